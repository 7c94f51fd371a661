"""The format of a template's answers. ``ChatFormat`` makes the grammars and parsers of one template's answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from llamapipe._messages import quoted
from llamapipe.chat._answer_grammar import AnswerGrammar, CallableTool, GrammarWriter
from llamapipe.chat._answer_markers import AnswerMarkers, MarkerProbe
from llamapipe.chat._call_format import PYTHON_TAG, CallFormat, Style, n_tags, segments
from llamapipe.chat._harmony import FINAL as HARMONY_FINAL
from llamapipe.chat._harmony import MARKERS as HARMONY_MARKERS
from llamapipe.chat._harmony import harmony_grammar, is_harmony
from llamapipe.chat._lark import Literals, SpecialId
from llamapipe.chat._tagged_arguments import TaggedArguments
from llamapipe.chat._template_probe import Render, TemplateProbe
from llamapipe.chat.options import LimitedReasoning
from llamapipe.chat.parser import ChatParser
from llamapipe.chat.tools import Tool
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.schema import Schema, closed_objects, schema_object, subschemas


class ChatFormat:
    """The markers of tool calls and reasoning in one template's answers. Immutable; any thread.

    ``of`` detects the format once per template and set of template arguments. ``grammar`` and ``parser`` return the
    grammar and the parser for a request.

    - ``supports_tools``: the template writes tool calls in a recognised format.
    - ``shows_tools``: the template has a place for the definitions of tools.
    - ``markers``: the markers of reasoning and text. ``reasoning``: the pair around reasoning, or None.
    - ``reasoning_off``: template arguments that switch reasoning off, such as ``{"enable_thinking": False}``.
    - ``has_efforts``: the template's output depends on ``reasoning_effort``.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        markers: AnswerMarkers,
        reasoning_off: dict[str, Any],
        special_id: SpecialId,
        harmony: bool = False,
        shows_tools: bool = True,
        has_efforts: bool = False,
    ) -> None:
        self.calls = calls
        self.has_efforts = has_efforts
        self.shows_tools = shows_tools
        self.markers = markers
        self.reasoning = markers.reasoning
        self.reasoning_off = reasoning_off
        self._harmony = harmony
        self._literals = Literals(special_id)

    @classmethod
    def of(
        cls,
        render: Render,
        special_id: SpecialId,
        is_eog: Callable[[int], bool] | None = None,
        usual: ChatFormat | None = None,
    ) -> ChatFormat:
        """Probe a template with about forty renders of short conversations.

        ``special_id`` returns the token's id if the text is one control token of the vocabulary, else None. ``is_eog``
        returns whether a token ends generation. Such a token is never part of a call, although templates write it after
        calls. ``usual``: if ``render`` has template arguments, the format without them. ``usual`` applies unless the
        texts with template arguments contradict it, because templates may then show less, for example with documents.
        """
        probe = TemplateProbe(render)
        chat_format = cls._of(probe, special_id, is_eog)
        if usual is None:
            return chat_format
        if chat_format._harmony or usual._harmony:
            return usual if usual._harmony else chat_format
        calls = chat_format.calls
        if calls is None or (usual.calls is not None and (calls.in_content or probe.shows(usual.calls))):
            calls = usual.calls
        markers = MarkerProbe(probe, lambda text: special_id(text) is not None).kept(
            usual.markers, chat_format.markers
        )
        return cls(
            calls,
            markers,
            usual.reasoning_off,
            special_id,
            shows_tools=chat_format.shows_tools,
            has_efforts=usual.has_efforts,
        )

    @classmethod
    def _of(
        cls, probe: TemplateProbe, special_id: SpecialId, is_eog: Callable[[int], bool] | None
    ) -> ChatFormat:

        def is_control(text: str) -> bool:
            return special_id(text) is not None

        def ends(text: str) -> bool:
            return is_eog is not None and (token := special_id(text)) is not None and is_eog(token)

        marker_probe = MarkerProbe(probe, is_control)
        has_efforts = marker_probe.has_efforts()
        if is_harmony(probe.prompt, probe.calls(1)):
            return cls(None, HARMONY_MARKERS, {}, special_id, harmony=True, has_efforts=has_efforts)
        calls = probe.call_format(is_control)
        if calls is not None:
            calls = _without_eog(calls, ends)
        markers = marker_probe.markers(calls, ends)
        if calls is not None and not calls.trigger and is_control(PYTHON_TAG):
            markers = replace(markers, control=markers.control | {PYTHON_TAG})
        return cls(
            calls,
            markers,
            marker_probe.reasoning_off(),
            special_id,
            shows_tools=probe.shows_tools,
            has_efforts=has_efforts,
        )

    def __repr__(self) -> str:
        calls = "HARMONY" if self._harmony else self.calls.style.name if self.calls else None
        return f"<ChatFormat calls={calls} reasoning={self.reasoning}>"

    @property
    def supports_tools(self) -> bool:
        """True if the template writes tool calls in a recognised format."""
        return self._harmony or self.calls is not None

    @property
    def is_marked(self) -> bool:
        """True if an answer without tools has markers other than control tokens."""
        return self.reasoning is not None or self.markers.marks_text

    def grammar(
        self,
        tools: Sequence[Tool],
        tool_choice: str,
        parallel: bool,
        *,
        prompt_tail: str,
        schema: Schema | None = None,
        whitespace: str = "compact",
        plain: bool = False,
    ) -> str | None:
        """Return llguidance's Lark grammar of the answers that a request allows; None if any text is allowed.

        - ``tool_choice``: "auto" (text, then valid calls), "none", "required" (calls only), or the name of the one tool
          to call. ``parallel``: several calls are allowed if the template can write several.
        - ``prompt_tail``: the end of the rendered prompt, which may have begun or closed the reasoning.
        - ``schema``: the JSON schema of the text after the reasoning; with "auto", the answer is such JSON or calls.
          ``whitespace``: the whitespace allowed in that JSON, as in ``SamplingParams.json_whitespace``. ``plain``: with
          "auto", a call may also be plain JSON; see ``differs_from_calls``.

        Raises InvalidRequestError if there is no such tool, if the template cannot write calls, or if a schema cannot
        be followed exactly.
        """
        used = (
            [] if tool_choice == "none" else [t for t in tools if tool_choice in ("auto", "required", t.name)]
        )
        required = tool_choice not in ("auto", "none")
        if required and not used:
            raise InvalidRequestError(f"tool_choice is {quoted(tool_choice)}, but there is no such tool")
        if used and not self.supports_tools:
            raise InvalidRequestError(
                "the model's chat template cannot write tool calls; use another template"
            )
        if not used and schema is None:
            return None
        answer = AnswerGrammar(
            tools=[CallableTool(t.name, _without_notes(closed_objects(_checked(t)))) for t in used],
            required=required,
            parallel=parallel,
            schema=None if schema is None else schema_object(schema),
            reasoning=None if self._is_closed(prompt_tail) else self.reasoning,
            reasoning_open=self._is_open(prompt_tail),
            whitespace=whitespace,
            text_starts=self.markers.text_starts,
            text_end=self.markers.text_end,
            # A ``turn_end`` of a single token ends generation, so the grammar needs only a longer ``turn_end``.
            turn_end=self.markers.turn_end if n_tags(self.markers.turn_end) > 1 else "",
            plain=plain and tool_choice == "auto",
            prompted=self._prompted(prompt_tail),
        )
        if self._harmony:
            return harmony_grammar(answer, self._literals)
        return GrammarWriter(self.calls, answer, self._literals).write()

    def relaxed(self, tool: Tool, keeps_types: bool) -> Tool:
        """Return the tool with any JSON object as its arguments, for a schema that no grammar can express.

        ``keeps_types``: in the style TAGGED, keep the arguments' types, because a text there may be a string or JSON.
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
        tool_choice: str,
        *,
        prompt_tail: str,
        stream_calls: bool = False,
        lenient: bool = False,
        parallel: bool = True,
        reasoning_format: str = "auto",
        continues: bool = False,
    ) -> ChatParser:
        """Return a parser for one answer to a prompt that ends with ``prompt_tail``.

        ``stream_calls``: return a call's arguments as they arrive. Use it only if the grammar constrains the answer.
        ``lenient``: with "auto", read an answer that consists of calls in plain JSON as calls; ``parallel`` allows
        several. ``reasoning_format``: see ``ChatParser``. ``continues``: the answer continues a message, so the caller
        already has the reasoning marker at the end of the prompt.
        """
        start = "" if self.reasoning is None else self.reasoning.start
        is_open = self._is_open(prompt_tail)
        return ChatParser(
            self.calls,
            self.markers,
            reasoning_open=is_open,
            tools={} if tool_choice == "none" else {t.name: t.parameters for t in tools},
            stream_calls=stream_calls,
            required=tool_choice not in ("auto", "none"),
            harmony=self._harmony,
            lenient=lenient and tool_choice == "auto",
            parallel=parallel,
            reasoning_format=reasoning_format,
            opened=start + prompt_tail.rpartition(start)[2] if is_open and not continues else "",
            prompted=self._prompted(prompt_tail),
        )

    def limited_reasoning(self, prompt_tail: str) -> LimitedReasoning | None:
        """Return the markers around the reasoning in an answer to a prompt that ends with ``prompt_tail``.

        Returns None if the answer has no reasoning.
        """
        if self.reasoning is None:
            return None
        close = HARMONY_FINAL if self._harmony else self.reasoning.end
        return LimitedReasoning(self.reasoning.start, self.reasoning.end, close, self._is_open(prompt_tail))

    def continued_tail(self, prompt_tail: str, messages: Any, is_constrained: bool, part: str) -> str:
        """Return the ``prompt_tail`` for a prompt that ends inside its last message.

        ``part``: the part of the message to continue, "content" or "reasoning". Raises InvalidRequestError if a
        constrained answer cannot continue the template's messages.
        """
        if part == "reasoning" and self.reasoning is not None:
            return self.reasoning.start
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

    def _prompted(self, prompt_tail: str) -> str:
        """Return the start of a call's opening at the end of the prompt; empty if there is none."""
        start = "" if self.calls is None else self.calls.prompted
        return start if prompt_tail.endswith(start) else ""

    def _is_open(self, prompt_tail: str) -> bool:
        return self.reasoning is not None and prompt_tail.rstrip().endswith(self.reasoning.start)

    def _is_closed(self, prompt_tail: str) -> bool:
        return self.reasoning is not None and prompt_tail.rstrip().endswith(self.reasoning.end)


