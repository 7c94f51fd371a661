"""Reads the models of ``llamapipe serve --models``: folders of GGUF files, TOML files that list models, and stores.

``entries_of`` reads and checks the lists; it reads only the first bytes of files in a folder. ``look`` finds out what
loading a model needs: its file, whether it embeds or generates, and the memory that its process will take.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import llamapipe as lp
from llamapipe import hub
from llamapipe._messages import did_you_mean, listed, quoted, readable
from llamapipe._options import MTP_CHOICES
from llamapipe._sampling_table import Kind
from llamapipe.arguments import path_of
from llamapipe.cli.options import ENGINE, MODEL, draft_source, model_path, reader_of
from llamapipe.cli.parser import UsageError
from llamapipe.fleet.catalog import FileFacts, ModelEntry, hub_entries
from llamapipe.fleet.model_memory import need_of
from llamapipe.gguf.check import GgufInfo, check_gguf, head_texts
from llamapipe.gguf.mmproj import MmprojInfo, check_mmproj, is_mmproj, mmproj_beside
from llamapipe.gguf.reader import fingerprint, first_texts
from llamapipe.llama.adapter import local_file
from llamapipe.ollama_models import PREFIX as OLLAMA
from llamapipe.ollama_models import find_stored, folders, model_of, stored_models, unusable_models
from llamapipe.server.routes.ollama_descriptions import QUANTIZATIONS, parameter_size

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PART = re.compile(r"(.+)-(\d{5})-of-\d{5}")
_OF_LIST = ("file", "aliases", "embeddings", "keep", "preload", "ttl")
_OF_MODEL = {option.name: option for option in (*ENGINE, *MODEL)}
# Options that name a file, and the words that they take in its place.
_FILES: dict[str, tuple[str, ...]] = {"draft": MTP_CHOICES, "mmproj": ("auto", "off")}
_PLACEMENT = ("n_gpu_layers", "rpc")
_ADAPTERS = ("lora", "control_vector")
_TEXTS = ("chat_template", "tool_calls", "fim_order", "reasoning", "template_args", "system")
_SOURCES = f"give a folder of GGUF files, a .toml file, {OLLAMA} or {hub.PREFIX}OWNER/REPO"
_MOST_TTL_S = 100_000_000  # three years; dates end at some time
_PROCESS_BYTES = 110 * 2**20  # of the interpreter and its libraries


def entries_of(sources: Sequence[str], may_be_empty: bool = False) -> list[ModelEntry]:
    """Return the models of all sources. ``may_be_empty``: clients may add models. Raises UsageError, OSError."""
    entries = [entry for source in sources for entry in _entries(source)]
    if not entries and not may_be_empty:
        raise UsageError(f"--models: there are no models in {listed(sources)}")
    return entries


def _entries(source: str) -> list[ModelEntry]:
    if source == OLLAMA:
        stored = stored_models()
        for reason in unusable_models():
            print(f"llamapipe: --models: left out: {reason}", file=sys.stderr)
        if not stored:
            where = " and ".join(map(str, folders()))
            raise UsageError(f"--models: Ollama has no models in {where} (OLLAMA_MODELS sets the folder)")
        return [ModelEntry(model.name.removesuffix(":latest"), OLLAMA + model.name) for model in stored]
    if source == hub.PREFIX:
        try:
            return hub_entries(hub.cached_models())
        except ImportError as e:
            raise UsageError(f"--models: {e}") from None
    if source.startswith(hub.PREFIX):
        try:
            hub.parse(source)
        except ValueError as e:
            raise UsageError(f"--models: {e}") from None
        return [ModelEntry(source.removeprefix(hub.PREFIX), source)]
    path = path_of(source)
    if path.is_dir():
        return _in_folder(path)
    if not path.exists():
        raise UsageError(f"--models: {path} does not exist; {_SOURCES}")
    if path.suffix.lower() != ".toml":
        raise UsageError(f"--models: {path} is not a list of models; {_SOURCES}")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as e:  # also of numbers that are too long, or lists that are too deep
        raise UsageError(f"--models: {path} is no TOML: {e}") from None
    tables = document.pop("models", None)
    if document or not isinstance(tables, dict) or not tables:
        raise UsageError(
            f"--models: {path} must have a table [models.NAME] for each model"
            + (f", and nothing else; it has {listed(document)}" if document else "")
        )
    return [_entry(path, name, table) for name, table in tables.items()]


def _in_folder(folder: Path) -> list[ModelEntry]:
    """Return a model for each file in a folder and its subfolders, under the file's name."""
    entries: dict[str, ModelEntry] = {}
    for file in sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]):
        part = _PART.fullmatch(file.stem)
        if is_mmproj(file.name) or (part is not None and int(part[2]) != 1) or _accompanies(file):
            continue
        name = readable(file.stem if part is None else part[1])
        if name in entries:
            raise UsageError(
                f"--models: {entries[name].file} and {file} have one name; list them in a TOML file"
            )
        entries[name] = ModelEntry(name, str(file))
    if not entries:
        raise UsageError(f"--models: {folder} has no GGUF files")
    return list(entries.values())


