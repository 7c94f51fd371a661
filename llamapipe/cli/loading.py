"""Opens what the commands work with: a model, with progress on a terminal if it takes long, and an engine."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import llamapipe as lp
from llamapipe.cli.options import UsageError
from llamapipe.cli.terminal import Terminal

_QUICK_LOAD_S = 1.0  # shorter loads show no progress


def open_model(path: Path | None, options: dict[str, Any], show_progress: bool = True) -> lp.Model:
    """Loads a model; None: the bundled one. Raises UsageError for wrong options, ModelLoadError."""
    terminal = Terminal(sys.stderr)
    start = time.perf_counter()
    shown = ""

    def progress(fraction: float) -> None:
        nonlocal shown
        line = f"loading {fraction:.0%}"
        if line != shown and time.perf_counter() - start > _QUICK_LOAD_S:
            shown = line
            terminal.write(f"\r\x1b[2K{line}")

    try:
        file = lp.demo_model_path() if path is None else path
        return lp.Model(file, **options, progress=progress if show_progress and terminal.redraws else None)
    except lp.errors.LlamapipeError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error
    finally:
        if shown:
            terminal.write("\r\x1b[2K")


def open_engine(model: lp.Model, options: dict[str, Any]) -> lp.Engine:
    """Makes an engine. The option ``n_ctx`` 0 is the model's context. Raises UsageError for wrong options."""
    if options.get("n_ctx") == 0:
        options = {**options, "n_ctx": model.n_ctx_train}
    try:
        return lp.Engine(model, **options)
    except lp.errors.LlamapipeError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(str(error)) from error


def template_problem(model: lp.Model) -> str | None:
    """Why the model cannot chat: it has no template, or the template is broken; None if it can."""
    if not model.chat_template:
        return f"{model.path.name} has no chat template"
    try:
        model.render_chat([{"role": "user", "content": "Hello"}])
    except lp.errors.InvalidRequestError as error:
        return str(error)
    return None
