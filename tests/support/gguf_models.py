"""Small models for tests, made by tools/make_model.py, and the llama.cpp tree with its vocabularies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llamapipe import demo_model_path
from llamapipe.native.load import native
from support.gguf_document import ARRAY, BOOL, STRING, Document

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.append(str(TOOLS))

from make_model import PRESETS, Shape, find_source, finish, make_model  # noqa: E402
from model_shapes import ARCHITECTURES, Architecture  # noqa: E402

__all__ = [
    "ARCHITECTURES",
    "PRESETS",
    "Architecture",
    "Shape",
    "find_source",
    "finish",
    "make_model",
    "tiny_architecture",
    "tiny_model",
]


def tiny_model(path: Path, vocab: str = "builtin-spm", type_name: str = "f16") -> Path:
    """A model of about 200 kB that computes in milliseconds."""
    return make_model(path, shape=PRESETS["tiny"].shape, type_name=type_name, vocab=vocab)


def tiny_architecture(path: Path, name: str, vocab: str = "builtin-spm", type_name: str = "f16") -> Path:
    """A model with the layers of one of ``ARCHITECTURES`` and tiny widths, of a few MB."""
    return make_model(path, shape=ARCHITECTURES[name].shrunk(), type_name=type_name, vocab=vocab)


def model_for_kernels(path: Path) -> Path:
    """A model of which this processor has kernels for all matrices; skips the test if it has none.

    The weights are 12 MiB in Q4_K and Q6_K, of which the table of embeddings is small.
    """
    types = (gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K)
    if not all(native().lib.lp_kernels_have(kind, 1024, 1024) for kind in types):
        pytest.skip("this processor has no kernels")
    shape = Shape(layers=2, width=1024, heads=8, heads_kv=4, ffn=2816, context=512)
    return make_model(path, shape=shape, type_name="q4_k_m", vocab="builtin-spm")


def add_words(writer: gguf.GGUFWriter, n: int) -> None:
    """A vocabulary of ``n`` tokens, words after the three special ones."""
    writer.add_vocab_size(n)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(n - 3))])
    writer.add_token_scores([-float(i) for i in range(n)])
    writer.add_token_types([2, 3, 3] + [1] * (n - 3))


def split_model(path: Path, folder: Path, n_each: int) -> list[Path]:
    """A model's parts, as llama.cpp's tools write them: the first has no tensors, the others have ``n_each``."""
    folder.mkdir()
    reader = gguf.GGUFReader(path)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(
        folder / path.name, architecture, split_max_tensors=n_each, small_first_shard=True
    )
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return sorted(folder.iterdir())


def not_causal_model(path: Path) -> Path:
    """A tiny model whose tokens also look at those after them, as embedding models' do."""
    document = Document.read(tiny_model(path, type_name="f32"))
    document.put("llama.attention.causal", BOOL, 0)
    return document.write(path)


def infilling_model(path: Path, with_files: bool = False) -> Path:
    """The bundled model with three of its tokens as those for filling in the middle; five of them ``with_files``."""
    document = Document.read(demo_model_path())
    names = ("mid", "suf", "pre", "rep", "sep")
    for i, name in enumerate(names if with_files else names[:3]):
        document.put(f"tokenizer.ggml.fim_{name}_token_id", 4, 2399 - i)
    return document.write(path)


def with_templates(path: Path, template: str, **named: str) -> Path:
    """The bundled model with other chat templates: one without a name, and named ones."""
    document = Document.read(demo_model_path())
    document.put("tokenizer.chat_template", STRING, template.encode())
    for name, text in named.items():
        document.put(f"tokenizer.chat_template.{name}", STRING, text.encode())
    return document.write(path)


def tiny_variant(path: Path, tokenizer: str) -> Path:
    """A tiny model with one of llama.cpp's other tokenizers: ``bert``, ``t5``, ``rwkv``, ``plamo2`` or ``gemma4``."""
    document = Document.read(tiny_model(path))
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
    return document.write(path)


def sliding_window_model(path: Path) -> Path:
    """A Gemma 3 whose first five layers see 16 tokens, and whose sixth sees all."""
    heads = {"attention.head_count_kv": 1, "attention.key_length": 16, "attention.value_length": 16}
    return _small(path, "gemma3", 6, 2, {**heads, "attention.sliding_window": 16})


def hybrid_model(path: Path) -> Path:
    """An LFM2: two layers with a short convolution, whose state is recurrent, and one with attention."""
    return _small(path, "lfm2", 3, 2, {"attention.head_count_kv": [0, 1, 0], "shortconv.l_cache": 3})


def recurrent_model(path: Path) -> Path:
    """A mamba, which keeps a state for each sequence instead of cells for each token."""
    sizes = {"conv_kernel": 4, "inner_size": 64, "state_size": 4, "time_step_rank": 2}
    return _small(path, "mamba", 2, 0, {f"ssm.{name}": n for name, n in sizes.items()})


def _small(path: Path, architecture: str, n_layers: int, n_heads: int, sizes: dict[str, Any]) -> Path:
    """A model of random weights for tests of memories: 32 wide, with 128 words.

    The seed is one with which texts repeat themselves, so that there is something to guess.
    """
    words = gguf.GGUFWriter(path, "llama")
    add_words(words, 128)
    finish(words)
    sizes = {"embedding_length": 32, "feed_forward_length": 64, "attention.head_count": n_heads, **sizes}
    shape = Architecture(architecture, n_layers, n_layers, 256, sizes, {})
    return make_model(path, shape=shape, type_name="f32", vocab=str(path), seed=8)


def encoder_decoder_model(path: Path, architecture: str = "t5") -> Path:
    """What is known of a T5 without its weights: a tiny model's file under another name. It cannot be loaded."""
    document = Document.read(tiny_model(path))
    document.rename(architecture)
    for key, value in (("attention.relative_buckets_count", 8), ("decoder_start_token_id", 0)):
        document.put(f"{architecture}.{key}", 4, value)
    template = b"{% for m in messages %}{{ m.content }}{% endfor %}"
    document.put("tokenizer.chat_template", STRING, template)
    return document.write(path)


BROKEN = 99  # the token after which the damaged model has no finite logit


def damaged_model(path: Path) -> Path:
    """A tiny model one of whose tokens is embedded as not-a-number."""
    make_model(path, shape=PRESETS["tiny"].shape, type_name="f32")
    reader = gguf.GGUFReader(path, "r+")
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
    embedding.data[BROKEN] = np.nan
    return path
