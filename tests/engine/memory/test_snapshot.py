"""Snapshots: a sequence as bytes, restored in the same engine, in another one, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from support.control import wait_until
from support.gguf_models import tiny_model
from support.plain import PlainLoop, greedy

import llamapipe as lp
from llamapipe.errors import DecodeError, EngineClosedError, InvalidRequestError
from llamapipe.llama.context import state_version

MakeEngine = Callable[..., lp.Engine]

PROMPT = "Once upon a time there was a miller who had three sons"


def take(generation: lp.Generation, n: int) -> list[int]:
    """The next ``n`` tokens."""
    return [token.id for _, token in zip(range(n), generation, strict=False)]


def snapshot_of(engine: lp.Engine, n: int = 5) -> bytes:
    """A snapshot after ``n`` tokens."""
    with engine.start(PROMPT, greedy(n)) as generation:
        assert len(take(generation, n)) == n
        return generation.snapshot()


@pytest.mark.parametrize("there", [{}, {"kv_unified": True}, {"n_seq_max": 1}, {"n_seq_max": 7}], ids=str)
@pytest.mark.parametrize(
    "here", [pytest.param({}, marks=pytest.mark.device), {"kv_unified": True}, {"n_seq_max": 1}], ids=str
)
def test_goes_on_elsewhere(
    make_engine: MakeEngine, loop: PlainLoop, here: dict[str, Any], there: dict[str, Any]
) -> None:
    """With the cells of the other engine: nothing is computed but new tokens."""
    first, second = (make_engine(n_ubatch=32, **{"n_seq_max": 4, **options}) for options in (here, there))
    ids = first.model.tokenize(PROMPT)
    others = [first.start([7 + i] * 20, greedy(4)) for i in range(first.n_seq_max - 1)]
    for other in others:  # the sequence is not in the first slot
        take(other, 1)
    with first.start(PROMPT, greedy(20)) as generation:
        begun = take(generation, 5)
        snapshot = generation.snapshot()
        rest = take(generation, 15)
    for other in others:
        other.close()
    with second.restore(snapshot, greedy(15)) as restored:
        assert restored.token_ids == ids + begun
        assert take(restored, 15) == rest
        second.check_integrity()
    stats = second.stats()
    assert (stats.n_prompt_tokens, stats.n_restored, stats.steps) == (0, 1, 15)
    assert loop.agrees(ids, begun + rest)


@pytest.mark.parametrize("how", ["not started", "cut", "lengthened", "ended", "preempted", "restored"])
def test_at_any_time(make_engine: MakeEngine, loop: PlainLoop, how: str) -> None:
    engine = make_engine(n_seq_max=1, n_ubatch=32)
    ids = engine.model.tokenize(PROMPT)
    generation = engine.start(ids, greedy(6))
    if how != "not started":
        take(generation, 6 if how == "ended" else 4)
    if how == "cut":
        generation.trim(len(ids) - 3)
    if how == "lengthened":
        generation.append([60, 61, 62])
    if how == "preempted":
        engine.generate([5] * 40, greedy(3))
    snapshot = generation.snapshot()
    tokens = generation.token_ids
    generation.close()
    restored = engine.restore(snapshot, greedy(8))
    if how == "restored":
        snapshot = restored.snapshot()
        restored.close()
        restored = engine.restore(snapshot, greedy(8))
    assert restored.token_ids == tokens
    assert loop.agrees(tokens, take(restored, 8))
    restored.close()


@pytest.mark.parametrize(
    "options", [{"prefix_cache": False}, {"cache_bytes": 0}, {"flash_attn": "off"}], ids=str
)
def test_a_snapshot_is_computed_again_where_its_cells_are_of_no_use(
    make_engine: MakeEngine, loop: PlainLoop, options: dict[str, Any]
) -> None:
    snapshot = snapshot_of(make_engine())
    engine = make_engine(**options)
    with engine.restore(snapshot, greedy(6)) as restored:
        assert loop.agrees(restored.token_ids, take(restored, 6))
    assert engine.stats().n_prompt_tokens > 5


def test_of_a_recurrent_model(make_engine: MakeEngine, recurrent: lp.Model) -> None:
    """Also in a context with another number of sequences."""
    first, same, other = (make_engine(recurrent, n_seq_max=n) for n in (2, 2, 3))
    with first.start([5, 6, 7] * 10, greedy(20)) as generation:
        take(generation, 4)
        snapshot = generation.snapshot()
        rest = take(generation, 10)
    for engine in (same, other):
        with engine.restore(snapshot, greedy(10)) as restored:
            assert take(restored, 10) == rest
        assert (engine.stats().n_prompt_tokens, engine.stats().n_restored) == (0, 1)


def test_constraints_hold_for_the_whole_text(engine: lp.Engine) -> None:
    pytest.importorskip("llguidance")
    params = lp.SamplingParams(max_tokens=4, regex="ab[a-z]{20}", seed=1, temperature=1.5)
    n = len(engine.model.tokenize(PROMPT))
    with engine.start(PROMPT, params) as generation:
        take(generation, 4)
        snapshot = generation.snapshot()
    with engine.restore(snapshot, replace(params, max_tokens=60)) as restored:
        take(restored, 60)
        text = engine.model.detokenize(restored.token_ids[n:])
        assert (text[:2], len(text), restored.finish_reason) == ("ab", 22, "stop")
    with (
        engine.restore(snapshot, replace(params, regex="[0-9]+")) as restored,
        pytest.raises(InvalidRequestError),
    ):
        restored.next()
    assert engine.generate(PROMPT, greedy(3)).n_completion_tokens == 3


def test_goes_on_inside_a_character(engine: lp.Engine) -> None:
    whole = engine.model.tokenize("\N{SNOWMAN}", add_special=False)
    assert len(whole) > 2, "the model must write this character byte by byte"
    bias = dict.fromkeys(whole[-2:], 50.0)
    del bias
    with engine.start(PROMPT, greedy(8)) as generation:
        generation.next()
        generation.append(whole[:-1])
        snapshot = generation.snapshot()
    params = lp.SamplingParams(max_tokens=1, allowed_token_ids=whole[-1:])
    with engine.restore(snapshot, params) as restored:
        token = restored.next()
        assert token is not None and token.text == "\N{SNOWMAN}"


class TestRefused:
    @pytest.fixture
    def snapshot(self, engine: lp.Engine) -> bytes:
        return snapshot_of(engine)

    def test_what_is_not_one(self, engine: lp.Engine, snapshot: bytes) -> None:
        for bad in (None, "text", 5, [1]):
            with pytest.raises(TypeError, match="snapshot must be bytes"):
                engine.restore(bad)  # type: ignore[arg-type]
        for short in (b"", b"llpsnap2", snapshot[:50], b"x" * 500, b"X" + snapshot[1:]):
            with pytest.raises(InvalidRequestError, match="are not a snapshot of this version"):
                engine.restore(short)

    def test_damage_anywhere(self, engine: lp.Engine, snapshot: bytes) -> None:
        chance = random.Random(5)
        places = [*range(8, 90), *(chance.randrange(8, len(snapshot)) for _ in range(300))]
        for i in places:
            damaged = bytearray(snapshot)
            damaged[i] ^= 1 << chance.randrange(8)
            with pytest.raises(InvalidRequestError, match="damaged"):
                engine.restore(bytes(damaged))
        for cut in (snapshot[:-1], snapshot + b"\0", snapshot[:200]):
            with pytest.raises(InvalidRequestError, match="damaged"):
                engine.restore(cut)

    def test_forgeries_end_nothing(self, engine: lp.Engine, snapshot: bytes, loop: PlainLoop) -> None:
        """With a right checksum: refused, or the cells are not taken, or they hold other numbers."""
        chance = random.Random(6)
        ids = engine.model.tokenize(PROMPT)
        for i in range(400):
            forged = bytearray(snapshot[:-16])
            for _ in range(chance.choice((1, 1, 4))):
                place = chance.randrange(8, 600) if i % 4 else chance.randrange(8, len(forged))
                forged[place] = chance.choice((0, 1, 127, 255, chance.randrange(256)))
            if i % 9 == 0:
                del forged[chance.randrange(60, len(forged)) :]
            data = bytes(forged)
            try:
                restored = engine.restore(data + blake2b(data, digest_size=16).digest(), greedy(1))
            except InvalidRequestError:
                continue
            with restored, suppress(DecodeError):  # no logit is finite
                restored.next()
        assert loop.agrees(ids, engine.generate(ids, greedy(6)).token_ids)

    def test_of_another_model(
        self, engine: lp.Engine, snapshot: bytes, make_engine: MakeEngine, tmp_path: Path
    ) -> None:
        with (
            lp.Model(tiny_model(tmp_path / "other.gguf", type_name="q8_0")) as model,
            make_engine(model) as other,
            pytest.raises(InvalidRequestError, match="another model"),
        ):
            other.restore(snapshot)

    def test_of_another_llama_cpp(self, engine: lp.Engine, snapshot: bytes) -> None:
        """llama.cpp reads a state of another version as if it were its own."""
        other = bytearray(snapshot[:-16])
        version = state_version()
        assert other[24:28] == version.to_bytes(4, "little")
        other[24] += 1
        with pytest.raises(InvalidRequestError, match=f"have version {version + 1}, not {version}"):
            engine.restore(bytes(other) + blake2b(other, digest_size=16).digest())

    def test_of_other_types(self, snapshot: bytes, make_engine: MakeEngine) -> None:
        other = make_engine(type_k="f32")
        with pytest.raises(InvalidRequestError, match=r"type_k='f16'.*this engine type_k='f32'"):
            other.restore(snapshot)

    def test_too_long(self, snapshot: bytes, make_engine: MakeEngine) -> None:
        with pytest.raises(InvalidRequestError, match="n_ctx is 16"):
            make_engine(n_ctx=16).restore(snapshot)

    def test_of_what_has_ended(self, make_engine: MakeEngine, snapshot: bytes) -> None:
        engine = make_engine()
        generation = engine.start(PROMPT, greedy(5))
        generation.cancel()
        with pytest.raises(InvalidRequestError, match="cancelled"):
            generation.snapshot()
        other = engine.start(PROMPT)
        engine.close()
        with pytest.raises(EngineClosedError):
            other.snapshot()
        with pytest.raises(EngineClosedError):
            engine.restore(snapshot)


class TestCachedPrefix:
    PREFIX = tuple(5 + i % 90 for i in range(60))

    @pytest.fixture
    def engine(self, make_engine: MakeEngine) -> lp.Engine:
        return make_engine(n_seq_max=2, n_ubatch=32, cache_bytes=200_000)

    def crowd(self, engine: lp.Engine) -> None:
        """Enough other prompts to drop everything that may be dropped."""
        engine.generate([[5 + i] * 200 for i in range(8)], greedy(2))

    def test_stays_until_it_is_released(self, engine: lp.Engine, loop: PlainLoop) -> None:
        prompt = [*self.PREFIX, 7, 8, 9]
        with engine.cache_prefix(self.PREFIX) as prefix:
            assert prefix.n_tokens == 60 and prefix.n_bytes > 10_000
            for _ in range(2):
                self.crowd(engine)
                out = engine.generate(prompt, greedy(5))
                assert out.n_cached_tokens == 60
                assert loop.agrees(prompt, out.token_ids)
        prefix.release()
        engine.check_integrity()
        for _ in range(3):
            self.crowd(engine)
        assert engine.generate(prompt, greedy(5)).n_cached_tokens == 0

    def test_of_text_and_of_a_prefix_that_is_cached(self, engine: lp.Engine) -> None:
        with engine.cache_prefix(PROMPT), engine.cache_prefix(PROMPT) as again:
            assert again.n_tokens == len(engine.model.tokenize(PROMPT))
            self.crowd(engine)
            assert engine.generate(PROMPT + ".", greedy(2)).n_cached_tokens >= again.n_tokens - 1

    def test_too_short_or_too_large(self, engine: lp.Engine, make_engine: MakeEngine) -> None:
        with pytest.raises(InvalidRequestError, match="has 15 tokens; fewer than 16"):
            engine.cache_prefix(self.PREFIX[:15])
        kept = [engine.cache_prefix([*self.PREFIX, 5 + i]) for i in range(12)]  # 16,424 bytes each
        with pytest.raises(
            InvalidRequestError, match=r"take about \d+ bytes, more than is left of the 200000"
        ):
            engine.cache_prefix([*self.PREFIX, 60])
        for prefix in kept:
            prefix.release()
        engine.cache_prefix([*self.PREFIX, 90]).release()
        with pytest.raises(InvalidRequestError, match="0 without a prefix cache"):
            make_engine(prefix_cache=False).cache_prefix(self.PREFIX)

    def test_an_interrupted_call_keeps_nothing(self, engine: lp.Engine) -> None:
        with pytest.raises(TimeoutError):
            engine.cache_prefix(self.PREFIX, timeout=0)
        wait_until(lambda: engine.stats().n_active == 0)
        for _ in range(3):
            self.crowd(engine)
        assert engine.generate([*self.PREFIX, 7], greedy(1)).n_cached_tokens == 0

    def test_nothing_is_left_after_close(self, engine: lp.Engine) -> None:
        engine.cache_prefix(self.PREFIX)
        self.crowd(engine)
        assert engine.stats().cache_bytes > 16_000
        engine.close()
        assert engine.stats().cache_bytes == 0
