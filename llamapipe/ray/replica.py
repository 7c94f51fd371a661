"""``EngineReplica``: the class of a deployment of Ray Serve; one engine, called by any number of requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from llamapipe._engine.submit import Prompt
from llamapipe.params import SamplingParams
from llamapipe.ray.placement import cores_of_actor
from llamapipe.ray.requests import HttpRequest
from llamapipe.ray.spec import EngineSpec
from llamapipe.results import ChatCompletion, ChatDelta, Completion, Delta
from llamapipe.server.settings import ServerSettings
from llamapipe.structured.compile import prepare_vocabulary

Message = MutableMapping[str, Any]
_MOST_WAITING = 256  # messages of an answer that were not sent yet


class EngineReplica:
    """One replica. Its methods are called through a handle: ``handle.generate.remote("Hello", params)``.

    Streams need ``handle.options(stream=True)``. A request whose caller goes away is cancelled within a step.
    """

    def __init__(
        self,
        spec: EngineSpec,
        settings: ServerSettings | None = None,
        num_cpus: float | None = None,
        n_sharing: int = 1,
    ) -> None:
        from llamapipe.server import app

        self._undo = ExitStack()
        self.engine = self._undo.enter_context(spec.opened(cores_of_actor(num_cpus, n_sharing)))
        prepare_vocabulary(self.engine.model.vocab)
        self._app = app(self.engine, settings)

    def __repr__(self) -> str:
        return f"<EngineReplica {self.engine!r}>"

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """``Engine.agenerate`` for one prompt."""
        return await self.engine.agenerate(prompt, params)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta, None]:
        """``Engine.astream``; for a handle with ``stream=True``."""
        async with self.engine.astream(prompt, params) as stream:
            async for delta in stream:
                yield delta

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> ChatCompletion:
        """``Engine.achat`` for one conversation."""
        return await self.engine.achat(messages, params, **options)

    async def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[ChatDelta, None]:
        """``Engine.astream_chat``; for a handle with ``stream=True``."""
        async with self.engine.astream_chat(messages, params, **options) as stream:
            async for delta in stream:
                yield delta

    async def http(self, request: HttpRequest) -> AsyncGenerator[list[Message], None]:
        """The answer that ``llamapipe serve`` would give, as ASGI messages; for a handle with ``stream=True``.

        Each item has all messages that are there: sending one through Ray takes longer than computing a token.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue(_MOST_WAITING)
        work = asyncio.ensure_future(self._answer(request, messages))
        try:
            while True:
                first = await messages.get()
                ready = [first]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                known = [message for message in ready if message is not None]
                if known:
                    yield known
                if None in ready:
                    break
            await work
        finally:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])

    async def _answer(self, request: HttpRequest, messages: asyncio.Queue[Message | None]) -> None:
        body: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await asyncio.Event().wait()  # if the client goes away, this task is cancelled
            raise AssertionError

        try:
            await self._app(request.scope(), receive, messages.put)
        except Exception:
            await messages.put(None)
            raise
        await messages.put(
            None
        )  # not after a cancellation: then nothing is read any more, and there may be no room

    async def check_health(self) -> None:
        """Called by Ray Serve, which replaces a replica that raises here, or that does not answer in time.

        Waits until the engine's step has ended, so an engine that hangs is found, too.
        """
        if self.engine.closed:
            raise RuntimeError(f"{self.engine!r} is closed")
        await asyncio.to_thread(self.engine.stats)

    def close(self) -> None:
        """Closes the engine and its model; a second call does nothing. Ray ends replicas without it."""
        self._undo.close()
