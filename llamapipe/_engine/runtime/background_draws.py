"""Draws that work threads make for a step, and how long the engine thread waits for them.

Open this file to change how long a step waits for slow samplers.

The principle: a slow request never holds up other requests. The engine thread waits for about half a step, and not at
all for samplers whose last draw took longer. In place of a late token, the step gets ``NoToken.LATER``: the request
skips steps until ``take`` returns the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TYPE_CHECKING

from llamapipe._engine.runtime.background_sampler import BackgroundSampler
from llamapipe.errors import NoToken
from llamapipe.llama.sampler import SamplerChain
from llamapipe.work.threads import FairThreads

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# The wait is half a step, within these limits. A shorter wait would often make requests of small models miss a step
# only because waking a thread takes time.
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.0005, 0.005
# The wait for a constraint's next forced text, as a fraction of the wait for a token. The text may save a step.
_PATIENCE_AHEAD = 0.2
_SHORTEST_WAIT_S = 2e-5  # SimpleQueue.get() with a shorter timeout may not end: see Inbox.run_next
AnySampler = SamplerChain | BackgroundSampler
Drawn = tuple[BackgroundSampler, int, int]  # the sampler, the number of the draw, and the token or NoToken


class BackgroundDraws:
    """The draws that other threads make for one executor. Methods are for the engine thread.

    ``notify``: called in any thread when ``take`` has a token.
    """

    def __init__(self, threads: FairThreads) -> None:
        self.threads = threads
        self.notify: Callable[[], object] = lambda: None
        self._tokens: SimpleQueue[Drawn] = SimpleQueue()
        self._kept: list[Drawn] = []  # tokens of earlier steps that arrived during a wait for a later step's
        self._n_late = 0  # tokens that ``take`` will return
        self._looked: SimpleQueue[None] = SimpleQueue()  # gets an item when a sampler may have looked

    def __repr__(self) -> str:
        return f"<BackgroundDraws n_late={self._n_late} {self.threads!r}>"

    def draw(
        self,
        rows: Sequence[int],
        samplers: Sequence[AnySampler],
        copied: Callable[[int], npt.NDArray[np.float32]],
        draw_native: Callable[[Sequence[int], Sequence[AnySampler], Sequence[int]], list[int]],
        patience_s: float,
        guessed: Sequence[int] = (),
    ) -> list[int]:
        """Return a token or NoToken for each row: begin the slow draws, make the other draws, then wait a moment.

        ``copied``: returns a copy of a row's logits. ``draw_native``: draws from rows whose samplers need no Python.
        ``patience_s``: the wait in seconds, within limits; samplers whose last draw took longer are not waited for.
        ``guessed``: as in ``Executor.sample``.
        """
        drawn: list[int] = [NoToken.NOT_DRAWN] * len(rows)
        at_once: list[int] = []
        pending: dict[tuple[BackgroundSampler, int], int] = {}
        looking: list[BackgroundSampler] = []
        for i, sampler in enumerate(samplers):
            if isinstance(sampler, SamplerChain):
                at_once.append(i)
                continue
            if guessed and i and samplers[i - 1] is sampler:
                continue  # drawn with the first of its rows, or not at all
            end = i + 1
            if guessed and guessed[i] >= 0:
                while end < len(rows) and samplers[end] is sampler:
                    end += 1
            if sampler.guesses:
                looking.append(sampler)
            if sampler.is_ready and sampler.finished:
                drawn[i] = NoToken.FINISHED
            elif end > i + 1 and sampler.expects(guessed[i : end - 1]) and sampler.ask():
                tokens = sampler.draw_along(rows[i:end], guessed[i:end], draw_native)
                drawn[i : i + len(tokens)] = tokens
                left = range(i + len(tokens), end)
                if left and tokens[-1] == guessed[left.start - 1]:  # a mask is missing
                    self._begin(sampler, left, rows, copied, guessed, pending, continues=True)
            elif end == i + 1 and sampler.is_ready and sampler.error is None and sampler.ask():
                at_once.append(i)
            else:
                self._begin(sampler, range(i, end), rows, copied, guessed, pending)
        if at_once:
            expected = [guessed[i] for i in at_once] if guessed else ()
            tokens = draw_native([rows[i] for i in at_once], [samplers[i] for i in at_once], expected)
            for i, token in zip(at_once, tokens, strict=True):
                drawn[i] = token
                sampler = samplers[i]
                if token >= 0 and isinstance(sampler, BackgroundSampler):
                    sampler.accept_drawn(token)
        if pending:
            patience_s = min(max(patience_s, _LEAST_PATIENCE_S), _MOST_PATIENCE_S)
            self._wait(pending, drawn, patience_s, guessed)
            for i in pending.values():
                drawn[i] = NoToken.LATER
            late = {sampler for sampler, _ in pending}
            looking = [sampler for sampler in looking if sampler not in late]
        if looking:
            self._await_looks(looking, min(_PATIENCE_AHEAD * patience_s, _LEAST_PATIENCE_S))
        return drawn

    def _begin(
        self,
        sampler: BackgroundSampler,
        places: range,
        rows: Sequence[int],
        copied: Callable[[int], npt.NDArray[np.float32]],
        guessed: Sequence[int],
        pending: dict[tuple[BackgroundSampler, int], int],
        continues: bool = False,
    ) -> None:
        copies = [copied(rows[i]) for i in places]
        expected = [guessed[i] if guessed else -1 for i in places]
        numbers = sampler.draw(copies, expected, self._put, continues)
        pending.update(((sampler, number), i) for number, i in zip(numbers, places, strict=True))

    def _await_looks(self, samplers: Sequence[BackgroundSampler], patience_s: float) -> None:
        """Wait a moment until the samplers have guessed the next tokens, so that the next step may have several."""
        deadline_s = perf_counter() + patience_s
        with suppress(Empty):
            while not all(sampler.has_looked for sampler in samplers):
                left_s = deadline_s - perf_counter()
                if left_s < _SHORTEST_WAIT_S:
                    return
                for sampler in samplers:
                    sampler.looked = self._put_looked
                self._looked.get(timeout=left_s)

    def _put_looked(self) -> None:
        self._looked.put(None)

    def _put(self, sampler: BackgroundSampler, number: int, token: int) -> None:
        """Add a drawn token. For the threads of samplers."""
        self._tokens.put((sampler, number, token))
        if self._n_late:
            self.notify()

    def _wait(
        self,
        pending: dict[tuple[BackgroundSampler, int], int],
        drawn: list[int],
        patience_s: float,
        guessed: Sequence[int],
    ) -> None:
        """Move the tokens that arrive in time from ``pending`` to ``drawn``.

        At most one draw of each sampler stays pending.
        """
        deadline_s = perf_counter() + patience_s
        while any(sampler.draw_s <= patience_s for sampler, _ in pending):
            left_s = deadline_s - perf_counter()
            if left_s < _SHORTEST_WAIT_S:
                break
            try:
                self._sort(self._tokens.get(timeout=left_s), pending, drawn, guessed)
            except Empty:
                break
        for sampler in {sampler for sampler, _ in pending} if guessed else ():
            n_left_out = sampler.give_up_guess()
            for number in range(sampler.n_draws + 1, sampler.n_draws + 1 + n_left_out):
                pending.pop((sampler, number), None)
        n_late = len(pending)
        self._n_late += n_late  # from here on, ``_put`` notifies the engine thread of each token
        with suppress(Empty):
            while pending:
                self._sort(self._tokens.get_nowait(), pending, drawn, guessed)
        self._n_late -= n_late - len(pending)

    def _sort(
        self,
        token: Drawn,
        pending: dict[tuple[BackgroundSampler, int], int],
        drawn: list[int],
        guessed: Sequence[int],
    ) -> None:
        """Use a token of this step, or keep a token of an earlier step."""
        sampler, number, token_id = token
        i = pending.pop((sampler, number), None)
        if i is None:
            self._kept.append(token)
            return
        drawn[i] = token_id
        if guessed and token_id != guessed[i]:
            while pending.pop((sampler, number + 1), None) is not None:  # rows after a wrong guess
                number += 1

    def take(self) -> list[Drawn]:
        """Return the tokens that were drawn after their steps."""
        taken, self._kept = self._kept, []
        with suppress(Empty):
            while True:
                taken.append(self._tokens.get_nowait())
        self._n_late -= len(taken)
        return taken

    def await_end_state(self, sampler: BackgroundSampler) -> None:
        """Add this sampler with ``NoToken.SETTLED`` to the results of ``take`` once its end state is known."""
        self._n_late += 1
        sampler.await_end_state(self._put)
