"""From sampling parameters to samplers, and the threads of samplers that take long.

A factory makes the sampler of a request when the request runs. A sampler whose token may take long, because it has a
constraint or a logits processor, works in sampling threads, and the engine thread never waits for it by more than half
a step. The engine thread adds jobs to a sampler, and the threads run the jobs of one sampler one after the other, in
order. Only jobs touch the chain, except while there are none: then ``is_busy`` is false and the engine thread may use
it. No lock is waited for on either side.

Jobs are fair to shares (see ``Tenant``): the shares take turns, and a named one has at most four threads at a time, and
no more than are free then. So neither one client nor two can use up the threads, or the cores that compute steps: of
eight threads, the first client has four, the next one two, and two more have one each. On Linux the thread of a long
job gets a lower priority, and ends with the job, as a priority cannot be raised again. Large jobs, which need memory
for the texts that they convert, say how large they are, and wait in a second line until there is room.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from llamapipe._engine.request import Request, Sampler
from llamapipe._engine.speculation import FORCED_SHARE, MOST_GUESSED
from llamapipe._sampling_table import SAMPLER_ORDER
from llamapipe.errors import ConstraintError, DecodeError, InvalidRequestError, NoToken
from llamapipe.host.cores import usable_cores
from llamapipe.llama.sampler import Guide, SamplerChain, takes_tokens
from llamapipe.llama.sampling_options import Dry, SamplingOptions
from llamapipe.llama.vocab import Vocab
from llamapipe.locks import Lock
from llamapipe.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_N_KEPT = 64
_MOST_OF_TOKEN = 16  # characters of a prediction for each token that fits: longer ones take time and memory
T = TypeVar("T")


def choose_seed(params: SamplingParams) -> int:
    """The request's seed, drawn when none is given: below 2**52, which every reader of JSON keeps exactly."""
    return int.from_bytes(os.urandom(8), "little") >> 12 if params.seed is None else params.seed


class LruCache(Generic[T]):
    """The values used last, by their keys. Any thread."""

    def __init__(self, n: int = _N_KEPT) -> None:
        self._n = n
        self._lock = Lock()
        self._values: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value kept for ``key``, or the one that ``make`` gives, which may be called twice by two threads."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._lock:
            self._values[key] = made
            if len(self._values) > self._n:
                self._values.popitem(last=False)
        return made


