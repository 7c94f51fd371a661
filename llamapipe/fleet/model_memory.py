"""Estimates how much memory a model takes with its options, from its file alone.

Open this file when ``serve --models`` loads more or fewer models than the memory has room for. The budget is divided by
these estimates; a model whose process takes more than estimated counts with the measured figure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from llamapipe._options import MTP_CHOICES
from llamapipe.gguf.check import GgufInfo, check_gguf, tensor_bytes
from llamapipe.gguf.draft_file import ASSISTANT, target_layers
from llamapipe.llama.kv_memory import TYPE_BYTES, draft_cell_bytes, draft_state_bytes, memory_sizes
from llamapipe.ollama_models import model_of

# Output rows for which compute buffers are counted; they grow with the vocabulary. Memory besides weights and cells,
# the interpreter's 110 MiB included: SmolLM2 135M measured 140 MiB, estimated 158; Qwen2.5 0.5B 238 and 258.
_STEP_ROWS = 256
_CACHE_SHARE = 0.1  # of weights and cells, for cached prefixes that have lost their slot
_USUAL_CONTEXT, _USUAL_SLOTS = 4096, 8
_USUAL_TEXT = 2048  # tokens of a text to embed
_DRAFT_STATES = 2  # the minimum of earlier recurrent states that an engine keeps for an MTP layer
_BLOCK = re.compile(r"blk\.(\d+)\.")
_TOKENS = "token_embd.weight"
_INPUT = re.compile(r"token_embd|token_types|position_embd|per_layer_token_embd")


class Need(NamedTuple):
    """The memory that a model takes once it is loaded.

    ``n_bytes``: system memory, without the process's own. ``n_ctx``: tokens of a request. ``cache_bytes``: the value of
    the engine option with which the model stays within ``n_bytes``. ``gpu_bytes``: GPU memory.
    """

    n_bytes: int
    n_ctx: int
    cache_bytes: int
    gpu_bytes: int


def need_of(info: GgufInfo, embeds: bool, options: Mapping[str, Any], has_gpus: bool = False) -> Need:
    """Return the memory that a file's model needs. Any thread may call it.

    ``embeds``: an ``Embedder`` runs it. ``options``: command-line options for ``Engine``, ``Embedder`` and ``Model``.
    ``has_gpus``: there are GPUs with dedicated memory, which get layers. Raises ModelLoadError.
    """
    n_on_gpu = _n_on_gpu(info, options) if has_gpus else 0
    weights, held = _weights_bytes(info, n_on_gpu)
    beside = more = 0
    if embeds:
        n_ctx, n_cache_bytes = options.get("n_ctx") or min(info.n_ctx_train, _USUAL_TEXT), 0
    else:
        option = options.get("n_ctx")  # 0: the context of the training
        n_ctx = min(info.n_ctx_train, _USUAL_CONTEXT) if option is None else option or info.n_ctx_train
        cells = _cells_bytes(info, n_ctx, options)
        n_cache_bytes = options.get("cache_bytes", int((info.size_bytes + cells) * _CACHE_SHARE))
        share = max(n_on_gpu - 1, 0) / max(info.n_layer, 1)
        weights, held = weights + cells * (1 - share), held + cells * share
        n_seq_max = options.get("n_seq_max") or _USUAL_SLOTS
        n_cells = options.get("n_cells") or n_ctx * n_seq_max
        if (draft := options.get("draft")) in MTP_CHOICES:
            of_cell = draft_cell_bytes(info.metadata, info.n_layer, info.n_embd)
            if of_cell:
                weights += n_cells * of_cell + draft_state_bytes(n_ctx, n_seq_max, info.n_embd)
        elif draft is not None:
            stored = model_of(draft)
            of_draft = {"n_ctx": n_ctx, "n_seq_max": options.get("n_seq_max"), "cache_bytes": 0}
            of_file = check_gguf(draft if stored is None else stored[0])
            draft_need = need_of(of_file, False, of_draft, n_on_gpu > 0)
            beside, more = draft_need.n_bytes, draft_need.gpu_bytes
            if layers := target_layers(of_file.metadata):
                beside += draft_state_bytes(n_ctx, n_seq_max, info.n_embd * len(layers))
            elif of_file.architecture == ASSISTANT:
                beside += draft_state_bytes(n_ctx, n_seq_max, info.n_embd, ASSISTANT)
    steps = 4 * info.n_vocab * _STEP_ROWS
    return Need(
        int(weights + n_cache_bytes + steps) + beside,
        n_ctx,
        n_cache_bytes,
        int(held + steps) + more + options.get("moe_cache_size", 0) if n_on_gpu else 0,
    )


def _n_on_gpu(info: GgufInfo, options: Mapping[str, Any]) -> int:
    """Return how many layers go to GPUs. Layers are counted from the end, and the output counts as the last layer."""
    if options.get("rpc"):
        return 0  # RPC workers get layers first, and how many are left for this machine is not known
    n = options.get("n_gpu_layers", -1)
    return info.n_layer + 1 if n < 0 else min(n, info.n_layer + 1)


def _weights_bytes(info: GgufInfo, n_on_gpu: int) -> tuple[float, float]:
    """Return the sizes in bytes of the weights in system memory and in GPU memory."""
    first = info.n_layer + 1 - n_on_gpu
    on_gpu, has_output = 0, False
    for tensor in info.tensors if n_on_gpu else ():
        block = _BLOCK.match(tensor.name)
        has_output = has_output or tensor.name == "output.weight"
        if int(block[1]) >= first if block else not _INPUT.match(tensor.name):
            on_gpu += tensor_bytes(tensor)
    # If the output shares its weights with the input, GPUs get a copy of them.
    copied = (
        0 if has_output or not n_on_gpu else sum(tensor_bytes(t) for t in info.tensors if t.name == _TOKENS)
    )
    return info.size_bytes - on_gpu, on_gpu + copied


def _cells_bytes(info: GgufInfo, n_ctx: int, options: Mapping[str, Any]) -> float:
    """Return the size in bytes of the KV cells and of recurrent states.

    It is an upper bound: layers with a sliding window may hold fewer cells.
    """
    types = (str(options.get(name, "f16")) for name in ("type_k", "type_v"))
    k, v = (kind if kind in TYPE_BYTES else "f16" for kind in types)  # the engine refuses unknown types
    sizes = memory_sizes(info.metadata, info.n_layer, info.n_embd, k, v)
    n_seq_max = options.get("n_seq_max") or _USUAL_SLOTS
    n_earlier = _DRAFT_STATES if options.get("draft") == "mtp" else 0
    n_cells = options.get("n_cells") or n_ctx * n_seq_max
    return 0.0 if sizes is None else float(sizes.total(n_cells, n_seq_max, n_rs_seq=n_earlier))
