"""Options of a request: how its tokens are sampled and when it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from llamapipe._messages import did_you_mean, explains_fields, quoted
from llamapipe._sampling_table import BY_NAME, CONSTRAINTS, OPTIONS, SAMPLER_ORDER, SWITCHES, Kind
from llamapipe.arguments import FrozenDict, check_flag, check_float, check_int
from llamapipe.llama.adapter import Adapter, ControlVector, check_choice_of_adapter
from llamapipe.structured.schema import WHITESPACE, check_depth, closed_objects

_INT32_MAX = 2**31 - 1
_MOST_CHARACTERS = 2**17  # limit for all texts of one option together
_MOST_SALT = 1024
# Far above any logit, and far below the values that make a float32 logit infinite.
_MAX_BIAS = 1e6

LogitsProcessor = (
    Callable[[npt.NDArray[np.float32]], object] | Callable[[list[int], npt.NDArray[np.float32]], object]
)

JsonWhitespace = Literal["spaced", "compact", "flexible"]


@runtime_checkable
class HasJsonSchema(Protocol):
    """A class that knows its JSON schema, such as a pydantic model."""

    def model_json_schema(self) -> Mapping[str, object]:
        """Return the schema as a dict."""


@explains_fields
@dataclass(frozen=True)
class SamplingParams:
    """Options of one request. Frozen; any number of requests and threads may use the same object.

    Forbidden tokens are masked first, then ``logit_bias`` is added, then the samplers of ``sampler_order`` run, by
    default in llama.cpp's order. Sampler names, meanings and defaults are llama.cpp's.

    - ``max_tokens``: maximum number of generated tokens; None: no limit but the context. ``min_tokens``:
      end-of-generation and stop tokens are masked until this many tokens have been generated, unless a constraint
      leaves no other token.
    - ``reasoning_budget``: in chats, the maximum number of reasoning tokens. When they are used up, the template's own
      marker ends the reasoning, after ``reasoning_budget_message`` if that is given, and the answer follows. None or
      -1: no limit. It has no effect in a model that does not reason.
    - ``temperature``: 0 takes the most probable token (on ties the lowest id) and applies no truncation.
      ``dynatemp_range``, ``dynatemp_exponent``: vary the temperature with the entropy, by up to this range.
    - ``top_k`` (0 or -1: all), ``top_p``, ``min_p``, ``typical_p``, ``top_n_sigma`` (0 or less: off) and
      ``xtc_probability`` with ``xtc_threshold`` remove candidates. ``min_keep``: the minimum number of candidates that
      ``top_p``, ``min_p``, ``typical_p`` and XTC leave.
    - ``repeat_penalty``, ``presence_penalty``, ``frequency_penalty`` look at the last ``repeat_last_n`` tokens,
      including the prompt's (-1: all of them, 0: none).
    - ``dry_multiplier`` (0: off), ``dry_base``, ``dry_allowed_length``, ``dry_penalty_last_n`` (-1: all) and
      ``dry_sequence_breakers``: lower the logits of tokens that would continue a repetition.
    - ``mirostat``: 1 or 2, with ``mirostat_tau`` and ``mirostat_eta``, replaces all samplers that remove candidates.
      ``adaptive_target`` (below 0: off) with ``adaptive_decay`` samples at the end. ``infill``: llama.cpp's sampler for
      filling in the middle, which ``Engine.infill`` does not turn on.
    - ``sampler_order``: the samplers to apply, names of ``SAMPLER_ORDER``, in this order; samplers not listed are
      skipped.
    - ``logit_bias``: maps token ids to numbers added to their logits; ``float("-inf")`` forbids a token, other numbers
      are at most a million. ``allowed_token_ids``: only these tokens are sampled. ``bad_words``: texts that are never
      generated, tokenized alone or after a space.
    - ``logits_processors``: callables that change a row, float32 ``(n_vocab,)``, in place, in a thread of the engine;
      if a callable raises, its request fails. A callable with two parameters gets the tokens so far, including the
      prompt's, and the row; it must not change the list.
    - ``grammar`` (GBNF of llama.cpp), or one of ``json_schema`` (a dict, JSON text, or a class with
      ``model_json_schema()`` such as a pydantic model, whose objects get no further properties unless it says so),
      ``regex``, ``lark`` and ``choice`` (texts, one of which is the output; with the extra ``structured``): a format
      that the text must match. If no text of ``choice`` begins with a space, the model may write one before it; its
      token is among the ids and log-probabilities, but the space is not in the text. ``grammar_timeout``: seconds of
      processor time that one request may spend on this format; None: no limit.
    - ``json_whitespace``: the whitespace in JSON that follows ``json_schema``. "spaced": one space after each colon and
      comma, as ``json.dumps`` writes them. "compact": none. "flexible": one or two spaces, or a newline and an
      indentation, may separate its parts; a model can then waste tokens on whitespace.
    - ``logprobs``: how many of the most probable tokens to report with each generated token; None: no
      log-probabilities. They are natural logarithms of the model's own probabilities, before any of the above.
      ``prompt_logprobs``: the same for the prompt's tokens.
    - ``n``: number of choices for each prompt; choices that run together compute the prompt once.
    - ``seed``: None or -1 means a random seed, reported in ``Choice.seed``. The i-th choice has ``seed + i``.
    - ``stop``: a string, or several, that end the text before them; ``stop_token_ids``: tokens that end it.
    - ``ignore_eos``: never sample a token that ends generation.
    - ``priority``: requests with a higher priority are admitted and computed first, and preempt others if slots or
      cells run short. ``cache``: share KV cells of equal prefixes with other requests; see ``Engine``. ``cache_salt``:
      a text; only requests with the same salt share cells, so nobody without it can infer these prompts from response
      times or ``n_cached_tokens``. None: share with all requests that have no salt.
    - ``prediction``: a text that the output is expected to resemble, such as a file with a few changes. The prediction
      saves steps where it matches, and never changes the output. ``speculate``: which guessed tokens steps also compute
      if that saves time. None: guesses come from the constraint, the prediction, the prompt, the output, and the
      engine's draft model. "ngram": not from the draft model. "draft": not from the prompt and the output. "off": no
      guesses.
    - ``adapter``: a LoRA or a control vector that the model has loaded (``Model.load_adapter``,
      ``load_control_vector``), by its name or as an object; or a mapping of several adapters to their scales. None: the
      model alone. On CPUs, requests with different LoRAs share steps; other sets take turns.

    Raises ValueError or TypeError naming the field. ``docs/sampling.md`` has the ranges.
    """

    max_tokens: int | None = 256
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    min_keep: int = 0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    reasoning_budget: int | None = None
    reasoning_budget_message: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: str | None = None
    json_schema: Mapping[str, object] | str | bool | HasJsonSchema | None = None
    regex: str | None = None
    lark: str | None = None
    choice: Sequence[str] | None = None
    json_whitespace: JsonWhitespace = "spaced"
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] | None = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    sampler_order: Sequence[str] | None = None
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    infill: bool = False
    priority: int = 0
    cache: bool = True
    grammar_timeout: float | None = 30.0
    cache_salt: str | None = None
    speculate: Literal["off", "ngram", "draft"] | None = None
    prediction: str | None = None
    adapter: str | Adapter | ControlVector | Mapping[Any, float] | None = None

    # Adapters, and classes with a schema.
    __pydantic_config__ = MappingProxyType({"arbitrary_types_allowed": True})

    def __post_init__(self) -> None:
        if self.max_tokens == -1:
            raise ValueError("max_tokens is -1; it must be from 1 to 2147483647, or None for no limit")
        for name, check, option in _CHECKS:
            value = getattr(self, name)
            if value is not None or not option.optional:
                self._set(name, check(name, value, option.low, option.high))
        self._set("top_k", max(self.top_k, 0))
        for name in ("seed", "reasoning_budget"):
            self._set(name, None if getattr(self, name) == -1 else getattr(self, name))
        check_salt(self.cache_salt)
        if self.speculate not in (None, "off", "ngram", "draft"):
            raise ValueError(
                f"speculate is {quoted(self.speculate)}; it must be 'off', 'ngram' or 'draft', or left out"
            )
        for name in ("prediction", "reasoning_budget_message"):
            text = getattr(self, name)
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{name} must be a str or None, not {type(text).__name__}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}"
            )
        if self.adapter is not None:
            self._set("adapter", check_choice_of_adapter(self.adapter))
        self._check_processors()
        self._check_constraints()
        self._check_order()
        if self.allowed_token_ids == ():
            raise ValueError(
                "allowed_token_ids is empty, so no token could be sampled; None allows every token"
            )
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(
                    f"logit_bias must map token ids to numbers, not be a {type(self.logit_bias).__name__}"
                )
            self._set("logit_bias", FrozenDict(_biases(dict(self.logit_bias))))

    def __hash__(self) -> int:
        biases = None if self.logit_bias is None else frozenset(self.logit_bias.items())
        return hash((_HASHED(self), biases))

    def __reduce__(self) -> Any:  # so that unpickling checks the values
        return _rebuild, ({name: getattr(self, name) for name in self.__dataclass_fields__},)

    def _check_processors(self) -> None:
        processors = tuple(_items("logits_processors", self.logits_processors))
        for processor in processors:
            if not callable(processor):
                raise TypeError(f"logits_processors must hold callables, not {type(processor).__name__}")
        self._set("logits_processors", processors)

    def _check_constraints(self) -> None:
        constraints = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(constraints) > 1:
            raise ValueError(
                f"{constraints[0]} and {constraints[1]} are both given; a text can follow only one of them"
            )
        for name in ("grammar", "regex", "lark"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a str, not {type(value).__name__}")
        if self.json_whitespace not in WHITESPACE:
            kinds = list(map(repr, WHITESPACE))
            raise ValueError(
                f"json_whitespace is {quoted(self.json_whitespace)}; it must be {', '.join(kinds[:-1])} or {kinds[-1]}"
            )
        if self.choice is not None:
            choices = _text_list("choice", _items("choice", self.choice))
            if not choices:
                raise ValueError("choice is empty, so no text could be generated; give one text or more")
            self._set("choice", choices)
        schema = self.json_schema
        if schema is None or isinstance(schema, str):
            return
        if isinstance(schema, HasJsonSchema):
            schema = closed_objects(dict(schema.model_json_schema()))
        if not isinstance(schema, (bool, Mapping)):
            raise TypeError(
                "json_schema must be a dict, JSON text, or a class with model_json_schema(), "
                f"not {type(schema).__name__}"
            )
        check_depth("json_schema is", schema)
        try:
            self._set("json_schema", json.dumps(schema if isinstance(schema, bool) else dict(schema)))
        except (TypeError, ValueError, RecursionError) as e:
            raise ValueError(f"json_schema cannot be written as JSON: {e}") from None

    def _check_order(self) -> None:
        if self.sampler_order is None:
            return
        order = tuple(_items("sampler_order", self.sampler_order))
        for i, name in enumerate(order):
            if name not in SAMPLER_ORDER:
                hint = did_you_mean(str(name), SAMPLER_ORDER)
                raise ValueError(
                    f"sampler_order holds {quoted(name)}; it may hold {', '.join(SAMPLER_ORDER)}{hint}"
                )
            if name in order[:i]:
                raise ValueError(f"sampler_order holds {quoted(name)} twice")
        for name in SAMPLER_ORDER:
            if name in order:
                continue
            changed = [f for f in SWITCHES[name] if getattr(self, f) != getattr(SamplingParams, f)]
            if changed:
                raise ValueError(
                    f"{changed[0]} is given, but sampler_order leaves {quoted(name)} out; add it there"
                )
        self._set("sampler_order", order)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_HASHED = attrgetter("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop")


def check_salt(value: object) -> str | None:
    """Check a ``cache_salt`` and return it. Raises TypeError, ValueError."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"cache_salt must be a str or None, not {type(value).__name__}")
    if not 0 < len(value) <= _MOST_SALT:
        raise ValueError(
            f"cache_salt has {len(value)} characters; leave it out for the common cache, or give 1 to {_MOST_SALT}"
        )
    return value


