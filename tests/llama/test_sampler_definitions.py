"""Sampler chains draw by draw against their definitions in float64, and against llama.cpp's own samplers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support.chains import Chain, request_chain
from support.sampler_definitions import (
    MASK,
    SIZES,
    Row,
    Stages,
    Theirs,
    TooCloseError,
    Uniform,
    apart,
    few,
    floats,
    rows,
    seed_whose_first_output_is,
    seeds,
    stages,
    vocab_model,
)

from llamapipe._engine.policy.core import Request, RequestSpec
from llamapipe._engine.runtime.samplers import SamplerFactoryCache, choose_seed
from llamapipe.errors import DecodeError
from llamapipe.llama import Model, Vocab
from llamapipe.params import SamplingParams


@pytest.fixture(scope="module")
def vocabs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Vocab]]:
    """A vocabulary of each size."""
    folder = tmp_path_factory.mktemp("vocabs")
    models = [Model(vocab_model(folder / f"{n}.gguf", n), vocab_only=True) for n in SIZES]
    yield {model.n_vocab: model.vocab for model in models}
    for model in models:
        model.close()


class TestGenerator:
    def test_is_splitmix64(self) -> None:
        uniform = Uniform(1234567)
        assert [uniform.bits() for _ in range(3)] == [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
        ]

    @given(bits=seeds)
    def test_can_be_turned_around(self, bits: int) -> None:
        assert Uniform(seed_whose_first_output_is(bits)).bits() == bits

    def test_equal_seeds_draw_equally_others_do_not(self, vocabs: dict[int, Vocab]) -> None:
        row = np.zeros(500, np.float32)

        def draws(seed: int) -> list[int]:
            with Chain(vocabs[500], seed) as chain:
                return [chain.sample(row) for _ in range(20)]

        assert draws(7) == draws(7)
        assert len({tuple(draws(seed)) for seed in (0, 1, 2, 3, 2**32, 2**63, MASK)}) == 7

    def test_chains_do_not_disturb_each_other(self, vocabs: dict[int, Vocab]) -> None:
        row = np.zeros(500, np.float32)
        with Chain(vocabs[500], 7) as a, Chain(vocabs[500], 8) as b:
            together = [(a.sample(row), b.sample(row)) for _ in range(20)]
        with Chain(vocabs[500], 7) as a, Chain(vocabs[500], 8) as b:
            one_by_one = [a.sample(row) for _ in range(20)], [b.sample(row) for _ in range(20)]
        assert together == list(zip(*one_by_one, strict=True))

    def test_a_row_that_fails_takes_no_number(self, vocabs: dict[int, Vocab]) -> None:
        row, bad = np.zeros(500, np.float32), np.full(500, np.nan, np.float32)
        with Chain(vocabs[500], 7) as a, Chain(vocabs[500], 7) as b:
            for _ in range(5):
                with pytest.raises(DecodeError, match="no logit of this row is finite"):
                    a.sample(bad)
                assert a.sample(row) == b.sample(row)


class TestDraw:
    @few
    @given(row=rows(), chain=stages, seed=seeds)
    @example(row=np.arange(33, dtype=np.float32), chain=Stages(top_k=33, top_p=0.9), seed=1)
    @example(row=np.arange(33, dtype=np.float32), chain=Stages(top_k=32, top_p=0.9), seed=1)
    def test_is_the_definitions(self, vocabs: dict[int, Vocab], row: Row, chain: Stages, seed: int) -> None:
        uniform = Uniform(seed)
        with chain.build(vocabs[len(row)], seed) as sampler:
            for _ in range(6):
                drawn, u = sampler.sample(row), uniform()
                try:
                    assert drawn == chain.draw(row, u)
                except TooCloseError:
                    continue

    @few
    @given(row=rows(), chain=stages, seed=seeds, data=st.data())
    def test_with_biases_and_penalties(
        self, vocabs: dict[int, Vocab], row: Row, chain: Stages, seed: int, data: st.DataObject
    ) -> None:
        tokens = st.integers(0, len(row) - 1)
        biases = floats(-20, 20) | st.just(-math.inf) | st.just(1000.0) | st.just(-1000.0)
        chain = Stages(
            **vars(chain)
            | {
                "bias": data.draw(st.dictionaries(tokens, biases, max_size=min(8, len(row) - 1))),
                "last_n": data.draw(st.integers(0, 12)),
                "repeat": data.draw(st.just(1.0) | floats(0.25, 4.0)),
                "frequency": data.draw(st.just(0.0) | floats(-2, 2)),
                "presence": data.draw(st.just(0.0) | floats(-4, 4)),
            }
        )
        accepted = data.draw(st.lists(tokens, max_size=30))
        uniform = Uniform(seed)
        with chain.build(vocabs[len(row)], seed) as sampler:
            sampler.accept(accepted)
            for _ in range(6):
                drawn, u = sampler.sample(row), uniform()
                logits = np.sort(chain.changed(row, accepted))
                try:
                    apart(np.diff(logits[np.isfinite(logits)]), 0)
                    assert drawn == chain.draw(row, u, accepted)
                except TooCloseError:
                    pass
                sampler.accept([drawn])
                accepted.append(drawn)

    @few
    @given(row=rows(), chain=stages, bad=st.lists(st.integers(0, 2**31), max_size=40), seed=seeds)
    def test_what_is_not_finite_is_never_drawn(
        self, vocabs: dict[int, Vocab], row: Row, chain: Stages, bad: list[int], seed: int
    ) -> None:
        for i, where in enumerate(bad):
            row[where % len(row)] = (np.nan, -np.inf, np.inf)[i % 3]
        uniform = Uniform(seed)
        with chain.build(vocabs[len(row)], seed) as sampler:
            if not np.isfinite(row).any():
                with pytest.raises(DecodeError):
                    sampler.sample(row)
                return
            for _ in range(4):
                drawn, u = sampler.sample(row), uniform()
                assert np.isfinite(row[drawn])
                try:
                    assert drawn == chain.draw(row, u)
                except TooCloseError:
                    continue

    @pytest.mark.parametrize("n", SIZES)
    def test_the_first_and_the_last_bin(self, vocabs: dict[int, Vocab], n: int) -> None:
        """The smallest and the largest uniform number; bins without width are never hit."""
        row = np.zeros(n, np.float32)
        least, most = (seed_whose_first_output_is(bits) for bits in (0, MASK))
        assert (Uniform(least)(), Uniform(most)()) == (0.0, 1 - 2.0**-53)
        for below in (0, 1, n // 3):
            row[:below] = row[n - below :] = -2000.0
            for seed, expected in ((least, below), (most, n - 1 - below)):
                with Chain(vocabs[n], seed) as sampler:
                    assert sampler.sample(row) == expected

    def test_frequencies_are_the_probabilities(self, vocabs: dict[int, Vocab]) -> None:
        row = (np.random.default_rng(5).standard_normal(100) * 2).astype(np.float32)
        n = 40_000
        for chain in (
            Stages(),
            Stages(temperature=2.5),
            Stages(top_k=12, temperature=0.7),
            Stages(top_k=40, top_p=0.95, min_p=0.05, temperature=0.8),
            Stages(typical=0.7),
            Stages(top_p=0.2, min_keep=5),
        ):
            with chain.build(vocabs[100], 3) as sampler:
                drawn = Counter(sampler.sample(row) for _ in range(n))
            ids, p = chain.candidates(row)
            assert drawn.keys() <= set(ids)
            expected, counts = p * n, np.array([drawn[i] for i in ids])
            rare = expected < 10  # together one bin
            expected = np.append(expected[~rare], expected[rare].sum() + 1e-9)
            counts = np.append(counts[~rare], counts[rare].sum())
            chi2 = float(((counts - expected) ** 2 / expected).sum())
            freedom = len(expected) - 1
            assert abs(chi2 - freedom) < 4 * math.sqrt(2 * freedom), chain


class TestTypical:
    @pytest.mark.parametrize("bias", [-50.0, -200.0, -1e6])
    def test_is_not_disturbed_by_what_has_no_probability(self, vocabs: dict[int, Vocab], bias: float) -> None:
        row = (np.random.default_rng(0).standard_normal(33) * 2).astype(np.float32)
        plain, biased = Stages(typical=0.5), Stages(typical=0.5, bias={4: bias, 9: bias})
        kept = plain.candidates(row)[0]
        assert not {4, 9} & set(kept)
        with biased.build(vocabs[33], 1) as sampler, plain.build(vocabs[33], 1) as alike:
            drawn = [sampler.sample(row) for _ in range(200)]
            assert drawn == [alike.sample(row) for _ in range(200)]
        assert set(drawn) == set(kept)


class TestTopK:
    @few
    @given(
        size=st.sampled_from(SIZES),
        levels=st.integers(1, 6),
        k=st.integers(1, 60),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_of_equals_the_lowest_ids_are_kept(
        self, vocabs: dict[int, Vocab], size: int, levels: int, k: int, seed: int
    ) -> None:
        assume(k < size)
        row = np.random.default_rng(seed).integers(0, levels, size).astype(np.float32)
        uniform = Uniform(seed)
        with Chain(vocabs[size], seed).add_top_k(k) as sampler:
            for _ in range(6):
                drawn, u = sampler.sample(row), uniform()
                try:
                    assert drawn == Stages(top_k=k).draw(row, u)
                except TooCloseError:
                    continue

    @pytest.mark.parametrize("n", SIZES)
    def test_rising_rows_replace_all_that_was_gathered(self, vocabs: dict[int, Vocab], n: int) -> None:
        for row in (np.arange(n, dtype=np.float32), -np.arange(n, dtype=np.float32)):
            for k in (1, 2, 31, 32, 33, n - 1, n, n + 1):
                kept = np.argsort(-row, kind="stable")[:k].tolist()
                with Chain(vocabs[n], 1).add_top_k(k).add_temperature(1e4) as sampler:
                    drawn = Counter(sampler.sample(row) for _ in range(200))
                assert drawn.keys() <= set(kept)
                assert len(drawn) > min(len(kept), 100) // 2

    def test_several_keep_the_fewest(self, vocabs: dict[int, Vocab]) -> None:
        row = np.arange(100, dtype=np.float32)
        for ks in ((5, 9), (9, 5), (0, 5), (5, 0)):
            with Chain(vocabs[100], 1) as sampler:
                for k in ks:
                    sampler.add_top_k(k)
                sampler.add_temperature(1e4)
                assert {sampler.sample(row) for _ in range(300)} == set(range(95, 100))

    def test_after_another_stage(self, vocabs: dict[int, Vocab]) -> None:
        row = np.arange(100, dtype=np.float32) / np.float32(50)
        with Chain(vocabs[100], 1).add_top_p(0.5).add_top_k(3) as sampler:
            assert {sampler.sample(row) for _ in range(300)} == {97, 98, 99}


class TestGreedy:
    @few
    @given(
        size=st.sampled_from(SIZES),
        levels=st.integers(1, 9),
        seed=st.integers(0, 2**32 - 1),
        n_bad=st.integers(0, 30),
    )
    def test_the_largest_of_equals_the_lowest_id(
        self, vocabs: dict[int, Vocab], size: int, levels: int, seed: int, n_bad: int
    ) -> None:
        rng = np.random.default_rng(seed)
        row = (rng.integers(0, levels, size) - 5).astype(np.float32)
        row[rng.integers(0, size, n_bad)] = rng.choice([np.nan, -np.inf, np.inf], n_bad)
        with Chain(vocabs[size]).add_top_k(7).add_temperature(0) as sampler:
            if np.isfinite(row).any():
                assert sampler.sample(row) == int(np.argmax(np.where(np.isfinite(row), row, -np.inf)))
            else:
                with pytest.raises(DecodeError):
                    sampler.sample(row)

    def test_with_biases_and_penalties(self, vocabs: dict[int, Vocab]) -> None:
        row = np.arange(33, dtype=np.float32) - 30
        with Chain(vocabs[33]).add_temperature(0) as sampler:
            sampler.set_bias({32: -math.inf, 3: 28.5})
            assert sampler.sample(row) == 3
            sampler.set_bias({32: -math.inf})
            assert sampler.sample(row) == 31
            sampler.set_penalties(4, presence=2.0).accept([31])
            assert sampler.sample(row) == 30
            sampler.set_bias({})
            assert sampler.sample(row) == 32


class TestPenalties:
    @pytest.mark.parametrize(
        ("penalties", "logit", "expected"),
        [
            ({"repeat": 2.0}, 3.0, 1.5),
            ({"repeat": 2.0}, -3.0, -6.0),
            ({"repeat": 0.5}, 3.0, 6.0),
            ({"repeat": 0.5}, -3.0, -1.5),
            ({"repeat": 2.0}, 0.0, 0.0),
            ({"presence": 0.75}, 3.0, 2.25),
            ({"presence": -0.75}, 3.0, 3.75),
            ({"frequency": 0.5}, 3.0, 2.0),
            ({"frequency": -0.5}, 3.0, 4.0),
            ({"repeat": 2.0, "presence": 0.25, "frequency": 0.5}, 3.0, 0.25),
        ],
    )
    def test_what_they_do_to_a_token_seen_twice(
        self, vocabs: dict[int, Vocab], penalties: dict[str, float], logit: float, expected: float
    ) -> None:
        row = np.full(33, -50, np.float32)
        row[8] = logit
        with Chain(vocabs[33]).set_penalties(64, **penalties).add_temperature(0) as sampler:
            sampler.accept([8, 8])
            for rival, winner in ((expected - 0.01, 8), (expected + 0.01, 20)):
                row[20] = rival
                assert sampler.sample(row) == winner

    @given(tokens=st.lists(st.integers(0, 32), max_size=80), last_n=st.integers(0, 40))
    def test_counts_are_those_of_the_window(
        self, vocabs: dict[int, Vocab], tokens: list[int], last_n: int
    ) -> None:
        counts = Counter(tokens[-last_n:] if last_n else [])
        row = np.arange(33, dtype=np.float32) / np.float32(100)
        expected = int(np.argmax([row[i] - counts[i] for i in range(33)]))
        with Chain(vocabs[33]).set_penalties(last_n, frequency=1.0).add_temperature(0) as sampler:
            sampler.accept(tokens[: len(tokens) // 2])
            sampler.accept(tokens[len(tokens) // 2 :])
            assert sampler.sample(row) == expected


@pytest.fixture(scope="module")
def theirs(vocabs: dict[int, Vocab]) -> Theirs:
    return Theirs()


class TestAgainstLlamaCpp:
    @few
    @given(row=rows(sizes=(33, 100, 500)), chain=stages, seed=seeds, data=st.data())
    def test_the_same_candidates_and_probabilities(
        self,
        vocabs: dict[int, Vocab],
        theirs: Theirs,
        row: Row,
        chain: Stages,
        seed: int,
        data: st.DataObject,
    ) -> None:
        tokens = st.integers(0, len(row) - 1)
        chain = Stages(
            **vars(chain)
            | {
                "bias": data.draw(st.dictionaries(tokens, floats(-9, 9), max_size=8)),
                "last_n": data.draw(st.integers(1, 12)),
                "repeat": data.draw(st.just(1.0) | floats(0.5, 2.0)),
                "frequency": data.draw(st.just(0.0) | floats(-1, 1)),
                "presence": data.draw(st.just(0.0) | floats(-2, 2)),
            }
        )
        accepted = data.draw(st.lists(tokens, max_size=30))
        assume(len(set(chain.changed(row, accepted).astype(np.float32).tolist())) == len(row))
        left = theirs.candidates(chain, row, accepted)
        logits = np.array([logit for _, logit in left], np.float64)
        is_sorted = 0 < chain.top_k < len(row) or chain.top_p < 1 or chain.typical < 1
        if chain.min_p > 0 and not is_sorted:
            # Too few are probable enough, so the most probable ones were looked for.
            below = (logits - logits.max()) * chain.temperature - math.log(chain.min_p)
            assume(np.abs(below).min() > 1e-4)
            is_sorted = bool(np.count_nonzero(below > 0) < chain.min_keep)
        if not is_sorted:
            left.sort()  # nothing had to be sorted, and we did not
            logits = np.array([logit for _, logit in left], np.float64)
        p = np.exp(logits - logits.max())
        edges = np.cumsum(p / p.sum())
        uniform = Uniform(seed)
        with chain.build(vocabs[len(row)], seed) as sampler:
            sampler.accept(accepted)
            for _ in range(6):
                drawn, u = sampler.sample(row), uniform()
                assert drawn in [token for token, _ in left]
                if np.abs(edges[:-1] - u).min(initial=1) > 1e-9:
                    assert drawn == left[int(np.searchsorted(edges, u, side="right"))][0]


class TestFactory:
    """From SamplingParams to a chain."""

    def request(self, tokens: list[int], seed: int = 5) -> Request:
        return Request(tokens, RequestSpec(seed=seed))

    @pytest.mark.parametrize(
        ("params", "chain"),
        [
            (SamplingParams(), Stages(top_k=40, top_p=0.95, min_p=0.05, temperature=0.8)),
            (
                SamplingParams(top_k=0, top_p=1, min_p=0, temperature=1.5, typical_p=0.6),
                Stages(typical=0.6, temperature=1.5),
            ),
            (
                SamplingParams(top_k=30, top_p=1, min_p=0, temperature=1, logit_bias={50: 9, 51: -math.inf}),
                Stages(top_k=30, bias={50: 9.0, 51: -math.inf}),
            ),
            (
                SamplingParams(top_k=30, top_p=1, min_p=0, repeat_penalty=1.5, repeat_last_n=3),
                Stages(top_k=30, temperature=0.8, last_n=3, repeat=1.5),
            ),
            (
                SamplingParams(
                    top_k=0, top_p=0.9, min_p=0, presence_penalty=1, frequency_penalty=-0.5, repeat_last_n=-1
                ),
                Stages(top_p=0.9, temperature=0.8, last_n=64, presence=1, frequency=-0.5),
            ),
            (
                SamplingParams(top_k=5, ignore_eos=True, logit_bias={2: 1000}, top_p=1, min_p=0),
                Stages(top_k=5, bias={2: -math.inf}, temperature=0.8),
            ),
            (
                SamplingParams(top_k=30, top_p=0.1, min_p=0.5, min_keep=9),
                Stages(top_k=30, top_p=0.1, min_p=0.5, min_keep=9, temperature=0.8),
            ),
        ],
    )
    def test_every_option_reaches_its_stage(
        self, vocabs: dict[int, Vocab], params: SamplingParams, chain: Stages
    ) -> None:
        row = np.random.default_rng(3).normal(0, 2, 100).astype(np.float32)
        tokens = [50, 60, 60, 70, 2, 60]
        sampler_factory = SamplerFactoryCache(vocabs[100], 64).sampler_factory(params)
        uniform = Uniform(5)
        n_compared = 0
        with request_chain(sampler_factory, self.request(tokens)) as sampler:
            for _ in range(100):
                drawn, u = sampler.sample(row), uniform()
                try:
                    assert drawn == chain.draw(row, u, tokens)
                except TooCloseError:
                    continue
                n_compared += 1
        assert n_compared > 50

    def test_temperature_nought_is_greedy_after_bias_and_penalties(self, vocabs: dict[int, Vocab]) -> None:
        row = np.arange(100, dtype=np.float32)
        params = SamplingParams(temperature=0, presence_penalty=50, logit_bias={98: -math.inf})
        sampler_factory = SamplerFactoryCache(vocabs[100], 64).sampler_factory(params)
        with request_chain(sampler_factory, self.request([99])) as sampler:
            assert sampler.sample(row) == 97

    def test_penalties_look_at_what_params_say(self, vocabs: dict[int, Vocab]) -> None:
        tokens = list(range(10))
        for n, expected in ((0, []), (3, [7, 8, 9]), (10, tokens), (64, tokens), (-1, tokens)):
            params = SamplingParams(repeat_penalty=1.5, repeat_last_n=n)
            assert SamplerFactoryCache(vocabs[100], 64).sampler_factory(params).history(tokens) == expected

    def test_a_seed_is_drawn_if_none_is_asked_for(self) -> None:
        assert choose_seed(SamplingParams(seed=11)) == 11
        assert choose_seed(SamplingParams(seed=0)) == 0
        drawn = {choose_seed(SamplingParams()) for _ in range(20)}
        assert len(drawn) == 20
        assert all(0 <= seed <= MASK for seed in drawn)
