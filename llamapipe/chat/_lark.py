"""Writes grammars in llguidance's dialect of Lark: ``Literals`` writes text, ``Rules`` collects the rules of a grammar.

Open this file to change how a marker, a member of an object or a JSON value becomes an element of a grammar.
``_answer_grammar.py`` and ``_harmony.py`` decide what an answer may contain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from llamapipe.chat._call_format import segments
from llamapipe.structured.schema import SPACE, with_options

SpecialId = Callable[[str], "int | None"]
# GAP: the spaces that may follow an end marker, because not all models write the template's newlines. SPACES: the
# spaces between the parts of JSON.
GAP, SPACES = "GAP?", "SP?"
TERMINALS = f"GAP: /[ \\n]{{1,8}}/\nSP: /{SPACE}/"
NOTHING = '""'
# Parts of regular expressions for any text and for any white space.
ANY, WHITE = "(?s:.*)", r"[ \t\r\n]*"
_MOST_BITS = 64


class Literals:
    """Writes text as Lark. A marker that is one control token of the vocabulary becomes that token."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id

    def token(self, marker: str) -> str | None:
        """Return the control token of a marker, ``<[id]>``; None if it is text."""
        token_id = self._special_id(marker) if len(marker) > 1 else None
        return None if token_id is None else f"<[{token_id}]>"

    def has_token(self, text: str) -> bool:
        """Return whether ``text`` contains a control token, which ordinary text cannot spell."""
        return any(self.token(segment) is not None for segment in segments(text))

    def text(self, text: str) -> str:
        """Return the elements that match ``text`` exactly; empty for empty text."""
        parts: list[str] = []
        for token, group in groupby(segments(text), self.token):
            same = [*group]
            parts += [json.dumps("".join(same))] if token is None else [token] * len(same)
        return " ".join(parts)

    def tags(self, text: str) -> str:
        """Return elements as ``text`` does, but make the newline between two tags optional."""
        first, newline, rest = text.partition(">\n<")
        return f"{self.text(f'{first}>')} {GAP} {self.text(f'<{rest}')}" if newline else self.text(text)

    def edge(self, text: str) -> str:
        """Return elements as ``text`` does, but let the spaces and newlines at both ends vary.

        Otherwise, a parser could not try two alternatives if only one of them begins with a newline.
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
        # Names by attribute and body. Equal bodies, which many arguments have, share one rule.
        self._shared: dict[tuple[str, str], str] = {}
        self._recursive: dict[object, str] = {}

    def add(self, name: str, body: str) -> str:
        """Add a rule, or a terminal if its name is in capitals; return the name."""
        self._lines.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal; return its name."""
        return self.named("TEXT", body, "terminal")

    def lazy(self, body: str) -> str:
        """Add a rule that ends at its first match; return its name."""
        return self.named("lazy", body, "[lazy]")

    def named(self, kind: str, body: str, attribute: str = "") -> str:
        """Add a rule with this body, unless there is one; return its name, which begins with ``kind``."""
        if (attribute, body) not in self._shared:
            name = self._shared[attribute, body] = f"{kind}_{len(self._shared) + 1}"
            self.add(f"{name}[lazy]" if attribute == "[lazy]" else name, body)
        return self._shared[attribute, body]

    def recursive(self, key: object, body: Callable[[str], str]) -> str:
        """Add a rule that may refer to itself, once per ``key``; return its name. ``body`` gets the name."""
        if key not in self._recursive:
            name = self._recursive[key] = f"value_{len(self._recursive) + 1}"
            self.add(name, body(name))
        return self._recursive[key]

    def in_any_order(self, members: Sequence[tuple[bool, str]], join: str, other: str | None = None) -> str:
        """Return the elements that match members in any order, each at most once, with ``join`` between them.

        A member is a pair: whether it is required, and its elements. More than 64 members keep their given order.
        ``other``: a member that may come any number of times, after the other ones if they are too many.
        """
        ordered = sorted(members, key=lambda member: not member[0])
        names = [self.named("member", body) for _, body in ordered]
        n_required = sum(required for required, _ in ordered)
        if len(names) <= 1 and other is None:
            return "" if not names else names[0] if n_required else f"({names[0]})?"
        if len(names) > _MOST_BITS:
            return self._in_order(members, join, other)
        key = (tuple(names), n_required, join, other)
        if key in self._recursive:
            return self._recursive[key]
        # The rule's parameter has a bit for each member. The bit is set once the member has been written.
        end = f'"" %if is_ones([0:{n_required}])' if n_required else NOTHING
        rest = f"more_{len(self._lines)}"
        start = f"first_{len(self._lines)}"
        options = [
            f"{join} {name} {rest}::set_bit({i}) %if bit_clear({i})".strip() for i, name in enumerate(names)
        ]
        firsts = [f"{name} {rest}::set_bit({i})" for i, name in enumerate(names)]
        if other is not None:
            more = self.named("member", other)
            options.append(f"{join} {more} {rest}::_".strip())
            firsts.append(f"{more} {rest}::_")
        self.add(f"{rest}::_", "\n  | ".join([end, *options]))
        self.add(f"{start}::_", "\n  | ".join([end, *firsts]))
        # llguidance (1.9.1) fails if several recursive rules start a rule with a parameter, so one rule does.
        self._recursive[key] = self.add(start.replace("first", "members"), f"{start}::0x0")
        return self._recursive[key]

    def _in_order(self, members: Sequence[tuple[bool, str]], join: str, other: str | None = None) -> str:
        """Return elements for members in a fixed order, because they are too many for ``in_any_order``."""
        if not join:
            parts = [body if required else f"({body})?" for required, body in members]
            return " ".join(parts if other is None else [*parts, f"({other})*"])
        # The elements of the members that follow, and the elements if none has come before.
        after = "" if other is None else f"({join} {other})*"
        whole = NOTHING if other is None else f"({other} ({join} {other})*)?"
        for i in range(len(members) - 1, -1, -1):
            required, body = members[i]
            name = self.named("member", body)
            first = f"{name} {after}".strip()
            whole = first if required else f"{first} | {whole}"
            rest = f"{join} {name} {after}".strip()
            after = self.named("rest", rest if required else f"{rest} | {after or NOTHING}")
            whole = self.named("rest", whole)
        return whole

    def up_to(self, marker: str, text: str = f"/{ANY}/") -> str:
        """Return the elements that match text up to and including the first ``marker``."""
        if self._literals.has_token(segments(marker)[0]):
            return f"{text} {self._literals.text(marker)}"
        return self.lazy(f"{text} {json.dumps(marker)}")

    def write(self, start: str) -> str:
        """Return the grammar's text."""
        return "\n".join([f"start: {start}", *self._lines, TERMINALS]) + "\n"


def json_value(schema: dict[str, Any], whitespace: str = "flexible") -> str:
    """Return the element that matches the JSON values of a schema.

    ``whitespace``: see ``SamplingParams.json_whitespace``. Models write the arguments of calls as in their training,
    mostly with spaces.
    """
    return f"%json {json.dumps(with_options(schema, whitespace))}"


def regex_text(text: str) -> str:
    """Escape ``text`` as a part of a regular expression between slashes."""
    return re.sub(r"([][.^$*+?(){}|\\/&~])", r"\\\1", text).replace("\n", r"\n")
