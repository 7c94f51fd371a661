"""Runs batch jobs with Ray Data: ``complete`` answers a dataset's rows with a pool of engines.

``Completer`` is the class of the pool's actors, for ``Dataset.map_batches``. Rows become records of a batch job, and
answers become columns.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as arrow

from llamapipe._messages import listed, quoted
from llamapipe.arguments import check_int
from llamapipe.jobs.answers import Answerer, RecordResult, check_template, fill
from llamapipe.jobs.records import Record
from llamapipe.params import SamplingParams
from llamapipe.ray._spec import EngineSpec, cores_of_actor, n_sharing, range_of, ray, reservation

if TYPE_CHECKING:
    from ray.data import Dataset
    from ray.data.checkpoint import CheckpointConfig

_COLUMNS = {
    "text": arrow.string(),
    "finish_reason": arrow.string(),
    "seed": arrow.uint64(),
    "n_prompt_tokens": arrow.int64(),
    "n_completion_tokens": arrow.int64(),
    "error": arrow.string(),
}
_CHAT_COLUMNS = {"reasoning": arrow.string(), "tool_calls": arrow.string()}
_TEXTS = {"texts": arrow.list_(arrow.string())}
_LOGPROBS = {"logprobs": arrow.string()}
_JSON = ("tool_calls", "logprobs")


@dataclass(frozen=True)
class RowFormat:
    """The columns that a row's request is made from, and the columns of its answer.

    - ``prompt``: a column of texts or of lists of token ids; or a template such as ``"Translate: {text}"``.
    - ``messages``: instead of ``prompt``, a column of conversations: lists of objects, or JSON.
    - ``options``: a column with a row's options of ``SamplingParams``: objects, or JSON. Null means no options.
    - ``params``: options for rows that do not set them. ``prefix``: precedes the name of each added column.

    Raises TypeError and ValueError.
    """

    prompt: str | None = None
    messages: str | None = None
    options: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    prefix: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt", "messages", "options", "prefix"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "prefix"):
                raise TypeError(f"{name} must be a str, not {type(value).__name__}")
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(self.params).__name__}")
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt, a column or a template, or messages, a column")
        for name in ("prompt_logprobs", "logits_processors"):
            if getattr(self.params, name):
                raise ValueError(f"params has {name}, for which a table of answers has no column")
        if self.is_template:
            check_template(str(self.prompt))
            if not self.fields:
                raise ValueError(
                    f"the template {quoted(self.prompt)} names no column, so all prompts would be the same"
                )

    @property
    def is_template(self) -> bool:
        """Whether ``prompt`` is a template."""
        return self.prompt is not None and "{" in self.prompt

    @property
    def needed(self) -> list[str]:
        """The columns that rows must have."""
        return list(dict.fromkeys([*self.fields, *([] if self.options is None else [self.options])]))

    @property
    def fields(self) -> list[str]:
        """The columns that the prompt or the conversation is made from."""
        if not self.is_template:
            return [str(self.prompt if self.messages is None else self.messages)]
        return list(dict.fromkeys(check_template(str(self.prompt))))

    @property
    def added(self) -> dict[str, arrow.DataType]:
        """The columns of answers and their types, without the prefix. They are the same for all rows of a job."""
        columns = dict(_COLUMNS)
        if self.messages is not None:
            columns |= _CHAT_COLUMNS
        if self.params.n > 1 or self.options is not None:
            columns |= _TEXTS
        if self.params.logprobs is not None or self.options is not None:
            columns |= _LOGPROBS
        return columns

    def check_columns(self, names: Sequence[str]) -> None:
        """Raise ValueError if a column is missing, or if answers would replace one."""
        have = listed(names) or "none"
        for name in self.needed:
            if name not in names:
                kind = "" if name != self.prompt else "; a template names columns in braces: {text}"
                raise ValueError(f"there is no column {quoted(name)}; the rows have {have}{kind}")
        for name in self.added:
            if self.prefix + name in names:
                raise ValueError(
                    f"the rows have a column {quoted(self.prefix + name)} already, which answers would replace; "
                    f"prefix='answer_' names theirs 'answer_{name}'"
                )

    def records(self, table: arrow.Table) -> list[Record]:
        """Return the request of each row. A bad row has a ``problem``."""
        rows = table.select(self.needed).to_pylist()
        return [self._record(index, row) for index, row in enumerate(rows)]

    def _record(self, index: int, row: Mapping[str, Any]) -> Record:
        try:
            options = {} if self.options is None else _options(row[self.options])
            if self.is_template:
                return Record(index, {"prompt": fill(str(self.prompt), row), **options})
            if self.prompt is not None:
                if row[self.prompt] is None:
                    raise ValueError(f"the column {quoted(self.prompt)} is null")
                return Record(index, {"prompt": row[self.prompt], **options})
            messages = _load_json(row[str(self.messages)])
            if messages is None:
                raise ValueError(f"the column {quoted(self.messages)} is null")
            return Record(index, {"messages": _without_nulls(messages), **options})
        except (TypeError, ValueError, RecursionError) as error:
            return Record(index, {}, str(error))

    def columns(self, answers: Iterable[RecordResult]) -> list[tuple[str, arrow.Array]]:
        """Return the columns of the answers, with the prefix in their names."""
        results = [_row(answer.result) for answer in answers]
        return [
            (self.prefix + name, arrow.array([row.get(name) for row in results], kind))
            for name, kind in self.added.items()
        ]


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(result)
    if "error" in row:
        row["error"] = f"{row['error']['type']}: {row['error']['message']}"
    if "texts" in row:
        row["text"] = row["texts"][0]
    for name in _JSON:
        if name in row:
            row[name] = json.dumps(row[name], ensure_ascii=False)
    return {name: _text(value) if isinstance(value, str) else value for name, value in row.items()}


def _text(text: str) -> str:
    """Return a text that Arrow can hold: lone surrogates, which error messages may have, are replaced."""
    return text.encode("utf-8", "replace").decode()


def _load_json(value: object) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _options(value: object) -> dict[str, Any]:
    """Return the options of a row. Every row of a table has every field, so a null means that an option is not set."""
    options = _load_json(value)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise TypeError(f"options must be an object, not {type(options).__name__}")
    for name in ("prompt", "messages", "id", "custom_id"):
        if name in options:
            raise ValueError(f"{quoted(name)} is not an option")
    return options if isinstance(value, str) else {k: v for k, v in options.items() if v is not None}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class Completer:
    """Answers batches of rows and adds a column for each part of the answers, including ``error``.

    A row that is bad or fails has a text in ``error`` and nulls in the other columns; other rows are not affected.
    ``complete`` is shorter. Use the class with ``map_batches`` for options of Ray that ``complete`` lacks::

        ds.map_batches(
            Completer,
            fn_constructor_kwargs={"spec": spec, "prompt": "question"},
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=2, max_concurrent_calls_per_actor=4),
        )

    ``num_cpus``: the actor computes on at most this many cores; without it, ``n_sharing`` actors share a machine's
    cores. For the other arguments see ``complete``. Batches must have the format ``"pyarrow"``. All batches of an actor
    share its engine, so several should be in flight.

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
        self.engine = self._undo.enter_context(spec.open(cores_of_actor(num_cpus, n_sharing)))
        self._answerer = Answerer(self.engine, self._format.params)

    def __repr__(self) -> str:
        return f"<Completer {self.engine!r}>"

    async def __call__(self, batch: arrow.Table) -> AsyncIterator[arrow.Table]:
        """Yield a batch's rows with their answers, in order, so that a batch that is run again gives the same rows."""
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
        """Close the engine and its model; a second call does nothing. Ray ends actors without calling it."""
        self._undo.close()


