"""Checks what callers ask for before anything is queued, and makes requests of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from llamapipe.engine.mailbox import Mailbox
from llamapipe.engine.params import SamplingParams
from llamapipe.engine.request import UNLIMITED, Request
from llamapipe.engine.sampling import choose_seed
from llamapipe.engine.sink import CompletionSink, DeltaSink, Sink, TokenSink
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.check import check_tokens
from llamapipe.llama.model import Model

Prompt = str | Sequence[int]
Item = tuple[list[int], SamplingParams]  # a checked prompt, tokenized, and its options


class Intake:
    """Checks against a model and the context length of one engine. Any thread."""

    def __init__(self, model: Model, n_ctx: int) -> None:
        self._model = model
        self._n_ctx = n_ctx
        self._eog = model.vocab.eog_tokens

    def items(self, prompt: Any, params: Any) -> tuple[list[Item], bool]:
        """Each prompt with its params, and whether a single prompt was given.

        Raises TypeError, ValueError, InvalidRequestError.
        """
        prompts, single = _split(prompt)
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
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias or ())):
            bad = [t for t in ids if t >= n_vocab]
            if bad:
                raise InvalidRequestError(
                    f"{name} holds {bad[0]}; this vocabulary has the ids 0 to {n_vocab - 1}"
                )
        return tokens, params

    def completion(self, item: Item, mailbox: Mailbox, index: int) -> Request:
        """A request answered with ``(index, Completion)``."""
        request = self._request(item, UNLIMITED, keep=False)
        request.sink = CompletionSink(
            mailbox, self._model.vocab.piece, tuple(item[1].stop), request.seed, index
        )
        return request

    def stream(self, item: Item, mailbox: Mailbox, n_ahead: int) -> Request:
        """A request answered with deltas, at most ``n_ahead`` tokens ahead of its reader."""
        return self._with(DeltaSink, self._request(item, n_ahead, keep=False), item, mailbox)

    def generation(self, item: Item, mailbox: Mailbox) -> Request:
        """A request that waits for leave before each token, and keeps its sequence at its end."""
        return self._with(TokenSink, self._request(item, 0, keep=True), item, mailbox)

    def _with(self, sink: Callable[..., Sink], request: Request, item: Item, mailbox: Mailbox) -> Request:
        request.sink = sink(mailbox, self._model.vocab.piece, tuple(item[1].stop))
        return request

    def _request(self, item: Item, limit: int, keep: bool) -> Request:
        tokens, params = item
        stop_tokens = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_tokens = stop_tokens | self._eog if stop_tokens else self._eog
        request = Request(tokens, params.max_tokens, stop_tokens, limit, keep)
        request.params = params
        request.seed = choose_seed(params)
        return request


def _split(prompt: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it was one prompt rather than a list of prompts."""
    if isinstance(prompt, str):
        return [prompt], True
    try:
        if isinstance(prompt, (bytes, bytearray, Mapping, Set)):
            raise TypeError
        items = list(prompt)
    except TypeError:
        raise TypeError(
            f"prompt must be a str, a sequence of token ids, or a list of those, not {type(prompt).__name__}"
        ) from None
    if not items:
        raise InvalidRequestError(
            "the prompt is empty; give at least one token, or a list with at least one prompt"
        )
    whole = [
        isinstance(i, (str, bytes)) or (isinstance(i, Iterable) and getattr(i, "ndim", 1) > 0) for i in items
    ]
    if all(whole):
        return items, False
    if any(whole):
        raise TypeError("prompt mixes token ids and whole prompts; give token ids, or a list of prompts")
    return [items], True
