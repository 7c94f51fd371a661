"""llama-server's formats: ``/completion``, ``/infill`` for editors, ``/props`` and ``/slots``.

Open it for what llama.vim, llama.vscode and Continue send and read. Each choice of an answer is a stream of the engine,
also where the client asks for no stream: two of llama-server's limits, ``n_indent`` and ``t_max_predict_ms``, depend on
the text and the time so far.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.responses import Response

import llamapipe
from llamapipe._messages import shown
from llamapipe._sampling_table import OPTIONS, SAMPLER_ORDER, Kind
from llamapipe.llama.fim import FimText, fim_room
from llamapipe.llama.vocab import Vocab
from llamapipe.params import SamplingParams
from llamapipe.results import Delta, TokenLogprob
from llamapipe.server._completions import check_params, token_limit
from llamapipe.server._generation import (
    Prompt,
    fim_prompt_of,
    n_prompts,
    prompts_of,
)
from llamapipe.server._job import merge_streams
from llamapipe.server._json import event
from llamapipe.server._limits import check_top, total_choices
from llamapipe.server._sampling import LoraScale, Sampling, adapters_of, chosen_samplers, token_biases
from llamapipe.server._times import timings
from llamapipe.server.dialects.logprobs import chat_logprobs, token_text
from llamapipe.server.dialects.openai_stream import progress_fields
from llamapipe.server.endpoint import SUBMITTED, EventStream, Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.streams import AsyncStream

if TYPE_CHECKING:
    from llamapipe.server.state import ServerState


class LlamaServerRequest(Sampling, kw_only=True):
    """What ``/completion`` and ``/infill`` share. ``n_predict``: 0 computes the prompt only, -1 has no limit.

    ``n_indent``: the text ends with a later line that is indented less. ``t_max_predict_ms``: it ends with the first
    line that is complete so long after the first token. ``response_fields``: paths such as ``timings/prompt_n``; the
    answer has only these.
    """

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    n_cmpl: int | None = None
    n_probs: int | None = None
    samplers: list[str] | str | None = None
    logit_bias: dict[str, float] | list[tuple[int | str, float | bool]] | None = None  # type: ignore[assignment]
    n_indent: int | None = None
    t_max_predict_ms: int | None = None
    response_fields: list[str] | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    lora: list[LoraScale] | None = None


class LlamaCompletionRequest(LlamaServerRequest, kw_only=True):
    """``POST /completion``, in llama-server's format."""

    prompt: Prompt


