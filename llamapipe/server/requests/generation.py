"""Helpers for all routes that generate text: prompts as tokens, a conversation as a job, reasoning limits.

Open it to change how a request of any API becomes a call of the engine.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Annotated, Any, Literal

import msgspec

from llamapipe._messages import DROP_TURNS, quoted, too_long
from llamapipe.arguments import check_tokens
from llamapipe.chat.media import first_media
from llamapipe.chat.options import ChatOptions
from llamapipe.errors import DecodeError, InvalidRequestError
from llamapipe.llama.fim import FimPrompt, FimText, fim_prompt
from llamapipe.llama.vocab import Vocab
from llamapipe.params import SamplingParams
from llamapipe.results import ChatChoice, ChatCompletion, ChatDelta, Timings
from llamapipe.server._fields import Only, unused_fields
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import TOO_LONG, ApiError, code_of
from llamapipe.server.requests.job import Job, count_drafted, gather
from llamapipe.server.requests.limits import refuse_long, refuse_long_chat, total_choices
from llamapipe.server.requests.media import in_request, place_of, with_media
from llamapipe.server.requests.sampling import with_field
from llamapipe.server.requests.time_limit import chat_choice
from llamapipe.server.settings import TEMPLATE_PARAMETERS
from llamapipe.server.state import ServerState
from llamapipe.work.long_work import size_of

# One or several prompts, as text or token ids. As in llama-server, a list with ids is one prompt; it may include texts.
Prompt = str | list[str | int | list[int | str]]
Continued = bool | Literal["content", "reasoning"]  # as ``continue_last`` of ``ChatOptions``
_LONG = 4096  # characters; longer texts are tokenized in a thread, to keep the event loop free


async def tokenized(
    state: ServerState, text: str, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """Return the tokens of a text, with at most one BOS.

    Raises ValueError for text that the vocabulary cannot express. A text of more than ``max_text_characters`` that
    cannot fit the context is refused before it is tokenized.

    By default, the text of a control token becomes that token, as on other servers, because clients of these APIs
    render templates themselves.
    """
    vocab = state.engine.model.vocab
    refuse_long(state, "text", len(text))
    if len(text) < _LONG:
        tokens = vocab.tokenize(text, add_special, parse_special)
    else:
        tokens = await state.in_thread(vocab.tokenize, text, add_special, parse_special, size=len(text))
    return _with_one_bos(vocab, tokens)


def _with_one_bos(vocab: Vocab, tokens: list[int]) -> list[int]:
    return tokens[1:] if vocab.bos is not None and tokens[:2] == [vocab.bos] * 2 else tokens


def _refuse_paths(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse message parts in the engine's form, which could name a file's path. Raises ApiError 400."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for i, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, Mapping) and part.get("type") in ("image", "audio"):
                place = place_of(messages, index, i)
                raise ApiError(
                    400,
                    f"{place} has the type {quoted(part['type'])}; only text is supported, image_url with a data URL, "
                    "and input_audio",
                    place,
                )


class PromptObject(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt in llama-server's form for images and sounds, which only chats take here."""

    prompt_string: str
    multimodal_data: Annotated[
        list[str] | None, Only([], instead="/v1/chat/completions takes images and sounds")
    ] = None


AnyPrompt = str | PromptObject | list[str | int | list[int | str] | PromptObject]


def plain_prompts(prompt: AnyPrompt) -> Prompt:
    """Return the prompts, with the text in place of each object. Raises ApiError 400."""
    if isinstance(prompt, (str, PromptObject)):
        return _text_of(prompt)
    return [item if isinstance(item, (int, list)) else _text_of(item) for item in prompt]


def _text_of(prompt: str | PromptObject) -> str:
    if isinstance(prompt, str):
        return prompt
    unused_fields(prompt)
    return prompt.prompt_string


