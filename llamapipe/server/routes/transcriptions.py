"""``/v1/audio/transcriptions``: OpenAI's route for transcribing sounds, whose body is a form with a file.

The sound becomes a message of a conversation that asks for its text, so any model that takes sounds can answer.

The form is parsed here because Starlette's parser needs another package and writes large parts to disk. The body is
already in memory, within its limits, and the front process of several models reads the same bytes.
"""

from __future__ import annotations

import asyncio
import base64
from typing import Any

from starlette.responses import PlainTextResponse, Response

from llamapipe._messages import quoted
from llamapipe.chat.options import ChatOptions
from llamapipe.params import SamplingParams
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.forms import form_of
from llamapipe.server.requests.generation import ChatJob

FIELDS = ("file", "model", "language", "prompt", "response_format", "temperature", "stream", "max_tokens",
          "seed")  # fmt: skip
_WITHOUT_EFFECT = ("chunking_strategy", "include[]", "timestamp_granularities[]")
_PROMPT = "Transcribe audio to text"


def _text(fields: dict[str, bytes], name: str, default: str, most: int) -> str:
    try:
        text = fields[name].decode() if name in fields else default
    except UnicodeDecodeError:
        raise ApiError(400, f"{name} is not UTF-8 text", name) from None
    if len(text) > most:
        raise ApiError(400, f"{name} has {len(text)} characters; at most {most} are allowed", name)
    return text


def _number(fields: dict[str, bytes], name: str, kind: type[int] | type[float]) -> float | None:
    text = _text(fields, name, "", 40).strip()
    try:
        return kind(text) if text else None
    except ValueError:
        raise ApiError(400, f"{name} is {quoted(text)}, which is not a number", name) from None


async def transcriptions(exchange: Exchange) -> Response:
    """Return the text of a sound."""
    state = exchange.server
    fields = {name: part.value for name, part in (await form_of(exchange, FIELDS, _WITHOUT_EFFECT)).items()}
    model = state.check_model(_text(fields, "model", "", 1000) or None)
    if not state.engine.model.supports_audio:
        raise ApiError(
            400, f"{model} takes no sounds: serve a model with a projector for them (--mmproj)", "model"
        )
    form = _text(fields, "response_format", "json", 40)
    if form not in ("json", "text"):
        raise ApiError(
            400, f"response_format is {quoted(form)}; there is 'json' and 'text'", "response_format"
        )
    if _text(fields, "stream", "false", 10).lower() not in ("false", "0", ""):
        raise ApiError(400, "stream is true; this route answers as a whole: leave it out", "stream")
    sound = fields.get("file")
    if not sound:
        raise ApiError(400, "file is missing or empty; send a WAV file", "file")
    question = _text(fields, "prompt", _PROMPT, state.settings.max_text_characters) or _PROMPT
    if language := _text(fields, "language", "", 40).strip():
        question += f" (language: {language})"
    numbers: dict[str, Any] = {name: _number(fields, name, int) for name in ("max_tokens", "seed")}
    numbers["temperature"] = _number(fields, "temperature", float) or 0.0
    try:
        params = SamplingParams(**numbers)
    except (ValueError, TypeError) as e:
        raise ApiError(400, str(e)) from None
    data = (await asyncio.to_thread(base64.b64encode, sound)).decode()
    content = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "text", "text": question},
    ]
    job = ChatJob(exchange, [{"role": "user", "content": content}], params, ChatOptions(), has_system=False)
    done = await job.complete()
    exchange.count(done.n_prompt_tokens, done.n_completion_tokens)
    text = done.content.strip()
    if form == "text":
        return PlainTextResponse(text + "\n")
    n, m = done.n_prompt_tokens, done.n_completion_tokens
    usage = {"type": "tokens", "input_tokens": n, "output_tokens": m, "total_tokens": n + m}
    return JsonResponse({"text": text, "usage": usage})
