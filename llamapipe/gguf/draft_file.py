"""Reads from a draft file's metadata what kind of draft it is, and which models it fits.

Open this file when a draft's kind is misidentified, or when a draft is refused although it fits its model.

A small model of the same family drafts without the target model. Drafts of all other kinds read values that the target
model computes. Such a draft belongs to one model, and its file names that model's widths, layers and vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from llamapipe.gguf.check import GgufInfo

ASSISTANT = "gemma4-assistant"
# Names of the drafts that read values which the target model computes in a step, by the file's architecture.
DRAFT_KINDS = {
    "eagle3": "an EAGLE-3 draft",
    "dflash": "a DFlash draft",
    ASSISTANT: "a Gemma 4 assistant",
}
# Architectures whose graphs in llama.cpp can output the inputs of layers, and which were tested with such drafts.
# llama.cpp ends the process if another architecture is asked for these inputs.
LAYER_INPUT_TARGETS = ("llama", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "gemma4", "gpt-oss", "lfm2")
# Architectures whose MTP layers were tested in llama.cpp. Some have several MTP layers; only the first one drafts.
MTP_ARCHITECTURES = (
    "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "glm4moe", "glm-dsa", "glm5-next", "deepseek2", "deepseek32",
    "nemotron_h_moe", "cohere2moe", "bailingmoe3", "hy_v3", "mimo2", "step35",
)  # fmt: skip
_WITH_SEVERAL = ("hy_v3", "mimo2", "step35")
_I64 = 27
_N_INPUTS = 3  # layers of the model that an EAGLE-3 draft reads
# Tokens of a DFlash block: llama.cpp's default; a limit that is higher than any known draft's block.
_BLOCK_SIZE, _MOST_BLOCK = 16, 64
_MARKOV, _SELECTOR = "markov_w1.weight", "selector_hidden.weight"  # only in DSpark, only in DFlash 2


def target_layers(metadata: Mapping[str, Any]) -> list[int]:
    """Return the layers of the model whose inputs a draft reads; empty if it reads none, or the file does not say."""
    layers = metadata.get(f"{metadata.get('general.architecture')}.target_layers", ())
    if not isinstance(layers, Sequence) or not all(isinstance(layer, int) for layer in layers):
        return []
    return list(layers)


def eagle3_problem(draft: GgufInfo, architecture: str, n_layer: int, n_embd: int, n_vocab: int) -> str:
    """Return why an EAGLE-3 draft does not fit a model of these sizes; empty if it does. Any thread.

    With a draft that does not fit, llama.cpp would end the process, or the drafted tokens would always be wrong.
    """
    if architecture not in LAYER_INPUT_TARGETS:
        return _other_target(architecture, "EAGLE-3")
    metadata, layers = draft.metadata, target_layers(draft.metadata)
    width = metadata.get("eagle3.target_hidden_size")
    if width != n_embd:
        return f"its model's hidden states have {width} numbers (eagle3.target_hidden_size), this model's {n_embd}"
    if len(layers) != _N_INPUTS or len(set(layers)) != _N_INPUTS:
        return f"it reads the layers {layers} (eagle3.target_layers), which must be {_N_INPUTS}"
    if problem := _layers_problem(draft, n_layer):
        return problem
    if draft.n_layer != 1:
        return f"it has {draft.n_layer} layers, and EAGLE-3 drafts have one"
    sizes = [metadata.get(f"eagle3.attention.{name}_length") for name in ("key", "value")]
    if sizes[0] != sizes[1]:
        return f"its keys have {sizes[0]} numbers and its values {sizes[1]}"
    if draft.n_vocab > n_vocab:
        return f"its vocabulary has {draft.n_vocab} tokens, this model's {n_vocab}"
    return _tensor_problem(draft, n_embd, n_vocab)


def mtp_problem(
    metadata: Mapping[str, Any], tensors: Container[str], n_embd: int, n_layer: int, n_mtp_layers: int
) -> str:
    """Return why a model's MTP layers cannot draft, in words that follow the file's name; empty if they can.

    ``metadata``: the file's metadata; ``tensors``: the names of its tensors. ``n_layer``: the number of layers without
    the MTP layers. llama.cpp loads a file that lacks the MTP layers' tensors, and ends the process when it computes
    such a layer. Any thread.
    """
    architecture = metadata.get("general.architecture")
    if not n_mtp_layers:
        return f"has no MTP layers ({architecture}.nextn_predict_layers in its metadata)"
    if architecture not in MTP_ARCHITECTURES:
        known = ", ".join(MTP_ARCHITECTURES)
        return f"is a {architecture}; llamapipe drafts with the MTP layers of {known}"
    if n_mtp_layers > 1 and architecture not in _WITH_SEVERAL:
        return f"has {n_mtp_layers} MTP layers, and llama.cpp computes only one of a {architecture}"
    tensor = f"blk.{n_layer}.nextn.eh_proj.weight"
    if tensor not in tensors:
        return f"lacks the tensors of the MTP layers that its metadata names ({tensor})"
    return last_states_problem(metadata, n_embd)


def last_states_problem(metadata: Mapping[str, Any], n_embd: int) -> str:
    """Return why a model of this width cannot output its last hidden states, in the same form; empty if it can."""
    key = f"{metadata.get('general.architecture')}.embedding_length_out"
    n = metadata.get(key, n_embd)
    if n not in (0, n_embd):  # llama.cpp would read this many values of each state
        return f"has hidden states of {n_embd} numbers, and {key} in its metadata is {n}"
    return ""


def assistant_problem(draft: GgufInfo, target: Mapping[str, Any], n_embd: int, n_vocab: int) -> str:
    """Return why a Gemma 4 assistant does not fit a model; empty if it does. Any thread.

    ``target``: the metadata of the model, with arrays; ``n_embd``, ``n_vocab``: its sizes. The assistant's layers read
    the cells of the model's last two layers, of which the last one sees all tokens and the other has a sliding window.
    llama.cpp compares no sizes: it would read other memory, or end the process.
    """
    architecture = str(target.get("general.architecture", ""))
    if architecture != "gemma4":
        return f"the model is a {architecture}; a Gemma 4 assistant drafts for gemma4"
    own, model = (
        _Sizes(metadata, arch) for metadata, arch in ((draft.metadata, ASSISTANT), (target, "gemma4"))
    )
    width, n_drafting = own.size("embedding_length_out"), own.size("nextn_predict_layers")
    if width is None:
        return f"it does not say how wide its model's hidden states are ({ASSISTANT}.embedding_length_out)"
    if width != n_embd:
        key = f"{ASSISTANT}.embedding_length_out"
        return f"its model's hidden states have {width} numbers ({key}), this model's {n_embd}"
    if n_drafting != draft.n_layer:
        key = f"{ASSISTANT}.nextn_predict_layers"
        return f"{n_drafting} of its {draft.n_layer} layers draft ({key}), and all of them must"
    if draft.n_vocab != n_vocab:
        return f"its vocabulary has {draft.n_vocab} tokens, this model's {n_vocab}"
    windows, n_layer = own.windows(draft.n_layer), model.size("block_count") or 0
    if windows is None or len(set(windows)) < 2:
        pattern = f"{ASSISTANT}.attention.sliding_window_pattern"
        return f"some of its layers must have a sliding window, and some must not ({pattern})"
    if (model.windows(n_layer) or [])[-2:] != [True, False]:
        return "the last but one of this model's layers must have a sliding window, and the last one must not"
    if own.size("attention.sliding_window") != model.size("attention.sliding_window"):
        return (
            f"its sliding window has {own.size('attention.sliding_window')} tokens, this model's "
            f"{model.size('attention.sliding_window')}"
        )
    for i, window in enumerate(windows):
        read = n_layer - (2 if window else 1)
        for name in ("key", "value"):
            key = f"attention.{name}_length{'_swa' if window else ''}"
            if own.size(key) != model.size(key):
                return f"its {name}s have {own.size(key)} numbers ({ASSISTANT}.{key}), this model's {model.size(key)}"
        heads, cells = own.heads_kv(i), model.heads_kv(read)
        if heads != cells or not heads:
            return f"its layer {i} reads {heads} heads of keys, and this model's layer {read} has {cells}"
    return ""


class _Sizes:
    """Reads sizes of one architecture from a file's metadata."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata, self._architecture = metadata, architecture

    def size(self, key: str) -> int | None:
        """Return an integer; None if the file does not have the key."""
        value = self._metadata.get(f"{self._architecture}.{key}")
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def windows(self, n_layer: int) -> list[bool] | None:
        """Return which layers have a sliding window; None if the file does not say."""
        values = self._metadata.get(f"{self._architecture}.attention.sliding_window_pattern")
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != n_layer:
            return None
        return [bool(value) for value in values]

    def heads_kv(self, layer: int) -> int | None:
        """Return the number of KV heads in a layer; None if the file does not say."""
        for key in ("attention.head_count_kv", "attention.head_count"):
            value = self._metadata.get(f"{self._architecture}.{key}")
            if isinstance(value, Sequence) and not isinstance(value, str):
                return int(value[layer]) if layer < len(value) else None
            if value is not None:
                return int(value)
        return None


