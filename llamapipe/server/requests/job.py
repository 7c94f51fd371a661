"""Runs a request in the engine and passes the parts of its answer to an encoder.

Open it to change what all APIs share in streamed answers: when the headers are sent, and what is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Generic, TypeVar

from llamapipe.errors import DecodeError
from llamapipe.params import SamplingParams
from llamapipe.results import (
    ChatCompletion,
    ChatDelta,
    Completion,
    Delta,
    FinishReason,
    Timings,
    TokenLogprob,
)
from llamapipe.server.dialects.encoder import Counts, Encoder
from llamapipe.server.endpoint import SUBMITTED, Exchange
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.time_limit import text_choice, until_line
from llamapipe.streams import AsyncChatStream, AsyncStream

T = TypeVar("T")
Part = TypeVar("Part", ChatDelta, Delta)


class Job(Generic[Part]):
    """A request to the engine, as one stream for each choice.

    ``timeout_s``: the limit for the whole answer; None: no limit. ``is_empty``: the request asks for no tokens. The
    engine then computes the prompt and one token, which is not returned. ``most_ms``: see ``until_line``; 0: no limit.
    ``late_reason``: the finish reason of a text that this limit ended. ``n_prompt_tokens``, ``n_cached_tokens``: totals
    of all prompts, once their streams have begun. ``running``: the streams, each None until it is submitted.
    """

    late_reason: FinishReason = "length"

    def __init__(
        self,
        exchange: Exchange,
        params: SamplingParams,
        n_streams: int,
        timeout_s: float | None,
        is_empty: bool,
        most_ms: int,
    ) -> None:
        self._exchange = exchange
        self._engine = exchange.server.engine
        self._params = params
        self._timeout = timeout_s
        self._most_ms = most_ms
        self.is_empty = is_empty
        self.n_prompt_tokens = self.n_cached_tokens = 0
        self.running: list[AsyncStream | AsyncChatStream | None] = [None] * n_streams

    async def prompt_tokens(self) -> list[int]:
        """Return the tokens of the first prompt's text, without images."""
        raise NotImplementedError

    def streams(self) -> list[AsyncGenerator[Part | None, None]]:
        """Return one stream for each choice. Its first item is None, when the request is checked and queued."""
        streams = [self._stream(index) for index in range(len(self.running))]
        if isinstance(self._params.adapter, Mapping):
            streams = [self._scaled(stream) for stream in streams]
        if not self._most_ms:
            return streams
        return [until_line(stream, self._most_ms, self.late_reason) for stream in streams]

    def _stream(self, index: int) -> AsyncGenerator[Part | None, None]:
        raise NotImplementedError

    async def _scaled(self, parts: AsyncGenerator[Part | None, None]) -> AsyncGenerator[Part | None, None]:
        try:
            async with aclosing(parts):
                async for part in parts:
                    yield part
        except DecodeError as e:
            raise self._overflow(e) from None

    def _overflow(self, error: DecodeError) -> Exception:
        """Return the error for a scale of an adapter, chosen by the client, with which numbers overflow.

        Other errors are not changed.
        """
        scales = self._params.adapter
        if not isinstance(scales, Mapping) or "the scale of an adapter" not in str(error):
            return error
        largest = max(scales.values(), key=abs)
        if abs(largest) <= 1:  # the adapter's file is damaged
            return error
        return ApiError(
            400,
            f"lora: with the scale {largest:g}, the model computes numbers that are not finite; an adapter was trained "
            "for 1: give a scale closer to it",
            "lora",
        )

    def _params_of(self, i: int) -> SamplingParams:
        """Return the params of choice ``i`` of each prompt."""
        params = replace(self._params, n=1, prompt_logprobs=None)
        return params if params.seed is None else replace(params, seed=(params.seed + i) % 2**64)


