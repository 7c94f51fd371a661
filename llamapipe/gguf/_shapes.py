"""Checks a model's hyperparameters, heads and rotary positions before llama.cpp reads them.

llama.cpp asserts these values in ``llama_model_base::load_hparams`` or in the operations it builds from them, and a
failed assertion ends the process. It refuses most tensors whose shapes do not fit the hyperparameters. But it compares
some matrices only with the model's width or with the first layer's sizes, and later reshapes them by the number of
heads.

A missing key is not an error here; a value of the wrong type, or outside its limits, is.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llamapipe.gguf.reader import ARRAY, BOOL, F32, I32, TYPE_NAMES, U32, Array, Damage, Entry, Head


def text(entries: dict[str, Entry], key: str) -> str | None:
    """Return the value of a string key; None if it is missing."""
    entry = entries.get(key)
    if entry is None:
        return None
    if not isinstance(entry.value, bytes):
        raise Damage(f"{key} must be a string")
    return entry.value.decode("utf-8", "backslashreplace")


@dataclass(frozen=True)
class Keys:
    """The metadata of one architecture, by the part of the key after the architecture's name."""

    entries: dict[str, Entry]
    architecture: str

    def name(self, key: str) -> str:
        """Return the full key, including the architecture's name."""
        return f"{self.architecture}.{key}"

    def get(self, key: str, kind: int) -> int | None:
        """Return the value of a key of type ``kind`` (an integer type or bool); None if it is missing."""
        entry = self.entries.get(self.name(key))
        if entry is None:
            return None
        if entry.kind != kind or not isinstance(entry.value, int):
            raise Damage(f"{self.name(key)} must be {TYPE_NAMES[kind]}, it is {TYPE_NAMES[entry.kind]}")
        return entry.value

    def integer(
        self, key: str, low: int, high: int, *, required: bool = False, besides: int | None = None
    ) -> int:
        """Return the value of a u32 key; 0 if it is missing."""
        value = self.get(key, U32)
        if value is None:
            if required:
                raise Damage(f"{self.name(key)} is missing from the metadata")
            return 0
        if not low <= value <= high and value != besides:
            raise Damage(f"{self.name(key)} is {value}; it must be {low} to {high}")
        return value

    def per_layer(self, key: str, n_layer: int) -> npt.NDArray[np.int64] | None:
        """Return the values ``(n_layer,)`` of a key that holds one number per layer, or one for all layers."""
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
            raise Damage(f"{self.name(key)} holds {values.min()}; it must not be negative")
        return values


MAX_WIDTH: Final = 1 << 24
MAX_U32: Final = (1 << 32) - 1
_PROJECTION: Final = re.compile(r"blk\.(\d{1,3})\.attn_(q|k|v|qkv)\.weight")
# Models with these keys (compressed KV, linear attention, state spaces) use the same names for other shapes.
_OTHER_SHAPES: Final = (
    "attention.kv_lora_rank",
    "attention.key_length_mla",
    "kda.head_dim",
    "ssm.state_size",
)
# Architectures whose states ggml updates in heads of `wkv.head_size` values, and the number that the size must be a
# multiple of. The RWKV 7 kernel takes steps of up to 64 values (GGML_F32_STEP with AVX-512) and could read and write
# past a head.
_WKV: Final = {"rwkv6": 1, "rwkv6qwen2": 1, "rwkv7": 64, "arwkv7": 64}
# Architectures whose graph asserts that rotary positions cover the whole head (llama.cpp's src/models).
_WHOLE_HEADS: Final = frozenset(
    """apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 dream ernie4_5
    ernie4_5-moe exaone exaone-moe exaone4 falcon granite granite_swa graniteswitch grok grovemoe hunyuan-moe hunyuan_vl
    hy_v3 internlm2 jais2 llada llada-moe llama llama4 maincoder mellum mistral3 olmo olmo2 olmoe orion paddleocr
    pangu-embedded plamo pockettts qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe rnd1 seed_oss smallthinker
    smollm3 starcoder2 talkie xverse""".split()
)


