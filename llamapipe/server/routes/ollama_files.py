"""``/api/pull``, ``/api/delete`` and ``/api/copy``: downloads from the Hugging Face Hub, and more names for models.

A server with one model keeps a pulled file for its next start; the front process of several models serves it
immediately. Files in Ollama's own store are only read. Each route must be enabled by the operator, and needs a key if
other machines can reach the server.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
from starlette.responses import Response

from llamapipe import hub
from llamapipe._messages import quoted
from llamapipe.errors import ModelLoadError
from llamapipe.ollama_models import find_stored
from llamapipe.server._fields import Only, Unused
from llamapipe.server.endpoint import Exchange, JsonResponse, LineStream
from llamapipe.server.errors import ApiError, no_model
from llamapipe.server.gate import Gate
from llamapipe.server.json_bytes import line
from llamapipe.server.requests.ollama_models import adapter_of, check_chat_model, is_named
from llamapipe.server.requests.permissions import check_allowed
from llamapipe.server.state import ServerState

_MOST_PULLS = 2  # downloads at once
_MOST_COPIES = 100
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:-]{0,255}")


class PullRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /api/pull``. ``name``: the older name of ``model``."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    insecure: Annotated[bool | None, Unused(False)] = None  # some clients always send true
    username: Annotated[str | None, Only("")] = None
    password: Annotated[str | None, Only("")] = None


class DeleteRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``DELETE /api/delete``. ``name``: the older name of ``model``."""

    model: str | None = None
    name: str | None = None


class CopyRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /api/copy``."""

    source: str
    destination: str


def named(request: PullRequest | DeleteRequest) -> str:
    """Return the model that a request names. Raises ApiError 400."""
    name = request.model or request.name
    if not name:
        raise ApiError(400, "model is missing", "model")
    return name


def _is_served(state: ServerState, name: str) -> bool:
    return is_named(name, *state.all_names)


def reference_of(name: str) -> hub.Reference:
    """Return the Hub file that a name means. Raises ApiError 400."""
    text = name.removesuffix(":latest")
    try:
        return hub.parse(hub.hub_name(text) or text)
    except ValueError:
        raise ApiError(
            400,
            f"{quoted(name)} is not a model on the Hugging Face Hub, where this server's models come from; write "
            "hf.co/OWNER/REPO:QUANT",
            "model",
        ) from None


# ---- pull
async def pull(exchange: Exchange, request: PullRequest) -> Response:
    """``POST /api/pull``: downloads a model into the Hub's cache, unless it is already served."""
    name = named(request)
    return await answered(exchange, request, None if _is_served(exchange.server, name) else name)


async def answered(
    exchange: Exchange,
    request: PullRequest,
    name: str | None,
    then: Callable[[Path], Awaitable[object]] | None = None,
) -> Response:
    """Download a model, report progress, and call ``then`` with its file.

    ``name``: the name on the Hub; None if the model is already here. Raises ApiError.
    """
    gate: Gate = exchange.server
    if name is None:
        done = _Pull(gate, None, None)
    else:
        check_allowed(exchange, gate.settings.allow_pull, "--allow-pull")
        done = _Pull(gate, reference_of(name), then)
        if gate.n_pulls >= _MOST_PULLS:
            raise ApiError(
                429, f"{gate.n_pulls} models are being downloaded, which is the limit", code="too_many_pulls"
            )
    if request.stream is False:
        await done.run()
        return JsonResponse(_SUCCESS)
    return LineStream(exchange, done.lines(), ping=line({"status": "pulling"}), sign=done.news)


_SUCCESS = {"status": "success"}


class _UnwantedError(Exception):
    """No client waits for the download any more."""


