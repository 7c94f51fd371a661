"""Renders the chat template of a model's file, in a sandbox: a template is a program that came with the weights."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llamapipe.llama.model import Model

_log = logging.getLogger(__name__)

# Behind a message that is to be continued: whatever the template puts after it is cut off.
_HERE = "\x02continued here\x03"


class _Generation(Extension):
    """``{% generation %}`` marks what a model wrote, for training; here it is only what is inside."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class ChatTemplate:
    """A compiled template, with the names and settings that transformers gives to it.

    ``variables``: further names, such as ``bos_token``. Raises ValueError for a template that cannot be read.
    """

    def __init__(self, text: str, variables: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ValueError(f"the model's chat template cannot be read: {error}") from None
        self._variables = {"tools": None, "documents": None, **variables}

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The prompt for a conversation.

        It ends where an answer begins, or, without ``add_generation_prompt``, inside the last message, which is to be
        continued. Raises ValueError where the template refuses the messages.
        """
        chat = [dict(message) for message in messages]
        if not add_generation_prompt:
            if not chat:
                raise ValueError("there is no message to be continued")
            chat[-1]["content"] += _HERE
        try:
            text = self._template.render(
                messages=chat, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from None
        if add_generation_prompt:
            return text
        text, found, _ = text.rpartition(_HERE)
        if not found:
            raise ValueError(
                "the model's chat template does not show the last message, so it cannot be continued"
            )
        return text


class ModelChat:
    """The chat templates of a model: a file may have several, one of them without a name.

    ``enable_thinking``: given to templates, unless it is None.
    """

    def __init__(self, model: Model, enable_thinking: bool | None = None) -> None:
        self._model = model
        self._name: str | None = None
        self._compiled: dict[str, ChatTemplate] = {}
        self._variables: dict[str, Any] = {
            "bos_token": self._written(model.bos),
            "eos_token": self._written(model.eos),
        }
        if enable_thinking is not None:
            self._variables["enable_thinking"] = enable_thinking

    @property
    def text(self) -> str | None:
        """The template in use, None where the model has none."""
        if self._name is None:
            return self._model.chat_template
        return self._model.metadata.get(f"tokenizer.chat_template.{self._name}")

    def choose(self, name: str | None) -> str:
        """Uses the template of this name from now on, and returns it. Raises ValueError where there is none."""
        self._name = name
        if not self.text:
            named = "" if name is None else f" named {name!r}"
            raise ValueError(
                f"{self._model.path.name} has no chat template{named}; run without --apply_chat_template"
            )
        return self.text

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """See ``ChatTemplate.render``; tries without system messages where a template has no place for them."""
        text = self.choose(self._name)
        if text not in self._compiled:
            self._compiled[text] = ChatTemplate(text, self._variables)
        template = self._compiled[text]
        try:
            return template.render(messages, add_generation_prompt)
        except ValueError:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages):
                raise
            # The harness's own models do the same.
            _log.warning("the chat template refuses these messages; trying without the system message")
            return template.render(others, add_generation_prompt)

    def _written(self, token: int | None) -> str:
        return "" if token is None else self._model.vocab.detokenize([token], unparse_special=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: jinja2's own filter would write it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