def check_heads(keys: Keys, head: Head, n_layer: int, n_embd: int) -> None:
    """Check the numbers and sizes of heads against each other and against the matrices. Raises Damage."""
    heads = keys.per_layer("attention.head_count", n_layer)
    if heads is None or not heads.any():
        return  # recurrent models have no heads
    groups = keys.per_layer("attention.head_count_kv", n_layer)
    if groups is None:
        groups = heads
    wrong = np.flatnonzero((groups > 0) & (heads % np.maximum(groups, 1) > 0))
    if len(wrong):
        i = int(wrong[0])
        raise Damage(
            f"layer {i} has {heads[i]} attention heads, not a multiple of its {groups[i]} key-value heads"
        )
    if not heads[0]:
        return  # llama.cpp takes the head sizes from the first layer
    n_key = keys.integer("attention.key_length", 1, MAX_WIDTH) or n_embd // int(heads[0])
    n_value = keys.integer("attention.value_length", 1, MAX_WIDTH) or n_embd // int(heads[0])
    sizes = {(n_key, n_value)}
    n_rot = _n_rotated(keys, "rope.dimension_count", n_key)
    n_rot_swa = _n_rotated(keys, "rope.dimension_count_swa", n_rot)
    if n_rot and not n_rot_swa:
        raise Damage(f"{keys.name('rope.dimension_count_swa')} is 0; it must be positive")
    if any(keys.integer(key, 0, MAX_WIDTH) for key in _OTHER_SHAPES):
        return
    if keys.integer("attention.sliding_window", 0, MAX_U32):
        n_key_swa = keys.integer("attention.key_length_swa", 1, MAX_WIDTH) or n_key
        n_value_swa = keys.integer("attention.value_length_swa", 1, MAX_WIDTH) or n_value
        sizes.add((n_key_swa, n_value_swa))
        if n_rot_swa > n_key_swa:
            raise Damage(
                f"{keys.name('rope.dimension_count_swa')} is {n_rot_swa}, heads have {n_key_swa} values"
            )
    if n_rot > n_key or (keys.architecture in _WHOLE_HEADS and n_rot != n_key):
        raise Damage(
            f"positions rotate {n_rot} ({keys.name('rope.dimension_count')}) of a head's {n_key} values"
        )
    _check_sections(keys, n_key)
    for tensor in head.tensors:
        match = _PROJECTION.fullmatch(tensor.name)
        if not match or int(match[1]) >= n_layer:
            continue
        n_heads, n_groups = int(heads[int(match[1])]), int(groups[int(match[1])])
        n_rows = math.prod(tensor.dims[1:])
        if not any(n_rows in _rows(match[2], n_heads, n_groups, k, v) for k, v in sizes):
            wanted = " or ".join(f"{k} and {v}" for k, v in sorted(sizes))
            raise Damage(
                f"{tensor.name} has {n_rows} rows, which does not fit {n_heads} heads and {n_groups} key-value heads"
                f" with keys and values of {wanted}"
            )


def _rows(matrix: str, n_heads: int, n_groups: int, n_key: int, n_value: int) -> tuple[int, ...]:
    """Return the row counts that a projection may have."""
    if matrix == "q":
        return n_heads * n_key, 2 * n_heads * n_key  # twice the rows with a gate
    if matrix == "k":
        return (n_groups * n_key,)
    if matrix == "v":
        return (n_groups * n_value,)
    return (n_heads * n_key + n_groups * (n_key + n_value),)


def _n_rotated(keys: Keys, key: str, default: int) -> int:
    value = keys.get(key, U32)
    n = default if value is None else value
    if n % 2:
        raise Damage(f"{keys.name(key)} or the head size is {n}; it must be even")
    return n


def _check_sections(keys: Keys, n_key: int) -> None:
    sections = _sections(keys)
    if any(not 0 <= n <= n_key for n in sections.tolist()) or sections.sum() > n_key:
        raise Damage(
            f"{keys.name('rope.dimension_sections')} is {sections.tolist()}, heads have {n_key} values"
        )


_MAX_LAYERS: Final = 512  # LLAMA_MAX_LAYERS
_MAX_EXPERTS: Final = 1024  # LLAMA_MAX_EXPERTS
_GATINGS: Final = 4  # LLAMA_EXPERT_GATING_FUNC_TYPE_SQRT_SOFTPLUS
_MAX_CONTEXT: Final = (1 << 31) - 1
_ROPE_SCALINGS: Final = ("none", "linear", "yarn", "longrope")
_POOLINGS: Final = 4  # LLAMA_POOLING_TYPE_RANK
_UNSPECIFIED: Final = (1 << 32) - 1
_EXPERTS: Final = re.compile(r"blk\.(\d{1,3})\.ffn_\w+_exps\.")
_NOT_MODELS: Final = {
    "adapter": "a LoRA adapter; give the file of the model it was made for",
    "mmproj": "the image or audio part of a model (mmproj); give the file of the language model",
    "imatrix": "an importance matrix; give the file of a model",
}


