"""The routes of files and batches: ``/v1/files`` and ``/v1/batches``.

Open it to change what clients see of files and batches. No route here needs a model, so the front process of several
models answers them itself. The form of an upload is already in memory, within the limits of all bodies.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response

from llamapipe._messages import listed, quoted
from llamapipe.server._background import wake
from llamapipe.server._batches import ENDPOINTS
from llamapipe.server.endpoint import Download, Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.forms import form_of
from llamapipe.server.requests.kept import NO_STORE, read, write
from llamapipe.server.requests.limits import check_metadata
from llamapipe.server.requests.listing import listing, page_of, query
from llamapipe.server.store.files import Files

FORM = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")
_MOST_NAME = 255
_MOST_FILES, _MOST_BATCHES = 10_000, 100  # on one page: the API's limits
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
    parts = await form_of(exchange, FORM)
    fields = {name: part.value for name, part in parts.items()}
    name = next((part.filename for part in reversed(parts.values()) if part.filename), "upload.jsonl")
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
    described = name, purpose, fields["file"], life_s
    return JsonResponse(await write(exchange, files, files.add_file, *described))


async def list_files(exchange: Exchange) -> Response:
    """``GET /v1/files``."""
    files = _files_of(exchange)
    parameters = query(exchange, "after", "limit", "order", "purpose")
    page = page_of(parameters, _MOST_FILES, _MOST_FILES)
    wanted = parameters.get("purpose"), page.after, page.limit, page.is_ascending
    return listing(*await read(exchange, files, files.files, *wanted, param="after"))


async def get_file(exchange: Exchange) -> Response:
    """``GET /v1/files/{id}``."""
    files = _files_of(exchange)
    return JsonResponse(await read(exchange, files, files.file, exchange.path_params["id"]))


async def delete_file(exchange: Exchange) -> Response:
    """``DELETE /v1/files/{id}``: deletes a file permanently."""
    files, file_id = _files_of(exchange), exchange.path_params["id"]
    await write(exchange, files, files.delete_file, file_id)
    return JsonResponse({"id": file_id, "object": "file", "deleted": True})


async def content(exchange: Exchange) -> Response:
    """``GET /v1/files/{id}/content``."""
    files, file_id = _files_of(exchange), exchange.path_params["id"]
    described = await read(exchange, files, files.file, file_id)

    async def parts() -> AsyncIterator[bytes]:
        after = -1
        while chunk := await read(exchange, files, files.content, file_id, after):
            after = chunk[-1][0]
            yield b"".join(body for _, body in chunk)

    return Download(parts(), {"content-length": str(described["bytes"])})


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
    batch = await write(
        exchange,
        files,
        files.add_batch,
        request.input_file_id,
        request.endpoint,
        request.completion_window,
        window_s,
        request.metadata or {},
        None if results is None else _life_s(results, "output_expires_after"),
        param="input_file_id",
    )
    wake(exchange)
    return JsonResponse(batch)


async def list_batches(exchange: Exchange) -> Response:
    """``GET /v1/batches``: the newest first."""
    files = _files_of(exchange)
    parameters = query(exchange, "after", "limit")
    page = page_of(parameters, 20, _MOST_BATCHES)
    return listing(*await read(exchange, files, files.batches, page.after, page.limit, param="after"))


async def get_batch(exchange: Exchange) -> Response:
    """``GET /v1/batches/{id}``."""
    files = _files_of(exchange)
    return JsonResponse(await read(exchange, files, files.batch, exchange.path_params["id"]))


async def cancel_batch(exchange: Exchange) -> Response:
    """``POST /v1/batches/{id}/cancel``: cancels a batch. Its results so far are kept."""
    files = _files_of(exchange)
    batch = await write(exchange, files, files.cancel_batch, exchange.path_params["id"])
    wake(exchange)
    return JsonResponse(batch)


# ---- helpers
def _files_of(exchange: Exchange) -> Files:
    files = exchange.gate.files
    if files is None:
        raise ApiError(404, NO_STORE, code="not_found")
    return files


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
