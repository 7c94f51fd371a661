"""Make random-weight GGUF models of the ``llama`` architecture, for benchmarks and tests.

The weights are random; the sizes and the vocabulary are those of real models. A vocabulary is one of the two tiny ones
built here (``builtin-spm``, ``builtin-bpe``), the path of a GGUF file, or the name of a ``ggml-vocab-*.gguf`` in the
pinned llama.cpp tree. Its tokenizer metadata is copied into the model and stored nowhere else.

    python tools/make_model.py --preset 15m --type q8_0 --seed 1 OUT.gguf
    python tools/make_model.py --preset tiny --type f16 OUT.gguf
    python tools/make_model.py --preset 15m --layers 12 --width 512 --heads 8 --ffn 1408 OUT.gguf
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import k_quants
import numpy as np
import numpy.typing as npt

REPO = Path(__file__).resolve().parent.parent
TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_k_m": (gguf.GGMLQuantizationType.Q4_K, gguf.LlamaFileType.MOSTLY_Q4_K_M),
}
PACKED = {"q8_0": 32, "q4_k_m": k_quants.BLOCK}  # values per block; a row consists of whole blocks

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


PRESETS = {
    "15m": Preset(Shape(), "llama-spm"),
    # Heads whose size is not a multiple of ggml's vectors: with AVX-512 its attention computes 48 values one by one.
    "15m-heads-of-48": Preset(Shape(layers=6, width=288, heads=6, heads_kv=6, ffn=768), "llama-spm"),
    # The sizes of small and medium models that people use on GPUs, with 152k pieces.
    "0.6b": Preset(Shape(layers=28, width=1024, heads=16, heads_kv=8, ffn=3072, context=32768), "qwen2"),
    "8b": Preset(Shape(layers=36, width=4096, heads=32, heads_kv=8, ffn=12288, context=32768), "qwen2"),
    "tiny": Preset(Shape(layers=2, width=64, heads=4, heads_kv=2, ffn=128, context=512), "builtin-spm"),
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
    shape: Shape = PRESETS["tiny"].shape,
    type_name: str = "f16",
    vocab: str = "builtin-spm",
    seed: int = 1,
    source: str | os.PathLike[str] | None = None,
    distinct_rows: int | None = None,
) -> Path:
    """Write a random-weight model to `path` and return it.

    Args:
        path: the file to write; replaced if it exists.
        shape: the sizes of the model.
        type_name: weight type of the matrices, ``f32``, ``f16``, ``q8_0`` or ``q4_k_m``; norms are always float32.
        vocab: ``builtin-spm``, ``builtin-bpe``, a path to a GGUF file, or a name as ``llama-spm``.
        seed: of the weights; the same arguments give the same bytes.
        source: the llama.cpp tree in which a vocabulary's name is looked up; see `find_source`.
        distinct_rows: of a matrix, whose other rows repeat them. Large models for benchmarks are made in seconds then.

    The output matrix is the token embedding (tied). Weights are scaled so that logits have a standard deviation of
    about 1 and depend on the layers rather than on the last token alone.

    Raises:
        ValueError: the sizes do not fit each other or the weight type.
        FileNotFoundError: the vocabulary is not there.
    """
    if type_name not in TYPES:
        raise ValueError(f"type {type_name!r} is unknown, use one of {', '.join(TYPES)}")
    shape.check(type_name)
    fields = vocabulary(vocab, source)
    n_vocab = len(fields["tokenizer.ggml.tokens"].value)
    writer = gguf.GGUFWriter(os.fspath(path), "llama")
    writer.add_name(f"random llama, {shape.layers} layers, {shape.width} wide, seed {seed}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
    writer.add_file_type(int(TYPES[type_name][1]))
    for key, field in fields.items():
        writer.add_key_value(key, field.value, field.type, field.sub_type)
    for name, tensor, n_rows in _weights(shape, n_vocab, seed, distinct_rows):
        if tensor.ndim == 1:
            writer.add_tensor(name, tensor)
        else:
            qtype = _tensor_type(type_name, name, shape.layers)
            rows = k_quants.quantize(tensor.reshape(-1, tensor.shape[-1]), qtype)
            rows = rows.reshape(*tensor.shape[:-1], -1)
            if n_rows > rows.shape[-2]:
                rows = np.take(rows, np.arange(n_rows) % rows.shape[-2], axis=-2)
            writer.add_tensor(name, rows, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(path)


def _tensor_type(type_name: str, name: str, n_layers: int) -> gguf.GGMLQuantizationType:
    """The type of a tensor in a Q4_K_M file, which is a mixture; llama-quantize makes the same choice."""
    if type_name == "q4_k_m":
        if name == "token_embd.weight":  # it is also the output matrix
            return gguf.GGMLQuantizationType.Q6_K
        if name.endswith(("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight")):
            layer, eighth = int(name.split(".")[1]), n_layers // 8
            if layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2:
                return gguf.GGMLQuantizationType.Q6_K
    return TYPES[type_name][0]


def _weights(
    shape: Shape, n_vocab: int, seed: int, distinct_rows: int | None
) -> Iterator[tuple[str, npt.NDArray[np.float32], int]]:
    """Yields tensors in file order, float32 in numpy's order of dimensions (GGUF stores them reversed).

    With each comes the number of its rows: a matrix may have the distinct ones only.

    One at a time: all tensors of an 8B model would take 32 GB.
    """
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        # Rows of standard deviation gain / sqrt(cols) turn inputs of unit size into outputs of size `gain`.
        rows = rows if distinct_rows is None else min(rows, distinct_rows)
        return rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(gain / np.sqrt(cols))

    def experts(rows: int, cols: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return np.stack([matrix(rows, cols, gain) for _ in range(shape.experts)])

    def ones(n: int) -> npt.NDArray[np.float32]:
        return np.ones(n, dtype=np.float32)

    width, kv = shape.width, shape.width // shape.heads * shape.heads_kv
    # The embedding must be small compared with the layers, or a tied output would always repeat the last token.
    yield "token_embd.weight", matrix(n_vocab, width), n_vocab
    for i in range(shape.layers):
        yield f"blk.{i}.attn_norm.weight", ones(width), 1
        yield f"blk.{i}.attn_q.weight", matrix(width, width), width
        yield f"blk.{i}.attn_k.weight", matrix(kv, width), kv
        yield f"blk.{i}.attn_v.weight", matrix(kv, width), kv
        yield f"blk.{i}.attn_output.weight", matrix(width, width), width
        yield f"blk.{i}.ffn_norm.weight", ones(width), 1
        if shape.experts:
            yield f"blk.{i}.ffn_gate_inp.weight", matrix(shape.experts, width), shape.experts
            yield f"blk.{i}.ffn_gate_exps.weight", experts(shape.ffn, width), shape.ffn
            yield f"blk.{i}.ffn_up_exps.weight", experts(shape.ffn, width), shape.ffn
            yield f"blk.{i}.ffn_down_exps.weight", experts(width, shape.ffn, gain=2.0), width
            continue
        yield f"blk.{i}.ffn_gate.weight", matrix(shape.ffn, width), shape.ffn
        yield f"blk.{i}.ffn_up.weight", matrix(shape.ffn, width), shape.ffn
        yield f"blk.{i}.ffn_down.weight", matrix(width, shape.ffn, gain=2.0), width
    yield "output_norm.weight", ones(width), 1


def vocabulary(vocab: str, source: str | os.PathLike[str] | None = None) -> dict[str, Field]:
    """The ``tokenizer.*`` metadata of a vocabulary (see `make_model` for what names one)."""
    if vocab == "builtin-spm":
        return _builtin_spm()
    if vocab == "builtin-bpe":
        return _builtin_bpe()
    path = Path(vocab)
    if not path.is_file():
        path = find_source(source) / "models" / f"ggml-vocab-{vocab}.gguf"
    if not path.is_file():
        raise FileNotFoundError(f"vocabulary {vocab!r} is neither a file nor in the llama.cpp tree ({path})")
    reader = gguf.GGUFReader(path)
    fields = {}
    for key, field in reader.fields.items():
        if not key.startswith("tokenizer."):
            continue
        sub_type = field.types[-1] if len(field.types) > 1 else None
        if field.types[-1] == gguf.GGUFValueType.STRING:
            # Bytes, not text: a piece may be part of a character.
            strings = [bytes(field.parts[i]) for i in field.data]
            fields[key] = Field(strings if sub_type else strings[0], field.types[0], sub_type)
        else:
            fields[key] = Field(field.contents(), field.types[0], sub_type)
    return fields


def find_source(source: str | os.PathLike[str] | None = None) -> Path:
    """The llama.cpp tree: `source`, else $LLAMAPIPE_LLAMA_CPP_DIR, third_party/llama.cpp, the build's cache.

    Raises FileNotFoundError.
    """
    if str(REPO) not in sys.path:
        sys.path.append(str(REPO))  # the build's package lies next to this folder and is not installed
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
        description="Make a random-weight GGUF model of the llama architecture, for benchmarks and tests."
    )
    parser.add_argument("out", metavar="OUT.gguf", help="file to write")
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), default="15m", help="sizes and vocabulary (%(default)s)"
    )
    parser.add_argument(
        "--type", choices=sorted(TYPES), default="q8_0", dest="type_name", help="weights (%(default)s)"
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    args = _parser().parse_args(argv)
    preset = PRESETS[args.preset]
    given = {name: getattr(args, name) for name in vars(Shape()) if getattr(args, name) is not None}
    if "heads" in given and "heads_kv" not in given:
        given["heads_kv"] = given["heads"]
    try:
        path = make_model(
            args.out,
            shape=replace(preset.shape, **given),
            type_name=args.type_name,
            vocab=args.vocab or preset.vocab,
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
