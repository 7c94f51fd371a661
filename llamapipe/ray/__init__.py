"""llamapipe on Ray (extra ``ray``): batch jobs with Ray Data, services with Ray Serve.

Each actor or replica has one engine, made from an ``EngineSpec``. Ray starts, restarts and places the processes; what
happens inside one is the engine's. Ray is imported when a name that needs it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamapipe.ray.spec import EngineSpec

if TYPE_CHECKING:
    from llamapipe.ray.data import Completer, complete
    from llamapipe.ray.router import PrefixCostRouter
    from llamapipe.ray.serve import deployment, openai_app

__all__ = ["Completer", "EngineSpec", "PrefixCostRouter", "complete", "deployment", "openai_app"]
_HOMES = {
    "Completer": "data",
    "PrefixCostRouter": "router",
    "complete": "data",
    "deployment": "serve",
    "openai_app": "serve",
}


def __getattr__(name: str) -> object:
    """Imports a public name on first use. Raises ImportError, which names the extra."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "llamapipe":
            raise
        raise ImportError(
            f"llamapipe.ray needs {e.name}, which is not installed: pip install 'llamapipe[ray]'"
        ) from None
    globals()[name] = value
    return value
