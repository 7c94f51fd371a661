"""Requests of Anthropic's API: messages, and counting their tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from llamapipe.arguments import did_you_mean, quoted
from llamapipe.server.errors import ApiError
from llamapipe.server.wire.fields import Only, Unused

# Tools that Anthropic's service runs, or whose definition only its models know; a date follows the name.
_HOSTED = (
    "advisor",
    "bash",
    "browser_toolset",
    "code_execution",
    "computer",
    "mcp_toolset",
    "memory",
    "text_editor",
    "tool_search_tool_bm25",
    "tool_search_tool_regex",
    "web_fetch",
    "web_search",
)


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int | None, Unused()] = None
    display: Annotated[str | None, Unused("summarized")] = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the model answers. ``effort`` is passed to the template as ``reasoning_effort``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[dict[str, Any] | None, Unused()] = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which tools the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ClientTool(msgspec.Struct, kw_only=True):
    """A tool that the caller runs; tools of other types have further fields."""

    name: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Annotated[dict[str, Any] | None, Unused()] = None
    eager_input_streaming: Annotated[bool | None, Unused(False)] = None
    input_examples: Annotated[list[dict[str, Any]] | None, Unused([])] = None
    defer_loading: Annotated[bool | None, Unused(False)] = None
    allowed_callers: Annotated[list[str] | None, Unused(["direct"])] = None

    @property
    def hosted(self) -> str | None:
        """The name of a tool that the model does not see, because nobody here can run it; None for other tools."""
        base = (self.type or "").rstrip("0123456789_")
        return base if base in _HOSTED else None

    def as_openai(self) -> dict[str, Any]:
        """The definition in OpenAI's form. Raises ApiError 400 for a tool of an unknown type."""
        if self.type not in (None, "custom"):
            hint = did_you_mean(str(self.type), ("custom", *_HOSTED))
            raise ApiError(
                400,
                f"the tool {quoted(self.name)} has the type {quoted(self.type)}; it may be 'custom'{hint}",
                "tools",
            )
        if self.name is None:
            raise ApiError(400, "tools: a tool needs a name", "tools")
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description or "",
            "parameters": self.input_schema or {},
        }
        if self.strict:
            function["strict"] = True
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
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Anthropic's, for what its service does: caches, billing, storage, tools that it runs.
    betas: Annotated[list[str] | None, Unused([])] = None
    cache_control: Annotated[dict[str, Any] | None, Unused()] = None
    compaction: Annotated[dict[str, Any] | None, Unused()] = None
    context_management: Annotated[dict[str, Any] | None, Unused({}, {"edits": []})] = None
    mcp_servers: Annotated[list[dict[str, Any]] | None, Unused([])] = None
    speed: Annotated[str | None, Unused("standard")] = None
    user_profile_id: Annotated[str | None, Unused()] = None
    workspace_id: Annotated[str | None, Unused()] = None

    def unused(self) -> tuple[str, ...]:
        """The tools that the model does not see, for the header."""
        names = dict.fromkeys(tool.hosted for tool in self.tools or ())
        return tuple(f"tools.{name}" for name in names if name is not None)

    def functions(self) -> list[dict[str, Any]] | None:
        """The tools in OpenAI's form. Raises ApiError 400."""
        return [tool.as_openai() for tool in self.tools or () if tool.hosted is None] or None


class MessagesRequest(CountRequest, kw_only=True):
    """``POST /v1/messages``. ``min_p``, ``seed``, ``cache_salt`` and ``chat_template_kwargs`` are llamapipe's own."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    billing_policy: Annotated[Any, Unused()] = None
    container: Annotated[Any, Unused()] = None
    diagnostics: Annotated[Any, Unused()] = None
    fallback_credit_token: Annotated[Any, Unused()] = None
    fallbacks: Annotated[Any, Unused([])] = None
    inference_geo: Annotated[str | None, Unused()] = None
    metadata: Annotated[dict[str, Any] | None, Unused({})] = None
    service_tier: Annotated[str | None, Unused("auto", "standard_only")] = None
    thread: Annotated[Any, Only(instead="this server stores no answers; send the whole conversation")] = None
