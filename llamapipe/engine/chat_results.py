"""What chats return: complete answers with their choices, and the parts of a streamed answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from llamapipe.engine.results import Timings, TokenLogprob, shortened

if TYPE_CHECKING:
    from llamapipe.chat.results import ToolCall, ToolCallDelta

ChatFinishReason = Literal["stop", "length", "tool_calls", "cancelled", "timeout"]


@dataclass(frozen=True, repr=False)
class ChatChoice:
    """One of the ``n`` answers to a conversation.

    ``content``: the answer's text, ``""`` if there is none. ``reasoning``: what the model wrote before the answer, if
    its template marks that. ``tool_calls``: the calls it asks for. ``finish_reason`` is ``"tool_calls"`` if it ended
    with calls; with ``"length"`` the last call may not be complete. ``token_ids``: all generated tokens, markers
    included, without the one that ended generation. ``logprobs``: one for each of ``token_ids`` if the params ask for
    them. ``stop_string``: the stop string that ended the answer, if one did.
    """

    index: int
    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: ChatFinishReason
    seed: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    stop_string: str | None = None

    def __repr__(self) -> str:
        calls = f", n_tool_calls={len(self.tool_calls)}" if self.tool_calls else ""
        return f"ChatChoice({self.index}, {shortened(self.content)}, {self.finish_reason!r}{calls})"

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to be appended to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call_message(call) for call in self.tool_calls]
        return message


@dataclass(frozen=True, repr=False)
class ChatCompletion:
    """The answer to a conversation: its ``choices``, one or more, and the counters of a ``Completion``.

    ``content``, ``reasoning``, ``tool_calls``, ``finish_reason`` and ``message`` are those of the first choice.
    """

    choices: tuple[ChatChoice, ...]
    n_prompt_tokens: int
    n_cached_tokens: int
    timings: Timings

    def __repr__(self) -> str:
        first = self.choices[0]
        return (
            f"ChatCompletion({shortened(first.content)}, {first.finish_reason!r}, "
            f"n_prompt_tokens={self.n_prompt_tokens}, n_completion_tokens={self.n_completion_tokens})"
        )

    @property
    def content(self) -> str:
        """The text of the first choice."""
        return self.choices[0].content

    @property
    def reasoning(self) -> str:
        """The reasoning of the first choice."""
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls of the first choice."""
        return self.choices[0].tool_calls

    @property
    def finish_reason(self) -> ChatFinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def message(self) -> dict[str, Any]:
        """The first choice as a message, to be appended to the conversation."""
        return self.choices[0].message

    @property
    def n_completion_tokens(self) -> int:
        """Generated tokens of all choices, reasoning and tool calls included."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all choices, divided by the time from submission to the end."""
        return self.n_completion_tokens / self.timings.total_s if self.timings.total_s > 0 else 0.0


class ChatDelta(NamedTuple):
    """A part of a streamed answer; the last one has a finish reason.

    ``tool_calls``: parts of calls; the first part of a call has its id and name, each has a piece of its arguments'
    JSON. ``token_ids``, ``logprobs``, ``stop_string``: as in ``Delta``, for the tokens that came with this part.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: ChatFinishReason | None
    stop_string: str | None = None


def call_message(call: ToolCall, as_written: bool = False) -> dict[str, object]:
    """A tool call as messages hold it, in OpenAI's form.

    ``as_written``: with the text of the arguments that a stream has, which is not JSON where a call is not complete.
    """
    arguments = call.arguments_text if as_written else call.arguments_json
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
