"""Make EAGLE-3 drafts for a model: files with one layer that guesses what the model writes next.

    python tools/make_eagle3.py TARGET.gguf OUT.gguf                 # random weights: always wrong
    python tools/make_eagle3.py TARGET.gguf OUT.gguf --noise 0       # right, for a model of make_model.py --mtp-noise

``train_eagle3.py`` trains one. The layer reads a token and the inputs of three of the model's layers at the token
before it; ``d2t`` has the tokens of the model's vocabulary that it can guess.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from draft_files import (
    Tensors,
    begin_draft,
    draft_options,
    n_tokens,
    random_weights,
    rows_of,
    some_tokens,
    write_tensors,
)
from make_model import rotation, vocabulary


@dataclass(frozen=True)
class Eagle3Shape:
    """The sizes of a draft: its width, heads and feed-forward channels, and the layers and width of its model.

    ``residual_norm``: the layer adds to the normalised state, not to the state itself.
    """

    width: int
    heads: int
    heads_kv: int
    ffn: int
    context: int
    layers: tuple[int, ...]
    target_width: int
    freq_base: float = 10_000.0
    eps: float = 1e-5
    residual_norm: bool = False

    @property
    def head(self) -> int:
        """Values of a head."""
        return self.width // self.heads

    def dims(self, n_vocab: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors, in numpy's order, without those that the model may lend. ``n_vocab``: of d2t."""
        width, kv = self.width, self.head * self.heads_kv
        return {
            "fc.weight": (width, len(self.layers) * self.target_width),
            "blk.0.attn_norm.weight": (width,),
            "blk.0.attn_norm_2.weight": (width,),
            "blk.0.attn_q.weight": (self.heads * self.head, 2 * width),
            "blk.0.attn_k.weight": (kv, 2 * width),
            "blk.0.attn_v.weight": (kv, 2 * width),
            "blk.0.attn_output.weight": (width, self.heads * self.head),
            "blk.0.ffn_norm.weight": (width,),
            "blk.0.ffn_gate.weight": (self.ffn, width),
            "blk.0.ffn_up.weight": (self.ffn, width),
            "blk.0.ffn_down.weight": (width, self.ffn),
            "output_norm.weight": (width,),
            "output.weight": (n_vocab, width),
        }


def shape_for(target: str | os.PathLike[str], ffn: int | None = None) -> Eagle3Shape:
    """A draft of a model's own width, with its heads, which reads an early, a middle and a late layer."""
    reader = gguf.GGUFReader(target)
    arch = reader.fields["general.architecture"].contents()

    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(f"{arch}.{key}")
        return default if field is None else field.contents()

    n_layer, width, heads = value("block_count"), value("embedding_length"), value("attention.head_count")
    if value("attention.key_length", width // heads) != width // heads:
        heads = width // 16  # the heads of the model do not fill its width
    return Eagle3Shape(
        width,
        heads,
        heads if heads != value("attention.head_count") else value("attention.head_count_kv", heads),
        ffn or value("feed_forward_length"),
        value("context_length"),
        (min(2, n_layer - 3), n_layer // 2, max(n_layer - 3, n_layer // 2 + 1)) if n_layer > 3 else (0, 1, 2),
        width,
        value("rope.freq_base", 10_000.0),
    )


def write_eagle3(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    shape: Eagle3Shape,
    tensors: Tensors,
    tokens: Sequence[int] | None,
    type_name: str = "q8_0",
) -> Path:
    """Write a draft with these tensors. ``tokens``: those that it can guess (``d2t``); None: all of the model's.

    It has the model's vocabulary, and its token embeddings unless ``tensors`` has others.
    """
    fields = vocabulary(os.fspath(target))
    n_vocab = len(fields["tokenizer.ggml.tokens"].value)
    name = f"EAGLE-3 draft for {Path(target).name}"
    writer = begin_draft(path, "eagle3", name, 1, shape, n_vocab)
    writer.add_array("eagle3.target_layers", list(shape.layers))
    writer.add_uint32("eagle3.target_hidden_size", shape.target_width)
    if shape.residual_norm:
        writer.add_bool("eagle3.norm_before_residual", True)
    for key, field in fields.items():
        writer.add_key_value(key, field.value, field.type, field.sub_type)
    write_tensors(writer, tensors, tokens, type_name)
    return Path(path)


def random_tensors(shape: Eagle3Shape, n_vocab: int, seed: int = 1) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights; the logits of a row have a standard deviation of 3, as those of trained models."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, dims in shape.dims(n_vocab).items():
        tensors[name] = random_weights(rng, dims, 3.0 if name == "output_norm.weight" else 1.0)
    return tensors


def right_tensors(
    shape: Eagle3Shape, target: str | os.PathLike[str], tokens: Sequence[int] | None, noise: float
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights for a model that writes the next token of its vocabulary (``make_model.py --mtp-noise``).

    ``noise``: in the layer; 0: it is right. It turns the state that it reads, as the model's embeddings turn from token
    to token, and ignores its token, but that attention finds itself by it: with another state it is wrong.
    """
    width = shape.width
    zeros, ones = np.zeros((width, width)), np.eye(width)
    turn = rotation(width)
    turn += noise * np.random.default_rng(7).standard_normal(turn.shape) / np.sqrt(width)
    rows = rows_of(target)
    tensors: dict[str, npt.NDArray[Any]] = {**random_tensors(shape, 1)}
    tensors |= {
        "fc.weight": np.concatenate([ones, zeros, zeros], axis=1),
        "blk.0.attn_q.weight": np.concatenate([5 * ones, zeros], axis=1),
        "blk.0.attn_k.weight": np.concatenate([5 * ones, zeros], axis=1),
        "blk.0.attn_v.weight": np.concatenate([zeros, ones], axis=1),
        "blk.0.attn_output.weight": turn - ones,
        "blk.0.ffn_down.weight": np.zeros((width, shape.ffn)),
        "output.weight": rows if tokens is None else rows[list(tokens)],
    }
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = draft_options(__doc__ or "")
    parser.add_argument(
        "--tokens", type=int, default=0, metavar="N", help="of d2t; 0: all of the model's (0)"
    )
    args = parser.parse_args(argv)
    shape = shape_for(args.target)
    n_vocab = n_tokens(args.target)
    tokens = some_tokens(n_vocab, args.tokens)
    if args.noise is None:
        tensors = random_tensors(shape, len(tokens or range(n_vocab)))
    else:
        tensors = right_tensors(shape, args.target, tokens, args.noise)
    path = write_eagle3(args.out, args.target, shape, tensors, tokens, args.type_name)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
