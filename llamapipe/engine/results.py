"""What callers get: completions, deltas, tokens, and an engine's counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Timings:
    """Durations in seconds since the request was submitted; ``first_token_s`` is None when none came."""

    first_token_s: float | None
    total_s: float


@dataclass(frozen=True)
class Completion:
    """A finished request.

    ``token_ids``: the generated tokens, without the one that ended generation. ``text``: their text, cut before a
    stop string. ``prompt_tokens``: length of the prompt. ``seed``: the one used, also when it was drawn.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    seed: int
    timings: Timings


class Delta(NamedTuple):
    """A part of a stream: new text (whole characters, maybe none yet), new tokens, at the end a finish reason."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None


class Token(NamedTuple):
    """One generated token: its id, its bytes, and the text that is complete with it."""

    id: int
    piece: bytes
    text: str


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and what it holds now; a consistent copy between two steps.

    ``n_tokens_prompt``: prompt tokens fed, again for what was preempted. Stage times are seconds of the decoder thread;
    ``compute_s`` is what steps took to compute and ``wait_s`` how long it was waited for them, as far as that is known.
    ``n_waits``: waits for a step; ``n_syncs``: waits for all that was launched; ``n_copies``, ``n_copied_bytes``: rows
    brought to host memory; ``n_reused``: compute graphs that llama.cpp used again; ``n_cohorts``: parts that decoding
    requests are split into now; ``n_graph_sampled``: tokens that the graph itself sampled.
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
    n_cohorts: int = 1
    n_waits: int = 0
    n_syncs: int = 0
    n_copies: int = 0
    n_copied_bytes: int = 0
    n_reused: int = 0
    compute_s: float = 0.0
    wait_s: float = 0.0
    n_graph_sampled: int = 0