def _rebuild(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _items(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)):
        raise TypeError(f"{name} must be a sequence, not {type(value).__name__}")
    try:
        return list(value)
    except TypeError:
        raise TypeError(f"{name} must be a sequence, not {type(value).__name__}") from None


def _strings(name: str, value: Any, *_: float) -> tuple[str, ...]:
    """Return ``value`` as a tuple of texts. None, which other libraries use for no texts, gives an empty tuple."""
    return () if value is None else _text_list(name, value)


def _text_list(name: str, value: Any, *_: float) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else _items(name, value)
    for s in strings:
        if not isinstance(s, str):
            raise TypeError(f"{name} must hold strings, not {type(s).__name__}")
        if not s:
            raise ValueError(f"{name} holds an empty string, which is in every text; leave it out")
    n_characters = sum(map(len, strings))
    if n_characters > _MOST_CHARACTERS:
        raise ValueError(f"{name} has {n_characters} characters in all; the limit is {_MOST_CHARACTERS}")
    return tuple(strings)


def _tokens(name: str, value: Any, *_: float) -> tuple[int, ...]:
    values = _items(name, () if value is None else value)
    if set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) <= _INT32_MAX)):
        return tuple(values)  # checking each value would take long for a whole vocabulary
    return tuple(check_int(f"a token id of {name}", value, 0, _INT32_MAX) for value in values)


