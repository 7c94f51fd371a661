"""``complete``: answers the rows of a dataset of Ray Data with a pool of engines."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llamapipe.arguments import check_float, check_int
from llamapipe.params import SamplingParams
from llamapipe.ray.completer import Completer
from llamapipe.ray.library import ray
from llamapipe.ray.placement import n_sharing
from llamapipe.ray.rows import RowFormat
from llamapipe.ray.spec import EngineSpec

if TYPE_CHECKING:
    from ray.data import Dataset
    from ray.data.checkpoint import CheckpointConfig

_ROWS_PER_TASK = 128
# Tasks of one actor at once: the rows of the next ones keep the engine full while the last rows of one are computed.
_TASKS_PER_ACTOR = 4
# Besides the actors, a job that goes on needs a CPU for its filter of rows, which is an actor, and one for reading.
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
    """The dataset with the answer to each row; lazy, and streamed while it is read or written.

    The columns of the rows stay, and ``text``, ``finish_reason``, ``seed``, ``n_prompt_tokens``,
    ``n_completion_tokens`` and ``error`` are added, for conversations also ``reasoning`` and ``tool_calls`` (JSON).
    A row that is wrong, or fails, has a text in ``error``, and the job goes on.

    - ``prompt``: a column of texts or of lists of token ids; or a template, ``"Translate: {text}"``. ``messages``: a
      column of conversations instead (extra ``chat``).
    - ``params``: for all rows. ``options``: a column of options of ``SamplingParams`` for single rows, as objects or
      JSON. With it, or with ``params.n`` above 1, there is a column ``texts``; with it, or ``params.logprobs``, also
      ``logprobs`` (JSON).
    - ``actors``: the number of actors, each with an engine of its own, or the least and the most.
    - ``checkpoint``: a folder that all machines see, or a ``CheckpointConfig``. A job that was stopped, however that
      was, goes on when the same program is run again: what ``write_parquet`` and other methods that write files have
      written is not computed again, and each row is there once. Needs ``id``, and a dataset that is read from files.
    - ``id``: the column that identifies a row: a text or a number, unique in the dataset.
    - ``prefix``: before the names of the columns that are added.
    - ``rows_per_task``: rows that are sent to an actor together, and computed again if it is killed; default: 128, or
      the engine's ``n_seq_max`` if that is more. Four tasks of an actor run at once.
    - ``num_cpus``, ``num_gpus``: what Ray reserves for an actor. An actor computes on at most ``num_cpus`` cores;
      None: Ray reserves one, and the engines of a machine divide its cores among them.

    An actor that dies is started again, and its tasks with it. Raises TypeError and ValueError for wrong arguments,
    ImportError without the extra ``ray``.
    """
    library = ray()
    import ray.data as ray_data

    if not isinstance(ds, ray_data.Dataset):
        raise TypeError(f"ds must be a Dataset of Ray Data, not {type(ds).__name__}")
    if not isinstance(spec, EngineSpec):
        raise TypeError(f"spec must be an EngineSpec, not {type(spec).__name__}")
    rows = RowFormat(prompt, messages, options, params or SamplingParams(), prefix)
    least, most = _actors(actors)
    n_rows = max(_ROWS_PER_TASK, spec.n_seq_max)
    if rows_per_task is not None:
        n_rows = check_int("rows_per_task", rows_per_task, 1, 2**31 - 1)
    reserved: dict[str, Any] = {}
    if num_cpus is not None:
        reserved["num_cpus"] = check_float("num_cpus", num_cpus, 0.0, 4096.0)
    if num_gpus is not None:
        reserved["num_gpus"] = check_float("num_gpus", num_gpus, 0.0, 1024.0)
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
    given = {
        "spec": spec,
        "prompt": prompt,
        "messages": messages,
        "params": rows.params,
        "options": options,
        "prefix": prefix,
        "num_cpus": num_cpus,
        "n_sharing": n_sharing(library, most),
    }
    out = mapped(ds, Completer, given, n_rows, (least, most), reserved)
    if config is not None:
        out.context.checkpoint_config = config
    return out


def mapped(
    ds: Dataset,
    kind: type[Completer],
    arguments: Mapping[str, object],
    n_rows: int,
    actors: tuple[int, int],
    reserved: Mapping[str, Any],
) -> Dataset:
    """The dataset with the columns that actors of a class add. ``n_rows``: rows of a task."""
    from ray.data import ActorPoolStrategy

    least, most = actors
    # Blocks of a file are large: without this, thousands of rows would be one task of one actor.
    return ds.repartition(target_num_rows_per_block=n_rows).map_batches(
        kind,
        fn_constructor_kwargs=dict(arguments),
        batch_size=n_rows,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ActorPoolStrategy(
            min_size=least, max_size=most, max_concurrent_calls_per_actor=_TASKS_PER_ACTOR
        ),
        **reserved,
    )


def _actors(actors: int | tuple[int, int]) -> tuple[int, int]:
    pair = actors if isinstance(actors, tuple) else (actors, actors)
    if len(pair) != 2:
        raise ValueError(f"actors is {actors}; give a number, or the least and the most")
    least, most = (check_int("actors", n, 1, 100_000) for n in pair)
    if least > most:
        raise ValueError(f"actors is {actors}; the least must not be more than the most")
    return least, most


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
        raise ValueError("checkpoint needs id, the column by which a row is known when the job goes on")
    return CheckpointConfig(id_column=id_column, checkpoint_path=os.fsdecode(checkpoint))


def _warn_of_cpus(library: Any, n_actors: int, num_cpus: float | None, n_others: int) -> None:
    """Warns where a job would wait: Ray gives its CPUs to the actors first, and then has none to read with."""
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
