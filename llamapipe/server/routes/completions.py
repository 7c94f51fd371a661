"""``POST /v1/completions``, in OpenAI's format, and the fields that chat completions share with it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from starlette.responses import Response

from llamapipe.server._fields import Only
from llamapipe.server.dialects.completions import CompletionEncoder, Prompts, Shown
from llamapipe.server.endpoint import EventStream, Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.generation import Prompt, given_prompts, n_prompts, prompts_of
from llamapipe.server.requests.job import TextJob, encode_stream, record_counts
from llamapipe.server.requests.limits import check_top, total_choices
from llamapipe.server.requests.sampling import (
    adapters_of,
    chosen_samplers,
    predicted,
)
from llamapipe.server.requests.text_options import Streamed, check_params, token_limit
from llamapipe.server.requests.time_limit import check_time_limit


class CompletionRequest(Streamed, kw_only=True):
    """``POST /v1/completions``.

    ``add_special_tokens``, ``parse_special``: as in ``Model.tokenize``; both are true by default.
    ``truncate_prompt_tokens``: use only this many tokens at the end of each prompt.
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
        """The maximum tokens of an answer; None: no limit. Raises ApiError 400."""
        if self.max_tokens is None and self.n_predict is None:
            return _DEFAULT_MAX_TOKENS
        return token_limit(max_tokens=self.max_tokens, n_predict=self.n_predict)


_DEFAULT_MAX_TOKENS = 16  # the API's default


async def completions(exchange: Exchange, request: CompletionRequest) -> Response:
    """Complete one prompt or several, in one piece or as a stream."""
    if not request.stream:
        job, encoder = await _prepared(exchange, request)
        done = await job.complete()
        return JsonResponse(encoder.whole(done, record_counts(exchange, *done, is_empty=job.is_empty)))
    encoders: list[CompletionEncoder] = []

    async def events() -> AsyncGenerator[bytes, None]:
        job, encoder = await _prepared(exchange, request)
        encoders.append(encoder)
        if request.echo:
            scores = await job.prompt_logprobs()
            for index in range(len(job.running)):
                yield encoder.echo(index, None if scores is None else scores[index // job.n])
        async with aclosing(encode_stream(exchange, job, encoder)) as stream:
            async for data in stream:
                yield data

    def news() -> bytes:
        return encoders[0].news() if encoders else b""

    return EventStream(exchange, events(), sign=news if request.return_progress else None)


async def _prepared(exchange: Exchange, request: CompletionRequest) -> tuple[TextJob, CompletionEncoder]:
    request.check()
    model = exchange.server.check_model(request.model)
    n = 1 if request.n is None else request.n
    best_of = request.best_of or n  # OpenAI's API allows 0, which means ``n``
    limit = exchange.server.settings.max_n
    if best_of > limit and request.best_of:
        raise ApiError(400, f"best_of is {best_of}; this server's limit is {limit}", "best_of")
    if best_of < n:
        raise ApiError(400, f"best_of is {best_of} and n is {n}; best_of must not be smaller", "best_of")
    if best_of > n and request.stream:
        raise ApiError(
            400, "best_of greater than n cannot be streamed: all choices must be complete", "best_of"
        )
    most_ms = check_time_limit(request.t_max_predict_ms)
    if most_ms and best_of > n:
        raise ApiError(400, "best_of needs whole choices, and t_max_predict_ms may cut them", "best_of")
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
        raise ApiError(400, "prompt_logprobs cannot be streamed; give echo with logprobs", "prompt_logprobs")
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
    await check_params(exchange.server, params, request.constraint())
    prompts = await prompts_of(
        exchange.server,
        request.prompt,
        "prompt",
        request.add_special_tokens is not False,
        request.parse_special is not False,
        request.suffix,
        request.truncate_prompt_tokens,
    )
    choice = params.choice
    # The texts of a choice may follow a space that is not in the answer; see ``SamplingParams``.
    skips_space = choice is not None and not any(text[:1].isspace() for text in choice)
    is_empty = max_tokens == 0
    job = TextJob(exchange, prompts, params, n, is_empty, most_ms)
    shown = Shown(bool(request.echo), request.logprobs, request.prompt_logprobs, skips_space, is_empty)
    encoder = CompletionEncoder(
        f"cmpl-{exchange.id}",
        model,
        int(time.time()),
        request.format(),
        shown,
        Prompts(given_prompts(request.prompt), prompts, n),
        exchange.server.engine.model.vocab,
        exchange.times,
        job.running,
    )
    return job, encoder