async def prompts_of(
    state: ServerState,
    prompt: Prompt,
    name: str,
    add_special: bool = True,
    parse_special: bool = True,
    suffix: str | None = None,
    n_last: int | None = None,
) -> list[list[int]]:
    """Return each prompt as token ids. Raises ApiError 400, with the prompt's index, for a bad prompt.

    ``name``: the request's field. ``suffix``: the text after the gap that is to be filled. ``n_last``: use only this
    many tokens at the end of each prompt; -1 uses as many as fit.
    """
    if n_last is not None and (n_last < -1 or n_last == 0):
        raise ApiError(
            400,
            f"truncate_prompt_tokens is {n_last}; it must be 1 or more, or -1 for as many as fit",
            "truncate_prompt_tokens",
        )
    if n_last == -1:
        n_last = state.engine.n_ctx - 1
    items = given_prompts(prompt)
    if not items:
        raise ApiError(400, f"{name} is empty; give at least one", name)
    prompts: list[list[int]] = []
    for index, item in enumerate(items):
        try:
            if isinstance(item, str):
                tokens = await _text(state, item, add_special, parse_special, suffix)
            elif suffix is not None:
                raise ApiError(400, "suffix needs a prompt of text, not of token ids", "suffix")
            elif n_last or len(item) < state.engine.n_ctx:
                tokens = await _mixed(state, item, add_special, parse_special)
            else:
                tokens = item  # type: ignore[assignment]  # too long, whatever it holds
            if n_last:
                tokens = tokens[-n_last:]
            _check(state, tokens)
        except ValueError as e:
            place = f" ({name} {index} of the list)" if len(items) > 1 else ""
            raise ApiError(400, f"{e}{place}", name, code_of(e)) from None
        prompts.append(tokens)
    return prompts


def given_prompts(prompt: Prompt) -> list[str | list[int | str]]:
    """Return the prompts of a request. A text, or a list that has token ids, is a single prompt."""
    if isinstance(prompt, str):
        return [prompt]
    # In most lists, the first item has the type of all; ``map`` checks the types of a long list in C.
    if prompt and (isinstance(prompt[0], int) or int in set(map(type, prompt))):
        return [prompt]  # type: ignore[list-item]
    return prompt  # type: ignore[return-value]


async def _mixed(
    state: ServerState, parts: list[int | str], add_special: bool, parse_special: bool
) -> list[int]:
    """Return the tokens of a prompt whose parts are token ids and texts.

    Special tokens are added if the prompt begins with a text. Raises ValueError.
    """
    types = set(map(type, parts))
    if types == {int}:
        return parts  # type: ignore[return-value]
    if list in types:
        raise ValueError("a prompt that has token ids may also have texts, but no lists")
    vocab = state.engine.model.vocab

    def tokens() -> list[int]:
        refuse_long(state, "text", sum(len(part) for part in parts if isinstance(part, str)))
        mixed: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                mixed.append(part)
            else:
                text = vocab.tokenize(part, add_special and not index, parse_special)
                mixed += text if index else _with_one_bos(vocab, text)
        return mixed

    return await state.in_thread(tokens, size=size_of(parts))  # many short texts take as long as a long one


def mixed_tokens(
    vocab: Vocab, name: str, parts: Sequence[int | str], add_special: bool = True, parse_special: bool = False
) -> list[int]:
    """Return the tokens of token ids and texts in one list. Raises ValueError, which names the list ``name``.

    Special tokens are added to the first part if it is a text, as in llama-server. May take long.
    """
    tokens: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, str):
            tokens += vocab.tokenize(part, add_special and not index, parse_special)
        else:
            tokens.append(part)
    return check_tokens(name, tokens, vocab.n_vocab)


def _check(state: ServerState, tokens: list[int]) -> None:
    n_vocab, n_ctx = state.engine.model.n_vocab, state.engine.n_ctx
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token")
    if len(tokens) >= n_ctx:
        raise ValueError(too_long(f"the prompt has {len(tokens)} tokens", n_ctx))
    wrong = next((token for token in tokens if not 0 <= token < n_vocab), None)
    if wrong is not None:
        raise ValueError(f"the token id {wrong} is not in the vocabulary, which has ids 0 to {n_vocab - 1}")


