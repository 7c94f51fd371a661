"""The prefix cache of an engine: the same texts as without it, and fewer tokens to compute."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.backends import FEW, device_unless_few
from support.control import Worker, all_results, held, turn, wait_until
from support.plain import PlainLoop, greedy

import llamapipe as lp
from llamapipe.work.tenant import Tenant, conversation, tenant

MakeEngine = Callable[..., lp.Engine]


def tokens_of(n: int, seed: int) -> list[int]:
    """Tokens that every vocabulary here has."""
    chance = random.Random(seed)
    return [chance.randrange(5, 95) for _ in range(n)]


SHARED = tokens_of(40, 0)


@pytest.mark.parametrize("kv_unified", [False, True])
def test_a_long_conversation_stays_in_its_cells(make_engine: MakeEngine, kv_unified: bool) -> None:
    """Where attention does not read the cells of others, or each has a range."""
    engine = make_engine(n_ctx=800, n_seq_max=2, kv_unified=kv_unified)
    told = tokens_of(600, 1)
    engine.generate(told, greedy(1))
    assert engine.generate([*told, 7], greedy(1)).n_cached_tokens == 600
    stays = not kv_unified or engine.model.attends
    assert engine.stats().n_restored == (0 if stays else 1)


@pytest.mark.device
@pytest.mark.parametrize("kv_unified", [False, True])
class TestPrefixes:
    def test_a_shared_prefix_is_computed_once(self, make_engine: MakeEngine, kv_unified: bool) -> None:
        """By requests that come together, one after another, and when all slots were used for others."""
        engine = make_engine(n_seq_max=4, kv_unified=kv_unified)
        prompts = [SHARED + tokens_of(8, i) for i in range(1, 7)]
        outs = engine.generate(prompts, greedy(4))
        assert [out.n_cached_tokens for out in outs] == [0] + [40] * 5
        assert engine.stats().n_prompt_tokens == 40 + 6 * 8
        assert engine.generate(SHARED + tokens_of(8, 9), greedy(4)).n_cached_tokens == 40
        engine.generate([tokens_of(50, 20 + i) for i in range(8)], greedy(4))
        assert engine.generate(SHARED + tokens_of(8, 10), greedy(4)).n_cached_tokens == 40
        stats = engine.stats()
        assert stats.n_saved > 0 and stats.n_restored > 0 and stats.cache_bytes > 0

    def test_a_conversation_goes_on(self, make_engine: MakeEngine, kv_unified: bool) -> None:
        engine = make_engine(n_seq_max=2, kv_unified=kv_unified)
        told, n_before = tokens_of(30, 1), 0
        for i in range(4):
            out = engine.generate(told, greedy(6))
            assert out.n_cached_tokens == n_before
            n_before = len(told) + 5  # the last token of an answer is never computed
            told = told + out.token_ids + tokens_of(7, 100 + i)

    def test_texts_are_those_without_it(
        self, make_engine: MakeEngine, loop: PlainLoop, kv_unified: bool
    ) -> None:
        """Many callers, few slots, little host memory: whatever is shared, moved, saved, dropped and loaded."""
        n = 4 if FEW else 60
        chance = random.Random(7)
        roots = [tokens_of(size, 50 + size) for size in (20, 40, 70)]
        prompts = [
            chance.choice(roots)[: chance.randint(16, 70)] + tokens_of(chance.randint(1, 30), 200 + i)
            for i in range(n)
        ]
        lengths = [chance.randint(1, 20) for _ in range(n)]
        engine = make_engine(n_seq_max=3, kv_unified=kv_unified, cache_bytes=200_000)
        params = [greedy(n) for n in lengths]
        workers = [Worker(engine.generate, p, q) for p, q in zip(prompts, params, strict=True)]
        for outs in (engine.generate(prompts, params), all_results(workers)):
            assert [out.n_completion_tokens for out in outs] == lengths
            for prompt, out in zip(prompts, outs, strict=True):
                assert loop.agrees(prompt, out.token_ids)
        stats = engine.stats()
        assert stats.n_cache_hit_tokens > (0 if FEW else 1000) and stats.cache_bytes <= 200_000
        engine.check_integrity()


@device_unless_few
def test_preempted_requests_are_not_computed_again(make_engine: MakeEngine, loop: PlainLoop) -> None:
    """Each of 12 requests fits into the cells, but not four at their ends."""
    prompts = [tokens_of(60, i) for i in range(12)]
    engine = make_engine(n_seq_max=4, n_cells=256)
    outs = engine.generate(prompts, greedy(80))
    stats = engine.stats()
    assert stats.n_preempted > 0 and stats.n_restored >= stats.n_preempted
    assert stats.n_prompt_tokens <= 12 * 60 + 2 * stats.n_preempted
    for prompt, out in zip(prompts, outs, strict=True):
        assert out.n_completion_tokens == 80 and loop.agrees(prompt, out.token_ids)


def test_scores_share_their_contexts(make_engine: MakeEngine) -> None:
    engine, plain = make_engine(n_seq_max=2), make_engine(n_seq_max=2, prefix_cache=False)
    contexts = [SHARED + tokens_of(i, i) for i in range(1, 9)]
    endings = [[tokens_of(5, 30), tokens_of(3, 31)] for _ in contexts]
    scores, expected = engine.score(contexts, endings), plain.score(contexts, endings)
    for ours, theirs in zip(scores, expected, strict=True):
        assert [s.total for s in ours] == pytest.approx([s.total for s in theirs], abs=1e-2)
    assert engine.stats().n_prompt_tokens < plain.stats().n_prompt_tokens - 6 * 40


def test_log_probabilities_of_a_prompt_need_all_of_it(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = lp.SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0)
    first, second = (engine.generate(SHARED, params) for _ in range(2))
    assert (first.n_cached_tokens, second.n_cached_tokens) == (0, 0)
    assert second.prompt_logprobs is not None and len(second.prompt_logprobs) == 39


def test_a_generation_leaves_its_cells_to_others(make_engine: MakeEngine, loop: PlainLoop) -> None:
    engine = make_engine(n_seq_max=2)
    with engine.start(SHARED, greedy(None)) as generation:
        tokens = [generation.next().id for _ in range(5)]  # type: ignore[union-attr]
        out = engine.generate(SHARED + tokens_of(3, 1), greedy(3))
        assert out.n_cached_tokens == 40  # while it still runs
        generation.trim(20)
        generation.append(tokens_of(20, 5))
        other = engine.generate(SHARED + tokens_of(3, 2), greedy(3))
        assert other.n_cached_tokens == 40  # of the other request
        assert loop.agrees(SHARED + tokens_of(3, 2), other.token_ids)
        assert [generation.next().id] == loop.greedy(SHARED[:20] + tokens_of(20, 5), 1)  # type: ignore[union-attr]
    assert tokens[0] == loop.greedy(SHARED, 1)[0]


def test_what_is_cancelled_leaves_what_it_computed(make_engine: MakeEngine) -> None:
    engine = make_engine(n_seq_max=2)
    with engine.stream(SHARED, greedy(100)) as stream:
        next(stream)
    wait_until(lambda: engine.stats().n_active == 0)
    assert engine.generate(SHARED, greedy(1)).n_cached_tokens == 39


def asked_as(engine: lp.Engine, name: str | None, tokens: list[int]) -> int:
    """How many tokens a request of this conversation did not have to compute."""
    token = conversation.set(name)
    try:
        return engine.generate(tokens, greedy(1)).n_cached_tokens
    finally:
        conversation.reset(token)


def test_cells_of_a_conversation_that_continues_soon_go_last(make_engine: MakeEngine) -> None:
    other, prompt, *more = (tokens_of(40, i) for i in range(5))
    for is_held in (True, False):
        engine = make_engine(n_seq_max=2, cache_bytes=0)
        asked_as(engine, "mine", prompt)
        engine.hold_conversation("mine")
        if not is_held:
            engine.release_conversation("mine")
        for tokens in (other, *more):  # the slots are needed for them
            asked_as(engine, None, tokens)
        assert asked_as(engine, "mine", prompt) == (39 if is_held else 0)
        engine.release_conversation("mine")
        engine.check_integrity()


def test_cells_of_a_conversation_that_nobody_continues_go_first(make_engine: MakeEngine) -> None:
    """In the slots, and in host memory, which has room for two here."""
    other, prompt, *more = (tokens_of(40, i) for i in range(5))
    engine = make_engine(n_seq_max=1, cache_bytes=2**20)
    asked_as(engine, None, other)
    asked_as(engine, None, prompt)
    n_bytes = engine.stats().cache_bytes
    for is_done in (True, False):
        slots = make_engine(n_seq_max=2, cache_bytes=0)
        host = make_engine(n_seq_max=1, cache_bytes=int(2.5 * n_bytes))
        for engine, n_between in ((slots, 0), (host, 1)):
            asked_as(engine, None, other)
            asked_as(engine, "mine", prompt)
            for tokens in more[:n_between]:
                asked_as(engine, None, tokens)
            engine.hold_conversation("mine")
            engine.release_conversation("mine", is_done=is_done)
            asked_as(engine, None, more[2])
            assert asked_as(engine, None, other) == (39 if is_done else 0)
            engine.check_integrity()


@pytest.mark.parametrize("names", [("mine", "mine"), ("mine", "same")])
def test_cells_that_are_held_twice(make_engine: MakeEngine, names: tuple[str, str]) -> None:
    """By a name, or by two: they are held until both have released them, and no longer."""
    prompt, *more = (tokens_of(40, i) for i in range(5))
    for released in ((), names[:1], names):
        engine = make_engine(n_seq_max=3, cache_bytes=0)
        for name in names:
            asked_as(engine, name, prompt)
        for name in names:
            engine.hold_conversation(name)
        for name in released:
            engine.release_conversation(name)
        asked_as(engine, "other", more[0])
        engine.hold_conversation("other")
        for tokens in more[1:]:
            asked_as(engine, None, tokens)
        is_held = bool(set(names) - set(released))
        assert asked_as(engine, None, prompt) == (39 if is_held else 0)


def test_conversations_of_files_are_remembered_as_others(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Those used last, so that loading files under ever new names takes no more memory."""
    engine = make_engine(n_seq_max=1)
    asked_as(engine, "mine", tokens_of(40, 0))
    engine.save_conversation("mine", tmp_path / "file")
    for i in range(256):
        engine.load_conversation(f"name {i}", tmp_path / "file")
    assert engine.forget_conversation("mine") == 0
    assert engine.forget_conversation("name 0") > 0


