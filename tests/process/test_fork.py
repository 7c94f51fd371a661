"""After ``fork()``: the child's use of what the parent made raises, its end harms nobody, the parent goes on."""

from __future__ import annotations

import sys

import pytest
from support.run_script import run_script

import llamapipe as lp

pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork()")

_ENGINE = "the engine was made before fork(); make one in the child process, or use the spawn start method"
_MODEL = "the model was loaded before fork(); load it in the child process, or use the spawn start method"
_CONTEXT = "the context was created before fork(); create one in the child process"

# Newer Pythons warn at each fork of a process with threads, rightly: here it is the point.
_FLAGS = ("-W", "ignore::DeprecationWarning", "-W", "error::ResourceWarning")

_SETUP = """
import asyncio, os, threading, warnings
import llamapipe as lp
from llamapipe.llama import DecodeBatch, Context, SamplerChain
from support.inside import held_locks

ENDLESS = lp.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
SHORT = lp.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

def attempt(name, use):
    try:
        say(name, "gave", use())
    except lp.errors.EngineClosedError as e:
        say(name, "raised:", e)

def child_of(child):
    "The exit code of a forked process that runs this."
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(99)  # it should have ended in its own way
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

model = lp.Model(sys.argv[1])
engine = lp.Engine(model, n_ctx=100_000, n_seq_max=4, n_threads=1)
expected = engine.generate("hello", SHORT).token_ids
"""
_TEARDOWN = """
assert engine.generate("hello", SHORT).token_ids == expected
engine.check_integrity()
engine.close(drain=False)
model.close()
"""


def run(program: str, *arguments: object) -> list[str]:
    return run_script(_SETUP + program + _TEARDOWN, *arguments, flags=_FLAGS).splitlines()


def test_every_use_in_the_child_raises(tiny: lp.Model) -> None:
    lines = run(
        """
stream = engine.stream("a", ENDLESS)
next(stream)
generation = engine.start("b", ENDLESS)
generation.next()
context = Context(model, n_ctx=64, n_threads=1)
context.decode(DecodeBatch.of_tokens([5]))

async def agenerate():
    return await engine.agenerate("a")

async def anext_of(stream):
    return await stream.__anext__()

def child():
    attempt("generate", lambda: engine.generate("a"))
    attempt("generate several", lambda: engine.generate(["a", "b"]))
    attempt("stream", lambda: engine.stream("a"))
    attempt("start", lambda: engine.start("a"))
    attempt("agenerate", lambda: asyncio.run(agenerate()))
    attempt("astream", lambda: engine.astream("a"))
    attempt("next of a stream", lambda: next(stream))
    attempt("next of an async stream", lambda: asyncio.run(anext_of(astream)))
    attempt("next of a generation", lambda: generation.next())
    attempt("trim", lambda: generation.trim(1))
    attempt("append", lambda: generation.append([5]))
    attempt("stats", lambda: engine.stats())
    attempt("check_integrity", lambda: engine.check_integrity())
    attempt("tokenize", lambda: model.tokenize("a"))
    attempt("metadata", lambda: model.chat_template)
    attempt("new engine", lambda: lp.Engine(model))
    attempt("decode", lambda: context.decode(DecodeBatch.of_tokens([5], 1)))
    attempt("logits", lambda: context.logits(0))
    attempt("clear", lambda: context.clear())
    sys.exit(7)

astream = engine.astream("c", ENDLESS)
say(child_of(child))
context.close()
generation.cancel()
next(stream)
stream.close()
""",
        tiny.path,
    )
    *uses, exit_code = lines
    assert exit_code == "7"
    raised = dict(line.split(" raised: ") for line in uses)
    assert len(raised) == 19
    for name, message in raised.items():
        if name in ("tokenize", "metadata", "new engine"):
            assert message == _MODEL
        elif name in ("decode", "logits", "clear"):
            assert message == _CONTEXT
        else:
            assert message == _ENGINE


@pytest.mark.parametrize(
    ("end", "exit_code"),
    [("sys.exit(7)", 7), ("raise_(SystemExit)", 0), ("os._exit(8)", 8), ("raise_(ZeroDivisionError)", 1)],
)
def test_the_child_ends_cleanly_in_its_own_way(tiny: lp.Model, end: str, exit_code: int) -> None:
    """Through the interpreter's exit hooks, while the parent's threads are at work."""
    lines = run(
        f"""
import atexit

def raise_(error):
    os.close(2)  # nobody wants to see it
    raise error

worker = threading.Thread(target=engine.generate, args=(["a", "b"], ENDLESS), daemon=True)
worker.start()
stream = engine.stream("c", ENDLESS)
next(stream)
atexit.register(lambda: say("hooks ran in", "the child" if os.getpid() != parent else "the parent"))
parent = os.getpid()
say(child_of(lambda: {end}))
next(stream)
stream.close()
""",
        tiny.path,
    )
    hooks = [] if "_exit" in end else ["hooks ran in the child"]
    assert lines == [*hooks, str(exit_code), "hooks ran in the parent"]


