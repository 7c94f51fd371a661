"""Every row of a pipeline is the row of the right batch entry: compared with a context that stages nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.backends import RINGS, assert_near, examples

import llamapipe as lp
from llamapipe.llama import Context, DecodeBatch

pytestmark = pytest.mark.native

N_CTX, N_SEQ, N_BATCH, N_UBATCH = 64, 5, 48, 16


class Entries(NamedTuple):
    """What one batch holds of each sequence, and in which order."""

    lengths: tuple[int, ...]  # tokens of each sequence
    order: int  # seed of how they are mixed
    outputs: int  # seed of which of them are outputs
    share: float  # of outputs
    hold: bool  # whether the output is kept until the end


batches = st.builds(
    Entries,
    # Nothing, one token (decoding), a few or a long chunk for each sequence: gaps between them come by themselves.
    st.tuples(*[st.sampled_from([0, 0, 1, 1, 1, 2, 7, 20]) for _ in range(N_SEQ)]).filter(
        lambda lengths: 1 <= sum(lengths) <= N_BATCH
    ),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
)


def batch_of(entries: Entries, past: list[int]) -> DecodeBatch:
    """The batch, going on from `past`, which it changes; sequences that are at their end get nothing."""
    rng = np.random.default_rng([entries.order, entries.outputs])
    lengths = [min(n, N_CTX - p) for n, p in zip(entries.lengths, past, strict=True)]
    seq_ids = np.repeat(np.arange(N_SEQ), lengths)
    if entries.order:  # 0: one sequence after another
        rng.shuffle(seq_ids)
    positions = np.empty_like(seq_ids)
    for i, seq_id in enumerate(seq_ids):
        positions[i] = past[seq_id]
        past[seq_id] += 1
    tokens = rng.integers(0, 500, len(seq_ids))
    outputs = rng.random(len(seq_ids)) < entries.share
    return DecodeBatch(tokens, positions, seq_ids, outputs)


@pytest.fixture(scope="module", params=[False, True], ids=["streams", "unified"])
def unified(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module", params=RINGS)
def ring(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def options(unified: bool) -> dict[str, Any]:
    return {
        "n_ctx": N_CTX,
        "n_seq_max": N_SEQ,
        "n_batch": N_BATCH,
        "n_ubatch": N_UBATCH,
        "kv_unified": unified,
        "n_threads": 1,
    }


@pytest.fixture(scope="module")
def plain(tiny: lp.Model, unified: bool) -> Iterator[Context]:
    with Context(tiny, **options(unified)) as context:
        yield context


@pytest.fixture(scope="module", params=[None, N_SEQ], ids=["whole", "few rows"])
def pipe(tiny: lp.Model, unified: bool, ring: str, request: pytest.FixtureRequest) -> Iterator[lp.Pipeline]:
    """With room for a ubatch's rows in a slot, and with so little that batches are cut for their rows, too."""
    with lp.Pipeline(tiny, ring=ring, n_outputs_max=request.param or N_BATCH, **options(unified)) as pipe:
        pipe.few = request.param is not None  # type: ignore[attr-defined]
        yield pipe


@pytest.mark.device
@settings(max_examples=examples(60), deadline=None)
@given(steps=st.lists(batches, min_size=1, max_size=6))
def test_rows_are_those_of_the_plain_path(steps: list[Entries], plain: Context, pipe: lp.Pipeline) -> None:
    plain.clear()
    pipe.memory.clear()
    past = [0] * N_SEQ
    taken: list[tuple[lp.lowlevel.StepOutput, np.ndarray[Any, Any]]] = []
    for entries in steps:
        if all(n == 0 or p >= N_CTX for n, p in zip(entries.lengths, past, strict=True)):
            continue
        batch = batch_of(entries, past)
        output = pipe.submit(batch)
        plain.decode(batch)
        rows = [plain.logits(row) for row in batch.rows]
        expected = np.stack(rows) if rows else np.empty((0, plain.model.n_vocab), np.float32)
        if entries.hold:
            taken.append((output, expected))
        else:
            compare(output, expected, pipe)
            output.release()
    for output, expected in taken:
        compare(output, expected, pipe)
        output.release()


def compare(output: lp.lowlevel.StepOutput, expected: np.ndarray[Any, Any], pipe: lp.Pipeline) -> None:
    """Bit for bit where both were cut alike."""
    rows = np.asarray(output.logits)
    if pipe.few:  # type: ignore[attr-defined]
        assert_near(rows, expected)
    else:
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.device
@pytest.mark.parametrize("n", [1, N_UBATCH, N_UBATCH + 1, N_BATCH])
def test_a_prompt_of_every_size_lands_whole(n: int, plain: Context, pipe: lp.Pipeline) -> None:
    batch = DecodeBatch.of_tokens([(7 * i + 3) % 500 for i in range(n)], all_outputs=True)
    plain.clear()
    pipe.memory.clear()
    plain.decode(batch)
    compare(pipe.submit(batch), np.stack([plain.logits(i) for i in range(n)]), pipe)


def test_graphs_are_reused_in_steady_decoding(plain: Context, pipe: lp.Pipeline) -> None:
    """llama.cpp's own counter: the place of the rows is an input of the graph, so it stays the same graph."""
    plain.clear()
    pipe.memory.clear()
    before, plain_before = 0, 0
    n = 24
    for i in range(4 + n):
        batch = DecodeBatch(np.full(N_SEQ, i + 3), np.full(N_SEQ, i), np.arange(N_SEQ), np.ones(N_SEQ, bool))
        plain.decode(batch)
        with pipe.submit(batch) as output:
            output.wait()
        if i == 3:
            before, plain_before = pipe.stats().n_reused, plain.n_reused
    assert plain.n_reused - plain_before == n
    assert pipe.stats().n_reused - before == n
