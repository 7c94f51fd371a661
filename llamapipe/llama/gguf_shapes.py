"""What must be true of a model's hyperparameters in a GGUF file before llama.cpp may read it.

llama.cpp asserts these in ``llama_model_base::load_hparams`` or in the operations it builds from them; an assertion
ends the process. Shapes of tensors that do not fit the hyperparameters it refuses by itself.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llamapipe.llama.gguf_reader import ARRAY, BOOL, F32, I32, TYPE_NAMES, U32, Array, Damage, Entry, Head

_MAX_LAYERS: Final = 512  # LLAMA_MAX_LAYERS
_MAX_EXPERTS: Final = 1024  # LLAMA_MAX_EXPERTS
_MAX_WIDTH: Final = 1 << 24
_MAX_CONTEXT: Final = (1 << 31) - 1
_ROPE_SCALINGS: Final = ("none", "linear", "yarn", "longrope")
_POOLINGS: Final = 4  # LLAMA_POOLING_TYPE_RANK
_UNSPECIFIED: Final = (1 << 32) - 1
_LAYER: Final = re.compile(r"blk\.(\d{1,3})\.(attn_[qk])\.weight")
_EXPERTS: Final = re.compile(r"blk\.(\d{1,3})\.ffn_\w+_exps\.")
_NOT_MODELS: Final = {
    "adapter": "a LoRA adapter; give the file of the model it was made for",
    "mmproj": "the image or audio part of a model (mmproj); give the file of the language model",
    "imatrix": "an importance matrix; give the file of a model",
}


@dataclass(frozen=True)
class Shapes:
    """The architecture's name and the sizes needed elsewhere; a size is 0 where a vocabulary-only file has none."""

    architecture: str
    n_layer: int
    n_embd: int
    n_ctx_train: int
    is_causal: bool


def check_shapes(head: Head) -> Shapes:
    """Check the hyperparameters of a file; raises Damage."""
    kind = _text(head.entries, "general.type")
    if kind in _NOT_MODELS:
        raise Damage(f"it is {_NOT_MODELS[kind]}")
    architecture = _text(head.entries, "general.architecture")
    if not architecture:
        raise Damage("it does not name its architecture: general.architecture is missing")
    if architecture == "clip":
        raise Damage(f"it is {_NOT_MODELS['mmproj']}")
    keys = _Keys(head.entries, architecture)
    required = bool(head.tensors)
    n_layer = keys.integer("block_count", 1, _MAX_LAYERS, required=required)
    n_embd = keys.integer("embedding_length", 1, _MAX_WIDTH, required=required)
    n_ctx_train = keys.integer("context_length", 1, _MAX_CONTEXT, required=required)
    if n_layer:
        keys.integer("nextn_predict_layers", 0, n_layer)
        keys.per_layer("feed_forward_length", n_layer)
        _check_heads(keys, head, n_layer, n_embd)
        _check_experts(keys, head, n_layer)
    keys.integer("pooling_type", 0, _POOLINGS, besides=_UNSPECIFIED)
    _check_floats(keys)
    causal = keys.get("attention.causal", BOOL)
    return Shapes(architecture, n_layer, n_embd, n_ctx_train, causal is None or bool(causal))


def _check_heads(keys: _Keys, head: Head, n_layer: int, n_embd: int) -> None:
    heads = keys.per_layer("attention.head_count", n_layer)
    if heads is None or not heads.any():
        return  # recurrent models have none
    groups = keys.per_layer("attention.head_count_kv", n_layer)
    if groups is not None:
        wrong = np.flatnonzero((groups > 0) & (heads % np.maximum(groups, 1) > 0))
        if len(wrong):
            i = int(wrong[0])
            raise Damage(
                f"layer {i} has {heads[i]} attention heads, not a multiple of its {groups[i]} key-value heads"
            )
        _check_layers(keys, head, "attn_k", groups)
    _check_layers(keys, head, "attn_q", heads)
    if not heads[0]:
        return
    n_key = keys.integer("attention.key_length", 1, _MAX_WIDTH) or n_embd // int(heads[0])
    n_rot = keys.integer("rope.dimension_count", 0, _MAX_WIDTH) or n_key
    if n_rot % 2:
        raise Damage(f"{keys.name('rope.dimension_count')} or the head size is {n_rot}, it must be even")