class Blocks(NamedTuple):
    """The layout of the blocks in which a DFlash draft computes several tokens at once.

    ``n_most``: the maximum number of drafted tokens. ``first``: the entry that predicts the first drafted token. It is
    1 if entry 0, the request's last token, predicts none. ``mask``: the token of the other entries. ``is_causal``: an
    entry attends only to those before it. ``is_even``: all blocks of a decode have the same length.
    """

    n_most: int
    first: int
    mask: int
    is_causal: bool
    is_even: bool

    def n_entries(self, n: int) -> int:
        """Return the number of entries in a block for ``n`` drafted tokens."""
        return n + self.first


def blocks_of(metadata: Mapping[str, Any], tensors: Collection[str]) -> Blocks:
    """Return the block layout of a DFlash file for which ``dflash_problem`` reported no problem."""
    # DSpark adds a part that makes each token depend on the previous token.
    is_dspark = _MARKOV in tensors
    first = 0 if is_dspark and metadata.get("dflash.sample_from_anchor", True) else 1
    size = metadata.get("dflash.block_size", _BLOCK_SIZE)
    is_causal = bool(metadata.get("dflash.attention.causal", False))
    return Blocks(size - first, first, metadata["tokenizer.ggml.mask_token_id"], is_causal, is_dspark)


