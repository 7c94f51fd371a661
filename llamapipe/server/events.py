"""Server-sent events: chunks of a stream as bytes, and several streams merged into one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from llamapipe.server.errors import Dialect, api_error, log_unexpected

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_PAD_TO = 32  # characters; padding extends an event's text to the next multiple of this
_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Writes the events of one stream of OpenAI's API.

    The parts that are the same in each event are encoded once. ``kind``: the ``object`` field. ``with_usage``: each
    event has a ``usage``, null in all but the last. ``padded``: a field ``obfuscation`` hides the length of texts.
    """

    def __init__(
        self, call_id: str, kind: str, created: int, model: str, with_usage: bool, padded: bool
    ) -> None:
        self._common = {"id": call_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + _encode(self._common)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._padded = padded

    def __repr__(self) -> str:
        return f"ChunkWriter({self._common})"

    def chunk(self, choice: bytes, text: str = "") -> bytes:
        """An event with one choice, given as encoded JSON. ``text``: the text whose length the padding hides."""
        if not self._padded:
            return self._head + choice + self._tail
        padding = secrets.token_hex(_PAD_TO)[: _PAD_TO - len(text) % _PAD_TO]
        return self._head + choice + b'],"obfuscation":"' + padding.encode() + b'"' + self._tail[1:]

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event that ends a stream with usage."""
        return event({**self._common, "choices": [], "usage": usage})


def event(value: object, name: str | None = None) -> bytes:
    """A value as an event, with a name for APIs that name their events."""
    data = b"data: " + _encode(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


def error_event(error: BaseException, dialect: Dialect) -> bytes:
    """The event for an error that occurs after the stream has begun."""
    answer = api_error(error)
    if answer is None:
        raise error
    log_unexpected(error, "a stream was")
    return event(answer.body(dialect), "error" if dialect == "anthropic" else None)


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncIterator[tuple[int, T]]:
    """Yields the items of several streams as they arrive, each with the index of its stream.

    Closing the iterator closes the streams. An exception of a stream is raised here.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(2 * len(streams))

    async def pump(index: int, stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream) as items:
                async for item in items:
                    await queue.put((index, item))
            await queue.put(None)
        except Exception as e:
            await queue.put(e)

    tasks = [asyncio.ensure_future(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        n_left = len(streams)
        while n_left:
            got = await queue.get()
            if isinstance(got, BaseException):
                raise got
            if got is None:
                n_left -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
