"""A model's chat templates, and the prompts rendered with them.

A file may hold several templates: one without a name, and named ones. If a request has tools, the template ``tool_use``
replaces the unnamed one.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from llamapipe._lazy import needs_extra
from llamapipe._messages import DROP_TURNS, quoted, too_long
from llamapipe.chat.control_text import ControlTexts, tokenized, unused_mark
from llamapipe.errors import InvalidRequestError
from llamapipe.locks import Lock
from llamapipe.structured.schema import check_depth

if TYPE_CHECKING:
    from llamapipe.chat.chat_format import ChatFormat
    from llamapipe.chat.template import ChatTemplate, WriteCalls
    from llamapipe.chat.tools import ToolDefinition
    from llamapipe.llama.model import Model

_MOST_FORMATS = 64  # maximum cached formats; clients could otherwise fill the cache with template arguments
_NO_TEMPLATE = "{} has no chat template; give one with chat_template, as text or as a file"


class ChatPrompts:
    """Renders and tokenizes conversations for one model. Any thread."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._compiled: dict[str, ChatTemplate] = {}
        self._lock = Lock()
        self._format: ChatFormat | None = None
        self._format_lock = Lock()
        # By the template arguments that the template reads, as JSON.
        self._formats: OrderedDict[str, ChatFormat] = OrderedDict()
        self._has_warned = False

    def __repr__(self) -> str:
        return f"<ChatPrompts of {self._model!r}>"

    def text(self, name: str | None = None) -> str | None:
        """Return the source of the unnamed template or of a named one; None if the file does not have it."""
        if name is None:
            return self._model.chat_template
        return self._model.metadata.get(f"tokenizer.chat_template.{name}")

    def template(self, name: str | None = None) -> ChatTemplate:
        """Compile a template. Raises InvalidRequestError if there is none, ImportError without the extra ``chat``."""
        text = self.text(name)
        if not text:
            if name is None:
                raise InvalidRequestError(_NO_TEMPLATE.format(self._model.path.name))
            raise InvalidRequestError(f"{self._model.path.name} has no chat template named {quoted(name)}")
        with self._lock:
            template = self._compiled.get(text)
            if template is None:
                template = self._compiled[text] = self.compile(text, self._model.vocab.add_bos)
        return template

    def compile(self, text: str, strips_bos: bool) -> ChatTemplate:
        """Return a template with the vocabulary's BOS and EOS. Raises InvalidRequestError, ImportError."""
        with needs_extra("chat", "chat"):
            from llamapipe.chat.template import ChatTemplate
        vocab = self._model.vocab
        return ChatTemplate(text, self._token_text(vocab.bos), self._token_text(vocab.eos), strips_bos)

    def _token_text(self, token: int | None) -> str:
        return "" if token is None else self._model.vocab.written_piece(token).decode(errors="replace")

    def _for(self, tools: object) -> ChatTemplate:
        """Return the template for a conversation with these tools."""
        is_own = not self._model.is_template_given
        return self.template("tool_use" if tools and is_own and self.text("tool_use") else None)

    def arguments(self) -> frozenset[str]:
        """Return the names of template arguments that the model's templates may read. Raises as ``template`` does."""
        return self._for(None).arguments | self._for(True).arguments

    def render(
        self,
        messages: object,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_args: Mapping[str, Any],
        continue_last: bool | str = False,
    ) -> str:
        """Render a conversation; see ``Model.render_chat``. ``tools``: in OpenAI's format.

        ``continue_last``: see ``ChatTemplate.render``.
        """
        template = self._for(tools)
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_last=continue_last,
            reasoning_opening=self._opening(continue_last, template_args),
            template_args=template_args,
            write_calls=self._call_writer(messages, template_args),
        )
        self._warn_of_dropped(template, messages, tools, template_args)
        return text

    def _opening(self, continue_last: bool | str, template_args: Mapping[str, Any]) -> str:
        return self.chat_format(template_args).markers.opening if continue_last else ""

    def render_probe(
        self,
        messages: object,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        given_args: Mapping[str, Any] | None = None,
        **template_args: Any,
    ) -> str:
        """Render a conversation to probe the template, without warnings. ``template_args`` replace the caller's."""
        return self._for(tools).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_args={**(given_args or {}), **template_args},
            is_probe=True,
        )

    def _call_writer(self, messages: object, template_args: Mapping[str, Any]) -> WriteCalls | None:
        """Return a function that writes the tool calls that a template leaves out; None if it is not needed."""
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            return None
        if not any(isinstance(message, Mapping) and message.get("tool_calls") for message in messages):
            return None
        calls = self.chat_format(template_args).calls
        return calls.written if calls is not None and calls.in_content else None

    def chat_format(self, template_args: Mapping[str, Any] | None = None) -> ChatFormat:
        """Find how the template writes tool calls and reasoning with these arguments. Raises as ``template`` does.

        The result is cached for the most recently used sets of arguments that the template reads. No lock is held while
        the template is probed with a client's arguments, so other clients do not wait.
        """
        from llamapipe.chat.chat_format import ChatFormat

        with self._format_lock:
            if self._format is None:
                self._format = ChatFormat.of(self.render_probe, self._special_id, self._model.vocab.is_eog)
            usual = self._format
        args = self._probed_arguments(template_args) if template_args else {}
        if not args:
            return usual
        key = json.dumps(args, sort_keys=True)
        with self._format_lock:
            if (known := self._formats.get(key)) is not None:
                self._formats.move_to_end(key)
                return known
        from llamapipe.chat.sandbox import limited

        render = partial(self.render_probe, given_args=args)
        with limited():
            chat_format = ChatFormat.of(render, self._special_id, self._model.vocab.is_eog, usual)
        with self._format_lock:
            self._formats[key] = chat_format
            while len(self._formats) > _MOST_FORMATS:
                self._formats.popitem(last=False)
        return chat_format

    def _probed_arguments(self, template_args: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that at least one of the model's templates reads, in a short form."""
        arguments: dict[str, Any] = {}
        for template in dict.fromkeys((self._for(True), self._for(None))):
            arguments |= template.probed_arguments(template_args)
        return arguments

    def _special_id(self, text: str) -> int | None:
        """Return the token id of a text that is a single control or user-defined token."""
        vocab = self._model.vocab
        tokens = vocab.tokenize(text, add_special=False, parse_special=True)
        if len(tokens) == 1 and vocab.tokenize(text, add_special=False) != tokens:
            return tokens[0]
        return None

    @staticmethod
    def definitions(tools: Iterable[ToolDefinition] | None) -> list[dict[str, Any]] | None:
        """Return a caller's tools in OpenAI's format. Raises as ``check_tools`` does."""
        if tools is None:
            return None
        from llamapipe.chat.tools import check_tools

        return [tool.as_openai() for tool in check_tools(tools)] or None

    def _warn_of_dropped(
        self,
        template: ChatTemplate,
        messages: Any,
        tools: Sequence[Mapping[str, Any]] | None,
        template_args: Mapping[str, Any],
    ) -> None:
        """Log a warning, once per template, about parts of the messages that the template leaves out."""
        writer = self._call_writer(messages, template_args)
        for what in template.newly_dropped(messages, tools, template_args, writer):
            logging.getLogger("llamapipe").warning(
                "the chat template of %s leaves out %s: the model does not see them; use a model whose template "
                "has a place for them, or give a chat_template",
                self._model.path.name,
                what,
            )

    def tokenize(
        self,
        messages: object,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_args: Mapping[str, Any],
        continue_last: bool | str = False,
        n_ctx: int | None = None,
        media_mark: str = "",
    ) -> list[int]:
        """Tokenize a conversation; see ``Model.tokenize_chat``. ``continue_last``: see ``ChatTemplate.render``.

        ``media_mark``: see ``chat/media.py``; the ``i``-th mark becomes the token ``-1 - i``.

        ``n_ctx``: raises InvalidRequestError for a text so long that it must have at least this many tokens.
        """
        vocab, controls = self._model.vocab, self.controls
        check_depth("messages, tools or template_args are", [messages, tools, template_args])
        mark = unused_mark([messages, tools, template_args])
        template = self._for(tools)
        text = template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_last=continue_last,
            reasoning_opening=self._opening(continue_last, template_args),
            template_args=template_args,
            change_text=lambda text: controls.marked(text, mark),
            write_calls=self._call_writer(messages, template_args),
        )
        self._warn_of_dropped(template, messages, tools, template_args)
        if n_ctx is not None and len(text) >= n_ctx and (n_least := vocab.least_tokens(len(text))) >= n_ctx:
            what = f"the conversation has {len(text)} characters, at least {n_least} tokens"
            raise InvalidRequestError(too_long(what, n_ctx, DROP_TURNS))
        return tokenized(text, mark, controls, vocab.tokenize, self._added_tokens, media_mark)

    def warn_of_control_text(self, text: str) -> None:
        """Warn, once per model, that a plain prompt contains ``text``, the name of a control token."""
        if not self._has_warned:
            self._has_warned = True
            logging.getLogger("llamapipe").warning(
                "a prompt contains %r, the text of a control token, which is tokenized as plain text: "
                "use engine.chat() for a conversation, or pass the tokens of "
                "model.tokenize(prompt, parse_special=True)",
                text,
            )

    @cached_property
    def controls(self) -> ControlTexts:
        """The special tokens of the vocabulary."""
        return ControlTexts(self._model.vocab.special_tokens())

    @cached_property
    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """The tokens that the vocabulary adds before and after a text."""
        tokenize = self._model.vocab.tokenize
        plain, whole = tokenize("a", add_special=False), tokenize("a")
        for n in range(len(whole) - len(plain) + 1):
            if whole[n : n + len(plain)] == plain:
                return whole[:n], whole[n + len(plain) :]
        raise InvalidRequestError(
            f"{self._model.path.name} adds special tokens in a way that is not supported"
        )
