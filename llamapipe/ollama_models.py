"""Models that Ollama has downloaded: their names, files and settings. Nothing here writes.

Open this file to change how ``ollama:NAME`` is resolved. For each name Ollama keeps a manifest, which lists blobs by
their hash: the GGUF file, and the settings of the Modelfile. This module looks where Ollama does: in ``OLLAMA_MODELS``,
or in ``~/.ollama/models`` and the folder of the system's service. A model may be damaged, half downloaded or
unreadable. Lists leave such models out; a request for one raises an error that says what is wrong.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from llamapipe._messages import did_you_mean, listed, quoted, readable
from llamapipe.errors import ModelLoadError

PREFIX = "ollama:"
_SERVICE = Path("/usr/share/ollama/.ollama/models")
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?:(?:({_PART}(?::\d+)?)/)?({_PART})/)?({_PART})(?::({_PART}))?")
_IN_STORE = re.compile(rf"{_PART}(?::\d+)?")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_LAYER = "application/vnd.ollama.image."
# The numbers that a Modelfile and SamplingParams have in common.
_WHOLE = {"top_k": 0, "repeat_last_n": -1, "seed": -1}  # with their minimums
_RANGES = {
    "temperature": (0, 1e6), "top_p": (0, 1), "min_p": (0, 1), "typical_p": (0, 1), "repeat_penalty": (1e-6, 1e6),
    "presence_penalty": (-1e6, 1e6), "frequency_penalty": (-1e6, 1e6),
}  # fmt: skip
_MOST_BYTES = 2**20  # of a manifest, and of a text that a Modelfile sets


class StoredModel(NamedTuple):
    """A named model in the store. ``path``: its GGUF file. ``digest``: the manifest's digest, in hexadecimal.

    ``texts``: the files with the settings of its Modelfile, by kind: ``params`` (JSON), ``system``, ``license``,
    ``template``. ``projector`` is the GGUF file of an image encoder.
    """

    name: str
    path: Path
    digest: str
    texts: Mapping[str, Path]

    def text(self, kind: str) -> str:
        """Return one of the texts; empty if it is missing or unreadable."""
        path = self.texts.get(kind)
        try:
            return "" if path is None else _read(path).decode()
        except (OSError, ValueError):
            return ""

    @property
    def parameters(self) -> dict[str, Any]:
        """The options that its Modelfile sets, such as ``temperature``."""
        try:
            values = json.loads(self.text("params") or "{}")
        except (ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}

    @property
    def sampling(self) -> dict[str, Any]:
        """Those of the parameters that are options of ``SamplingParams``, clamped to their ranges as in Ollama."""
        values: dict[str, Any] = {}
        for name, value in self.parameters.items():
            if name in _RANGES and isinstance(value, (int, float)):
                low, high = _RANGES[name]
                values[name] = min(max(value, low), high)
            elif name in _WHOLE and isinstance(value, (int, float)) and abs(value) < 2**31:
                values[name] = max(int(value), _WHOLE[name])
            elif name == "stop" and isinstance(value, list):
                values[name] = [text for text in value if isinstance(text, str) and text]
            elif name == "num_predict" and isinstance(value, int) and value > 0:  # else there is no limit
                values["max_tokens"] = value
        return values


def folders() -> list[Path]:
    """Return the folders that may hold Ollama's models."""
    folder = os.environ.get("OLLAMA_MODELS")
    if folder:
        return [Path(folder)]
    try:
        return [Path.home() / ".ollama" / "models", _SERVICE]
    except RuntimeError:  # there is no home
        return [_SERVICE]


def find_stored(name: str) -> StoredModel:
    """Return the model with a name, with or without a tag. Raises ModelLoadError, ValueError for an invalid name."""
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise ValueError(
            f"{quoted(name)} is not the name of an Ollama model; write {PREFIX}NAME or {PREFIX}NAME:TAG"
        )
    host, namespace, model, tag = parts.groups()
    wanted = Path(host or _HOST, namespace or _NAMESPACE, model, tag or _TAG)
    places = folders()
    for folder in places:
        manifest = folder / "manifests" / wanted
        try:
            data = _read(manifest)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue  # a folder that cannot be read is named below
        except OSError as e:
            raise ModelLoadError(f"{manifest} cannot be read: {e.strerror}") from None
        return _read_manifest(folder, wanted, data)
    for folder in places:
        try:
            list((folder / "manifests").iterdir())
        except PermissionError:
            raise ModelLoadError(
                f"{folder} cannot be read: run this as its user or a member of its group, or set OLLAMA_MODELS"
            ) from None
        except OSError:
            continue
    names = [stored.name for stored in stored_models()]
    there = f"there is {listed(names)}{did_you_mean(name, names)}" if names else "there are no models"
    where = " and ".join(map(str, places))
    raise ModelLoadError(
        f"Ollama has no model {quoted(name)}: {there} in {where} (OLLAMA_MODELS sets the folder)"
    )


