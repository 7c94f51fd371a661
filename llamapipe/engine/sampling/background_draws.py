"""Draws of one step that may take long: begun together, waited for a moment, and taken when they are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING

from llamapipe.engine.sampling.background import BackgroundSampler
from llamapipe.engine.sampling.threads import SamplingThreads
from llamapipe.errors import NoToken
from llamapipe.llama.sampler import SamplerChain

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The wait is half a step, within these limits. With less, requests of small models would often miss a step only because
# waking a thread takes time.
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.0005, 0.005
_SHORTEST_WAIT_S = 2e-5  # SimpleQueue.get() with a shorter timeout may not end: see Inbox.run_next

Sampler = SamplerChain | BackgroundSampler
Drawn = tuple[BackgroundSampler, int, int]  # with the number of the draw, and the token or NoToken


class BackgroundDraws:
    """The draws of one executor in other threads. Methods are for the engine thread.

    ``notify``: called in any thread when ``take`` has a token.
    """

    def __init__(self, threads: SamplingThreads) -> None:
        self.threads = threads
        self.notify: Callable[[], object] = lambda: None
        self._tokens: SimpleQueue[Drawn] = SimpleQueue()
        self._kept: list[Drawn] = []  # of earlier steps, found while this one's were waited for
        self._n_late = 0  # tokens that ``take`` will return

    def __repr__(self) -> str:
        return f"<BackgroundDraws n_late={self._n_late} {self.threads!r}>"

    def draw(
        self,
        rows: Sequence[int],
        samplers: Sequence[Sampler],
        copied: Callable[[int], npt.NDArray[np.float32]],
        draw_native: Callable[[Sequence[int], Sequence[Sampler]], list[int]],
        patience_s: float,
    ) -> list[int]:
        """A token or NoToken for each row. Begins the draws that may take long, makes the others, and waits a moment.

        ``copied``: a copy of a row's logits. ``draw_native``: draws from rows whose samplers need no Python.
        ``patience_s``: longest wait. Samplers whose last draw took longer are not waited for.
        """
        drawn = [0] * len(rows)
        at_once: list[int] = []
        pending: dict[tuple[BackgroundSampler, int], int] = {}
        for i, sampler in enumerate(samplers):
            if isinstance(sampler, SamplerChain):
                at_once.append(i)
            elif sampler.is_ready and sampler.finished:
                drawn[i] = NoToken.FINISHED
            elif sampler.is_ready and sampler.error is None and sampler.ask():
                at_once.append(i)
            else:
                pending[sampler, sampler.draw(copied(rows[i]), self._put)] = i
        if at_once:
            tokens = draw_native([rows[i] for i in at_once], [samplers[i] for i in at_once])
            for i, token in zip(at_once, tokens, strict=True):
                drawn[i] = token
                sampler = samplers[i]
                if token >= 0 and isinstance(sampler, BackgroundSampler):
                    sampler.took(token)
        if pending:
            self._wait(pending, drawn, min(max(patience_s, _LEAST_PATIENCE_S), _MOST_PATIENCE_S))
            for i in pending.values():
                drawn[i] = NoToken.LATER
        return drawn

    def _put(self, sampler: BackgroundSampler, number: int, token: int) -> None:
        """Adds a token. Threads of samplers."""
        self._tokens.put((sampler, number, token))
        if self._n_late:
            self.notify()

    def _wait(
        self, pending: dict[tuple[BackgroundSampler, int], int], drawn: list[int], patience_s: float
    ) -> None:
        """Moves the tokens that arrive in time from ``pending`` to ``drawn``."""
        deadline_s = perf_counter() + patience_s
        while any(sampler.draw_s <= patience_s for sampler, _ in pending):
            left_s = deadline_s - perf_counter()
            if left_s < _SHORTEST_WAIT_S:
                break
            try:
                self._sort(self._tokens.get(timeout=left_s), pending, drawn)
            except Empty:
                break
        self._n_late += len(pending)  # the engine thread is told of each token that arrives from here on
        with suppress(Empty):
            while pending:
                self._n_late -= self._sort(self._tokens.get_nowait(), pending, drawn)

    def _sort(
        self, token: Drawn, pending: dict[tuple[BackgroundSampler, int], int], drawn: list[int]
    ) -> bool:
        """Uses a token of this step, or keeps one of an earlier step. Returns whether it was of this step."""
        i = pending.pop(token[:2], None)
        if i is None:
            self._kept.append(token)
            return False
        drawn[i] = token[2]
        return True

    def take(self) -> list[Drawn]:
        """The tokens that were drawn after their steps."""
        taken, self._kept = self._kept, []
        with suppress(Empty):
            while True:
                taken.append(self._tokens.get_nowait())
        self._n_late -= len(taken)
        return taken

    def settle(self, sampler: BackgroundSampler) -> None:
        """``take`` will return this sampler with ``NoToken.SETTLED`` once it is known whether it is finished."""
        self._n_late += 1
        sampler.settle(self._put)
