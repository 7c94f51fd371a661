"""The sampling options of a request, with their names in the APIs of OpenAI, vLLM, SGLang and llama-server.

Open this file to change what a request's body may say about sampling. The fields of llamapipe's options are generated
from ``_sampling_table``. A format that the answer must match has several names, and a request may give only one. Errors
name the field as it is in the request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from llamapipe._messages import quoted
from llamapipe._sampling_table import CONSTRAINTS, OPTIONS, SAMPLER_ORDER, SWITCHES, Kind
from llamapipe.arguments import check_float
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.adapter import MOST_SCALE, Adapter
from llamapipe.params import JsonWhitespace, SamplingParams
from llamapipe.server._fields import Only, Unused
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import ApiError
from llamapipe.server.state import ServerState
from llamapipe.work.tenant import conversation

_ID_DIGITS = 10  # of a token id, which has 32 bits
_MOST_CHARACTERS = 65_536  # of all texts of one option
# The most texts of an option, and the characters of all of them. Each breaker is compared with every token of the
# vocabulary before the first step; a message is part of the answer's context.
_MOST_TEXTS = {
    "reasoning_budget_message": (1, 4096),
    "stop": (1024, _MOST_CHARACTERS),
    "bad_words": (1024, _MOST_CHARACTERS),
    "dry_sequence_breakers": (64, _MOST_CHARACTERS),
}
Tokenize = Callable[[str], list[int]]


_FIRST_WORD = re.compile(r"\w+")
_COMPACT = 'json_whitespace: "flexible" allows any usual spaces between the parts of JSON'
_TAGS = "give tools, whose calls are written in the model's format, or a grammar"


_SLOT = re.compile(r"[0-9]{1,9}|[A-Za-z][A-Za-z0-9._-]{0,63}")


def slot_name(slot: int | str | None, field: str = "id_slot") -> str:
    """Return the name of the conversation that ``id_slot`` means. Raises ApiError 400."""
    name = "0" if slot in (None, -1) else str(slot)  # -1 means any slot
    if not _SLOT.fullmatch(name):
        raise ApiError(
            400,
            f"{field} is {quoted(name[:80])}; it must be a number of at most 9 digits, or a name of at most 64 "
            "letters, digits, '.', '_' and '-' that begins with a letter",
            field,
        )
    return str(int(name)) if name.isdigit() else name


def shown_slot(name: str) -> int | str:
    """Return a conversation's name as clients see it."""
    return int(name) if name.isdigit() else name


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text, in OpenAI's form.

    ``schema`` is llama-server's. ``value`` is Text Generation Inference's, whose client is huggingface_hub's.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None
    value: dict[str, Any] | None = None

    def answer_schema(self) -> Any:
        """Return the JSON schema that the answer must match; None allows any text. Raises ApiError 400."""
        if self.type == "text":
            return None
        fields = {
            "json_schema": (self.json_schema or {}).get("schema"),
            "schema": self.schema,
            "value": self.value,
        }
        schemas = {name: schema for name, schema in fields.items() if schema is not None}
        first = next(iter(schemas), "")
        schema = schemas.get(first)
        for name, other in schemas.items():
            if other != schema:
                raise ApiError(
                    400,
                    f"response_format: {first} and {name} have different schemas; give one of them",
                    f"response_format.{name}",
                )
        if self.type == "json_object":
            return schema or {"type": "object"}
        if schema is None:
            raise ApiError(
                400, "response_format: json_schema needs a schema", "response_format.json_schema.schema"
            )
        return schema


