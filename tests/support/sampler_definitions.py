"""The definitions of the samplers in float64, and llama.cpp's own samplers through ctypes."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st

from llamapipe.llama import Vocab
from llamapipe.native.load import LIB_DIR
from support.chains import Chain
from support.gguf_models import add_words, finish

Row = npt.NDArray[np.float32]
# Around the 32 and 64 lanes of the scans; below and above 128 and 1024 candidates, where llama.cpp sorts differently.
SIZES = (3, 31, 32, 33, 63, 64, 65, 100, 500, 1500)
MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


# ---- the definitions
class Uniform:
    """The generator of a chain: splitmix64, 53 bits of each output."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def bits(self) -> int:
        self.state = (self.state + GAMMA) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def __call__(self) -> float:
        return (self.bits() >> 11) * 2.0**-53


def seed_whose_first_output_is(bits: int) -> int:
    """The generator turned around."""

    def unshift(z: int, n: int) -> int:
        out = z
        for _ in range(64 // n):
            out = z ^ (out >> n)
        return out

    z = unshift(bits, 31)
    z = unshift((z * pow(0x94D049BB133111EB, -1, 2**64)) & MASK, 27)
    z = unshift((z * pow(0xBF58476D1CE4E5B9, -1, 2**64)) & MASK, 30)
    return (z - GAMMA) & MASK


class TooCloseError(Exception):
    """Rounding decides: the definition in float64 says nothing about float32."""


def apart(values: npt.NDArray[Any], border: float, margin: float = 1e-4) -> None:
    if len(values) and np.abs(values - border).min() < margin:
        raise TooCloseError


@dataclass(frozen=True)
class Stages:
    """A chain as it is built, and what it keeps by definition."""

    top_k: int = 0
    typical: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    min_keep: int = 0
    temperature: float = 1.0
    bias: dict[int, float] = field(default_factory=dict)
    last_n: int = 0
    repeat: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    def build(self, vocab: Vocab, seed: int = 0) -> Chain:
        chain = Chain(vocab, seed)
        if self.bias:
            chain.set_bias(self.bias)
        chain.set_penalties(self.last_n, self.repeat, self.frequency, self.presence)
        # What changes nothing is left out, as for requests: what comes first decides how the row is looked through.
        chain.set_min_keep(self.min_keep)
        chain.add_top_k(self.top_k)
        if self.typical < 1:
            chain.add_typical(self.typical)
        if self.top_p < 1:
            chain.add_top_p(self.top_p)
        if self.min_p > 0:
            chain.add_min_p(self.min_p)
        return chain.add_temperature(self.temperature)

    def changed(self, row: Row, accepted: Sequence[int] = ()) -> npt.NDArray[np.float64]:
        """The row with biases and penalties."""
        logits = row.astype(np.float64)
        for token, bias in self.bias.items():
            logits[token] += bias
        for token, n in Counter(accepted[-self.last_n :] if self.last_n else ()).items():
            logit = logits[token] * self.repeat if logits[token] <= 0 else logits[token] / self.repeat
            logits[token] = logit - n * self.frequency - self.presence
        return logits

    def candidates(self, row: Row, accepted: Sequence[int] = ()) -> tuple[list[int], npt.NDArray[np.float64]]:
        """What is kept, in the order in which the draw goes through it, and the probabilities."""
        logits = self.changed(row, accepted)
        ids = np.flatnonzero(np.isfinite(logits))
        logits = logits[ids]

        def keep(which: npt.NDArray[Any]) -> None:
            nonlocal ids, logits
            ids, logits = ids[which], logits[which]

        def probabilities() -> npt.NDArray[np.float64]:
            weights = np.exp(logits - logits.max())
            return np.asarray(weights / weights.sum())

        def sort() -> None:
            keep(np.lexsort((ids, -logits)))

        if 0 < self.top_k < len(row):
            sort()
            keep(np.arange(len(ids)) < self.top_k)
        if self.typical < 1:
            keep(logits > logits.max() - 70)  # the others have no probability
            sort()
            p = probabilities()
            score = np.abs(-np.log(p) + (p * np.log(p)).sum())
            order = np.argsort(score, kind="stable")
            keep(order)
            self.cut(probabilities(), self.typical, keep)
            apart(np.diff(score[order][: len(ids) + 1]), 0, 1e-5)  # in another order others would be kept
        if self.top_p < 1:
            sort()
            self.cut(probabilities(), self.top_p, keep)
        if self.min_p > 0:
            border = logits.max() + math.log(self.min_p)
            apart(logits[logits < logits.max()], border)
            if np.count_nonzero(logits >= border) < self.min_keep:
                sort()
                keep(np.arange(len(ids)) < self.min_keep)
            else:
                keep(logits >= border)
        logits = logits / self.temperature
        return ids.tolist(), probabilities()

    def cut(self, p: npt.NDArray[np.float64], mass: float, keep: Any) -> None:
        """Keeps the first candidates, as many as are needed for `mass`, and at least `min_keep`."""
        so_far = np.cumsum(p)
        apart(so_far[:-1], mass)
        keep(np.arange(len(p)) < max(1 + int(np.count_nonzero(so_far[:-1] < mass)), self.min_keep))

    def draw(self, row: Row, u: float, accepted: Sequence[int] = ()) -> int:
        """The candidate in whose bin `u` lies."""
        ids, p = self.candidates(row, accepted)
        edges = np.cumsum(p)
        apart(edges[:-1], u, 1e-6)
        return ids[min(int(np.searchsorted(edges, u, side="right")), len(ids) - 1)]


# ---- what is given
def vocab_model(path: Path, n: int) -> Path:
    """A vocabulary of `n` tokens without weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    add_words(writer, n)
    writer.add_eos_token_id(2)
    finish(writer)
    return path


@st.composite
def rows(draw: st.DrawFn, sizes: Sequence[int] = SIZES, spread: float = 12.0) -> Row:
    """Logits without equals, as models give them: a few high, many low."""
    n = draw(st.sampled_from(sizes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    steps = np.sort(rng.gamma(draw(st.sampled_from([0.3, 1.0, 4.0])), size=n)) + np.arange(n) * 1e-3
    steps *= spread / steps[-1]
    return rng.permutation(steps - draw(st.floats(0, spread))).astype(np.float32)


# llama.cpp's parameters are floats: what rounds to 1 there would be less here.
floats = partial(st.floats, width=32)
fractions = floats(1 / 64, 1.0)
stages = st.builds(
    Stages,
    top_k=st.sampled_from([0, 1, 2, 3, 20, 40, 200, 10**9]),
    typical=st.just(1.0) | fractions,
    top_p=st.just(1.0) | fractions,
    min_p=st.just(0.0) | floats(1 / 1024, 0.875),
    min_keep=st.sampled_from([0, 1, 2, 7, 50, 10**9]),
    temperature=st.just(1.0) | floats(1 / 16, 20.0),
)
seeds = st.integers(0, MASK)
few = settings(max_examples=200, deadline=None)


# ---- llama.cpp's own samplers
class TokenData(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class TokenDataArray(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class LogitBias(ctypes.Structure):
    _fields_ = (("token", ctypes.c_int32), ("bias", ctypes.c_float))


class Theirs:
    """The samplers of the library that llamapipe is linked to."""

    def __init__(self) -> None:
        path, *_ = LIB_DIR.glob("libllamapipe-llama.*")
        lib = self.lib = ctypes.CDLL(str(path))
        integer, number, pointer = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p
        for name, arguments in (
            ("logit_bias", (integer, integer, pointer)),
            ("penalties", (integer, integer, number, number, number)),
            ("top_k", (integer,)),
            ("typical", (number, ctypes.c_size_t)),
            ("top_p", (number, ctypes.c_size_t)),
            ("min_p", (number, ctypes.c_size_t)),
            ("temp", (number,)),
        ):
            function = getattr(lib, f"llama_sampler_init_{name}")
            function.argtypes, function.restype = arguments, pointer
        lib.llama_sampler_apply.argtypes = (pointer, ctypes.POINTER(TokenDataArray))
        lib.llama_sampler_accept.argtypes = (pointer, integer)
        lib.llama_sampler_free.argtypes = (pointer,)

    def candidates(self, chain: Stages, row: Row, accepted: Sequence[int]) -> list[tuple[int, float]]:
        """What their samplers leave of a row, in their order, with logits."""
        lib = self.lib
        biases = (LogitBias * len(chain.bias))(*(LogitBias(*item) for item in chain.bias.items()))
        samplers = [
            lib.llama_sampler_init_logit_bias(len(row), len(biases), ctypes.addressof(biases)),
            lib.llama_sampler_init_penalties(
                len(row), chain.last_n, chain.repeat, chain.frequency, chain.presence
            ),
            lib.llama_sampler_init_top_k(chain.top_k),
            lib.llama_sampler_init_typical(chain.typical, chain.min_keep),
            lib.llama_sampler_init_top_p(chain.top_p, chain.min_keep),
            lib.llama_sampler_init_min_p(chain.min_p, chain.min_keep),
            lib.llama_sampler_init_temp(chain.temperature),
        ]
        data = (TokenData * len(row))(*(TokenData(i, float(x), 0.0) for i, x in enumerate(row)))
        array = TokenDataArray(data, len(row), -1, False)
        for sampler in samplers:
            for token in accepted:
                lib.llama_sampler_accept(sampler, token)
            lib.llama_sampler_apply(sampler, array)
            lib.llama_sampler_free(sampler)
        return [(array.data[i].id, array.data[i].logit) for i in range(array.size)]
