"""Checks a projector's file (``mmproj``) before libmtmd reads it.

libmtmd asserts its assumptions, some of them only while it computes an image, on threads that cannot report an error.
This module checks types, places and sizes, as for models, and the numbers by which libmtmd's graphs divide.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from llamapipe.errors import ModelLoadError
from llamapipe.gguf.check import Stamp, check_tensors, naming, open_gguf
from llamapipe.gguf.names import read_name, split_quantization
from llamapipe.gguf.reader import BOOL, STRING, U32, Damage, Head
from llamapipe.ollama_models import names_of

# Projectors that need more than rows in place of tokens: their layout depends on the prompt before the image.
_UNSUPPORTED: Final = frozenset({"deepseek4v", "hunyuanvl", "hunyuanocr", "cogvlm", "qwen3tts", "pockettts"})
_BLOCK: Final = re.compile(r"([va])\.blk\.(\d+)\.(.+)\.(weight|bias)")
_MOST: Final = 2**20  # limit of all sizes
_MOST_PIXELS: Final = 2**31 - 1  # limit for an image that is resized for libmtmd


class _Resized(NamedTuple):
    """libmtmd's limits on the tokens of images that keep their proportions, for one kind of projector.

    ``least``, ``most``: libmtmd's limits, or None. ``key``: the file's key for the number of patches along a side of a
    token; ``side``: the number if the file lacks that key. ``from_file``: limits in the file take precedence over
    these. ``takes_least``: the lower limit can be set.
    """

    least: int | None
    most: int | None
    key: str = "spatial_merge_size"
    side: int = 2
    from_file: bool = False
    takes_least: bool = True


_QWEN: Final = _Resized(8, 4096, from_file=True)
_TILES: Final = "projector.scale_factor"
_RESIZED: Final = {
    "qwen2vl_merger": _QWEN,
    "qwen2.5vl_merger": _QWEN,
    "qwen3vl_merger": _QWEN,
    "ling3vl": _QWEN,
    "glm4v": _Resized(8, 4096),
    "glm5v": _Resized(None, None, from_file=True),
    "gemma4v": _Resized(70, 1120, _TILES, 3),
    "gemma4uv": _Resized(70, 1120, _TILES, 3),
    "idefics3": _Resized(None, None, _TILES, 1),
    "lfm2": _Resized(64, 256, _TILES, 1),
    "d1omni_v": _Resized(64, 256, _TILES, 1),
    "pixtral": _Resized(8, 1024, side=1),
    "lightonocr": _Resized(None, None, side=1),
    "kimivl": _Resized(8, 1024, _TILES, 1),
    "kimik25": _Resized(2, 4096, _TILES, 1),
    "minimax_m3": _Resized(8, 576),
    "muse_glimmer": _Resized(1, 4096, takes_least=False),
    "youtuvl": _Resized(1, 62500, takes_least=False),
}


class ImageTokens(NamedTuple):
    """A file's limits on an image's tokens, if other limits can be set; None for no limit.

    ``area``: the pixels of a token. ``takes_least``: the lower limit can be set.
    """

    least: int | None
    most: int | None
    area: int
    takes_least: bool

    def check(self, least: int | None, most: int | None) -> None:
        """Raise ValueError for limits that libmtmd cannot use. None stands for the file's own limit."""
        if least is not None and not self.takes_least:
            raise ValueError(
                f"image_min_tokens is {least}, and this kind of projector has a maximum only: leave it out"
            )
        low, high = (self.least if least is None else least), (self.most if most is None else most)
        if least is not None and high is None:
            raise ValueError(
                f"image_min_tokens is {least}, and the projector has no maximum: give image_max_tokens, too"
            )
        if low is not None and high is not None and low > high:
            own = "image_max_tokens" if most is None else "image_min_tokens"
            raise ValueError(
                f"images would have at least {low} tokens and at most {high}; the projector's own {own} is "
                f"{high if most is None else low}: set it, too"
            )
        if high is not None and high * self.area > _MOST_PIXELS:
            raise ValueError(
                f"image_max_tokens is {high}; with {self.area} pixels for a token at most "
                f"{_MOST_PIXELS // self.area} are possible"
            )


