"""llama-server's ``t_max_predict_ms``: ends a text with the first line that is completed after a time limit.

The time counts from the text's first token. An answer that is not streamed is also read as streams, and joined here.
Otherwise, the engine would compute it to its end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import TypeVar

from llamapipe._messages import shown
from llamapipe.chat.results import ToolCall
from llamapipe.results import ChatChoice, ChatDelta, Choice, Delta, FinishReason, TokenLogprob
from llamapipe.server.errors import ApiError

Part = TypeVar("Part", ChatDelta, Delta)
_MOST_MS = 2**31 - 1


def check_time_limit(most_ms: int | None) -> int:
    """Return the limit in milliseconds; 0: no limit. Raises ApiError 400 for a number outside its range."""
    if most_ms is not None and not -1 <= most_ms <= _MOST_MS:
        name = "t_max_predict_ms"
        raise ApiError(400, f"{name} is {shown(most_ms)}; it must be from -1 to {_MOST_MS}", name)
    return max(most_ms or 0, 0)


async def until_line(
    parts: AsyncGenerator[Part | None, None],
    most_ms: int,
    reason: FinishReason = "length",
    clock: Callable[[], float] = perf_counter,
) -> AsyncGenerator[Part | None, None]:
    """Yield the parts of a text until the limit ends the text. ``reason``: the finish reason in that case."""
    first_s: float | None = None
    async with aclosing(parts) as source:
        async for part in source:
            if part is not None:
                now_s = clock()
                first_s = now_s if first_s is None else first_s
                if part.finish_reason is None and (now_s - first_s) * 1e3 > most_ms and _ends_line(part):
                    yield part._replace(finish_reason=reason)
                    return
            yield part


def _ends_line(part: ChatDelta | Delta) -> bool:
    return "\n" in (part.text if isinstance(part, Delta) else part.content + part.reasoning)


def text_choice(index: int, parts: Sequence[Delta]) -> Choice:
    """Join the parts of a choice. The result has no seed."""
    last = parts[-1]
    return Choice(
        index,
        "".join(part.text for part in parts),
        [token for part in parts for token in part.token_ids],
        last.finish_reason or "cancelled",
        0,
        _logprobs(parts),
        last.stop_string,
    )


def chat_choice(index: int, parts: Sequence[ChatDelta]) -> ChatChoice:
    """Join the parts of a choice of a conversation's answer."""
    calls: dict[int, list[str]] = {}
    for part in parts:
        for piece in part.tool_calls:
            call = calls.setdefault(piece.index, [piece.id or "", piece.name or "", ""])
            call[2] += piece.arguments
    last = parts[-1]
    return ChatChoice(
        index,
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(ToolCall.of(*call) for call in calls.values()),
        last.finish_reason or "cancelled",
        0,
        [token for part in parts for token in part.token_ids],
        _logprobs(parts),
        last.stop_string,
    )


def _logprobs(parts: Sequence[ChatDelta] | Sequence[Delta]) -> list[TokenLogprob] | None:
    if all(part.logprobs is None for part in parts):
        return None
    return [entry for part in parts for entry in part.logprobs or ()]
