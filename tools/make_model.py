"""Make random-weight GGUF models of the sizes of real ones, for benchmarks and tests.

The weights are random; the sizes and the vocabulary are those of real models. A vocabulary is one of the two tiny ones
built here (``builtin-spm``, ``builtin-bpe``), the path of a GGUF file, the name of a ``ggml-vocab-*.gguf`` in the
pinned llama.cpp tree, or that of a model of ``real_models.py``, which is fetched. Its tokenizer metadata is copied into
the model and stored nowhere else.

Models of the ``llama`` architecture need nothing else. For others (``model_shapes.py``) llama.cpp itself tells which
tensors they have, so llamapipe must be installed or built.

    python tools/make_model.py --preset 15m --type q8_0 --seed 1 OUT.gguf
    python tools/make_model.py --preset qwen3.5-0.8b --tiny --vocab smollm2 OUT.gguf
    python tools/make_model.py --preset gpt-oss-20b --layers 12 --type mxfp4_moe --distinct-rows 256 OUT.gguf
    python tools/make_model.py --preset qwen3.5-0.8b --tiny --mtp 1 --vocab builtin-bpe OUT.gguf
    python tools/make_model.py --preset tiny --type f16 OUT.gguf
    python tools/make_model.py --preset 15m --layers 12 --width 512 --heads 8 --ffn 1408 OUT.gguf
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import k_quants
import numpy as np
import numpy.typing as npt
import real_models
from model_shapes import ARCHITECTURES, Architecture

REPO = Path(__file__).resolve().parent.parent
TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_k_m": (gguf.GGMLQuantizationType.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_M),
    "mxfp4_moe": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_MXFP4_MOE),  # experts: MXFP4
}
PACKED = {
    "q8_0": 32,
    "q4_k_m": k_quants.BLOCK,
    "mxfp4_moe": 32,
}  # values per block; a row consists of whole blocks

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # token types of llama.h


@dataclass(frozen=True)
class Shape:
    """The sizes of a model: counts of layers, channels, heads and feed-forward channels, trained context in tokens.

    ``experts``: feed-forward networks of a layer, of which each token uses ``experts_used``; 0: one, for all tokens.
    """

    layers: int = 8
    width: int = 256
    heads: int = 4
    heads_kv: int = 4
    ffn: int = 704
    context: int = 2048
    experts: int = 0
    experts_used: int = 0

    @property
    def architecture(self) -> str:
        """Its name in llama.cpp."""
        return "llama"

    def metadata(self) -> dict[str, Any]:
        """Values by key without the architecture's prefix."""
        values: dict[str, Any] = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.width,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.heads_kv,
            "rope.dimension_count": self.width // self.heads,
            "attention.layer_norm_rms_epsilon": 1e-5,
        }
        experts = {"expert_count": self.experts, "expert_used_count": self.experts_used}
        return values | (experts if self.experts else {})

    def check(self, type_name: str) -> None:
        """Raise ValueError when llama.cpp could not run a model of these sizes in this weight type."""
        for name, value in vars(self).items():
            if value < 1 and not name.startswith("experts"):
                raise ValueError(f"{name} is {value}, it must be at least 1")
        if not (0 < self.experts_used <= self.experts or self.experts == self.experts_used == 0):
            raise ValueError(
                f"experts_used is {self.experts_used}, it must be 1 to experts, which is {self.experts}"
            )
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")
        if self.heads % self.heads_kv:
            raise ValueError(f"heads {self.heads} must be a multiple of heads_kv {self.heads_kv}")
        block = PACKED.get(type_name, 1)
        if self.width % block or self.ffn % block:
            raise ValueError(
                f"{type_name} packs {block} values: width {self.width} and ffn {self.ffn} must be multiples of {block}"
            )


@dataclass(frozen=True)
class Preset:
    """A named shape and the vocabulary that goes with it."""

    shape: Shape
    vocab: str


TINY = Shape(layers=2, width=64, heads=4, heads_kv=2, ffn=128, context=512)
PRESETS = {
    "15m": Preset(Shape(), "llama-spm"),
    # Heads whose size is not a multiple of ggml's vectors: with AVX-512 its attention computes 48 values one by one.
    "15m-heads-of-48": Preset(Shape(layers=6, width=288, heads=6, heads_kv=6, ffn=768), "llama-spm"),
    # The sizes of small and medium models that people use on GPUs, with 152k pieces.
    "0.6b": Preset(Shape(layers=28, width=1024, heads=16, heads_kv=8, ffn=3072, context=32768), "qwen2"),
    "8b": Preset(Shape(layers=36, width=4096, heads=32, heads_kv=8, ffn=12288, context=32768), "qwen2"),
    "tiny": Preset(TINY, "builtin-spm"),
}


