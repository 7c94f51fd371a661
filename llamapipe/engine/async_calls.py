"""The calls of an engine for asyncio: agenerate, aiter_completed, astream and ascore."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, overload

from llamapipe._engine.deliver import AsyncMailbox
from llamapipe._engine.long_work import LongWork
from llamapipe._engine.request import Request
from llamapipe._engine.score_requests import score_job
from llamapipe._engine.submit import (
    ON,
    CallOptions,
    Item,
    OnError,
    OnTimeout,
    Pending,
    Prompt,
    amakes_of,
    call_options,
    explains_keywords,
    outcome_of,
)
from llamapipe.arguments import check_choice, check_int, explains_options, refuse_table
from llamapipe.engine.calls import EngineCalls
from llamapipe.params import SamplingParams
from llamapipe.results import Completion, Score
from llamapipe.streams import BUFFER_TOKENS, AsyncStream


class AsyncEngineCalls(EngineCalls):
    """The part of ``Engine`` with the calls for asyncio. Any thread with an event loop."""

    _long_work: LongWork

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        on_error: Literal["raise"] = "raise",
        on_timeout: OnTimeout = "raise",
    ) -> Completion: ...

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        on_error: Literal["return"],
        on_timeout: OnTimeout = "raise",
    ) -> Completion | Exception: ...

    @overload
    async def agenerate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        on_error: Literal["raise"] = "raise",
        on_timeout: OnTimeout = "raise",
    ) -> list[Completion]: ...

    @overload
    async def agenerate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        on_error: Literal["return"],
        on_timeout: OnTimeout = "raise",
    ) -> list[Completion | Exception]: ...

    @explains_keywords
    async def agenerate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
        on_error: OnError = "raise",
        on_timeout: OnTimeout = "raise",
    ) -> Completion | Exception | list[Completion] | list[Completion | Exception]:
        """``generate`` for asyncio. Cancelling the task cancels its requests; raises as ``generate`` does."""
        self._engine_thread.check_open()
        checked = check_choice("on_error", on_error, ON)
        items, single = await self._long_work.built(self._request_builder.items, prompt, params, checked)
        options = call_options(timeout, block, on_error, on_timeout, names_prompts=not single)
        makes = self._request_builder.completions(items)
        return outcome_of(items, await self._submission.acollect(makes, options), single)

    @overload
    def aiter_completed(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n_ahead: int | None = None,
        timeout: float | None = None,
        on_error: Literal["raise"] = "raise",
    ) -> AsyncGenerator[tuple[int, Completion], None]: ...

    @overload
    def aiter_completed(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n_ahead: int | None = None,
        timeout: float | None = None,
        on_error: Literal["return"],
    ) -> AsyncGenerator[tuple[int, Completion | Exception], None]: ...

    @explains_keywords
    def aiter_completed(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        n_ahead: int | None = None,
        timeout: float | None = None,
        on_error: OnError = "raise",
    ) -> (
        AsyncGenerator[tuple[int, Completion], None]
        | AsyncGenerator[tuple[int, Completion | Exception], None]
    ):
        """``iter_completed`` for asyncio: an async generator of ``(index, Completion)``, as they finish.

        ``prompts`` may be an async iterable: completions are also yielded while it waits for its next prompt.
        ``timeout`` counts from the first ``anext``. Closing the generator or cancelling its task cancels the rest; to
        close it after a ``break``, use ``contextlib.aclosing``. Raises as ``generate`` does.
        """
        self._engine_thread.check_open()
        check_choice("on_error", on_error, ON)
        call_options(timeout, True, on_error, "raise")
        if isinstance(prompts, (str, bytes)) or not isinstance(prompts, (Iterable, AsyncIterable)):
            raise TypeError(f"prompts must be an iterable of prompts, not {type(prompts).__name__}")
        refuse_table("prompts", prompts)
        n = 2 * self.n_seq_max if n_ahead is None else check_int("n_ahead", n_ahead, 1, 2**31 - 1)
        return self._aiter_completed(prompts, params, n, timeout, on_error)

    async def _aiter_completed(
        self,
        prompts: Iterable[Prompt] | AsyncIterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        n_ahead: int,
        timeout: float | None,
        on_error: OnError,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        options = call_options(timeout, True, on_error, "raise", names_prompts=True)
        pending = Pending[Completion](options)
        makes = amakes_of(self._request_builder, prompts, params, pending, self._long_work)
        results = self._submission.aiterate(makes, n_ahead, pending)
        async with aclosing(makes), aclosing(results):
            async for index, result in results:
                yield index, result

    @overload
    async def ascore(  # type: ignore[overload-overlap]
        self, prompt: Prompt, continuation: Prompt, *, timeout: float | None = None, block: bool = True
    ) -> Score: ...

    @overload
    async def ascore(  # type: ignore[overload-overlap]
        self,
        prompt: Prompt | Sequence[Prompt],
        continuation: Sequence[Prompt],
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> list[Score]: ...

    @overload
    async def ascore(
        self,
        prompt: Sequence[Prompt],
        continuation: Sequence[Sequence[Prompt]],
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> list[list[Score]]: ...

    @overload
    async def ascore(
        self,
        prompt: Sequence[Prompt],
        continuation: Sequence[Prompt | Sequence[Prompt]],
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> list[Score | list[Score]]: ...

    @explains_options()
    async def ascore(
        self,
        prompt: Prompt | Sequence[Prompt],
        continuation: Prompt | Sequence[Prompt | Sequence[Prompt]],
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> Score | list[Score] | list[list[Score]] | list[Score | list[Score]]:
        """``score`` for asyncio. Cancelling the task cancels its requests."""
        self._engine_thread.check_open()
        options = call_options(timeout, block, operation="score")
        job = score_job(self.model, prompt, continuation)
        makes = job.makes(self._request_builder)
        return job.result(await self._submission.acollect(makes, options))

    @explains_keywords
    def astream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        block: bool = True,
    ) -> AsyncStream:
        """``stream`` for asyncio; the request starts with the first ``__anext__``, bad arguments raise at once."""
        self._engine_thread.check_open()
        options = call_options(timeout, block)
        return self._open_astream(self._request_builder.item(prompt, params), options)

    def _open_astream(self, item: Item, options: CallOptions) -> AsyncStream:
        def make() -> tuple[Request, AsyncMailbox]:
            import asyncio

            mailbox = AsyncMailbox(asyncio.get_running_loop(), self._engine_thread.dispatcher)
            request = self._request_builder.stream(item, mailbox, BUFFER_TOKENS)
            mailbox.requests.append(request)
            observer = self._submission.observer
            if observer is not None:
                stream.observed = observer.begin([request], options.operation)
            return request, mailbox

        submit = partial(self._submission.asubmit, block=options.block)
        stream = AsyncStream(self._engine_thread, make, submit, options.deadline)
        stream.engine = self
        return stream
