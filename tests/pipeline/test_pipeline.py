"""The public pipeline: what is lazy, who waits, what is held, what fails, and how it ends."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support.backends import ON_DEVICE, RINGS, assert_near
from support.bad_values import INTEGERS, names
from support.control import PATIENCE_S, Worker, wait_until
from support.inside import fail_next, pipeline_of
from support.run_script import run_script, run_script_with_errors

import llamapipe as lp
from llamapipe.errors import ContextFullError, DecodeError, EngineClosedError, InvalidRequestError
from llamapipe.llama import Context, DecodeBatch

pytestmark = pytest.mark.native

MakePipeline = Callable[..., lp.Pipeline]
N_VOCAB = 512


@pytest.fixture(params=RINGS)
def ring(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_pipeline(tiny: lp.Model, ring: str) -> Iterator[MakePipeline]:
    pipelines: list[lp.Pipeline] = []

    def make(**options: Any) -> lp.Pipeline:
        defaults = {"n_ctx": 64, "n_seq_max": 3, "n_ubatch": 16, "n_batch": 48, "n_threads": 1, "ring": ring}
        pipelines.append(lp.Pipeline(tiny, **{**defaults, **options}))
        return pipelines[-1]

    yield make
    for pipe in pipelines:
        pipe.close(drain=False)


@pytest.fixture
def pipe(make_pipeline: MakePipeline) -> lp.Pipeline:
    return make_pipeline()


@pytest.fixture(scope="module")
def plain(tiny: lp.Model) -> Iterator[Context]:
    """The same without a pipeline, in the same ubatches."""
    with Context(tiny, n_ctx=64, n_seq_max=3, n_ubatch=16, n_batch=48, n_threads=1) as context:
        yield context


def run(first: int, n: int, seq_id: int = 0, start: int = 5, outputs: bool = True) -> DecodeBatch:
    """`n` tokens of a sequence from position `first` on."""
    tokens = [(start + 7 * i) % N_VOCAB for i in range(first, first + n)]
    return DecodeBatch(tokens, np.arange(first, first + n), np.full(n, seq_id), np.full(n, outputs))


def rows_of(plain: Context, *batches: DecodeBatch) -> list[np.ndarray[Any, Any]]:
    """The rows of batches, one after the other in a context of their own."""
    plain.clear()
    rows = []
    for batch in batches:
        plain.decode(batch)
        rows.append(np.stack([plain.logits(row) for row in batch.rows]))
    return rows


# ---- laziness
class TestLazy:
    @pytest.mark.device
    def test_reading_waits_for_the_step_and_a_second_time_for_nothing(
        self, pipe: lp.Pipeline, plain: Context
    ) -> None:
        batch = run(0, 12)
        (expected,) = rows_of(plain, batch)
        output = pipe.submit(batch)
        first = np.asarray(output.logits)
        np.testing.assert_array_equal(first, expected)
        before = pipe.stats()
        second = np.asarray(output.logits)
        output.wait()
        assert output.logits[3, 7] == expected[3, 7]
        assert pipe.stats() == before
        assert second is first
        assert output.logits.shape == first.shape == (12, N_VOCAB) and len(output.logits) == 12
        assert first.dtype == np.float32 == output.logits.dtype
        assert not first.flags.writeable

    @pytest.mark.device
    def test_ready_turns_true_by_itself(self, pipe: lp.Pipeline) -> None:
        output = pipe.submit(run(0, 12))
        wait_until(lambda: output.ready)
        before = pipe.stats().n_waits
        output.wait()
        np.asarray(output.logits)
        assert pipe.stats().n_waits == before

    def test_an_array_of_another_type_is_a_copy(self, pipe: lp.Pipeline) -> None:
        output = pipe.submit(run(0, 3))
        doubles = np.asarray(output.logits, dtype=np.float64)
        assert doubles.dtype == np.float64 and np.array_equal(doubles, np.asarray(output.logits))
        copy = np.array(output.logits)
        copy[:] = 0
        assert np.asarray(output.logits).any()

    @pytest.mark.device
    def test_a_wait_may_be_given_up(self, make_pipeline: MakePipeline, ring: str) -> None:
        n = 128 if ON_DEVICE else 4000
        pipe = make_pipeline(n_ctx=4096, n_batch=4096, n_ubatch=512)
        output = pipe.submit(run(0, n, outputs=False))
        with pytest.raises(TimeoutError, match="within 0 s; it continues"):
            output.wait(timeout=0)
        output.wait()
        assert output.ready

    @pytest.mark.device
    def test_a_batch_without_outputs_has_an_end_too(self, pipe: lp.Pipeline) -> None:
        output = pipe.submit(run(0, 20, outputs=False))
        output.wait(timeout=PATIENCE_S)
        assert np.asarray(output.logits).shape == (0, N_VOCAB)
        assert output.candidates.ids.shape == (0, 40)

    @pytest.mark.device
    def test_candidates_are_the_largest_and_their_logarithm(self, pipe: lp.Pipeline) -> None:
        output = pipe.submit(run(0, 5))
        rows = np.asarray(output.logits).astype(np.float64)
        candidates = output.candidates
        for row, ids, logits, lse in zip(
            rows, candidates.ids, candidates.logits, candidates.log_sum_exp, strict=True
        ):
            order = sorted(range(N_VOCAB), key=lambda i: (-row[i], i))[:40]
            assert ids.tolist() == order and np.array_equal(logits, row[order].astype(np.float32))
            assert abs(lse - np.log(np.exp(row).sum())) < 1e-7  # exponentials in float32, added up in float64

    def test_threads_may_change_while_steps_are_computed(self, pipe: lp.Pipeline, plain: Context) -> None:
        batches = [run(position, 4) for position in range(0, 64, 4)]
        outputs = []
        for i, batch in enumerate(batches):
            outputs.append(pipe.submit(batch))
            pipeline_of(pipe).context.set_threads(1 + i % 3, 1 + i % 2)
        for output, expected in zip(outputs, rows_of(plain, *batches), strict=True):
            np.testing.assert_array_equal(output.logits, expected)

    @pytest.mark.device
    def test_many_threads_read_one_output(self, pipe: lp.Pipeline, plain: Context) -> None:
        batch = run(0, 16)
        (expected,) = rows_of(plain, batch)
        output = pipe.submit(batch)
        readers = [Worker(lambda: np.array(output.logits)) for _ in range(8)]
        for reader in readers:
            np.testing.assert_array_equal(reader.result(), expected)


# ---- the ring
@pytest.mark.device
class TestHeld:
    def test_nothing_is_ever_stale(self, make_pipeline: MakePipeline, plain: Context) -> None:
        """Far more outputs than slots are kept, read in any order, some while later steps run."""
        pipe = make_pipeline(depth=2)
        batches = [run(6 * i, 6) for i in range(10)]
        expected = rows_of(plain, *batches)
        outputs = [pipe.submit(batch) for batch in batches]
        for i in (9, 0, 5, 4, 8, 1, 2, 7, 3, 6):
            np.testing.assert_array_equal(np.asarray(outputs[i].logits), expected[i])
        if pipe.mode == "host":
            assert pipe.stats().n_moved >= len(batches) - (pipe.depth + 1)

    def test_arrays_stay_as_they_are_while_the_ring_goes_round(
        self, make_pipeline: MakePipeline, plain: Context
    ) -> None:
        pipe = make_pipeline(depth=1)
        batches = [run(i, 1) for i in range(20)]
        expected = rows_of(plain, *batches)
        arrays = []
        for batch in batches:
            output = pipe.submit(batch)
            arrays.append(np.asarray(output.logits))
            output.release()
        for array, rows in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(array, rows)

    def test_released_outputs_cost_no_copy(self, make_pipeline: MakePipeline) -> None:
        pipe = make_pipeline()
        for i in range(12):
            with pipe.submit(run(i, 1)) as output:
                np.asarray(output.logits)
        stats = pipe.stats()
        assert stats.n_moved == 0
        assert stats.n_copies == (0 if pipe.mode == "host" else 12)

    def test_dropped_outputs_are_released_at_once(self, make_pipeline: MakePipeline) -> None:
        """Without the garbage collector: it comes when it likes, and rows are large."""
        pipe = make_pipeline()
        gc.disable()
        try:
            for i in range(12):
                output = pipe.submit(run(i, 1))
                np.asarray(output.logits)
                assert output.logits[0, 0] is not None
            del output
        finally:
            gc.enable()
        assert pipe.stats().n_moved == 0

    def test_submitting_waits_for_room_and_not_for_readers(self, make_pipeline: MakePipeline) -> None:
        """Nobody reads anything, so nobody asks whether a step is done but who wants to submit the next."""
        for depth in (1, 2):
            pipe = make_pipeline(depth=depth)
            outputs = [pipe.submit(run(i, 1)) for i in range(8)]
            assert np.isfinite(np.asarray(outputs[-1].logits)).all()
            for i in range(8, 14):
                pipe.submit(run(i, 1, outputs=i % 2 == 0)).release()
            pipe.submit(run(14, 1)).wait()

    def test_releasing_while_another_thread_reads(self, make_pipeline: MakePipeline, plain: Context) -> None:
        """The reader gets the rows or an error, never those of another step."""
        pipe = make_pipeline(depth=1)
        batches = [run(i, 1) for i in range(40)]
        expected = rows_of(plain, *batches)
        for batch, rows in zip(batches, expected, strict=True):
            output = pipe.submit(batch)
            reader = Worker(lambda output=output: np.array(output.logits))
            output.release()
            with suppress(EngineClosedError):
                np.testing.assert_array_equal(reader.result(), rows)

    def test_a_released_output_is_gone(self, pipe: lp.Pipeline) -> None:
        output = pipe.submit(run(0, 1))
        output.release()
        output.release()
        for use in (
            output.wait,
            lambda: np.asarray(output.logits),
            lambda: output.ready,
            lambda: output.candidates,
        ):
            with pytest.raises(EngineClosedError, match="was released"):
                use()
        assert "released" in repr(output)

    def test_more_outputs_than_a_slot_holds(self, make_pipeline: MakePipeline, plain: Context) -> None:
        batch = run(0, 40)
        (expected,) = rows_of(plain, batch)
        pipe = make_pipeline(n_outputs_max=16)
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(pipe.submit(batch).logits), expected)
            pipe.memory.clear()
        assert pipe.stats().n_decodes == 9

    def test_submit_waits_while_depth_steps_are_under_way(self, make_pipeline: MakePipeline) -> None:
        n = 8 if ON_DEVICE else 256
        pipe = make_pipeline(depth=2, n_ctx=2048, n_batch=512, n_ubatch=512)
        outputs = []
        for i in range(6):
            outputs.append(pipe.submit(run(n * i, n, outputs=False)))
            if pipe.mode in ("host", "direct"):  # elsewhere nobody asked whether they are
                assert sum(not output.ready for output in outputs) <= 2


# ---- memory
class TestMemory:
    @pytest.mark.device
    def test_a_tail_is_forgotten(self, pipe: lp.Pipeline, plain: Context) -> None:
        pipe.submit(run(0, 10, outputs=False))
        pipe.memory.remove(0, 6)
        output = pipe.submit(run(6, 3, start=99))
        plain.clear()
        plain.decode(run(0, 6, outputs=False))
        plain.decode(run(6, 3, start=99))
        expected = np.stack([plain.logits(i) for i in range(3)])
        assert_near(np.asarray(output.logits), expected)

    @pytest.mark.device
    def test_a_whole_sequence_is_copied(self, pipe: lp.Pipeline, plain: Context) -> None:
        pipe.submit(run(0, 9, outputs=False))
        pipe.memory.copy(0, 2)
        output = pipe.submit(run(9, 2, seq_id=2, start=99))
        plain.clear()
        plain.decode(run(0, 9, outputs=False))
        plain.decode(run(9, 2, start=99))
        expected = np.stack([plain.logits(i) for i in range(2)])
        assert_near(np.asarray(output.logits), expected)

    @pytest.mark.device
    def test_a_part_is_copied_where_cells_are_shared(
        self, make_pipeline: MakePipeline, plain: Context
    ) -> None:
        pipe = make_pipeline(kv_unified=True)
        pipe.submit(run(0, 9, outputs=False))
        pipe.memory.copy(0, 1, 0, 5)
        output = pipe.submit(run(5, 2, seq_id=1, start=99))
        plain.clear()
        plain.decode(run(0, 5, outputs=False))
        plain.decode(run(5, 2, start=99))
        expected = np.stack([plain.logits(i) for i in range(2)])
        assert_near(np.asarray(output.logits), expected)

    @pytest.mark.device
    def test_all_but_one_are_forgotten(self, pipe: lp.Pipeline) -> None:
        for seq_id in range(3):
            pipe.submit(run(0, 4, seq_id))
        pipe.memory.keep(1)
        pipe.submit(run(4, 1, 1)).wait()
        for seq_id in (0, 2):
            pipe.submit(run(0, 4, seq_id)).wait()

    @pytest.mark.device
    def test_positions_are_shifted(self, pipe: lp.Pipeline) -> None:
        pipe.submit(run(0, 8))
        pipe.memory.remove(0, 0, 4)
        pipe.memory.shift(0, 4, -1, -4)
        with pytest.raises(ValueError, match="must go on from 4"):
            pipe.submit(run(8, 1))
        pipe.submit(run(4, 1)).wait()

    @pytest.mark.parametrize(
        ("use", "message"),
        [
            (lambda m: m.copy(0, 1, 0, 5), "cannot be copied alone"),
            (lambda m: m.shift(0, 2, -1, -3), "it would be negative"),
            (lambda m: m.shift(0, 2, 60, 8), "n_ctx is 64"),
            (lambda m: m.remove(3), "seq_id"),
            (lambda m: m.copy(0, 9), "dst"),
            (lambda m: m.remove(0, -1), "p0"),
        ],
    )
    def test_what_llama_cpp_would_not_survive_is_refused(
        self, pipe: lp.Pipeline, use: Callable[[Any], object], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            use(pipe.memory)
        pipe.submit(run(0, 1)).wait()

    def test_where_a_sequence_goes_on_is_known_at_once(self, make_pipeline: MakePipeline) -> None:
        """Random operations, and llama.cpp's own answer once they are done."""
        rng = np.random.default_rng(5)
        pipe = make_pipeline(kv_unified=True, n_ctx=512, n_batch=512)
        lib, handle = pipeline_of(pipe).native.lib, pipeline_of(pipe).context.llama
        for i in range(60 if ON_DEVICE else 300):
            a, b = (int(x) for x in rng.integers(0, 3, 2))
            p0 = int(rng.integers(0, 12))
            p1 = int(rng.choice([-1, p0 + 1, p0 + 4]))
            kind = int(rng.integers(0, 6))
            if kind == 0:
                pipe.memory.remove(a, p0, p1)
            elif kind == 1:
                pipe.memory.remove(b)
                pipe.memory.copy(a, b, p0, p1)
            elif kind == 2:
                with suppress(InvalidRequestError):  # shares its cells
                    pipe.memory.shift(a, p0, p1, int(rng.integers(-p0, 4)))
            elif kind == 3 and i % 7 == 0:
                pipe.memory.keep(a)
            else:
                n = int(rng.integers(1, 4))
                pipe.submit(run(pipeline_of(pipe).next_position(a), n, a, outputs=False))
            expected = [pipeline_of(pipe).next_position(seq_id) for seq_id in range(3)]
            other = next(seq_id for seq_id in range(3) if seq_id != a)
            pipe.submit(run(expected[other], 1, other, outputs=False)).wait()  # behind all of it
            expected[other] += 1
            memory = lib.llama_get_memory(handle)
            assert [lib.llama_memory_seq_pos_max(memory, seq_id) + 1 for seq_id in range(3)] == expected
            if max(expected) > 400:
                pipe.memory.clear()

    def test_shared_cells_are_not_shifted(self, make_pipeline: MakePipeline) -> None:
        pipe = make_pipeline(kv_unified=True)
        pipe.submit(run(0, 6))
        pipe.memory.copy(0, 1)
        pipe.memory.copy(1, 2)
        pipe.memory.remove(1)
        with pytest.raises(InvalidRequestError, match="sequence 0 shares cells with sequence 2"):
            pipe.memory.shift(0, 0, -1, 3)
        pipe.memory.remove(2)
        pipe.memory.shift(0, 0, -1, 3)
        pipe.submit(run(9, 1)).wait()

    def test_a_shift_beyond_all_positions_is_refused(self, pipe: lp.Pipeline) -> None:
        pipe.submit(run(0, 4))
        with pytest.raises(InvalidRequestError, match="beyond the largest position"):
            pipe.memory.shift(0, 0, -1, 2**31 - 1)
        pipe.submit(run(4, 1)).wait()

    def test_a_copy_onto_itself_is_nothing(self, pipe: lp.Pipeline) -> None:
        pipe.submit(run(0, 3))
        pipe.memory.copy(0, 0, 0, 2)
        pipe.submit(run(3, 1)).wait()