async def _text(
    state: ServerState, text: str, add_special: bool, parse_special: bool, suffix: str | None
) -> list[int]:
    if suffix is None:
        return await tokenized(state, text, add_special, parse_special)
    refuse_long(state, "text", len(text) + len(suffix))
    prompt = await fim_prompt_of(state, FimText(text, suffix, order=state.settings.fim_order), None, "suffix")
    vocab = state.engine.model.vocab
    return prompt.tokens if add_special or not vocab.add_bos else prompt.tokens[1:]


async def fim_prompt_of(state: ServerState, text: FimText, n_max: int | None, field: str) -> FimPrompt:
    """Return the prompt that asks for the text in a gap. ``n_max``: the maximum tokens of that text.

    Raises ApiError 400, which names ``field``. Names of control tokens in the texts are read as text, because the texts
    are the user's files.
    """
    vocab = state.engine.model.vocab
    size = len(text.prefix) + len(text.suffix) + sum(len(content) for _, content in text.extra)
    try:
        if size < _LONG:
            return fim_prompt(vocab, text, n_max)
        return await state.in_thread(fim_prompt, vocab, text, n_max, size=size)
    except ValueError as e:
        raise ApiError(400, str(e), field) from None


def n_prompts(prompt: Prompt) -> int:
    """Return the number of prompts in a request, which is checked before any prompt is tokenized."""
    return len(given_prompts(prompt))


async def n_prompt_tokens(
    exchange: Exchange,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    args: Mapping[str, Any],
    field: str = "messages",
    continue_last: Continued = False,
) -> int:
    """Count the tokens of a conversation's prompt, including its images and sounds.

    ``field``: the request's field that holds the conversation. ``continue_last``: see ``ChatOptions``. Without media,
    the prompt need not fit the context.
    Raises ApiError and InvalidRequestError.
    """
    if first_media(messages) is None:
        args = await with_default_args(exchange.server, args)
        conversation = with_system(exchange.server, messages)
        try:
            return len(await tokenize_chat(exchange.server, conversation, tools, True, args, continue_last))
        except InvalidRequestError as e:
            n_added = len(conversation) - len(messages)
            raise about_conversation(e, messages, field, n_added) from None
    options = ChatOptions(tools=tools, template_args=args, continue_last=continue_last)
    job = ChatJob(exchange, messages, SamplingParams(max_tokens=None), options, field=field)
    return len(await job.tokens())