class TextJob(Job[Delta]):
    """Tokenized prompts with their params: ``n`` choices of each, starting with the first prompt's."""

    def __init__(
        self,
        exchange: Exchange,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        n: int = 1,
        is_empty: bool = False,
        most_ms: int = 0,
    ) -> None:
        timeout_s = exchange.server.settings.timeout_s
        super().__init__(exchange, params, len(prompts) * n, timeout_s, is_empty, most_ms)
        self._prompts = prompts
        self._n_cached = [0] * len(prompts)
        self.n = n
        self.n_prompt_tokens = sum(map(len, prompts))

    def __repr__(self) -> str:
        return f"<TextJob n_prompts={len(self._prompts)} n={self.n}>"

    async def prompt_tokens(self) -> list[int]:
        """Return the tokens of the first prompt."""
        return self._prompts[0]

    async def complete(self) -> list[Completion]:
        """Return the answers when all choices are complete.

        There are ``params.n`` choices of each prompt, or ``n`` with a time limit.
        """
        if self._most_ms:
            return await self._exchange.await_streams(self._gather())
        answers = self._engine.agenerate(self._prompts, self._params, timeout=self._timeout, block=False)
        try:
            return await self._exchange.await_engine(answers)
        except DecodeError as e:
            raise self._overflow(e) from None

    async def _gather(self) -> list[Completion]:
        parts = await gather(self._exchange, self)
        scores = await self.prompt_logprobs()
        completions = []
        for p, prompt in enumerate(self._prompts):
            streams = parts[p * self.n : (p + 1) * self.n]
            completions.append(
                Completion(
                    tuple(text_choice(i, stream) for i, stream in enumerate(streams)),
                    len(prompt),
                    self._n_cached[p],
                    Timings(None, 0.0),
                    None if scores is None else scores[p],
                    *count_drafted(self.running[p * self.n : (p + 1) * self.n]),
                )
            )
        return completions

    async def prompt_logprobs(self) -> list[list[TokenLogprob]] | None:
        """Return the log-probabilities of each prompt's tokens, for a stream that begins with them.

        Returns None if the request did not ask for them.
        """
        asked = self._params
        if asked.prompt_logprobs is None:
            return None
        # The cells have the same owner, and may be shared in the same way, as those of the answer.
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=asked.prompt_logprobs,
            cache=asked.cache,
            cache_salt=asked.cache_salt,
            adapter=asked.adapter,
            priority=asked.priority,
        )
        done = await self._engine.agenerate(self._prompts, params, timeout=self._timeout, block=False)
        return [list(completion.prompt_logprobs or ()) for completion in done]

    async def _stream(self, index: int) -> AsyncGenerator[Delta | None, None]:
        p, i = divmod(index, self.n)
        params = self._params_of(i)
        stream = self._engine.astream(self._prompts[p], params, timeout=self._timeout, block=False)
        async with stream:
            await stream.submit()
            self._exchange.times.follow(stream)
            self.running[index] = stream
            yield None
            async for delta in stream:
                if i == 0:  # a prompt's first choice computes the prompt for the others
                    self._n_cached[p] = stream.n_cached_tokens
                    self.n_cached_tokens = sum(self._n_cached)
                if self.is_empty:
                    yield delta._replace(text="", token_ids=(), finish_reason="length")
                    return
                yield delta


def record_counts(exchange: Exchange, *done: Completion | ChatCompletion, is_empty: bool = False) -> Counts:
    """Return the token counts of complete answers, and record them. ``is_empty``: the request asked for no tokens."""
    counts = Counts(
        sum(answer.n_prompt_tokens for answer in done),
        sum(answer.n_cached_tokens for answer in done),
        0 if is_empty else sum(answer.n_completion_tokens for answer in done),
        sum(answer.n_drafted_tokens for answer in done),
        sum(answer.n_accepted_tokens for answer in done),
    )
    exchange.count(counts.n_prompt, counts.n_completion)
    return counts


def count_drafted(running: Sequence[AsyncStream | AsyncChatStream | None]) -> tuple[int, int]:
    """Return how many drafted tokens the streams computed, and how many of them were accepted."""
    streams = [stream for stream in running if stream is not None]
    return (
        sum(stream.n_drafted_tokens for stream in streams),
        sum(stream.n_accepted_tokens for stream in streams),
    )


async def encode_stream(
    exchange: Exchange, job: Job[Part], encoder: Encoder[Part]
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of a streamed answer as they arrive. Counts its tokens for the log and the metrics."""
    streams = job.streams()
    n_completion = n_submitted = 0
    begun: set[int] = set()
    try:
        async with aclosing(merge_streams(streams)) as items:  # type: ignore[type-var]
            async for index, part in items:
                if part is None:
                    n_submitted += 1
                    if n_submitted == len(streams):
                        yield SUBMITTED
                    continue
                exchange.token_arrived(index)
                n_completion += len(part.token_ids)
                counts = Counts(job.n_prompt_tokens, job.n_cached_tokens, n_completion)
                if index not in begun:
                    begun.add(index)
                    prompt = await job.prompt_tokens() if encoder.prompt_at == "begin" else ()
                    if data := encoder.begin(index, counts, prompt):
                        yield data
                if data := encoder.part(index, part, counts):
                    yield data
    finally:
        exchange.count(job.n_prompt_tokens, n_completion)
    counts = Counts(job.n_prompt_tokens, job.n_cached_tokens, n_completion, *count_drafted(job.running))
    prompt = await job.prompt_tokens() if encoder.prompt_at == "end" else ()
    if data := encoder.end(counts, prompt):
        yield data


async def gather(exchange: Exchange, job: Job[Part]) -> list[list[Part]]:
    """Return the parts of each choice of an answer that is not streamed."""
    streams = job.streams()
    parts: list[list[Part]] = [[] for _ in streams]
    async with aclosing(merge_streams(streams)) as items:  # type: ignore[type-var]
        async for index, part in items:
            if part is not None:
                exchange.token_arrived(index)
                parts[index].append(part)
    return parts


async def join(parts: AsyncGenerator[bytes, None]) -> bytes:
    """Join the parts of an answer that is not streamed."""
    async with aclosing(parts):
        return b"".join([part async for part in parts])


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncIterator[tuple[int, T]]:
    """Yield the items of several streams as they arrive, each with the index of its stream.

    Closing the iterator closes the streams. If a stream raises an exception, the iterator raises it.
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
