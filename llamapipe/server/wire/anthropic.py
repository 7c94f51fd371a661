"""Requests of Anthropic's API: messages, and counting their tokens."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from llamapipe.server.errors import ApiError


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons before it answers. ``budget_tokens`` and ``display`` have no effect here."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the model answers. ``effort`` is passed to the template as ``reasoning_effort``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ClientTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool that the caller runs. ``strict`` changes nothing: arguments always match their schema."""

    name: str
    input_schema: dict[str, Any] = {}
    description: str = ""
    type: str = "custom"
    strict: bool | None = None
    # No effect on this server.
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    def as_openai(self) -> dict[str, Any]:
        """The definition in OpenAI's form. Raises ApiError 400 for a tool that only a hosted service can run."""
        if self.type != "custom":
            raise ApiError(
                400,
                f"the tool {self.name!r} has the type {self.type!r}; only 'custom' can be used here",
                "tools",
            )
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function}


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/messages/count_tokens``, and the fields that messages share with it."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    def unused(self) -> tuple[str, ...]:
        """The given options that have no effect on this server."""
        return tuple(name for name in _HOSTED if getattr(self, name, None) is not None)


class MessagesRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``. ``min_p``, ``seed`` and ``chat_template_kwargs`` are llamapipe's own."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # No effect on this server.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: str | None = None


_HOSTED = (
    "cache_control",
    "speed",
    "user_profile_id",
    "workspace_id",
    "metadata",
    "service_tier",
    "container",
    "diagnostics",
    "inference_geo",
)