_ROWS_PER_TASK = 128
# Concurrent tasks of an actor: rows of later tasks keep the engine full while the last rows of a task are computed.
_TASKS_PER_ACTOR = 4
# A job that is continued also needs a CPU for the actor that filters rows, and another CPU for reading.
_OTHER_CPUS = 2
_log = logging.getLogger("llamapipe.ray")


def complete(
    ds: Dataset,
    spec: EngineSpec,
    *,
    prompt: str | None = None,
    messages: str | None = None,
    params: SamplingParams | None = None,
    options: str | None = None,
    id: str | None = None,  # noqa: A002  (the name of the column that says it)
    actors: int | tuple[int, int] = 1,
    checkpoint: str | os.PathLike[str] | CheckpointConfig | None = None,
    prefix: str = "",
    rows_per_task: int | None = None,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
) -> Dataset:
    """Return the dataset with the answer to each row. The result is lazy: rows are computed as it is read or written.

    Rows keep their columns. The columns ``text``, ``finish_reason``, ``seed``, ``n_prompt_tokens``,
    ``n_completion_tokens`` and ``error`` are added, and for conversations also ``reasoning`` and ``tool_calls`` (JSON).
    A row that is bad or fails has a text in ``error``, and the job continues. If an engine fails, the job ends with an
    error.

    - ``prompt``: a column of texts or of lists of token ids; or a template such as ``"Translate: {text}"``.
      ``messages``: a column of conversations instead (extra ``chat``).
    - ``params``: options for all rows. ``options``: a column with a row's options of ``SamplingParams``, as objects or
      JSON. With ``options`` or ``params.n`` above 1, there is a column ``texts``; with ``options`` or
      ``params.logprobs``, also ``logprobs`` (JSON).
    - ``actors``: the number of actors, each with its own engine, or a pair of the fewest and the most.
    - ``checkpoint``: a folder that all machines see, or a ``CheckpointConfig``. Running the same program again resumes
      a job that was stopped for any reason: rows that ``write_parquet`` or other methods have written to files are not
      computed again, and each row is written once. A checkpoint needs ``id``, and a dataset that is read from files.
    - ``id``: the column that identifies a row: a text or a number, unique in the dataset.
    - ``prefix``: precedes the names of added columns.
    - ``rows_per_task``: how many rows are sent to an actor together, and computed again if the actor is killed;
      default: 128, or the engine's ``n_seq_max`` if that is more. Each actor runs four tasks at once.
    - ``num_cpus``, ``num_gpus``: how many CPUs and GPUs Ray reserves for an actor. An actor computes on at most
      ``num_cpus`` cores; None: Ray reserves one, and the engines on a machine divide its cores.

    An actor that dies is restarted with its tasks. Raises TypeError and ValueError for wrong arguments, ImportError
    without the extra ``ray``.
    """
    library = ray()
    import ray.data as ray_data

    if not isinstance(ds, ray_data.Dataset):
        raise TypeError(f"ds must be a Dataset of Ray Data, not {type(ds).__name__}")
    if not isinstance(spec, EngineSpec):
        raise TypeError(f"spec must be an EngineSpec, not {type(spec).__name__}")
    rows = RowFormat(prompt, messages, options, params or SamplingParams(), prefix)
    least, most = range_of("actors", actors, 1)
    n_rows = max(_ROWS_PER_TASK, spec.n_seq_max)
    if rows_per_task is not None:
        n_rows = check_int("rows_per_task", rows_per_task, 1, 2**31 - 1)
    resources = reservation(num_cpus, num_gpus)
    if id is not None and not isinstance(id, str):
        raise TypeError(f"id must be the name of a column, not {type(id).__name__}")
    schema = ds.schema(fetch_if_missing=False)
    if schema is not None:
        rows.check_columns(schema.names)
        if id is not None and id not in schema.names:
            raise ValueError(f"there is no column {id!r}; the rows have {', '.join(map(repr, schema.names))}")
    config = None
    if checkpoint is not None:
        config = _checkpoint(checkpoint, id)
    _warn_of_cpus(library, least, num_cpus, 1 if config is None else _OTHER_CPUS)
    arguments = {
        "spec": spec,
        "prompt": prompt,
        "messages": messages,
        "params": rows.params,
        "options": options,
        "prefix": prefix,
        "num_cpus": num_cpus,
        "n_sharing": n_sharing(library, most),
    }
    out = map_rows(ds, Completer, arguments, n_rows, (least, most), resources)
    if config is not None:
        out.context.checkpoint_config = config
    return out


