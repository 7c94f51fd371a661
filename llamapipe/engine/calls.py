"""The calls of an engine for threads: generate, stream, start and score."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, Literal, TypeVar, overload

from llamapipe._engine.deliver import Mailbox, Progress, ThreadMailbox, progress_bar
from llamapipe._engine.request import Request
from llamapipe._engine.score_requests import ScoreJob, perplexity_job, score_job, tokens_job
from llamapipe._engine.snapshot import Layout, unpack
from llamapipe._engine.submit import (
    ON,
    CallOptions,
    Item,
    OnError,
    OnTimeout,
    Pending,
    Prompt,
    RequestBuilder,
    Submission,
    TokenIds,
    call_options,
    explains_keywords,
    makes_of,
    outcome_of,
)
from llamapipe._engine.thread import EngineThread
from llamapipe.arguments import check_choice, check_flag, check_int, explains_options, refuse_table
from llamapipe.engine.cache import MIN_PREFIX
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.model import Model
from llamapipe.params import SamplingParams, check_salt
from llamapipe.results import Completion, Score
from llamapipe.streams import BUFFER_TOKENS, CachedPrefix, Generation, Stream

T = TypeVar("T")


class EngineCalls:
    """The part of ``Engine`` with the blocking calls. Any thread. ``Engine`` owns the attributes."""

    model: Model
    n_ctx: int
    n_seq_max: int
    _engine_thread: EngineThread
    _request_builder: RequestBuilder
    _submission: Submission

    def _layout(self) -> Layout:
        raise NotImplementedError

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
        on_timeout: OnTimeout = "raise",
    ) -> Completion: ...

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: Literal["return"],
        on_timeout: OnTimeout = "raise",
    ) -> Completion | Exception: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
        on_timeout: OnTimeout = "raise",
    ) -> list[Completion]: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: Literal["return"],
        on_timeout: OnTimeout = "raise",
    ) -> list[Completion | Exception]: ...

    @explains_keywords
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        on_error: OnError = "raise",
        on_timeout: OnTimeout = "raise",
    ) -> Completion | Exception | list[Completion] | list[Completion | Exception]:
        """Completes a prompt, or several together, and returns when all are finished.

        ``prompt``: text or token ids for one ``Completion``; a list of those for a list of completions, in its order.
        ``params``: for all prompts, or a list with one for each. ``timeout``: seconds for the whole call. ``block``:
        wait for room in the queue, or raise QueueFullError. ``progress``: show a progress bar (needs tqdm).
        ``on_error``: ``"raise"`` raises the first error, which names the index of its prompt, and cancels the rest;
        ``"return"`` puts the error in the place of its completion, like ``asyncio.gather(return_exceptions=True)``.
        ``on_timeout``: ``"raise"`` raises TimeoutError; ``"return"`` returns what was generated, and unfinished choices
        have the finish reason ``"timeout"``.

        Ctrl-C and any error cancel the requests of this call. Raises InvalidRequestError, TypeError or
        ValueError for bad prompts and options, QueueFullError, TimeoutError, DecodeError, EngineClosedError.
        """
        self._engine_thread.check_open()
        items, single = self._request_builder.items(prompt, params, check_choice("on_error", on_error, ON))
        options = call_options(timeout, block, on_error, on_timeout, names_prompts=not single)
        makes = self._request_builder.completions(items)
        results = self._submission.collect(
            makes, options, progress_bar(check_flag("progress", progress), len(items))
        )
        return outcome_of(items, results, single)

    @overload
    def iter_completed(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n_ahead: int | None = None,
        timeout: float | None = None,
        progress: bool = False,
        on_error: Literal["raise"] = "raise",
    ) -> Iterator[tuple[int, Completion]]: ...

    @overload
    def iter_completed(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n_ahead: int | None = None,
        timeout: float | None = None,
        progress: bool = False,
        on_error: Literal["return"],
    ) -> Iterator[tuple[int, Completion | Exception]]: ...

    @explains_keywords
    def iter_completed(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n_ahead: int | None = None,
        timeout: float | None = None,
        progress: bool = False,
        on_error: OnError = "raise",
    ) -> Iterator[tuple[int, Completion]] | Iterator[tuple[int, Completion | Exception]]:
        """Completes any number of prompts in bounded memory: yields ``(index, Completion)`` as they finish.

        ``prompts`` may be a generator; it is read as slots become free, at most ``n_ahead`` prompts ahead (default:
        twice ``n_seq_max``). ``params``: for all prompts, or an iterable with one for each. Other options as for
        ``generate``; ``timeout`` counts from the first ``next``.

        For one thread at a time. Closing or dropping the iterator cancels what is left. Raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        check_choice("on_error", on_error, ON)
        call_options(timeout, True, on_error, "raise")
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise TypeError(f"prompts must be an iterable of prompts, not {type(prompts).__name__}")
        refuse_table("prompts", prompts)
        n = 2 * self.n_seq_max if n_ahead is None else check_int("n_ahead", n_ahead, 1, 2**31 - 1)
        bar = progress_bar(
            check_flag("progress", progress), len(prompts) if isinstance(prompts, Sized) else None
        )
        return self._iter_completed(prompts, params, n, timeout, bar, on_error)

    def _iter_completed(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        n_ahead: int,
        timeout: float | None,
        bar: Progress,
        on_error: OnError,
    ) -> Iterator[tuple[int, Any]]:
        options = call_options(timeout, True, on_error, "raise", names_prompts=True)
        pending = Pending[Completion](options)
        makes = makes_of(self._request_builder, prompts, params, pending)
        try:
            yield from self._submission.iterate(makes, n_ahead, pending, bar)
        finally:
            bar.close()

    @explains_keywords
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> Stream:
        """Starts a completion and returns an iterator over its deltas, a ``Stream``. Raises as ``generate`` does."""
        self._engine_thread.check_open()
        options = call_options(timeout, block)
        return self._open_stream(self._request_builder.item(prompt, params), options)

    def _open_stream(self, item: Item, options: CallOptions) -> Stream:
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        request = self._request_builder.stream(item, mailbox, BUFFER_TOKENS)
        stream = Stream(self._engine_thread, request, mailbox, options.deadline)
        stream.engine = self  # keeps the engine alive: it closes itself when it is dropped
        observer = self._submission.observer
        if observer is not None:
            stream.observed = observer.begin([request], options.operation)
        try:
            self._submission.submit(request, block=options.block, deadline=options.deadline)
        except BaseException as e:
            stream.observed_end(e)
            raise
        return stream

    @explains_keywords
    def start(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Starts a generation that computes one token for each call of ``next``, and nothing before the first.

        Raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        item = self._request_builder.item(prompt, params)
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        request = self._request_builder.generation(item, mailbox)
        generation = self._generation(request, mailbox)
        self._submission.submit_paused(request)
        return generation

    def _generation(self, request: Request, mailbox: ThreadMailbox) -> Generation:
        generation = Generation(
            self._engine_thread, request, mailbox, self.model.n_vocab, self.n_ctx, self._layout
        )
        generation.engine = self
        return generation

    @explains_keywords
    def restore(self, snapshot: bytes, params: SamplingParams | None = None) -> Generation:
        """Continues a sequence from a ``Generation.snapshot`` of this engine or another one with the same model.

        Its cells are loaded with the first ``next``. They are computed again if ``cache_bytes`` has no room for them,
        if there is no prefix cache, or if the other engine's memory had another layout (``flash_attn``; with sliding
        windows or recurrent states, also the number of sequences). ``params`` count from here, and constraints hold for
        all that was generated. Returns at once.

        Raises TypeError for what is not bytes, InvalidRequestError for what is damaged, of another model, made with
        other ``type_k`` or ``type_v`` or too long for ``n_ctx``; else as ``start`` does.
        """
        self._engine_thread.check_open()
        if not isinstance(snapshot, (bytes, bytearray, memoryview)):
            raise TypeError(f"snapshot must be bytes, not {type(snapshot).__name__}")
        found = unpack(bytes(snapshot), self._layout(), self.model.n_vocab)
        item = self._request_builder.item(found.tokens, params)
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        request = self._request_builder.restored(item, mailbox, found.n_prompt)
        generation = self._generation(request, mailbox)
        engine_thread = self._engine_thread
        engine_thread.call(engine_thread.loop.restore, request, found.n_cells, found.state)
        return generation

    @explains_options()
    def cache_prefix(
        self, prompt: Prompt, *, timeout: float | None = None, cache_salt: str | None = None
    ) -> CachedPrefix:
        """Computes a prompt and keeps its KV cells in host memory until they are released.

        Requests whose prompts begin with the same tokens load them, also long after. ``prompt``: text or token ids,
        such as those of ``Model.tokenize_chat(messages, add_generation_prompt=False)``. ``cache_salt``: that of the
        requests.

        Blocks until the prompt is computed. Raises InvalidRequestError if it has fewer than 16 tokens or takes more
        than is left of ``cache_bytes``, or if the engine has no prefix cache; else as ``score`` does.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, True, operation="cache_prefix")
        tokens = self._request_builder.item(prompt, None).tokens
        if len(tokens) < MIN_PREFIX:
            raise InvalidRequestError(
                f"the prefix has {len(tokens)} tokens; fewer than {MIN_PREFIX} are computed again for each request: "
                "there is no need to cache them"
            )
        requests: list[Request] = []

        def make(mailbox: Mailbox) -> dict[int, list[Request]]:
            requests[:] = [self._request_builder.prefix(tokens, mailbox, check_salt(cache_salt))]
            return {0: requests}

        engine_thread = self._engine_thread
        try:
            self._submission.collect(iter([make]), options, progress_bar(False, 1))
            n_bytes, n_needed, budget = engine_thread.ask(lambda: engine_thread.loop.kept_bytes(requests[0]))
            if n_bytes == 0:
                raise InvalidRequestError(
                    f"the {len(tokens)} tokens take about {n_needed} bytes, more than is left of the {budget} in "
                    "cache_bytes (0 without a prefix cache): raise it, or release other prefixes"
                )
        except BaseException:
            if requests:
                engine_thread.call(engine_thread.loop.release, requests[0])
            raise
        return CachedPrefix(engine_thread, requests[0], len(tokens), n_bytes)

    # ---- scores
    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        continuation: Prompt,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> Score: ...

    @overload
    def score(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt | Sequence[Prompt],
        continuation: Sequence[Prompt],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> list[Score]: ...

    @overload
    def score(
        self,
        prompt: Sequence[Prompt],
        continuation: Sequence[Sequence[Prompt]],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> list[list[Score]]: ...

    @overload
    def score(
        self,
        prompt: Sequence[Prompt],
        continuation: Sequence[Prompt | Sequence[Prompt]],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> list[Score | list[Score]]: ...

    @explains_options()
    def score(
        self,
        prompt: Prompt | Sequence[Prompt],
        continuation: Prompt | Sequence[Prompt | Sequence[Prompt]],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> Score | list[Score] | list[list[Score]] | list[Score | list[Score]]:
        """Scores continuations given a prompt: the log-probability of each of their tokens.

        Prompt and continuation are text or token ids. One prompt and one continuation return a Score; one prompt and a
        list of continuations, a list. For a list of prompts, ``continuation`` has one item for each prompt, or a list
        of items for each, and the result has the same shape. Equal prompts are computed once. If a prompt has many
        continuations, they are divided among requests that run at the same time. If both are text,
        prompt + continuation are tokenized together, and the tokens beyond the prompt's own count are scored.

        Options as for ``generate``. Raises InvalidRequestError if prompt and continuation together exceed ``n_ctx`` or
        a continuation has no tokens; else as ``generate`` does.
        """
        return self._score(score_job(self.model, prompt, continuation), timeout, block, progress)

    @overload
    def score_tokens(
        self, tokens: TokenIds, *, timeout: float | None = None, block: bool = True, progress: bool = False
    ) -> Score: ...

    @overload
    def score_tokens(
        self,
        tokens: Sequence[TokenIds],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> list[Score]: ...

    @explains_options()
    def score_tokens(
        self,
        tokens: TokenIds | Sequence[TokenIds],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> Score | list[Score]:
        """Scores a text, or several: every token but the first, given the tokens before it.

        Options and exceptions as for ``score``.
        """
        return self._score(tokens_job(self.model, tokens), timeout, block, progress)

    @explains_options()
    def perplexity(
        self,
        text: str | TokenIds,
        n_window: int | None = None,
        *,
        timeout: float | None = None,
        progress: bool = False,
    ) -> float:
        """The perplexity of a text: the exponential of the mean negative log-probability of its tokens.

        ``text``: text or token ids, of any length. By default every token but the first counts, given all tokens before
        it. In a text longer than ``n_ctx`` a token is given at least the ``n_ctx // 2`` tokens before it.

        With ``n_window`` the result is that of llama.cpp's perplexity tool. The text is cut into windows of
        ``n_window`` tokens that do not overlap; an incomplete last one is left out. If the vocabulary asks for a BOS
        token, it replaces each window's first token. Only the tokens after the first ``n_window // 2 + 1`` of a window
        count.

        Options and exceptions as for ``score``; InvalidRequestError also for fewer than 2 tokens, or fewer than a
        window.
        """
        return self._score(perplexity_job(self.model, text, n_window, self.n_ctx), timeout, True, progress)

    def _score(self, job: ScoreJob[T], timeout: float | None, block: bool, progress: bool) -> T:
        self._engine_thread.check_open()
        options = call_options(timeout, block, operation="score")
        makes = job.makes(self._request_builder)
        bar = progress_bar(check_flag("progress", progress), job.n_requests)
        return job.result(self._submission.collect(makes, options, bar))
