"""What tests share: models, engines that are checked after each test, and no thread left behind."""

from __future__ import annotations

import gc
import os
import random
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from support.clock import Clock
    from support.plain import PlainLoop

    import llamapipe as lp

# Nothing native is imported here: tests of the build run before there is a library.

# Many tests start interpreters. Without bytecode each would compile the package, for longer than most then run.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Before numpy is imported: on cores that are shared, the threads of its products spin while they wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

with suppress(ImportError):  # not every session has it
    from hypothesis import HealthCheck, settings

    # On a busy machine examples are slow, whatever is tested.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Leave all tests out of the garbage collections that tests ask for: each would take most of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def nothing_of_other_modules_to_collect() -> None:
    """Leave out also what the tests of other modules have imported and kept."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_set_of_authorities() -> Iterator[None]:
    """All HTTP clients share the certificate authorities, which each would read for 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


def _engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "llamapipe-engine"}


@pytest.fixture(autouse=True)
def no_engine_thread_left() -> Iterator[None]:
    """Every engine made in a test is closed in it, and its thread has ended."""
    before = _engine_threads()
    yield
    left = _engine_threads() - before
    assert not left, f"{len(left)} engine threads outlived the test"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    """A model of random weights, F16: 512 pieces, bytes among them; a step takes a fraction of a millisecond."""
    from support.gguf_models import tiny_model

    import llamapipe as lp

    path: Path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    with lp.Model(tiny_model(path)) as model:
        yield model


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    """A small model that keeps a state for each sequence instead of cells for each token."""
    from support.gguf_models import recurrent_model

    import llamapipe as lp

    with lp.Model(recurrent_model(tmp_path_factory.mktemp("models") / "recurrent.gguf")) as model:
        yield model


@pytest.fixture(scope="session")
def demo() -> Iterator[lp.Model]:
    """The bundled model, Q8_0: it writes sentences and ends them."""
    import llamapipe as lp

    with lp.Model.demo() as model:
        yield model


@pytest.fixture
def make_engine(tiny: lp.Model) -> Iterator[Callable[..., lp.Engine]]:
    """Makes engines over the tiny model unless another is given; each is checked and closed after the test.

    ``options``: of Engine and EngineTuning. One thread computes unless asked otherwise: the models are so small that a
    second one only adds waiting.
    """
    import llamapipe as lp
    from llamapipe.engine import with_tuning

    engines: list[lp.Engine] = []

    def make(model: lp.Model | None = None, **options: Any) -> lp.Engine:
        engine = lp.Engine(model or tiny, **with_tuning({"n_ctx": 256, "n_threads": 1, **options}))
        engines.append(engine)
        return engine

    yield make
    gc.collect()
    for engine in engines:
        stats = engine.stats()
        engine.check_integrity()
        engine.close(drain=False)
        assert (stats.n_active, stats.n_queued) == (0, 0), f"{engine!r} still holds requests: {stats}"
    if engines:
        assert "n_queued=0" in repr(engine) or engine.closed


@pytest.fixture
def engine(make_engine: Callable[..., lp.Engine]) -> lp.Engine:
    """An engine of four slots with 256 positions each, which computes in the chunks of ``loop``."""
    return make_engine(n_seq_max=4, n_ubatch=32)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is guessed is taken: neither times nor earlier tests decide."""
    from support.eager_gate import EagerGate

    monkeypatch.setattr(EagerGate, "rng", random.Random(1))
    monkeypatch.setattr("llamapipe._engine.assembly.Gate", EagerGate)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of callers, whose deadlines pass when the test says so."""
    from support.clock import Clock

    return Clock(monkeypatch)


@pytest.fixture(scope="module")
def loop(tiny: lp.Model) -> Iterator[PlainLoop]:
    """The same tokens without an engine."""
    from support.plain import plain_loop

    with plain_loop(tiny, n_ubatch=32) as loop:
        yield loop


@pytest.fixture(scope="module")
def plain(model: lp.Model) -> Iterator[PlainLoop]:
    """A plain loop of the module's own ``model``."""
    from support.plain import plain_loop

    with plain_loop(model) as loop:
        yield loop


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What benchmarks have noted besides times."""
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    for bench in getattr(session, "benchmarks", ()):
        for what, value in bench.extra_info.items():
            terminalreporter.write_line(f"{bench.name}: {what} = {value}")
