"""Turns the prompts of a call into requests one by one, and the results into the shape of the prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

from llamapipe._engine.request import Request
from llamapipe.engine.delivery.mailbox import Mailbox
from llamapipe.engine.frontend.long_work import LongWork
from llamapipe.engine.frontend.pending import Pending
from llamapipe.engine.frontend.request_builder import Item, Make, Prompt, RequestBuilder
from llamapipe.engine.params import SamplingParams
from llamapipe.engine.results import Completion

T = TypeVar("T")


def outcome_of(
    items: Sequence[Item | Exception], results: dict[int, Any], single: bool
) -> Completion | Exception | list[Completion] | list[Completion | Exception]:
    """What ``generate`` returns: the completions and errors in the order of the prompts."""
    outcome: list[Completion | Exception] = [
        item if isinstance(item, Exception) else results[index] for index, item in enumerate(items)
    ]
    return outcome[0] if single else outcome


def makes_of(
    builder: RequestBuilder,
    prompts: Iterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
    pending: Pending[Completion],
) -> Iterator[Make]:
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
            yield partial(builder.one_completion, item, index)


async def amakes_of(
    builder: RequestBuilder,
    prompts: Iterable[Prompt] | AsyncIterable[Prompt],
    params: SamplingParams | Iterable[SamplingParams] | None,
    pending: Pending[Completion],
    long_work: LongWork,
) -> AsyncGenerator[Make, None]:
    """``makes_of`` for asyncio; long prompts are tokenized in a thread."""
    each = None if params is None or isinstance(params, SamplingParams) else iter(params)
    index = 0
    async for prompt in _async(prompts):
        its_params = params if each is None else next(each, None)
        if each is not None and its_params is None:
            raise ValueError(f"params has {index} items, and there are more prompts")
        item = await long_work.built(
            builder.item_or_error, prompt, its_params, index, pending.options.on_error
        )
        if isinstance(item, Exception):
            pending.ready.append((index, item))
            yield no_requests
        else:
            yield partial(builder.one_completion, item, index)
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
