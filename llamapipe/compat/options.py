"""The constructor's arguments of llama-cpp-python as those of ``Model`` and ``Engine``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from llamapipe.arguments import did_you_mean

# llama.h's numbers.
SPLIT_MODES: Final = {0: "none", 1: "layer", 2: "row"}
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
POOLING: Final = {-1: None, 0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
_OLDER: Final = {"n_parts": -1, "f16_kv": True}
NO_SEED: Final = 0xFFFFFFFF
# Cells that requests which run together share, if one request may have fewer.
_SHARED_CELLS: Final = 8192

# Arguments that llamapipe cannot honour: the value that asks for nothing, and why another is refused.
_FROM_FILE = "llamapipe takes it from the model file"
REFUSED: Final[dict[str, tuple[object, str]]] = {
    "kv_overrides": (None, "change the file's metadata instead"),
    "rope_scaling_type": (-1, _FROM_FILE),
    "attention_type": (-1, _FROM_FILE),
    "yarn_ext_factor": (-1.0, _FROM_FILE),
    "yarn_attn_factor": (1.0, _FROM_FILE),
    "yarn_beta_fast": (32.0, _FROM_FILE),
    "yarn_beta_slow": (1.0, _FROM_FILE),
    "yarn_orig_ctx": (0, _FROM_FILE),
    "offload_kqv": (True, "the KV cache is where the layers are"),
    "op_offload": (None, "llama.cpp's default holds"),
    "swa_full": (None, "the engine chooses the cache of sliding windows"),
    "lora_base": (None, "llamapipe has no adapters yet; merge it into the model"),
    "lora_scale": (1.0, "llamapipe has no adapters yet"),
    "lora_path": (None, "llamapipe has no adapters yet; merge it into the model"),
    "numa": (False, "start the process under numactl"),
    "chat_handler": (None, "llamapipe reads no images; pass chat_format or use the model's template"),
    "draft_model": (None, "llamapipe has no speculative decoding yet"),
    "tokenizer": (None, "the model file's tokenizer is used"),
}


def check_refused(values: dict[str, Any]) -> None:
    """Raises ValueError for the first argument that asks for what llamapipe does not have."""
    for name, (nothing, reason) in REFUSED.items():
        value = values[name]
        if value is not nothing and (nothing is None or value != nothing):
            raise ValueError(f"{name}={value!r} is not supported: {reason}")


def check_older(values: dict[str, Any], known: Iterable[str]) -> None:
    """Accepts arguments of older versions, which LangChain still gives. Raises TypeError and ValueError for others.

    ``known``: the names of all others.
    """
    for name, value in values.items():
        if name not in _OLDER:
            raise TypeError(f"Llama() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}")
        if value != _OLDER[name]:
            raise ValueError(f"{name}={value!r} is not supported: llama.cpp has no such option any more")


def check_rope(values: dict[str, Any], metadata: dict[str, str]) -> None:
    """Raises ValueError for a scaling of positions that is not the file's: it cannot be changed here."""
    name = metadata.get("general.architecture", "")
    factor = float(metadata.get(f"{name}.rope.scaling.factor", 1)) or 1.0
    own = {
        "rope_freq_base": float(metadata.get(f"{name}.rope.freq_base", 10000)),
        "rope_freq_scale": 1 / factor,
    }
    for option, value in own.items():
        if values[option] not in (0.0, value):
            raise ValueError(
                f"{option}={values[option]!r} is not supported: the model file says {value:g}; leave it at 0"
            )


def model_options(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of ``Model``, but for its path and template. Raises ValueError."""
    return {
        "n_gpu_layers": values["n_gpu_layers"],
        "split_mode": _named("split_mode", SPLIT_MODES, values["split_mode"]),
        "main_gpu": values["main_gpu"],
        "tensor_split": values["tensor_split"],
        "vocab_only": values["vocab_only"],
        "use_mmap": values["use_mmap"],
        "use_mlock": values["use_mlock"],
    }


def engine_options(values: dict[str, Any], n_ctx: int) -> dict[str, Any]:
    """The arguments of ``Engine``. ``n_ctx``: the context of a request, in tokens. Raises ValueError."""
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
    }
    for name in ("type_k", "type_v"):
        if values[name] is not None:
            options[name] = _named(name, TYPES, values[name])
    return options


def _named(name: str, names: dict[int, str], value: int) -> str:
    if value not in names:
        known = ", ".join(f"{number} ({text})" for number, text in names.items())
        raise ValueError(f"{name} is {value!r}; it must be one of {known}")
    return names[value]