class SamplerFactory:
    """One SamplingParams resolved for a vocabulary; creates the samplers of its requests.

    ``is_constrained``: the text must match a format. ``is_slow``: a sampler may take long, for a constraint or logits
    processors.

    Raises InvalidRequestError for what this vocabulary does not have and for constraints that cannot be compiled.
    """

    def __init__(self, params: SamplingParams, vocab: Vocab, n_ctx: int, dries: LruCache[Dry]) -> None:
        _check_vocab(params, vocab)
        _check_exclusive(params)
        self.params = params
        self._vocab = vocab
        self._n_ctx = n_ctx
        self._biases = dict(params.logit_bias or {})
        if params.ignore_eos:
            self._biases.update(dict.fromkeys(vocab.eog_tokens, -math.inf))
        self._ends = sorted(vocab.eog_tokens | set(params.stop_token_ids or ())) if params.min_tokens else []
        self._bad_words = sorted(
            {
                tuple(tokens)
                for word in params.bad_words or ()
                for text in (word, " " + word)
                if (tokens := vocab.tokenize(text, add_special=False))
            }
        )
        self._dry: Dry | None = None
        if params.dry_multiplier > 0 and params.dry_penalty_last_n != 0:
            last_n = n_ctx if params.dry_penalty_last_n < 0 else min(params.dry_penalty_last_n, n_ctx)
            options = (params.dry_multiplier, params.dry_base, params.dry_allowed_length, last_n)
            breakers = tuple(params.dry_sequence_breakers)
            self._dry = dries.get((*options, breakers), lambda: Dry(vocab, *options, breakers))
        self._guide: Callable[[], Guide] | None = None
        if params.grammar is not None:
            self._check_grammar(params.grammar)
        for name in ("json_schema", "regex", "lark", "choice"):
            if getattr(params, name) is not None:
                from llamapipe.structured.compile import compile_guide

                constraint = {name: getattr(params, name), "json_whitespace": params.json_whitespace}
                self._guide = compile_guide(vocab, **constraint).new
        self._predicted = (
            vocab.tokenize(params.prediction, add_special=False)[:n_ctx]
            if params.prediction is not None
            else []
        )
        self._options = self._make_options()
        self.is_constrained = self._guide is not None or params.grammar is not None
        self.is_slow = self.is_constrained or bool(params.logits_processors)
        self._takes_tokens = any(map(takes_tokens, params.logits_processors))
        # How many of the last tokens each of those reads that look back: bad words, penalties, DRY; -1: all.
        self._looks_back = list(map(len, self._bad_words))
        if params.repeat_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self._looks_back.append(params.repeat_last_n)
        if self._dry is not None:
            self._looks_back.append(params.dry_penalty_last_n)

    def history(self, tokens: list[int]) -> list[int]:
        """The last tokens of a sequence, as many as penalties, DRY and bad words read."""
        n = len(tokens) if -1 in self._looks_back else max(self._looks_back, default=0)
        return list(tokens[-n:]) if n else []

    def make(self, request: Request) -> Sampler:
        """The sampler of a request that gets its first slot. Engine thread.

        If the constraint refuses tokens that the request has already generated, its first draw fails.
        """
        spec = request.spec
        text = request.text_tokens.copy() if spec.speculates else None
        build = partial(self._build, spec.seed, *self._accepted(request), text)
        if not self.is_slow:
            return build()
        budget = spec.grammar_budget if self.is_constrained else None
        assert budget is None or isinstance(budget, GrammarBudget)
        is_python = bool(self.params.logits_processors)
        return BackgroundSampler(build, budget, spec.share, is_python, spec.speculates)

    def rebuild(self, sampler: Sampler, request: Request) -> None:
        """Resets a sampler to its request's changed sequence. Engine thread."""
        change = partial(_reset, accepted=partial(self._accept, *self._accepted(request)))
        if isinstance(sampler, BackgroundSampler):
            sampler.rebuild(change)
        elif isinstance(sampler, SamplerChain):
            change(sampler)

    def _build(
        self,
        seed: int,
        history: Sequence[int],
        generated: Sequence[int],
        tokens: Sequence[int],
        text: Sequence[int] | None,
    ) -> SamplerChain:
        """A chain after a sequence; see ``_accepted``. ``text``: what it guesses from; None: it does not."""
        guide = None if self._guide is None else self._guide()
        try:
            chain = SamplerChain(self._vocab, seed, self._options, self.params.logits_processors, guide)
        except BaseException:
            if guide is not None:
                guide.close()
            raise
        try:
            self._accept(history, generated, tokens, chain)
            if text is not None:
                chain.watch(self._predicted, text, own=self.params.speculate != "draft")
        except BaseException:
            chain.close()
            raise
        return chain

    def _accepted(self, request: Request) -> tuple[list[int], list[int], list[int]]:
        """Tokens that penalties look at, those that the constraint has to accept, and all, for logits processors.

        Copies: other threads may read them.
        """
        generated = request.full_sequence[request.n_prompt :] if self.is_constrained else []
        tokens = [token for token in request.full_sequence if token >= 0] if self._takes_tokens else []
        history = self.history(request.text_tokens) if self._looks_back else []
        return history, generated, tokens

    def _accept(
        self, history: Sequence[int], generated: Sequence[int], tokens: Sequence[int], chain: SamplerChain
    ) -> None:
        chain.tokens = list(tokens)
        if history:
            chain.accept(history)
        if self.params.grammar is not None and generated:
            chain.accept_grammar(generated)
        if chain.guide is not None:
            for token in generated:
                chain.guide.accept(token)

    def _check_grammar(self, text: str) -> None:
        from llamapipe.structured.gbnf import check_gbnf

        check_gbnf(text, self._vocab)
        options = SamplingOptions()
        try:
            options.set_grammar(text)
            SamplerChain(self._vocab, options=options).close()
        except ValueError as e:
            raise InvalidRequestError(f"grammar: {e}") from None

    def _make_options(self) -> SamplingOptions:
        """The native options."""
        p, options = self.params, SamplingOptions()
        options.set_numbers(p)
        options.set_order(SAMPLER_ORDER if p.sampler_order is None else p.sampler_order)
        options.set_bias(self._biases)
        options.set_allowed(p.allowed_token_ids)
        options.set_bad_words(self._bad_words)
        options.set_min_tokens(p.min_tokens, self._ends)
        options.set_dry(self._dry)
        if p.grammar is not None:
            options.set_grammar(p.grammar)
        struct = options.struct
        struct.repeat_last_n = self._n_ctx if p.repeat_last_n < 0 else min(p.repeat_last_n, self._n_ctx)
        struct.n_logprobs = -1 if p.logprobs is None else p.logprobs
        struct.needs_row, struct.has_guide = bool(p.logits_processors), self._guide is not None
        return options


