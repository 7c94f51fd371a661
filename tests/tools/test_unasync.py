"""The calls for threads are those that tools/unasync.py makes from the calls for asyncio."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import llamapipe as lp

ROOT = Path(__file__).resolve().parent.parent.parent
NAMES = {name for name in dir(lp.Engine) if inspect.isfunction(inspect.getattr_static(lp.Engine, name))}
CALLS = sorted(name for name in NAMES if f"a{name}" in NAMES and name != "close")


def test_nothing_was_edited_by_hand() -> None:
    pytest.importorskip("ruff")
    command = [sys.executable, str(ROOT / "tools" / "unasync.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}run: python tools/unasync.py"


def test_every_call_has_a_twin() -> None:
    """But for those that wait for one step at most, and those for programs around an engine."""
    public = {name for name in NAMES if not name.startswith("_")}
    twins = {"close", *CALLS}
    assert public - twins - {f"a{name}" for name in twins} == {
        "check_integrity",
        "check_params",
        "count_chat_tokens",
        "forget_conversation",
        "hold_conversation",
        "import_conversation",
        "load_conversation",
        "observe",
        "offload",
        "release_conversation",
        "reset_prefix_cache",
        "save_conversation",
        "set_cache_writes",
        "stats",
        "tokenize_chat",
    }


@pytest.mark.parametrize("name", CALLS)
def test_twins_have_the_same_options(name: str) -> None:
    ours, theirs = getattr(lp.Engine, name), getattr(lp.Engine, f"a{name}")
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
