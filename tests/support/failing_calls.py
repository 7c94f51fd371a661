"""Sweeps over failing allocations and threads: in each of many child processes, another call fails.

    LD_PRELOAD=failing_calls.so python failing_calls.py KIND PHASE N_CHILDREN

Prints a line for each child: the call that failed, and what became of the child.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import llamapipe as lp
from llamapipe.errors import DecodeError, LlamapipeError
from llamapipe.native.load import native

KINDS = {"malloc": 1, "thread": 2}
_PARAMS = lp.SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
_SAMPLED = lp.SamplingParams(max_tokens=5, seed=1, repeat_penalty=1.1, regex="[a-z ]+", logprobs=2)
_calls = ctypes.CDLL(None)


class Work:
    """What a child does, in phases of which one has a call that fails."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self.model: lp.Model | None = None
        self.engine: lp.Engine | None = None

    def load(self) -> None:
        """Loads the model."""
        self.model = lp.Model.demo()

    def make(self) -> None:
        """Creates the engine."""
        assert self.model is not None
        self.engine = lp.Engine(self.model, n_ctx=64, n_seq_max=2, n_threads=self.n_threads)

    def first(self) -> None:
        """The first requests."""
        self.generate()

    def generate(self) -> None:
        """Requests of several kinds."""
        assert self.engine is not None
        self.engine.generate(["abc", [310, 320]], _PARAMS)
        self.engine.generate("abc", _SAMPLED)
        self.engine.score("abc", "def")

    def close(self) -> None:
        """Closes everything."""
        if self.engine is not None:
            self.engine.close()
        if self.model is not None:
            self.model.close()


PHASES = ("load", "make", "first", "generate", "close")


def run(kind: str, phase: str, call: int) -> tuple[int, str]:
    """Does all phases; ``call`` of ``phase`` fails. The number of calls in that phase, and how it ended."""
    work, result, n = Work(2 if kind == "thread" else 1), "completed", 0
    for name in PHASES:
        try:
            if name == phase:
                _calls.fail_calls(KINDS[kind], ctypes.c_long(call), ctypes.c_long(call))
            try:
                getattr(work, name)()
            finally:
                if name == phase:
                    _calls.calls_made.restype = ctypes.c_long
                    n = _calls.calls_made()
        except (LlamapipeError, MemoryError, RuntimeError, OSError) as error:
            if name != phase:
                raise
            result = f"{type(error).__name__}: {str(error)[:200]}"
            try:
                getattr(work, name)()  # now it works
            except DecodeError as later:
                if "make another" not in str(later):
                    raise
                assert work.engine is not None
                work.engine.close()
                work.make()
                getattr(work, name)()
                result += "; then it was made anew"
    return n, result


def ending(kind: str, phase: str, call: int) -> str:
    """How ``run`` ended, in one line."""
    return run(kind, phase, call)[1].replace("\n", " ")


def child(job: Callable[[], object]) -> str:
    """What the job returned in a process of its own, or how that ended."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(job())
        except BaseException:
            text = "wrong: " + " | ".join(traceback.format_exc().splitlines())
        os.write(write, text.encode()[:60_000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return said if status == 0 else f"died: {status}"


def main() -> None:
    """The command line."""
    kind, phase, n_children = sys.argv[1], sys.argv[2], int(sys.argv[3])
    native()
    whole = child(lambda: run(kind, phase, 10**9))
    n_calls = int(whole.partition(",")[0].strip("("))
    rng = random.Random(1)
    calls: Any = range(1, n_calls + 1)
    if n_calls > n_children:
        calls = sorted(rng.sample(calls, n_children))
    sys.stdout.write(f"{n_calls} calls\n")
    for call in calls:
        sys.stdout.write(f"{call} {child(partial(ending, kind, phase, call))}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
