"""How things end: closing, use after it, dropping without it, memory given back, and exit without close."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.control import Worker, all_results, held
from support.gguf_document import STRING, Document
from support.gguf_models import Shape, make_model, tiny_model
from support.inside import children_of, thread_of
from support.run_script import run_script, run_script_with_errors

import llamapipe as lp
from llamapipe.errors import EngineClosedError
from llamapipe.llama import Context

MakeEngine = Callable[..., lp.Engine]
ENDLESS = lp.SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
SHORT = lp.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


# ---- closing
def test_closing_twice_and_from_many_threads(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.generate("a", SHORT)
    engine.close()
    engine.close(drain=False)
    again = make_engine()
    stream = again.stream("a", ENDLESS)
    all_results([Worker(again.close, drain) for drain in (False, True, False, True)])
    assert again.closed
    assert "closed" in repr(again)
    assert list(stream)[-1].finish_reason in ("cancelled", "length")


def test_use_of_an_engine_after_close(make_engine: MakeEngine) -> None:
    engine = make_engine()
    generation = engine.start("abc", SHORT)
    assert generation.next() is not None
    stream = engine.stream("abc", SHORT)
    engine.close()
    uses: list[Callable[[], object]] = [
        lambda: engine.generate("a"),
        lambda: engine.generate(["a", "b"]),
        lambda: engine.stream("a"),
        lambda: engine.astream("a"),
        lambda: engine.start("a"),
        lambda: asyncio.run(_agenerate(engine)),
        lambda: generation.trim(1),
        lambda: generation.append([5]),
        engine.reset_prefix_cache,
        lambda: engine.save_conversation("a", "file"),
        lambda: engine.load_conversation("a", "file"),
        lambda: engine.import_conversation(b"", "file"),
        lambda: engine.forget_conversation("a"),
    ]
    for use in uses:
        with pytest.raises(EngineClosedError, match=r"^the engine is closed; make another$"):
            use()
    assert sum(len(delta.token_ids) for delta in stream) == 4  # was finished before the engine closed
    assert generation.next() is None
    assert generation.finish_reason == "cancelled"
    generation.cancel()
    stream.close()
    assert engine.stats().n_requests == 2
    engine.check_integrity()


async def _agenerate(engine: lp.Engine) -> Any:
    return await engine.agenerate("a")


def test_closing_cancels_or_drains(make_engine: MakeEngine) -> None:
    for drain in (False, True):
        engine = make_engine(n_seq_max=2)
        with held(engine):
            workers = [Worker(engine.generate, [5, 6, n], ENDLESS) for n in range(4)]
            for worker in workers:
                assert worker.is_alive()
            closer = Worker(engine.close, drain)
            while not engine.closed:
                pass
        closer.result()
        results: list[Any] = []
        for worker in workers:
            try:
                results.append(worker.result())
            except EngineClosedError:  # came after the door was shut
                continue
        for out in results:
            assert out.finish_reason == ("length" if drain else "cancelled")
            assert (len(out.token_ids) == 253) == drain


def test_leaving_with_an_exception_does_not_wait(make_engine: MakeEngine) -> None:
    engine = make_engine(n_ctx=100_000, n_seq_max=1)
    stream = engine.stream("a", ENDLESS)
    next(stream)

    def leave() -> None:
        with engine:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    assert engine.closed
    assert list(stream)[-1].finish_reason == "cancelled"


def test_a_model_with_a_live_engine_is_not_closed(tiny: lp.Model) -> None:
    with lp.Model(tiny.path) as model, lp.Engine(model, n_ctx=64, n_threads=1) as engine:
        other = lp.Engine(model, n_ctx=64, n_threads=1)
        with pytest.raises(
            EngineClosedError,
            match=r"^the model is in use; first close Engine\(n_ctx=64, n_seq_max=8\), Engine\(.*\)$",
        ):
            model.close()
        other.close()
        with pytest.raises(EngineClosedError, match=r"^the model is in use; first close Engine\(.*\)$"):
            model.close()
        assert len(engine.generate("a", SHORT).token_ids) == 4
    assert model.closed


def test_leaving_a_model_with_an_exception_while_an_engine_lives(tiny: lp.Model) -> None:
    """The refusal to close names its cause and keeps what happened before."""
    model = lp.Model(tiny.path)
    engine = lp.Engine(model, n_ctx=64, n_threads=1)

    def leave() -> None:
        with model:
            raise ZeroDivisionError

    with pytest.raises(EngineClosedError, match="the model is in use; first close") as caught:
        leave()
    assert isinstance(caught.value.__context__, ZeroDivisionError)
    engine.close()
    model.close()


def test_no_thread_is_left(tiny: lp.Model) -> None:
    before = set(threading.enumerate())
    for _ in range(3):
        with lp.Engine(tiny, n_ctx=64, n_threads=1) as engine:
            engine.generate("a", SHORT)
            assert len(set(threading.enumerate()) - before) == 1
        assert set(threading.enumerate()) == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts native threads in /proc")
def test_no_native_thread_is_left(tiny: lp.Model) -> None:
    """Those that compute belong to the engine thread, and end a moment after it."""
    out = run_script(
        """
