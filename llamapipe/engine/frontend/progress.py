"""A progress bar for lists of prompts, on a terminal."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Protocol


class Progress(Protocol):
    """What ``generate`` reports finished prompts to."""

    def update(self, n: int = 1) -> Any:
        """``n`` more are finished."""

    def close(self) -> Any:
        """Nothing more comes."""


class _Silent:
    def update(self, n: int = 1) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Nothing to close."""


def progress_bar(wanted: bool, total: int) -> Progress:
    """A bar on standard error if it is wanted and that is a terminal, else something silent.

    Raises ImportError, with the fix, when it is wanted and tqdm is not installed.
    """
    if not wanted:
        return _Silent()
    try:
        tqdm: Any = import_module("tqdm").tqdm
    except ImportError:
        raise ImportError('progress=True needs tqdm: pip install "llamapipe[progress]"') from None
    bar: Progress = tqdm(total=total, unit="prompt", disable=not sys.stderr.isatty())
    return bar
