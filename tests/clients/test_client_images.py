"""Images and sounds as the clients of each API send them."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.media_models import (
    model_with_grids,
    model_with_tile_tokens,
    png,
    qwen2vl_projector,
    ultravox_projector,
)

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

openai = pytest.importorskip("openai", reason="needs openai: nox -s clients")
anthropic = pytest.importorskip("anthropic", reason="needs anthropic: nox -s clients")
ollama = pytest.importorskip("ollama", reason="needs ollama: nox -s clients")

pytestmark = pytest.mark.clients
PICTURE = png(200, 120)
DATA = base64.b64encode(PICTURE).decode()
URL = f"data:image/png;base64,{DATA}"
N_ROWS = 24  # of the picture


def served(model: lp.Model) -> Iterator[str]:
    with (
        model,
        lp.Engine(model, n_ctx=2048, n_seq_max=4) as engine,
        serve(engine, settings=ServerSettings(model_names=("m",), ollama=True)) as server,
    ):
        yield server.url
        engine.check_integrity()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A model that takes images, whose positions have a height and a width."""
    folder = tmp_path_factory.mktemp("images")
    yield from served(
        lp.Model(model_with_grids(folder / "text.gguf"), mmproj=qwen2vl_projector(folder / "p.gguf"))
    )


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("sounds")
    yield from served(
        lp.Model(model_with_tile_tokens(folder / "text.gguf"), mmproj=ultravox_projector(folder / "p.gguf"))
    )


def sound() -> bytes:
    """Two seconds of a tone."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16000)
        writer.writeframes((np.sin(np.arange(32000) / 7) * 8000).astype("<i2").tobytes())
    return file.getvalue()


def test_openai(url: str) -> None:
    client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    parts: list[Any] = [{"type": "text", "text": "What is this?"}]
    image = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}

    def ask(content: list[Any], **more: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(
            model="m", messages=messages, max_tokens=4, temperature=0, extra_body={"ignore_eos": True}, **more
        )

    plain, seen = ask(parts), ask([*parts, image])
    assert seen.usage.prompt_tokens >= plain.usage.prompt_tokens + N_ROWS
    deltas = [chunk.choices[0].delta.content or "" for chunk in ask([*parts, image], stream=True)]
    assert "".join(deltas) == seen.choices[0].message.content != ""
    answer = client.responses.create(
        model="m",
        max_output_tokens=16,
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "What is this?"},
                    {"type": "input_image", "image_url": URL},
                ],
            }
        ],
    )
    assert answer.usage.input_tokens >= plain.usage.prompt_tokens + N_ROWS
    with pytest.raises(openai.BadRequestError, match="is not base64"):
        ask([*parts, {"type": "image_url", "image_url": {"url": URL[:200]}}])
    with pytest.raises(openai.BadRequestError, match="no address is fetched"):
        ask([*parts, {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}])
    assert client.models.list().data[0].id == "m"


def test_anthropic(url: str) -> None:
    client: Any = anthropic.Anthropic(base_url=url, api_key="none")
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}],
        }
    ]
    answer = client.messages.create(model="m", max_tokens=4, messages=messages)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > N_ROWS
    with client.messages.stream(model="m", max_tokens=4, messages=messages) as stream:
        assert isinstance("".join(stream.text_stream), str)
    assert client.messages.count_tokens(model="m", messages=messages).input_tokens > N_ROWS


def test_ollama(url: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PICTURE)
    with ollama.Client(host=url) as client:
        assert "vision" in client.show("m").capabilities
        plain = client.generate("m", "What is this?", options={"num_predict": 4}).prompt_eval_count
        for image in (PICTURE, DATA, str(path), path):
            messages = [{"role": "user", "content": "What is this?", "images": [image]}]
            answer = client.chat("m", messages=messages, options={"num_predict": 4})
            assert answer.prompt_eval_count >= plain + N_ROWS
        assert (
            client.generate("m", "What?", images=[PICTURE], options={"num_predict": 4}).prompt_eval_count
            > N_ROWS
        )


def test_langchain(url: str) -> None:
    chat: Any = pytest.importorskip("langchain_openai", reason="needs langchain: nox -s clients").ChatOpenAI
    chat_model = chat(model="m", base_url=f"{url}/v1", api_key="none", max_tokens=4)
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image", "base64": DATA, "mime_type": "image/png"},
    ]
    answer = chat_model.invoke([{"role": "user", "content": content}])
    assert answer.usage_metadata["input_tokens"] > N_ROWS


def test_sounds(hearing: str) -> None:
    client: Any = openai.OpenAI(base_url=f"{hearing}/v1", api_key="none")
    data = base64.b64encode(sound()).decode()
    content = [
        {"type": "text", "text": "What is said?"},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
    ]
    answer = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": content}], max_tokens=4
    )
    assert answer.usage.prompt_tokens > 375
    told = client.audio.transcriptions.create(
        model="m", file=("a.wav", sound()), extra_body={"max_tokens": 4}
    )
    assert isinstance(told.text, str)
