"""How many bytes the KV cells of a context need, and whether this machine can hold them.

llama.cpp fills the cells with zeros when it creates them. Where the system grants memory that it does not have (Linux
with overcommit, a container with a limit), it then kills the process instead of reporting an error. So a context that
can never fit is refused here, before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping

from llamapipe.errors import BackendError
from llamapipe.host.memory import memory_limit
from llamapipe.llama.devices import devices
from llamapipe.llama.model import Model

# Bytes per value, by cache type. The quantized types pack blocks of 32 values.
TYPE_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_0": 22 / 32, "q5_1": 24 / 32,
              "q4_0": 18 / 32, "q4_1": 20 / 32, "iq4_nl": 18 / 32}  # fmt: skip
_CELL_BYTES = 40  # llama.cpp's record of a cell: its position, its shift and its set of sequences
_GIB = 2**30


def kv_bytes(model: Model, n_cells: int, type_k: str, type_v: str) -> int | None:
    """Bytes of the keys and values of ``n_cells`` KV cells, on whichever devices the layers are placed.

    ``type_k`` and ``type_v`` are names of ``TYPE_BYTES``. None where the metadata does not give the size: see
    ``cell_bytes``. Any thread.

    Raises EngineClosedError when the model is closed.
    """
    if model.is_recurrent:
        return None
    cell = cell_bytes(model.metadata, model.n_layer, model.n_embd, type_k, type_v)
    return None if cell is None else int(n_cells * cell)


def cell_bytes(
    metadata: Mapping[str, str], n_layer: int, n_embd: int, type_k: str, type_v: str
) -> float | None:
    """Bytes of the keys and values of one KV cell in all layers, from a file's metadata. Any thread.

    None where the metadata does not give the size: models with sliding windows or compressed keys, and models whose
    heads differ between layers. A recurrent state is not counted.
    """
    arch = metadata.get("general.architecture", "")
    if any(f"{arch}.attention.{key}" in metadata for key in ("sliding_window", "kv_lora_rank")):
        return None
    n_head = _int(metadata.get(f"{arch}.attention.head_count"))
    if n_head == 0:
        return None
    n_head_kv = _int(metadata.get(f"{arch}.attention.head_count_kv"), n_head)
    key_size = _int(metadata.get(f"{arch}.attention.key_length"), n_embd // n_head)
    value_size = _int(metadata.get(f"{arch}.attention.value_length"), n_embd // n_head)
    return n_layer * n_head_kv * (key_size * TYPE_BYTES[type_k] + value_size * TYPE_BYTES[type_v])


def check_kv_memory(model: Model, n_cells: int, type_k: str, type_v: str) -> None:
    """Raises BackendError when ``n_cells`` KV cells can never fit in this machine's memory.

    Keys and values count only where no GPU may hold them; the records of cells are always in host memory.
    """
    on_gpu = any(device.type in ("gpu", "igpu") for device in (*devices(), *model.devices))
    needed = n_cells * _CELL_BYTES + (0 if on_gpu else kv_bytes(model, n_cells, type_k, type_v) or 0)
    limit = memory_limit()
    if limit is not None and needed > limit:
        raise BackendError(
            f"a context of {n_cells} cells needs at least {needed / _GIB:.1f} GiB; this machine gives a process at "
            f"most {limit / _GIB:.1f} GiB: use a smaller n_ctx, n_seq_max or n_cells, or a smaller cache type"
        )


def head_size(model: Model) -> int:
    """Values in the key of one attention head; 0 when the metadata has no single size (heads that differ by layer)."""
    sizes = model.metadata
    arch = sizes.get("general.architecture", "")
    n_head = _int(sizes.get(f"{arch}.attention.head_count"))
    return _int(sizes.get(f"{arch}.attention.key_length"), model.n_embd // n_head if n_head else 0)


def _int(text: str | None, default: int = 0) -> int:
    return int(text) if text is not None and text.isdigit() else default
