"""``POST /v1/completions``: completes text or tokens, in OpenAI's format; and what chat completions share with it.

The fields and the events of a stream are the same in both.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response

from llamapipe._messages import shown
from llamapipe.errors import InvalidRequestError
from llamapipe.params import SamplingParams
from llamapipe.results import Choice, Completion, Delta, TokenLogprob
from llamapipe.server._fields import Only, Unused
from llamapipe.server._generation import (
    CompletionLogprobs,
    Prompt,
    given_prompts,
    n_prompts,
    prompt_logprobs,
    prompts_of,
)
from llamapipe.server._limits import check_top, total_choices
from llamapipe.server._sampling import (
    LoraScale,
    Prediction,
    Sampling,
    adapters_of,
    chosen_samplers,
    predicted,
    with_field,
)
from llamapipe.server.endpoint import SUBMITTED, EventStream, Exchange, JsonResponse, encode_json, event
from llamapipe.server.errors import ApiError
from llamapipe.streams import AsyncStream, PromptProgress
from llamapipe.text.stream import TextOffsets, prompt_offsets
from llamapipe.work.long_work import takes_long

if TYPE_CHECKING:
    from llamapipe.server.state import ServerState


_MOST_TOKENS = 2**31 - 1


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. ``include_obfuscation``: events are padded to hide the length of their text.

    ``continuous_usage_stats``: each event has the usage so far, as vLLM's.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Streamed(Sampling, kw_only=True):
    """A request whose answer may be a stream."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings_per_token: bool | None = None  # of llama-server: each event of a stream has the times so far
    lora: list[LoraScale] | None = None
    return_progress: bool | None = None  # of llama-server: a stream tells how much of the prompt is computed
    prediction: Prediction | str | None = None
    # llama-server's names.
    n_predict: int | None = None
    n_probs: int | None = None
    samplers: list[str] | str | None = None
    t_max_predict_ms: Annotated[int | None, Only(-1, 0, instead="max_tokens limits the answer")] = None
    response_fields: Annotated[list[str] | None, Unused([])] = None
    user: Annotated[str | None, Unused()] = None

    def check(self) -> None:
        """Raises ApiError 400 for stream options without a stream; an explicit ``"stream": false`` allows them."""
        if self.stream is None and self.stream_options is not None:
            raise ApiError(400, "stream_options is given, but stream is not", "stream_options")

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with an event that holds the usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether each event of the stream holds the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def is_padded(self) -> bool:
        """Whether events are padded."""
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)


def token_limit(**given: int | None) -> int | None:
    """The smallest of limits of generated tokens; None, as -1: no limit. Raises ApiError 400, which names the field."""
    for name, limit in given.items():
        if limit is not None and limit < -1:
            raise ApiError(400, f"{name} is {limit}; it must be 0 or more, or -1 for no limit", name)
        if limit is not None and limit > _MOST_TOKENS:
            raise ApiError(
                400, f"{name} is {shown(limit)}; it must be at most {_MOST_TOKENS}, or -1 for no limit", name
            )
    return min((limit for limit in given.values() if limit is not None and limit >= 0), default=None)