import os, time
import llamapipe as lp
def count():
    return len(os.listdir("/proc/self/task"))
with lp.Model(sys.argv[1]) as model:
    before = count()
    for _ in range(3):
        with lp.Engine(model, n_ctx=64, n_threads=3) as engine:
            engine.generate("a", lp.SamplingParams(max_tokens=3))
            assert count() > before + 1
        deadline = time.monotonic() + 60
        while count() > before and time.monotonic() < deadline:
            os.sched_yield()
        say(count() - before)
""",
        tiny.path,
    )
    assert out.split() == ["0", "0", "0"]


# ---- dropping
def test_a_dropped_engine_warns(tiny: lp.Model) -> None:
    engine = lp.Engine(tiny, n_ctx=64, n_threads=1)
    engine_thread = thread_of(engine)
    with pytest.warns(
        ResourceWarning, match=r"<Engine n_queued=0 .*> was never closed; use `with` or close\(\)"
    ):
        del engine
    assert not engine_thread._thread.is_alive()


def test_an_engine_dropped_on_the_thread_of_another_one(tiny: lp.Model) -> None:
    """As the garbage collector may do it: that thread does not wait for the end of the dropped one."""
    dropped = [lp.Engine(tiny, n_ctx=64, n_threads=1)]
    thread = thread_of(dropped[0])._thread
    with lp.Engine(tiny, n_ctx=64, n_threads=1) as other:
        with pytest.warns(ResourceWarning, match="was never closed"):
            thread_of(other).ask(dropped.clear)
        assert len(other.generate("a", SHORT).token_ids) == 4
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("n_ctx", "n_free_bytes", "expected"),
    [
        (64, None, None),
        (64, 10**9, None),
        (64, 0, "the KV cache takes 0.0 GiB, more than half of the 0.0 GiB that were free"),
        (8192, None, "n_ctx is 8192, but the model was trained with"),
    ],
)
def test_sizes_that_are_rarely_meant_are_logged(
    tiny: lp.Model,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    n_ctx: int,
    n_free_bytes: int | None,
    expected: str | None,
) -> None:
    monkeypatch.setattr("llamapipe._engine.assembly.free_memory", lambda: n_free_bytes)
    with lp.Engine(tiny, n_ctx=n_ctx, n_seq_max=1, n_threads=1):
        logged = [r.getMessage() for r in caplog.records if r.name == "llamapipe"]
    assert len(logged) == (expected is not None)
    assert not expected or expected in logged[0]


def test_a_context_beyond_the_training_is_logged_unless_the_file_scales_positions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    document = Document.read(tiny_model(tmp_path / "m.gguf"))
    document.put("llama.rope.scaling.type", STRING, b"yarn")
    document.put("llama.rope.scaling.factor", 6, 4.0)
    document.write(tmp_path / "scaled.gguf")
    for name, n_ctx, expected in (("m", 512, 0), ("m", 513, 1), ("scaled", 2048, 0), ("scaled", 2049, 1)):
        for kind in (lp.Engine, lp.Embedder):
            caplog.clear()
            with kind(tmp_path / f"{name}.gguf", n_ctx=n_ctx, n_seq_max=1, n_threads=1):
                logged = [r.getMessage() for r in caplog.records if r.name == "llamapipe"]
            assert sum("but the model was trained with" in text for text in logged) == expected, logged


def test_ten_dropped_engines_leave_nothing(tiny: lp.Model) -> None:
    before = set(threading.enumerate())
    with lp.Model(tiny.path) as model:
        for _ in range(10):
            with pytest.warns(ResourceWarning, match="was never closed"):
                lp.Engine(model, n_ctx=64, n_threads=1).generate("a", SHORT)
        assert set(threading.enumerate()) == before
    assert model.closed


def test_a_stream_keeps_its_engine(tiny: lp.Model) -> None:
    stream = lp.Engine(tiny, n_ctx=64, n_threads=1).stream("a", SHORT)
    assert sum(len(delta.token_ids) for delta in stream) == 4
    with pytest.warns(ResourceWarning, match="was never closed"):
        del stream


def test_an_engine_made_of_a_path_owns_its_model(tiny: lp.Model) -> None:
    with lp.Engine(tiny.path, n_ctx=64, n_threads=1) as engine:
        assert len(engine.generate("a", SHORT).token_ids) == 4
    assert engine.model.closed
    with pytest.raises(ValueError, match="n_ctx"):
        lp.Engine(str(tiny.path), n_ctx=0)


def test_an_engine_whose_end_fails_frees_its_models(tiny: lp.Model, tmp_path: Path) -> None:
    """An observer that raises, and a trace whose folder is gone: the caller sees both, and closes nothing twice."""

    class Observer:
        n_closed = 0

        def begin(self, request: object) -> Any: ...

        def close(self) -> None:
            self.n_closed += 1
            raise RuntimeError("no exporter")

    folder = tmp_path / "gone"
    folder.mkdir()
    tuning = lp.EngineTuning(trace=folder / "trace.json")
    engine = lp.Engine(tiny.path, n_ctx=64, n_threads=1, tuning=tuning)
    observer = Observer()
    engine.observe(observer)
    folder.rmdir()
    with pytest.raises(OSError, match="gone") as error:
        engine.close()
    assert str(error.value.__context__) == "no exporter"
    assert engine.model.closed
    engine.close()
    assert observer.n_closed == 1


def test_an_embedder_whose_thread_cannot_start_leaves_its_model_alone(
    tiny: lp.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == "llamapipe-embedder":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with lp.Model(tiny.path) as model, pytest.raises(RuntimeError, match="can't start"):
        lp.Embedder(model, n_ctx=64)
    assert model.closed


def test_what_is_closed_or_was_never_made_does_not_warn(tiny: lp.Model) -> None:
    """Warnings are errors here."""
    engine = lp.Engine(tiny, n_ctx=64, n_threads=1)
    engine.close()
    del engine
    with pytest.raises(ValueError, match="max_queue"):
        lp.Engine(tiny, max_queue=0)
    with pytest.raises(lp.errors.BackendError):
        lp.Engine(tiny, type_k="q8_0")


def test_dropped_streams_and_generations_give_their_slots_up(make_engine: MakeEngine) -> None:
    engine = make_engine(n_seq_max=2)
    for _ in range(5):
        stream = engine.stream("a", ENDLESS)
        next(stream)
        generation = engine.start("b", ENDLESS)
        generation.next()
        del stream, generation
    assert len(engine.generate(["a", "b", "c"], SHORT)) == 3
    stats = engine.stats()
    assert (stats.n_active, stats.n_queued) == (0, 0)


# ---- memory
_MEASURE = """
import llamapipe as lp
def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
"""


# glibc keeps freed memory for later use, more and more of it as its thresholds grow. With fixed ones the resident size
# tells what is really held.
_EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 24 MiB in 56 tensors."""
    shape = Shape(layers=6, width=288, heads=6, heads_kv=6, ffn=768, context=2048)
    return make_model(tmp_path_factory.mktemp("models") / "big.gguf", shape=shape, type_name="f32")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_memory_is_given_back_at_once(big: Path) -> None:
    """Sizes in MiB: weights of 24 read into memory, 108 of KV cells, in each of eight rounds."""
    out = run_script(
        _MEASURE
        + """
params = lp.SamplingParams(max_tokens=2, ignore_eos=True)
for round in range(8):
    empty = resident()
    model = lp.Model(sys.argv[1], use_mmap=False)
    loaded = resident()
    engine = lp.Engine(model, n_ctx=2048, n_seq_max=8, n_threads=1)
    engine.generate(["a"] * 8, params)
    ready = resident()
    engine.close()
    closed = resident()
    model.close()
    say(empty, loaded, ready, closed, resident())
""",
        big,
        env=_EXACT,
    )
    rounds = [[float(n) for n in line.split()] for line in out.splitlines()]
    assert len(rounds) == 8
    for empty, loaded, ready, closed, end in rounds:
        assert loaded - empty > 22
        assert ready - loaded > 105
        assert ready - closed > 105
        assert closed - end > 22
    assert rounds[-1][-1] - rounds[1][-1] < 2, rounds


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_loads_and_engines_that_fail_leave_nothing(big: Path) -> None:
    """Each would leave 24 or 108 MiB."""
    out = run_script(
        _MEASURE
        + """
def stop_at(end):
    def progress(fraction):
        if fraction >= end:
            raise ValueError("stop")
    return progress

for round in range(6):
    for end in (0.5, 1.0):
        try:
            lp.Model(sys.argv[1], use_mmap=False, progress=stop_at(end))
        except ValueError:
            pass
    with lp.Model(sys.argv[1], use_mmap=False) as model:
        try:
            lp.Engine(model, n_ctx=16384, n_seq_max=8, n_cells=16383, n_threads=1)
        except ValueError as e:
            assert "n_cells" in str(e)
    say(resident())
""",
        big,
        env=_EXACT,
    )
    sizes = [float(line) for line in out.splitlines()]
    assert len(sizes) == 6
    assert sizes[-1] - sizes[1] < 2, sizes


