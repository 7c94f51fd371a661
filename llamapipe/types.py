"""Exports types that few programs name: argument types, parts of results, protocols for observers of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from llamapipe.chat.results import ToolCallDelta
from llamapipe.chat.tools import ToolDefinition
from llamapipe.params import HasJsonSchema, SamplingParams
from llamapipe.results import ChatChoice, TimeHistogram, Timings, TokenLogprob, TopLogprob

__all__ = [
    "ChatChoice", "HasJsonSchema", "Observation", "ObservedRequest", "Prompt", "RequestObserver", "ResponseFormat",
    "TimeHistogram", "Timings", "TokenIds", "TokenLogprob", "ToolCallDelta", "ToolDefinition", "TopLogprob",
]  # fmt: skip
TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]
Prompt: TypeAlias = str | TokenIds
ResponseFormat: TypeAlias = Mapping[str, object] | str | bool | HasJsonSchema


class ObservedRequest(Protocol):
    """One submitted prompt with all its choices. Any thread; the values change while the request runs.

    ``operation``: ``"text_completion"``, ``"chat"`` or ``"score"``. ``params``: None for scores. ``is_stream``:
    whether the tokens are delivered one by one. ``finish_reasons``: one for each choice, None while it is
    unfinished. Times are seconds of ``time.perf_counter``; None means not yet, or never. ``prefill_at``: when a slot
    began to compute the prompt.
    """

    @property
    def operation(self) -> str: ...  # noqa: D102
    @property
    def params(self) -> SamplingParams | None: ...  # noqa: D102
    @property
    def is_stream(self) -> bool: ...  # noqa: D102
    @property
    def n_prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def n_cached_tokens(self) -> int: ...  # noqa: D102
    @property
    def n_completion_tokens(self) -> int: ...  # noqa: D102
    @property
    def finish_reasons(self) -> tuple[str | None, ...]: ...  # noqa: D102
    @property
    def prefill_at(self) -> float | None: ...  # noqa: D102
    @property
    def first_token_at(self) -> float | None: ...  # noqa: D102
    @property
    def ended_at(self) -> float | None: ...  # noqa: D102


class Observation(Protocol):
    """An observer's record of one request."""

    def end(self, error: BaseException | None = None, timed_out: bool = False) -> None:
        """Record that the caller has the result or the error, or has given up. The caller's thread calls this once."""

    def drop(self) -> None:
        """Record that the caller has dropped its stream. A destructor calls this, so it must not take a lock."""


class RequestObserver(Protocol):
    """Observes every prompt that is submitted to an engine. Any thread."""

    def begin(self, request: ObservedRequest) -> Observation:
        """Begin to observe a prompt, before its requests are submitted."""

    def close(self) -> None:
        """Record that the engine was closed."""