def _check_vocab(params: SamplingParams, vocab: Vocab) -> None:
    """Refuses what a vocabulary does not have."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        bad = [token for token in getattr(params, name) or () if token >= vocab.n_vocab]
        if bad:
            raise InvalidRequestError(
                f"{name} holds {bad[0]}; this vocabulary has the ids 0 to {vocab.n_vocab - 1}"
            )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > vocab.n_vocab:
            raise InvalidRequestError(
                f"{name} is {getattr(params, name)}; this vocabulary has {vocab.n_vocab} tokens"
            )
    for name in ("infill", "grammar"):
        if getattr(params, name) and (params.ignore_eos or not vocab.eog_tokens):
            raise InvalidRequestError(
                f"{name} needs a token that ends generation: "
                + ("leave ignore_eos off" if params.ignore_eos else "this vocabulary has none")
            )
    if params.infill and vocab.eos is None and vocab.eot is None:
        raise InvalidRequestError("infill needs an EOT or EOS token; this vocabulary has neither")


def _check_exclusive(params: SamplingParams) -> None:
    """Refuses samplers that exclude each other."""
    for name, without in (
        ("mirostat", "infill"),
        ("mirostat", "adaptive_target"),
        ("adaptive_target", "infill"),
    ):
        if _is_on(params, name) and _is_on(params, without):
            raise InvalidRequestError(f"{name} and {without} are both given; each decides alone: choose one")
    if params.temperature == 0:
        for name in ("mirostat", "adaptive_target", "infill"):
            if _is_on(params, name):
                raise InvalidRequestError(
                    f"{name} draws, but temperature is 0, which never does: leave one out"
                )


def _reset(chain: SamplerChain, accepted: Callable[[SamplerChain], object]) -> None:
    chain.reset()
    chain.finished = False
    if chain.guide is not None:
        chain.guide.reset(())
    accepted(chain)


def _is_on(params: SamplingParams, name: str) -> bool:
    value = getattr(params, name)
    return bool(value >= 0 if name == "adaptive_target" else value)


class SamplerFactoryCache:
    """The sampler factories of one engine, kept for requests with the same params. Any thread."""

    def __init__(self, vocab: Vocab, n_ctx: int) -> None:
        self._vocab = vocab
        self._n_ctx = n_ctx
        self._factories: LruCache[SamplerFactory] = LruCache()
        self._dries: LruCache[Dry] = LruCache(8)

    def sampler_factory(self, params: SamplingParams) -> SamplerFactory:
        """The sampler factory for ``params``. Raises InvalidRequestError."""
        most = _MOST_OF_TOKEN * self._n_ctx
        if params.prediction is not None and len(params.prediction) > most:
            params = replace(params, prediction=params.prediction[:most])
        # Equal processors need not be the same, and a cache must not keep them alive.
        if params.logits_processors:
            return SamplerFactory(params, self._vocab, self._n_ctx, self._dries)
        return self._factories.get(
            params, lambda: SamplerFactory(params, self._vocab, self._n_ctx, self._dries)
        )


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


class _Row(NamedTuple):
    """A copy of a row to draw from, the number of that draw, and the token that is guessed to be drawn, or -1."""

    number: int
    logits: npt.NDArray[np.float32]
    guessed: int


class _Expected:
    """Guessed tokens of a step, and the masks after them, which a thread adds until it is ``stopped``.

    ``n_allowed``: no more of the tokens may follow; None: none of those with a mask is known to be forbidden.
    """

    __slots__ = ("masks", "n_allowed", "stopped", "tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.masks: list[npt.NDArray[np.uint32]] = []
        self.n_allowed: int | None = None
        self.stopped = False


class BackgroundSampler:
    """Makes and uses a ``SamplerChain`` in ``SamplingThreads``. Methods are for the engine thread.

    ``build``: makes the chain. ``budget``: of its jobs' processor time, perhaps with other samplers; None: no limit.
    ``share``, ``is_python``: of its jobs, see SamplingThreads. ``guesses``: it guesses which tokens follow, first those
    of text that its guide forces.

    After each token the sampler first finds out what may follow, in a fraction of the time that a mask takes; the next
    step waits a moment for that (``has_looked``). While the step is computed, the masks for its rows are: the tokens
    before them are all that a mask needs. If the first mask is ready, the row is drawn from as any other
    (``is_ready``), and so are the rows after it along a guess. If it is not, if there is none (GBNF), or a processor
    wants the row, ``draw`` continues with copies of the rows, and other requests continue.

    ``is_forced``: the guess that was drawn along last was of forced text.

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
        guesses: bool = False,
    ) -> None:
        self.guesses = guesses
        self.is_forced = False
        self._expected = _Expected(())
        self._rows_left: deque[_Row] = deque()  # of the last ``draw``, that no thread has begun with
        self.looked: Callable[[], object] | None = None  # called, in any thread, when ``has_looked`` is true
        self._has_looked = False
        self._forced: Sequence[int] = ()  # tokens of text that follows in any case
        self._guessed: tuple[Sequence[int], float] = ((), 0.0)  # by the chain, as far as its guide allows
        self._forced_share = FORCED_SHARE
        self._noted: list[tuple[float, Sequence[tuple[int, float]]]] = []  # of what a call drew along a guess
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
                    if self.looked is not None and self.has_looked:
                        self.looked()
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
        """Whether jobs wait or run, but for the masks along a guess."""
        return self._n_done != self._n_added

    @property
    def has_looked(self) -> bool:
        """Whether ``guess`` will tell no more until the next token."""
        return self._has_looked or not self.is_busy

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
        self._noted = []
        if self._chain.ask_guide():
            return True
        self.error = self._chain.error
        return False

    def expect(self, tokens: Sequence[int]) -> int:
        """Begins with the masks of the rows after guessed tokens, unless they are known.

        Returns how many of the tokens may follow, as far as that is known by now: if they are told one by one, while
        they are drafted, almost all of it is. GBNF has no masks, but it is asked, too.
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
            self._n_added -= 1  # no other job needs its result, and it leaves the chain alone
        return len(tokens) if expected.n_allowed is None else min(len(tokens), expected.n_allowed)

    def _allows(self, token: int) -> bool:
        """Whether a token may be the next one. While the sampler is ready, as its mask is there then."""
        assert self._chain is not None and self._chain.guide is not None
        return bool(int(self._chain.guide.mask()[token >> 5]) >> (token & 31) & 1)

    def took(self, *tokens: int) -> None:
        """These tokens were drawn from native rows. Begins with the next mask."""
        self._expected.stopped = True
        self._has_looked = False
        self._add(*(partial(self._accept, token) for token in tokens), self._look_ahead, self._advance)

    def expects(self, guessed: Sequence[int]) -> bool:
        """Whether the masks along a guess are computed, or will soon be."""
        expected = self._expected.tokens[: len(guessed)]
        return self.is_ready and self.error is None and expected == list(guessed)

    def draw_along(
        self,
        rows: Sequence[int],
        guessed: Sequence[int],
        draw_native: Callable[[Sequence[int], Sequence[Any], Sequence[int]], list[int]],
    ) -> list[int]:
        """Draws from native rows, each with its mask, until a token is not the guessed one. After ``ask``.

        Also ends before the first row whose mask is not there yet: ``draw`` may continue there.
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
            self.took(*tokens)
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
        """Begins to draw from rows of the caller's, after the jobs so far, until a token is not the guessed one.

        Returns a number for each row. ``drawn`` is called in another thread, with this sampler, the number, and the
        token or a NoToken. ``guessed``: for each row the token after it, or -1. ``continues``: after ``draw_along``.
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
        """Lets the last ``draw`` end with the row that it is at. Returns how many rows it leaves out."""
        n = 0
        with suppress(IndexError):
            while True:
                self._rows_left.pop()
                n += 1
        self.n_draws -= n
        return n

    def await_end_state(self, drawn: PutToken) -> int:
        """Calls ``drawn`` as ``draw`` does, with ``NoToken.SETTLED``, when ``finished`` is known."""
        self.n_draws += 1
        number = self.n_draws
        self._add(lambda: drawn(self, number, NoToken.SETTLED))
        return number

    def rebuild(self, change: Callable[[SamplerChain], object]) -> None:
        """Starts over: ``change`` resets the chain and accepts another sequence."""
        self._expected.stopped = True
        self._has_looked = False
        self._add(lambda: self._rebuild(change))

    def guess(self, n: int) -> tuple[Sequence[int], float]:
        """The tokens of the text that its guide forces, or that its chain guesses, if that is known by now."""
        if not self.guesses or not self.has_looked or self.error is not None or self._chain is None:
            return (), 0.0
        if self._forced:
            return self._forced[:n], self._forced_share
        if self._chain.guide is None and not self._chain.has_grammar:
            return ((), 0.0) if self.is_busy else self._chain.guess(n)
        return self._guessed[0][:n], self._guessed[1]

    def logprobs(self, i: int = 0) -> tuple[float, Sequence[tuple[int, float]]]:
        """Those of the last draw, or of the ``i``-th token that it drew along a guess."""
        assert self._chain is not None
        return self._noted[i] if self._noted else self._chain.logprobs()

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
        """Computes the mask after an accepted token."""
        chain = self._chain
        if self._closing or self.error is not None or chain is None:
            return
        if chain.advance_guide():
            self.finished = chain.finished
        else:
            self.error = chain.error

    def _follow(self, expected: _Expected) -> None:
        """Computes the masks along a guess. No counted job; without guesses its time would not be spent."""
        began_s, chain = thread_time(), self._chain
        try:
            if chain is None or expected.stopped or self._closing or self.error:
                return
            tokens = expected.tokens.copy()  # more may come
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
        """Guesses what follows: text that the guide forces, or what the chain guesses and a constraint allows."""
        chain = self._chain
        self._forced, self._guessed = (), ((), 0.0)
        if self.guesses and chain is not None and not self._closing and self.error is None:
            try:
                if chain.guide is not None and not self._is_python:
                    with suppress(SystemExit):  # the interpreter ends: nothing is compiled any more
                        self._forced = chain.guide.forced(MOST_GUESSED)
                if not self._forced and (chain.guide is not None or chain.has_grammar):
                    self._guessed = self._allowed(chain, *chain.guess(MOST_GUESSED))
            except DecodeError as e:
                self.error = e
        self._has_looked = True

    def _allowed(
        self, chain: SamplerChain, tokens: Sequence[int], share: float
    ) -> tuple[Sequence[int], float]:
        """The first tokens of a guess that may follow. Without guesses this time would not be spent, so it is free."""
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
        # Before the next draw, which the engine thread adds once it has this token. The last comes first.
        following: list[Job] = []
        if token >= 0 and token == row.guessed:
            with suppress(IndexError):  # the engine thread waits no longer
                following_row = left.popleft()
                following.append(lambda: self._draw(following_row, left, drawn, ended_s))
        else:
            left.clear()  # copies of rows are large
        if token >= 0 and chain is not None and chain.guide is not None:
            following += self._advance, self._look_ahead, lambda: self._accept(token)
        elif token >= 0 and chain is not None and chain.has_grammar and self.guesses and not following:
            following.append(self._look_ahead)
        self._has_looked = False
        self._n_done -= len(following)
        self._jobs.extendleft(following)
        drawn(self, row.number, token)

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


# The wait is half a step, within these limits. With less, requests of small models would often miss a step only because
# waking a thread takes time.
_LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.0005, 0.005
# Of the wait for what a constraint forces next, in times of the wait for a token: it may save a step.
_PATIENCE_AHEAD = 0.2
# The time to find out which tokens of a guess are allowed: they are for the next step, which does not wait.
_MOST_CHECK_S = 0.001
_SHORTEST_WAIT_S = 2e-5  # SimpleQueue.get() with a shorter timeout may not end: see Inbox.run_next

AnySampler = SamplerChain | BackgroundSampler
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
        self._looked: SimpleQueue[None] = SimpleQueue()  # an item where a sampler may have looked

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
        """A token or NoToken for each row. Begins the draws that may take long, makes the others, and waits a moment.

        ``copied``: a copy of a row's logits. ``draw_native``: draws from rows whose samplers need no Python.
        ``patience_s``: longest wait. Samplers whose last draw took longer are not waited for. ``guessed``: as
        ``Executor.sample`` has it.
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
                    sampler.took(token)
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
        """Lets other threads draw from the rows of a sampler at these places."""
        copies = [copied(rows[i]) for i in places]
        expected = [guessed[i] if guessed else -1 for i in places]
        numbers = sampler.draw(copies, expected, self._put, continues)
        pending.update(((sampler, number), i) for number, i in zip(numbers, places, strict=True))

    def _await_looks(self, samplers: Sequence[BackgroundSampler], patience_s: float) -> None:
        """Waits a moment for what may follow: with that, the next step may take several tokens."""
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
        """Adds a token. Threads of samplers."""
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
        """Moves the tokens that arrive in time from ``pending`` to ``drawn``. At most one of a sampler stays there."""
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
        self._n_late += len(pending)  # the engine thread is told of each token that arrives from here on
        with suppress(Empty):
            while pending:
                self._n_late -= self._sort(self._tokens.get_nowait(), pending, drawn, guessed)

    def _sort(
        self,
        token: Drawn,
        pending: dict[tuple[BackgroundSampler, int], int],
        drawn: list[int],
        guessed: Sequence[int],
    ) -> bool:
        """Uses a token of this step, or keeps one of an earlier step. Returns whether it was of this step."""
        sampler, number, found = token
        i = pending.pop((sampler, number), None)
        if i is None:
            self._kept.append(token)
            return False
        drawn[i] = found
        if guessed and found != guessed[i]:
            while pending.pop((sampler, number + 1), None) is not None:  # rows after a wrong guess
                number += 1
        return True

    def take(self) -> list[Drawn]:
        """The tokens that were drawn after their steps."""
        taken, self._kept = self._kept, []
        with suppress(Empty):
            while True:
                taken.append(self._tokens.get_nowait())
        self._n_late -= len(taken)
        return taken

    def await_end_state(self, sampler: BackgroundSampler) -> None:
        """``take`` will return this sampler with ``NoToken.SETTLED`` once it is known whether it is finished."""
        self._n_late += 1
        sampler.await_end_state(self._put)


