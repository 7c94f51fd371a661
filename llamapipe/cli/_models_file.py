"""What ``llamapipe serve --models`` names: a folder of GGUF files, or a TOML file that lists models.

``entries_of`` reads the list and checks it; no model's file is opened. ``look`` finds out what loading one needs: its
file, whether it embeds or generates, and the memory that its process will take.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import sys
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import llamapipe as lp
from llamapipe._messages import did_you_mean, listed, quoted
from llamapipe.cli.options import ENGINE, MODEL, Option, model_path
from llamapipe.cli.parser import UsageError
from llamapipe.gguf.check import GgufInfo, check_gguf, head_texts
from llamapipe.gguf.reader import fingerprint
from llamapipe.llama.kv_memory import TYPE_BYTES, cell_bytes
from llamapipe.ollama_models import PREFIX as OLLAMA
from llamapipe.ollama_models import find_stored, model_of
from llamapipe.server.ollama import QUANTIZATIONS, parameter_size
from llamapipe.server.pool import Found, ModelEntry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PART = re.compile(r"(.+)-(\d{5})-of-\d{5}")
_OF_LIST = ("file", "aliases", "embeddings", "keep", "preload", "ttl")
_OF_MODEL: dict[str, Option] = {option.name: option for option in (*ENGINE, *MODEL)}
_TEXTS = ("chat_template", "tool_calls", "fim_order")
# Beside weights and cells: the interpreter and its libraries, and what a step computes with, which grows with the
# vocabulary. Measured with SmolLM2 135M and Qwen2.5 0.5B: 140 and 238 MiB; this gives 158 and 258.
_PROCESS_BYTES = 110 * 2**20
_STEP_ROWS = 256
_CACHE_SHARE = 0.1  # of weights and cells, for cached prefixes that have lost their slot
_USUAL_CONTEXT, _USUAL_SLOTS = 4096, 8
_USUAL_TEXT = 2048  # tokens of a text to embed


def entries_of(path: Path) -> list[ModelEntry]:
    """The models of a folder or of a TOML file. Raises UsageError, OSError."""
    if path.is_dir():
        return _in_folder(path)
    if path.suffix.lower() != ".toml":
        raise UsageError(f"--models: {path} is neither a folder of GGUF files nor a .toml file")
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise UsageError(f"--models: {path} is no TOML: {e}") from None
    tables = document.pop("models", None)
    if document or not isinstance(tables, dict) or not tables:
        raise UsageError(
            f"--models: {path} must have a table [models.NAME] for each model"
            + (f", and nothing else; it has {listed(document)}" if document else "")
        )
    return [_entry(path, name, table) for name, table in tables.items()]


def _in_folder(folder: Path) -> list[ModelEntry]:
    """A model for each file, under its name; those in folders of the folder, too."""
    made: dict[str, ModelEntry] = {}
    for file in sorted([*folder.glob("*.gguf"), *folder.glob("*/*.gguf")]):
        part = _PART.fullmatch(file.stem)
        if file.name.startswith("mmproj") or (part is not None and int(part[2]) != 1):
            continue
        name = file.stem if part is None else part[1]
        if name in made:
            raise UsageError(
                f"--models: {made[name].file} and {file} have one name; list them in a TOML file"
            )
        made[name] = ModelEntry(name, str(file))
    if not made:
        raise UsageError(f"--models: {folder} has no GGUF files")
    return list(made.values())


def _entry(path: Path, name: str, table: Any) -> ModelEntry:
    where = f"--models: {path}: models.{name}"
    if not isinstance(table, dict):
        raise UsageError(f"{where} must be a table")
    given = {key.replace("-", "_"): value for key, value in table.items()}
    known = [*_OF_LIST, *_OF_MODEL, *_TEXTS]
    for key in given:
        if key not in known:
            raise UsageError(f"{where}.{key} is unknown{did_you_mean(key, known)}; there is {listed(known)}")
    file = given.pop("file", None)
    if not isinstance(file, str) or not file:
        raise UsageError(f"{where}.file is missing: a GGUF file, hf:OWNER/REPO/FILE or ollama:NAME")
    aliases = given.pop("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise UsageError(f"{where}.aliases must be a list of names")
    flags = {key: given.pop(key, None) for key in ("embeddings", "keep", "preload")}
    for key, value in flags.items():
        if value is not None and not isinstance(value, bool):
            raise UsageError(f"{where}.{key} must be true or false")
    ttl = given.pop("ttl", None)
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, int | float) or not ttl >= 0):
        raise UsageError(f"{where}.ttl must be seconds without a request, from 0 up")
    return ModelEntry(
        name,
        file if file.startswith(("hf:", OLLAMA)) else str(path.parent / file),
        tuple(aliases),
        {key: _value(f"{where}.{key}", key, value, path.parent) for key, value in given.items()},
        flags["embeddings"],
        bool(flags["keep"]),
        bool(flags["preload"]),
        None if ttl is None else float(ttl),
    )


def _value(where: str, name: str, value: Any, folder: Path) -> Any:
    """An option's value, as the command line would have it."""
    if name == "chat_template" and isinstance(value, str) and "{" not in value:
        return str(folder / value)
    option = _OF_MODEL.get(name)
    if option is None or option.read is str:
        if not isinstance(value, str) and not (option is not None and option.repeats):
            raise UsageError(f"{where} must be text")
        return value
    if option.read is bool:
        if not isinstance(value, bool):
            raise UsageError(f"{where} must be true or false")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where} must be a number")
    try:
        return option.read(str(value))
    except (ValueError, argparse.ArgumentTypeError) as e:
        raise UsageError(f"{where} is {quoted(str(value))}: {e}") from None