def _without_eog(form: CallFormat, ends: Callable[[str], bool]) -> CallFormat:
    """Return the format without tokens that end generation, because they are not part of the text."""

    def cut(text: str) -> tuple[str, bool]:
        kept = list(takewhile(lambda segment: not ends(segment), segments(text)))
        return "".join(kept), "".join(kept) != text

    call_end, ended = cut(form.call_end)
    if ended:
        return replace(form, call_end=call_end.rstrip(), section_end="", parallel=False)
    return replace(form, section_end=cut(form.section_end)[0].rstrip())


_NOTES = ("title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly")


def _without_notes(schema: dict[str, Any]) -> dict[str, Any]:
    """Remove a schema's annotations in place; return the schema. Annotations are most of the text of many tools."""
    for _, part in subschemas(schema):
        for name in _NOTES:
            part.pop(name, None)
    return schema


def differs_from_calls(schema: Schema) -> bool:
    """Return False if a schema lists both members of a call, ``name`` and ``arguments``; else True."""
    return not {"name", "arguments"} <= {
        name
        for _, part in subschemas(schema_object(schema))
        for name in (part["properties"] if isinstance(part.get("properties"), dict) else ())
    }


def _checked(tool: Tool) -> dict[str, Any]:
    try:
        return schema_object(tool.parameters)
    except InvalidRequestError as e:
        raise InvalidRequestError(f"tool {quoted(tool.name)}: {e}") from None
