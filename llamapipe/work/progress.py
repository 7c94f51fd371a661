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
    """Make a tqdm bar on a terminal, a tqdm bar or a widget in a notebook, and nothing elsewhere.

    ``total``: the number of prompts, None if it is not known. Raises ImportError if tqdm is missing.
    """
    try:
        with warnings.catch_warnings():  # a notebook without ipywidgets gets the bar made of text
            warnings.simplefilter("ignore")
            tqdm: Any = import_module("tqdm.auto").tqdm
    except ImportError:
        raise ImportError('progress=True needs tqdm: pip install "llamapipe[progress]"') from None
    bar: Progress = tqdm(total=total, unit="prompt", disable=not (sys.stderr.isatty() or _in_notebook()))
    return bar


def _in_notebook() -> bool:
    """Return whether standard error goes to a Jupyter frontend."""
    return type(sys.stderr).__module__.split(".")[0] == "ipykernel"
