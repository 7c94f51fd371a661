"""Checks what callers ask for before anything is queued, and makes requests of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from llamapipe.arguments import check_tokens
from llamapipe.engine.delivery.mailbox import Mailbox
from llamapipe.engine.delivery.sink import CompletionSink, DeltaSink, ScoreSink, Sink, TokenSink
from llamapipe.engine.frontend.sampler_factory import SamplerFactory, SamplerFactoryCache, choose_seed
from llamapipe.engine.params import SamplingParams
from llamapipe.engine.scheduler.logprob_targets import ContinuationTargets, PromptTargets
from llamapipe.engine.scheduler.prompt_group import PromptGroup
from llamapipe.engine.scheduler.request import UNLIMITED, Request
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.model import Model

Prompt = str | Sequence[int]
Item = tuple[list[int], SamplerFactory]  # a checked prompt, tokenized, and how its tokens are chosen


class RequestBuilder:
    """Checks against a model and the context length of one engine. Any thread."""

    def __init__(self, model: Model, n_ctx: int) -> None:
        self._model = model
        self._n_ctx = n_ctx
        self._eog = model.vocab.eog_tokens
        self._factories = SamplerFactoryCache(model.vocab, n_ctx)

    def items(self, prompt: Any, params: Any) -> tuple[list[Item], bool]:
        """Each prompt with its params, and whether a single prompt was given.

        Raises TypeError, ValueError, InvalidRequestError.
        """
        prompts, single = split(prompt)
        if params is None or isinstance(params, SamplingParams):
            each: Sequence[SamplingParams | None] = [params] * len(prompts)
        elif isinstance(params, (str, bytes)) or not isinstance(params, Sequence):
            raise TypeError(f"params must be SamplingParams or a list of them, not {type(params).__name__}")
        elif len(params) != len(prompts):
            raise ValueError(
                f"there are {len(prompts)} prompts and {len(params)} params; give one for all, or one for each"
            )
        else:
            each = params
        return [self.item(p, q) for p, q in zip(prompts, each, strict=True)], single

    def item(self, prompt: Any, params: SamplingParams | None) -> Item:
        """One prompt as token ids, with its params. Raises as ``items`` does."""
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        if isinstance(prompt, str) and not prompt:
            raise InvalidRequestError(
                "the prompt is empty; give at least one character or token (start from nothing with [model.bos])"
            )
        n_vocab = self._model.n_vocab
        tokens = (
            self._model.tokenize(prompt)
            if isinstance(prompt, str)
            else check_tokens("prompt", prompt, n_vocab)
        )
        if not tokens:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        if len(tokens) >= self._n_ctx:
            raise InvalidRequestError(
                f"the prompt has {len(tokens)} tokens; n_ctx is {self._n_ctx} and one must stay free for an answer: "
                "shorten it, or make the engine with a larger n_ctx"
            )
        return tokens, self._factories.sampler_factory(params)

    def completions(self, items: Sequence[Item], mailbox: Mailbox) -> list[Request]:
        """Requests answered with ``(index, Completion)``: as many of each item as its params say, in their order."""
        requests: list[Request] = []
        for tokens, sampler_factory in items:
            params = sampler_factory.params
            first = len(requests)
            seed = choose_seed(params)
            targets = (
                None if params.prompt_logprobs is None else PromptTargets(tokens, params.prompt_logprobs)
            )
            for i in range(params.n):
                request = self._request((tokens.copy(), sampler_factory), UNLIMITED, resumable=False)
                request.seed = (seed + i) % 2**64
                sink = CompletionSink(
                    mailbox, self._model.vocab.piece, tuple(params.stop), request.seed, len(requests)
                )
                sink.prompt_targets = targets
                request.sink = sink
                requests.append(request)
            requests[first].logprob_targets = targets
            if params.n > 1:
                PromptGroup(requests[first:])
        return requests

    def scores(
        self, context: Sequence[int], continuations: Sequence[Sequence[int]], mailbox: Mailbox, index: int
    ) -> Request:
        """A request answered with ``(index, the scores of each continuation)``. Raises InvalidRequestError."""
        longest = len(context) + max(len(c) for c in continuations) - 1
        if longest > self._n_ctx:
            raise InvalidRequestError(
                f"{longest + 1} tokens are to be scored together; n_ctx is {self._n_ctx} and the last is not fed: "
                "shorten them, or make the engine with a larger n_ctx"
            )
        targets = ContinuationTargets(context, continuations)
        request = Request(targets.first(), max_tokens=0)
        request.logprob_targets = targets
        request.sink = ScoreSink(mailbox, index)
        return request

    def stream(self, item: Item, mailbox: Mailbox, n_ahead: int) -> Request:
        """A request answered with deltas, at most ``n_ahead`` tokens ahead of its reader.

        Raises InvalidRequestError for params that ask for what a stream does not give.
        """
        self._check_single(item)
        return self._with(DeltaSink, self._request(item, n_ahead, resumable=False), item, mailbox)

    def generation(self, item: Item, mailbox: Mailbox) -> Request:
        """A request that waits for leave before each token, and keeps its sequence at its end.

        Raises InvalidRequestError for params that ask for what it does not give.
        """
        self._check_single(item)
        return self._with(TokenSink, self._request(item, 0, resumable=True), item, mailbox)

    def _check_single(self, item: Item) -> None:
        params = item[1].params
        if params.n > 1:
            raise InvalidRequestError(
                f"n is {params.n}; a stream is one completion: start {params.n} of them"
            )
        if params.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs come with generate(); a stream has no place for them")

    def _with(self, sink: Callable[..., Sink], request: Request, item: Item, mailbox: Mailbox) -> Request:
        request.sink = sink(mailbox, self._model.vocab.piece, tuple(item[1].params.stop))
        return request

    def _request(self, item: Item, token_budget: int, resumable: bool) -> Request:
        tokens, sampler_factory = item
        params = sampler_factory.params
        stop_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_tokens = stop_tokens | self._eog if stop_tokens else self._eog
        request = Request(tokens, params.max_tokens, stop_tokens, token_budget, resumable)
        request.sampler_factory = sampler_factory
        request.wants_logprobs = params.logprobs is not None
        request.seed = choose_seed(params)
        return request


def split(prompt: Any, name: str = "prompt", empty_ok: bool = False) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it was one prompt rather than a list of prompts.

    ``empty_ok``: an empty list is one prompt without tokens.
    """
    if isinstance(prompt, str):
        return [prompt], True
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
