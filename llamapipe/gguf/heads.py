"""Checks a model's attention heads and rotary positions before llama.cpp builds a graph of them.

llama.cpp compares some matrices only with the model's width or with the first layer's sizes. Later it reshapes them by
the number of heads, where an assertion ends the process.
"""

from __future__ import annotations

import math
import re
from typing import Final

import numpy as np

from llamapipe.gguf.keys import Keys
from llamapipe.gguf.reader import ARRAY, U32, Array, Damage, Head

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
        return  # llama.cpp takes the sizes of heads from the first layer
    n_key = keys.integer("attention.key_length", 1, MAX_WIDTH) or n_embd // int(heads[0])
    n_value = keys.integer("attention.value_length", 1, MAX_WIDTH) or n_embd // int(heads[0])
    sizes = {(n_key, n_value)}
    n_rot = _rotated(keys, "rope.dimension_count", n_key)
    n_rot_swa = _rotated(keys, "rope.dimension_count_swa", n_rot)
    if n_rot and not n_rot_swa:
        raise Damage(f"{keys.name('rope.dimension_count_swa')} is 0, it must be positive")
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
    """The row counts that a projection may have."""
    if matrix == "q":
        return n_heads * n_key, 2 * n_heads * n_key  # twice the rows with a gate
    if matrix == "k":
        return (n_groups * n_key,)
    if matrix == "v":
        return (n_groups * n_value,)
    return (n_heads * n_key + n_groups * (n_key + n_value),)


def _rotated(keys: Keys, key: str, default: int) -> int:
    value = keys.get(key, U32)
    n = default if value is None else value
    if n % 2:
        raise Damage(f"{keys.name(key)} or the head size is {n}, it must be even")
    return n


def _check_sections(keys: Keys, n_key: int) -> None:
    entry = keys.entries.get(keys.name("rope.dimension_sections"))
    if entry is None:
        return
    if isinstance(entry.value, int):
        sections = np.full(4, entry.value, np.int64)  # llama.cpp takes one number for all of them
    elif isinstance(entry.value, Array) and entry.kind == ARRAY and len(entry.value.data):
        sections = entry.value.data.astype(np.int64)
    else:
        return
    if sections.min() < 0 or sections.sum() > n_key:
        raise Damage(
            f"{keys.name('rope.dimension_sections')} is {sections.tolist()}, heads have {n_key} values"
        )