# ---- exit without close
_STATES = {
    "idle": "",
    "busy": """
worker = threading.Thread(target=engine.generate, args=("a", ENDLESS), daemon=True)
worker.start()
while engine.stats().n_completion_tokens == 0:
    pass
""",
    "everything": """
def daemon(function, *arguments):
    threading.Thread(target=function, args=arguments, daemon=True).start()

read, unread, queued = (engine.stream(str(i), ENDLESS) for i in range(3))
next(read), next(read)
generation, other = engine.start("b", ENDLESS), engine.start("c", ENDLESS)
generation.next()
daemon(engine.generate, ["d", "e"], ENDLESS)
daemon(asyncio.run, astream(engine))
context = Context(model, n_ctx=64)
context.decode(DecodeBatch.of_tokens([5, 6]))
chain = SamplerChain(model.vocab)
second_model = lp.Model(sys.argv[1])
second = lp.Engine(second_model, n_ctx=64)
second.generate("f", lp.SamplingParams(max_tokens=1))
""",
}
_ENDS = {
    "end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "exception": ("raise ZeroDivisionError('unhandled')", 1),
    "os._exit": ("os._exit(4)", 4),
    "exit in a thread": (
        "worker = threading.Thread(target=sys.exit, args=(5,)); worker.start(); worker.join()",
        0,
    ),
    "end with a reference cycle": ("cycle = [engine, model]; cycle.append(cycle)", 0),
}
_SETUP = """
import asyncio, os, threading
import llamapipe as lp
from llamapipe.llama import DecodeBatch, Context, SamplerChain

ENDLESS = lp.SamplingParams(max_tokens=None, ignore_eos=True)

async def astream(engine):
    async for delta in engine.astream("asyncio", ENDLESS):
        pass

model = lp.Model(sys.argv[1])
engine = lp.Engine(model, n_ctx=100_000, n_seq_max=2, n_threads=1)
"""


