"""Ctrl-C and other signals, for real: sent to a process that is known to be where it should be hit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.gguf_models import Shape, make_model
from support.run_script import Script

import llamapipe as lp

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="Windows has no signals to send to one process"
)

# `watch` says a line as soon as the engine has worked for what the main thread asks of it; the engine then works no
# further until `go_on` is set, where that is given.
_SETUP = """
import asyncio, signal, threading
import llamapipe as lp
from support.inside import n_waiting_threads, queue_of, thread_of

ENDLESS = lp.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
SHORT = lp.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

model = lp.Model(sys.argv[1])
engine = lp.Engine(model, n_ctx=100_000, n_seq_max=2, n_threads=1, max_queue=3)
expected = engine.generate("hello", SHORT).token_ids

def watch(line, n_active=1, go_on=None):
    before = engine.stats().n_completion_tokens
    def look():
        while (stats := engine.stats()).n_completion_tokens == before or stats.n_active < n_active:
            pass
        if go_on is not None:
            thread_of(engine).call(go_on.wait)
        say(line)
    threading.Thread(target=look).start()

def check_alive():
    "The engine is idle and as good as new."
    while engine.stats().n_active or engine.stats().n_queued:
        pass
    assert engine.generate("hello", SHORT).token_ids == expected
    assert len(engine.generate(["hello"] * 3, SHORT, block=False)) == 3
    engine.check_integrity()
    say("alive")
"""
_TEARDOWN = """
check_alive()
engine.close()
model.close()
"""

# What the main thread does when the signal comes: each runs until then.
_PLACES = {
    "generate": 'engine.generate("a", ENDLESS)',
    "generate, several": 'engine.generate(["a", "b", "c"], ENDLESS)',
    "generate, waiting for room in the queue": """
thread_of(engine).call(go_on.wait)  # nothing leaves the queue
streams += [engine.stream("x", ENDLESS) for _ in range(3)]
threading.Thread(target=say_when_waiting_for_room).start()
engine.generate("a", ENDLESS)
""",
    "stream": 'for delta in engine.stream("a", ENDLESS): pass',
    # Where the signal comes between two calls, the generation is as good as before.
    "next": 'generation = engine.start("a", ENDLESS)\nends.append(generation.cancel)\nwhile generation.next(): pass',
    "agenerate": 'asyncio.run(agenerate(["a", "b"]))',
    "astream": 'asyncio.run(astream("a"))',
    "gather": "asyncio.run(gather())",
}
# CPython misses a signal that comes just before a loop waits, until something else wakes the loop: nothing does there,
# unless the loop handles some signal, and so has the interpreter write of all to a socket that it watches.
_FUNCTIONS = """
async def agenerate(prompt):
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)
    return await engine.agenerate(prompt, ENDLESS)

async def astream(prompt):
    async for delta in engine.astream(prompt, ENDLESS):
        pass

async def gather():
    await asyncio.gather(agenerate("a"), astream("b"), agenerate("c"))

streams, ends = [], []
go_on = threading.Event()
def say_when_waiting_for_room():
    while not n_waiting_threads(queue_of(engine)):
        pass
    say("working")
"""


def program_at(place: str) -> str:
    statements = _PLACES[place]
    if "say_when" not in statements:
        statements = 'watch("working")\n' + statements
    body = "\n".join("    " + line for line in statements.strip().splitlines())
    return f"{_SETUP}{_FUNCTIONS}try:\n{body}\n"


@pytest.mark.parametrize("place", _PLACES)
def test_ctrl_c_ends_what_is_waited_for_and_nothing_else(tiny: lp.Model, place: str) -> None:
    program = (
        program_at(place)
        + """
except KeyboardInterrupt:
    say("interrupted")
go_on.set()
for stream in streams:
    stream.close()
for end in ends:
    end()
"""
        + _TEARDOWN
    )
    with Script(program, tiny.path) as script:
        script.expect("working")
        script.send(signal.SIGINT)
        script.expect("interrupted")
        script.expect("alive")
        assert script.end() == ("", "")


@pytest.mark.parametrize("place", ["generate", "stream", "next", "agenerate"])
def test_ctrl_c_that_nobody_catches_ends_the_process(tiny: lp.Model, place: str) -> None:
    program = program_at(place) + "\nfinally:\n    say('leaving')\n"
    with Script(program, tiny.path) as script:
        script.expect("working")
        script.send(signal.SIGINT)
        script.expect("leaving")
        out, err = script.end(exit_code=-signal.SIGINT)
        assert out == ""
        assert err.rstrip().endswith("KeyboardInterrupt")


def test_ctrl_c_leaves_the_requests_of_other_threads_alone(tiny: lp.Model) -> None:
    program = (
        _SETUP
        + """
def work():
    results.append(engine.generate("hello", lp.SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)))

results = []
thread = threading.Thread(target=work)
go_on = threading.Event()
watch("working", n_active=2, go_on=go_on)
thread.start()
try:
    engine.generate("a", ENDLESS)
except KeyboardInterrupt:
    say("interrupted")
    go_on.set()
thread.join()
say(len(results[0].token_ids), results[0].token_ids[:8] == expected)
"""
        + _TEARDOWN
    )
    with Script(program, tiny.path) as script:
        script.expect("working")
        script.send(signal.SIGINT)
        script.expect("interrupted")
        script.expect("200 True")
        script.expect("alive")
        assert script.end() == ("", "")


def test_a_handler_that_returns_changes_nothing(tiny: lp.Model) -> None:
    # The tokens take long enough that the thread that holds the engine is never late, however busy the machine is.
    program = (
        _SETUP
        + """