class CompletionRequest(Streamed, kw_only=True):
    """``POST /v1/completions``.

    ``add_special_tokens``, ``parse_special``: as in ``Model.tokenize``; both are true by default.
    ``truncate_prompt_tokens``: use the last so many tokens of each prompt.
    """

    prompt: Prompt
    suffix: str | None = None
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_embeds: Annotated[Any, Only(instead="give text or token ids")] = None

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None: no limit. Raises ApiError 400."""
        if self.max_tokens is None and self.n_predict is None:
            return _DEFAULT_MAX_TOKENS
        return token_limit(max_tokens=self.max_tokens, n_predict=self.n_predict)


T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
_PAD_TO = 32  # characters; padding extends an event's text to the next multiple of this


class ChunkWriter:
    """Writes the events of one stream of OpenAI's API.

    The parts that are the same in each event are encoded once. ``kind``: the ``object`` field. ``with_usage``: each
    event has a ``usage``, null in all but the last. ``padded``: a field ``obfuscation`` hides the length of texts.
    """

    def __init__(
        self, call_id: str, kind: str, created: int, model: str, with_usage: bool, padded: bool
    ) -> None:
        self._common = {"id": call_id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + encode_json(self._common)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
        self._padded = padded

    def __repr__(self) -> str:
        return f"ChunkWriter({self._common})"

    def chunk(self, choice: bytes, text: str = "", timings: dict[str, Any] | None = None) -> bytes:
        """An event with one choice, given as encoded JSON. ``text``: the text whose length the padding hides."""
        if not self._padded and timings is None:
            return self._head + choice + self._tail
        more = b"]"
        if self._padded:
            padding = secrets.token_hex(_PAD_TO)[: _PAD_TO - len(text) % _PAD_TO]
            more += b',"obfuscation":"' + padding.encode() + b'"'
        if timings is not None:
            more += b',"timings":' + encode_json(timings)
        return self._head + choice + more + self._tail[1:]

    def progress(self, choice: bytes, progress: PromptProgress) -> bytes:
        """An event with ``prompt_progress``."""
        fields = encode_json(progress_fields(progress))
        return self._head + choice + b'],"prompt_progress":' + fields + self._tail[1:]

    def set_usage(self, usage: dict[str, Any]) -> None:
        """The usage of the next events."""
        self._tail = b'],"usage":' + encode_json(usage) + b"}\n\n"

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event that ends a stream with usage."""
        return event({**self._common, "choices": [], "usage": usage})


def progress_fields(progress: PromptProgress) -> dict[str, int]:
    """llama-server's ``prompt_progress``: tokens, and milliseconds since the prompt was begun."""
    return {
        "total": progress.n_prompt_tokens,
        "cache": progress.n_cached_tokens,
        "processed": progress.n_done,
        "time_ms": round(progress.seconds * 1e3),
    }


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
        """The events for the choices that have come further; the first has what was cached."""
        made = b""
        for index, stream in enumerate(self._running):
            found = None if stream is None else stream.prompt_progress
            if found is not None:
                made += self._upto(index, found)
        return made

    def _upto(self, index: int, found: PromptProgress) -> bytes:
        made = b""
        for n_done in sorted({found.n_cached_tokens, found.n_done}):
            if self._told.get(index, -1) < n_done:
                self._told[index] = n_done
                made += self._writer.progress(self._choice % index, found._replace(n_done=n_done))
        return made

    def last(self, index: int) -> bytes:
        """The event for a choice whose whole prompt is computed."""
        stream = self._running[index]
        found = None if stream is None else stream.prompt_progress
        return b"" if found is None else self._upto(index, found._replace(n_done=found.n_prompt_tokens))