SAMPLING_THREAD_NAME = "llamapipe-sampling"
_MOST_AT_FIRST = 4
_MOST_OF_SHARE = 4
_LONG_S = 0.01  # a job that runs longer may leave its core to another thread's
_SLOW_S = 0.1  # a job that runs longer gets a thread of lower priority; schemas usually take less
_MOST_SIZE = 2**22  # of the large jobs that run at a time; a larger one runs without others
_NICE = 10  # about a tenth of the time of a thread that computes steps, where they need all cores


class _Waiting(NamedTuple):
    job: Job
    is_python: bool
    size: int


class _Share:
    """``was_large``: which of its two lines had the last turn."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.jobs: deque[_Waiting] = deque()
        self.large: deque[_Waiting] = deque()
        self.was_large = False
        self.n_running = 0

    @property
    def n_waiting(self) -> int:
        return len(self.jobs) + len(self.large)


class SamplingThreads:
    """Threads that run jobs; as many as there are cores, but at most four.

    While all of them have been busy for 10 ms, ``add_spare_thread`` starts another one, up to ``n_max``: a job that
    hangs must not stop those of other requests. The threads start with the first jobs and end with ``close``. Any
    thread.
    """

    def __init__(self, n_max: int) -> None:
        self._n_first = max(min(usable_cores(), _MOST_AT_FIRST, n_max), 1)
        self._n_max = n_max
        self._lock = Lock()  # of what follows; held for microseconds
        self._shares: OrderedDict[Hashable, _Share] = OrderedDict()  # in the order of their turns
        self._n_running = 0
        self._size = 0  # of the large jobs that run
        self._threads: list[_Thread] = []
        self._closed = False
        self._wakes: SimpleQueue[bool] = (
            SimpleQueue()
        )  # True for each job that might run now, False to end a thread

    def __repr__(self) -> str:
        n_jobs = sum(share.n_waiting for share in list(self._shares.values()))
        return f"<SamplingThreads n={len(self._threads)} n_jobs={n_jobs}>"

    def run(self, job: Job, share: Hashable = None, is_python: bool = False, size: int = 0) -> None:
        """Calls ``job``, which must not raise, on one of the threads. After ``close``, calls it at once.

        ``is_python``: it holds the interpreter's lock, so its thread keeps its priority. ``size``: of a large job, in
        characters; 0: it needs little memory.
        """
        with self._lock:
            if not self._closed:
                found = self._shares.get(share)
                if found is None:
                    found = _Share(self._n_max if share is None else _MOST_OF_SHARE)
                    self._shares[share] = found
                (found.large if size else found.jobs).append(_Waiting(job, is_python, size))
                threads = [thread for thread in self._threads if not thread.is_slowed]
                if len(threads) < self._n_first and all(thread.began_s is not None for thread in threads):
                    self._start()
                if not self._closed:
                    self._wakes.put(True)
                return
        job()

    def add_spare_thread(self) -> None:
        """Lowers the priority of long jobs. Starts another thread if jobs wait and all threads are busy for long."""
        if not self._shares:
            return
        now_s = perf_counter()
        with self._lock:
            for thread in self._threads:
                if thread.began_s is not None and now_s - thread.began_s > _SLOW_S:
                    thread.slow_down()
            if (
                not self._closed
                and len(self._threads) < self._n_max
                and self._next() is not None
                and all(t.began_s is not None and now_s - t.began_s > _LONG_S for t in self._threads)
            ):
                self._start()

    def _next(self) -> tuple[Hashable, deque[_Waiting]] | None:
        """The share whose turn it is, and its line whose turn it is; None if nothing may run now."""
        has_room = True
        for name, share in self._shares.items():
            n_most = share.most if name is None else min(share.most, self._n_max - self._n_running)
            if share.n_running >= n_most:
                continue
            if share.large:  # one that has to wait is not overtaken by those of later shares
                has_room = has_room and (not self._size or self._size + share.large[0].size <= _MOST_SIZE)
                if has_room and not (share.was_large and share.jobs):
                    return name, share.large
            if share.jobs:
                return name, share.jobs
        return None

    def take(self) -> tuple[_Waiting, Hashable] | None:
        """The next job, with its share; None if every share with jobs has its threads. For the threads."""
        with self._lock:
            found = self._next()
            if found is None:
                return None
            name, line = found
            taken, share = line.popleft(), self._shares[name]
            share.n_running += 1
            self._n_running += 1
            share.was_large = taken.size > 0
            self._size += taken.size
            self._shares.move_to_end(name)
            return taken, name

    def done(self, name: Hashable, thread: _Thread, size: int) -> bool:
        """Notes the end of a job. False if its thread is to end. For the threads."""
        with self._lock:
            thread.began_s = None
            share = self._shares[name]
            share.n_running -= 1
            self._n_running -= 1
            self._size -= size
            if not share.n_waiting and not share.n_running:
                del self._shares[name]
            waiting = (share.n_waiting for share in self._shares.values())
            n_wakes = (
                min(sum(waiting), len(self._threads)) if size else any(waiting)
            )  # several have room after a large one
            for _ in range(n_wakes):
                self._wakes.put(True)
            if not thread.is_slowed:
                return True
            if thread in self._threads:
                self._threads.remove(thread)
            n_quick = sum(not other.is_slowed for other in self._threads)
            if self._shares and not self._closed and n_quick < self._n_first:
                self._start()
            return False

    def _start(self) -> None:
        thread = _Thread(self, self._wakes)
        try:
            thread.start()
        except RuntimeError:  # the system refuses another thread
            if not self._threads:
                self._closed = True  # so that jobs run at all
                self._run_rest()
            return
        self._threads.append(thread)

    def _run_rest(self) -> None:
        """Runs the jobs that are left in this thread."""
        for share in list(self._shares.values()):
            for line in (share.large, share.jobs):
                while line:
                    line.popleft().job()

    def close(self) -> None:
        """Ends the threads after the jobs that wait, and waits for them. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._wakes.put(False)
        for thread in threads:
            thread.join()
        self._run_rest()


