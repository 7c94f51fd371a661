"""Measures where the time of a request went: for ``server-timing``, the log, the answer's ``timings``, ``/requests``.

The phases follow each other: the body arrives, a model is loaded, the prompt is built, the request waits for a slot,
its prompt is computed, tokens are generated. A phase ends when the next one begins, so no time is counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from llamapipe.results import ChatCompletion, Completion
from llamapipe.streams import AsyncChatStream, AsyncStream

PHASES = ("load", "prepare", "queue", "prompt", "generate")


class RequestTimes:
    """The times of one request, by ``perf_counter``; None until the event happens. Use it on the event loop's thread.

    Several prompts or choices count as one: ``slot_at`` and ``first_at`` are the earliest of them, ``last_at`` the
    latest.
    """

    def __init__(self) -> None:
        self.arrived_at = perf_counter()
        self.load_s = 0.0  # seconds that the request waited for its model
        self.submitted_at: float | None = None
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.n_prompt: int | None = 0
        self.n_completion: int | None = 0
        self._slot_at: float | None = None
        self._counts = [0, 0, 0]  # cached, drafted and accepted tokens, of answers that are complete
        self._streams: list[AsyncStream | AsyncChatStream] = []
        self._n_earlier = 0  # how many of the streams belong to earlier prompts

    def __repr__(self) -> str:
        return f"<RequestTimes {self.phases_ms()}>"

    def next_prompt(self) -> None:
        """Begin another prompt for the streams that follow; the streams of one prompt share its cached tokens."""
        self._counts[0] += self._n_cached()
        self._n_earlier = len(self._streams)

    def _n_cached(self) -> int:
        return min((stream.n_cached_tokens for stream in self._streams[self._n_earlier :]), default=0)

    def follow(self, stream: AsyncStream | AsyncChatStream) -> None:
        """Record that a stream of the engine was submitted."""
        if self.submitted_at is None:
            self.submitted_at = perf_counter()
        self._streams.append(stream)

    def take(self, done: Completion | ChatCompletion | Sequence[Completion]) -> None:
        """Record that the engine's complete answer has arrived: one completion, or one for each prompt."""
        answers = [done] if isinstance(done, (Completion, ChatCompletion)) else done
        now = perf_counter()
        began = now - max(answer.timings.total_s for answer in answers)
        firsts = [s for answer in answers if (s := answer.timings.first_token_s) is not None]
        queued = [s for answer in answers if (s := answer.timings.queue_s) is not None]
        self.submitted_at, self.last_at = began, now
        self._slot_at = began + min(queued) if queued else None
        if firsts and self.first_at is None:
            self.first_at = began + min(firsts)
        for answer in answers:
            self._counts[0] += answer.n_cached_tokens
            self._counts[1] += answer.n_drafted_tokens
            self._counts[2] += answer.n_accepted_tokens

    def token_arrived(self) -> None:
        """Record that a token of a stream has arrived. The first may have come earlier: a tool call arrives whole."""
        self.last_at = perf_counter()
        if self.first_at is None:
            firsts = [s for stream in self._streams if (s := stream.first_token_at) is not None]
            self.first_at = min(firsts, default=self.last_at)

    @property
    def was_computed(self) -> bool:
        """Whether a request was submitted to the engine."""
        return self.submitted_at is not None

    @property
    def slot_at(self) -> float | None:
        """When the first of its prompts got a slot."""
        slots = [s for stream in self._streams if (s := stream.slot_at) is not None]
        return min(slots, default=self._slot_at)

    @property
    def n_cached(self) -> int:
        """The number of cached tokens of all prompts; with several choices, from the one that computed the prompt."""
        return self._counts[0] + self._n_cached()

    @property
    def n_drafted(self) -> int:
        """The number of drafted tokens that were computed."""
        return self._counts[1] + sum(stream.n_drafted_tokens for stream in self._streams)

    @property
    def n_accepted(self) -> int:
        """The number of drafted tokens that were accepted."""
        return self._counts[2] + sum(stream.n_accepted_tokens for stream in self._streams)

    def phases_ms(self) -> dict[str, float]:
        """Return the duration of each phase that has begun, in milliseconds; of the current one, until now."""
        submitted, slot, first = self.submitted_at, self.slot_at, self.first_at
        now = perf_counter()
        ends = (submitted, slot, first, self.last_at if first is not None else None)
        phases = {"load": self.load_s * 1e3}
        begin = self.arrived_at  # the model is loaded before the request reaches the process of the model
        for name, end in zip(PHASES[1:], ends, strict=True):
            phases[name] = max((now if end is None else end) - begin, 0.0) * 1e3
            if end is None:
                break
            begin = max(end, begin)
        return {name: round(ms, 3) for name, ms in phases.items()}

    def header(self) -> bytes:
        """Return the value of ``server-timing``: phases in milliseconds, and the cached tokens."""
        phases = (f"{name};dur={ms:.1f}" for name, ms in self.phases_ms().items())
        return f'{", ".join(phases)}, cached;desc="{self.n_cached} tokens"'.encode()

    def timings(self, n_prompt: int, n_completion: int) -> dict[str, Any]:
        """Return llama-server's ``timings``, and ``queue_ms``: how long the request waited for its slot."""
        phases = self.phases_ms()
        fields = timings(
            self.n_cached, n_prompt, phases.get("prompt", 0.0), n_completion, phases.get("generate", 0.0)
        )
        if self.n_drafted:
            fields |= {"draft_n": self.n_drafted, "draft_n_accepted": self.n_accepted}
        return fields | {"queue_ms": phases.get("queue", 0.0)}


def timings(
    n_cached: int, n_prompt: int, prompt_ms: float, n_predicted: int, predicted_ms: float
) -> dict[str, Any]:
    """Return llama-server's ``timings``. ``n_prompt``: tokens of the prompt, including the cached ones."""
    n_computed = n_prompt - n_cached
    return {
        "cache_n": n_cached,
        "prompt_n": n_computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(n_computed, 1),
        "prompt_per_second": n_computed / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": n_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(n_predicted, 1),
        "predicted_per_second": n_predicted / predicted_ms * 1e3 if predicted_ms else 0.0,
    }