@pytest.mark.parametrize("end", _ENDS)
@pytest.mark.parametrize("state", _STATES)
def test_exit_without_close(tiny: lp.Model, state: str, end: str) -> None:
    program, exit_code = _ENDS[end]
    out, err = run_script_with_errors(
        _SETUP + _STATES[state] + "say('ready')\n" + program, tiny.path, exit_code=exit_code
    )
    assert out == "ready\n"
    assert ("ZeroDivisionError: unhandled" in err) if end == "exception" else not err, err


def test_exit_waits_for_threads_that_are_no_daemons(tiny: lp.Model) -> None:
    out = run_script(
        _SETUP
        + """
def work():
    started.set()
    out = engine.generate(["a", "b", "c"], lp.SamplingParams(max_tokens=50, ignore_eos=True))
    say(sum(len(c.token_ids) for c in out))

started = threading.Event()
threading.Thread(target=work).start()
started.wait()
say("main ends")
""",
        tiny.path,
    )
    assert out.split("\n") == ["main ends", "150", ""]


def test_exit_hooks_that_use_an_engine(tiny: lp.Model) -> None:
    """A hook set after the engine was made runs before it is closed; one set earlier finds it closed."""
    out = run_script(
        """
import atexit
def hook(when):
    try:
        say(when, len(engine.generate("a", lp.SamplingParams(max_tokens=4, ignore_eos=True)).token_ids))
    except lp.errors.EngineClosedError as e:
        say(when, e)
atexit.register(hook, "earlier:")
"""
        + _SETUP
        + 'atexit.register(hook, "later:")',
        tiny.path,
    )
    assert out.splitlines() == ["later: 4", "earlier: the engine is closed; make another"]