@dataclass(frozen=True)
class MmprojInfo:
    """The facts in a checked file. ``projectors``: libmtmd's names of the projectors' kinds, such as ``"gemma3"``.

    ``sees``, ``hears``: whether it has an encoder for images, for sounds. ``widths``: the lengths of the rows that each
    encoder makes, according to the file. ``title``: the title of the model that it was made from, or an empty text.
    ``image_tokens``: None if every image or tile has the same number of tokens, or if the file's limits cannot be
    changed.
    """

    path: Path
    projectors: tuple[str, ...]
    size_bytes: int
    stamp: Stamp
    sees: bool
    hears: bool
    widths: tuple[int, ...]
    title: str
    image_tokens: ImageTokens | None


def check_mmproj(path: str | os.PathLike[str]) -> MmprojInfo:
    """Check a projector's file. Raises ModelLoadError, which names the problem."""
    file = Path(path)
    opened = open_gguf(file)
    with naming(file):
        modalities, projectors = _check(opened.head)
        check_tensors(opened.head)
        widths = tuple(
            _value(opened.head, f"clip.{modality}.projection_dim", U32) or 0 for modality in modalities
        )
        title = _text(opened.head, "general.name")
        image_tokens = _image_tokens(opened.head) if "vision" in modalities else None
    sees, hears = "vision" in modalities, "audio" in modalities
    stamp, n_bytes = opened.stamp, len(opened.head.buffer)
    return MmprojInfo(file, projectors, n_bytes, stamp, sees, hears, widths, title, image_tokens)


def is_mmproj(name: str) -> bool:
    """Return whether a file is a projector, judging by its name."""
    return name.lower().startswith("mmproj") and name.lower().endswith(".gguf")


def mmproj_beside(model: Path, n_embd: int, title: Callable[[], str]) -> list[MmprojInfo]:
    """Return the projectors in a model's folder that belong to it.

    ``n_embd``, ``title``: the model's width and name. A projector whose rows have another width belongs to another
    model. A text model often has the same width as a model that takes images. In a folder with several models, the name
    in the file's metadata or the file's own name must therefore agree, too. In Ollama's store, the manifests say which
    projector a model has.
    """
    stored = {named.texts["projector"] for named in names_of(model) if "projector" in named.texts}
    if stored:
        return [info for path in sorted(stored) if (info := _fitting(path, n_embd)) is not None]
    try:
        names = [entry.name for entry in os.scandir(model.parent) if entry.name.endswith(".gguf")]
    except OSError:
        return []
    others = {_plain(name) for name in names if not is_mmproj(name) and not name.startswith("imatrix")}
    own = _plain(model.name)
    projectors = []
    for name in sorted(filter(is_mmproj, names)):
        info = _fitting(model.with_name(name), n_embd)
        if info is not None:
            same = _plain(name) == own or _letters(info.title) == _letters(title()) != ""
            if same or others <= {own}:
                projectors.append(info)
    return projectors


def _fitting(path: Path, n_embd: int) -> MmprojInfo | None:
    """Return a projector for models of this width; None if it is for other models or damaged."""
    try:
        info = check_mmproj(path)
    except ModelLoadError:
        return None
    return info if all(width == n_embd for width in info.widths) else None


def _plain(name: str) -> str:
    """Return the model's name in a file name, without the part number, the role and the types of weights."""
    stem, quantization = split_quantization(read_name(name.lower()).stem)
    while quantization is not None:  # the projector's quantization may follow the model's
        stem, quantization = split_quantization(stem)
    return _letters(stem.replace("mmproj", ""))


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text.lower())


def _text(head: Head, key: str) -> str:
    value = _value(head, key, STRING)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _value(head: Head, key: str, kind: int) -> Any:
    """Return the value of a key, of this type; None if it is missing. libmtmd asserts the types."""
    entry = head.entries.get(key)
    if entry is not None and entry.kind != kind:
        raise Damage(f"{key} has the type {entry.kind} of GGUF, not {kind}")
    return None if entry is None else entry.value


