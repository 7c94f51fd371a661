"""The forward passes of llama, qwen2, gemma3 and bert in numpy, on the dequantized weights of a GGUF file.

They follow the papers and the models' own descriptions, in float32 and without a cache: an oracle that shares nothing
with llama.cpp but the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from support.bert_model import Bert

Floats = npt.NDArray[np.float32]
_MOST_KEPT = 2**20  # numbers of a tensor


class GgufWeights:
    """Metadata and dequantized tensors of a file. A tensor is dequantized when it is asked for; small ones are kept.

    So the layers of small models, of which tests ask for several passes, are dequantized once.
    """

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(str(path))
        self._fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.")
        }
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._floats: dict[str, Floats] = {}
        self.architecture = str(self._fields["general.architecture"])

    def field(self, name: str, default: Any = None) -> Any:
        return self._fields.get(f"{self.architecture}.{name}", default)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> Floats:
        if name in self._floats:
            return self._floats[name]
        tensor = self._tensors[name]
        floats = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if floats.size <= _MOST_KEPT:
            self._floats[name] = floats
        return floats

    def rows(self, name: str, ids: Sequence[int]) -> Floats:
        tensor = self._tensors[name]
        return gguf.quants.dequantize(tensor.data[list(ids)], tensor.tensor_type).astype(np.float32)

    def linear(self, x: Floats, name: str) -> Floats:
        product: Floats = x @ self[f"{name}.weight"].T
        return product + self[f"{name}.bias"] if f"{name}.bias" in self else product


@lru_cache(maxsize=1)
def opened(path: Path) -> GgufWeights:
    """The file's weights; reading a large vocabulary takes seconds."""
    return GgufWeights(path)


def logprobs(
    path: Path, tokens: Sequence[int], scaling: str = "none", scale: float = 1, n_trained: int = 0
) -> Floats:
    """Log-probabilities of the next token after each of ``tokens``: ``(n_tokens, n_vocab)``.

    Positions are scaled by ``scale``: all (``"linear"``), or as YaRN does (``"yarn"``, section 3 of arXiv 2309.00071)
    for a model that was trained with ``n_trained`` tokens.
    """
    w = opened(path)
    is_gemma = w.architecture == "gemma3"
    epsilon = w.field("attention.layer_norm_rms_epsilon")
    n_embd, n_head = w.field("embedding_length"), w.field("attention.head_count")
    n_kv = w.field("attention.head_count_kv")
    width = w.field("attention.key_length", n_embd // n_head)
    window = w.field("attention.sliding_window")
    n = len(tokens)
    distance = np.arange(n)[:, None] - np.arange(n)[None, :]
    # llama's converter reorders the rows of queries and keys so that a pair to rotate lies side by side.
    side_by_side = w.architecture == "llama"

    def norm(x: Floats, name: str) -> Floats:
        normed: Floats = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * w[f"{name}.weight"]
        return normed

    x = w.rows("token_embd.weight", tokens) * np.float32(sqrt(n_embd) if is_gemma else 1)
    for i in range(w.field("block_count")):
        layer = f"blk.{i}"
        is_local = is_gemma and (i + 1) % 6 != 0  # Gemma 3: five layers with a window, then one without
        y = norm(x, f"{layer}.attn_norm")
        q, k, v = (
            w.linear(y, f"{layer}.attn_{part}").reshape(n, heads, width).transpose(1, 0, 2)
            for part, heads in (("q", n_head), ("k", n_kv), ("v", n_kv))
        )
        if is_gemma:
            q, k = norm(q, f"{layer}.attn_q_norm"), norm(k, f"{layer}.attn_k_norm")
        base = 10_000.0 if is_local else w.field("rope.freq_base", 10_000.0)
        frequencies = _frequencies(width, base, scaling, scale, n_trained)
        sharpened = np.float32(1 + 0.1 * np.log(1 / scale) if scaling == "yarn" else 1)
        q, k = (sharpened * _rotated(part, frequencies, side_by_side) for part in (q, k))
        k, v = (np.repeat(part, n_head // n_kv, axis=0) for part in (k, v))
        hidden = (distance < 0) | ((distance >= window) if is_local else False)
        mixed = _attention(q, k, v, hidden).transpose(1, 0, 2).reshape(n, -1)
        y = w.linear(mixed, f"{layer}.attn_output")
        x = x + (norm(y, f"{layer}.post_attention_norm") if is_gemma else y)
        y = norm(x, f"{layer}.ffn_norm")
        gate = w.linear(y, f"{layer}.ffn_gate")
        gate = _gelu_tanh(gate) if is_gemma else gate / (1 + np.exp(-gate))
        y = w.linear(gate * w.linear(y, f"{layer}.ffn_up"), f"{layer}.ffn_down")
        x = x + (norm(y, f"{layer}.post_ffw_norm") if is_gemma else y)
    x = norm(x, "output_norm")
    logits = w.linear(x, "output" if "output.weight" in w else "token_embd")
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits


def embedding(path: Path, tokens: Sequence[int]) -> Floats:
    """The mean of bert's last layer over ``tokens``, of length 1: ``(n_embd,)``."""
    w = opened(path)
    sizes = w.field("block_count"), w.field("attention.head_count"), w.field("attention.layer_norm_epsilon")
    mean = Bert(w, *sizes).hidden(tokens).mean(0)
    unit: Floats = mean / np.linalg.norm(mean)
    return unit


def _attention(q: Floats, k: Floats, v: Floats, hidden: npt.NDArray[np.bool_]) -> Floats:
    scores = q @ k.transpose(0, 2, 1) / np.float32(sqrt(q.shape[-1]))
    scores = np.where(hidden, -np.inf, scores)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    attended: Floats = (scores / scores.sum(-1, keepdims=True)) @ v
    return attended


def _frequencies(
    width: int, base: float, scaling: str, scale: float, n_trained: int
) -> npt.NDArray[np.float64]:
    pairs = np.arange(width // 2)
    frequencies: npt.NDArray[np.float64] = base ** (-2.0 * pairs / width)
    if scaling == "none":
        return frequencies
    if scaling == "linear":
        return frequencies * scale
    # The pairs that turn 32 times and once in the trained context: between them, both frequencies are mixed.
    low, high = (
        width * np.log(n_trained / (turns * 2 * np.pi)) / (2 * np.log(base)) for turns in (32.0, 1.0)
    )
    low, high = max(np.floor(low), 0), min(np.ceil(high), width - 1)
    share = 1 - np.clip((pairs - low) / max(high - low, 0.001), 0, 1)
    mixed: npt.NDArray[np.float64] = frequencies * (share + scale * (1 - share))
    return mixed


def _rotated(x: Floats, frequencies: npt.NDArray[np.float64], side_by_side: bool) -> Floats:
    """Rotary positions of ``(heads, n, width)``."""
    width = x.shape[-1]
    angles = np.arange(x.shape[1])[:, None] * frequencies
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = (
        (slice(0, None, 2), slice(1, None, 2))
        if side_by_side
        else (
            slice(0, width // 2),
            slice(width // 2, None),
        )
    )
    rotated = np.empty_like(x)
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., first] * sin + x[..., second] * cos
    return rotated


def _gelu_tanh(x: Floats) -> Floats:
    activated: Floats = 0.5 * x * (1 + np.tanh(np.float32(sqrt(2 / np.pi)) * (x + 0.044715 * x**3)))
    return activated
