"""Null pointers and divisions by zero in llama.cpp's loaders become errors; other faults end the process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import llamapipe as lp
from llamapipe.native.load import native

pytestmark = pytest.mark.native

PROGRAM = """
from llamapipe.native.load import native
module = native()
module.lib.lp_cause_fault(module.lib.{})
print("survived")
"""


@pytest.mark.parametrize(
    ("cause", "said"),
    [("LP_CAUSE_NULL", "read from a null pointer"), ("LP_CAUSE_DIVISION", "divided by zero")],
)
def test_faults_of_a_file_become_errors(cause: str, said: str) -> None:
    module = native()
    for _ in range(3):  # the handler's state is whole after a fault
        assert module.ffi.string(module.lib.lp_cause_fault(getattr(module.lib, cause))).decode() == said


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
@pytest.mark.parametrize("cause", ["LP_CAUSE_C_LIBRARY", "LP_CAUSE_ELSEWHERE"])
def test_overwritten_memory_ends_the_process(cause: str) -> None:
    """A fault in the allocator's library, or at an address that is no null pointer: nothing can be trusted any more."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(cause)], capture_output=True, check=False)
    assert done.stdout == b""
    assert done.returncode == -signal.SIGSEGV


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_a_signal_that_is_sent_during_a_load_ends_the_process(tiny: lp.Model) -> None:
    """It is no fault of the file, and no instruction would run into it again."""
    program = f"""
import os, signal
import llamapipe as lp

def progress(fraction):
    os.kill(os.getpid(), signal.SIGSEGV)

lp.Model({str(tiny.path)!r}, progress=progress)
print("survived")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.stdout == b""
    assert done.returncode == -signal.SIGSEGV
