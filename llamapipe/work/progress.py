"""Progress bars for calls with many prompts. They need tqdm, which the first bar imports."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from typing import Any, Protocol


class Progress(Protocol):
    """Counts finished prompts."""

    def update(self, n: int = 1) -> Any:
        """Count ``n`` more prompts as finished."""

    def close(self) -> Any:
        """End the display."""


def progress_bar(total: int | None) -> Progress:
    """Return a tqdm bar for a terminal, or a widget or bar for a notebook; elsewhere the bar shows nothing.

    ``total``: the number of prompts; None if unknown. Raises ImportError if tqdm is missing.
    """
    try:
        with warnings.catch_warnings():  # tqdm warns if a notebook has no ipywidgets, and shows a text bar
            warnings.simplefilter("ignore")
            tqdm: Any = import_module("tqdm.auto").tqdm
    except ImportError:
        raise ImportError('progress=True needs tqdm: pip install "llamapipe[progress]"') from None
    bar: Progress = tqdm(total=total, unit="prompt", disable=not (sys.stderr.isatty() or _in_notebook()))
    return bar


def _in_notebook() -> bool:
    """Return whether standard error goes to a Jupyter frontend."""
    return type(sys.stderr).__module__.split(".")[0] == "ipykernel"
