"""Imports the llguidance package when the first grammar is compiled.

It is an optional dependency, so this is the only module that imports it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from llamapipe.host.at_exit import awaited_at_exit


def llguidance(field: str) -> Any:
    """The llguidance module. Any thread.

    Raises ImportError if it is not installed; the message names ``field``, the option that needs it, and the fix.
    """
    found = sys.modules.get("llguidance")
    if found is not None:
        return found
    try:
        with awaited_at_exit():
            return import_module("llguidance")
    except ImportError:
        raise ImportError(f'{field} needs llguidance: pip install "llamapipe[structured]"') from None
