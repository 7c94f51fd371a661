"""Names of model files on a hub: parses ``hf:owner/repo/file`` and chooses among the files of a repository."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

PREFIX = "hf:"
_ADDRESS = re.compile(
    r"(?:https?://)?(?:huggingface|hf)\.co/([^/?:]+/[^/?:]+)"
    r"(?:/(?:(?:resolve|blob)/[^/]+/)?([^?]+\.gguf)|(:[^/?]+))?.*"
)
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_MOST_LISTED = 20


class Reference(NamedTuple):
    """A file, or a pattern of files, of a repository. ``filename``: as ``pattern`` of ``choose``."""

    repo_id: str
    filename: str | None


def parse(text: str) -> Reference:
    """``hf:owner/repo``, ``hf:owner/repo/file``, where the file may be a pattern, or ``hf:owner/repo:quantization``.

    Raises ValueError.
    """
    owner, _, rest = text.removeprefix(PREFIX).partition("/")
    name, slash, filename = rest.partition("/")
    name, colon, quantization = name.partition(":")
    is_whole = owner and name and bool(filename) == bool(slash) and bool(quantization) == bool(colon)
    if not text.startswith(PREFIX) or not is_whole or (slash and colon):
        raise ValueError(
            f"{text!r} names no model on the hub; write hf:OWNER/REPO, hf:OWNER/REPO/FILE.gguf or hf:OWNER/REPO:QUANT"
        )
    return Reference(f"{owner}/{name}", filename or colon + quantization or None)


def hub_name(address: str) -> str | None:
    """The name, for ``parse``, of what an address of the hub's website shows; None for any other text."""
    found = _ADDRESS.fullmatch(address)
    if found is None:
        return None
    repo_id, filename, quantization = found.groups()
    return f"{PREFIX}{repo_id}{f'/{filename}' if filename else quantization or ''}"


def choose(names: Iterable[str], pattern: str | None, where: str) -> list[str]:
    """The files of the one model that matches: itself, or all of its parts, the first one first.

    ``pattern``: a file's name or a pattern such as ``*Q4_K_M.gguf``, for the whole path or the last part of it;
    ``:Q4_K_M`` for the name's last part, in any case. None: the only model. ``where``: for messages. Raises ValueError
    if no model matches, or several do, or a part is missing.
    """
    files = sorted(name for name in names if name.endswith(".gguf"))
    if pattern is None or pattern.startswith(":"):
        # Projectors of pictures and importance matrices accompany models.
        found = [name for name in files if not _last(name).startswith(("mmproj", "imatrix"))]
        if pattern is not None:
            found = [name for name in found if _has_quantization(name, pattern[1:])]
    elif pattern in files:
        found = [pattern]
    else:
        found = [name for name in files if fnmatchcase(name, pattern) or fnmatchcase(_last(name), pattern)]
    models = sorted({_SPLIT.sub("", name) for name in found})
    if not models:
        what = (
            "no GGUF file" if pattern is None else f"no GGUF file that matches {pattern.removeprefix(':')!r}"
        )
        raise ValueError(f"{where} has {what}; it has {_listed(files)}")
    if len(models) > 1:
        raise ValueError(f"{where} has {len(models)} models; name one of {_listed(found)}")
    split = _SPLIT.search(found[0])
    if split is None:
        return found
    stem, n = found[0][: split.start()], int(split.group(2))
    parts = [f"{stem}-{i:05}-of-{n:05}.gguf" for i in range(1, n + 1)]
    missing = [part for part in parts if part not in files]
    if missing:
        raise ValueError(f"{where} has not all parts of {stem}: {missing[0]} is missing")
    return parts


def part_of(name: str) -> tuple[str, int]:
    """The model that a file belongs to, without ``.gguf``, and which part of it the file is, from 1."""
    split = _SPLIT.search(name)
    return (name.removesuffix(".gguf"), 1) if split is None else (name[: split.start()], int(split.group(1)))


def _has_quantization(name: str, quantization: str) -> bool:
    """Whether the file's name ends with it, as in ``model-Q4_K_M.gguf``."""
    stem, wanted = part_of(_last(name))[0].lower(), quantization.lower()
    return stem == wanted or stem.endswith(tuple(separator + wanted for separator in "-._"))


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return (", ".join(names[:_MOST_LISTED]) or "none") + more
