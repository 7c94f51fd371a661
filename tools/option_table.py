"""Write the tables of options into the pages, from the rows that the library uses.

    python tools/option_table.py

``docs/sampling.md`` gets the options of requests, ``docs/reference/options.md`` those of engines, models, embedders and
servers, ``docs/guides/server.md`` the limits of a server. A test fails if a page says something else than the rows.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from page_sections import cell, with_section

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after an installed llamapipe

import llamapipe as lp
from llamapipe._options import ACCESS, EMBEDDER, ENGINE, LIMITS, MODEL, SERVER, TUNING, Option
from llamapipe._sampling_table import OPTIONS, Kind, SamplingOption
from llamapipe.server.settings import ServerSettings

DOCS = Path(__file__).parent.parent / "docs"
PAGE, ALL, LIMITED = DOCS / "sampling.md", DOCS / "reference" / "options.md", DOCS / "guides" / "server.md"
BEGIN, END = "<!-- options: python tools/option_table.py -->\n", "<!-- end of options -->\n"
# The headings of ``ALL``, the class that has the options, and their rows.
_OWNERS: tuple[tuple[str, Callable[..., Any], Sequence[Option]], ...] = (
    ("Engine", lp.Engine, ENGINE),
    ("EngineTuning", lp.EngineTuning, TUNING),
    ("Model", lp.Model, MODEL),
    ("Embedder", lp.Embedder, EMBEDDER),
    ("ServerSettings", ServerSettings, (*SERVER, *ACCESS, *LIMITS)),
)


def with_tables(page: Path) -> str:
    """The text of a page with its tables as the rows say them."""
    make_section = {PAGE: _requests, ALL: _owners, LIMITED: _limits}[page]
    return with_section(page.read_text(encoding="utf-8"), BEGIN, END, make_section())


def _table(titles: str, rows: Sequence[Sequence[str]]) -> str:
    lines = [titles, "|---" * titles.count(" | ") + "|---|"]
    lines += ["| " + " | ".join(map(cell, cells)) + " |" for cells in rows]
    return "\n".join(lines) + "\n"


# ---- options of requests
def _requests() -> str:
    return _table(
        "| option | values | default | elsewhere | meaning |", [_request(option) for option in OPTIONS]
    )


def _request(option: SamplingOption) -> tuple[str, ...]:
    default = lp.SamplingParams.__dataclass_fields__[option.name].default
    return (
        f"`{option.name}`",
        _values(option),
        f"`{_written(default)}`",
        "; ".join(_elsewhere(option)),
        option.help,
    )


def _elsewhere(option: SamplingOption) -> list[str]:
    """What the names of the option in commands and requests are, unless they are its own."""
    notes = [", ".join(f"`{flag}`" for flag in option.flags)] if option.flags else []
    if option.metavar is None:
        notes.append(f"no command: {option.why_no_flag}")
    fields = option.wire or option.route_fields
    if not fields:
        notes.append(f"no field: {option.why_no_field}")
    elif fields != (option.name,):
        notes.append("field " + " or ".join(f"`{field}`" for field in fields))
    return notes


# ---- options of engines, models, embedders and servers
def _owners() -> str:
    parts = []
    for title, owner, rows in _OWNERS:
        parameters = inspect.signature(owner).parameters
        table = _table(
            "| argument | command line | values | default | meaning |",
            [_argument(row, parameters) for row in rows],
        )
        parts.append(f"## {title}\n\n{table}")
    return "\n".join(parts)


def _argument(row: Option, parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    flags = [] if row.metavar is None else [f"`{flag}`" for flag in row.flags]
    values = f"{_values(row)}, or `None`" if row.optional else _values(row)
    meaning = f"with the flag: {row.help}" if row.is_off else row.help
    return f"`{row.name}`", ", ".join(flags), values, _default(row, parameters), meaning


def _limits() -> str:
    parameters = inspect.signature(ServerSettings).parameters
    return _table(
        "| option | what it limits | default | over the limit |",
        [(f"`{row.flags[-1]}`", row.help, _default(row, parameters), row.over) for row in LIMITS if row.over],
    )


def _default(row: Option, parameters: Mapping[str, inspect.Parameter]) -> str:
    value = parameters[row.name].default
    if row.kind is Kind.SIZE and value is not None:
        return f"{value // 2**20} MiB"
    if row.kind is Kind.OBJECT and not isinstance(value, (bool, str, tuple, type(None))):
        return f"`{type(value).__name__}()`"
    if value is None and row.none:
        return row.none
    return f"{value:,}" if type(value) is int else f"{value:g}" if type(value) is float else f"`{value!r}`"


# ---- cells
def _values(option: SamplingOption | Option) -> str:
    if isinstance(option, Option) and option.choices:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.kind not in (Kind.INT, Kind.SIZE, Kind.FLOAT):
        return _KINDS[option.kind]
    return f"{_number(option.low)} to {_number(option.high)}"


def _number(value: float) -> str:
    for name, limit in (
        ("2³¹ - 1", 2**31 - 1),
        ("2⁶⁴ - 1", 2**64 - 1),
        ("2⁶³ - 1", 2**63 - 1),
        ("2⁶²", 2**62),
    ):
        if value == limit:
            return name
    return f"{int(value):,}" if value == int(value) else f"{value:g}"


_KINDS = {
    Kind.FLAG: "bool",
    Kind.TEXT: "text",
    Kind.TEXTS: "a text, or several",
    Kind.TEXT_LIST: "texts",
    Kind.TOKENS: "token ids",
    Kind.BIASES: "numbers by token id",
    Kind.SAMPLERS: "names of samplers",
    Kind.CONSTRAINT: "text",
    Kind.CALLABLES: "functions",
    Kind.ADAPTER: "name, `Adapter`, `ControlVector`, or a mapping to scales",
    Kind.OBJECT: "an object",
}


def _written(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) and value else repr(value)


if __name__ == "__main__":
    for page in (PAGE, ALL, LIMITED):
        page.write_text(with_tables(page), encoding="utf-8")
