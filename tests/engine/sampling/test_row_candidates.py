"""Draws from candidates are those of the whole row: masks, biases, penalties, DRY and bad words, ties included.

The reference changes every logit of the row, with llama.cpp's own DRY sampler, sorts all of them and cuts then.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.chains import Chain
from support.inside import lib_for_tests
from support.sampler_definitions import TokenData, TokenDataArray, Uniform

import llamapipe as lp
from llamapipe.errors import DecodeError
from llamapipe.llama.sampling_options import Dry
from llamapipe.llama.vocab import Vocab
from llamapipe.native.load import LIB_DIR, native

Row = npt.NDArray[np.float32]
BREAKERS = ("\n", ":")


@dataclass
class Options:
    """What changes logits, and how many of the largest are kept."""

    top_k: int
    bias: dict[int, float] = field(default_factory=dict)
    forbidden: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    mask: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    last_n: int = 0
    repeat: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    dry: float = 0.0

    def build(self, vocab: Vocab, seed: int) -> Chain:
        chain = Chain(vocab, seed).set_bias(self.bias | dict.fromkeys(self.forbidden, -np.inf))
        if self.allowed:
            chain.set_allowed(self.allowed)
        chain.set_bad_words(self.bad_words)
        if self.ends:
            chain.set_min_tokens(self.min_tokens, self.ends)
        chain.set_penalties(self.last_n, self.repeat, self.frequency, self.presence)
        if self.dry:
            with_closing = Dry(vocab, self.dry, 1.75, 1, 64, BREAKERS)
            chain.set_dry(with_closing)
            with_closing.close()  # the chain has its own
        if self.mask:
            bits = np.zeros(-(-vocab.n_vocab // 32), np.uint32)
            for token in self.mask:
                bits[token // 32] |= np.uint32(1 << token % 32)
            chain.set_python((), Always(bits))
            assert chain.ask_guide()
        return chain.add_top_k(self.top_k)


class Always:
    """A guide that always allows the same."""

    finished = False

    def __init__(self, bits: npt.NDArray[np.uint32]) -> None:
        self.bits = bits

    def mask(self) -> npt.NDArray[np.uint32]:
        return self.bits

    def accept(self, token: int) -> None: ...

    def follow(self, tokens: Sequence[int], n_known: int = 0) -> Iterator[npt.NDArray[np.uint32]]:
        return iter(())

    def n_allowed(self, tokens: Sequence[int], limit_s: float) -> int:
        return len(tokens)

    def forced(self, n: int) -> list[int]:
        return []

    def reset(self, tokens: Sequence[int]) -> None: ...

    def close(self) -> None: ...


class Reference:
    """The whole row, with llama.cpp's DRY sampler."""

    def __init__(self, vocab: Vocab) -> None:
        self.vocab = vocab
        path, *_ = LIB_DIR.glob("libllamapipe-llama.*")
        lib = self.lib = ctypes.CDLL(str(path))
        number, integer, pointer = ctypes.c_float, ctypes.c_int32, ctypes.c_void_p
        lib.llama_sampler_init_dry.argtypes = (
            pointer,
            number,
            number,
            integer,
            integer,
            pointer,
            ctypes.c_size_t,
        )
        lib.llama_sampler_init_dry.restype = pointer
        lib.llama_sampler_apply.argtypes = (pointer, ctypes.POINTER(TokenDataArray))
        lib.llama_sampler_accept.argtypes = (pointer, integer)
        lib.llama_sampler_free.argtypes = (pointer,)

    def changed(self, options: Options, row: Row, accepted: Sequence[int], n_drawn: int) -> Row:
        """All changed logits; ends wait for `min_tokens` only where something else is allowed."""
        logits = self.changed_at(options, row, accepted, n_drawn)
        if np.isfinite(logits).any():
            return logits
        return self.changed_at(options, row, accepted, options.min_tokens)

    def changed_at(self, options: Options, row: Row, accepted: Sequence[int], n_drawn: int) -> Row:
        logits = row.copy()
        for token, bias in options.bias.items():
            logits[token] += np.float32(bias)
        for token, n in Counter(accepted[-options.last_n :] if options.last_n else ()).items():
            repeat = np.float32(options.repeat)
            logit = logits[token] * repeat if logits[token] <= 0 else logits[token] / repeat
            logits[token] = logit - (
                np.float32(n) * np.float32(options.frequency) + np.float32(options.presence)
            )
        for only in (options.allowed, options.mask):
            if only:
                keep = np.zeros(len(row), bool)
                keep[list(only)] = True
                logits[~keep] = -np.inf
        for word in options.bad_words:
            *before, last = word
            if not before or list(accepted[-len(before) :]) == before:
                logits[last] = -np.inf
        logits[list(options.forbidden)] = -np.inf
        if n_drawn < options.min_tokens:
            logits[list(options.ends)] = -np.inf
        return self.dried(options, logits, accepted) if options.dry else logits

    def dried(self, options: Options, logits: Row, accepted: Sequence[int]) -> Row:
        texts = [text.encode() for text in BREAKERS]
        address = int(native().ffi.cast("uintptr_t", self.vocab.handle))
        dry = self.lib.llama_sampler_init_dry(
            address, options.dry, 1.75, 1, 64, (ctypes.c_char_p * len(texts))(*texts), len(texts)
        )
        data = (TokenData * len(logits))(*(TokenData(i, float(x), 0.0) for i, x in enumerate(logits)))
        array = TokenDataArray(data, len(logits), -1, False)
        for token in accepted:
            self.lib.llama_sampler_accept(dry, token)
        self.lib.llama_sampler_apply(dry, array)
        self.lib.llama_sampler_free(dry)
        return np.array([array.data[i].logit for i in range(array.size)], np.float32)

    def draw(self, options: Options, logits: Row, u: float) -> int | None:
        """The token at `u`; None where two bins meet there."""
        ids = np.lexsort((np.arange(len(logits)), -logits))
        ids = ids[np.isfinite(logits[ids])]
        if options.top_k:
            ids = ids[: options.top_k]
        if not 0 < options.top_k < len(logits):
            ids = np.sort(ids)  # nothing is cut off, and nothing sorted
        weights = np.exp(logits[ids].astype(np.float64) - logits[ids].max())
        edges = np.cumsum(weights / weights.sum())
        if np.abs(edges[:-1] - u).min(initial=1) < 1e-6:
            return None
        return int(ids[np.searchsorted(edges, u, side="right")])


