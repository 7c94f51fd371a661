"""Results of calls: completions, deltas, tokens, scores, chats and their parts, and the counters of an engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from llamapipe._messages import explain_attribute
from llamapipe.chat.results import ToolCall, ToolCallDelta

FinishReason = Literal["stop", "length", "cancelled", "timeout"]
_MOST_CHARACTERS = 60  # of a text in a repr


@dataclass(frozen=True)
class Timings:
    """The durations of a request, in seconds from its submission.

    - ``first_token_s``: until the first token; None if there was none.
    - ``total_s``: until the end.
    - ``queue_s``: until it got a slot and its prompt could be computed; None without a first token.
    """

    first_token_s: float | None
    total_s: float
    queue_s: float | None = None


class _IdLogprob(NamedTuple):
    id: int
    logprob: float


class TopLogprob(_IdLogprob):
    """A token and the natural logarithm of its probability; unpacks into those two, so ``dict(entry.top)`` works.

    ``piece``: the token's bytes, which may split a UTF-8 character. ``text``: the piece as text.
    """

    piece: bytes

    def __new__(cls, id: int, logprob: float, piece: bytes = b"") -> TopLogprob:  # noqa: A002
        """Make a pair of ``id`` and ``logprob`` that also has its ``piece``."""
        self = super().__new__(cls, id, logprob)
        self.piece = piece
        return self

    @property
    def text(self) -> str:
        """The piece as text; bytes that are not a complete character are replaced by U+FFFD."""
        return self.piece.decode(errors="replace")

    def __repr__(self) -> str:
        return f"({self.id}, {self.text!r}, {self.logprob:.4f})"


class _TokenLogprob(NamedTuple):
    id: int
    logprob: float
    top: tuple[TopLogprob, ...]


class TokenLogprob(_TokenLogprob):
    """A token with the natural logarithm of its probability under the model, before any sampler or bias changed it.

    Unpacks into ``id, logprob, top``.

    - ``top``: the most probable tokens at this position, best first, as many as ``logprobs`` or ``prompt_logprobs`` of
      the params ask for.
    - ``piece``: the token's bytes, which may split a UTF-8 character. ``text``: the piece as text.
    """

    piece: bytes

    if not TYPE_CHECKING:  # a type checker would accept any name
        __getattr__ = explain_attribute

    def __new__(  # noqa: D102
        cls,
        id: int,  # noqa: A002
        logprob: float,
        top: tuple[TopLogprob, ...],
        piece: bytes = b"",
    ) -> TokenLogprob:
        self = super().__new__(cls, id, logprob, top)
        self.piece = piece
        return self

    @property
    def text(self) -> str:
        """The piece as text; bytes that are not a complete character are replaced by U+FFFD."""
        return self.piece.decode(errors="replace")

    def __repr__(self) -> str:
        top = f", top={list(self.top)}" if self.top else ""
        return f"TokenLogprob({self.id}, {self.text!r}, {self.logprob:.4f}{top})"


class LogprobLists(NamedTuple):
    """The parts of ``logprobs`` in OpenAI's completions: lists with an entry for each token."""

    tokens: list[str]
    logprobs: list[float | None]
    tops: list[dict[str, float] | None]
    offsets: list[int]


def logprob_lists(
    entries: Iterable[TokenLogprob],
    first: int | None,
    text_of: Callable[[int], str],
    offset_of: Callable[[int], int],
    top_of: Callable[[TokenLogprob, str], dict[str, float]],
) -> LogprobLists:
    """Return the lists for tokens, each of which is passed to the functions once and in order.

    ``first``: a token before them that has no log-probability. ``offset_of``: where a token begins in the text.
    ``top_of``: the log-probabilities by text, from an entry and the text of its token.
    """
    lists = LogprobLists([], [], [], [])
    if first is not None:
        lists.tokens.append(text_of(first))
        lists.offsets.append(offset_of(first))
        lists.logprobs.append(None)
        lists.tops.append(None)
    for entry in entries:
        text = text_of(entry.id)
        lists.tokens.append(text)
        lists.offsets.append(offset_of(entry.id))
        lists.logprobs.append(entry.logprob)
        lists.tops.append(top_of(entry, text))
    return lists


