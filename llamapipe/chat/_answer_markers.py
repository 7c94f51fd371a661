"""Finds the markers of reasoning and text in an answer. ``_template_probe.py`` finds the markers of calls.

Reasoning precedes the text. Some templates also mark the text, as in ``<|START_RESPONSE|>…<|END_RESPONSE|>``. The probe
renders answers with known texts and reads the tags around these texts. A marker that also surrounds a user's message
does not identify reasoning. The probe extends such a marker to the next tag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from llamapipe.chat._call_format import CallFormat, ReasoningMarkers, n_tags, segments
from llamapipe.chat._template_probe import (
    CONTENT,
    KNOWN_REASONING,
    MAX_MARKER,
    TOOL,
    USER,
    TemplateProbe,
    common_start,
)
from llamapipe.chat.messages import REASONING_KEYS

_REASONING = "Qxreasonqx."
_NAME = "qxfirst"
_CALL = {
    "id": "Qxid00001",
    "type": "function",
    "function": {"name": _NAME, "arguments": {"qxkey": "qxvalue"}},
}
# Template arguments that switch reasoning on and off.
_SWITCHES = ("enable_thinking", "thinking")
# The sentences before reasoning and text that some templates ask the model to write.
_SENTENCES = ReasoningMarkers("Here is my thought process:", "Here is my response:")
# Pairs of text markers that templates remove from earlier answers but do not write.
_KNOWN_TEXT = (("<answer>", "</answer>"), ("<response>", "</response>"))


@dataclass(frozen=True)
class AnswerMarkers:
    """The markers of an answer.

    - ``reasoning``: the pair around reasoning, or None. ``opening``: the start marker with the newline after it, if
      the template writes one.
    - ``text_starts``: optional markers before the text, the longest first. ``text_end``: the marker after the text.
    - ``turn_end``: the end of the answer. It is a token that ends generation, but some models write it as text.
    - ``control``: the control tokens in all markers, including the markers of calls. An answer's text never has them.
    """

    reasoning: ReasoningMarkers | None = None
    text_starts: tuple[str, ...] = ()
    text_end: str = ""
    turn_end: str = ""
    control: frozenset[str] = frozenset()
    opening: str = ""

    def has_control(self, marker: str) -> bool:
        """Return whether a marker contains a control token, which ordinary text cannot spell."""
        return any(segment in self.control for segment in segments(marker))

    @property
    def marks_text(self) -> bool:
        """True if a marker around the text has no control token."""
        return any(not self.has_control(marker) for marker in (*self.text_starts, self.text_end) if marker)


class MarkerProbe:
    """Looks for the markers of one template. ``is_control``: returns whether a text is one control token."""

    def __init__(self, probe: TemplateProbe, is_control: Callable[[str], bool]) -> None:
        self._probe = probe
        self._is_control = is_control
        answer = probe.rendered([USER, {"role": "assistant", "content": CONTENT}], prompt=False)
        self._head, _, self._tail = answer.rpartition(CONTENT)
        self._user = probe.rendered([USER], prompt=False)
        before, _, after = self._user.rpartition(USER["content"])
        header = before.rstrip().rpartition("\n")[2]  # earlier lines may explain markers
        self._around_user = _last_tag(header, _last_tag(header, "")) + after

    def markers(self, calls: CallFormat | None, ends: Callable[[str], bool]) -> AnswerMarkers:
        """Return all markers.

        ``calls``: the format of the template's calls. ``ends``: returns whether a text is a token that ends generation.
        Such a token does not become the marker after the text.
        """
        reasoning = self._shown_reasoning() or self._empty_reasoning() or self._known_reasoning()
        starts, end = self._text(reasoning, ends)
        texts = [*starts, end]
        texts += [reasoning.start, reasoning.end] if reasoning is not None else []
        if calls is not None:
            texts += [text for text in (*vars(calls).values(), *calls.head) if isinstance(text, str)]
            texts += [end for _, end in calls.key_ends]
        # Models may repeat the end of the prompt, so its control tokens count, too.
        texts.append(self._probe.prompt[len(common_start(self._probe.prompt, self._user)) :])
        control = {s for text in texts for s in segments(text) if self._is_control(s)}
        turn_end = self._tags(self._tail.lstrip().removeprefix(end), max(n_tags(end), 1))
        if not self._is_control("".join(segments(turn_end)[:1])) or turn_end in control:
            turn_end = ""
        opening = "" if reasoning is None else self._opening(reasoning)
        return AnswerMarkers(reasoning, starts, end, turn_end, frozenset(control), opening)

    def kept(self, usual: AnswerMarkers, markers: AnswerMarkers) -> AnswerMarkers:
        """Return the markers to use with template arguments.

        ``usual``: the markers without template arguments; ``markers``: the markers that this probe found.
        """
        control = usual.control | markers.control
        reasoning = self._begun_reasoning(usual.reasoning) or self._other_reasoning(usual, markers)
        if reasoning is None:
            return replace(usual, control=control)
        control |= {s for text in vars(reasoning).values() for s in segments(text) if self._is_control(s)}
        starts = sorted({*usual.text_starts, *markers.text_starts}, key=len, reverse=True)
        return replace(
            usual,
            reasoning=reasoning,
            text_starts=tuple(starts),
            text_end=markers.text_end or usual.text_end,
            control=control,
            opening=self._opening(reasoning),
        )

    def _other_reasoning(self, usual: AnswerMarkers, markers: AnswerMarkers) -> ReasoningMarkers | None:
        """Return the pair in ``markers`` if the template writes it instead of the usual pair, else None."""
        known, other = usual.reasoning, markers.reasoning
        if other is None or other == known:
            return None
        written = [*self._written_reasoning()]
        if known is None:
            return other
        if any(known.start in before and known.end in after for before, after, _ in written):
            return None
        is_written = any(other.start in before and other.end in after for before, after, _ in written)
        return other if is_written else None

    def _begun_reasoning(self, usual: ReasoningMarkers | None) -> ReasoningMarkers | None:
        """Return the pair whose start ends the prompt, if its name extends the usual name: ``<think_fast>``."""
        if usual is None or _closed(usual.start) != usual.end:
            return None
        tag = segments(self._probe.prompt.rstrip())[-1:]
        if not tag or tag[0] == usual.start or not tag[0].startswith(usual.start[:-1]):
            return None
        return ReasoningMarkers(tag[0], _closed(tag[0]))

    def reasoning_off(self) -> dict[str, Any]:
        """Return template arguments that switch reasoning off; empty if there are none."""
        for name in _SWITCHES:
            on, off = (self._prompt(name, value) for value in (True, False))
            if on and off and on != off:
                return {name: False}
        return {}

    def has_efforts(self) -> bool:
        """Return whether ``reasoning_effort`` changes the template's output."""
        low, high = (self._prompt("reasoning_effort", effort) for effort in ("low", "high"))
        return bool(low and high) and low != high

    def _prompt(self, switch: str, value: bool | str) -> str:
        return self._probe.rendered([USER], prompt=True, switches={switch: value})

    # ---- reasoning
    def _shown_reasoning(self) -> ReasoningMarkers | None:
        """Find the markers in an answer with reasoning, as the template writes it."""
        for before, after, _ in self._written_reasoning():
            start, end = self._start(before), self._end(after)
            if start and end and start != end:
                return ReasoningMarkers(start, end)
        return None

    def _written_reasoning(self) -> Iterator[tuple[str, str, bool]]:
        """Yield the text before and the text after reasoning, and whether content follows instead of a call."""
        for key in REASONING_KEYS:
            for calls in (False, True):
                message: dict[str, Any] = {"role": "assistant", "content": CONTENT, key: _REASONING}
                if calls:
                    message |= {"content": "", "tool_calls": [_CALL]}
                text = self._probe.rendered([USER, message], prompt=False, tools=[TOOL] if calls else None)
                before, reasoning, after = text.rpartition(_REASONING)
                between, then, _ = after.partition(_NAME if calls else CONTENT)
                if reasoning and then:
                    yield before, between, not calls

    def _start(self, before: str) -> str:
        """Return the marker at the end of a text; empty if there is none."""
        marker = self._distinct(before, _last_tag)
        if len("".join(segments(marker)[:1])) < 2:
            return ""
        prompt = self._probe.prompt
        if self._head.rstrip().endswith(marker):  # the marker also precedes a text without reasoning
            before = before.rstrip()
            return prompt[len(before) :].strip() if prompt.startswith(before) else ""
        n = len(segments(marker)[0])
        overlap = next((i for i in range(len(marker) - 1, n - 1, -1) if prompt.endswith(marker[:i])), 0)
        return marker[overlap:].strip()  # a prompt may end inside the marker

    def _end(self, after: str) -> str:
        """Return the marker at the beginning of a text; empty if there is none."""
        marker = self._distinct(after, _first_tag)
        return marker if marker.startswith(("<", "[")) else ""

    def _distinct(self, text: str, extended: Callable[[str, str], str]) -> str:
        """Return the shortest marker that does not also surround a user's message; empty if there is none."""
        marker = ""
        while not marker or marker in self._around_user:
            longer = extended(text, marker)
            if longer == marker or len(longer) > MAX_MARKER:
                return ""
            marker = longer
        return marker

    def _opening(self, markers: ReasoningMarkers) -> str:
        """Return the start of reasoning as the template writes it, with the newline after it, if any."""
        texts = [self._probe.prompt, *(before for before, _, _ in self._written_reasoning()), self._head]
        texts += [self._prompt(name, False) for name in _SWITCHES]
        for text in texts:
            _, marker, after = text.rpartition(markers.start)
            if marker:
                return markers.start + ("\n" if after.startswith("\n") else "")
        return markers.start

    def _empty_reasoning(self) -> ReasoningMarkers | None:
        """Find the markers in a prompt with reasoning switched off, which may end with empty reasoning."""
        prompt = self._probe.prompt
        for name in _SWITCHES:
            off = self._prompt(name, False)
            written = off[len(prompt) :].strip() if prompt and off.startswith(prompt) else ""
            tags = [segment for segment in segments(written) if len(segment) > 1]
            if len(tags) == 2 and written.startswith(tags[0]) and written.endswith(tags[1]):
                return ReasoningMarkers(written.removesuffix(tags[1]).rstrip(), tags[1])
        return None

    def _known_reasoning(self) -> ReasoningMarkers | None:
        """Return a pair that many models use, if the template hints at it."""
        call = self._probe.calls(1) or ""
        prompts = [self._probe.prompt, *(self._prompt(name, True) for name in _SWITCHES)]
        for known in KNOWN_REASONING:
            shown = any(known.start in prompt for prompt in prompts)
            shown = shown or any(known.start in text and known.end in text for text in (call, self._head))
            if shown or self._takes_off(known.start + _REASONING + known.end + CONTENT, _REASONING):
                return known
        asked = any(_SENTENCES.start in prompt and _SENTENCES.end in prompt for prompt in prompts)
        return _SENTENCES if asked else None

    def _takes_off(self, content: str, part: str) -> bool:
        """Return whether the template drops ``part`` of an earlier answer with this content."""
        messages = [USER, {"role": "assistant", "content": content}, USER]
        rendered = self._probe.rendered(messages, prompt=False)
        return CONTENT in rendered and part not in rendered

    # ---- text
    def _text(
        self, reasoning: ReasoningMarkers | None, ends: Callable[[str], bool]
    ) -> tuple[tuple[str, ...], str]:
        """Return the start markers and the end marker of an answer's text, without those of reasoning and turn end."""
        written = self._head[len(common_start(self._head, self._probe.prompt)) :]
        if reasoning is not None:
            for marker in (reasoning.end, reasoning.start):
                if marker in written:
                    written = written.rpartition(marker)[2]
                    break
        start = self._text_start(written)
        if not start or self._probe.prompt.rstrip().endswith(start):  # the prompt has written the marker
            return self._known_text()
        end = self._tags(self._tail, n_tags(start), ends)
        starts = {start}
        for _, between, is_text in self._written_reasoning():
            after = between.partition(reasoning.end)[2] if reasoning is not None and is_text else ""
            starts |= {self._text_start(after)} if start in after else set()
        is_marker = any(map(self._is_control, segments(end)))
        return tuple(sorted(starts - {""}, key=len, reverse=True)), end if is_marker else ""

    @staticmethod
    def _tags(text: str, n: int, ends: Callable[[str], bool] | None = None) -> str:
        """Return a text up to its ``n``-th tag, or to just before a tag that ends generation."""
        beginning = ""
        for segment in segments(text.lstrip()):
            if not n or (ends is not None and ends(segment)):
                break
            beginning += segment
            n -= len(segment) > 1
        return beginning.rstrip()

    def _text_start(self, written: str) -> str:
        """Return the marker before the text. A marker without control tokens includes the spaces after it."""
        start = written.lstrip()
        if len(start) > MAX_MARKER:
            return ""
        return start.rstrip() if any(map(self._is_control, segments(start))) else start

    def _known_text(self) -> tuple[tuple[str, ...], str]:
        """Return a pair that the template removes from the text of earlier answers; empty texts if there is none."""
        for start, end in _KNOWN_TEXT:
            if self._takes_off(start + CONTENT + end, start):
                return (start,), end
        return (), ""


def _closed(tag: str) -> str:
    return f"{tag[0]}/{tag[1:]}"


def _last_tag(text: str, tag: str) -> str:
    """Return the last tag of a text, with the text after it.

    ``tag``: an earlier result, to be extended by the tag before it.
    """
    parts = segments(text.rstrip())
    return "".join(parts[-_to_next_tag(parts[::-1], tag) :])


def _first_tag(text: str, tag: str) -> str:
    """Return the first tag of a text and the text before it, or all text.

    ``tag``: an earlier result, to be extended by the next tag.
    """
    parts = segments(text.strip())
    return "".join(parts[: _to_next_tag(parts, tag)])


def _to_next_tag(parts: list[str], tag: str) -> int:
    """Return the number of parts up to the end of the first tag after ``tag``, or up to the end."""
    n = len(segments(tag)) + 1
    while n < len(parts) and len(parts[n - 1]) == 1:
        n += 1
    return n