def _check(head: Head) -> tuple[list[str], tuple[str, ...]]:
    """Check the metadata and tensors. Return the modalities, and the kinds of their projectors. Raises Damage."""
    architecture = _text(head, "general.architecture")
    if architecture != "clip":
        raise Damage(
            f"it is a model of the architecture {architecture!r}, not a projector; mmproj is the second file of a "
            "model that takes images, whose name usually begins with mmproj"
        )
    modalities = [m for m in ("vision", "audio") if _value(head, f"clip.has_{m}_encoder", BOOL)]
    if not modalities:
        raise Damage("it has neither an encoder of images nor one of sounds")
    common = _text(head, "clip.projector_type")
    projectors = []
    for modality in modalities:
        kind = _text(head, f"clip.{modality}.projector_type") or common
        if not kind:
            raise Damage("it does not say its kind: clip.projector_type is missing")
        if kind in _UNSUPPORTED:
            raise Damage(f"llamapipe does not support the projector {kind!r} yet")
        projectors.append(kind)
        _check_sizes(head, modality)
    return modalities, tuple(dict.fromkeys(projectors))


def _image_tokens(head: Head) -> ImageTokens | None:
    kind = _text(head, "clip.vision.projector_type") or _text(head, "clip.projector_type")
    resized = _RESIZED.get(kind)
    patch = _size(head, "clip.vision.patch_size")
    if resized is None or patch is None:
        return None
    side = _size(head, f"clip.vision.{resized.key}") or resized.side
    area = (patch * side) ** 2
    own = [_size(head, f"clip.vision.image_{end}_pixels", 0, 2**31 - 1) for end in ("min", "max")]
    if kind == "kimik25" and all(own):
        return None
    least, most = (
        pixels // area if pixels and resized.from_file else limit
        for pixels, limit in zip(own, (resized.least, resized.most), strict=True)
    )
    return ImageTokens(least, most, area, resized.takes_least)


def _size(head: Head, key: str, least: int = 1, most: int = _MOST) -> int | None:
    value: int | None = _value(head, key, U32)
    if value is not None and not least <= value <= most:
        raise Damage(f"{key} is {value}; it must be from {least} to {most}")
    return value


def _check_sizes(head: Head, modality: str) -> None:
    prefix = f"clip.{modality}."
    width = _size(head, prefix + "embedding_length")
    inner = _size(head, prefix + "feed_forward_length")
    n_heads = _size(head, prefix + "attention.head_count")
    n_blocks = _size(head, prefix + "block_count", 0)
    _size(head, prefix + "projection_dim")
    image, patch = _size(head, prefix + "image_size"), _size(head, prefix + "patch_size")
    for name in ("projector.scale_factor", "projector.stack_factor", "spatial_merge_size", "num_mel_bins"):
        _size(head, prefix + name)
    if width and n_heads and width % n_heads:
        raise Damage(f"{prefix}embedding_length is {width}, which {n_heads} heads do not divide")
    if image and patch and (image < patch or image > 2**14):
        raise Damage(f"{prefix}image_size is {image} with patches of {patch}")
    by_name = {tensor.name: tensor.dims for tensor in head.tensors}
    letter = modality[0]
    blocks = set()
    for name, dims in by_name.items():
        match = _BLOCK.fullmatch(name)
        if match is None or match[1] != letter:
            continue
        blocks.add(int(match[2]))
        if width and inner:
            expected = _expected_shapes(match[3], match[4], width, inner)
            if expected is not None and tuple(dims) not in expected:
                shapes = " or ".join(map(str, sorted(expected)))
                raise Damage(f"tensor {name!r} has the shape {tuple(dims)}, not {shapes}")
    if n_blocks and len(blocks) < n_blocks and blocks:
        raise Damage(f"{prefix}block_count is {n_blocks}, and the file has {len(blocks)} blocks")
    if image and patch and modality == "vision":
        n_patches = (image // patch) ** 2
        table = by_name.get("v.position_embd.weight")
        if table is not None and len(table) == 2 and table[1] < n_patches:
            raise Damage(f"v.position_embd.weight has {table[1]} rows, and an image {n_patches} patches")
        kernel = by_name.get("v.patch_embd.weight")
        if kernel is not None and len(kernel) == 4 and kernel[:2] != (patch, patch):
            raise Damage(
                f"v.patch_embd.weight has patches of {kernel[0]} × {kernel[1]}, not {patch} × {patch}"
            )


def _expected_shapes(name: str, kind: str, width: int, inner: int) -> set[tuple[int, ...]] | None:
    if name in ("ln1", "ln2"):
        return {(width,)}
    if name in ("ffn_up", "ffn_down"):
        # Some converters have swapped these two names.
        return {(inner,), (width,)} if kind == "bias" else {(width, inner), (inner, width)}
    return None