def map_rows(
    ds: Dataset,
    kind: type[Completer],
    arguments: Mapping[str, object],
    n_rows: int,
    actors: tuple[int, int],
    resources: Mapping[str, Any],
) -> Dataset:
    """Return the dataset with the columns that actors of a class add. ``n_rows``: rows per task."""
    from ray.data import ActorPoolStrategy

    least, most = actors
    # Blocks of a file are large: unless they are split, thousands of rows would be a single task.
    return ds.repartition(target_num_rows_per_block=n_rows).map_batches(
        kind,
        fn_constructor_kwargs=dict(arguments),
        batch_size=n_rows,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ActorPoolStrategy(
            min_size=least, max_size=most, max_concurrent_calls_per_actor=_TASKS_PER_ACTOR
        ),
        **resources,
    )


def _checkpoint(
    checkpoint: str | os.PathLike[str] | CheckpointConfig, id_column: str | None
) -> CheckpointConfig:
    from ray.data.checkpoint import CheckpointConfig

    if isinstance(checkpoint, CheckpointConfig):
        if id_column is not None and id_column != checkpoint.id_column:
            raise ValueError(f"id is {id_column!r}, and the CheckpointConfig has {checkpoint.id_column!r}")
        return checkpoint
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise TypeError(f"checkpoint must be a folder or a CheckpointConfig, not {type(checkpoint).__name__}")
    if id_column is None:
        raise ValueError("checkpoint needs id, the column by which a row is known when the job continues")
    return CheckpointConfig(id_column=id_column, checkpoint_path=os.fsdecode(checkpoint))


def _warn_of_cpus(library: Any, n_actors: int, num_cpus: float | None, n_others: int) -> None:
    """Warn if a job would hang because Ray gives all CPUs to the actors and has none left for reading."""
    have = library.cluster_resources().get("CPU", 0)
    need = n_actors * (1 if num_cpus is None else num_cpus) + n_others
    if have < need:
        _log.warning(
            "Ray has %g CPUs, and this job needs %g: %d for its actors, %d to read rows and to see which are done. It "
            "waits until there are more; on one machine, ray.init(num_cpus=%d) counts more than there are",
            have,
            need,
            need - n_others,
            n_others,
            math.ceil(need),
        )
