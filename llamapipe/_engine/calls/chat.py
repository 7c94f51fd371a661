"""Turns conversations into checked prompts, and generated text into answers.

Open this file to change how messages, tools and a response format become a prompt and a grammar.

The principle: the model's template writes the prompt, and ``ChatFormat`` knows the template. It says how the template
marks tool calls and reasoning, and provides the grammar that the text must follow and the parser that reads it.

If a call is forced, or a tool is ``strict``, a schema that no grammar can express is an error. Otherwise the chat runs
without a guarantee for this tool (``ToolSchemas``): its arguments are then any JSON object. Servers that speak MCP send
such schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from llamapipe._engine.calls.prompts import CheckedPrompt, RequestBuilder, with_prompt_index
from llamapipe._engine.policy.core import Span
from llamapipe._messages import DROP_TURNS, GIVE_PROJECTOR, quoted, too_long
from llamapipe._sampling_table import CONSTRAINTS
from llamapipe.arguments import check_choice, check_flag, from_column
from llamapipe.chat.deltas import DeltaParser
from llamapipe.chat.options import ChatOptions, Conversation, ReasoningFormat
from llamapipe.chat.tool_schemas import ToolSchemas
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.model import Model
from llamapipe.llama.projector import Media, in_prompt
from llamapipe.llama.vocab import Vocab
from llamapipe.params import SamplingParams
from llamapipe.results import ChatChoice, ChatCompletion, ChatFinishReason, Choice, Completion
from llamapipe.work.tenant import cache_key, grammar_limit, tenant

if TYPE_CHECKING:
    from llamapipe.chat.chat_format import ChatFormat
    from llamapipe.chat.parser import ChatParser
    from llamapipe.chat.results import ToolCall
    from llamapipe.chat.tools import Tool

_MOST_PIXELS = 2**28  # of the images of a conversation: decoding them takes seconds
_AFTER_MESSAGE = 512  # bytes of a prompt after its last message, at most
_TAIL_TOKENS = 24  # of a prompt: enough to see whether the template has opened a marker


class CheckedChat(NamedTuple):
    """A checked conversation: its prompt with params, and the parser of an answer (None: the text is the answer)."""

    item: CheckedPrompt
    new_parser: Callable[[], ChatParser] | None

    def delta_parser(self) -> DeltaParser:
        """Return a parser for the stream of one answer."""
        parser = None if self.new_parser is None else self.new_parser()
        return DeltaParser(parser, len(self.item.tokens))

    def answer(self, completion: Completion) -> ChatCompletion:
        """Return the completion of the prompt as an answer."""
        choices = tuple(map(self._choice, completion.choices))
        return ChatCompletion(
            choices,
            completion.n_prompt_tokens,
            completion.n_cached_tokens,
            completion.timings,
            completion.n_drafted_tokens,
            completion.n_accepted_tokens,
        )

    def _choice(self, choice: Choice) -> ChatChoice:
        content, reasoning = choice.text, ""
        tool_calls: tuple[ToolCall, ...] = ()
        reason: ChatFinishReason = choice.finish_reason
        if self.new_parser is not None:
            from llamapipe.chat.results import ChatMessage

            parser = self.new_parser()
            message = ChatMessage((parser.feed(choice.text), parser.finish(cut_off=reason != "stop")))
            content, reasoning, tool_calls = message.content, message.reasoning, message.tool_calls
            if tool_calls and reason == "stop" and not parser.ended_in_call:
                reason = "tool_calls"
        return ChatChoice(
            choice.index,
            content,
            reasoning,
            tool_calls,
            reason,
            choice.seed,
            choice.token_ids,
            choice.logprobs,
            choice.stop_string,
        )


class ChatBuilder:
    """Builds the prompts of conversations for one engine. Any thread."""

    def __init__(self, model: Model, request_builder: RequestBuilder) -> None:
        self._model = model
        self._request_builder = request_builder
        self._tool_schemas = ToolSchemas(request_builder.check_params)

    def __repr__(self) -> str:
        return f"<ChatBuilder of {self._model!r}>"

    def items(
        self, messages: Any, params: SamplingParams | Sequence[SamplingParams] | None, options: ChatOptions
    ) -> tuple[list[CheckedChat], bool]:
        """Check each conversation. Return them all, and whether a single one was given.

        ``params``: for all conversations, or a list with one for each.
        Raises TypeError, ValueError and InvalidRequestError; errors in a list name the conversation's index.
        """
        from llamapipe.chat.tools import check_tools

        conversations, single = _conversations(messages)
        if options.tools is not None:  # once for all conversations: they may come from a generator
            options = options._replace(tools=check_tools(options.tools))
        if single or not isinstance(params, (list, tuple)):
            all_params: Sequence[Any] = [params] * len(conversations)
        elif len(params) != len(conversations):
            raise ValueError(
                f"there are {len(conversations)} conversations and {len(params)} params; give one for all, or one for "
                "each"
            )
        else:
            all_params = params
        if single:
            return [self.item(conversations[0], all_params[0], options)], True
        items = []
        for index, (conversation, own) in enumerate(zip(conversations, all_params, strict=True)):
            try:
                items.append(self.item(conversation, own, options))
            except (TypeError, ValueError) as e:
                raise with_prompt_index(e, index) from None
        return items, False

    def item(
        self,
        messages: Conversation,
        params: SamplingParams | None,
        options: ChatOptions,
        before: Sequence[int] = (),
    ) -> CheckedChat:
        """Check one conversation. Raises TypeError, ValueError, InvalidRequestError, ImportError.

        ``before``: tokens of earlier turns, which precede the prompt. If there is too little room, the oldest are left
        out.
        """
        from llamapipe.chat.messages import continued_part
        from llamapipe.chat.tools import allowed_tools, check_tool_choice, check_tools

        if params is None:
            params = SamplingParams(max_tokens=None)
        elif not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        messages = _of_user(messages)
        tools = check_tools(options.tools)
        tool_choice, allowed = allowed_tools(options.tool_choice, tools)
        tool_choice = check_tool_choice(tool_choice, tools)
        parallel = check_flag("parallel_tool_calls", options.parallel_tool_calls)
        parallel = parallel and tool_choice in ("auto", "required")
        shown = tools if tool_choice != "none" else ()
        messages, tokens, spans = self._prompt(messages, params, options, shown, before)
        if options.response_format is not None:
            if any(getattr(params, name) is not None for name in CONSTRAINTS):
                raise InvalidRequestError(
                    "response_format and another constraint are both given; give only one"
                )
            params = replace(params, json_schema=_answer_schema(options.response_format))
        chat_format = self.chat_format(options.template_args)
        end = [token for token in tokens[-_TAIL_TOKENS:] if token >= 0] if spans else tokens[-_TAIL_TOKENS:]
        tail = self._model.vocab.detokenize(end, unparse_special=True)
        active: Sequence[Tool] = allowed if tool_choice != "none" else ()
        if options.continue_last:
            last = messages[-1]
            assert not isinstance(last, str)
            part = continued_part(last, options.continue_last)
            is_limited = bool(active) or params.json_schema is not None
            tail = chat_format.continued_tail(tail, messages, is_limited, part)
        constrained, active = self._constrain(chat_format, params, active, tool_choice, parallel, tail)
        reasoning = None
        if params.reasoning_budget is not None:
            reasoning = chat_format.limited_reasoning(tail)
            if reasoning is None:  # the model does not reason
                constrained = replace(constrained, reasoning_budget=None)
        item = self._request_builder.item(tokens, constrained, spans, reasoning)
        if self._model.is_recurrent or self._model.n_swa:
            item = item._replace(places=_places(self._model.vocab, tokens, messages))
        if not active and not chat_format.is_marked:
            return CheckedChat(item, None)  # control tokens have no text

        # Where nothing but the tools, or a schema, limits the answer, it may be a call as plain JSON.
        is_free = not options.continue_last and (
            all(getattr(params, name) is None for name in CONSTRAINTS) or _may_be_plain(params)
        )

        # JSON that a schema asks for stays JSON.
        check_choice("reasoning_format", options.reasoning_format, get_args(ReasoningFormat))
        is_json = constrained.json_schema is not None or options.response_format is not None
        reasoning_format = "auto" if is_json else options.reasoning_format

        def new_parser() -> ChatParser:
            return chat_format.parser(
                active,
                tool_choice,
                prompt_tail=tail,
                stream_calls=constrained is not params,
                lenient=is_free and self._model.tool_calls == "lenient",
                parallel=parallel,
                reasoning_format=reasoning_format,
                continues=bool(options.continue_last),
            )

        return CheckedChat(item._replace(piece=self._piece_for(chat_format)), new_parser)

    def _piece_for(self, chat_format: ChatFormat) -> Callable[[int], bytes]:
        """Return a token's bytes for a parser: none for a control token that the parser does not look for."""
        vocab = self._model.vocab
        markers = {marker.encode() for marker in chat_format.markers.control}

        def piece(token: int) -> bytes:
            text = vocab.piece(token)
            if text:
                return text
            name = vocab.written_piece(token)
            return name if name in markers else b""

        return piece

    def _prompt(
        self,
        messages: Conversation,
        params: SamplingParams,
        options: ChatOptions,
        tools: Sequence[Tool],
        before: Sequence[int],
    ) -> tuple[Conversation, list[int], tuple[Span, ...]]:
        """Return the messages that fit into the prompt, its tokens, and the places of images and sounds in them."""
        from llamapipe.chat.media import check_shown
        from llamapipe.chat.messages import check_messages, kept_messages, kept_tokens

        args = {} if options.template_args is None else options.template_args
        if not isinstance(args, Mapping):
            raise TypeError(f"template_args must be a dict, not {type(args).__name__}")
        openai_tools = [tool.as_openai() for tool in tools] or None
        n_ctx, room = self._request_builder.n_ctx, self._request_builder.room(params)
        may_drop = options.truncation == "auto"
        messages, media_mark, media, places = self._take_media(messages, may_drop, params.cache_salt)
        tokenize: Callable[..., list[int]] = partial(
            self._model.chat_prompts.tokenize,
            tools=openai_tools,
            add_generation_prompt=True,
            template_args=args,
            media_mark=media_mark,
        )

        def n_tokens(messages: Conversation) -> int:
            tokens = tokenize(messages)
            return len(in_prompt(tokens, media)[0]) if media else len(tokens)

        continued = options.continue_last
        if isinstance(continued, str):
            check_choice("continue_last", continued, ("content", "reasoning"))
        else:
            check_flag("continue_last", continued)
        if check_choice("truncation", options.truncation, ("error", "auto")) == "auto":
            messages = kept_messages(check_messages(messages), n_tokens, n_ctx, params.max_tokens, room)
        tokens = tokenize(messages, continue_last=continued, n_ctx=n_ctx)
        spans: tuple[Span, ...] = ()
        if media:
            check_shown(messages, media_mark, tokens, places)
            tokens, chunks = in_prompt(tokens, media)
            spans = tuple(Span(begin, begin + chunk.n, chunk) for begin, chunk in chunks)
            self._check_spans(tokens, spans)
        if before:
            bos = self._model.vocab.bos
            tokens = tokens[1:] if bos is not None and tokens[:1] == [bos] else tokens
            if options.truncation == "auto":
                before = kept_tokens(before, len(tokens), n_ctx, params.max_tokens, room)
            tokens = [*before, *tokens]
            spans = tuple(Span(s.begin + len(before), s.end + len(before), s.source) for s in spans)
        if len(tokens) + room > n_ctx and not may_drop:
            what = f"the prompt has {len(tokens)} tokens"
            raise InvalidRequestError(too_long(what, n_ctx, DROP_TURNS, room))
        return messages, tokens, spans

    def n_tokens(self, messages: Conversation, template_args: Mapping[str, Any]) -> int:
        """Count the tokens of a conversation's prompt, whether or not they fit. Raises as ``item`` does."""
        messages, mark, media, _ = self._take_media(_of_user(messages), True, None)
        tokens = self._model.chat_prompts.tokenize(messages, None, True, template_args, media_mark=mark)
        return len(in_prompt(tokens, media)[0]) if media else len(tokens)

    def _take_media(
        self, messages: Any, may_drop: bool, salt: str | None
    ) -> tuple[Any, str, list[Media], list[str]]:
        """Return the messages with a mark in place of each image and sound, the mark, the prepared media and places.

        Media that were prepared before are reused only for the same tenant and ``salt``: otherwise response times would
        reveal which images others have sent. ``may_drop``: turns may be left out. Old images that cannot fit are then
        not prepared; each counts as a full context.
        """
        from llamapipe.chat.media import first_media, taken_media

        first = first_media(messages)
        if first is None:
            return messages, "", [], []
        projector = self._model.projector
        if projector is None:
            raise InvalidRequestError(
                f"{first[0]} has the type {quoted(first[1])}; only text is supported, because {self._model.path.name} "
                f"{self._model.no_projector}: {GIVE_PROJECTOR}"
            )
        messages, mark, parts = taken_media(messages)
        owner = repr(cache_key(salt)).encode()
        n_ctx, n, n_pixels = self._request_builder.n_ctx, 0, 0
        media: list[Media] = []
        for part in reversed(parts) if may_drop else parts:
            if n >= n_ctx and may_drop:
                media.append(Media([[0] * n_ctx]))
                continue
            media.append(projector.media(part, owner, tenant.get().share, tenant.get().max_sound_s))
            n += media[-1].n
            n_pixels += media[-1].n_pixels
            if n_pixels > _MOST_PIXELS:
                raise InvalidRequestError(
                    f"{part.place}: the images up to this one have {n_pixels} pixels; a conversation may have "
                    f"{_MOST_PIXELS}: give fewer or smaller ones"
                )
            if n >= n_ctx and not may_drop:
                raise InvalidRequestError(
                    f"{part.place}: the images and sounds up to this one have {n} tokens; n_ctx is {n_ctx}: give fewer "
                    "or smaller ones, or raise n_ctx"
                )
        if may_drop:
            media.reverse()
        return messages, mark, media, [part.place for part in parts]

    def _check_spans(self, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        """Refuse media that one step cannot compute, or that have no text after them."""
        if tokens[-1] < 0:
            raise InvalidRequestError(
                "the prompt ends with an image or a sound, so there is no text that an answer could follow"
            )
        longest = max((span.end - span.begin for span in spans if not span.source.is_causal), default=0)
        n_ubatch = self._request_builder.n_ubatch
        if longest > n_ubatch:
            projector = self._model.projector
            smaller = projector is not None and projector.image_tokens is not None
            raise InvalidRequestError(
                f"an image has {longest} tokens, which this model computes at once; n_ubatch is {n_ubatch}: give "
                f"EngineTuning a larger n_ubatch{', or Model a smaller image_max_tokens' if smaller else ''}"
            )

    def chat_format(self, template_args: Mapping[str, Any] | None = None) -> ChatFormat:
        """Return the format in which the model's template writes tool calls and reasoning with these arguments."""
        return self._model.chat_prompts.chat_format(template_args)

    def _constrain(
        self,
        chat_format: ChatFormat,
        params: SamplingParams,
        tools: Sequence[Tool],
        tool_choice: str,
        parallel: bool,
        tail: str,
    ) -> tuple[SamplingParams, Sequence[Tool]]:
        """Return the params with the grammar that tool calls need, and the tools with the schemas in the grammar."""
        if tools and not chat_format.supports_tools:
            if chat_format.shows_tools:
                raise InvalidRequestError(
                    "tools are given, and the model's chat template shows them, but it writes calls in a format that "
                    'was not recognised; give tool_choice="none", or a chat_template that writes calls in another one'
                )
            raise InvalidRequestError(
                "tools are given, but the model's chat template has no place for them; "
                "use a model that was trained to call tools, or give a chat_template with a place for them"
            )
        constraint = next((name for name in CONSTRAINTS if getattr(params, name) is not None), None)
        if constraint is not None and constraint != "json_schema":
            if tools and tool_choice not in ("auto", "none"):
                raise InvalidRequestError(
                    f"{constraint} is given, and tool_choice forces a call; give one of them"
                )
            return params, tools
        schema: str | None = params.json_schema  # type: ignore[assignment]  # text, once it was checked

        def compiled(tools: Sequence[Tool]) -> SamplingParams:
            lark = chat_format.grammar(
                tools,
                tool_choice,
                parallel,
                prompt_tail=tail,
                schema=schema,
                whitespace=params.json_whitespace,
                plain=self._model.tool_calls == "lenient" and _may_be_plain(params),
            )
            if lark is None:
                return params
            grammar_params = replace(params, json_schema=None, lark=lark)
            self._request_builder.check_params(grammar_params)
            return grammar_params

        if not tools:
            return compiled(tools), tools
        limit_s = grammar_limit(params.grammar_timeout)
        return self._tool_schemas.followed(chat_format, tools, tool_choice, compiled, limit_s)


def _places(vocab: Vocab, tokens: Sequence[int], messages: Conversation) -> tuple[int, ...]:
    """Return where a prompt with another last message would differ from this one: before the last message's text.

    The prompt is searched for that text from its end. If the template changes the text, there is no such place.
    """
    last = messages[-1] if messages and not isinstance(messages, str) else None
    content = last.get("content") if isinstance(last, Mapping) else None
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        content = next((text for text in texts if isinstance(text, str) and text.strip()), None)
    wanted = content.strip().encode(errors="replace") if isinstance(content, str) else b""
    if not wanted:
        return ()
    n_left, pieces, begin = len(wanted) + _AFTER_MESSAGE, list[bytes](), len(tokens)
    while begin and n_left > 0:
        begin -= 1
        pieces.append(vocab.piece(tokens[begin]) if tokens[begin] >= 0 else b"")
        n_left -= len(pieces[-1]) or 1
    pieces.reverse()
    at = b"".join(pieces).rfind(wanted)
    if at < 0:
        return ()
    for n, piece in enumerate(pieces):
        at -= len(piece)
        if at < 0:
            return (begin + n,)
    return ()


def _may_be_plain(params: SamplingParams) -> bool:
    """Return whether an answer that otherwise follows a schema may be a tool call in plain JSON."""
    from llamapipe.chat.chat_format import differs_from_calls

    schema: Any = params.json_schema
    return schema is not None and differs_from_calls(schema)


def _answer_schema(response_format: Any) -> Any:
    """Return the JSON schema in ``response_format``, which may have any form of OpenAI's API.

    Raises InvalidRequestError.
    """
    if not isinstance(response_format, Mapping) or response_format.get("type") not in (
        "text",
        "json_object",
        "json_schema",
    ):
        return response_format
    if response_format["type"] == "text":
        return None
    if response_format["type"] == "json_object":
        return {"type": "object"}
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if schema is None:
        raise InvalidRequestError(
            'response_format has the type "json_schema" and no schema; give {"type": "json_schema", "json_schema": '
            '{"schema": ...}}, or the schema itself'
        )
    return schema


def _of_user(messages: Conversation) -> Conversation:
    """Return the messages; a text is a message of the user."""
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def _conversations(messages: Any) -> tuple[list[Conversation], bool]:
    """Return the conversations as a list, and whether a single one was given."""
    if isinstance(messages, str):
        return [messages], True
    messages = from_column("messages", messages)
    if not isinstance(messages, Sequence) or isinstance(messages, (bytes, bytearray)):
        raise TypeError(
            f"messages must be a list of messages, not {type(messages).__name__}: "
            'engine.chat([{"role": "user", "content": "Hello"}])'
        )
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message")
    if isinstance(messages[0], Mapping):
        return [messages], True
    return list(messages), False
