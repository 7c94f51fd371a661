"""``/v1/audio/transcriptions``: forms with sounds, models that take none, and forms that are damaged in many ways."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
import threading
import urllib.error
import urllib.request
import wave
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fleet_servers import pool_server
from support.media_models import ultravox_projector

import llamapipe as lp
from llamapipe.server import ServerSettings, serve
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.forms import form_parts

TYPE = "multipart/form-data; boundary=xYz"


def sound(seconds: float = 1.0) -> bytes:
    samples = (np.sin(np.arange(int(16000 * seconds)) / 7) * 20000).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes(samples.tobytes())
    return file.getvalue()


WAV = sound()


def form(fields: Mapping[str, str | bytes]) -> bytes:
    parts = []
    for name, value in fields.items():
        more = '; filename="a.wav"\r\nContent-Type: audio/wav' if name == "file" else ""
        head = f'--xYz\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
        parts.append(head.encode() + (value if isinstance(value, bytes) else value.encode()) + b"\r\n")
    return b"".join(parts) + b"--xYz--\r\n"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Engine]:
    path = ultravox_projector(tmp_path_factory.mktemp("sounds") / "mmproj.gguf")
    with (
        lp.Model(lp.demo_model_path(), mmproj=path) as model,
        lp.Engine(model, n_ctx=1024, n_seq_max=4) as engine,
    ):
        yield engine


@pytest.fixture(scope="module")
def url(engine: lp.Engine) -> Iterator[str]:
    with serve(engine, settings=ServerSettings(model_names=("m",), max_body_bytes=2**20)) as server:
        yield server.url
        engine.check_integrity()


def send(
    url: str, body: bytes, content_type: str = TYPE, path: str = "/v1/audio/transcriptions"
) -> tuple[int, Any]:
    request = urllib.request.Request(url + path, body, {"content-type": content_type})
    try:
        with urllib.request.urlopen(request) as answer:
            is_json = answer.headers["content-type"] == "application/json"
            return answer.status, json.load(answer) if is_json else answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]["message"]


def test_the_text_of_a_sound(url: str, engine: lp.Engine) -> None:
    status, answer = send(url, form({"file": WAV, "model": "m", "max_tokens": "8"}))
    assert status == 200
    assert set(answer) == {"text", "usage"} and answer["usage"]["input_tokens"] > 375
    part = {"type": "audio", "audio": WAV}
    question = [{"role": "user", "content": [part, {"type": "text", "text": "Transcribe audio to text"}]}]
    params = lp.SamplingParams(max_tokens=8, temperature=0)
    assert engine.chat(question, params).n_prompt_tokens == answer["usage"]["input_tokens"]
    fields: dict[str, str | bytes] = {
        "file": WAV,
        "response_format": "text",
        "language": "en",
        "prompt": "Say it.",
        "max_tokens": "8",
    }
    status, text = send(
        url, form({**fields, "temperature": "0.5", "seed": "1", "timestamp_granularities[]": "word"})
    )
    assert status == 200 and isinstance(text, str) and text.endswith("\n")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "file is missing or empty"),
        ({"file": b""}, "file is missing or empty"),
        ({"file": b"no sound"}, "of an unknown format, and only WAV files are read"),
        ({"file": b"ID3\x04"}, "is MP3, and only WAV files are read: convert it, for example with ffmpeg"),
        ({"file": b"\xff\xfb\x90d"}, "is MP3 or AAC"),
        ({"file": b"\0\0\0 ftypM4A "}, "is MP4 or M4A"),
        ({"file": b"\x1aE\xdf\xa3\x9f"}, "is WebM or Matroska"),
        ({"file": b"OggS\0"}, "is Ogg"),
        ({"file": b"fLaC\0"}, "is FLAC"),
        ({"file": WAV[:20]}, "cannot be decoded"),
        ({"file": WAV, "stream": "true"}, "stream is true"),
        ({"file": WAV, "response_format": "srt"}, "there is 'json' and 'text'"),
        ({"file": WAV, "temperature": "hot"}, "temperature is 'hot', which is not a number"),
        ({"file": WAV, "temperature": "-1"}, "temperature"),
        ({"file": WAV, "max_tokens": "0"}, "max_tokens"),
        ({"file": WAV, "prompt": b"\xff"}, "prompt is not UTF-8"),
        ({"file": WAV, "prompts": "x"}, "the field 'prompts' is unknown"),
        ({"file": sound(30) * 2}, "at least"),
    ],
)
def test_wrong_forms_are_refused(url: str, fields: dict[str, str | bytes], message: str) -> None:
    status, answer = send(url, form(fields))
    assert status in (400, 413) and message in answer


def test_a_sound_may_have_so_many_seconds(engine: lp.Engine) -> None:
    """In a chat, too; one of another length is served."""
    message = "the sound is 3 s long; the limit of this server is 2 s (--max-sound)"
    with serve(engine, settings=ServerSettings(model_names=("m",), max_sound_s=2)) as server:
        for seconds, status in ((2.0, 200), (3.0, 400)):
            code, answer = send(server.url, form({"file": sound(seconds), "model": "m", "max_tokens": "2"}))
            assert code == status and (code == 200 or message in answer)
        data = base64.b64encode(sound(3.0)).decode()
        part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        body = json.dumps({"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}).encode()
        code, answer = send(server.url, body, "application/json", "/v1/chat/completions")
        assert code == 400 and message in answer and "messages.0.content.0" in answer


def test_what_is_no_form(url: str) -> None:
    assert "must be multipart/form-data" in send(url, b"{}", "application/json")[1]
    assert (
        "must be multipart/form-data" in send(url, form({"file": WAV}), "multipart/form-data; boundary=")[1]
    )
    assert "must be multipart/form-data" in send(url, form({"file": WAV}), TYPE + "; " * 5000)[1]
    assert "does not occur" in send(url, form({"file": WAV}), "multipart/form-data; boundary=other")[1]
    assert "is there twice" in send(url, form({"file": WAV})[:-9] + b"\r\n" + form({"file": WAV}))[1]
    assert send(url, form({"file": WAV, "model": "none"}))[0] == 404


def test_a_model_that_takes_no_sounds(demo: lp.Model) -> None:
    with (
        lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine,
        serve(engine, settings=ServerSettings(model_names=("m",))) as server,
    ):
        status, answer = send(server.url, form({"file": WAV}))
        assert status == 400 and "m takes no sounds" in answer


def test_a_server_of_several_models_finds_the_one_that_a_form_names(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    for name in ("hears", "reads"):
        (folder / name).mkdir(parents=True)
        shutil.copy(lp.demo_model_path(), folder / name / f"{name}.gguf")
    ultravox_projector(folder / "hears" / "mmproj.gguf")
    with pool_server(folder, "-c", "512", "-np", "2", log=tmp_path / "log") as server:
        fields: dict[str, str | bytes] = {"file": WAV, "max_tokens": "4"}
        status, answer = send(server.url, form({**fields, "model": "hears"}))
        assert status == 200 and answer["usage"]["input_tokens"] > 375, answer
        assert "reads takes no sounds" in send(server.url, form({**fields, "model": "reads"}))[1]
        assert send(server.url, form({**fields, "model": "none"}))[0] == 404
        assert "model is missing" in send(server.url, form(fields))[1]
        assert send(server.url, b"no form")[0] == 400


# ---- damaged forms
WHOLE = form({"model": "m", "file": WAV[:500], "max_tokens": "4", "prompt": "--xYz\r"})
PIECES = (
    b"--xYz",
    b"--xYz--",
    b"\r\n",
    b"\r\n\r\n",
    b'name="',
    b'"',
    b"\0",
    b"--",
    b"Content-Disposition:",
    b";",
)


def damaged(chance: random.Random) -> bytes:
    data = bytearray(WHOLE)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                del data[at:]
            case 1:
                del data[at : at + chance.randint(1, 40)]
            case 2:
                data[at:at] = chance.choice(PIECES)
            case 3:
                data[at : at + 1] = bytes([chance.randrange(256)])
            case _:
                begin = chance.randrange(len(data) + 1)
                data[at:at] = data[begin : begin + chance.randint(1, 200)]
    return bytes(data)


def test_parts_of_damaged_forms_end_in_errors_or_in_what_the_form_has() -> None:
    n_read = 0
    assert [part.name for part in form_parts(TYPE, WHOLE)] == ["model", "file", "max_tokens", "prompt"]
    assert form_parts(TYPE, WHOLE)[3].value == b"--xYz\r"
    for seed in range(5000):
        data = damaged(random.Random(seed))
        try:
            parts = form_parts(TYPE, data)
        except ApiError:
            continue
        n_read += 1
        assert all(part.value in data for part in parts)
    assert 500 < n_read < 4500
    for flood in (
        b"--xYz\r\n" * 2**17,
        b"--xYz" + b"\r\n--xYz" * 2**17,
        b"--xYz\r\n" + b"a:" * 2**19,
        b"\r\n" * 2**19,
    ):
        with pytest.raises(ApiError):
            form_parts(TYPE, flood)


def test_damaged_forms_harm_no_other_request(url: str, engine: lp.Engine) -> None:
    ended = threading.Event()
    n_tokens = []

    def others() -> None:
        while not ended.is_set():
            answer = engine.generate("Once upon a time", lp.SamplingParams(max_tokens=16, ignore_eos=True))
            n_tokens.append(len(answer.token_ids))

    thread = threading.Thread(target=others)
    thread.start()
    try:
        statuses = {send(url, damaged(random.Random(seed)))[0] for seed in range(300)}
    finally:
        ended.set()
        thread.join()
    assert statuses <= {200, 400, 404} and 400 in statuses
    assert n_tokens and set(n_tokens) == {16}
    assert send(url, form({"file": WAV, "max_tokens": "4"}))[0] == 200
