"""Writes as Lark the parts of a JSON schema that llguidance's own schema compiler cannot follow exactly.

llguidance reads numbers as doubles, so integers beyond 2**53 and bounds of over 15 digits would silently change. It
does not support ``uniqueItems``, ``contains`` or look-around in patterns. This module writes only the parts that need
these, and the parts around them. All other parts become ``%json`` elements of the grammar, which llguidance's compiler
reads.

``patterns`` writes patterns with look-around as Lark. The regular expressions for numbers within bounds are exact for
any number of digits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NoReturn

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.structured._rewrite import (
    ASSERTIONS,
    BOUNDS,
    OF_TYPE,
    OF_TYPED,
    Node,
    listed_values,
    target,
)
from llamapipe.structured.patterns import CHARACTER, LOOK_AROUND, as_lark, length_as_lark
from llamapipe.structured.schema import (
    COUNTED,
    SPACE,
    WHITESPACE,
    identity,
    json_type,
    pointer_to,
    resolved,
    steps_of,
    subschemas,
    with_options,
)


def integer_range(low: int | None, high: int | None) -> str:
    """Return a regular expression for the integers from ``low`` to ``high``, inclusive. None means no bound."""
    parts = []
    if low is None or low < 0:
        parts.append(
            f"-(?:{_natural_range(max(1, -high) if high is not None else 1, None if low is None else -low)})"
        )
    if (low is None or low <= 0) and (high is None or high >= 0):
        parts.append("0")
    if high is None or high > 0:
        parts.append(_natural_range(1 if low is None else max(1, low), high))
    return "|".join(parts)


_FRACTION = r"(?:\.[0-9]+)?"


def number_bound(bound: Fraction, keyword: str) -> str:
    """Return a regular expression for the decimal numbers, without exponents, that one bound allows.

    ``bound`` must have finitely many digits. ``keyword``: "minimum", "maximum", "exclusiveMinimum" or
    "exclusiveMaximum".
    """
    is_exclusive = keyword.startswith("exclusive")
    is_upper = keyword.endswith("aximum")
    size = abs(bound)
    sign, other = ("-", "") if bound < 0 or (bound == 0 and is_upper) else ("", "-")
    if bound == 0 or (bound > 0) != is_upper:  # the allowed numbers lie away from zero
        zero = [r"-?0(?:\.0+)?"] if bound == 0 and not is_exclusive else []
        return "|".join([f"{sign}(?:{_far_from(size, is_exclusive)})", *zero])
    up_to = _up_to(size, is_exclusive)
    below = [r"-?0(?:\.0+)?"]
    if up_to:
        below.append(f"{sign}(?:{up_to})")
    return "|".join([f"{other}(?:{_far_from(Fraction(0), False)})", *below])


def _digits(size: Fraction) -> tuple[int, str]:
    """Return the whole part of a number and the digits after its decimal point."""
    whole, rest = divmod(size, 1)
    digits = ""
    while rest:
        digit, rest = divmod(rest * 10, 1)
        digits += str(digit)
    return int(whole), digits


def _far_from(size: Fraction, is_exclusive: bool) -> str:
    """Return a regular expression for numbers of at least ``size``; with ``is_exclusive``, above ``size``."""
    whole, digits = _digits(size)
    above = r"[0-9]*[1-9][0-9]*" if is_exclusive else "[0-9]*"
    parts = [f"(?:{_natural_range(whole + 1, None)}){_FRACTION}"]
    for i, digit in enumerate(digits):
        if digit != "9":
            parts.append(rf"{whole}\.{digits[:i]}[{int(digit) + 1}-9][0-9]*")
    if digits:
        parts.append(rf"{whole}\.{digits}{above}")
    else:
        parts.append(rf"{whole}\.{above}" if is_exclusive else f"{whole}{_FRACTION}")
    return "|".join(parts)


def _up_to(size: Fraction, is_exclusive: bool) -> str:
    """Return a regular expression for numbers from 0 up to ``size``; with ``is_exclusive``, below ``size``."""
    whole, digits = _digits(size)
    parts = [] if whole == 0 else [f"(?:{integer_range(0, whole - 1)}){_FRACTION}"]
    if not digits:
        return "|".join([*parts, *([] if is_exclusive else [rf"{whole}(?:\.0+)?"])])
    parts.append(rf"{whole}(?:\.0+)?")
    for i, digit in enumerate(digits):
        if i:
            parts.append(rf"{whole}\.{digits[:i]}0*")
        if digit != "0":
            parts.append(rf"{whole}\.{digits[:i]}[0-{int(digit) - 1}][0-9]*")
    if not is_exclusive:
        parts.append(rf"{whole}\.{digits}0*")
    return "|".join(parts)


def _natural_range(low: int, high: int | None) -> str:
    """Return a regular expression like ``integer_range``, for a ``low`` of 1 or more."""
    n_low = len(str(low))
    if high is None:
        return f"{_same_length(str(low), '9' * n_low)}|[1-9][0-9]{{{n_low},}}"
    n_high = len(str(high))
    if n_low == n_high:
        return _same_length(str(low), str(high))
    parts = [_same_length(str(low), "9" * n_low)]
    if n_high - n_low > 1:
        parts.append(f"[1-9][0-9]{{{n_low},{n_high - 2}}}")
    return "|".join([*parts, _same_length("1" + "0" * (n_high - 1), str(high))])


def _same_length(low: str, high: str) -> str:
    n = len(low)
    if low == high:
        return low
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{n}}}"
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    if n == 1:
        return f"[{low}-{high}]"
    parts, first, last = [], int(low[0]), int(high[0])
    if low[1:].strip("0"):
        parts.append(low[0] + _same_length(low[1:], "9" * (n - 1)))
        first += 1
    if high[1:].strip("9"):
        parts.append(high[0] + _same_length("0" * (n - 1), high[1:]))
        last -= 1
    if first <= last:
        parts.append(f"[{first}-{last}][0-9]{{{n - 1}}}")
    return f"(?:{'|'.join(parts)})"


_EXACT = 2**53  # doubles hold every integer up to this one exactly
_MOST_DIGITS = 400  # of a bound
_MOST_PLAIN_CHARS = 2**19  # of all parts for llguidance's compiler, which each have a copy of the definitions
_NAME = rf'/"{CHARACTER}*"/'  # any string of JSON


class _NothingError(InvalidRequestError):
    """No value satisfies a part. Alternatives, items and members that need not be there are left out instead."""


class SchemaGrammar:
    """A schema as a Lark grammar, for schemas that llguidance's compiler would not follow exactly.

    ``root``: a result of ``rewritten``. ``whitespace``: a key of ``WHITESPACE``. ``hard``: the pointers of the parts
    that this class writes. ``plain``: after ``text``, the pointers of the parts that llguidance's compiler reads, and
    these parts, with the definitions that they refer to.
    """

    def __init__(self, root: Node, whitespace: str) -> None:
        self.root = root
        self._whitespace = whitespace
        options = WHITESPACE[whitespace]
        self._comma = json.dumps(options.get("item_separator", ","))
        self._colon = json.dumps(options.get("key_separator", ":"))
        self._parts = dict(subschemas(root))
        self._places = {id(part): pointer for pointer, part in self._parts.items()}
        self._names: dict[str, str] = {}
        self._empty: dict[str, _NothingError] = {}  # parts that allow nothing
        self._inner: tuple[str, _NothingError] | None = None  # the last part that was left out
        self.plain: dict[str, tuple[str, Node]] = {}
        self._lines: list[str] = []
        self._n_chars = 0  # of the texts that `_plain` has written
        self.hard = frozenset(self._find_hard())

    @property
    def is_needed(self) -> bool:
        """True if this class must write a part of the schema."""
        return "#" in self.hard

    def text(self, empty: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return the grammar. Raises InvalidRequestError, with keyword and pointer, if it cannot be written.

        ``empty``: the errors of parts that allow nothing, by their keys in the ``plain`` of an earlier grammar.
        """
        self._empty |= {key: _NothingError(message) for key, message in empty.items()}
        start = self._rule("#")
        options = f'%llguidance {{"ignore_once": true}}\n%ignore /{SPACE}/\n'
        head = options if self._whitespace == "flexible" else ""
        return f"{head}start: {start}\n" + "\n".join(self._lines)

    # ---- which parts are written here
    def _find_hard(self) -> set[str]:
        """Return the pointers of hard parts, and of all parts that contain or refer to them."""
        users: dict[str, list[str]] = {}
        for pointer, part in self._parts.items():
            parent = pointer
            while (cut := parent.rfind("/")) > 0:
                parent = parent[:cut]
                if parent in self._parts:
                    users.setdefault(pointer, []).append(parent)
                    break
            place = resolved(self.root, part.get("$ref"))
            if place is not None:
                users.setdefault(place[0], []).append(pointer)
        waiting = [pointer for pointer, part in self._parts.items() if _is_hard(part)]
        reached: set[str] = set()
        in_definition = re.compile(r"/(\$defs|definitions)/[^/]*$")
        while waiting:
            pointer = waiting.pop()
            if pointer in reached:
                continue
            reached.add(pointer)
            # A hard definition does not make the part that holds it hard, but only parts that refer to it.
            parents = users.get(pointer, [])
            if in_definition.search(pointer):
                parents = [
                    parent
                    for parent in parents
                    if not pointer.startswith(f"{parent}/") or self._refers(parent, pointer)
                ]
            waiting += parents
        return reached

    def _refers(self, pointer: str, to: str) -> bool:
        place = resolved(self.root, self._parts[pointer].get("$ref"))
        return place is not None and place[0] == to

    # ---- rules
    def _rule(self, pointer: str) -> str:
        """Return the name of a part's rule. The first call writes the rule."""
        if pointer in self._names:
            return self._names[pointer]
        part = self._parts[pointer]
        if pointer not in self.hard and part.keys() & ASSERTIONS == {"$ref"}:
            place = resolved(self.root, part["$ref"])
            if place is not None and place[0] in self._parts:
                return self._rule(place[0])  # a definition is written once, however often it is used
        return self._written(pointer, pointer, part)

    def _written(self, key: str, pointer: str, part: Node) -> str:
        """Write the rule of a part under ``key``; return its name. If it allows nothing, nothing is written for it."""
        if key in self._names:
            return self._names[key]
        if key in self._empty:
            raise self._empty[key]
        n_names, n_lines, n_chars = len(self._names), len(self._lines), self._n_chars
        name = self._names[key] = f"n{n_names}"
        try:
            body = self._body(pointer, part) if pointer in self.hard else self._plain(key, pointer, part)
        except _NothingError as error:
            self._empty[key] = error
            while len(self._names) > n_names:  # rules that were written for this one may refer to it
                self._names.popitem()
            del self._lines[n_lines:]
            self._n_chars = n_chars
            raise
        self._lines.append(f"{name}: {body}")
        return name

    def _element(self, pointer: str, node: Any) -> str | None:
        """Return the element for a subschema; None if it allows nothing."""
        if node is False:
            return None
        if pointer not in self._parts:
            return self._json({})
        try:
            return self._rule(pointer)
        except _NothingError as error:
            self._inner = pointer, error
            return None

    def _new(self, kind: str, body: str) -> str:
        """Add a rule or, if the kind is in capitals, a terminal; return its name."""
        name = f"{kind}{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _json(self, node: Node) -> str:
        return f"%json {json.dumps(with_options(node, self._whitespace))}"

    def _plain(self, key: str, pointer: str, node: Node) -> str:
        """Write a part that llguidance's compiler reads, with the definitions that it refers to."""
        definitions: dict[str, Node] = {}
        waiting: list[Any] = [node]
        while waiting:
            for _, part in subschemas(waiting.pop()):
                reference = part.get("$ref")
                if reference is None:
                    continue
                steps = steps_of(reference)
                if len(steps) < 3 or steps[0] != "#" or steps[1] not in ("$defs", "definitions"):
                    self._fail(
                        "#",
                        "$ref",
                        f"{quoted(reference)} cannot be followed in a schema with numbers of over 15 digits, "
                        "'uniqueItems' or look-around; move its target into '$defs'",
                    )
                group, name = steps[1], steps[2]
                if name in self.root.get(group, {}) and name not in definitions.setdefault(group, {}):
                    definitions[group][name] = self.root[group][name]
                    waiting.append(self.root[group][name])
        self.plain[key] = pointer, {**node, **definitions}
        written = self._json(self.plain[key][1])
        self._n_chars += len(written)
        if self._n_chars > _MOST_PLAIN_CHARS:
            self._fail(
                pointer,
                "$ref",
                f"with the definitions that its parts refer to, the schema has over {_MOST_PLAIN_CHARS} characters; "
                "refer to large definitions less often",
            )
        return written

    # ---- parts
    def _body(self, pointer: str, node: Node) -> str:
        keywords = node.keys() & ASSERTIONS
        if "$ref" in keywords:
            self._alone(pointer, "$ref", keywords)
            place = resolved(self.root, node["$ref"])
            if place is None or place[0] not in self._parts:
                self._fail(pointer, "$ref", f"{quoted(node['$ref'])} does not exist")
            return self._rule(place[0])
        if "enum" in keywords or "const" in keywords:
            return self._values(pointer, node, keywords)
        if "allOf" in keywords:
            self._alone(pointer, "allOf", keywords)
            if len(node["allOf"]) != 1:
                self._fail(pointer, "allOf", _NOT_COMBINED)
            return self._element(f"{pointer}/allOf/0", node["allOf"][0]) or self._nothing(pointer, "allOf")
        for keyword in ("anyOf", "oneOf"):
            if keyword in keywords:
                self._alone(pointer, keyword, keywords - {"type"})
                return self._options(pointer, keyword, node)
        return self._typed(pointer, node, keywords)

    def _alone(self, pointer: str, keyword: str, keywords: Iterable[str]) -> None:
        others = sorted(set(keywords) - {keyword})
        if others:
            self._fail(
                pointer, keyword, f"it cannot be combined with {quoted(others[0])} here: {_NOT_COMBINED}"
            )

    def _options(self, pointer: str, keyword: str, node: Node) -> str:
        """Write the alternatives. ``oneOf`` means ``anyOf`` here, because ``_logic`` makes its schemas exclusive."""
        elements = []
        for i, option in enumerate(node[keyword]):
            place = f"{pointer}/{keyword}/{i}"
            elements.append(
                self._narrowed(place, option, node["type"])
                if "type" in node
                else self._element(place, option)
            )
        return " | ".join(element for element in elements if element is not None) or self._nothing(
            pointer, keyword
        )

    def _narrowed(self, pointer: str, option: Any, kinds: str | list[str]) -> str | None:
        """Return the element for an alternative with only the types in ``kinds``, which stand beside the alternatives.

        Returns None if the alternative has none of these types.
        """
        part = target(self.root, option, is_plain=True)
        if part is False:
            return None
        origin = pointer
        if part is not option:
            origin = self._places.get(id(part), pointer)
        part = part if isinstance(part, dict) else {}
        values = listed_values(self.root, part)
        if values is not None:
            n_fitting = sum(_fits(value, {"type": kinds}) for value in values)
            if n_fitting in (0, len(values)):
                return self._element(pointer, option) if n_fitting else None
        listed = part.get("type", list(OF_TYPE))
        names = [listed] if isinstance(listed, str) else listed
        both = [kind for kind in names if kind in kinds or (kind == "integer" and "number" in kinds)]
        if "number" in names and "number" not in both and "integer" in kinds and "integer" not in both:
            both.append("integer")
        if not both:
            return None
        if "type" in part and set(both) == set(names):
            return self._element(pointer, option)
        try:
            # No pointer, whatever its names, begins with a type.
            return self._written(f"{' '.join(both)} {origin}", origin, {**part, "type": both})
        except _NothingError as error:
            self._inner = pointer, error
            return None

    def _typed(self, pointer: str, node: Node, keywords: set[str]) -> str:
        kinds = node.get("type", list(OF_TYPE))
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        for keyword in sorted(keywords - OF_TYPED):
            self._fail(pointer, keyword, f"it is not supported here: {_NOT_COMBINED}")
        elements = []
        for kind in kinds:
            try:
                elements.append(self._of_type(pointer, node, kind))
            except _NothingError as error:
                nothing = error
        if not elements and kinds:
            raise nothing
        return " | ".join(elements)

    def _of_type(self, pointer: str, node: Node, kind: str) -> str:
        if kind == "integer" and any(bound in node for bound in BOUNDS):
            return self._integer(pointer, node)
        if kind == "array":
            return self._array(pointer, node)
        if kind == "object":
            return self._object(pointer, node)
        if kind == "string" and isinstance(node.get("pattern"), str) and LOOK_AROUND.search(node["pattern"]):
            return self._string(pointer, node)
        if kind == "number" and any(bound in node for bound in BOUNDS):
            return self._number(pointer, node)
        group = "number" if kind == "integer" else kind
        if group not in OF_TYPE:
            self._fail(pointer, "type", f"{quoted(kind)} is not a type")
        return self._json({"type": kind, **{k: node[k] for k in OF_TYPE[group] if k in node}})

    def _integer(self, pointer: str, node: Node) -> str:
        if _fraction(node.get("multipleOf", 1)) != 1:
            self._fail(pointer, "multipleOf", "it cannot be combined with bounds beyond 2**53")
        low: int | None = None
        high: int | None = None
        for name, exact in self._bounds(pointer, node):
            if name.endswith("inimum"):
                least = math.ceil(exact) if name == "minimum" else math.floor(exact) + 1
                low = least if low is None else max(low, least)
            else:
                most = math.floor(exact) if name == "maximum" else math.ceil(exact) - 1
                high = most if high is None else min(high, most)
        if low is not None and high is not None and low > high:
            self._nothing(pointer, "minimum", f"no integer is from {low} to {high}")
        return self._new("T", f"/{integer_range(low, high)}/")

    def _number(self, pointer: str, node: Node) -> str:
        if "multipleOf" in node:
            self._fail(pointer, "multipleOf", "it cannot be combined with bounds of over 15 digits")
        bounds = self._bounds(pointer, node)
        texts = [f"/{number_bound(exact, name)}/" for name, exact in bounds]
        low = max((exact for name, exact in bounds if name.endswith("inimum")), default=None)
        high = min((exact for name, exact in bounds if name.endswith("aximum")), default=None)
        if low is not None and high is not None and (low > high or (low == high and len(set(bounds)) > 2)):
            self._nothing(pointer, "minimum", "no number is within the bounds")
        return self._new("T", " & ".join(texts))

    def _bounds(self, pointer: str, node: Node) -> list[tuple[str, Fraction]]:
        bounds = []
        for name in BOUNDS:
            bound = node.get(name)
            if bound is None or bound is False:
                continue
            exact = _fraction(node.get(name.replace("exclusiveM", "m")) if bound is True else bound)
            if exact is None or len(str(abs(int(exact)))) > _MOST_DIGITS:
                self._fail(pointer, name, f"it must be a number of at most {_MOST_DIGITS} digits")
            bounds.append((name, exact))
        return bounds

    def _string(self, pointer: str, node: Node) -> str:
        body = as_lark(node["pattern"], is_json=True)
        if body is None:
            self._fail(
                pointer,
                "pattern",
                f"look-around in {quoted(node['pattern'])} is not supported: only look-ahead outside repetitions, "
                "and look-around at one character or at the end",
            )
        least, most = node.get("minLength", 0), node.get("maxLength")
        if least or most is not None:
            body = f"({body}) & {length_as_lark(least, most)}"
        return self._new("T", f'"\\"" ({body}) "\\""')

    def _value(self, value: Any) -> str:
        """Write a listed value.

        Arrays and objects are written by parts, as in other rules. As one text, the lexer would prefer them to an
        alternative with the same beginning.
        """
        if isinstance(value, list):
            return f'"[" {f" {self._comma} ".join(map(self._value, value))} "]"'
        if isinstance(value, dict):
            members = (f"{_name(name)} {self._colon} {self._value(member)}" for name, member in value.items())
            return f'"{{" {f" {self._comma} ".join(members)} "}}"'
        return json.dumps(json.dumps(value, ensure_ascii=False))

    def _values(self, pointer: str, node: Node, keywords: set[str]) -> str:
        listing = "enum" if "enum" in node else "const"
        for keyword in sorted(keywords - {"enum", "const", "type", *BOUNDS}):
            self._fail(pointer, listing, f"it cannot be combined with {quoted(keyword)} here")
        values = listed_values(self.root, {listing: node[listing]})
        assert values is not None
        if "const" in node:
            values = [value for value in values if identity(value) == identity(node["const"])]
        fitting = [value for value in values if _fits(value, node)]
        if not fitting:
            self._nothing(pointer, listing)
        is_nested = any(isinstance(value, (list, dict)) for value in fitting)
        return self._new("r" if is_nested else "T", " | ".join(map(self._value, fitting)))

    # ---- arrays
    def _array(self, pointer: str, node: Node) -> str:
        first = node.get("prefixItems", [])
        items = node.get("items", True)
        if isinstance(items, list) or "additionalItems" in node:
            self._fail(pointer, "items", "a list of schemas is of draft 2019; use 'prefixItems'")
        least, most = int(node.get("minItems", 0)), node.get("maxItems")
        if node.get("uniqueItems"):
            return self._unique(pointer, node, least, most)
        if COUNTED in node:
            return self._counted(pointer, node, least, most)
        if most is not None:
            first = first[: int(most)]
        item = self._element(f"{pointer}/items", items)
        n = len(first)
        if (item is None and least > n) or (most is not None and most < least):
            self._nothing(pointer, "minItems", f"no array has {least} items")
        low, high = max(0, least - n), None if most is None else int(most) - n
        rest = "" if item is None or high == 0 else self._more(item, low, high, n > 0)
        for i in reversed(range(n)):
            element = self._element(f"{pointer}/prefixItems/{i}", first[i])
            if element is None:
                if i < least:
                    self._nothing(pointer, "prefixItems")
                rest = ""
                continue
            part = f"{self._comma} {element} {rest}" if i else f"{element} {rest}"
            rest = part if i < least else f"({part})?"
        return f'"[" {rest} "]"'

    def _more(self, item: str, low: int, high: int | None, is_after: bool) -> str:
        """Write ``low`` to ``high`` items with commas between them; with ``is_after``, also before the first item."""
        if is_after:
            return f"({self._comma} {item}){{{low},{'' if high is None else high}}}"
        tail = f"({self._comma} {item}){{{max(low - 1, 0)},{'' if high is None else high - 1}}}"
        if high == 1:  # Lark has no repetition of at most 0 times
            tail = ""
        return f"({item} {tail})" + ("" if low else "?")

    def _counted(self, pointer: str, node: Node, least: int, most: Any) -> str:
        """Write an automaton whose state is the number of items and the number of items that ``contains`` counts.

        Both numbers are counted up to a bound. A rule matches the texts that lead to its state. The rule begins with
        the previous state's rule, so the parser's work for an item does not grow with the array.
        """
        first, counted = node.get("prefixItems", []), node[COUNTED]
        fewest, n_max = node.get("minContains", 1), node.get("maxContains")
        n_states = max(len(first), least, 1) if most is None else int(most)
        n_counts = fewest if n_max is None else n_max

        def element(place: str, schema: Any) -> str | None:
            return self._element(f"{pointer}/{place}", schema)

        def items(i: int, n: int) -> list[tuple[int, str]]:
            """Return the possible counts after the item at ``i``, each with the item's element.

            ``n``: the count before the item.
            """
            at = str(i) if i < len(first) else "rest"
            place, schema = (
                (f"prefixItems/{i}", first[i]) if i < len(first) else ("items", node.get("items", True))
            )
            choices = [(n, element(place, schema))]
            if n_max is not None:
                choices = [(n, element(f"{COUNTED}/without {at}", counted[f"without {at}"]))]
            if n < n_counts:
                choices.append((n + 1, element(f"{COUNTED}/with {at}", counted[f"with {at}"])))
            return [(after, item) for after, item in choices if item is not None]

        base = f"c{len(self._lines)}"
        reached = {(0, 0): [""]}  # the options of each state's rule
        waiting = [(0, 0)]
        while waiting:
            i, n = waiting.pop()
            if most is not None and i >= n_states:
                continue
            before = f"{base}_{i}_{n} {self._comma} " if i else ""
            for after, item in items(i, n):
                state = min(i + 1, n_states), after
                if state not in reached:
                    waiting.append(state)
                reached.setdefault(state, []).append(f"{before}{item}")
        self._lines += [f"{base}_{i}_{n}: {' | '.join(options)}" for (i, n), options in reached.items() if i]
        ends = [f"{base}_{i}_{n}" for i, n in reached if i >= max(least, 1) and n >= fewest]
        ends += ['""'] * (least == 0 and fewest == 0)
        if not ends:
            self._nothing(pointer, "contains")
        return f'"[" ({" | ".join(ends)}) "]"'

    def _unique(self, pointer: str, node: Node, least: int, most: Any) -> str:
        """Write each value at most once, in any order. The rule's parameter has a bit for each value, set once used."""
        values = listed_values(self.root, node["items"])
        assert values is not None
        item = target(self.root, node["items"])
        values = [value for value in values if _fits(value, item)]
        n_most = len(values) if most is None else min(int(most), len(values))
        if least > n_most:
            self._nothing(
                pointer, "uniqueItems", f"'minItems' is {least}, but 'items' has {len(values)} values"
            )
        texts = [self._new("r", self._value(value)) for value in values]
        more = f"r{len(self._lines)}"
        options = [
            f"{self._comma} {text} {more}::set_bit({i}) %if and(bit_clear({i}), bit_count_lt(_, {n_most}))"
            for i, text in enumerate(texts)
        ]
        self._lines.append(f'{more}::_: "" %if bit_count_ge(_, {least})\n | ' + "\n | ".join(options))
        begun = [f"{text} {more}::{1 << i}" for i, text in enumerate(texts)] if n_most else []
        first = self._new("r", " | ".join(begun + ['""'] * (least == 0)))
        return f'"[" {first} "]"'

    # ---- objects
    def _object(self, pointer: str, node: Node) -> str:
        properties = node.get("properties", {})
        required = list(dict.fromkeys(node.get("required", ())))
        others = node.get("additionalProperties", True)
        patterns = node.get("patternProperties") or {}
        if patterns and (properties or required or others is not False or len(patterns) > 1):
            self._fail(pointer, "patternProperties", f"only one pattern and nothing else: {_NOT_COMBINED}")
        fields: list[tuple[str, bool]] = []
        for name in [*properties, *(name for name in required if name not in properties)]:
            place = f"{pointer}/additionalProperties"
            if name in properties:
                place = pointer_to(f"{pointer}/properties", name)
            value = self._element(place, properties.get(name, others))
            if value is not None:
                fields.append((f"{_name(name)} {self._colon} {value}", name in required))
            elif name in required:
                self._nothing(pointer, "required")
        n_required = len(required)
        least, most = int(node.get("minProperties", 0)), node.get("maxProperties")
        limited = most is not None or least > n_required
        if limited and len(fields) > n_required:
            keyword = "maxProperties" if most is not None else "minProperties"
            self._fail(pointer, keyword, "it is supported only if all 'properties' are in 'required'")
        extra: str | None = None
        if patterns:
            ((pattern, value_schema),) = patterns.items()
            value = self._element(pointer_to(f"{pointer}/patternProperties", pattern), value_schema)
            if value is not None:
                extra = f"{self._json({'type': 'string', 'pattern': pattern})} {self._colon} {value}"
        else:
            value = self._element(f"{pointer}/additionalProperties", others)
            if value is not None:
                taken = " | ".join(map(_name, dict.fromkeys([*properties, *required])))
                name_of = self._new("T", f"{_NAME} & ~({taken})" if taken else _NAME)
                extra = f"{name_of} {self._colon} {value}"
        low, high = max(0, least - n_required), None if most is None else int(most) - n_required
        if (high is not None and high < 0) or (extra is None and low > 0):
            self._nothing(pointer, "minProperties" if low else "maxProperties")
        if extra is not None and high != 0:
            fields.append((self._more(f"({extra})", max(low, 1), high, False), low > 0))
        return '"{" ' + self._members(fields) + ' "}"'

    def _members(self, fields: Sequence[tuple[str, bool]]) -> str:
        """Write the members in order, with or without each optional member. Each member adds at most three rules."""
        after = first = '""'
        for field, is_required in reversed(fields):
            member = self._new("r", field)
            after_here = f"{self._comma} {member} {after}"
            first_here = f"{member} {after}"
            if is_required:
                after, first = self._new("r", after_here), self._new("r", first_here)
            else:
                first = self._new("r", f"{first_here} | {first}")
                after = self._new("r", f"{after_here} | {after}")
        return first

    # ---- errors
    def _nothing(self, pointer: str, keyword: str, reason: str = "no value satisfies it") -> NoReturn:
        """Raise the error of the part inside that was left out and made this one empty, or else one for this part."""
        if self._inner is not None and self._inner[0].startswith(f"{pointer}/"):
            raise self._inner[1]
        raise _NothingError(f"json_schema at {pointer}: {quoted(keyword)}: {reason}")

    def _fail(self, pointer: str, keyword: str, reason: str) -> NoReturn:
        raise InvalidRequestError(f"json_schema at {pointer}: {quoted(keyword)}: {reason}")