@dataclass(frozen=True, repr=False)
class Choice:
    """One of the ``n`` texts generated for a prompt.

    - ``token_ids``: the generated tokens, without the one that ended generation. ``text``: their text, cut before a
      stop string.
    - ``finish_reason``: ``"stop"`` at an end token or a stop string, ``"length"`` at ``max_tokens`` or the end of the
      context, ``"cancelled"`` or ``"timeout"``.
    - ``seed``: the seed that was used, even if it was chosen at random.
    - ``logprobs``: one for each of ``token_ids`` if the params ask for log-probabilities, else None.
    - ``stop_string``, ``stop_token``: what ended the text, if one of them did. ``stop_logprob``: the log-probability of
      that token, if the params ask for it.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    logprobs: list[TokenLogprob] | None = None
    stop_string: str | None = None
    stop_token: int | None = None
    stop_logprob: TokenLogprob | None = None

    if not TYPE_CHECKING:  # a type checker would accept any name
        __getattr__ = explain_attribute

    def __repr__(self) -> str:
        return f"Choice({self.index}, {shorten(self.text)}, n_tokens={len(self.token_ids)}, {self.finish_reason!r})"

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None without ``SamplingParams(logprobs=...)``."""
        return None if self.logprobs is None else math.fsum(entry.logprob for entry in self.logprobs)


class _Answer:
    """The counters that completions and answers to conversations share."""

    choices: tuple[Choice, ...] | tuple[ChatChoice, ...]
    timings: Timings

    @property
    def n_completion_tokens(self) -> int:
        """Generated tokens of all choices, reasoning and tool calls included."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all choices, divided by the time from submission to the end."""
        return self.n_completion_tokens / self.timings.total_s if self.timings.total_s > 0 else 0.0


