"""Requests of OpenAI's API: completions, chat completions and embeddings."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from llamapipe.engine.params import CONSTRAINTS
from llamapipe.server.errors import ApiError
from llamapipe.server.wire.sampling import Sampling

Prompt = str | list[str | int | list[int]]  # text or token ids, one or several
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")  # how much a model reasons


# What sglang-router adds to each request, whatever its clients leave out, and fields of llama-server. These values ask
# for what this server does.
_ONLY = {
    "id_slot": -1,
    "timings_per_token": False,
    "return_tokens": False,
    "post_sampling_probs": False,
    "no_stop_trim": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. ``include_obfuscation``: events are padded to hide the length of their text."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None
    schema: dict[str, Any] | None = None

    def answer_schema(self) -> Any:
        """The JSON schema that the answer must match, None for any text. Raises ApiError 400."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return self.schema or {"type": "object"}
        schema = (self.json_schema or {}).get("schema", self.schema)
        if schema is None:
            raise ApiError(
                400, "response_format: json_schema needs a schema", "response_format.json_schema.schema"
            )
        return schema


class Streamed(Sampling, kw_only=True):
    """A request whose answer may be a stream."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    # Accepted with the only value that holds here: see _ONLY.
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    return_hidden_states: bool | None = None
    id_slot: int | None = None
    timings_per_token: bool | None = None
    return_tokens: bool | None = None
    post_sampling_probs: bool | None = None
    return_progress: bool | None = None  # of llama-server: a stream tells how much of the prompt is computed
    # The format of the text, as OpenAI's API and as llama-server name it.
    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | str | None = None

    def check(self) -> None:
        """Raises ApiError 400 for values that this server does not support, and for stream options without a stream.

        An explicit ``"stream": false`` allows these.
        """
        for name, only in _ONLY.items():
            if getattr(self, name, None) not in (None, only):
                given = getattr(self, name)
                raise ApiError(
                    400, f"{name} is {_json(given)}; leave it out, or set it to {_json(only)}", name
                )
        if self.stream is None and self.stream_options is not None:
            raise ApiError(400, "stream_options is given, but stream is not", "stream_options")

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with an event that holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def is_padded(self) -> bool:
        """Whether events are padded."""
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)

    def answer_schema(self) -> Any:
        """The JSON schema in ``response_format``; None for any text. Raises ApiError 400."""
        if self.response_format is None:
            return None
        schema = self.response_format.answer_schema()
        other = next((name for name in CONSTRAINTS if getattr(self, name, None) is not None), None)
        if schema is not None and other is not None:
            raise ApiError(400, f"response_format and {other} are both given; give one of them", other)
        return schema

    def unused(self) -> tuple[str, ...]:
        """The given options that have no effect on this server."""
        return ("user",) if self.user is not None else ()


def token_limit(**given: int | None) -> int | None:
    """The smallest of limits of generated tokens; None, as -1: no limit. Raises ApiError 400, which names the field."""
    for name, limit in given.items():
        if limit is not None and limit < -1:
            raise ApiError(400, f"{name} is {limit}; it must be 0 or more, or -1 for no limit", name)
    return min((limit for limit in given.values() if limit is not None and limit >= 0), default=None)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


class CompletionRequest(Streamed, kw_only=True):
    """``POST /v1/completions``.

    ``add_special_tokens``, ``parse_special``: as in ``Model.tokenize``; both are true by default.
    """

    prompt: Prompt
    suffix: str | None = None
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None


class ChatRequest(Streamed, kw_only=True):
    """``POST /v1/chat/completions``. ``chat_template_kwargs``: further variables of the template."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: list[str] | None = None
    continue_final_message: bool | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    # No effect on this server: a hosted service uses these for storage, billing, moderation or search.
    audio: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    verbosity: str | None = None
    web_search_options: dict[str, Any] | None = None

    def unused(self) -> tuple[str, ...]:
        """The given options that have no effect on this server."""
        return tuple(name for name in _HOSTED if getattr(self, name) is not None)


_HOSTED = (
    "user",
    "audio",
    "metadata",
    "moderation",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "verbosity",
    "web_search_options",
)


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/embeddings``. ``truncate``: cut texts that are too long for the model."""

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate: bool = False


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/rerank``. ``truncate``: cut documents that are too long with the query."""

    query: str
    documents: list[str | dict[str, str]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    truncate: bool = False
