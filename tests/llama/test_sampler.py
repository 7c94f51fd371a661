"""SamplerChain alone, held against a reference in numpy."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.bad_values import INF, INTEGERS, NAN, TOKENS, Bad, names
from support.chains import Chain

import llamapipe as lp
from llamapipe.errors import DecodeError, EngineClosedError
from llamapipe.llama.sampling_options import Dry

pytestmark = pytest.mark.native

Row = npt.NDArray[np.float32]


@pytest.fixture
def make_chain(tiny: lp.Model) -> Iterator[Callable[..., Chain]]:
    chains: list[Chain] = []

    def make(seed: int = 0) -> Chain:
        chains.append(Chain(tiny.vocab, seed))
        return chains[-1]

    yield make
    for chain in chains:
        chain.close()


@pytest.fixture
def chain(make_chain: Callable[..., Chain]) -> Chain:
    return make_chain(7)


@pytest.fixture
def row(tiny: lp.Model) -> Row:
    """Distinct logits of a spread as models have it."""
    return np.random.default_rng(3).normal(0, 3, tiny.n_vocab).astype(np.float32)


def uniforms(seed: int) -> Iterator[float]:
    """splitmix64, from its publication."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield ((z ^ (z >> 31)) >> 11) * 2.0**-53


def pick(ids: npt.NDArray[np.int64], logits: Row, u: float) -> int:
    """The id in whose bin ``u`` falls, the bins as wide as probable, in the order given."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    edges = np.cumsum(weights)
    return int(ids[np.searchsorted(edges, u * edges[-1], side="right")])


def softmax(logits: Row) -> npt.NDArray[np.float64]:
    weights: npt.NDArray[np.float64] = np.exp(logits.astype(np.float64) - logits.max())
    weights /= weights.sum()
    return weights


# ---- the draw
def test_a_seed_gives_the_tokens_of_its_uniform_numbers(make_chain: Callable[..., Chain], row: Row) -> None:
    for seed in (0, 1, 12345678901234567890):
        chain = make_chain(seed).add_top_k(40).add_temperature(0.7)
        ids = np.argsort(-row, kind="stable")[:40]
        numbers = uniforms(seed)
        expected = [pick(ids, row[ids] / np.float32(0.7), next(numbers)) for _ in range(200)]
        assert [chain.sample(row) for _ in range(200)] == expected
        assert len(set(expected)) > 3


def test_without_stages_every_token_is_a_candidate(make_chain: Callable[..., Chain], row: Row) -> None:
    flat = row * np.float32(0.1)
    numbers = uniforms(5)
    expected = [pick(np.arange(len(flat)), flat, next(numbers)) for _ in range(300)]
    chain = make_chain(5)
    assert [chain.sample(flat) for _ in range(300)] == expected
    assert len(set(expected)) > 150


def test_greedy_takes_the_largest_and_on_ties_the_lowest_id(chain: Chain, row: Row) -> None:
    chain.add_temperature(0)
    assert chain.sample(row) == int(row.argmax())
    for first, second in ((3, 500), (31, 32), (0, 511), (64, 65)):
        tied = row.copy()
        tied[[second, first]] = 50
        assert chain.sample(tied) == first
    # The vector scan looks at blocks; the largest may be anywhere in one.
    for i in range(len(row)):
        single = np.zeros_like(row)
        single[i] = 1
        assert chain.sample(single) == i


@pytest.mark.parametrize("temperature", [1e-7, 1e-30, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy_not_infinite(chain: Chain, row: Row, temperature: float) -> None:
    chain.add_temperature(temperature)
    assert {chain.sample(row) for _ in range(20)} == {int(row.argmax())}


def test_top_k_ties_keep_the_lowest_ids(chain: Chain, row: Row) -> None:
    flat = np.zeros_like(row)
    chain.add_top_k(3)
    assert {chain.sample(flat) for _ in range(100)} == {0, 1, 2}


@pytest.mark.parametrize("k", [1, 2, 17, 511, 512, 513, 2**31 - 1])
def test_top_k_of_any_size(chain: Chain, row: Row, k: int) -> None:
    chain.add_top_k(k)
    best = set(np.argsort(-row)[:k].tolist())
    assert {chain.sample(row * np.float32(0.01)) for _ in range(50)} <= best


def test_top_p_keeps_the_smallest_set_of_that_mass(chain: Chain, row: Row) -> None:
    chain.add_top_p(0.6)
    order = np.argsort(-row)
    n_kept = int(np.searchsorted(np.cumsum(softmax(row)[order]), 0.6)) + 1
    drawn = {chain.sample(row) for _ in range(600)}
    assert drawn <= set(order[:n_kept].tolist())
    assert set(order[: n_kept // 2].tolist()) <= drawn


def test_min_p_keeps_what_is_probable_beside_the_first(chain: Chain, row: Row) -> None:
    chain.add_min_p(0.2)
    kept = set(np.flatnonzero(softmax(row) >= 0.2 * softmax(row).max()).tolist())
    assert {chain.sample(row) for _ in range(600)} == kept


def test_typical_leaves_the_too_probable_out(chain: Chain) -> None:
    """One token of probability 0.4 among hundreds of 0.001: typical are those near the mean information."""
    row = np.zeros(512, np.float32)
    row[9] = math.log(0.4 / 0.6 * 511)
    chain.add_typical(0.5)
    assert 9 not in {chain.sample(row) for _ in range(100)}


# ---- changes of logits
def test_biases_and_penalties_as_documented(tiny: lp.Model, row: Row) -> None:
    last_n, repeat, frequency, presence = 16, 1.3, 0.4, 0.7
    bias = {5: 2.5, 100: -1.0, int(row.argmax()): -INF}
    numbers = uniforms(11)
    accepted: list[int] = []
    with Chain(tiny.vocab, 11) as chain:
        chain.set_bias(bias).set_penalties(last_n, repeat, frequency, presence).add_temperature(0.5)
        for _ in range(300):
            changed = row.copy()
            for token, value in bias.items():
                changed[token] += np.float32(value)
            for token in set(accepted[-last_n:]):
                logit = changed[token]
                logit = logit * np.float32(repeat) if logit <= 0 else logit / np.float32(repeat)
                count = accepted[-last_n:].count(token)
                changed[token] = logit - (np.float32(count) * np.float32(frequency) + np.float32(presence))
            ids = np.flatnonzero(np.isfinite(changed))
            expected = pick(ids, changed[ids] / np.float32(0.5), next(numbers))
            assert chain.sample(row) == expected
            accepted.append(expected)
            chain.accept([expected])
    assert len(set(accepted)) < len(accepted)


def test_penalties_forget_what_left_the_window(chain: Chain, row: Row) -> None:
    best, second = np.argsort(-row)[:2].tolist()
    chain.set_penalties(2, presence=1000).add_temperature(0)
    chain.accept([best])
    assert chain.sample(row) == second
    chain.accept([0, 1])
    assert chain.sample(row) == best


def test_a_shortened_window_forgets_at_the_next_token(chain: Chain, row: Row) -> None:
    best = int(row.argmax())
    chain.set_penalties(64, presence=1000).add_temperature(0)
    chain.accept([best, 0, 1, 2, 3])
    assert chain.sample(row) != best
    chain.set_penalties(2, presence=1000)
    chain.accept([4])
    assert chain.sample(row) == best


def test_reset_forgets_accepted_tokens_and_goes_on_drawing(
    make_chain: Callable[..., Chain], row: Row
) -> None:
    chain = make_chain(3).set_penalties(8, presence=1000)
    numbers = uniforms(3)
    ids = np.arange(len(row))
    chain.accept(np.argsort(-row)[:8])
    chain.reset()
    for _ in range(20):
        assert chain.sample(row) == pick(ids, row, next(numbers))


# ---- rows that no model should give
def test_only_finite_logits_are_drawn(chain: Chain, row: Row) -> None:
    strange = np.full_like(row, NAN)
    strange[::2] = -INF
    strange[[7, 300]] = 0.0, 1.0
    assert {chain.sample(strange) for _ in range(50)} == {7, 300}


@pytest.mark.parametrize("value", [NAN, -INF, INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_is_an_error(
    chain: Chain, row: Row, value: float, temperature: float
) -> None:
    chain.add_temperature(temperature)
    with pytest.raises(DecodeError, match="finite"):
        chain.sample(np.full_like(row, value))
    assert chain.sample(row) >= 0


def test_forbidding_every_token_is_an_error(chain: Chain, row: Row) -> None:
    chain.set_bias(dict.fromkeys(range(len(row)), -INF))
    with pytest.raises(DecodeError, match="no token is allowed"):
        chain.sample(row)
    chain.set_bias({})
    assert chain.sample(row) >= 0


@pytest.mark.parametrize("kind", [np.float64, np.float16, np.int64, list])
def test_rows_of_other_numbers_are_converted(chain: Chain, row: Row, kind: Any) -> None:
    chain.add_temperature(0)
    whole = np.round(row * 100)
    values = whole.tolist() if kind is list else whole.astype(kind)
    assert chain.sample(values) == int(whole.argmax())
    assert chain.sample(np.stack([whole, whole], axis=1)[:, 0]) == int(whole.argmax())  # not contiguous


# ---- wrong arguments
@pytest.mark.parametrize("bad", [*INTEGERS, Bad(-1, ValueError)], ids=names)
def test_wrong_seeds_are_refused(tiny: lp.Model, bad: Bad) -> None:
    with pytest.raises(bad.error, match=r"^seed (is|must be)"):
        Chain(tiny.vocab, bad.value)


@pytest.mark.parametrize("bad", [*TOKENS, Bad("1", TypeError), Bad(b"1", TypeError)], ids=names)
def test_bad_accepted_tokens(chain: Chain, bad: Bad) -> None:
    with pytest.raises(bad.error, match=r"^tokens (contains|must be)"):
        chain.accept(bad.value)


@pytest.mark.parametrize(
    ("logits", "error"),
    [
        (np.zeros(511, np.float32), ValueError),
        (np.zeros((1, 512), np.float32), ValueError),
        (np.float32(0), ValueError),
        ([], ValueError),
        (None, TypeError),
        ("abc", TypeError),
        (np.zeros(512, complex), TypeError),
        (np.zeros(512, bool), TypeError),
        (np.zeros(512, object), TypeError),
        (["a"] * 512, TypeError),
    ],
)
def test_wrong_rows_are_refused(chain: Chain, row: Row, logits: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^logits (must be|have)"):
        chain.sample(logits)
    assert chain.sample(row) == next(chain_of_seed_7(row))


@pytest.mark.parametrize("vocab", [None, "vocab", 5])
def test_a_chain_needs_a_vocabulary(vocab: Any, tiny: lp.Model) -> None:
    with pytest.raises(TypeError, match=r"^vocab must be a Vocab \(model\.vocab\), not "):
        Chain(vocab)
    with pytest.raises(TypeError, match=r"not Model$"):
        Chain(tiny)  # type: ignore[arg-type]


def chain_of_seed_7(row: Row) -> Iterator[int]:
    """What the fixture's chain draws while nothing was added to it."""
    for u in uniforms(7):
        yield pick(np.arange(len(row)), row, u)


