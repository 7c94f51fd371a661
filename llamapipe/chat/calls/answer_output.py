"""Collects the content, reasoning and calls read from an answer, and returns them piece by piece."""

from __future__ import annotations

from llamapipe.chat.calls.reader import TextBuffer
from llamapipe.chat.results import ChatPiece, ToolCallDelta, new_call_id


class AnswerOutput:
    """Output that was parsed and not returned yet. Spaces before a call and around reasoning are dropped.

    With ``stream_calls`` the pieces of a call are returned as they are read, else when the call is complete.
    """

    def __init__(self, buffer: TextBuffer, stream_calls: bool) -> None:
        self._buffer = buffer
        self._stream_calls = stream_calls
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._spaces = ""  # at the end of content: dropped if a call follows
        self._reasoning_spaces = ""
        self._after_call = False
        self._any_content = False
        self._any_reasoning = False
        self._begun = False  # a part of a call was returned, and the call is not complete
        self._n_calls = 0
        self._held: list[ToolCallDelta] = []  # of the call that is being read
        self.ended_in_call = False  # the text ended within a call of which a part was returned
        self.drops_incomplete = (
            False  # a call that the end of the text cuts off is dropped, else it is content
        )

    def piece(self) -> ChatPiece:
        """The output added since ``piece`` was last called."""
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
        """Adds text of the answer."""
        if self._after_call and not self._any_content:
            text = text.lstrip()
        visible = text.rstrip()
        if visible:
            self._content.append(self._spaces + visible)
            self._spaces = text[len(visible) :]
            self._after_call = False
            self._any_content = True
        else:
            self._spaces += text

    def reasoning(self, text: str) -> None:
        """Adds text of the reasoning."""
        visible = text.rstrip()
        if visible:
            self._reasoning.append(self._reasoning_spaces + visible)
            self._reasoning_spaces = text[len(visible) :]
            self._any_reasoning = True
        else:
            self._reasoning_spaces += text

    def paragraph(self) -> None:
        """Begins another message, separated from the one before by an empty line."""
        self._spaces = "\n\n" if self._any_content else ""
        self._reasoning_spaces = "\n\n" if self._any_reasoning else ""

    def finish(self) -> None:
        """Ends the text."""
        if self._spaces and not self._after_call:
            self._content.append(self._spaces)
        self._spaces = ""

    # ---- calls
    def begin(self, name: str, id_: str | None) -> None:
        """A call begins. ``id_``: the model's own id, if it is known already."""
        self._add(ToolCallDelta(self._n_calls, id_ or new_call_id(), name, ""))

    def more(self, text: str) -> None:
        """The next piece of the JSON text of the call's arguments."""
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
        """The call is complete."""
        for delta in self._held:
            self._called(delta)
        self._held = []
        self._begun = False
        self._n_calls += 1
        self._buffer.record()

    def give_back(self) -> None:
        """Turns text that was read as a call, but is not one, into content."""
        if self._begun:  # it stays unfinished
            self._begun = False
            self._n_calls += 1
            if self._buffer.ended:
                self.ended_in_call = True
                self._drop()
                return
        self._held = []
        if self.drops_incomplete and self._buffer.ended:
            self._drop()
        else:
            self.content(self._buffer.recorded())

    def _drop(self) -> None:
        """Drops what was read of an incomplete call, and the rest of the text, which belongs to it."""
        self._buffer.recorded()
        self._buffer.take(len(self._buffer.rest))
