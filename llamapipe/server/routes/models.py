"""The served models and their properties: ``/v1/models``, ``/model_info``."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import llamapipe
from llamapipe.arguments import quoted
from llamapipe.server.errors import ApiError
from llamapipe.server.exchange import Call
from llamapipe.server.state import ServerState


async def list_models(call: Call) -> None:
    """``GET /v1/models``: every name that is served, with what OpenAI's and Anthropic's clients read."""
    state = call.state
    names = state.all_names
    data = [_model(state, name) for name in names]
    page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    await call.answer_json({"object": "list", "data": data, **page})


async def get_model(call: Call) -> None:
    """``GET /v1/models/{id}``."""
    name = call.path_params["id"]
    if name not in call.state.all_names:
        call.state.check_model(name)
    await call.answer_json(_model(call.state, name))


async def delete_model(call: Call) -> None:
    """``DELETE /v1/models/{id}``: answers 403 for a served model and 404 for any other."""
    name = call.path_params["id"]
    if name in call.state.all_names:
        raise ApiError(
            403, f"the model {quoted(name)} is served and cannot be deleted; stop the server instead"
        )
    await call.answer_json({"id": name, "object": "model", "deleted": True})


async def model_info(call: Call) -> None:
    """``GET /model_info``: sizes that routers read before they send requests."""
    state = call.state
    engine, model = state.engine, state.engine.model
    await call.answer_json(
        {
            "model_path": model.path.name,
            "served_model_names": list(state.model_names),
            "is_generation": True,
            "max_model_len": engine.n_ctx,
            "n_seq_max": engine.n_seq_max,
            "n_cells": engine.n_cells,
            "n_vocab": model.n_vocab,
            "n_params": model.n_params,
            "size_bytes": model.size_bytes,
            "version": llamapipe.__version__,
        }
    )


def _model(state: ServerState, name: str) -> dict[str, Any]:
    embedder = state.embedder
    is_chat = name in state.model_names or embedder is None
    n_ctx = state.engine.n_ctx if is_chat or embedder is None else embedder.n_ctx
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": state.created,
        "created_at": datetime.fromtimestamp(state.created, timezone.utc).isoformat(),
        "lifecycle": "active",
        "owned_by": "llamapipe",
        "max_model_len": n_ctx,
        "max_input_tokens": n_ctx,
    }
