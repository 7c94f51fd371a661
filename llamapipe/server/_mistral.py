"""``POST /v1/fim/completions``, Mistral's format of filling in: a prompt and a suffix, answered like a chat."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from starlette.responses import Response

from llamapipe.llama.fim import FimText, fim_room
from llamapipe.params import SamplingParams
from llamapipe.server._completions import DONE, ChunkWriter, check_params, token_limit, usage
from llamapipe.server._fields import Unused
from llamapipe.server._generation import fim_prompt_of
from llamapipe.server._sampling import Sampling
from llamapipe.server.endpoint import SUBMITTED, EventStream, Exchange, JsonResponse, encode_json
from llamapipe.server.errors import ApiError


class FimRequest(Sampling, kw_only=True):
    """``POST /v1/fim/completions``. What the context has no room for is left out, as in ``/infill``."""

    prompt: str
    suffix: str | None = None
    model: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    random_seed: int | None = None
    metadata: Annotated[Any, Unused({})] = None
    prompt_cache_key: Annotated[str | None, Unused()] = None


async def fim_completions(exchange: Exchange, request: FimRequest) -> Response:
    """Fills in one text, as a whole or as a stream."""
    state = exchange.server
    model = state.check_model(request.model)
    created, call_id = int(time.time()), f"fim-{exchange.id}"
    params = _params(exchange, request)
    timeout = state.settings.timeout_s

    async def prompt() -> list[int]:
        constraint = request.constraint()
        await check_params(state, params, "" if constraint is None else constraint.field)
        text = FimText(request.prompt, request.suffix or "", order=state.settings.fim_order)
        return (
            await fim_prompt_of(state, text, fim_room(state.engine.n_ctx, params.max_tokens), "prompt")
        ).tokens

    if not request.stream:
        answer = state.engine.agenerate(await prompt(), params, timeout=timeout, block=False)
        done = await exchange.await_engine(answer)
        exchange.count(done.n_prompt_tokens, done.n_completion_tokens)
        message = {"role": "assistant", "content": done.text, "tool_calls": None, "prefix": False}
        choice = {"index": 0, "message": message, "finish_reason": done.finish_reason}
        return JsonResponse(
            {
                "id": call_id,
                "object": "chat.completion",
                "created": created,
                "model": model,
                "choices": [choice],
                "usage": usage(done.n_prompt_tokens, done.n_completion_tokens, done.n_cached_tokens),
            }
        )
    writer = ChunkWriter(call_id, "chat.completion.chunk", created, model, False, False)

    async def events() -> AsyncGenerator[bytes, None]:
        tokens = await prompt()
        n = 0
        try:
            async with state.engine.astream(tokens, params, timeout=timeout, block=False) as stream:
                await stream.submit()
                exchange.times.follow(stream)
                yield SUBMITTED
                async for delta in stream:
                    exchange.token_arrived(0)
                    content = {"content": delta.text} if n else {"role": "assistant", "content": delta.text}
                    n += len(delta.token_ids)
                    if delta.finish_reason is not None:  # the last one has the usage
                        writer.set_usage(usage(len(tokens), n, stream.n_cached_tokens))
                    elif not delta.text:
                        continue
                    yield writer.chunk(
                        encode_json({"index": 0, "delta": content, "finish_reason": delta.finish_reason})
                    )
        finally:
            exchange.count(len(tokens), n)
        yield DONE

    return EventStream(exchange, events())


def _params(exchange: Exchange, request: FimRequest) -> SamplingParams:
    """The request's options. Raises ApiError 400."""
    if request.random_seed is not None:
        if request.seed is not None:
            raise ApiError(400, "seed and random_seed are the same option; give one", "random_seed")
        request.seed = request.random_seed
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
