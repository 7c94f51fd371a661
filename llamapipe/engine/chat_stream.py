"""Streamed answers of a chat: iterators over the parts of an answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType

from llamapipe.engine.chat_results import ChatDelta
from llamapipe.engine.delivery.delta_parser import DeltaParser
from llamapipe.engine.frontend.chat_builder import ChatItem
from llamapipe.engine.frontend.request_builder import Item
from llamapipe.engine.stream import AsyncStream, PromptProgress, Stream
from llamapipe.locks import OneCall, OneTask
from llamapipe.native.owner import Owner


class ChatStream(Owner):
    """An iterator over the parts of an answer; closing or dropping it cancels the request. Threads as for ``Stream``.

    ``n_prompt_tokens``: length of the prompt.
    """

    def __init__(self, stream: Stream, parser: DeltaParser) -> None:
        self._stream = stream
        self._parser = parser
        self._one_call = OneCall("stream")
        self.n_prompt_tokens = parser.n_prompt_tokens

    def __repr__(self) -> str:
        return f"<ChatStream of {self._stream!r}>"

    @property
    def n_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; known with the first part, 0 before."""
        return self._stream.n_cached_tokens

    def __iter__(self) -> ChatStream:
        return self

    def __next__(self) -> ChatDelta:
        with self._one_call:
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


class AsyncChatStream(Owner):
    """An asynchronous iterator over the parts of an answer; see ``AsyncStream``.

    ``n_prompt_tokens``: length of the prompt; 0 until the first part of a long conversation's answer.
    """

    def __init__(
        self, item: ChatItem | Callable[[], Awaitable[ChatItem]], open_stream: Callable[[Item], AsyncStream]
    ) -> None:
        self.n_prompt_tokens = 0
        self._build = item if callable(item) else None
        self._open_stream = open_stream
        self._stream: AsyncStream | None = None
        self._parser: DeltaParser | None = None
        self._closed = False
        self._one_task = OneTask("stream")
        if not callable(item):
            self._open(item)

    def _open(self, item: ChatItem) -> None:
        self._build = None
        self._parser = item.delta_parser()
        self.n_prompt_tokens = self._parser.n_prompt_tokens
        self._stream = self._open_stream(item.item)

    def __repr__(self) -> str:
        return f"<AsyncChatStream of {self._stream!r}>"

    @property
    def n_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache had; known with the first part, 0 before."""
        return 0 if self._stream is None else self._stream.n_cached_tokens

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """How much of the prompt is computed; None while the request waits for its first slot."""
        return None if self._stream is None else self._stream.prompt_progress

    def __aiter__(self) -> AsyncChatStream:
        return self

    async def submit(self) -> None:
        """Renders the conversation and submits the request, which the first ``__anext__`` does otherwise.

        Raises as that does, QueueFullError too.
        """
        await self._built()
        if self._stream is not None:
            await self._stream.submit()

    async def _built(self) -> None:
        if self._build is not None and not self._closed:
            item = await self._build()
            if not self._closed:
                self._open(item)

    async def __anext__(self) -> ChatDelta:
        with self._one_task:
            return await self._next()

    async def _next(self) -> ChatDelta:
        if self._build is not None:
            await self._built()
        if self._stream is None or self._parser is None:
            raise StopAsyncIteration
        while True:
            delta = self._parser.read(await self._stream.__anext__())
            if delta is not None:
                return delta

    def cancel(self) -> None:
        """Ends the request within a step; the stream then ends too."""
        if self._stream is None:
            self._closed = True
        else:
            self._stream.cancel()

    async def aclose(self) -> None:
        """Cancels the request if it is not finished."""
        self._closed = True
        if self._stream is not None:
            await self._stream.aclose()

    async def __aenter__(self) -> AsyncChatStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
