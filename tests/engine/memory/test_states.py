"""What models with recurrent layers or sliding windows reuse: prompts part anywhere, and states are saved there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.control import Worker, all_results
from support.gguf_models import hybrid_model, recurrent_model, sliding_window_model
from support.plain import PlainLoop, greedy, tokens_of

import llamapipe as lp
from llamapipe._engine.policy.core import Forget, Request, RequestSpec, SaveState
from llamapipe._engine.policy.kv import KvCache

MakeEngine = Callable[..., lp.Engine]
KINDS = {
    "window": sliding_window_model,
    "last window": sliding_window_model,
    "hybrid": hybrid_model,
    "recurrent": recurrent_model,
}
NEAR = 8  # tokens above the ideal that count as reused


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    """A small model of each kind."""
    path: Path = tmp_path_factory.mktemp("models") / "model.gguf"
    with lp.Model(KINDS[request.param](path)) as loaded:
        yield loaded


@pytest.fixture
def goes_back(request: pytest.FixtureRequest) -> bool:
    """Whether a sequence can be cut anywhere in its slot."""
    return bool(request.node.callspec.params["model"] == "window")


@pytest.fixture
def make_engine(request: pytest.FixtureRequest, make_engine: MakeEngine) -> partial[lp.Engine]:
    """Engines whose windows keep all cells, or the last ones only."""
    swa_full = request.node.callspec.params["model"] != "last window"
    return partial(make_engine, swa_full=swa_full)


def n_computed(engine: lp.Engine, work: Callable[[], object]) -> int:
    """The prompt tokens that some work computes."""
    before = engine.stats().n_prompt_tokens
    work()
    engine.check_integrity()
    return engine.stats().n_prompt_tokens - before


def test_the_same_prompt_again(make_engine: MakeEngine, model: lp.Model, plain: PlainLoop) -> None:
    engine = make_engine(model, n_seq_max=2, n_ctx=256)
    prompt = tokens_of(150, 1)
    first = engine.generate(prompt, greedy(8))
    assert first.n_cached_tokens == 0 and plain.agrees(prompt, first.token_ids)
    for _ in range(2):
        again = engine.generate(prompt, greedy(8))
        assert again.n_cached_tokens >= 150 - NEAR and again.token_ids == first.token_ids
    other = engine.generate([*prompt, *tokens_of(9, 2)], greedy(8))  # the answer is another one now
    assert other.n_cached_tokens >= 150 - NEAR and plain.agrees([*prompt, *tokens_of(9, 2)], other.token_ids)


def test_prompts_that_part_anywhere(
    make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, goes_back: bool
) -> None:
    """The second one leaves a state where it parts from the first; the third one starts there."""
    engine = make_engine(model, n_seq_max=2, n_ctx=256)
    base = tokens_of(140, 3)
    for i, n in enumerate((140, 97, 97, 97, 33, 33)):
        prompt = base[:n] + tokens_of(20, 10 + i)
        out = engine.generate(prompt, greedy(6))
        assert plain.agrees(prompt, out.token_ids)
        if goes_back or i in (2, 3, 5):
            assert out.n_cached_tokens >= (n if i else 0) - NEAR
        assert out.n_cached_tokens <= n + 1


@pytest.mark.parametrize("n_ubatch", [16, 512])
def test_long_prompts_have_states_between(
    make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, monkeypatch: pytest.MonkeyPatch, n_ubatch: int
) -> None:
    monkeypatch.setattr("llamapipe._engine.policy.kv._INTERVAL", 48)
    engine = make_engine(model, n_seq_max=2, n_ctx=256, n_ubatch=n_ubatch)
    base = tokens_of(200, 4)
    engine.generate(base, greedy(2))
    for i, n in enumerate((170, 120, 60)):
        prompt = base[:n] + tokens_of(10, 20 + i)
        out = engine.generate(prompt, greedy(6))
        assert plain.agrees(prompt, out.token_ids)
        assert out.n_cached_tokens >= n - n % 48


def test_requests_that_arrive_together(make_engine: MakeEngine, model: lp.Model, plain: PlainLoop) -> None:
    """One computes what they share, and the others wait for its state."""
    engine = make_engine(model, n_seq_max=9, n_ctx=256)
    shared = tokens_of(160, 5)
    prompts = [shared + tokens_of(10 + i, 30 + i) for i in range(8)]
    ideal = 160 + sum(10 + i for i in range(8))

    def work() -> None:
        for prompt, out in zip(prompts, engine.generate(prompts, greedy(6)), strict=True):
            assert plain.agrees(prompt, out.token_ids)

    assert n_computed(engine, work) <= ideal * 1.05
    several = lp.SamplingParams(max_tokens=6, temperature=0, n=4, ignore_eos=True)
    other = tokens_of(180, 6)
    assert n_computed(engine, lambda: engine.generate(other, several)) <= 183 * 1.1


def test_one_that_runs_is_shared(make_engine: MakeEngine, model: lp.Model, plain: PlainLoop) -> None:
    """Its state is of its end, so others start from those that it left on its way."""
    engine = make_engine(model, n_seq_max=4, n_ctx=256)
    shared = tokens_of(120, 7)
    with engine.start(shared + tokens_of(10, 8), greedy(None)) as running:
        for _ in range(20):
            next(running)
        for i in range(3):
            prompt = shared + tokens_of(12, 40 + i)
            out = engine.generate(prompt, greedy(5))
            assert plain.agrees(prompt, out.token_ids)
            if i:
                assert out.n_cached_tokens >= 120 - NEAR
        with running.fork() as child:
            assert n_computed(engine, lambda: next(child)) == 0
        whole = shared + tokens_of(10, 8)
        assert running.token_ids[: len(whole)] == whole
        assert plain.agrees(whole, running.token_ids[len(whole) :])
    engine.check_integrity()


def test_going_back_computes_from_the_last_state(
    make_engine: MakeEngine, model: lp.Model, plain: PlainLoop
) -> None:
    """To a place where a state is, and to one where none is: then from the last one before it."""
    engine = make_engine(model, n_seq_max=2, n_ctx=256)
    prompt = tokens_of(100, 9)
    with engine.start(prompt, greedy(None)) as generation:
        generated = [next(generation).id for _ in range(30)]
        assert plain.agrees(prompt, generated)
        generation.trim(100)
        assert n_computed(engine, lambda: next(generation)) <= NEAR
        generation.append(tokens_of(6, 1))
        more = [next(generation).id for _ in range(5)]
        assert plain.agrees([*prompt, generated[0], *tokens_of(6, 1)], more)


def test_slots_are_few(make_engine: MakeEngine, model: lp.Model, plain: PlainLoop) -> None:
    """Sequences lose their slots; what is saved of them goes back to its states."""
    engine = make_engine(model, n_seq_max=1, n_ctx=256)
    prompts = [tokens_of(120, 50 + i) for i in range(3)]
    for prompt in prompts:
        engine.generate(prompt, greedy(40))
    for prompt in prompts:
        out = engine.generate([*prompt, 7, 7, 7], greedy(6))
        assert plain.agrees([*prompt, 7, 7, 7], out.token_ids)
        assert out.n_cached_tokens >= 120 - NEAR
    engine.check_integrity()
    assert engine.stats().n_restored >= 3


def test_preempted_requests_continue_their_texts(
    make_engine: MakeEngine, model: lp.Model, plain: PlainLoop
) -> None:
    engine = make_engine(model, n_seq_max=2, n_ctx=256)
    prompts = [tokens_of(60 + 5 * i, 60 + i % 3) for i in range(8)]
    workers = [
        Worker(
            engine.generate,
            prompt,
            lp.SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, priority=i % 3),
        )
        for i, prompt in enumerate(prompts)
    ]
    for prompt, out in zip(prompts, all_results(workers), strict=True):
        assert plain.agrees(prompt, out.token_ids)
    engine.check_integrity()


def test_a_salt_hides_states(make_engine: MakeEngine, model: lp.Model) -> None:
    engine = make_engine(model, n_seq_max=2, n_ctx=256)
    prompt = tokens_of(100, 11)
    for salt in ("one", "two", None):
        params = lp.SamplingParams(max_tokens=2, temperature=0, cache_salt=salt)
        assert engine.generate(prompt, params).n_cached_tokens == 0
        assert engine.generate(prompt, params).n_cached_tokens >= 100 - NEAR


@pytest.mark.parametrize("cache_bytes", [0, 3_000, 60_000])
def test_states_that_do_not_fit_are_not_kept(
    make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, cache_bytes: int
) -> None:
    """States that do not fit are not kept, and nothing else is lost."""
    if cache_bytes == 3_000 and model.has_only_states:  # not a single state
        with pytest.raises(ValueError, match=r"cache_bytes is 3000; half .* give at least \d+, or 0"):
            make_engine(model, n_seq_max=2, cache_bytes=cache_bytes)
        return
    engine = make_engine(model, n_seq_max=2, n_ctx=256, cache_bytes=cache_bytes)
    for i in range(12):
        prompt = tokens_of(90, i % 4)[: 90 - i] + tokens_of(5, i)
        assert plain.agrees(prompt, engine.generate(prompt, greedy(5)).token_ids)
        assert engine.stats().cache_bytes <= cache_bytes
    engine.check_integrity()


def test_nothing_is_kept_for_a_request_without_cache(make_engine: MakeEngine, model: lp.Model) -> None:
    engine = make_engine(model, n_seq_max=2, n_ctx=256)
    params = lp.SamplingParams(max_tokens=2, temperature=0, cache=False)
    for _ in range(2):
        assert engine.generate(tokens_of(100, 12), params).n_cached_tokens == 0
    assert engine.stats().cache_bytes == 0


def test_scores_share_their_context(make_engine: MakeEngine, model: lp.Model) -> None:
    engine = make_engine(model, n_seq_max=1, n_ctx=256)
    context, endings = tokens_of(120, 13), [tokens_of(6, i) for i in range(6)]
    assert n_computed(engine, lambda: engine.score(context, endings)) <= 120 + 6 * (5 + NEAR)
    alone = make_engine(model, n_seq_max=1, n_ctx=256, prefix_cache=False)
    scores, expected = engine.score(context, endings), alone.score(context, endings)
    for score, other in zip(scores, expected, strict=True):
        assert score.logprobs == pytest.approx(other.logprobs, abs=0.01)


def test_exact_prefixes_give_equal_bits(make_engine: partial[lp.Engine], model: lp.Model) -> None:
    """States are at multiples of a ubatch, so the tokens after them are computed in the same batches: equal bits."""
    if model.n_swa and make_engine.keywords["swa_full"] is False:
        with pytest.raises(ValueError, match="swa_full=True"):
            make_engine(model, n_seq_max=1, prefix_cache="exact")
        return
    params = lp.SamplingParams(max_tokens=10, temperature=0, logprobs=3, ignore_eos=True, speculate="off")
    base = tokens_of(150, 14)
    prompts = [base[:n] + tokens_of(13, n) for n in (150, 100, 100, 40, 100)]
    alone = make_engine(model, n_seq_max=1, n_ctx=256, n_ubatch=32, prefix_cache=False)
    engine = make_engine(model, n_seq_max=2, n_ctx=256, n_ubatch=32, prefix_cache="exact")
    cached = []
    for prompt in prompts:
        out, expected = engine.generate(prompt, params), alone.generate(prompt, params)
        assert out.token_ids == expected.token_ids
        assert out.logprobs == expected.logprobs
        cached.append(out.n_cached_tokens)
    assert cached[2] == 96 and all(n % 32 == 0 for n in cached)


def test_states_of_unknown_size_stay_within_their_memory() -> None:
    """The first ones are saved together, before the cache knows what one takes."""
    cache = KvCache(4, has_states=True, host_bytes=200, min_prefix=1)
    requests = [Request(tokens_of(100, i), RequestSpec(1)) for i in range(4)]
    for request in requests:
        cache.place(request, cache.find(request))
        assert request.places == [96]
        request.n_past = 96
        cache.save_reached_state(request)
    keys = [op.key for op in cache.take_memory_ops() if isinstance(op, SaveState)]
    assert len(keys) == 4
    for key in keys:
        cache.note_saved(key, 40)
    assert cache.n_host_bytes == 80 and cache.take_memory_ops() == [Forget(keys[0]), Forget(keys[1])]
    cache.check_integrity()


def test_exact_states_replace_others(make_engine: partial[lp.Engine], model: lp.Model) -> None:
    """What was computed beside another prompt is not exact; computed alone, it is."""
    if make_engine.keywords["swa_full"] is False:
        pytest.skip("exact needs swa_full")
    engine = make_engine(model, n_seq_max=2, n_ctx=256, n_ubatch=32, prefix_cache="exact")
    prompts = [tokens_of(150, 15), tokens_of(150, 16)]
    engine.generate(prompts, greedy(2))
    for _ in range(2):
        cached = [engine.generate(prompt, greedy(2)).n_cached_tokens for prompt in prompts]
        engine.check_integrity()
    assert cached == [128, 128]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    parents=st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 120), st.integers(1, 60)), min_size=3, max_size=10
    ),
    together=st.booleans(),
)
def test_random_trees_of_prompts(
    make_engine: MakeEngine,
    model: lp.Model,
    plain: PlainLoop,
    parents: list[tuple[int, int, int]],
    together: bool,
) -> None:
    """Each begins with a part of one before it; texts are those of a fresh computation."""
    prompts: list[list[int]] = [tokens_of(40, 70)]
    for i, (parent, n, n_more) in enumerate(parents):
        prompts.append((prompts[parent % len(prompts)][:n] + tokens_of(n_more, 71 + i))[-200:])
    engine = make_engine(model, n_seq_max=3, n_ctx=256, cache_bytes=300_000)
    outs = (
        engine.generate(prompts, greedy(6)) if together else [engine.generate(p, greedy(6)) for p in prompts]
    )
    for prompt, out in zip(prompts, outs, strict=True):
        assert plain.agrees(prompt, out.token_ids)
    engine.check_integrity()
    engine.close()
