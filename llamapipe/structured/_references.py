"""Rewrites the references of a JSON schema, so that each is a plain ``$ref`` to a subschema.

Open this file to change which references and identifiers a schema may have. ``_logic`` rewrites the result.

Dynamic references become plain ones, targets at other places are copied to ``$defs``, and identifiers that are not URIs
are removed. OpenAPI's ``nullable`` becomes a type or an alternative.
"""

from __future__ import annotations

import json
import re
from urllib.parse import quote, unquote, urlsplit

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.structured._rewrite import Node
from llamapipe.structured.schema import resolved, subschemas, with_nulls

# A character that is invalid in URIs, a percent sign without hexadecimal digits, or an invalid scheme.
_NO_URI = re.compile(r"[^!#-;=?-\[\]_a-z~]|%(?![0-9A-Fa-f]{2})|^(?![A-Za-z][A-Za-z0-9+.-]*:)[^/?#:]*:")
_FRAGMENT = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/?-]|%[0-9A-Fa-f]{2})*")
_DYNAMIC = {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}


def with_definitions(schema: Node) -> Node:
    """Return the schema with every target of a ``$ref`` at a place where subschemas may be.

    A reference may name any place of the document, so targets at other places are copied to ``$defs``. Invalid
    identifiers are removed.
    """
    schema = _without_dynamic(with_nulls(schema))
    parts = list(subschemas(schema, logic=True))
    references = {part["$ref"] for _, part in parts if isinstance(part.get("$ref"), str)}
    known = {pointer for pointer, _ in parts}
    bad = {pointer for pointer, part in parts if any(map(_is_no_identifier, _identifiers(part, references)))}
    moved: dict[str, str] = {}
    definitions: Node = {}
    waiting = [part for _, part in parts]
    for part in waiting:
        target = resolved(schema, part.get("$ref"))
        if (
            target is None
            or target[0] in known
            or target[0] in moved
            or not isinstance(target[1], (dict, bool))
        ):
            continue
        name = _free_name(target[0], schema, definitions)
        moved[target[0]] = f"#/$defs/{name}"
        definitions[name] = target[1]
        if isinstance(target[1], dict):
            waiting += [inner for _, inner in subschemas(target[1], logic=True)]
    if not moved and not bad and all(_as_uri(text) == text for text in references):
        return schema
    copy: Node = json.loads(json.dumps(schema))
    if definitions:
        copy["$defs"] = {**copy.get("$defs", {}), **json.loads(json.dumps(definitions))}
    for pointer, part in list(subschemas(copy, logic=True)):
        target = resolved(schema, part.get("$ref"))
        if target is not None and target[0] in moved:
            part["$ref"] = moved[target[0]]
        elif target is not None:  # names of definitions need not be URIs
            part["$ref"] = _as_uri(part["$ref"])
        if pointer in bad:
            for keyword in ("$id", "id"):
                part.pop(keyword, None)
            for _, inner in subschemas(part, logic=True):  # references in this part were relative to it
                if pointer != "#" and resolved(part, inner.get("$ref")) is not None:
                    inner["$ref"] = quote(pointer, safe="#/~$") + inner["$ref"][1:]
    return copy


def _without_dynamic(schema: Node) -> Node:
    """Return the schema with plain references in place of dynamic references.

    Both mean the same if only one schema has the anchor. Otherwise, raises InvalidRequestError.
    """
    parts = list(subschemas(schema, logic=True))
    if not any(part.keys() & _DYNAMIC for _, part in parts):
        return schema
    copy: Node = json.loads(json.dumps(schema))
    parts = list(subschemas(copy, logic=True))
    n_resources = sum(isinstance(part.get("$id"), str) for pointer, part in parts if pointer != "#")
    for pointer, part in parts:
        for keyword in ("$dynamicRef", "$recursiveRef"):
            reference = part.pop(keyword, None)
            if reference is None:
                continue
            name = reference[1:] if isinstance(reference, str) and reference.startswith("#") else None
            anchors = [
                place
                for place, candidate in parts
                if name and name in (candidate.get("$dynamicAnchor"), candidate.get("$anchor"))
            ]
            place = (
                anchors[0]
                if len(anchors) == 1
                else reference
                if name == "" or resolved(copy, reference)
                else None
            )
            if place is None or n_resources or "$ref" in part:
                raise InvalidRequestError(
                    f"json_schema at {pointer}: {quoted(keyword)} is supported only where one schema has its "
                    "anchor, and none but the root has an '$id'; use '$ref'"
                )
            part["$ref"] = quote(place, safe="#/~$")
    for _, part in parts:
        for keyword in ("$dynamicAnchor", "$recursiveAnchor"):
            part.pop(keyword, None)
    return copy


def _as_uri(reference: str) -> str:
    """Return a reference to a JSON pointer with the escapes of URIs, which generators of schemas often omit."""
    if not reference.startswith("#") or _FRAGMENT.fullmatch(reference, 1):
        return reference
    return "#" + quote(unquote(reference[1:]), safe="/~$")


def _identifiers(part: Node, references: set[str]) -> list[str]:
    """Return the identifiers of a schema, except those that a reference names."""
    return [
        part[keyword]
        for keyword in ("$id", "id")
        if isinstance(part.get(keyword), str) and part[keyword] not in references
    ]


def _is_no_identifier(text: str) -> bool:
    try:
        return not text or text[0] == "#" or _NO_URI.search(text) is not None or urlsplit(text).port == -1
    except ValueError:
        return True


def _free_name(pointer: str, schema: Node, definitions: Node) -> str:
    name = re.sub(r"[^0-9A-Za-z]+", "_", pointer).strip("_")
    while name in definitions or name in schema.get("$defs", {}):
        name += "_"
    return name
