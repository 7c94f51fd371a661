"""Runs services with Ray Serve: ``deployment`` and ``openai_app``, with an engine in each replica.

``EngineReplica`` is the class of a deployment; any number of requests can call it at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from llamapipe.arguments import check_float, check_int
from llamapipe.params import SamplingParams
from llamapipe.ray._costs import HttpRequest
from llamapipe.ray._spec import (
    EngineSpec,
    activated_loras,
    cores_of_actor,
    n_sharing,
    range_of,
    ray,
    reservation,
)
from llamapipe.results import ChatCompletion, ChatDelta, Completion, Delta
from llamapipe.server.settings import ServerSettings
from llamapipe.structured.compile import prepare_vocabulary
from llamapipe.types import Prompt

if TYPE_CHECKING:
    from ray.serve import Application

Message = MutableMapping[str, Any]
_MOST_WAITING = 256  # maximum number of messages of an answer that wait to be sent


class EngineReplica:
    """One replica. Its methods are called through a handle: ``handle.generate.remote("Hello", params)``.

    Streams need ``handle.options(stream=True)``. If a caller goes away, its request is cancelled within a step.
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
        self.engine = self._undo.enter_context(spec.open(cores_of_actor(num_cpus, n_sharing)))
        prepare_vocabulary(self.engine.model.vocab)
        self._app = app(self.engine, settings)

    def __repr__(self) -> str:
        return f"<EngineReplica {self.engine!r}>"

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> Completion:
        """Generate as ``Engine.agenerate`` does, for one prompt."""
        return await self.engine.agenerate(prompt, params)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncGenerator[Delta, None]:
        """Stream as ``Engine.astream`` does; for a handle with ``stream=True``."""
        async with self.engine.astream(prompt, params) as stream:
            async for delta in stream:
                yield delta

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> ChatCompletion:
        """Answer as ``Engine.achat`` does, for one conversation."""
        return await self.engine.achat(messages, params, **options)

    async def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> AsyncGenerator[ChatDelta, None]:
        """Stream as ``Engine.astream_chat`` does; for a handle with ``stream=True``."""
        async with self.engine.astream_chat(messages, params, **options) as stream:
            async for delta in stream:
                yield delta

    async def http(self, request: HttpRequest) -> AsyncGenerator[list[Message], None]:
        """Yield the answer that ``llamapipe serve`` would give, as ASGI messages; for a handle with ``stream=True``.

        Each item has all messages that are ready, because sending one through Ray takes longer than computing a token.
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
        # Not after a cancellation: messages are then no longer read, and the queue may be full.
        await messages.put(None)

    async def check_health(self) -> None:
        """Raise if the engine is closed. Ray Serve replaces a replica that raises here or does not answer in time.

        The check waits until the engine's step has ended, so it also detects an engine that hangs.
        """
        if self.engine.closed:
            raise RuntimeError(f"{self.engine!r} is closed")
        await asyncio.to_thread(self.engine.stats)

    def close(self) -> None:
        """Close the engine and its model; a second call does nothing. Ray ends replicas without calling it."""
        self._undo.close()


_NAME = "llamapipe"


def deployment(
    spec: EngineSpec,
    *,
    name: str = _NAME,
    replicas: int | tuple[int, int] = 1,
    target_ongoing_requests: float | None = None,
    max_ongoing_requests: int | None = None,
    max_queued_requests: int = 1024,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    settings: ServerSettings | None = None,
    autoscaling: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
) -> Application:
    """Create a Ray Serve deployment with an engine in each replica, for ``serve.run`` or another application.

    A handle has the methods ``generate`` and ``chat``, and with ``options(stream=True)`` also ``stream`` and
    ``stream_chat``. They have the arguments and results of the engine's methods. ``openai_app`` serves HTTP.

    - ``replicas``: the number of replicas, or a pair of the fewest and the most. With a pair, Serve adds replicas when
      a replica has more than ``target_ongoing_requests`` requests on average, by default the engine's ``n_seq_max``.
      ``autoscaling``: more fields of Serve's ``AutoscalingConfig``, such as ``{"upscale_delay_s": 5}``.
    - ``max_ongoing_requests``: how many requests a replica gets at the same time; default: four times ``n_seq_max``.
      More requests wait for a replica, up to ``max_queued_requests`` for each handle.
    - ``num_cpus``, ``num_gpus``: how many CPUs and GPUs Ray reserves for a replica. A replica computes on at most
      ``num_cpus`` cores; None: Ray reserves one, and the replicas on a machine divide its cores.
    - ``settings``: the limits and names of the HTTP routes.
    - ``options``: more arguments of ``serve.deployment``, such as ``{"health_check_period_s": 5}``.

    Requests go to the replica with the least work; see ``PrefixCostRouter``. Serve replaces a replica that dies or
    whose engine does not answer. Raises TypeError and ValueError for wrong arguments, ImportError without the extra
    ``ray``.
    """
    library = ray()
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from llamapipe.ray._router import PrefixCostRouter

    if not isinstance(spec, EngineSpec):
        raise TypeError(f"spec must be an EngineSpec, not {type(spec).__name__}")
    if settings is not None and not isinstance(settings, ServerSettings):
        raise TypeError(f"settings must be ServerSettings, not {type(settings).__name__}")
    least, most = range_of("replicas", replicas, 0)
    actor = reservation(num_cpus, num_gpus)
    n_at_once = 4 * spec.n_seq_max
    if max_ongoing_requests is not None:
        n_at_once = check_int("max_ongoing_requests", max_ongoing_requests, 1, 2**31 - 1)
    target = float(spec.n_seq_max)
    if target_ongoing_requests is not None:
        target = check_float("target_ongoing_requests", target_ongoing_requests, 1e-3, 2**31 - 1)
    scale: dict[str, Any] = {"num_replicas": least}
    if least != most:
        scale = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": most,
                "target_ongoing_requests": target,
                **(autoscaling or {}),
            }
        }
    elif target_ongoing_requests is not None or autoscaling is not None:
        raise ValueError(
            f"replicas is {least}, so their number stays; give the least and the most to scale, as in (1, 4)"
        )
    engines = serve.deployment(
        EngineReplica,
        name=name,
        max_ongoing_requests=n_at_once,
        max_queued_requests=check_int("max_queued_requests", max_queued_requests, -1, 2**31 - 1),
        ray_actor_options=actor,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixCostRouter,
            request_router_kwargs={
                "adapters": [*spec.adapters, *spec.control_vectors],
                "activated": activated_loras(spec),
            },
        ),
        **{**scale, **(options or {})},
    )
    bound: Application = engines.bind(spec, settings, num_cpus, n_sharing(library, most))
    return bound


def openai_app(
    spec: EngineSpec,
    *,
    settings: ServerSettings | None = None,
    n_ingress: int = 1,
    **options: Any,
) -> Application:
    """Create a Ray Serve application with all routes of ``llamapipe serve``, for OpenAI's and Anthropic's clients.

    Run it with ``serve.run(openai_app(spec), route_prefix="/")``. ``options``: as for ``deployment``. ``n_ingress``:
    the number of processes that take HTTP requests and hand them to the replicas. If a replica dies, its streams end
    with an error event, and requests that it had not begun to answer get 503. ``/metrics`` and ``/timeline`` show one
    replica.

    Raises as ``deployment`` does.
    """
    engines = deployment(spec, settings=settings, **options)
    from ray import serve

    from llamapipe.ray._ingress import Ingress

    limits = settings or ServerSettings()
    ingress = serve.deployment(
        Ingress,
        name=f"{options.get('name', _NAME)}-http",
        num_replicas=check_int("n_ingress", n_ingress, 1, 10_000),
        max_ongoing_requests=limits.max_requests,
        ray_actor_options={"num_cpus": 0},
    )
    bound: Application = ingress.bind(engines, settings)
    return bound