def _check_layers(keys: _Keys, head: Head, matrix: str, counts: npt.NDArray[np.int64]) -> None:
    """Where layers differ in their number of heads, the heads themselves must not, and a layer with a matrix has some.

    llama.cpp compares the shapes of most architectures' matrices with the first layer's numbers, then reshapes with
    each layer's own.
    """
    if (counts == counts[0]).all() or keys.name("attention.key_length_swa") in keys.entries:
        return
    sizes = {}
    for tensor in head.tensors:
        match = _LAYER.fullmatch(tensor.name)
        if match and match[2] == matrix and int(match[1]) < len(counts):
            n_rows, n_heads = math.prod(tensor.dims[1:]), int(counts[int(match[1])])
            if not n_heads or n_rows % n_heads:
                raise Damage(f"{tensor.name} has {n_rows} rows, which do not divide into {n_heads} heads")
            sizes[n_rows // n_heads] = tensor.name
    if len(sizes) > 1:
        raise Damage(
            f"{' and '.join(sizes.values())} have heads of different sizes, {', '.join(map(str, sizes))}"
        )


def _check_experts(keys: _Keys, head: Head, n_layer: int) -> None:
    if keys.architecture in ("hunyuan-dense", "hunyuan_vl"):
        return  # there llama.cpp takes one expert for none
    n_expert = keys.integer("expert_count", 0, _MAX_EXPERTS)
    per_layer = keys.per_layer("expert_used_count", n_layer)
    n_used = 0 if per_layer is None else int(per_layer.max())
    if n_used > n_expert or (n_expert and not n_used):
        raise Damage(
            f"it uses {n_used} of {n_expert} experts ({keys.name('expert_used_count')}, …expert_count)"
        )
    if n_expert and per_layer is not None and not per_layer.all():
        idle = set(np.flatnonzero(per_layer == 0).tolist())
        for tensor in head.tensors:
            match = _EXPERTS.match(tensor.name)
            if match and int(match[1]) in idle:
                raise Damage(f"layer {match[1]} has experts but uses none ({keys.name('expert_used_count')})")
    n_groups = keys.integer("expert_group_count", 0, max(n_expert - 1, 0))
    if n_groups > 1:
        if n_expert % n_groups:
            raise Damage(f"its {n_expert} experts do not divide into {n_groups} groups")
        keys.integer("expert_group_used_count", 1, n_groups - 1, required=True)


def _check_floats(keys: _Keys) -> None:
    for key, entry in keys.entries.items():
        if entry.kind != F32 or not key.startswith(keys.architecture + "."):
            continue
        value = float(entry.value)  # type: ignore[arg-type]
        if math.isnan(value):
            raise Damage(f"{key} is not a number")
        if key.endswith("epsilon") and not 0 <= value < math.inf:
            raise Damage(f"{key} is {value}, it must not be negative or infinite")
        if ".rope.freq_base" in key and not 0 < value < math.inf:
            raise Damage(f"{key} is {value}, it must be positive")
    scaling = _text(keys.entries, keys.name("rope.scaling.type"))
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        raise Damage(
            f"{keys.name('rope.scaling.type')} is {scaling!r}, llama.cpp knows {', '.join(_ROPE_SCALINGS)}"
        )


@dataclass(frozen=True)
class _Keys:
    """Access to the metadata of one architecture by the rest of a key, with types and limits checked."""

    entries: dict[str, Entry]
    architecture: str

    def name(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str, kind: int) -> int | None:
        entry = self.entries.get(self.name(key))
        if entry is None:
            return None
        if entry.kind != kind or not isinstance(entry.value, int):
            raise Damage(f"{self.name(key)} must be {TYPE_NAMES[kind]}, it is {TYPE_NAMES[entry.kind]}")
        return entry.value

    def integer(
        self, key: str, low: int, high: int, *, required: bool = False, besides: int | None = None
    ) -> int:
        """The value of a u32 key, 0 if it is missing."""
        value = self.get(key, U32)
        if value is None:
            if required:
                raise Damage(f"{self.name(key)} is missing from the metadata")
            return 0
        if not low <= value <= high and value != besides:
            raise Damage(f"{self.name(key)} is {value}, it must be {low} to {high}")
        return value

    def per_layer(self, key: str, n_layer: int) -> npt.NDArray[np.int64] | None:
        """The values of a key that holds one number for each layer or one for all, `(n_layer,)`."""
        entry = self.entries.get(self.name(key))
        if entry is None:
            return None
        if entry.kind != ARRAY:
            return np.full(n_layer, self.get(key, U32), np.int64)
        array = entry.value
        if not isinstance(array, Array) or array.kind not in (U32, I32, BOOL):
            raise Damage(f"{self.name(key)} must be u32 or an array of integers")
        if array.count != n_layer:
            raise Damage(f"{self.name(key)} has {array.count} elements, but the model has {n_layer} layers")
        values = array.data.astype(np.int64)
        if values.min() < 0:
            raise Damage(f"{self.name(key)} holds {values.min()}, it must not be negative")
        return values


def _text(entries: dict[str, Entry], key: str) -> str | None:
    entry = entries.get(key)
    if entry is None:
        return None
    if not isinstance(entry.value, bytes):
        raise Damage(f"{key} must be a string")
    return entry.value.decode("utf-8", "backslashreplace")
