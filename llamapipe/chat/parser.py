"""Parses generated text into content, reasoning and tool calls while it arrives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llamapipe.chat.calls.answer_output import AnswerOutput
from llamapipe.chat.calls.call_format import CallFormat, ReasoningMarkers
from llamapipe.chat.calls.call_reader import CallReader
from llamapipe.chat.calls.grammar import PYTHON_TAG
from llamapipe.chat.calls.harmony import HarmonyReader
from llamapipe.chat.calls.lenient import plain_calls
from llamapipe.chat.calls.reader import Malformed, Reading, TextBuffer, ahead, skip, spaces, until
from llamapipe.chat.results import ChatMessage, ChatPiece


class ChatParser:
    """Parses one answer. Feed it the text as it arrives, with control tokens as text. For one thread at a time.

    The result does not depend on where the text is cut. Markers never appear in content. Text that begins like a call
    but is not one, such as the name of an unknown tool, is content. An incomplete call at the end is dropped if the
    answer was cut off and a marker began the call, or with ``required``, where the grammar allows nothing but calls.

    With ``stream_calls`` the arguments of a call are returned while they arrive, and an incomplete call stays
    unfinished. Without it, a call is returned when it is complete. With ``lenient`` an answer that consists of calls as
    plain JSON is read as these; see ``plain_calls``. Text that may still become such calls is held back.

    ``ended_in_call``: the text ended within a call of which a part was returned.
    """

    def __init__(
        self,
        form: CallFormat | None,
        reasoning: ReasoningMarkers | None,
        *,
        reasoning_open: bool = False,
        tools: Mapping[str, dict[str, Any]] | None = None,
        stream_calls: bool = False,
        required: bool = False,
        harmony: bool = False,
        lenient: bool = False,
        parallel: bool = True,
    ) -> None:
        """``tools``: the parameters of each tool that may be called. ``reasoning_open``: the prompt ends in reasoning.

        ``parallel``: plain JSON may be several calls.

        ``harmony``: the text is in the format of gpt-oss; ``form`` and ``reasoning`` are not used then.
        """
        self._buffer = TextBuffer()
        self._output = AnswerOutput(self._buffer, stream_calls)
        self._reasoning = reasoning
        self._reasoning_open = reasoning_open
        self._calls = CallReader(form, tools, self._output) if form is not None and tools else None
        self._form = form
        self._harmony = HarmonyReader(self._buffer, self._output, tools or {}) if harmony else None
        self._reading = self._answer()
        self._plain_tools = tuple(tools or ()) if lenient else ()
        self._parallel = parallel
        self._required = required
        self._finished = False
        next(self._reading)

    @property
    def ended_in_call(self) -> bool:
        """See the class."""
        return self._output.ended_in_call

    def feed(self, text: str) -> ChatPiece:
        """Parses the next text; returns the parts that later text cannot change. Raises ValueError after ``finish``."""
        if self._finished:
            raise ValueError("the parser is finished; use a new one for another answer")
        if text:
            self._buffer.feed(text)
            next(self._reading)
        return self._output.piece()

    def finish(self, cut_off: bool = False) -> ChatPiece:
        """Ends the text; returns the parts that were held back. A second call returns nothing.

        ``cut_off``: the model had more to say.
        """
        if not self._finished:
            # Without a marker, such text may be JSON that the user asked for.
            marked = self._harmony is not None or (self._form is not None and bool(self._form.trigger))
            self._output.drops_incomplete = cut_off and marked
            self._finished = self._buffer.ended = True
            next(self._reading, None)
        piece = self._output.piece()
        return replace(piece, content="") if self._required else piece

    def _answer(self) -> Reading[None]:
        yield
        if self._harmony is not None:
            yield from self._harmony.answer(self._reasoning_open)
            self._output.finish()
            return
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if self._plain_tools and self._form is not None and (yield from self._plain_calls(self._form)):
            pass
        elif self._calls is None or self._form is None:
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

    def _plain_calls(self, form: CallFormat) -> Reading[bool]:
        """Reads an answer that consists of calls as plain JSON; otherwise consumes nothing and returns False."""
        buffer, output = self._buffer, self._output
        buffer.record()
        try:
            yield from spaces(buffer)
            # What the template's own format begins with is read as such, piece by piece.
            for marker in (form.trigger,) if form.trigger else ("{", PYTHON_TAG):
                if (yield from ahead(buffer, marker)):
                    raise Malformed
            calls = yield from plain_calls(buffer, self._plain_tools, self._parallel)
        except Malformed:
            buffer.unread(buffer.recorded())
            return False
        for call in calls:
            output.begin(call.name, None)
            output.more(call.arguments)
            output.end()
        buffer.recorded()
        return True

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
        """Reads calls. ``start``: the text consumed already. False if there is no call: the text is then content."""
        self._buffer.record(start)
        try:
            yield from calls.section(self._buffer, opening)
        except Malformed:
            self._output.give_back()
            return False
        self._buffer.recorded()
        return True


def parse_answer(parser: ChatParser, text: str) -> ChatMessage:
    """The whole answer in one call."""
    return ChatMessage([parser.feed(text), parser.finish()])
