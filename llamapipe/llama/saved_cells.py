"""The KV cells of one sequence in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llamapipe.native.load import last_error, native

if TYPE_CHECKING:
    from llamapipe.llama.native_pipeline import NativePipeline


class SavedCells:
    """Owns one saved copy; ``SavedCells.of`` makes it. One thread at a time; may outlive its pipeline."""

    def __init__(self, handle: Any) -> None:
        self._lib = native().lib
        self._handle = handle
        self.n_bytes = int(self._lib.lp_saved_bytes(handle))

    @classmethod
    def of(cls, pipeline: NativePipeline, seq_id: int, max_bytes: int) -> SavedCells | None:
        """A copy of a sequence's cells; waits for the steps before. None if it is larger than ``max_bytes``, or fails.

        The thread that launches.
        """
        module = pipeline.native
        handle = module.lib.lp_save(pipeline.handle, seq_id, max_bytes)
        return None if handle == module.ffi.NULL else cls(handle)

    def load(self, pipeline: NativePipeline, seq_id: int, n: int) -> bool:
        """Replaces a sequence's cells by the first ``n`` of these. If that is refused, it is empty and False returned.

        The thread that launches.
        """
        done: int = pipeline.native.lib.lp_load(pipeline.handle, self._handle, seq_id, n)
        if done < 0:
            raise RuntimeError(f"loading a sequence failed: {last_error(pipeline.native)}")
        return done > 0

    def close(self) -> None:
        """Frees the memory; a second call does nothing."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._lib.lp_saved_free(handle)

    def __repr__(self) -> str:
        return f"<SavedCells {self.n_bytes} bytes{' closed' if self._handle is None else ''}>"

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()
