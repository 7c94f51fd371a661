"""The tables of docs/coming-from name options, arguments and routes of ours: they exist."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Route

import llamapipe as lp
from llamapipe.cli import _parser
from llamapipe.server import ServerSettings, app, serve

PAGES = sorted((Path(__file__).parents[2] / "docs" / "coming-from").glob("*.md"))
# Of the client of OpenAI.
OTHERS = {"extra_body"}
CALLS = (
    lp.Engine, lp.EngineTuning, lp.Model, lp.Model.from_pretrained, lp.SamplingParams, lp.Embedder,
    lp.Engine.generate, lp.Engine.chat, lp.Engine.stream_chat, ServerSettings, serve,
)  # fmt: skip


def rows(page: Path) -> Iterator[tuple[str, list[str]]]:
    """The first cell of each row of a page's tables, and the others."""
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) > 1 and not set(cells[0]) <= set("-: "):
            yield cells[0], cells[1:]


def code(cells: list[str]) -> str:
    """What is marked as code."""
    return " ".join(part for cell in cells for part in re.findall(r"`([^`]+)`", cell))


@pytest.fixture(scope="module")
def options() -> set[str]:
    """The options of all commands."""
    names: set[str] = set()
    for action in _parser()._actions:
        for command in (action.choices or {}).values() if isinstance(action.choices, dict) else ():
            names |= set(command._option_string_actions)
    assert "--n-seq-max" in names
    return names


@pytest.fixture(scope="module")
def routes() -> set[str]:
    """The paths of the server."""
    with lp.Model.demo() as model, lp.Engine(model, n_ctx=64, n_seq_max=1) as engine:
        settings = ServerSettings(ollama=True)
        return {route.path for route in app(engine, settings).routes if isinstance(route, Route)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_exist(page: Path, options: set[str]) -> None:
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(code(ours) for _, ours in rows(page))))
    assert not named - options


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_arguments_exist(page: Path) -> None:
    known = {name for call in CALLS for name in inspect.signature(call).parameters}
    named = set(re.findall(r"\b([a-z]\w*)=", " ".join(code(ours) for _, ours in rows(page))))
    assert not named - known - OTHERS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_routes_exist(page: Path, routes: set[str]) -> None:
    for theirs, ours in rows(page):
        text = code([theirs]) if ours[0].startswith("the same") else code(ours[:1])
        named = set(re.findall(r"(?<![\w.:/])/[a-z_][\w/-]*", text))
        assert not named - routes, theirs


def test_parameters_with_the_same_names_as_in_vllm() -> None:
    (names,) = [theirs for theirs, ours in rows(PAGES[-1]) if ours == ["the same names"]]
    fields = set(inspect.signature(lp.SamplingParams).parameters)
    assert PAGES[-1].stem == "vllm" and set(code([names]).replace(",", " ").split()) < fields
