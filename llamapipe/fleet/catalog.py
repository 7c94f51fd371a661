"""The models that a server may load: their names, their files, and the facts known before a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from llamapipe import hub
from llamapipe._messages import quoted, readable


class FileFacts(NamedTuple):
    """Facts about a model that its file tells before a load.

    ``n_bytes``, ``gpu_bytes``: the system memory and the GPU memory that its process will take. ``options``: engine
    options that keep it within that memory. ``n_ctx``: the maximum tokens of a request. ``takes``: ``"text"``, and
    ``"image"`` and ``"audio"`` if messages may have them. ``details``: as in Ollama's lists. ``size_bytes``,
    ``modified_s``, ``digest``: the file's size, its Unix time of modification, and its digest.
    """

    file: str
    embeds: bool
    n_bytes: int
    options: Mapping[str, Any]
    n_ctx: int
    takes: tuple[str, ...]
    details: Mapping[str, Any]
    size_bytes: int
    modified_s: float
    digest: str
    gpu_bytes: int = 0


@dataclass(frozen=True)
class ModelEntry:
    """A model that a pool may load.

    ``file``: as ``--model`` takes it. ``options``: command-line options, by the names of their arguments. ``embeds``:
    whether it embeds or ranks texts; None: the file decides. ``keep``: it is never ended for another model.
    ``preload``: it is loaded at the start. ``ttl_s``: seconds without a request after which it is ended; None: never.
    ``adapters``: names of its adapters, which clients use like model names. ``reference``: the value of ``-m`` for a
    file in the hub's cache, which clients may delete if the operator allows it.
    """

    name: str
    file: str
    aliases: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    embeds: bool | None = None
    keep: bool = False
    preload: bool = False
    ttl_s: float | None = None
    adapters: tuple[str, ...] = ()
    reference: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", readable(self.name))
        object.__setattr__(self, "aliases", tuple(map(readable, self.aliases)))

    @property
    def is_local(self) -> bool:
        """Whether its file is on this machine and needs no download."""
        return not self.file.startswith(hub.PREFIX)

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use."""
        return (self.name, *self.aliases)

    @property
    def taken_names(self) -> tuple[str, ...]:
        """The names that no other model may have: its own names and those of its adapters."""
        return (*self.names, *self.adapters)

    def is_same_process(self, other: ModelEntry) -> bool:
        """Return whether one process can serve both: they differ only in settings of the front process."""
        return (
            replace(self, aliases=other.aliases, keep=other.keep, preload=other.preload, ttl_s=other.ttl_s)
            == other
        )


def hub_entries(cached: Sequence[hub.CachedModel]) -> list[ModelEntry]:
    """Return the entries of models in the hub's cache.

    They are named as Ollama's clients name them: ``hf.co/OWNER/REPO:QUANT``. If the file's name has no quantization, or
    another file has the same one, the name is ``hf.co/OWNER/REPO/FILE``.
    """
    entries: dict[str, ModelEntry] = {}
    for model in cached:
        repo_id, filename = hub.parse(model.reference)
        assert filename is not None
        quantization = hub.quantization_of(filename)
        name = f"hf.co/{repo_id}:{quantization}"
        if quantization is None or name in entries:
            name = f"hf.co/{repo_id}/{filename}"
        entries[name] = ModelEntry(name, str(model.path), reference=model.reference)
    return list(entries.values())


def taken_names(entries: Sequence[ModelEntry]) -> set[str]:
    """Return the names of all models and adapters. Raises ValueError if two models have the same name."""
    owners: dict[str, ModelEntry] = {}
    for entry in entries:
        for name in set(entry.taken_names):
            if name in owners:
                raise ValueError(
                    f"two models have the name {quoted(name)}: {owners[name].name} and {entry.name}"
                )
            owners[name] = entry
    return set(owners)
