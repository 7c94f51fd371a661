"""Rewrites JSON schema keywords that combine or negate schemas as keywords that a grammar can follow.

A grammar can express "one of these" and "all of these", but not "not this". So ``not``, ``if``, overlapping schemas of
``oneOf``, and keywords that depend on the presence of properties become alternatives. A negated ``required`` becomes
forbidden properties, and a negated ``enum`` becomes all other values. The result never allows less than the schema. If
the result allows more, a warning names the keyword and its place.

Alternatives multiply, so their number, their length and the number of comparisons are bounded. Beyond a bound, the
result allows more than the keyword, with the warning.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.structured._references import with_definitions
from llamapipe.structured._rewrite import ASSERTIONS, BOUNDS, OF_TYPED, Node
from llamapipe.structured.formats import FORMATS
from llamapipe.structured.schema import (
    COUNTED,
    MAPS,
    ONE,
    identity,
    json_type,
    pointer_to,
    ref_stands_alone,
    resolved,
    subschemas,
)

# The most alternatives of a part. The first number is tried first, and the next ones if the grammar is too large.
WAYS: Final = (32, 8, 1, 0)
MAX_ONE_OF: Final = 200  # schemas of a oneOf that are compared with each other
_MAX_CHARS = 2**16  # in the schemas of all alternatives
_MAX_STEPS = 20_000  # comparisons and denials for one schema, about a second
_MAX_DEPTH = 40  # levels of schemas that are compared or denied
_FEW = 4  # alternatives that are written although they allow more
_MAX_STATES = 200  # positions times counts of an automaton that counts items
_MAX_TRIE = 20_000  # characters of a pattern that excludes texts

KINDS = {
    "null": {"null"},
    "boolean": {"boolean"},
    "integer": {"integer"},
    "number": {"integer", "fraction"},
    "string": {"string"},
    "array": {"array"},
    "object": {"object"},
}
_ALL = frozenset(kind for kinds in KINDS.values() for kind in kinds)
_OF_STRINGS = ("minLength", "maxLength", "pattern", "format")
# Keywords that this module replaces.
_LOGIC = {
    "not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "contains", "minContains",
    "maxContains", "minProperties", "maxProperties",
}  # fmt: skip

_UNEVALUATED = {"unevaluatedProperties", "unevaluatedItems"}
_WHICH_HOLD = "which of the combined schemas hold cannot be told by a grammar"

_COUNTS = {"minProperties", "maxProperties", "minItems", "maxItems"}

# One alternative: literals that must all be true. "+name": an object has the member. "-name": an object lacks the
# member. "=...": the JSON text of a schema. "+" and "-" allow all values that are not objects.
Way = tuple[str, ...]
Ways = list[Way]
Denial = tuple[Ways, bool]  # alternatives, and whether they allow only values that a schema excludes
_NOTHING: Final[Node] = {"enum": []}


def without_logic(
    schema: Node, max_ways: int = WAYS[0], counts_items: bool = False
) -> tuple[Node, list[str]]:
    """Return a copy that a grammar can express, and a warning for each keyword whose replacement allows more.

    ``max_ways``: the most alternatives of a part. ``counts_items``: ``contains`` stays, and ``COUNTED`` is added, where
    ``SchemaGrammar`` can count the items.

    ``oneOf`` stays and means ``anyOf``, because its schemas become exclusive; if they do not, there is a warning.
    Raises InvalidRequestError, with keyword and pointer, if no value satisfies a keyword.
    """
    return _Rewriter(with_definitions(schema), max_ways, counts_items).rewritten()


class _Rewriter:
    def __init__(self, root: Node, max_ways: int, counts_items: bool) -> None:
        self._root = root
        self._counts_items = counts_items
        self._max_ways = max_ways
        self._warnings: dict[tuple[str, str], str] = {}
        self._refused = ""
        self._place = "#"  # pointer to the schema whose keywords are being replaced
        self._ref_stands_alone = ref_stands_alone(root)
        # In a part with an identifier, "#" may mean that part.
        self._has_resources = any(
            isinstance(part.get(keyword), str)
            for pointer, part in subschemas(root, logic=True)
            for keyword in ("$id", "id")
            if pointer != "#"
        )
        self._n_steps = 0
        self._n_chars = 0
        # These are keyed by the node's id(). They hold the node, so that no other object gets the same id.
        self._flat: dict[int, tuple[Any, list[Node]]] = {}
        self._kinds: dict[int, tuple[Node, frozenset[str]]] = {}
        self._listed: dict[int, tuple[Node, frozenset[str]]] = {}
        self._known: dict[tuple[int, ...], tuple[Sequence[Any], Sequence[Any], bool]] = {}
        self._disjoint: dict[tuple[int, int, frozenset[str]], tuple[Any, Any, bool]] = {}
        self._nodes: dict[str, Any] = {}  # schemas by literal
        self._literals: dict[int, tuple[Any, str]] = {}  # literals by the node's id(), as above
        self._begun: set[int] = set()  # ids of nodes whose literals are written or being written
        self._depth = 0

    def rewritten(self) -> tuple[Node, list[str]]:
        out = self._positive(self._root, "#", ())
        if not isinstance(out, dict):
            raise InvalidRequestError(self._refused)
        return out, [*self._warnings.values()]

    # ---- the schema with its keywords replaced
    def _positive(self, node: Any, pointer: str, within: tuple[Any, ...]) -> Any:
        """Return a schema without the keywords that this module replaces; False if no value satisfies it.

        ``within``: other schemas that the same value satisfies.
        """
        if not isinstance(node, dict):
            return node
        if "$ref" in node and self._ref_stands_alone:
            node = {key: node[key] for key in node if key == "$ref" or key in ("$defs", "definitions")}
        if node.keys() & _UNEVALUATED:
            node = self._evaluated(node, pointer)
        out: Node = {}
        for key, value in node.items():
            if key in _LOGIC or key == COUNTED:
                continue
            place = f"{pointer}/{key}"
            if key in ONE and isinstance(value, dict):
                out[key] = self._positive(value, place, ())
            elif key in ("items", "prefixItems") and isinstance(value, list):
                out[key] = [self._positive(item, f"{place}/{i}", ()) for i, item in enumerate(value)]
            elif key in MAPS and isinstance(value, dict):
                out[key] = {
                    name: self._positive(schema, pointer_to(place, name), ())
                    for name, schema in value.items()
                }
            elif key in ("allOf", "anyOf"):
                around = (*within, _without(node, key))
                out[key] = [self._positive(option, f"{place}/{i}", around) for i, option in enumerate(value)]
            elif key == "oneOf":
                out[key] = self._one_of(value, pointer, (*within, _without(node, key)))
                if all(option is False for option in out[key]):
                    return self._nothing(
                        pointer, key, "no value satisfies exactly one of its schemas; use 'anyOf'"
                    )
            else:
                out[key] = value
        if not _LOGIC & node.keys():
            return out
        self._place = pointer
        around = (*within, _without(node))
        counted = self._counted(node, pointer, within) if "contains" in node else None
        if counted is not None:
            out |= counted
            node = {key: value for key, value in node.items() if key not in counted}
        ways: Ways = [()]
        for keyword, more in sorted(self._clauses(node, pointer, around), key=lambda clause: len(clause[1])):
            product = self._product(ways, more, around)
            if product is None:
                self._warn(pointer, keyword, f"it takes more than {self._max_ways} alternatives")
            elif not product:
                return self._nothing(pointer, keyword, "no value satisfies it")
            else:
                ways = product
        if len(ways) == 1:
            ways = [_merged(out, ways[0])]
        if ways != [()]:
            out["allOf"] = [*out.get("allOf", ()), self._schema_of(ways)]
        return out

    def _evaluated(self, node: Node, pointer: str) -> Node:
        """Replace ``unevaluatedProperties`` and ``unevaluatedItems`` with other keywords of members and items.

        Members and items that a subschema evaluates only for some values are allowed for all.
        """
        out = {key: value for key, value in node.items() if key not in _UNEVALUATED}
        parts = self._all_parts(node)
        # These parts apply to every value. Whether the other parts apply, a grammar cannot tell.
        certain = {id(part) for part in self._parts(node)}
        is_known = all("$ref" not in part or self._target(part["$ref"]) is not None for part in parts)
        is_exact = is_known and all(id(part) in certain for part in parts)
        rest = node.get("unevaluatedProperties", True)
        if rest is not True and rest != {} and "additionalProperties" not in node:
            own = [part for part in parts if part is not node]
            if is_known and not any(
                {"additionalProperties", "unevaluatedProperties"} & part.keys() for part in own
            ):
                for keyword in ("properties", "patternProperties"):
                    schemas = node.get(keyword, {})
                    names = {
                        name: True for part in own for name in part.get(keyword, {}) if name not in schemas
                    }
                    if names or schemas:
                        out[keyword] = {**schemas, **names}
                out["additionalProperties"] = rest
            if not is_exact:
                self._warn(pointer, "unevaluatedProperties", _WHICH_HOLD)
        rest = node.get("unevaluatedItems", True)
        if rest is not True and rest != {}:
            is_open = not is_known or any(
                isinstance(part.get("items"), (dict, bool))
                or "contains" in part
                or ("additionalItems" in part and isinstance(part.get("items"), list))
                or ("unevaluatedItems" in part and part is not node)
                for part in parts
            )
            n_first = max(map(_n_first, parts))
            is_list = any(isinstance(part.get("items"), list) for part in parts)  # before draft 2020-12
            if not is_open and rest is False:
                out["maxItems"] = min(n_first, node.get("maxItems", n_first))
            elif not is_open and not (is_list and n_first):
                if n_first:
                    first = node.get("prefixItems", [])
                    out["prefixItems"] = [*first, *[True] * (n_first - len(first))]
                out["items"] = rest
            if not is_exact or any("contains" in part for part in parts) or (is_list and rest is not False):
                self._warn(pointer, "unevaluatedItems", _WHICH_HOLD)
        return out

    def _all_parts(self, node: Any) -> list[Node]:
        """Return the schemas that may apply to the same value, including conditions and alternatives."""
        parts: list[Node] = []
        waiting = [node]
        while waiting and len(parts) < 500:
            for part in self._parts(waiting.pop()):
                if any(part is other for other in parts):
                    continue
                parts.append(part)
                for keyword in ("anyOf", "oneOf"):
                    waiting += part.get(keyword, ())
                waiting += [part[keyword] for keyword in ("if", "then", "else") if keyword in part]
                for keyword in ("dependentSchemas", "dependencies"):
                    waiting += [
                        schema for schema in part.get(keyword, {}).values() if isinstance(schema, dict)
                    ]
        return parts

    def _clauses(self, node: Node, pointer: str, around: tuple[Any, ...]) -> Iterator[tuple[str, Ways]]:
        """Yield each keyword to be replaced with its alternatives.

        Warns about keywords that cannot be enforced.
        """
        if "not" in node:
            ways, exact = self._denied(node["not"], around)
            if not exact:
                self._warn(pointer, "not", "what it excludes cannot be told by a grammar")
            yield "not", ways
        if "if" in node:
            yield from self._conditions(node, pointer, around)
        names: dict[str, Any] = dict(node.get("dependentRequired", {}))
        schemas: dict[str, Any] = dict(node.get("dependentSchemas", {}))
        for name, value in node.get("dependencies", {}).items():
            (names if isinstance(value, list) else schemas)[name] = value
        keywords = [key for key in ("dependencies", "dependentRequired", "dependentSchemas") if key in node]
        for name, others in names.items():
            if others:
                needed = self._pruned([tuple(f"+{other}" for other in others)], around)
                yield keywords[0], [*self._pruned([(f"-{name}",)], around), *needed]
        for name, schema in schemas.items():
            if schema is True or schema == {}:
                continue
            absent = self._pruned([(f"-{name}",)], around)
            with_it: Ways = [] if schema is False else [(f"+{name}", self._literal(schema))]
            yield keywords[-1], [*absent, *self._pruned(with_it, around)]
        if "contains" in node:
            yield from self._contains(node, pointer)
        if "minProperties" in node or "maxProperties" in node:
            counts = self._counts(node, pointer, around)
            if counts is not None:
                yield "minProperties" if "minProperties" in node else "maxProperties", counts

    def _conditions(self, node: Node, pointer: str, around: tuple[Any, ...]) -> Iterator[tuple[str, Ways]]:
        condition = node["if"]
        premise = self._literal(condition)
        for keyword, holds in (("then", True), ("else", False)):
            if keyword not in node or node[keyword] is True:
                continue
            follows = self._literal(node[keyword])
            if holds:
                ways, exact = self._denied(condition, around)
                if not exact:
                    self._warn(pointer, "if", "when it does not hold cannot be told by a grammar")
                # The condition precedes its consequence, so its members come first as well.
                ways = [*ways, (premise, follows)]
            else:
                ways = [(premise,), (follows,)]
            yield "if", self._pruned(ways, around)

    def _contains(self, node: Node, pointer: str) -> Iterator[tuple[str, Ways]]:
        least, most = node.get("minContains", 1), node.get("maxContains")
        if least == 0 and most is None:
            return
        self._warn(pointer, "contains", "a grammar cannot look for an item")
        if least > 0:
            yield (
                "contains",
                [(_text({"type": _all_types_but("array")}),), (_text({"minItems": least}),)],
            )

    def _counted(self, node: Node, pointer: str, within: tuple[Any, ...]) -> Node | None:
        """Return ``contains`` with the schemas of the items that it counts, and of the other items.

        Returns None if the items cannot be counted, because keywords combine the schema with others, or because there
        are too many positions and counts. The result may allow more than the schema, but never less.
        """
        least, most = int(node.get("minContains", 1)), node.get("maxContains")
        first, items = node.get("prefixItems", []), node.get("items", True)
        n_positions = max(len(first), int(node.get("minItems", 0)), int(node.get("maxItems", 0)), 1)
        n_counts = (least if most is None else int(most)) + 1
        if (
            not self._counts_items
            or within
            or "array" not in _kinds(node)
            or (node.keys() & ASSERTIONS) - OF_TYPED
            or not isinstance(items, (dict, bool))
            or node.get("uniqueItems")
            or (most is not None and most < least)
            or n_positions * n_counts > _MAX_STATES
        ):
            return None
        counted: Node = {}
        for name, item in [*((str(i), schema) for i, schema in enumerate(first)), ("rest", items)]:
            if item is False:
                counted |= {f"with {name}": False, f"without {name}": False}
                continue
            inside: tuple[Any, ...] = (item,) if isinstance(item, dict) else ()
            is_apart = bool(inside) and self._are_disjoint((node["contains"],), inside)
            element = self._positive(item, f"{pointer}/items", ())
            other = self._positive(node["contains"], f"{pointer}/contains", inside)
            both = [part for part in (element, other) if part is not True and part != {}]
            counted[f"with {name}"] = (
                False if is_apart or False in both else both[0] if len(both) == 1 else {"allOf": both}
            )
            if most is None:
                continue
            ways, exact = self._denied(node["contains"], inside)
            if not exact:
                self._warn(pointer, "maxContains", "what it does not count cannot be told by a grammar")
            rest = [] if element is True or element == {} else [element]
            counted[f"without {name}"] = False if not ways else {"allOf": [*rest, self._schema_of(ways)]}
        limits: Node = {key: int(node[key]) for key in ("minContains", "maxContains") if key in node}
        return {"contains": node["contains"], **limits, COUNTED: counted}

    def _counts(self, node: Node, pointer: str, around: tuple[Any, ...]) -> Ways | None:
        """Return alternatives for ``minProperties`` and ``maxProperties`` that say which listed members are present.

        Returns None if the schema enforces the limits anyway, or with a warning, if there are too many alternatives.
        """
        listed: dict[str, bool] = {}  # members, with True if they may occur
        required: dict[str, None] = {}
        is_open = True
        for part in (part for other in around for part in self._parts(other)):
            for name, schema in part.get("properties", {}).items():
                listed[name] = listed.get(name, True) and schema is not False
            required.update(dict.fromkeys(part.get("required", ())))
            is_open &= part.get("additionalProperties", True) is not False or bool(
                part.get("patternProperties")
            )
        optional = [name for name, may in listed.items() if may and name not in required]
        n = len(required)
        n_most = math.inf if is_open else n + len(optional)
        least, most = int(node.get("minProperties", 0)), node.get("maxProperties", math.inf)
        if least > min(most, n_most) or n > most:  # no object satisfies both limits
            return self._pruned([(_text({"type": _all_types_but("object")}),)], around)
        if least <= n and most >= n_most:
            return None
        counts = _text({key: int(node[key]) for key in ("minProperties", "maxProperties") if key in node})
        if is_open and least > n + 1:
            self._warn(
                pointer, "minProperties", "a grammar cannot see that members which are not listed differ"
            )
        if not optional:
            return [(counts,)]
        low, high = max(0, least - n), min(len(optional), most - n)
        if most >= n_most:  # only the lower limit matters
            few = range(low) if is_open else range(0)
            ways = self._subsets(optional, few, counts), self._subsets(optional, [low], "", rest=False)
        elif not is_open and low == 0:
            ways = self._subsets(optional, [len(optional) - int(high)], "", rest=False, sign="-"), []
        else:
            ways = (
                self._subsets(
                    optional, range(0 if is_open else low, int(high) + 1), counts if is_open else ""
                ),
                [],
            )
        if ways[0] is None or ways[1] is None:
            keyword = "minProperties" if "minProperties" in node else "maxProperties"
            self._warn(pointer, keyword, f"it takes more than {self._max_ways} alternatives")
            return None
        return [*ways[0], *ways[1]]

    def _subsets(
        self, names: Sequence[str], sizes: Iterable[int], more: str, *, rest: bool = True, sign: str = "+"
    ) -> Ways | None:
        """Return an alternative for each subset of ``names`` with one of ``sizes``; None if there are too many.

        The members of the subset are present (``sign`` "+") or absent ("-"). With ``rest``, the others are absent.
        ``more``: a literal that is added to each alternative; or empty.
        """
        sizes = list(sizes)
        if sum(math.comb(len(names), size) for size in sizes) > self._max_ways:
            return None
        ways = []
        for chosen in (chosen for size in sizes for chosen in itertools.combinations(names, size)):
            lacks = [f"-{name}" for name in names if name not in chosen] if rest else []
            ways.append((*(f"{sign}{name}" for name in chosen), *lacks, *([more] if more else [])))
        return ways

    # ---- oneOf
    def _one_of(self, options: list[Any], pointer: str, around: tuple[Any, ...]) -> list[Any]:
        """Return the schemas of a ``oneOf``, each without the values that another schema allows.

        If a grammar cannot separate two schemas, they may still overlap, and there is a warning.
        """
        out = [self._positive(option, f"{pointer}/oneOf/{i}", around) for i, option in enumerate(options)]
        self._place = pointer
        pairs = self._overlaps(options, around)
        if pairs is None:
            self._warn(
                pointer, "oneOf", f"at most {MAX_ONE_OF} schemas are compared; it is taken for 'anyOf'"
            )
            return out
        overlapping: dict[int, list[int]] = {}
        for i, j in pairs:
            overlapping.setdefault(i, []).append(j)
            overlapping.setdefault(j, []).append(i)
        unclear: tuple[int, int] | None = None
        for i, others in overlapping.items():
            inside = (*around, options[i])
            ways: Ways = [()]
            for j in others:
                more, exact = self._denied(options[j], inside)
                product = self._product(ways, more, inside) if exact or len(more) <= _FEW else None
                if product is None or not exact:
                    unclear = unclear or (min(i, j), max(i, j))
                ways = ways if product is None else product
            if ways != [()]:
                out[i] = False if not ways else {"allOf": [out[i], self._schema_of(ways)]}
        if unclear is not None:
            self._warn(
                pointer, "oneOf", f"its schemas {unclear[0]} and {unclear[1]} may allow the same value"
            )
        return out

    def _overlaps(self, options: list[Any], around: tuple[Any, ...]) -> list[tuple[int, int]] | None:
        """Return the pairs of schemas that may allow the same value; None if there are too many schemas."""
        pairs = []
        values = [_values(option) if isinstance(option, dict) else None for option in options]
        seen: dict[str, int] = {}
        for i, listed in enumerate(values):
            for value in listed or ():
                first = seen.setdefault(identity(value), i)
                if first != i:
                    pairs.append((first, i))
        rest = [i for i, listed in enumerate(values) if listed is None]
        if len(rest) * len(options) > MAX_ONE_OF**2:
            return None
        for i in rest:
            for j in range(len(options)):
                if (j < i or values[j] is not None) and i != j:
                    inside = (*around, options[i])
                    if not self._are_disjoint((options[j],), inside):
                        pairs.append((min(i, j), max(i, j)))
        return list(dict.fromkeys(pairs))

    # ---- denied schemas
    def _denied(self, node: Any, within: tuple[Any, ...]) -> Denial:
        """Return alternatives for all values that a schema excludes, and whether they allow only these values.

        ``within``: other schemas that the same value satisfies.
        """
        self._n_steps += 1
        if node is True or node == {}:
            return [], True
        if node is False:
            return [()], True
        if self._n_steps > _MAX_STEPS or self._n_chars > _MAX_CHARS or self._depth > _MAX_DEPTH:
            return [()], False
        self._depth += 1
        try:
            ways, exact = _joined(self._denials(node, within))
            ways = _shortest(self._pruned(ways, within))
            self._n_chars += sum(len(literal) for way in ways for literal in way)
            return (ways, exact) if len(ways) <= self._max_ways else ([()], False)
        finally:
            self._depth -= 1

    def _denials(self, node: Node, within: tuple[Any, ...]) -> Iterator[Denial]:
        """Yield the alternatives for the values that each keyword excludes; see ``_denied``."""
        if "$ref" in node:
            target = self._target(node["$ref"])
            yield ([()], False) if target is None else self._denied(target[1], within)
            if self._ref_stands_alone:
                return
        kinds = self._kinds_of(within) & _kinds(node)
        if "type" in node:
            yield self._denied_kinds(node, self._kinds_of(within))
        yield from self._denied_values(node, within)
        for keyword, value in node.items():
            if keyword in _OF_KIND and not _OF_KIND[keyword] & kinds:
                continue
            yield from self._denial(keyword, value, node, within)

    def _denied_kinds(self, node: Node, allowed: frozenset[str]) -> Denial:
        others = allowed - _kinds({"type": node["type"]})
        names = sorted(kind for kind in KINDS if kind != "integer" and KINDS[kind] & others)
        if "integer" in others and "fraction" not in others:
            names = [name if name != "number" else "integer" for name in names]
        exact = not ("fraction" in others and "integer" not in others and "integer" in allowed)
        return ([(_text({"type": names if len(names) != 1 else names[0]}),)] if names else []), exact

    def _denied_values(self, node: Node, within: tuple[Any, ...]) -> Iterator[Denial]:
        for keyword in ("enum", "const"):
            if keyword not in node:
                continue
            values = node["enum"] if keyword == "enum" else [node["const"]]
            left_out = set(map(identity, values))
            listed = next(
                (v for schema in within for part in self._parts(schema) if (v := _values(part)) is not None),
                None,
            )
            if listed is not None:
                rest = [value for value in listed if identity(value) not in left_out]
                yield ([(_text({"enum": rest}),)] if rest else []), True
                continue
            yield _other_values(values, self._kinds_of(within))

    def _denial(self, keyword: str, value: Any, node: Node, within: tuple[Any, ...]) -> Iterator[Denial]:
        """Yield the alternatives for the values that one keyword excludes on its own."""
        is_object, is_array = _text({"type": "object"}), {"type": "array"}
        match keyword:
            case "required":
                yield [(is_object, f"-{name}") for name in value], True
            case "properties":
                yield from self._denied_properties(value, within)
            case "additionalProperties" if value is not True and value != {}:
                yield self._denied_others(node, within)
            case "patternProperties" | "propertyNames" | "unevaluatedProperties":
                yield [(is_object,)], False
            case "minProperties":
                if value > 0:
                    yield ([(_text({"const": {}}),)], True) if value <= 1 else ([(is_object,)], False)
            case "maxProperties":
                yield [(_text({"type": "object", "minProperties": int(value) + 1}),)], False
            case "minItems":
                yield ([(_text({**is_array, "maxItems": int(value) - 1}),)] if value > 0 else []), True
            case "maxItems":
                yield [(_text({**is_array, "minItems": int(value) + 1}),)], True
            case "items" | "prefixItems" if isinstance(value, list):
                yield from self._denied_items(value, keyword)
            case "items" | "additionalItems" | "unevaluatedItems":
                if value is not True and value != {}:
                    n = len(node.get("prefixItems", ())) if keyword == "items" else 0
                    yield [(_text({**is_array, "minItems": n + 1}),)], value is False and keyword == "items"
            case "uniqueItems":
                yield ([(_text({**is_array, "minItems": 2}),)] if value else []), not value
            case "contains" if node.get("minContains", 1) != 0 or "maxContains" in node:
                ways, exact = self._denied(value, ())
                exact &= node.get("minContains", 1) == 1 and "maxContains" not in node
                inside = {"items": self._schema_of(ways)} if exact else {}
                yield [(_text({**is_array, **inside}),)], exact
            case "minLength":
                yield ([(_text({"type": "string", "maxLength": int(value) - 1}),)] if value > 0 else []), True
            case "maxLength":
                yield [(_text({"type": "string", "minLength": int(value) + 1}),)], True
            case "pattern":
                yield [(_text({"type": "string"}),)], False
            case "format" if value in FORMATS:
                yield [(_text({"type": "string"}),)], False
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                yield from self._denied_bound(keyword, value, node)
            case "multipleOf":
                yield [(_text({"type": "number"}),)], False
            case "allOf":
                yield from (self._denied(option, within) for option in value)
            case "anyOf":
                yield self._denied_all(value, within)
            case "oneOf":
                yield self._denied_one_of(value, within)
            case "not":
                yield [(self._literal(value),)], True
            case "if":
                yield from self._denied_condition(node, within)
            case "dependentRequired" | "dependencies" | "dependentSchemas":
                yield from self._denied_dependencies(value, within)
            case "$dynamicRef" | "$recursiveRef":
                yield [()], False

    def _denied_properties(self, properties: Node, within: tuple[Any, ...]) -> Iterator[Denial]:
        for name, schema in properties.items():
            inside = tuple(
                other for whole in within for part in self._parts(whole) for other in _schemas_of(part, name)
            )
            if any(self._same(schema, other) for other in inside):
                continue  # the member satisfies this schema anyway
            ways, exact = self._denied(schema, inside)
            if ways == [()]:
                yield [(_text({"type": "object"}), f"+{name}")], exact
            elif ways:
                denied = {"type": "object", "properties": {name: self._schema_of(ways)}, "required": [name]}
                yield [(_text(denied),)], exact
            else:
                yield [], exact

    def _denied_others(self, node: Node, within: tuple[Any, ...]) -> Denial:
        """Return alternatives with a member that violates ``additionalProperties``."""
        schema = node["additionalProperties"]
        for whole in within:
            for part in self._parts(whole):
                if part.get("additionalProperties") is False and not part.get("patternProperties"):
                    names = [
                        name for name in part.get("properties", {}) if name not in node.get("properties", {})
                    ]
                    ways, exact = _joined(self._denied_properties(dict.fromkeys(names, schema), within))
                    return ways, exact and (not names or not node.get("patternProperties"))
        return [(_text({"type": "object"}),)], False

    def _denied_items(self, items: list[Any], keyword: str) -> Iterator[Denial]:
        for i, schema in enumerate(items):
            ways, exact = self._denied(schema, ())
            first = [*[True] * i, self._schema_of(ways)]
            denied = {"type": "array", "minItems": i + 1, keyword: first}
            yield ([(_text(denied),)] if ways else []), exact

    def _denied_bound(self, keyword: str, value: Any, node: Node) -> Iterator[Denial]:
        if isinstance(value, bool):
            return  # a keyword of draft 4, which is read with its bound
        is_minimum = keyword.endswith("inimum")
        exclusive = "exclusiveMinimum" if is_minimum else "exclusiveMaximum"
        other = ("maximum", "exclusiveMaximum") if is_minimum else ("minimum", "exclusiveMinimum")
        is_exclusive = keyword == exclusive or node.get(exclusive) is True
        yield [(_text({"type": "number", other[0] if is_exclusive else other[1]: value}),)], True

    def _denied_all(self, options: list[Any], within: tuple[Any, ...]) -> Denial:
        """Return alternatives for the values that no schema of ``options`` allows."""
        ways: Ways = [()]
        exact = True
        for option in options:
            if self._are_disjoint((option,), within):
                continue
            more, is_exact = self._denied(option, within)
            exact &= is_exact
            product = self._product(ways, more, within)
            if product is None:
                exact = False
            else:
                ways = product
        return ways, exact

    def _denied_one_of(self, options: list[Any], within: tuple[Any, ...]) -> Denial:
        pairs = self._overlaps(options, within)
        if pairs is None or len(pairs) > self._max_ways // 2:
            return [()], False
        ways, exact = self._denied_all(options, within)
        both = [(self._literal(options[i]), self._literal(options[j])) for i, j in pairs]
        return [*ways, *both], exact

    def _denied_condition(self, node: Node, within: tuple[Any, ...]) -> Iterator[Denial]:
        premise = self._literal(node["if"])
        for keyword in ("then", "else"):
            if keyword not in node:
                continue
            when: Ways = [(premise,)]
            is_certain = True
            if keyword == "else":
                when, is_certain = self._denied(node["if"], within)
            more, exact = self._denied(node[keyword], within)
            product = self._product(when, more, within)
            yield when if product is None else product, is_certain and exact and product is not None

    def _denied_dependencies(self, value: Node, within: tuple[Any, ...]) -> Iterator[Denial]:
        is_object = _text({"type": "object"})
        for name, needed in value.items():
            if isinstance(needed, list):
                yield [(is_object, f"+{name}", f"-{other}") for other in needed], True
            else:
                ways, exact = self._denied(needed, within)
                yield [(is_object, f"+{name}", *way) for way in ways], exact

    # ---- alternatives
    def _literal(self, node: Any) -> str:
        """Return a schema as a literal, with its keywords replaced.

        If there is too much text or the schema contains itself, warns and returns a literal that allows all values.
        """
        entry = self._literals.get(id(node))
        if entry is None and (self._n_chars > _MAX_CHARS or id(node) in self._begun):
            self._warn(self._place, "allOf", "it takes too many alternatives")
            return _text(True)
        if entry is None:
            self._begun.add(id(node))
            place = self._place
            text = _text(self._positive(node, place, ()))
            self._place = place
            self._n_chars += len(text)
            entry = self._literals[id(node)] = node, text
        return entry[1]

    def _product(self, ways: Ways, others: Ways, within: tuple[Any, ...]) -> Ways | None:
        """Return the combinations of two lists of alternatives; None if there are too many or they are too long."""
        if len(ways) * len(others) > self._max_ways**2 or self._n_chars > _MAX_CHARS:
            return None
        both = [tuple(dict.fromkeys((*way, *other))) for way in ways for other in others]
        product = _shortest(self._pruned(both, within))
        if product in ([], [()]):
            return product
        self._n_chars += sum(len(literal) for way in product for literal in way)
        return product if len(product) <= self._max_ways and self._n_chars <= _MAX_CHARS else None

    def _pruned(self, ways: Ways, within: tuple[Any, ...]) -> Ways:
        """Return the alternatives without impossible alternatives and redundant literals."""
        kinds = self._kinds_of(within)
        required = {
            name for schema in within for part in self._parts(schema) for name in part.get("required", ())
        }
        out = []
        for way in ways:
            nodes = tuple(map(self._node_of, way))
            inside = self._kinds_of(nodes) & kinds
            if not inside or (
                inside == {"object"} and any(f"-{literal[1:]}" in way for literal in way if literal[0] == "+")
            ):
                continue
            if any(self._are_disjoint((node,), (*within, *nodes[: i + 1])) for i, node in enumerate(nodes)):
                continue
            new = [
                literal
                for literal, node in zip(way, nodes, strict=True)
                if not (
                    (literal[0] == "+" and literal[1:] in required)
                    or (isinstance(node, dict) and node.keys() == {"type"} and kinds <= _kinds(node))
                )
            ]
            out.append(tuple(new))
        return out

    def _node_of(self, literal: str) -> Any:
        if literal not in self._nodes:
            self._nodes[literal] = _node_of(literal)
        return self._nodes[literal]

    def _schema_of(self, ways: Ways) -> Any:
        if not ways:
            return False
        if () in ways:
            return True
        schemas = [_schema_of_way(way) for way in ways]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}

    # ---- common values of two schemas
    def _are_disjoint(self, these: Sequence[Any], those: Sequence[Any]) -> bool:
        """Return whether certainly no value satisfies all schemas of both groups."""
        key = (*map(id, these), 0, *map(id, those))
        known = self._known.get(key)
        if known is not None:
            return known[2]
        if self._depth > _MAX_DEPTH:
            return False
        self._depth += 1
        try:
            ours = [part for schema in these for part in self._parts(schema)] or [{}]
            theirs = [part for schema in those for part in self._parts(schema)] or [{}]
            kinds = _ALL.intersection(*map(self._kinds_of_part, (*ours, *theirs)))
            result = (
                not kinds
                or any(self._parts_are_disjoint(part, other, kinds) for part in ours for other in theirs)
                or self._no_option_fits(ours, those)
                or self._no_option_fits(theirs, these)
            )
            self._known[key] = these, those, result
            return result
        finally:
            self._depth -= 1

    def _no_option_fits(self, parts: list[Node], others: Sequence[Any]) -> bool:
        return any(
            isinstance(part.get(keyword), list)
            and all(self._are_disjoint((option,), others) for option in part[keyword])
            for part in parts
            for keyword in ("anyOf", "oneOf")
        )

    def _parts_are_disjoint(self, first: Node, second: Node, kinds: frozenset[str]) -> bool:
        """Return whether certainly no value of these kinds satisfies both schemas."""
        pair = (id(first), id(second), kinds)
        entry = self._disjoint.get(pair)
        if entry is None:
            self._n_steps += 1
            if self._n_steps > _MAX_STEPS:
                return False
            # While a recursive schema is compared, the answer to the same comparison is "not disjoint".
            self._disjoint[pair] = (first, second, False)
            entry = self._disjoint[pair] = (first, second, self._compare(first, second, kinds))
        return entry[2]

    def _compare(self, first: Node, second: Node, kinds: frozenset[str]) -> bool:
        for listed, schema in ((_values(first), second), (_values(second), first)):
            if listed is not None:
                return all(
                    _kind_of(value) not in kinds or self._excludes(schema, value, 0) for value in listed
                )
        return all(self._kind_is_disjoint(kind, first, second) for kind in kinds)

    def _kind_is_disjoint(self, kind: str, first: Node, second: Node) -> bool:
        match kind:
            case "string":
                return _no_count(first, second, "minLength", "maxLength")
            case "integer" | "fraction":
                return _no_number(first, second) or _no_number(second, first)
            case "array":
                if _no_count(first, second, "minItems", "maxItems"):
                    return True
                least = max(int(first.get("minItems", 0)), int(second.get("minItems", 0)))
                return any(
                    self._are_disjoint((_item(first, i),), (_item(second, i),))
                    for i in range(min(least, 1 + max(_n_first(first), _n_first(second))))
                )
            case "object":
                if _no_count(first, second, "minProperties", "maxProperties"):
                    return True
                names = dict.fromkeys((*first.get("required", ()), *second.get("required", ())))
                if any(len(names) > part.get("maxProperties", math.inf) for part in (first, second)):
                    return True
                return any(
                    self._are_disjoint(_schemas_of(first, name), _schemas_of(second, name)) for name in names
                )
        return False

    def _excludes(self, node: Any, value: Any, depth: int) -> bool:
        """Return whether a schema certainly excludes a value."""
        self._n_steps += 1
        if depth > _MAX_DEPTH or self._n_steps > _MAX_STEPS:
            return False
        return any(self._part_excludes(part, value, depth + 1) for part in self._parts(node))

    def _part_excludes(self, part: Node, value: Any, depth: int) -> bool:
        kind = _kind_of(value)
        if kind not in self._kinds_of_part(part):
            return True
        listed = _values(part)
        if listed is not None and identity(value) not in self._identities(part, listed):
            return True
        if any(
            isinstance(part.get(keyword), list)
            and all(self._excludes(option, value, depth) for option in part[keyword])
            for keyword in ("anyOf", "oneOf")
        ):
            return True
        if "not" in part and self._allows(part["not"], value):
            return True
        if kind == "string":
            return not part.get("minLength", 0) <= len(value) <= part.get("maxLength", math.inf)
        if kind in ("integer", "fraction"):
            return _no_number({"minimum": value, "maximum": value}, part) or _no_number(
                part, {"minimum": value, "maximum": value}
            )
        if kind == "array":
            return not part.get("minItems", 0) <= len(value) <= part.get("maxItems", math.inf) or any(
                self._excludes(_item(part, i), item, depth) for i, item in enumerate(value)
            )
        if kind == "object":
            return (
                any(name not in value for name in part.get("required", ()))
                or not part.get("minProperties", 0) <= len(value) <= part.get("maxProperties", math.inf)
                or any(
                    self._excludes(schema, inner, depth)
                    for name, inner in value.items()
                    for schema in _schemas_of(part, name)
                )
            )
        return False

    def _allows(self, node: Any, value: Any) -> bool:
        """Return whether a schema certainly allows a value.

        Knows types, listed values, and combinations of them. For all other keywords, returns False.
        """
        if not isinstance(node, dict):
            return node is True
        for part in self._parts(node):
            keywords = part.keys() & ASSERTIONS
            is_known = (
                keywords <= {"type", "enum", "const", "anyOf", "allOf"} and not {"enum", "const"} <= keywords
            )
            if not is_known or _kind_of(value) not in self._kinds_of_part(part):
                return False
            listed = _values(part)
            if listed is not None and identity(value) not in self._identities(part, listed):
                return False
            if "anyOf" in part and not any(self._allows(option, value) for option in part["anyOf"]):
                return False
        return True

    def _parts(self, node: Any) -> list[Node]:
        """Return the schemas whose keywords all apply to the same value as ``node``.

        These are the schema itself, the targets of its references, and the schemas of its ``allOf``.
        """
        entry = self._flat.get(id(node))
        if entry is not None:
            return entry[1]
        parts: list[Node] = []
        waiting: list[Any] = [node]
        seen: set[int] = set()
        while waiting and len(seen) < 200:
            schema = waiting.pop()
            if schema is False:
                parts.append(_NOTHING)
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            if "$ref" in schema:
                target = self._target(schema["$ref"])
                if target is not None:
                    waiting.append(target[1])
                if self._ref_stands_alone:
                    continue
            parts.append(schema)
            waiting += schema.get("allOf", ())
        if isinstance(node, dict):
            self._flat[id(node)] = (node, parts)
        return parts

    def _target(self, reference: Any) -> tuple[str, Any] | None:
        return None if self._has_resources else resolved(self._root, reference)

    def _kinds_of(self, nodes: Sequence[Any]) -> frozenset[str]:
        kinds = _ALL
        for node in nodes:
            for part in self._parts(node):
                kinds &= self._kinds_of_part(part)
        return kinds

    def _kinds_of_part(self, part: Node) -> frozenset[str]:
        entry = self._kinds.get(id(part))
        if entry is None:
            entry = self._kinds[id(part)] = part, _kinds(part)
        return entry[1]

    def _identities(self, part: Node, listed: list[Any]) -> frozenset[str]:
        """Return the ``identity`` of each value that a part lists."""
        entry = self._listed.get(id(part))
        if entry is None:
            entry = self._listed[id(part)] = part, frozenset(map(identity, listed))
        return entry[1]

    def _same(self, schema: Any, other: Any) -> bool:
        """Return whether two schemas are the same object, or short and equal."""
        return schema is other or (schema == other and identity(schema) == identity(other))

    # ---- messages
    def _warn(self, pointer: str, keyword: str, reason: str) -> None:
        self._warnings.setdefault(
            (pointer, keyword),
            f"json_schema at {pointer}: {quoted(keyword)} is not enforced exactly, so more is allowed: {reason}",
        )

    def _nothing(self, pointer: str, keyword: str, reason: str) -> bool:
        self._refused = f"json_schema at {pointer}: {quoted(keyword)}: {reason}"
        return False


_OF_KIND: dict[str, frozenset[str]] = {
    **dict.fromkeys(_OF_STRINGS, frozenset({"string"})),
    **dict.fromkeys((*BOUNDS, "multipleOf"), frozenset({"integer", "fraction"})),
    **dict.fromkeys(
        ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems", "contains"),
        frozenset({"array"}),
    ),
    **dict.fromkeys(
        (
            "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
            "maxProperties", "dependencies", "dependentRequired", "dependentSchemas",
        ),
        frozenset({"object"}),
    ),
}  # fmt: skip


def _without(node: Node, keyword: str = "") -> Node:
    """Return the schema without ``keyword`` and without the keywords that this module replaces."""
    return {key: value for key, value in node.items() if key not in _LOGIC and key != keyword}


def _joined(denials: Iterable[Denial]) -> Denial:
    """Return the alternatives of all denials, and whether all denials are exact."""
    denials = list(denials)
    return [way for ways, _ in denials for way in ways], all(exact for _, exact in denials)


def _all_types_but(name: str) -> list[str]:
    return [kind for kind in KINDS if kind not in (name, "integer")]


def _text(node: Any) -> str:
    return f"={json.dumps(node)}"


def _node_of(literal: str) -> Any:
    name = literal[1:]
    match literal[0]:
        case "+":
            return {"required": [name]}
        case "-":
            return {"properties": {name: False}}
    return json.loads(name)


def _schema_of_way(way: Way) -> Node:
    merged: Node = {}
    parts: list[Any] = []
    for literal in way:
        node = _node_of(literal)
        if literal[0] == "+":
            merged.setdefault("required", []).append(literal[1:])
        elif literal[0] == "-":
            merged.setdefault("properties", {})[literal[1:]] = False
        elif isinstance(node, dict) and node.keys() == {"type"} and "type" not in merged:
            merged["type"] = node["type"]
        else:
            parts.append(node)
    if merged:
        parts = [merged, *parts]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], dict) else {"allOf": parts}


def _merged(node: Node, way: Way) -> Way:
    """Write the only alternative into ``node``; return the literals that must remain separate."""
    left = []
    for literal in way:
        name = literal[1:]
        if literal[0] == "+":
            node["required"] = [*node.get("required", ()), name]
        elif literal[0] == "-":
            node["properties"] = {**node.get("properties", {}), name: False}
        else:
            schema = json.loads(name)
            if isinstance(schema, dict) and schema.keys() <= _COUNTS - node.keys():
                node.update(schema)
            else:
                left.append(literal)
    return tuple(left)


def _shortest(ways: Ways) -> Ways:
    """Return the alternatives without duplicates and without those that a more general alternative covers."""
    unique = list(dict.fromkeys(ways))
    sets = [frozenset(way) for way in unique]
    by_size = sorted(set(sets), key=len)
    kept: list[frozenset[str]] = []
    for literals in by_size:
        if len(kept) > 4 * WAYS[0]:
            return unique
        if not any(other <= literals for other in kept):
            kept.append(literals)
    left = set(kept)
    out = []
    for way, literals in zip(unique, sets, strict=True):
        if literals in left:
            left.discard(literals)
            out.append(way)
    return out


def _kinds(node: Node) -> frozenset[str]:
    kinds = _ALL
    if "type" in node:
        names = [node["type"]] if isinstance(node["type"], str) else node["type"]
        kinds = frozenset(kind for name in names for kind in KINDS.get(name, ()))
    values = _values(node)
    return kinds if values is None else kinds & frozenset(map(_kind_of, values))


def _kind_of(value: Any) -> str:
    kind = json_type(value)
    if kind == "number":
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return kind


def _values(node: Node) -> list[Any] | None:
    values = node.get("enum")
    if "const" in node:
        return [node["const"]]
    return values if isinstance(values, list) else None


def _no_count(first: Node, second: Node, least: str, most: str) -> bool:
    low: float = max(first.get(least, 0), second.get(least, 0))
    high: float = min(first.get(most, math.inf), second.get(most, math.inf))
    return low > high


def _no_number(low: Node, high: Node) -> bool:
    """Return whether the lower bound of ``low`` excludes all numbers up to the upper bound of ``high``."""
    least, most = low.get("minimum"), high.get("maximum")
    above, below = low.get("exclusiveMinimum"), high.get("exclusiveMaximum")
    if isinstance(above, bool):  # draft 4
        above, least = (least, None) if above else (None, least)
    if isinstance(below, bool):
        below, most = (most, None) if below else (None, most)
    return (
        (least is not None and most is not None and least > most)
        or (least is not None and below is not None and least >= below)
        or (above is not None and most is not None and above >= most)
        or (above is not None and below is not None and above >= below)
    )


def _n_first(node: Node) -> int:
    first = node.get("prefixItems", node.get("items"))
    return len(first) if isinstance(first, list) else 0


def _item(node: Node, i: int) -> Any:
    items, first = node.get("items", True), node.get("prefixItems", [])
    if isinstance(items, list):
        items, first = node.get("additionalItems", True), items
    return first[i] if i < len(first) else items


def _schemas_of(node: Node, name: str) -> list[Any]:
    """Return the schemas in ``node`` that certainly apply to a member with this name."""
    if name in node.get("properties", {}):
        return [node["properties"][name]]
    if node.get("patternProperties") or "additionalProperties" not in node:
        return []
    return [node["additionalProperties"]]


def _other_values(values: list[Any], kinds: frozenset[str]) -> Denial:
    """Return alternatives by type for all values of these kinds except ``values``, and whether they are exact."""
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        kind = _kind_of(value)
        by_kind.setdefault("number" if kind in ("integer", "fraction") else kind, []).append(value)
    free = [name for name in KINDS if name != "integer" and name not in by_kind and KINDS[name] & kinds]
    ways: Ways = [(_text({"type": free}),)] if free else []
    exact = True
    for name, listed in by_kind.items():
        if not KINDS[name] & kinds:
            continue
        if name == "boolean":
            ways += [(_text({"const": boolean}),) for boolean in (False, True) if boolean not in listed]
        elif name == "string":
            pattern = others_than(listed)
            exact &= pattern is not None
            ways.append(
                (_text({"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}),)
            )
        elif name == "number":
            ways += _other_numbers(listed, "integer" if kinds & KINDS["number"] == {"integer"} else "number")
        elif name in ("array", "object"):
            empty = all(not container for container in listed)
            exact &= empty
            least = "minItems" if name == "array" else "minProperties"
            ways.append((_text({"type": name, least: 1} if empty else {"type": name}),))
    return ways, exact


def _other_numbers(values: list[Any], kind: str) -> Ways:
    """Return alternatives for the ranges below, between and above the given numbers."""
    numbers = sorted({value for value in values if kind == "number" or _kind_of(value) == "integer"})
    if not numbers:
        return [(_text({"type": kind}),)]
    ways: Ways = []
    for low, high in itertools.pairwise([None, *numbers, None]):
        if kind == "integer":
            least = None if low is None else int(low) + 1
            most = None if high is None else int(high) - 1
            if least is not None and most is not None and least > most:
                continue
            bounds = {"minimum": least, "maximum": most}
        else:
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        ways.append((_text({"type": kind, **{k: v for k, v in bounds.items() if v is not None}}),))
    return ways


def others_than(texts: Iterable[str]) -> str | None:
    """Return a regular expression for all strings except these; None if it would be too long.

    A different string leaves the trie of these strings: at some node, it ends or has another character.
    """
    ends = set(texts)
    following: dict[str, set[str]] = {"": set()}  # the characters that follow each beginning
    n_chars = 0
    for text in ends:
        n_chars += len(text) ** 2 // 2
        if n_chars > _MAX_CHARS:
            return None
        for i, character in enumerate(text):
            following.setdefault(text[:i], set()).add(character)
            following.setdefault(text[: i + 1], set())
    options = []
    for begin in sorted(following):
        escaped = "".join(f"[{_escaped(character)}]" for character in begin)
        next_characters = "".join(map(_escaped, sorted(following[begin])))
        options.append(f"{escaped}{f'[^{next_characters}]' if next_characters else '(?s:.)'}(?s:.)*")
        if begin not in ends:
            options.append(escaped)
    pattern = f"^(?:{'|'.join(options)})$"
    return pattern if len(pattern) <= _MAX_TRIE else None


def _escaped(character: str) -> str:
    """Escape a character for a character class of a regular expression."""
    return f"\\{character}" if character in "\\]^[-&~" else character
