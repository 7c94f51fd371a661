"""Makes the harness's command know the model ``llamapipe``: run by ``llamapipe-lm-eval.pth`` as such a command starts.

The harness looks for no plug-ins. So this waits until it imports the list of its models and adds a name to that, whose
module is imported when somebody asks for it. It is executed alone, before anything of llamapipe or the harness is
imported, and must never raise: that would be an error of every start of the command.
"""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

NAME, TARGET = "llamapipe", "llamapipe.lm_eval.model:LlamapipeLM"


class _Finder:
    """Waits for the harness's list of models, once."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the other finders find, with our line after its execution."""
        if name != "lm_eval.models" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register()

            # Of this one object: its class stays what tools expect that look at the module's source.
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register() -> None:
    """Adds the name to the harness's registry; a harness that has another one gets a warning instead."""
    try:
        from lm_eval.api.registry import model_registry

        if NAME not in model_registry:
            model_registry.register(NAME, target=TARGET)
    except Exception as error:
        warnings.warn(
            f"llamapipe could not register with this lm_eval ({error!r}); use: python -m llamapipe.lm_eval",
            stacklevel=2,
        )


def install() -> None:
    """Begins to wait."""
    sys.meta_path.insert(0, _Finder())
