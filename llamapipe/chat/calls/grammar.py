"""Grammars of whole answers: optional reasoning, then free text, tool calls, or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llamapipe.chat.calls.call_format import CallFormat, ReasoningMarkers, Style
from llamapipe.chat.calls.lark import ANY, GAP, SPACES, Literals, Rules, json_value, regex_text
from llamapipe.chat.calls.tagged import TaggedArguments


class ToolLike(Protocol):
    """The attributes of a tool that a grammar needs."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def parameters(self) -> dict[str, Any]:
        """The checked JSON schema of its arguments."""


@dataclass(frozen=True)
class Answer:
    """The answers that a request allows.

    - ``tools``: the tools that may be called; empty for none. ``required``: the answer consists of calls only.
    - ``schema``: the JSON schema of the text; None for free text. ``whitespace``: the spaces of such JSON.
    - ``reasoning``: its markers if the answer may begin with reasoning, and whether the prompt has opened it.
    """

    tools: Sequence[ToolLike]
    required: bool
    parallel: bool
    schema: dict[str, Any] | None
    reasoning: ReasoningMarkers | None
    reasoning_open: bool
    whitespace: str = "compact"


class GrammarWriter:
    """Writes one Lark grammar. Rules are collected in the order in which they are needed."""

    def __init__(self, form: CallFormat | None, answer: Answer, literals: Literals) -> None:
        self._form = form
        self._answer = answer
        self._literals = literals
        self._rules = Rules(literals)
        self._excluded: list[str] = []  # free text must not begin with a match of these

    def write(self) -> str:
        """The grammar's text."""
        answer = self._answer
        before = self._reasoning() if answer.reasoning else ""
        main = self._main()
        start = f"{before} {main}".strip()
        if answer.reasoning_open and not answer.required and answer.schema is None:
            start += " | THINKING"  # a model may end without closing its reasoning
            self._rules.add("THINKING", f"/{ANY}/")
        elif answer.reasoning and self._free:
            start += f" | {self._reasoning_start()} THINKING"
            self._rules.add("THINKING", f"/{ANY}/")
        return self._rules.write(start)

    # ---- reasoning
    def _reasoning(self) -> str:
        markers = self._answer.reasoning
        assert markers is not None
        rest = self._rules.up_to(markers.end) + ("" if self._free else f" {GAP}")
        if self._answer.reasoning_open:
            return rest
        if self._literals.token(markers.start) is None:
            self._excluded.append(rf"\s*{regex_text(markers.start)}")
        return f"({self._reasoning_start()} {rest})?"

    def _reasoning_start(self) -> str:
        markers = self._answer.reasoning
        assert markers is not None
        # One terminal, so that other text that begins with spaces is not a longer match.
        return self._literals.token(markers.start) or f"/[ \\n]{{0,4}}{regex_text(markers.start)}/"

    # ---- what follows the reasoning
    @property
    def _free(self) -> bool:
        return not self._answer.required and self._answer.schema is None

    def _main(self) -> str:
        answer = self._answer
        options: list[str] = []
        if not self._free:
            if answer.schema is not None and not answer.required:
                options.append(json_value(answer.schema, answer.whitespace))
            if answer.tools:
                options.append(self._forced_calls())
        else:
            options += self._free_calls()
            options.append("FREE")
            self._rules.add("FREE", self._free_text())
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _free_text(self) -> str:
        return f"/{ANY}/" + "".join(f" & ~/(?s:{text}.*)/" for text in self._excluded)

    def _forced_calls(self) -> str:
        form = self._form
        assert form is not None
        self._add_calls(form, form.opening)
        return "calls" if form.trigger else self._python_tag("calls")

    def _free_calls(self) -> list[str]:
        """The options for free text followed by calls; a trigger in the text always begins a call."""
        form = self._form
        assert form is not None
        trigger = form.trigger
        if not trigger:
            return self._bare_calls(form)
        self._add_calls(form, form.opening[len(trigger) :])
        return [f"{self._rules.up_to(trigger, 'FREE')} calls"]

    def _bare_calls(self, form: CallFormat) -> list[str]:
        """Calls without a marker. The whole answer is a call if it begins like one."""
        first = json.dumps(form.members[0].key)
        self._excluded.append(rf"\s*\{{\s*{regex_text(first)}")
        # One terminal, so that free text, which can begin in the same way, is not a longer match.
        self._rules.add("OPENING", rf"/[ \n]{{0,2}}\{{[ \n]{{0,2}}{regex_text(first)}/")
        self._add_calls(form, "", opened=True)
        return [self._python_tag("calls")]

    def _python_tag(self, calls: str) -> str:
        tag = self._literals.token(PYTHON_TAG)
        return calls if tag is None else f"{tag}? {calls}"

    # ---- calls
    def _add_calls(self, form: CallFormat, opening: str, opened: bool = False) -> None:
        """The rule ``calls``: what is left of the opening, calls, and the end of their section."""
        text = self._literals
        names = []
        for i, tool in enumerate(self._answer.tools):
            names.append(self._rules.add(f"call_{i}", self._call(form, tool, opened)))
        call = f"({' | '.join(names)})"
        parts = [text.edge(opening), call]
        if self._answer.parallel and form.parallel:
            between = text.edge(form.separator + form.call_start)
            parts.append(f"({between} {call})*")
        end = form.section_end
        parts.append(text.edge(end.rstrip()))
        self._rules.add("calls", " ".join(part for part in parts if part))

    def _call(self, form: CallFormat, tool: ToolLike, opened: bool) -> str:
        text = self._literals
        if form.style is Style.JSON:
            parts = [self._object(form, tool, opened)]
        else:
            parts = [json.dumps(tool.name)]
            if form.id_start:
                parts.append(f"({text.text(form.id_start)} /[a-zA-Z0-9]{{9}}/)?")
            parts.append(text.edge(form.after_name))
            if form.style is Style.NAMED:
                parts.append(json_value(tool.parameters))
            else:
                parts.append(TaggedArguments(form, tool.parameters).grammar(text, self._rules))
        # Any spaces may precede the end of a call, because the template's own may have been generated already.
        end = form.call_end
        parts.append(text.edge(end.rstrip()))
        return " ".join(part for part in parts if part)

    def _object(self, form: CallFormat, tool: ToolLike, opened: bool) -> str:
        parts = []
        for i, member in enumerate(form.members):
            if opened and i == 0:
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
            else:
                parts.append(json.dumps(member.constant))
            parts.append(SPACES)
        return " ".join([*parts, '"}"'])


# Llama 3.1 and its successors may write this token before a call.
PYTHON_TAG = "<|python_tag|>"
