"""The llguidance package, imported when the first grammar is compiled."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def llguidance(field: str) -> Any:
    """The module. Any thread; ``field`` is the option that needs it.

    Raises ImportError, with the fix, when it is not installed.
    """
    found = sys.modules.get("llguidance")
    if found is not None:
        return found
    try:
        return import_module("llguidance")
    except ImportError:
        raise ImportError(f'{field} needs llguidance: pip install "llamapipe[structured]"') from None
