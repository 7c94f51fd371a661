"""Damages a GGUF file in one of many seeded ways, before the tensor data or by cutting the file."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
import re
import struct
from collections.abc import Callable
from typing import Any

from support.gguf_document import ARRAY, BLOCKS, SCALARS, STRING, Document, Entry, Span, Tensor, unpack
from support.gguf_models import find_source

MOST_BYTES = 64 * 2**20  # of tensors; a changed size may ask for more
HUGE = (0, 1, 2, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, -1.0, 1.0, 1e-30, 1e30, -1e30, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    b"",
    b"\0",
    b" ",
    b"a b c",
    b"\xff\xfe",
    b"<0x0A>",
    b"<0xZZ>",
    b"\xe2\x96\x81",
    b"x" * 70,
    b"y" * 9000,
)
TOKENIZERS = b"llama gpt2 bert t5 rwkv plamo2 gemma4 test none no_vocab hybriddna whitespace".split()
TOKENIZERS += b"", b"unheard-of"
PRES = (
    b"default llama-bpe gpt-2 qwen2 gemma4 whitespace tekken sarvam-moe deepseek-llm command-r smaug-bpe chatglm-bpe "
    b"superbpe kimi-k2 granite-embed-multi-311m falcon"
).split()
IDS = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask", "cls", "fim_pre", "fim_pad")
# Optional keys that llama.cpp reads for this architecture or for all: type and rest of the key.
OPTIONAL = (
    (4, "attention.key_length"), (4, "attention.value_length"), (4, "rope.dimension_count"), (4, "expert_count"),
    (4, "expert_used_count"), (4, "expert_group_count"), (4, "expert_group_used_count"), (4, "nextn_predict_layers"),
    (4, "vocab_size"), (4, "pooling_type"), (4, "attention.sliding_window"), (4, "embedding_length_out"),
    (4, "rope.scaling.original_context_length"), (4, "rope.dimension_count_swa"), (4, "attention.key_length_swa"),
    (4, "expert_shared_feed_forward_length"), (4, "leading_dense_block_count"), (4, "n_deepstack_layers"),
    (4, "attention.value_length_swa"), (4, "decoder_start_token_id"), (4, "adapters.count"),
    (6, "rope.freq_base"), (6, "rope.scaling.factor"), (6, "rope.scale_linear"), (6, "rope.scaling.attn_factor"),
    (6, "attention.max_alibi_bias"), (6, "attention.clamp_kqv"), (6, "attention.scale"), (6, "logit_scale"),
    (6, "rope.scaling.yarn_log_multiplier"), (6, "residual_scale"), (6, "embedding_scale"), (6, "rope.freq_base_swa"),
    (6, "final_logit_softcapping"), (6, "attention.layer_norm_epsilon"), (6, "rope.scaling.alpha"),
    (6, "rope.scaling.yarn_ext_factor"), (6, "rope.scaling.yarn_beta_fast"), (6, "expert_weights_scale"),
    (7, "attention.causal"), (7, "use_parallel_residual"), (7, "rope.scaling.finetuned"), (8, "rope.scaling.type"),
)  # fmt: skip
FLAGS = ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces")
EXTRA_TENSORS = (
    ("output.weight", 2), ("rope_freqs.weight", 0), ("blk.0.attn_q.bias", 1), ("blk.0.attn_output.bias", 1),
    ("blk.0.ffn_down.bias", 1), ("blk.0.attn_qkv.weight", 2), ("blk.0.ffn_gate_inp.weight", 2), ("cls.weight", 2),
    ("blk.0.rope_freqs.weight", 0), ("rope_factors_long.weight", 0), ("blk.0.attn_q.scale", 3), ("other.weight", 1),
)  # fmt: skip


def mutate(file: bytes, seed: int) -> tuple[bytes, str]:
    """A damaged copy of a valid file and what was done to it; the same seed gives the same bytes.

    Seed -1 leaves the file as it is.
    """
    if seed < 0:
        return file, "nothing"
    rng = random.Random(seed)
    if rng.random() < 0.65:
        document, done = unpack(file)[0], []
        # Changes can get in each other's way (a list of pieces may have become one of numbers): then bytes it is.
        with contextlib.suppress(IndexError, StopIteration, TypeError, ValueError, struct.error):
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                action = rng.choices(_ACTIONS, _WEIGHTS)[0]
                done.append(f"{action.__name__}: {action(rng, document)}")
            padded = [tensor.n_bytes + document.alignment for tensor in document.tensors]
            if sum(padded) <= MOST_BYTES:
                return document.pack(), "; ".join(done)
    changed, spans = bytearray(file), unpack(file)[1]
    done = [_raw(rng, changed, spans) for _ in range(rng.choice((1, 1, 1, 2, 4)))]
    return bytes(changed), "; ".join(done)


def _raw(rng: random.Random, file: bytearray, spans: list[Span]) -> str:
    kinds: dict[str, list[Span]] = {}
    for span in spans:
        if span.end <= len(file):
            kinds.setdefault(span.what, []).append(span)
    if not kinds or rng.random() < 0.08:
        cut = rng.randrange(len(file)) if rng.random() < 0.5 else rng.randrange(min(spans[-1].end, len(file)))
        del file[cut:]
        file += b"G" * (not file)
        return f"cut at {cut}"
    span = rng.choice(kinds[rng.choice(sorted(kinds))])
    width = span.end - span.start
    how = rng.choice(("bit", "byte", "value", "insert", "delete"))
    if how == "bit":
        file[rng.randrange(span.start, span.end)] ^= 1 << rng.randrange(8)
    elif how == "byte":
        file[rng.randrange(span.start, span.end)] = rng.randrange(256)
    elif how == "value" and width in (4, 8):
        value = rng.choice((*HUGE, rng.randrange(50)))
        file[span.start : span.end] = (value & (1 << 8 * width) - 1).to_bytes(width, "little")
    elif how == "insert":
        file[span.start : span.start] = rng.randbytes(rng.choice((1, 4, 8)))
    else:
        del file[span.start : span.end]
    return f"{how} in {span.what} at {span.start}"


def _value(rng: random.Random, kind: int) -> Any:
    if kind == STRING:
        return rng.choice(TEXTS)
    if kind in (6, 12):
        value = rng.choice(FLOATS)
        return struct.unpack("<f", struct.pack("<f", value))[0]
    size = struct.calcsize(SCALARS[kind])
    raw = rng.choice((*HUGE, *range(3, 40))) & (1 << 8 * size) - 1
    return struct.unpack("<" + SCALARS[kind], raw.to_bytes(size, "little"))[0]


def change_value(rng: random.Random, doc: Document) -> str:
    entry = rng.choice([e for e in doc.entries if e.kind != ARRAY])
    if entry.kind in (4, 5, 10) and rng.random() < 0.4:
        entry.value = max(
            0, rng.choice((entry.value * 2, entry.value // 2, entry.value + 1, entry.value - 1))
        )
        entry.value &= 0x7FFFFFFF
    else:
        entry.value = _value(rng, entry.kind)
    return f"{entry.key!r} = {entry.value!r:.60}"


def change_type(rng: random.Random, doc: Document) -> str:
    entry = rng.choice(doc.entries)
    if entry.kind == ARRAY:
        entry.item = rng.choice([*SCALARS, STRING])
        entry.value = [_value(rng, entry.item) for _ in entry.value[:2000]]
    elif rng.random() < 0.3:
        entry.item, entry.kind = rng.choice([*SCALARS, STRING]), ARRAY
        entry.value = [_value(rng, entry.item) for _ in range(rng.choice((0, 1, 2, 600)))]
    else:
        entry.kind = rng.choice([*SCALARS, STRING])
        entry.value = _value(rng, entry.kind)
    return f"{entry.key!r} is now {entry.kind}/{entry.item}"


def per_layer(rng: random.Random, doc: Document) -> str:
    name = rng.choice(
        ("attention.head_count", "attention.head_count_kv", "feed_forward_length", "expert_used_count")
    )
    values = [rng.choice((0, 1, 2, 3, 4, 8, 64, 128)) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
    doc.put(f"{doc.architecture}.{name}", ARRAY, values, rng.choice((4, 5)))
    return f"{name} = {values}"


def rename_key(rng: random.Random, doc: Document) -> str:
    entry = rng.choice(doc.entries)
    other = rng.choice(doc.entries).key
    old, entry.key = entry.key, rng.choice((other, entry.key + b"\0", entry.key[:-1], b"", entry.key.upper()))
    return f"{old!r} -> {entry.key!r}"


def remove_entry(rng: random.Random, doc: Document) -> str:
    return repr(doc.entries.pop(rng.randrange(len(doc.entries))).key)


def repeat_entry(rng: random.Random, doc: Document) -> str:
    doc.entries.insert(rng.randrange(len(doc.entries)), copy.deepcopy(rng.choice(doc.entries)))
    return "one twice"


def add_optional(rng: random.Random, doc: Document) -> str:
    kind, name = rng.choice(OPTIONAL)
    value = _value(rng, kind)
    if name == "rope.scaling.type":
        value = rng.choice((b"none", b"linear", b"yarn", b"longrope", b"magic"))
    doc.put(f"{doc.architecture}.{name}", kind, value)
    return f"{name} = {value!r:.40}"


def change_size(rng: random.Random, doc: Document) -> str:
    """One of the architecture's own numbers, there or not, is small: where loaders divide and assert."""
    if rng.random() < 0.6:
        start = doc.architecture.encode() + b"."
        key = rng.choice([e.key.decode() for e in doc.entries if e.key.startswith(start) and e.kind == 4])
    else:
        key = f"{doc.architecture}.{rng.choice(known_keys())}"
    value = rng.choice((0, 0, 0, 1, 1, 2, 3, 5, 7, 16, 63))
    doc.put(key, 4, value)
    return f"{key} = {value}"


