"""Converts llama-cpp-python's constructor arguments and constants to options of ``Model`` and ``Engine``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

from llamapipe._messages import did_you_mean, instead_of, quoted
from llamapipe.arguments import check_int
from llamapipe.llama.model import Model
from llamapipe.llama.rope import SCALINGS

# llama.h's numbers.
SPLIT_MODES: Final = {0: "none", 1: "layer", 2: "row", 3: "tensor"}
TYPES: Final = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    20: "iq4_nl",
    30: "bf16",
}
POOLING: Final = {-1: "unspecified", 0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
_ROPE_SCALING: Final = {-1: "unspecified", **{number: name for name, number in SCALINGS.items()}}
# llama-cpp-python's names of these numbers. They come from the tables that options are checked with.
CONSTANTS: Final[dict[str, int]] = {
    f"{prefix}_{name.upper()}": number
    for prefix, names in (
        ("GGML_TYPE", TYPES),
        ("LLAMA_POOLING_TYPE", POOLING),
        ("LLAMA_SPLIT_MODE", SPLIT_MODES),
        ("LLAMA_ROPE_SCALING_TYPE", _ROPE_SCALING),
    )
    for number, name in names.items()
}
# Arguments of older versions, which LangChain still gives: the values that are accepted, as the original ignores all,
# and what to use instead of others.
_OLDER: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "n_parts": ((-1,), "the parts of a model are found by themselves"),
    "f16_kv": ((True, False), "use type_k and type_v"),
    "device": ((None,), "use n_gpu_layers and main_gpu"),
}
NO_SEED: Final = 0xFFFFFFFF
# Options that are compared or looked up before ``Model`` and ``Engine`` check them, with their ranges.
_INT32_MAX: Final = 2**31 - 1
_INTEGERS: Final = {
    "n_ctx": (0, _INT32_MAX),
    "n_batch": (0, _INT32_MAX),
    "n_ubatch": (0, _INT32_MAX),
    "n_seq_max": (-_INT32_MAX, _INT32_MAX),  # the engine knows the range
    "last_n_tokens_size": (-1, _INT32_MAX),
    "split_mode": (-_INT32_MAX, _INT32_MAX),  # the message about another number names the modes
    "pooling_type": (min(POOLING), max(POOLING)),
    "type_k": (-_INT32_MAX, _INT32_MAX),
    "type_v": (-_INT32_MAX, _INT32_MAX),
}
# The arguments that ``Model`` has, too.
_OF_MODEL: Final = (
    "n_gpu_layers", "main_gpu", "tensor_split", "vocab_only", "use_mmap", "use_mlock", "kv_overrides",
)  # fmt: skip
# The arguments that are attributes of a ``Llama``, too, as they were given.
AS_GIVEN: Final = frozenset({
    "draft_model", "kv_overrides", "last_n_tokens_size", "lora_base", "lora_path", "lora_scale", "n_batch", "numa",
    "spm_infill", "tensor_split",
})  # fmt: skip
# Cells that requests which run together share, if one request may have fewer.
_SHARED_CELLS: Final = 8192

# Arguments that llamapipe cannot honour: the value that asks for nothing, and why another is refused.
# The values with which positions are as the model's file says: llama-cpp-python's defaults, and those that LangChain
# gives for every model, whatever its file says.
_FILE_ROPE: Final[dict[str, tuple[float, ...]]] = {
    "rope_freq_base": (0.0, 10000.0),
    "rope_freq_scale": (0.0, 1.0),
    "yarn_orig_ctx": (0,),
    "yarn_ext_factor": (-1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_beta_fast": (32.0,),
    "yarn_beta_slow": (1.0,),
}
_NO_HANDLER = (
    "for images, put the projector (mmproj*.gguf) beside the model and leave chat_handler out; for text, pass "
    "chat_format or chat_template"
)
REFUSED: Final[dict[str, tuple[object, str]]] = {
    "attention_type": (-1, "llamapipe takes it from the model file"),
    "offload_kqv": (True, "the KV cache is where the layers are"),
    "op_offload": (None, "llama.cpp's default holds"),
    "lora_base": (None, "an adapter is applied to the model itself"),
    "numa": (False, "start the process under numactl"),
    "chat_handler": (None, _NO_HANDLER),
    "draft_model": (None, "give a path or an lp.Model; texts are guessed from themselves without it"),
    "tokenizer": (None, "the model file's tokenizer is used"),
}


def check_refused(values: dict[str, Any]) -> None:
    """Raise ValueError for the first argument that asks for a feature that llamapipe lacks."""
    for name, (nothing, reason) in REFUSED.items():
        value = values[name]
        if name == "draft_model" and isinstance(value, (str, os.PathLike, Model)):
            continue
        if value is not nothing and (nothing is None or value != nothing):
            raise ValueError(f"{name}={quoted(value)} is not supported: {reason}")


def check_older(values: dict[str, Any], known: Iterable[str]) -> None:
    """Accept arguments of older versions, which LangChain still passes. Raises TypeError and ValueError for others.

    ``known``: the names of all current arguments.
    """
    for name, value in values.items():
        if name not in _OLDER:
            instead = instead_of(name, "Llama")
            hint = did_you_mean(name, known) if instead is None else f"; {instead}"
            raise TypeError(f"Llama() got an unexpected keyword argument {quoted(name)}{hint}")
        accepted, instead = _OLDER[name]
        if value not in accepted:
            raise ValueError(f"{name}={quoted(value)} is not supported: {instead}")


def check_integers(values: dict[str, Any]) -> None:
    """Raise TypeError for a value that is not an integer, and ValueError for an integer out of range."""
    for name, (low, high) in _INTEGERS.items():
        if values[name] is not None or name not in ("type_k", "type_v"):
            check_int(name, values[name], low, high)


def pooling(number: int, metadata: dict[str, str]) -> str:
    """Return the pooling of embeddings for ``pooling_type``; -1 means the file's pooling.

    For a file that names no pooling, this is "none", as in llama.cpp: one vector per token. ``Embedder`` would choose
    "last" or "mean", whose result has another shape than llama-cpp-python's.
    """
    if number == -1:
        own = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", "0")
        number = int(own) if own.isdecimal() and int(own) in POOLING else 0
    return POOLING[number]


def model_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Model`` other than its path and template. Raises ValueError."""
    options = {name: values[name] for name in _OF_MODEL}
    return options | {"split_mode": _look_up("split_mode", SPLIT_MODES, values["split_mode"])}


