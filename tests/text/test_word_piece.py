"""BERT's tokenizer against Hugging Face's: scripts that decompose, marks, punctuation, unknown and long words."""

from __future__ import annotations

import random
import tracemalloc
import unicodedata
from pathlib import Path

import pytest
from support.gguf_models import find_source

import llamapipe as lp
from llamapipe.text.word_piece import WordPiece

tokenizers = pytest.importorskip("tokenizers")

BEGIN = "\u2581"
BLOCKS = {
    "Hangul": range(0xAC00, 0xD7A4),
    "jamo": range(0x1100, 0x1200),
    "Latin": range(0x20, 0x250),
    "Vietnamese": range(0x1E00, 0x1F00),
    "Greek": range(0x370, 0x400),
    "Devanagari": range(0x900, 0x980),
    "Japanese": range(0x3000, 0x3100),
    "Chinese": range(0x4E00, 0x4F00),
    "compatible": range(0xF900, 0xFB00),
    "marks": range(0x300, 0x370),
    "punctuation": range(0x2000, 0x2070),
}
# Assigned since 2002, so every table of Unicode has them.
OLD = {
    name: [chr(c) for c in block if unicodedata.ucd_3_2_0.category(chr(c)) != "Cn"]
    for name, block in BLOCKS.items()
}


def pieces() -> list[str]:
    """The letters of all blocks, at the beginning of a word and after it, and some words."""
    vocabulary = dict.fromkeys(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    for text in map("".join, OLD.values()):
        for c in unicodedata.normalize("NFD", text + text.lower()):
            if not c.isspace():
                vocabulary |= dict.fromkeys((BEGIN + c, c))
    vocabulary |= dict.fromkeys((BEGIN + "the", "ing", BEGIN + "caf", "\u1161\u11ab"))
    return list(vocabulary)


def texts() -> list[str]:
    rng = random.Random(1)
    every = [c for block in OLD.values() for c in block]
    single = [before + c + "b" for c in every for before in ("a", "")]
    mixed = ["".join(rng.choices(every, k=rng.randrange(1, 24))) for _ in range(3000)]
    words = [" ".join("".join(rng.choices(OLD[name], k=4)) for name in OLD) for _ in range(500)]
    long = ["x" * 100, "x" * 101, "the \U0001f600 caf\u00e9ing", "", " \t\n"]
    return [*single, *mixed, *words, *long]


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("strips", [True, False])
def test_as_hugging_face(lowercase: bool, strips: bool) -> None:
    ids = {piece: i for i, piece in enumerate(pieces())}
    named = {
        text[1:] if text.startswith(BEGIN) else text if i < 4 else f"##{text}": i for text, i in ids.items()
    }
    theirs = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(named, unk_token="[UNK]", max_input_chars_per_word=100)
    )
    theirs.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strips)
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    ours = WordPiece(dict(list(ids.items())[4:]), 1, lowercase, strips)
    samples = texts()
    expected = theirs.encode_batch(samples, add_special_tokens=False)
    wrong = [
        text for text, encoding in zip(samples, expected, strict=True) if ours.tokenize(text) != encoding.ids
    ]
    assert not wrong, (len(wrong), list(map(ascii, wrong[:5])))


@pytest.fixture(scope="module")
def bge() -> Path:
    return find_source() / "models" / "ggml-vocab-bert-bge.gguf"


def test_a_real_vocabulary(bge: Path) -> None:
    """A syllable keeps its vowel and its last consonant; elsewhere tokens are llama.cpp's own."""
    with lp.Model(bge, vocab_only=True) as model:
        vocab = model.vocab
        assert vocab.tokenize("\ud55c", add_special=False) == vocab.tokenize(
            "\u1112\u1161\u11ab", add_special=False
        )
        assert len(vocab.tokenize("\ud55c")) == 5
        assert vocab.tokenize("") == vocab.tokenize("  ") == [101, 102]
        assert vocab.tokenize("[SEP]") != [101, 102, 102]
        assert vocab.tokenize("[SEP]", parse_special=True) == [101, 102, 102]
        text = "The caf\u00e9's GR\u00dcN: 3.5 \u4e16\u754c, na\u00efve (re)tokenization!"
        for special in (True, False):
            assert vocab.tokenize(text, add_special=special) == vocab.tokenize(
                text, special, parse_special=True
            )


def test_long_words_are_not_kept() -> None:
    ours = WordPiece({f"{BEGIN}a": 2, "a": 3}, 1, True, True)
    tracemalloc.start()
    try:
        for n in range(100):
            assert ours.tokenize("a" * (10_000 + n)) == [1]
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 100_000