class _Pull:
    """One download. ``reference``: None if there is nothing to download."""

    def __init__(
        self,
        gate: Gate,
        reference: hub.Reference | None,
        then: Callable[[Path], Awaitable[object]] | None,
    ) -> None:
        self._gate = gate
        self._reference = reference
        self._then = then
        self._stopped = threading.Event()
        self._files: dict[str, tuple[int, int]] = {}  # bytes of each file in total, and on this machine
        self._told: dict[str, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"<_Pull {self._reference}>"

    def _watch(self, name: str, n_bytes: int, n_here: int) -> None:
        if self._stopped.is_set():
            raise _UnwantedError
        self._files[name] = n_bytes, n_here

    async def run(self) -> None:
        """Download the file. If the task is cancelled, the download stops at the next part. Raises ApiError."""
        if self._reference is None:
            return
        self._gate.n_pulls += 1
        job = asyncio.ensure_future(
            asyncio.to_thread(hub.model_file, *self._reference, progress=False, watch=self._watch)
        )
        job.add_done_callback(self._ended)
        try:
            path = await asyncio.shield(job)
        except ModelLoadError as e:
            raise no_model(str(e)) from None
        except ImportError as e:
            raise ApiError(400, str(e)) from None
        except OSError as e:
            raise ApiError(507, f"the model cannot be kept: {e}") from None
        finally:
            self._stopped.set()
        if self._then is not None:
            await self._then(path)

    def _ended(self, job: asyncio.Future[Any]) -> None:
        self._gate.n_pulls -= 1
        if not job.cancelled():
            job.exception()

    def news(self) -> bytes:
        """Return lines for the files that have made progress."""
        lines = b""
        for name, counts in list(self._files.items()):
            if self._told.get(name) != counts:
                self._told[name] = counts
                total, completed = counts
                lines += line(
                    {"status": f"pulling {name}", "digest": name, "total": total, "completed": completed}
                )
        return lines

    async def lines(self) -> AsyncGenerator[bytes, None]:
        yield line({"status": "pulling manifest"})
        await self.run()
        if news := self.news():
            yield news
        yield line(_SUCCESS)


# ---- delete and copy
async def delete(exchange: Exchange, request: DeleteRequest) -> Response:
    """``DELETE /api/delete``: deletes a name made by a copy, or a file in the Hub's cache."""
    name = named(request)
    state = exchange.server
    check_allowed(exchange, state.settings.allow_delete, "--allow-delete")
    for copied in state.copies:
        if is_named(name, copied):
            state.copies.remove(copied)
            return Response()
    if _is_served(state, name):
        raise ApiError(403, f"the model {quoted(name)} is loaded; stop the server instead", "model")
    if _is_stored(name):
        raise ApiError(403, f"the model {quoted(name)} belongs to Ollama: use ollama rm", "model")
    reference = reference_of(name)
    try:
        path = await asyncio.to_thread(hub.model_file, *reference, local_files_only=True, progress=False)
        if path.resolve() in {model.path.resolve() for model in state.models}:
            raise ApiError(403, f"the model {quoted(name)} is loaded; stop the server instead", "model")
        await asyncio.to_thread(hub.delete, *reference)
    except ModelLoadError as e:
        raise no_model(str(e)) from None
    except ImportError as e:
        raise ApiError(400, str(e)) from None
    return Response()


def _is_stored(name: str) -> bool:
    try:
        find_stored(name)
    except (ValueError, ModelLoadError):
        return False
    return True


def check_destination(name: str) -> None:
    """Raise ApiError 400 for a text that cannot be a model's name."""
    if not _NAME.fullmatch(name):
        raise ApiError(400, f"destination: {quoted(name)} is not the name of a model", "destination")


async def copy(exchange: Exchange, request: CopyRequest) -> Response:
    """``POST /api/copy``: gives the model another name, until the server ends."""
    state = exchange.server
    check_allowed(exchange, state.settings.allow_pull, "--allow-pull")
    check_chat_model(state, request.source)
    if adapter_of(state, request.source) is not None:
        raise ApiError(400, f"{quoted(request.source)} is an adapter, which has one name", "source")
    check_destination(request.destination)
    if state.worker is not None:
        raise ApiError(400, "each worker has its names: give the model another one with --alias")
    if _is_served(state, request.destination):
        return Response()
    if len(state.copies) >= _MOST_COPIES:
        raise ApiError(400, f"the model has {_MOST_COPIES} further names, which is the limit", "destination")
    state.copies.append(request.destination.removesuffix(":latest"))
    return Response()
