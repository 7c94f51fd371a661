"""Tiny models that write the next token of their vocabulary, and EAGLE-3 drafts for them that are right or wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from support.gguf_models import ARCHITECTURES, TOOLS, make_model

sys.path.append(str(TOOLS))

from draft_files import n_tokens, rows_of
from make_eagle3 import Eagle3Shape, random_tensors, right_tensors, shape_for, write_eagle3
from model_shapes import Architecture

_SIZES = {
    "embedding_length": 128,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 32,
}
_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 64}
TARGETS = {
    "llama": Architecture("llama", 4, 4, 4096, _SIZES, {}),
    "qwen2": Architecture("qwen2", 4, 4, 4096, _SIZES, {}),
    "qwen3": Architecture("qwen3", 4, 4, 4096, _SIZES, {}),
    "qwen3moe": Architecture("qwen3moe", 4, 4, 4096, _SIZES | _EXPERTS, {}),
    "qwen35": ARCHITECTURES["qwen3.5-0.8b"].shrunk(),
    "qwen35moe": ARCHITECTURES["qwen3.6-35b-a3b"].shrunk(),
    "gemma4": ARCHITECTURES["gemma4-e2b"].shrunk(),
    "gpt-oss": ARCHITECTURES["gpt-oss-20b"].shrunk(),
    "lfm2": ARCHITECTURES["lfm2-1.2b"].shrunk(),
}


def eagle3_target(path: Path, architecture: str = "llama", tied: bool = False) -> Path:
    """A model that writes the next token of the vocabulary after each, with little effect of its layers.

    ``tied``: its output matrix is the embedding, so that it writes the same token again.
    """
    shape = replace(TARGETS[architecture], tied=tied, mtp_noise=0.0)
    return make_model(path, shape=shape, type_name="f32", vocab="builtin-bpe")


def eagle3_shape(target: Path) -> Eagle3Shape:
    """The sizes of a draft for such a model: as many heads of keys as of queries."""
    shape = shape_for(target, ffn=64)
    return replace(shape, heads_kv=shape.heads)


def eagle3_draft(
    path: Path,
    target: Path,
    noise: float | None = 0.0,
    tokens: Sequence[int] | None = None,
    lent: Sequence[str] = (),
) -> Path:
    """A draft for the model. ``noise``: 0: it is right; None: it is random. ``tokens``: those that it can guess.

    ``lent``: tensors that the model lends; without ``token_embd.weight`` there, the draft has a copy.
    """
    shape = eagle3_shape(target)
    n_vocab = n_tokens(target)
    if noise is None:
        tensors = random_tensors(shape, n_vocab if tokens is None else len(tokens))
    else:
        tensors = right_tensors(shape, target, tokens, noise)
    if "token_embd.weight" not in lent:
        tensors["token_embd.weight"] = rows_of(target, "token_embd.weight")
    for name in lent:
        tensors.pop(name, None)
    return write_eagle3(path, target, shape, tensors, tokens, type_name="f32")
