"""Conversations that chat templates are rendered with."""

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name"},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    }
]
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Z\u00fcrich", "days": 2}'},
}
_USER = {"role": "user", "content": "What's the weather in Z\u00fcrich?"}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [{"role": "user", "content": 'Hello, \u4e16\u754c! <b> & "quotes"'}]},
    "system": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    },
    "turns": {
        "messages": [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": "Three?\n\nFour?"},
            {"role": "assistant", "content": "Five."},
            {"role": "user", "content": "Six?"},
        ]
    },
    "tools": {
        "messages": [
            _USER,
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {
                "role": "tool",
                "tool_call_id": "call00001",
                "name": "get_weather",
                "content": '{"sky": "clear"}',
            },
        ],
        "tools": TOOLS,
    },
}