@functools.cache
def known_keys() -> list[str]:
    """The ends of all keys that the pinned llama.cpp reads for some architecture."""
    text = (find_source() / "src" / "llama-arch.cpp").read_text(encoding="utf-8")
    return re.findall(r'"%s\.([\w.]+)"', text)


def special_id(rng: random.Random, doc: Document) -> str:
    name = rng.choice(IDS)
    n = len(doc.entry("tokenizer.ggml.tokens").value)
    value = rng.choice((0, 1, n - 1, n, n + 1, 1 << 31, (1 << 32) - 1)) & 0xFFFFFFFF
    doc.put(f"tokenizer.ggml.{name}_token_id", 4, value)
    return f"{name} = {value}"


def flag(rng: random.Random, doc: Document) -> str:
    name, value = rng.choice(FLAGS), rng.randrange(2)
    doc.put(f"tokenizer.ggml.{name}", 7, value)
    if rng.random() < 0.5:
        doc.remove(f"tokenizer.ggml.{rng.choice(('bos', 'eos', 'unknown'))}_token_id")
    return f"{name} = {value}"


def tokenizer(rng: random.Random, doc: Document) -> str:
    if rng.random() < 0.5:
        doc.put("tokenizer.ggml.model", STRING, rng.choice(TOKENIZERS))
    if rng.random() < 0.6:
        doc.put("tokenizer.ggml.pre", STRING, rng.choice(PRES))
    if rng.random() < 0.2:
        size = rng.choice((0, 3, 8, 400))
        doc.put("tokenizer.ggml.precompiled_charsmap", ARRAY, [rng.randrange(256) for _ in range(size)], 0)
    return repr([e.value for e in doc.entries if e.key in (b"tokenizer.ggml.model", b"tokenizer.ggml.pre")])