@dataclass(frozen=True, repr=False)
class Completion(_Answer):
    """The result of a prompt: its ``choices``, one or more, and counters.

    ``text``, ``token_ids``, ``finish_reason``, ``seed``, ``logprobs`` and ``cumulative_logprob`` are those of the first
    choice.

    - ``n_prompt_tokens``: length of the prompt, which is computed once for all choices.
    - ``n_cached_tokens``: tokens of the prompt that came from the prefix cache and were not computed.
    - ``n_drafted_tokens``: guessed tokens that were computed, for all choices. ``n_accepted_tokens``: how many of them
      were right.
    - ``prompt_logprobs``: one for each token of the prompt except the first, if the params ask for them, else None.
    - ``timings``: until the first token of any choice, and until the end of the last one.
    """

    choices: tuple[Choice, ...]
    n_prompt_tokens: int
    n_cached_tokens: int
    timings: Timings
    prompt_logprobs: list[TokenLogprob] | None = None
    n_drafted_tokens: int = 0
    n_accepted_tokens: int = 0

    if not TYPE_CHECKING:  # a type checker would accept any name
        __getattr__ = explain_attribute

    def __repr__(self) -> str:
        first = self.choices[0]
        more = f", n_choices={len(self.choices)}" if len(self.choices) > 1 else ""
        return (
            f"Completion({shorten(first.text)}, n_tokens={len(first.token_ids)}, {first.finish_reason!r}{more}, "
            f"n_prompt_tokens={self.n_prompt_tokens})"
        )

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def token_ids(self) -> list[int]:
        """The generated tokens of the first choice."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first choice ended."""
        return self.choices[0].finish_reason

    @property
    def seed(self) -> int:
        """The seed of the first choice; the i-th has ``seed + i``."""
        return self.choices[0].seed

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """The log-probabilities of the first choice's tokens."""
        return self.choices[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the first choice's log-probabilities; None without ``SamplingParams(logprobs=...)``."""
        return self.choices[0].cumulative_logprob


class Delta(NamedTuple):
    """A part of a stream: new text (whole characters, possibly empty) and tokens. The last part has a finish reason.

    ``logprobs``: one for each of ``token_ids`` if the params ask for them. ``stop_string``: in the last part, the stop
    string that ended the text, if one did.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stop_string: str | None = None


class Token(NamedTuple):
    """One generated token: its id, its bytes, and the text that became complete with it.

    ``logprob`` and ``top``: as in ``TokenLogprob``, if the params ask for log-probabilities.
    """

    id: int
    piece: bytes
    text: str
    logprob: float | None = None
    top: tuple[TopLogprob, ...] | None = None


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a continuation's tokens, each given all tokens before it.

    ``token_ids``: int32 ``(n,)``; ``logprobs``: float32 ``(n,)``, natural logarithms; ``is_greedy``: whether every
    token is the most probable one at its position.
    """

    __pydantic_config__ = MappingProxyType({"arbitrary_types_allowed": True})  # arrays

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    is_greedy: bool

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation: the sum of ``logprobs``, added up in float64."""
        return float(self.logprobs.sum(dtype=np.float64))


class TimeHistogram(NamedTuple):
    """A histogram of durations.

    ``bounds_s``: upper bounds in seconds, ascending. ``counts``: for each bound, the number of durations up to it and
    above the previous one; the last entry counts all longer ones. ``total_s``: the sum of all durations.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total_s: float = 0.0


_NO_TIMES = TimeHistogram()


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was created, and its state now: a consistent copy, taken between two steps.

    Requests:

    - ``n_requests``: requests that were submitted. ``n_active``: requests that have a slot now. ``n_queued``: requests
      that wait for one now.
    - ``n_preempted``: how often a request lost its slot to another.
    - ``queue_times``: from a request's submission until it has a slot.

    Steps and tokens:

    - ``steps``: steps that were computed. ``step_times``: from a step's launch until its tokens are sampled.
    - ``n_prompt_tokens``: prompt tokens that were computed, counted again after a preemption.
    - ``n_completion_tokens``: generated tokens.

    Time of the engine thread, in seconds:

    - ``plan_s``, ``launch_s``, ``sample_s``, ``deliver_s``: by stage of a step. ``idle_s``: without work.
    - ``wait_s``: blocked until a step was computed, where the backend reports it.
    - ``compute_s``: computing steps, on any thread.

    Memory:

    - ``n_used_cells``: KV cells of running requests.
    - ``n_cache_hit_tokens``: prompt tokens that came from the prefix cache.
    - ``n_saved``, ``n_restored``: sequences copied to host memory, and back. ``cache_bytes``: host memory that saved
      sequences and states take now.
    - ``n_disk_reads``, ``n_disk_writes``: sequences read from and written to ``cache_dir``.
    - ``swa_full``: whether layers with a sliding window keep all cells; None if there are no such layers.

    Guessed tokens:

    - ``n_drafted``: guesses that were computed. ``n_accepted``: guesses that were right. ``n_forced``: right guesses
      that a constraint forced. ``n_drafted_by_model``, ``n_accepted_by_model``: guesses of the draft model or of the
      model's MTP layer, and how many were right.
    - ``n_steps_saved``: steps that right guesses made unnecessary for a whole batch.
    - ``no_guesses``: why no step has guesses; ``""`` if steps may have some. ``unguessed``: requests without guesses
      although others may have some, counted by reason.

    The rest:

    - ``n_waits``: waits for one step. ``n_syncs``: waits for everything that was launched.
    - ``n_copies``, ``n_copied_bytes``: rows that were copied to host memory.
    - ``n_reused``: how often llama.cpp reused a compute graph. ``n_graph_sampled``: tokens sampled in the compute
      graph.
    - ``n_micro_batches``: micro-batches that decoding requests are split into now.
    - ``n_threads``: compute threads in use now. ``n_thread_changes``: how often their number changed.
    - ``n_adapter_changes``: how often llama.cpp planned its graphs again, for adapters that cannot share a step.
    - ``n_encoded_media``: images and sounds, or tiles of them, that were encoded.
    """

    steps: int
    n_prompt_tokens: int
    n_completion_tokens: int
    n_requests: int
    n_preempted: int
    n_active: int
    n_queued: int
    plan_s: float
    launch_s: float
    sample_s: float
    deliver_s: float
    idle_s: float
    n_micro_batches: int = 1
    n_waits: int = 0
    n_syncs: int = 0
    n_copies: int = 0
    n_copied_bytes: int = 0
    n_reused: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    n_graph_sampled: int = 0
    n_threads: int = 0
    n_thread_changes: int = 0
    n_used_cells: int = 0
    n_cache_hit_tokens: int = 0
    n_saved: int = 0
    n_restored: int = 0
    cache_bytes: int = 0
    n_disk_reads: int = 0
    n_disk_writes: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_drafted_by_model: int = 0
    n_accepted_by_model: int = 0
    n_forced: int = 0
    n_steps_saved: int = 0
    no_guesses: str = ""
    swa_full: bool | None = None
    unguessed: Mapping[str, int] = field(default_factory=dict)
    n_adapter_changes: int = 0
    n_encoded_media: int = 0
    step_times: TimeHistogram = _NO_TIMES
    queue_times: TimeHistogram = _NO_TIMES


def shorten(text: str) -> str:
    """Return a text as a literal; leave out the middle if it is long."""
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[: _MOST_CHARACTERS // 2]}…{text[-_MOST_CHARACTERS // 2 + 1 :]}"
    return repr(text)


ChatFinishReason = Literal["stop", "length", "tool_calls", "cancelled", "timeout"]


@dataclass(frozen=True, repr=False)
class ChatChoice:
    """One of the ``n`` answers to a conversation.

    - ``content``: the answer's text; ``""`` if there is none.
    - ``reasoning``: the model's reasoning before the answer, if its template marks reasoning, else ``""``.
    - ``tool_calls``: the calls that the answer asks for.
    - ``finish_reason``: as in ``Choice``, but ``"tool_calls"`` if the answer ended with calls. After ``"length"`` the
      last call may be incomplete.
    - ``token_ids``: all generated tokens, markers included, without the one that ended generation.
    - ``logprobs``: one for each of ``token_ids`` if the params ask for log-probabilities, else None.
    - ``stop_string``: the stop string that ended the answer, if one did.
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
        return f"ChatChoice({self.index}, {shorten(self.content)}, {self.finish_reason!r}{calls})"

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
class ChatCompletion(_Answer):
    """The answer to a conversation: its ``choices``, one or more, and the counters of a ``Completion``.

    ``content``, ``reasoning``, ``tool_calls``, ``finish_reason`` and ``message`` are those of the first choice.
    """

    choices: tuple[ChatChoice, ...]
    n_prompt_tokens: int
    n_cached_tokens: int
    timings: Timings
    n_drafted_tokens: int = 0
    n_accepted_tokens: int = 0

    if not TYPE_CHECKING:  # a type checker would accept any name
        __getattr__ = explain_attribute

    def __repr__(self) -> str:
        first = self.choices[0]
        return (
            f"ChatCompletion({shorten(first.content)}, {first.finish_reason!r}, "
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


class ChatDelta(NamedTuple):
    """A part of a streamed answer; the last part has a finish reason.

    - ``content``, ``reasoning``: the new text of each; ``""`` if there is none.
    - ``tool_calls``: parts of calls. The first part of a call has its id and name; every part has a piece of the JSON
      of its arguments.
    - ``token_ids``, ``logprobs``, ``stop_string``: as in ``Delta``, for the tokens that came with this part.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: ChatFinishReason | None
    stop_string: str | None = None


for _part in (Delta, ChatDelta):  # to a type checker, the body of a NamedTuple has fields and methods only
    setattr(_part, "__getattr__", explain_attribute)  # noqa: B010


def call_message(call: ToolCall, as_written: bool = False) -> dict[str, object]:
    """Return a tool call as messages hold it, in OpenAI's form.

    ``as_written``: with the arguments as the stream delivered them, which are not valid JSON if the call is incomplete.
    """
    arguments = call.arguments_text if as_written else call.arguments_json
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
