"""A small BERT of random weights, as a file and as a forward pass of numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import numpy.typing as npt

from support.gguf_models import finish

if TYPE_CHECKING:
    from _typeshed import SupportsGetItem

Floats = npt.NDArray[np.float32]
PAD, UNK, CLS, SEP, MASK = range(5)
WORDS = ["the", "fox", "owl", "sat", "ran", "by", "tree", "river", "night", *"abcdefghijklmnopqrstuvwxyz"]
ENDS = ["s", "ed", "ing", *"abcdefghijklmnopqrstuvwxyz"]
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    *(f"\u2581{w}" for w in WORDS),
    *dict.fromkeys(ENDS),
    ",",
    ".",
]
POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}


@dataclass
class Bert:
    """The weights, by the names of the file."""

    weights: SupportsGetItem[str, Floats]
    n_layer: int = 2
    n_head: int = 4
    epsilon: float = 1e-5

    def hidden(self, tokens: Sequence[int]) -> Floats:
        """The last layer's output, ``(n_tokens, n_embd)``."""
        w = self.weights
        n = len(tokens)
        x = w["token_embd.weight"][list(tokens)] + w["position_embd.weight"][:n] + w["token_types.weight"][0]
        x = self._norm(x, "token_embd_norm")
        width = x.shape[1] // self.n_head
        for i in range(self.n_layer):
            name = f"blk.{i}"
            q, k, v = (
                self._linear(x, f"{name}.attn_{part}").reshape(n, self.n_head, width).transpose(1, 0, 2)
                for part in "qkv"
            )
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(width)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (scores / scores.sum(-1, keepdims=True)) @ v
            mixed = mixed.transpose(1, 0, 2).reshape(n, -1)
            x = self._norm(x + self._linear(mixed, f"{name}.attn_output"), f"{name}.attn_output_norm")
            up = self._linear(x, f"{name}.ffn_up")
            up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
            x = self._norm(x + self._linear(up, f"{name}.ffn_down"), f"{name}.layer_output_norm")
        return x.astype(np.float32)

    def score(self, tokens: Sequence[int]) -> float:
        """The rank head's output."""
        inner = np.tanh(self._linear(self.hidden(tokens)[:1], "cls"))
        return float(self._linear(inner, "cls.output")[0, 0])

    def _linear(self, x: Floats, name: str) -> Floats:
        product: Floats = x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]
        return product

    def _norm(self, x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + self.epsilon)
        normed: Floats = scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
        return normed


def bert_model(
    path: Path, pooling: str = "mean", n_ctx: int = 64, rank_head: bool = False
) -> tuple[Path, Bert]:
    """Writes the model, and returns its path and its weights."""
    rng = np.random.default_rng(1)
    n_embd, n_ff = 64, 96
    weights: dict[str, Floats] = {}
    bert = Bert(weights)

    def put(name: str, *shape: int, scale: float = 1.0, about: float = 0.0) -> None:
        values = about + rng.standard_normal(shape) * scale / np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)

    put("token_embd.weight", len(PIECES), n_embd, scale=8.0)
    put("position_embd.weight", n_ctx, n_embd, scale=4.0)
    put("token_types.weight", 2, n_embd)
    norms = ["token_embd_norm"]
    for i in range(bert.n_layer):
        for name, rows, columns in (
            ("attn_q", n_embd, n_embd),
            ("attn_k", n_embd, n_embd),
            ("attn_v", n_embd, n_embd),
            ("attn_output", n_embd, n_embd),
            ("ffn_up", n_ff, n_embd),
            ("ffn_down", n_embd, n_ff),
        ):
            put(f"blk.{i}.{name}.weight", rows, columns, scale=1.5)
            put(f"blk.{i}.{name}.bias", rows)
        norms += [f"blk.{i}.attn_output_norm", f"blk.{i}.layer_output_norm"]
    for name in norms:
        put(f"{name}.weight", n_embd, about=1.0)
        put(f"{name}.bias", n_embd)
    if rank_head:
        put("cls.weight", n_embd, n_embd, scale=2.0)
        put("cls.bias", n_embd)
        put("cls.output.weight", 1, n_embd, scale=4.0)
        put("cls.output.bias", 1)

    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_block_count(bert.n_layer)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(bert.n_head)
    writer.add_layer_norm_eps(bert.epsilon)
    writer.add_causal_attention(False)
    writer.add_uint32("bert.pooling_type", POOLINGS[pooling])
    writer.add_vocab_size(len(PIECES))
    writer.add_tokenizer_model("bert")
    writer.add_token_list(PIECES)
    writer.add_token_types([3] * 5 + [1] * (len(PIECES) - 5))
    writer.add_token_type_count(2)
    writer.add_bos_token_id(CLS)
    writer.add_sep_token_id(SEP)
    writer.add_unk_token_id(UNK)
    writer.add_pad_token_id(PAD)
    writer.add_mask_token_id(MASK)
    for name, values in weights.items():
        writer.add_tensor(name, values)
    finish(writer)
    return path, bert