# ---- errors
class TestErrors:
    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            (run(1, 3), "positions of sequence 0 must go on from 0 without gaps, not 1"),
            (DecodeBatch([1, 2], [0, 2], [0, 0], [1, 1]), "must go on from 1 without gaps, not 2"),
            (DecodeBatch([1], [0], [3], [1]), "seq_ids holds 3; it must be from 0 to 2"),
            (DecodeBatch([1], [0], [-1], [1]), "seq_ids holds -1"),
            (DecodeBatch([N_VOCAB], [0], [0], [1]), "tokens holds 512; it must be from 0 to 511"),
            (DecodeBatch([1], [64], [0], [1]), "positions holds 64; it must be from 0 to 63"),
            (run(0, 49), "the batch has 49 tokens; n_batch is 48"),
        ],
    )
    def test_a_batch_that_does_not_fit_is_refused(
        self, pipe: lp.Pipeline, batch: DecodeBatch, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            pipe.submit(batch)
        assert pipe.stats().steps == 0
        pipe.submit(run(0, 2)).wait()

    def test_what_is_no_batch_is_refused(self, pipe: lp.Pipeline) -> None:
        with pytest.raises(TypeError, match="batch must be a DecodeBatch, not list"):
            pipe.submit([1, 2])  # type: ignore[arg-type]

    @pytest.mark.device
    @pytest.mark.parametrize("code", [-1, -2, -3, 2])
    def test_a_failed_launch_is_told_where_it_is_read(
        self, make_pipeline: MakePipeline, plain: Context, code: int
    ) -> None:
        """Its own readers learn of it, each time; steps before and behind it that are others' go on."""
        pipe = make_pipeline(depth=4)
        before = pipe.submit(run(0, 5, seq_id=1))
        before.wait()
        fail_next(pipeline_of(pipe), "launch", code)
        failed = pipe.submit(run(0, 5))
        other = pipe.submit(run(5, 2, seq_id=1))
        later = pipe.submit(run(5, 2))  # continues what failed
        for _ in range(2):
            with pytest.raises(DecodeError):
                failed.wait()
            with pytest.raises(DecodeError):
                np.asarray(failed.logits)
        assert failed.ready
        first, second = rows_of(plain, run(0, 5), run(5, 2))
        assert_near(np.asarray(before.logits), first)
        assert_near(np.asarray(other.logits), second)
        with pytest.raises(DecodeError, match="whose step before it failed"):
            later.wait()
        pipe.submit(run(0, 3)).wait()  # the sequence is where it was before

    @pytest.mark.device
    def test_a_failed_step_that_nobody_wants_is_forgotten(self, make_pipeline: MakePipeline) -> None:
        pipe = make_pipeline()
        fail_next(pipeline_of(pipe), "launch", -3)
        pipe.submit(run(0, 5)).release()
        pipe.submit(run(0, 3, seq_id=1)).wait()
        wait_until(
            lambda: pipeline_of(pipe).next_position(0) == 0
        )  # the launcher counts again once it has nothing to do
        with pytest.raises(ValueError, match="must go on from 0 without gaps, not 5"):
            pipe.submit(run(5, 1))
        pipe.submit(run(0, 5)).wait()

    @pytest.mark.device
    def test_rows_that_came_otherwise_fail_their_step(self, pipe: lp.Pipeline) -> None:
        if pipe.mode == "direct":
            pytest.skip("llama.cpp's own buffer has no rows to mix up")
        fail_next(pipeline_of(pipe), "rows", 0)
        output = pipe.submit(run(0, 5))
        with pytest.raises(DecodeError, match="cut the batch otherwise than expected"):
            output.wait()
        pipe.memory.clear()
        pipe.submit(run(0, 5)).wait()

    @pytest.mark.device
    @pytest.mark.skipif(not ON_DEVICE, reason="rows are not copied out where the ring is host memory")
    def test_a_failed_copy_fails_its_step(self, pipe: lp.Pipeline) -> None:
        if pipe.mode == "direct":
            pytest.skip("rows are copied by llama.cpp")
        fail_next(pipeline_of(pipe), "copy", -3)
        output = pipe.submit(run(0, 5))
        with pytest.raises(DecodeError):
            np.asarray(output.logits)
        pipe.memory.clear()
        np.asarray(pipe.submit(run(0, 5)).logits)

    @pytest.mark.device
    def test_no_cells_left_changes_nothing(self, make_pipeline: MakePipeline, plain: Context) -> None:
        pipe = make_pipeline(n_cells=256, kv_unified=True, n_ctx=256)
        for first in range(0, 240, 40):
            pipe.submit(run(first, 40, outputs=False)).wait()
        full = pipe.submit(run(0, 30, seq_id=1))  # in two parts, the first of which has room
        with pytest.raises(ContextFullError, match="no KV cells are left for a step of 30 tokens"):
            full.wait()
        output = pipe.submit(run(240, 2))
        assert np.isfinite(np.asarray(output.logits)).all()
        pipe.submit(run(0, 14, seq_id=1)).wait()  # as much as there is room for

    @pytest.mark.skipif(ON_DEVICE, reason="only what a CPU computes can be aborted")
    def test_a_long_step_is_aborted_by_closing(self, make_pipeline: MakePipeline) -> None:
        pipe = make_pipeline(n_ctx=16384, n_batch=16384, n_ubatch=512)
        running = pipe.submit(run(0, 16000, outputs=False))
        wait_until(lambda: pipeline_of(pipe).native.lib.lp_launching(pipeline_of(pipe).handle) >= 0)
        queued = pipe.submit(run(16000, 10))
        pipe.close(drain=False)
        with pytest.raises(EngineClosedError, match="before the step was computed"):
            running.wait()
        with pytest.raises(EngineClosedError, match="before this step was launched"):
            queued.wait()


# ---- life
class TestClose:
    @pytest.mark.device
    def test_what_was_submitted_is_computed_and_stays_readable(
        self, make_pipeline: MakePipeline, plain: Context
    ) -> None:
        pipe = make_pipeline()
        batches = [run(0, 10), run(10, 6)]
        expected = rows_of(plain, *batches)
        with pipe:
            outputs = [pipe.submit(batch) for batch in batches]
        for output, rows in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(output.logits), rows)
        array = np.asarray(outputs[0].logits)
        del outputs, output, pipe
        gc.collect()
        np.testing.assert_array_equal(array, expected[0])

    def test_a_closed_pipeline_refuses(self, pipe: lp.Pipeline) -> None:
        pipe.submit(run(0, 2))
        pipe.close()
        pipe.close()
        with pytest.raises(EngineClosedError, match="is closed"):
            pipe.submit(run(2, 1))
        with pytest.raises(EngineClosedError, match="is closed"):
            pipe.memory.remove(0)
        assert pipe.stats().steps == 1 and "closed" in repr(pipe)

    @pytest.mark.device
    def test_closing_while_others_submit_and_read(self, make_pipeline: MakePipeline) -> None:
        pipe = make_pipeline(depth=3)
        started = threading.Barrier(4)

        def use(seq_id: int) -> int:
            started.wait()
            for i in range(60):
                try:
                    np.asarray(pipe.submit(run(i, 1, seq_id)).logits)
                except EngineClosedError:
                    return i
            return 60

        users = [Worker(lambda seq_id=seq_id: use(seq_id)) for seq_id in range(3)]
        started.wait()
        pipe.close(drain=False)
        for user in users:  # none hangs, none sees another error
            user.result()

    def test_nobody_closes_it(self, make_pipeline: MakePipeline, tiny: lp.Model) -> None:
        pipes = [lp.Pipeline(tiny, n_ctx=64, n_threads=1)]
        pipeline = pipeline_of(pipes[0])
        with pytest.warns(ResourceWarning, match="was never closed"):
            pipes.clear()
        pipeline.close()

    def test_the_model_outlives_it(self, pipe: lp.Pipeline) -> None:
        with pytest.raises(Exception, match="close"):
            pipe.model.close()