# ---- what a load needs
async def look(common: Mapping[str, Any], entry: ModelEntry) -> Found:
    """What a load needs. ``common``: options of the command line. Raises OSError, ValueError."""
    return await asyncio.to_thread(partial(found_of, common, entry))


def found_of(common: Mapping[str, Any], entry: ModelEntry) -> Found:
    """The same, waiting; a file of the hub is downloaded if need be."""
    try:
        path = model_path(entry.file)
        stored = model_of(path)
        info = check_gguf(path if stored is None else stored[0])
    except (argparse.ArgumentTypeError, lp.errors.LlamapipeError, ImportError) as e:
        raise ValueError(str(e)) from None
    embeds = entry.embeds
    if embeds is None:
        embeds = not info.is_causal or info.has_rank_head
    options = {**common, **entry.options}
    texts = head_texts(info.path)
    if embeds:
        n_ctx = entry.options.get("n_ctx") or min(info.n_ctx_train, _USUAL_TEXT)
    else:
        n_ctx = _n_ctx(info.n_ctx_train, options)
    held = info.size_bytes + (0.0 if embeds else _cells_bytes(texts, info, n_ctx, options))
    n_cache_bytes = 0 if embeds else options.get("cache_bytes", int(held * _CACHE_SHARE))
    steps = 4 * info.n_vocab * _STEP_ROWS
    return Found(
        str(path),
        embeds,
        int(held + n_cache_bytes + steps + _PROCESS_BYTES),
        {} if embeds else {"cache_bytes": n_cache_bytes},
        n_ctx,
        _details(texts, info),
        info.size_bytes,
        info.stamps[0].modified_ns / 1e9,
        sha256(fingerprint(info.path)).hexdigest() if stored is None else find_stored(stored[1]).digest,
    )


def _details(texts: dict[str, str], info: GgufInfo) -> dict[str, Any]:
    """What Ollama's lists say about a model."""
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


def _n_ctx(n_ctx_train: int, options: Mapping[str, Any]) -> int:
    """The context of each request, as ``Engine`` and ``open_engine`` have it."""
    given = options.get("n_ctx")
    return min(n_ctx_train, _USUAL_CONTEXT) if given is None else given or n_ctx_train


def _cells_bytes(texts: Mapping[str, str], info: GgufInfo, n_ctx: int, options: Mapping[str, Any]) -> float:
    """Bytes of the KV cells. At most: layers with a sliding window hold fewer."""
    window = f"{info.architecture}.attention.sliding_window"
    sizes = {key: value for key, value in texts.items() if key != window}
    types = (str(options.get(name, "f16")) for name in ("type_k", "type_v"))
    k, v = (kind if kind in TYPE_BYTES else "f16" for kind in types)  # the engine refuses others
    n_cells = options.get("n_cells") or n_ctx * (options.get("n_seq_max") or _USUAL_SLOTS)
    return n_cells * (cell_bytes(sizes, info.n_layer, info.n_embd, k, v) or 0.0)
