"""The server's OpenAPI document: every route, the fields of its body, and the statuses it answers with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

import llamapipe
from llamapipe.server.anthropic import CountRequest, MessagesRequest
from llamapipe.server.chat import ChatRequest
from llamapipe.server.completions import CompletionRequest
from llamapipe.server.embeddings import EmbeddingRequest, RerankRequest
from llamapipe.server.responses import ResponsesRequest
from llamapipe.server.tokens import DetokenizeRequest, TemplateRequest, TokenizeRequest

_STATUSES = {
    "200": "The answer.",
    "400": "A field is wrong; the error names it.",
    "401": "No valid API key.",
    "403": "Not allowed.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "429": "Too many requests; Retry-After says when to retry.",
    "503": "The server is shutting down, or the KV cache is full.",
    "504": "The request took longer than the server allows.",
}
_BODY = ("400", "404", "408", "413")
_BUSY = ("429", "503")
_REF = "#/components/schemas/{name}"


class Operation(NamedTuple):
    """One route. ``parameters``: where each is (path or query), its name and its type."""

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    statuses: tuple[str, ...] = ()
    media: str = "application/json"
    parameters: tuple[tuple[str, str, str], ...] = ()
    has_key: bool = True


_GENERATES = (*_BODY, *_BUSY, "504")
OPERATIONS = (
    Operation("post", "/v1/chat/completions", "Answer a conversation.", ChatRequest, _GENERATES),
    Operation("post", "/v1/completions", "Complete text or tokens.", CompletionRequest, _GENERATES),
    Operation("post", "/v1/responses", "Answer an input; nothing is stored.", ResponsesRequest, _GENERATES),
    Operation(
        "post", "/v1/messages", "Answer a conversation, in Anthropic's format.", MessagesRequest, _GENERATES
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation.",
        CountRequest,
        (*_BODY, *_BUSY),
    ),
    Operation("post", "/v1/embeddings", "Embed texts.", EmbeddingRequest, (*_BODY, *_BUSY)),
    Operation("post", "/v1/rerank", "Rank documents for a query.", RerankRequest, (*_BODY, *_BUSY)),
    Operation("get", "/v1/models", "The models that are served.", None, _BUSY),
    Operation(
        "get",
        "/v1/models/{id}",
        "One model.",
        None,
        ("404", *_BUSY),
        parameters=(("path", "id", "string"),),
    ),
    Operation(
        "delete",
        "/v1/models/{id}",
        "Refused for a model that is served.",
        None,
        ("403", *_BUSY),
        parameters=(("path", "id", "string"),),
    ),
    Operation("post", "/tokenize", "Tokenize text or a conversation.", TokenizeRequest, (*_BODY, *_BUSY)),
    Operation("post", "/detokenize", "The text of tokens.", DetokenizeRequest, (*_BODY, *_BUSY)),
    Operation("post", "/apply-template", "The prompt of a conversation.", TemplateRequest, (*_BODY, *_BUSY)),
    Operation("get", "/tokenizer_info", "Properties of the tokenizer.", None, _BUSY),
    Operation("get", "/model_info", "Sizes of the model and of the engine.", None, _BUSY),
    Operation("get", "/health", "Whether the server accepts requests.", None, ("503",), has_key=False),
    Operation("get", "/metrics", "Metrics for Prometheus.", None, _BUSY, "text/plain"),
)
# Other paths of an operation, its own path, and its method: those of llama-server whose answers have the same form.
ALIASES = (
    ("/chat/completions", "/v1/chat/completions", "POST"),
    ("/responses", "/v1/responses", "POST"),
    ("/models", "/v1/models", "GET"),
    ("/rerank", "/v1/rerank", "POST"),
    ("/reranking", "/v1/rerank", "POST"),
    ("/v1/reranking", "/v1/rerank", "POST"),
    ("/v1/health", "/health", "GET"),
)


def document(paths: Iterable[str]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the operations whose path is served."""
    served = set(paths)
    by_path = {(one.path, one.method.upper()): one for one in OPERATIONS}
    aliases = [
        by_path[path, method]._replace(path=alias, summary=f"The same as {path}.")
        for alias, path, method in ALIASES
    ]
    operations = [one for one in (*OPERATIONS, *aliases) if one.path in served]
    bodies = list({one.body: None for one in operations if one.body is not None})
    _, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    components["Error"] = {"type": "object", "description": "In the format of the route's API."}
    described: dict[str, Any] = {}
    for one in operations:
        described.setdefault(one.path, {})[one.method] = _described(one)
    return {
        "openapi": "3.1.0",
        "info": {"title": "llamapipe", "version": llamapipe.__version__},
        "paths": described,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(one: Operation) -> dict[str, Any]:
    statuses = ("200", *one.statuses, *(("401",) if one.has_key else ()))
    made: dict[str, Any] = {
        "summary": one.summary,
        "operationId": f"{one.method}_{one.path.strip('/').replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": {status: _answer(status, one.media) for status in sorted(statuses)},
    }
    if one.has_key:
        made["security"] = [{}, {"key": []}]
    if one.body is not None:
        reference = {"$ref": _REF.format(name=one.body.__name__)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
        if "stream" in one.body.__struct_fields__:
            made["responses"]["200"]["content"]["text/event-stream"] = {}
    if one.parameters:
        made["parameters"] = [
            {"in": place, "name": name, "required": place == "path", "schema": {"type": kind}}
            for place, name, kind in one.parameters
        ]
    return made


def _answer(status: str, media: str) -> dict[str, Any]:
    if status == "200":
        return {"description": _STATUSES[status], "content": {media: {}}}
    error = {"schema": {"$ref": _REF.format(name="Error")}}
    return {"description": _STATUSES[status], "content": {"application/json": error}}
