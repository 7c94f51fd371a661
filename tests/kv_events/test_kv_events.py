"""KV events over real sockets: a subscriber knows at any time what the engine's prefix cache holds."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.control import PATIENCE_S, Worker, all_results, wait_until
from support.inside import n_waiting_events, stalled_events, told_and_cached, tree_of
from support.kv_subscriber import GapError, Subscriber
from support.plain import greedy
from support.run_script import run_script

import llamapipe as lp
from llamapipe._engine.policy.prefix_tree import PrefixTree
from llamapipe.server.settings import ServerSettings
from llamapipe.server.state import ServerState

WITHOUT_ZMQ = """
sys.modules["zmq"] = None
import llamapipe as lp
with lp.Model.demo() as model:
    try:
        lp.Engine(model, n_ctx=64, tuning=lp.EngineTuning(kv_events=lp.KvEvents("tcp://127.0.0.1:0")))
    except ImportError as e:
        say(e)
"""
MakeEngine = Callable[..., lp.Engine]
SIZE = 8


def options(**more: Any) -> lp.KvEvents:
    values: dict[str, Any] = {"replay_endpoint": "tcp://127.0.0.1:0", "block_size": SIZE, **more}
    return lp.KvEvents("tcp://127.0.0.1:0", **values)


def tokens_of(n: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(5, 95) for _ in range(n)]


def check(engine: lp.Engine, subscriber: Subscriber) -> None:
    """Once the subscriber has every batch, it has the engine's blocks."""
    n_put, cached = told_and_cached(engine, SIZE)
    subscriber.replay(n_put)
    assert subscriber.index.prefixes == cached


@pytest.mark.parametrize(
    "engine_options",
    [
        {"n_seq_max": 3, "cache_bytes": 200_000},
        {"n_seq_max": 3, "cache_bytes": 0, "kv_unified": True},
        {"n_seq_max": 4, "n_cells": 320, "cache_bytes": 100_000},
        {"n_seq_max": 3, "prefix_cache": "exact", "n_ubatch": 32},
        {"n_seq_max": 3, "overflow": "recompute", "n_ctx": 96},
        {"n_seq_max": 3, "overflow": "shift", "n_ctx": 96},
    ],
    ids=str,
)
def test_a_replay_rebuilds_the_cache(make_engine: MakeEngine, engine_options: dict[str, Any]) -> None:
    """Random traffic of several callers: prompts that share prefixes, more of them than slots and host memory hold."""
    engine = make_engine(kv_events=options(), **engine_options)
    chance = random.Random(5)
    roots = [tokens_of(n, 50 + n) for n in (20, 40, 70)]
    n_prompt = engine.n_ctx // 2
    with Subscriber(engine.kv_events) as subscriber:
        seen = 0
        for round_ in range(8):
            prompts = [
                (chance.choice(roots)[: chance.randint(8, 70)] + tokens_of(chance.randint(1, 30), i))[
                    :n_prompt
                ]
                for i in range(round_ * 10, round_ * 10 + 10)
            ]
            params = [greedy(chance.randint(1, 120)) for _ in prompts]
            workers = [Worker(engine.generate, p, q) for p, q in zip(prompts, params, strict=True)]
            all_results(workers)
            check(engine, subscriber)
            seen = max(seen, len(subscriber.index.blocks))
        assert seen > 20


def test_only_what_the_model_alone_computed_is_announced(demo: lp.Model) -> None:
    tuning = lp.EngineTuning(kv_events=options())
    with lp.Engine(demo, n_ctx=128, tuning=tuning) as engine, Subscriber(engine.kv_events) as subscriber:
        with demo.load_adapter(demo.path.with_name("letters.gguf"), "events") as adapter:
            for params in ({"adapter": adapter}, {"cache_salt": "s"}):
                engine.generate(tokens_of(40, 1), lp.SamplingParams(max_tokens=2, **params))
        subscriber.replay(told_and_cached(engine, SIZE)[0])
        assert not subscriber.index.blocks
        engine.generate(tokens_of(40, 1), greedy(2))
        subscriber.replay(told_and_cached(engine, SIZE)[0])
        assert len(subscriber.index.blocks) >= 40 // SIZE


class Traffic:
    """Short requests, each with another prompt."""

    def __init__(self, engine: lp.Engine) -> None:
        self._engine = engine
        self._n = 0

    def __call__(self, n: int = 1) -> None:
        for _ in range(n):
            self._n += 1
            self._engine.generate(tokens_of(40, 1000 + self._n), greedy(2))


def receive_all(engine: lp.Engine, subscriber: Subscriber) -> int:
    """Receives every batch that the engine has sent, and compares. Returns how many came."""
    n_put, cached = told_and_cached(engine, SIZE)
    n = 0
    while subscriber.next < n_put:
        subscriber.receive()
        n += 1
    assert subscriber.index.prefixes == cached
    return n


