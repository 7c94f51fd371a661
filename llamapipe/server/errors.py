"""Errors as HTTP answers: the exception that handlers raise, and the answers to llamapipe's other exceptions.

The APIs have different error formats, and ``ApiError.body`` returns all of them. llama-server's format is OpenAI's with
one more type.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Container, Mapping
from typing import Any, Literal

from llamapipe._messages import quoted, with_flags
from llamapipe.errors import (
    ConstraintError,
    ContextFullError,
    EngineClosedError,
    InvalidRequestError,
    LlamapipeError,
    QueueFullError,
)

Dialect = Literal["openai", "llama-server", "anthropic", "ollama"]
# Other statuses below 500 have the type invalid_request_error; from 500 on, server_error or api_error.
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_log = logging.getLogger("llamapipe.server")
_MOST_CHARACTERS = 2000  # of a message
_MOST_OF_PARAM = 200
QUOTA = "insufficient_quota"  # OpenAI's code for a 429 that will not succeed later
TOO_LONG = "context_length_exceeded"  # the code of an error about a prompt that does not fit
# The numbers in the message of a ``TOO_LONG`` error, which llama-server's clients read as fields.
_SIZES = re.compile(r"(\d+) tokens; n_ctx is (\d+)(?: and (\d+) must stay free)?")
_N_FRAMES = 12  # of a logged traceback: a deeply nested request could otherwise write thousands of lines
BUSY = (429, 503)  # statuses after which the client should retry


class ApiError(Exception):
    """An answer other than 200: the HTTP status, a message, and the field of the request that caused it.

    If the message advises another value for an option of the engine, the ``--option`` of the command is added to it.
    ``details``: the object that Anthropic's clients read as ``error.details``, with its ``error_code``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        if len(message) > _MOST_CHARACTERS:  # it quotes what the client sent
            message = f"{message[: _MOST_CHARACTERS // 2]} … {message[-_MOST_CHARACTERS // 2 :]}"
        message = with_flags(message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = None if param is None else param[:_MOST_OF_PARAM]
        self.code = code
        self.details = details

    def again(self) -> ApiError:
        """Return the same error for another request.

        If several requests raised the same exception, its traceback would hold the frames of all of them.
        """
        error = ApiError.__new__(ApiError, self.message)
        error.__dict__.update(self.__dict__)
        return error

    def body(self, dialect: Dialect) -> dict[str, Any]:
        """Return the answer's body in the format of an API."""
        sizes = _SIZES.search(self.message) if self.code == TOO_LONG else None
        message = self.message
        if sizes is not None:  # agents shorten their conversation if they recognize their API's words
            most = int(sizes[2]) - int(sizes[3] or 0)
            message = f"prompt is too long: {sizes[1]} tokens > {most} maximum: {message}"
            if dialect != "anthropic":
                message = f"this model's maximum context length is {sizes[2]} tokens: {message}"
        if dialect == "ollama":
            return {"error": message}
        if dialect == "anthropic":
            kind = _ANTHROPIC_TYPES.get(
                self.status, "api_error" if self.status >= 500 else "invalid_request_error"
            )
            error: dict[str, Any] = {"type": kind, "message": message}
            if self.details is not None:
                error["details"] = dict(self.details)
            return {"type": "error", "error": error}
        kind = _OPENAI_TYPES.get(
            self.status, "server_error" if self.status >= 500 else "invalid_request_error"
        )
        error = {"message": message, "type": kind, "param": self.param, "code": self.code or kind}
        if sizes is not None:
            error |= {"n_prompt_tokens": int(sizes[1]), "n_ctx": int(sizes[2])}
            # OpenAI's clients recognize this error by its code, llama-server's by its type.
            if dialect == "llama-server":
                error["type"] = "exceed_context_size_error"
        return {"error": error}


def shutting_down() -> ApiError:
    """Return the error for a request that arrives while the server shuts down."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


def wrong(place: str, key: str, problem: str) -> ApiError:
    """Return error 400 for a field of the object at ``place`` in the request."""
    return ApiError(400, f"{place}: {problem}", f"{place}.{key}")


def as_sent(value: object) -> str:
    """Return a value of a request's JSON for a message, as ``quoted`` does. A missing field is shown as null."""
    return "null" if value is None else quoted(value)


def no_model(message: str, param: str = "model") -> ApiError:
    """Return the error for a model or an adapter that is not served."""
    return ApiError(404, message, param, "model_not_found")


def code_of(error: Exception) -> str | None:
    """Return the code for the engine's error about a request: ``TOO_LONG`` if a prompt does not fit, else None."""
    return TOO_LONG if "n_ctx" in str(error) else None


def dialect_of(path: str, headers: Container[str] = ()) -> Dialect:
    """Return the format of errors at a path that may have no route; ``headers``: the names of the request's headers."""
    if path.startswith("/api/"):
        return "ollama"
    if path.startswith("/v1/messages") or "anthropic-version" in headers:
        return "anthropic"
    return "openai" if path.startswith("/v1/") else "llama-server"


def log_unexpected(error: BaseException, what: str) -> None:
    """Log an exception that may be a defect of the server, with the innermost frames.

    Checks of requests raise ``ApiError`` or one of llamapipe's other exceptions. Any other TypeError or ValueError is
    answered with 400, and only the log shows where it came from. A RecursionError is not a defect: the request is
    nested too deeply.
    """
    if isinstance(error, (TypeError, ValueError)) and not isinstance(error, LlamapipeError):
        trace = "".join(traceback.format_exception(error, limit=-_N_FRAMES))
        _log.warning("%s refused\n%s", what, trace.rstrip())


def api_error(error: BaseException) -> ApiError | None:
    """Return the error for an exception of the engine; None for an unexpected exception, which is a defect."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, EngineClosedError):
        return shutting_down()
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), code=code_of(error))
    if isinstance(error, ConstraintError):
        return ApiError(400, str(error), code="constraint_failed")
    if isinstance(error, ContextFullError):
        return ApiError(503, f"{error}; try again later", code="kv_cache_full")
    if isinstance(error, TimeoutError):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, ImportError) and "pip install 'llamapipe[" in str(error):
        return ApiError(400, f"this server lacks a package for it: {error}")
    if isinstance(error, RecursionError):  # decoding allows more levels than templates and schemas
        return ApiError(400, "the request is nested too deeply")
    if isinstance(error, UnicodeEncodeError):  # a text of this server: clients' texts can be encoded
        return None
    if isinstance(error, (TypeError, ValueError)):  # bad options, before the engine ran
        return ApiError(400, str(error))
    return None
