"""The table of options, and what is made from it: fields, checks, flags."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

import llamapipe as lp
from llamapipe._options import ACCESS, BY_NAME, EMBEDDER, ENGINE, LIMITS, MODEL, SERVER, TUNING, Option
from llamapipe._sampling_table import Kind
from llamapipe.arguments import check_option
from llamapipe.cli import serve
from llamapipe.llama.context import CACHE_TYPES
from llamapipe.native.load import native
from llamapipe.server.settings import ServerSettings

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))

from option_table import ALL, LIMITED, with_tables

SETTINGS = (*SERVER, *ACCESS, *LIMITS)
OWNERS: Mapping[Any, tuple[Option, ...]] = {
    lp.Engine: ENGINE,
    lp.EngineTuning: TUNING,
    lp.Model: MODEL,
    lp.Embedder: EMBEDDER,
    ServerSettings: SETTINGS,
}
ROWS = [(owner, row) for owner, rows in OWNERS.items() for row in rows]
# The options of a server say more than the field: a name for clients, a file of keys, a second port.
WITHOUT_ROW = {"model", "path", "progress", "model_names", "embedding_names", "api_keys", "ollama"}


def names(rows: object) -> object:
    return rows.name if isinstance(rows, Option) else getattr(rows, "__name__", "")


@pytest.mark.parametrize(("owner", "row"), ROWS, ids=names)
def test_a_row_is_an_argument_and_its_default_is_allowed(owner: Any, row: Option) -> None:
    parameters = inspect.signature(owner).parameters
    assert row.name in parameters, f"llamapipe/_options.py has {row.name}, and {owner.__name__} has not"
    check_option(row, parameters[row.name].default)


@pytest.mark.parametrize("owner", OWNERS, ids=names)
def test_every_argument_has_a_row(owner: Any) -> None:
    missing = inspect.signature(owner).parameters.keys() - {row.name for row in OWNERS[owner]}
    assert missing <= WITHOUT_ROW, "add a row to llamapipe/_options.py"


def test_names_are_different() -> None:
    """Embedders have names of engines, with other ranges."""
    assert len(BY_NAME) == len(ROWS) - len(EMBEDDER), "two rows have one name"


@pytest.mark.parametrize(("owner", "row"), [pair for pair in ROWS if pair[1].choices], ids=names)
def test_types_have_the_choices_of_the_row(owner: Any, row: Option) -> None:
    written = inspect.signature(owner).parameters[row.name].annotation
    choices = get_args(eval(written.removesuffix(" | None"), vars(sys.modules[owner.__module__])))
    assert choices == row.choices or written.startswith("str")


def test_rows_have_what_llama_cpp_has() -> None:
    assert native().lib.llama_max_parallel_sequences() == BY_NAME["n_seq_max"].high
    assert tuple(CACHE_TYPES) == BY_NAME["type_k"].choices


@pytest.mark.parametrize("page", [ALL, LIMITED], ids=lambda page: page.stem)
def test_pages_have_the_tables(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == with_tables(page), "run: python tools/option_table.py"


@pytest.mark.parametrize(("owner", "row"), ROWS, ids=names)
def test_the_docstring_of_the_owner_tells_of_it(owner: Any, row: Option) -> None:
    assert f"``{row.name}``" in owner.__doc__, (
        f"{inspect.getsourcefile(owner)}: the docstring of {owner.__name__}"
    )


@pytest.mark.parametrize(("owner", "row"), ROWS, ids=names)
def test_docstrings_leave_ranges_to_the_table(owner: Any, row: Option) -> None:
    """They would have to be changed with it, and errors say them."""
    words = owner.__doc__.replace("``", "").split()
    texts = {f"{row.high:g}", f"{int(row.high)}", f"{int(row.high):,}"} if row.high >= 1000 else set()
    assert not {word.strip(".,;:()") for word in words} & texts


@pytest.mark.parametrize(
    "row", [row for row in SETTINGS if row.kind in (Kind.INT, Kind.SIZE, Kind.FLOAT)], ids=names
)
def test_the_range_of_a_setting_holds(row: Option) -> None:
    def settings(value: Any) -> ServerSettings:
        return ServerSettings(**{row.name: value})

    number = float if row.kind is Kind.FLOAT else int
    for value in (number(row.low), number(row.high)):
        assert getattr(settings(value), row.name) == value
    for value in (number(row.low - 1), number(row.high * 2 + 1)):
        with pytest.raises(ValueError, match=rf"^{row.name} is "):
            settings(value)
    with pytest.raises(TypeError, match=rf"^{row.name} must be "):
        settings("many")


def outside(row: Option) -> list[object]:
    """Values that the row does not allow."""
    if row.kind in (Kind.INT, Kind.SIZE):
        return [int(row.low) - 1, int(row.high) + 1, "many"]
    if row.kind is Kind.FLOAT:
        return [row.low - 1, row.high * 2 + 1, "many"]
    return ["maybe", 7] if row.kind is Kind.FLAG or row.choices else []


@pytest.mark.parametrize(
    ("owner", "row"), [(owner, row) for owner, row in ROWS if row not in SETTINGS and outside(row)], ids=names
)
def test_what_a_row_does_not_allow_is_refused(tiny: lp.Model, owner: Any, row: Option) -> None:
    """Settings are checked below."""
    makers: Mapping[Any, Any] = {
        lp.Model: partial(lp.Model, lp.demo_model_path()),
        lp.EngineTuning: lambda **options: lp.Engine(tiny, tuning=lp.EngineTuning(**options)),
    }
    make = makers.get(owner, partial(owner, tiny))
    for value in outside(row):
        with pytest.raises((TypeError, ValueError), match=rf"^{row.name} (is|must be) "):
            make(**{row.name: value})


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.metavar is not None], ids=names)
def test_a_flag_of_serve_sets_its_field(row: Option) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    serve.add_arguments(parser)
    text, value = {
        Kind.INT: ("7", 7),
        Kind.SIZE: ("3MiB", 3 * 2**20),
        Kind.FLOAT: ("2.5", 2.5),
        Kind.TEXTS: ("a", ("a",)),
        Kind.TEXT: (row.choices[-1] if row.choices else "a",) * 2,
        Kind.FLAG: ("", not row.is_off),
    }[row.kind]
    fields = serve.settings_fields(parser.parse_args([row.flags[-1], *([text] if text else [])]))
    assert fields[row.name] == value
    assert row.name not in serve.settings_fields(parser.parse_args([]))
    assert serve.with_option_name(f"{row.name} is bad") == f"{row.flags[-1]} is bad"


def test_flags_are_different() -> None:
    flags = [flag for row in BY_NAME.values() if row.metavar is not None for flag in row.flags]
    assert len(flags) == len(set(flags))
    assert all(row.help for row in BY_NAME.values() if row.metavar is not None)