def refuse_media(state: ServerState, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidRequestError for images and sounds, where only text can be returned."""
    medium = first_media(messages)
    if (
        medium is not None and state.engine.model.projector is not None
    ):  # else the template's check reports it
        place, kind = medium
        raise InvalidRequestError(
            f"{place} has the type {quoted(kind)}, which has no text and no token ids; "
            "/v1/chat/completions/input_tokens counts its tokens"
        )


async def tokenize_chat(
    state: ServerState,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    template_args: Mapping[str, Any],
    continue_last: Continued = False,
) -> list[int]:
    """Return the tokens of a conversation, computed in a worker thread. ``continue_last``: see ``ChatOptions``.

    Raises ApiError 400 for reserved arguments, InvalidRequestError for a conversation that is too long.
    """
    check_template_args(template_args)
    refuse_long_chat(state, messages)
    prompts = state.engine.model.chat_prompts

    def tokens() -> list[int]:
        definitions = prompts.definitions(tools)
        return prompts.tokenize(messages, definitions, add_generation_prompt, template_args, continue_last)

    return await state.in_thread(tokens, size=size_of(messages))


def with_system(state: ServerState, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the conversation, with the operator's system prompt first unless the conversation has a system prompt."""
    text = state.settings.system
    if not text or not messages or any(message.get("role") in _SYSTEM_ROLES for message in messages):
        return messages
    return [{"role": "system", "content": text}, *messages]


_SYSTEM_ROLES = ("system", "developer")
_INDEX = re.compile(r"messages\[(\d+)\]")
_ABOUT_MESSAGES = re.compile(r"messages(?:\[(\d+)\])?[: ]")
_TOO_LONG = ("the conversation has ", "the prompt has ")  # how such errors begin


def _as_sent(error: InvalidRequestError, n_added: int) -> InvalidRequestError:
    """Return the engine's error with the message's index in the request, which has ``n_added`` fewer messages."""
    if not n_added:
        return error
    # Only the first index is replaced, because the rest may quote the client's text.
    return InvalidRequestError(_INDEX.sub(lambda m: f"messages[{int(m[1]) - n_added}]", str(error), count=1))


def about_conversation(
    error: InvalidRequestError,
    messages: Sequence[Mapping[str, Any]],
    field: str = "messages",
    n_added: int = 0,
) -> Exception:
    """Return the engine's error about a conversation, with the request's field that caused it. Others are not changed.

    ``messages``: the messages of the request, from ``field``. ``n_added``: see ``_as_sent``.
    """
    error = _as_sent(error, n_added)
    placed = in_request(error, messages)
    if placed is not error:
        return placed
    text = str(error)
    if text.startswith(_TOO_LONG):
        return ApiError(400, text, field, code_of(error))
    match = _ABOUT_MESSAGES.match(text)
    if match is None:
        return error
    # An item of ``input`` and the message made from it may have different indices.
    place = field if match[1] is None or field != "messages" else f"messages.{match[1]}"
    return ApiError(400, text, place, code_of(error))


def input_tokens(n: int) -> dict[str, Any]:
    """Return a number of tokens in the form that OpenAI's and llama-server's counting routes use."""
    return {"object": "response.input_tokens", "input_tokens": n}


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # how much a model reasons
# The maximum tokens of reasoning for an effort, if the template has no levels. Other efforts have no maximum.
_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096, "high": 16_384}
_ABOUT_REASONING = ("enable_thinking", "thinking", "reasoning_effort")  # arguments of templates


def template_args(arguments: Mapping[str, Any] | None, effort: str | None, field: str) -> dict[str, Any]:
    """Return the template's arguments, with the effort from ``field``. Raises ApiError 400, even for reserved names.

    "none" turns reasoning off, if the template can; other efforts are passed to the template as ``reasoning_effort``.
    """
    args = dict(arguments or {})
    check_template_args(args)
    if effort is None:
        return args
    if effort not in EFFORTS:
        raise ApiError(400, f"{field} is {quoted(effort)}; it may be {', '.join(EFFORTS)}", field)
    if effort == "none":
        args.setdefault("enable_thinking", False)
    else:
        args.setdefault("reasoning_effort", effort)
    return args


_NAME = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
_MOST_NOTED = 8  # names in the header


async def note_unread(
    exchange: Exchange, arguments: Mapping[str, Any] | None, documents: object = None
) -> None:
    """Note the template arguments of a request that the model's template does not read. Raises ApiError 400.

    ``documents`` are refused then, because the answer would look as if the model had read them.
    """
    if not arguments and not documents:
        return
    check_template_args(arguments or ())
    state = exchange.server
    known = await state.in_thread(state.engine.model.chat_prompts.arguments)
    if documents and "documents" not in known:
        raise ApiError(
            400,
            "documents are given, but the model's chat template has no place for them; put them into a message",
            "documents",
        )
    unread = (name for name in arguments or () if name not in known and name not in _ABOUT_REASONING)
    # They become a header, which must be short and may hold no other characters.
    noted = (
        f"chat_template_kwargs.{name}" if _NAME.fullmatch(name) else "chat_template_kwargs" for name in unread
    )
    exchange.note_unused(tuple(dict.fromkeys(islice(noted, _MOST_NOTED))))


