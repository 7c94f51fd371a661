"""Make DFlash and DSpark drafts for a model: files with a few layers that guess several next tokens at once.

    python tools/make_dflash.py TARGET.gguf OUT.gguf                 # random weights: always wrong
    python tools/make_dflash.py TARGET.gguf OUT.gguf --noise 0       # right, for a model of make_model.py --mtp-noise

The layers read the model's last token, a mask token for each guess, and cells that are computed from the inputs of some
of the model's layers. DSpark adds a part (``markov_w1``, ``markov_w2``) by which a guess depends on the one before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

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
from make_eagle3 import shape_for
from make_model import rotation, vocabulary

Right = Literal["states", "token", "guess before"]
_SHARP = 3.2  # weights of the norms of queries and keys, so that a head attends to one position
# The first head's part of the result is multiplied by the first number, each further head's by the second one as well:
# the nearest token that can be read decides.
_GAIN, _FALL = 1000.0, 0.3
_NOISE = 5.0  # an EAGLE-3 draft's noise adds up from token to token, and this one's does not


@dataclass(frozen=True)
class DFlashShape:
    """The sizes of a draft: its layers and width, heads and feed-forward channels, and the layers of its model.

    ``block``: tokens of a block. ``mask``: the mask token. ``window``: positions that the first of two layers sees.
    ``has_sections``: positions have four parts, as those of models for images do, of which only the first counts.
    ``is_dspark``: the guess after a guess depends on it. ``from_anchor``: of DSpark, the block's first token gives the
    first guess.
    """

    n_layers: int
    width: int
    heads: int
    heads_kv: int
    head: int
    ffn: int
    context: int
    layers: tuple[int, ...]
    mask: int
    block: int = 8
    freq_base: float = 10_000.0
    eps: float = 1e-5
    window: int = 0
    has_sections: bool = False
    is_causal: bool = False
    is_dspark: bool = False
    from_anchor: bool = True

    def dims(self, n_vocab: int, n_guessed: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors, in numpy's order, without embeddings. ``n_guessed``: tokens of d2t."""
        width, kv = self.width, self.head * self.heads_kv
        dims: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, len(self.layers) * width),
            "enc.output_norm.weight": (width,),
            "output_norm.weight": (width,),
            "output.weight": (n_guessed, width),
        }
        for i in range(self.n_layers):
            dims |= {
                f"blk.{i}.attn_norm.weight": (width,),
                f"blk.{i}.attn_q.weight": (self.heads * self.head, width),
                f"blk.{i}.attn_k.weight": (kv, width),
                f"blk.{i}.attn_v.weight": (kv, width),
                f"blk.{i}.attn_output.weight": (width, self.heads * self.head),
                f"blk.{i}.attn_q_norm.weight": (self.head,),
                f"blk.{i}.attn_k_norm.weight": (self.head,),
                f"blk.{i}.ffn_norm.weight": (width,),
                f"blk.{i}.ffn_gate.weight": (self.ffn, width),
                f"blk.{i}.ffn_up.weight": (self.ffn, width),
                f"blk.{i}.ffn_down.weight": (width, self.ffn),
            }
        if self.is_dspark:
            dims |= {"markov_w1.weight": (n_vocab, width), "markov_w2.weight": (n_guessed, width)}
        return dims


def dflash_shape(target: str | os.PathLike[str], ffn: int | None = None, **sizes: Any) -> DFlashShape:
    """A draft of the model's width and heads that reads an early, a middle and a late layer. ``sizes``: others."""
    like = shape_for(target, ffn)
    mask = n_tokens(target) - 1
    shape = DFlashShape(
        2, like.width, like.heads, like.heads_kv, like.head, like.ffn, like.context, like.layers, mask,
        freq_base=like.freq_base,
    )  # fmt: skip
    return replace(shape, **sizes)


