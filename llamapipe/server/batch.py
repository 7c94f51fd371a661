"""Answers requests in OpenAI's batch format with the server's application, in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from llamapipe._messages import quoted
from llamapipe.embedding import Embedder
from llamapipe.engine import Engine
from llamapipe.jobs.answers import RecordResult
from llamapipe.jobs.records import Record
from llamapipe.jobs.results import request_id
from llamapipe.media.decode import MOST_SECONDS
from llamapipe.server._inside import post
from llamapipe.server.application import app
from llamapipe.server.settings import ServerSettings

_NO_LIMIT = 2**31 - 1  # for requests and bytes, because the job limits both


class BatchRequests:
    """Gives each record the answer that ``llamapipe serve`` would give. Use it on one event loop.

    ``names``, ``embedding_names``: the names of the model and of the ``embedder`` in requests; by default, the names of
    their files.
    """

    def __init__(
        self,
        engine: Engine,
        names: Sequence[str] = (),
        embedder: Embedder | None = None,
        embedding_names: Sequence[str] = (),
    ) -> None:
        settings = ServerSettings(
            model_names=tuple(names),
            embedding_names=tuple(embedding_names),
            max_requests=_NO_LIMIT,
            max_body_bytes=_NO_LIMIT,
            max_bodies_bytes=2**62,
            max_messages=_NO_LIMIT,
            max_text_characters=_NO_LIMIT,
            max_sound_s=MOST_SECONDS,
            page=False,
        )
        self._application = app(engine, settings, embedder)

    async def answer(self, record: Record) -> RecordResult:
        """Return the result of a record that has ``custom_id``, in OpenAI's format."""
        fields = record.fields
        url, body = fields.get("url"), fields.get("body")
        result: dict[str, Any] = {"id": request_id(record.index), "custom_id": fields["custom_id"]}
        problem = None
        if fields.get("method", "POST") != "POST":
            problem = f"method is {quoted(fields['method'])}; it must be POST"
        elif not isinstance(url, str) or not url.startswith("/v1/") or not isinstance(body, dict):
            problem = "a request needs a url such as /v1/chat/completions and a body"
        elif body.get("stream"):
            problem = "stream is true; a batch has whole answers"
        if problem is not None:
            error = {"code": "invalid_request", "message": problem}
            return RecordResult(result | {"response": None, "error": error}, failed=True)
        status, answer = await self._post(str(url), json.dumps(body).encode())
        usage = answer.get("usage") if isinstance(answer, dict) else None
        n = int((usage or {}).get("completion_tokens") or (usage or {}).get("output_tokens") or 0)
        response = {"status_code": status, "request_id": request_id(record.index), "body": answer}
        return RecordResult(result | {"response": response, "error": None}, n, status >= 400)

    async def _post(self, path: str, body: bytes) -> tuple[int, Any]:
        answer = await post(self._application, path, body)
        return answer.status, json.loads(answer.body)