def check_template_args(names: Iterable[str]) -> None:
    """Raise ApiError 400 for a template argument that has a separate field in the request."""
    for name in names:
        if name in TEMPLATE_PARAMETERS:
            raise ApiError(
                400,
                f"chat_template_kwargs may not hold {quoted(name)}: the request and the template define it",
                "chat_template_kwargs",
            )


async def with_default_args(state: ServerState, arguments: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the template arguments of a request, with the operator's arguments as defaults."""
    args = dict(arguments or {})
    defaults = state.settings.default_template_args()
    if not any(name in args for name in _ABOUT_REASONING):
        if state.settings.reasoning == "off":
            form = await state.in_thread(state.engine.model.chat_prompts.chat_format)
            defaults |= {"enable_thinking": False, **form.reasoning_off}
    else:
        defaults = {name: value for name, value in defaults.items() if name not in _ABOUT_REASONING}
    return defaults | args


async def reasoning_budget(state: ServerState, args: Mapping[str, Any]) -> int | None:
    """Return the maximum tokens of reasoning for a request that gives no number; None: no limit."""
    effort = args.get("reasoning_effort")
    if args.get("enable_thinking") is False:
        return 0  # a model may begin to reason although the template has closed the reasoning in the prompt
    if effort is not None:
        form = await state.in_thread(state.engine.model.chat_prompts.chat_format)
        return None if form.has_efforts else _BUDGETS.get(str(effort))
    limit = state.settings.reasoning
    return int(limit) if limit.isdecimal() else None


class ChatJob(Job[ChatDelta]):
    """One conversation with its params, answered in one piece or as one stream for each choice.

    ``constraint_field``: the field of the request that holds the format of the answer, if any. ``before``: tokens that
    precede the prompt of a stream. ``grammars``: for each tool, the field of the request that holds its grammar.
    ``has_system``: the operator's system prompt applies, unless the conversation has one. ``spent_s``: how much of the
    request's time is already used. ``field``: the request's field that holds the conversation.
    """

    def __init__(
        self,
        exchange: Exchange,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        options: ChatOptions,
        constraint_field: str | None = None,
        is_empty: bool = False,
        before: Sequence[int] = (),
        grammars: Mapping[str, str] | None = None,
        has_system: bool = True,
        spent_s: float = 0.0,
        most_ms: int = 0,
        field: str = "messages",
    ) -> None:
        total_choices(exchange.server, params.n)
        _refuse_paths(messages)
        if options.truncation == "error":
            try:
                refuse_long_chat(exchange.server, messages)
            except InvalidRequestError as e:
                raise about_conversation(e, messages, field) from None
        timeout_s = exchange.server.settings.timeout_s
        left_s = None if timeout_s is None else max(timeout_s - spent_s, 0)
        super().__init__(exchange, params, params.n, left_s, is_empty, most_ms)
        self._began = perf_counter()
        self._messages = messages
        self._preparing = asyncio.Lock()
        self._is_prepared = False
        self._has_system = has_system and not before  # they already begin a conversation
        self._n_added = 0  # messages that precede the request's
        self._options = options
        self._before = before
        self._constraint = constraint_field
        self._grammars = grammars or {}
        self._field = field

    def __repr__(self) -> str:
        return f"<ChatJob n_messages={len(self._messages)} n={self._params.n}>"

    async def _prepare(self) -> None:
        """Fetch images and apply the operator's defaults. A second call does nothing.

        The time for fetching counts towards the request's limit.
        """
        async with self._preparing:
            if self._is_prepared:
                return
            state, sent = self._exchange.server, self._messages
            args = await with_default_args(state, self._options.template_args)
            self._options = self._options._replace(template_args=args)
            if self._params.reasoning_budget is None:
                self._params = replace(self._params, reasoning_budget=await reasoning_budget(state, args))
            messages = await with_media(self._exchange, sent)
            if self._timeout is not None and messages is not sent:
                self._timeout = max(round(self._timeout - (perf_counter() - self._began), 3), 0)
            self._messages = with_system(state, messages) if self._has_system else messages
            self._n_added = len(self._messages) - len(messages)
            self._is_prepared = True

    async def complete(self) -> ChatCompletion:
        """Return the answer when all choices are complete."""
        await self._prepare()
        if self._most_ms:
            return await self._exchange.await_streams(self._gathered())
        answer = self._engine.achat(
            self._messages, self._params, timeout=self._timeout, block=False, **self._options._asdict()
        )
        try:
            done = await self._exchange.await_engine(answer)
        except InvalidRequestError as e:
            raise self._explained(e) from None
        except DecodeError as e:
            raise self._overflow(e) from None
        if self.is_empty:
            done = replace(done, choices=tuple(map(_emptied, done.choices)))
        return done

    async def _gathered(self) -> ChatCompletion:
        parts = await gather(self._exchange, self)
        return ChatCompletion(
            tuple(chat_choice(i, stream) for i, stream in enumerate(parts)),
            self.n_prompt_tokens,
            self.n_cached_tokens,
            Timings(None, 0.0),
            *count_drafted(self.running),
        )

    async def prompt_tokens(self) -> list[int]:
        """Return the tokens of the prompt's text, without images. Raises the same errors as ``tokens``."""
        return [token for token in await self.tokens() if token >= 0]

    async def tokens(self) -> list[int]:
        """Return the prompt's tokens as the engine computes them; tokens of images are negative.

        Raises ApiError, InvalidRequestError, TimeoutError.
        """
        await self._prepare()
        tokenize = partial(
            self._engine.tokenize_chat,
            self._messages,
            self._params,
            before=self._before,
            **self._options._asdict(),
        )
        try:
            return await self._exchange.server.in_thread(tokenize, size=size_of(self._messages))
        except InvalidRequestError as e:
            raise self._explained(e) from None

    async def _stream(self, index: int) -> AsyncGenerator[ChatDelta | None, None]:
        await self._prepare()
        try:
            stream = self._engine.astream_chat(
                self._messages,
                self._params_of(index),
                timeout=self._timeout,
                block=False,
                before=self._before,
                **self._options._asdict(),
            )
            async with stream:
                await stream.submit()
                self._exchange.times.follow(stream)
                self.n_prompt_tokens = stream.n_prompt_tokens
                self.running[index] = stream
                yield None
                async for delta in stream:
                    self.n_prompt_tokens = stream.n_prompt_tokens
                    if index == 0:  # the first stream computes the prompt for the others
                        self.n_cached_tokens = stream.n_cached_tokens
                    if self.is_empty:
                        yield ChatDelta("", "", (), (), () if delta.logprobs is not None else None, "length")
                        return
                    yield delta
        except InvalidRequestError as e:
            raise self._explained(e) from None

    def _explained(self, error: InvalidRequestError) -> Exception:
        """Return the error with the request's field that caused it, if known."""
        for tool, field in self._grammars.items():
            named = f"tool {quoted(tool)}: "
            if str(error).startswith(named):
                return ApiError(400, f"{field}: {str(error).removeprefix(named)}", field)
        if DROP_TURNS in str(error):
            instead = _DROP_TURNS.get(self._exchange.dialect, DROP_TURNS)
            return ApiError(400, str(error).replace(DROP_TURNS, instead), self._field, TOO_LONG)
        placed = about_conversation(error, self._messages[self._n_added :], self._field, self._n_added)
        if not isinstance(placed, InvalidRequestError):
            return placed
        return with_field(placed, self._constraint or "tools")


# The words for the advice to drop turns in APIs without a field ``truncation``.
_DROP_TURNS = {"anthropic": "", "ollama": "leave truncate out to drop the oldest turns, "}


def _emptied(choice: ChatChoice) -> ChatChoice:
    return replace(
        choice,
        content="",
        reasoning="",
        tool_calls=(),
        finish_reason="length",
        token_ids=[],
        logprobs=None if choice.logprobs is None else [],
    )
