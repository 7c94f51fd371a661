"""What clients may do only if the operator has allowed it with an option."""

from __future__ import annotations

from llamapipe.server._guard import listens_on_loopback
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import ApiError
from llamapipe.server.gate import Gate


def check_allowed(exchange: Exchange, is_allowed: bool, option: str) -> None:
    """Raise ApiError 403 unless the operator allows the request with ``option``."""
    if not is_allowed:
        raise ApiError(403, f"this server does not allow it; start it with {option}", code="not_allowed")
    gate: Gate = exchange.server
    if not gate.settings.api_keys and not listens_on_loopback(gate, exchange.scope):
        raise ApiError(
            403,
            f"{option} needs an API key where other machines reach the server (--api-key-file)",
            code="not_allowed",
        )
