"""A sampler whose draws may take long, because it has a constraint or a logits processor.

Open this file to change what such a sampler computes in advance, or how its draws are divided into jobs.

The principle: the engine thread adds jobs, and the work threads (``llamapipe/work/threads.py``) run the jobs of a
sampler one at a time, in order. While there are jobs, only they use the chain. Without jobs, ``is_busy`` is false and
the engine thread may use the chain. Neither side ever blocks on a lock.

``background_draws.py`` says how long a step waits for these samplers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

from llamapipe._engine.policy.speculation import FORCED_SHARE, MOST_GUESSED
from llamapipe.errors import DecodeError, InvalidRequestError, NoToken
from llamapipe.llama.sampler import SamplerChain
from llamapipe.structured.budget import GrammarBudget
from llamapipe.work.threads import FairThreads, Job, Place, on_slowed_thread

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


PutToken = Callable[["BackgroundSampler", int, int], object]


class _Row(NamedTuple):
    """A copy of a row to draw from, the number of the draw, and the guessed token, or -1."""

    number: int
    logits: npt.NDArray[np.float32]
    guessed: int


class _Expected:
    """The guessed tokens of a step, and the masks after them, which a thread adds until ``stopped`` is set.

    ``n_allowed``: how many of the tokens may follow; None: no token is known to be forbidden.
    """

    __slots__ = ("masks", "n_allowed", "stopped", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.masks: list[npt.NDArray[np.uint32]] = []
        self.n_allowed: int | None = None
        self.stopped = False


class BackgroundSampler:
    """Builds a ``SamplerChain`` and draws with it in ``FairThreads``. Methods are for the engine thread.

    ``build``: makes the chain. ``budget``: limits the processor time of the jobs, perhaps of several samplers in total;
    None: no limit. ``share``, ``is_python``: see ``FairThreads.run``. ``guesses``: whether the sampler guesses the next
    tokens, first of all text that its guide forces.

    After each token the sampler first guesses the next tokens, in a fraction of the time of a mask; the next step waits
    a moment for this (``has_looked``). The masks for a step's rows are computed during the step, because a mask needs
    only the tokens before it. If the first mask is ready, the row is drawn from like any other (``is_ready``), and so
    are the rows after it along a guess. If the mask is not ready, if there is none (GBNF), or if a processor needs the
    row, ``draw`` works on copies of the rows while other requests continue.

    ``is_forced``: whether the last guess that was drawn along was forced text.

    ``finished``: no token may follow the accepted ones. ``error``: why nothing can be drawn any more. Both are known
    when the jobs are done. ``draw_s``: how many seconds the last ``draw`` took, including waits.
    """

    is_native = False

    def __init__(
        self,
        build: Callable[[], SamplerChain],
        budget: GrammarBudget | None,
        share: Hashable = None,
        is_python: bool = True,
        guesses: bool = False,
    ) -> None:
        self.guesses = guesses
        self.is_forced = False
        self._expected = _Expected(())
        self._rows_left: deque[_Row] = deque()  # rows of the last ``draw`` that no thread has started on
        self.looked: Callable[[], object] | None = None  # called, in any thread, when ``has_looked`` is true
        self._has_looked = False
        self._forced: Sequence[int] = ()  # tokens of the text that every continuation has
        self._guessed: tuple[Sequence[int], float] = ((), 0.0)  # by the chain, as far as its guide allows
        self._forced_share = FORCED_SHARE
        self._noted: list[tuple[float, Sequence[tuple[int, float]]]] = []  # log-probabilities along a guess
        self.finished = False
        self.error: Exception | None = None
        self.draw_s = 0.0
        self.n_draws = 0
        self._chain: SamplerChain | None = None
        self._budget = budget
        self._share = share
        self._is_python = is_python
        self._threads: FairThreads | None = None
        self._place = Place()
        self._jobs: deque[Job] = deque()
        self._turn = threading.Lock()  # held by the thread that runs the jobs; never waited for
        self._n_added = self._n_done = 0
        self._closing = False
        self._add(lambda: self._build(build))

    def __repr__(self) -> str:
        state = " busy" if self.is_busy else " ready" if self.is_ready else ""
        return f"<BackgroundSampler{state} {self._chain!r}>"

    # ---- jobs
    def start(self, threads: FairThreads) -> None:
        """Begin the jobs added so far. Later calls do nothing."""
        if self._threads is None:
            self._threads = threads
            threads.run(self._run_jobs, self._share, self._is_python, place=self._place)

    def _add(self, *jobs: Job) -> None:
        self._n_added += len(jobs)
        self._jobs.extend(jobs)
        if self._threads is not None:
            self._threads.run(self._run_jobs, self._share, self._is_python, place=self._place)

    def _run_jobs(self) -> None:
        """Run jobs until there are none, unless another thread runs them; that thread checks again when it stops.

        Computing a mask releases the interpreter's lock; accepting a token holds it, for 30 ms in bad grammars. Other
        threads wait for this lock, so jobs after a long mask are left to a thread with normal priority.
        """
        while self._jobs and self._turn.acquire(blocking=False):
            is_slowed, spent_s = False, 0.0
            try:
                while self._jobs and not is_slowed:
                    began_s = thread_time()
                    try:
                        self._jobs.popleft()()
                    except BaseException as e:  # not handled by the job: only this request fails
                        self._fail(e)
                    took_s = thread_time() - began_s
                    spent_s += took_s
                    self._place.add_time(took_s, spent_s)
                    if self._budget is not None:
                        self._budget.spent_s += took_s
                        self.error = self.error or self._budget.error()
                    self._n_done += 1
                    if self.looked is not None and self.has_looked:
                        self.looked()
                    is_slowed = on_slowed_thread()
            finally:
                self._turn.release()
            if is_slowed and self._threads is not None:
                self._threads.run(self._run_jobs, self._share, self._is_python, place=self._place)
                return

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.error = error
        else:
            self.error = DecodeError(f"what chooses this request's tokens raised {error!r}")

    @property
    def is_busy(self) -> bool:
        """Whether jobs wait or run; jobs for masks along a guess do not count."""
        return self._n_done != self._n_added

    @property
    def has_looked(self) -> bool:
        """Whether the answer of ``guess`` stays the same until the next token."""
        return self._has_looked or not self.is_busy

    # ---- the chain
    @property
    def is_ready(self) -> bool:
        """Whether the next token can be drawn from a native row now, because its mask is known."""
        chain = self._chain
        return not self.is_busy and chain is not None and chain.guide is not None and not chain.processors

    @property
    def handle(self) -> Any:
        """The native sampler. Use it only after ``is_ready`` was true."""
        assert self._chain is not None
        return self._chain.handle

    def ask(self) -> bool:
        """Give the native sampler the mask that is ready. On failure, return False and set ``error``."""
        assert self._chain is not None
        self._noted = []
        if self._chain.ask_guide():
            return True
        self.error = self._chain.error
        return False

    def expect(self, tokens: Sequence[int]) -> int:
        """Begin to compute the masks of the rows after guessed tokens, unless they are known.

        Returns how many of the tokens may follow. A token that is not known yet counts. If the caller adds tokens one
        by one, as they are drafted, almost all are known. GBNF has no masks, but its tokens are also checked.
        """
        chain = self._chain
        if self._is_python or chain is None or (chain.guide is None and not chain.has_grammar):
            return len(tokens)
        if self.is_ready and self.error is None and tokens and not self._allows(tokens[0]):
            return 0
        expected, n = self._expected, len(self._expected.tokens)
        if expected.stopped or not n or expected.tokens[: len(tokens)] != list(tokens[:n]):
            expected.stopped = True
            expected, n = _Expected(()), 0
            self._expected = expected
        expected.tokens += tokens[n:]
        if n < len(tokens) and expected.n_allowed is None:
            self._add(lambda: self._follow(expected))
            self._n_added -= 1  # not counted: no other job needs its result, and it does not change the chain
        return len(tokens) if expected.n_allowed is None else min(len(tokens), expected.n_allowed)

    def _allows(self, token: int) -> bool:
        """Return whether a token may be the next one. Call this only while ``is_ready``, so that there is a mask."""
        assert self._chain is not None and self._chain.guide is not None
        return bool(int(self._chain.guide.mask()[token >> 5]) >> (token & 31) & 1)

    def accept_drawn(self, *tokens: int) -> None:
        """Record that these tokens were drawn from native rows, and begin to compute the next mask."""
        self._expected.stopped = True
        self._has_looked = False
        self._add(*(partial(self._accept, token) for token in tokens), self._look_ahead, self._advance)

    def expects(self, guessed: Sequence[int]) -> bool:
        """Return whether the masks along a guess are computed or soon will be."""
        expected = self._expected.tokens[: len(guessed)]
        return self.is_ready and self.error is None and expected == list(guessed)

    def draw_along(
        self,
        rows: Sequence[int],
        guessed: Sequence[int],
        draw_native: Callable[[Sequence[int], Sequence[Any], Sequence[int]], list[int]],
    ) -> list[int]:
        """Return tokens drawn from native rows, each with its mask, until a token is not the guessed one.

        Call ``ask`` first. This also ends before the first row whose mask is not ready; ``draw`` may continue there.
        """
        assert self._chain is not None
        self.is_forced = list(self._forced[: len(guessed) - 1]) == list(guessed[:-1])
        masks = self._expected.masks
        tokens: list[int] = []
        for i, row in enumerate(rows):
            if i > len(masks):
                break
            if i and not len(masks[i - 1]):
                tokens.append(NoToken.FINISHED)
                break
            if i:
                self._chain.show_mask(masks[i - 1])
            tokens += draw_native([row], [self], ())
            if self._chain.n_logprobs >= 0 and tokens[-1] >= 0:
                self._noted.append(self._chain.logprobs())
            if tokens[-1] != guessed[i]:
                break
        if self.is_forced and (len(tokens) == len(rows) or tokens[-1] != guessed[len(tokens) - 1]):
            n_right = len(tokens) - 1
            self._forced_share += 0.1 * (n_right / (len(rows) - 1) - self._forced_share)
        if tokens[-1] >= 0:
            self.accept_drawn(*tokens)
        else:
            self._add(*(partial(self._accept, token) for token in tokens[:-1]))
        return tokens

    def draw(
        self,
        rows: Sequence[npt.NDArray[np.float32]],
        guessed: Sequence[int],
        drawn: PutToken,
        continues: bool = False,
    ) -> Sequence[int]:
        """Begin to draw from copies of rows, after the jobs so far, until a token is not the guessed one.

        Returns a number for each row. ``drawn`` is called in another thread with this sampler, the number, and the
        token or a NoToken. ``guessed``: for each row the guessed token, or -1. ``continues``: this draw follows
        ``draw_along``.
        """
        numbers = range(self.n_draws + 1, self.n_draws + 1 + len(rows))
        self.n_draws = numbers[-1]
        self._expected.stopped = True
        self._has_looked = False
        if not continues:
            self._noted = []
            self.is_forced = False
        first, *others = map(_Row, numbers, rows, guessed)
        left = self._rows_left = deque(others)
        began_s = perf_counter()
        self._add(lambda: self._draw(first, left, drawn, began_s))
        return numbers

    def give_up_guess(self) -> int:
        """End the last ``draw`` after its current row. Return how many rows it leaves out."""
        n = 0
        with suppress(IndexError):
            while True:
                self._rows_left.pop()
                n += 1
        self.n_draws -= n
        return n

    def await_end_state(self, drawn: PutToken) -> int:
        """Call ``drawn`` with ``NoToken.SETTLED`` once ``finished`` is known. Return the number of the call."""
        self.n_draws += 1
        number = self.n_draws
        self._add(lambda: drawn(self, number, NoToken.SETTLED))
        return number

    def rebuild(self, change: Callable[[SamplerChain], object]) -> None:
        """Start over: ``change`` resets the chain, which then accepts another sequence."""
        self._expected.stopped = True
        self._has_looked = False
        self._add(lambda: self._rebuild(change))

    def guess(self, n: int) -> tuple[Sequence[int], float]:
        """Return at most ``n`` tokens that the guide forces or the chain guesses, and their share of right guesses.

        Returns no tokens while they are unknown.
        """
        if not self.guesses or not self.has_looked or self.error is not None or self._chain is None:
            return (), 0.0
        if self._forced:
            return self._forced[:n], self._forced_share
        if self._chain.guide is None and not self._chain.has_grammar:
            return ((), 0.0) if self.is_busy else self._chain.guess(n)
        return self._guessed[0][:n], self._guessed[1]

    def logprobs(self, i: int = 0) -> tuple[float, Sequence[tuple[int, float]]]:
        """Return the log-probabilities of token ``i`` of the last draw; a draw along a guess has several tokens."""
        assert self._chain is not None
        return self._noted[i] if self._noted else self._chain.logprobs()

    # ---- in the threads
    def _build(self, build: Callable[[], SamplerChain]) -> None:
        if self._closing:
            return
        try:
            self._chain = build()
            self._prepare()
        except (ValueError, DecodeError) as e:  # a fork or a restored sequence violates the constraint
            self.error = InvalidRequestError(str(e))

    def _rebuild(self, change: Callable[[SamplerChain], object]) -> None:
        if self._closing or self._chain is None:
            return
        self.finished, self.error = False, None
        try:
            change(self._chain)
            self._prepare()
        except (ValueError, DecodeError) as e:
            self.error = InvalidRequestError(str(e))

    def _prepare(self) -> None:
        """Guess the next tokens, and learn from the guide whether the text is finished."""
        self._look_ahead()
        chain = self._chain
        if chain is not None and chain.guide is not None:
            self.finished = chain.finished = chain.guide.finished

    def _accept(self, token: int) -> None:
        chain = self._chain
        if self._closing or self.error is not None or chain is None:
            return
        if not chain.tell_guide(token):
            self.error = chain.error

    def _advance(self) -> None:
        """Compute the mask after an accepted token."""
        chain = self._chain
        if self._closing or self.error is not None or chain is None:
            return
        if chain.advance_guide():
            self.finished = chain.finished
        else:
            self.error = chain.error

    def _follow(self, expected: _Expected) -> None:
        """Compute the masks along a guess. This does not count as a job, and the budget does not pay for it."""
        began_s, chain = thread_time(), self._chain
        try:
            if chain is None or expected.stopped or self._closing or self.error:
                return
            tokens = expected.tokens.copy()  # ``expect`` may add more tokens
            if chain.guide is None:
                n_allowed = chain.n_allowed(tokens)
            else:
                for mask in chain.guide.follow(tokens, len(expected.masks)):
                    expected.masks.append(mask)
                    if expected.stopped:
                        return
                n_allowed = len(expected.masks)
            if n_allowed < len(tokens):
                expected.n_allowed = n_allowed
        finally:
            self._n_done -= 1
            if self._budget is not None:
                self._budget.spent_s -= thread_time() - began_s

    def _look_ahead(self) -> None:
        """Guess the next tokens: text that the guide forces, or a guess of the chain that the constraint allows."""
        chain = self._chain
        self._forced, self._guessed = (), ((), 0.0)
        if self.guesses and chain is not None and not self._closing and self.error is None:
            try:
                if chain.guide is not None and not self._is_python:
                    with suppress(SystemExit):  # the interpreter exits, so nothing is compiled any more
                        self._forced = chain.guide.forced(MOST_GUESSED)
                if not self._forced and (chain.guide is not None or chain.has_grammar):
                    self._guessed = self._allowed_start(chain, *chain.guess(MOST_GUESSED))
            except DecodeError as e:
                self.error = e
        self._has_looked = True

    def _allowed_start(
        self, chain: SamplerChain, tokens: Sequence[int], share: float
    ) -> tuple[Sequence[int], float]:
        """Return the first tokens of a guess that the constraint allows. The budget does not pay for this."""
        if not tokens:
            return tokens, share
        began_s, guide = thread_time(), chain.guide
        n = chain.n_allowed(tokens) if guide is None else guide.n_allowed(tokens, _MOST_CHECK_S)
        if self._budget is not None:
            self._budget.spent_s -= thread_time() - began_s
        return tokens[:n], share

    def _draw(self, row: _Row, left: deque[_Row], drawn: PutToken, began_s: float) -> None:
        token: int = NoToken.SAMPLER_FAILED
        chain = self._chain
        if self.finished:
            token = NoToken.FINISHED
        elif self.error is None and chain is not None and not self._closing:
            if chain.ask_guide():
                token = chain.draw_processed(row.logits)
            if token == NoToken.SAMPLER_FAILED:
                self.error = chain.error
            elif token >= 0 and chain.n_logprobs >= 0:
                self._noted.append(chain.logprobs())
        ended_s = perf_counter()
        self.draw_s = ended_s - began_s
        # These jobs run before the next draw, which the engine thread adds when it has this token; the last runs first.
        following: list[Job] = []
        if left and token >= 0 and token == row.guessed:
            following.append(lambda: self._draw_next(left, drawn, ended_s))
        if token >= 0 and chain is not None and chain.guide is not None:
            following += self._advance, self._look_ahead, lambda: self._accept(token)
        elif token >= 0 and chain is not None and chain.has_grammar and self.guesses and not following:
            following.append(self._look_ahead)
        self._has_looked = False
        self._n_done -= len(following)
        self._jobs.extendleft(following)
        drawn(self, row.number, token)
        if token != row.guessed:
            left.clear()  # copies of rows are large

    def _draw_next(self, left: deque[_Row], drawn: PutToken, began_s: float) -> None:
        """Draw from the next row along a guess, unless the engine thread no longer waits.

        A row leaves ``left`` only when the token before it was passed to ``drawn``. So ``give_up_guess`` either leaves
        out a row, or the row's token still arrives, never both.
        """
        try:
            row = left.popleft()
        except IndexError:
            if self._chain is not None and self._chain.guide is None:
                self._look_ahead()
            return
        self._draw(row, left, drawn, began_s)

    def _close_chain(self) -> None:
        chain, self._chain = self._chain, None
        if chain is not None:
            chain.close()

    # ---- lifetime
    def close(self) -> None:
        """Free the chain after the running job."""
        self._closing = True
        if self._threads is None or not self.is_busy:
            self._jobs.clear()
            self._close_chain()
        else:
            self._add(self._close_chain)


# Maximum seconds to check which tokens of a guess are allowed: they are for the next step, which does not wait long.
_MOST_CHECK_S = 0.001
