"""The calls of ``Engine`` for threads. Made by ``tools/unasync.py`` from ``engine.py``: edit that file."""

from __future__ import annotations

from collections.abc import (
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any, Literal, TypeVar, overload

from llamapipe._engine.calls.call_options import ERROR_MODES, CallOptions, OnError, OnTimeout, call_options
from llamapipe._engine.calls.observed import observed_request
from llamapipe._engine.calls.prompts import CheckedPrompt, RequestFactory, in_order_of_prompts
from llamapipe._engine.calls.scores import ScoreJob, perplexity_job, score_job, tokens_job
from llamapipe._engine.calls.submission import END, Pending, no_requests
from llamapipe._engine.parts import EngineParts
from llamapipe._engine.policy.core import Request
from llamapipe._engine.policy.kv import MIN_PREFIX
from llamapipe._engine.runtime.mailboxes import Mailbox, ThreadMailbox
from llamapipe._messages import explains_keywords, explains_options
from llamapipe._sync.streams import ChatStream, Generation, Stream
from llamapipe._sync.submission import BlockingSubmission
from llamapipe.arguments import (
    check_choice,
    check_flag,
    check_int,
    refuse_table,
)
from llamapipe.chat.options import ChatOptions, Conversation, ReasoningFormat, ToolChoice, Truncation
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.adapter import AdapterChoice
from llamapipe.llama.fim import FimExtra, FimOrder, fim_text
from llamapipe.params import SamplingParams, check_salt
from llamapipe.results import ChatCompletion, Completion, Score
from llamapipe.streams import (
    BUFFER_TOKENS,
    CachedPrefix,
)
from llamapipe.types import Prompt, ResponseFormat, TokenIds, ToolDefinition
from llamapipe.work.progress import Progress, progress_bar

T = TypeVar("T")


class BlockingCalls(EngineParts):
    """The calls of ``Engine`` for threads."""

    _submission: BlockingSubmission

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
        """Complete a prompt, or several together, and return when all are finished.

        - ``prompt``: text or token ids, for one ``Completion``; or a list of these, for a list of completions in its
          order.
        - ``params``: one for all prompts, or a list with one for each; None: the defaults of ``SamplingParams``.
        - ``timeout``: seconds for the whole call; None: no limit.
        - ``block``: wait for room in the queue; otherwise QueueFullError is raised.
        - ``progress``: show a progress bar (needs tqdm).
        - ``on_error``: ``"raise"`` raises the first error, which names the index of its prompt, and cancels the rest.
          ``"return"`` returns each error in place of its completion, like ``asyncio.gather(return_exceptions=True)``.
        - ``on_timeout``: ``"raise"`` raises TimeoutError. ``"return"`` returns the text so far; unfinished choices have
          the finish reason ``"timeout"``.

        Any thread. Ctrl-C, a cancelled task and any error cancel the requests of this call. Raises InvalidRequestError,
        TypeError or ValueError for bad prompts and options, ImportError for options that need a missing extra,
        QueueFullError, TimeoutError, DecodeError, EngineClosedError, and BackendError if the engine has failed.
        """
        self._engine_thread.check_open()
        checked = check_choice("on_error", on_error, ERROR_MODES)
        options = call_options(timeout, block, on_error, on_timeout)
        with options.in_time():
            items, single = self._request_builder.items(prompt, params, checked)
        options = replace(options, names_prompts=not single)
        batches = self._request_builder.completions(items)
        bar = progress_bar(len(items)) if check_flag("progress", progress) else None
        results = self._submission.collect(batches, options, bar)
        return in_order_of_prompts(items, results, single)

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
        """Complete any number of prompts in bounded memory: yield ``(index, Completion)`` as they finish.

        - ``prompts``: any iterable, including a generator. It is read as requests finish. For asyncio it may be
          asynchronous; completions are then also yielded while the next prompt is awaited.
        - ``n_ahead``: maximum number of prompts read ahead of their completions; default: twice ``n_seq_max``.
        - ``params``: one for all prompts, or an iterable with one for each.
        - ``timeout``: as for ``generate``, but counted from when the first result is asked for.

        Other options are as for ``generate``. For one thread or task at a time. Closing or dropping the iterator, or
        cancelling its task, cancels the requests that are left; to close it after a ``break``, use
        ``contextlib.closing``. Raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        check_choice("on_error", on_error, ERROR_MODES)
        call_options(timeout, True, on_error, "raise")
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Iterable):
            raise TypeError(f"prompts must be an iterable of prompts, not {type(prompts).__name__}")
        refuse_table("prompts", prompts)
        n = 2 * self.n_seq_max if n_ahead is None else check_int("n_ahead", n_ahead, 1, 2**31 - 1)
        total = len(prompts) if isinstance(prompts, Sized) else None
        bar = progress_bar(total) if check_flag("progress", progress) else None
        return self._iter_completed(prompts, params, n, timeout, bar, on_error)

    def _iter_completed(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        n_ahead: int,
        timeout: float | None,
        bar: Progress | None,
        on_error: OnError,
    ) -> Iterator[tuple[int, Any]]:
        options = call_options(timeout, True, on_error, "raise", names_prompts=True)
        pending = Pending[Completion](options, self._submission.observer, bar)
        batches = self._request_batches(prompts, params, pending)
        results = self._submission.iterate(batches, n_ahead, pending)
        yield from results

    def _request_batches(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        pending: Pending[Completion],
    ) -> Iterator[RequestFactory]:
        """Yield, for each prompt as it is read, a function that makes its requests.

        Errors that are to be returned go to ``pending.ready``.
        """
        all_params: Iterator[SamplingParams | None]
        all_params = repeat(params) if params is None or isinstance(params, SamplingParams) else iter(params)
        index = 0
        for prompt in prompts:
            its_params = next(all_params, END)
            if its_params is END:
                raise ValueError(f"params has {index} items, and there are more prompts; give one for each")
            item = self._request_builder.item_or_error(prompt, its_params, index, pending.options.on_error)
            if isinstance(item, Exception):
                pending.ready.append((index, item))
                yield no_requests
            else:
                yield partial(self._request_builder.make_requests, {index: item})
            index += 1
        if not isinstance(all_params, repeat) and next(all_params, END) is not END:
            raise ValueError(f"there are {index} prompts, and params has more items; give one for each")

    @explains_keywords
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> Stream:
        """Start a completion and return an iterator over its deltas. Raises as ``generate`` does.

        For asyncio the request starts when its first delta is awaited, or with ``submit``; bad arguments raise
        immediately. With ``block=False`` the request starts immediately, in a task, and a full queue raises here: a web
        service can still answer with status 429.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, block)
        return self._open_stream(options, self._request_builder.item(prompt, params))

    def _open_stream(self, options: CallOptions, item: CheckedPrompt) -> Stream:
        def make() -> tuple[Request, ThreadMailbox]:
            mailbox = ThreadMailbox(self._engine_thread.dispatcher)
            request = self._request_builder.stream(item, mailbox, BUFFER_TOKENS)
            observer = self._submission.observer
            if observer is not None:
                stream.observed = observer.begin(observed_request([request], options.operation))
            return request, mailbox

        submit = partial(self._submission.submit, block=options.block)
        stream = Stream(self._engine_thread, make, submit, options.deadline)
        stream.engine = self  # keeps the engine alive, which closes itself when nothing refers to it
        stream.submit()
        return stream

    # ---- filling in the middle
    @explains_keywords
    def infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        *,
        extra: FimExtra = (),
        filename: str | None = None,
        order: FimOrder = "psm",
        timeout: float | None = None,
        block: bool = True,
    ) -> Completion:
        """Generate the text between ``prefix`` and ``suffix``, with a model that was trained to fill gaps.

        - ``extra``: other files, each ``(filename, text)``, the most important last. ``filename``: the name of the file
          with the gap.
        - ``order``: the prompt begins with the prefix (``"psm"``) or with the suffix (``"spm"``).

        Other options are as for ``generate``. If the whole prompt and ``max_tokens`` do not fit into ``n_ctx``, text is
        left out as in ``Model.tokenize_fim``: in large portions, so that the prefix cache helps while a cursor moves.

        Raises InvalidRequestError for a model without fill-in-the-middle tokens; otherwise raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        text = fim_text(prefix, suffix, extra, filename, order)
        tokens = self._fim_tokens(text, params)
        return self.generate(tokens, params, timeout=timeout, block=block)

    @explains_keywords
    def stream_infill(
        self,
        prefix: str,
        suffix: str,
        params: SamplingParams | None = None,
        *,
        extra: FimExtra = (),
        filename: str | None = None,
        order: FimOrder = "psm",
        timeout: float | None = None,
        block: bool = True,
    ) -> Stream:
        """Start filling in and return an iterator over the deltas, as ``stream`` does.

        Takes the arguments of ``infill``.
        """
        self._engine_thread.check_open()
        tokens = self._fim_tokens(fim_text(prefix, suffix, extra, filename, order), params)
        return self.stream(tokens, params, timeout=timeout, block=block)

    # ---- chats
    @overload
    def chat(  # type: ignore[overload-overlap]
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        template_args: Mapping[str, object] | None = None,
        continue_last: bool | Literal["content", "reasoning"] = False,
        truncation: Truncation = "error",
        reasoning_format: ReasoningFormat = "auto",
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> ChatCompletion: ...

    @overload
    def chat(
        self,
        messages: Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        template_args: Mapping[str, object] | None = None,
        continue_last: bool | Literal["content", "reasoning"] = False,
        truncation: Truncation = "error",
        reasoning_format: ReasoningFormat = "auto",
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> list[ChatCompletion]: ...

    @explains_keywords
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        template_args: Mapping[str, object] | None = None,
        continue_last: bool | Literal["content", "reasoning"] = False,
        truncation: Truncation = "error",
        reasoning_format: ReasoningFormat = "auto",
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
    ) -> ChatCompletion | list[ChatCompletion]:
        """Answer a conversation, or several together, and return when all answers are complete.

        For a list of conversations, returns a list of answers in the same order; ``params`` may then be a list, too.
        ``timeout``, ``block`` and ``progress`` are as for ``generate``. Raises as ``generate`` does; also raises
        InvalidRequestError for messages that the model's template refuses, and ImportError without the extra ``chat``.
        """
        self._engine_thread.check_open()
        chat_options = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            template_args,
            continue_last,
            truncation=truncation,
            reasoning_format=reasoning_format,
        )
        options = call_options(timeout, block, operation="chat")
        with options.in_time():
            items, single = self._chat_builder.items(messages, params, chat_options)
        options = replace(options, names_prompts=not single)
        batches = self._request_builder.completions([item.item for item in items])
        bar = progress_bar(len(items)) if check_flag("progress", progress) else None
        results = self._submission.collect(batches, options, bar)
        answers = [item.answer(results[index]) for index, item in enumerate(items)]
        return answers[0] if single else answers

    @explains_keywords
    def stream_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolDefinition] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        template_args: Mapping[str, object] | None = None,
        continue_last: bool | Literal["content", "reasoning"] = False,
        truncation: Truncation = "error",
        reasoning_format: ReasoningFormat = "auto",
        before: Sequence[int] = (),
        timeout: float | None = None,
        block: bool = True,
    ) -> ChatStream:
        """Start an answer and return an iterator over its parts. Raises as ``chat`` does.

        ``before``: tokens of earlier turns, which precede the prompt. With ``truncation="auto"`` the oldest are left
        out.

        For asyncio the request starts when its first part is awaited, or with ``submit``. Bad arguments raise
        immediately. A long conversation, or one with tools or a response format, is rendered in a worker thread when it
        starts. With ``block=False`` a full queue raises here, and conversations that need no worker thread also start
        immediately.
        """
        self._engine_thread.check_open()
        chat_options = ChatOptions(
            tools,
            tool_choice,
            parallel_tool_calls,
            response_format,
            template_args,
            continue_last,
            truncation=truncation,
            reasoning_format=reasoning_format,
        )
        options = call_options(timeout, block, operation="chat")
        open_stream = partial(self._open_stream, options)
        build = partial(self._chat_builder.item, messages, params, chat_options, before)

        with options.in_time():
            item = build()
        return ChatStream(item, open_stream)

    # ---- token by token, and memory
    @explains_keywords
    def start(self, prompt: Prompt, params: SamplingParams | None = None) -> Generation:
        """Start a generation that computes one token for each call of ``next``, and nothing before the first call.

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
            self._engine_thread, request, mailbox, self.model.n_vocab, self.n_ctx, self._snapshot_format
        )
        generation.engine = self
        return generation

    @explains_keywords
    def restore(self, snapshot: bytes, params: SamplingParams | None = None) -> Generation:
        """Continue a sequence from a ``Generation.snapshot`` of this engine or another one with the same model.

        Nothing is computed before the first ``next``, which loads the cells. They are computed again if ``cache_bytes``
        has no room for them, if there is no prefix cache, or if the other engine's memory had another layout
        (``flash_attn``). Limits in ``params`` count from here; a constraint applies to earlier generated tokens, too.

        Raises TypeError if ``snapshot`` is not bytes, InvalidRequestError if it is damaged, from another model, made
        with other ``type_k`` or ``type_v``, or too long for ``n_ctx``; otherwise raises as ``start`` does.
        """
        self._engine_thread.check_open()
        if not isinstance(snapshot, (bytes, bytearray, memoryview)):
            raise TypeError(f"snapshot must be bytes, not {type(snapshot).__name__}")
        sequence = self._unpack(snapshot, params)
        item = self._request_builder.item(sequence.tokens, params)
        mailbox = ThreadMailbox(self._engine_thread.dispatcher)
        request = self._request_builder.restored_generation(item, mailbox, sequence)
        generation = self._generation(request, mailbox)
        self._engine_thread.restore(request, sequence)
        return generation

    @explains_options()
    def cache_prefix(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        cache_salt: str | None = None,
        adapter: AdapterChoice | None = None,
    ) -> CachedPrefix:
        """Compute a prompt and keep its KV cells in host memory until they are released.

        Later requests whose prompts begin with the same tokens load these cells. ``prompt``: text or token ids, such as
        the result of ``Model.tokenize_chat(messages, add_generation_prompt=False)``. ``cache_salt``, ``adapter``: as in
        the requests that will use the prefix. ``timeout``: seconds; None: no limit.

        Returns when the prompt is computed. Raises InvalidRequestError if the prompt has fewer than 16 tokens or needs
        more than is left of ``cache_bytes``, or if the engine has no prefix cache; otherwise raises as ``score`` does.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, True, operation="cache_prefix")
        adapters = self._request_builder.select_adapters(adapter)
        item = self._request_builder.item(prompt, None)
        tokens = item.tokens
        if len(tokens) < MIN_PREFIX:
            raise InvalidRequestError(
                f"the prefix has {len(tokens)} tokens; fewer than {MIN_PREFIX} are computed again for each request: "
                "there is no need to cache them"
            )
        requests: list[Request] = []

        def make(mailbox: Mailbox) -> dict[int, list[Request]]:
            requests[:] = [self._request_builder.prefix(tokens, mailbox, check_salt(cache_salt), adapters)]
            return {0: requests}

        try:
            self._submission.collect(iter([make]), options)
            n_bytes, n_needed, budget = self._engine_thread.saved_sizes(requests[0])
            if n_bytes == 0:
                raise InvalidRequestError(
                    f"the {len(tokens)} tokens take about {n_needed} bytes, more than is left of the {budget} in "
                    "cache_bytes (0 without a prefix cache): raise it, or release other prefixes"
                )
        except BaseException:
            if requests:
                self._engine_thread.release(requests[0])
            raise
        return CachedPrefix(self._engine_thread, requests[0], len(tokens), n_bytes)

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
        adapter: AdapterChoice | None = None,
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
        adapter: AdapterChoice | None = None,
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
        adapter: AdapterChoice | None = None,
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
        adapter: AdapterChoice | None = None,
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
        adapter: AdapterChoice | None = None,
    ) -> Score | list[Score] | list[list[Score]] | list[Score | list[Score]]:
        """Score continuations given a prompt: the log-probability of each of their tokens.

        Prompt and continuation are text or token ids.

        - One prompt and one continuation: a ``Score``. One prompt and a list of continuations: a list of scores.
        - A list of prompts: ``continuation`` has one item, or a list of items, for each prompt; the result has the same
          shape.

        Equal prompts are computed once. Many continuations of a prompt are divided among requests that run at the same
        time. If prompt and continuation are both text, they are tokenized together; the tokens after the longest prefix
        that the prompt and all these texts share are scored. No space is added: after "Answer:", pass " yes", not
        "yes". A warning is logged if several continuations all seem to lack the space.

        Options are as for ``generate``; ``adapter`` is as in SamplingParams. Raises InvalidRequestError if prompt and
        continuation together exceed ``n_ctx``, a continuation has no tokens, or there is no such adapter; otherwise
        raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, block, operation="score")
        with options.in_time():
            job = score_job(prompt, continuation, self.model)
        return self._score(job, options, progress, adapter)

    @overload
    def score_tokens(
        self,
        tokens: TokenIds,
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> Score: ...

    @overload
    def score_tokens(
        self,
        tokens: Sequence[TokenIds],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> list[Score]: ...

    @explains_options()
    def score_tokens(
        self,
        tokens: TokenIds | Sequence[TokenIds],
        *,
        timeout: float | None = None,
        block: bool = True,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> Score | list[Score]:
        """Score a text, or several: every token but the first, given the tokens before it.

        ``tokens``: the token ids of one text, for a ``Score``; or a list of these, for a list of scores. A text has at
        least two tokens. Options and exceptions are as for ``score``.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, block, operation="score")
        with options.in_time():
            job = tokens_job(tokens, self.model)
        return self._score(job, options, progress, adapter)

    @explains_options()
    def perplexity(
        self,
        text: str | TokenIds,
        n_window: int | None = None,
        *,
        timeout: float | None = None,
        progress: bool = False,
        adapter: AdapterChoice | None = None,
    ) -> float:
        """Return the perplexity of a text: the exponential of the mean negative log-probability of its tokens.

        ``text``: text or token ids, of any length. By default every token but the first counts, given all tokens before
        it. In a text longer than ``n_ctx``, each token is scored given at least the ``n_ctx // 2`` tokens before it.

        With ``n_window`` the result equals that of llama.cpp's perplexity tool. The text is cut into windows of
        ``n_window`` tokens that do not overlap; an incomplete last window is left out. If the vocabulary asks for a BOS
        token, it replaces each window's first token. The first ``n_window // 2 + 1`` tokens of each window do not
        count.

        Options and exceptions are as for ``score``. Also raises InvalidRequestError for fewer than 2 tokens, or for
        less than one window.
        """
        self._engine_thread.check_open()
        options = call_options(timeout, True, operation="score")
        with options.in_time():
            job = perplexity_job(text, n_window, self.model, self.n_ctx)
        return self._score(job, options, progress, adapter)

    def _score(
        self,
        job: ScoreJob[T],
        options: CallOptions,
        progress: bool,
        adapter: AdapterChoice | None,
    ) -> T:
        batches = job.batches(self._request_builder, self._request_builder.select_adapters(adapter))
        bar = progress_bar(job.n_requests) if check_flag("progress", progress) else None
        return job.result(self._submission.collect(batches, options, bar))