async def merge_streams(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncIterator[tuple[int, T]]:
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


_DEFAULT_MAX_TOKENS = 16  # the API's default
_PROGRESS = b'{"index":%d,"text":"","logprobs":null,"finish_reason":null}'


async def completions(exchange: Exchange, request: CompletionRequest) -> Response:
    """Completes one prompt or several, as a whole or as a stream."""
    if not request.stream:
        job = await _Job.of(exchange, request)
        return JsonResponse(await job.answer())
    jobs: list[_Job] = []

    async def events() -> AsyncGenerator[bytes, None]:
        jobs.append(await _Job.of(exchange, request))
        async with aclosing(jobs[0].events()) as made:
            async for data in made:
                yield data

    def news() -> bytes:
        return jobs[0].progress.news() if jobs else b""

    return EventStream(exchange, events(), sign=news if request.return_progress else None)


class _Job:
    """One request: its prompts as tokens, its params, and the answer."""

    def __init__(
        self,
        exchange: Exchange,
        request: CompletionRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
    ) -> None:
        self.exchange = exchange
        self.request = request
        self.prompts = prompts
        self._given = given_prompts(request.prompt)
        self._offsets: dict[int, list[int]] = {}  # of the tokens that logprobs show, by prompt
        self.n_cached = [0] * len(prompts)  # for streams: cached tokens of each prompt
        self.params = params
        self.model = exchange.server.check_model(request.model)
        self.id = f"cmpl-{exchange.id}"
        self.created = int(time.time())
        self.n = request.n or 1  # choices that are returned for each prompt
        self.running: list[AsyncStream | None] = [None] * (len(prompts) * self.n)
        self.writer = ChunkWriter(
            self.id, "text_completion", self.created, self.model, request.wants_usage, request.is_padded
        )
        self.progress = Progress(self.writer, _PROGRESS, self.running)

    @classmethod
    async def of(cls, exchange: Exchange, request: CompletionRequest) -> _Job:
        """Checks the request. Raises ApiError."""
        request.check()
        exchange.server.check_model(request.model)
        n = 1 if request.n is None else request.n
        best_of = request.best_of or n  # OpenAI allows 0, which means the same
        limit = exchange.server.settings.max_n
        if best_of > limit and request.best_of:
            raise ApiError(400, f"best_of is {best_of}; this server's limit is {limit}", "best_of")
        if best_of < n:
            raise ApiError(400, f"best_of is {best_of} and n is {n}; best_of must not be smaller", "best_of")
        if best_of > n and request.stream:
            raise ApiError(
                400, "best_of greater than n cannot be streamed: all choices must be complete", "best_of"
            )
        max_tokens = request.limit
        if request.suffix is not None and request.parse_special:
            raise ApiError(
                400,
                "parse_special: with suffix, names of control tokens stay text; leave it out",
                "parse_special",
            )
        if request.n_probs and request.logprobs is None:  # 0 is llama-server's word for none
            request.logprobs = check_top("n_probs", request.n_probs)
        top = check_top("logprobs", request.logprobs)
        more: dict[str, Any] = {
            "max_tokens": None if max_tokens is None else max(max_tokens, 1),
            "n": best_of,
        }
        if top is not None or best_of > n:
            more["logprobs"] = top or 0
        asked = check_top("prompt_logprobs", request.prompt_logprobs)
        if asked is not None and request.stream:
            raise ApiError(
                400, "prompt_logprobs cannot be streamed; give echo with logprobs", "prompt_logprobs"
            )
        if request.echo and top is not None:
            asked = max(top, asked or 0)
        if asked is not None:
            more["prompt_logprobs"] = asked
        total_choices(exchange.server, n_prompts(request.prompt) * best_of)
        more.update(predicted(request.prediction))
        more.update(adapters_of(exchange.server, request.model, request.lora))
        if request.samplers is not None:
            more |= chosen_samplers(exchange, request, request.samplers)
        params = request.params(exchange.server, **more)
        constraint = request.constraint()
        await check_params(exchange.server, params, "" if constraint is None else constraint.field)
        prompts = await prompts_of(
            exchange.server,
            request.prompt,
            "prompt",
            request.add_special_tokens is not False,
            request.parse_special is not False,
            request.suffix,
            request.truncate_prompt_tokens,
        )
        return cls(exchange, request, prompts, params)

    @property
    def _is_empty(self) -> bool:
        """The request asks for no tokens; the engine computes the prompt and one token, which is not returned."""
        return self.request.limit == 0

    # ---- complete
    async def answer(self) -> dict[str, Any]:
        """The answer, when all choices are complete."""
        state = self.exchange.server
        done = await self.exchange.await_engine(
            state.engine.agenerate(self.prompts, self.params, timeout=state.settings.timeout_s, block=False)
        )
        choices = [
            self._choice(completion, choice, i * self.n + j)
            for i, completion in enumerate(done)
            for j, choice in enumerate(self._best(completion))
        ]
        n_prompt = sum(completion.n_prompt_tokens for completion in done)
        n_completion = 0 if self._is_empty else sum(completion.n_completion_tokens for completion in done)
        self.exchange.count(n_prompt, n_completion)
        guesses = None
        if self.request.prediction is not None:
            guesses = sum(c.n_drafted_tokens for c in done), sum(c.n_accepted_tokens for c in done)
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage(n_prompt, n_completion, sum(c.n_cached_tokens for c in done), guesses),
            "timings": self.exchange.times.timings(n_prompt, n_completion),
        }

    def _best(self, completion: Completion) -> Sequence[Choice]:
        """Of the ``best_of`` choices, the ``n`` with the highest mean log-probability."""
        choices = completion.choices
        if len(choices) == self.n:
            return choices
        return sorted(choices, key=_mean_logprob, reverse=True)[: self.n]

    def _choice(self, completion: Completion, choice: Choice, index: int) -> dict[str, Any]:
        vocab = self.exchange.server.engine.model.vocab
        if self._is_empty:
            choice = replace(
                choice, text="", token_ids=[], finish_reason="length", logprobs=choice.logprobs and []
            )
        text = choice.text
        made: dict[str, Any] = {"text": text, "index": index, "logprobs": None}
        given, i = self.request, index // self.n
        if given.echo:
            made["text"] = self._echo(i) + text
        if given.logprobs is not None:
            entries = list(choice.logprobs or ())
            first = None
            if given.echo:
                scores = _narrowed(completion.prompt_logprobs or (), given.logprobs)
                entries = [*scores, *entries]
                if choice.stop_logprob is not None and not self._is_empty:
                    entries.append(choice.stop_logprob)  # clients that score prompts drop the last entry
                first = self._first(i)
            made["logprobs"] = self._writer(i).of(entries, first)
        if given.prompt_logprobs is not None:
            scores = _narrowed(completion.prompt_logprobs or (), given.prompt_logprobs)
            made["prompt_logprobs"] = prompt_logprobs(self.prompts[i], scores, vocab)
        if given.return_token_ids:
            made |= {"token_ids": choice.token_ids, "prompt_token_ids": self.prompts[i]}
        made["finish_reason"] = choice.finish_reason
        return made

    def _writer(self, i: int) -> CompletionLogprobs:
        """Writes the log-probabilities of a choice for prompt ``i``."""
        vocab = self.exchange.server.engine.model.vocab
        choice = self.params.choice
        # See ``SamplingParams``: its texts may follow a space that is not in the answer.
        skips_space = choice is not None and not any(text[:1].isspace() for text in choice)
        text = self._echo(i) if self.request.echo else ""
        if text and i not in self._offsets:
            pieces = ((vocab.piece(token), vocab.written_piece(token)) for token in self.prompts[i])
            self._offsets[i] = prompt_offsets(text, pieces)[self._first(i) is None :]
        offsets = TextOffsets(len(text), skips_space, self._offsets.get(i, ()))
        return CompletionLogprobs(vocab, offsets, bool(self.request.return_tokens_as_token_ids))

    def _first(self, i: int) -> int | None:
        """The first token of prompt ``i``, which has no log-probability; None if it is a BOS token that was added."""
        given, token = self._given[i], self.prompts[i][0]
        is_text = isinstance(given, str) or isinstance(given[0], str)
        return None if is_text and token == self.exchange.server.engine.model.vocab.bos else token

    def _echo(self, i: int) -> str:
        """The text of prompt ``i``."""
        given = self._given[i]
        if isinstance(given, str):
            return given
        return self.exchange.server.engine.model.vocab.detokenize(self.prompts[i], remove_special=True)

    # ---- streamed
    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the stream."""
        request, writer = self.request, self.writer
        streams = [self._stream(p, i) for p in range(len(self.prompts)) for i in range(self.n)]
        offsets = [self._writer(index // self.n) for index in range(len(streams))]
        with_ids = bool(request.return_token_ids)
        n_prompt = sum(map(len, self.prompts))
        n_completion = n_submitted = 0
        begun: set[int] = set()
        try:
            if request.echo:
                scores = await self._prompt_logprobs()
                for index, writes in enumerate(offsets):
                    i = index // self.n
                    logprobs = None if scores is None else writes.of(scores[i], self._first(i))
                    text = self._echo(i)
                    yield writer.chunk(_stream_choice(index, text, logprobs, None), text)
            async with aclosing(merge_streams(streams)) as items:  # type: ignore[type-var]
                async for index, delta in items:
                    if delta is None:
                        n_submitted += 1
                        if n_submitted == len(streams):
                            yield SUBMITTED
                        continue
                    self.exchange.token_arrived(index)
                    is_first = index not in begun
                    begun.add(index)
                    if request.return_progress and is_first:
                        yield self.progress.last(index)
                    if self._is_empty:
                        yield writer.chunk(_stream_choice(index, "", None, "length"))
                        continue
                    n_completion += len(delta.token_ids)
                    is_shown = delta.text or delta.finish_reason is not None or delta.logprobs is not None
                    if not (is_shown or with_ids):
                        continue  # an incomplete character
                    if request.wants_continuous_usage:
                        writer.set_usage(usage(n_prompt, n_completion, sum(self.n_cached)))
                    logprobs = None
                    if delta.logprobs is not None and request.logprobs is not None:
                        logprobs = offsets[index].of(delta.logprobs)
                    ids: dict[str, Any] | None = None
                    if with_ids:
                        ids = {"token_ids": delta.token_ids}
                        if is_first:
                            ids["prompt_token_ids"] = self.prompts[index // self.n]
                    timings = None
                    if request.timings_per_token or delta.finish_reason is not None:
                        timings = self.exchange.times.timings(n_prompt, n_completion)
                    choice = _stream_choice(index, delta.text, logprobs, delta.finish_reason, ids)
                    yield writer.chunk(choice, delta.text, timings)
        finally:
            self.exchange.count(n_prompt, n_completion)
        if request.wants_usage:
            running = [stream for stream in self.running if stream is not None]
            drafted = sum(stream.n_drafted_tokens for stream in running)
            accepted = sum(stream.n_accepted_tokens for stream in running)
            guesses = (drafted, accepted) if request.prediction is not None else None
            yield writer.usage(usage(n_prompt, n_completion, sum(self.n_cached), guesses))
        yield DONE

    async def _prompt_logprobs(self) -> list[list[TokenLogprob]] | None:
        """The log-probabilities of each prompt's tokens, which a stream sends before the first generated token."""
        if self.params.prompt_logprobs is None:
            return None
        given = self.params
        # Whose cells these are, and whether others may use them, is the same as for the answer.
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=given.prompt_logprobs,
            cache=given.cache,
            cache_salt=given.cache_salt,
            adapter=given.adapter,
            priority=given.priority,
        )
        done = await self.exchange.server.engine.agenerate(
            self.prompts,
            params,
            timeout=self.exchange.server.settings.timeout_s,
            block=False,
        )
        return [list(completion.prompt_logprobs or ()) for completion in done]

    async def _stream(self, p: int, i: int) -> AsyncGenerator[Delta | None, None]:
        """A choice of a prompt. Its first item is None: the request is in the queue."""
        params = replace(self.params, n=1, prompt_logprobs=None)
        if self.params.seed is not None:
            params = replace(params, seed=(self.params.seed + i) % 2**64)
        engine, timeout = self.exchange.server.engine, self.exchange.server.settings.timeout_s
        async with engine.astream(self.prompts[p], params, timeout=timeout, block=False) as stream:
            await stream.submit()
            self.exchange.times.follow(stream)
            self.running[p * self.n + i] = stream
            yield None
            async for delta in stream:
                if i == 0:  # the first of a prompt's choices computes it for the others
                    self.n_cached[p] = stream.n_cached_tokens
                yield delta
                if self._is_empty:
                    return


