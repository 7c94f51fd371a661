"""Tokenizing over HTTP: ``/tokenize``, ``/detokenize`` and ``/tokenizer_info``.

``/tokenize`` and ``/detokenize`` support two formats: llama-server's (``content``, ``tokens``) and vLLM's (``prompt``
or ``messages``, ``count``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from starlette.responses import Response

from llamapipe.errors import InvalidRequestError
from llamapipe.server._fields import Only, Unused
from llamapipe.server._tools import check_functions
from llamapipe.server.dialects.logprobs import token_text
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError, as_sent
from llamapipe.server.requests.generation import (
    about_conversation,
    check_template_args,
    mixed_tokens,
    refuse_media,
    tokenize_chat,
    tokenized,
    with_default_args,
    with_system,
)
from llamapipe.server.requests.limits import check_n_messages, refuse_long
from llamapipe.server.requests.openai_messages import continued_part, engine_messages
from llamapipe.server.state import ServerState


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: ``content`` is llama-server's field, ``prompt`` and ``messages`` are vLLM's."""

    model: str | None = None
    content: str | list[int | str] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    # The rest of vLLM's fields, which its clients send with these values.
    chat_template: Annotated[
        str | None, Only(instead="the operator sets it: llamapipe serve --chat-template")
    ] = None
    mm_processor_kwargs: Annotated[Any, Unused({})] = None
    media_io_kwargs: Annotated[Any, Unused({})] = None


# The fields of each form, besides those of all.
_FORMS: dict[str, tuple[str, ...]] = {
    "content": ("add_special", "parse_special", "with_pieces"),
    "prompt": ("add_special_tokens", "parse_special", "return_token_strs"),
    "messages": ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
                 "return_token_strs"),
}  # fmt: skip
_NEUTRAL = {
    "parse_special": True,
    "add_special_tokens": False,
}  # else false; these have no effect in other forms


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``: answers ``content`` for llama-server's clients and ``prompt`` for vLLM's."""

    tokens: list[int]
    model: str | None = None


_SIZE = 8  # the estimated characters of a token's entry in the answer
_MANY = 1024  # tokens; more are processed in a thread, to keep the event loop free
T = TypeVar("T")


async def tokenize(exchange: Exchange, request: TokenizeRequest) -> Response:
    """``POST /tokenize``."""
    state = exchange.server
    state.check_model(request.model)
    vocab = state.engine.model.vocab
    sources = [name for name in ("content", "prompt", "messages") if getattr(request, name) is not None]
    if len(sources) != 1:
        raise ApiError(400, "give one of content, prompt and messages", sources[1] if sources else "prompt")
    _check_form(request, sources[0])
    check_n_messages(state, request.messages, "messages")

    def pieces(tokens: Sequence[int]) -> bytes:
        entries = [{"id": token, "piece": _piece(vocab.written_piece(token))} for token in tokens]
        return msgspec.json.encode({"tokens": entries})

    def counted(tokens: Sequence[int]) -> bytes:
        strings = None
        if request.return_token_strs:
            strings = [token_text(vocab.written_piece(token)) for token in tokens]
        return msgspec.json.encode(
            {
                "count": len(tokens),
                "max_model_len": state.engine.n_ctx,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    if request.content is not None:
        tokens = await _content_tokens(state, request)
        if not request.with_pieces:
            return JsonResponse({"tokens": tokens})
        return JsonResponse(await _made(state, pieces, tokens))
    if request.messages is not None:
        check_functions(request.tools)
        continued = continued_part(
            request.messages, request.continue_final_message, request.add_generation_prompt
        )
        check_template_args(request.chat_template_kwargs or ())
        args = await with_default_args(state, request.chat_template_kwargs)
        sent = engine_messages(request.messages)
        messages = with_system(state, sent)
        adds_prompt = request.add_generation_prompt is not False
        try:
            refuse_media(state, messages)
            tokens = await tokenize_chat(state, messages, request.tools, adds_prompt, args, continued)
        except InvalidRequestError as e:
            raise about_conversation(e, sent, n_added=len(messages) - len(sent)) from None
    else:
        assert request.prompt is not None
        tokens = await tokenized(
            state, request.prompt, request.add_special_tokens is not False, request.parse_special is not False
        )
    return JsonResponse(await _made(state, counted, tokens))


async def _content_tokens(state: ServerState, request: TokenizeRequest) -> list[int]:
    content, special = request.content, (bool(request.add_special), request.parse_special is not False)
    assert content is not None
    if isinstance(content, str):
        return await tokenized(state, content, *special)
    n = sum(len(part) if isinstance(part, str) else 1 for part in content)
    refuse_long(state, "text", n)
    try:
        return await state.in_thread(
            mixed_tokens, state.engine.model.vocab, "content", content, *special, size=n
        )
    except ValueError as e:
        raise ApiError(400, str(e), "content") from None


def _check_form(request: TokenizeRequest, form: str) -> None:
    """Raise ApiError 400 for a field of another form that asks for something."""
    for name in dict.fromkeys(field for fields in _FORMS.values() for field in fields):
        value = getattr(request, name)
        if name in _FORMS[form] or value in (None, []) or value is _NEUTRAL.get(name, False):
            continue
        owner = " or ".join(other for other, fields in _FORMS.items() if name in fields)
        raise ApiError(
            400, f"{name} is {as_sent(value)}; it belongs to {owner}: leave it out with {form}", name
        )


async def _made(state: ServerState, make: Callable[[list[int]], T], tokens: list[int]) -> T:
    """Return ``make(tokens)``, computed in a thread if there are many tokens."""
    return (
        make(tokens) if len(tokens) < _MANY else await state.in_thread(make, tokens, size=_SIZE * len(tokens))
    )


async def detokenize(exchange: Exchange, request: DetokenizeRequest) -> Response:
    """``POST /detokenize``."""
    state = exchange.server
    state.check_model(request.model)
    most = max(state.settings.max_text_characters, state.engine.n_ctx)
    if len(request.tokens) > most:
        raise ApiError(
            400,
            f"tokens has {len(request.tokens)} items; the limit of this server is {most} (--max-text-characters): "
            "split it",
            "tokens",
        )
    try:
        text = await _made(
            state, partial(state.engine.model.vocab.detokenize, unparse_special=True), request.tokens
        )
    except ValueError as e:
        text = str(e)  # it names the argument of Python's method
        text = f"tokens{text.removeprefix('ids')}" if text.startswith("ids ") else f"tokens: {text}"
        raise ApiError(400, text, "tokens") from None
    return JsonResponse({"content": text, "prompt": text})


async def tokenizer_info(exchange: Exchange) -> Response:
    """``GET /tokenizer_info``: properties of the tokenizer, for evaluation harnesses."""
    model = exchange.server.engine.model
    vocab = model.vocab

    def written(token: int | None) -> str | None:
        return None if token is None else token_text(vocab.written_piece(token))

    return JsonResponse(
        {
            "tokenizer_class": "llamapipe",
            "vocab_size": vocab.n_vocab,
            "model_max_length": exchange.server.engine.n_ctx,
            "bos_token": written(vocab.bos),
            "eos_token": written(vocab.eos),
            "pad_token": written(vocab.eos),
            "bos_token_id": vocab.bos,
            "eos_token_id": vocab.eos,
            "add_bos_token": vocab.add_bos,
            "chat_template": model.chat_template,
        }
    )


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they are not complete characters, as in llama-server's answers."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
