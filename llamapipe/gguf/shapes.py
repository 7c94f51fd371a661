"""Checks a model's hyperparameters before llama.cpp reads them.

llama.cpp asserts them in ``llama_model_base::load_hparams`` or in the operations it builds from them, and a failed
assertion ends the process. It refuses tensors whose shapes do not fit the hyperparameters by itself.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from llamapipe.gguf.heads import MAX_WIDTH, check_heads
from llamapipe.gguf.keys import Keys, text
from llamapipe.gguf.reader import BOOL, F32, U32, Array, Damage, Head

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
    """The architecture's name and the sizes needed elsewhere; a size is 0 if a vocabulary-only file omits it."""

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
        _has_sections(keys),
    )


def _has_sections(keys: Keys) -> bool:
    """Whether one of the three kinds of positions rotates anything; llama.cpp takes one number for all of them."""
    entry = keys.entries.get(keys.name("rope.dimension_sections"))
    if entry is None:
        return False
    if isinstance(entry.value, Array):
        return bool((entry.value.data[:3].astype(np.int64) > 0).any())
    return isinstance(entry.value, int) and entry.value > 0


def _check_experts(keys: Keys, head: Head, n_layer: int) -> None:
    n_expert = keys.integer("expert_count", 0, _MAX_EXPERTS)
    if n_expert <= 1 and keys.architecture in ("hunyuan-dense", "hunyuan_vl"):
        return  # llama.cpp treats one expert of these architectures as none
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


def _check_floats(keys: Keys) -> None:
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
    scaling = text(keys.entries, keys.name("rope.scaling.type"))
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        raise Damage(
            f"{keys.name('rope.scaling.type')} is {scaling!r}, llama.cpp knows {', '.join(_ROPE_SCALINGS)}"
        )
