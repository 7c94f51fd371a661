"""From a conversation to a checked prompt, and from generated text to an answer.

The template of the model writes the prompt. ``ChatFormat`` says how that template marks tool calls and reasoning; it
gives the grammar that the text must follow, and the parser that reads it. If a call is forced, or a tool is ``strict``,
a schema that no grammar can express is an error. Otherwise the chat runs without a guarantee for this tool
(``ToolSchemas``): its arguments are then any JSON object. Servers that speak MCP send such schemas.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import thread_time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from llamapipe._engine.deliver import DeltaParser
from llamapipe._engine.request import Span
from llamapipe._engine.sampling import GrammarBudget
from llamapipe._engine.submit import CheckedPrompt, RequestBuilder, with_prompt_index
from llamapipe._engine.tenant import cache_key, grammar_limit
from llamapipe._messages import quoted
from llamapipe._sampling_table import CONSTRAINTS
from llamapipe.arguments import check_choice, check_flag, from_column
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.model import Model
from llamapipe.llama.projector import Media, in_prompt
from llamapipe.locks import Lock
from llamapipe.params import SamplingParams
from llamapipe.results import ChatChoice, ChatCompletion, ChatFinishReason, Choice, Completion
from llamapipe.structured.compile import TooLongError

if TYPE_CHECKING:
    from llamapipe.chat.chat_format import ChatFormat
    from llamapipe.chat.parser import ChatParser
    from llamapipe.chat.results import ToolCall
    from llamapipe.chat.tools import Tool

Message: TypeAlias = "Mapping[str, Any]"
Conversation: TypeAlias = "str | Sequence[Message]"
ToolChoice: TypeAlias = "str | Mapping[str, Any]"
Truncation: TypeAlias = Literal["error", "auto"]
_MOST_PIXELS = 2**28  # of the images of a conversation: decoding them takes seconds
_TAIL_TOKENS = 24  # of a prompt: enough to see whether the template has opened a marker


class ChatOptions(NamedTuple):
    """What a chat asks for besides its messages and params; see ``Engine.chat``."""

    tools: Sequence[Any] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: Any = None
    template_args: Mapping[str, Any] | None = None
    continue_last: bool = False
    truncation: Truncation = "error"

    @property
    def takes_long(self) -> bool:
        """Whether rendering the conversation, or compiling its grammar, would block an event loop."""
        return self.tools is not None or self.response_format is not None or self.truncation != "error"


class CheckedChat(NamedTuple):
    """A checked conversation: its prompt with params, and the parser of an answer (None: the text is the answer)."""

    item: CheckedPrompt
    new_parser: Callable[[], ChatParser] | None

    def delta_parser(self) -> DeltaParser:
        """A parser for the stream of one answer."""
        parser = None if self.new_parser is None else self.new_parser()
        return DeltaParser(parser, len(self.item.tokens))

    def answer(self, completion: Completion) -> ChatCompletion:
        """The completion of the prompt as an answer."""
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
        self._tool_schemas = ToolSchemas(request_builder)

    def __repr__(self) -> str:
        return f"<ChatBuilder of {self._model!r}>"

    def items(
        self, messages: Any, params: SamplingParams | None, options: ChatOptions
    ) -> tuple[list[CheckedChat], bool]:
        """Each conversation, checked, and whether a single one was given.

        Raises TypeError, ValueError and InvalidRequestError; errors in a list name the conversation's index.
        """
        from llamapipe.chat.tools import check_tools

        conversations, single = _conversations(messages)
        if options.tools is not None:  # once for all conversations: they may come from a generator
            options = options._replace(tools=check_tools(options.tools))
        if single:
            return [self.item(conversations[0], params, options)], True
        items = []
        for index, conversation in enumerate(conversations):
            try:
                items.append(self.item(conversation, params, options))
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
        """One conversation, checked. Raises TypeError, ValueError, InvalidRequestError, ImportError.

        ``before``: tokens of what was said earlier, which precede the prompt; the oldest are left out as turns are.
        """
        from llamapipe.chat.tools import allowed_tools, check_tool_choice, check_tools

        if params is None:
            params = SamplingParams(max_tokens=None)
        elif not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        tools = check_tools(options.tools)
        choice, allowed = allowed_tools(options.tool_choice, tools)
        choice = check_tool_choice(choice, tools)
        parallel = check_flag("parallel_tool_calls", options.parallel_tool_calls)
        parallel = parallel and choice in ("auto", "required")
        shown = tools if choice != "none" else ()
        messages, tokens, spans = self._prompt(messages, params, options, shown, before)
        if options.response_format is not None:
            if any(getattr(params, name) is not None for name in CONSTRAINTS):
                raise InvalidRequestError(
                    "response_format and another constraint are both given; give only one"
                )
            params = replace(params, json_schema=_answer_schema(options.response_format))
        chat_format = self.chat_format()
        end = [token for token in tokens[-_TAIL_TOKENS:] if token >= 0] if spans else tokens[-_TAIL_TOKENS:]
        tail = self._model.vocab.detokenize(end, unparse_special=True)
        active: Sequence[Tool] = allowed if choice != "none" else ()
        if options.continue_last:
            tail = chat_format.continued_tail(tail, messages, bool(active) or params.json_schema is not None)
        constrained, active = self._constrained(chat_format, params, active, choice, parallel, tail)
        item = self._request_builder.item(tokens, constrained, spans)
        if not active and chat_format.reasoning is None:
            return CheckedChat(item, None)  # control tokens have no text

        # Only where nothing but the tools limits the answer, the text is free, and may be a call as plain JSON.
        is_free = all(getattr(params, name) is None for name in CONSTRAINTS) and not options.continue_last

        def new_parser() -> ChatParser:
            return chat_format.parser(
                active,
                choice,
                prompt_tail=tail,
                stream_calls=constrained is not params,
                lenient=is_free and self._model.tool_calls == "lenient",
                parallel=parallel,
            )

        return CheckedChat(item._replace(piece=self._model.vocab.written_piece), new_parser)

    def _prompt(
        self,
        messages: Conversation,
        params: SamplingParams,
        options: ChatOptions,
        tools: Sequence[Tool],
        before: Sequence[int],
    ) -> tuple[Conversation, list[int], tuple[Span, ...]]:
        """The messages that the prompt has, its tokens, and the images and sounds among them."""
        from llamapipe.chat.media import check_shown
        from llamapipe.chat.messages import check_messages, kept_messages, kept_tokens

        args = {} if options.template_args is None else options.template_args
        if not isinstance(args, Mapping):
            raise TypeError(f"template_args must be a dict, not {type(args).__name__}")
        given = [tool.as_openai() for tool in tools] or None
        n_ctx = self._request_builder.n_ctx
        may_drop = options.truncation == "auto"
        messages, media_mark, media = self._taken_media(messages, may_drop, params.cache_salt)
        written: Callable[..., list[int]] = partial(
            self._model.chat_prompts.tokenize,
            tools=given,
            add_generation_prompt=True,
            template_args=args,
            media_mark=media_mark,
        )

        def n_tokens(messages: Conversation) -> int:
            tokens = written(messages)
            return len(in_prompt(tokens, media)[0]) if media else len(tokens)

        continued = check_flag("continue_last", options.continue_last)
        if check_choice("truncation", options.truncation, ("error", "auto")) == "auto":
            messages = kept_messages(check_messages(messages), n_tokens, n_ctx, params.max_tokens)
        tokens = written(messages, continue_last=continued, n_ctx=n_ctx)
        spans: tuple[Span, ...] = ()
        if media:
            check_shown(messages, media_mark, tokens)
            tokens, chunks = in_prompt(tokens, media)
            spans = tuple(Span(begin, begin + chunk.n, chunk) for begin, chunk in chunks)
            self._check_spans(tokens, spans)
        if before:
            bos = self._model.vocab.bos
            tokens = tokens[1:] if bos is not None and tokens[:1] == [bos] else tokens
            if options.truncation == "auto":
                before = kept_tokens(before, len(tokens), n_ctx, params.max_tokens)
            tokens = [*before, *tokens]
            spans = tuple(Span(s.begin + len(before), s.end + len(before), s.source) for s in spans)
        return messages, tokens, spans

    def n_tokens(self, messages: Conversation, template_args: Mapping[str, Any]) -> int:
        """The tokens of a conversation's prompt, whether or not they fit. Raises as ``item``."""
        messages, mark, media = self._taken_media(messages, True, None)
        tokens = self._model.chat_prompts.tokenize(messages, None, True, template_args, media_mark=mark)
        return len(in_prompt(tokens, media)[0]) if media else len(tokens)

    def _taken_media(self, messages: Any, may_drop: bool, salt: str | None) -> tuple[Any, str, list[Media]]:
        """The messages with marks in the places of images and sounds, the mark, and what these are in a prompt.

        Those that were prepared before are found for the same tenant and ``salt`` only: otherwise the time would tell
        which images others have sent. ``may_drop``: turns may be left out. Old images that cannot fit are not prepared
        then, and count as a whole context.
        """
        from llamapipe.chat.media import first_media, taken_media

        first = first_media(messages)
        if first is None:
            return messages, "", []
        projector = self._model.projector
        if projector is None:
            raise InvalidRequestError(
                f"{first[0]} has the type {quoted(first[1])}; only text is supported, because {self._model.path.name} "
                f"{self._model.no_projector}: give Model(…, mmproj=FILE) the model's second file, if it has one"
            )
        messages, mark, given = taken_media(messages)
        owner = repr(cache_key(salt)).encode()
        n_ctx, n, n_pixels = self._request_builder.n_ctx, 0, 0
        media: list[Media] = []
        for part in reversed(given) if may_drop else given:
            if n >= n_ctx and may_drop:
                media.append(Media([[0] * n_ctx]))
                continue
            media.append(projector.media(part, owner))
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
        return messages, mark, media

    def _check_spans(self, tokens: Sequence[int], spans: Sequence[Span]) -> None:
        """Refuses what a step cannot compute."""
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

    def chat_format(self) -> ChatFormat:
        """How the model's template writes tool calls and reasoning; found once."""
        return self._model.chat_prompts.chat_format()

    def _constrained(
        self,
        chat_format: ChatFormat,
        params: SamplingParams,
        tools: Sequence[Tool],
        choice: str,
        parallel: bool,
        tail: str,
    ) -> tuple[SamplingParams, Sequence[Tool]]:
        """The params with the grammar that tool calls need, and the tools with the schemas that are in it."""
        if tools and not chat_format.supports_tools:
            raise InvalidRequestError(
                "tools are given, but the model's chat template has no place for them; "
                "use a model that was trained to call tools, or give a chat_template with a place for them"
            )
        given = next((name for name in CONSTRAINTS if getattr(params, name) is not None), None)
        if given is not None and given != "json_schema":
            if tools and choice not in ("auto", "none"):
                raise InvalidRequestError(
                    f"{given} is given, and tool_choice forces a call; give one of them"
                )
            return params, tools
        schema: str | None = params.json_schema  # type: ignore[assignment]  # text, once it was checked

        def compiled(tools: Sequence[Tool]) -> SamplingParams:
            lark = chat_format.grammar(
                tools,
                choice,
                parallel,
                prompt_tail=tail,
                schema=schema,
                whitespace=params.json_whitespace,
            )
            if lark is None:
                return params
            made = replace(params, json_schema=None, lark=lark)
            self._request_builder.check_params(made)
            return made

        if not tools:
            return compiled(tools), tools
        limit_s = grammar_limit(params.grammar_timeout)
        return self._tool_schemas.followed(chat_format, tools, choice, compiled, limit_s)