def test_closing_in_the_child_leaves_the_parent_alone(tiny: lp.Model) -> None:
    lines = run(
        """
def child():
    with engine, model:
        pass
    engine.close()
    engine.close(drain=False)
    asyncio.run(engine.aclose())
    stream.close()
    generation.cancel()
    model.close()
    say(repr(engine).split()[0], repr(model).split()[0])
    sys.exit(0)

stream = engine.stream("a", ENDLESS)
next(stream)
generation = engine.start("b", ENDLESS)
assert generation.next() is not None
say(child_of(child))
assert next(stream).token_ids
assert generation.next() is not None
stream.close()
generation.close()
""",
        tiny.path,
    )
    assert lines == ["<Engine <Model", "0"]


def test_dropping_in_the_child_neither_warns_nor_frees(tiny: lp.Model) -> None:
    """ResourceWarnings are errors there, which would be written to stderr."""
    lines = run(
        """
import gc

def child():
    global engine, model, chain, context
    del engine, model, chain, context
    gc.collect()
    sys.exit(0)

chain = SamplerChain(model.vocab)
context = Context(model, n_ctx=64)
say(child_of(child))
chain.close()
context.close()
""",
        tiny.path,
    )
    assert lines == ["0"]


def test_a_child_with_a_model_and_an_engine_of_its_own(tiny: lp.Model) -> None:
    """With several computing threads: those of the parent's engine do not exist in the child."""
    lines = run(
        """
def child():
    with lp.Model(sys.argv[1]) as own, lp.Engine(own, n_ctx=64, n_threads=2) as mine:
        say(mine.generate("hello", SHORT).token_ids == expected)
        with mine.start("hello", SHORT) as generation:
            say([token.id for token in generation] == expected)
    sys.exit(0)

with lp.Engine(model, n_ctx=64, n_threads=2) as threaded:
    assert threaded.generate("hello", SHORT).token_ids == expected
    say(child_of(child))
    assert threaded.generate("hello", SHORT).token_ids == expected
""",
        tiny.path,
    )
    assert lines == ["True", "True", "0"]


def test_a_child_with_a_context_of_its_own(tiny: lp.Model) -> None:
    """On the thread that computed in the parent: nothing of that may be taken for the child's."""
    lines = run(
        """
def child():
    with lp.Model(sys.argv[1]) as own, Context(own, n_ctx=64, n_threads=3) as mine:
        mine.decode(DecodeBatch.of_tokens([5, 6, 7]))
        say(float(mine.logits(2)[5]) == logit)
    sys.exit(0)

with Context(model, n_ctx=64, n_threads=3) as context:
    context.decode(DecodeBatch.of_tokens([5, 6, 7]))
    logit = float(context.logits(2)[5])
    say(child_of(child))
    context.decode(DecodeBatch.of_tokens([8], 3))
""",
        tiny.path,
    )
    assert lines == ["True", "0"]


def test_a_fork_while_another_thread_holds_a_lock(tiny: lp.Model) -> None:
    """It is held for ever in the child, where nothing may wait for it."""
    lines = run(
        """
def child():
    for use in (lambda: engine.generate("a"), engine.stats, lambda: engine.stream("a"), engine.check_integrity):
        attempt("use", use)
    engine.close()
    sys.exit(0)

with held_locks(engine):
    say(child_of(child))
""",
        tiny.path,
    )
    assert lines == [f"use raised: {_ENGINE}"] * 4 + ["0"]


def test_multiprocessing_with_fork(tiny: lp.Model) -> None:
    lines = run(
        """
import multiprocessing

def work(prompt):
    try:
        return engine.generate(prompt).text
    except lp.errors.EngineClosedError as e:
        return str(e)

def own(prompt):
    with lp.Model(sys.argv[1]) as own_model, lp.Engine(own_model, n_ctx=64, n_threads=1) as own_engine:
        return own_engine.generate(prompt, SHORT).token_ids

with multiprocessing.get_context("fork").Pool(2) as pool:
    for text in pool.map(work, ["a", "b"]):
        say(text)
    say(pool.map(own, ["hello", "hello"]) == [expected, expected])
    pool.close()
    pool.join()
""",
        tiny.path,
    )
    assert lines == [_ENGINE, _ENGINE, "True"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere spawn is the default")
def test_a_fork_before_first_use_is_no_fork_at_all(tiny: lp.Model) -> None:
    out = run_script(
        """
import os
import llamapipe as lp
pid = os.fork()
with lp.Model(sys.argv[1]) as model, lp.Engine(model, n_ctx=64, n_threads=2) as engine:
    tokens = engine.generate("hello", lp.SamplingParams(temperature=0, max_tokens=8)).token_ids
if pid == 0:
    os._exit(len(tokens))
say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(tokens))
""",
        tiny.path,
    )
    assert out == "True\n"


def test_a_fork_that_python_was_not_told_of(tiny: lp.Model) -> None:
    """By a program that forks in C."""
    lines = run(
        """
import ctypes

pid = ctypes.PyDLL(None).fork()
if pid == 0:
    try:
        engine.generate([1, 2], SHORT)
    except lp.errors.EngineClosedError:
        engine.close()
        os._exit(7)
    os._exit(1)
say(os.waitpid(pid, 0)[1] >> 8)
""",
        tiny.path,
    )
    assert lines == ["7"]
