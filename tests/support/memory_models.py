"""Small models of random weights whose memory is not one KV cell for each token: sliding windows, and hybrids."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from support.gguf_models import add_words, finish

N_VOCAB, N_EMBD, N_HEAD, N_FF, N_WINDOW = 128, 32, 2, 64, 16


class _Weights:
    """A GGUF file of random weights that is written when it is complete."""

    def __init__(self, path: Path, architecture: str, n_layer: int, n_head_kv: list[int] | int) -> None:
        self.writer = writer = gguf.GGUFWriter(path, architecture)
        self._chance = np.random.default_rng(1)
        writer.add_block_count(n_layer)
        writer.add_context_length(256)
        writer.add_embedding_length(N_EMBD)
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(N_HEAD)
        writer.add_head_count_kv(n_head_kv)
        writer.add_layer_norm_rms_eps(1e-5)
        add_words(writer, N_VOCAB)
        self.put("token_embd.weight", N_VOCAB, N_EMBD)

    def put(self, name: str, *shape: int, scale: float = 2.0) -> None:
        """Adds a matrix."""
        values = self._chance.standard_normal(shape, dtype=np.float32) * np.float32(scale / shape[-1] ** 0.5)
        self.writer.add_tensor(name, values)

    def ones(self, name: str, n: int) -> None:
        """Adds the weights of a norm."""
        self.writer.add_tensor(name, np.ones(n, np.float32))

    def attention(self, i: int, n_head_kv: int) -> None:
        """Adds queries, keys, values, output, and norms of queries and keys."""
        n_head = N_EMBD // N_HEAD
        self.put(f"blk.{i}.attn_q.weight", N_EMBD, N_EMBD)
        self.put(f"blk.{i}.attn_k.weight", n_head * n_head_kv, N_EMBD)
        self.put(f"blk.{i}.attn_v.weight", n_head * n_head_kv, N_EMBD)
        self.put(f"blk.{i}.attn_output.weight", N_EMBD, N_EMBD)
        self.ones(f"blk.{i}.attn_q_norm.weight", n_head)
        self.ones(f"blk.{i}.attn_k_norm.weight", n_head)

    def feed_forward(self, i: int) -> None:
        """Adds both norms and the feed-forward part."""
        self.ones(f"blk.{i}.attn_norm.weight", N_EMBD)
        self.ones(f"blk.{i}.ffn_norm.weight", N_EMBD)
        self.put(f"blk.{i}.ffn_gate.weight", N_FF, N_EMBD)
        self.put(f"blk.{i}.ffn_up.weight", N_FF, N_EMBD)
        self.put(f"blk.{i}.ffn_down.weight", N_EMBD, N_FF)

    def write(self) -> None:
        """Writes the file."""
        finish(self.writer)


def sliding_window_model(path: Path) -> Path:
    """A Gemma 3 whose first five layers see 16 tokens, and whose sixth sees all."""
    weights = _Weights(path, "gemma3", 6, 1)
    weights.writer.add_sliding_window(N_WINDOW)
    weights.writer.add_key_length(N_EMBD // N_HEAD)
    weights.writer.add_value_length(N_EMBD // N_HEAD)
    weights.ones("output_norm.weight", N_EMBD)
    for i in range(6):
        weights.attention(i, 1)
        weights.feed_forward(i)
        weights.ones(f"blk.{i}.post_attention_norm.weight", N_EMBD)
        weights.ones(f"blk.{i}.post_ffw_norm.weight", N_EMBD)
    weights.write()
    return path


def hybrid_model(path: Path) -> Path:
    """An LFM2: two layers with a short convolution, whose state is recurrent, and one with attention."""
    weights = _Weights(path, "lfm2", 3, [0, 1, 0])
    weights.writer.add_uint32("lfm2.shortconv.l_cache", 3)
    weights.ones("token_embd_norm.weight", N_EMBD)
    for i in range(3):
        weights.feed_forward(i)
        if i == 1:
            weights.attention(i, 1)
            continue
        weights.put(f"blk.{i}.shortconv.conv.weight", N_EMBD, 3)
        weights.put(f"blk.{i}.shortconv.in_proj.weight", 3 * N_EMBD, N_EMBD)
        weights.put(f"blk.{i}.shortconv.out_proj.weight", N_EMBD, N_EMBD)
    weights.write()
    return path
