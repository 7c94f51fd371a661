"""Turns prompts and params into checked requests.

Open this file to change what a prompt may be, when it is refused, or which fields of a request follow from params.

The principle: invalid prompts and params are refused here, before anything is queued. ``RequestBuilder`` checks a
prompt once (``CheckedPrompt``), and makes complete requests from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from time import thread_time
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

from llamapipe._engine.policy.core import UNLIMITED, Activation, Request, RequestSpec, ResultSink, Span
from llamapipe._engine.policy.scoring import ContinuationTargets, PromptTargets
from llamapipe._engine.runtime.mailboxes import Mailbox
from llamapipe._engine.runtime.samplers import SamplerFactory, SamplerFactoryCache, choose_seed
from llamapipe._engine.runtime.sinks import (
    Choices,
    CompletionSink,
    DeltaSink,
    Piece,
    ScoreSink,
    TokenSink,
)
from llamapipe._engine.runtime.snapshot import Snapshot
from llamapipe._messages import too_long
from llamapipe.arguments import check_tokens, from_column
from llamapipe.chat.options import LimitedReasoning
from llamapipe.errors import InvalidRequestError, LlamapipeError
from llamapipe.llama.adapter import AdapterChoice, AdapterSet, AnyAdapter, check_choice_of_adapter
from llamapipe.llama.model import Model
from llamapipe.params import SamplingParams
from llamapipe.results import Completion
from llamapipe.structured.budget import GrammarBudget
from llamapipe.work.tenant import cache_key, conversation, conversation_key, grammar_limit, tenant

# By index: the requests that one item (index, result) answers.
Groups: TypeAlias = "Mapping[int, Sequence[Request]]"
RequestFactory: TypeAlias = "Callable[[Mailbox], Groups]"
PORTION = 256  # requests of a long list that are created and submitted together
_MOST_BYTES = 8  # last tokens of a text to look at, whose bytes may end within a character


class CheckedPrompt(NamedTuple):
    """A checked prompt: its tokens, the factory of its samplers, and how the text of its answer is made.

    ``piece``: returns the bytes of a token of the answer. ``stops``: the strings that end the answer. ``budget``: the
    time for the constraint, minus the time that compiling took. ``spans``: the images and sounds among the tokens.
    ``places``: see ``RequestSpec``.
    """

    tokens: list[int]
    sampler_factory: SamplerFactory
    piece: Piece
    stops: tuple[str, ...]
    adapters: AdapterSet | None
    budget: GrammarBudget | None
    spans: tuple[Span, ...]
    places: tuple[int, ...] = ()

    @property
    def skip_space(self) -> bool:
        """Whether the answer may begin with a space that is not part of its text."""
        return self.sampler_factory.allows_space


class RequestBuilder:
    """Checks prompts and params against one engine's model and context length, and builds requests. Any thread.

    ``n_sharing``: how many requests of a call may share a prompt's cells and run at the same time; 1: no sharing.
    ``speculates``: whether steps may have guessed tokens. ``drafts``: whether a draft model also guesses.
    ``drafts_media``: whether the draft model guesses after images and sounds. ``allowed``: the adapters that requests
    may name; empty: all that the model has loaded. ``n_ubatch``: the maximum number of tokens that llama.cpp computes
    together. ``min_room``: see ``room``.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        n_sharing: int = 1,
        speculates: bool = False,
        drafts: bool = False,
        drafts_media: bool = False,
        allowed: Sequence[AnyAdapter] = (),
        n_ubatch: int = 0,
        min_room: int = 1,
    ) -> None:
        self._model = model
        self._allowed = tuple(allowed)
        self.n_ctx = n_ctx
        self._min_room = min_room
        self.n_ubatch = n_ubatch
        self.n_sharing = n_sharing
        self._speculates = speculates
        self._drafts, self._drafts_media = drafts, drafts_media
        self._eog = model.vocab.eog_tokens
        self._factories = SamplerFactoryCache(model.vocab, n_ctx)

    def check_params(self, params: SamplingParams) -> None:
        """Check params against the vocabulary and compile their constraint. Raises the errors of ``item``."""
        self.adapters(params)
        self._compile(params)

    @property
    def named_adapters(self) -> tuple[AnyAdapter, ...]:
        """The adapters that requests may currently name."""
        known = self._allowed or self._model.adapters.loaded()
        return tuple(adapter for adapter in known if not adapter.closed)

    def adapters(self, params: SamplingParams) -> AdapterSet | None:
        """Return the adapters that params select. Raises TypeError, InvalidRequestError."""
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        if params.adapter is None:
            return None
        return self._model.adapters.choose(params.adapter, self._allowed)

    def select_adapters(self, adapter: AdapterChoice | None) -> AdapterSet | None:
        """Return the adapters that a call's option selects. Raises TypeError, ValueError, InvalidRequestError."""
        if adapter is None:
            return None
        return self._model.adapters.choose(check_choice_of_adapter(adapter), self._allowed)

    def _compile(
        self, params: SamplingParams, reasoning: LimitedReasoning | None = None
    ) -> tuple[SamplerFactory, GrammarBudget | None]:
        """Return the factory for params, and the time left for their constraint (None: no constraint).

        Raises the errors of ``item``, DecodeError.
        """
        if params.speculate == "draft" and not self._drafts:
            raise InvalidRequestError(
                "speculate is 'draft', but the engine has no draft model; give Engine(draft=...) a smaller model of "
                "the same family, or leave speculate out"
            )
        began_s = thread_time()
        factory = self._factories.sampler_factory(params, reasoning)
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
        """Return the checked prompts with their params, and whether a single prompt was given.

        Raises TypeError, ValueError, InvalidRequestError; errors in a list name the prompt's index. With ``on_error``
        ``"return"``, an InvalidRequestError takes the place of its prompt instead.
        """
        if isinstance(prompt, str):
            prompts, single = [prompt], True
        else:
            prompt = from_column("prompt", prompt)
            self._refuse_long_ids(prompt)
            prompts, single = split_prompts(prompt)
        if params is None or isinstance(params, SamplingParams):
            all_params: Sequence[SamplingParams | None] = [params] * len(prompts)
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
            all_params = params
        if single:
            return [self.item_or_error(prompts[0], all_params[0], None, on_error)], True
        pairs = enumerate(zip(prompts, all_params, strict=True))
        return [self.item_or_error(p, q, index, on_error) for index, (p, q) in pairs], False

    def item_or_error(
        self, prompt: Any, params: SamplingParams | None, index: int | None, on_error: str
    ) -> CheckedPrompt | Exception:
        """Return ``item`` for prompt ``index`` of a list; its error names the index and is raised or returned."""
        try:
            return self.item(prompt, params)
        except (TypeError, ValueError) as e:
            error = e if index is None else with_prompt_index(e, index)
            if on_error == "return" and isinstance(error, InvalidRequestError):
                return error
            raise error from None

    def item(
        self,
        prompt: Any,
        params: SamplingParams | None,
        spans: tuple[Span, ...] = (),
        reasoning: LimitedReasoning | None = None,
    ) -> CheckedPrompt:
        """Return one checked prompt. ``spans``: the images and sounds; if given, the prompt is checked tokens.

        ``reasoning``: the markers around the reasoning that params limit. Raises the errors of ``items``.
        """
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
            if (control := chat_prompts.controls.first_in(prompt)) is not None:
                chat_prompts.warn_of_control_text(control)
            tokens = vocab.tokenize(prompt)
        elif spans:
            tokens = prompt
        else:
            tokens = check_tokens("prompt", prompt, vocab.n_vocab)
        if not tokens:
            raise InvalidRequestError("the prompt is empty; give at least one token")
        if len(tokens) + (room := self.room(params)) > self.n_ctx:
            raise InvalidRequestError(too_long(f"the prompt has {len(tokens)} tokens", self.n_ctx, room=room))
        if spans and params.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs are not supported for a prompt with images or sounds")
        adapters = self.adapters(params)
        if params.reasoning_budget is not None and reasoning is None:
            raise InvalidRequestError(
                "reasoning_budget limits the reasoning of chats, and a plain prompt has no markers of it: use "
                "engine.chat or stream_chat, or leave reasoning_budget out"
            )
        factory, budget = self._compile(params, reasoning)
        return CheckedPrompt(tokens, factory, vocab.piece, tuple(params.stop or ()), adapters, budget, spans)

    def room(self, params: SamplingParams) -> int:
        """Return how many tokens a prompt must leave for its answer: ``min_room``, but no more than ``max_tokens``."""
        most = params.max_tokens
        return self._min_room if most is None else max(min(self._min_room, most), 1)

    def _refuse_long_text(self, prompt: str) -> None:
        """Raise InvalidRequestError if a text's length alone shows that it is too long; tokenizing would take long."""
        n_least = self._model.vocab.least_tokens(len(prompt))
        if n_least >= self.n_ctx:
            raise InvalidRequestError(
                too_long(f"the prompt has {len(prompt)} characters, at least {n_least} tokens", self.n_ctx)
            )

    def _refuse_long_ids(self, prompt: Any) -> None:
        """Raise InvalidRequestError for a sequence of too many token ids. This reads only the first id."""
        if isinstance(prompt, (list, tuple)):
            first = prompt[0] if prompt else None
        elif getattr(prompt, "ndim", None) == 1:
            first = prompt[0] if len(prompt) else None
        else:
            return
        if len(prompt) >= self.n_ctx and isinstance(first, SupportsIndex):
            raise InvalidRequestError(too_long(f"the prompt has {len(prompt)} tokens", self.n_ctx))

    def completions(self, items: Sequence[CheckedPrompt | Exception]) -> Iterator[RequestFactory]:
        """Yield functions that each make the requests for a portion of the items; skip items that are errors."""
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
        """Make the ``n`` requests of each item, by index; one ``(index, Completion)`` answers those of an item."""
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
                sink = CompletionSink(choices, item.piece, item.stops, seed, i, item.skip_space)
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
        """Make a request that ``(index, scores of each continuation)`` answers. Raises InvalidRequestError.

        ``active_from``: the token from which an activated LoRA computes; None: where the context invokes the LoRA.
        """
        self.check_scores(context, continuations)
        targets = ContinuationTargets(context, continuations)
        before, activation = activation_of(adapters)
        spec = RequestSpec(
            max_tokens=0,
            logprob_targets=targets,
            caller=mailbox,
            share=tenant.get().share,
            cache_key=cache_key(salt, None if before is None else before.key),
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
        """Raise InvalidRequestError for texts that are too long to be scored."""
        longest = len(context) + max(map(len, continuations)) - 1
        if longest > self.n_ctx:
            raise InvalidRequestError(
                f"prompt and continuation have {longest + 1} tokens; n_ctx is {self.n_ctx}, and all but the last "
                "must fit: shorten them, or raise n_ctx"
            )

    def stream(self, item: CheckedPrompt, mailbox: Mailbox, n_ahead: int) -> Request:
        """Make a request that delivers deltas and runs at most ``n_ahead`` tokens ahead of its reader.

        Raises InvalidRequestError for params that a stream does not support.
        """
        self._check_single(item)
        sink = DeltaSink(mailbox, item.piece, item.stops, item.skip_space)
        return Request(item.tokens, self._spec(item, n_ahead, sink))

    def generation(self, item: CheckedPrompt, mailbox: Mailbox) -> Request:
        """Make a request that generates one token per ``resume``, and keeps its sequence when it ends.

        Raises InvalidRequestError for params that a generation does not support.
        """
        self._check_single(item)
        sink = TokenSink(mailbox, item.piece, item.stops, item.skip_space)
        spec = self._spec(item, 0, sink, resumable=True)
        return Request(item.tokens, spec)

    def restored_generation(self, item: CheckedPrompt, mailbox: Mailbox, snapshot: Snapshot) -> Request:
        """Make a request as ``generation`` does, for the sequence of a snapshot."""
        self._check_single(item)
        n_prompt = snapshot.n_prompt
        sink = TokenSink(mailbox, item.piece, item.stops, item.skip_space)
        pieces = [self._model.vocab.piece(token) for token in item.tokens[n_prompt:][-_MOST_BYTES:]]
        sink.continue_character(b"".join(pieces))
        n_generated = len(item.tokens) - n_prompt
        spec = self._spec(item, n_generated, sink, resumable=True)
        request = Request(item.tokens, spec._replace(n_generated=n_generated))
        request.active_from = snapshot.active_from
        return request

    def prefix(
        self, tokens: list[int], mailbox: Mailbox, salt: str | None, adapters: AdapterSet | None
    ) -> Request:
        """Make a request that computes these tokens and keeps its cells. Its answer is that of ``scores``."""
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
        self, item: CheckedPrompt, token_budget: int, sink: ResultSink | None = None, resumable: bool = False
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
            cache_key=cache_key(params.cache_salt, None if adapters is None else adapters.key),
            adapters=adapters,
            activation=activation,
            wants_logprobs=params.logprobs is not None,
            priority=params.priority + tenant.get().priority,
            share=tenant.get().share,
            speculates=speculates,
            unguessed=unguessed if self._speculates else "",
            drafts=speculates
            and self._drafts
            and params.speculate != "ngram"
            and (self._drafts_media or not item.spans),  # a draft model sees no images
            spans=item.spans,
            places=item.places,
            conversation=conversation_key(conversation.get()),
        )