@pytest.fixture(scope="module")
def reference(demo: lp.Model) -> Reference:
    return Reference(demo.vocab)


N = 2400  # of the bundled model: large enough for candidates to be few of it
ids = st.integers(0, N - 1)
some_ids = st.lists(ids, max_size=12).map(tuple)
numbers = st.floats(-20, 20, width=32)
options_of = st.fixed_dictionaries(
    {"top_k": st.integers(1, 60) | st.just(0) | st.just(N) | st.just(N - 1)},
    optional={
        "bias": st.dictionaries(ids, numbers | st.just(1000.0) | st.just(-1000.0), max_size=8),
        "forbidden": some_ids,
        "allowed": st.lists(ids, min_size=1, max_size=60, unique=True).map(tuple),
        "mask": st.lists(ids, min_size=1, max_size=60, unique=True).map(tuple),
        "bad_words": st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "min_tokens": st.integers(0, 4),
        "ends": some_ids,
        "last_n": st.integers(0, 64),
        "repeat": st.floats(0.25, 4.0, width=32),
        "frequency": st.floats(-2, 2, width=32),
        "presence": st.floats(-4, 4, width=32),
        "dry": st.sampled_from([0.5, 0.8, 5.0]),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    given_options=options_of,
    seed=st.integers(0, 2**32),
    levels=st.sampled_from([0, 0, 0, 2, 30]),
    shift=st.sampled_from([0.0, -30.0, 30.0]),
    accepted=st.lists(st.integers(0, 40), max_size=40),
)
def test_candidates_are_those_of_the_whole_row(
    demo: lp.Model,
    reference: Reference,
    given_options: dict[str, Any],
    seed: int,
    levels: int,
    shift: float,
    accepted: list[int],
) -> None:
    """`levels`: so many different values, and ties everywhere; none: all differ."""
    options = Options(**given_options)
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(demo.n_vocab) * 4 + shift).astype(np.float32)
    if levels:
        row = (np.round(row * levels / 16) * (16 / levels)).astype(np.float32)
    assert demo.n_vocab >= N
    uniform = Uniform(seed)
    accepted = list(accepted)
    with options.build(demo.vocab, seed) as chain:
        chain.accept(accepted)
        for n_drawn in range(5):
            logits = reference.changed(options, row, accepted, n_drawn)
            if not np.isfinite(logits).any():
                with pytest.raises(DecodeError, match="no token is allowed"):
                    chain.sample(row)
                return
            drawn, u = chain.sample(row), uniform()
            expected = reference.draw(options, logits, u)
            assert drawn == expected or expected is None
            chain.accept_drawn([drawn])
            accepted.append(drawn)