def stored_models() -> list[StoredModel]:
    """Return the complete models, sorted by name; for equal names the first folder wins."""
    models: dict[str, StoredModel] = {}
    for folder in folders():
        for stored in _models_in(folder):
            models.setdefault(stored.name, stored)
    return [models[name] for name in sorted(models)]


def unusable_models() -> list[str]:
    """Return why models of the store are not among ``stored_models``: a text for each of them."""
    return sorted(
        str(error)
        for folder in folders()
        for error in _read_store(folder)
        if isinstance(error, ModelLoadError)
    )


def short_names() -> set[str]:
    """Return the names of ``stored_models``, and those without ``:latest``."""
    return {name for stored in stored_models() for name in (stored.name, stored.name.removesuffix(":latest"))}


def names_of(path: Path) -> list[StoredModel]:
    """Return the models that use ``path``, a file of a store: several, with different settings, may share it."""
    if path.parent.name != "blobs" or not _DIGEST.fullmatch(path.name):
        return []
    return sorted(stored for stored in _models_in(path.parent.parent) if stored.path.name == path.name)


def model_of(path: str | os.PathLike[str]) -> tuple[Path, str] | None:
    """Return the file and the name of the model ``ollama:NAME``; None for a file's path.

    Raises as ``find_stored`` does.
    """
    stored = stored_model(path)
    return None if stored is None else (stored.path, stored.name.removesuffix(f":{_TAG}"))


def stored_model(path: str | os.PathLike[str]) -> StoredModel | None:
    """Return the model ``ollama:NAME``; None for a file's path. Raises as ``find_stored`` does."""
    text = os.fsdecode(path)
    if not text.startswith(PREFIX):
        return None
    with suppress(OSError):  # too long for a path
        if Path(text).exists():
            return None
    return find_stored(text.removeprefix(PREFIX))


def display_name(path: Path) -> str:
    """Return the name to show for a model's file: Ollama's for a file in the store, else its name without ``.gguf``."""
    names = names_of(path)
    return names[0].name.removesuffix(f":{_TAG}") if names else readable(path.stem)


def _models_in(folder: Path) -> Iterator[StoredModel]:
    return (stored for stored in _read_store(folder) if isinstance(stored, StoredModel))


def _read_store(folder: Path) -> Iterator[StoredModel | ModelLoadError]:
    """Yield the models of a store, and an error for each that cannot be loaded."""
    root = folder / "manifests"
    try:
        manifests = [path for path in root.glob("*/*/*/*") if path.is_file()]
    except OSError:
        return
    for manifest in manifests:
        place = manifest.relative_to(root)
        if not all(_IN_STORE.fullmatch(part) for part in place.parts):  # no name that could be asked for
            continue
        try:
            yield _read_manifest(folder, place, _read(manifest))
        except OSError:
            continue
        except ModelLoadError as error:
            yield error


def _read(path: Path) -> bytes:
    """Read a small file. Raises OSError."""
    if path.is_fifo():  # opening it would wait for a writer
        raise OSError(0, "it is not a file")
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise OSError(0, f"it has more than {_MOST_BYTES} bytes")
    return data


def _read_manifest(folder: Path, place: Path, data: bytes) -> StoredModel:
    """Return the model that a manifest describes. Raises ModelLoadError."""
    host, namespace, model, tag = place.parts
    name = f"{model}:{tag}"
    if namespace != _NAMESPACE or host != _HOST:
        name = f"{namespace}/{name}" if host == _HOST else f"{host}/{namespace}/{name}"
    files: dict[str, Path] = {}
    try:
        for layer in json.loads(data)["layers"]:
            kind = str(layer["mediaType"]).partition(";")[0].removeprefix(_LAYER)
            digest = _DIGEST.fullmatch(layer["digest"])
            if digest is None:
                raise ValueError(layer["digest"])
            files.setdefault(kind, folder / "blobs" / f"sha256-{digest[1]}")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ModelLoadError(
            f"the manifest of {name} in {folder} is damaged; pull the model again with Ollama"
        ) from None
    path = files.get("model")
    if path is None:
        raise ModelLoadError(f"{name} of Ollama has no GGUF file: it runs elsewhere, or is in another format")
    if "adapter" in files:
        raise ModelLoadError(
            f"{name} of Ollama has an adapter, which llamapipe does not load from there: load the model alone, and the "
            "adapter with --lora NAME=FILE or model.load_adapter, if it is a GGUF file"
        )
    if not path.is_file():
        raise ModelLoadError(f"{path}, the file of {name}, is missing; pull the model again with Ollama")
    return StoredModel(name, path, sha256(data).hexdigest(), files)