def on_slowed_thread() -> bool:
    """Whether the priority of this thread was lowered."""
    thread = threading.current_thread()
    return isinstance(thread, _Thread) and thread.is_slowed


class _Thread(threading.Thread):
    """``began_s``: when it began the job that it runs, of ``perf_counter``; None: it waits for one.

    ``is_slowed``: its priority was lowered.
    """

    def __init__(self, pool: SamplingThreads, wakes: SimpleQueue[bool]) -> None:
        super().__init__(name=SAMPLING_THREAD_NAME, daemon=True)
        self._pool = pool
        self._wakes = wakes
        self._is_python = False
        self.began_s: float | None = perf_counter()
        self.is_slowed = False

    def run(self) -> None:
        """Runs jobs until False comes, or until it was slowed down."""
        while True:
            self.began_s = None
            if not self._wakes.get():
                return
            self.began_s = perf_counter()
            taken = self._pool.take()
            if taken is None:
                continue
            waiting, share = taken
            self._is_python = waiting.is_python
            waiting.job()
            if not self._pool.done(share, self, waiting.size):
                return

    def slow_down(self) -> None:
        """Lowers the priority of the thread, where threads have one."""
        if self.is_slowed or self._is_python or self.native_id is None or sys.platform != "linux":
            return
        try:
            os.setpriority(os.PRIO_PROCESS, self.native_id, _NICE)
            self.is_slowed = True
        except OSError:  # it has ended, or the system forbids it
            pass
