"""Write the table of options in docs/sampling.md from the rows that the library uses.

    python tools/option_table.py

A test fails if the page says something else than the rows.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after an installed llamapipe

import llamapipe as lp
from llamapipe._sampling_table import OPTIONS, Kind, SamplingOption

PAGE = Path(__file__).parent.parent / "docs" / "sampling.md"
BEGIN, END = "<!-- options: python tools/option_table.py -->\n", "<!-- end of options -->\n"


def with_table(text: str) -> str:
    """The page with the table as the rows say it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{_table()}{END}{after}"


def _table() -> str:
    lines = ["| option | values | default | elsewhere | meaning |", "|---|---|---|---|---|"]
    lines += [_row(option) for option in OPTIONS]
    return "\n".join(lines) + "\n"


def _row(option: SamplingOption) -> str:
    default = lp.SamplingParams.__dataclass_fields__[option.name].default
    cells = (
        f"`{option.name}`",
        _values(option),
        f"`{_written(default)}`",
        "; ".join(_elsewhere(option)),
        option.help,
    )
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "\\n") for cell in cells) + " |"


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


def _values(option: SamplingOption) -> str:
    if option.kind not in (Kind.INT, Kind.FLOAT):
        return _KINDS[option.kind]
    return f"{_number(option.low)} to {_number(option.high)}"


def _number(value: float) -> str:
    for name, limit in (("2³¹ - 1", 2**31 - 1), ("2⁶⁴ - 1", 2**64 - 1)):
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
}


def _written(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) and value else repr(value)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