async def check_params(state: ServerState, params: SamplingParams, field: str) -> None:
    """Checks params for the engine's model before any prompt is. Raises ApiError 400, which names the field.

    ``field``: what holds the constraint, if one is given.
    """
    engine = state.engine
    try:
        if takes_long((), params):  # a constraint is compiled now, and the result is kept
            await state.in_thread(engine.check_params, params)
        else:
            engine.check_params(params)
    except InvalidRequestError as e:
        raise with_field(e, field) from None


def usage(
    n_prompt: int, n_completion: int, n_cached: int, guesses: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The tokens of all prompts and choices. ``guesses``: computed ones and right ones, if a text was predicted."""
    details = {}
    if guesses is not None:
        details["completion_tokens_details"] = {
            "accepted_prediction_tokens": guesses[1],
            "rejected_prediction_tokens": guesses[0] - guesses[1],
        }
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        **details,
    }


def _stream_choice(
    index: int,
    text: str,
    logprobs: dict[str, Any] | None,
    reason: str | None,
    ids: dict[str, Any] | None = None,
) -> bytes:
    if logprobs is None and reason is None and ids is None:
        return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}' % (index, encode_json(text))
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
    return encode_json(choice | (ids or {}))


def _narrowed(entries: Iterable[TokenLogprob], n_top: int) -> list[TokenLogprob]:
    """The entries with at most ``n_top`` alternatives."""
    return [TokenLogprob(entry.id, entry.logprob, entry.top[:n_top], entry.piece) for entry in entries]


def _mean_logprob(choice: Choice) -> float:
    total = choice.cumulative_logprob
    return total / len(choice.token_ids) if total is not None and choice.token_ids else float("-inf")
