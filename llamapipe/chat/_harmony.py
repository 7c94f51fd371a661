"""The "harmony" format of gpt-oss: an answer is a sequence of messages, each with a channel and perhaps a recipient.

Source: openai/harmony, docs/format.md. The channel "analysis" holds reasoning, "final" the answer, and "commentary" a
call or text that introduces a call. A prompt ends with ``<|start|>assistant``, so the first message begins after that
text.

Models deviate from this format: they call tools in the channel "analysis", call unknown tools, or begin a header inside
another header. A message to an unknown recipient is not meant for the user. The reader leaves it out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llamapipe.chat._answer_grammar import AnswerGrammar
from llamapipe.chat._answer_markers import AnswerMarkers
from llamapipe.chat._call_format import ReasoningMarkers
from llamapipe.chat._lark import ANY, SPACES, Literals, Rules, json_value
from llamapipe.chat._reader import (
    AnswerOutput,
    Malformed,
    Reading,
    TextBuffer,
)

START, CHANNEL, MESSAGE, END, CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_CONSTRAIN, _RETURN = "<|constrain|>", "<|return|>"
_ENDS = (END, _RETURN, CALL)
_ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
# The text that ends reasoning and begins the answer.
FINAL = f"{END}{START}assistant{CHANNEL}final{MESSAGE}"
MARKERS = AnswerMarkers(
    ReasoningMarkers(_ANALYSIS, END),
    control=frozenset((START, CHANNEL, MESSAGE, *_ENDS, _CONSTRAIN)),
    opening=_ANALYSIS,
)
_AUTHOR = "assistant"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>(\s*)(\w+)")
_NAME = re.compile(r"[\w.\-]*")
_NOT_TOOLS = (_AUTHOR, "user")


def is_harmony(prompt: str, calls: str | None) -> bool:
    """Return whether a template writes this format, judging by a rendered prompt and the text of calls, if any."""
    return prompt.rstrip().endswith(START + _AUTHOR) and (
        calls is None or (CHANNEL in calls and MESSAGE in calls)
    )


def harmony_grammar(answer: AnswerGrammar, literals: Literals) -> str:
    """Return the Lark grammar of an answer: analysis, then text or calls.

    Optional spaces precede names, because some tokenizers put a space there.
    """
    rules = Rules(literals)
    text = literals.text
    channel, message = f"{text(CHANNEL)} {SPACES}", f"{text(MESSAGE)} {SPACES}"
    again = f'{rules.up_to(END)} {text(START)} {SPACES} "{_AUTHOR}"'
    analysis = f'({channel} "analysis" {text(MESSAGE)} {again})*'
    if answer.reasoning_open:
        analysis = f"{again} {analysis}"
    calls = []
    for tool in answer.tools:
        to = f'"to=functions.{tool.name}"'
        kind = f'({SPACES} {text(_CONSTRAIN)} {SPACES} ("json" | "code") | " json" | " code")?'
        arguments = f"{message} {json_value(tool.parameters)}"
        calls.append(f'{channel} ("commentary " | "analysis ") {to} {kind} {arguments}')
        calls.append(f'" " {to} {channel} ("commentary" | "analysis") {kind} {arguments}')
    options = []
    if calls:
        call = rules.add("call", " | ".join(calls))
        several = f'({text(END)} {text(START)} {SPACES} "{_AUTHOR}" {call})*' if answer.parallel else ""
        options.append(f"{call} {several}".strip())
    if not answer.required:
        head = f'{channel} "final"'
        if answer.schema is None:
            options.append(f"{head} {text(MESSAGE)} /{ANY}/")
            analysis += f' ({channel} "commentary" {text(MESSAGE)} {again})?'
        else:
            kind = f'({SPACES} {text(_CONSTRAIN)} {SPACES} "json")?'
            options.append(f"{head} {kind} {message} {json_value(answer.schema, answer.whitespace)}")
    return rules.write(f"{analysis} ({' | '.join(options)})")


class HarmonyReader:
    """Reads the messages of one answer."""

    def __init__(self, buffer: TextBuffer, output: AnswerOutput, tools: Mapping[str, dict[str, Any]]) -> None:
        self._buffer = buffer
        self._output = output
        self._tools = tools

    def answer(self, reasoning_open: bool) -> Reading[None]:
        """Read until the text ends. Text outside of messages is content."""
        buffer, output = self._buffer, self._output
        if reasoning_open:
            output.mark((yield from buffer.until(_ENDS, output.reasoning)) or "")
        while True:
            before = yield from buffer.spaces()
            if (yield from buffer.skip(START)):
                yield from self._author()
            elif (yield from buffer.ahead(CHANNEL)) or (yield from buffer.ahead(MESSAGE)):
                yield from self._message("")
            elif recipient := (yield from self._recipient(before)):
                yield from self._message(recipient)
            else:
                marker = yield from buffer.until(
                    (START, CHANNEL, MESSAGE, _CONSTRAIN, *_ENDS), output.content
                )
                if marker is None:
                    return
                if marker in (START, CHANNEL):
                    buffer.unread(marker)

    def _author(self) -> Reading[None]:
        """Read the author in a header. Messages of other authors are left out."""
        buffer = self._buffer
        yield from buffer.spaces()
        for ours in (_AUTHOR, CHANNEL, MESSAGE):
            if (yield from buffer.ahead(ours)):
                yield from buffer.skip(_AUTHOR)
                return
        if (yield from buffer.until((START, *_ENDS), _leave_out)) == START:
            buffer.unread(START)

    def _recipient(self, before: str) -> Reading[str]:
        """Read a recipient at the start of a header. Any other text is content, and the result is then empty."""
        buffer, output = self._buffer, self._output
        buffer.record(before)
        if (yield from buffer.skip("to=")):
            yield from buffer.take_while(_NAME)
            yield from buffer.spaces()
            for marker in (CHANNEL, MESSAGE, _CONSTRAIN):
                if (yield from buffer.ahead(marker)):
                    return buffer.recorded()
        output.content(buffer.recorded())
        return ""

    def _message(self, start: str) -> Reading[None]:
        """Read the rest of a header, which begins with ``start``, and the message after it."""
        buffer, output = self._buffer, self._output
        parts = [start]
        marker = yield from buffer.until((MESSAGE, START, *_ENDS), parts.append)
        if marker == START:
            buffer.unread(START)
        if marker != MESSAGE:
            return
        header = "".join(parts)
        to, channels = _RECIPIENT.findall(header), _CHANNEL_NAME.findall(header)
        recipient = to[-1] if to and to[-1] not in _NOT_TOOLS else None
        if recipient is not None and recipient not in self._tools:
            yield from buffer.until(_ENDS, _leave_out)
            return
        space, channel = channels[-1] if channels else ("", "")
        if space and recipient is None:  # the tokenizer then also puts a space before the text
            yield from buffer.skip(" ")
        if recipient is not None:
            buffer.record()
            try:
                yield from self._call(recipient)
            except Malformed:
                output.give_back()
            return
        output.paragraph()
        if channel != "analysis":
            yield from buffer.until(_ENDS, output.content)
            return
        output.mark(_ANALYSIS)
        output.mark((yield from buffer.until(_ENDS, output.reasoning)) or "")

    def _call(self, name: str) -> Reading[None]:
        yield from self._buffer.spaces()
        if not (yield from self._buffer.ahead("{")):
            raise Malformed
        self._output.begin(name, None)
        yield from self._buffer.json_value(self._output.more)
        yield from self._buffer.spaces()
        ended = self._buffer.ended and not self._buffer.rest
        if not ended and not (yield from self._buffer.skip(CALL)) and not (yield from self._buffer.skip(END)):
            raise Malformed
        self._output.end()


def _leave_out(text: str) -> None: ...