@dataclass(frozen=True)
class Field:
    """One metadata entry: its value and its GGUF types (the second is the element type of an array)."""

    value: Any
    type: gguf.GGUFValueType
    sub_type: gguf.GGUFValueType | None = None


def make_model(
    path: str | os.PathLike[str],
    *,
    shape: Shape | Architecture = TINY,
    type_name: str = "f16",
    vocab: str = "builtin-spm",
    seed: int = 1,
    source: str | os.PathLike[str] | None = None,
    distinct_rows: int | None = None,
) -> Path:
    """Write a random-weight model to `path` and return it.

    Args:
        path: the file to write; replaced if it exists.
        shape: the sizes of the model: of a ``llama``, or one of ``ARCHITECTURES``.
        type_name: weight type of the matrices, one of ``TYPES``; norms are always float32.
        vocab: ``builtin-spm``, ``builtin-bpe``, a path to a GGUF file, or a name as ``llama-spm`` or ``smollm2``.
        seed: of the weights; the same arguments give the same bytes.
        source: the llama.cpp tree in which a vocabulary's name is looked up; see `find_source`.
        distinct_rows: of a matrix, whose other rows repeat them. Large models for benchmarks are made in seconds then.

    The output matrix of a ``llama`` is the token embedding (tied). Weights are scaled so that logits have a standard
    deviation of about 1 (of other architectures 3) and depend on the layers rather than on the last token alone.

    Raises:
        ValueError: the sizes do not fit each other or the weight type.
        FileNotFoundError: the vocabulary is not there.
        BackendError: llamapipe's native module, which other architectures than ``llama`` need, cannot be loaded.
    """
    if type_name not in TYPES:
        raise ValueError(f"type {type_name!r} is unknown, use one of {', '.join(TYPES)}")
    if isinstance(shape, Shape):
        shape.check(type_name)
    fields = vocabulary(vocab, source)
    n_vocab = len(fields["tokenizer.ggml.tokens"].value)
    writer = gguf.GGUFWriter(os.fspath(path), shape.architecture)
    n_layers = shape.layers
    if isinstance(shape, Shape):
        _describe(writer, shape.metadata() | {"vocab_size": n_vocab}, fields)
        width, tensors = shape.width, _weights(shape, n_vocab, seed, distinct_rows)
    else:
        metadata = shape.metadata()
        width, tensors = (
            metadata["embedding_length"],
            _weights_of(shape, metadata, n_vocab, seed, distinct_rows),
        )
        _describe(writer, metadata, fields)
    writer.add_name(f"random {shape.architecture}, {n_layers} layers, {width} wide, seed {seed}")
    writer.add_file_type(int(TYPES[type_name][1]))
    for name, tensor, dims in tensors:
        kept = tensor.ndim == 1 or (isinstance(shape, Architecture) and KEPT.search(name))
        qtype = _F32 if kept else _tensor_type(type_name, name, n_layers, dims[-1])
        rows: npt.NDArray[Any] = tensor.reshape(-1, dims[-1])
        rows = rows if qtype == _F32 else k_quants.quantize(rows, qtype)
        n_rows = math.prod(dims[:-1])
        if n_rows > len(rows):
            rows = np.take(rows, np.arange(n_rows) % len(rows), axis=0)
        writer.add_tensor(name, rows.reshape(*dims[:-1], -1), raw_dtype=qtype)
    finish(writer)
    return Path(path)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all of a file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_F32 = gguf.GGMLQuantizationType.F32
# What llama.cpp computes with as float32, or leaves so when it quantizes a model. And the factors of compressed keys
# and values, because ggml puts half-precision ones into a buffer for AMX, where it cannot multiply them.
KEPT = re.compile(
    r"norm|ffn_gate_inp\.|ssm_conv1d|shortconv\.conv\.|ssm_[ad]$|time_mix_([wav][012]|g[12]|lerp|k_|r_k)|"
    r"channel_mix_lerp|rope_freqs|per_layer_model_proj|attn_[kv]_b\.|\.bias$"
)