class OtherFile(msgspec.Struct, kw_only=True):
    """A file beside the one that is edited. Editors add fields, such as ``time``, that no prompt has."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaServerRequest, kw_only=True):
    """``POST /infill``. ``prompt``: what stands before the cursor in its line, after ``input_prefix``.

    ``input_extra``: other files, the most important last. ``filename``: that of the edited file.
    """

    input_prefix: str
    input_suffix: str
    prompt: str | None = None
    input_extra: list[OtherFile] | None = None
    filename: str | None = None


async def completion(exchange: Exchange, request: LlamaCompletionRequest) -> Response:
    """``POST /completion``: completes one prompt or several."""

    async def prompts() -> tuple[list[list[int]], bool]:
        return await prompts_of(exchange.server, request.prompt, "prompt"), False

    total_choices(exchange.server, n_prompts(request.prompt) * _n_choices(request))
    return await _answer(exchange, request, prompts)


async def infill(exchange: Exchange, request: InfillRequest) -> Response:
    """``POST /infill``: the text between a prefix and a suffix."""
    total_choices(exchange.server, _n_choices(request))
    state = exchange.server

    async def prompts() -> tuple[list[list[int]], bool]:
        extra = tuple((file.filename, file.text) for file in request.input_extra or ())
        prefix = request.input_prefix + (request.prompt or "")
        order = state.settings.fim_order
        text = FimText(prefix, request.input_suffix, extra, request.filename, order)
        made = await fim_prompt_of(state, text, fim_room(state.engine.n_ctx, _limit(request)), "input_prefix")
        return [made.tokens], made.is_cut

    return await _answer(exchange, request, prompts)


async def _answer(exchange: Exchange, request: LlamaServerRequest, prompts: Any) -> Response:
    if not request.stream:
        job = await _Job.of(exchange, request, prompts)
        return JsonResponse(await exchange.await_streams(job.answer()))
    jobs: list[_Job] = []

    async def events() -> AsyncGenerator[bytes, None]:
        jobs.append(await _Job.of(exchange, request, prompts))
        async with aclosing(jobs[0].events()) as made:
            async for data in made:
                yield data

    def news() -> bytes:
        return jobs[0].progress() if jobs else b""

    return EventStream(exchange, events(), sign=news if request.return_progress else None)


# ---- options
_MOST_OF_A_LIMIT = 2**31 - 1


def _limit(request: LlamaServerRequest) -> int | None:
    return token_limit(n_predict=request.n_predict, max_tokens=request.max_tokens)


def _n_choices(request: LlamaServerRequest) -> int:
    if request.n is not None and request.n_cmpl is not None:
        raise ApiError(400, "n and n_cmpl are the same option; give one", "n_cmpl")
    n = request.n if request.n_cmpl is None else request.n_cmpl
    if n is not None and n < 1:
        raise ApiError(400, f"n_cmpl is {n}; it must be 1 or more", "n_cmpl")
    return n or 1


def _params(exchange: Exchange, request: LlamaServerRequest) -> SamplingParams:
    """The request's options. Raises ApiError 400."""
    vocab = exchange.server.engine.model.vocab

    def tokenize(text: str) -> list[int]:
        return vocab.tokenize(text, add_special=False)

    limit = _limit(request)
    more: dict[str, Any] = {"max_tokens": None if limit is None else max(limit, 1), "n": 1}
    probs = check_top("n_probs", request.n_probs)
    if probs:
        more["logprobs"] = probs
    if isinstance(request.logit_bias, list):
        more["logit_bias"], request.logit_bias = token_biases(request.logit_bias, tokenize), None
    if request.samplers is not None:
        more |= chosen_samplers(exchange, request, request.samplers)
    for name in ("n_indent", "t_max_predict_ms"):
        value = getattr(request, name)
        least = -1 if name == "t_max_predict_ms" else 0
        if value is not None and not least <= value <= _MOST_OF_A_LIMIT:
            raise ApiError(
                400, f"{name} is {shown(value)}; it must be from {least} to {_MOST_OF_A_LIMIT}", name
            )
    more.update(adapters_of(exchange.server, request.model or None, request.lora))
    params = request.params(exchange.server, **more)
    return params if params.seed is not None else replace(params, seed=secrets.randbelow(2**32))


async def lora_adapters(exchange: Exchange) -> Response:
    """``GET /lora-adapters``: what is loaded. No request uses one unless it says so, hence the scale 0."""
    vocab = exchange.server.engine.model.vocab
    found: list[dict[str, Any]] = []
    for i, adapter in enumerate(exchange.server.loras):
        entry = {"id": i, "name": adapter.name, "path": adapter.path.name, "scale": 0.0}
        if tokens := adapter.invocation_tokens:
            written = b"".join(map(vocab.written_piece, tokens)).decode(errors="replace")
            entry |= {"alora_invocation_string": written, "alora_invocation_tokens": list(tokens)}
        found.append(entry)
    return JsonResponse(found)


def generation_settings(params: SamplingParams) -> dict[str, Any]:
    """Options with llama-server's names, as its answers have them."""
    made: dict[str, Any] = {
        option.name: getattr(params, option.name)
        for option in OPTIONS
        if option.kind in (Kind.INT, Kind.FLOAT, Kind.FLAG) and option.fields != ()
    }
    del made["infill"], made["cache"], made["n"], made["min_tokens"]
    limit = -1 if params.max_tokens is None else params.max_tokens
    order = SAMPLER_ORDER if params.sampler_order is None else params.sampler_order
    return made | {
        "seed": -1 if params.seed is None else params.seed,
        "n_predict": limit,
        "max_tokens": limit,
        "n_probs": params.logprobs or 0,
        "stop": list(params.stop or ()),
        "dry_sequence_breakers": list(params.dry_sequence_breakers),
        "samplers": ["typ_p" if name == "typical_p" else name for name in order],
    }