def test_the_live_stream_is_complete(make_engine: MakeEngine) -> None:
    """After one replay at the start every batch arrives, in order."""
    engine = make_engine(kv_events=options())
    traffic = Traffic(engine)
    with Subscriber(engine.kv_events) as subscriber:
        subscriber.wait(traffic)
        subscriber.replay()
        traffic(20)
        assert receive_all(engine, subscriber) >= 20


def test_a_gap_is_seen_and_a_replay_fills_it(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_events=options(), cache_bytes=100_000)
    traffic = Traffic(engine)
    with Subscriber(engine.kv_events) as subscriber:
        subscriber.wait(traffic)
        subscriber.replay()
        receive_all(engine, subscriber)
        subscriber.disconnect()
        traffic(30)
        subscriber.reconnect()
        subscriber.wait(traffic)
        before = dict(subscriber.index.blocks)
        with pytest.raises(GapError):
            subscriber.receive()
        assert subscriber.index.blocks == before
        first = subscriber.next
        assert subscriber.replay()[0] == first
        traffic(3)
        receive_all(engine, subscriber)


def test_a_replay_of_batches_that_are_not_kept(make_engine: MakeEngine) -> None:
    """It begins with one that clears all blocks and stores what the older ones had left."""
    engine = make_engine(kv_events=options(n_replay=3), cache_bytes=100_000)
    traffic = Traffic(engine)
    traffic(30)
    with Subscriber(engine.kv_events) as subscriber:
        n_put, _ = told_and_cached(engine, SIZE)
        numbers = subscriber.replay()
        assert numbers == list(range(n_put - 4, n_put))
        check(engine, subscriber)
        traffic(20)
        assert len(subscriber.replay()) == 4  # this one knows blocks that are gone
        check(engine, subscriber)


def test_a_publisher_that_stands_still_does_not_delay_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_events=options(), cache_bytes=100_000)
    traffic = Traffic(engine)
    with Subscriber(engine.kv_events) as subscriber:
        with stalled_events(engine):
            traffic(100)  # more than may wait
            n_put, _ = told_and_cached(engine, SIZE)
            assert n_put < 80
        wait_until(lambda: n_waiting_events(engine) == 0)
        traffic()
        check(engine, subscriber)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="lp") as folder:
        yield Path(folder)


def test_a_closed_engine_holds_nothing_and_the_next_one_begins_anew(
    make_engine: MakeEngine, short_path: Path
) -> None:
    address = f"ipc://{short_path}/events"
    settings = lp.KvEvents(address, f"ipc://{short_path}/replay", block_size=SIZE, topic="kv@here@tiny")
    engine = make_engine(kv_events=settings)
    assert engine.kv_events == settings
    with Subscriber(settings) as subscriber:
        traffic = Traffic(engine)
        traffic(40)  # a lower number tells that an engine was started again
        subscriber.wait(traffic)
        subscriber.replay()
        receive_all(engine, subscriber)
        assert subscriber.index.blocks
        engine.close()
        while subscriber.index.blocks:
            subscriber.receive()
        engine = make_engine(kv_events=settings)
        traffic = Traffic(engine)
        subscriber.wait(traffic)
        try:
            subscriber.receive()
        except GapError:  # the first batches were sent before the subscription was known
            subscriber.replay()
        traffic(3)
        receive_all(engine, subscriber)


def test_lost_cells_are_told(make_engine: MakeEngine, recurrent: lp.Model) -> None:
    """A recurrent model without saved states cannot go back: a trim loses all cells, though the prompt stays."""
    engine = make_engine(recurrent, kv_events=options(), cache_bytes=0)
    generation = engine.start(tokens_of(20, 1), greedy(None))
    with Subscriber(engine.kv_events) as subscriber:
        for _ in range(10):
            generation.next()
        check(engine, subscriber)
        assert len(subscriber.index.blocks) == 20 // SIZE
        generation.trim(25)
        engine.check_integrity()  # the cells are removed before it looks
        check(engine, subscriber)
        assert not subscriber.index.blocks
        generation.next()
        check(engine, subscriber)
        assert subscriber.index.blocks
        generation.cancel()


