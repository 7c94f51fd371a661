"""Prompts for filling in the middle: the order of their tokens, what is left out, and that a moving cursor keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gguf_models import infilling_model

import llamapipe as lp
from llamapipe.llama.fim import fim_prompt, fim_room, fim_text

LINES = [f"    if fox[{i}] == {i * 7}: return box({i})\n" for i in range(400)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    """A model that has the three tokens."""
    with lp.Model(infilling_model(tmp_path_factory.mktemp("fim") / "plain.gguf")) as model:
        yield model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    """A model that also has tokens before the names of projects and files."""
    with lp.Model(infilling_model(tmp_path_factory.mktemp("fim") / "files.gguf", with_files=True)) as model:
        yield model


def ids(model: lp.Model, text: str) -> list[int]:
    return model.tokenize(text, add_special=False)


class TestOrder:
    @pytest.mark.parametrize("order", ["psm", "spm"])
    def test_the_prompt_is_that_of_llama_server(self, plain: lp.Model, order: Any) -> None:
        fim = plain.vocab.fim_tokens
        assert fim is not None
        assert tuple(fim) == (2397, 2398, 2399, None, None)
        before, after = [fim.prefix, *ids(plain, "Once")], [fim.suffix, *ids(plain, "end")]
        ends = before + after if order == "psm" else after + before
        assert plain.tokenize_fim("Once", "end", order=order) == [plain.bos, *ends, fim.middle]

    def test_other_files_stand_before_the_bos_token(self, model: lp.Model) -> None:
        assert model.vocab.fim_tokens == (2397, 2398, 2399, 2396, 2395)
        tokens = model.tokenize_fim(
            "a", "b", extra=[("one.py", "x"), {"filename": "two.py", "text": "y"}], filename="three.py"
        )
        assert tokens == [
            *[2396, *ids(model, "myproject\n")],
            *[2395, *ids(model, "one.py\n"), *ids(model, "x")],
            *[2395, *ids(model, "two.py\n"), *ids(model, "y")],
            *[2395, *ids(model, "three.py\n")],
            *[model.bos, 2397, *ids(model, "a"), 2398, *ids(model, "b"), 2399],
        ]

    def test_names_of_files_are_llama_servers_where_none_is_given(self, model: lp.Model) -> None:
        named = model.tokenize_fim("a", "b", extra=[("tmp", "x")], filename="filename")
        assert model.tokenize_fim("a", "b", extra=[{"text": "x"}]) == named

    def test_a_model_without_a_token_for_files_gets_a_line_between_them(self, plain: lp.Model) -> None:
        tokens = plain.tokenize_fim(
            "a", "b", extra=[("one.py", "x"), ("two.py", "y")], filename="no place for it"
        )
        line = ids(plain, "\n\n--- snippet ---\n\n")
        assert tokens == [*line, *ids(plain, "x"), *line, *ids(plain, "y"), *plain.tokenize_fim("a", "b")]

    def test_names_of_control_tokens_stay_text(self, plain: lp.Model) -> None:
        name = "</s>"
        assert plain.tokenize(name, False, parse_special=True) == [plain.eos]
        assert plain.eos not in plain.tokenize_fim(name, name, extra=[(name, name)])


class TestWrong:
    def test_a_model_that_cannot_fill_in(self, demo: lp.Model) -> None:
        with pytest.raises(lp.errors.InvalidRequestError, match="no tokens for filling in the middle"):
            demo.tokenize_fim("a", "b")

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"prefix": None}, TypeError, "prefix must be a str, not NoneType"),
            ({"suffix": b"b"}, TypeError, "suffix must be a str, not bytes"),
            ({"filename": 1}, TypeError, "filename must be a str, not int"),
            ({"order": "mps"}, ValueError, "order"),
            ({"order": None}, TypeError, "order"),
            ({"extra": {"a.py": "x"}}, TypeError, r"extra must be a list of \(filename, text\), not dict"),
            ({"extra": "ab"}, TypeError, "extra must be a list"),
            ({"extra": None}, TypeError, "extra must be a list"),
            ({"extra": ["ab"]}, TypeError, "extra 0 must be"),
            ({"extra": [("a", "b", "c")]}, TypeError, "extra 0 must be"),
            ({"extra": [("a", "b"), ("a", 1)]}, TypeError, "extra 1 must hold two str, not str and int"),
            ({"extra": [{"filename": "a"}]}, ValueError, "extra 0 must have the keys"),
            ({"extra": [{"text": "a", "path": "b"}]}, ValueError, "extra 0 must have the keys"),
            ({"prefix": "\ud800"}, ValueError, "lone surrogate"),
            ({"n_max": 0}, ValueError, "n_max is 0"),
            ({"n_max": "9"}, TypeError, "n_max must be an integer"),
            ({"n_max": 7}, lp.errors.InvalidRequestError, "may have 7 tokens here, and its marks take 4"),
        ],
    )
    def test_wrong_arguments_are_refused(
        self, plain: lp.Model, change: dict[str, Any], error: Any, message: str
    ) -> None:
        arguments = {"prefix": "a", "suffix": "b", **change}
        with pytest.raises(error, match=message):
            plain.tokenize_fim(arguments.pop("prefix"), arguments.pop("suffix"), **arguments)

    def test_a_closed_model(self, tmp_path: Path) -> None:
        model = lp.Model(infilling_model(tmp_path / "fim.gguf"))
        model.close()
        with pytest.raises(lp.errors.EngineClosedError):
            model.tokenize_fim("a", "b")


class TestCut:
    def test_what_fits_is_whole(self, model: lp.Model) -> None:
        text = fim_text(
            "".join(LINES[:10]), "".join(LINES[10:15]), [("a.py", "".join(LINES[20:30]))], None, "psm"
        )
        whole = fim_prompt(model.vocab, text)
        assert fim_prompt(model.vocab, text, 4096) == (whole.tokens, False)

    @pytest.mark.parametrize("n_max", [64, 300, 512, 2000, 4096])
    @pytest.mark.parametrize(
        ("n_before", "n_after"), [(0, 400), (400, 0), (400, 400), (5, 400), (400, 5), (40, 40)]
    )
    def test_the_room_is_kept_and_used(
        self, model: lp.Model, n_max: int, n_before: int, n_after: int
    ) -> None:
        prefix, suffix = "".join(LINES[:n_before]), "".join(LINES[:n_after])
        extra = [("a.py", line) for line in LINES]
        tokens, is_cut = fim_prompt(model.vocab, fim_text(prefix, suffix, extra, None, "psm"), n_max)
        assert len(tokens) <= n_max
        assert is_cut
        assert len(tokens) > n_max * 0.65 or n_max == 64
        before = tokens[tokens.index(2397) + 1 : tokens.index(2398)]
        after = tokens[tokens.index(2398) + 1 : -1]
        assert before == ids(model, prefix)[len(ids(model, prefix)) - len(before) :]
        assert after == ids(model, suffix)[: len(after)]
        if n_before == n_after == 400:
            assert 2 < len(before) / len(after) < 3.2

    def test_whole_files_are_kept_from_the_last_one_back(self, model: lp.Model) -> None:
        extra = [(f"{i}.py", line) for i, line in enumerate(LINES)]
        tokens = model.tokenize_fim("a", "b", extra=extra, n_max=512)
        starts = [i for i, token in enumerate(tokens) if token == 2395]
        kept = len(starts) - 1
        assert 5 < kept < 100
        assert tokens == model.tokenize_fim("a", "b", extra=extra[-kept:])

    @pytest.mark.parametrize("order", ["psm", "spm"])
    @pytest.mark.parametrize("n_extra", [0, 30])
    def test_the_prompts_of_a_typing_user_begin_alike(
        self, model: lp.Model, order: Any, n_extra: int
    ) -> None:
        extra = [("a.py", line) for line in LINES[:n_extra]]
        typed = "".join(LINES[60:120])
        before, after = "".join(LINES[:60]), "".join(LINES[200:260])
        n_max = 1024
        n_suffix = len(model.tokenize_fim("", after, n_max=n_max, order=order))
        last: list[int] = []
        n_new = []
        for i in range(600):
            text = before + typed[: 2 * i]
            tokens = model.tokenize_fim(text, after, extra=extra, n_max=n_max, order=order)
            n_same = next(
                (j for j, (a, b) in enumerate(zip(last, tokens, strict=False)) if a != b), len(last)
            )
            n_new.append(len(tokens) - n_same)
            last = tokens
        most = 15 if order == "spm" else 15 + n_suffix
        long = [n for n in n_new[1:] if n > most]
        n_typed = len(ids(model, typed[:1200]))
        # Steps of 64 tokens, of the prefix and of what it leaves. A key may make two tokens one, and so undo a step.
        assert len(long) <= 4 * (n_typed // 64 + 1), long

    def test_a_very_long_text_is_cut_before_it_is_tokenized(self, model: lp.Model) -> None:
        whole = "".join(LINES) * 100
        tokens = model.tokenize_fim(whole, whole, extra=[("a.py", whole)], n_max=512)
        assert 300 < len(tokens) <= 512
        assert tokens[-1] == 2399

    def test_requests_for_a_few_more_tokens_get_the_same_room(self) -> None:
        assert {fim_room(4096, n) for n in (1, 64, 128, 256)} == {3840}
        assert fim_room(4096, None) == 3072
        assert fim_room(4096, 10**9) == 2048
        assert all(0 < fim_room(n, m) < n for n in range(2, 300) for m in (1, 7, 128, 10**6, None))