@pytest.mark.parametrize("bad", INTEGERS, ids=names(INTEGERS))
def test_wrong_options_are_refused(tiny: lp.Model, bad: Any) -> None:
    for name in ("depth", "n_outputs_max", "n_seq_max"):
        if bad.value is None and name == "n_outputs_max":  # the default
            continue
        with pytest.raises((TypeError, ValueError), match=name):
            lp.Pipeline(tiny, **{"n_ctx": 64, name: bad.value})


def test_wrong_rings_and_models_are_refused(tiny: lp.Model) -> None:
    with pytest.raises(ValueError, match="ring"):
        lp.Pipeline(tiny, ring="square")
    with pytest.raises(TypeError, match="model must be a Model"):
        lp.Pipeline("model.gguf")  # type: ignore[arg-type]


@pytest.mark.device
def test_a_model_whose_rows_cannot_be_told_apart_takes_the_direct_path(recurrent: lp.Model) -> None:
    with lp.Pipeline(recurrent, n_ctx=64, n_seq_max=2, n_threads=1) as pipe:
        assert pipe.mode == "direct"
        outputs = [
            pipe.submit(DecodeBatch.of_tokens([5, 6, 7], 0, seq_id, all_outputs=True)) for seq_id in (0, 1)
        ]
        first, second = (np.asarray(output.logits) for output in outputs)
        assert_near(first, second)
        with pytest.raises(InvalidRequestError, match="one state per sequence, so positions"):
            pipe.memory.remove(0, 2)
        pipe.memory.remove(0)
        pipe.submit(DecodeBatch.of_tokens([5])).wait()