def _describe(writer: gguf.GGUFWriter, metadata: Mapping[str, Any], fields: Mapping[str, Field]) -> None:
    """Adds the metadata of the architecture, and the vocabulary's."""
    kind = gguf.GGUFValueType
    for key, value in metadata.items():
        element = value[0] if isinstance(value, list) else value
        of_one = (
            kind.BOOL
            if isinstance(element, bool)
            else kind.UINT32
            if isinstance(element, int)
            else kind.FLOAT32
        )
        array = (kind.ARRAY, of_one) if isinstance(value, list) else (of_one, None)
        writer.add_key_value(f"{writer.arch}.{key}", value, *array)
    for key, field in fields.items():
        writer.add_key_value(key, field.value, field.type, field.sub_type)


def _tensor_type(type_name: str, name: str, n_layers: int, n_cols: int) -> gguf.GGMLQuantizationType:
    """The type of a tensor in a Q4_K_M file, which is a mixture; llama-quantize makes the same choice.

    Rows of other than whole blocks have the type of the next more bits whose blocks they are.
    """
    kind = gguf.GGMLQuantizationType
    if type_name == "mxfp4_moe" and "_exps." in name:
        return kind.MXFP4 if n_cols % 32 == 0 else kind.F16
    tensor_type = TYPES[type_name][0]
    if type_name == "q4_k_m":
        if name in ("token_embd.weight", "output.weight"):  # the first may be the output matrix
            tensor_type = kind.Q6_K
        elif name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")):
            layer, eighth = int(name.split(".")[1]), n_layers // 8
            if layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2:
                tensor_type = kind.Q6_K
        if n_cols % k_quants.BLOCK:
            tensor_type = kind.Q5_0 if tensor_type == kind.Q4_K else kind.Q8_0
    return (
        kind.F16 if tensor_type != _F32 and n_cols % PACKED.get(type_name, 1) and n_cols % 32 else tensor_type
    )


Weights = Iterator[tuple[str, npt.NDArray[np.float32], tuple[int, ...]]]


def _weights(shape: Shape, n_vocab: int, seed: int, distinct_rows: int | None) -> Weights:
    """Yields tensors in file order: a name, values as float32, and the shape in numpy's order (GGUF's is reversed).

    A matrix may have fewer rows than its shape: the distinct ones only.

    One at a time: all tensors of an 8B model would take 32 GB.
    """
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int, gain: float = 1.0) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
        # Rows of standard deviation gain / sqrt(cols) turn inputs of unit size into outputs of size `gain`.
        n = rows if distinct_rows is None else min(rows, distinct_rows)
        values = rng.standard_normal((n, cols), dtype=np.float32) * np.float32(gain / np.sqrt(cols))
        return values, (rows, cols)

    def experts(rows: int, cols: int, gain: float = 1.0) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
        values = np.stack([matrix(rows, cols, gain)[0] for _ in range(shape.experts)])
        return values, (shape.experts, rows, cols)

    def ones(n: int) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
        return np.ones(n, dtype=np.float32), (n,)

    width, kv = shape.width, shape.width // shape.heads * shape.heads_kv
    # The embedding must be small compared with the layers, or a tied output would always repeat the last token.
    yield "token_embd.weight", *matrix(n_vocab, width)
    for i in range(shape.layers):
        yield f"blk.{i}.attn_norm.weight", *ones(width)
        yield f"blk.{i}.attn_q.weight", *matrix(width, width)
        yield f"blk.{i}.attn_k.weight", *matrix(kv, width)
        yield f"blk.{i}.attn_v.weight", *matrix(kv, width)
        yield f"blk.{i}.attn_output.weight", *matrix(width, width)
        yield f"blk.{i}.ffn_norm.weight", *ones(width)
        if shape.experts:
            yield f"blk.{i}.ffn_gate_inp.weight", *matrix(shape.experts, width)
            yield f"blk.{i}.ffn_gate_exps.weight", *experts(shape.ffn, width)
            yield f"blk.{i}.ffn_up_exps.weight", *experts(shape.ffn, width)
            yield f"blk.{i}.ffn_down_exps.weight", *experts(width, shape.ffn, gain=2.0)
            continue
        yield f"blk.{i}.ffn_gate.weight", *matrix(shape.ffn, width)
        yield f"blk.{i}.ffn_up.weight", *matrix(shape.ffn, width)
        yield f"blk.{i}.ffn_down.weight", *matrix(width, shape.ffn, gain=2.0)
    yield "output_norm.weight", *ones(width)


