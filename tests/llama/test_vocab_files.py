"""The vocabularies that llama.cpp ships for its own tests: the same ids from the same texts, and back."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from time import process_time

import pytest
from support.gguf_models import find_source

from llamapipe.llama import Model
from llamapipe.llama.vocab import Vocab

SEPARATOR = "\n__ggml_vocab_test__\n"
# Those with texts and ids, and what is left of a text when its pieces are joined: all of it, all of it after one
# space (SentencePiece), or less (BERT drops case, accents and white space).
VOCABULARIES = {
    "bert-bge": "lossy",
    "command-r": "same",
    "deepseek-coder": "same",
    "deepseek-llm": "same",
    "falcon": "same",
    "gemma-4": "same",
    "gpt-2": "same",
    "llama-bpe": "same",
    "llama-spm": "space",
    "mpt": "same",
    "phi-3": "space",
    "qwen2": "same",
    "qwen35": "same",
    "refact": "same",
    "starcoder": "same",
}


@pytest.fixture(scope="session")
def folder() -> Path:
    return find_source() / "models"


@pytest.fixture(params=sorted(VOCABULARIES), scope="module")
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(folder: Path, name: str) -> Iterator[Model]:
    with Model(folder / f"ggml-vocab-{name}.gguf", vocab_only=True) as model:
        yield model


@pytest.fixture(scope="module")
def cases(folder: Path, name: str) -> list[tuple[str, list[int]]]:
    # No newline translation: some texts hold a carriage return.
    with (folder / f"ggml-vocab-{name}.gguf.inp").open(encoding="utf-8", newline="") as file:
        texts = file.read().split(SEPARATOR)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    if not texts[-1]:
        texts.pop()  # what follows the last separator
    assert len(texts) == len(lines) >= 40
    return [(text, [int(number) for number in line.split()]) for text, line in zip(texts, lines, strict=True)]


def test_every_vocabulary_file_has_a_test(folder: Path) -> None:
    names = {path.name for path in folder.glob("ggml-vocab-*.gguf.inp")}
    assert names == {f"ggml-vocab-{name}.gguf.inp" for name in VOCABULARIES}


def test_texts_have_the_ids_of_the_files(model: Model, cases: list[tuple[str, list[int]]]) -> None:
    for text, ids in cases:
        assert model.tokenize(text, add_special=False, parse_special=False) == ids, repr(text)


def test_ids_give_their_texts_back(model: Model, name: str, cases: list[tuple[str, list[int]]]) -> None:
    kind = VOCABULARIES[name]
    for text, ids in cases:
        joined = b"".join(model.piece(token) for token in ids).decode("utf-8", "replace")
        if kind == "same":
            assert joined == text
        elif kind == "space":
            assert joined == (" " + text if text else "")
            assert model.detokenize(ids) == text
        else:
            # Unknown words become [UNK]; the ASCII letters and digits stay, accents go.
            plain = unicodedata.normalize("NFD", text.lower())
            assert re.sub(r"\[UNK\]|[^a-z0-9]", "", joined) == re.sub(r"[^a-z0-9]", "", plain)


def test_no_text_has_fewer_tokens_than_its_length_shows(
    model: Model, name: str, cases: list[tuple[str, list[int]]]
) -> None:
    vocab = model.vocab
    assert (vocab.least_tokens(10**6) > 0) == (VOCABULARIES[name] != "lossy")
    longest = max((vocab.piece(token) for token in range(vocab.n_vocab)), key=len).decode(errors="replace")
    for text in [text for text, _ in cases] + [longest * 100, " " * 500, "\n" * 500, "a" * 500]:
        assert len(vocab.tokenize(text, add_special=False)) >= vocab.least_tokens(len(text)), text[:40]


@pytest.mark.parametrize("name", ["llama-spm", "phi-3"], indirect=True)
def test_a_long_text_has_the_tokens_of_the_whole(
    model: Model, cases: list[tuple[str, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut where no token can span the cut: with SPM, what llama.cpp does takes time in the square of emoji."""
    vocab = model.vocab
    monkeypatch.setattr(f"{Vocab.__module__}._PART", 3)
    rng = Random(1)
    words = [text[:9] for text, _ in cases]
    words += [token.text for token in vocab.special_tokens()][:20]
    words += [
        " ",
        "  ",
        "\n",
        "\t",
        "▁",
        "<0x0A>",
        "the",
        "\U0001f600",
        "\u0e81",
        "\u1330",
        "\ud55c",
        "é",
        "\x01",
    ]
    for _ in range(1000):
        text = "".join(rng.choices(words, k=rng.randrange(2, 12)))
        for flags in product((False, True), repeat=2):
            assert vocab.tokenize(text, *flags) == vocab._tokenize(text.encode(), *flags), (text, flags)


@pytest.mark.parametrize("name", ["llama-spm"], indirect=True)
def test_time_of_characters_without_a_token(model: Model) -> None:
    """Twice as many emoji take twice the time, not four times; they took 24 s."""
    text = "\U0001f600" * 250_000
    began_s = process_time()
    tokens = model.tokenize(text, add_special=False)
    assert process_time() - began_s < 8  # 0.5 s here
    assert model.detokenize(tokens) == text
