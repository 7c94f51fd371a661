"""Writes a GGUF file's vocabulary as ``tokenizer.json``, the format of the ``tokenizers`` package.

Programs that tokenize themselves, such as the frontend of NVIDIA Dynamo, read that format. The tokens of a text are the
same as in llama.cpp with special tokens parsed; a vocabulary that the format cannot express exactly is refused. This
module does not call llama.cpp. The caller passes facts that llama.cpp determines when it loads a model, such as which
tokens are special.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, NamedTuple

from llamapipe.chat.control_text import SpecialToken
from llamapipe.gguf._shapes import text
from llamapipe.gguf.reader import Array, Head, parse_head


class PreTokenizer(NamedTuple):
    """``patterns``: applied in this order. ``whole_words``: a word that equals a piece becomes one token."""

    patterns: tuple[str, ...]
    whole_words: bool = False


_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _words(letters: str, digits: str) -> str:
    """Return the regular expression of GPT-4 and its descendants.

    ``letters``: a character class without brackets; ``digits``: the expression for a number.
    """
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|{_ENDS}"


_LLAMA3: Final = _words(r"\p{L}", r"\p{N}{1,3}")
_QWEN2: Final = _words(r"\p{L}", r"\p{N}")
_QWEN35: Final = _words(r"\p{L}\p{M}", r"\p{N}")
PRE_TOKENIZERS: Final = {
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "modern-bert", "mpt", "olmo", "jais"),
            *("trillion", "granite-docling", "exaone4"),
        ),
        PreTokenizer((_GPT2,)),
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        PreTokenizer((_LLAMA3,), whole_words=True),
    ),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer((_LLAMA3,), whole_words=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "hunyuan", "solar-open", "megrez"),
        PreTokenizer((_QWEN2,)),
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
}
_SPACE: Final = "\u2581"  # how SentencePiece writes a space
_BYTE_PIECES: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))


class CannotExportError(ValueError):
    """``tokenizer.json`` cannot express the vocabulary exactly; the message gives the reason."""


def tokenizer_json(
    path: Path, added: Sequence[SpecialToken], first: int | None, last: int | None
) -> dict[str, Any]:
    """Return the content of ``tokenizer.json`` for the vocabulary of a checked GGUF file.

    ``added``: the special tokens that llama.cpp found. ``first``, ``last``: the ids of tokens that are added before and
    after a text, if any. Raises CannotExportError, and OSError if the file cannot be read.
    """
    with path.open("rb") as file:
        head = parse_head(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    pieces = _pieces(head)
    _check_overlaps(added)
    kind = text(head.entries, "tokenizer.ggml.model") or ""
    if kind == "llama":
        parts = _sentencepiece(head, pieces, added)
    elif kind == "gpt2":
        parts = _byte_level(head, pieces)
    else:
        raise CannotExportError(
            f"its tokenizer is {kind!r}; only 'llama' (SentencePiece with merges) and 'gpt2' (byte-level BPE) "
            "can be written as tokenizer.json"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token.id,
                "content": token.text,
                "single_word": False,
                "lstrip": token.strips_left,
                "rstrip": token.strips_right,
                "normalized": False,
                "special": token.is_control,
            }
            for token in sorted(added, key=lambda token: token.id)
            if token.text
        ],
        **parts,
        "post_processor": _template(pieces, first, last),
    }


def _pieces(head: Head) -> list[str]:
    array = _strings(head, "tokens")
    pieces = []
    for i, piece in enumerate(array):
        try:
            # llama.cpp gives empty pieces these names.
            pieces.append(piece.decode() if piece else f"[EMPTY_{i}]")
        except UnicodeDecodeError:
            raise CannotExportError(f"piece {i} of its vocabulary, {piece!r}, is not UTF-8") from None
    return pieces


def _strings(head: Head, name: str) -> list[bytes]:
    entry = head.entries.get(f"tokenizer.ggml.{name}")
    if entry is None or not isinstance(entry.value, Array):
        raise CannotExportError(f"tokenizer.ggml.{name} is missing")
    return head.strings(entry.value)


def _check_overlaps(added: Sequence[SpecialToken]) -> None:
    """Refuse special tokens if one can begin inside another.

    llama.cpp matches the longest token first, anywhere in the text; ``tokenizers`` matches from left to right.
    """
    starts: dict[str, list[str]] = {}
    for token in added:
        for n in range(1, len(token.text)):
            starts.setdefault(token.text[:n], []).append(token.text)
    for name in (token.text for token in added):
        for n in range(1, len(name)):
            for other in starts.get(name[n:], ()):
                both = name[:n] + other
                if len(other.encode()) >= len(name.encode()) and other != name and not both.startswith(other):
                    raise CannotExportError(
                        f"its special tokens {name!r} and {other!r} overlap in the text {both!r}, in which "
                        "llama.cpp and tokenizers match different tokens"
                    )


# ---- SentencePiece with merges: pieces have scores, and the pair with the best score is merged first
def _sentencepiece(head: Head, pieces: list[str], added: Sequence[SpecialToken]) -> dict[str, Any]:
    known = set(pieces)
    if missing := [piece for piece in _BYTE_PIECES if piece not in known]:
        raise CannotExportError(
            f"its vocabulary lacks byte pieces, such as {missing[0]!r}, so it cannot encode every text"
        )
    entry = head.entries.get("tokenizer.ggml.add_space_prefix")
    prefix = True if entry is None else bool(entry.value)
    escape = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    steps = [{"type": "Prepend", "prepend": _SPACE}, escape] if prefix else [escape]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(pieces, _merges_by_score(head, pieces, added), byte_fallback=True),
    }


def _merges_by_score(head: Head, pieces: list[str], added: Sequence[SpecialToken]) -> list[tuple[str, str]]:
    """Return every pair of pieces that merges into a third.

    Merges into the pieces with the best scores come first. Merges with equal scores are refused: llama.cpp applies them
    from left to right, ``tokenizers`` in the order of this list. Among the pairs that form the same piece, pairs with
    the longer left half come first: if two such pairs overlap in a text, this is the order from left to right.

    Pieces with characters that are not pieces are also refused, unless they are special tokens: llama.cpp merges such
    characters, ``tokenizers`` splits them into bytes.
    """
    entry = head.entries.get("tokenizer.ggml.scores")
    if entry is None or not isinstance(entry.value, Array):
        raise CannotExportError("tokenizer.ggml.scores is missing")
    scores = entry.value.data.tolist()
    known = set(pieces)
    special = {token.text for token in added}  # matched before merging
    by_score: dict[float, str] = {}
    merges = []
    for i in sorted(range(len(pieces)), key=lambda i: (-scores[i], i)):
        piece = pieces[i]
        pairs = []
        for n in range(len(piece) - 1, 0, -1):
            left, right = piece[:n], piece[n:]
            if left in known and right in known:
                pairs.append((left, right))
            elif (
                piece not in special and (left in known or n == 1) and (right in known or n == len(piece) - 1)
            ):
                missing = left if left not in known else right
                raise CannotExportError(
                    f"its piece {piece!a} has the character {missing!a}, which is not a piece: llama.cpp "
                    "merges it, tokenizers splits it into bytes"
                )
        if not pairs:
            continue
        if (other := by_score.setdefault(scores[i], piece)) != piece:
            raise CannotExportError(
                f"its pieces {other!r} and {piece!r} have the same score, {scores[i]}; tokenizer.json needs an order"
            )
        merges += pairs
    return merges


# ---- byte-level BPE: the file lists the merges in their order
def _byte_level(head: Head, pieces: list[str]) -> dict[str, Any]:
    flavour = text(head.entries, "tokenizer.ggml.pre")
    pre_tokenizer = PRE_TOKENIZERS.get(flavour or "")
    if pre_tokenizer is None:
        named = (
            "it does not name its pre-tokenizer" if flavour is None else f"its pre-tokenizer is {flavour!r}"
        )
        raise CannotExportError(f"{named}; supported ones are {', '.join(sorted(PRE_TOKENIZERS))}")
    known = set(pieces)
    merges = []
    for i, line in enumerate(_strings(head, "merges")):
        left, _, right = line.decode("utf-8", "backslashreplace").partition(" ")
        for piece in (left, right, left + right):
            if piece not in known:
                raise CannotExportError(
                    f"merge {i} of its vocabulary, {left!r} and {right!r}, needs the piece {piece!r}, which is missing"
                )
        merges.append((left, right))
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre_tokenizer.patterns
    ]
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, _BYTE_LEVEL]},
        "decoder": _BYTE_LEVEL,
        "model": _bpe(pieces, merges, ignore_merges=pre_tokenizer.whole_words),
    }


_BYTE_LEVEL: Final = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}


def _bpe(pieces: list[str], merges: Iterable[tuple[str, str]], **options: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **options,
        "vocab": {piece: i for i, piece in enumerate(pieces)},
        "merges": [list(pair) for pair in merges],
    }


def _template(pieces: list[str], first: int | None, last: int | None) -> dict[str, Any] | None:
    """Return the post-processor that adds the tokens before and after a text if a reader asks for them."""
    if first is None and last is None:
        return None

    def special(token: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": pieces[token], "type_id": 0}}

    def sequence(name: str) -> list[dict[str, Any]]:
        before = [] if first is None else [special(first)]
        return [*before, {"Sequence": {"id": name, "type_id": 0}}, *([] if last is None else [special(last)])]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A"),
        "pair": sequence("A") + sequence("B"),
        "special_tokens": {
            pieces[token]: {"id": pieces[token], "ids": [token], "tokens": [pieces[token]]}
            for token in (first, last)
            if token is not None
        },
    }


def write_tokenizer(
    source: Path,
    folder: Path,
    added: Sequence[SpecialToken],
    *,
    first: int | None,
    last: int | None,
    bos: int | None,
    eos: int | None,
    ends: Sequence[int],
    n_ctx_train: int,
    chat_template: str | None,
) -> Path:
    """Write the three files for the checked GGUF file ``source`` and return the folder.

    ``bos``, ``eos``: the special tokens that templates refer to; ``ends``: all tokens that end generation. For
    other arguments see ``tokenizer_json``. Output is deterministic. Raises CannotExportError, OSError.
    """
    tokenizer = tokenizer_json(source, added, first, last)
    names = {token: piece for piece, token in tokenizer["model"]["vocab"].items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": first is not None,
        "add_eos_token": last is not None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": n_ctx_train,
    }
    for name, token in (("bos_token", bos), ("eos_token", eos)):
        if token is not None:
            config[name] = names[token]
    if chat_template is not None:
        config["chat_template"] = chat_template
    model = {
        "architectures": ["GGUF"],  # readers require one; no program loads weights with it
        "model_type": "gguf",
        "vocab_size": len(names),
        "max_position_embeddings": n_ctx_train,
        "bos_token_id": bos,
        "eos_token_id": list(ends) if len(ends) > 1 else eos,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("config.json", model),
    ):
        with NamedTemporaryFile(
            "w", encoding="utf-8", dir=folder, prefix=f".{name}.", delete=False
        ) as partial:
            try:
                json.dump(content, partial, ensure_ascii=False)
                partial.close()
                Path(partial.name).chmod(0o644)
                Path(partial.name).replace(folder / name)
            except BaseException:
                Path(partial.name).unlink()
                raise
    return folder
