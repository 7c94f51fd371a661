"""Errors as HTTP answers: one exception for handlers, and the answer for each of llamapipe's own.

OpenAI's and Anthropic's APIs write errors in shapes of their own; ``ApiError.body`` knows both.
"""

from __future__ import annotations

from typing import Any, Literal

from llamapipe.errors import (
    ContextFullError,
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
)

Dialect = Literal["openai", "anthropic"]
_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
BUSY = (429, 503)  # statuses that ask the client to come back


class ApiError(Exception):
    """An answer other than 200: the HTTP status, a message, and the request's field that it is about."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """The answer's body in the shape of an API."""
        if dialect == "anthropic":
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = _OPENAI_TYPES.get(self.status, "server_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code or kind}
        }


def api_error(error: BaseException) -> ApiError | None:
    """The answer for an exception that a call of the engine raised; None for a defect."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, f"{error}; try again later", code="queue_full")
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the server is shutting down", code="shutting_down")
    if isinstance(error, InvalidRequestError):
        code = "context_length_exceeded" if "n_ctx" in str(error) else None
        return ApiError(400, str(error), code=code)
    if isinstance(error, ContextFullError):
        return ApiError(503, f"{error}; try again later", code="kv_cache_full")
    if isinstance(error, TimeoutError):
        return ApiError(504, str(error), code="timeout")
    if isinstance(
        error, (TypeError, ValueError)
    ):  # of options: the engine checks them before it runs anything
        return ApiError(400, str(error))
    return None
