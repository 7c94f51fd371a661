"""The format of gpt-oss, "harmony": an answer is a sequence of messages, each with a channel and perhaps a recipient.

Source: openai/harmony, docs/format.md. Channel "analysis" is reasoning, "final" the answer, "commentary" a call or text
that introduces one. A prompt ends with ``<|start|>assistant``, so the first message begins after that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llamapipe.chat._answer_grammar import ANY, SPACES, AnswerGrammar, Literals, Rules, json_value
from llamapipe.chat._call_format import ReasoningMarkers
from llamapipe.chat._reader import AnswerOutput, Malformed, Reading, TextBuffer, ahead, skip, spaces, until
from llamapipe.chat._reader import json_value as read_json

START, CHANNEL, MESSAGE, END, CALL = "<|start|>assistant", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_CONSTRAIN, _RETURN = "<|constrain|>", "<|return|>"
_ENDS = (END, _RETURN, CALL)
REASONING = ReasoningMarkers(f"{CHANNEL}analysis{MESSAGE}", END)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


def is_harmony(prompt: str, calls: str | None) -> bool:
    """True if a template writes this format: from a rendered prompt, and the text of a call."""
    return prompt.rstrip().endswith(START) and (calls is None or (CHANNEL in calls and MESSAGE in calls))


def harmony_grammar(answer: AnswerGrammar, literals: Literals) -> str:
    """The Lark grammar of an answer: analysis, then text or one call."""
    rules = Rules(literals)
    text = literals.text
    analysis = f'({text(CHANNEL)} "analysis" {text(MESSAGE)} {rules.up_to(END)} {text(START)})*'
    if answer.reasoning_open:
        analysis = f"{rules.up_to(END)} {text(START)} {analysis}"
    options = []
    for tool in answer.tools:
        arguments = f"{text(MESSAGE)} {json_value(tool.parameters)}"
        to = f'"to=functions.{tool.name}"'
        kind = f'({SPACES} {text(_CONSTRAIN)} "json" | " json")?'
        options.append(f'{text(CHANNEL)} "commentary " {to} {kind} {arguments}')
        options.append(f'" " {to} {text(CHANNEL)} "commentary" {kind} {arguments}')
    if not answer.required:
        head = f'{text(CHANNEL)} "final"'
        if answer.schema is None:
            options.append(f"{head} {text(MESSAGE)} /{ANY}/")
            head = f'{text(CHANNEL)} "commentary" {text(MESSAGE)}'
            analysis += f" ({head} {rules.up_to(END)} {text(START)})?"
        else:
            kind = f'({SPACES} {text(_CONSTRAIN)} "json")?'
            options.append(f"{head} {kind} {text(MESSAGE)} {json_value(answer.schema, answer.whitespace)}")
    return rules.write(f"{analysis} ({' | '.join(options)})")


class HarmonyReader:
    """Reads the messages of one answer."""

    def __init__(self, buffer: TextBuffer, output: AnswerOutput, tools: Mapping[str, dict[str, Any]]) -> None:
        self._buffer = buffer
        self._output = output
        self._tools = tools

    def answer(self, reasoning_open: bool) -> Reading[None]:
        """Reads until the text ends. Text outside of messages is content."""
        buffer, output = self._buffer, self._output
        if reasoning_open:
            yield from until(buffer, _ENDS, output.reasoning)
        while True:
            before = yield from spaces(buffer)
            if (yield from skip(buffer, START)):
                before += START + (yield from spaces(buffer))
            if not (yield from self._is_header()):
                if not before.startswith(START):
                    output.content(before)
                if (yield from until(buffer, (START, CHANNEL, *_ENDS), output.content)) is None:
                    return
                continue
            yield from self._message(before)

    def _is_header(self) -> Reading[bool]:
        return (yield from ahead(self._buffer, CHANNEL)) or (yield from ahead(self._buffer, "to=functions."))

    def _message(self, before: str) -> Reading[None]:
        buffer, output = self._buffer, self._output
        buffer.record(before)
        parts: list[str] = []
        if (yield from until(buffer, (MESSAGE,), parts.append)) is None:
            output.give_back()
            return
        header = "".join(parts)
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if recipient:
            try:
                yield from self._call(recipient[1])
            except Malformed:
                output.give_back()
            return
        buffer.recorded()
        output.paragraph()
        show = output.reasoning if channel and channel[1] == "analysis" else output.content
        yield from until(buffer, _ENDS, show)

    def _call(self, name: str) -> Reading[None]:
        if name not in self._tools:
            raise Malformed
        yield from spaces(self._buffer)
        if not (yield from ahead(self._buffer, "{")):
            raise Malformed
        self._output.begin(name, None)
        yield from read_json(self._buffer, self._output.more)
        yield from spaces(self._buffer)
        ended = self._buffer.ended and not self._buffer.rest
        if (
            not ended
            and not (yield from skip(self._buffer, CALL))
            and not (yield from skip(self._buffer, END))
        ):
            raise Malformed
        self._output.end()
