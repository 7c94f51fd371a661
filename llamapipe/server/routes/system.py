"""About the server itself: ``/health``, ``/metrics`` and ``/openapi.json``."""

from __future__ import annotations

import asyncio

from llamapipe.server.errors import ApiError
from llamapipe.server.exchange import Call
from llamapipe.server.metrics import CONTENT_TYPE
from llamapipe.server.wire.openapi import document


async def health(call: Call) -> None:
    """``GET /health``: 200 and how many workers are ready, or 503 while the server drains."""
    if call.state.draining or call.state.engine.closed:
        raise ApiError(503, "the server is shutting down", code="shutting_down")
    worker = call.state.worker
    if worker is None:
        await call.answer_json({"status": "ok"})
    else:
        await call.answer_json({"status": "ok", "workers_ready": worker.n_ready, "workers": worker.n_workers})


async def metrics(call: Call) -> None:
    """``GET /metrics``, in Prometheus' text format; of all workers, if there are several."""
    worker = call.state.worker
    text = await (asyncio.to_thread(call.state.metrics.text) if worker is None else worker.text())
    await call.answer(text, headers=((b"content-type", CONTENT_TYPE),))


async def openapi(call: Call) -> None:
    """``GET /openapi.json``: the server's routes, for clients and tests."""
    paths = [route.path.replace(":path", "") for route in call.scope["app"].routes]
    await call.answer_json(document(paths))