def _answer_schema(given: Any) -> Any:
    """The JSON schema in ``response_format``, also in the forms of OpenAI's API. Raises InvalidRequestError."""
    if not isinstance(given, Mapping) or given.get("type") not in ("text", "json_object", "json_schema"):
        return given
    if given["type"] == "text":
        return None
    if given["type"] == "json_object":
        return {"type": "object"}
    wrapper = given.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if schema is None:
        raise InvalidRequestError(
            'response_format has the type "json_schema" and no schema; give {"type": "json_schema", "json_schema": '
            '{"schema": ...}}, or the schema itself'
        )
    return schema


def _conversations(messages: Any) -> tuple[list[Conversation], bool]:
    """The conversations as a list, and whether a single one was given."""
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


Compile = Callable[["Sequence[Tool]"], SamplingParams]
_MAX_REMEMBERED = 256
_MANY = 64  # tools: to look at each of more takes a second
_TOGETHER = "with the other tools,"  # begins the reason of a tool whose schema can be followed alone
_MAX_MESSAGE = 300  # characters of the compiler's message that an error shows


class ToolSchemas:
    """Finds the tools whose schemas cannot be followed, and remembers them. Any thread."""

    def __init__(self, request_builder: RequestBuilder) -> None:
        self._request_builder = request_builder
        self._lock = Lock()
        self._relaxed: OrderedDict[str, Mapping[str, str]] = (
            OrderedDict()
        )  # of lists of tools: reasons by name
        self._warned: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ToolSchemas of {self._request_builder!r}>"

    def followed(
        self,
        chat_format: ChatFormat,
        tools: Sequence[Tool],
        choice: str,
        compiled: Compile,
        limit_s: float | None = None,
    ) -> tuple[SamplingParams, Sequence[Tool]]:
        """The params that ``compiled`` makes of the tools, and the tools with the schemas that are in their grammar.

        ``limit_s``: processor time that it may take to find those that cannot be followed.

        Raises InvalidRequestError, which names the tool, for a schema that cannot be followed and must be;
        ConstraintError over the limit.
        """
        began_s, budget = thread_time(), GrammarBudget(limit_s)

        def check_time() -> None:
            budget.spent_s = thread_time() - began_s
            if (late := budget.error()) is not None:
                raise late

        key = json.dumps([(tool.name, tool.parameters, tool.strict) for tool in tools])
        with self._lock:
            reasons = self._relaxed.get(key, {}) if choice == "auto" else {}
        try:
            return self._made(chat_format, tools, reasons, compiled)
        except InvalidRequestError as e:
            error = e
        used = [tool for tool in tools if choice in ("auto", "required", tool.name)]
        if isinstance(error, TooLongError) and len(used) > _MANY:  # before each is looked at alone
            if choice != "auto":
                raise error
            least = {tool.name: f"{_TOGETHER} {error}" for tool in used if not tool.strict}
            try:
                self._made(chat_format, tools, least, compiled)
            except TooLongError as e:
                raise e from None
            except InvalidRequestError:
                pass  # a strict one is at fault
        reasons = {}
        for tool in used:  # each has its own time limit; there may be thousands
            check_time()
            if reason := self._fault(chat_format, tool):
                reasons[tool.name] = reason
        for tool in used:
            if tool.name in reasons and (choice != "auto" or tool.strict):
                raise InvalidRequestError(f"tool {quoted(tool.name)}: {reasons[tool.name]}") from None
        if choice != "auto":
            raise error
        attempts = [reasons] if reasons else []
        # Each can be compiled alone, and all together may be too large: the longest lose their guarantee first.
        longest = sorted((t for t in used if not t.strict), key=lambda t: -len(json.dumps(t.parameters)))
        n = 1
        while n < 2 * len(longest):
            too_large = {tool.name: f"{_TOGETHER} {error}" for tool in longest[:n]}
            attempts.append(reasons | too_large)
            n *= 2
        for reasons in attempts:
            check_time()
            try:
                made = self._made(chat_format, tools, reasons, compiled)
            except InvalidRequestError as e:
                error = e
                continue
            self._remember(key, reasons)
            return made
        raise error

    def _made(
        self,
        chat_format: ChatFormat,
        tools: Sequence[Tool],
        reasons: Mapping[str, str],
        compiled: Compile,
    ) -> tuple[SamplingParams, Sequence[Tool]]:
        made = [
            chat_format.relaxed(tool, keeps_types=not reasons[tool.name].startswith(_TOGETHER))
            if tool.name in reasons
            else tool
            for tool in tools
        ]
        return compiled(made), made

    def _fault(self, chat_format: ChatFormat, tool: Tool) -> str | None:
        """Why the schema of a tool cannot be compiled alone; None if it can."""
        from llamapipe.structured.schema import closed_objects, schema_object

        try:
            schema = closed_objects(schema_object(tool.parameters))
            self._request_builder.check_params(SamplingParams(json_schema=schema))
            lark = chat_format.grammar((tool,), tool.name, False, prompt_tail="")
            self._request_builder.check_params(SamplingParams(lark=lark))
        except InvalidRequestError as e:
            return _short(str(e).removeprefix(f"tool {quoted(tool.name)}: "))
        return None

    def _remember(self, key: str, reasons: Mapping[str, str]) -> None:
        new = []
        with self._lock:
            self._relaxed[key] = reasons
            if len(self._relaxed) > _MAX_REMEMBERED:
                self._relaxed.popitem(last=False)
            for named_reason in reasons.items():
                if named_reason not in self._warned:
                    new.append(named_reason)
                    self._warned[named_reason] = None
            while len(self._warned) > _MAX_REMEMBERED:
                self._warned.popitem(last=False)
        for name, reason in new:
            logging.getLogger("llamapipe").warning(
                "tool %r: %s; its arguments are any JSON object, which may not match the schema", name, reason
            )


def _short(message: str) -> str:
    """The first line of a message, in which the schema is not called by the name of an option."""
    line = message.partition("\n")[0]
    if line.startswith("json_schema"):
        line = f"the JSON schema{line.removeprefix('json_schema')}"
    elif line.startswith("lark"):
        line = f"the grammar of its calls{line.removeprefix('lark')}"
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."
