"""llama-server's formats: ``/completion``, ``/infill`` for editors, ``/props`` and ``/slots``.

Open it to change what llama.vim, llama.vscode and Continue send and read. Each choice of an answer is a stream of the
engine, even if the client does not ask for a stream. Two of llama-server's limits, ``n_indent`` and
``t_max_predict_ms``, depend on the text and the time so far.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response

from llamapipe._messages import shown
from llamapipe.llama.fim import FimText, fim_room
from llamapipe.llama.vocab import Vocab
from llamapipe.params import SamplingParams
from llamapipe.results import Delta
from llamapipe.server.dialects.llama_server import CUT, Form, LlamaServerEncoder, generation_settings
from llamapipe.server.dialects.logprobs import token_text
from llamapipe.server.dialects.openai_stream import system_fingerprint
from llamapipe.server.endpoint import EventStream, Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.generation import (
    AnyPrompt,
    fim_prompt_of,
    n_prompts,
    plain_prompts,
    prompts_of,
)
from llamapipe.server.requests.job import TextJob, encode_stream, join
from llamapipe.server.requests.limits import check_top, total_choices
from llamapipe.server.requests.sampling import (
    LoraScale,
    Sampling,
    adapters_of,
    by_token,
    chosen_samplers,
    listed_biases,
    shown_slot,
    slot_name,
)
from llamapipe.server.requests.text_options import check_params, token_limit
from llamapipe.server.requests.time_limit import check_time_limit
from llamapipe.server.state import ServerState


class LlamaServerRequest(Sampling, kw_only=True):
    """The fields that ``/completion`` and ``/infill`` share.

    ``n_predict``: 0 computes only the prompt, -1 means no limit. ``n_indent``: the text ends at the first later line
    that is indented by fewer characters. ``t_max_predict_ms``: the text ends with the first line that is completed
    more than this many milliseconds after the first token. ``response_fields``: the only fields of the answer, as
    paths such as ``timings/prompt_n``. ``logprobs`` and ``max_completion_tokens``: other names of ``n_probs`` and
    ``n_predict``.
    """

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_cmpl: int | None = None
    n_probs: int | None = None
    logprobs: int | None = None
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

    prompt: AnyPrompt


class OtherFile(msgspec.Struct, kw_only=True):
    """A file other than the edited file. Editors add fields, such as ``time``, that do not go into the prompt."""

    text: str
    filename: str = "tmp"


class InfillRequest(LlamaServerRequest, kw_only=True):
    """``POST /infill``. ``prompt``: the text before the cursor in its line, after ``input_prefix``.

    ``input_extra``: other files, the most important last. ``filename``: the name of the edited file.
    """

    input_prefix: str
    input_suffix: str
    prompt: str | None = None
    input_extra: list[OtherFile] | None = None
    filename: str | None = None


async def completion(exchange: Exchange, request: LlamaCompletionRequest) -> Response:
    """``POST /completion``: completes one prompt or several."""
    plain = plain_prompts(request.prompt)

    async def prompts() -> tuple[list[list[int]], bool]:
        return await prompts_of(exchange.server, plain, "prompt"), False

    total_choices(exchange.server, n_prompts(plain) * _n_choices(request))
    return await _answer(exchange, request, prompts)


async def infill(exchange: Exchange, request: InfillRequest) -> Response:
    """``POST /infill``: generates the text between a prefix and a suffix."""
    total_choices(exchange.server, _n_choices(request))
    state = exchange.server

    async def prompts() -> tuple[list[list[int]], bool]:
        extra = tuple((file.filename, file.text) for file in request.input_extra or ())
        prefix = request.input_prefix + (request.prompt or "")
        order = state.settings.fim_order
        text = FimText(prefix, request.input_suffix, extra, request.filename, order)
        prompt = await fim_prompt_of(
            state, text, fim_room(state.engine.n_ctx, _limit(request)), "input_prefix"
        )
        return [prompt.tokens], prompt.is_cut

    return await _answer(exchange, request, prompts)


async def _answer(exchange: Exchange, request: LlamaServerRequest, prompts: Prompts) -> Response:
    if not request.stream:
        job, encoder = await _prepared(exchange, request, prompts)
        return JsonResponse(await exchange.await_streams(join(encode_stream(exchange, job, encoder))))
    encoders: list[LlamaServerEncoder] = []

    async def events() -> AsyncGenerator[bytes, None]:
        job, encoder = await _prepared(exchange, request, prompts)
        encoders.append(encoder)
        async with aclosing(encode_stream(exchange, job, encoder)) as stream:
            async for data in stream:
                yield data

    def news() -> bytes:
        return encoders[0].news() if encoders else b""

    return EventStream(exchange, events(), sign=news if request.return_progress else None)


async def _prepared(
    exchange: Exchange, request: LlamaServerRequest, prompts: Prompts
) -> tuple[_Job, LlamaServerEncoder]:
    model = exchange.server.check_model(request.model or None)
    params = _params(exchange, request)
    await check_params(exchange.server, params, request.constraint())
    tokens, is_cut = await prompts()
    wanted = tuple(request.response_fields or ())
    with_texts = not wanted or "prompt" in [path.partition("/")[0] for path in wanted]
    job = _Job(exchange, request, tokens, params, with_texts)
    form = Form(
        bool(request.stream),
        bool(request.return_tokens),
        bool(request.timings_per_token),
        bool(request.return_progress),
        wanted,
        is_cut,
        _limit(request) == 0,
        -1 if exchange.server.settings.slot_save_path is None else shown_slot(slot_name(request.id_slot)),
    )
    vocab = exchange.server.engine.model.vocab
    return job, LlamaServerEncoder(model, form, params, job.prompts, job.texts, vocab, job.running)


# Returns the prompts as tokens, and whether they were cut.
Prompts = Callable[[], Awaitable[tuple[list[list[int]], bool]]]


# ---- options
_MOST_OF_A_LIMIT = 2**31 - 1


def _limit(request: LlamaServerRequest) -> int | None:
    return token_limit(
        n_predict=request.n_predict,
        max_tokens=request.max_tokens,
        max_completion_tokens=request.max_completion_tokens,
    )


def _n_choices(request: LlamaServerRequest) -> int:
    if request.n is not None and request.n_cmpl is not None:
        raise ApiError(400, "n and n_cmpl are the same option; give one", "n_cmpl")
    n = request.n if request.n_cmpl is None else request.n_cmpl
    if n is not None and n < 1:
        raise ApiError(400, f"n_cmpl is {n}; it must be 1 or more", "n_cmpl")
    return n or 1


def _params(exchange: Exchange, request: LlamaServerRequest) -> SamplingParams:
    tokenize = partial(exchange.server.engine.model.vocab.tokenize, add_special=False)
    limit = _limit(request)
    more: dict[str, Any] = {"max_tokens": None if limit is None else max(limit, 1), "n": 1}
    top = check_top("logprobs", request.logprobs)
    probs = top if request.n_probs is None else check_top("n_probs", request.n_probs)
    if probs:
        more["logprobs"] = probs
    if isinstance(request.logit_bias, list):
        more["logit_bias"] = by_token(listed_biases(request.logit_bias), tokenize)
        request.logit_bias = None
    if request.samplers is not None:
        more |= chosen_samplers(exchange, request, request.samplers)
    check_time_limit(request.t_max_predict_ms)
    n_indent = request.n_indent
    if n_indent is not None and not 0 <= n_indent <= _MOST_OF_A_LIMIT:
        raise ApiError(
            400, f"n_indent is {shown(n_indent)}; it must be from 0 to {_MOST_OF_A_LIMIT}", "n_indent"
        )
    more.update(adapters_of(exchange.server, request.model or None, request.lora))
    params = request.params(exchange.server, **more)
    return params if params.seed is not None else replace(params, seed=secrets.randbelow(2**32))


async def lora_adapters(exchange: Exchange) -> Response:
    """``GET /lora-adapters``: the loaded adapters, with scale 0, because no request uses one by default."""
    vocab = exchange.server.engine.model.vocab
    entries: list[dict[str, Any]] = []
    for i, adapter in enumerate(exchange.server.loras):
        entry = {"id": i, "name": adapter.name, "path": adapter.path.name, "scale": 0.0}
        if tokens := adapter.invocation_tokens:
            written = b"".join(map(vocab.written_piece, tokens)).decode(errors="replace")
            entry |= {"alora_invocation_string": written, "alora_invocation_tokens": list(tokens)}
        entries.append(entry)
    return JsonResponse(entries)


# ---- the text of a choice
_LAST_INDENT = re.compile(r"\n[ \t]*\Z")


class TextLimits:
    """Cuts a text as ``n_indent`` asks. Text is held back while it may still be cut."""

    def __init__(self, n_indent: int | None) -> None:
        # The end of a line, and an indentation of the next line that is too small.
        self._cut = re.compile(rf"\n[ \t]{{0,{n_indent - 1}}}(?=[^ \t])") if n_indent else None
        self._line = ""  # a line's end and the next line's indentation, which may still grow
        self.is_over = False

    def __repr__(self) -> str:
        return f"<TextLimits line={self._line!r} is_over={self.is_over}>"

    def push(self, text: str) -> str:
        """Take new text. Returns the text that can be shown."""
        if self._cut is None:
            return text
        text, start = self._line + text, len(self._line[:1])  # the line's end was already returned
        if cut := self._cut.search(text):
            self.is_over = True
            return text[start : cut.end()]
        last = _LAST_INDENT.search(text)
        self._line = "" if last is None else last[0]
        return text[start:] if last is None else text[start : last.start() + 1]

    def finish(self) -> str:
        """Return the text that is still held back. Call it at the end of the text."""
        return self._line[1:]


class _Job(TextJob):
    """The choices, each of which may end early. ``texts``: the prompt of each as text, set when the choice ends."""

    late_reason = CUT

    def __init__(
        self,
        exchange: Exchange,
        request: LlamaServerRequest,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        with_texts: bool,
    ) -> None:
        n = _n_choices(request)
        most_ms = check_time_limit(request.t_max_predict_ms)
        super().__init__(exchange, prompts, params, n, _limit(request) == 0, most_ms)
        self.prompts = [tokens for tokens in prompts for _ in range(n)]
        self.texts = [""] * len(self.prompts)
        self._request = request
        self._state = exchange.server
        self._with_texts = with_texts

    def streams(self) -> list[AsyncGenerator[Delta | None, None]]:
        return [self._limited(index, parts) for index, parts in enumerate(super().streams())]

    async def _limited(
        self, index: int, parts: AsyncGenerator[Delta | None, None]
    ) -> AsyncGenerator[Delta | None, None]:
        limits = TextLimits(self._request.n_indent)
        async with aclosing(parts):
            async for part in parts:
                if part is None:
                    yield None
                    continue
                text = limits.push(part.text)
                reason = CUT if limits.is_over else part.finish_reason
                if reason is not None and not limits.is_over:
                    text += limits.finish()
                if reason is not None and self._with_texts:
                    tokens = self.prompts[index]
                    detokenize = self._state.engine.model.vocab.detokenize
                    self.texts[index] = await self._state.in_thread(
                        detokenize, tokens, False, True, size=len(tokens)
                    )
                stop = None if limits.is_over else part.stop_string
                yield part._replace(text=text, finish_reason=reason, stop_string=stop)
                if limits.is_over:
                    return


# ---- the server
async def props(exchange: Exchange) -> Response:
    """``GET /props``: the model's template and special tokens, and the defaults for requests."""
    state = exchange.server
    engine, model = state.engine, state.engine.model
    defaults = generation_settings(SamplingParams(**{"max_tokens": None, **(state.settings.sampling or {})}))
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
            "build_info": system_fingerprint(),
            "is_sleeping": False,
        }
    )


def _written(vocab: Vocab, token: int | None) -> str:
    return "" if token is None else token_text(vocab.written_piece(token))


async def slots(exchange: Exchange) -> Response:
    """``GET /slots``: a list of the engine's slots, with the number of busy slots but not which requests they hold.

    With ``?fail_on_no_slot=1``, answers 503 if no slot is free.
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