# Optional tensors that llama.cpp names and the published models lack. A `cls` would make a model a reranker.
_LEFT_OUT = re.compile(
    r"^cls|^dense_|\.(input_)?scale$|rope_factors|nextn\.(embed_tokens|shared_head_head)\."
)
_OPTIONAL_BIASES = re.compile(r"(attn_(q|k|v|qkv|output)|ffn_(gate|up|down))\.bias$")
_OF_EXPERTS = re.compile(r"_exps\.|ffn_gate_inp\.|exp_probs_b")
_OUTPUT_NORMS = ("output_norm.weight", "token_embd_norm.weight")  # the second is that of LFM 2


def _weights_of(
    model: Architecture,
    metadata: Mapping[str, Any],
    n_vocab: int,
    seed: int,
    distinct_rows: int | None,
) -> Weights:
    """The same for an architecture whose tensors llama.cpp names."""
    rng = np.random.default_rng(seed)
    tensors = _tensor_shapes(model, metadata, n_vocab)
    output_norm = next((name for name in _OUTPUT_NORMS if name in tensors), "")
    for name, dims in tensors.items():
        n_rows = math.prod(dims[:-1])
        few = dims
        if model.mtp_noise is not None and _ROTATED.search(name):
            yield name, _rotated(name, dims, n_vocab, model.mtp_noise), dims
            continue
        if distinct_rows is not None and len(dims) > 1 and n_rows > distinct_rows and not KEPT.search(name):
            few = (distinct_rows, dims[-1])
        values = _values(rng, name, few, model)
        if model.mtp_noise is not None and _SMALL.search(name):
            values = _SMALL_GAIN * values
        if name == output_norm or name.endswith(
            "nextn.shared_head_norm.weight"
        ):  # logits of a standard deviation of 3, as those of trained models have
            values *= 3.0 * (np.sqrt(dims[-1]) if model.scales_embedding else 1.0)
        yield name, values.astype(np.float32), dims


# Where a model writes the next token of its vocabulary: what makes it do so, and layers whose effect must be small.
_ROTATED = re.compile(r"^(token_embd|output)\.weight$|nextn\.eh_proj\.")
_SMALL, _SMALL_GAIN = re.compile(r"(attn_output|ssm_out|ffn_down(_exps|_shexp)?)\.weight$"), 0.05


