"""llama-server's ``POST /slots/{id}``: the cells of a conversation in a file of the operator's folder.

Open it to change what clients may save, load and delete there.

A slot's number names a conversation, not a place in the batch: the last request with this ``id_slot``, or for 0 without
any. Each API key has its own conversations and files, if there are several.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.work.tenant import tenant

T = TypeVar("T")
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)
_ACTIONS = ("save", "restore", "erase")
_NUMBER = re.compile("[0-9]{1,9}")
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class SlotRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``filename``: in the folder of ``--slot-save-path``."""

    filename: str | None = None
    model: str | None = None


_decoder = msgspec.json.Decoder(SlotRequest)


async def slot_action(exchange: Exchange) -> Response:
    """``POST /slots/{id}?action=save``, ``restore`` or ``erase``."""
    folder = _folder(exchange)
    name, action = str(exchange.path_params["id"]), exchange.query_params.get("action")
    if not _NUMBER.fullmatch(name):
        raise ApiError(400, f"the slot {quoted(name)} is no number", "id")
    name = str(int(name))
    if action not in _ACTIONS:
        raise ApiError(400, f"action is {quoted(action)}; it must be one of {', '.join(_ACTIONS)}", "action")
    request = await exchange.decode(_decoder) if exchange.raw else SlotRequest()
    engine, began = exchange.server.engine, perf_counter()
    if action == "erase":
        n = await asyncio.to_thread(engine.forget_conversation, name)
        return JsonResponse({"id_slot": int(name), "n_erased": n})
    path = _path(folder, request.filename)
    n_bytes = 0
    if action == "save":
        n, n_bytes = await _done(exchange, path, _save, folder, engine.save_conversation, name, path)
    else:
        n = await _done(exchange, path, engine.load_conversation, name, path)
        n_bytes = (await asyncio.to_thread(path.stat)).st_size
    done, moved = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
    ms = (perf_counter() - began) * 1e3
    return JsonResponse(
        {
            "id_slot": int(name),
            "filename": path.name,
            done: n,
            moved: n_bytes,
            "timings": {f"{action}_ms": ms},
        }
    )


async def saved_files(exchange: Exchange) -> Response:
    """``GET /slots/files``: what the client has saved."""
    folder = _folder(exchange)
    return JsonResponse({"object": "list", "data": await asyncio.to_thread(_files, folder)})


async def delete_file(exchange: Exchange) -> Response:
    """``DELETE /slots/files/{filename}``."""
    path = _path(_folder(exchange), str(exchange.path_params["filename"]))
    await _done(exchange, path, path.unlink)
    return JsonResponse({"filename": path.name, "deleted": True})


async def _done(exchange: Exchange, path: Path, function: Callable[..., T], *arguments: Any) -> T:
    """``function(*arguments)`` in a thread. Raises ApiError for what the engine or the disk refuses."""
    try:
        return await asyncio.to_thread(function, *arguments)
    except FileNotFoundError:
        raise ApiError(404, f"there is no file {quoted(path.name)}", "filename", "not_found") from None
    except InvalidRequestError as error:
        raise ApiError(400, str(error), "filename") from error
    except OSError as error:
        status = 400 if error.errno in _NO_FILE else 507
        raise ApiError(status, f"{quoted(path.name)}: {error.strerror or error}", "filename") from error


def _save(folder: Path, save: Callable[[str, Path], T], name: str, path: Path) -> T:
    folder.mkdir(mode=0o700, exist_ok=True)  # of this key
    return save(name, path)


def _files(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _FILE.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            status = path.stat()
            found.append({"filename": path.name, "n_bytes": status.st_size, "saved_at": int(status.st_mtime)})
    return found


def _folder(exchange: Exchange) -> Path:
    """The folder of the client's files. Raises ApiError 403 without ``--slot-save-path``."""
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


def _path(folder: Path, name: str | None) -> Path:
    if name is None or not _FILE.fullmatch(name):
        raise ApiError(
            400,
            f"filename is {quoted(name)}; it must be a name of letters, digits, '.', '_' and '-', without a folder",
            "filename",
        )
    return folder / name
