"""Runs an engine's steps on a pipeline: launch, then sample from the staged rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from llamapipe.errors import DecodeError
from llamapipe.llama.sampler import SamplerChain
from llamapipe.native.load import last_error
from llamapipe.pipeline.core import Core


class Executor(Protocol):
    """What the decoder thread needs of a context.

    ``overlaps``: a launch returns before its step is computed, so there is time for other work before ``sample``.
    ``late_errors``: errors of a launch are raised by ``sample``. ``depth``: most steps launched and not sampled.
    """

    overlaps: bool
    late_errors: bool
    depth: int

    def remove(self, seq_id: int, position: int) -> bool:
        """Forgets the cells of a sequence from ``position`` on; False when it could only forget all of them."""

    def launch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        outputs: Sequence[int],
        samplers: Sequence[Any] = (),
    ) -> int:
        """Starts computing a batch and returns the step's number.

        ``samplers``: those that ``sample`` will be called with, in the order of the outputs. Where they are known by
        now, the graph may sample.

        Raises ContextFullError (nothing changed) or DecodeError, here or in ``sample``.
        """

    def launch_again(self) -> int:
        """Launches the last batch, every entry one position further and with the token that was sampled from it.

        Only after a ``sample`` of all its entries in their order. Returns and raises as ``launch`` does.
        """

    def sample(self, step: int, rows: Sequence[int], samplers: Sequence[Any]) -> list[int]:
        """Draws and accepts a token for each output entry of a step; -1 where no logit is finite."""

    def sample_again(self, step: int) -> list[int]:
        """``sample`` with the rows and samplers of the last one."""

    def compute_s(self) -> float:
        """Seconds spent computing steps so far, as far as they are known."""

    def stats(self) -> dict[str, Any]:
        """Counters for EngineStats; any thread."""

    def launching(self) -> int:
        """The number of the step that is being computed by a call of ``launch``; any thread."""

    def abort(self, step: int) -> None:
        """Ends a step early if it is still being computed, and where that is possible; any thread."""

    def close(self) -> None:
        """Frees the context."""


class StepExecutor:
    """An Executor over a pipeline; belongs to the thread that uses it first, like the context."""

    def __init__(self, core: Core) -> None:
        context = core.context
        self.core = core
        self.overlaps = core.threaded or core.mode in ("events", "sync")
        self.late_errors = core.threaded
        self.depth = core.depth
        self._context = context
        self._native = core.native
        new, n = self._native.ffi.new, context.n_batch
        self._tokens, self._positions, self._seq_ids = (new("int32_t[]", n) for _ in range(3))
        self._outputs = new("int8_t[]", n)
        self._rows, self._sampled = (new("int32_t[]", context.n_seq_max) for _ in range(2))
        self._samplers, self._launched = (new("lp_sampler *[]", context.n_seq_max) for _ in range(2))
        self._in_graph = context.graph_sampling
        self._n = self._n_rows = 0  # entries of the last launch, rows of the last sample
        self._handle = core.handle  # what calls go to

    def remove(self, seq_id: int, position: int) -> bool:
        """Forgets the cells of a sequence from ``position`` on; False when it could only forget all of them."""
        self._context.claim()
        lib = self._native.lib
        removed = lib.lp_memory(self._handle, lib.LP_REMOVE, seq_id, 0, position, -1, 0)
        if removed > 0:
            return True
        if removed < 0:
            raise DecodeError(f"removing from sequence {seq_id} failed ({last_error(self._native)})")
        lib.lp_memory(
            self._handle, lib.LP_REMOVE, seq_id, 0, 0, -1, 0
        )  # recurrent models keep no history to go back to
        return False

    def launch(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        seq_ids: Sequence[int],
        outputs: Sequence[int],
        samplers: Sequence[SamplerChain] = (),
    ) -> int:
        """Starts computing a batch of at most ``n_batch`` entries; the step's number.

        ``samplers``: one for each output, if the graph may draw their tokens, or none.

        Raises ContextFullError when no cells are left (nothing changed), DecodeError when llama.cpp fails.
        """
        self._context.claim()
        n = self._n = len(tokens)
        self._tokens[0:n] = tokens
        self._positions[0:n] = positions
        self._seq_ids[0:n] = seq_ids
        self._outputs[0:n] = outputs
        known = self._native.ffi.NULL
        if samplers and self._in_graph:
            if len(samplers) != sum(outputs):
                raise ValueError(f"{len(samplers)} samplers for {sum(outputs)} outputs")
            known = self._launched
            known[0 : len(samplers)] = [s.handle for s in samplers]
        step: int = self._native.lib.lp_launch(
            self._handle,
            n,
            self._tokens,
            self._positions,
            self._seq_ids,
            self._outputs,
            known,
            self._native.ffi.NULL,
        )
        if step < 0:
            self._fail(step)
        return step

    def launch_again(self) -> int:
        """Launches the last batch, every entry one position further and with the token sampled from it.

        Returns and raises as ``launch`` does.
        """
        known = self._samplers if self._in_graph else self._native.ffi.NULL
        step: int = self._native.lib.lp_launch_again(self._handle, self._sampled, known)
        if step < 0:
            self._fail(step)
        return step

    def _fail(self, code: int) -> NoReturn:
        raise self.core.error(code, n_tokens=self._n)

    def sample(self, step: int, rows: Sequence[int], samplers: Sequence[SamplerChain]) -> list[int]:
        """Draws and accepts a token for each output entry of a step; -1 where no logit is finite.

        Its rows stay until ``depth`` more steps are launched.
        """
        self._context.claim()
        n = self._n_rows = len(rows)
        self._rows[0:n] = rows
        self._samplers[0:n] = [s.handle for s in samplers]
        return self.sample_again(step)

    def sample_again(self, step: int) -> list[int]:
        """``sample`` with the rows and samplers of the last one."""
        native, n = self._native, self._n_rows
        code = native.lib.lp_sample_rows(self._handle, step, n, self._rows, self._samplers, self._sampled)
        if code < 0:
            self._sampling_failed(code)
        return native.ffi.unpack(self._sampled, n)  # type: ignore[no-any-return]

    def _sampling_failed(self, code: int) -> NoReturn:
        lib = self._native.lib
        if code == lib.LP_ERROR:
            raise RuntimeError(f"sampling failed: {last_error(self._native)}")
        self._fail(code)

    def compute_s(self) -> float:
        """Seconds spent computing steps so far, as far as they are known."""
        return float(self.core.counters().compute_ns) * 1e-9

    def stats(self) -> dict[str, Any]:
        """Counters for EngineStats; any thread, also after ``close``."""
        counters = self.core.counters()
        return {
            "n_waits": counters.n_waits,
            "n_syncs": counters.n_syncs,
            "n_copies": counters.n_copies,
            "n_copied_bytes": counters.n_bytes,
            "n_reused": self.core.n_reused,
            "n_graph_sampled": counters.n_graph,
            "compute_s": counters.compute_ns * 1e-9,
            "wait_s": counters.wait_ns * 1e-9,
        }

    def launching(self) -> int:
        """The number of the step that is being computed by a call of ``launch``; any thread."""
        step: int = self._native.lib.lp_launching(self._handle)
        return step

    def abort(self, step: int) -> None:
        """Ends a step within one node of its graph if it is still being computed, on a CPU; any thread."""
        self._native.lib.lp_abort(self._handle, step)

    def close(self) -> None:
        """Frees pipeline and context."""
        self.core.close()