def activation_of(adapters: AdapterSet | None) -> tuple[AdapterSet | None, Activation | None]:
    """Return the adapters that compute a text from its first token, and the activation of later ones or None."""
    if adapters is None or not adapters.invocation:
        return adapters, None
    return adapters.before, Activation(adapters, adapters.invocation)


def with_prompt_index(error: BaseException, index: int) -> BaseException:
    """Return an error of one prompt in a list, with the prompt's index in its message."""
    text = f"prompt {index} of the list"
    own = isinstance(error, LlamapipeError) or type(error) in (TypeError, ValueError)
    if own and len(error.args) == 1:
        new = type(error)(f"{error} ({text})")
        new.__cause__ = error.__cause__
        return new
    if hasattr(error, "add_note"):  # Python 3.11; a callback raised the error, so its message stays
        error.add_note(text)
    return error


def split_prompts(prompt: Any, name: str = "prompt", empty_ok: bool = False) -> tuple[list[Any], bool]:
    """Return the prompts as a list, and whether a single prompt was given.

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


def in_order_of_prompts(
    items: Sequence[CheckedPrompt | Exception], results: dict[int, Any], single: bool
) -> Completion | Exception | list[Completion] | list[Completion | Exception]:
    """Return the completions and errors in the order of the prompts, as ``generate`` returns them."""
    if single:
        return items[0] if isinstance(items[0], Exception) else results[0]
    return [item if isinstance(item, Exception) else results[index] for index, item in enumerate(items)]
