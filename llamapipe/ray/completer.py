"""``Completer``: answers the rows of batches with one engine; a class for ``Dataset.map_batches``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack

import pyarrow as arrow

from llamapipe.jobs.answers import Answerer
from llamapipe.params import SamplingParams
from llamapipe.ray.placement import cores_of_actor
from llamapipe.ray.rows import RowFormat
from llamapipe.ray.spec import EngineSpec


class Completer:
    """Answers batches of rows: adds a column for each part of the answers, ``error`` among them.

    A row that is wrong, or fails, has a text in ``error`` and nulls in the other columns; the other rows go on.
    ``complete`` is the short way. Use the class with ``map_batches`` for options of Ray that ``complete`` lacks::

        ds.map_batches(
            Completer,
            fn_constructor_kwargs={"spec": spec, "prompt": "question"},
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=4),
        )

    ``num_cpus``: the actor computes on at most this many cores; without it, ``n_sharing`` actors share a machine's.
    For the others see ``complete``. Batches must have the format ``"pyarrow"``. All batches of an actor share its
    engine, so several should be in flight.

    Raises as ``complete`` does, and what ``Model`` and ``Engine`` raise.
    """

    def __init__(
        self,
        spec: EngineSpec,
        prompt: str | None = None,
        messages: str | None = None,
        params: SamplingParams | None = None,
        options: str | None = None,
        prefix: str = "",
        num_cpus: float | None = None,
        n_sharing: int = 1,
    ) -> None:
        if not isinstance(spec, EngineSpec):
            raise TypeError(f"spec must be an EngineSpec, not {type(spec).__name__}")
        self._format = RowFormat(prompt, messages, options, params or SamplingParams(), prefix)
        self._undo = ExitStack()
        self.engine = self._undo.enter_context(spec.opened(cores_of_actor(num_cpus, n_sharing)))
        self._answerer = Answerer(self.engine, self._format.params)

    def __repr__(self) -> str:
        return f"<Completer {self.engine!r}>"

    async def __call__(self, batch: arrow.Table) -> AsyncIterator[arrow.Table]:
        """The rows of a batch with their answers, in their order: a batch that is run again gives the same rows."""
        if not isinstance(batch, arrow.Table):
            raise TypeError(
                f"a batch must be a pyarrow.Table: batch_format='pyarrow', not {type(batch).__name__}"
            )
        if batch.num_rows:
            self._format.check_columns(batch.column_names)
            records = self._format.records(batch)
            answers = await asyncio.gather(*(self._answerer.answer(record) for record in records))
            for name, column in self._format.columns(answers):
                batch = batch.append_column(name, column)
        yield batch

    def close(self) -> None:
        """Closes the engine and its model; a second call does nothing. Ray ends actors without it."""
        self._undo.close()
