"""Streamed answers of a chat: iterators over the parts of an answer."""

from __future__ import annotations

from types import TracebackType

from llamapipe.engine.chat_results import ChatDelta
from llamapipe.engine.frontend.delta_parser import DeltaParser
from llamapipe.engine.stream import AsyncStream, Stream


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