def _accompanies(file: Path) -> bool:
    """Return whether a file is an adapter, control vector, projector or importance matrix instead of a model."""
    texts = first_texts(file)
    architecture = texts.get("general.architecture")
    return texts.get("general.type", "model") != "model" or architecture in ("clip", "controlvector")


def _entry(path: Path, name: str, table: Any) -> ModelEntry:
    where = f"--models: {path}: models.{name}"
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    values = {key.replace("-", "_"): value for key, value in table.items()}
    if len(values) < len(table):
        twice = next(key for key in table if "-" in key and key.replace("-", "_") in table)
        raise UsageError(f"{where} has {twice} and {twice.replace('-', '_')}, which are one option; give one")
    known = [*_OF_LIST, *_OF_MODEL, *_TEXTS, *_ADAPTERS]
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known, "models file") or f"; there is {', '.join(sorted(known))}"
            raise UsageError(f"{where}.{key} is unknown{hint}")
    file = values.pop("file", None)
    if not isinstance(file, str) or not file:
        raise UsageError(f"{where}.file is missing: a GGUF file, hf:OWNER/REPO/FILE or ollama:NAME")
    aliases = values.pop("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise UsageError(f"{where}.aliases must be a list of names")
    flags = {key: values.pop(key, None) for key in ("embeddings", "keep", "preload")}
    for key, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise UsageError(f"{where}.{key} must be true or false")
    adapters = {key: _files(f"{where}.{key}", values.pop(key, {}), path.parent) for key in _ADAPTERS}
    ttl = values.pop("ttl", None)
    is_number = isinstance(ttl, int | float) and not isinstance(ttl, bool)
    if ttl is not None and not (is_number and 0 <= ttl <= _MOST_TTL_S):
        raise UsageError(
            f"{where}.ttl must be seconds without a request, from 0 to {_MOST_TTL_S}; without it the model stays"
        )
    options = {key: _value(f"{where}.{key}", key, value, path.parent) for key, value in values.items()}
    return ModelEntry(
        name,
        _place(file, path.parent),
        tuple(aliases),
        options | {key: files for key, files in adapters.items() if files},
        flags["embeddings"],
        bool(flags["keep"]),
        bool(flags["preload"]),
        None if ttl is None else float(ttl),
        tuple(adapter for files in adapters.values() for adapter, _ in files),
    )


def _place(file: str, folder: Path) -> str:
    """Return the path of a model's file; names on the Hub or in Ollama's store are unchanged."""
    return file if file.startswith(("hf:", OLLAMA)) else _path(file, folder)


def _path(file: str, folder: Path) -> str:
    """Return a path relative to the list's folder, or to the home folder if it begins with ``~``."""
    try:
        return str(folder / path_of(file))
    except ValueError as e:  # there is no home folder
        raise UsageError(f"--models: {e}") from None


def _files(where: str, value: Any, folder: Path) -> list[tuple[str, str]]:
    """Return a table's names and files, as they would be parsed from ``NAME=FILE`` on the command line."""
    if not isinstance(value, dict) or not all(isinstance(file, str) and file for file in value.values()):
        raise UsageError(f'{where} must be a table of names and files, such as {{ style = "style.gguf" }}')
    return [(name, _place(file, folder)) for name, file in value.items()]


def _value(where: str, name: str, value: Any, folder: Path) -> Any:
    """Return an option's value as the command line would parse it."""
    if name in _FILES:
        if not isinstance(value, str):
            raise UsageError(f"{where} must be text, the name of a GGUF file")
        return value if value in _FILES[name] else _place(value, folder)
    if name == "chat_template" and isinstance(value, str) and "{" not in value:
        return _path(value, folder)
    if name == "cache_dir" and isinstance(value, str):
        return _path(value, folder)
    if name == "system" and isinstance(value, str) and value.startswith("@"):
        return f"@{_path(value[1:], folder)}"
    option = _OF_MODEL.get(name)
    if option is not None and option.repeats:
        if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
            raise UsageError(f'{where} must be a list of texts, such as ["{option.metavar}"]')
        return value
    if option is None or reader_of(option) is str:
        if not isinstance(value, str):
            raise UsageError(f"{where} must be text")
        return value
    if option.kind is Kind.FLAG:
        if not isinstance(value, bool):
            raise UsageError(f"{where} must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where} must be a number")
    least = -1 if name == "n_gpu_layers" else 0
    if not value >= least:  # before the list replaces a good one; its load finds the other limits
        raise UsageError(f"{where} is {value}; it must be {least} or more")
    try:
        return reader_of(option)(str(value))
    except (ValueError, argparse.ArgumentTypeError) as e:
        raise UsageError(f"{where} is {quoted(str(value))}: {e}") from None


# ---- what a load needs
async def look(common: Mapping[str, Any], entry: ModelEntry, has_gpus: bool = False) -> FileFacts:
    """Find out what a load needs. ``common``: command-line options for all models. Raises OSError, ValueError.

    ``has_gpus``: there are GPUs with dedicated memory.
    """
    return await asyncio.to_thread(read_facts, common, entry, has_gpus)


def read_facts(common: Mapping[str, Any], entry: ModelEntry, has_gpus: bool = False) -> FileFacts:
    """Do the work of ``look``, blocking; a file on the Hub is downloaded if necessary."""
    placement = {name: common[name] for name in _PLACEMENT if name in common}
    options = {**(placement if entry.embeds else common), **entry.options}
    extra: dict[str, Any] = {}
    try:
        path = model_path(entry.file)
        stored = model_of(path)
        info = check_gguf(path if stored is None else stored[0])
        if "draft" in options:
            extra["draft"] = str(draft_source(str(options["draft"])))
        embeds = (not info.is_causal or info.has_rank_head) if entry.embeds is None else entry.embeds
        model_options = {**placement, **entry.options} if embeds else {**options, **extra}
        need = need_of(info, embeds, model_options, has_gpus)
        texts = head_texts(info.path)
        beside = [local_file(file) for key in _ADAPTERS for _, file in entry.options.get(key, ())]
        projector = None if embeds else _projector(entry.options.get("mmproj", "auto"), info, texts)
        beside += [] if projector is None else [projector.path]
    except (argparse.ArgumentTypeError, lp.errors.LlamapipeError, ImportError) as e:
        raise ValueError(str(e)) from None
    return FileFacts(
        str(path),
        embeds,
        need.n_bytes + sum(file.stat().st_size for file in beside) + _PROCESS_BYTES,
        {} if embeds else {"cache_bytes": need.cache_bytes, **extra},
        need.n_ctx,
        _takes(projector),
        _details(texts, info),
        info.size_bytes,
        info.stamps[0].modified_ns / 1e9,
        sha256(fingerprint(info.path)).hexdigest() if stored is None else find_stored(stored[1]).digest,
        need.gpu_bytes,
    )


def _projector(mmproj: str, info: GgufInfo, texts: Mapping[str, str]) -> MmprojInfo | None:
    """Return the projector that the model will load, if any. Raises ValueError, ModelLoadError."""
    if mmproj == "off":
        return None
    if mmproj == "auto":
        projectors = mmproj_beside(info.path, info.n_embd, lambda: texts.get("general.name", ""))
        return projectors[0] if len(projectors) == 1 else None
    if mmproj.startswith("hf:"):
        repo_id, filename = hub.parse(mmproj)
        return check_mmproj(hub.model_file(repo_id, filename or hub.MMPROJ))
    return check_mmproj(mmproj)


def sees_images(entry: ModelEntry) -> bool:
    """Return whether ``mmproj`` names a local file with an image encoder. A load reports files that cannot be read."""
    mmproj = entry.options.get("mmproj", "auto")
    if mmproj in ("auto", "off") or str(mmproj).startswith("hf:"):
        return False
    try:
        return check_mmproj(mmproj).sees
    except (lp.errors.LlamapipeError, OSError):
        return False


def _takes(projector: MmprojInfo | None) -> tuple[str, ...]:
    """Return the kinds of content that messages for the model may contain."""
    if projector is None:
        return ("text",)
    return ("text", *["image"] * projector.sees, *["audio"] * projector.hears)


def _details(texts: dict[str, str], info: GgufInfo) -> dict[str, Any]:
    """Return a model's details for Ollama's lists."""
    family = info.architecture
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family],
        "parameter_size": parameter_size(sum(math.prod(tensor.dims) for tensor in info.tensors)),
        "quantization_level": QUANTIZATIONS.get(texts.get("general.file_type", ""), "unknown"),
        "context_length": info.n_ctx_train,
        "embedding_length": info.n_embd,
    }
