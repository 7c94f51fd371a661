"""The HTTP server: an ASGI application over one engine, for clients and routers that speak OpenAI's or Anthropic's API.

Routes are thin: they decode a request, call the engine and encode the answer. All scheduling is done by the engine.
Needs the extra ``server``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llamapipe.server.application import app
    from llamapipe.server.run import bound_socket, run_server, serve
    from llamapipe.server.settings import ServerSettings

__all__ = ["ServerSettings", "app", "bound_socket", "run_server", "serve"]
_HOMES = {
    "ServerSettings": "settings",
    "app": "application",
    "bound_socket": "run",
    "run_server": "run",
    "serve": "run",
}


def __getattr__(name: str) -> object:
    """Imports a public name on first use, so that importing the package does not need the extra."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        value: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] == "llamapipe":
            raise
        raise ImportError(
            f"the server needs {e.name}, which is not installed: pip install 'llamapipe[server]'"
        ) from None
    globals()[name] = value
    return value