@dataclass(frozen=True)
class Shapes:
    """The architecture's name and the sizes needed elsewhere. A size is 0 if a vocabulary-only file omits it."""

    architecture: str
    n_layer: int
    n_embd: int
    n_ctx_train: int
    is_causal: bool
    n_rot: int | None
    has_rope_sections: bool


def check_shapes(head: Head) -> Shapes:
    """Check the hyperparameters of a file. Raises Damage."""
    kind = text(head.entries, "general.type")
    if kind in _NOT_MODELS:
        raise Damage(f"it is {_NOT_MODELS[kind]}")
    architecture = text(head.entries, "general.architecture")
    if not architecture:
        raise Damage("it does not name its architecture: general.architecture is missing")
    if architecture == "clip":
        raise Damage(f"it is {_NOT_MODELS['mmproj']}")
    keys = Keys(head.entries, architecture)
    required = bool(head.tensors)
    n_layer = keys.integer("block_count", 1, _MAX_LAYERS, required=required)
    n_embd = keys.integer("embedding_length", 1, MAX_WIDTH, required=required)
    n_ctx_train = keys.integer("context_length", 1, _MAX_CONTEXT, required=required)
    if n_layer:
        keys.integer("nextn_predict_layers", 0, n_layer)
        keys.per_layer("feed_forward_length", n_layer)
        check_heads(keys, head, n_layer, n_embd)
        _check_experts(keys, head, n_layer)
        _check_wkv(keys, n_embd)
        keys.integer("attention.group_norm_groups", 1, MAX_WIDTH)
    keys.integer("pooling_type", 0, _POOLINGS, besides=_UNSPECIFIED)
    _check_floats(keys)
    causal = keys.get("attention.causal", BOOL)
    return Shapes(
        architecture,
        n_layer,
        n_embd,
        n_ctx_train,
        causal is None or bool(causal),
        keys.get("rope.dimension_count", U32),
        bool((_sections(keys)[:3] > 0).any()),
    )


def _sections(keys: Keys) -> npt.NDArray[np.int64]:
    """Return how many values each kind of position rotates; an empty array if the file does not say."""
    entry = keys.entries.get(keys.name("rope.dimension_sections"))
    value = None if entry is None else entry.value
    if isinstance(value, int):
        return np.full(4, min(value, MAX_U32), np.int64)  # llama.cpp uses a single number for all four kinds
    return (value.data if isinstance(value, Array) else np.empty(0)).astype(np.int64)


def _check_experts(keys: Keys, head: Head, n_layer: int) -> None:
    n_expert = keys.integer("expert_count", 0, _MAX_EXPERTS)
    if n_expert <= 1 and keys.architecture in ("hunyuan-dense", "hunyuan_vl"):
        return  # llama.cpp treats one expert as none in these architectures
    keys.integer("expert_gating_func", 0, _GATINGS)
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


def _check_wkv(keys: Keys, n_embd: int) -> None:
    step = _WKV.get(keys.architecture)
    if step is None:
        return
    size = keys.integer("wkv.head_size", 1, MAX_WIDTH)
    if size and (n_embd % size or size % step):
        multiple = f" and be a multiple of {step}" if step > 1 else ""
        raise Damage(
            f"{keys.name('wkv.head_size')} is {size}; it must divide the embedding_length {n_embd}{multiple}"
        )


def _check_floats(keys: Keys) -> None:
    for key, entry in keys.entries.items():
        if entry.kind != F32 or not key.startswith(keys.architecture + "."):
            continue
        value = float(entry.value)  # type: ignore[arg-type]
        if math.isnan(value):
            raise Damage(f"{key} is not a number")
        if key.endswith("epsilon") and not 0 <= value < math.inf:
            raise Damage(f"{key} is {value}; it must not be negative or infinite")
        if ".rope.freq_base" in key and not 0 < value < math.inf:
            raise Damage(f"{key} is {value}; it must be positive")
    scaling = text(keys.entries, keys.name("rope.scaling.type"))
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        raise Damage(
            f"{keys.name('rope.scaling.type')} is {scaling!r}; llama.cpp knows {', '.join(_ROPE_SCALINGS)}"
        )