_NOT_COMBINED = (
    "numbers of over 15 digits, 'uniqueItems' and look-around are not supported in combined schemas"
)


def _name(name: str) -> str:
    """Write a member's name as a literal of Lark."""
    return json.dumps(json.dumps(name, ensure_ascii=False))


def _is_hard(part: Node) -> bool:
    return (
        _is_inexact(part)
        or part.get("uniqueItems") is True
        or COUNTED in part
        or any(_has_large(part[key]) for key in ("enum", "const") if key in part)
        or (isinstance(part.get("pattern"), str) and LOOK_AROUND.search(part["pattern"]) is not None)
    )


def _is_inexact(part: Node) -> bool:
    """Return whether llguidance would not enforce the bounds exactly."""
    kinds = part.get("type", list(OF_TYPE))
    if "number" in kinds and (_bound_leaks(part) or any(_is_long(part.get(bound)) for bound in BOUNDS)):
        return True
    if "integer" not in kinds and "number" not in kinds:
        return False
    # The integer next to an exclusive bound of 2**53 is beyond it.
    is_edge = any(
        abs(_fraction(part.get(name)) or 0) == _EXACT for name in BOUNDS if name.startswith("exclusive")
    )
    return is_edge or any(_beyond(part.get(bound)) for bound in BOUNDS)


