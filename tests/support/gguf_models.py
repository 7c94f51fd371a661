"""Small models for tests, made by tools/make_model.py, and the llama.cpp tree with its vocabularies."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

from llamapipe import demo_model_path
from support.gguf_document import ARRAY, BOOL, STRING, unpack

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.append(str(TOOLS))

from make_model import PRESETS, Shape, find_source, finish, make_model  # noqa: E402
from model_shapes import ARCHITECTURES  # noqa: E402

__all__ = [
    "ARCHITECTURES",
    "PRESETS",
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
    document, _ = unpack(tiny_model(path, type_name="f32").read_bytes())
    document.put("llama.attention.causal", BOOL, 0)
    path.write_bytes(document.pack())
    return path


def infilling_model(path: Path, with_files: bool = False) -> Path:
    """The bundled model with three of its tokens as those for filling in the middle; five of them ``with_files``."""
    document, _ = unpack(demo_model_path().read_bytes())
    names = ("mid", "suf", "pre", "rep", "sep")
    for i, name in enumerate(names if with_files else names[:3]):
        document.put(f"tokenizer.ggml.fim_{name}_token_id", 4, 2399 - i)
    path.write_bytes(document.pack())
    return path


def with_templates(path: Path, template: str, **named: str) -> Path:
    """The bundled model with other chat templates: one without a name, and named ones."""
    document, _ = unpack(demo_model_path().read_bytes())
    document.put("tokenizer.chat_template", STRING, template.encode())
    for name, text in named.items():
        document.put(f"tokenizer.chat_template.{name}", STRING, text.encode())
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


def recurrent_model(path: Path, n_embd: int = 32, n_state: int = 4, n_rank: int = 2, n_conv: int = 4) -> Path:
    """A mamba model of random weights: it keeps a state for each sequence instead of cells for each token."""
    writer = gguf.GGUFWriter(path, "mamba")
    n_vocab, n_inner = 128, 2 * n_embd
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_rank)
    add_words(writer, n_vocab)
    rng = np.random.default_rng(1)

    def put(name: str, *shape: int, scale: float = 1.0) -> None:
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(scale / np.sqrt(shape[-1]))
        writer.add_tensor(name, values)

    put("token_embd.weight", n_vocab, n_embd)
    writer.add_tensor("output_norm.weight", np.ones(n_embd, np.float32))
    for i in range(2):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(n_embd, np.float32))
        put(f"blk.{i}.ssm_in.weight", 2 * n_inner, n_embd)
        put(f"blk.{i}.ssm_conv1d.weight", n_inner, n_conv)
        put(f"blk.{i}.ssm_conv1d.bias", n_inner)
        put(f"blk.{i}.ssm_x.weight", n_rank + 2 * n_state, n_inner)
        put(f"blk.{i}.ssm_dt.weight", n_inner, n_rank)
        put(f"blk.{i}.ssm_dt.bias", n_inner)
        decay = -np.exp(rng.standard_normal((n_inner, n_state), dtype=np.float32))
        writer.add_tensor(f"blk.{i}.ssm_a", decay)
        put(f"blk.{i}.ssm_d", n_inner)
        put(f"blk.{i}.ssm_out.weight", n_embd, n_inner, scale=3.0)
    finish(writer)
    return path


def encoder_decoder_model(path: Path, architecture: str = "t5") -> Path:
    """The head of a T5 with two layers: what is known of such a file without its weights. It cannot be loaded."""
    writer = gguf.GGUFWriter(path, architecture)
    n_vocab, n_embd = 3 + 256, 16
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(2 * n_embd)
    writer.add_head_count(2)
    writer.add_key_length(8)
    writer.add_value_length(8)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_relative_attn_buckets_count(8)
    writer.add_decoder_start_token_id(0)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))])
    writer.add_token_scores([-float(i) for i in range(n_vocab)])
    writer.add_token_types([2, 3, 3] + [6] * 256)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    writer.add_tensor("token_embd.weight", np.ones((n_vocab, n_embd), np.float32))
    finish(writer)
    return path


BROKEN = 99  # the token after which the damaged model has no finite logit


def damaged_model(path: Path) -> Path:
    """A tiny model one of whose tokens is embedded as not-a-number."""
    make_model(path, shape=PRESETS["tiny"].shape, type_name="f32")
    reader = gguf.GGUFReader(path, "r+")
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
    embedding.data[BROKEN] = np.nan
    return path
