"""Converts the deltas of a text stream to deltas of a chat: content, reasoning, tool calls.

Open this file to change when the caller receives a part of an answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamapipe.results import ChatDelta, ChatFinishReason, Delta, TokenLogprob

if TYPE_CHECKING:
    from llamapipe.chat.parser import ChatParser


class DeltaParser:
    """Converts the text deltas of a request to chat deltas. Tokens without visible text go into the next chat delta."""

    def __init__(self, parser: ChatParser | None, n_prompt_tokens: int) -> None:
        self.n_prompt_tokens = n_prompt_tokens
        self._parser = parser
        self._called = False
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def __repr__(self) -> str:
        return f"<DeltaParser n_prompt_tokens={self.n_prompt_tokens}>"

    def read(self, delta: Delta) -> ChatDelta | None:
        """Return the next part of the answer; None if there is nothing to show yet."""
        reason: ChatFinishReason | None = delta.finish_reason
        parser = self._parser
        if parser is None:
            if not delta.text and reason is None and delta.logprobs is None:
                self._token_ids += delta.token_ids
                return None
            return self._with_tokens(
                ChatDelta(delta.text, "", (), delta.token_ids, delta.logprobs, reason, delta.stop_string)
            )
        piece = parser.feed(delta.text)
        content, reasoning, tool_calls = piece.content, piece.reasoning, piece.tool_calls
        if reason is not None:
            last = parser.finish(cut_off=reason != "stop")
            content, reasoning = content + last.content, reasoning + last.reasoning
            tool_calls += last.tool_calls
        self._called = self._called or bool(tool_calls)
        if reason == "stop" and self._called and not parser.ended_in_call:
            reason = "tool_calls"
        if not (content or reasoning or tool_calls) and reason is None:
            self._token_ids += delta.token_ids
            self._logprobs += delta.logprobs or ()
            return None
        return self._with_tokens(
            ChatDelta(
                content, reasoning, tool_calls, delta.token_ids, delta.logprobs, reason, delta.stop_string
            )
        )

    def _with_tokens(self, delta: ChatDelta) -> ChatDelta:
        """Return the delta with the tokens and logprobs of earlier deltas that showed nothing."""
        if not self._token_ids:
            return delta
        ids, logprobs = (*self._token_ids, *delta.token_ids), delta.logprobs
        if logprobs is not None:
            logprobs = (*self._logprobs, *logprobs)
        self._token_ids.clear()
        self._logprobs.clear()
        return delta._replace(token_ids=ids, logprobs=logprobs)