# ---- lifetime
def test_use_after_close(chain: Chain, row: Row) -> None:
    chain.close()
    chain.close()
    assert "closed" in repr(chain)
    uses: list[Callable[[], object]] = [
        lambda: chain.sample(row),
        lambda: chain.accept([1]),
        chain.reset,
    ]
    for use in uses:
        with pytest.raises(EngineClosedError, match="the sampler chain is closed; create another"):
            use()


def test_a_chain_outlives_its_model(tiny: lp.Model, row: Row) -> None:
    """It holds nothing of the model's memory but the size of the vocabulary."""
    with lp.Model(tiny.path) as model:
        chain = Chain(model.vocab, 7)
        vocab = model.vocab
    with chain:
        assert chain.sample(row) == next(chain_of_seed_7(row))
    with pytest.raises(EngineClosedError, match="the vocabulary's model is closed"):
        Chain(vocab)


def test_dropped_without_close_it_warns(tiny: lp.Model) -> None:
    chain = Chain(tiny.vocab)
    with pytest.warns(ResourceWarning, match="SamplerChain seed=0> was never closed"):
        del chain


def test_a_failed_constructor_does_not_warn(tiny: lp.Model) -> None:
    with pytest.raises(ValueError, match="seed"):
        Chain(tiny.vocab, -1)