import signal
def handler(*arguments):
    say("handled")
    go_on.set()
params = lp.SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
signal.signal(signal.SIGINT, handler)
go_on = threading.Event()
watch("working", go_on=go_on)
say(len(engine.generate("a", params).token_ids))
go_on = threading.Event()
watch("working", go_on=go_on)
say(sum(len(delta.token_ids) for delta in engine.stream("a", params)))
"""
        + _TEARDOWN
    )
    with Script(program, tiny.path) as script:
        for _ in range(2):
            script.expect("working")
            script.send(signal.SIGINT)
            script.expect("handled")
            script.expect("3000")
        script.expect("alive")
        assert script.end() == ("", "")


def test_a_handler_that_raises_something_else(tiny: lp.Model) -> None:
    """As programs do that clean up on SIGTERM."""
    program = (
        _SETUP
        + """
import signal
def handler(*arguments):
    raise SystemExit("terminated")
signal.signal(signal.SIGTERM, handler)
watch("working")
try:
    engine.generate("a", ENDLESS)
except SystemExit as e:
    say(e)
"""
        + _TEARDOWN
    )
    with Script(program, tiny.path) as script:
        script.expect("working")
        script.send(signal.SIGTERM)
        script.expect("terminated")
        script.expect("alive")
        assert script.end() == ("", "")


def test_ctrl_c_while_closing_cancels_what_was_being_drained(tiny: lp.Model) -> None:
    """Leaving for good must not wait for a drain that was given up."""
    program = (
        _SETUP
        + """
stream = engine.stream("a", ENDLESS)
next(stream)
def look():
    while not engine.closed:
        pass
    say("draining")
threading.Thread(target=look).start()
try:
    engine.close()
except KeyboardInterrupt:
    say("interrupted")
REST
"""
    )
    for end, last in (
        ("engine.close(drain=False); say(list(stream)[-1].finish_reason)", "cancelled"),
        ("say('leaving')", "leaving"),
    ):
        with Script(program.replace("REST", end), tiny.path) as script:
            script.expect("draining")
            script.send(signal.SIGINT)
            script.expect("interrupted")
            script.expect(last)
            assert script.end() == ("", "")


# ---- loading
@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 24 MiB in 56 tensors: its loading is heard of 56 times."""
    shape = Shape(layers=6, width=288, heads=6, heads_kv=6, ffn=768, context=2048)
    return make_model(tmp_path_factory.mktemp("models") / "big.gguf", shape=shape, type_name="f32")


_AFTER_LOAD = """
except KeyboardInterrupt:
    say("interrupted")
with lp.Model(sys.argv[1], use_mmap=False) as model, lp.Engine(model, n_ctx=64, n_threads=1) as engine:
    say(len(engine.generate("a", lp.SamplingParams(max_tokens=4, ignore_eos=True)).token_ids))
"""


def test_ctrl_c_in_a_progress_function(big: Path) -> None:
    program = (
        """
import llamapipe as lp
calls = []
def progress(fraction):
    calls.append(fraction)
    if len(calls) == 2:
        say("loading")
        sys.stdin.readline()
try:
    lp.Model(sys.argv[1], use_mmap=False, progress=progress)
"""
        + _AFTER_LOAD
        + "say(len(calls))"
    )
    with Script(program, big) as script:
        script.expect("loading")
        script.send(signal.SIGINT)
        script.expect("interrupted")
        script.expect("4")
        script.expect("2")
        assert script.end() == ("", "")


def test_ctrl_c_in_the_native_part_of_a_load(big: Path) -> None:
    """Without a progress function. A thread that sees the load sends the signal: it runs while native code does."""
    program = (
        """
import os, signal, threading
import llamapipe as lp

def interrupt():
    main = threading.main_thread().ident
    while sys._current_frames()[main].f_code.co_name != "load":  # it is in native code: others would be above
        pass
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt).start()
try:
    lp.Model(sys.argv[1], use_mmap=False)
    say("loaded")
"""
        + _AFTER_LOAD
    )
    with Script(program, big) as script:
        script.expect("interrupted")
        script.expect("4")
        assert script.end() == ("", "")


def test_ctrl_c_in_a_load_that_nobody_catches(big: Path) -> None:
    program = """
import llamapipe as lp
def progress(fraction):
    if fraction > 0:
        say("loading")
        sys.stdin.readline()
lp.Model(sys.argv[1], progress=progress)
"""
    with Script(program, big) as script:
        script.expect("loading")
        script.send(signal.SIGINT)
        out, err = script.end(exit_code=-signal.SIGINT)
        assert out == ""
        assert err.rstrip().endswith("KeyboardInterrupt")
        assert "in progress" in err


def interrupted_after(n_calls: int) -> Callable[[float], None]:
    """A progress function that interrupts the main thread at its n-th call."""
    left = iter(range(n_calls - 1))

    def progress(fraction: float) -> None:
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)

    return progress


def test_ctrl_c_at_every_point_of_a_load(tiny: lp.Model) -> None:
    """Also at the last, when the model is there already."""
    calls: list[float] = []
    with lp.Model(tiny.path, progress=calls.append):
        pass
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for n in range(1, len(calls) + 1):
            with pytest.raises(KeyboardInterrupt):
                lp.Model(tiny.path, progress=interrupted_after(n))
    finally:
        signal.signal(signal.SIGINT, handler)
    with lp.Model(tiny.path, progress=interrupted_after(len(calls) + 1)) as model:
        assert model.n_vocab == 512