def salted(n: int, salt: str | None) -> lp.SamplingParams:
    return dataclasses.replace(greedy(n), cache_salt=salt)


class TestSalts:
    def test_requests_of_another_salt_find_nothing(self, make_engine: MakeEngine) -> None:
        """Neither in slots nor saved, whatever was computed in between."""
        engine = make_engine(n_seq_max=2)
        prompt = SHARED + tokens_of(8, 1)
        texts = []
        for salt in ("a", "b", None):
            for n_cached in (0, 47):
                out = engine.generate(prompt, salted(4, salt))
                assert out.n_cached_tokens == n_cached
                texts.append(out.token_ids)
        assert all(text == texts[0] for text in texts)
        engine.generate([tokens_of(50, 20 + i) for i in range(8)], greedy(4))
        assert engine.stats().n_saved >= 3
        assert [engine.generate(prompt, salted(4, s)).n_cached_tokens for s in ("b", "c")] == [47, 0]
        engine.check_integrity()

    def test_none_follows_one_of_another_salt(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=4)
        prompts = [SHARED + tokens_of(8, i) for i in range(4)]
        outs = engine.generate(prompts, [salted(4, s) for s in ("a", "b", "a", "b")])
        assert [out.n_cached_tokens for out in outs] == [0, 0, 40, 40]

    def test_forks_and_snapshots(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=4)
        with engine.start(SHARED, salted(20, "a")) as parent:
            parent.next()
            with parent.fork() as child:
                before = engine.stats().n_cache_hit_tokens
                assert child.next() is not None
                assert engine.stats().n_cache_hit_tokens == before + 40
            snapshot = parent.snapshot()
        with engine.restore(snapshot, salted(20, "b")) as restored:
            assert restored.next() is not None
        assert engine.stats().n_restored == 1
        assert engine.generate(SHARED, salted(4, "c")).n_cached_tokens == 0
        assert engine.generate(SHARED, salted(4, "b")).n_cached_tokens == 39
        assert engine.generate(SHARED, greedy(4)).n_cached_tokens == 0

    def test_a_cached_prefix(self, make_engine: MakeEngine) -> None:
        engine = make_engine(n_seq_max=2)
        with engine.cache_prefix(SHARED, cache_salt="a"):
            prompt = SHARED + tokens_of(8, 1)
            assert engine.generate(prompt, greedy(4)).n_cached_tokens == 0
            assert engine.generate(prompt, salted(4, "a")).n_cached_tokens == 40
        with pytest.raises(ValueError, match=r"^cache_salt has 0 characters"):
            engine.cache_prefix(SHARED, cache_salt="")

    @pytest.mark.parametrize(
        ("salt", "error", "match"),
        [
            (
                "",
                ValueError,
                r"^cache_salt has 0 characters; leave it out for the common cache, or give 1 to 1024",
            ),
            ("x" * 1025, ValueError, "^cache_salt has 1025 characters"),
            (7, TypeError, "^cache_salt must be a str or None, not int$"),
        ],
    )
    def test_wrong_salts_are_refused(self, salt: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            lp.SamplingParams(cache_salt=salt)

    @pytest.mark.parametrize("salt", ["\ud800", "\0", "é" * 100, " "], ids=ascii)
    def test_salts_that_are_no_text_separate_prefixes(self, make_engine: MakeEngine, salt: str) -> None:
        """CVE-2026-105756: one that is no text in UTF-8 ended another engine."""
        engine = make_engine(n_seq_max=2)
        params = dataclasses.replace(greedy(4), cache_salt=salt)
        n_cached = [engine.generate(SHARED, params).n_cached_tokens for _ in range(2)]
        assert n_cached[0] == 0 < n_cached[1]
        assert engine.generate(SHARED, greedy(4)).n_cached_tokens == 0

    def test_each_tenant_has_a_cache(self, make_engine: MakeEngine) -> None:
        """Whatever is called, also when tasks and threads do the work."""
        engine = make_engine(n_seq_max=2)

        async def as_tenant(name: str | None) -> list[int]:
            tenant.set(Tenant(cache=name))
            tasks = [
                engine.agenerate(SHARED, greedy(2)),
                asyncio.to_thread(engine.generate, SHARED, greedy(2)),
            ]
            return [(await task).n_cached_tokens for task in tasks]

        async def main() -> list[list[int]]:
            return [await asyncio.create_task(as_tenant(name)) for name in ("a", "b", "a", None)]

        assert asyncio.run(main()) == [[0, 39], [0, 39], [39, 39], [0, 39]]


def test_without_a_cache_nothing_is_reused(make_engine: MakeEngine) -> None:
    engine = make_engine(prefix_cache=False)
    outs = [engine.generate(SHARED, greedy(2)) for _ in range(3)]
    assert [out.n_cached_tokens for out in outs] == [0, 0, 0]
    assert engine.stats().n_prompt_tokens == 120


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"prefix_cache": 1}, TypeError, "prefix_cache"),
        ({"cache_bytes": -1}, ValueError, "cache_bytes"),
        ({"cache_bytes": 1.5}, TypeError, "cache_bytes"),
    ],
)
def test_wrong_options_are_refused(
    tiny: lp.Model, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        lp.Engine(tiny, **options)


def test_choices_follow_the_first(make_engine: MakeEngine) -> None:
    engine = make_engine(n_seq_max=2)
    out = engine.generate(SHARED, lp.SamplingParams(max_tokens=4, n=5, seed=1, ignore_eos=True))
    assert out.n_cached_tokens == 0 and engine.stats().n_prompt_tokens == 40
    assert len({choice.text for choice in out.choices}) > 1


def test_tasks_on_one_prefix(make_engine: MakeEngine) -> None:
    engine = make_engine(n_seq_max=3)

    async def main() -> list[lp.Completion]:
        prompts = [SHARED + tokens_of(4, i) for i in range(9)]
        with held(engine):
            tasks = [asyncio.create_task(engine.agenerate(p, greedy(3))) for p in prompts]
            await turn()
        tasks[0].cancel()  # the leader, at times
        return [
            out
            for out in await asyncio.gather(*tasks, return_exceptions=True)
            if isinstance(out, lp.Completion)
        ]

    outs = asyncio.run(main())
    assert len(outs) >= 8
    wait_until(lambda: engine.stats().n_active == 0)
    assert engine.stats().n_prompt_tokens <= 2 * 40 + 9 * 4


class TestExact:
    @device_unless_few
    def test_log_probabilities_are_bitwise_those_without_it(self, make_engine: MakeEngine) -> None:
        """Prompts that share prefixes of all lengths, one after another: in place, copied and loaded."""
        options = {"n_ubatch": 32, "n_batch": 64, "n_seq_max": 3}
        exact = make_engine(prefix_cache="exact", cache_bytes=300_000, **options)
        plain = make_engine(prefix_cache=False, **options)
        chance = random.Random(9)
        base = tokens_of(200, 3)
        for i in range(40):
            prompt = base[: chance.randrange(1, 200)] + tokens_of(chance.randrange(1, 40), 300 + i)
            params = greedy(6, logprobs=3)
            outs = [engine.generate(prompt, params) for engine in (exact, plain)]
            assert outs[0].token_ids == outs[1].token_ids
            assert outs[0].logprobs == outs[1].logprobs
            assert outs[0].n_cached_tokens % 32 == 0
        assert exact.stats().n_cache_hit_tokens > 1000
        exact.check_integrity()

    def test_what_was_computed_beside_others_is_not_reused(self, make_engine: MakeEngine) -> None:
        engine = make_engine(prefix_cache="exact", n_ubatch=32, n_seq_max=4)
        engine.generate([SHARED + tokens_of(9, i) for i in range(4)], greedy(2))
        assert engine.stats().n_cache_hit_tokens == 0
        engine.generate(SHARED + tokens_of(9, 5), greedy(2))
        assert engine.generate(SHARED + tokens_of(9, 6), greedy(2)).n_cached_tokens == 32

    def test_options_that_rule_exactness_out_are_refused(self, make_engine: MakeEngine) -> None:
        with pytest.raises(ValueError, match="n_batch is 100 and n_ubatch 64"):
            make_engine(prefix_cache="exact", n_batch=100, n_ubatch=64)
        with pytest.raises(ValueError, match="rounding depends on where cells are"):
            make_engine(prefix_cache="exact", kv_unified=True)
        for bad in ("on", 2, None):
            with pytest.raises(TypeError, match="prefix_cache"):
                make_engine(prefix_cache=bad)
