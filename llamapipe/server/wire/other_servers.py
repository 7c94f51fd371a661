"""Names that clients of other servers use: for the message that refuses a path or a field, and names the one here."""

from __future__ import annotations

from collections.abc import Collection

_AT_START = "the model is chosen when the server starts, with -m"
_PATHS = {  # Ollama's, then llama-server's
    "/api/chat": "use /v1/chat/completions",
    "/api/generate": "use /v1/completions",
    "/api/embed": "use /v1/embeddings",
    "/api/embeddings": "use /v1/embeddings",
    "/api/tags": "use /v1/models",
    "/api/ps": "use /model_info",
    "/api/show": "use /model_info",
    "/api/version": "use /model_info",
    "/api/pull": _AT_START,
    "/api/create": _AT_START,
    # These two exist there with and without /v1, and the answers differ. So they are no aliases here.
    "/completions": "use /v1/completions",
    "/embeddings": "use /v1/embeddings",
    "/completion": "use /v1/completions",
    "/embedding": "use /v1/embeddings",
    "/infill": "use /v1/completions with suffix",
    "/props": "use /model_info",
    "/slots": "use /metrics",
    "/models/load": _AT_START,
}
_MAX_TOKENS = ("max_tokens", "max_output_tokens")
_FIELDS = {  # the names here; which of them a route has differs
    "n_predict": _MAX_TOKENS,
    "num_predict": _MAX_TOKENS,
    "max_new_tokens": _MAX_TOKENS,
    "max_tokens": _MAX_TOKENS,
    "max_completion_tokens": _MAX_TOKENS,
    "n_probs": ("top_logprobs", "logprobs"),
    "n_cmpl": ("n",),
    "samplers": ("sampler_order",),
    "mirostat_mode": ("mirostat",),
    "format": ("response_format",),
    "guided_json": ("json_schema",),
    "guided_regex": ("regex",),
    "stop": ("stop_sequences",),
}
_NOTES = {
    "options": "give each option as a field of its own, such as temperature",
    "think": "give chat_template_kwargs with enable_thinking instead",
    "keep_alive": "leave it out: the model stays loaded until the server ends",
    "num_ctx": "leave it out: --n-ctx sets it when the server starts",
    "n_ctx": "leave it out: --n-ctx sets it when the server starts",
}


def path_hint(path: str) -> str:
    """What to use instead of another server's path; empty if the path is unknown."""
    hint = _PATHS.get(path.rstrip("/"))
    return "" if hint is None else f"; {hint}"


def field_hint(field: str, known: Collection[str]) -> str | None:
    """What to use instead of another server's field, on a route with the fields ``known``; None if it is unknown."""
    name = next((one for one in _FIELDS.get(field, ()) if one in known), None)
    if name is not None:
        return f"; it is {name} here"
    if field == "think" and "chat_template_kwargs" not in known:
        return "; only chats have reasoning"
    return f"; {_NOTES[field]}" if field in _NOTES else None
