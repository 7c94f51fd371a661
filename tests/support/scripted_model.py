"""Models whose next token depends on the last one only, as in a table of bigrams."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from support.gguf_models import finish

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # token types of llama.h
BOS, EOS = "<s>", "</s>"
_BYTES = [("<unk>", UNKNOWN), (BOS, CONTROL), (EOS, CONTROL), *((f"<0x{i:02X}>", BYTE) for i in range(256))]


def pieces_of(text: str, specials: Sequence[str] = (), taken: Sequence[str] = ()) -> list[str]:
    """A text cut into pieces that are all different; control tokens are pieces of their own, and must differ too.

    None of the pieces is one of ``taken``.
    """
    pattern = (
        "|".join(f"({re.escape(special)})" for special in sorted(specials, key=len, reverse=True)) or r"(?!)"
    )
    pieces: list[str] = []
    for part in filter(None, re.split(pattern, text)):
        if part in specials:
            pieces.append(part)
            continue
        start = len(pieces)
        piece = ""
        for character in part:
            piece += character
            # Pieces of three characters or more: no prompt is tokenized with them, because shorter ones are missing.
            if len(piece) >= 3 and piece not in pieces and piece not in taken:
                pieces.append(piece)
                piece = ""
        if piece:
            pieces.append(piece)
        while len(pieces) > start + 1 and (len(pieces[-1]) < 3 or pieces[-1] in (*pieces[:-1], *taken)):
            last = pieces.pop()
            pieces[-1] += last
    assert len({*pieces, *taken}) == len(pieces) + len(taken), pieces
    return pieces


def scripted_model(path: Path, text: str, specials: Sequence[str] = (), chat_template: str = "") -> Path:
    """Writes a model that answers any prompt with ``text``, greedily."""
    specials = [special for special in specials if special not in (BOS, EOS)]
    script = pieces_of(text, specials)
    pieces = [*_BYTES, *((special, CONTROL) for special in specials)]
    pieces += [(piece.replace(" ", "\u2581"), NORMAL) for piece in script if piece not in specials]
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    names = [piece if piece in specials else piece.replace(" ", "\u2581") for piece in script]
    said = [ids[name] for name in [*names, EOS]]
    scores = np.zeros((len(pieces), len(pieces)), np.float32)
    after = np.full(len(pieces), said[0])
    after[said[:-1]] = said[1:]
    scores[np.arange(len(pieces)), after] = 10
    return _write(path, pieces, scores, chat_template)


def turns_model(path: Path, texts: Sequence[str], chat_template: str) -> Path:
    """Writes a model that answers with ``texts[i]``, greedily, where the control token ``<|turn_i|>`` ends its prompt.

    The chat template writes that token, and so decides which turn of a conversation it is. Prompts are tokenized into
    bytes; attention is narrow, so that tens of thousands of them take seconds.
    """
    starts = [f"<|turn_{i}|>" for i in range(len(texts))]
    scripts: list[list[str]] = []
    for text in texts:
        scripts.append(pieces_of(text, taken=[piece for script in scripts for piece in script]))
    pieces = [*_BYTES, *((special, CONTROL) for special in starts)]
    pieces += [(piece.replace(" ", "\u2581"), NORMAL) for script in scripts for piece in script]
    ids = {piece: i for i, (piece, _) in enumerate(pieces)}
    scores = np.zeros((len(pieces), len(pieces)), np.float32)
    scores[:, ids[EOS]] = 1
    for start, script in zip(starts, scripts, strict=True):
        said = [ids[start], *(ids[piece.replace(" ", "\u2581")] for piece in script), ids[EOS]]
        scores[said[:-1], said[1:]] = 10
    return _write(path, pieces, scores, chat_template, n_ctx=131_072, head_size=32)


def terse_model(path: Path, chat_template: str = "") -> Path:
    """Writes a model that says "OK", and where JSON is forced, short values: 3, "你こ", [] and no optional property."""
    ids = {chr(i): i + 3 for i in range(256)}
    said = "你こ".encode().decode("latin-1")  # its bytes as characters, all different
    scores = np.zeros((259, 259), np.float32)
    ends = '}],:"'
    preferences = {
        **dict.fromkeys(map(chr, range(256)), "O"),
        "O": "K",
        "K": "",
        '"': said[0] + ":},]",
        **dict(pairwise(said)),
        said[-1]: '"',
        "3": ends,
        ":": '3"[{t',
        ",": '"3{',
        "{": '"}',
        "[": ']"3{',
        "]": ends,
        "}": ends,
        "e": ends,
    }
    for before, order in preferences.items():
        for rank, after in enumerate(order):
            scores[ids[before], ids[after]] = 10 - rank
        scores[ids[before], 2] = 1 if order else 10  # the end of the text
    scores[:3, ids["O"]] = 10
    return _write(path, list(_BYTES), scores, chat_template)


def _write(
    path: Path,
    pieces: Sequence[tuple[str, int]],
    scores: npt.NDArray[np.float32],
    chat_template: str,
    n_ctx: int = 8192,
    head_size: int | None = None,
) -> Path:
    """Writes a model of one layer that does nothing: the logits after a token are ``scores[token]``, scaled.

    The embedding of a token is a unit vector, which the output matrix maps to the scores. ``head_size``: one head of
    that many rows, instead of heads of 32 for the whole width.
    """
    n_vocab = len(pieces)
    width = -(-n_vocab // 32) * 32
    output = np.zeros((n_vocab, width), np.float32)
    output[:, :n_vocab] = scores.T

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(32)
    writer.add_head_count(width // 32 if head_size is None else 1)
    writer.add_head_count_kv(width // 32 if head_size is None else 1)
    if head_size is not None:
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
    writer.add_rope_dimension_count(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(n_vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([-float(i) for i in range(n_vocab)])
    writer.add_token_types([kind for _, kind in pieces])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    if chat_template:
        writer.add_chat_template(chat_template)
    writer.add_tensor("token_embd.weight", np.eye(n_vocab, width, dtype=np.float32))
    writer.add_tensor("output.weight", output)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    rows = width if head_size is None else head_size
    for name, shape in (
        ("q", (rows, width)),
        ("k", (rows, width)),
        ("v", (rows, width)),
        ("output", (width, rows)),
    ):
        writer.add_tensor(f"blk.0.attn_{name}.weight", np.zeros(shape, np.float32))
    for name, shape in (("gate", (32, width)), ("up", (32, width)), ("down", (width, 32))):
        writer.add_tensor(f"blk.0.ffn_{name}.weight", np.zeros(shape, np.float32))
    finish(writer)
    return path
