"""Builds the server's OpenAPI document from its table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

import llamapipe
from llamapipe.server.endpoint import Endpoint

_STATUSES = {
    "200": "The answer.",
    "400": "A field is wrong; the error names it.",
    "401": "No valid API key.",
    "403": "Not allowed.",
    "404": "There is no such model, or nothing with this id.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "424": "An MCP server cannot be used.",
    "429": "Too many requests; Retry-After says when to retry.",
    "500": "What is stored cannot be read.",
    "503": "The server is shutting down, or the KV cache is full.",
    "507": "It cannot be kept: the disk is full or failed.",
    "504": "The request took longer than the server allows.",
}
_WITH_BODY = ("400", "404", "408", "413")
_WITH_KEY = ("401", "429", "503")
_PARAMETER = re.compile(r"\{(\w+)(?::path)?\}")
_REF = "#/components/schemas/{name}"


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the routes that have a summary, and of their aliases."""
    described = [endpoint for endpoint in endpoints if endpoint.summary]
    bodies = list({endpoint.body: None for endpoint in described if endpoint.body is not None})
    _, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    components["Error"] = {"type": "object", "description": "In the format of the route's API."}
    paths: dict[str, Any] = {}
    for endpoint in described:
        for path in (endpoint.path, *endpoint.aliases):
            operations = paths.setdefault(_PARAMETER.sub(r"{\1}", path), {})
            operations[endpoint.method.lower()] = _operation(endpoint, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llamapipe", "version": llamapipe.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint, path: str) -> dict[str, Any]:
    statuses = {"200", *endpoint.more_statuses}
    if endpoint.has_key:
        statuses |= {*_WITH_KEY}
    if endpoint.body is not None or endpoint.form:
        statuses |= {*_WITH_BODY}
    name = re.sub(r"[/-]", "_", _PARAMETER.sub(r"\1", path).strip("/"))
    operation: dict[str, Any] = {
        "summary": endpoint.summary if path == endpoint.path else f"The same as {endpoint.path}.",
        "operationId": f"{endpoint.method.lower()}_{name}",
        "responses": {status: _answer(status, endpoint.media) for status in sorted(statuses)},
    }
    if endpoint.has_key:
        operation["security"] = [{}, {"key": []}]
    if endpoint.body is not None:
        reference = {"$ref": _REF.format(name=endpoint.body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        if "stream" in endpoint.body.__struct_fields__:
            operation["responses"]["200"]["content"][endpoint.stream_media] = {}
    if endpoint.form:
        fields: dict[str, Any] = {field: {"type": "string"} for field in endpoint.form}
        fields[endpoint.form[0]] = {"type": "string", "format": "binary"}
        schema = {"type": "object", "properties": fields, "required": [endpoint.form[0]]}
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    if names := _PARAMETER.findall(path):
        operation["parameters"] = [
            {"in": "path", "name": name, "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation


def _answer(status: str, media: str) -> dict[str, Any]:
    if status == "200":
        return {"description": _STATUSES[status], "content": {media: {}}}
    error = {"schema": {"$ref": _REF.format(name="Error")}}
    return {"description": _STATUSES[status], "content": {"application/json": error}}