def dflash_problem(draft: GgufInfo, architecture: str, n_layer: int, n_embd: int, n_vocab: int) -> str:
    """Return why a DFlash or DSpark draft does not fit a model of these sizes; empty if it does. Any thread.

    With a draft that does not fit, llama.cpp would end the process, or the drafted tokens would always be wrong.
    """
    if architecture not in LAYER_INPUT_TARGETS:
        return _other_target(architecture, "DFlash")
    if problem := blocks_problem(draft) or _layers_problem(draft, n_layer):
        return problem
    if draft.n_embd != n_embd:
        return f"it is {draft.n_embd} numbers wide (dflash.embedding_length), and this model {n_embd}"
    if draft.n_vocab > n_vocab:
        return f"its vocabulary has {draft.n_vocab} tokens, this model's {n_vocab}"
    return _tensor_problem(draft, n_embd, n_vocab)


def blocks_problem(draft: GgufInfo) -> str:
    """Return why a DFlash or DSpark file cannot draft for any model; empty if it can. Any thread."""
    metadata, names = draft.metadata, {tensor.name for tensor in draft.tensors}
    if _SELECTOR in names:
        return f"it is a DFlash 2 draft ({_SELECTOR}), and llamapipe drafts with DFlash and DSpark"
    if metadata.get("dflash.hyper_connection_count", 0):
        return "it has the layers of a DeepSeek V4 (dflash.hyper_connection_count)"
    if not target_layers(metadata):
        return "it does not say which layers of the model it reads (dflash.target_layers)"
    if draft.n_layer < 1:
        return "it has no layers (dflash.block_count)"
    heads = [metadata.get(f"dflash.attention.head_count{kind}") for kind in ("", "_kv")]
    n_heads, n_kv = heads[0], heads[0] if heads[1] is None else heads[1]
    if not _is_count(n_heads) or not _is_count(n_kv) or n_heads % n_kv:
        return f"it has {n_heads} heads of queries and {n_kv} of keys (dflash.attention.head_count)"
    sizes = [
        metadata.get(f"dflash.attention.{name}_length", draft.n_embd // n_heads) for name in ("key", "value")
    ]
    if sizes[0] != sizes[1]:
        return f"its keys have {sizes[0]} numbers and its values {sizes[1]}"
    sections = metadata.get("dflash.rope.dimension_sections", ())
    if sections and (not isinstance(sections, Sequence) or any(sections[1:])):
        return f"its positions have several parts ({sections}, dflash.rope.dimension_sections)"
    size = metadata.get("dflash.block_size", None if _MARKOV in names else _BLOCK_SIZE)
    if not _is_count(size) or not 2 <= size <= _MOST_BLOCK:
        return f"its blocks have {size} tokens (dflash.block_size), which must be 2 to {_MOST_BLOCK}"
    mask = metadata.get("tokenizer.ggml.mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < draft.n_vocab:
        key = "tokenizer.ggml.mask_token_id"
        return f"its mask token is {mask} ({key}), which must be from 0 to {draft.n_vocab - 1}"
    return ""


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def _other_target(architecture: str, kind: str) -> str:
    known = ", ".join(LAYER_INPUT_TARGETS)
    return f"the model is a {architecture}; llamapipe drafts with {kind} for {known}"


def _layers_problem(draft: GgufInfo, n_layer: int) -> str:
    layers = target_layers(draft.metadata)
    if min(layers) >= 0 and max(layers) < n_layer:
        return ""
    name = f"{draft.architecture}.target_layers"
    return f"it reads the inputs of the layers {layers} ({name}), and this model has {n_layer}"


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
