"""Streamed answers of a chat: the deltas of a request, parsed as they arrive."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from llamapipe.engine.chat_results import ChatDelta, ChatFinishReason
from llamapipe.engine.results import Delta, TokenLogprob
from llamapipe.engine.stream import AsyncStream, Stream

if TYPE_CHECKING:
    from llamapipe.chat.parser import ChatParser


class DeltaParser:
    """Turns the deltas of one request into those of a chat; tokens without visible text are kept for the next."""

    def __init__(self, parser: ChatParser | None, n_prompt_tokens: int) -> None:
        self.n_prompt_tokens = n_prompt_tokens
        self._parser = parser
        self._called = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def __repr__(self) -> str:
        return f"<DeltaParser n_prompt_tokens={self.n_prompt_tokens}>"

    def read(self, delta: Delta) -> ChatDelta | None:
        """The next part of the answer; None if there is nothing to show yet."""
        reason: ChatFinishReason | None = delta.finish_reason
        parser = self._parser
        if parser is None:
            if not delta.text and reason is None and delta.logprobs is None:
                self._token_ids += delta.token_ids
                return None
            return self._with_tokens(ChatDelta(delta.text, "", (), delta.token_ids, delta.logprobs, reason))
        piece = parser.feed(delta.text)
        content, reasoning, tool_calls = piece.content, piece.reasoning, piece.tool_calls
        if reason is not None:
            last = parser.finish()
            content, reasoning = content + last.content, reasoning + last.reasoning
            tool_calls += last.tool_calls
        self._called = self._called or bool(tool_calls)
        if reason == "stop" and self._called:
            reason = "tool_calls"
        if not (content or reasoning or tool_calls) and reason is None:
            self._token_ids += delta.token_ids
            self._logprobs += delta.logprobs or ()
            return None
        return self._with_tokens(
            ChatDelta(content, reasoning, tool_calls, delta.token_ids, delta.logprobs, reason)
        )

    def _with_tokens(self, delta: ChatDelta) -> ChatDelta:
        """The delta with the tokens that were kept before it."""
        if not self._token_ids:
            return delta
        ids, logprobs = (*self._token_ids, *delta.token_ids), delta.logprobs
        if logprobs is not None:
            logprobs = (*self._logprobs, *logprobs)
        self._token_ids.clear()
        self._logprobs.clear()
        return delta._replace(token_ids=ids, logprobs=logprobs)


class ChatStream:
    """An iterator over the parts of an answer; closing or dropping it cancels the request. Threads as for ``Stream``.

    ``n_prompt_tokens``: length of the prompt.
    """

    def __init__(self, stream: Stream, parser: DeltaParser) -> None:
        self._stream = stream
        self._parser = parser
        self.n_prompt_tokens = parser.n_prompt_tokens

    def __repr__(self) -> str:
        return f"<ChatStream of {self._stream!r}>"

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> ChatDelta:
        while True:
            delta = self._parser.read(next(self._stream))
            if delta is not None:
                return delta

    def cancel(self) -> None:
        """Ends the request within a step; the stream then ends too. Any thread."""
        self._stream.cancel()

    def close(self) -> None:
        """Cancels the request if it is not finished."""
        self._stream.close()

    def __enter__(self) -> ChatStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncChatStream:
    """An asynchronous iterator over the parts of an answer; see ``AsyncStream``."""

    def __init__(self, stream: AsyncStream, parser: DeltaParser) -> None:
        self._stream = stream
        self._parser = parser
        self.n_prompt_tokens = parser.n_prompt_tokens

    def __repr__(self) -> str:
        return f"<AsyncChatStream of {self._stream!r}>"

    def __aiter__(self) -> AsyncChatStream:
        return self

    async def __anext__(self) -> ChatDelta:
        while True:
            delta = self._parser.read(await self._stream.__anext__())
            if delta is not None:
                return delta

    def cancel(self) -> None:
        """Ends the request within a step; the stream then ends too."""
        self._stream.cancel()

    async def aclose(self) -> None:
        """Cancels the request if it is not finished."""
        await self._stream.aclose()

    async def __aenter__(self) -> AsyncChatStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