def _angles(width: int) -> npt.NDArray[np.float64]:
    angles = np.random.default_rng(5).uniform(0, 2 * np.pi, width // 2)
    angles[0] = 0.0  # the first channel is alike in all tokens
    return angles


def rotation(width: int) -> npt.NDArray[np.float64]:
    """The rotation of `_rotated`, as a matrix."""
    angles = _angles(width)
    cos, sin = np.diag(np.cos(angles)), np.diag(np.sin(angles))
    return np.block([[cos, -sin], [sin, cos]])


def _rotated(name: str, dims: tuple[int, ...], n_vocab: int, noise: float) -> npt.NDArray[np.float32]:
    """Embeddings that are powers of one rotation: token n + 1 has that of token n, turned once more.

    The output matrix has those of the tokens before, so that a token's own embedding gives the next token. The MTP
    layer turns the hidden state that it reads and ignores its token: with the state of another token it is wrong.
    """
    width = dims[-1] if len(dims) > 1 and "eh_proj" not in name else dims[-1] // 2
    angles = _angles(width)
    if "eh_proj" in name:
        turn = rotation(width)
        turn += noise * np.random.default_rng(6).standard_normal((width, width)) / np.sqrt(width)
        both: npt.NDArray[np.float32] = np.concatenate([np.zeros_like(turn), turn], axis=1).astype(np.float32)
        return both
    first = -1 if name == "output.weight" else 0
    turned = np.arange(first, first + n_vocab)[:, None] * angles
    values = np.sqrt(2) * np.concatenate([np.cos(turned), np.sin(turned)], axis=1)
    scaled: npt.NDArray[np.float32] = (values / np.sqrt(width) if first else values).astype(np.float32)
    return scaled


def _tensor_shapes(
    model: Architecture, metadata: Mapping[str, Any], n_vocab: int
) -> dict[str, tuple[int, ...]]:
    """Shapes by name, in numpy's order. llama.cpp is asked with as few experts as it uses: it reserves memory."""
    _find_repo()
    from tensor_list import tensors_of

    fewer = dict(metadata) | {"vocab_size": n_vocab}
    n_experts, n_used = metadata.get("expert_count", 0), metadata.get("expert_used_count", 0)
    if n_experts:
        fewer["expert_count"] = n_used
    writer = gguf.GGUFWriter(None, model.architecture)
    # A tokenizer that only counts.
    _describe(writer, fewer, {"tokenizer.ggml.model": Field("none", gguf.GGUFValueType.STRING)})
    shapes = {}
    for name, listed in tensors_of(writer, model.architecture):
        dims = listed
        if (
            _LEFT_OUT.search(name)
            or (name == "output.weight" and model.tied)
            or (_OPTIONAL_BIASES.search(name) and not model.biases)
            or ("rope_freqs" in name and model.architecture != "gemma4")
        ):
            continue
        if n_experts and _OF_EXPERTS.search(name):
            if dims[-1] != n_used:
                raise ValueError(f"{name} of shape {dims} was taken for one of {n_used} experts")
            dims = (*dims[:-1], n_experts)
        shapes[name] = tuple(reversed(dims))
    if model.architecture == "mimo2":  # whose graph of MTP layers needs them in one matrix
        for i in range(model.layers, model.layers + model.mtp):
            rows = [shapes.pop(f"blk.{i}.attn_{name}.weight") for name in "qkv"]
            shapes[f"blk.{i}.attn_qkv.weight"] = (sum(n for n, _ in rows), rows[0][1])
    return shapes


def _values(
    rng: np.random.Generator, name: str, dims: tuple[int, ...], model: Architecture
) -> npt.NDArray[np.floating[Any]]:
    """Weights with which the next token depends on all that came before, through every layer.

    Recurrent states must decay slowly, or they would forget a prompt's beginning; attention must be sharp, or it would
    give the mean of all tokens.
    """
    last = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("ssm_a"):
        return -np.exp(rng.uniform(-2.5, 0.7, dims))
    if name.endswith("ssm_dt.bias"):
        return rng.uniform(-4, -1, dims)
    if last == "time_mix_w0":
        return rng.uniform(-6, -1, dims)
    if "lerp" in last:
        return rng.uniform(0, 1, dims)
    if last in ("attn_q_norm", "attn_k_norm"):
        # Gemma 4 does not divide products of queries and keys by the root of their size.
        return np.full(dims, 2.0 / (dims[-1] ** 0.25 if model.architecture == "gemma4" else 1.0))
    if (
        "norm" in last
        or last in ("ssm_d", "time_mix_ln", "time_mix_k_k", "time_mix_k_a", "rope_freqs")
        or "scale" in last
    ):
        return np.ones(dims)
    if name.endswith(".bias") and "exps" not in name and len(dims) == 1:
        return rng.normal(0, 0.02, dims)
    if len(dims) == 1:
        return rng.normal(0, 0.3, dims)
    gain = 1.0
    if last in ("attn_q", "attn_k", "attn_q_b", "attn_k_b"):
        gain = 2.0 if model.architecture in ("gpt-oss", "granitehybrid", "nemotron_h", "deepseek2") else 1.0
    elif last in ("ffn_down", "ffn_down_exps", "channel_mix_value"):
        gain = 2.0
    elif last == "token_embd" and model.scales_embedding:
        gain = dims[-1] ** -0.5
    return rng.standard_normal(dims, dtype=np.float32) * np.float32(gain / np.sqrt(dims[-1]))


def vocabulary(vocab: str, source: str | os.PathLike[str] | None = None) -> dict[str, Field]:
    """The ``tokenizer.*`` metadata of a vocabulary (see `make_model` for what names one)."""
    if vocab == "builtin-spm":
        return _builtin_spm()
    if vocab == "builtin-bpe":
        return _builtin_bpe()
    path = Path(vocab)
    if vocab in real_models.MODELS:
        try:
            path = real_models.fetch(vocab)
        except real_models.ModelError as error:
            raise FileNotFoundError(str(error)) from None
    if not path.is_file():
        path = find_source(source) / "models" / f"ggml-vocab-{vocab}.gguf"
    if not path.is_file():
        raise FileNotFoundError(f"vocabulary {vocab!r} is neither a file nor in the llama.cpp tree ({path})")
    return _read_vocabulary(path)


def _read_vocabulary(path: Path) -> dict[str, Field]:
    """The same of a file. llamapipe's reader takes a hundredth of the time that gguf's takes."""
    _find_repo()
    from llamapipe.gguf.check import open_gguf
    from llamapipe.gguf.reader import STRING, Array

    kind = gguf.GGUFValueType
    fields = {}
    head = open_gguf(path).head
    for key, entry in head.entries.items():
        value = entry.value
        if not key.startswith("tokenizer."):
            continue
        if not isinstance(value, Array):
            fields[key] = Field(bool(value) if entry.kind == kind.BOOL else value, kind(entry.kind))
            continue
        # Bytes, not text: a piece may be part of a character.
        places = zip(value.starts.tolist(), value.lengths.tolist(), strict=True)
        strings = value.kind == STRING
        values = [bytes(head.buffer[at : at + n]) for at, n in places] if strings else value.data.tolist()
        fields[key] = Field(values, kind.ARRAY, kind(value.kind))
    return fields


def _find_repo() -> None:
    """Makes the packages beside this folder importable, after what is installed."""
    if str(REPO) not in sys.path:
        sys.path.append(str(REPO))


def find_source(source: str | os.PathLike[str] | None = None) -> Path:
    """The llama.cpp tree: `source`, else $LLAMAPIPE_LLAMA_CPP_DIR, third_party/llama.cpp, the build's cache.

    Raises FileNotFoundError.
    """
    _find_repo()
    from native_build.errors import BuildError
    from native_build.sources import find_source as find

    try:
        return find(Path(source) if source else None, lambda text: print(text, file=sys.stderr)).path
    except BuildError as error:
        raise FileNotFoundError(f"{error.problem}; {error.fix}") from error


def _tokens(pieces: Sequence[tuple[str, float, int]], model: str) -> dict[str, Field]:
    kind = gguf.GGUFValueType
    return {
        "tokenizer.ggml.model": Field(model, kind.STRING),
        "tokenizer.ggml.pre": Field("default", kind.STRING),
        "tokenizer.ggml.tokens": Field([p[0] for p in pieces], kind.ARRAY, kind.STRING),
        "tokenizer.ggml.scores": Field([p[1] for p in pieces], kind.ARRAY, kind.FLOAT32),
        "tokenizer.ggml.token_type": Field([p[2] for p in pieces], kind.ARRAY, kind.INT32),
        "tokenizer.ggml.bos_token_id": Field(1, kind.UINT32),
        "tokenizer.ggml.eos_token_id": Field(2, kind.UINT32),
        "tokenizer.ggml.unknown_token_id": Field(0, kind.UINT32),
        "tokenizer.ggml.add_bos_token": Field(True, kind.BOOL),
        "tokenizer.ggml.add_eos_token": Field(False, kind.BOOL),
    }


_SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
_PAIRS = [
    "th",
    "he",
    "in",
    "er",
    "an",
    "re",
    "nd",
    "on",
    "en",
    "at",
    "ou",
    "ed",
    "ha",
    "to",
    "or",
    "it",
    "is",
    "hi",
]
_WORDS = ["the", "and", "you", "that", "was", "for", "are", "with", "his", "they"]
_SPACE = "\u2581"  # how SentencePiece writes a space


def _builtin_spm() -> dict[str, Field]:
    """A SentencePiece-style vocabulary of 512 pieces: bytes, printable ASCII and frequent pairs."""
    pieces = [*_SPECIAL, *((f"<0x{i:02X}>", 0.0, BYTE) for i in range(256))]
    words = [_SPACE + w for w in [*"abcdefghijklmnopqrstuvwxyz", *_PAIRS, *_WORDS]]
    words += [*_PAIRS, "ing", "the", "and", _SPACE * 2, _SPACE, *(chr(c) for c in range(33, 127))]
    words += [chr(c) for c in range(0xC0, 0xC0 + 512 - len(pieces) - len(words))]
    pieces += [(word, -float(i), NORMAL) for i, word in enumerate(words)]
    return _tokens(pieces, "llama")


def _builtin_bpe() -> dict[str, Field]:
    """A byte-level BPE vocabulary: 256 bytes in GPT-2's printable writing and the merges of frequent pairs."""
    # GPT-2 writes a byte as itself when it is printable Latin-1, and as 256, 257, … otherwise.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    alphabet = [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
    space = alphabet[ord(" ")]
    merges = [(p[0], p[1]) for p in _PAIRS]
    merges += [(space, p) for p in [*_PAIRS, *"abcdefghiklmnopstuw"]]
    pieces = [*_SPECIAL, *((c, 0.0, NORMAL) for c in alphabet), *((a + b, 0.0, NORMAL) for a, b in merges)]
    kind = gguf.GGUFValueType
    fields = _tokens(pieces, "gpt2")
    fields["tokenizer.ggml.pre"] = Field("gpt-2", kind.STRING)
    fields["tokenizer.ggml.merges"] = Field([f"{a} {b}" for a, b in merges], kind.ARRAY, kind.STRING)
    return fields


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Make a random-weight GGUF model of the sizes of a real one, for benchmarks and tests."
    )
    parser.add_argument("out", metavar="OUT.gguf", help="file to write")
    parser.add_argument(
        "--preset",
        "--shape",
        choices=sorted({*PRESETS, *ARCHITECTURES}),
        default="15m",
        help="sizes and vocabulary (%(default)s)",
        metavar="NAME",
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny widths and few layers of an architecture, in a file of a few MB",
    )
    parser.add_argument(
        "--type", choices=sorted(TYPES), default="q8_0", dest="type_name", help="weights (%(default)s)"
    )
    parser.add_argument(
        "--mtp", type=int, default=0, metavar="N", help="layers that predict the token after the next (0)"
    )
    parser.add_argument(
        "--mtp-noise",
        type=float,
        metavar="X",
        help="the model writes the next token of its vocabulary after each, and its MTP layer is right but for this "
        "noise (0 to about 1) instead of random",
    )
    parser.add_argument("--vocab", help="builtin-spm, builtin-bpe, a GGUF file, or a name such as llama-spm")
    parser.add_argument("--seed", type=int, default=1, help="of the weights (%(default)s)")
    parser.add_argument("--source", metavar="DIR", help="llama.cpp tree that holds the named vocabularies")
    parser.add_argument(
        "--distinct-rows", type=int, metavar="N", help="of each matrix, the others repeat them; quick (all)"
    )
    for name in vars(Shape()):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", help="instead of the preset's"
        )
    return parser


