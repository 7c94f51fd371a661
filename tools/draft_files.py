"""Parts of the tools that make drafts: their command line, reading the model they draft for, writing tensors.

Open this file to add a tool for another kind of draft; ``make_eagle3.py`` is the shortest example.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import numpy.typing as npt
from make_model import finish, vocabulary

if TYPE_CHECKING:
    from make_dflash import DFlashShape
    from make_eagle3 import Eagle3Shape

Tensors = Mapping[str, npt.NDArray[np.floating[Any]]]
KINDS = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}


def draft_options(doc: str) -> argparse.ArgumentParser:
    """The options that all drafts have. ``doc``: the tool's docstring."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--noise", type=float, help="of a right draft; default: the draft is random")
    parser.add_argument("--type", dest="type_name", default="q8_0", choices=KINDS)
    return parser


def n_tokens(target: str | os.PathLike[str]) -> int:
    """The number of tokens in a model's vocabulary."""
    return len(vocabulary(os.fspath(target))["tokenizer.ggml.tokens"].value)


def some_tokens(n_vocab: int, n: int) -> list[int] | None:
    """``n`` tokens of a vocabulary for ``d2t``, evenly spread; None for 0."""
    return list(range(0, n_vocab, max(n_vocab // n, 1)))[:n] if n else None


def rows_of(target: str | os.PathLike[str], name: str = "output.weight") -> npt.NDArray[np.float32]:
    """A matrix of a model, by default its output, in float32: a row for each token."""
    matrix = next(t for t in gguf.GGUFReader(target).tensors if t.name == name)
    rows: npt.NDArray[np.float32] = gguf.quants.dequantize(matrix.data, matrix.tensor_type)
    return rows


def random_weights(rng: np.random.Generator, dims: tuple[int, ...], gain: float) -> npt.NDArray[np.float32]:
    """Ones for a vector, random numbers for a matrix, times ``gain``; products with a matrix keep the input's size."""
    values = np.ones(dims) if len(dims) == 1 else rng.standard_normal(dims) / np.sqrt(dims[-1])
    return (values * gain).astype(np.float32)


def begin_draft(
    path: str | os.PathLike[str],
    arch: str,
    name: str,
    n_layers: int,
    shape: DFlashShape | Eagle3Shape,
    n_vocab: int,
) -> gguf.GGUFWriter:
    """Return the writer of a draft's file, after writing the draft's name and shape."""
    writer = gguf.GGUFWriter(os.fspath(path), arch)
    writer.add_name(name)
    writer.add_block_count(n_layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.freq_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(n_vocab)
    return writer


def write_tensors(
    writer: gguf.GGUFWriter, tensors: Tensors, tokens: Sequence[int] | None, type_name: str
) -> None:
    """Add the tensors, matrices in a type of ``KINDS``, and ``tokens`` as ``d2t``. Write the file and close it."""
    for name, tensor in tensors.items():
        kind = KINDS[type_name] if tensor.ndim > 1 else KINDS["f32"]
        writer.add_tensor(name, gguf.quants.quantize(tensor.astype(np.float32), kind), raw_dtype=kind)
    if tokens is not None:
        writer.add_tensor("d2t", np.array(tokens, np.int64))
    finish(writer)
