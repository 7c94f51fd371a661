"""llama-server's ``POST /slots/{id}``: saves the KV cells of a conversation to a file, and restores them.

Open it to change what clients may save, load and delete there.

A slot is a conversation, not a place in the batch: the last request with this ``id_slot``, which is a number or a name;
slot 0 is also the last request without one. If there are several API keys, each has separate conversations and files.

With ``--slot-transfer`` clients download and upload these files. Uploaded files are read, checked as far as possible,
and rewritten. A client that forges the values of cells can decide what the model has read, but only in its own
conversations.
"""

from __future__ import annotations

import asyncio
import errno
import re
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from llamapipe._messages import listed, quoted
from llamapipe.cache_file import open_private
from llamapipe.errors import InvalidRequestError
from llamapipe.server.endpoint import Download, Exchange, JsonResponse
from llamapipe.server.errors import ApiError, as_sent
from llamapipe.server.requests.forms import form_parts
from llamapipe.server.requests.sampling import shown_slot, slot_name
from llamapipe.work.tenant import tenant

T = TypeVar("T")
FORM = ("file", "model")
_PART_BYTES = 2**18
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)
_ACTIONS = ("save", "restore", "erase")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class SlotRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``filename``: the name of a file in the folder of ``--slot-save-path``."""

    filename: str | None = None
    model: str | None = None


_decoder = msgspec.json.Decoder(SlotRequest)


async def slot_action(exchange: Exchange) -> Response:
    """``POST /slots/{id}?action=save``, ``restore`` or ``erase``."""
    folder = _folder(exchange)
    name, action = str(exchange.path_params["id"]), exchange.query_params.get("action")
    name = slot_name(name, "id")
    shown = shown_slot(name)
    if action not in _ACTIONS:
        raise ApiError(400, f"action is {as_sent(action)}; it must be one of {', '.join(_ACTIONS)}", "action")
    request = await exchange.decode(_decoder) if exchange.raw else SlotRequest()
    engine, began = exchange.server.engine, perf_counter()
    if action == "erase":
        n = await asyncio.to_thread(engine.forget_conversation, name)
        return JsonResponse({"id_slot": shown, "n_erased": n})
    path = _path(folder, request.filename)
    n_bytes = 0
    if action == "save":
        saved = await _done(exchange, path, _save, folder, engine.save_conversation, name, path, field="id")
        n, n_bytes = saved
    else:
        n = await _done(exchange, path, engine.load_conversation, name, path)
        n_bytes = (await _done(exchange, path, path.stat)).st_size
    done, moved = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    ms = (perf_counter() - began) * 1e3
    return JsonResponse(
        {
            "id_slot": shown,
            "filename": path.name,
            done: n,
            moved: n_bytes,
            "timings": {f"{action}_ms": ms},
        }
    )


async def saved_files(exchange: Exchange) -> Response:
    """``GET /slots/files``: lists the files that the client has saved."""
    folder = _folder(exchange)
    return JsonResponse({"object": "list", "data": await asyncio.to_thread(_files, folder)})


async def delete_file(exchange: Exchange) -> Response:
    """``DELETE /slots/files/{filename}``."""
    path = _path(_folder(exchange), str(exchange.path_params["filename"]))
    await _done(exchange, path, path.unlink)
    return JsonResponse({"filename": path.name, "deleted": True})


async def download(exchange: Exchange) -> Response:
    """``GET /slots/files/{filename}``: downloads a file, with ``--slot-transfer``."""
    folder = _transferred(exchange)
    path = _path(folder, str(exchange.path_params["filename"]))
    return Download(_parts(*await _done(exchange, path, _open, path)))


async def upload(exchange: Exchange) -> Response:
    """``POST /slots/files``: uploads a file from another server as a form, with ``--slot-transfer``."""
    folder = _transferred(exchange)
    raw, exchange.raw = exchange.raw, b""
    content_type = exchange.headers.get("content-type", "")
    fields: dict[str, Any] = {}
    for part in await asyncio.to_thread(form_parts, content_type, raw):
        if (name := part.name) not in FORM:
            raise ApiError(400, f"the field {quoted(name[:80])} is unknown; there is {listed(FORM)}", name)
        if name in fields:
            raise ApiError(400, f"the field {quoted(name)} is there twice", name)
        fields[name] = part
    del raw
    if "file" not in fields:
        raise ApiError(400, "file is missing", "file")
    path = _path(folder, fields["file"].filename)
    imported = exchange.server.engine.import_conversation
    n, n_bytes = await _done(exchange, path, _save, folder, imported, fields["file"].value, path)
    return JsonResponse({"filename": path.name, "n_tokens": n, "n_bytes": n_bytes})


def _open(path: Path) -> tuple[FileIO, ExitStack]:
    """Open a file. Returns the file and an exit stack that closes it."""
    stack = ExitStack()
    try:
        return stack.enter_context(open_private(path)), stack
    except ValueError as error:
        raise InvalidRequestError(f"{quoted(path.name)}: {error}") from error


async def _parts(file: FileIO, closing: ExitStack) -> AsyncIterator[bytes]:
    with closing:
        while part := await asyncio.to_thread(file.read, _PART_BYTES):
            yield part


async def _done(
    exchange: Exchange, path: Path, function: Callable[..., T], *arguments: Any, field: str = "filename"
) -> T:
    """Run ``function(*arguments)`` in a thread. Raises ApiError if the engine or the disk fails.

    ``field``: what is wrong if the engine refuses the request.
    """
    try:
        return await asyncio.to_thread(function, *arguments)
    except FileNotFoundError:
        raise ApiError(404, f"there is no file {quoted(path.name)}", "filename", "not_found") from None
    except InvalidRequestError as error:
        raise ApiError(400, str(error), field) from error
    except OSError as error:
        status = 400 if error.errno in _NO_FILE else 507
        raise ApiError(status, f"{quoted(path.name)}: {error.strerror or error}", "filename") from error


def _save(folder: Path, save: Callable[[Any, Path], T], what: object, path: Path) -> T:
    folder.mkdir(mode=0o700, exist_ok=True)  # of this key
    return save(what, path)


def _files(folder: Path) -> list[dict[str, Any]]:
    files = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _FILE.fullmatch(path.name):
            with suppress(FileNotFoundError):  # it has been deleted meanwhile
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    about = {"n_bytes": status.st_size, "saved_at": int(status.st_mtime)}
                    files.append({"filename": path.name, **about})
    return files


def _folder(exchange: Exchange) -> Path:
    """Return the folder of the client's files. Raises ApiError 403 without ``--slot-save-path``."""
    state = exchange.server
    if state.settings.slot_save_path is None:
        raise ApiError(
            403,
            "this server saves no conversations; start it with --slot-save-path DIR, or keep all of them with "
            "--cache-dir DIR",
            code="not_allowed",
        )
    if state.worker is not None and not state.is_behind_front:
        raise ApiError(400, "each worker has its cache, and a request reaches one of them")
    folder, owner = Path(state.settings.slot_save_path), tenant.get().cache
    return folder if owner is None else folder / owner[:32]


def _transferred(exchange: Exchange) -> Path:
    """Return the same as ``_folder``. Also raises ApiError 403 without ``--slot-transfer``."""
    folder = _folder(exchange)
    if not exchange.gate.settings.slot_transfer:
        raise ApiError(
            403, "clients of this server cannot download and upload conversations; --slot-transfer lets them",
            code="not_allowed",
        )  # fmt: skip
    return folder


def _path(folder: Path, name: str | None) -> Path:
    if name is None or not _FILE.fullmatch(name):
        raise ApiError(
            400,
            f"filename is {as_sent(name)}; it must be a name of letters, digits, '.', '_' and '-', without a folder",
            "filename",
        )
    return folder / name
