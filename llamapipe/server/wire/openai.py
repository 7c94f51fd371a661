"""Requests of OpenAI's API: completions, chat completions and embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from llamapipe.server.errors import ApiError
from llamapipe.server.wire.fields import Only, Unused
from llamapipe.server.wire.sampling import Sampling

Prompt = str | list[str | int | list[int]]  # text or token ids, one or several
_NO_AUDIO = "this server answers in text"


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Options of a stream. ``include_obfuscation``: events are padded to hide the length of their text.

    ``continuous_usage_stats``: each event has the usage so far, as vLLM's.
    """

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Streamed(Sampling, kw_only=True):
    """A request whose answer may be a stream."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_progress: bool | None = None  # of llama-server: a stream tells how much of the prompt is computed
    user: Annotated[str | None, Unused()] = None

    def check(self) -> None:
        """Raises ApiError 400 for stream options without a stream; an explicit ``"stream": false`` allows them."""
        if self.stream is None and self.stream_options is not None:
            raise ApiError(400, "stream_options is given, but stream is not", "stream_options")

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with an event that holds the usage."""
        options = self.stream_options
        return options is not None and bool(options.include_usage or options.continuous_usage_stats)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether each event of the stream holds the usage so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def is_padded(self) -> bool:
        """Whether events are padded."""
        return self.stream_options is not None and bool(self.stream_options.include_obfuscation)


def token_limit(**given: int | None) -> int | None:
    """The smallest of limits of generated tokens; None, as -1: no limit. Raises ApiError 400, which names the field."""
    for name, limit in given.items():
        if limit is not None and limit < -1:
            raise ApiError(400, f"{name} is {limit}; it must be 0 or more, or -1 for no limit", name)
    return min((limit for limit in given.values() if limit is not None and limit >= 0), default=None)


class CompletionRequest(Streamed, kw_only=True):
    """``POST /v1/completions``.

    ``add_special_tokens``, ``parse_special``: as in ``Model.tokenize``; both are true by default.
    ``truncate_prompt_tokens``: use the last so many tokens of each prompt.
    """

    prompt: Prompt
    suffix: str | None = None
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_embeds: Annotated[Any, Only(instead="give text or token ids")] = None


class ChatRequest(Streamed, kw_only=True):
    """``POST /v1/chat/completions``.

    ``chat_template_kwargs``: further variables of the template; ``documents`` is one of them. ``truncation``: "auto"
    drops the oldest turns of a conversation that is too long. ``continue_final_message``: the answer continues the last
    message. ``include_reasoning``: false leaves the reasoning out of the answer.
    """

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
    truncation: Literal["auto", "disabled"] | None = None
    # OpenAI's, for what a hosted service does: storage, billing, moderation, search, sound.
    modalities: Annotated[list[str] | None, Only(["text"], instead=_NO_AUDIO)] = None
    audio: Annotated[dict[str, Any] | None, Unused({})] = None
    metadata: Annotated[dict[str, Any] | None, Unused({})] = None
    moderation: Annotated[dict[str, Any] | None, Unused()] = None
    prediction: Annotated[dict[str, Any] | None, Unused()] = None
    prompt_cache_key: Annotated[str | None, Unused()] = None
    prompt_cache_options: Annotated[dict[str, Any] | None, Unused({})] = None
    prompt_cache_retention: Annotated[str | None, Unused()] = None
    safety_identifier: Annotated[str | None, Unused()] = None
    service_tier: Annotated[str | None, Unused("auto", "default")] = None
    store: Annotated[bool | None, Unused(False)] = None
    verbosity: Annotated[str | None, Unused()] = None
    web_search_options: Annotated[dict[str, Any] | None, Unused()] = None
    # vLLM's, SGLang's and llama-server's.
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    separate_reasoning: Annotated[bool | None, Only(True)] = None
    stream_reasoning: Annotated[bool | None, Only(True)] = None
    echo: Annotated[bool | None, Only(False, instead="the client has the messages")] = None
    add_special_tokens: Annotated[bool | None, Only(False, instead="the template writes them")] = None
    chat_template: Annotated[
        str | None, Only(instead="the operator sets it: llamapipe serve --chat-template")
    ] = None
    prompt_logprobs: Annotated[
        int | None, Only(instead="/v1/completions has it; /apply-template writes the prompt")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None, Only(-1, instead='truncation: "auto" drops the oldest turns')
    ] = None
    thinking_token_budget: Annotated[int | None, Only(-1, instead="max_tokens limits the whole answer")] = (
        None
    )
    mm_processor_kwargs: Annotated[Any, Unused({})] = None
    media_io_kwargs: Annotated[Any, Unused({})] = None


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/embeddings``. ``truncate``: cut texts that are too long for the model."""

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate: bool = False
    user: Annotated[str | None, Unused()] = None
    priority: Annotated[int | None, Only(0)] = None
    truncate_prompt_tokens: Annotated[int | None, Only(instead="give truncate: true")] = None


class RerankRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/rerank``. ``truncate``: cut documents that are too long with the query."""

    query: str
    documents: list[str | dict[str, str]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = False
    truncate: bool = False
    priority: Annotated[int | None, Only(0)] = None
