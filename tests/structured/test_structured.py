"""Guides: their masks against languages written out in full, their state, and one compilation for many requests."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gguf_models import tiny_model
from support.guided import allowed_ids
from support.run_script import run_script

import llamapipe as lp
from llamapipe.errors import DecodeError, EngineClosedError, InvalidRequestError
from llamapipe.structured import compile as compiling
from llamapipe.structured._guide import GrammarTokenizer, Guide, token_bytes
from llamapipe.structured.compile import compile_guide


@pytest.fixture(scope="module", params=["builtin-spm", "builtin-bpe"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    with lp.Model(tiny_model(path, vocab=request.param)) as model:
        yield model


@pytest.fixture
def own(tmp_path: Path) -> Iterator[lp.Model]:
    """A model that a test may change or close."""
    with lp.Model(tiny_model(tmp_path / "own.gguf")) as model:
        yield model


# ---- tokenizer
def test_every_token_has_its_bytes(small: lp.Model, demo: lp.Model) -> None:
    for model in (small, demo):
        tokenizer = GrammarTokenizer(model.vocab)
        assert tokenizer.native.vocab_size == model.n_vocab + 1
        for token in range(model.n_vocab):
            special = model.vocab.is_control(token) or model.vocab.is_eog(token)
            assert tokenizer.native.is_special_token(token) or not special
            if not tokenizer.native.is_special_token(token):
                assert tokenizer.native.decode_bytes([token]) == model.piece(token)


def test_control_tokens_have_names_and_are_no_text(demo: lp.Model) -> None:
    tokens, special = token_bytes(demo.vocab)
    names = {tokens[t] for t in special}
    assert {b"<|end|>", b"<|user|>", b"</s>"} <= names
    guide = compile_guide(demo, regex=r"(?s:.)*").new()
    assert not set(special) - demo.vocab.eog_tokens & set(allowed_ids(guide, demo.n_vocab))
    asked = compile_guide(demo, lark='start: <|user|> "a"').new()
    assert [tokens[t] for t in allowed_ids(asked, demo.n_vocab)] == [b"<|user|>"]


def test_text_is_tokenized_by_the_model(demo: lp.Model) -> None:
    text = "Once upon a time, é."
    tokens = GrammarTokenizer(demo.vocab).native.tokenize_str(text)
    assert tokens == demo.tokenize(text, add_special=False)


def test_an_end_token_with_text_is_never_text(own: lp.Model) -> None:
    letter = next(t for t in range(own.n_vocab) if own.piece(t) == b"a")
    own.vocab.eog_tokens |= {letter}
    guide = compile_guide(own, regex="a{1,2}").new()
    first = allowed_ids(guide, own.n_vocab)
    assert letter not in first and all(own.piece(t)[:1] == b"a" for t in first)
    guide.accept(next(t for t in first if own.piece(t) == b"a"))
    assert own.vocab.eog_tokens <= set(allowed_ids(guide, own.n_vocab))


def test_a_vocabulary_without_end_tokens(own: lp.Model) -> None:
    own.vocab.eog_tokens = frozenset()
    with compile_guide(own, regex="a|aa").new() as guide:
        letter = next(t for t in allowed_ids(guide, own.n_vocab) if own.piece(t) == b"a")
        assert not guide.finished and not guide.may_end
        guide.accept(letter)
        assert guide.may_end and not guide.finished
        guide.accept(letter)
        assert guide.finished and allowed_ids(guide, own.n_vocab) == []


# ---- masks
def strings(*parts: str) -> set[str]:
    """Every choice of one word from each part; words are set off by commas, and may be empty."""
    return {"".join(chosen) for chosen in itertools.product(*(p.split(",") for p in parts))}


LANGUAGES = {
    "(cat|dog)s?": strings("cat,dog", "s,"),
    "[a-c]{1,3}": strings("a,b,c", "a,b,c,", "a,b,c,"),
    "the (end|enemy|then)": strings("the ", "end,enemy,then"),
    "(é|日|😀){2}": strings("é,日,😀", "é,日,😀"),
    "a?b?c?": strings("a,", "b,", "c,"),
    "": {""},
}


def check_against(language: set[str], guide: Guide, model: lp.Model, seed: int) -> None:
    """Follows random allowed tokens; at each step every token of the vocabulary is looked up in the language."""
    texts = [text.encode() for text in language]
    written, rng = b"", random.Random(seed)
    while True:
        following = {t[len(written) :] for t in texts if t.startswith(written)}
        expected = [
            t
            for t in range(model.n_vocab)
            if (piece := model.piece(t))
            and t not in model.vocab.eog_tokens
            and any(f.startswith(piece) for f in following)
        ]
        ends = sorted(model.vocab.eog_tokens) if b"" in following else []
        assert allowed_ids(guide, model.n_vocab) == sorted(expected + ends), written
        assert guide.finished == (not expected)
        assert guide.may_end == (b"" in following)
        token = rng.choice(expected + ends)
        guide.accept(token)
        if token in ends:
            return
        written += model.piece(token)


@pytest.mark.parametrize("pattern", LANGUAGES)
def test_masks_are_exact(small: lp.Model, pattern: str) -> None:
    factory = compile_guide(small, regex=pattern)
    for seed in range(8):
        with factory.new() as guide:
            check_against(LANGUAGES[pattern], guide, small, seed)


def test_masks_of_a_schema_are_exact(small: lp.Model) -> None:
    factory = compile_guide(small, json_schema={"enum": ["the", "then", 12, 120, True, None, "é"]})
    language = {'"the"', '"then"', "12", "120", "true", "null", '"é"'}
    for seed in range(8):
        with factory.new() as guide:
            check_against(language, guide, small, seed)


def test_masks_of_a_lark_grammar_are_exact(small: lp.Model) -> None:
    factory = compile_guide(small, lark='start: "a" (B | "x"){1,2}\nB: /b+c/ & /.{2,3}/')
    pieces = ["bc", "bbc", "x"]
    language = {"a" + "".join(parts) for n in (1, 2) for parts in itertools.product(pieces, repeat=n)}
    for seed in range(8):
        with factory.new() as guide:
            check_against(language, guide, small, seed)


# ---- state
def test_what_is_refused_changes_nothing(demo: lp.Model) -> None:
    guide = compile_guide(demo, regex="ab+").new()
    before = guide.mask().copy()
    for token in (
        demo.tokenize("x", add_special=False)[0],
        demo.eos or 0,
        -1,
        demo.n_vocab,
        demo.n_vocab + 31,
    ):
        with pytest.raises(DecodeError, match=f"token {token}"):
            guide.accept(token)
    assert np.array_equal(guide.mask(), before)


def test_going_back_is_as_if_never_gone(demo: lp.Model) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "maxItems": 9}
    factory = compile_guide(demo, json_schema=schema, json_whitespace="flexible")
    tokens = demo.tokenize("[1, 22, 333]", add_special=False)
    masks = []
    guide = factory.new()
    for token in tokens:
        masks.append(guide.mask().copy())
        guide.accept(token)
    masks.append(guide.mask().copy())
    assert guide.finished and demo.eos is not None
    guide.accept(demo.eos)
    with pytest.raises(DecodeError, match="ended"):
        guide.mask()
    guide.rollback(1)
    for n in reversed(range(len(tokens))):
        assert np.array_equal(guide.mask(), masks[n + 1])
        guide.rollback(1)
    with pytest.raises(ValueError, match="0 were accepted"):
        guide.rollback(1)
    for n in range(len(tokens) + 1):
        guide.reset(tokens[:n])
        assert np.array_equal(guide.mask(), masks[n])


def test_a_dead_end_is_named_and_can_be_left(own: lp.Model) -> None:
    """A grammar may need a character that the vocabulary cannot write; here one that would end the text."""
    own.vocab.eog_tokens |= {t for t in range(own.n_vocab) if b"z" in own.piece(t)}
    guide, other = compile_guide(own, regex="az").new(), compile_guide(own, regex="a(b|z)").new()
    letter = next(t for t in range(own.n_vocab) if own.piece(t) == b"a")
    guide.accept(letter)
    other.accept(letter)
    for _ in range(2):
        with pytest.raises(DecodeError, match="after 1 tokens: the output does not match the grammar yet"):
            guide.prepare()
    assert {own.piece(t) for t in allowed_ids(other, own.n_vocab)} == {b"b"}
    guide.reset()
    assert letter in allowed_ids(guide, own.n_vocab)


def test_a_closed_guide_says_so(demo: lp.Model) -> None:
    guide = compile_guide(demo, regex="a").new()
    guide.close()
    guide.close()
    with pytest.raises(EngineClosedError, match="closed"):
        guide.mask()


@pytest.mark.parametrize("pattern", ["[a-z ]+", "( once| little)[a-z, ]*[.]?", "a{3}", "[0-9]*"])
def test_how_many_of_some_tokens_may_follow(demo: lp.Model, pattern: str) -> None:
    """As many as can be accepted one after the other; the guide stays where it is."""
    rng = random.Random(1)
    text = demo.tokenize(" once upon a time, there was a little 7 girl. One day aaa 12", add_special=False)
    factory = compile_guide(demo, regex=pattern)
    counts = set()
    for _ in range(60):
        begin = rng.randrange(len(text))
        tokens = text[begin : begin + rng.randint(1, 9)] + rng.choices(
            range(demo.n_vocab), k=rng.randint(0, 2)
        )
        with factory.new() as guide, factory.new() as other:
            n = guide.n_allowed(tokens, 60.0)
            counts.add(n)
            for token in tokens[:n]:
                other.accept(token)
            if n < len(tokens):
                with pytest.raises(DecodeError):
                    other.accept(tokens[n])
            assert len(list(guide.follow(tokens))) == n
            assert guide.n_allowed(tokens, 0.0) == min(n, 1)
            assert allowed_ids(guide, demo.n_vocab) == allowed_ids(factory.new(), demo.n_vocab)
    assert len(counts) > 1


# ---- compiling
def test_many_requests_compile_once(demo: lp.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    n_compiled = 0
    compile_one = compiling._Compiler._compile

    def count(self: compiling._Compiler, *grammar: str) -> compiling.GuideFactory:
        nonlocal n_compiled
        n_compiled += 1
        return compile_one(self, *grammar)

    monkeypatch.setattr(compiling._Compiler, "_compile", count)
    schema = {"type": "object", "properties": {"once": {"type": "integer"}}}
    factories: list[compiling.GuideFactory] = []
    threads = [
        threading.Thread(
            target=lambda: factories.extend(compile_guide(demo, json_schema=dict(schema)) for _ in range(50))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(factories) == 200 and n_compiled == 1


def test_guides_of_one_grammar_know_nothing_of_each_other(demo: lp.Model) -> None:
    factory = compile_guide(demo, regex="[0-9]{3}|[a-z]{3}")
    digits, letters = factory.new(), factory.new()
    digits.accept(demo.tokenize("1", add_special=False)[0])
    letters.accept(demo.tokenize("a", add_special=False)[0])
    pieces = [b"".join(map(demo.piece, allowed_ids(guide, demo.n_vocab))) for guide in (digits, letters)]
    assert pieces[0].isdigit() and pieces[1].isalpha()


def test_grammars_do_not_keep_a_vocabulary(tmp_path: Path) -> None:
    model = lp.Model(tiny_model(tmp_path / "short.gguf"))
    factory = compile_guide(model, regex="a*")
    vocab = weakref.ref(model.vocab)
    guide = factory.new()
    model.close()
    del model, factory
    gc.collect()
    assert vocab() is None
    assert guide.mask().any()


def test_a_vocabulary_keeps_only_the_grammars_used_last(
    own: lp.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 0.1 MB and more, so that a server whose clients all have their own schemas must drop some."""
    monkeypatch.setattr(compiling, "N_CACHED", 4)
    compiled = [weakref.ref(compile_guide(own, regex=f"a{{{n}}}")) for n in range(1, 12)]
    gc.collect()
    assert [factory() is not None for factory in compiled] == [False] * 7 + [True] * 4


