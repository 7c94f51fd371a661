"""Routes about the server and the served models, such as ``/health``, ``/metrics`` and ``/openapi.json``."""

from __future__ import annotations

import asyncio
from datetime import datetime, timezone
from typing import Any

from starlette.responses import Response

import llamapipe
from llamapipe._messages import quoted
from llamapipe.server._openapi import document
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError, shutting_down
from llamapipe.server.metrics import CONTENT_TYPE
from llamapipe.server.state import ServerState


async def health(exchange: Exchange) -> Response:
    """``GET /health``: 200 and how many workers are ready, or 503 while the server drains."""
    if exchange.server.draining or exchange.server.is_closed:
        raise shutting_down()
    if (failure := exchange.server.failure) is not None:
        raise ApiError(503, f"{failure}: restart the server", code="engine_failed")
    worker = exchange.server.worker
    if worker is None:
        return JsonResponse({"status": "ok"})
    return JsonResponse({"status": "ok", "workers_ready": worker.n_ready, "workers": worker.n_workers})


async def ping(exchange: Exchange) -> Response:
    """``GET /ping``, as in SageMaker and vLLM: 200, or 503 while the server drains."""
    await health(exchange)
    return JsonResponse({})


async def reset_prefix_cache(exchange: Exchange) -> Response:
    """``POST /reset_prefix_cache``, as in vLLM: drops the client's cached tokens that no request uses."""
    refuse_resets(exchange)
    state = exchange.server
    if state.worker is not None and not state.is_behind_front:
        raise ApiError(
            400, "each worker has its cache, and a request reaches one of them; send SIGHUP to replace all"
        )
    if state.has_engine:
        await asyncio.to_thread(state.engine.reset_prefix_cache)
    return JsonResponse({})


def refuse_resets(exchange: Exchange) -> None:
    """Raise ApiError 400 if a request asks for other resets that vLLM offers."""
    for name in ("reset_running_requests", "reset_external"):
        if exchange.query_params.get(name, "false").lower() not in ("false", "0", ""):
            raise ApiError(400, f"{name} is set; leave it out: running requests keep what they use", name)


async def version(exchange: Exchange) -> Response:
    """``GET /version``, as in vLLM."""
    return JsonResponse({"version": llamapipe.__version__})


async def metrics(exchange: Exchange) -> Response:
    """``GET /metrics``: the metrics of all workers, in Prometheus' text format."""
    worker = exchange.server.worker
    text = await (asyncio.to_thread(exchange.server.metrics.text) if worker is None else worker.text())
    return Response(text, media_type=CONTENT_TYPE)


async def requests(exchange: Exchange) -> Response:
    """``GET /requests``: how the client's most recent requests to all workers spent their time, the newest first."""
    state = exchange.server
    if state.worker is None or state.is_behind_front:
        entries = state.recent.entries()
    else:
        entries = await state.worker.requests()
    return JsonResponse({"object": "list", "data": state.own_requests(exchange, entries)})


async def openapi(exchange: Exchange) -> Response:
    """``GET /openapi.json``: the server's routes, for clients and tests."""
    return JsonResponse(document(dict.fromkeys(route.endpoint for route in exchange.app.routes)))


async def list_models(exchange: Exchange) -> Response:
    """``GET /v1/models``: every served name, with the fields that OpenAI's and Anthropic's clients read."""
    state = exchange.server
    names = state.all_names
    data = [_model(state, name) for name in names]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return JsonResponse({"object": "list", "data": data, **page})


async def get_model(exchange: Exchange) -> Response:
    """``GET /v1/models/{id}``."""
    return JsonResponse(_model(exchange.server, exchange.server.check_name(exchange.path_params["id"])))


async def delete_model(exchange: Exchange) -> Response:
    """``DELETE /v1/models/{id}``: answers 403 for a served model and 404 for any other."""
    name = exchange.server.check_name(exchange.path_params["id"])
    raise ApiError(403, f"the model {quoted(name)} is served and cannot be deleted; stop the server instead")


async def model_info(exchange: Exchange) -> Response:
    """``GET /model_info``: sizes that routers read before they send requests."""
    state = exchange.server
    owner = state.engine if state.has_engine or state.embedder is None else state.embedder
    model = owner.model
    return JsonResponse(
        {
            "model_path": model.path.name,
            "served_model_names": list(state.model_names or state.embedding_names),
            "is_generation": state.has_engine,
            "max_model_len": owner.n_ctx,
            "n_seq_max": owner.n_seq_max,
            **({"n_cells": state.engine.n_cells} if state.has_engine else {}),
            "n_vocab": model.n_vocab,
            "n_params": model.n_params,
            "size_bytes": model.size_bytes,
            "supports_images": model.supports_images,
            "supports_audio": model.supports_audio,
            "version": llamapipe.__version__,
        }
    )


def _model(state: ServerState, name: str) -> dict[str, Any]:
    embedder = state.embedder
    is_chat = name in (*state.chat_names, *state.adapter_names) or embedder is None
    owner = state.engine if is_chat or embedder is None else embedder
    model = owner.model
    reads = {
        "text": True,
        "image": is_chat and model.supports_images,
        "audio": is_chat and model.supports_audio,
    }
    is_adapter = name in state.adapter_names
    return {
        **({"root": state.model_names[0], "parent": state.model_names[0]} if is_adapter else {}),
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": state.created,
        "created_at": datetime.fromtimestamp(state.created, timezone.utc).isoformat(),
        "lifecycle": "active",
        "owned_by": "llamapipe",
        "max_model_len": owner.n_ctx,
        "max_input_tokens": owner.n_ctx,
        "supports_images": reads["image"],
        "supports_audio": reads["audio"],
        # A field of llama-server.
        "architecture": {
            "input_modalities": [kind for kind, is_read in reads.items() if is_read],
            "output_modalities": ["text"],
        },
        "meta": {
            "n_vocab": model.n_vocab,
            "n_ctx": owner.n_ctx,
            "n_ctx_train": model.n_ctx_train,
            "n_embd": model.n_embd,
            "n_params": model.n_params,
            "size": model.size_bytes,
        },
    }