class TestWhatReviewsFound:
    """Each of these was wrong once."""

    def test_a_logit_just_within_the_histogram_of_a_nucleus(self, tiny: lp.Model) -> None:
        """Its distance to the largest rounds up to the histogram's depth."""
        row = np.full(tiny.n_vocab, np.nextafter(np.float32(-12), np.float32(0)), np.float32)
        row[0] = 20
        with Chain(tiny.vocab, 1).add_top_p(0.999) as chain:
            assert {chain.sample(row) for _ in range(50)} == {0}

    def test_any_top_k(self, tiny: lp.Model) -> None:
        row = np.random.default_rng(1).standard_normal(tiny.n_vocab).astype(np.float32)
        drawn = []
        for k in (2**31 - 1, 2**31 - 129, tiny.n_vocab):
            with Chain(tiny.vocab, 3).add_top_k(k).add_top_p(0.9) as chain:
                drawn.append([chain.sample(row) for _ in range(20)])
        assert drawn[0] == drawn[1] == drawn[2]
        assert len(set(drawn[0])) > 5

    def test_biases_and_bad_words_in_any_order(self, tiny: lp.Model) -> None:
        row = np.zeros(tiny.n_vocab, np.float32)
        row[[5, 6, 7]] = 3, 2, 1
        with Chain(tiny.vocab).add_temperature(0) as chain:
            chain.set_bad_words([[5]]).set_bias({6: -math.inf})
            assert chain.sample(row) == 7

    def test_logprobs_nobody_asked_for(self, tiny: lp.Model) -> None:
        row = np.random.default_rng(1).standard_normal(tiny.n_vocab).astype(np.float32)
        with Chain(tiny.vocab).add_temperature(0) as chain:
            chain.sample(row)
            with pytest.raises(ValueError, match="were not enabled"):
                chain.logprobs()
            chain.set_logprobs(tiny.n_vocab).sample(row)
            chain.set_logprobs(1)
            assert chain.logprobs()[1] == []

    def test_a_grammar_says_no_and_stays_so(self, tiny: lp.Model) -> None:
        row = np.zeros(tiny.n_vocab, np.float32)
        eos = tiny.eos
        assert eos is not None
        for token in (eos, tiny.tokenize("z", add_special=False)[-1]):
            with Chain(tiny.vocab).set_grammar('root ::= "a"') as chain:
                for accept in (chain.accept_grammar, chain.accept_drawn):
                    with pytest.raises(ValueError, match="the grammar does not go on with token"):
                        accept([token])
                    with pytest.raises(DecodeError, match="no token is allowed"):
                        chain.sample(row)
                    chain.reset()
                    assert tiny.piece(chain.sample(row)) == b"a"

    @pytest.mark.parametrize("text", ["", " ", "root ::= [a]\0"])
    def test_no_grammar_at_all(self, tiny: lp.Model, text: str) -> None:
        with Chain(tiny.vocab) as chain, pytest.raises(ValueError, match="empty or has a NUL"):
            chain.set_grammar(text)

    def test_options_of_dry_are_freed(self, tiny: lp.Model) -> None:
        dry = Dry(tiny.vocab, 1, 1.75, 1, 64, ["x"])
        finalizer = dry._free
        with Chain(tiny.vocab).set_dry(dry) as chain:
            del dry
            gc.collect()
            assert not finalizer.alive
            chain.sample(np.zeros(tiny.n_vocab, np.float32))
        closed = Dry(tiny.vocab, 1, 1.75, 1, 64, [])
        closed.close()
        with Chain(tiny.vocab) as chain, pytest.raises(EngineClosedError):
            chain.set_dry(closed)

    def test_penalties_are_forgotten_when_taken_away(self, tiny: lp.Model) -> None:
        row = np.zeros(tiny.n_vocab, np.float32)
        row[[5, 6]] = 3, 2
        with Chain(tiny.vocab).set_penalties(64, presence=5).add_temperature(0) as chain:
            chain.accept([5])
            assert chain.sample(row) == 6
            assert chain.set_penalties(0, presence=5).sample(row) == 5
