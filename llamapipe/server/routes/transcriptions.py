"""``/v1/audio/transcriptions``: OpenAI's route for transcribing sounds, whose body is a form with a file.

The sound becomes a message of a conversation that asks for its text, so any model that takes sounds can answer.

The form is parsed here because Starlette's parser needs another package and writes large parts to disk. The body is
already in memory, within its limits, and the front process of several models reads the same bytes.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from starlette.responses import PlainTextResponse, Response

from llamapipe._messages import listed, quoted
from llamapipe.chat.options import ChatOptions
from llamapipe.params import SamplingParams
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.generation import ChatJob

_MOST_PARTS = 64
_MOST_TYPE = 300  # characters of a content type
_MOST_HEAD = 8192  # bytes of a part's headers
_BOUNDARY = re.compile(
    r"""multipart/form-data\s*;(?:[^"]*;)?\s*boundary="""
    r"""(?:"([\w'()+,./:=? -]{1,70})"|([\w'()+,./:=?-]{1,70}))\s*(?:;.*)?""",
    re.IGNORECASE | re.ASCII,
)
_DISPOSITION = rb"(?im)^content-disposition:\s*form-data\s*;[^\r\n]*?\b"
_NAME = re.compile(_DISPOSITION + rb'name="([^"\r\n]{1,200})"')
_FILENAME = re.compile(_DISPOSITION + rb'filename="([^"\r\n]{1,255})"')
FIELDS = ("file", "model", "language", "prompt", "response_format", "temperature", "stream", "max_tokens",
          "seed")  # fmt: skip
_WITHOUT_EFFECT = ("chunking_strategy", "include[]", "timestamp_granularities[]")
_PROMPT = "Transcribe audio to text"


class _Part(NamedTuple):
    name: str
    value: bytes
    filename: str | None


def form_parts(content_type: str, body: bytes) -> list[_Part]:
    """Return the fields of a form, in order. Raises ApiError 400 for an incomplete or invalid form."""
    match = _BOUNDARY.fullmatch(content_type.strip()) if len(content_type) <= _MOST_TYPE else None
    if match is None:
        raise ApiError(
            400,
            f"the body must be multipart/form-data with a boundary; its content-type is {quoted(content_type[:80])}",
        )
    mark = b"--" + (match[1] or match[2]).encode()
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if at == 1:
        raise ApiError(400, "the body's parts are not there: its boundary does not occur")
    parts: list[_Part] = []
    at += len(mark)
    while body[at : at + 2] != b"--":
        if body[at : at + 2] != b"\r\n":
            raise ApiError(400, f"part {len(parts)} of the body does not begin with a line end")
        if len(parts) == _MOST_PARTS:
            raise ApiError(400, f"the body has more than {_MOST_PARTS} parts")
        head_end = body.find(b"\r\n\r\n", at, at + _MOST_HEAD)
        end = body.find(b"\r\n" + mark, head_end + 4)
        if head_end < 0 or end < 0:
            raise ApiError(400, f"part {len(parts)} of the body is not complete")
        name = _NAME.search(body[at + 2 : head_end])
        if name is None:
            raise ApiError(400, f"part {len(parts)} of the body has no name")
        filename = _FILENAME.search(body[at + 2 : head_end])
        parts.append(
            _Part(
                name[1].decode("utf-8", "replace"),
                body[head_end + 4 : end],
                None if filename is None else filename[1].decode("utf-8", "replace"),
            )
        )
        at = end + 2 + len(mark)
    return parts


def form_model(content_type: str, body: bytes) -> str | None:
    """Return the model that a form names. Raises ApiError 400."""
    models = [part.value for part in form_parts(content_type, body) if part.name == "model"]
    return models[0].decode("utf-8", "replace") if models else None


async def form_of(
    exchange: Exchange, known: Sequence[str], without_effect: Sequence[str] = ()
) -> dict[str, _Part]:
    """Return the known fields of the form in the body, and release the body. Raises ApiError 400 for other fields."""
    raw, exchange.raw = exchange.raw, b""
    parts = await asyncio.to_thread(form_parts, exchange.headers.get("content-type", ""), raw)
    del raw
    fields: dict[str, _Part] = {}
    for part in parts:
        name = part.name
        if name in without_effect:
            continue
        if name not in known:
            raise ApiError(400, f"the field {quoted(name[:80])} is unknown; there is {listed(known)}", name)
        if name in fields:
            raise ApiError(400, f"the field {name} is there twice", name)
        fields[name] = part
    exchange.note_unused(tuple(part.name for part in parts if part.name in without_effect))
    return fields


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
