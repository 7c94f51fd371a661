"""Calls from unusual places: destructors, callbacks, signal handlers, other interpreters."""

from __future__ import annotations

import sys

import pytest
from support.run_script import run_script, run_script_with_errors

_HEAD = """
import gc, sys, threading
import llamapipe as lp
PARAMS = lp.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
model = lp.Model.demo()
engine = lp.Engine(model, n_ctx=128, n_seq_max=2)
expected = engine.generate("abc", PARAMS).token_ids
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there is concurrent.interpreters")
def test_a_sub_interpreter_is_refused() -> None:
    # Where the main interpreter has numpy, numpy itself refuses to be imported by another.
    program = """
try:
    import _interpreters as interpreters
    run = interpreters.exec
except ImportError:
    import _xxsubinterpreters as interpreters
    run = interpreters.run_string
other = interpreters.create()
failure = run(other, '''
import llamapipe as lp
from llamapipe.errors import BackendError
try:
    lp.Model.demo()
except BackendError as error:
    assert "does not run in a sub-interpreter" in str(error)
    print("refused", flush=True)
''')
assert failure is None, failure
interpreters.destroy(other)
"""
    out, _ = run_script_with_errors(program, flags=("-W", "ignore"))  # numpy warns
    assert out == "refused\n"


def test_a_destructor_that_generates() -> None:
    """The garbage collector runs it on any thread, also on one of ours."""
    program = f"""{_HEAD}
found = []

class Owner:
    def __init__(self):
        self.itself = self

    def __del__(self):
        try:
            found.append(engine.generate("abc", PARAMS).token_ids == expected)
        except RuntimeError as error:  # on the engine thread
            found.append(type(error).__name__)

gc.set_threshold(20)
for _ in range(30):
    Owner()
    for _ in engine.stream("abc", PARAMS):
        pass
gc.set_threshold(700)
gc.collect()
assert engine.generate("abc", PARAMS).token_ids == expected
engine.close()
say(len(found), set(map(str, found)) <= {{"True", "RuntimeError"}})
"""
    assert run_script(program) == "30 True\n"


def test_a_logits_processor_that_uses_the_engine_is_refused() -> None:
    """It runs in a thread of the engine, of which there are only a few."""
    program = f"""{_HEAD}
def process(logits):
    engine.generate("abc", PARAMS)

try:
    engine.generate("abc", lp.SamplingParams(max_tokens=3, logits_processors=[process]))
except RuntimeError as error:
    say("cannot wait for the engine" in str(error))
assert engine.generate("abc", PARAMS).token_ids == expected
engine.close()
"""
    assert run_script(program) == "True\n"


def test_a_processor_that_closes_the_engine() -> None:
    program = f"""{_HEAD}
def process(logits):
    threading.Thread(target=engine.close, kwargs=dict(drain=False)).start()

try:
    engine.generate("abc", lp.SamplingParams(max_tokens=100, ignore_eos=True, logits_processors=[process]))
except lp.errors.EngineClosedError:
    pass
engine.close()
say("closed")
"""
    assert run_script(program) == "closed\n"


def test_a_progress_function_that_loads_another_model() -> None:
    program = f"""{_HEAD}
depth = []

def progress(fraction):
    if len(depth) < 3:
        depth.append(fraction)
        lp.Model(lp.demo_model_path(), progress=progress).close()

lp.Model(lp.demo_model_path(), progress=progress).close()
engine.close()
say(len(depth))
"""
    assert run_script(program) == "3\n"


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGALRM")
def test_a_signal_handler_that_generates() -> None:
    """It runs between any two instructions of a call that waits."""
    program = f"""{_HEAD}
import signal
found = []

def handle(number, frame):
    found.append(engine.generate("abc", PARAMS).token_ids == expected)

signal.signal(signal.SIGALRM, handle)
while len(found) < 50:
    signal.setitimer(signal.ITIMER_REAL, 0.0001 + len(found) * 2e-5)
    for _ in engine.stream("abc", PARAMS):
        pass
    assert engine.generate("abc", PARAMS).token_ids == expected
engine.close()
say(set(found))
"""
    assert run_script(program) == "{True}\n"
