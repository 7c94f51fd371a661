"""Routes for stored answers and conversations: ``/v1/responses/{id}`` and ``/v1/conversations``.

Open it to change what clients see of the store. No route here needs a model, so the front process of several models
answers them itself.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from llamapipe._messages import quoted
from llamapipe.server._background import follow
from llamapipe.server.endpoint import EventStream, Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.items import check_items
from llamapipe.server.requests.kept import read, resolve_references, store_of, write
from llamapipe.server.requests.limits import check_metadata, check_n_messages
from llamapipe.server.requests.listing import MOST_DIGITS, listing, page_of, query
from llamapipe.server.store.answers import Item

_MOST_LISTED = 100  # the API's limits


class ConversationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/conversations``."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class MetadataRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/conversations/{id}``."""

    metadata: dict[str, str]


class ItemsRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/conversations/{id}/items``."""

    items: list[dict[str, Any]]


# ---- answers
async def get_response(exchange: Exchange) -> Response:
    """``GET /v1/responses/{id}``; with ``stream``, the events of a background answer."""
    store = store_of(exchange)
    parameters = query(exchange, "include", "stream", "include_obfuscation", "starting_after")
    after = parameters.get("starting_after")
    stream = parameters.get("stream", "false").lower()
    if stream not in ("true", "1", "false", "0"):
        raise ApiError(400, f"stream is {quoted(parameters['stream'])}; it must be true or false", "stream")
    if stream in ("true", "1"):
        if after is not None and not (after.isascii() and after.isdigit() and len(after) <= MOST_DIGITS):
            raise ApiError(
                400, f"starting_after is {quoted(after)}; it must be the number of an event", "starting_after"
            )
        answer_id = exchange.path_params["id"]
        return EventStream(exchange, follow(exchange, answer_id, -1 if after is None else int(after)))
    if after is not None:
        raise ApiError(400, "starting_after needs stream=true", "starting_after")
    return JsonResponse(await read(exchange, store, store.answer, exchange.path_params["id"]))


async def delete_response(exchange: Exchange) -> Response:
    """``DELETE /v1/responses/{id}``: deletes an answer for good."""
    store, answer_id = store_of(exchange), exchange.path_params["id"]
    await write(exchange, store, store.delete_answer, answer_id)
    return JsonResponse({"id": answer_id, "object": "response", "deleted": True})


async def input_items(exchange: Exchange) -> Response:
    """``GET /v1/responses/{id}/input_items``: the answer's input, including what it continued."""
    return await _listed(exchange, store_of(exchange).input_items)


# ---- conversations
async def create(exchange: Exchange, request: ConversationRequest) -> Response:
    """``POST /v1/conversations``."""
    store = store_of(exchange)
    check_metadata(request.metadata)
    items = await _checked(exchange, request.items or [])
    return JsonResponse(await write(exchange, store, store.add_conversation, request.metadata or {}, items))


async def get_conversation(exchange: Exchange) -> Response:
    """``GET /v1/conversations/{id}``."""
    store = store_of(exchange)
    return JsonResponse(await read(exchange, store, store.conversation, exchange.path_params["id"]))


async def update(exchange: Exchange, request: MetadataRequest) -> Response:
    """``POST /v1/conversations/{id}``: replaces the metadata."""
    store, conversation_id = store_of(exchange), exchange.path_params["id"]
    check_metadata(request.metadata)
    changed = await write(exchange, store, store.change_conversation, conversation_id, request.metadata)
    return JsonResponse(changed)


async def delete_conversation(exchange: Exchange) -> Response:
    """``DELETE /v1/conversations/{id}``: deletes it for good, with its items and the answers given in it."""
    store, conversation_id = store_of(exchange), exchange.path_params["id"]
    await write(exchange, store, store.delete_conversation, conversation_id)
    return JsonResponse({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


async def add_items(exchange: Exchange, request: ItemsRequest) -> Response:
    """``POST /v1/conversations/{id}/items``."""
    store = store_of(exchange)
    query(exchange, "include")
    if not request.items:
        raise ApiError(400, "items is empty; give at least one", "items")
    items = await _checked(exchange, request.items)
    return listing(await write(exchange, store, store.add_items, exchange.path_params["id"], items), False)


async def list_items(exchange: Exchange) -> Response:
    """``GET /v1/conversations/{id}/items``."""
    return await _listed(exchange, store_of(exchange).items)


async def get_item(exchange: Exchange) -> Response:
    """``GET /v1/conversations/{id}/items/{item}``."""
    store = store_of(exchange)
    query(exchange, "include")
    ids = exchange.path_params["id"], exchange.path_params["item"]
    return JsonResponse(await read(exchange, store, store.item, *ids))


async def delete_item(exchange: Exchange) -> Response:
    """``DELETE /v1/conversations/{id}/items/{item}``: deletes an item for good and returns the conversation."""
    store, ids = store_of(exchange), (exchange.path_params["id"], exchange.path_params["item"])
    return JsonResponse(await write(exchange, store, store.delete_item, *ids))


# ---- what they share
async def _listed(exchange: Exchange, function: Any) -> Response:
    parameters = query(exchange, "include", "order", "after", "limit", "before")
    page = page_of(parameters, 20, _MOST_LISTED)._replace(most_bytes=exchange.gate.settings.max_body_bytes)
    path_id = exchange.path_params["id"]
    return listing(*await read(exchange, store_of(exchange), function, path_id, page, param="after"))


async def _checked(exchange: Exchange, items: list[Item]) -> list[Item]:
    check_n_messages(exchange.gate, items, "items")
    check_items(items := await resolve_references(exchange, items, "items"))
    return items
