"""Server-sent events: chunks of a stream as bytes, and several streams merged into one."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import msgspec

from llamapipe.engine.stream import PromptProgress
from llamapipe.server.errors import ApiError, Dialect, api_error, log_unexpected

T = TypeVar("T")
_log = logging.getLogger("llamapipe.server")
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which clients skip
SUBMITTED = b""  # no event: the requests are checked and in the queue, so the answer's headers can be sent
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

    def progress(self, choice: bytes, progress: PromptProgress) -> bytes:
        """An event with llama-server's ``prompt_progress``: tokens, and milliseconds since the prompt was begun."""
        fields = {
            "total": progress.n_prompt_tokens,
            "cache": progress.n_cached_tokens,
            "processed": progress.n_done,
            "time_ms": round(progress.seconds * 1e3),
        }
        return self._head + choice + b'],"prompt_progress":' + _encode(fields) + self._tail[1:]

    def set_usage(self, usage: dict[str, Any]) -> None:
        """The usage of the next events."""
        self._tail = b'],"usage":' + _encode(usage) + b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event that ends a stream with usage."""
        return event({**self._common, "choices": [], "usage": usage})


class Computing(Protocol):
    """A stream whose prompt may still be computed."""

    @property
    def prompt_progress(self) -> PromptProgress | None:
        """How much of the prompt is computed; None while it waits for a slot."""


class Progress:
    """Tells how much of the prompts of a stream's choices is computed.

    ``choice``: the JSON of a choice without text, with ``%d`` for its index. ``running``: the streams, None before they
    are submitted.
    """

    def __init__(self, writer: ChunkWriter, choice: bytes, running: Sequence[Computing | None]) -> None:
        self._writer = writer
        self._choice = choice
        self._running = running
        self._told: dict[int, int] = {}  # tokens, by the index of the choice

    def __repr__(self) -> str:
        return f"<Progress {self._told}>"

    def news(self) -> bytes:
        """The events for the choices that have come further."""
        made = b""
        for index, stream in enumerate(self._running):
            found = None if stream is None else stream.prompt_progress
            if found is not None and self._told.get(index, -1) < found.n_done:
                self._told[index] = found.n_done
                made += self._writer.progress(self._choice % index, found)
        return made

    def last(self, index: int) -> bytes:
        """The event for a choice whose whole prompt is computed."""
        stream = self._running[index]
        found = None if stream is None else stream.prompt_progress
        if found is None or self._told.get(index) == found.n_prompt_tokens:
            return b""
        self._told[index] = found.n_prompt_tokens
        return self._writer.progress(self._choice % index, found._replace(n_done=found.n_prompt_tokens))


def event(value: object, name: str | None = None) -> bytes:
    """A value as an event, with a name for APIs that name their events."""
    data = b"data: " + _encode(value) + b"\n\n"
    return data if name is None else b"event: " + name.encode() + b"\n" + data


def error_event(error: BaseException, dialect: Dialect) -> bytes:
    """The event for an error that occurs after the stream has begun."""
    answer = api_error(error)
    if answer is None:
        _log.error("a stream failed", exc_info=error)
        answer = ApiError(500, f"the server failed: {type(error).__name__}")
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
