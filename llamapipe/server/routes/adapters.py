"""``/v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``, with vLLM's fields: load adapters while the server runs.

Open it for what clients may load. The operator names a folder (``--lora-path``), and only files in it can be loaded. A
key is needed if other machines can reach the server. Clients cannot unload the operator's own adapters.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from starlette.responses import PlainTextResponse, Response

from llamapipe._messages import quoted
from llamapipe.errors import ModelLoadError
from llamapipe.server._fields import Only, Unused
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import ApiError, no_model
from llamapipe.server.requests.permissions import check_allowed
from llamapipe.server.state import ServerState

_MOST_LOADED = 64


class LoadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``lora_path``: a GGUF file in the folder of ``--lora-path``, as an absolute path or relative to it."""

    lora_name: str
    lora_path: str
    load_inplace: Annotated[bool | None, Only(False, instead="unload it first")] = None
    is_3d_lora_weight: Annotated[bool | None, Only(False)] = None
    base_model_name: Annotated[str | None, Unused()] = None


class UnloadRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``lora_int_id``: vLLM's number of the adapter; it has no effect here."""

    lora_name: str
    lora_int_id: Annotated[int | None, Unused()] = None


async def load(exchange: Exchange, request: LoadRequest) -> Response:
    """``POST /v1/load_lora_adapter``: loads a LoRA, which requests can then name as their model."""
    state = exchange.server
    path = _allowed_path(exchange, request.lora_path)
    name = request.lora_name
    if name in state.all_names:
        raise ApiError(400, f"{quoted(name)} is the name of another model or adapter here", "lora_name")
    if len(state.loaded_adapters.keys() | state.loading_adapters) >= _MOST_LOADED:
        raise ApiError(
            400, f"{_MOST_LOADED} adapters are loaded, which is the limit; unload one", "lora_name"
        )
    state.loading_adapters.add(name)
    try:
        await state.in_thread(_load, state, path, name)
    except ModelLoadError as e:
        raise ApiError(400 if os.path.lexists(path) else 404, str(e), "lora_path") from None
    except ValueError as e:  # its name is taken, or too long
        raise ApiError(400, str(e), "lora_name") from None
    finally:
        state.loading_adapters.discard(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


def _load(state: ServerState, path: Path, name: str) -> None:
    # Noted in the thread: a client that hangs up or whose time is over does not end the load, and can unload it later.
    state.loaded_adapters[name] = state.engine.model.load_adapter(path, name)


async def unload(exchange: Exchange, request: UnloadRequest) -> Response:
    """``POST /v1/unload_lora_adapter``: removes an adapter; running requests that use it finish."""
    state = exchange.server
    _allowed_folder(exchange)
    name = request.lora_name
    adapter = state.loaded_adapters.pop(name, None)
    if adapter is None:
        if name in state.adapter_names:
            raise ApiError(
                403, f"the adapter {quoted(name)} was loaded when the server started, and stays", "lora_name"
            )
        there = ", ".join(map(repr, state.loaded_adapters)) or "none"
        raise no_model(f"there is no adapter {quoted(name)}; loaded by clients: {there}", "lora_name")
    adapter.close()
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _allowed_folder(exchange: Exchange) -> Path:
    """Return the folder whose files clients may load. Raises ApiError 403, 400."""
    state = exchange.server
    folder = state.settings.lora_path
    check_allowed(exchange, folder is not None, "--lora-path DIR")
    assert folder is not None
    if state.worker is not None:
        raise ApiError(
            400, "each worker has its adapters: load them when the server starts (--lora NAME=FILE)"
        )
    return Path(folder).resolve()


def _allowed_path(exchange: Exchange, name: str) -> Path:
    folder = _allowed_folder(exchange)
    path = folder / name
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
        path = path.resolve()
    except OSError as e:
        raise ApiError(400, f"{quoted(name)} is not the path of a file: {e.strerror}", "lora_path") from None
    except (ValueError, RuntimeError):  # a NUL in it; a link to itself
        path = folder.parent
    if not path.is_relative_to(folder):
        raise ApiError(
            403, f"{quoted(name)} is not in the folder of --lora-path; give a file's path in it", "lora_path"
        )
    return path
