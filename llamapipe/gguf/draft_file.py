"""Reads from a draft file's metadata what kind of draft it is, and which models it fits.

Open this file when a draft's kind is mistaken, or when a draft is refused although it fits its model.

A small model of the same family drafts on its own. Drafts of the other kinds read values that the target model
computes. Each belongs to one model, whose widths, layers and vocabulary the file names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from llamapipe.gguf.check import GgufInfo

# By the architecture in the file: how the kind is called.
DRAFT_KINDS = {
    "eagle3": "an EAGLE-3 draft",
    "dflash": "a DFlash draft",
    "gemma4-assistant": "a Gemma 4 assistant",
}
STATE_DRAFTS = ("eagle3",)  # those that read what the model computes in a step
# Architectures of llama.cpp whose graphs give out the inputs of layers, and with which EAGLE-3 drafts were tried. Asked
# for those of another one, llama.cpp ends the process.
EAGLE3_TARGETS = ("llama", "qwen3", "qwen3moe")
_NOT_SUPPORTED = {
    "dflash": "a DFlash draft, which computes a block of tokens at once from cells that another call writes",
    "gemma4-assistant": "a Gemma 4 assistant, whose layers read the KV cells of another context",
}
_I64 = 27
_N_INPUTS = 3  # layers of the model that an EAGLE-3 draft reads


def not_supported(architecture: str) -> str:
    """Return why llamapipe cannot draft with a file of this architecture; empty if it can."""
    kind = _NOT_SUPPORTED.get(architecture)
    return "" if kind is None else f"is {kind}; llamapipe drafts with whole models, MTP layers and EAGLE-3"


def target_layers(metadata: Mapping[str, Any]) -> list[int]:
    """Return the layers whose inputs an EAGLE-3 draft reads; empty if the file does not say."""
    layers = metadata.get("eagle3.target_layers", ())
    return (
        [int(layer) for layer in layers]
        if isinstance(layers, Sequence) and not isinstance(layers, str)
        else []
    )


def eagle3_problem(draft: GgufInfo, architecture: str, n_layer: int, n_embd: int, n_vocab: int) -> str:
    """Return why an EAGLE-3 draft does not fit a model of these sizes; empty if it does. Any thread.

    With a draft that does not fit, llama.cpp would end the process, or the drafted tokens would always be wrong.
    """
    if architecture not in EAGLE3_TARGETS:
        known = ", ".join(EAGLE3_TARGETS)
        return f"the model is a {architecture}; llamapipe drafts with EAGLE-3 for {known}"
    metadata, layers = draft.metadata, target_layers(draft.metadata)
    width = metadata.get("eagle3.target_hidden_size")
    if width != n_embd:
        return f"its model's hidden states have {width} numbers (eagle3.target_hidden_size), this model's {n_embd}"
    if len(layers) != _N_INPUTS or len(set(layers)) != _N_INPUTS:
        return f"it reads the layers {layers} (eagle3.target_layers), which must be {_N_INPUTS}"
    if min(layers) < 0 or max(layers) >= n_layer:
        return (
            f"it reads the inputs of the layers {layers} (eagle3.target_layers), and this model has {n_layer}"
        )
    if draft.n_layer != 1:
        return f"it has {draft.n_layer} layers, and EAGLE-3 drafts have one"
    sizes = [metadata.get(f"eagle3.attention.{name}_length") for name in ("key", "value")]
    if sizes[0] != sizes[1]:
        return f"its keys have {sizes[0]} numbers and its values {sizes[1]}"
    if draft.n_vocab > n_vocab:
        return f"its vocabulary has {draft.n_vocab} tokens, this model's {n_vocab}"
    return _tensor_problem(draft, n_embd, n_vocab)


def _tensor_problem(draft: GgufInfo, n_embd: int, n_vocab: int) -> str:
    tensors = {tensor.name: tensor for tensor in draft.tensors}
    borrowed = [name for name in ("token_embd.weight", "output.weight") if name not in tensors]
    if borrowed and draft.n_embd != n_embd:
        return f"it has no {' or '.join(borrowed)}, and this model's is {n_embd} numbers wide instead of {draft.n_embd}"
    if borrowed and draft.n_vocab != n_vocab:
        return f"it has no {' or '.join(borrowed)}, and this model's has {n_vocab} rows instead of {draft.n_vocab}"
    chosen = tensors.get("d2t")
    if chosen is None:
        return ""
    if "output.weight" in borrowed:
        return "it has its own vocabulary (d2t), but no output.weight"
    if chosen.kind != _I64 or draft.n_parts > 1:
        return "its own vocabulary (d2t) is not in 64-bit integers of its only file"
    tokens = _numbers(draft.path, "d2t")
    wrong = tokens[(tokens < 0) | (tokens >= draft.n_vocab)]
    if wrong.size:
        return f"its own vocabulary (d2t) has the token {wrong[0]}; they are from 0 to {draft.n_vocab - 1}"
    return ""


def _numbers(path: str | os.PathLike[str], name: str) -> npt.NDArray[np.int64]:
    """Return the values of a tensor of 64-bit integers. The file must have been checked."""
    from llamapipe.gguf.check import open_gguf

    head = open_gguf(Path(path)).head
    tensor = next(tensor for tensor in head.tensors if tensor.name == name)
    return np.frombuffer(head.buffer, "<i8", tensor.dims[0], head.data_start + tensor.offset).astype(np.int64)
