"""A sampler whose work may take long: it has a constraint or logits processors.

The rule of this file: the engine thread adds jobs to a sampler, and the threads run the jobs of one sampler one after
the other, in their order. Only jobs touch the chain, except while there are none: then ``is_busy`` is false and the
engine thread may use it. No lock is waited for on either side.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any

from llamapipe.engine.sampling.threads import SamplingThreads, on_slowed_thread
from llamapipe.errors import ConstraintError, DecodeError, InvalidRequestError, NoToken
from llamapipe.llama.sampler import SamplerChain

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Job = Callable[[], object]
PutToken = Callable[["BackgroundSampler", int, int], object]


class GrammarBudget:
    """The processor time that the constraint of one prompt may take, compiled and followed. ``limit_s`` None: any."""

    __slots__ = ("limit_s", "spent_s")

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s
        self.spent_s = 0.0

    def error(self) -> ConstraintError | None:
        """Why the request must end; None while time is left."""
        if self.limit_s is None or self.spent_s <= self.limit_s:
            return None
        return ConstraintError(
            f"the request's constraint has taken {self.spent_s:.1f} s of processor time; grammar_timeout is "
            f"{self.limit_s:g} s: simplify the constraint, or raise grammar_timeout"
        )


class BackgroundSampler:
    """Makes and uses a ``SamplerChain`` in ``SamplingThreads``. Methods are for the engine thread.

    ``build``: makes the chain. ``budget``: of its jobs' processor time, perhaps with other samplers; None: no limit.
    ``share``, ``is_python``: of its jobs, see SamplingThreads.

    While a step is computed, the mask for its row is: the token before it is all that a mask needs. If the mask is
    ready, the row is drawn from as any other (``is_ready``). If it is not, or a processor wants the row, ``draw``
    continues with a copy of the row, and other requests go on.

    ``finished``: no token may follow the accepted ones. ``error``: why nothing can be drawn any more. Both are known
    when the jobs are done. ``draw_s``: how long the last ``draw`` took, waiting included.
    """

    is_native = False

    def __init__(
        self,
        build: Callable[[], SamplerChain],
        budget: GrammarBudget | None,
        share: Hashable = None,
        is_python: bool = True,
    ) -> None:
        self.finished = False
        self.error: Exception | None = None
        self.draw_s = 0.0
        self.n_draws = 0
        self._chain: SamplerChain | None = None
        self._budget = budget
        self._share = share
        self._is_python = is_python
        self._threads: SamplingThreads | None = None
        self._jobs: deque[Job] = deque()
        self._turn = threading.Lock()  # held by the thread that runs the jobs; never waited for
        self._n_added = self._n_done = 0
        self._closing = False
        self._add(lambda: self._build(build))

    def __repr__(self) -> str:
        state = " busy" if self.is_busy else " ready" if self.is_ready else ""
        return f"<BackgroundSampler{state} {self._chain!r}>"

    # ---- jobs
    def start(self, threads: SamplingThreads) -> None:
        """Begins with the jobs so far. Later calls do nothing."""
        if self._threads is None:
            self._threads = threads
            threads.run(self._run_jobs, self._share, self._is_python)

    def _add(self, *jobs: Job) -> None:
        self._n_added += len(jobs)
        self._jobs.extend(jobs)
        if self._threads is not None:
            self._threads.run(self._run_jobs, self._share, self._is_python)

    def _run_jobs(self) -> None:
        """Runs jobs until there are none, unless another thread does. That one looks again after it let go.

        A mask is computed without the interpreter's lock, a token accepted with it, for 30 ms in bad grammars. So what
        follows a long mask is left to a thread whose priority was not lowered: others wait for that lock.
        """
        while self._jobs and self._turn.acquire(blocking=False):
            is_slowed = False
            try:
                while self._jobs and not is_slowed:
                    began_s = thread_time()
                    try:
                        self._jobs.popleft()()
                    except BaseException as e:  # a job's own handling missed it: this request fails, no other
                        self._fail(e)
                    if self._budget is not None:
                        self._budget.spent_s += thread_time() - began_s
                        self.error = self.error or self._budget.error()
                    self._n_done += 1
                    is_slowed = on_slowed_thread()
            finally:
                self._turn.release()
            if is_slowed and self._threads is not None:
                self._threads.run(self._run_jobs, self._share, self._is_python)
                return

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, Exception):
            self.error = error
        else:
            self.error = DecodeError(f"what chooses this request's tokens raised {error!r}")

    @property
    def is_busy(self) -> bool:
        """Whether jobs wait or run."""
        return self._n_done != self._n_added

    # ---- the chain
    @property
    def is_ready(self) -> bool:
        """Whether the next token can be drawn from a native row at once: its mask is known."""
        chain = self._chain
        return not self.is_busy and chain is not None and chain.guide is not None and not chain.processors

    @property
    def handle(self) -> Any:
        """The native sampler. Only after ``is_ready`` was true."""
        assert self._chain is not None
        return self._chain.handle

    def ask(self) -> bool:
        """Gives the native sampler the mask of a sampler that is ready; False, with ``error`` set, if that fails."""
        assert self._chain is not None
        if self._chain.ask_guide():
            return True
        self.error = self._chain.error
        return False

    def took(self, token: int) -> None:
        """The token was drawn from a native row. Begins with the next mask."""
        self._add(lambda: self._accept(token), self._advance)

    def draw(self, row: npt.NDArray[np.float32], drawn: PutToken) -> int:
        """Begins to draw from a row of the caller's, after the jobs so far. Returns the number of the draw.

        ``drawn`` is called in another thread, with this sampler, the number, and the token or a NoToken.
        """
        self.n_draws += 1
        number, began_s = self.n_draws, perf_counter()
        self._add(lambda: self._draw(row, drawn, number, began_s))
        return number

    def settle(self, drawn: PutToken) -> int:
        """Calls ``drawn`` as ``draw`` does, with ``NoToken.SETTLED``, when ``finished`` is known."""
        self.n_draws += 1
        number = self.n_draws
        self._add(lambda: drawn(self, number, NoToken.SETTLED))
        return number

    def rebuild(self, change: Callable[[SamplerChain], object]) -> None:
        """Starts over: ``change`` resets the chain and accepts another sequence."""
        self._add(lambda: self._rebuild(change))

    def logprobs(self) -> tuple[float, Sequence[tuple[int, float]]]:
        """Those of the last draw."""
        assert self._chain is not None
        return self._chain.logprobs()

    # ---- in the threads
    def _build(self, build: Callable[[], SamplerChain]) -> None:
        if self._closing:
            return
        try:
            self._chain = build()
            self._prepare()
        except (ValueError, DecodeError) as e:  # a fork or a restored sequence that violates the constraint
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
        """Computes the mask of the next token."""
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
        """Computes the mask after an accepted token."""
        chain = self._chain
        if self._closing or self.error is not None or chain is None:
            return
        if chain.advance_guide():
            self.finished = chain.finished
        else:
            self.error = chain.error

    def _draw(self, row: npt.NDArray[np.float32], drawn: PutToken, number: int, began_s: float) -> None:
        token: int = NoToken.SAMPLER_FAILED
        chain = self._chain
        if self.finished:
            token = NoToken.FINISHED
        elif self.error is None and chain is not None and not self._closing:
            if chain.ask_guide():
                token = chain.draw_processed(row)
            if token == NoToken.SAMPLER_FAILED:
                self.error = chain.error
        self.draw_s = perf_counter() - began_s
        if token >= 0 and chain is not None and chain.guide is not None:
            # Before the next draw, which the engine thread adds once it has this token.
            self._n_done -= 2
            self._jobs.extendleft((self._advance, lambda: self._accept(token)))
        drawn(self, number, token)

    def _close_chain(self) -> None:
        chain, self._chain = self._chain, None
        if chain is not None:
            chain.close()

    # ---- lifetime
    def close(self) -> None:
        """Frees the chain, after the job that runs."""
        self._closing = True
        if self._threads is None or not self.is_busy:
            self._jobs.clear()
            self._close_chain()
        else:
            self._add(self._close_chain)
