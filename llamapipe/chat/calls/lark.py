"""Pieces of Lark grammars in llguidance's dialect: literals with control tokens, JSON, raw text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from llamapipe.chat.calls.call_format import segments
from llamapipe.structured.schema import SPACE, with_options

SpecialId = Callable[[str], "int | None"]
# The spaces that may follow an end marker (not all models write the template's newlines), and those between the parts
# of JSON.
GAP, SPACES = "GAP?", "SP?"
TERMINALS = f"GAP: /[ \\n]{{1,8}}/\nSP: /{SPACE}/"


# Any text, as a part of a regular expression.
ANY = "(?s:.*)"


class Literals:
    """Writes text as Lark. Markers that are one control token of the vocabulary become that token."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id

    def token(self, marker: str) -> str | None:
        """The control token of a marker, ``<[id]>``; None if it is text."""
        found = self._special_id(marker) if len(marker) > 1 else None
        return None if found is None else f"<[{found}]>"

    def text(self, text: str) -> str:
        """The elements that match ``text`` exactly; empty for empty text."""
        parts: list[str] = []
        plain = ""
        for segment in segments(text):
            token = self.token(segment)
            if token is None:
                plain += segment
                continue
            parts += [json.dumps(plain)] * bool(plain) + [token]
            plain = ""
        return " ".join(parts + [json.dumps(plain)] * bool(plain))

    def edge(self, text: str) -> str:
        """Like ``text``, but the spaces and newlines at its start and its end may vary.

        If one option begins with a newline and another does not, both can be tried only with such freedom.
        """
        inner = text.strip()
        before = GAP if inner and text[0] != inner[0] else ""
        after = GAP if text and text[-1:] != inner[-1:] else ""
        return " ".join(part for part in (before, self.text(inner), after) if part)


class Rules:
    """The rules of one grammar, in the order in which they are needed."""

    def __init__(self, literals: Literals) -> None:
        self._literals = literals
        self._lines: list[str] = []
        self._lazy: dict[str, str] = {}  # names by body: equal ones, as of many arguments, are one rule
        self._terminals: dict[str, str] = {}

    def add(self, name: str, body: str) -> str:
        """Adds a rule, or a terminal if its name is in capitals; returns the name."""
        self._lines.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Adds a terminal; returns its name."""
        if body not in self._terminals:
            self._terminals[body] = self.add(f"TEXT_{len(self._terminals) + 1}", body)
        return self._terminals[body]

    def lazy(self, body: str) -> str:
        """Adds a rule whose text ends where it first matches; returns its name."""
        if body not in self._lazy:
            self._lazy[body] = f"lazy_{len(self._lazy) + 1}"
            self._lines.append(f"{self._lazy[body]}[lazy]: {body}")
        return self._lazy[body]

    def up_to(self, marker: str, text: str = f"/{ANY}/") -> str:
        """The elements that match text up to and including the first ``marker``."""
        token = self._literals.token(marker)
        return self.lazy(f"{text} {json.dumps(marker)}") if token is None else f"{text} {token}"

    def write(self, start: str) -> str:
        """The grammar's text."""
        return "\n".join([f"start: {start}", *self._lines, TERMINALS]) + "\n"


def json_value(schema: dict[str, Any], whitespace: str = "flexible") -> str:
    """The element that matches JSON of a schema. ``whitespace``: see ``SamplingParams.json_whitespace``.

    Models write the arguments of calls as they were trained to, mostly with spaces.
    """
    return f"%json {json.dumps(with_options(schema, whitespace))}"


def regex_text(text: str) -> str:
    """``text`` as a part of a regular expression between slashes."""
    return re.sub(r"([][.^$*+?(){}|\\/&~])", r"\\\1", text).replace("\n", r"\n")