LEFT_OPEN = """\
import numpy as np
import llamapipe as lp

model = lp.Model.demo()
pipe = lp.Pipeline(model, n_ctx=8192, n_batch=8192, depth=3)
outputs = [pipe.submit(lp.DecodeBatch.of_tokens([5, 6, 7]))]
array = np.asarray(outputs[0].logits)
n = 64 if model.devices[0].is_software else 4000
for first in (3, 3 + n):
    outputs.append(pipe.submit(lp.DecodeBatch.of_tokens([5] * n, first)))
say("left")
"""
FORKED = """\
import os
import sys
import numpy as np
import llamapipe as lp

with lp.Model.demo() as model, lp.Pipeline(model, n_ctx=64) as pipe:
    output = pipe.submit(lp.DecodeBatch.of_tokens([5, 6]))
    output.wait()
    child = os.fork()
    if child == 0:
        try:
            pipe.submit(lp.DecodeBatch.of_tokens([5], 2))
        except lp.errors.EngineClosedError as error:
            say(error)
        pipe.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    say(np.asarray(pipe.submit(lp.DecodeBatch.of_tokens([5], 2)).logits).shape)
"""


@pytest.mark.device
@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('an end')", 1)])
def test_the_process_ends_whatever_is_left_open(ending: str, code: int) -> None:
    """Steps queued, running and unread, arrays alive: exit neither hangs nor crashes."""
    text, _ = run_script_with_errors(LEFT_OPEN + ending, exit_code=code)
    assert text.strip() == "left"