class Known:
    """What a device sends of a row: its largest logits, of those equal to the last of them any, and some others."""

    def __init__(self, row: Row, n: int, others: Sequence[int], rng: np.random.Generator) -> None:
        last = np.sort(row)[-n]
        above = np.lexsort((np.arange(len(row)), -row))[: int((row > last).sum())]
        equal = rng.permutation(np.flatnonzero(row == last))[: n - len(above)]
        self.ids = np.concatenate([above, np.sort(equal)]).astype(np.float32)
        self.logits = row[self.ids.astype(int)]
        self.others = np.array(others, np.float32)
        self.other_logits = row[np.array(others, int)]
        self.log_sum_exp = float(np.logaddexp.reduce(row.astype(np.float64)))

    def draw(self, chain: Chain) -> int | None:
        """None where the whole row is asked for."""
        ffi, lib = native().ffi, lib_for_tests()
        token = ffi.new("int32_t *")
        ids, logits, others, other_logits = (
            ffi.from_buffer("float[]", a) for a in (self.ids, self.logits, self.others, self.other_logits)
        )
        code = lib.lp_sampler_draw_partial(
            chain.handle, len(self.ids), ids, logits, len(self.others), others, other_logits, self.log_sum_exp, token
        )  # fmt: skip
        assert code in (0, 1)
        return int(token[0]) if code == 0 else None


KNOWN = 64
few_changes = st.fixed_dictionaries(
    {"top_k": st.integers(1, 40) | st.integers(1, 5)},
    optional={
        "bias": st.dictionaries(ids, numbers, max_size=8),
        "forbidden": some_ids,
        "mask": st.integers(2, 20).map(lambda n: tuple(i for i in range(N) if i % n)),
        "bad_words": st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
        "last_n": st.integers(0, 64),
        "repeat": st.floats(0.5, 2.0, width=32),
        "frequency": st.floats(-0.5, 2, width=32),
        "presence": st.floats(-0.5, 4, width=32),
        "dry": st.sampled_from([0.5, 0.8, 5.0]),
    },
)


@settings(max_examples=300, deadline=None)
@given(
    given_options=options_of | few_changes,
    seed=st.integers(0, 2**32),
    levels=st.sampled_from([0, 2, 30]),
    scale=st.sampled_from([0.5, 4.0]),
    greedy=st.booleans(),
    accepted=st.lists(st.integers(0, N - 1), max_size=40),
    n_others=st.integers(0, 8),
    n_logprobs=st.sampled_from([-1, 0, 20, 60]),
    cut=st.tuples(st.sampled_from([0, 0, 0.5, 0.9, 0.95]), st.sampled_from([0, 0.02, 0.05, 0.5])),
)
@example({"top_k": 3}, 3, 30, 0.5, False, [], 0, 60, (0, 0))  # not all of the 60 are known
@example(
    {"top_k": 40, "mask": tuple(range(0, N, 2))}, 5, 0, 0.5, False, [], 0, -1, (0, 0.02)
)  # min_p leaves others
def test_what_a_device_sends_is_enough_or_is_not_used(
    demo: lp.Model,
    given_options: dict[str, Any],
    seed: int,
    levels: int,
    scale: float,
    greedy: bool,
    accepted: list[int],
    n_others: int,
    n_logprobs: int,
    cut: tuple[float, float],
) -> None:
    """The same token as from the whole row with the same number, or the row is asked for and nothing was used up."""
    options = Options(**given_options)
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(demo.n_vocab) * scale).astype(np.float32)
    if levels:
        row = (np.round(row * levels / 16) * (16 / levels)).astype(np.float32)
    others = [*options.bias, *rng.permutation(N)[:8].tolist()][:n_others]
    with options.build(demo.vocab, seed) as some, options.build(demo.vocab, seed) as whole:
        for chain in (some, whole):
            chain.accept([*accepted, *np.argsort(row)[-7:].tolist()])  # likely ones, too
            if n_logprobs >= 0:
                chain.set_logprobs(n_logprobs)
            if cut[0]:
                chain.add_top_p(cut[0])
            if cut[1]:
                chain.add_min_p(cut[1])
            if greedy:
                chain.add_temperature(0)
        for _ in range(4):
            try:
                expected = whole.sample(row)
            except DecodeError:
                assert Known(row, KNOWN, others, rng).draw(some) is None
                return
            token = Known(row, KNOWN, others, rng).draw(some)
            if token is None:
                token = some.sample(row)
            assert token == expected
            if n_logprobs >= 0:
                (logprob, top), (other, whole_top) = some.logprobs(), whole.logprobs()
                assert abs(logprob - other) < 1e-5
                assert [t for t, _ in top] == [t for t, _ in whole_top]
            for chain in (some, whole):
                chain.accept_drawn([expected])


