"""Sampling options of a request: those of common APIs and llamapipe's own, as ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from llamapipe.arguments import quoted
from llamapipe.params import SamplingParams
from llamapipe.server.errors import ApiError
from llamapipe.server.fields import Only, Unused
from llamapipe.server.wire.constraints import Constrained

_ID_DIGITS = 10  # of a token id, which has 32 bits
_MOST_CHARACTERS = 65_536  # of all texts of one option
# The most texts of an option. Each breaker is compared with every token of the vocabulary before the first step.
_MOST_TEXTS = {"stop": 1024, "bad_words": 1024, "dry_sequence_breakers": 64}
Tokenize = Callable[[str], list[int]]


class Sampling(Constrained, kw_only=True):
    """Options that every text route accepts; None: the default of ``SamplingParams``."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    infill: bool | None = None
    sampler_order: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    cache_prompt: bool | None = None  # llama-server's name of ``cache``
    cache_salt: str | None = None
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
    kv_transfer_params: Annotated[Any, Unused({})] = None
    bootstrap_host: Annotated[Any, Only()] = None
    bootstrap_port: Annotated[Any, Only()] = None
    bootstrap_room: Annotated[Any, Only()] = None
    data_parallel_rank: Annotated[Any, Unused()] = None
    extra_key: Annotated[Any, Only(instead="give cache_salt")] = None
    # llama-server's, with the only value that holds here.
    id_slot: Annotated[int | None, Only(-1)] = None
    timings_per_token: Annotated[bool | None, Only(False)] = None
    return_tokens: Annotated[bool | None, Only(False, instead="return_token_ids returns them")] = None
    post_sampling_probs: Annotated[bool | None, Only(False)] = None

    def params(self, tokenize: Tokenize, **more: Any) -> SamplingParams:
        """The options as ``SamplingParams``; ``more``: further fields of it.

        ``tokenize``: for the keys of ``logit_bias``, which may be token ids or text. Raises ApiError 400, which names
        the field.
        """
        values: dict[str, Any] = {
            name: value for name in _SAME_NAME if (value := getattr(self, name)) is not None
        }
        if self.repetition_penalty is not None:
            if self.repeat_penalty is not None:
                raise ApiError(400, "repeat_penalty and repetition_penalty are the same option; give one")
            values["repeat_penalty"] = self.repetition_penalty
        if self.cache_prompt is not None:
            values["cache"] = self.cache_prompt
        if self.json_whitespace is not None:
            values["json_whitespace"] = self.json_whitespace
        constraint = self.constraint()
        if constraint is not None:
            values[constraint.name] = constraint.value
        if self.seed is not None and self.seed != -1:
            values["seed"] = self.seed % 2**64
        if self.logit_bias is not None:
            values["logit_bias"] = _biases(self.logit_bias, tokenize)
        values.update(more)
        return checked_params(values)


# Fields that are passed on as they are; a name that is missing here would be ignored, so no list is kept by hand.
_SAME_NAME = [
    name
    for name in Sampling.__struct_fields__
    if name in SamplingParams.__dataclass_fields__
    and name not in ("seed", "logit_bias", "priority", *Constrained.__struct_fields__)
]


def checked_params(values: dict[str, Any]) -> SamplingParams:
    """``SamplingParams`` of these fields. Raises ApiError 400, which names the field."""
    for name, most in _MOST_TEXTS.items():
        _check_texts(name, values.get(name), most)
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as e:
        message = str(e)
        first = message.partition(" ")[0]
        raise ApiError(
            400, message, first if first in SamplingParams.__dataclass_fields__ else None
        ) from None


def _check_texts(name: str, given: str | list[str] | None, most: int) -> None:
    """Raises ApiError 400 for texts that would keep the engine, and so all other requests, busy for long."""
    texts = [given] if isinstance(given, str) else given or []
    if len(texts) > most:
        raise ApiError(400, f"{name} has {len(texts)} texts; the limit is {most}", name)
    n_characters = sum(map(len, texts))
    if n_characters > _MOST_CHARACTERS:
        raise ApiError(400, f"{name} has {n_characters} characters; the limit is {_MOST_CHARACTERS}", name)


def _biases(given: dict[str, float], tokenize: Tokenize) -> dict[int, float]:
    """Biases by token id. A key that is not a number is text; each of its tokens gets the bias. Raises ApiError 400."""
    biases: dict[int, float] = {}
    n_characters = 0
    for key, value in given.items():
        if key.isascii() and key.isdigit() and len(key) <= _ID_DIGITS:
            biases[int(key)] = value
            continue
        if not key or key.removeprefix("-").isdigit():
            raise ApiError(
                400, f"logit_bias has the key {quoted(key)}; give a token id or text", "logit_bias"
            )
        n_characters += len(key)
        if n_characters > _MOST_CHARACTERS:
            raise ApiError(
                400,
                f"logit_bias has keys of more than {_MOST_CHARACTERS} characters; that is the limit",
                "logit_bias",
            )
        try:
            tokens = tokenize(key)
        except ValueError as e:
            raise ApiError(400, f"logit_bias: {e}", "logit_bias") from None
        biases.update(dict.fromkeys(tokens, value))
    return biases
