"""The routes of files and batches: ``/v1/files`` and ``/v1/batches``.

Open it to change what clients see of files and batches. No route here needs a model, so the front process of several
models answers them itself. The form of an upload is already in memory, within the limits of every body.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.responses import Response, StreamingResponse

from llamapipe._messages import listed, quoted
from llamapipe.server._batches import ENDPOINTS
from llamapipe.server._conversations import check_metadata, limit_of, query
from llamapipe.server._files import Files, InUseError
from llamapipe.server._kept import NO_STORE, read_of, write_of
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.transcriptions import form_parts

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")
FORM = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_MOST_NAME = 255
_MOST_FILES, _MOST_BATCHES = 10_000, 100  # of a page: the API's limits
_LEAST_LIFE_S, _MOST_LIFE_S = 3600, 2_592_000  # the API's limits
_WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])", re.ASCII)
_MOST_WINDOW_S = 30 * 86_400


class ExpiresAfter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """When a file expires: ``seconds`` after its creation."""

    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


# ---- files
async def upload(exchange: Exchange) -> Response:
    """``POST /v1/files``: stores the file of a form."""
    files = _files_of(exchange)
    raw, exchange.raw = exchange.raw, b""
    fields: dict[str, bytes] = {}
    name = ""
    for part in await asyncio.to_thread(form_parts, exchange.headers.get("content-type", ""), raw):
        if part.name not in FORM:
            raise ApiError(
                400, f"the field {quoted(part.name[:80])} is unknown; there is {listed(FORM)}", part.name
            )
        if part.name in fields:
            raise ApiError(400, f"the field {part.name} is there twice", part.name)
        fields[part.name] = part.value
        name = part.filename or name
    del raw
    if "file" not in fields:
        raise ApiError(400, "file is missing", "file")
    purpose = _text(fields, "purpose")
    if purpose != "batch":
        raise ApiError(400, f"purpose is {quoted(purpose)}; this server keeps files for 'batch'", "purpose")
    life_s = None
    if "expires_after[seconds]" in fields or "expires_after[anchor]" in fields:
        seconds = _text(fields, "expires_after[seconds]")
        life_s = _life_s(
            ExpiresAfter(
                anchor=_text(fields, "expires_after[anchor]") or "created_at",
                seconds=int(seconds) if seconds.isascii() and seconds.isdigit() and len(seconds) < 10 else -1,
            ),
            "expires_after",
        )
    file = await _write(exchange, files.add_file, name or "upload.jsonl", purpose, fields["file"], life_s)
    return JsonResponse(file)


async def list_files(exchange: Exchange) -> Response:
    """``GET /v1/files``."""
    files = _files_of(exchange)
    parameters = query(exchange, "after", "limit", "order", "purpose")
    order, purpose = parameters.get("order", ["desc"])[-1], parameters.get("purpose", [None])[-1]
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {quoted(order)}; it may be asc or desc", "order")
    limit = limit_of(parameters, _MOST_FILES, _MOST_FILES)
    after = parameters.get("after", [None])[-1]
    page = await _read(exchange, files.files, purpose, after, limit, order == "asc", param="after")
    return JsonResponse(_list_of(*page))


async def get_file(exchange: Exchange) -> Response:
    """``GET /v1/files/{id}``."""
    return JsonResponse(await _read(exchange, _files_of(exchange).file, exchange.path_params["id"]))


async def delete_file(exchange: Exchange) -> Response:
    """``DELETE /v1/files/{id}``: deletes a file for good."""
    file_id = exchange.path_params["id"]
    await _write(exchange, _files_of(exchange).delete_file, file_id)
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


async def content(exchange: Exchange) -> Response:
    """``GET /v1/files/{id}/content``."""
    files, file_id = _files_of(exchange), exchange.path_params["id"]
    described = await _read(exchange, files.file, file_id)

    async def parts() -> AsyncIterator[bytes]:
        after = -1
        while chunk := await _read(exchange, files.content, file_id, after):
            after = chunk[-1][0]
            yield b"".join(body for _, body in chunk)

    return _Content(parts(), described["bytes"])


class _Content(StreamingResponse):
    """The bytes of a file. ``Endpoint`` cancels it when the client disconnects."""

    def __init__(self, parts: AsyncIterator[bytes], n_bytes: int) -> None:
        headers = {
            "content-length": str(n_bytes),
            "content-disposition": "attachment",
            "x-content-type-options": "nosniff",
        }
        super().__init__(parts, headers=headers, media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.stream_response(send)


# ---- batches
async def create_batch(exchange: Exchange, request: BatchRequest) -> Response:
    """``POST /v1/batches``."""
    files = _files_of(exchange)
    check_metadata(request.metadata)
    if request.endpoint not in ENDPOINTS:
        raise ApiError(
            400, f"endpoint is {quoted(request.endpoint)}; there is {listed(ENDPOINTS)}", "endpoint"
        )
    window = _WINDOW.fullmatch(request.completion_window)
    window_s = 0 if window is None else int(window[1]) * (3600 if window[2] == "h" else 86_400)
    if not 0 < window_s <= _MOST_WINDOW_S:
        raise ApiError(
            400,
            f"completion_window is {quoted(request.completion_window)}; write 24h, or another time from 1h to 30d",
            "completion_window",
        )
    results = request.output_expires_after
    batch = await _write(
        exchange,
        files.add_batch,
        request.input_file_id,
        request.endpoint,
        request.completion_window,
        window_s,
        request.metadata or {},
        None if results is None else _life_s(results, "output_expires_after"),
        param="input_file_id",
    )
    _wake(exchange)
    return JsonResponse(batch)


async def list_batches(exchange: Exchange) -> Response:
    """``GET /v1/batches``: the newest first."""
    files = _files_of(exchange)
    parameters = query(exchange, "after", "limit")
    limit = limit_of(parameters, 20, _MOST_BATCHES)
    return JsonResponse(
        _list_of(
            *await _read(exchange, files.batches, parameters.get("after", [None])[-1], limit, param="after")
        )
    )


async def get_batch(exchange: Exchange) -> Response:
    """``GET /v1/batches/{id}``."""
    return JsonResponse(await _read(exchange, _files_of(exchange).batch, exchange.path_params["id"]))


async def cancel_batch(exchange: Exchange) -> Response:
    """``POST /v1/batches/{id}/cancel``: cancels a batch; results that it has are kept."""
    batch = await _write(exchange, _files_of(exchange).cancel_batch, exchange.path_params["id"])
    _wake(exchange)
    return JsonResponse(batch)


# ---- what they share
def _files_of(exchange: Exchange) -> Files:
    files = exchange.gate.files
    if files is None:
        raise ApiError(404, NO_STORE, code="not_found")
    return files


async def _read(
    exchange: Exchange, function: Callable[..., T], *arguments: Any, param: str | None = None
) -> T:
    return await read_of(exchange, _files_of(exchange), function, *arguments, param=param)


async def _write(
    exchange: Exchange, function: Callable[..., T], *arguments: Any, param: str | None = None
) -> T:
    try:
        return await write_of(exchange, _files_of(exchange), function, *arguments, param=param)
    except InUseError:
        raise ApiError(
            400, "a batch that has not ended reads this file: cancel the batch first", "id"
        ) from None


def _wake(exchange: Exchange) -> None:
    background = exchange.gate.background
    if background is not None:
        background.start()
        background.wake()


def _list_of(entries: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": entries,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
        "has_more": has_more,
    }


def _text(fields: dict[str, bytes], name: str) -> str:
    return fields.get(name, b"")[:_MOST_NAME].decode("utf-8", "replace")


def _life_s(expires_after: ExpiresAfter, field: str) -> int:
    if expires_after.anchor != "created_at":
        raise ApiError(
            400, f"{field}.anchor is {quoted(expires_after.anchor)}; it must be created_at", f"{field}.anchor"
        )
    if not _LEAST_LIFE_S <= expires_after.seconds <= _MOST_LIFE_S:
        raise ApiError(
            400, f"{field}.seconds must be from {_LEAST_LIFE_S} to {_MOST_LIFE_S}", f"{field}.seconds"
        )
    return expires_after.seconds