def test_what_a_device_sends_is_usually_enough(demo: lp.Model) -> None:
    """Penalties, biases and masks that leave most of it need no row; what was raised from far below does."""
    row = np.random.default_rng(1).standard_normal(demo.n_vocab).astype(np.float32) * 4
    order = np.argsort(row)[::-1].tolist()
    best, worst = order[:9], order[-9:]
    cases: list[tuple[Options, Sequence[int], bool]] = [
        (Options(40), (), True),
        (Options(40, last_n=64, repeat=1.3, frequency=0.5, presence=0.5), (), True),
        (Options(40, forbidden=tuple(best)), (), True),
        (Options(40, bias=dict.fromkeys(best, -9.0)), (), True),
        (Options(40, bias=dict.fromkeys(worst[:4], 40.0)), worst[:4], True),
        (Options(40, bias={worst[0]: 40.0}), (), False),  # nobody knows what it was raised from
        (Options(40, bias={worst[0]: -9.0}), (), True),
        (Options(40, mask=tuple(i for i in range(demo.n_vocab) if i % 9)), (), True),
        (Options(1, mask=tuple(best[5:])), (), True),
        (Options(40, mask=tuple(best)), (), False),
        (Options(1, mask=tuple(worst)), (), False),
        (Options(63), (), True),
        (Options(64), (), False),
    ]
    cut = [  # where top_p or min_p cuts off all that is not known
        (Options(40, mask=tuple(best)), True),
        (Options(40, mask=tuple(worst)), False),
        (Options(40, mask=tuple(range(0, demo.n_vocab, 2))), True),
        (Options(40, bias={worst[0]: 40.0}), False),
    ]
    for options, others, enough in cases:
        with options.build(demo.vocab, 1) as chain:
            chain.accept([*best, *worst])
            token = Known(row, KNOWN, others, np.random.default_rng(1)).draw(chain)
            assert (token is not None) == enough, options
    for options, enough in cut:
        for name in ("add_top_p", "add_min_p"):
            with options.build(demo.vocab, 1) as chain:
                getattr(chain, name)(0.5 if name == "add_min_p" else 0.6)
                token = Known(row, KNOWN, (), np.random.default_rng(1)).draw(chain)
                assert (token is not None) == enough, (options, name)


@settings(max_examples=100, deadline=None)
@given(given_options=options_of, seed=st.integers(0, 2**32), levels=st.sampled_from([0, 2, 30]))
def test_greedy_is_the_largest_that_is_allowed(
    demo: lp.Model, reference: Reference, given_options: dict[str, Any], seed: int, levels: int
) -> None:
    options = Options(**given_options)
    row = (np.random.default_rng(seed).standard_normal(demo.n_vocab) * 4).astype(np.float32)
    if levels:
        row = (np.round(row * levels / 16) * (16 / levels)).astype(np.float32)
    with options.build(demo.vocab, seed).add_temperature(0) as chain:
        logits = reference.changed(options, row, [], 0)
        if np.isfinite(logits).any():
            assert chain.sample(row) == int(np.argmax(logits))
