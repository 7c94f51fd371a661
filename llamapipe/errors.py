"""Defines every exception of llamapipe; this module imports nothing from llamapipe.

Messages name the value, the limit and the fix. Wrong arguments raise ``ValueError`` (``InvalidRequestError`` is one)
or ``TypeError``.
"""

from enum import IntEnum


class NoToken(IntEnum):
    """The reason why no token was sampled from a row, in place of the token. Equals lp_no_token in native/cdef."""

    NO_FINITE_LOGIT = -1
    NO_ALLOWED_TOKEN = -2
    SAMPLER_FAILED = -3  # the sampler's ``error`` says why, if it has one
    LATER = -4  # the token comes later: see ``Executor.sample``
    FINISHED = -5  # the constraint allows no further token, and the text is complete
    SETTLED = -6  # nothing was drawn, but the sampler now knows whether another token is allowed
    NOT_DRAWN = -7  # the row follows a guessed token that was not drawn


class LlamapipeError(Exception):
    """Base of all llamapipe errors."""


class ModelLoadError(LlamapipeError):
    """A model file is missing, damaged or unsupported, or its loading was stopped."""


class BackendError(LlamapipeError):
    """The native libraries or a device could not be used."""


class InvalidRequestError(LlamapipeError, ValueError):
    """A request that can never be served without changes."""


class ContextFullError(LlamapipeError):
    """All KV cells are used, and none can be freed."""


class DecodeError(LlamapipeError):
    """llama.cpp failed while computing a step; only the requests of that step are affected."""


class ConstraintError(DecodeError):
    """A request's constraint leaves no token to sample, or exceeds a limit; only this request fails."""


class QueueFullError(LlamapipeError):
    """The engine's queue is at its limit, and the caller asked not to wait."""


class EngineClosedError(LlamapipeError):
    """The engine, model or context was closed, or belongs to the process that this process was forked from."""
