"""What a context's cells need at least, and what the machine has at most: asking for more must not end the process.

llama.cpp fills the cells with zeros when it creates them. Where the system grants memory that it does not have (Linux
with overcommit, containers with a limit), it answers that by killing the process rather than with an error.
"""

from __future__ import annotations

from llamapipe.errors import BackendError
from llamapipe.host.memory import memory_limit
from llamapipe.llama.devices import devices
from llamapipe.llama.model import Model

# Bytes a number takes, by cache type; the quantized ones pack blocks of 32.
TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32,
              "q4_0": 18 / 32, "q4_1": 20 / 32, "iq4_nl": 18 / 32}  # fmt: skip
_CELL_BYTES = 40  # llama.cpp's own notes on a cell: its position, shift and set of sequences
_GIB = 2**30


def check_room(model: Model, n_cells: int, type_k: str, type_v: str) -> None:
    """Raises BackendError when ``n_cells`` can never fit in this machine's memory."""
    needed = n_cells * (_CELL_BYTES + _kv_bytes(model, type_k, type_v))
    room = memory_limit()
    if room is not None and needed > room:
        raise BackendError(
            f"a context of {n_cells} cells needs at least {needed / _GIB:.1f} GiB; this machine gives a process at "
            f"most {room / _GIB:.1f} GiB: use a smaller n_ctx, n_seq_max or n_cells, or a smaller cache type"
        )


def _kv_bytes(model: Model, type_k: str, type_v: str) -> float:
    """Bytes of keys and values in a cell; 0 where they are not known to be in this machine's memory, all of them."""
    if model.is_recurrent or any(device.type in ("gpu", "igpu") for device in devices()):
        return 0.0
    sizes = model.metadata
    arch = sizes.get("general.architecture", "")
    if any(f"{arch}.attention.{key}" in sizes for key in ("sliding_window", "kv_lora_rank")):
        return 0.0
    n_head = _int(sizes.get(f"{arch}.attention.head_count"))
    n_kv = _int(sizes.get(f"{arch}.attention.head_count_kv"), n_head)
    head = head_size(model)
    value = _int(sizes.get(f"{arch}.attention.value_length"), head)
    return model.n_layer * n_kv * (head * TYPE_BYTES[type_k] + value * TYPE_BYTES[type_v])


def head_size(model: Model) -> int:
    """Numbers in a key of one attention head; 0 when the file does not say, as with sizes that differ by layer."""
    sizes = model.metadata
    arch = sizes.get("general.architecture", "")
    n_head = _int(sizes.get(f"{arch}.attention.head_count"))
    return _int(sizes.get(f"{arch}.attention.key_length"), model.n_embd // n_head if n_head else 0)


def _int(text: str | None, default: int = 0) -> int:
    return int(text) if text is not None and text.isdigit() else default