# ---- the text of a choice
class TextLimits:
    """Ends a text where ``n_indent`` or ``t_max_predict_ms`` end it. Text is held back while it may still be cut."""

    def __init__(self, n_indent: int | None, most_ms: int | None) -> None:
        self._n_indent = n_indent or 0
        self._most_s = (most_ms or 0) / 1e3
        self._text = ""
        self._n_shown = 0
        self._line: int | None = None  # where a line begins whose indentation is not known yet
        self._from = 0  # where the next newline is looked for
        self.is_over = False

    def __repr__(self) -> str:
        return f"<TextLimits n_characters={len(self._text)} is_over={self.is_over}>"

    def push(self, text: str, seconds: float) -> str:
        """Takes new text, ``seconds`` after the first token. Returns what can be shown."""
        self._text += text
        if self._n_indent:
            self._follow_lines()
        if "\n" in text and 0 < self._most_s < seconds:
            self.is_over = True
        return self._shown(len(self._text) if self._line is None or self.is_over else self._line)

    def _follow_lines(self) -> None:
        while True:
            if self._line is None:
                newline = self._text.find("\n", self._from)
                if newline < 0:
                    self._from = len(self._text)
                    return
                self._line = newline + 1
            end = self._line
            while self._text[end : end + 1] in (" ", "\t"):
                end += 1
            if end == len(self._text):
                return
            if end - self._line < self._n_indent:
                self._text = self._text[:end]
                self.is_over = True
                return
            self._line, self._from = None, end

    def finish(self) -> str:
        """The text that was held back, at the end."""
        return self._shown(len(self._text))

    def _shown(self, end: int) -> str:
        start, self._n_shown = self._n_shown, max(end, self._n_shown)
        return self._text[start:end]