def change_piece(rng: random.Random, doc: Document) -> str:
    pieces = doc.entry("tokenizer.ggml.tokens").value
    i, j = rng.randrange(len(pieces)), rng.randrange(len(pieces))
    how = rng.choice(("copy", "swap", "text", "cut", "nul", "space"))
    if how == "copy":
        pieces[i] = pieces[j]
    elif how == "swap":
        pieces[i], pieces[j] = pieces[j], pieces[i]
    elif how == "text":
        pieces[i] = rng.choice(TEXTS)
    elif how == "cut":
        pieces[i] = pieces[i][: rng.randrange(len(pieces[i]) + 1)]
    else:
        pieces[i] += b"\0x" if how == "nul" else b" "
    return f"{how} {i} {j}: {pieces[i][:20]!r}"


def change_array(rng: random.Random, doc: Document) -> str:
    entry = rng.choice([e for e in doc.entries if e.kind == ARRAY])
    values = entry.value
    how = rng.choice(("shorten", "empty", "extend", "all", "one", "one", "shuffle"))
    if how == "shorten":
        del values[rng.randrange(len(values)) :]
    elif how == "empty":
        values.clear()
    elif how == "extend":
        values += [_value(rng, entry.item) for _ in range(rng.choice((1, 300)))]
    elif how == "all":
        entry.value = [_value(rng, entry.item)] * len(values)
    elif how == "shuffle":
        rng.shuffle(values)
    else:
        values[rng.randrange(len(values))] = _value(rng, entry.item)
    return f"{how} {entry.key!r}"