@pytest.mark.device
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_refuses() -> None:
    text = run_script(
        FORKED, flags=("-W", "ignore::DeprecationWarning")
    )  # of fork() beside threads, from Python 3.12 on
    assert "before fork()" in text and "(1, 2400)" in text


NO_MEMORY_FOR_A_RING = """\\
import logging, resource, sys
import numpy as np
import llamapipe as lp

logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
with lp.Model.demo() as model:
    with open("/proc/self/statm") as f:
        used = int(f.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 700 * 2**20,) * 2)
    with lp.Pipeline(model, n_ctx=2048, n_ubatch=64, n_outputs_max=2048, depth=64, n_threads=1) as pipe:
        rows = np.asarray(pipe.submit(lp.DecodeBatch.of_tokens([5, 6, 7], all_outputs=True)).logits)
        say(pipe.mode, rows.shape, bool(np.isfinite(rows).all()))
"""


@pytest.mark.skipif(
    ON_DEVICE or sys.platform != "linux", reason="limits the address space of a Linux process"
)
def test_without_room_for_the_ring_the_direct_path_is_taken_with_a_warning() -> None:
    text = run_script(NO_MEMORY_FOR_A_RING)
    assert "WARNING output rows of demo.gguf cannot be staged (there is no memory" in text
    assert "direct (3, 2400) True" in text
