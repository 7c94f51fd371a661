"""What callers get: completions, deltas, tokens, and an engine's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Timings:
    """Durations in seconds since the request was submitted; ``first_token_s`` is None when none came."""

    first_token_s: float | None
    total_s: float


class TokenLogprob(NamedTuple):
    """How probable a token was: natural logarithms of the model's own probabilities, before any change of them.

    ``top``: the most probable tokens with theirs, as many as were asked for, the first first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Completion:
    """A finished request.

    ``token_ids``: the generated tokens, without the one that ended generation. ``text``: their text, cut before a
    stop string. ``prompt_tokens``: length of the prompt. ``seed``: the one used, also when it was drawn. ``logprobs``:
    one for each of ``token_ids`` where params ask for it; ``prompt_logprobs``: one for each token of the prompt but the
    first, which follows nothing.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    timings: Timings
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class Delta(NamedTuple):
    """A part of a stream: new text (whole characters, maybe none yet), new tokens, at the end a finish reason.

    ``logprobs``: one for each of ``token_ids`` where params ask for it.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None


class Token(NamedTuple):
    """One generated token: its id, its bytes, and the text that is complete with it.

    ``logprob`` and ``top`` where params ask for logprobs, as in ``TokenLogprob``.
    """

    id: int
    piece: bytes
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True)
class Score:
    """How probable a model holds a text behind another.

    ``token_ids``: int32 ``(n,)``; ``logprobs``: float32 ``(n,)``, the natural logarithm of each one's probability
    behind all before it; ``is_greedy``: whether each is the most probable token at its place.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    is_greedy: bool

    @property
    def total(self) -> float:
        """The logarithm of the whole text's probability, added up in float64."""
        return float(self.logprobs.sum(dtype=np.float64))


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and what it holds now; a consistent copy between two steps.

    ``n_tokens_prompt``: prompt tokens fed, again for what was preempted. Stage times are seconds of the engine thread;
    ``compute_s`` is what steps took to compute and ``wait_s`` how long it was waited for them, as far as that is known.
    ``n_waits``: waits for a step; ``n_syncs``: waits for all that was launched; ``n_copies``, ``n_copied_bytes``: rows
    brought to host memory; ``n_reused``: compute graphs that llama.cpp used again; ``n_micro_batches``: parts that
    decoding requests are split into now; ``n_graph_sampled``: tokens that the graph itself sampled.
    """

    steps: int
    n_tokens_prompt: int
    n_tokens_generated: int
    n_requests: int
    n_preempted: int
    n_active: int
    n_queued: int
    plan_s: float
    launch_s: float
    sample_s: float
    deliver_s: float
    idle_s: float
    n_micro_batches: int = 1
    n_waits: int = 0
    n_syncs: int = 0
    n_copies: int = 0
    n_copied_bytes: int = 0
    n_reused: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    n_graph_sampled: int = 0
