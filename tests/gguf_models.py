"""Small models for tests, made by tools/make_model.py, and the llama.cpp tree with its vocabularies."""

from __future__ import annotations

import sys
from pathlib import Path

from gguf_document import ARRAY, BOOL, STRING, unpack

TOOLS = Path(__file__).resolve().parent.parent / "tools"
sys.path.append(str(TOOLS))

from make_model import PRESETS, Shape, find_source, make_model  # noqa: E402

__all__ = ["PRESETS", "Shape", "find_source", "make_model", "tiny_model"]


def tiny_model(path: Path, vocab: str = "builtin-spm", type_name: str = "f16") -> Path:
    """A model of about 200 kB that computes in milliseconds."""
    return make_model(path, shape=PRESETS["tiny"].shape, type_name=type_name, vocab=vocab)


def not_causal_model(path: Path) -> Path:
    """A tiny model whose tokens also look at those after them, as embedding models' do."""
    document, _ = unpack(tiny_model(path, type_name="f32").read_bytes())
    document.put("llama.attention.causal", BOOL, 0)
    path.write_bytes(document.pack())
    return path


def tiny_variant(path: Path, tokenizer: str) -> Path:
    """A tiny model with one of llama.cpp's other tokenizers: ``bert``, ``t5``, ``rwkv``, ``plamo2`` or ``gemma4``."""
    document, _ = unpack(tiny_model(path).read_bytes())
    tokens = document.entry("tokenizer.ggml.tokens").value
    document.put("tokenizer.ggml.model", STRING, tokenizer.encode())
    if tokenizer == "bert":
        kinds = document.entry("tokenizer.ggml.token_type").value
        kinds[:] = [1 if kind == 6 else kind for kind in kinds]
        document.put("tokenizer.ggml.seperator_token_id", 4, 2)
    elif tokenizer == "t5":
        # Replaces nothing: a root without children in a table of 256 entries, and one empty string.
        document.put(
            "tokenizer.ggml.precompiled_charsmap", ARRAY, [*(1024).to_bytes(4, "little"), *bytes(1025)], 0
        )
    elif tokenizer == "rwkv":
        tokens[3:259] = [b"\\x%02x" % i for i in range(256)]
        tokens[259:] = [b"z%d" % i for i in range(len(tokens) - 259)]
    elif tokenizer == "gemma4":
        merges = [b"t h", b"h e", "\u2581 t".encode(), b"\n \n"]
        document.put("tokenizer.ggml.merges", ARRAY, merges, STRING)
    path.write_bytes(document.pack())
    return path
