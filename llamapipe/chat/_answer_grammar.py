"""Grammars of whole answers: optional reasoning, then free text, tool calls, or JSON.

Open this file to change what an answer may contain and in which order. ``_argument_grammar.py`` writes the arguments
of calls, and ``_lark.py`` writes the elements of the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from llamapipe.chat._argument_grammar import argument_grammar
from llamapipe.chat._call_format import PYTHON_TAG, CallFormat, ReasoningMarkers, Slot, Style, segments
from llamapipe.chat._lark import ANY, GAP, SPACES, WHITE, Literals, Rules, json_value, regex_text
from llamapipe.chat._reader import is_run
from llamapipe.chat._tagged_arguments import TaggedArguments

_SLOTS = {Slot.ID: "/[a-zA-Z0-9]{9}/", Slot.NUMBER: "/(0|[1-9][0-9]{0,5})/"}


class CallableTool(NamedTuple):
    """A tool with its checked schema, in which objects allow only the listed properties."""

    name: str
    parameters: dict[str, Any]


@dataclass(frozen=True)
class AnswerGrammar:
    """The answers that a request allows.

    - ``tools``: the tools that may be called; empty for none. ``required``: the answer consists of calls only.
      ``parallel``: the answer may have several calls.
    - ``schema``: the JSON schema of the text; None for free text. ``whitespace``: the whitespace allowed in that JSON.
    - ``plain``: with a schema, the answer may also be one call as plain JSON.
    - ``reasoning``: the markers of reasoning, if the answer may begin with reasoning; else None. ``reasoning_open``:
      the prompt ends with the start marker.
    - ``text_starts``, ``text_end``: optional markers before and after the text.
    - ``turn_end``: an optional marker at the end of the answer.
    - ``prompted``: the start of a call's opening, if the prompt ends with it; else empty.
    """

    tools: Sequence[CallableTool]
    required: bool
    parallel: bool
    schema: dict[str, Any] | None
    reasoning: ReasoningMarkers | None
    reasoning_open: bool
    whitespace: str = "compact"
    text_starts: tuple[str, ...] = ()
    text_end: str = ""
    turn_end: str = ""
    plain: bool = False
    prompted: str = ""


class GrammarWriter:
    """Writes one Lark grammar. ``write`` collects the rules in the order in which they are needed."""

    def __init__(self, form: CallFormat | None, answer: AnswerGrammar, literals: Literals) -> None:
        self._form = form
        self._answer = answer
        self._literals = literals
        self._rules = Rules(literals)
        self._excluded: list[str] = []  # free text must not begin with a match of these

    def write(self) -> str:
        """Return the grammar's text."""
        answer = self._answer
        before = self._reasoning() if answer.reasoning else ""
        prompted = self._prompted_calls() if answer.prompted and answer.tools else ""
        main = self._main()
        start = f"{before} {main}".strip()
        if prompted:
            start = prompted if answer.required and not before else f"{prompted} | {start}"
        if answer.reasoning_open and not answer.required and answer.schema is None:
            start += " | THINKING"  # a model may end without closing its reasoning
            self._rules.add("THINKING", f"/{ANY}/")
        elif answer.reasoning and self._free:
            start += f" | {self._reasoning_start()} THINKING"
            self._rules.add("THINKING", f"/{ANY}/")
        if answer.reasoning and answer.tools:
            start += self._calls_in_reasoning()
        if answer.reasoning:
            start += self._text_in_reasoning()
        if answer.turn_end:
            start = f"({start}) ({GAP} {self._literals.text(answer.turn_end)})?"
        return self._rules.write(start)

    # ---- reasoning
    def _reasoning(self) -> str:
        markers = self._answer.reasoning
        assert markers is not None
        rest = self._rules.up_to(markers.end) + ("" if self._free else f" {GAP}")
        if self._answer.reasoning_open:
            return rest
        if not self._literals.has_token(markers.start):
            self._excluded.append(rf"\s*{regex_text(markers.start)}")
        return f"({self._reasoning_start()} {rest})?"

    def _reasoning_start(self) -> str:
        markers = self._answer.reasoning
        assert markers is not None
        return self._first(markers.start)

    def _first(self, marker: str) -> str:
        """Return the elements of a marker at the start of the answer, after optional spaces.

        The spaces and the marker form one terminal. Otherwise free text, which can also begin with spaces, would be the
        longer match.
        """
        text = "".join(takewhile(lambda segment: self._literals.token(segment) is None, segments(marker)))
        start = f"/[ \\n]{{0,4}}{regex_text(text)}/" if text else SPACES
        return f"{start} {self._literals.text(marker[len(text) :])}".strip()

    def _calls_in_reasoning(self) -> str:
        """Return the alternative for calls that end the reasoning, if calls begin with a control token.

        If calls begin with plain text, reasoning may mention that text without starting a call. Then the result is
        empty.
        """
        assert self._form is not None
        if self._literals.token(trigger := self._form.trigger) is None:
            return ""
        begin = "" if self._answer.reasoning_open else f"{self._reasoning_start()} "
        calls = f"{self._literals.text(trigger)} calls" if self._free else "calls"
        return f" | {begin}{self._rules.terminal(f'/{ANY}/')} {calls}"

    def _text_in_reasoning(self) -> str:
        """Return the alternative for text that ends the reasoning; empty unless a control token can begin the text."""
        answer, literals = self._answer, self._literals
        starts = [start for start in answer.text_starts if literals.token(segments(start)[0]) is not None]
        if not starts or answer.required:
            return ""
        begin = "" if answer.reasoning_open else f"{self._reasoning_start()} "
        if answer.schema is not None:
            main = self._marked(json_value(answer.schema, answer.whitespace), starts)
        else:
            main = self._marked("FREE", starts)
            if self._form is not None and answer.tools and literals.token(self._form.trigger) is not None:
                main += f" ({literals.text(self._form.trigger)} calls)?"
        return f" | {begin}{self._rules.terminal(f'/{ANY}/')} {main}"

    # ---- what follows the reasoning
    @property
    def _free(self) -> bool:
        return not self._answer.required and self._answer.schema is None

    def _main(self) -> str:
        answer = self._answer
        options: list[str] = []
        if not self._free:
            if answer.schema is not None and not answer.required:
                options.append(self._marked(json_value(answer.schema, answer.whitespace)))
                if answer.plain and self._form is not None and self._form.trigger:
                    options += [self._plain_call(tool) for tool in answer.tools]
            if answer.tools:
                options.append(self._forced_calls())
        else:
            options += self._free_calls()
            options.append(self._marked("FREE"))
            self._rules.add("FREE", self._free_text())
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _marked(self, text: str, required: Sequence[str] = ()) -> str:
        """Return the elements of a text with its optional markers.

        ``required``: markers, one of which must begin the text.
        """
        literals = self._literals
        end = self._answer.text_end
        return self._text_start(required) + text + (f" ({GAP} {literals.text(end)})?" if end else "")

    def _text_start(self, required: Sequence[str] = ()) -> str:
        """Return the elements of the markers before a text. A marker is required if the prompt has opened a call."""
        starts = [f"{self._first(start.strip())} {GAP}" for start in required or self._answer.text_starts]
        is_needed = required or self._answer.prompted
        return f"({' | '.join(starts)}){'' if is_needed else '?'} " if starts else ""

    @staticmethod
    def _plain_call(tool: CallableTool) -> str:
        """Write a call as plain JSON. Models that were not trained on the template's markers call tools this way."""
        name = f'{SPACES} "\\"name\\"" {SPACES} ":" {SPACES} {json.dumps(json.dumps(tool.name))}'
        arguments = f'{SPACES} "\\"arguments\\"" {SPACES} ":" {SPACES} {json_value(tool.parameters)}'
        return f'"{{" {name} {SPACES} "," {arguments} {SPACES} "}}"'

    def _free_text(self) -> str:
        return f"/{ANY}/" + "".join(f" & ~/(?s:{text}.*)/" for text in self._excluded)

    def _forced_calls(self) -> str:
        form = self._form
        assert form is not None
        self._add_calls(form, form.opening)
        if not form.trigger:
            return self._tagged_calls()
        literals, answer = self._literals, self._answer
        if answer.text_end and all(map(literals.has_token, (*answer.text_starts, answer.text_end))):
            starts = " | ".join(map(literals.text, answer.text_starts))  # some templates write an empty text
            return f"(({starts}) {GAP} {literals.text(answer.text_end)} {GAP})? calls"
        return "calls"

    def _free_calls(self) -> list[str]:
        """Return the alternatives for free text followed by calls; a trigger in the text always begins a call."""
        form = self._form
        assert form is not None
        trigger = form.trigger
        if not trigger:
            return self._bare_calls(form)
        text = self._literals
        is_in_text = is_run(trigger) and text.token(trigger) is None
        if is_in_text:
            self._add_calls(form, "", f"{regex_text(trigger[0])}*")
        else:
            self._add_calls(form, form.opening[len(trigger) :])
        # If the prompt opens the first call, text is another kind of message: it needs a start marker and has the same
        # end. Calls without text, which may follow reasoning, are then a separate option.
        alone = [f"{text.text(trigger)} calls"] if form.prompted and self._answer.reasoning else []
        if text.token(trigger) is None:
            start = self._text_start() if form.prompted else ""
            after = self._after_run(trigger) if is_in_text else "calls"
            return [f"{start}{self._rules.up_to(trigger, 'FREE')} {after}", *alone]
        end = f" ({text.text(form.separator)})?" if form.prompted and form.separator else ""
        return [f"{self._marked('FREE')}{end} {text.text(trigger)} calls", *alone]

    def _after_run(self, trigger: str) -> str:
        """Return what follows a trigger such as ``>>>``: calls, or text with more triggers.

        Ordinary text may contain the trigger as well. After a trigger, the name of a tool begins a call, and a line
        that consists of a name must be a call. In a run longer than the trigger, the last characters are the trigger.
        """
        more = f"{regex_text(trigger[0])}*"
        names = "|".join(regex_text(tool.name) for tool in self._answer.tools)
        is_call = rf"{more}({WHITE}({names})([^\w.\-]{ANY})?|[a-zA-Z_][\w.\-]*\n{ANY})"
        text = self._rules.terminal(f"/{ANY}/ & ~/{is_call}/")
        again = self._rules.up_to(trigger, text)
        return self._rules.recursive("run", lambda name: f"calls | {text} | {again} {name}")

    def _bare_calls(self, form: CallFormat) -> list[str]:
        """Write calls without a marker. If the answer begins like a call, the whole answer must be calls."""
        before = regex_text(form.opening.strip())
        if form.style is Style.PYTHON:
            self._excluded.append(rf"\s*{before}\s*[a-zA-Z_][\w.\-]*\(")
        else:
            first = json.dumps(form.members[0].key)
            before = rf"{before}\s*" if before else ""
            self._excluded.append(rf"\s*{before}\{{\s*{regex_text(first)}")
            # The opening is one terminal. Otherwise free text, which can begin in the same way, is a longer match.
            space = r"[ \n]{0,2}"
            before = before.replace(r"\s*", space)
            self._rules.add("OPENING", rf"/{space}{before}\{{{space}{regex_text(first)}/")
        self._add_calls(form, "", regex_text(form.opening.strip()))
        return [self._tagged_calls()]

    def _tagged_calls(self) -> str:
        tag = self._literals.token(PYTHON_TAG)
        return "calls" if tag is None else f"{tag}? calls"

    # ---- calls
    def _prompted_calls(self) -> str:
        """Write calls after a prompt that ends with the start of their opening."""
        form, prompted = self._form, self._answer.prompted
        assert form is not None
        rest = form.opening[len(prompted) :]
        if form.style is Style.JSON:
            self._add_calls(form, rest, rule="prompted")
        else:
            self._add_calls(form, "", regex_text(rest.strip()), "prompted")
        return "prompted"

    def _add_calls(
        self, form: CallFormat, opening: str, opened: str | None = None, rule: str = "calls"
    ) -> None:
        """Add a rule named ``rule``: the rest of the opening, the calls, and the end of their section.

        ``opened``: the rest of the opening as a regular expression, if the opening and the text after it must be one
        terminal, as at the start of an answer; ``opening`` is then empty.
        """
        text = self._literals
        first = self._one_of_calls(form, opened)
        parts = [text.edge(opening), first]
        if self._answer.parallel and form.parallel:
            between = text.edge(form.separator + form.call_start)
            if is_run(form.call_start):  # models may write a newline before it
                between = f"{GAP} {between}"
            call = self._one_of_calls(form) if opened is not None else first
            parts.append(f"({between} {call})*")
        end = form.section_end.rstrip()
        if segments(end.lstrip())[:1] == ["]"]:  # after the end of a list, models may begin a new line
            after = end.lstrip()[1:].strip()
            parts += [
                text.edge(end[: len(end) - len(end.lstrip()) + 1]),
                f"{GAP} {text.text(after)}" if after else "",
            ]
        else:
            parts.append(text.edge(end))
        self._rules.add(rule, " ".join(part for part in parts if part))

    def _one_of_calls(self, form: CallFormat, opened: str | None = None) -> str:
        calls = [self._call(form, tool, opened) for tool in self._answer.tools]
        return f"({' | '.join(self._rules.named('call', call) for call in calls)})"

    def _call(self, form: CallFormat, tool: CallableTool, opened: str | None) -> str:
        text = self._literals
        if form.style is Style.JSON:
            parts = [self._object(form, tool, opened)]
        else:
            parts = self._head(form, tool.name, opened)
            if form.style is Style.NAMED:
                parts.append(json_value(tool.parameters))
            else:
                parts.append(argument_grammar(TaggedArguments(form, tool.parameters), text, self._rules))
        # Any spaces may precede the end of a call, because the model may already have generated the template's spaces.
        end = form.call_end
        parts.append(text.edge(end.rstrip()))
        return " ".join(part for part in parts if part)

    def _head(self, form: CallFormat, name: str, opened: str | None) -> list[str]:
        """Return the elements of a call before its arguments. An id after the name is optional."""
        text = self._literals
        elements: list[str] = []
        parts = form.head
        at = 0
        if opened is not None and parts[0] is Slot.NAME:
            start = f"/{WHITE}{opened}{WHITE}{regex_text(name)}/"
            elements, at = [self._rules.terminal(start)], 1
        while at < len(parts):
            part, at = parts[at], at + 1
            if isinstance(part, str):
                following = parts[at] if at < len(parts) else None
                if following is Slot.ID and Slot.NAME in parts[:at]:
                    elements.append(f"({text.text(part)} {_SLOTS[Slot.ID]})?")
                    at += 1
                else:
                    elements.append(text.edge(part) if following is None else text.text(part))
            else:
                elements.append(json.dumps(name) if part is Slot.NAME else _SLOTS[part])
        return elements

    def _object(self, form: CallFormat, tool: CallableTool, opened: str | None) -> str:
        parts = []
        for i, member in enumerate(form.members):
            if opened is not None and i == 0:
                parts.append("OPENING")
            else:
                parts += ['"{"' if i == 0 else '","', SPACES, json.dumps(json.dumps(member.key))]
            parts += [SPACES, '":"', SPACES]
            if member.role == "name":
                parts.append(json.dumps(json.dumps(tool.name)))
            elif member.role == "arguments":
                parts.append(json_value(tool.parameters))
            elif member.role == "id":
                parts.append('/"[a-zA-Z0-9]{9}"/')
            elif member.role == "number":
                quote = '"' if member.constant.startswith('"') else ""
                parts.append(f"/{quote}(0|[1-9][0-9]{{0,5}}){quote}/")
            else:
                parts.append(json.dumps(member.constant))
            parts.append(SPACES)
        return " ".join([*parts, '"}"'])
