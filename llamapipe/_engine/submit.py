"""From the arguments of a call to requests in the engine loop, and from their results to what the call returns.

A call goes through this file once: its options and prompts are checked before anything is queued (``call_options``,
``RequestBuilder``), its requests are made, enter the queue when there is room (``QueueLimit``) and are submitted, and
its results are collected until none is missing (``Pending``, ``Submission``). If the caller gives up at any line, by
an error, Ctrl-C, a cancelled task or a closed iterator, what has no result yet is cancelled.

The engine thread takes no lock that a caller may hold, because an exception of a signal handler may interrupt a caller
between any two instructions. Callers enter the queue under a lock that only they take. The engine thread only removes
requests, and wakes the callers that wait.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, repeat
from queue import Empty
from time import perf_counter, thread_time
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NamedTuple,
    NoReturn,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypeVar,
)

from llamapipe._engine.deliver import (
    AsyncMailbox,
    Choices,
    CompletionSink,
    DeltaSink,
    Failure,
    Mailbox,
    Piece,
    Progress,
    ScoreSink,
    Sink,
    ThreadMailbox,
    TokenSink,
    running_loop,
    wake_task,
)
from llamapipe._engine.long_work import LongWork
from llamapipe._engine.loop import TimeCounter
from llamapipe._engine.request import UNLIMITED, Activation, Request, RequestSpec, Span
from llamapipe._engine.sampling import GrammarBudget, SamplerFactory, SamplerFactoryCache, choose_seed
from llamapipe._engine.scoring import ContinuationTargets, PromptTargets
from llamapipe._engine.snapshot import Snapshot
from llamapipe._engine.tenant import cache_key, grammar_limit, tenant
from llamapipe._engine.thread import EngineThread
from llamapipe.arguments import check_choice, check_flag, check_float, check_tokens, from_column
from llamapipe.errors import EngineClosedError, InvalidRequestError, LlamapipeError, QueueFullError
from llamapipe.llama.adapter import AdapterChoice, AdapterSet, AnyAdapter, check_choice_of_adapter
from llamapipe.llama.model import Model
from llamapipe.locks import Lock
from llamapipe.params import SamplingParams
from llamapipe.results import Completion

if TYPE_CHECKING:
    import asyncio

    import numpy as np
    import numpy.typing as npt

    from llamapipe.results import TimeHistogram

OnError = Literal["raise", "return"]
OnTimeout = Literal["raise", "return"]
ERROR_MODES = ("raise", "return")


@dataclass(frozen=True)
class CallOptions:
    """How a call waits, and what it does with failures.

    ``deadline``: a time of ``perf_counter``. ``names_prompts``: errors name the index of their prompt. ``operation``:
    its name for observers.
    """

    block: bool = True
    timeout: float | None = None
    deadline: float | None = None
    on_error: OnError = "raise"
    on_timeout: OnTimeout = "raise"
    names_prompts: bool = False
    operation: str = "text_completion"

    def expired(self) -> ExpiredError:
        """The error for a call whose deadline passed."""
        return ExpiredError(f"not finished within the timeout of {self.timeout} s; the rest was cancelled")


def call_options(
    timeout: float | None,
    block: bool,
    on_error: OnError = "raise",
    on_timeout: OnTimeout = "raise",
    names_prompts: bool = False,
    operation: str = "text_completion",
) -> CallOptions:
    """Checked options of a call, whose time starts now."""
    deadline = None
    if timeout is not None:
        seconds = min(check_float("timeout", timeout, 0, math.inf), threading.TIMEOUT_MAX)
        deadline = perf_counter() + seconds
    check_choice("on_timeout", on_timeout, ERROR_MODES)
    return CallOptions(
        check_flag("block", block), timeout, deadline, on_error, on_timeout, names_prompts, operation
    )


class ExpiredError(TimeoutError):
    """The deadline of a call passed."""


class QueueLimit:
    """A set with a ``limit``; None: any number. Callers call ``enter``, the engine thread ``remove``.

    It holds the requests themselves, with the time they entered, and not their number, so leaving twice, or without
    having entered, is not an error: a caller that Ctrl-C interrupts between two instructions cannot know which of them
    ran.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._inside: dict[Request, float] = {}  # and when they entered
        self._times = TimeCounter()
        # Of callers only. A Condition would run Python code while it is held. Reentrant, as all locks of callers: a
        # destructor or signal handler that uses the engine may run while its thread holds the lock.
        self._entering = Lock()
        self._waiters: deque[Callable[[], object]] = deque()  # each wakes a caller that waits for room

    @property
    def n(self) -> int:
        """Requests that were accepted and have no slot yet."""
        return len(self._inside)

    def times(self) -> TimeHistogram:
        """How long requests have waited for a slot, or until they ended without one."""
        return self._times.copy()

    def try_enter(self, *requests: Request) -> bool:
        """Enters all requests if there is room for all; returns whether there was."""
        entered = dict.fromkeys(requests, perf_counter())
        with self._entering:
            if self.limit is not None and len(self._inside) + len(entered) > self.limit:
                return False
            self._inside.update(entered)
            return True

    def enter_at_once(self, *requests: Request) -> None:
        """Enters all requests. Raises QueueFullError if there is no room for all."""
        if not self.try_enter(*requests):
            if self.limit is not None and len(requests) > self.limit:
                raise QueueFullError(
                    f"{len(requests)} requests are submitted at once and max_queue is {self.limit}: that never fits; "
                    "submit fewer at once, or raise max_queue"
                )
            raise QueueFullError(
                f"max_queue is {self.limit} and the queue has {self.n}: there is no room for {len(requests)} more; "
                "retry later, or raise max_queue"
            )

    def enter(self, request: Request, deadline: float | None) -> None:
        """Waits for room for one request. Raises ExpiredError after ``deadline`` (``perf_counter`` seconds)."""
        while not self.try_enter(request):
            woken = threading.Lock()
            woken.acquire()
            self._waiters.append(woken.release)
            try:
                if self.try_enter(request):  # room may have come free before the waiter was added
                    return
                left_s = None if deadline is None else deadline - perf_counter()
                if left_s is not None and left_s <= 0:
                    raise ExpiredError("no room came free in the queue within the timeout")
                woken.acquire(timeout=-1 if left_s is None else min(left_s, threading.TIMEOUT_MAX))
            finally:
                with suppress(ValueError):  # woken: it is off the list
                    self._waiters.remove(woken.release)

    async def aenter(self, request: Request, deadline: float | None) -> None:
        """``enter`` for asyncio."""
        import asyncio

        loop = asyncio.get_running_loop()
        while not self.try_enter(request):
            waiter = loop.create_future()
            self._waiters.append(partial(loop.call_soon_threadsafe, wake_task, waiter))
            if self.try_enter(request):
                waiter.cancel()
                return
            if deadline is None:
                await waiter
            elif (left_s := deadline - perf_counter()) > 0:
                timer = loop.call_later(left_s, wake_task, waiter)
                try:
                    await waiter
                finally:
                    timer.cancel()
            else:
                waiter.cancel()
                raise ExpiredError("no room came free in the queue within the timeout")

    def remove(self, requests: Sequence[Request]) -> None:
        """Notes that requests have got a slot, or ended without one, and wakes callers that wait. Engine thread."""
        now = perf_counter()
        for request in requests:
            if request.left_queue_at is None:  # a preempted request leaves the queue again
                request.left_queue_at = now
            entered = self._inside.pop(request, None)
            if entered is not None:
                self._times.add(now - entered)
        if self._waiters:
            self._wake_all()

    def discard(self, requests: Collection[Request]) -> None:
        """``remove`` for callers whose requests may never reach the engine thread."""
        for request in requests:
            self._inside.pop(request, None)
        self._wake_all()

    def _wake_all(self) -> None:
        # All waiters, not one per free place: a woken waiter may be giving up, and its place would stay unused.
        for _ in range(len(self._waiters)):
            try:
                wake = self._waiters.popleft()
            except IndexError:  # another thread took it
                return
            try:
                wake()
            except RuntimeError:  # that loop is closed
                continue


TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]"
Prompt: TypeAlias = "str | TokenIds"


Groups: TypeAlias = (
    "Mapping[int, Sequence[Request]]"  # the requests that are answered together with (index, result)
)
RequestFactory: TypeAlias = "Callable[[Mailbox], Groups]"

PORTION = 256  # requests of a long list that are created and submitted together
_MOST_BYTES = 8  # tokens whose bytes may end with half a character


class CheckedPrompt(NamedTuple):
    """A checked prompt: its tokens, the factory of its samplers, and what its answer's text is made of.

    ``piece``: the bytes of a token of that text. ``stops``: the strings that end it. ``budget``: the time for the
    constraint, of which compiling it has taken some. ``spans``: the images and sounds among the tokens.
    """

    tokens: list[int]
    sampler_factory: SamplerFactory
    piece: Piece
    stops: tuple[str, ...]
    adapters: AdapterSet | None
    budget: GrammarBudget | None
    spans: tuple[Span, ...]


class RequestBuilder:
    """Checks against a model and the context length of one engine. Any thread.

    ``n_sharing``: how many requests of a call may share a prompt's cells and run at the same time; 1: no sharing.
    ``speculates``: whether steps may have guessed tokens. ``drafts``: whether a draft model guesses, too. ``allowed``:
    the adapters that requests may name; empty: all that the model has loaded. ``n_ubatch``: most tokens
    that are computed at once.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        n_sharing: int = 1,
        speculates: bool = False,
        drafts: bool = False,
        allowed: Sequence[AnyAdapter] = (),
        n_ubatch: int = 0,
    ) -> None:
        self._model = model
        self._allowed = tuple(allowed)
        self.n_ctx = n_ctx
        self.n_ubatch = n_ubatch
        self.n_sharing = n_sharing
        self._speculates = speculates
        self._drafts = drafts
        self._eog = model.vocab.eog_tokens
        self._factories = SamplerFactoryCache(model.vocab, n_ctx)

    def check_params(self, params: SamplingParams) -> None:
        """Looks params up in the vocabulary and compiles their constraint. Raises as ``item`` does."""
        self.adapters(params)
        self._compiled(params)

    @property
    def named_adapters(self) -> tuple[AnyAdapter, ...]:
        """The adapters that requests may name now."""
        known = self._allowed or self._model.adapters.loaded()
        return tuple(adapter for adapter in known if not adapter.closed)

    def adapters(self, params: SamplingParams) -> AdapterSet | None:
        """The adapters that params name. Raises TypeError, InvalidRequestError."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        if params.adapter is None:
            return None
        return self._model.adapters.choose(params.adapter, self._allowed)

    def chosen(self, adapter: AdapterChoice | None) -> AdapterSet | None:
        """The adapters that the option of a call names. Raises TypeError, ValueError, InvalidRequestError."""
        if adapter is None:
            return None
        return self._model.adapters.choose(check_choice_of_adapter(adapter), self._allowed)

    def _compiled(self, params: SamplingParams) -> tuple[SamplerFactory, GrammarBudget | None]:
        """The factory for params, and what is left for their constraint. Raises as ``item`` does, DecodeError."""
        if params.speculate == "draft" and not self._drafts:
            raise InvalidRequestError(
                "speculate is 'draft', but the engine has no draft model; give Engine(draft=...) a smaller model of "
                "the same family, or leave speculate out"
            )
        began_s = thread_time()
        factory = self._factories.sampler_factory(params)
        if not factory.is_constrained:
            return factory, None
        budget = GrammarBudget(grammar_limit(params.grammar_timeout))
        budget.spent_s = thread_time() - began_s
        error = budget.error()
        if error is not None:
            raise error
        return factory, budget

    def items(
        self, prompt: Any, params: Any, on_error: str = "raise"
    ) -> tuple[list[CheckedPrompt | Exception], bool]:
        """Each prompt with its params, and whether a single prompt was given.

        Raises TypeError, ValueError, InvalidRequestError; errors in a list name the prompt's index. With ``on_error``
        ``"return"``, an InvalidRequestError is in the place of its prompt instead.
        """
        if isinstance(prompt, str):
            prompts, single = [prompt], True
        else:
            prompt = from_column("prompt", prompt)
            self._refuse_long_ids(prompt)
            prompts, single = split_prompts(prompt)
        if params is None or isinstance(params, SamplingParams):
            each: Sequence[SamplingParams | None] = [params] * len(prompts)
        elif isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
            raise TypeError(
                f"params must be SamplingParams or a list of them, not {type(params).__name__}: "
                "generate(prompt, lp.SamplingParams(max_tokens=100))"
            )
        elif len(params) != len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts and {len(params)} params; give one for all, or one for each"
            )
        else:
            each = params
        if single:
            return [self.item_or_error(prompts[0], each[0], None, on_error)], True
        pairs = enumerate(zip(prompts, each, strict=True))
        return [self.item_or_error(p, q, index, on_error) for index, (p, q) in pairs], False

    def item_or_error(
        self, prompt: Any, params: SamplingParams | None, index: int | None, on_error: str
    ) -> CheckedPrompt | Exception:
        """``item`` for the prompt at ``index`` of a list; what it raises names the index, or is returned."""
        try:
            return self.item(prompt, params)
        except (TypeError, ValueError) as e:
            error = e if index is None else with_prompt_index(e, index)
            if on_error == "return" and isinstance(error, InvalidRequestError):
                return error
            raise error from None

    def item(self, prompt: Any, params: SamplingParams | None, spans: tuple[Span, ...] = ()) -> CheckedPrompt:
        """One prompt as token ids, with its params. ``spans``: those of checked tokens. Raises as ``items`` does."""
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        vocab = self._model.vocab
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequestError(
                    "the prompt is empty; give at least one character or token (the BOS token, to start from nothing)"
                )
            if len(prompt) >= self.n_ctx:
                self._refuse_long_text(prompt)
            chat_prompts = self._model.chat_prompts
            if (found := chat_prompts.controls.first_in(prompt)) is not None:
                chat_prompts.warn_of_control_text(found)
            tokens = vocab.tokenize(prompt)
        elif spans:
            tokens = prompt
        else:
            tokens = check_tokens("prompt", prompt, vocab.n_vocab)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        if len(tokens) >= self.n_ctx:
            self._refuse_ids(len(tokens))
        if spans and params.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs are not supported for a prompt with images or sounds")
        adapters = self.adapters(params)
        factory, budget = self._compiled(params)
        return CheckedPrompt(tokens, factory, vocab.piece, tuple(params.stop or ()), adapters, budget, spans)

    def _refuse_long_text(self, prompt: str) -> None:
        """Refuses a text whose length alone shows that it has too many tokens: tokenizing it would take long."""
        n_least = self._model.vocab.least_tokens(len(prompt))
        if n_least >= self.n_ctx:
            raise InvalidRequestError(
                f"the prompt has {len(prompt)} characters, at least {n_least} tokens; n_ctx is {self.n_ctx} "
                "and one must stay free: shorten it, or raise n_ctx"
            )

    def _refuse_long_ids(self, prompt: Any) -> None:
        """Refuses one sequence of too many token ids before any of them is looked at, but the first."""
        if isinstance(prompt, (list, tuple)):
            first = prompt[0] if prompt else None
        elif getattr(prompt, "ndim", None) == 1:
            first = prompt[0] if len(prompt) else None
        else:
            return
        if len(prompt) >= self.n_ctx and isinstance(first, SupportsIndex):
            self._refuse_ids(len(prompt))

    def _refuse_ids(self, n: int) -> NoReturn:
        raise InvalidRequestError(
            f"the prompt has {n} tokens; n_ctx is {self.n_ctx} and one must stay free: "
            "shorten it, or raise n_ctx"
        )

    def completions(self, items: Sequence[CheckedPrompt | Exception]) -> Iterator[RequestFactory]:
        """Yields functions that each create the requests of a portion of the items. Skips items that are errors."""
        portion: dict[int, CheckedPrompt] = {}
        n = 0
        for index, item in enumerate(items):
            if isinstance(item, Exception):
                continue
            portion[index] = item
            n += item.sampler_factory.params.n
            if n >= PORTION:
                yield partial(self.make_requests, portion)
                portion, n = {}, 0
        if portion:
            yield partial(self.make_requests, portion)

    def make_requests(self, items: Mapping[int, CheckedPrompt], mailbox: Mailbox) -> dict[int, list[Request]]:
        """The ``n`` requests of each item, answered together with ``(index, Completion)``."""
        groups: dict[int, list[Request]] = {}
        for index, item in items.items():
            tokens, params = item.tokens, item.sampler_factory.params
            n_top = params.prompt_logprobs
            targets = None if n_top is None else PromptTargets(tokens, n_top)
            choices = Choices(mailbox, index, params.n, targets)
            spec = self._spec(item, UNLIMITED)._replace(caller=mailbox, logprob_targets=targets)
            groups[index] = requests = []
            for i in range(params.n):
                seed = (spec.seed + i) % 2**64
                sink = CompletionSink(choices, item.piece, item.stops, seed, i)
                requests.append(Request(tokens.copy(), spec._replace(seed=seed, sink=sink)))
                spec = spec._replace(logprob_targets=None)  # the prompt is scored once
        return groups

    def scores(
        self,
        context: Sequence[int],
        continuations: Sequence[Sequence[int]],
        mailbox: Mailbox,
        index: int,
        salt: str | None = None,
        keeps_cells: bool = False,
        adapters: AdapterSet | None = None,
        active_from: int | None = None,
    ) -> Request:
        """A request answered with ``(index, scores of each continuation)``. Raises InvalidRequestError.

        ``active_from``: where an activated LoRA begins to compute; None: where the context invokes it.
        """
        self.check_scores(context, continuations)
        targets = ContinuationTargets(context, continuations)
        before, activation = activation_of(adapters)
        spec = RequestSpec(
            max_tokens=0,
            logprob_targets=targets,
            caller=mailbox,
            share=tenant.get().share,
            cache_key=cache_key(salt, before),
            adapters=before,
            activation=activation,
            keeps_cells=keeps_cells,
            sink=ScoreSink(mailbox, index),
        )
        request = Request(targets.first(), spec)
        if activation is not None:
            request.active_from = activation.begin(context) if active_from is None else active_from
        return request

    def check_scores(self, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
        """Raises InvalidRequestError for texts that are too long to be scored."""
        longest = len(context) + max(map(len, continuations)) - 1
        if longest > self.n_ctx:
            raise InvalidRequestError(
                f"prompt and continuation have {longest + 1} tokens; n_ctx is {self.n_ctx}, and all but the last "
                "must fit: shorten them, or raise n_ctx"
            )

    def stream(self, item: CheckedPrompt, mailbox: Mailbox, n_ahead: int) -> Request:
        """A request answered with deltas, at most ``n_ahead`` tokens ahead of its reader.

        Raises InvalidRequestError for params that a stream does not support.
        """
        self._check_single(item)
        return Request(item.tokens, self._spec(item, n_ahead, DeltaSink(mailbox, item.piece, item.stops)))

    def generation(self, item: CheckedPrompt, mailbox: Mailbox) -> Request:
        """A request that generates one token per ``resume``, and keeps its sequence at its end.

        Raises InvalidRequestError for params that a generation does not support.
        """
        self._check_single(item)
        spec = self._spec(item, 0, TokenSink(mailbox, item.piece, item.stops), resumable=True)
        return Request(item.tokens, spec)

    def restored(self, item: CheckedPrompt, mailbox: Mailbox, found: Snapshot) -> Request:
        """``generation`` for the sequence of a snapshot."""
        self._check_single(item)
        n_prompt = found.n_prompt
        sink = TokenSink(mailbox, item.piece, item.stops)
        pieces = [self._model.vocab.piece(token) for token in item.tokens[n_prompt:][-_MOST_BYTES:]]
        sink.continue_character(b"".join(pieces))
        n_generated = len(item.tokens) - n_prompt
        spec = self._spec(item, n_generated, sink, resumable=True)
        request = Request(item.tokens, spec._replace(n_generated=n_generated))
        request.active_from = found.active_from
        return request

    def prefix(
        self, tokens: list[int], mailbox: Mailbox, salt: str | None, adapters: AdapterSet | None
    ) -> Request:
        """A request that computes these tokens and keeps its cells; answered as ``scores``."""
        return self.scores(tokens, [[0]], mailbox, 0, salt, keeps_cells=True, adapters=adapters)

    def _check_single(self, item: CheckedPrompt) -> None:
        params = item.sampler_factory.params
        if params.n > 1:
            raise InvalidRequestError(
                f"n is {params.n}; a stream is one completion: start {params.n} streams, or use generate()"
            )
        if params.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs come with generate(); streams do not return them")

    def _spec(
        self, item: CheckedPrompt, token_budget: int, sink: Sink | None = None, resumable: bool = False
    ) -> RequestSpec:
        params = item.sampler_factory.params
        stop_tokens = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_tokens = stop_tokens | self._eog if stop_tokens else self._eog
        unguessed = ""
        if params.speculate == "off":
            unguessed = "speculate is 'off'"
        elif resumable:
            unguessed = "engine.start: a text that may be changed needs a sampler that has drawn no further"
        speculates = self._speculates and not unguessed
        adapters, activation = activation_of(item.adapters)
        return RequestSpec(
            params.max_tokens,
            stop_tokens,
            token_budget,
            resumable,
            sink,
            item.sampler_factory,
            grammar_budget=item.budget,
            seed=choose_seed(params),
            uses_cache=params.cache,
            cache_key=cache_key(params.cache_salt, adapters),
            adapters=adapters,
            activation=activation,
            wants_logprobs=params.logprobs is not None,
            priority=params.priority,
            share=tenant.get().share,
            speculates=speculates,
            unguessed=unguessed if self._speculates else "",
            drafts=speculates
            and self._drafts
            and params.speculate != "ngram"
            and not item.spans,  # a draft model sees no images
            spans=item.spans,
        )


def activation_of(adapters: AdapterSet | None) -> tuple[AdapterSet | None, Activation | None]:
    """The adapters that a text is computed with from its first token on, and what activates others."""
    if adapters is None or not adapters.invocation:
        return adapters, None
    return adapters.before, Activation(adapters, adapters.invocation)


def with_prompt_index(error: BaseException, index: int) -> BaseException:
    """An error of one prompt of a list, with the prompt's index in its message."""
    text = f"prompt {index} of the list"
    own = isinstance(error, LlamapipeError) or type(error) in (TypeError, ValueError)
    if own and len(error.args) == 1:
        new = type(error)(f"{error} ({text})")
        new.__cause__ = error.__cause__
        return new
    if hasattr(error, "add_note"):  # Python 3.11; raised by a callback, whose message stays as it is
        error.add_note(text)
    return error


def split_prompts(prompt: Any, name: str = "prompt", empty_ok: bool = False) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether a single prompt was given.

    ``empty_ok``: an empty list is one prompt without tokens.
    """
    if isinstance(prompt, str):
        return [prompt], True
    prompt = from_column(name, prompt)
    try:
        if isinstance(prompt, (bytes, bytearray, Mapping, Set)):
            raise TypeError
        items = list(prompt)
    except TypeError:
        raise TypeError(
            f"{name} must be a str, a sequence of token ids, or a list of those, not {type(prompt).__name__}"
        ) from None
    if not items and not empty_ok:
        raise InvalidRequestError(
            f"the {name} is empty; give at least one token, or a list with at least one {name}"
        )
    whole = [
        isinstance(i, (str, bytes)) or (isinstance(i, Iterable) and getattr(i, "ndim", 1) > 0) for i in items
    ]
    if items and all(whole):
        return items, False
    if any(whole):
        raise TypeError(f"{name} mixes token ids and whole {name}s; give token ids, or a list of {name}s")
    return [items], True


T = TypeVar("T")


def in_order_of_prompts(
    items: Sequence[CheckedPrompt | Exception], results: dict[int, Any], single: bool
) -> Completion | Exception | list[Completion] | list[Completion | Exception]:
    """What ``generate`` returns: the completions and errors in the order of the prompts."""
    if single:
        return items[0] if isinstance(items[0], Exception) else results[0]
    return [item if isinstance(item, Exception) else results[index] for index, item in enumerate(items)]


def request_batches(
    builder: RequestBuilder,
    prompts: Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
    pending: Pending[Completion],
) -> Iterator[RequestFactory]:
    """For each prompt, as it is read, a function that makes its requests. Errors to return go to ``pending.ready``."""
    if params is None or isinstance(params, SamplingParams):
        pairs: Iterable[tuple[Prompt, SamplingParams | None]] = zip(prompts, repeat(params), strict=False)
    else:
        pairs = zip(prompts, params, strict=True)
    for index, (prompt, its_params) in enumerate(pairs):
        item = builder.item_or_error(prompt, its_params, index, pending.options.on_error)
        if isinstance(item, Exception):
            pending.ready.append((index, item))
            yield no_requests
        else:
            yield partial(builder.make_requests, {index: item})


async def arequest_batches(
    builder: RequestBuilder,
    prompts: Iterable[Prompt] | AsyncIterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
    pending: Pending[Completion],
    long_work: LongWork,
) -> AsyncGenerator[RequestFactory, None]:
    """``request_batches`` for asyncio; long prompts are tokenized in a thread."""
    each = None if params is None or isinstance(params, SamplingParams) else iter(params)
    index = 0
    async for prompt in _async(prompts):
        its_params = params if each is None else next(each, None)
        if each is not None and its_params is None:
            raise ValueError(f"params has {index} items, and there are more prompts")
        item = await long_work.run_off_loop(
            builder.item_or_error, prompt, its_params, index, pending.options.on_error
        )
        if isinstance(item, Exception):
            pending.ready.append((index, item))
            yield no_requests
        else:
            yield partial(builder.make_requests, {index: item})
        index += 1
    if each is not None and next(each, None) is not None:
        raise ValueError(f"there are {index} prompts, and params has more items")


async def _async(values: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield value
    else:
        for value in values:
            yield value


def no_requests(mailbox: Mailbox) -> dict[int, list[Request]]:
    """The requests of a prompt that failed its checks."""
    return {}


class ObservedRequest(Protocol):
    """One prompt that was submitted."""

    def end(self, error: BaseException | None = None, timed_out: bool = False) -> None:
        """The caller has the result or the error, or has given up. Called once, by the caller's thread."""

    def drop(self) -> None:
        """The caller dropped its stream. Called by a destructor, so it must not take a lock."""


class RequestObserver(Protocol):
    """Observes every prompt that is submitted to an engine. Any thread."""

    def begin(self, requests: Sequence[Request], operation: str) -> ObservedRequest:
        """Called with the requests of one prompt before they are submitted. It may replace their sinks."""

    def close(self) -> None:
        """The engine was closed."""


class Pending(Generic[T]):
    """The requests of one call that have no result yet. One thread or task. ``bar``: counts results."""

    def __init__(
        self, options: CallOptions, observer: RequestObserver | None, bar: Progress | None = None
    ) -> None:
        self.options = options
        self.bar = bar
        self._observer = observer
        self.observed: dict[int, ObservedRequest] = {}
        self.groups: dict[int, Sequence[Request]] = {}
        self.unsubmitted: deque[Request] = deque()
        self.ready: deque[tuple[int, T | Exception]] = deque()  # results that need no request
        self.timed_out = False
        # Of a long list. The thread that closes the engine submits the rest of it.
        self.lock = Lock()
        self.is_long = False
        self.is_making = False
        self.is_broken = False  # that was interrupted: results will be missing
        self.has_ended = False

    def add(self, groups: Groups) -> None:
        """Requests that are to be submitted."""
        self.groups.update(groups)
        for index, requests in groups.items():
            self.unsubmitted += requests
            if self._observer is not None:
                self.observed[index] = self._observer.begin(requests, self.options.operation)

    @property
    def requests(self) -> list[Request]:
        """All requests without a result."""
        return [request for requests in list(self.groups.values()) for request in requests]

    def give_up(self, error: BaseException | None) -> None:
        """Reports the end of all groups that have no result to the observer; ``error``: the reason, if there is one."""
        if not isinstance(error, (TimeoutError, QueueFullError, EngineClosedError)):
            error = None  # Ctrl-C, or the error of another request
        while self.observed:
            self.observed.popitem()[1].end(error)


def _timed_out(completion: Completion) -> Completion:
    if all(choice.finish_reason != "cancelled" for choice in completion.choices):
        return completion
    return replace(
        completion,
        choices=tuple(
            replace(choice, finish_reason="timeout") if choice.finish_reason == "cancelled" else choice
            for choice in completion.choices
        ),
    )


# Long lists are submitted in portions. When 20,000 prompts were submitted at once, the garbage collector scanned
# all their objects again and again, for up to 0.26 s, during which no thread ran.
_N_AHEAD = 2 * PORTION  # if fewer groups of a long list have no result yet, the next portion is submitted


class Submission:
    """Brings requests to the engine loop and their results back. Any thread."""

    def __init__(self, engine_thread: EngineThread, queue: QueueLimit) -> None:
        self._engine_thread = engine_thread
        self._queue = queue
        self.observer: RequestObserver | None = None

    def _entering(self, unsubmitted: deque[Request], block: bool) -> Iterator[Request]:
        """Submits all requests together if the queue has room for them.

        If not, it yields each request before it submits it, and the caller waits for room. Raises QueueFullError
        instead if ``block`` is false.
        """
        if not block:
            self._queue.enter_at_once(*unsubmitted)
        elif not self._queue.try_enter(*unsubmitted):
            while unsubmitted:
                yield unsubmitted[0]
                self._engine_thread.submit(unsubmitted[0])
                unsubmitted.popleft()
            return
        self._engine_thread.submit(*unsubmitted)
        unsubmitted.clear()

    def cancel(self, requests: Collection[Request]) -> None:
        """Ends requests, whether or not they were submitted before their caller gave up."""
        if not requests:
            return
        self._queue.discard(requests)
        for request in requests:
            self._engine_thread.cancel_soon(request)

    def _end(self, pending: Pending[T]) -> None:
        """Ends the call after an error, or when its caller gives up. Cancels the requests without a result."""
        error = sys.exc_info()[1]
        with pending.lock:
            pending.has_ended = True
            if pending.is_long:
                self._engine_thread.end_list(pending)
            if pending.groups:
                self.cancel(pending.requests)
                pending.give_up(error)
        if pending.bar is not None:
            pending.bar.close()

    def _stop(self, pending: Pending[T], expired: ExpiredError) -> None:
        """After the deadline: ends the requests, so that what they generated arrives within a step, or raises."""
        if pending.options.on_timeout == "raise":
            raise expired
        with pending.lock:
            pending.timed_out = True
            self.cancel(pending.requests)
            self._submit_cancelled(pending)

    def _submit_cancelled(self, pending: Pending[T]) -> None:
        """Submits, as cancelled, the requests left at the deadline. They end at once, without a token."""
        if pending.unsubmitted:
            self.cancel(pending.unsubmitted)
            self._engine_thread.submit(*pending.unsubmitted, of_list=pending.is_long)
            pending.unsubmitted.clear()

    def _read(self, item: tuple[int, Any], pending: Pending[Any]) -> tuple[int, Any]:
        """The index and the result in a mailbox item. Its requests, if it has any, are not pending any more.

        Raises the error of a failed request if the call's options say so.
        """
        index, result = item
        if (observed := pending.observed.pop(index, None)) is not None:
            error = result.error if isinstance(result, Failure) else None
            observed.end(error, timed_out=pending.timed_out)
        if isinstance(result, Failure):
            options = pending.options
            result = with_prompt_index(result.error, index) if options.names_prompts else result.error
            if options.on_error == "raise" or not isinstance(result, Exception):
                raise result
            self.cancel(pending.groups[index])  # the other choices of the prompt
        elif pending.timed_out and isinstance(result, Completion):
            result = _timed_out(result)
        pending.groups.pop(index, None)
        if pending.bar is not None:
            pending.bar.update()
        return index, result

    def _make_next(self, batches: Iterator[RequestFactory], mailbox: Mailbox, pending: Pending[T]) -> bool:
        """Makes the next requests, if there are any; submits those of a long list."""
        with pending.lock:
            if pending.is_broken:
                raise EngineClosedError("the engine is closed; make another")
            pending.is_making = True
            try:
                make = next(batches, None)
                if make is None:
                    return False
                pending.add(make(mailbox))
                if isinstance(mailbox, AsyncMailbox):
                    mailbox.requests = pending.requests
                if pending.timed_out:
                    self._submit_cancelled(pending)
                elif pending.is_long:
                    self._queue.try_enter(*pending.unsubmitted)  # it has no limit
                    self._engine_thread.submit(*pending.unsubmitted, of_list=True)
                    pending.unsubmitted.clear()
                return True
            finally:
                pending.is_making = False

    def _portions(
        self, batches: Iterator[RequestFactory], mailbox: Mailbox, pending: Pending[T]
    ) -> Iterator[RequestFactory]:
        """The portions of a list that are submitted one after another.

        It is one if all requests must enter the queue together, or none. If the queue has no limit, closing the engine
        submits the rest of a long list, as if the list had come at once.
        """
        if self._queue.limit is not None:  # callers wait for room, and closing refuses those that do
            if pending.options.block:
                return batches

            def make(mailbox: Mailbox) -> Groups:
                return {index: requests for make in batches for index, requests in make(mailbox).items()}

            return iter([make])
        first = list(islice(batches, 2))
        batches = chain(first, batches)
        if len(first) < 2:
            return batches

        def submit_rest() -> None:
            with pending.lock:
                # While it is made in this thread, a signal handler closes the engine.
                if pending.has_ended or pending.is_making or pending.is_broken:
                    return
                try:
                    while self._make_next(batches, mailbox, pending):
                        pass
                except BaseException:
                    pending.is_broken = True
                    raise

        pending.is_long = True
        self._engine_thread.begin_list(pending, submit_rest)
        return batches

    def submit_paused(self, request: Request) -> None:
        """Submits a request that computes nothing before it is resumed; it takes no place in the queue."""
        try:
            self._engine_thread.submit(request)
        except BaseException:
            self.cancel([request])
            raise

    # ---- asyncio: tools/unasync.py makes the next part, for threads, from this one
    async def asubmit(self, *requests: Request, block: bool = True, deadline: float | None = None) -> None:
        """Enters the queue and submits; any error cancels all requests, also Ctrl-C and that its task is cancelled.

        Raises QueueFullError, TimeoutError, EngineClosedError.
        """
        try:
            self._engine_thread.note_waiting_task()
            for request in self._entering(deque(requests), block):
                await self._queue.aenter(request, deadline)
        except BaseException:
            self.cancel(requests)
            raise

    async def acollect(
        self, batches: Iterator[RequestFactory], options: CallOptions, bar: Progress | None = None
    ) -> dict[int, Any]:
        """The results, by index, of the requests of all batches. Long lists are submitted in portions.

        Any error cancels all of them, also Ctrl-C and that its task is cancelled. Raises the error of a request,
        TimeoutError, QueueFullError.
        """
        pending = Pending[Any](options, self.observer, bar)
        mailbox = AsyncMailbox(running_loop(), self._engine_thread.dispatcher)
        results: dict[int, Any] = {}
        try:
            batches = self._portions(batches, mailbox, pending)
            exhausted = False
            while True:
                try:
                    while not exhausted and len(pending.groups) < _N_AHEAD:
                        self._engine_thread.note_waiting_task()
                        if not self._make_next(batches, mailbox, pending):
                            exhausted = True
                            break
                        if pending.unsubmitted:
                            for request in self._entering(pending.unsubmitted, options.block):
                                await self._queue.aenter(request, options.deadline)
                    if not pending.groups:
                        return results
                    # What is cancelled at the deadline arrives within a step.
                    item = await mailbox.get(None if pending.timed_out else options.deadline)
                except Empty:
                    self._stop(pending, options.expired())
                except ExpiredError as expired:
                    self._stop(pending, expired)
                else:
                    index, results[index] = self._read(item, pending)
        finally:
            self._end(pending)

    # ---- threads: made by tools/unasync.py; edit the part above
    def submit(self, *requests: Request, block: bool = True, deadline: float | None = None) -> None:
        """Enters the queue and submits; any error cancels all requests, also Ctrl-C and that its task is cancelled.

        Raises QueueFullError, TimeoutError, EngineClosedError.
        """
        try:
            self._engine_thread.note_waiting_thread()
            for request in self._entering(deque(requests), block):
                self._queue.enter(request, deadline)
        except BaseException:
            self.cancel(requests)
            raise

    def collect(
        self, batches: Iterator[RequestFactory], options: CallOptions, bar: Progress | None = None
    ) -> dict[int, Any]:
        """The results, by index, of the requests of all batches. Long lists are submitted in portions.

        Any error cancels all of them, also Ctrl-C and that its task is cancelled. Raises the error of a request,
        TimeoutError, QueueFullError.
        """
        pending = Pending[Any](options, self.observer, bar)
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        results: dict[int, Any] = {}
        try:
            batches = self._portions(batches, mailbox, pending)
            exhausted = False
            while True:
                try:
                    while not exhausted and len(pending.groups) < _N_AHEAD:
                        self._engine_thread.note_waiting_thread()
                        if not self._make_next(batches, mailbox, pending):
                            exhausted = True
                            break
                        if pending.unsubmitted:
                            for request in self._entering(pending.unsubmitted, options.block):
                                self._queue.enter(request, options.deadline)
                    if not pending.groups:
                        return results
                    # What is cancelled at the deadline arrives within a step.
                    item = mailbox.get(None if pending.timed_out else options.deadline)
                except Empty:
                    self._stop(pending, options.expired())
                except ExpiredError as expired:
                    self._stop(pending, expired)
                else:
                    index, results[index] = self._read(item, pending)
        finally:
            self._end(pending)

    # ---- end of what tools/unasync.py makes

    # ---- results while prompts are still read
    def iterate(
        self,
        batches: Iterator[RequestFactory],
        n_ahead: int,
        pending: Pending[T],
    ) -> Iterator[tuple[int, T | Exception]]:
        """Yields each result with its index, as requests finish. At most about ``n_ahead`` groups are without a result.

        Closing the iterator, Ctrl-C and any error cancel what is left.
        """
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        options = pending.options
        try:
            exhausted = False
            while True:
                try:
                    while not exhausted and len(pending.groups) < n_ahead:
                        self._engine_thread.note_waiting_thread()
                        if not self._make_next(batches, mailbox, pending):
                            exhausted = True
                            break
                        if pending.unsubmitted:
                            for request in self._entering(pending.unsubmitted, options.block):
                                self._queue.enter(request, options.deadline)
                        if pending.ready:
                            break
                    while pending.ready:
                        yield self._read(pending.ready.popleft(), pending)
                    if not pending.groups:
                        if exhausted:
                            return
                        continue
                    item = mailbox.get(options.deadline)
                except Empty:
                    raise options.expired() from None
                yield self._read(item, pending)
        finally:
            self._end(pending)

    async def aiterate(
        self, batches: AsyncIterator[RequestFactory], n_ahead: int, pending: Pending[T]
    ) -> AsyncGenerator[tuple[int, T | Exception], None]:
        """``iterate`` for asyncio; results also arrive while ``batches`` waits. Closing it cancels the rest."""
        import asyncio

        mailbox = AsyncMailbox(asyncio.get_running_loop(), self._engine_thread.dispatcher)
        room = asyncio.Semaphore(n_ahead)
        submitting = asyncio.ensure_future(self._submit_all(batches, mailbox, room, pending))
        submitting.add_done_callback(mailbox.receive)  # wakes the reader below
        try:
            while pending.groups or not submitting.done():
                try:
                    item = await mailbox.get(pending.options.deadline)
                except Empty:
                    raise pending.options.expired() from None
                if item is submitting:
                    submitting.result()  # raises what the submission raised
                    continue
                index, result = self._read(item, pending)
                room.release()
                yield index, result
        finally:
            submitting.cancel()
            await asyncio.wait([submitting])
            self._end(pending)

    async def _submit_all(
        self,
        batches: AsyncIterator[RequestFactory],
        mailbox: AsyncMailbox,
        room: asyncio.Semaphore,
        pending: Pending[T],
    ) -> None:
        """Submits what ``batches`` yields, while there is room."""
        while True:
            await room.acquire()
            make = await anext(batches, None)
            if make is None:
                return
            pending.add(make(mailbox))
            mailbox.requests = pending.requests
            self._engine_thread.note_waiting_task()
            for request in self._entering(pending.unsubmitted, pending.options.block):
                await self._queue.aenter(request, pending.options.deadline)
            while pending.ready:
                mailbox.receive(pending.ready.popleft())
