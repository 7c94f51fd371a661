"""Random LoRAs for a model's matrices, and the model with such ones merged into its weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

import llamapipe as lp
from llamapipe.llama.adapter import AdapterSet
from llamapipe.llama.context import Context
from support.gguf_document import Document, Tensor
from support.gguf_models import finish

MATRICES = r"blk\.\d+\.(?:attn_(?:q|k|v|output)|ffn_(?:gate|up|down))\.weight"


def make_adapter(
    path: Path,
    model: Path,
    *,
    seed: int = 1,
    rank: int = 4,
    alpha: float | None = 8.0,
    strength: float = 0.5,
    matrices: str = MATRICES,
    type_name: str = "F32",
    name: str | None = None,
    invocation: Sequence[int] | None = None,
) -> Path:
    """Write a random LoRA. ``strength``: how large its changes are, in standard deviations of the weights.

    ``invocation``: the tokens that activate it, which makes it an activated LoRA.
    """
    reader = gguf.GGUFReader(str(model))
    writer = new_writer(path, str(reader.fields["general.architecture"].contents()))
    if name is not None:
        writer.add_name(name)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if invocation is not None:  # as llama.cpp's converter does
        kind = gguf.GGUFValueType
        writer.add_key_value("adapter.alora.invocation_tokens", list(invocation), kind.ARRAY, kind.UINT32)
    rng = np.random.default_rng(seed)
    dtype = np.float16 if type_name == "F16" else np.float32
    for tensor in reader.tensors:
        if not re.fullmatch(matrices, tensor.name):
            continue
        *experts, n_rows, n_columns = (int(n) for n in reversed(tensor.shape))
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        scale = strength * float(weights.std()) / np.sqrt(rank) / ((alpha or rank) / rank)
        a = rng.standard_normal((*experts, rank, n_columns), dtype=np.float32)
        b = rng.standard_normal((*experts, n_rows, rank), dtype=np.float32) * np.float32(scale)
        writer.add_tensor(f"{tensor.name}.lora_a", a.astype(dtype))
        writer.add_tensor(f"{tensor.name}.lora_b", b.astype(dtype))
    finish(writer)
    return path


def matrices_of(path: Path) -> list[str]:
    """The kinds of matrices in a file's layers, as patterns."""
    names = (t.name for t in gguf.GGUFReader(str(path)).tensors if len(t.shape) == 2 and "norm" not in t.name)
    return sorted({re.sub(r"\d+", r"\\d+", re.escape(name)) for name in names if name.startswith("blk.")})


def new_writer(path: Path, architecture: str) -> gguf.GGUFWriter:
    """A writer with the keys that every LoRA has, but alpha."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    return writer


def write_pairs(path: Path, architecture: str, tensors: Mapping[str, np.ndarray]) -> Path:
    """Write an adapter of these tensors."""
    writer = new_writer(path, architecture)
    writer.add_float32("adapter.lora.alpha", 1.0)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
    return path


def merged(path: Path, model: Path, adapters: Iterable[tuple[Path, float]]) -> Path:
    """Write a model of F32 matrices with adapters added to these, each with its scale."""
    shutil.copyfile(model, path)
    written = gguf.GGUFReader(str(path), "r+")
    tensors = {tensor.name: tensor for tensor in written.tensors}
    for adapter, scale in adapters:
        reader = gguf.GGUFReader(str(adapter))
        halves = {tensor.name: np.asarray(tensor.data, np.float64) for tensor in reader.tensors}
        field = reader.fields.get("adapter.lora.alpha")
        for name in [name.removesuffix(".lora_a") for name in halves if name.endswith(".lora_a")]:
            a, b = halves[f"{name}.lora_a"], halves[f"{name}.lora_b"]
            factor = scale if field is None else scale * float(field.contents()) / b.shape[-1]
            assert tensors[name].tensor_type == gguf.GGMLQuantizationType.F32, name
            tensors[name].data[:] += (factor * (b @ a)).astype(np.float32)
    return path


def make_control_vector(
    path: Path, n_embd: int, layers: Iterable[int], *, seed: int = 1, strength: float = 0.5
) -> Path:
    """Write a random control vector with directions for these layers."""
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    rng = np.random.default_rng(seed)
    for layer in layers:
        writer.add_tensor(f"direction.{layer}", strength * rng.standard_normal(n_embd, dtype=np.float32))
    finish(writer)
    return path


def steered(path: Path, model: Path, vectors: Iterable[tuple[Path, float]]) -> Path:
    """Write a model of llama's architecture that adds control vectors by itself: as biases of its last matrices."""
    document = Document.read(model)
    biases: dict[str, np.ndarray] = {}
    for vector, scale in vectors:
        for tensor in gguf.GGUFReader(str(vector)).tensors:
            name = f"blk.{tensor.name.removeprefix('direction.')}.ffn_down.bias"
            biases[name] = biases.get(name, 0) + np.float32(scale) * tensor.data
    document.tensors += [
        Tensor(name.encode(), [len(bias)], 0, np.asarray(bias, np.float32).tobytes())
        for name, bias in biases.items()
    ]
    return document.write(path)


def dequantized(path: Path, model: Path) -> Path:
    """Write a model with the values of another's matrices as F32."""
    document = Document.read(model)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(model)).tensors}
    for tensor in document.tensors:
        values = tensors[tensor.name.decode()]
        tensor.kind = 0
        tensor.data = np.asarray(
            gguf.quants.dequantize(values.data, values.tensor_type), np.float32
        ).tobytes()
    return document.write(path)


TOKENS = [1, 40, 77, 103, 55, 61, 92, 38]


def logits(model: lp.Model, adapters: AdapterSet | None = None) -> npt.NDArray[np.float32]:
    """The rows of ``TOKENS``; computed with a KV cache that is as exact as the weights."""
    with Context(model, n_ctx=64, type_k="f32", type_v="f32", n_threads=1) as context:
        context.set_adapters(adapters)
        return rows(context)


def rows(context: Context, tokens: Sequence[int] = TOKENS) -> npt.NDArray[np.float32]:
    """The rows of all tokens, in a context that is emptied before."""
    context.clear()
    n = len(tokens)
    context.decode(lp.DecodeBatch(tokens, range(n), [0] * n, [1] * n))
    return np.array([context.logits(i) for i in range(n)])
