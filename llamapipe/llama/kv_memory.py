"""Computes the size of a context's KV cells, and refuses contexts that this machine cannot hold.

llama.cpp fills the cells with zeros when it creates them. Where the system grants memory that it does not have (Linux
with overcommit, a container with a limit), it then kills the process instead of reporting an error. So a context that
can never fit is refused before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamapipe.errors import BackendError
from llamapipe.gguf.draft_file import ASSISTANT
from llamapipe.host.memory import memory_limit
from llamapipe.llama.devices import devices
from llamapipe.llama.model import Model

# Bytes per value, by cache type. The quantized types pack blocks of 32 values.
TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32,
              "q4_0": 18 / 32, "q4_1": 20 / 32, "iq4_nl": 18 / 32}  # fmt: skip
_CELL_BYTES = 40  # llama.cpp's record of a cell: its position, its shift and its set of sequences
_GIB = 2**30


# Layers with a sliding window in architectures whose files do not list them: in each group of this size, all but the
# last, or all but the first (``_WINDOWS_LAST``).
_WINDOWS = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "cohere2": 4, "exaone-moe": 4, "llama4": 4,
            "olmo2": 4, "afmoe": 4, "plamo3": 8, "mellum": 4, "muse-glimmer": 4}  # fmt: skip
_WINDOWS_LAST = {"cohere2moe": 4, "laguna": 4, "smallthinker": 4}
_WINDOWS_LISTED = frozenset({"gemma4", "granite-swa", "maple", "mimo2", "spark2-5", "step35"})
_WINDOW_TOKENS = {"llama4": 8192, "smallthinker": 4096}  # these override the file's value
_RECURRENT = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_EVERY_FOURTH_ATTENDS = frozenset({"qwen35", "qwen35moe", "qwen3next", "minimax-01"})
_ATTENDS_WITH_HEADS = frozenset(
    {"jamba", "plamo2", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "kimi-linear", "kimi-k3",
     "bailingmoe3"}
)  # fmt: skip
# Caches of other kinds: indexers, compressed windows, layers that are computed several times.
_UNKNOWN = frozenset(
    {"deepseek4", "deepseek32", "glm-dsa", "glm5-next", "hy-v4", "dots3note", "minimax-m3", "qwen4exp",
     "hrm-text", "nanbeige", "exaone4"}
)  # fmt: skip
_STATE_BYTES = 4  # per value of a recurrent state: always float32
_DRAFT_STATE_BYTES = 16 * 2**20  # per sequence, for the hidden states that are kept for drafting
_LEAST_STATES = 256
_ASSISTANT_STATES = 32  # more than a step drafts; an assistant reads only the last state
# Vectors per cell in the cache of an MTP layer's indexer: the key and its pooled forms.
_INDEX_ROWS = {"qwen4exp": 2, "glm5-next": 3}
_WINDOW_PAD = 256  # llama.cpp rounds the cells of window layers up to a multiple of this


@dataclass(frozen=True)
class MemorySizes:
    """The sizes in bytes of the memory that llama.cpp allocates for a model's sequences with flash attention.

    ``full``: a cell, in all layers that see all tokens. ``window``: a cell, in all layers that see only the last
    ``n_window`` tokens; 0 without such layers. ``state``: the recurrent state of one sequence, in all layers.
    """

    full: float
    window: float
    n_window: int
    state: int

    def n_window_cells(self, n_cells: int, n_seq_max: int, n_ubatch: int, unified: bool) -> int:
        """Return how many cells window layers have, over all sequences, with ``swa_full=False``.

        ``n_cells``: the number of cells of the other layers.
        """
        n_streams = 1 if unified else n_seq_max
        n_most = self.n_window * (n_seq_max if unified else 1) + n_ubatch
        return -(-min(n_cells // n_streams, n_most) // _WINDOW_PAD) * _WINDOW_PAD * n_streams

    def total(
        self,
        n_cells: int,
        n_seq_max: int,
        *,
        swa_full: bool = True,
        n_ubatch: int = 512,
        unified: bool = False,
        n_rs_seq: int = 0,
    ) -> int:
        """Return the size in bytes of a context with ``n_cells`` cells, over all sequences.

        ``swa_full``: window layers keep all cells. ``n_rs_seq``: earlier states kept for each sequence.
        """
        n_window = n_cells if swa_full else self.n_window_cells(n_cells, n_seq_max, n_ubatch, unified)
        return int(n_cells * self.full + n_window * self.window + n_seq_max * (1 + n_rs_seq) * self.state)


def memory_sizes(
    metadata: Mapping[str, Any], n_layer: int, n_embd: int, type_k: str, type_v: str
) -> MemorySizes | None:
    """Return the sizes of the parts of a context, from a file's metadata. Any thread.

    ``metadata``: values by key; numbers may be text, arrays are sequences (see ``GgufInfo.metadata``). ``type_k`` and
    ``type_v`` are names in ``TYPE_BYTES``. Returns None for architectures with other kinds of caches, and if an array
    that gives the size is missing.
    """
    arch = str(metadata.get("general.architecture", ""))
    if arch in _UNKNOWN or metadata.get(f"{arch}.hyper_connection_count"):
        return None
    if arch == ASSISTANT:  # its layers read the cells of the model that it drafts for
        return MemorySizes(0, 0, 0, 0)
    try:
        return _Sizes(metadata, arch, n_layer, n_embd).parts(TYPE_BYTES[type_k], TYPE_BYTES[type_v])
    except (IndexError, ValueError, TypeError):
        return None  # an array is too short: llama.cpp refuses the file


def draft_cell_bytes(metadata: Mapping[str, Any], n_layer: int, n_embd: int) -> int:
    """Return the size in bytes of a KV cell of the MTP layers, which predict the token after the next.

    See ``memory_sizes`` for ``metadata``. Cells of these layers are 16-bit floats. Returns 0 if the size is not known,
    and for an assistant, which has none. Any thread.
    """
    arch = str(metadata.get("general.architecture", ""))
    if arch == ASSISTANT:
        return 0
    try:
        return _Sizes(metadata, arch, n_layer, n_embd).of_draft_layers()
    except (IndexError, ValueError, TypeError):
        return 0


def draft_state_bytes(n_ctx: int, n_seq_max: int, width: int, arch: str = "") -> int:
    """Return the maximum size in bytes of the hidden states that a context keeps for drafting.

    ``width``: the number of values in a state. ``arch``: the architecture of a draft file.
    """
    return n_seq_max * 2 * 4 * width * n_draft_states(n_ctx, width, arch)


def n_draft_states(n_ctx: int, width: int, arch: str) -> int:
    """Return how many of a sequence's last states are always kept. Up to twice as many may be kept."""
    if arch == ASSISTANT:
        return min(_ASSISTANT_STATES, n_ctx)
    return min(max(_DRAFT_STATE_BYTES // (2 * 4 * width), _LEAST_STATES), n_ctx)


class _Sizes:
    """Reads llama.cpp's hyperparameters (llama-hparams.cpp and the files of ``src/models``) from the metadata."""

    def __init__(self, metadata: Mapping[str, Any], arch: str, n_layer: int, n_embd: int) -> None:
        self._metadata, self._arch, self._n_all, self._n_embd = metadata, arch, n_layer, n_embd
        self._n_own = n_layer - self._first("nextn_predict_layers")  # the other layers only draft

    def _first(self, key: str, default: int = 0) -> int:
        value = self._metadata.get(f"{self._arch}.{key}", default)
        return int(value[0]) if isinstance(value, Sequence) and not isinstance(value, str) else int(value)

    def _each(self, key: str, default: int = 0) -> list[int]:
        """Return a value for every layer, read from an array or from one value for all layers."""
        value = self._metadata.get(f"{self._arch}.{key}", default)
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [int(value[i]) for i in range(self._n_all)]
        return [int(value)] * self._n_all

    def parts(self, bytes_k: float, bytes_v: float) -> MemorySizes:
        heads = self._each("attention.head_count")
        heads_kv = self._each("attention.head_count_kv") if self._has("attention.head_count_kv") else heads
        windows, n_window = self._windows(heads_kv)
        recurrent, attending = self._layers(heads_kv)
        has_values = stores_values(self._metadata)
        head = self._n_embd // heads[0] if heads[0] else 0
        cells = {False: 0.0, True: 0.0}
        for i in attending:
            swa = "_swa" if windows[i] else ""
            key, value = (
                self._first(f"attention.{name}_length{swa}", self._first(f"attention.{name}_length", head))
                for name in ("key", "value")
            )
            cells[windows[i]] += heads_kv[i] * (key * bytes_k + value * bytes_v * has_values)
        state = len(recurrent) * _STATE_BYTES * self._state(heads[0])
        return MemorySizes(cells[False], cells[True], n_window if cells[True] else 0, state)

    def of_draft_layers(self) -> int:
        """Return the size in bytes of a cell of all layers that draft."""
        heads = self._each("attention.head_count")
        heads_kv = self._each("attention.head_count_kv") if self._has("attention.head_count_kv") else heads
        n_values = 0
        for i in range(self._n_own, self._n_all):
            head = self._n_embd // heads[i] if heads[i] else 0
            key, value = (self._first(f"attention.{name}_length", head) for name in ("key", "value"))
            n_values += heads_kv[i] * (key + value * stores_values(self._metadata))
            n_values += _INDEX_ROWS.get(self._arch, 0) * self._first("attention.indexer.key_length")
        return int(n_values * TYPE_BYTES["f16"])

    def _has(self, key: str) -> bool:
        return f"{self._arch}.{key}" in self._metadata

    def _windows(self, heads_kv: list[int]) -> tuple[list[bool], int]:
        """Return which layers have a sliding window, and its size in tokens."""
        arch, key = self._arch, "attention.sliding_window_pattern"
        n = self._first("attention.sliding_window", {"gemma2": 4096, "llama4": 8192}.get(arch, 0))
        if arch == "lfm2":
            return [n > 0 and heads > 0 for heads in heads_kv], n
        group = (_WINDOWS | _WINDOWS_LAST).get(arch, 0)
        if not (n and (group or arch in _WINDOWS_LISTED)):
            return [False] * self._n_all, 0
        n = _WINDOW_TOKENS.get(arch, n)
        pattern = self._metadata.get(f"{arch}.{key}", group)
        if isinstance(pattern, Sequence) and not isinstance(pattern, str):
            return [bool(value) for value in self._each(key)], n
        group = int(pattern)
        sees = [
            i < self._n_own
            and (group == 0 or (i % group != 0 if arch in _WINDOWS_LAST else i % group < group - 1))
            for i in range(self._n_all)
        ]
        return sees, n

    def _layers(self, heads_kv: list[int]) -> tuple[list[int], list[int]]:
        """Return the layers with a recurrent state, and the layers with cells."""
        arch, own, whole = self._arch, range(self._n_own), range(self._n_all)
        if arch in _RECURRENT:
            return list(own), []
        if arch == "falcon-h1":
            return list(own), list(whole)
        if arch in _EVERY_FOURTH_ATTENDS:
            if self._has("attention.recurrent_layers"):
                keeps = [bool(value) for value in self._each("attention.recurrent_layers")]
            else:
                group = self._first("full_attention_interval", 4)
                keeps = [(i + 1) % group != 0 for i in whole]
            return [i for i in own if keeps[i]], [i for i in own if not keeps[i]]
        if arch in _ATTENDS_WITH_HEADS:
            ffn = self._each("feed_forward_length") if arch.startswith("nemotron_h") else [0] * self._n_all
            recurrent = [i for i in own if heads_kv[i] == 0 and ffn[i] == 0]
            return recurrent, [i for i in whole if i not in recurrent and ffn[i] == 0]
        n_with_cells = {
            "gemma3n": 20,
            "gemma4": self._n_all - self._first("attention.shared_kv_layers"),
        }.get(arch, self._n_all)
        n_own = self._n_own if self._n_own > 0 else self._n_all
        return [], list(range(min(n_own, n_with_cells)))

    def _state(self, n_head: int) -> int:
        """Return the number of values in a layer's state."""
        n_embd = self._n_embd
        if head := self._first("wkv.head_size"):
            return n_embd * (self._first("token_shift_count", 2) + head)
        if n_conv := self._first("shortconv.l_cache"):
            return n_embd * (n_conv - 1)
        n_before = max(self._first("ssm.conv_kernel") - 1, 0)
        if head := self._first("kda.head_dim"):
            return 3 * (n_before or 3) * n_head * head + head * head * n_head
        if self._arch == "minimax-01":
            head = self._first("attention.key_length", n_embd // n_head)
            return head * head * n_head
        inner, size = self._first("ssm.inner_size"), self._first("ssm.state_size")
        n_groups = 0 if self._arch in ("mamba", "jamba") else self._first("ssm.group_count")
        return n_before * (inner + 2 * n_groups * size) + size * inner


def stores_values(metadata: Mapping[str, Any]) -> bool:
    """Return whether cells store values; latent attention (MLA) stores none. ``metadata``: see ``memory_sizes``."""
    key = f"{metadata.get('general.architecture', '')}.attention."
    return not all(int(metadata.get(f"{key}{name}_length_mla", 0)) for name in ("key", "value"))


def model_sizes(model: Model, type_k: str, type_v: str) -> MemorySizes | None:
    """Return the sizes of the parts of a context for a model, counting layers on every device. Any thread.

    Returns None if a size is not known (see ``memory_sizes``). Raises EngineClosedError when the model is closed.
    """
    # The caller's overrides of metadata are in ``model.metadata``, which llama.cpp returns as text.
    metadata = {**model.file_metadata, **model.metadata}
    n_layer = model.n_layer + model.n_mtp_layers  # as the file counts them
    return memory_sizes(metadata, n_layer, model.n_embd, type_k, type_v)


def kv_bytes(model: Model, n_cells: int, type_k: str, type_v: str) -> int | None:
    """Return the size in bytes of ``n_cells`` KV cells, counting layers on every device.

    ``type_k`` and ``type_v`` are names in ``TYPE_BYTES``. Returns None if the metadata does not give the size, and for
    models with a recurrent state; see ``model_sizes``. Any thread.

    Raises EngineClosedError when the model is closed.
    """
    if model.is_recurrent:
        return None
    sizes = model_sizes(model, type_k, type_v)
    return None if sizes is None else sizes.total(n_cells, 1)


def check_kv_memory(
    model: Model, n_cells: int, n_seq_max: int, type_k: str, type_v: str, *, swa_full: bool
) -> None:
    """Raise BackendError if ``n_cells`` KV cells and ``n_seq_max`` states can never fit in this machine's memory.

    Keys, values and states count only where no GPU may hold them; the records of cells are always in host memory.
    ``swa_full``: window layers keep all cells.
    """
    on_gpu = any(device.type in ("gpu", "igpu") for device in (*devices(), *model.devices))
    sizes = None if on_gpu else model_sizes(model, type_k, type_v)
    needed = n_cells * _CELL_BYTES
    if sizes is not None:  # of window layers at least these cells: a step has at least one token
        needed += sizes.total(n_cells, n_seq_max, swa_full=swa_full, n_ubatch=1, unified=True)
    limit = memory_limit()
    if limit is not None and needed > limit:
        window = ", or swa_full=False" if swa_full and sizes is not None and sizes.window else ""
        raise BackendError(
            f"a context of {n_cells} cells needs at least {needed / _GIB:.1f} GiB; this machine gives a process at "
            f"most {limit / _GIB:.1f} GiB: use a smaller n_ctx, n_seq_max or n_cells, or a smaller cache type{window}"
        )


def head_size(model: Model) -> int:
    """Return the number of values in an attention head's key; 0 if it differs by layer or is not in the metadata."""
    sizes = model.metadata
    arch = sizes.get("general.architecture", "")
    n_head = _int(sizes.get(f"{arch}.attention.head_count"))
    return _int(sizes.get(f"{arch}.attention.key_length"), model.n_embd // n_head if n_head else 0)


def _int(text: str | None, default: int = 0) -> int:
    return int(text) if text is not None and text.isdigit() else default
