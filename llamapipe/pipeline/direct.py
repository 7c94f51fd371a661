"""Runs one step at a time: decodes, then samples from llama.cpp's own output buffer.

It does for the engine what the ring of staged outputs will do: ``launch`` a step, ``sample`` its rows. The scheduler
knows nothing of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from llamapipe.errors import ContextFullError
from llamapipe.llama.context import Context
from llamapipe.llama.sampler import SamplerChain
from llamapipe.native.load import last_error, native


class Executor(Protocol):
    """What the decoder thread needs of a context: one step at a time, rows in batch order."""

    def remove(self, seq_id: int, position: int) -> bool:
        """Forgets the cells of a sequence from ``position`` on; False when it could only forget all of them."""

    def launch(
        self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """Starts computing a batch. Raises ContextFullError (nothing changed) or DecodeError."""

    def launch_again(self) -> None:
        """Launches the last batch, every entry one position further and with the token that was sampled from it.

        Only after a ``sample`` of all its entries in their order. Raises as ``launch`` does.
        """

    def sample(self, rows: Sequence[int], samplers: Sequence[Any]) -> list[int]:
        """Draws and accepts a token for each output entry; -1 where no logit is finite."""

    def sample_again(self) -> list[int]:
        """``sample`` with the same rows and samplers."""

    def close(self) -> None:
        """Frees the context."""


class DirectPipeline:
    """An Executor over a context; belongs to the thread that uses it first, like the context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._native = native()
        new, n = self._native.ffi.new, context.n_batch
        self._tokens, self._positions, self._seq_ids = (new("int32_t[]", n) for _ in range(3))
        self._outputs = new("int8_t[]", n)
        self._rows, self._sampled = (new("int32_t[]", context.n_seq_max) for _ in range(2))
        self._samplers = new("lp_sampler *[]", context.n_seq_max)
        self._handle: Any = None  # the context's, from this thread's last launch or sample
        self._n = self._n_rows = 0  # entries of the last launch, rows of the last sample

    def remove(self, seq_id: int, position: int) -> bool:
        """Forgets the cells of a sequence from ``position`` on; False when it could only forget all of them."""
        if self._context.seq_remove(seq_id, position):
            return True
        self._context.seq_remove(seq_id)  # recurrent models keep no history to go back to
        return False

    def launch(
        self, tokens: Sequence[int], positions: Sequence[int], seq_ids: Sequence[int], outputs: Sequence[int]
    ) -> None:
        """Computes a batch of at most ``n_batch`` entries.

        Raises ContextFullError when no cells are left (nothing changed), DecodeError when llama.cpp fails.
        """
        self._handle = self._context.claim()
        n = self._n = len(tokens)
        self._tokens[0:n] = tokens
        self._positions[0:n] = positions
        self._seq_ids[0:n] = seq_ids
        self._outputs[0:n] = outputs
        code = self._native.lib.lp_decode(
            self._handle, n, self._tokens, self._positions, self._seq_ids, self._outputs
        )
        if code != 0:
            self._fail(code)

    def launch_again(self) -> None:
        """Computes the last batch, every entry one position further and with the token sampled from it.

        Raises as ``launch`` does.
        """
        code = self._native.lib.lp_decode_next(
            self._handle, self._n, self._tokens, self._positions, self._seq_ids, self._outputs, self._sampled
        )
        if code != 0:
            self._fail(code)

    def _fail(self, code: int) -> NoReturn:
        if code == 1:
            raise ContextFullError(f"no KV cells are left for a step of {self._n} tokens")
        raise self._context.decode_error(code)

    def sample(self, rows: Sequence[int], samplers: Sequence[SamplerChain]) -> list[int]:
        """Draws and accepts a token for each output entry of the last step; -1 where no logit is finite."""
        self._handle = self._context.claim()
        n = self._n_rows = len(rows)
        self._rows[0:n] = rows
        self._samplers[0:n] = [s.handle for s in samplers]
        return self.sample_again()

    def sample_again(self) -> list[int]:
        """``sample`` with the same rows and samplers."""
        native, n = self._native, self._n_rows
        code = native.lib.lp_sample_rows(self._handle, n, self._rows, self._samplers, self._sampled)
        if code < 0:
            raise RuntimeError(f"sampling failed: {last_error(native)}")
        return native.ffi.unpack(self._sampled, n)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Frees the context."""
        self._context.close()
        self._handle = None
