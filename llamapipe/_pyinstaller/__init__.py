"""Tells PyInstaller what a program with llamapipe needs.

The package's entry point ``pyinstaller40`` names this folder. PyInstaller runs the hook in it when it packs a program.
"""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """Return the folders that hold PyInstaller's hooks for this package."""
    return [str(Path(__file__).parent)]