class _Part(NamedTuple):
    """What is new of a choice."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None


class _Choice:
    """One text, as far as it has come. ``stop_type``: why it ended, ``"none"`` until then."""

    def __init__(self, tokens: list[int]) -> None:
        self.prompt = tokens
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.stop_type = "none"
        self.stopping_word = ""
        self.is_full = False  # the context
        self.n_cached = 0
        self.began_at = perf_counter()
        self.first_at: float | None = None
        self.prompt_s = 0.0
        self.last_at = 0.0
        self.stream: AsyncStream | None = None
        self.n_told = -1  # tokens of the prompt, in events of progress

    def take(self, part: _Part) -> None:
        self.text.append(part.text)
        self.tokens += part.tokens
        self.logprobs += part.logprobs or ()

    def timings(self) -> dict[str, Any]:
        predicted_ms = 0.0 if self.first_at is None else (self.last_at - self.first_at) * 1e3
        return timings(self.n_cached, len(self.prompt), self.prompt_s * 1e3, len(self.tokens), predicted_ms)


class _Job:
    """One request: its prompts as tokens, its params, and the answer."""

    def __init__(
        self,
        exchange: Exchange,
        request: LlamaServerRequest,
        prompts: Sequence[list[int]],
        is_cut: bool,
        params: SamplingParams,
    ) -> None:
        self._exchange = exchange
        self._request = request
        self._params = params
        self._is_cut = is_cut
        self._is_empty = _limit(request) == 0
        self._model = exchange.server.check_model(request.model or None)
        self._n = _n_choices(request)
        self._choices = [_Choice(tokens) for tokens in prompts for _ in range(self._n)]
        self._n_prompt = sum(map(len, prompts))

    @classmethod
    async def of(cls, exchange: Exchange, request: LlamaServerRequest, prompts: Any) -> _Job:
        """Checks the request. Raises ApiError."""
        exchange.server.check_model(request.model or None)
        params = _params(exchange, request)
        constraint = request.constraint()
        await check_params(exchange.server, params, "" if constraint is None else constraint.field)
        tokens, is_cut = await prompts()
        return cls(exchange, request, tokens, is_cut, params)

    async def answer(self) -> Any:
        """The answer: an object, or a list of them for several prompts or choices."""
        try:
            async with aclosing(merge_streams(self._streams())) as items:  # type: ignore[type-var]
                async for index, part in items:
                    if part is not None:
                        self._exchange.token_arrived(index)
        finally:
            self._exchange.count(self._n_prompt, sum(len(c.tokens) for c in self._choices))
        answers = [await self._last(i) for i in range(len(self._choices))]
        return answers if len(answers) > 1 else answers[0]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of the stream; the last of each choice has everything but the text."""
        request, n_submitted = self._request, 0
        try:
            async with aclosing(merge_streams(self._streams())) as items:  # type: ignore[type-var]
                async for index, part in items:
                    if part is None:
                        n_submitted += 1
                        if n_submitted == len(self._choices):
                            yield SUBMITTED
                        continue
                    choice = self._choices[index]
                    self._exchange.token_arrived(index)
                    if request.return_progress:
                        yield self.progress()
                    if part.text or part.tokens:
                        yield event(self._partial(index, part))
                    if choice.stop_type != "none":
                        yield event(await self._last(index))
        finally:
            self._exchange.count(self._n_prompt, sum(len(c.tokens) for c in self._choices))

    def _streams(self) -> list[AsyncGenerator[_Part | None, None]]:
        return [self._stream(i) for i in range(len(self._choices))]

    async def _stream(self, index: int) -> AsyncGenerator[_Part | None, None]:
        """The parts of a choice. The first item is None: the request is in the queue."""
        choice, state = self._choices[index], self._exchange.server
        assert self._params.seed is not None
        params = replace(self._params, seed=(self._params.seed + index % self._n) % 2**64)
        limits = TextLimits(self._request.n_indent, self._request.t_max_predict_ms)
        stream = state.engine.astream(choice.prompt, params, timeout=state.settings.timeout_s, block=False)
        async with stream:
            await stream.submit()
            self._exchange.times.follow(stream)
            choice.stream = stream
            yield None
            async for delta in stream:
                part = self._part(choice, stream, limits, delta)
                choice.take(part)
                yield part
                if choice.stop_type != "none":
                    return

    def _part(self, choice: _Choice, stream: AsyncStream, limits: TextLimits, delta: Delta) -> _Part:
        choice.last_at = perf_counter()
        if choice.first_at is None:
            choice.first_at = choice.last_at
            choice.n_cached = stream.n_cached_tokens
            progress = stream.prompt_progress
            choice.prompt_s = choice.last_at - choice.began_at if progress is None else progress.seconds
        if self._is_empty:
            choice.stop_type = "limit"
            return _Part("", (), None)
        text = limits.push(delta.text, choice.last_at - choice.first_at)
        if limits.is_over:
            choice.stop_type = "limit"
        elif delta.finish_reason is not None:
            text += limits.finish()
            choice.stop_type = (
                "limit" if delta.finish_reason != "stop" else "word" if delta.stop_string else "eos"
            )
            choice.stopping_word = delta.stop_string or ""
            most = self._params.max_tokens
            n = len(choice.tokens) + len(delta.token_ids)
            choice.is_full = delta.finish_reason == "length" and (most is None or n < most)
        return _Part(text, delta.token_ids, delta.logprobs)

    # ---- objects
    def progress(self) -> bytes:
        """Events that tell how much of the prompts is computed, for those that have come further."""
        made = b""
        for index, choice in enumerate(self._choices):
            found = None if choice.stream is None else choice.stream.prompt_progress
            if found is None:
                continue
            for n_done in sorted({found.n_cached_tokens, found.n_done}):
                if choice.n_told < n_done:
                    choice.n_told = n_done
                    fields = progress_fields(found._replace(n_done=n_done))
                    made += event(self._partial(index, _Part("", (), None)) | {"prompt_progress": fields})
        return made

    def _partial(self, index: int, part: _Part) -> dict[str, Any]:
        choice = self._choices[index]
        made: dict[str, Any] = {
            "index": index,
            "content": part.text,
            "tokens": part.tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": len(choice.prompt),
        }
        if self._request.timings_per_token:
            made["timings"] = choice.timings()
        if part.logprobs:
            made["completion_probabilities"] = _probabilities(part.logprobs, self._vocab)
        return made

    @property
    def _vocab(self) -> Vocab:
        return self._exchange.server.engine.model.vocab

    async def _last(self, index: int) -> dict[str, Any]:
        """The last object of a choice, with the fields that the client asks for."""
        choice, request = self._choices[index], self._request
        wanted = request.response_fields
        roots = None if not wanted else {path.partition("/")[0] for path in wanted}
        text = "".join(choice.text)
        made: dict[str, Any] = {
            "index": index,
            "content": "" if request.stream else text,
            "tokens": [] if request.stream or not request.return_tokens else choice.tokens,
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(choice.tokens),
            "tokens_evaluated": len(choice.prompt),
            "has_new_line": "\n" in text,
            "truncated": self._is_cut or choice.is_full,
            "stop_type": choice.stop_type,
            "stopping_word": choice.stopping_word,
            "tokens_cached": len(choice.prompt) + len(choice.tokens),
            "timings": choice.timings(),
        }
        if roots is None or "generation_settings" in roots:
            made["generation_settings"] = generation_settings(self._params)
            made["generation_settings"] |= {"stream": bool(request.stream)}
            if self._is_empty:
                made["generation_settings"] |= {"n_predict": 0, "max_tokens": 0}
        if roots is None or "prompt" in roots:
            made["prompt"] = await self._exchange.server.in_thread(
                self._vocab.detokenize, choice.prompt, False, True, size=len(choice.prompt)
            )
        if choice.logprobs and not request.stream:
            made["completion_probabilities"] = _probabilities(choice.logprobs, self._vocab)
        return made if not wanted else _at_paths(made, wanted)


