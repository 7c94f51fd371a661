"""``EngineSpec``: a description from which a process creates its engine. Unlike an engine, it can be pickled."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from llamapipe._lazy import needs_extra
from llamapipe._messages import did_you_mean, quoted
from llamapipe.arguments import check_float, check_int
from llamapipe.engine import Engine, EngineTuning, with_tuning
from llamapipe.errors import ModelLoadError
from llamapipe.gguf.adapter import is_activated
from llamapipe.host.cores import usable_cores
from llamapipe.host.cpu_load import limit_cores
from llamapipe.hub import PREFIX, model_file, parse
from llamapipe.llama.adapter import check_adapter_name, local_file
from llamapipe.llama.model import Model


def ray() -> Any:
    """Import the package ``ray`` and return it. Raises ImportError."""
    with needs_extra("llamapipe.ray", "ray"):
        return import_module("ray")


def n_sharing(ray: Any, n_actors: int) -> int:
    """Estimate how many actors share a machine: the number of actors per machine, rounded up."""
    n_machines = sum(1 for node in ray.nodes() if node["Alive"]) if ray.is_initialized() else 1
    return -(-n_actors // max(n_machines, 1))


def cores_of_actor(num_cpus: float | None, n_sharing: int) -> int | None:
    """Return how many cores this actor may use: as many as Ray reserved, or its share of the machine's.

    ``n_sharing``: how many actors share the machine. Returns None for all cores that other work leaves free.
    """
    if num_cpus:
        return math.ceil(num_cpus)
    return max(usable_cores() // n_sharing, 1) if n_sharing > 1 else None


def range_of(name: str, value: int | tuple[int, int], low: int) -> tuple[int, int]:
    """Return the minimum and the maximum; ``value``: the two, or one number for both. Raises TypeError, ValueError."""
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2:
        raise ValueError(f"{name} is {value}; give a number, or a pair of minimum and maximum")
    least, most = (check_int(name, n, low, 100_000) for n in pair)
    if least > most or most == 0:
        also = "" if low else ", and the maximum must be at least 1"
        raise ValueError(f"{name} is {value}; the minimum must not exceed the maximum{also}")
    return least, most


def reservation(num_cpus: float | None, num_gpus: float | None) -> dict[str, float]:
    """Return Ray's options for the CPUs and GPUs of an actor. Raises TypeError, ValueError."""
    values = (("num_cpus", num_cpus, 4096.0), ("num_gpus", num_gpus, 1024.0))
    return {name: check_float(name, n, 0.0, most) for name, n, most in values if n is not None}


_NOT_PICKLED = {"path", "model", "progress"}


@dataclass(frozen=True)
class EngineSpec:
    """A model and the options of the engine that runs it. Frozen; can be pickled.

    - ``model``: the path of a GGUF file, which each machine must have; or ``hf:OWNER/REPO`` or
      ``hf:OWNER/REPO/FILE.gguf`` on the Hugging Face Hub (extra ``hub``), which each machine downloads once.
    - ``engine_options``: arguments of ``Engine`` and ``EngineTuning``, such as ``{"n_ctx": 2048, "n_ubatch": 1024}``.
    - ``model_options``: arguments of ``Model``, such as ``{"n_gpu_layers": 20}``.
    - ``adapters``, ``control_vectors``: mappings from the names that requests use (``SamplingParams.adapter``; over
      HTTP, ``model``) to GGUF files, which are named as ``model`` is.

    The values of options are checked when the engine is created.

    Raises TypeError for wrong types, ValueError for options that ``Engine`` and ``Model`` do not have, for bad
    references to files, and for a name that both an adapter and a control vector have.
    """

    model: str | os.PathLike[str]
    engine_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    model_options: Mapping[str, object] = field(default_factory=dict, hash=False)
    adapters: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict, hash=False)
    control_vectors: Mapping[str, str | os.PathLike[str]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, os.PathLike)):
            raise TypeError(
                f"model must be a path or hf:OWNER/REPO/FILE, not {type(self.model).__name__}: an open model "
                "cannot be sent to another process"
            )
        name = os.fsdecode(self.model)
        if name.startswith(PREFIX):
            parse(name)
        object.__setattr__(self, "model", name)
        tuning = EngineTuning.__dataclass_fields__.keys()
        for options, kind, more in (("engine_options", Engine, tuning), ("model_options", Model, ())):
            values = getattr(self, options)
            if not isinstance(values, Mapping):
                raise TypeError(f"{options} must be a mapping, not {type(values).__name__}")
            known = {*inspect.signature(kind).parameters, *more} - _NOT_PICKLED
            for option in values:
                if option not in known:
                    hint = did_you_mean(str(option), known)
                    raise ValueError(
                        f"{options} has {quoted(option)}, which is not an option of {kind.__name__} here{hint}"
                    )
            object.__setattr__(self, options, dict(values))
        for files in ("adapters", "control_vectors"):
            object.__setattr__(self, files, _check_files(files, getattr(self, files)))
        if both := self.adapters.keys() & self.control_vectors.keys():
            raise ValueError(f"{quoted(min(both))} is the name of an adapter and of a control vector")

    @property
    def n_seq_max(self) -> int:
        """The number of requests that the engine computes at once. Raises TypeError, ValueError for a bad option."""
        default = inspect.signature(Engine).parameters["n_seq_max"].default
        n = self.engine_options.get("n_seq_max", default)
        return check_int("n_seq_max", n, 1, 2**31 - 1)  # type: ignore[arg-type]

    def model_path(self) -> Path:
        """Return the model's file on this machine; download it first if it is on the Hub and not in the cache.

        A local path is not checked. Raises ImportError without the extra ``hub``, ModelLoadError if the Hub has no such
        model.
        """
        name = os.fsdecode(self.model)
        if not name.startswith(PREFIX):
            return Path(name)
        reference = parse(name)
        return model_file(reference.repo_id, reference.filename, progress=False)

    @contextmanager
    def open(self, n_cores: int | None = None) -> Iterator[Engine]:
        """Open an engine in this process until the block ends. Raises what ``Model`` and ``Engine`` raise.

        ``n_cores``: this process computes on at most this many cores; None: all that it may use. The option
        ``n_threads`` takes precedence.
        """
        if n_cores is not None:
            limit_cores(n_cores)
        with Model(self.model_path(), **self.model_options) as model:  # type: ignore[arg-type]
            for name, file in self.adapters.items():
                model.load_adapter(file, name)
            for name, file in self.control_vectors.items():
                model.load_control_vector(file, name=name)
            with Engine(model, **with_tuning(self.engine_options)) as engine:
                yield engine


def activated_loras(spec: EngineSpec) -> list[str]:
    """Return the names of the activated LoRAs whose files this machine has or can download."""
    return [name for name, file in spec.adapters.items() if _is_activated(file)]


def _is_activated(file: str | os.PathLike[str]) -> bool:
    try:
        return is_activated(local_file(file))
    except (ImportError, ModelLoadError):  # the replicas report the error
        return False


def _check_files(kind: str, by_name: object) -> dict[str, str]:
    """Return the files of adapters by name, after checking both. Raises TypeError, ValueError."""
    if not isinstance(by_name, Mapping):
        raise TypeError(f"{kind} must be a mapping from names to files, not {type(by_name).__name__}")
    files = {}
    for name, file in by_name.items():
        if not isinstance(file, (str, os.PathLike)):
            raise TypeError(
                f"the file of {quoted(check_adapter_name(name))} must be a path, not {type(file).__name__}"
            )
        files[check_adapter_name(name)] = text = os.fsdecode(file)
        if text.startswith(PREFIX):
            parse(text)
    return files
