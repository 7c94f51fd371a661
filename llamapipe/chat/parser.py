"""From generated text to content, reasoning and tool calls, while the text arrives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamapipe.chat.calls.call_format import CallFormat, ReasoningMarkers
from llamapipe.chat.calls.call_reader import CallReader, CallSink
from llamapipe.chat.calls.grammar import PYTHON_TAG
from llamapipe.chat.calls.reader import Malformed, Reading, TextBuffer, ahead, skip, spaces, until
from llamapipe.chat.results import ChatMessage, ChatPiece, ToolCallDelta, new_call_id


class ChatParser:
    """Takes one answer apart. Feed it the text as it arrives, control tokens written out. One thread at a time.

    However the text is cut, the pieces add up to the same answer. No part of a marker is ever content. Text that
    begins as a call and is none, such as JSON that breaks off or the name of an unknown tool, is content.

    With ``stream_calls`` the arguments of a call are handed out while they arrive. A call that breaks off then stays
    unfinished. Without, a call is handed out when it is complete.
    """

    def __init__(
        self,
        form: CallFormat | None,
        reasoning: ReasoningMarkers | None,
        *,
        reasoning_open: bool = False,
        tools: Mapping[str, dict[str, Any]] | None = None,
        stream_calls: bool = False,
    ) -> None:
        """``tools``: the parameters of each tool that may be called. ``reasoning_open``: the prompt began reasoning."""
        self._buffer = TextBuffer()
        self._output = _Output(self._buffer, stream_calls)
        self._reasoning = reasoning
        self._reasoning_open = reasoning_open
        self._calls = CallReader(form, tools, self._output) if form is not None and tools else None
        self._form = form
        self._reading = self._answer()
        self._finished = False
        next(self._reading)

    def feed(self, text: str) -> ChatPiece:
        """Takes the next text; returns what is certain now. Raises ValueError after ``finish``."""
        if self._finished:
            raise ValueError("the parser is finished; use a new one for another answer")
        if text:
            self._buffer.feed(text)
            next(self._reading)
        return self._output.piece()

    def finish(self) -> ChatPiece:
        """The text has ended; returns what was held back. A second call returns nothing."""
        if not self._finished:
            self._finished = self._buffer.ended = True
            next(self._reading, None)
        return self._output.piece()

    def _answer(self) -> Reading[None]:
        yield
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._calls is None or self._form is None:
            yield from until(self._buffer, (), self._output.content)
        elif self._form.trigger:
            yield from self._content_and_calls(self._calls, self._form)
        else:
            yield from self._bare_calls(self._calls)
        self._output.finish()

    def _read_reasoning(self, markers: ReasoningMarkers) -> Reading[None]:
        buffer, output = self._buffer, self._output
        if not self._reasoning_open:
            before = yield from spaces(buffer)
            if not (yield from skip(buffer, markers.start)):
                output.content(before)
                return
        elif (yield from ahead(buffer, markers.start)):  # some models write the marker again
            yield from skip(buffer, markers.start)
        yield from spaces(buffer)
        yield from until(buffer, (markers.end,), output.reasoning)
        yield from spaces(buffer)

    def _content_and_calls(self, calls: CallReader, form: CallFormat) -> Reading[None]:
        buffer, trigger = self._buffer, form.trigger
        rest = form.opening[len(trigger) :]
        while True:
            found = yield from until(buffer, (trigger,), self._output.content)
            if found is None:
                return
            yield from self._section(calls, found, rest)

    def _bare_calls(self, calls: CallReader) -> Reading[None]:
        """The whole text is a call or content. After a call only another one may follow."""
        buffer = self._buffer
        while True:
            before = yield from spaces(buffer)
            if (yield from skip(buffer, PYTHON_TAG)):
                before += PYTHON_TAG
            if not (yield from ahead(buffer, "{")):
                break
            if not (yield from self._section(calls, before, "")):
                before = ""
                break
        self._output.content(before)
        yield from until(buffer, (), self._output.content)

    def _section(self, calls: CallReader, start: str, opening: str) -> Reading[bool]:
        """Reads calls. ``start`` is what was consumed already; false if the text is none and was given back."""
        self._buffer.record(start)
        try:
            yield from calls.section(self._buffer, opening)
        except Malformed:
            self._output.give_back()
            return False
        self._buffer.recorded()
        return True


class _Output(CallSink):
    """What is certain and not handed out yet."""

    def __init__(self, buffer: TextBuffer, stream_calls: bool) -> None:
        self._buffer = buffer
        self._stream_calls = stream_calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._spaces = ""  # at the end of content: dropped if a call follows
        self._reasoning_spaces = ""
        self._after_call = False
        self._begun = False  # a call was handed out and is not complete
        self._n_calls = 0
        self._held: list[ToolCallDelta] = []  # of the call that is being read

    def piece(self) -> ChatPiece:
        deltas: list[ToolCallDelta] = []
        for delta in self._deltas:  # joins the pieces of one call
            if deltas and deltas[-1].index == delta.index:
                last = deltas[-1]
                deltas[-1] = ToolCallDelta(last.index, last.id, last.name, last.arguments + delta.arguments)
            else:
                deltas.append(delta)
        piece = ChatPiece("".join(self._content), "".join(self._reasoning), tuple(deltas))
        self._content, self._reasoning, self._deltas = [], [], []
        return piece

    def content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        visible = text.rstrip()
        if visible:
            self._content.append(self._spaces + visible)
            self._spaces = text[len(visible) :]
            self._after_call = False
        else:
            self._spaces += text

    def reasoning(self, text: str) -> None:
        visible = text.rstrip()
        if visible:
            self._reasoning.append(self._reasoning_spaces + visible)
            self._reasoning_spaces = text[len(visible) :]
        else:
            self._reasoning_spaces += text

    def finish(self) -> None:
        if self._spaces:
            self._content.append(self._spaces)
            self._spaces = ""

    # ---- calls
    def begin(self, name: str, id_: str | None) -> None:
        self._add(ToolCallDelta(self._n_calls, id_ or new_call_id(), name, ""))

    def more(self, text: str) -> None:
        self._add(ToolCallDelta(self._n_calls, None, None, text))

    def _add(self, delta: ToolCallDelta) -> None:
        if self._stream_calls:
            self._called(delta)
        else:
            self._held.append(delta)

    def _called(self, delta: ToolCallDelta) -> None:
        self._deltas.append(delta)
        self._spaces = ""
        self._after_call = True
        self._begun = True
        self._buffer.record()

    def end(self) -> None:
        for delta in self._held:
            self._called(delta)
        self._held = []
        self._begun = False
        self._n_calls += 1
        self._buffer.record()

    def give_back(self) -> None:
        """The text that was read as a call and is none becomes content."""
        if self._begun:  # it stays unfinished
            self._begun = False
            self._n_calls += 1
        self._held = []
        self.content(self._buffer.recorded())


def parse_answer(parser: ChatParser, text: str) -> ChatMessage:
    """The whole answer in one call."""
    return ChatMessage([parser.feed(text), parser.finish()])
