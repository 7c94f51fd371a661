"""llamapipe on Ray (extra ``ray``): batch jobs with Ray Data, services with Ray Serve.

Each actor or replica has one engine, made from an ``EngineSpec``. Ray starts, restarts and places the processes; inside
each process, the engine does the work. Ray is imported when a name that needs it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamapipe._lazy import imported_name
from llamapipe.ray._spec import EngineSpec

if TYPE_CHECKING:
    from llamapipe.ray._data import Completer, complete
    from llamapipe.ray._router import PrefixCostRouter
    from llamapipe.ray._serve import deployment, openai_app

__all__ = ["Completer", "EngineSpec", "PrefixCostRouter", "complete", "deployment", "openai_app"]
_HOMES = {
    "Completer": "_data",
    "PrefixCostRouter": "_router",
    "complete": "_data",
    "deployment": "_serve",
    "openai_app": "_serve",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use. Raises ImportError, which names the extra."""
    value = globals()[name] = imported_name(__name__, _HOMES, name, "ray")
    return value