def _bound_leaks(part: Node) -> bool:
    """Return whether llguidance (1.9.1) would accept an excluded bound, such as 7 for "above 7, at most 7.5"."""
    bounds: list[Fraction | None] = []
    whole = False
    for inclusive, exclusive, narrower in (
        ("minimum", "exclusiveMinimum", max),
        ("maximum", "exclusiveMaximum", min),
    ):
        bound: Any = part.get(exclusive)
        if bound is True:  # draft 4
            bound = part.get(inclusive)
        exact = _fraction(bound)
        whole = whole or (exact is not None and exact.denominator == 1)
        both = [number for number in (exact, _fraction(part.get(inclusive))) if number is not None]
        bounds.append(narrower(both) if both else None)
    low, high = bounds
    return whole and low is not None and high is not None and high - low < 1


def _beyond(bound: Any) -> bool:
    exact = _fraction(bound)
    return exact is not None and abs(exact) > _EXACT


def _is_long(bound: Any) -> bool:
    """Return whether a bound has a fraction and too many digits for the arithmetic of doubles."""
    exact = _fraction(bound)
    if exact is None or exact.denominator == 1:
        return False
    whole, digits = _digits(abs(exact))
    return len(f"{whole}{digits}".lstrip("0")) > 15


def _has_large(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_large, value.values()))
    if isinstance(value, list):
        return any(map(_has_large, value))
    return isinstance(value, (int, float)) and _beyond(value)


def _fraction(value: Any) -> Fraction | None:
    """Return the exact number that JSON writes, even if a double cannot hold it; None for other values."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return Fraction(value) if isinstance(value, int) else Fraction(Decimal(repr(value)))


def _fits(value: Any, node: Node) -> bool:
    """Return whether a listed value has the type and is within the bounds of the schema that lists it."""
    kinds = node.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    number = _fraction(value)
    is_integer = number is not None and number.denominator == 1
    if kinds is not None and json_type(value) not in kinds and not (is_integer and "integer" in kinds):
        return False
    if number is None:
        return True
    low, above, high, below = (_fraction(node.get(bound)) for bound in BOUNDS)
    return (
        (low is None or number >= low)
        and (above is None or number > above)
        and (high is None or number <= high)
        and (below is None or number < below)
    )