class PredictionPart(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A part of a predicted text."""

    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text that the output is expected to resemble, in OpenAI's form."""

    type: Literal["content"]
    content: str | list[PredictionPart]


def predicted(prediction: Prediction | str | None) -> dict[str, str]:
    """Return the field of ``SamplingParams`` for a request's prediction."""
    if prediction is None:
        return {}
    text = prediction.content if isinstance(prediction, Prediction) else prediction
    return {"prediction": text if isinstance(text, str) else "".join(part.text for part in text)}


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text, in vLLM's form."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Annotated[Any, Only(instead=_TAGS)] = None
    disable_fallback: Annotated[bool | None, Only(False, True)] = None
    disable_any_whitespace: Annotated[bool | None, Only(False, True)] = None
    disable_additional_properties: Annotated[
        bool | None, Only(False, instead="put additionalProperties: false into the schema")
    ] = None
    whitespace_pattern: Annotated[str | None, Only(instead=_COMPACT)] = None


class Formats(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The formats of an answer, by llamapipe's names."""

    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    lark: str | None = None
    choice: list[str] | None = None
    json_whitespace: JsonWhitespace | None = None


class Constrained(Formats, kw_only=True):
    """The fields for the format of the answer; a request may give at most one of them."""

    response_format: ResponseFormat | None = None
    # vLLM's names, and SGLang's.
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: Annotated[str | None, Unused()] = None
    guided_whitespace_pattern: Annotated[str | None, Only(instead=_COMPACT)] = None
    structural_tag: Annotated[Any, Only(instead=_TAGS)] = None
    ebnf: str | None = None

    def constraint(self) -> Constraint | None:
        """Return the format that the answer must match. Raises ApiError 400 if two are given."""
        constraints: list[Constraint] = []
        for field, kind in _KINDS.items():
            value = getattr(self, field)
            if value is not None and value is not False:
                constraints.append(_constraint(field, kind, value))
        if self.response_format is not None:
            schema = self.response_format.answer_schema()
            if schema is not None:
                constraints.insert(0, _constraint("response_format", "json_schema", schema))
        for field, kind in _STRUCTURED.items():
            value = getattr(self.structured_outputs, field, None)
            if value is not None and value is not False:
                constraints.append(_constraint(f"structured_outputs.{field}", kind, value))
        if len(constraints) > 1:
            first, other = (constraint.field for constraint in constraints[:2])
            raise ApiError(400, f"{first} and {other} are both given; give one of them", other)
        return constraints[0] if constraints else None


class Constraint(NamedTuple):
    """A format. ``field``: the request's field; ``name``, ``value``: a field of ``SamplingParams``."""

    field: str
    name: str
    value: Any


# The kind of each field's value. "any grammar" may be Lark's or GBNF; an object without a schema is "object".
_KINDS = {
    **{name: name for name in ("json_schema", "regex", "grammar", "lark", "choice")},
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "any grammar",
    "guided_json_object": "object",
    "ebnf": "grammar",
}
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "any grammar",
    "json_object": "object",
}


def _constraint(field: str, kind: str, value: Any) -> Constraint:
    if kind == "object":
        return Constraint(field, "json_schema", {"type": "object"})
    if kind == "any grammar":
        return Constraint(field, "grammar" if "::=" in value else "lark", value)
    if kind == "json_schema" and not isinstance(value, (dict, bool, str)):
        raise ApiError(400, f"{field}: the schema must be a JSON object or a boolean", field)
    if kind == "choice" and (not value or not all(value)):
        raise ApiError(400, f"{field} must hold at least one text, and no empty one", field)
    return Constraint(field, kind, value)


# ---- all options
# A field of a request, by the kind of its option. Null: the default of ``SamplingParams``.
_TYPES: dict[Kind, Any] = {
    Kind.INT: int | None,
    Kind.FLOAT: float | None,
    Kind.FLAG: bool | None,
    Kind.TEXT: str | None,
    Kind.TEXTS: str | list[str] | None,
    Kind.TEXT_LIST: list[str] | None,
    Kind.SAMPLERS: list[str] | None,
    Kind.TOKENS: list[int] | None,
    Kind.BIASES: dict[str, float] | None,  # by token id or text
}
_IN_CONSTRAINED = frozenset(Constrained.__struct_fields__)
# The fields of a request's type that the table gives, for ``defstruct``; the formats are ``Formats``.
FROM_TABLE = [
    (name, _TYPES[option.kind], None)
    for option in OPTIONS
    for name in option.wire
    if name not in _IN_CONSTRAINED
]
if TYPE_CHECKING:

    class _Options(Constrained, kw_only=True):
        """The fields of the table that this server's modules read by name."""

        n: int | None = None
        stop: str | list[str] | None = None
        seed: int | None = None
        logit_bias: dict[str, float] | None = None
        cache_salt: str | None = None

else:
    _Options = msgspec.defstruct(
        "_Options",
        FROM_TABLE,
        bases=(Constrained,),
        module=__name__,
        kw_only=True,
        forbid_unknown_fields=True,
    )


class LoraScale(msgspec.Struct, forbid_unknown_fields=True):
    """An adapter, by its number in ``/lora-adapters`` or its name, and its scale.

    The other fields are those of that list, whose entries clients send back with another scale.
    """

    id: int | str
    scale: float = 1.0
    name: Any = None
    path: Any = None
    alora_invocation_string: Any = None
    alora_invocation_tokens: Any = None


class Sampling(_Options, kw_only=True):
    """Options that every text route accepts, from the table and from other servers; None means the default."""

    priority: Annotated[int | None, Only(0)] = None
    # vLLM's and SGLang's.
    length_penalty: Annotated[float | None, Only(1.0, 1, 0.0, 0)] = None  # of beam search
    use_beam_search: Annotated[bool | None, Only(False)] = None
    stop_regex: Annotated[Any, Only([], "", instead="give stop, or a regex that ends there")] = None
    include_stop_str_in_output: Annotated[bool | None, Only(False)] = None
    no_stop_trim: Annotated[bool | None, Only(False)] = None
    skip_special_tokens: Annotated[
        bool | None, Only(True, instead="control tokens have no text; return_token_ids has their ids")
    ] = None
    spaces_between_special_tokens: Annotated[bool | None, Only(True, False)] = None
    logits_processors: Annotated[Any, Only([], instead="give logit_bias or allowed_token_ids")] = None
    custom_logit_processor: Annotated[Any, Only(instead="give logit_bias or allowed_token_ids")] = None
    custom_params: Annotated[Any, Only({})] = None
    lora_path: Annotated[Any, Only()] = None
    session_params: Annotated[Any, Only({})] = None
    vllm_xargs: Annotated[Any, Only({})] = None
    return_hidden_states: Annotated[bool | None, Only(False)] = None
    return_routed_experts: Annotated[bool | None, Only(False)] = None
    return_cached_tokens_details: Annotated[bool | None, Unused(False)] = None
    request_id: Annotated[str | None, Unused()] = None
    rid: Annotated[Any, Unused()] = None
    session_id: Annotated[str | None, Unused()] = None
    stream_interval: Annotated[int | None, Unused(1)] = None
    kv_transfer_params: Annotated[Any, Unused({})] = None
    ec_transfer_params: Annotated[Any, Unused({})] = None
    return_mm_kwargs: Annotated[bool | None, Unused(True, False)] = None
    return_token_offsets: Annotated[bool | None, Unused(False)] = None
    routed_experts_prompt_start: Annotated[int | None, Only(0)] = None
    watermarking: Annotated[bool | None, Only(False)] = None
    truncation_side: Annotated[str | None, Only("left", instead="prompts lose their beginning")] = None
    repetition_detection: Annotated[
        Any, Only({}, instead="dry_multiplier and repeat_penalty keep the model from repeating itself")
    ] = None
    return_prompt_text: Annotated[
        bool | None,
        Only(False, instead="/apply-template writes the prompt; return_token_ids returns its ids"),
    ] = None
    bootstrap_host: Annotated[Any, Only()] = None
    bootstrap_port: Annotated[Any, Only()] = None
    bootstrap_room: Annotated[Any, Only()] = None
    data_parallel_rank: Annotated[Any, Unused()] = None
    extra_key: Annotated[Any, Only(instead="give cache_salt")] = None
    # llama-server's, with the only value that holds here.
    id_slot: Annotated[int | str | None, Unused(-1)] = None
    timings_per_token: Annotated[bool | None, Unused(False)] = None
    t_max_prompt_ms: Annotated[float | None, Unused()] = None
    n_cache_reuse: Annotated[int | None, Unused(0)] = None
    sse_ping_interval: Annotated[float | None, Unused()] = None
    backend_sampling: Annotated[bool | None, Unused(False)] = None
    verbose: Annotated[bool | None, Unused(False)] = None
    n_keep: Annotated[int | None, Only(0, -1, instead="the operator sets it: llamapipe serve --n-keep")] = (
        None
    )
    n_discard: Annotated[int | None, Only(0)] = None
    reasoning_control: Annotated[
        bool | None, Only(False, instead="reasoning_budget limits the reasoning")
    ] = None
    return_tokens: Annotated[bool | None, Only(False, instead="return_token_ids returns them")] = None
    post_sampling_probs: Annotated[bool | None, Only(False)] = None

    def params(
        self, state: ServerState, fields: Mapping[str, str] | None = None, /, **more: Any
    ) -> SamplingParams:
        """Return the options as ``SamplingParams``, with the operator's defaults.

        ``more``: further fields. ``fields``: the request's names of options that have other names there. Raises
        ApiError 400, which names the field.
        """
        vocab = state.engine.model.vocab
        tokenize = partial(vocab.tokenize, add_special=False)
        name = slot_name(self.id_slot)
        if state.settings.slot_save_path is not None:
            conversation.set(name)  # of what this task submits
        return self.params_with(state.settings.sampling or {}, tokenize, fields, **more)

    def params_with(
        self,
        defaults: Mapping[str, Any],
        tokenize: Tokenize,
        fields: Mapping[str, str] | None = None,
        /,
        **more: Any,
    ) -> SamplingParams:
        """Return the same as ``params``.

        ``tokenize``: for the keys of ``logit_bias``, which may be token ids or text.
        """
        values: dict[str, Any] = {}
        called = dict(fields or {})
        for field, name in _PASSED_ON:
            value = getattr(self, field)
            if value is None:
                continue
            if name in values:
                raise ApiError(400, f"{name} and {field} are the same option; give one")
            values[name] = value
            called.setdefault(name, field)
        constraint = self.constraint()
        if constraint is not None:
            values[constraint.name] = constraint.value
        if self.seed is not None and self.seed != -1:
            values["seed"] = self.seed % 2**64
        if self.logit_bias is not None:
            values["logit_bias"] = by_token(_biases(self.logit_bias), tokenize)
        return checked_params({**defaults, **values, **more}, called)


# The fields that are passed on as they are, with the names that ``SamplingParams`` has for them.
_READ_HERE = {"seed", "logit_bias", *CONSTRAINTS}
_PASSED_ON = [
    (field, option.name) for option in OPTIONS for field in option.wire if option.name not in _READ_HERE
]


def checked_params(values: dict[str, Any], fields: Mapping[str, str]) -> SamplingParams:
    """Return ``SamplingParams`` with these values. ``fields``: the request's names of options that differ.

    Raises ApiError 400, which names the field.
    """
    for name, limits in _MOST_TEXTS.items():
        _check_texts(fields.get(name, name), values.get(name), *limits)
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as e:
        first, space, rest = str(e).partition(" ")
        if first not in SamplingParams.__dataclass_fields__:
            raise ApiError(400, str(e)) from None
        field = fields.get(first, first)
        raise ApiError(400, field + space + rest, field) from None


def _check_texts(name: str, value: str | list[str] | None, most: int, most_characters: int) -> None:
    """Raise ApiError 400 for texts that would keep the engine busy, and other requests waiting, for long."""
    texts = [value] if isinstance(value, str) else value or []
    if len(texts) > most:
        raise ApiError(400, f"{name} has {len(texts)} texts; the limit is {most}", name)
    n_characters = sum(map(len, texts))
    if n_characters > most_characters:
        raise ApiError(400, f"{name} has {n_characters} characters; the limit is {most_characters}", name)


def _biases(logit_bias: dict[str, float]) -> Iterator[tuple[int | str, float]]:
    """Yield the biases of token ids and of texts, which are the keys that are not numbers. Raises ApiError 400."""
    for key, value in logit_bias.items():
        is_id = key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS
        if not is_id and (not key or key.removeprefix("-").isdigit()):
            raise ApiError(
                400, f"logit_bias has the key {quoted(key)}; give a token id or text", "logit_bias"
            )
        yield int(key) if is_id else key, value


def listed_biases(logit_bias: list[tuple[int | str, float | bool]]) -> Iterator[tuple[int | str, float]]:
    """Yield the biases of llama-server's list of ids or texts with a bias; False forbids a token.

    Raises ApiError 400.
    """
    for index, (key, value) in enumerate(logit_bias):
        if value is True:
            raise ApiError(
                400, f"logit_bias {index} is true; give a number, or false to forbid it", "logit_bias"
            )
        yield key, -math.inf if value is False else value


def by_token(biases: Iterable[tuple[int | str, float]], tokenize: Tokenize) -> dict[int, float]:
    """Return biases by token id; each token of a text gets its bias. Raises ApiError 400."""
    tokens: dict[int, float] = {}
    n_characters = 0
    for key, bias in biases:
        if isinstance(key, int):
            tokens[key] = bias
            continue
        n_characters += len(key)
        if n_characters > _MOST_CHARACTERS:
            raise ApiError(
                400,
                f"logit_bias has keys of more than {_MOST_CHARACTERS} characters; that is the limit",
                "logit_bias",
            )
        try:
            tokens.update(dict.fromkeys(tokenize(key), bias))
        except ValueError as e:
            raise ApiError(400, f"logit_bias: {e}", "logit_bias") from None
    return tokens


def take_random_seed(request: Sampling, random_seed: int | None) -> None:
    """Use ``random_seed``, Mistral's name of the field, as the seed. Raises ApiError 400."""
    if random_seed is None:
        return
    if request.seed is not None:
        raise ApiError(400, "seed and random_seed are the same option; give one", "random_seed")
    request.seed = random_seed


# ---- llama-server's samplers
_ALIASES = {
    "typ_p": "typical_p",
    "typ": "typical_p",
    "typical": "typical_p",
    "temp": "temperature",
    "nucleus": "top_p",
}
_LETTERS = {
    "e": "penalties", "d": "dry", "s": "top_n_sigma", "k": "top_k", "y": "typical_p", "p": "top_p", "m": "min_p",
    "x": "xtc", "t": "temperature", "i": "infill", "a": "adaptive_p",
}  # fmt: skip
_BY_BARE_NAME = {
    name.replace("_", ""): name for name in SAMPLER_ORDER
}  # llama-server takes top-k and topk, too
_MOST_SAMPLERS = 64


def sampler_names(samplers: Sequence[str] | str) -> list[str]:
    """Return the ``sampler_order`` for a list of llama-server's sampler names, or a text of its letters.

    Raises ApiError 400. ``adaptive_p`` is left out: here ``adaptive_target`` alone turns it on, as the last sampler.
    """
    if len(samplers) > _MOST_SAMPLERS:
        raise ApiError(400, f"samplers has {len(samplers)} names; the limit is {_MOST_SAMPLERS}", "samplers")
    names: list[str] = []
    for word in samplers:
        if isinstance(samplers, str):
            name = _LETTERS.get(word)
        else:
            plain = word.lower().replace("-", "_")
            name = _ALIASES.get(plain) or _BY_BARE_NAME.get(plain.replace("_", ""))
            name = "adaptive_p" if plain.replace("_", "") == "adaptivep" else name
        if name is None:
            known = ", ".join(_LETTERS) if isinstance(samplers, str) else ", ".join(SAMPLER_ORDER)
            raise ApiError(400, f"samplers holds {quoted(word)}; it may hold {known}", "samplers")
        if name != "adaptive_p" and name not in names:
            names.append(name)
    return names


def chosen_samplers(exchange: Exchange, request: Sampling, samplers: Sequence[str] | str) -> dict[str, Any]:
    """Return the fields of ``SamplingParams`` for ``samplers``. Raises ApiError 400.

    Options whose sampler is left out have no effect and are reported as unused, because editors send them.
    """
    if getattr(request, "sampler_order", None) is not None:
        raise ApiError(400, "sampler_order and samplers are the same option; give one", "samplers")
    order = sampler_names(samplers)
    unused = [
        field
        for name in SAMPLER_ORDER
        if name not in order
        for option in SWITCHES[name]
        for field in (option, "repetition_penalty")
        if getattr(request, field, None) is not None and (field == option or name == "penalties")
    ]
    for field in dict.fromkeys(unused):
        setattr(request, field, None)
    exchange.note_unused(tuple(dict.fromkeys(unused)))
    return {"sampler_order": order, **({"infill": True} if "infill" in order else {})}


# ---- errors
def with_field(error: InvalidRequestError, field: str) -> ApiError | InvalidRequestError:
    """Return the error with the field that it is about, or unchanged if that is not known.

    ``field``: the request's field that holds the constraint. The engine knows only ``SamplingParams``. A request may
    use another name for its JSON schema, and the engine merges the schema and the tools of a chat into one Lark grammar
    before it compiles them.
    """
    text = str(error)
    match = _FIRST_WORD.match(text)
    word = "" if match is None else match[0]
    if word in CONSTRAINTS and word != field:
        what = {"json_schema": "the JSON schema", "regex": "the regex"}.get(word, "the grammar")
        return ApiError(400, f"{field}: {what}{text[len(word) :]}", field.partition(":")[0])
    if word == field or word in SamplingParams.__dataclass_fields__:
        return ApiError(400, text, word)
    return ApiError(400, text, "tools") if word in ("tool", "tools") else error


def adapters_of(state: ServerState, name: str | None, chosen: Sequence[LoraScale] | None) -> dict[str, Any]:
    """Return the field of ``SamplingParams`` that a model's name or ``lora`` asks for. Raises ApiError 400."""
    named = state.adapter_of(name)
    if chosen is None:
        return dict(named)
    if named:
        raise ApiError(400, "model is the name of an adapter, and lora chooses others; give one", "lora")
    there = state.loras
    scales: dict[Adapter, float] = {}
    for lora in chosen:
        numbers = range(len(there)) if isinstance(lora.id, int) else (adapter.name for adapter in there)
        at = next((i for i, known in enumerate(numbers) if known == lora.id), None)
        if at is None:
            raise ApiError(
                400,
                f"there is no adapter {quoted(lora.id)}; "
                + (f"GET /lora-adapters lists {len(there)}" if there else "start with --lora NAME=FILE"),
                "lora",
            )
        if there[at] in scales:
            raise ApiError(400, f"lora names the adapter {quoted(lora.id)} twice", "lora")
        try:
            scales[there[at]] = check_float(
                f"lora: the scale of {quoted(lora.id)}", lora.scale, -MOST_SCALE, MOST_SCALE
            )
        except ValueError as e:
            raise ApiError(400, str(e), "lora") from None
    return {"adapter": scales or None}