def test_exit_while_a_daemon_thread_loads(big: Path) -> None:
    """Its progress function must not enter an interpreter that is going away."""
    program = """
import atexit, threading
import llamapipe as lp
calls = []

def progress(fraction):
    calls.append(fraction)
    loading.set()
    go_on.wait()

def load():
    try:
        lp.Model(sys.argv[1], use_mmap=False, progress=progress)
    except SystemExit:
        stopped.set()
        raise

def report():
    stopped.wait()
    say("stopped after", len(calls), "calls")

loading, go_on, stopped = threading.Event(), threading.Event(), threading.Event()
atexit.register(report)  # runs after llamapipe's hook, which is registered when the load begins
threading.Thread(target=load, daemon=True).start()
loading.wait()
atexit.register(go_on.set)  # runs before it
"""
    assert run_script(program, big) == "stopped after 1 calls\n"


def test_loading_at_exit_is_possible_on_the_main_thread(tiny: lp.Model) -> None:
    out = run_script(
        """
import atexit
import llamapipe as lp
def hook():
    with lp.Model(sys.argv[1]) as model, lp.Engine(model, n_ctx=64, n_threads=1) as engine:
        say(len(engine.generate("a", lp.SamplingParams(max_tokens=4, ignore_eos=True)).token_ids))
atexit.register(hook)
lp.Model(sys.argv[1]).close()
""",
        tiny.path,
    )
    assert out == "4\n"


def test_unclosed_contexts_do_not_keep_a_process(tiny: lp.Model) -> None:
    run_script(
        _SETUP + "contexts = [Context(model, n_ctx=64, n_threads=2) for _ in range(5)]\n"
        "for c in contexts: c.decode(DecodeBatch.of_tokens([5, 6, 7]))",
        tiny.path,
    )


def test_a_closed_context_frees_its_engine_slot_of_the_model(tiny: lp.Model) -> None:
    with lp.Model(tiny.path) as model:
        for _ in range(50):
            Context(model, n_ctx=64).close()
        assert not children_of(model)