def write_dflash(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    shape: DFlashShape,
    tensors: Tensors,
    tokens: Sequence[int] | None,
    type_name: str = "q8_0",
) -> Path:
    """Write a draft with these tensors. ``tokens``: those that it can guess (``d2t``); None: all of the model's.

    It has the model's vocabulary, and its token embeddings unless ``tensors`` has others.
    """
    fields = vocabulary(os.fspath(target))
    n_vocab = len(fields["tokenizer.ggml.tokens"].value)
    name = f"{'DSpark' if shape.is_dspark else 'DFlash'} draft for {Path(target).name}"
    writer = begin_draft(path, "dflash", name, shape.n_layers, shape, n_vocab)
    writer.add_array("dflash.target_layers", list(shape.layers))
    writer.add_uint32("dflash.block_size", shape.block)
    if shape.is_causal:
        writer.add_causal_attention(True)
    if shape.has_sections:
        writer.add_rope_dimension_sections([shape.head // 2, 0, 0, 0])
    if shape.window:
        writer.add_sliding_window(shape.window)
        writer.add_sliding_window_pattern([i == 0 for i in range(shape.n_layers)])
    if shape.is_dspark:
        writer.add_bool("dflash.sample_from_anchor", shape.from_anchor)
        writer.add_bool("dflash.has_confidence_head", False)
    for key, field in fields.items():
        if key != "tokenizer.ggml.mask_token_id":
            writer.add_key_value(key, field.value, field.type, field.sub_type)
    writer.add_mask_token_id(shape.mask)
    write_tensors(writer, tensors, tokens, type_name)
    return Path(path)


def random_tensors(
    shape: DFlashShape, n_vocab: int, n_guessed: int | None = None, seed: int = 1
) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights; the logits of a row have a standard deviation of 3, as those of trained models."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, dims in shape.dims(n_vocab, n_vocab if n_guessed is None else n_guessed).items():
        tensors[name] = random_weights(rng, dims, 3.0 if name == "output_norm.weight" else 1.0)
    return tensors


def right_shape(shape: DFlashShape, right: Right) -> DFlashShape:
    """The sizes with which ``right_tensors`` can be right: a head for each distance of a guess from what it reads."""
    heads = shape.block if right == "states" else shape.block - 1
    base = 4.0  # positions differ in all pairs of numbers, and none repeats within a context
    return replace(shape, n_layers=1, heads=heads, heads_kv=1, head=shape.width, freq_base=base, window=0)


def right_tensors(
    shape: DFlashShape,
    target: str | os.PathLike[str],
    tokens: Sequence[int] | None,
    noise: float,
    right: Right = "states",
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights for a model that writes the next token of its vocabulary (``make_model.py --mtp-noise``).

    ``noise``: in the layer; 0: it is right. ``right``: by what it is: the model's states of the tokens before the last
    one, that token, or (DSpark) the guess before. Head n attends to what is n positions before a guess and turns it n
    times, as the model's embeddings turn from token to token. Masks, and what is not to be read, have only the channel
    that all tokens share, which says nothing.
    """
    width, turn = shape.width, rotation(shape.width)
    rows = rows_of(target)
    n_vocab = len(rows)
    shared = np.zeros(width)
    shared[0] = np.sqrt(width)
    embeddings = (
        np.tile(shared, (n_vocab, 1)) if right != "token" else rows_of(target, "token_embd.weight").copy()
    )
    embeddings[shape.mask] = shared
    n_pairs = width // 2
    slopes = shape.freq_base ** (-np.arange(n_pairs) / n_pairs)
    others = np.eye(width)
    others[0, 0] = 0.0
    rng = np.random.default_rng(7)
    queries, outputs = [], []
    for n in range(1, shape.heads + 1):
        query = np.concatenate([np.cos(n * slopes), -np.sin(n * slopes)])
        queries.append(np.outer(query, np.eye(width)[0]))
        noisy = _NOISE * noise * rng.standard_normal(turn.shape) / np.sqrt(width)
        outputs.append(_GAIN * _FALL ** (n - 1) * (np.linalg.matrix_power(turn, n - 1) + noisy))
    key = np.outer(np.concatenate([np.ones(n_pairs), np.zeros(n_pairs)]), np.eye(width)[0])
    guessed = rows if tokens is None else rows[list(tokens)]
    states = np.eye(width) if right == "states" else np.eye(width) - others
    tensors: dict[str, npt.NDArray[Any]] = {**random_tensors(shape, n_vocab, len(guessed))}
    tensors |= {
        "fc.weight": np.concatenate([states, *[np.zeros((width, width))] * (len(shape.layers) - 1)], axis=1),
        "blk.0.attn_q.weight": np.concatenate(queries),
        "blk.0.attn_k.weight": key,
        "blk.0.attn_v.weight": others if right != "guess before" else np.zeros((width, width)),
        "blk.0.attn_output.weight": np.concatenate(outputs, axis=1),
        "blk.0.attn_q_norm.weight": np.full(width, _SHARP),
        "blk.0.attn_k_norm.weight": np.full(width, _SHARP),
        "blk.0.ffn_down.weight": np.zeros((width, shape.ffn)),
        "output.weight": guessed,
        "token_embd.weight": embeddings,
    }
    if shape.is_dspark:
        by_guess = right == "guess before"
        tensors["markov_w1.weight"] = (
            rows_of(target, "token_embd.weight") if by_guess else np.zeros((n_vocab, width))
        )
        tensors["markov_w2.weight"] = 3.0 * guessed
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = draft_options(__doc__ or "")
    parser.add_argument(
        "--tokens", type=int, default=0, metavar="N", help="of d2t; 0: all of the model's (0)"
    )
    parser.add_argument("--layers", type=int, default=2, help="of a random draft (2)")
    parser.add_argument("--block", type=int, default=8, metavar="N", help="tokens of a block (8)")
    parser.add_argument("--dspark", action="store_true", help="a guess depends on the one before it")
    args = parser.parse_args(argv)
    shape = dflash_shape(args.target, n_layers=args.layers, block=args.block, is_dspark=args.dspark)
    n_vocab = n_tokens(args.target)
    tokens = some_tokens(n_vocab, args.tokens)
    if args.noise is None:
        tensors = random_tensors(shape, n_vocab, None if tokens is None else len(tokens))
        if tokens is None:  # the model lends its own
            del tensors["output.weight"]
    else:
        shape = right_shape(shape, "states")
        tensors = right_tensors(shape, args.target, tokens, args.noise)
    path = write_dflash(args.out, args.target, shape, tensors, tokens, args.type_name)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