def test_the_format_is_vllms(make_engine: MakeEngine) -> None:
    """Three frames, as its subscribers read them; the numbers of hashes, tokens and parents fit together."""
    engine = make_engine(kv_events=options(block_size=16))
    assert engine.kv_events is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.linger = 0
        assert engine.kv_events.replay_endpoint is not None
        replay.connect(engine.kv_events.replay_endpoint)
        prompt = tokens_of(50, 1)
        engine.generate(prompt, greedy(2))
        engine.generate(prompt[:32] + tokens_of(20, 2), greedy(2))
        told_and_cached(engine, 16)
        replay.send_multipart([b"", bytes(8)])
        batches: list[Any] = []
        while (frames := replay.recv_multipart())[2] != b"\xff" * 8:
            empty, topic, number, payload = frames
            assert empty == b"" and topic.startswith(b"kv@") and topic.endswith(b"@tiny")
            assert int.from_bytes(number, "big") == len(batches)
            batches.append(msgspec.msgpack.decode(payload))
    assert all(isinstance(time, float) and isinstance(events, list) for time, events in batches)
    events = [event for _, events in batches for event in events]
    assert events[0] == ["AllBlocksCleared"]
    names = ["AllBlocksCleared", "BlockStored", "BlockRemoved", "BlockStored"]
    assert [event[0] for event in events] == names
    (_, first, parent, tokens, size, *_), (_, gone, *_), (_, second, branch, more, *_) = events[1:]
    assert (len(first), parent, tokens, size) == (3, None, prompt[:48], 16)
    assert gone == first[2:]  # the second request took the slot over, with the cells of its prefix
    assert (len(second), branch) == (1, first[1])
    assert more == tokens_of(20, 2)[:16]


def test_hashes_do_not_depend_on_the_engine(make_engine: MakeEngine) -> None:
    hashes = []
    for n_other in (0, 3):
        engine = make_engine(kv_events=options())
        Traffic(engine)(n_other)
        engine.generate(tokens_of(40, 7), greedy(2))
        with Subscriber(engine.kv_events) as subscriber:
            check(engine, subscriber)
            hashes.append({prefix: key for key, prefix in subscriber.index.blocks.items()})
    few, many = hashes
    assert len(few) >= 5 and many.items() >= few.items()


def test_without_events_nothing_is_made(make_engine: MakeEngine) -> None:
    before = threading.active_count()
    engine = make_engine()
    engine.generate(tokens_of(40, 1), greedy(2))
    assert engine.kv_events is None
    assert threading.active_count() == before + 1
    assert type(tree_of(engine)) is PrefixTree


class TestOptions:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({"endpoint": "127.0.0.1:5557"}, "endpoint"),
            ({"endpoint": "tcp://127.0.0.1"}, "endpoint"),
            ({"endpoint": "tcp://127.0.0.1:70000"}, "endpoint"),
            ({"endpoint": "tcp://[::1]:1", "replay_endpoint": "inproc://x"}, "replay_endpoint"),
            ({"endpoint": "tcp://*:5557", "block_size": 0}, "block_size"),
            ({"endpoint": "ipc:///tmp/x", "n_replay": 0}, "n_replay"),
        ],
    )
    def test_wrong_values_are_refused(self, fields: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            lp.KvEvents(**fields)

    def test_wrong_types_are_refused(self, tiny: lp.Model) -> None:
        with pytest.raises(TypeError, match="endpoint"):
            lp.KvEvents(5557)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="topic"):
            lp.KvEvents("tcp://127.0.0.1:1", topic=b"kv")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="connect"):
            lp.KvEvents("tcp://127.0.0.1:1", connect=1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="kv_events"):
            lp.Engine(tiny, tuning=lp.EngineTuning(kv_events="tcp://127.0.0.1:1"))  # type: ignore[arg-type]

    def test_there_is_nothing_to_tell_without_a_cache(self, tiny: lp.Model) -> None:
        with pytest.raises(ValueError, match="prefix_cache is False"):
            lp.Engine(tiny, prefix_cache=False, tuning=lp.EngineTuning(kv_events=options()))

    def test_an_address_in_use(self, make_engine: MakeEngine, tiny: lp.Model) -> None:
        engine = make_engine(kv_events=options())
        assert engine.kv_events is not None
        with pytest.raises(OSError, match=engine.kv_events.endpoint):
            lp.Engine(tiny, tuning=lp.EngineTuning(kv_events=engine.kv_events))

    def test_the_router_may_be_the_one_that_listens(self, make_engine: MakeEngine) -> None:
        with zmq.Context() as context, context.socket(zmq.SUB) as sub:
            sub.linger = 0
            sub.rcvtimeo = int(PATIENCE_S * 1000)
            sub.bind("tcp://127.0.0.1:0")
            sub.subscribe("kv@pod-1@")
            address = sub.getsockopt_string(zmq.LAST_ENDPOINT)
            settings = lp.KvEvents(address, topic="kv@pod-1@tiny", connect=True)
            traffic = Traffic(make_engine(kv_events=settings))
            while not sub.poll(10):
                traffic()
            assert sub.recv_multipart()[0] == b"kv@pod-1@tiny"

    def test_the_extra_is_named(self) -> None:
        assert "llamapipe[kv-events]" in run_script(WITHOUT_ZMQ)


def test_a_server_with_several_keys_says_that_nothing_is_published(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(kv_events=options())
    ServerState(engine, ServerSettings(api_keys=("a",)))
    assert not caplog.text
    ServerState(engine, ServerSettings(api_keys=("a", "b")))
    assert "no KV events are published: each of the 2 API keys has a prefix cache" in caplog.text
