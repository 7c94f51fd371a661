"""Tools with schemas such as servers that speak MCP list, in our words: one for each of 17 servers."""

from __future__ import annotations

from typing import Any

_DRAFT_7 = "http://json-schema.org/draft-07/schema#"
_SCHEMAS: dict[str, dict[str, Any]] = {
    "read_files": {  # filesystem
        "type": "object",
        "properties": {
            "paths": {
                "type": "array",
                "items": {"type": "string"},
                "minItems": 1,
                "description": "Which files.",
            },
            "head": {"type": "number", "description": "Lines at the start."},
        },
        "required": ["paths"],
        "additionalProperties": False,
        "$schema": _DRAFT_7,
    },
    "git_log": {  # git: a pydantic model
        "type": "object",
        "title": "GitLog",
        "properties": {
            "repo_path": {"title": "Repo Path", "type": "string", "format": "path"},
            "max_count": {"default": 10, "title": "Max Count", "type": "integer"},
            "since": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Since"},
        },
        "required": ["repo_path"],
    },
    "fetch": {
        "description": "Parameters for fetching a URL.",
        "type": "object",
        "properties": {
            "url": {"type": "string", "format": "uri", "minLength": 1, "title": "Url"},
            "max_length": {
                "type": "integer",
                "exclusiveMinimum": 0,
                "exclusiveMaximum": 1000000,
                "default": 5000,
            },
            "raw": {"type": "boolean", "default": False},
        },
        "required": ["url"],
    },
    "create_issue": {  # github
        "type": "object",
        "properties": {
            "owner": {"type": "string"},
            "title": {"type": "string", "minLength": 1},
            "labels": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "milestone": {"type": ["number", "null"]},
        },
        "required": ["owner", "title"],
        "not": {"required": ["milestone", "labels"]},
    },
    "query": {  # postgres
        "type": "object",
        "properties": {
            "sql": {"type": "string"},
            "parameters": {"type": "array", "items": {"type": ["string", "number", "boolean", "null"]}},
        },
    },
    "puppeteer_click": {
        "type": "object",
        "properties": {"selector": {"type": "string"}, "launchOptions": {"type": "object"}},
        "required": ["selector"],
        "if": {"required": ["launchOptions"]},
        "then": {"properties": {"selector": {"pattern": "^#"}}},
    },
    "create_entities": {  # memory
        "type": "object",
        "properties": {"entities": {"type": "array", "items": {"$ref": "#/$defs/Entity"}}},
        "required": ["entities"],
        "$defs": {
            "Entity": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "observations": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["name", "observations"],
            }
        },
    },
    "slack_post_message": {
        "type": "object",
        "properties": {
            "channel_id": {"type": "string", "pattern": "^[CGD][A-Z0-9]{8,}$"},
            "blocks": {
                "oneOf": [
                    {"type": "array", "items": {"type": "object"}},
                    {"type": "string", "contentMediaType": "application/json"},
                ]
            },
        },
        "required": ["channel_id"],
    },
    "write_query": {
        "type": "object",
        "properties": {"query": {"type": "string"}},
        "required": ["query"],
    },  # sqlite
    "convert_time": {
        "type": "object",
        "properties": {
            "timezone": {"type": "string"},
            "time": {"type": "string", "pattern": "^([01]?[0-9]|2[0-3]):[0-5][0-9]$"},
        },
        "required": ["timezone", "time"],
    },
    "sequential_thinking": {
        "type": "object",
        "properties": {
            "thought": {"type": "string"},
            "step": {"type": "integer", "minimum": 1},
            "next": {"type": "boolean"},
        },
        "required": ["thought", "step", "next"],
        "dependentRequired": {"step": ["next"]},
    },
    "web_search": {
        "type": "object",
        "properties": {
            "query": {"type": "string", "maxLength": 400},
            "count": {"type": "number", "default": 10},
            "filters": {"type": "object", "propertyNames": {"pattern": "^[a-z_]+$"}},
        },
        "required": ["query"],
    },
    "maps_directions": {
        "type": "object",
        "properties": {
            "origin": {"$ref": "#/definitions/place"},
            "mode": {"type": "string", "enum": ["driving", "walking", "transit"]},
        },
        "required": ["origin"],
        "definitions": {
            "place": {"anyOf": [{"type": "string"}, {"type": "object", "required": ["lat", "lng"]}]}
        },
    },
    "update_page": {  # notion
        "type": "object",
        "properties": {
            "page_id": {"type": "string", "format": "uuid"},
            "properties": {
                "type": "object",
                "patternProperties": {"^[A-Za-z].*$": {"type": ["string", "number", "null"]}},
                "additionalProperties": False,
            },
        },
        "required": ["page_id"],
    },
    "search_nodes": {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/Node"}},
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}, "contains": {}}
                },
            }
        },
    },
    "send_mail": {
        "type": "object",
        "properties": {
            "to": {"type": "array", "items": {"type": "string", "format": "email"}},
            "body": {"type": "string"},
            "html": {"type": "string"},
        },
        "required": ["to"],
        "oneOf": [{"required": ["body"]}, {"required": ["html"]}],
    },
    "run_container": {  # docker
        "type": "object",
        "properties": {
            "image": {"type": "string"},
            "ports": {
                "type": "object",
                "additionalProperties": {"type": ["integer", "null"]},
                "unevaluatedProperties": False,
            },
            "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        },
        "required": ["image"],
    },
}
MCP_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}
    for name, schema in _SCHEMAS.items()
]
