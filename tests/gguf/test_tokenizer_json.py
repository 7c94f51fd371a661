"""``tokenizer.json``, read by the ``tokenizers`` package, gives llama.cpp's token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_models import TOOLS
from tokenizers import Tokenizer

import llamapipe as lp
from llamapipe.chat.control_text import SpecialToken
from llamapipe.gguf.tokenizer_json import PRE_TOKENIZERS, CannotExportError, _check_overlaps

assert TOOLS.is_dir()  # importing it makes this one importable
import make_model  # noqa: E402

# The two programs treat unassigned characters differently: one as words, the other not.
_CHARACTERS = st.characters(exclude_categories=("Cs", "Cn"))
_FEW = st.sampled_from(list("aeiht THE'1234 \n\t\u2581\u00e9\u4e2d\U0001f600<|>s"))


def vocabulary(folder: Path, name: str, changes: dict[str, Any] | None = None) -> Path:
    """A model with one of the built-in vocabularies; ``changes``: metadata to replace, None: to leave out."""
    fields = make_model.vocabulary(name)
    for key, value in (changes or {}).items():
        if value is None:
            del fields[key]
        else:
            kind = gguf.GGUFValueType.STRING if isinstance(value, str) else fields[key].type
            fields[key] = make_model.Field(value, kind, fields[key].sub_type if key in fields else None)
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in fields.items():
        writer.add_key_value(key, field.value, field.type, field.sub_type)
    make_model.finish(writer)
    return path


def opened(path: Path) -> lp.Model:
    return lp.Model(path, vocab_only=True)


CASES = (
    "demo",
    "builtin-spm",
    *(f"builtin-bpe {flavour}" for flavour in ("gpt-2", "starcoder", "llama-bpe", "qwen2", "qwen35")),
)


@pytest.fixture(scope="module", params=CASES)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[lp.Model, Any]]:
    """A model, and its tokenizer as ``tokenizers`` reads it."""
    folder = tmp_path_factory.mktemp("vocabulary")
    name, _, flavour = request.param.partition(" ")
    path = lp.demo_model_path()
    if name != "demo":
        path = vocabulary(folder, name, {"tokenizer.ggml.pre": flavour} if flavour else None)
    with opened(path) as model:
        saved = model.save_tokenizer(folder / "out")
        yield model, Tokenizer.from_file(str(saved / "tokenizer.json"))


@settings(max_examples=60, deadline=None)
@given(text=st.text(_CHARACTERS) | st.text(_FEW) | st.text(_FEW | _CHARACTERS), data=st.data())
def test_token_ids_are_those_of_llama_cpp(
    exported: tuple[lp.Model, Any], text: str, data: st.DataObject
) -> None:
    model, tokenizer = exported
    special = data.draw(st.sampled_from(["", *(token.text for token in model.vocab.special_tokens())]))
    at = data.draw(st.integers(0, len(text)))
    text = text[:at] + special + text[at:]
    expected = model.tokenize(text, add_special=False, parse_special=True)
    assert tokenizer.encode(text, add_special_tokens=False).ids == expected
    # Tokens before and after a text: llamapipe adds no second BOS to a text that begins with one.
    if expected[:1] != [model.vocab.bos]:
        assert tokenizer.encode(text).ids == model.tokenize(text, parse_special=True)


@settings(max_examples=30, deadline=None)
@given(text=st.text(_CHARACTERS) | st.text(_FEW))
def test_decoding_gives_the_text_back(exported: tuple[lp.Model, Any], text: str) -> None:
    model, tokenizer = exported
    text = text.replace("\u2581", " ")  # SentencePiece cannot tell the two apart
    tokens = model.tokenize(text, add_special=False)
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_the_files_beside_it(tmp_path: Path) -> None:
    with opened(lp.demo_model_path()) as model:
        folder = model.save_tokenizer(tmp_path / "out")
        assert folder == tmp_path / "out"
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        assert config["chat_template"] == model.chat_template
        assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<s>", "</s>", True)
        sizes = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert sizes["vocab_size"] == model.vocab.n_vocab
        assert sizes["eos_token_id"] == sorted(model.vocab.eog_tokens)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert set(before) == {"tokenizer.json", "tokenizer_config.json", "config.json"}
        model.save_tokenizer(folder)  # workers of one model share a folder
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("builtin-bpe", {"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer is 'tekken'"),
        ("builtin-bpe", {"tokenizer.ggml.pre": None}, "does not name its pre-tokenizer"),
        ("builtin-spm", {"tokenizer.ggml.scores": [0.0] * 512}, "have the same score"),
    ],
)
def test_what_has_no_exact_form_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    with opened(vocabulary(tmp_path, name, changes)) as model, pytest.raises(ValueError, match=message):
        model.save_tokenizer(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_piece_with_an_unknown_character_is_refused(tmp_path: Path) -> None:
    tokens = list(make_model.vocabulary("builtin-spm")["tokenizer.ggml.tokens"].value)
    tokens[-1] = "\u2603e"
    with opened(vocabulary(tmp_path, "builtin-spm", {"tokenizer.ggml.tokens": tokens})) as model:
        assert len(tokens) - 1 in model.tokenize("\u2603e")
        with pytest.raises(ValueError, match=r"the character '\\u2603', which is not a piece"):
            model.save_tokenizer(tmp_path / "out")
    types = list(make_model.vocabulary("builtin-spm")["tokenizer.ggml.token_type"].value)
    types[-1] = 4  # user-defined: matched before merging
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    with opened(vocabulary(tmp_path, "builtin-spm", changes)) as model:
        saved = model.save_tokenizer(tmp_path / "special")
        ids = Tokenizer.from_file(str(saved / "tokenizer.json")).encode("a \u2603e\u2603").ids
        assert ids == list(model.tokenize("a \u2603e\u2603", parse_special=True))
    tokens[-2] = "\u2603"
    with opened(vocabulary(tmp_path, "builtin-spm", {"tokenizer.ggml.tokens": tokens})) as model:
        saved = model.save_tokenizer(tmp_path / "out")
        ids = Tokenizer.from_file(str(saved / "tokenizer.json")).encode("a \u2603e\u2603").ids
        assert ids == list(model.tokenize("a \u2603e\u2603"))


def test_special_tokens_that_overlap_are_refused() -> None:
    def check(*texts: str) -> None:
        _check_overlaps([SpecialToken(text, i, True) for i, text in enumerate(texts)])

    check("<|a|>", "<|b|>", "  ", "   ", "<|a|>x")
    with pytest.raises(CannotExportError, match="overlap in the text 'ABCD'"):
        check("AB", "BCD")


def test_llama_cpp_knows_each_flavour(tmp_path: Path) -> None:
    for flavour in PRE_TOKENIZERS:
        with opened(vocabulary(tmp_path, "builtin-bpe", {"tokenizer.ggml.pre": flavour})) as model:
            model.save_tokenizer(tmp_path / "out")
            text = (
                "It's 12345 words,\n\n  'LL \u00e9t\u00e9 \u0939\u093f\u0928\u094d\u0926\u0940 \u4e2d\u6587!!"
            )
            tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
            assert tokenizer.encode(text, add_special_tokens=False).ids == model.tokenize(
                text, add_special=False
            ), flavour