def _biases(logit_bias: dict[Any, Any]) -> dict[int, float]:
    tokens, values = _tokens("logit_bias", list(logit_bias)), list(logit_bias.values())
    if not (
        set(map(type, values)) <= {int, float}
        and all(-_MAX_BIAS <= v <= _MAX_BIAS or v == -inf for v in values)
    ):
        values = [_bias(f"logit_bias of token {t}", v) for t, v in zip(tokens, values, strict=True)]
    return dict(zip(tokens, map(float, values), strict=True))


def _bias(name: str, value: Any) -> float:
    """Return ``value`` as a number that may be added to a logit. Raises TypeError and ValueError that name it."""
    if isinstance(value, float) and value == -inf:
        return -inf
    try:
        return check_float(name, value, -_MAX_BIAS, _MAX_BIAS)
    except ValueError as e:
        raise ValueError(f"{e}, or minus infinity to forbid the token") from None


# Functions that convert an option to its plain type. Constraints, biases and orders have longer checks, above.
_CHECK_OF: dict[Kind, Callable[[str, Any, Any, Any], object]] = {
    Kind.INT: check_int,
    Kind.FLOAT: check_float,
    Kind.FLAG: lambda name, value, *_: check_flag(name, value),
    Kind.TEXTS: _strings,
    Kind.TEXT_LIST: _text_list,
    Kind.TOKENS: _tokens,
}
assert BY_NAME.keys() == SamplingParams.__dataclass_fields__.keys(), (
    "rows of _sampling_table.py and fields of SamplingParams (params.py) differ in "
    f"{sorted(BY_NAME.keys() ^ SamplingParams.__dataclass_fields__.keys())}; each option has both"
)
_CHECKS = [(option.name, _CHECK_OF[option.kind], option) for option in OPTIONS if option.kind in _CHECK_OF]
