"""The format of a template's answers: one object per template, which makes grammars and parsers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from llamapipe._messages import quoted
from llamapipe.chat._answer_grammar import AnswerGrammar, GrammarWriter, Literals, SpecialId, TaggedArguments
from llamapipe.chat._call_format import (
    KNOWN_REASONING,
    CallFormat,
    ReasoningMarkers,
    Render,
    Style,
    TemplateProbe,
    segments,
)
from llamapipe.chat._harmony import REASONING as HARMONY_REASONING
from llamapipe.chat._harmony import harmony_grammar, is_harmony
from llamapipe.chat.parser import ChatParser
from llamapipe.chat.tools import Tool
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.schema import Schema, closed_objects, schema_object, subschemas


class ChatFormat:
    """How the answers of one template mark tool calls and reasoning. Immutable; any thread.

    ``of`` detects it once per template. Each request gets its grammar and its parser from it.

    - ``supports_tools``: the template writes tool calls in a format that was recognised.
    - ``reasoning``: the markers around reasoning, or None.
    - ``reasoning_off``: template arguments that switch reasoning off, such as ``{"enable_thinking": False}``.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        reasoning: ReasoningMarkers | None,
        reasoning_off: dict[str, Any],
        special_id: SpecialId,
        harmony: bool = False,
    ) -> None:
        self.calls = calls
        self.reasoning = reasoning
        self.reasoning_off = reasoning_off
        self._harmony = harmony
        self._literals = Literals(special_id)

    @classmethod
    def of(
        cls, render: Render, special_id: SpecialId, is_eog: Callable[[int], bool] | None = None
    ) -> ChatFormat:
        """Probes a template: about twenty renders of short conversations.

        ``special_id`` returns the token's id if the text is one control token of the vocabulary, else None. ``is_eog``
        returns whether a token ends generation. Such a token is never part of a call, although templates write it
        after calls.
        """
        probe = TemplateProbe(render)
        if is_harmony(probe.prompt, probe.calls(1)):
            return cls(None, HARMONY_REASONING, {}, special_id, harmony=True)
        calls, reasoning = probe.call_format(), probe.reasoning()
        if calls is not None and is_eog is not None:
            calls = _without_eog(
                calls, lambda text: (token := special_id(text)) is not None and is_eog(token)
            )
        if reasoning is None:  # such tokens are in the vocabulary of a reasoning model
            known = (
                m
                for m in KNOWN_REASONING
                if special_id(m.start) is not None and special_id(m.end) is not None
            )
            reasoning = next(known, None)
        return cls(calls, reasoning, probe.reasoning_off(), special_id)

    def __repr__(self) -> str:
        calls = "HARMONY" if self._harmony else self.calls.style.name if self.calls else None
        return f"<ChatFormat calls={calls} reasoning={self.reasoning}>"

    @property
    def supports_tools(self) -> bool:
        """True if the template writes tool calls in a format that was recognised."""
        return self._harmony or self.calls is not None

    def grammar(
        self,
        tools: Sequence[Tool],
        choice: str,
        parallel: bool,
        *,
        prompt_tail: str,
        schema: Schema | None = None,
        whitespace: str = "compact",
    ) -> str | None:
        """A Lark grammar, for llguidance, of the answers that a request allows; None if any text is allowed.

        - ``choice``: "auto" (text, then valid calls), "none", "required" (calls only), or the name of the one tool to
          call. ``parallel``: several calls are allowed, where the template can write several.
        - ``prompt_tail``: the end of the rendered prompt, which may have begun or closed the reasoning.
        - ``schema``: the JSON schema of the text after the reasoning; with "auto", the answer is such JSON or calls.
          ``whitespace``: the spaces of such JSON, as ``SamplingParams.json_whitespace`` names them.

        Raises InvalidRequestError if the template cannot write calls, or a schema cannot be followed exactly.
        """
        used = [] if choice == "none" else [t for t in tools if choice in ("auto", "required", t.name)]
        required = choice not in ("auto", "none")
        if required and not used:
            raise InvalidRequestError(f"tool_choice is {quoted(choice)}, but there is no such tool")
        if used and not self.supports_tools:
            raise InvalidRequestError(
                "the model's chat template cannot write tool calls; use another template"
            )
        if not used and schema is None:
            return None
        answer = AnswerGrammar(
            tools=[_Checked(t.name, _without_notes(closed_objects(_checked(t)))) for t in used],
            required=required,
            parallel=parallel,
            schema=None if schema is None else schema_object(schema),
            reasoning=None if self._is_closed(prompt_tail) else self.reasoning,
            reasoning_open=self._is_open(prompt_tail),
            whitespace=whitespace,
        )
        if self._harmony:
            return harmony_grammar(answer, self._literals)
        return GrammarWriter(self.calls, answer, self._literals).write()

    def relaxed(self, tool: Tool, keeps_types: bool = True) -> Tool:
        """The tool with arguments that are any JSON object, for a schema that no grammar can express.

        ``keeps_types``: of arguments whose text says only with its type whether it is a string.
        """
        anything: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": True}
        if keeps_types and self.calls is not None and self.calls.style is Style.TAGGED:
            properties = tool.parameters.get("properties")
            types = {
                name: {"type": kind} if isinstance(kind := member.get("type"), str) else {}
                for name, member in (properties if isinstance(properties, dict) else {}).items()
                if isinstance(member, dict)
            }
            try:
                TaggedArguments(self.calls, {**anything, "properties": types})
                anything["properties"] = types
            except InvalidRequestError:
                pass
        return replace(tool, parameters=anything)

    def parser(
        self,
        tools: Sequence[Tool],
        choice: str,
        *,
        prompt_tail: str,
        stream_calls: bool = False,
        lenient: bool = False,
        parallel: bool = True,
    ) -> ChatParser:
        """A parser for one answer to a prompt that ends with ``prompt_tail``.

        ``stream_calls``: return a call's arguments while they arrive. Use it only if the grammar constrains the answer.
        ``lenient``: with "auto", an answer that consists of calls as plain JSON is read as these, of several calls only
        if ``parallel``.
        """
        return ChatParser(
            self.calls,
            None if self._is_closed(prompt_tail) else self.reasoning,
            reasoning_open=self._is_open(prompt_tail),
            tools={} if choice == "none" else {t.name: t.parameters for t in tools},
            stream_calls=stream_calls,
            required=choice not in ("auto", "none"),
            harmony=self._harmony,
            lenient=lenient and choice == "auto",
            parallel=parallel,
        )

    def continued_tail(self, prompt_tail: str, messages: Any, is_constrained: bool) -> str:
        """The ``prompt_tail`` for a prompt that ends inside its last message.

        Raises InvalidRequestError if the template's messages cannot be continued by a constrained answer.
        """
        if self._harmony and is_constrained:
            raise InvalidRequestError(
                "continue_last: this model's template cannot continue a message with tools or a response_format"
            )
        last = messages[-1].get("content") if messages else None
        if self.reasoning is not None and isinstance(last, str):
            start, end = last.rfind(self.reasoning.start), last.rfind(self.reasoning.end)
            if start > end:
                return self.reasoning.start  # the message ends inside its reasoning
        return prompt_tail

    def _is_open(self, prompt_tail: str) -> bool:
        return self.reasoning is not None and prompt_tail.rstrip().endswith(self.reasoning.start)

    def _is_closed(self, prompt_tail: str) -> bool:
        return self.reasoning is not None and prompt_tail.rstrip().endswith(self.reasoning.end)


def _without_eog(form: CallFormat, ends: Callable[[str], bool]) -> CallFormat:
    """The format without tokens that end generation: they are not part of the text."""

    def cut(text: str) -> tuple[str, bool]:
        kept = list(takewhile(lambda one: not ends(one), segments(text)))
        return "".join(kept), "".join(kept) != text

    call_end, ended = cut(form.call_end)
    if ended:
        return replace(form, call_end=call_end.rstrip(), section_end="", parallel=False)
    return replace(form, section_end=cut(form.section_end)[0].rstrip())


_NOTES = ("title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly")


def _without_notes(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without annotations, which make up most of the text of many tools. Changes it in place."""
    for _, part in subschemas(schema):
        for name in _NOTES:
            part.pop(name, None)
    return schema


class _Checked:
    """A tool with its checked schema, in which objects allow listed properties only."""

    def __init__(self, name: str, parameters: dict[str, Any]) -> None:
        self.name = name
        self.parameters = parameters


def _checked(tool: Tool) -> dict[str, Any]:
    try:
        return schema_object(tool.parameters)
    except InvalidRequestError as e:
        raise InvalidRequestError(f"tool {quoted(tool.name)}: {e}") from None
