"""Sampling in the graph: its numbers against the definitions, and engines that use it against those that do not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.backends import FEW, ON_DEVICE, examples
from support.chains import Chain, request_chain
from support.gguf_models import BROKEN, damaged_model
from support.inside import fail_next, lib_for_tests, pipeline_of, thread_of
from support.sampler_definitions import (
    MASK,
    TooCloseError,
    Uniform,
    floats,
    fractions,
    rows,
    seed_whose_first_output_is,
    vocab_model,
)
from support.sampler_definitions import Stages as Definition

import llamapipe as lp
from llamapipe._engine.policy.core import Remove, Request
from llamapipe._engine.runtime.executor import StepExecutor
from llamapipe._engine.runtime.samplers import SamplerFactoryCache
from llamapipe.errors import DecodeError
from llamapipe.llama import Model, Vocab
from llamapipe.llama.context import Context
from llamapipe.llama.devices import device_handles
from llamapipe.llama.native_pipeline import engine_pipeline, ring_slots
from llamapipe.native.load import drain_log, last_error, native

MakeEngine = Callable[..., lp.Engine]
Row = npt.NDArray[np.float32]
SIZES = (3, 33, 64, 65, 500) if not ON_DEVICE else (33, 500)
RINGS = ("events",) if FEW else ("events", "sync") if ON_DEVICE else ("auto",)
MOST = 64  # candidates of the graph
few = settings(max_examples=examples(150), deadline=None)


class Stages(Definition):
    """What may be in the graph, as requests make it."""

    def build(self, vocab: Vocab, seed: int = 0) -> Chain:
        chain = Chain(vocab, seed).add_top_k(self.top_k)
        if self.top_p < 1:
            chain.add_top_p(self.top_p)
        if self.min_p > 0:
            chain.add_min_p(self.min_p)
        return chain.add_temperature(self.temperature)


# ---- the subgraph alone, on given rows
@pytest.fixture(scope="module")
def vocabs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Vocab]]:
    folder = tmp_path_factory.mktemp("graph")
    models = [Model(vocab_model(folder / f"{n}.gguf", n), vocab_only=True) for n in (*SIZES, 3000)]
    yield {model.n_vocab: model.vocab for model in models}
    for model in models:
        model.close()


class Results:
    """What the graph says of each row."""

    def __init__(self, numbers: npt.NDArray[np.float32], candidates: npt.NDArray[np.float32]) -> None:
        self.candidates, self.logits = np.split(candidates, 2, axis=1)
        self.tokens = numbers[:, 0].astype(np.int64).tolist()
        self.logprobs, self.log_sum_exp = numbers[:, 1], numbers[:, 2]
        self.best = numbers[:, 3].astype(np.int64).tolist()
        self.target_logits = numbers[:, 4]


def device() -> Any:
    """The device that is tested."""
    handles = device_handles()
    return next((handle for d, handle in handles if (d.type == "cpu") != ON_DEVICE), handles[0][1])


def sample(logits: Row, samplers: Sequence[Chain | None], targets: Sequence[int] = ()) -> Results:
    """The subgraph over rows, float32 ``(n, n_vocab)``."""
    module = native()
    ffi, lib = module.ffi, lib_for_tests()
    n, n_vocab = logits.shape
    out = np.zeros((n, lib.LP_GRAPH_RESULTS), np.float32)
    some = np.zeros((n, 2 * min(n_vocab, 64)), np.float32)
    handles = ffi.new("lp_sampler *[]", [ffi.NULL if s is None else s.handle for s in samplers])
    values = ffi.from_buffer("float[]", np.ascontiguousarray(logits, np.float32))
    wanted = ffi.new("int32_t[]", list(targets) or [0] * n)
    results, candidates = (ffi.from_buffer("float[]", a) for a in (out, some))
    code = lib.lp_graph_sample(device(), n_vocab, n, values, handles, wanted, results, candidates)
    assert code == 0, last_error(module)
    return Results(out, some)


stages = st.builds(
    Stages,
    top_k=st.sampled_from([1, 2, 3, 20, 40, 63, 64]),
    top_p=st.just(1.0) | fractions,
    min_p=st.just(0.0) | floats(1 / 1024, 0.875),
    temperature=st.just(1.0) | floats(1 / 16, 20.0),
)
cases = st.lists(st.tuples(stages, st.integers(0, MASK)), min_size=1, max_size=6)


@pytest.mark.device
class TestRows:
    @few
    @given(row=rows(SIZES), others=st.integers(0, 99), choices=cases)
    def test_is_the_definitions(
        self, vocabs: dict[int, Vocab], row: Row, others: int, choices: list[tuple[Stages, int]]
    ) -> None:
        """Each row with parameters of its own, as in float64 wherever rounding does not decide."""
        logits = np.stack([np.roll(row, others * i) for i in range(len(choices))])
        targets = [(others + 7 * i) % len(row) for i in range(len(choices))]
        with ExitStack() as stack:
            chains = [stack.enter_context(chain.build(vocabs[len(row)], seed)) for chain, seed in choices]
            assume(all(lib_for_tests().lp_in_graph(chain.handle) for chain in chains))
            sampled = sample(logits, chains, targets)
            drawn = [chain.sample(z) for chain, z in zip(chains, logits, strict=True)]
        exact = logits.astype(np.float64)
        log_sum_exp = np.logaddexp.reduce(exact, axis=1)
        np.testing.assert_allclose(sampled.log_sum_exp, log_sum_exp, atol=2e-5)
        np.testing.assert_array_equal(sampled.target_logits, logits[np.arange(len(choices)), targets])
        assert sampled.best == logits.argmax(axis=1).tolist()
        self.check_candidates(logits, sampled)
        logprobs = exact[np.arange(len(choices)), sampled.tokens] - log_sum_exp
        np.testing.assert_allclose(sampled.logprobs, logprobs, atol=2e-5)
        for i, (chain, seed) in enumerate(choices):
            try:
                expected = chain.draw(logits[i], Uniform(seed)())
            except TooCloseError:
                continue
            assert sampled.tokens[i] == drawn[i] == expected

    def check_candidates(self, logits: Row, sampled: Results) -> None:
        """The largest in their order, of equal ones the lower ids first; of those equal to the last any."""
        for row, ids, values in zip(logits, sampled.candidates.astype(int), sampled.logits, strict=True):
            np.testing.assert_array_equal(row[ids], values)
            assert len(set(ids.tolist())) == len(ids)
            order = np.lexsort((np.arange(len(row)), -row))[: len(ids)]
            np.testing.assert_array_equal(row[order], values)
            above = int((values > values[-1]).sum())
            np.testing.assert_array_equal(order[:above], ids[:above])

    @few
    @given(choices=cases, seed=st.integers(0, 99), levels=st.integers(1, 5))
    def test_of_equal_logits_the_lower_ids_come_first(
        self, vocabs: dict[int, Vocab], choices: list[tuple[Stages, int]], seed: int, levels: int
    ) -> None:
        """As on the CPU's route, wherever all that are equal to a candidate are candidates."""
        n = 64 if not ON_DEVICE else 33
        row = np.random.default_rng(seed).integers(0, levels, n).astype(np.float32)
        with ExitStack() as stack:
            chains = [stack.enter_context(chain.build(vocabs[n], seed)) for chain, seed in choices]
            assume(all(lib_for_tests().lp_in_graph(chain.handle) for chain in chains))
            sampled = sample(np.tile(row, (len(choices), 1)), chains)
        assert sampled.best == [int(row.argmax())] * len(choices)
        for token, (chain, seed) in zip(sampled.tokens, choices, strict=True):
            try:
                assert token == chain.draw(row, Uniform(seed)())
            except TooCloseError:
                continue

    @pytest.mark.parametrize("n", SIZES)
    def test_the_first_and_the_last_bin(self, vocabs: dict[int, Vocab], n: int) -> None:
        """The smallest and the largest uniform number, the latter 1 in float32, with weights that sums round."""
        least, most = (seed_whose_first_output_is(bits) for bits in (0, MASK))
        rng = np.random.default_rng(n)
        ramp = -np.arange(n, dtype=np.float32)
        logits = [np.zeros(n), ramp / 3, ramp * 5, *rng.normal(size=(30, n)), *rng.normal(size=(9, n)) * 9]
        chain = Stages(top_k=min(n - 1, 50), temperature=0.7)
        with ExitStack() as stack:
            first, last = (stack.enter_context(chain.build(vocabs[n], seed)) for seed in (least, most))
            block = np.array(logits, np.float32)
            low, high = (sample(block, [which] * len(block)) for which in (first, last))
        assert low.tokens == block.argmax(axis=1).tolist()
        for token, row in zip(high.tokens, block, strict=True):
            ids, p = chain.candidates(row)
            assert token in ids
            # nothing behind it has a weight that a sum in float32 would feel
            assert p[ids.index(token) + 1 :].sum() < 1e-5, (token, ids)

    def test_greedy_is_the_first_of_the_largest(self, vocabs: dict[int, Vocab]) -> None:
        block = np.random.default_rng(1).normal(size=(40, 500)).astype(np.float32)
        block[10:20, [7, 70, 400]] = 9.0
        block[20:30] -= 1e4
        block[30:40] *= 1e4
        with Chain(vocabs[500]).add_temperature(0.0) as chain:
            sampled = sample(block, [chain] * 40)
        assert sampled.tokens == sampled.best == block.argmax(axis=1).tolist()

    def test_forbidden_tokens_are_no_candidates(self, vocabs: dict[int, Vocab]) -> None:
        block = np.full((64, 500), -np.inf, np.float32)
        block[:, [3, 41, 499]] = [1.0, 0.5, 0.0]
        with ExitStack() as stack:
            chains = [stack.enter_context(Stages(top_k=64).build(vocabs[500], seed)) for seed in range(64)]
            sampled = sample(block, chains)
        assert set(sampled.tokens) == {3, 41, 499}

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_row_that_is_not_finite_says_so(self, vocabs: dict[int, Vocab], value: float) -> None:
        """Its neighbours are none the wiser, whatever it holds."""
        block = np.random.default_rng(2).normal(size=(4, 500)).astype(np.float32)
        block[1, 17] = value
        block[2] = value
        with Stages(top_k=40, top_p=0.9).build(vocabs[500], 5) as chain:
            sampled = sample(block, [chain] * 4)
            assert [sampled.tokens[i] for i in (0, 3)] == [
                sample(block[[i]], [chain]).tokens[0] for i in (0, 3)
            ]
        assert np.isfinite(sampled.log_sum_exp).tolist() == [True, False, False, True]


