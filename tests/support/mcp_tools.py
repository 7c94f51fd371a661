"""Tools with schemas such as servers that speak MCP list, in our words: one for each of 17 servers."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}


def _object(required: str = "", **properties: Schema) -> Schema:
    """The schema of an object; ``required``: names."""
    schema: Schema = {"type": "object", "properties": properties}
    return schema | ({"required": required.split()} if required else {})


def _array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


_SCHEMAS: dict[str, Schema] = {
    "read_files": {  # filesystem
        **_object(
            "paths",
            paths=_array(STRING, minItems=1, description="Which files."),
            head={"type": "number", "description": "Lines at the start."},
        ),
        "additionalProperties": False,
        "$schema": "http://json-schema.org/draft-07/schema#",
    },
    "git_log": {  # git: a pydantic model
        "title": "GitLog",
        **_object(
            "repo_path",
            repo_path={"title": "Repo Path", "type": "string", "format": "path"},
            max_count={"default": 10, "title": "Max Count", "type": "integer"},
            since={"anyOf": [STRING, {"type": "null"}], "default": None, "title": "Since"},
        ),
    },
    "fetch": {
        "description": "Parameters for fetching a URL.",
        **_object(
            "url",
            url={"type": "string", "format": "uri", "minLength": 1, "title": "Url"},
            max_length={
                "type": "integer",
                "exclusiveMinimum": 0,
                "exclusiveMaximum": 1000000,
                "default": 5000,
            },
            raw={"type": "boolean", "default": False},
        ),
    },
    "create_issue": {  # github
        **_object(
            "owner title",
            owner=STRING,
            title={"type": "string", "minLength": 1},
            labels=_array(STRING, uniqueItems=True),
            milestone={"type": ["number", "null"]},
        ),
        "not": {"required": ["milestone", "labels"]},
    },
    "query": _object(  # postgres
        sql=STRING, parameters=_array({"type": ["string", "number", "boolean", "null"]})
    ),
    "puppeteer_click": {
        **_object("selector", selector=STRING, launchOptions={"type": "object"}),
        "if": {"required": ["launchOptions"]},
        "then": {"properties": {"selector": {"pattern": "^#"}}},
    },
    "create_entities": {  # memory
        **_object("entities", entities=_array({"$ref": "#/$defs/Entity"})),
        "$defs": {"Entity": _object("name observations", name=STRING, observations=_array(STRING))},
    },
    "slack_post_message": _object(
        "channel_id",
        channel_id={"type": "string", "pattern": "^[CGD][A-Z0-9]{8,}$"},
        blocks={
            "oneOf": [_array({"type": "object"}), {"type": "string", "contentMediaType": "application/json"}]
        },
    ),
    "write_query": _object("query", query=STRING),  # sqlite
    "convert_time": _object(
        "timezone time",
        timezone=STRING,
        time={"type": "string", "pattern": "^([01]?[0-9]|2[0-3]):[0-5][0-9]$"},
    ),
    "sequential_thinking": {
        **_object(
            "thought step next",
            thought=STRING,
            step={"type": "integer", "minimum": 1},
            next={"type": "boolean"},
        ),
        "dependentRequired": {"step": ["next"]},
    },
    "web_search": _object(
        "query",
        query={"type": "string", "maxLength": 400},
        count={"type": "number", "default": 10},
        filters={"type": "object", "propertyNames": {"pattern": "^[a-z_]+$"}},
    ),
    "maps_directions": {
        **_object(
            "origin",
            origin={"$ref": "#/definitions/place"},
            mode={"type": "string", "enum": ["driving", "walking", "transit"]},
        ),
        "definitions": {"place": {"anyOf": [STRING, {"type": "object", "required": ["lat", "lng"]}]}},
    },
    "update_page": _object(  # notion
        "page_id",
        page_id={"type": "string", "format": "uuid"},
        properties={
            "type": "object",
            "patternProperties": {"^[A-Za-z].*$": {"type": ["string", "number", "null"]}},
            "additionalProperties": False,
        },
    ),
    "search_nodes": {
        **_object(tree={"$ref": "#/$defs/Node"}),
        "$defs": {"Node": _object(children=_array({"$ref": "#/$defs/Node"}, contains={}))},
    },
    "send_mail": {
        **_object("to", to=_array({"type": "string", "format": "email"}), body=STRING, html=STRING),
        "oneOf": [{"required": ["body"]}, {"required": ["html"]}],
    },
    "run_container": _object(  # docker
        "image",
        image=STRING,
        ports={
            "type": "object",
            "additionalProperties": {"type": ["integer", "null"]},
            "unevaluatedProperties": False,
        },
        environment={"type": "object", "additionalProperties": STRING},
    ),
}
MCP_TOOLS: list[Schema] = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}
    for name, schema in _SCHEMAS.items()
]
