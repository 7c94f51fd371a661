"""Sequences with the same cells have the rows that each has alone, whatever was done to them before."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from support.gguf_models import Shape, make_model

import llamapipe as lp
from llamapipe.llama import Context, DecodeBatch
from llamapipe.native.load import native

pytestmark = pytest.mark.native

SHAPE = Shape(layers=2, width=256, heads=4, heads_kv=2, ffn=512, context=512)
TEXT = Random(1).choices(range(5, 500), k=300)
N_SEQUENCES, N_CTX = 5, 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    if native().lib.lp_kernels_level() == native().ffi.NULL:
        pytest.skip("this processor has no kernels")
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    with lp.Model(make_model(path, shape=SHAPE, type_name="q8_0", vocab="builtin-spm")) as model:
        yield model


@pytest.fixture
def alone(model: lp.Model) -> Iterator[Context]:
    with Context(model, n_ctx=N_CTX, n_seq_max=1, n_threads=1) as context:
        yield context


def row_of(context: Context, tokens: list[int]) -> Any:
    """The logits after these tokens, of the only sequence."""
    context.clear()
    context.decode(DecodeBatch.of_tokens(tokens))
    return context.logits(len(tokens) - 1)


def n_spared(context: Context) -> int:
    return int(native().lib.lp_context_n_spared(context.handle))


class Sequences:
    """Those of a context, with the tokens that each should have."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.tokens: list[list[int]] = [[] for _ in range(N_SEQUENCES)]

    def feed(self, seq_id: int, tokens: list[int]) -> None:
        self.context.decode(DecodeBatch.of_tokens(tokens, len(self.tokens[seq_id]), seq_id))
        self.tokens[seq_id] += tokens

    def step(self, new: dict[int, int]) -> None:
        """Decode a token of each of these sequences."""
        positions = [len(self.tokens[seq_id]) for seq_id in new]
        self.context.decode(DecodeBatch([*new.values()], positions, [*new], [True] * len(new)))
        for seq_id, token in new.items():
            self.tokens[seq_id].append(token)

    def cut(self, seq_id: int, n: int) -> None:
        assert self.context.seq_remove(seq_id, n)
        del self.tokens[seq_id][n:]

    def copy(self, source: int, to: int) -> None:
        self.context.seq_copy(source, to)
        self.tokens[to] = self.tokens[source][:]


def test_the_same_prompt_of_several_sequences(model: lp.Model, alone: Context) -> None:
    """Each computed it; their cells are equal, and are read once from then on."""
    with Context(model, n_ctx=N_CTX, n_seq_max=N_SEQUENCES, n_threads=2) as context:
        sequences = Sequences(context)
        for seq_id in range(N_SEQUENCES):
            sequences.feed(seq_id, [*TEXT[:150], *TEXT[150 + seq_id : 160]])
        assert not n_spared(context)
        for step in range(3):
            sequences.step({seq_id: 20 + seq_id + step for seq_id in range(N_SEQUENCES)})
            for seq_id, tokens in enumerate(sequences.tokens):
                np.testing.assert_array_equal(context.logits(seq_id), row_of(alone, tokens))
        assert n_spared(context) == 3 * SHAPE.layers * (N_SEQUENCES - 1) * 150


def test_what_was_written_anew_is_no_longer_the_same(model: lp.Model, alone: Context) -> None:
    """Cells between those of others, so that only the writing tells."""
    with Context(model, n_ctx=N_CTX, n_seq_max=N_SEQUENCES, n_threads=1) as context:
        sequences = Sequences(context)
        for seq_id in (0, 1):
            sequences.feed(seq_id, TEXT[:150])
        sequences.step({0: 20, 1: 20})
        sequences.cut(1, 100)
        sequences.feed(1, TEXT[200:250])
        sequences.step({0: 21, 1: 21})
        for seq_id in (0, 1):
            np.testing.assert_array_equal(context.logits(seq_id), row_of(alone, sequences.tokens[seq_id]))
        assert n_spared(context) == SHAPE.layers * (151 + 100)


@pytest.mark.parametrize("seed", range(4))
def test_any_operations(model: lp.Model, alone: Context, seed: int) -> None:
    draw = Random(seed)
    with Context(model, n_ctx=N_CTX, n_seq_max=N_SEQUENCES, n_threads=2) as context:
        sequences = Sequences(context)
        for _ in range(120):
            seq_id = draw.randrange(N_SEQUENCES)
            n = len(sequences.tokens[seq_id])
            what = draw.random()
            if what < 0.2 and n < 200:
                sequences.feed(seq_id, TEXT[n : n + draw.randrange(1, 50)])
            elif what < 0.3 and n:
                sequences.cut(seq_id, draw.randrange(n))
            elif what < 0.4:
                sequences.copy(seq_id, draw.choice([i for i in range(N_SEQUENCES) if i != seq_id]))
            else:
                # Neighbours mostly, with mostly the same tokens.
                first = draw.randrange(N_SEQUENCES)
                chosen = [i for i in range(first, N_SEQUENCES) if 0 < len(sequences.tokens[i]) < N_CTX - 1]
                if not chosen:
                    continue
                token = draw.randrange(5, 500)
                sequences.step({i: token if draw.random() < 0.8 else token + 1 for i in chosen})
                at = draw.randrange(len(chosen))
                row = row_of(alone, sequences.tokens[chosen[at]])
                np.testing.assert_array_equal(context.logits(at), row)
        assert n_spared(context)