def _chosen(
    name: str, tiny: bool, sizes: dict[str, int], mtp: int = 0, mtp_noise: float | None = None
) -> tuple[Shape | Architecture, str]:
    """The sizes that the command line asks for, and the vocabulary that goes with them. Raises ValueError."""
    if name in PRESETS:
        if tiny:
            raise ValueError("--tiny is for the architectures of model_shapes.py; use --preset tiny")
        if mtp:
            raise ValueError("--mtp is for the architectures of model_shapes.py, such as qwen3.5-0.8b")
        if "heads" in sizes and "heads_kv" not in sizes:
            sizes = sizes | {"heads_kv": sizes["heads"]}
        return replace(PRESETS[name].shape, **sizes), PRESETS[name].vocab
    model = ARCHITECTURES[name].shrunk() if tiny else ARCHITECTURES[name]
    if others := sorted(sizes.keys() - {"layers", "context"}):
        raise ValueError(
            f"{name} has sizes of its own: {', '.join(others)} cannot be set, layers and context can"
        )
    model = replace(model, context=sizes.get("context", model.context), mtp=mtp, mtp_noise=mtp_noise)
    if mtp_noise is not None:
        model = replace(model, tied=False)
    return model.cut(sizes["layers"]) if "layers" in sizes else model, "smollm2"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = _parser().parse_args(argv)
    sizes = {name: getattr(args, name) for name in vars(Shape()) if getattr(args, name) is not None}
    try:
        shape, vocab = _chosen(args.preset, args.tiny, sizes, args.mtp, args.mtp_noise)
        path = make_model(
            args.out,
            shape=shape,
            type_name=args.type_name,
            vocab=args.vocab or vocab,
            seed=args.seed,
            source=args.source,
            distinct_rows=args.distinct_rows,
        )
    except (ValueError, OSError) as error:
        print(f"make_model: {error}", file=sys.stderr)
        return 1
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