# What chi-square exceeds once in a thousand, by degrees of freedom (Wilson and Hilferty, 1931). Seeds are fixed.
CRITICAL = {n: n * (1 - 2 / (9 * n) + 3.09 * (2 / (9 * n)) ** 0.5) ** 3 for n in range(1, 80)}


@pytest.mark.device
class TestDistribution:
    @pytest.mark.parametrize(
        "chain",
        [
            Stages(top_k=64),
            Stages(top_k=20, temperature=1.7),
            Stages(top_k=40, top_p=0.8, temperature=1.2),
            Stages(top_k=64, min_p=0.05, temperature=0.6),
        ],
    )
    def test_tokens_are_drawn_from_the_exact_distribution(
        self, vocabs: dict[int, Vocab], chain: Stages
    ) -> None:
        """Against the exact distribution, and against the CPU's route with other numbers."""
        n_draws, size = 4000 if not ON_DEVICE else 1000, 500
        row = (2 * np.random.default_rng(5).normal(size=size)).astype(np.float32)
        with ExitStack() as stack:
            chains = [stack.enter_context(chain.build(vocabs[size], seed)) for seed in range(n_draws)]
            in_graph = Counter(sample(np.tile(row, (n_draws, 1)), chains).tokens)
        with chain.build(vocabs[size], MASK) as plain:
            on_cpu = Counter(plain.sample(row) for _ in range(n_draws))
        ids, p = chain.candidates(row)
        assert set(in_graph) <= set(ids)
        bins = np.cumsum(p * n_draws) // 8  # neighbours together, so that at least five are expected in each
        expected = np.array([p[bins == b].sum() * n_draws for b in np.unique(bins)])
        graph, cpu = (
            np.array([sum(c[ids[i]] for i in np.flatnonzero(bins == b)) for b in np.unique(bins)])
            for c in (in_graph, on_cpu)
        )
        keep = expected >= 4
        graph, cpu, expected = graph[keep], cpu[keep], expected[keep]
        freedom = len(expected) - 1
        assert freedom >= 3
        assert ((graph - expected) ** 2 / expected).sum() < CRITICAL[freedom]
        both = graph + cpu
        assert ((graph - cpu) ** 2 / np.maximum(both, 1)).sum() < CRITICAL[freedom]


