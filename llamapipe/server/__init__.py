"""The HTTP server: an ASGI application over one engine, for clients and routers that speak OpenAI's or Anthropic's API.

Routes are thin: they decode a request, call the engine and encode the answer. The engine does all the scheduling. This
package needs the extra ``server``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamapipe._lazy import imported_name

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
    """Import a public name on first use. Raises ImportError, which names the extra to install, or AttributeError."""
    value = globals()[name] = imported_name(__name__, _HOMES, name, "server")
    return value
