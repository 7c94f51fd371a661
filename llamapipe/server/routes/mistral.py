"""``POST /v1/fim/completions``: fills the gap between a prompt and a suffix, in Mistral's format."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from starlette.responses import Response

from llamapipe.llama.fim import FimText, fim_room
from llamapipe.params import SamplingParams
from llamapipe.server._fields import Unused
from llamapipe.server.dialects.mistral import FimEncoder
from llamapipe.server.endpoint import EventStream, Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.generation import fim_prompt_of
from llamapipe.server.requests.job import TextJob, encode_stream, record_counts
from llamapipe.server.requests.sampling import Sampling, take_random_seed
from llamapipe.server.requests.text_options import check_params, token_limit


class FimRequest(Sampling, kw_only=True):
    """``POST /v1/fim/completions``. Leaves out text that does not fit the context, as ``/infill`` does."""

    prompt: str
    suffix: str | None = None
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    random_seed: int | None = None
    metadata: Annotated[Any, Unused({})] = None
    prompt_cache_key: Annotated[str | None, Unused()] = None


async def fim_completions(exchange: Exchange, request: FimRequest) -> Response:
    """Fill in one gap, with an answer in one piece or as a stream."""
    state = exchange.server
    model = state.check_model(request.model)
    params = _params(exchange, request)

    async def prompt() -> list[int]:
        await check_params(state, params, request.constraint())
        text = FimText(request.prompt, request.suffix or "", order=state.settings.fim_order)
        return (
            await fim_prompt_of(state, text, fim_room(state.engine.n_ctx, params.max_tokens), "prompt")
        ).tokens

    encoder = FimEncoder(f"fim-{exchange.id}", model, int(time.time()))
    if not request.stream:
        job = TextJob(exchange, [await prompt()], params)
        done = await job.complete()
        return JsonResponse(encoder.whole(done[0], record_counts(exchange, *done)))

    async def events() -> AsyncGenerator[bytes, None]:
        job = TextJob(exchange, [await prompt()], params)
        async with aclosing(encode_stream(exchange, job, encoder)) as stream:
            async for data in stream:
                yield data

    return EventStream(exchange, events())


def _params(exchange: Exchange, request: FimRequest) -> SamplingParams:
    take_random_seed(request, request.random_seed)
    if request.n is not None and request.n != 1:
        raise ApiError(400, f"n is {request.n}; this route gives one choice", "n")
    limit = token_limit(max_tokens=request.max_tokens)
    if limit == 0:
        raise ApiError(400, "max_tokens is 0; it must be 1 or more, or -1 for no limit", "max_tokens")
    return request.params(
        exchange.server,
        max_tokens=limit,
        **exchange.server.adapter_of(request.model),
    )