def _probabilities(entries: Iterable[TokenLogprob], vocab: Vocab) -> list[dict[str, Any]]:
    """``completion_probabilities``: as OpenAI's ``logprobs`` of chats, with ids."""
    entries = list(entries)
    made: list[dict[str, Any]] = chat_logprobs(entries, vocab)["content"]
    for entry, record in zip(entries, made, strict=True):
        record["id"] = entry.id
        for top, its in zip(entry.top, record["top_logprobs"], strict=True):
            its["id"] = top.id
    return made


def _at_paths(value: dict[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The values at these paths, by path, as llama-server's ``response_fields``; what is not there is left out."""
    made: dict[str, Any] = {}
    for path in paths:
        found: Any = value
        for key in path.split("/"):
            if not isinstance(found, dict) or key not in found:
                break
            found = found[key]
        else:
            made[path] = found
    return made


# ---- the server
async def props(exchange: Exchange) -> Response:
    """``GET /props``: the model's template and tokens, and the defaults of requests, for llama-server's clients."""
    state = exchange.server
    engine, model = state.engine, state.engine.model
    defaults = generation_settings(SamplingParams(max_tokens=None))
    return JsonResponse(
        {
            "default_generation_settings": {"params": defaults, "n_ctx": engine.n_ctx},
            "total_slots": engine.n_seq_max,
            "model_alias": state.model_names[0],
            "model_path": model.path.name,
            "modalities": {"vision": model.supports_images, "audio": model.supports_audio, "video": False},
            "endpoint_slots": True,
            "endpoint_props": False,
            "endpoint_metrics": True,
            "chat_template": model.chat_template or "",
            "bos_token": _written(model.vocab, model.vocab.bos),
            "eos_token": _written(model.vocab, model.vocab.eos),
            "build_info": f"llamapipe {llamapipe.__version__}",
            "is_sleeping": False,
        }
    )


def _written(vocab: Vocab, token: int | None) -> str:
    return "" if token is None else token_text(vocab.written_piece(token))


async def slots(exchange: Exchange) -> Response:
    """``GET /slots``: how many of the engine's slots compute a request. Which one is which is not told.

    ``?fail_on_no_slot=1`` answers 503 if none is free.
    """
    state: ServerState = exchange.server
    n = state.engine.n_seq_max
    stats = await asyncio.to_thread(state.engine.stats)
    n_busy = min(stats.n_active, n)
    if n_busy == n and exchange.query_params.get("fail_on_no_slot"):
        raise ApiError(503, "no slot is free", code="unavailable")
    return JsonResponse(
        [
            {
                "id": i,
                "n_ctx": state.engine.n_ctx,
                "speculative": not stats.no_guesses,
                "is_processing": i < n_busy,
            }
            for i in range(n)
        ]
    )
