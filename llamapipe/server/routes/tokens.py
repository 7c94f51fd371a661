"""Tokenizing over HTTP: ``/tokenize``, ``/detokenize``, ``/tokenizer_info`` and ``/apply-template``.

``/tokenize`` and ``/detokenize`` support two formats: llama-server's (``content``, ``tokens``) and vLLM's (``prompt``
or ``messages``, ``count``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.responses import Response

from llamapipe.errors import InvalidRequestError
from llamapipe.server._fields import Only, Unused
from llamapipe.server._tools import check_functions
from llamapipe.server.dialects.logprobs import token_text
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.generation import (
    about_conversation,
    check_template_args,
    tokenize_chat,
    tokenized,
    with_default_args,
    with_system,
)
from llamapipe.server.requests.limits import check_n_messages, refuse_long_chat
from llamapipe.server.state import ServerState
from llamapipe.work.long_work import size_of

_AS_TEXT = "/apply-template with add_generation_prompt: false writes the prompt; cut the end of its turn"


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /tokenize``: ``content`` is llama-server's field, ``prompt`` and ``messages`` are vLLM's."""

    model: str | None = None
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False
    # The rest of vLLM's fields, which its clients send with these values.
    continue_final_message: Annotated[bool | None, Only(False, instead=_AS_TEXT)] = None
    chat_template: Annotated[
        str | None, Only(instead="the operator sets it: llamapipe serve --chat-template")
    ] = None
    mm_processor_kwargs: Annotated[Any, Unused({})] = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /detokenize``: answers ``content`` for llama-server's clients and ``prompt`` for vLLM's."""

    tokens: list[int]
    model: str | None = None


class TemplateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /apply-template``."""

    messages: list[dict[str, Any]]
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


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
        tokens = await tokenized(state, request.content, request.add_special, request.parse_special)
        if not request.with_pieces:
            return JsonResponse({"tokens": tokens})
        return JsonResponse(await _made(state, pieces, tokens))
    if request.messages is not None:
        check_functions(request.tools)
        try:
            tokens = await tokenize_chat(
                state,
                request.messages,
                request.tools,
                request.add_generation_prompt,
                request.chat_template_kwargs or {},
            )
        except InvalidRequestError as e:
            raise about_conversation(e, request.messages) from None
    else:
        assert request.prompt is not None
        tokens = await tokenized(state, request.prompt, request.add_special_tokens, request.parse_special)
    return JsonResponse(await _made(state, counted, tokens))


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


async def apply_template(exchange: Exchange, request: TemplateRequest) -> Response:
    """``POST /apply-template``: returns the prompt of a chat request with these messages, as text."""
    exchange.server.check_model(request.model)
    check_template_args(request.chat_template_kwargs or {})
    check_n_messages(exchange.server, request.messages, "messages")
    check_functions(request.tools)
    args = await with_default_args(exchange.server, request.chat_template_kwargs)
    messages = with_system(exchange.server, request.messages)
    render = partial(
        exchange.server.engine.model.render_chat,
        messages,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        **args,
    )
    try:
        refuse_long_chat(exchange.server, request.messages)
        prompt = await exchange.server.in_thread(render, size=size_of(request.messages))
    except InvalidRequestError as e:
        n_added = len(messages) - len(request.messages)
        raise about_conversation(e, request.messages, n_added=n_added) from None
    return JsonResponse({"prompt": prompt})


def _piece(piece: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they are not complete characters, as in llama-server's answers."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