class TestWhatIsInTheGraph:
    @pytest.mark.parametrize(
        ("options", "inside"),
        [
            ({}, True),
            ({"temperature": 0}, True),
            ({"temperature": 0, "top_k": 0}, True),
            ({"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}, True),
            ({"top_k": 64}, True),
            ({"top_k": 65}, False),
            ({"top_k": 0}, False),
            ({"top_k": 2**31 - 1}, False),
            ({"logprobs": 5}, True),
            ({"typical_p": 0.9}, False),
            ({"typical_p": 0.9, "temperature": 0}, True),
            ({"repeat_penalty": 1.1}, False),
            ({"presence_penalty": 0.5, "temperature": 0}, False),
            ({"logit_bias": {5: 1.0}}, False),
            ({"ignore_eos": True}, False),
        ],
    )
    def test_options_decide_whether_the_graph_samples(
        self, vocabs: dict[int, Vocab], options: dict[str, Any], inside: bool
    ) -> None:
        sampler_factory = SamplerFactoryCache(vocabs[500], 64).sampler_factory(lp.SamplingParams(**options))
        with request_chain(sampler_factory, Request([1])) as chain:
            assert lib_for_tests().lp_in_graph(chain.handle) == inside

    def test_a_small_vocabulary_needs_no_top_k(self, vocabs: dict[int, Vocab]) -> None:
        with Stages(top_k=0, top_p=0.7).build(vocabs[33], 3) as chain:
            assert lib_for_tests().lp_in_graph(chain.handle)
        with Stages(top_k=0).build(vocabs[33], 3) as chain:  # who draws from all of it need not sort it
            assert not lib_for_tests().lp_in_graph(chain.handle)

    def test_stages_in_another_order_are_not(self, vocabs: dict[int, Vocab]) -> None:
        with Chain(vocabs[500]) as chain:
            chain.add_top_k(20).add_temperature(0.5).add_top_p(0.5)
            assert not lib_for_tests().lp_in_graph(chain.handle)


# ---- steps of a model
N_TOKENS = 24 if not ON_DEVICE else 4
PARAMS = [
    lp.SamplingParams(temperature=0),
    lp.SamplingParams(seed=1),
    lp.SamplingParams(seed=2, temperature=1.3, top_k=20, top_p=0.7, min_p=0.02),
    lp.SamplingParams(seed=3, temperature=0.4, top_k=64, top_p=1.0, min_p=0.0),
    lp.SamplingParams(seed=4, temperature=3.0, top_k=5),
]
# What the graph does not sample: candidates are enough for the first ones, the last one always has its whole row.
SOME = [
    lp.SamplingParams(seed=5, repeat_penalty=1.3, presence_penalty=0.2),
    lp.SamplingParams(seed=6, logit_bias={5: -3.0, 7: 2.0}, logprobs=3),
    lp.SamplingParams(temperature=0, dry_multiplier=0.8, bad_words=("the",)),
    lp.SamplingParams(seed=7, max_tokens=N_TOKENS, min_tokens=N_TOKENS),
]
FULL = [
    lp.SamplingParams(seed=8, mirostat=1),  # a grammar would draw late at times, and so change the batches
    lp.SamplingParams(seed=9, mirostat=2),
]
PROMPTS = ["Once upon a time", "The dog", "A cat and", "Hello", "In the"]
N_SEQ = 3


def tokens(outs: Sequence[lp.Completion]) -> list[list[int]]:
    return [out.token_ids for out in outs]


def longer(*params: lp.SamplingParams, n: int = N_TOKENS) -> list[lp.SamplingParams]:
    return [replace(p, max_tokens=n) for p in params]


class TestEngine:
    @pytest.mark.device
    @pytest.mark.parametrize("ring", RINGS)
    @pytest.mark.parametrize("unified", [False, True], ids=["streams", "unified"])
    def test_says_what_the_other_route_says(
        self, make_engine: MakeEngine, demo: lp.Model, unified: bool, ring: str
    ) -> None:
        """Requests of all kinds come and go, and rounds hold those whose whole row is needed, too."""
        texts = {}
        for choice in ("off", "on"):
            engine = make_engine(demo, n_seq_max=N_SEQ, kv_unified=unified, ring=ring, graph_sampling=choice)
            params = longer(*PARAMS[:3], *FULL, *SOME, *PARAMS[3:])
            prompts = (PROMPTS * 3)[: len(params)]
            texts[choice] = tokens(engine.generate(prompts, params))
            stats = engine.stats()
            n_full = sum(map(len, texts[choice][3:-2]))
            n_all = sum(map(len, texts[choice]))
            assert stats.n_completion_tokens >= n_all
            if choice == "on":  # a token that ends a request is sampled, too
                assert n_all - n_full <= stats.n_graph_sampled <= stats.n_completion_tokens - n_full
            else:
                assert stats.n_graph_sampled == 0
        same = [a == b for a, b in zip(texts["off"], texts["on"], strict=True)]
        assert sum(same) >= len(same) - (2 if ON_DEVICE else 0)

    @pytest.mark.device
    @pytest.mark.parametrize("ring", RINGS)
    def test_only_the_results_come_to_the_host(
        self, make_engine: MakeEngine, demo: lp.Model, ring: str
    ) -> None:
        engine = make_engine(demo, n_seq_max=N_SEQ, ring=ring, graph_sampling="on")
        engine.generate(PROMPTS[:N_SEQ], longer(*PARAMS[:N_SEQ]))
        stats = engine.stats()
        assert stats.n_graph_sampled == stats.n_completion_tokens
        per_token = 4 * lib_for_tests().LP_GRAPH_RESULTS if ON_DEVICE else 0  # the CPU's are in place
        assert stats.n_copied_bytes == per_token * stats.n_completion_tokens

    @pytest.mark.device
    @pytest.mark.parametrize("ring", RINGS)
    def test_candidates_come_before_rows(self, make_engine: MakeEngine, demo: lp.Model, ring: str) -> None:
        """Changes of few tokens need no row, nor do log-probabilities; of others a request has its own rows only."""
        lib = native().lib
        result, some, row = 4 * lib.LP_GRAPH_RESULTS, 4 * 2 * 64, 4 * demo.n_vocab

        def generate(*params: lp.SamplingParams) -> tuple[list[lp.Completion], lp.EngineStats]:
            engine = make_engine(demo, n_seq_max=N_SEQ, ring=ring, graph_sampling="on")
            outs = engine.generate(
                PROMPTS[: len(params)], longer(*(replace(p, ignore_eos=True) for p in params))
            )
            return outs, engine.stats()

        noted = [replace(PARAMS[1], logprobs=n) for n in (0, 5)]
        for params in ([*SOME[:2], PARAMS[1]], SOME[2:], noted[:1], noted[1:]):
            outs, stats = generate(*params)
            n_tokens = sum(len(out.token_ids) for out in outs)
            assert stats.n_copied_bytes == (n_tokens * (result + some) if ON_DEVICE else 0)
        outs, stats = generate(FULL[1], PARAMS[1], PARAMS[2])
        n_tokens, n_rows = sum(len(out.token_ids) for out in outs), len(outs[0].token_ids)
        assert stats.n_copied_bytes == (n_tokens * (result + some) + n_rows * row if ON_DEVICE else 0)

    @pytest.mark.device
    def test_log_probabilities_are_those_of_the_row(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        params = longer(*(replace(p, logprobs=5) for p in (*PARAMS[:3], SOME[0], FULL[0])))
        completions = {}
        for choice in ("off", "on"):
            engine = make_engine(demo, n_seq_max=N_SEQ, graph_sampling=choice)
            completions[choice] = engine.generate(PROMPTS, params)
        for out, other in zip(completions["on"], completions["off"], strict=True):
            if ON_DEVICE and out.token_ids != other.token_ids:
                continue
            assert out.logprobs is not None and other.logprobs is not None
            for entry, expected in zip(out.logprobs, other.logprobs, strict=True):
                assert abs(entry.logprob - expected.logprob) < (0.02 if ON_DEVICE else 1e-5)
                assert [t for t, _ in entry.top] == [t for t, _ in expected.top] or ON_DEVICE

    @pytest.mark.skipif(ON_DEVICE, reason="there is no other thread on a device")
    def test_steps_that_overlap(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        texts = [
            tokens(
                make_engine(
                    demo, n_seq_max=N_SEQ, kv_unified=True, pipeline_depth=depth, graph_sampling=choice
                ).generate(PROMPTS, longer(*PARAMS))
            )
            for depth, choice in ((1, "off"), (1, "on"), (2, "on"))
        ]
        assert texts[0] == texts[1] == texts[2]

    @pytest.mark.device
    def test_by_itself_only_on_a_device(self, make_engine: MakeEngine, demo: lp.Model) -> None:
        engine = make_engine(demo, n_seq_max=1)
        engine.generate("The", longer(*PARAMS[:1], n=2))
        software = demo.devices[0].type == "cpu" or demo.devices[0].is_software
        assert (engine.stats().n_graph_sampled == 0) == software

    def test_another_value_is_rejected(self, demo: lp.Model) -> None:
        with pytest.raises(ValueError, match="graph_sampling"):
            lp.Engine(demo, tuning=lp.EngineTuning(graph_sampling="yes"))  # type: ignore[arg-type]

    @pytest.mark.device
    def test_where_it_cannot_be(
        self, make_engine: MakeEngine, demo: lp.Model, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make_engine(demo, n_seq_max=1, ring="off", graph_sampling="on")
        assert "cannot be sampled in the graph" in caplog.text
        engine.generate("The", longer(*PARAMS[:1], n=2))
        assert engine.stats().n_graph_sampled == 0

    @pytest.mark.skipif(ON_DEVICE, reason="this device may make a number of what is none")
    def test_a_row_without_a_finite_logit_ends_its_request_only(
        self, make_engine: MakeEngine, tmp_path: Path
    ) -> None:
        with lp.Model(damaged_model(tmp_path / "damaged.gguf")) as model:
            outcomes = {}
            for choice in ("off", "on"):
                engine = make_engine(model, n_seq_max=3, graph_sampling=choice)
                streams = [engine.stream([3, token], longer(PARAMS[1])[0]) for token in (4, BROKEN, 5)]
                said: list[Any] = []
                for stream in streams:
                    try:
                        said.append([token for delta in stream for token in delta.token_ids])
                    except DecodeError as e:
                        said.append(str(e))
                outcomes[choice] = said
                engine.close()
            assert outcomes["on"] == outcomes["off"]
            assert isinstance(outcomes["on"][1], str)


class TestCosts:
    @pytest.mark.device
    def test_requests_reserve_nothing(
        self, make_engine: MakeEngine, demo: lp.Model, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Neither graphs, as llama.cpp's log tells, nor memory, whatever requests ask for."""
        lib = lib_for_tests()
        engine = make_engine(demo, n_seq_max=N_SEQ, graph_sampling="on")
        pipeline = pipeline_of(engine)

        def n_bytes() -> tuple[int, int]:
            context = pipeline.context
            return lib.lp_context_scratch_bytes(context.handle), lib.lp_context_ring_bytes(context.handle)

        with caplog.at_level(logging.DEBUG, "llamapipe.native"):
            drain_log(native())
            n_dropped = lib.lp_log_dropped()
            assert "reserving" not in caplog.text  # all of it was said before this block
            n = 3 if ON_DEVICE else 12
            engine.generate(PROMPTS[:N_SEQ], longer(*PARAMS[:N_SEQ], n=n))
            before = thread_of(engine).ask(n_bytes)
            for i in range(2 if ON_DEVICE else 20):
                params = [
                    lp.SamplingParams(
                        seed=i,
                        temperature=0.1 + i / 10,
                        top_k=1 + 3 * i,
                        top_p=1 - i / 40,
                        max_tokens=1 + (i + j) % n,
                    )
                    for j in range(N_SEQ + 1)
                ]
                engine.generate(PROMPTS[: N_SEQ + 1], params)
            after = thread_of(engine).ask(n_bytes)
            drain_log(native())
        assert lib.lp_log_dropped() == n_dropped
        assert "reserv" not in caplog.text
        assert before == after and min(before) > 0
        assert engine.stats().n_graph_sampled == engine.stats().n_completion_tokens

    def test_llama_cpp_does_say_when_it_reserves(
        self, demo: lp.Model, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.DEBUG, "llamapipe.native"), Context(demo, n_ctx=64):
            drain_log(native())
        assert "sched_reserve: reserving" in caplog.text


class Steps:
    """An executor of three sequences, driven by hand."""

    def __init__(self, model: lp.Model, ring: str = "auto", **options: Any) -> None:
        self.model = model
        context = Context(
            model, 128, N_SEQ, n_batch=32, n_ubatch=16, n_outputs_max=N_SEQ, n_threads=1,
            n_ring_slots=ring_slots(model, ring, 2), graph_sampling=True, **options,
        )  # fmt: skip
        assert context.graph_sampling, context.graph_problem
        self.executor = StepExecutor(engine_pipeline(context, ring, None))
        self.pipeline = self.executor.pipeline

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *arguments: object) -> None:
        self.executor.close()

    def chain(self, seed: int = 0) -> Chain:
        return Stages(top_k=40, temperature=1.5).build(self.model.vocab, seed)

    def launch(self, sequences: dict[int, list[int]], samplers: Sequence[Chain]) -> int:
        entries = [(t, p, s) for s, run in sequences.items() for p, t in enumerate(run)]
        ends = np.cumsum([len(run) for run in sequences.values()]) - 1
        outputs = [int(i in ends) for i in range(len(entries))]
        self.rows = ends.tolist()
        tokens, positions, seq_ids = (list(x) for x in zip(*entries, strict=True))
        return self.executor.launch(
            tokens, positions, seq_ids, outputs, self.rows if samplers else [], samplers
        )

    def n_graph(self) -> int:
        return int(self.pipeline.counters().n_graph)


@pytest.mark.device
@pytest.mark.parametrize("ring", RINGS)
class TestSteps:
    def test_a_sampler_that_was_not_announced_gets_the_row(self, demo: lp.Model, ring: str) -> None:
        """So does one that has drawn meanwhile, or draws twice from a row."""
        with Steps(demo, ring) as steps, steps.chain(1) as a, steps.chain(1) as b, steps.chain(2) as c:
            step = steps.launch({0: [5, 6, 7]}, [a])
            first = steps.executor.sample(step, steps.rows, [a])
            assert steps.n_graph() == 1
            other = steps.executor.sample(step, steps.rows, [c])
            again = [steps.executor.sample(step, steps.rows, [a])[0] for _ in range(3)]
            assert steps.n_graph() == 1
            # one row, however often it was looked at
            row = 4 * demo.n_vocab if ON_DEVICE else 0
            result = 4 * lib_for_tests().LP_GRAPH_RESULTS if ON_DEVICE else 0
            assert steps.pipeline.counters().n_bytes == row + result
            step = steps.launch({1: [5, 6, 7]}, [])
            assert first + again == [steps.executor.sample(step, steps.rows, [b])[0] for _ in range(4)]
            assert steps.n_graph() == 1
            assert other != [] and other[0] >= 0

    def test_an_aborted_step_uses_no_number(self, demo: lp.Model, ring: str) -> None:
        with Steps(demo, ring) as steps, steps.chain(1) as a, steps.chain(1) as b:
            steps.launch({0: [5, 6]}, [a])  # and nobody samples it
            step = steps.launch({1: [5, 6]}, [a])
            assert steps.executor.sample(step, steps.rows, [a]) == steps.executor.sample(
                step, steps.rows, [b]
            )
            assert steps.n_graph() == 2

    def test_results_are_held_while_the_next_step_runs(self, demo: lp.Model, ring: str) -> None:
        """Two steps under way, each with as many outputs as it has; the ring goes round and nothing is moved."""
        with Steps(demo, ring, kv_unified=True) as steps, ExitStack() as stack:
            chains = [stack.enter_context(steps.chain(seed)) for seed in range(N_SEQ)]
            plain = [stack.enter_context(steps.chain(seed)) for seed in range(N_SEQ)]
            for i in range(3 if ON_DEVICE else 12):
                runs: list[dict[int, list[int]]] = [
                    {0: [5 + i, 6]},
                    {1: [7, 8 + i, 9], 2: [10 + i]},
                ]
                launched = []
                if steps.pipeline.depth > 1:
                    for run in runs:
                        step = steps.launch(run, [chains[s] for s in run])
                        launched.append((step, steps.rows, run))
                    said = [steps.executor.sample(s, r, [chains[x] for x in run]) for s, r, run in launched]
                else:
                    said = []
                    for run in runs:
                        step = steps.launch(run, [chains[s] for s in run])
                        said.append(steps.executor.sample(step, steps.rows, [chains[s] for s in run]))
                for run, drawn in zip(runs, said, strict=True):
                    for seq_id in run:
                        steps.executor.change_cells([Remove(seq_id, 0)])
                    step = steps.launch(run, [])
                    assert steps.executor.sample(step, steps.rows, [plain[s] for s in run]) == drawn
                    for seq_id in run:
                        steps.executor.change_cells([Remove(seq_id, 0)])
            assert steps.n_graph() == 3 * (3 if ON_DEVICE else 12)
            assert steps.pipeline.counters().n_moved == 0

    def test_a_launch_that_repeats_has_fresh_numbers(self, demo: lp.Model, ring: str) -> None:
        with Steps(demo, ring) as steps, steps.chain(1) as a, steps.chain(1) as b:
            step = steps.launch({0: [5]}, [a])
            said = steps.executor.sample(step, [0], [a])
            for _ in range(3 if ON_DEVICE else 9):
                said += steps.executor.sample_repeat(steps.executor.launch_repeat())
            assert steps.n_graph() == len(said)
            assert len(set(said)) > 1
            step = steps.launch({1: [5, *said[:-1]]}, [])
            # the same numbers: the last row drawn with the last of them
            for _ in said:
                last = steps.executor.sample(step, steps.rows, [b])
            assert last == said[-1:]

    @pytest.mark.parametrize("stage", ["launch", "rows", *(["copy"] if ON_DEVICE else [])])
    def test_a_step_that_fails_uses_no_number(self, demo: lp.Model, ring: str, stage: str) -> None:
        with Steps(demo, ring) as steps, steps.chain(1) as a, steps.chain(1) as b:
            fail_next(steps.pipeline, stage)
            with pytest.raises(DecodeError):
                steps.executor.sample(steps.launch({0: [5, 6]}, [a]), steps.rows, [a])
            for i in range(4):  # no slot of the ring is lost
                steps.executor.change_cells([Remove(0, 0)])
                said = steps.executor.sample(steps.launch({0: [5, 6 + i]}, [a]), steps.rows, [a])
                steps.executor.change_cells([Remove(0, 0)])
                assert said == steps.executor.sample(steps.launch({0: [5, 6 + i]}, []), steps.rows, [b])
            assert steps.n_graph() == 4

    def test_a_row_left_on_the_device_outlives_the_ring(self, demo: lp.Model, ring: str) -> None:
        """Where more is held than there are slots, what the graph has sampled from is moved, too."""
        with Steps(demo, ring) as steps, steps.chain(1) as a, steps.chain(1) as b:
            step = steps.launch({0: [5, 6]}, [a])
            first, rows = steps.executor.sample(step, steps.rows, [a]), steps.rows
            if steps.pipeline.depth > 1:
                steps.launch({1: [7]}, [a])
            with steps.chain(1) as c:
                assert steps.executor.sample(step, rows, [c]) == first
            assert steps.n_graph() == 2  # it would have asked for the same
            with steps.chain(9) as c:
                steps.executor.sample(step, rows, [c])
            steps.executor.change_cells([Remove(0, 0)])
            step = steps.launch({0: [5, 6]}, [])
            assert steps.executor.sample(step, steps.rows, [b]) == first

    @pytest.mark.parametrize("n_top", [0, 5, 63, 64])
    @pytest.mark.parametrize("n", [N_SEQ, N_SEQ + 2], ids=["whole", "in parts"])
    def test_scores_come_without_the_row(self, demo: lp.Model, ring: str, n: int, n_top: int) -> None:
        """Log-probabilities of up to four tokens a row, and of the most probable ones, without the row.

        Rows of a step that does not fit into a slot cannot be had later, so they come at once where candidates may not
        be enough.
        """
        text = demo.tokenize("Once upon a time there was a little dog")[: n + 1]
        places, per_row = list(range(n)), [1, 4, 5, 2, 1][:n]
        rng = np.random.default_rng(1)
        targets = {i: [text[i + 1], *rng.integers(0, demo.n_vocab, per_row[i] - 1).tolist()] for i in places}
        entries = [i for i in places for _ in targets[i]]
        wanted = [t for i in places for t in targets[i]]
        with Steps(demo, ring) as steps:
            step = steps.executor.launch(text[:-1], places, [0] * n, [1] * n, [], [], targets, n_top)
            scores = steps.executor.score(step, entries, wanted, n_top)
            if ON_DEVICE:
                row, result = 4 * demo.n_vocab, 4 * lib_for_tests().LP_GRAPH_RESULTS
                some = 4 * 2 * 64 if n_top else 0
                whole = n_top == 64 or (n_top > 0 and n > N_SEQ)
                n_bytes = n * row if whole else row + n * (result + some)  # one row has too many targets
                assert steps.pipeline.counters().n_bytes == n_bytes
        with Context(demo, 64, n_threads=1) as context:
            batch = lp.DecodeBatch(np.array(text[:-1]), np.array(places), np.zeros(n, int), np.ones(n, bool))
            context.decode(batch)
            rows = np.stack([context.logits(i) for i in places]).astype(np.float64)
        logprobs = rows - np.logaddexp.reduce(rows, axis=1)[:, None]
        for score, entry, token in zip(scores, entries, wanted, strict=True):
            near = 0.05 if ON_DEVICE else 2e-3
            assert abs(score.logprob - logprobs[entry, token]) < near
            assert len(score.top) == n_top
            if not ON_DEVICE:
                assert score.is_greedy == (rows[entry].argmax() == token)
                assert [t for t, _ in score.top] == np.argsort(-rows[entry], kind="stable")[:n_top].tolist()
            for t, p in score.top:
                assert abs(p - logprobs[entry, t]) < near

    @pytest.mark.parametrize("n_logprobs", [0, 3, 63])
    def test_log_probabilities_of_a_step_in_parts(self, demo: lp.Model, ring: str, n_logprobs: int) -> None:
        """Its rows cannot be had later, so they come with it."""
        n = N_SEQ + 2
        places = list(range(n))
        with Steps(demo, ring) as steps, ExitStack() as stack:
            chains = [stack.enter_context(steps.chain(i)).set_logprobs(n_logprobs) for i in places]
            step = steps.executor.launch([5] * n, places, [0] * n, [1] * n, places, chains)
            drawn = steps.executor.sample(step, places, chains)
            row = [
                steps.executor.score(step, [i], [t], n_logprobs)[0]
                for i, t in zip(places, drawn, strict=True)
            ]
            for chain, score in zip(chains, row, strict=True):
                logprob, top = chain.logprobs()
                assert abs(logprob - score.logprob) < 1e-4
                assert [t for t, _ in top] == [t for t, _ in score.top]

    def test_a_row_nobody_announced_is_scored_whole(self, demo: lp.Model, ring: str) -> None:
        with Steps(demo, ring) as steps:
            step = steps.executor.launch([5, 6, 7], [0, 1, 2], [0] * 3, [1] * 3, [], [], {0: [6], 2: [1]})
            alone = steps.executor.score(step, [0, 0, 1, 2], [6, 7, 7, 3], 2)
            steps.executor.change_cells([Remove(0, 0)])
            step = steps.executor.launch([5, 6, 7], [0, 1, 2], [0] * 3, [1] * 3)
            whole = steps.executor.score(step, [0, 0, 1, 2], [6, 7, 7, 3], 2)
        for score, expected in zip(alone, whole, strict=True):
            assert abs(score.logprob - expected.logprob) < 1e-5
            assert score.is_greedy == expected.is_greedy
            assert [t for t, _ in score.top] == [t for t, _ in expected.top]