def test_exactly_one_grammar(demo: lp.Model) -> None:
    for options in ({}, {"regex": "a", "lark": 'start: "a"'}):
        with pytest.raises(ValueError, match="give one of json_schema, regex, lark and choice"):
            compile_guide(demo, **options)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "group": (
        {"regex": 'a"(b'},
        "^regex cannot be compiled: it is not a regular .* followed: unclosed group:\n",
    ),
    "position": ({"regex": "abc[z-a]"}, r"\n    abc\[z-a\]\n        \^\^\^$"),
    "look-around": ({"regex": "a(?=b)"}, "look-around"),
    "word": ({"regex": r"\bfoo"}, r"compiled: it has '\\b', .* characters, in /\\bfoo/; leave it out$"),
    "name of a keyword": (
        {"regex": r"'pattern'\b"},
        r"^regex cannot be compiled: it has .* in /'pattern'\\b/; ",
    ),
    "NUL": ({"regex": "ab\0"}, "NUL character at 2; write it as an escape"),
    "NUL in a text": ({"choice": ["a", "b\0"]}, "NUL character at 1; leave it out"),
    "surrogate": ({"regex": "a\ud800"}, "lone surrogate at 1"),
    "long": ({"regex": "a" * 70_000}, "70000 characters; the limit is 65536"),
    "rule": ({"lark": "start: a\nb: c"}, r'1\(8\): unknown name: "a"'),
    "bracket": ({"lark": 'start: "a" ('}, r"1\(13\): Expected token '\)'"),
    "no rule": ({"lark": ""}, "no start rule"),
    "endless": ({"lark": "start: start"}, "allows no first token"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled_says_why_and_where(demo: lp.Model, name: str) -> None:
    options, message = BAD[name]
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            compile_guide(demo, **options)
        assert str(caught.value).startswith(next(iter(options)))
        assert "no_forcing" not in str(caught.value) and "<state>" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"regex": b"a"}, {"lark": 1}, {"json_schema": 3}, {"json_schema": {"a": {1}}}]
)
def test_other_types_are_type_errors(demo: lp.Model, options: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=next(iter(options))):
        compile_guide(demo, **options)  # type: ignore[arg-type]


def test_without_llguidance_the_message_has_the_fix() -> None:
    program = """
sys.modules["llguidance"] = None
import llamapipe as lp
from llamapipe.structured.compile import compile_guide
with lp.Model.demo() as model:
    try:
        compile_guide(model, regex="a")
    except ImportError as e:
        say(e)
"""
    assert run_script(program) == 'regex needs llguidance: pip install "llamapipe[structured]"\n'
