"""The options of a chat other than its messages and params."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Conversation: TypeAlias = str | Sequence[Message]
ToolChoice: TypeAlias = str | Mapping[str, Any]
Truncation: TypeAlias = Literal["error", "auto"]
# The place of reasoning: separate ("auto" and "deepseek", two names of llama-server), in the content with its markers
# ("none"), or both ("deepseek-legacy").
ReasoningFormat: TypeAlias = Literal["auto", "deepseek", "none", "deepseek-legacy"]


class ChatOptions(NamedTuple):
    """The options of a chat other than its messages and params. ``Engine.chat`` describes them."""

    tools: Sequence[Any] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: Any = None
    template_args: Mapping[str, Any] | None = None
    continue_last: bool | Literal["content", "reasoning"] = False
    truncation: Truncation = "error"
    reasoning_format: ReasoningFormat = "auto"

    @property
    def takes_long(self) -> bool:
        """True if rendering the conversation or compiling its grammar would block an event loop."""
        return self.tools is not None or self.response_format is not None or self.truncation != "error"


class LimitedReasoning(NamedTuple):
    """The markers around reasoning in an answer.

    ``opens``, ``ends``: the markers. ``close``: the text that ends the reasoning when a limit is reached. In all three,
    control tokens are written as their names. ``is_open``: the prompt has opened the reasoning.
    """

    opens: str
    ends: str
    close: str
    is_open: bool