def engine_options(values: dict[str, Any], n_ctx: int) -> dict[str, Any]:
    """Return the options of ``Engine`` and ``EngineTuning``. ``n_ctx``: tokens per request. Raises ValueError."""
    n_seq_max = values["n_seq_max"]
    n_cells = values["n_cells"]
    if n_cells is None and n_seq_max * n_ctx > _SHARED_CELLS:
        # As much memory as llama-cpp-python takes for one request, or a little more.
        n_cells = max(n_ctx, _SHARED_CELLS)
    options: dict[str, Any] = {
        "n_ctx": n_ctx,
        "n_seq_max": n_seq_max,
        "n_cells": n_cells,
        "n_batch": max(values["n_batch"], n_seq_max),
        "n_ubatch": max(values["n_ubatch"], n_seq_max),
        "n_threads": values["n_threads"],
        "n_threads_batch": values["n_threads_batch"],
        # False is llama-cpp-python's default; llama.cpp then chooses.
        "flash_attn": "on" if values["flash_attn"] else "auto",
        "draft": values.get("draft_model"),
        "swa_full": values.get("swa_full"),
    }
    for name in ("type_k", "type_v"):
        if values[name] is not None:
            options[name] = _look_up(name, TYPES, values[name])
    options.update(_rope_options(values))
    return options


def _rope_options(values: dict[str, Any]) -> dict[str, Any]:
    options = {name: values[name] for name, own in _FILE_ROPE.items() if values.get(name, own[0]) not in own}
    if values.get("rope_scaling_type", -1) not in (-1, None):
        options["rope_scaling"] = _look_up("rope_scaling_type", _ROPE_SCALING, values["rope_scaling_type"])
    return options


def _look_up(name: str, names: dict[int, str], value: int) -> str:
    if value not in names:
        known = ", ".join(f"{number} ({text})" for number, text in names.items())
        raise ValueError(f"{name} is {quoted(value)}; it must be one of {known}")
    return names[value]