def shrink_vocabulary(rng: random.Random, doc: Document) -> str:
    """Fewer pieces everywhere, so that the file stays consistent."""
    n = rng.choice((1, 2, 12, 103, 270))
    for name in ("tokens", "scores", "token_type"):
        del doc.entry(f"tokenizer.ggml.{name}").value[n:]
    for tensor in doc.tensors:
        if tensor.name in (b"token_embd.weight", b"output.weight"):
            tensor.dims[1] = n
    return str(n)


def token_kinds(rng: random.Random, doc: Document) -> str:
    kinds = doc.entry("tokenizer.ggml.token_type").value
    value, share = rng.choice((-1, 0, 1, 2, 3, 4, 5, 6, 7)), rng.choice((0.01, 1))
    kinds[:] = [value if rng.random() < share else kind for kind in kinds]
    return f"{value} for {share}"


def alignment(rng: random.Random, doc: Document) -> str:
    value = rng.choice((1, 2, 8, 16, 64, 4096, 3))
    doc.put("general.alignment", 4, value)
    return str(value)


def split(rng: random.Random, doc: Document) -> str:
    doc.put("split.count", rng.choice((2, 2, 4)), rng.choice((0, 1, 2, 65535)))
    if rng.random() < 0.7:
        doc.put("split.no", 2, rng.choice((0, 1, 7)))
    return "part of several"


def change_tensor(rng: random.Random, doc: Document) -> str:
    i = rng.randrange(len(doc.tensors))
    tensor = doc.tensors[i]
    how = rng.choice(("type", "type", "type", "dims", "swap", "name", "remove", "repeat", "order", "rank"))
    if how == "type":
        tensor.kind = rng.choice(list(BLOCKS))
    elif how == "dims":
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice((0, 1, 2, 31, 32, 64, 65, 96, 1 << 20))
    elif how == "swap":
        tensor.dims.reverse()
    elif how == "name":
        tensor.name = rng.choice(
            (tensor.name + b"x", b"", rng.choice(doc.tensors).name, b"n" * 64, b"output.weight")
        )
    elif how == "remove":
        del doc.tensors[i]
    elif how == "repeat":
        doc.tensors.append(copy.copy(tensor))
    elif how == "order":
        rng.shuffle(doc.tensors)
    else:
        tensor.dims = rng.choice(([], tensor.dims + [1] * 3, [*tensor.dims, 1, 1], [1, *tensor.dims]))
    return f"{how} {tensor.name!r:.30} {tensor.dims} {tensor.kind}"


def add_tensor(rng: random.Random, doc: Document) -> str:
    name, rank = rng.choice(EXTRA_TENSORS)
    dims = {0: [8], 1: [64], 2: [64, len(doc.entry("tokenizer.ggml.tokens").value)], 3: [1]}[rank]
    doc.tensors.append(Tensor(name.encode(), dims, rng.choice((0, 0, 1, 8, 24, 26, 30))))
    return name


def experts(rng: random.Random, doc: Document) -> str:
    """Turn the feed-forward part into experts, mostly rightly."""
    n = rng.choice((1, 2, 4))
    doc.put(f"{doc.architecture}.expert_count", 4, n)
    doc.put(f"{doc.architecture}.expert_used_count", 4, rng.choice((0, 1, n, n + 1)))
    for tensor in [
        t for t in doc.tensors if b"ffn_" in t.name and b"norm" not in t.name and len(t.dims) == 2
    ]:
        tensor.name = tensor.name.replace(b".weight", b"_exps.weight")
        tensor.dims.append(n)
    width = doc.entry(f"{doc.architecture}.embedding_length").value
    doc.tensors += [Tensor(b"blk.%d.ffn_gate_inp.weight" % i, [width, n], 0) for i in range(2)]
    return f"{n}"


def add_entry(rng: random.Random, doc: Document) -> str:
    kind = rng.choice((*SCALARS, STRING))
    doc.entries.append(
        Entry(rng.choice((b"custom.key", b"general.type", b"general.file_type")), kind, _value(rng, kind))
    )
    return "an unknown key"


_CHOICES: dict[Callable[[random.Random, Document], str], int] = {
    change_value: 5, change_type: 2, per_layer: 2, rename_key: 1, remove_entry: 2, repeat_entry: 1, add_optional: 5,
    special_id: 2, flag: 2, tokenizer: 5, change_piece: 4, change_array: 3, shrink_vocabulary: 1, token_kinds: 1,
    alignment: 1, split: 1, change_size: 5, change_tensor: 4, add_tensor: 2, experts: 1, add_entry: 1,
}  # fmt: skip
_ACTIONS, _WEIGHTS = list(_CHOICES), list(_CHOICES.values())
