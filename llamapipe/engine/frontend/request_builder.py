"""Checks prompts and params before anything is queued, and makes requests of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex, TypeAlias

from llamapipe._engine.request import UNLIMITED, Request, RequestSpec
from llamapipe._engine.scoring import ContinuationTargets, PromptTargets
from llamapipe.arguments import check_tokens, from_column
from llamapipe.engine.delivery.mailbox import Mailbox
from llamapipe.engine.delivery.sink import (
    Choices,
    CompletionSink,
    DeltaSink,
    Piece,
    ScoreSink,
    Sink,
    TokenSink,
)
from llamapipe.engine.frontend.tenant import cache_key, grammar_limit, tenant
from llamapipe.engine.params import SamplingParams
from llamapipe.engine.sampling.background import GrammarBudget
from llamapipe.engine.sampling.factory import SamplerFactory, SamplerFactoryCache, choose_seed
from llamapipe.errors import InvalidRequestError, LlamapipeError
from llamapipe.llama.model import Model

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]"
Prompt: TypeAlias = "str | TokenIds"


Groups: TypeAlias = (
    "Mapping[int, Sequence[Request]]"  # the requests that are answered together with (index, result)
)
Make: TypeAlias = "Callable[[Mailbox], Groups]"

PORTION = 256  # requests of a long list that are created and submitted together
_MOST_BYTES = 8  # tokens whose bytes may end with half a character


class Item(NamedTuple):
    """A checked prompt: its tokens, the factory of its samplers, and the pieces its answer's text is made of.

    ``piece``: the bytes of a token; None: the vocabulary's, in which control tokens have no text. ``budget``: the time
    for the constraint, of which compiling it has taken some.
    """

    tokens: list[int]
    sampler_factory: SamplerFactory
    piece: Piece | None = None
    budget: GrammarBudget | None = None


class RequestBuilder:
    """Checks against a model and the context length of one engine. Any thread.

    ``n_sharing``: how many requests of a call may share a prompt's cells and run at the same time; 1: no sharing.
    """

    def __init__(self, model: Model, n_ctx: int, n_sharing: int = 1) -> None:
        self._model = model
        self.n_ctx = n_ctx
        self.n_sharing = n_sharing
        self._eog = model.vocab.eog_tokens
        self._factories = SamplerFactoryCache(model.vocab, n_ctx)

    def check_params(self, params: SamplingParams) -> None:
        """Looks params up in the vocabulary and compiles their constraint. Raises as ``item`` does."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        self._compiled(params)

    def _compiled(self, params: SamplingParams) -> tuple[SamplerFactory, GrammarBudget | None]:
        """The factory for params, and what is left for their constraint. Raises as ``item`` does, DecodeError."""
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

    def items(self, prompt: Any, params: Any, on_error: str = "raise") -> tuple[list[Item | Exception], bool]:
        """Each prompt with its params, and whether a single prompt was given.

        Raises TypeError, ValueError, InvalidRequestError; errors in a list name the prompt's index. With ``on_error``
        ``"return"``, an InvalidRequestError is in the place of its prompt instead.
        """
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
    ) -> Item | Exception:
        """``item`` for the prompt at ``index`` of a list; what it raises names the index, or is returned."""
        try:
            return self.item(prompt, params)
        except (TypeError, ValueError) as e:
            error = e if index is None else named(e, index)
            if on_error == "return" and isinstance(error, InvalidRequestError):
                return error
            raise error from None

    def item(self, prompt: Any, params: SamplingParams | None) -> Item:
        """One prompt as token ids, with its params. Raises as ``items`` does."""
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        if isinstance(prompt, str) and not prompt:
            raise InvalidRequestError(
                "the prompt is empty; give at least one character or token (the BOS token, to start from nothing)"
            )
        if isinstance(prompt, str):
            self._refuse_long_text(prompt)
            self._model.chat_prompts.warn_of_control_text(prompt)
        n_vocab = self._model.n_vocab
        tokens = (
            self._model.tokenize(prompt)
            if isinstance(prompt, str)
            else check_tokens("prompt", prompt, n_vocab)
        )
        if not tokens:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        if len(tokens) >= self.n_ctx:
            self._refuse_ids(len(tokens))
        factory, budget = self._compiled(params)
        return Item(tokens, factory, budget=budget)

    def _refuse_long_text(self, prompt: str) -> None:
        """Refuses a text whose length alone shows that it has too many tokens: tokenizing it would take long."""
        if len(prompt) < self.n_ctx:
            return
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

    def completions(self, items: Sequence[Item | Exception]) -> Iterator[Make]:
        """Yields functions that each create the requests of a portion of the items. Skips items that are errors."""
        portion: dict[int, Item] = {}
        n = 0
        for index, item in enumerate(items):
            if isinstance(item, Exception):
                continue
            portion[index] = item
            n += item.sampler_factory.params.n
            if n >= PORTION:
                yield partial(self._completions, portion)
                portion, n = {}, 0
        if portion:
            yield partial(self._completions, portion)

    def _completions(self, items: Mapping[int, Item], mailbox: Mailbox) -> dict[int, list[Request]]:
        return {index: self.completion(item, mailbox, index) for index, item in items.items()}

    def one_completion(self, item: Item, index: int, mailbox: Mailbox) -> dict[int, list[Request]]:
        """``completions`` for the item at ``index``."""
        return {index: self.completion(item, mailbox, index)}

    def completion(self, item: Item, mailbox: Mailbox, index: int) -> list[Request]:
        """The ``n`` requests of one item, answered together with ``(index, Completion)``."""
        tokens, params = item.tokens, item.sampler_factory.params
        piece, stops = self._text_of(item)
        seed = choose_seed(params)
        targets = None if params.prompt_logprobs is None else PromptTargets(tokens, params.prompt_logprobs)
        choices = Choices(mailbox, index, params.n, targets)
        spec = self._spec(item, UNLIMITED)._replace(caller=mailbox)
        requests: list[Request] = []
        for i in range(params.n):
            own = (seed + i) % 2**64
            sink = CompletionSink(choices, piece, stops, own, i)
            requests.append(
                Request(
                    tokens.copy(), spec._replace(seed=own, sink=sink, logprob_targets=None if i else targets)
                )
            )
        return requests

    def scores(
        self,
        context: Sequence[int],
        continuations: Sequence[Sequence[int]],
        mailbox: Mailbox,
        index: int,
        salt: str | None = None,
        keeps_cells: bool = False,
    ) -> Request:
        """A request answered with ``(index, scores of each continuation)``. Raises InvalidRequestError."""
        self.check_scores(context, continuations)
        targets = ContinuationTargets(context, continuations)
        spec = RequestSpec(
            max_tokens=0,
            logprob_targets=targets,
            caller=mailbox,
            share=tenant.get().share,
            cache_key=cache_key(salt),
            keeps_cells=keeps_cells,
            sink=ScoreSink(mailbox, index),
        )
        return Request(targets.first(), spec)

    def check_scores(self, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
        """Raises InvalidRequestError for texts that are too long to be scored."""
        longest = len(context) + max(map(len, continuations)) - 1
        if longest > self.n_ctx:
            raise InvalidRequestError(
                f"prompt and continuation have {longest + 1} tokens; n_ctx is {self.n_ctx}, and all but the last "
                "must fit: shorten them, or raise n_ctx"
            )

    def stream(self, item: Item, mailbox: Mailbox, n_ahead: int) -> Request:
        """A request answered with deltas, at most ``n_ahead`` tokens ahead of its reader.

        Raises InvalidRequestError for params that a stream does not support.
        """
        self._check_single(item)
        return Request(item.tokens, self._spec(item, n_ahead, DeltaSink(mailbox, *self._text_of(item))))

    def generation(self, item: Item, mailbox: Mailbox) -> Request:
        """A request that generates one token per ``resume``, and keeps its sequence at its end.

        Raises InvalidRequestError for params that a generation does not support.
        """
        self._check_single(item)
        spec = self._spec(item, 0, TokenSink(mailbox, *self._text_of(item)), resumable=True)
        return Request(item.tokens, spec)

    def restored(self, item: Item, mailbox: Mailbox, n_prompt: int) -> Request:
        """``generation`` for a sequence whose tokens after the first ``n_prompt`` were generated."""
        self._check_single(item)
        sink = TokenSink(mailbox, *self._text_of(item))
        pieces = [self._model.vocab.piece(token) for token in item.tokens[n_prompt:][-_MOST_BYTES:]]
        sink.continue_character(b"".join(pieces))
        n_generated = len(item.tokens) - n_prompt
        spec = self._spec(item, n_generated, sink, resumable=True)
        return Request(item.tokens, spec._replace(n_generated=n_generated))

    def prefix(self, tokens: list[int], mailbox: Mailbox, salt: str | None) -> Request:
        """A request that computes these tokens and keeps its cells; answered as ``scores``."""
        return self.scores(tokens, [[0]], mailbox, 0, salt, keeps_cells=True)

    def _check_single(self, item: Item) -> None:
        params = item.sampler_factory.params
        if params.n > 1:
            raise InvalidRequestError(
                f"n is {params.n}; a stream is one completion: start {params.n} streams, or use generate()"
            )
        if params.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs come with generate(); streams do not return them")

    def _text_of(self, item: Item) -> tuple[Piece, tuple[str, ...]]:
        """The pieces of an item's text, and its stop strings."""
        return item.piece or self._model.vocab.piece, tuple(item.sampler_factory.params.stop or ())

    def _spec(
        self, item: Item, token_budget: int, sink: Sink | None = None, resumable: bool = False
    ) -> RequestSpec:
        params = item.sampler_factory.params
        stop_tokens = frozenset(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_tokens = stop_tokens | self._eog if stop_tokens else self._eog
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
            cache_key=cache_key(params.cache_salt),
            wants_logprobs=params.logprobs is not None,
            priority=params.priority,
            share=tenant.get().share,
        )


def named(error: BaseException, index: int) -> BaseException:
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
