"""Runs a conversation in the engine; shared by all chat APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llamapipe.engine.chat_results import ChatChoice, ChatCompletion, ChatDelta
from llamapipe.engine.chat_stream import AsyncChatStream
from llamapipe.engine.frontend.chat_builder import ChatOptions
from llamapipe.engine.frontend.long_work import size_of
from llamapipe.engine.params import SamplingParams
from llamapipe.errors import InvalidRequestError
from llamapipe.server.exchange import Call
from llamapipe.server.prompts import refuse_long_chat, total_choices
from llamapipe.server.wire.constraints import with_field


class ChatJob:
    """One conversation with its params: answered as a whole, or as one stream for each choice.

    ``constraint_field``: the field of the request that holds the format of the answer, if one does.
    ``is_empty``: the request asks for no tokens. The engine then computes the prompt and one token, which is not
    returned. ``n_prompt_tokens``, ``n_cached_tokens``: set when the first stream has begun.
    """

    def __init__(
        self,
        call: Call,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams,
        options: ChatOptions,
        constraint_field: str | None = None,
        is_empty: bool = False,
    ) -> None:
        total_choices(call.state, params.n)
        if options.truncation == "error":
            refuse_long_chat(call.state, messages)
        self._call = call
        self._engine = call.state.engine
        self._timeout = call.state.settings.timeout_s
        self._messages = messages
        self._params = params
        self._options = options._asdict()
        self._constraint = constraint_field
        self.is_empty = is_empty
        self.n_prompt_tokens = self.n_cached_tokens = 0
        self.running: list[AsyncChatStream | None] = [None] * params.n  # the streams that were submitted

    def __repr__(self) -> str:
        return f"<ChatJob n_messages={len(self._messages)} n={self._params.n}>"

    async def whole(self) -> ChatCompletion:
        """The answer, when all choices are complete."""
        answer = self._engine.achat(
            self._messages, self._params, timeout=self._timeout, block=False, **self._options
        )
        try:
            done = await self._call.whole(answer)
        except InvalidRequestError as e:
            raise self._explained(e) from None
        if self.is_empty:
            done = replace(done, choices=tuple(map(_emptied, done.choices)))
        return done

    async def prompt_tokens(self) -> list[int]:
        """The prompt's tokens, as the engine computes them."""
        build = self._engine._chat_builder.item  # turns may be dropped there
        options = ChatOptions(**self._options)
        made = await self._call.state.in_thread(
            build, self._messages, self._params, options, size=size_of(self._messages)
        )
        return made.item.tokens

    def streams(self) -> list[AsyncGenerator[ChatDelta | None, None]]:
        """One stream for each choice. Its first item is None: the request was checked and is in the queue."""
        return [self._stream(i) for i in range(self._params.n)]

    async def _stream(self, i: int) -> AsyncGenerator[ChatDelta | None, None]:
        params = replace(self._params, n=1)
        if params.seed is not None:
            params = replace(params, seed=(params.seed + i) % 2**64)
        stream = self._engine.astream_chat(
            self._messages, params, timeout=self._timeout, block=False, **self._options
        )
        try:
            async with stream:
                await stream.submit()
                self.n_prompt_tokens = stream.n_prompt_tokens
                self.running[i] = stream
                yield None
                async for delta in stream:
                    self.n_prompt_tokens = stream.n_prompt_tokens
                    if i == 0:  # the first stream computes the prompt for the others
                        self.n_cached_tokens = stream.n_cached_tokens
                    if self.is_empty:
                        yield ChatDelta("", "", (), (), () if delta.logprobs is not None else None, "length")
                        return
                    yield delta
        except InvalidRequestError as e:
            raise self._explained(e) from None

    def _explained(self, error: InvalidRequestError) -> Exception:
        """The error with the field of the request that caused it, if that is known."""
        return with_field(error, self._constraint or "tools")


def _emptied(choice: ChatChoice) -> ChatChoice:
    return replace(
        choice,
        content="",
        reasoning="",
        tool_calls=(),
        finish_reason="length",
        token_ids=[],
        logprobs=None if choice.logprobs is None else [],
    )
