"""Images in the forms of all APIs, and what a client may not ask for."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.media_models import idefics3_projector, model_with_tile_tokens, png
from support.served import post_json

import llamapipe as lp
from llamapipe.server import ServerSettings, serve

DATA = base64.b64encode(png(200, 120)).decode()
URL = f"data:image/png;base64,{DATA}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("images")
    projector = idefics3_projector(folder / "mmproj.gguf")
    with (
        lp.Model(model_with_tile_tokens(folder / "text.gguf"), mmproj=projector) as model,
        lp.Engine(model, n_ctx=512, n_seq_max=4) as engine,
        serve(engine, settings=ServerSettings(model_names=("m",), ollama=True)) as server,
    ):
        yield server.url
        engine.check_integrity()


def chat(url: str, *parts: Any) -> Any:
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return post_json(
        url,
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0},
    )


def test_openais_chat_takes_images(url: str) -> None:
    without = chat(url)["usage"]["prompt_tokens"]
    answer = chat(url, {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}})
    assert answer["usage"]["prompt_tokens"] > without + 16
    assert answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", ["/apply-template", "/tokenize"])
def test_an_image_has_no_text(url: str, path: str) -> None:
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL}}
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    error = httpx.post(url + path, json=body).json()["error"]
    assert error["param"] == "messages.0.content.0"
    assert error["message"].endswith("; /v1/chat/completions/input_tokens counts its tokens")


@pytest.mark.parametrize("detail", ["auto", "high"])
def test_a_detail_is_named(url: str, detail: str) -> None:
    """The projector chooses the resolution."""
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL, "detail": detail}}
    item: dict[str, Any] = {"type": "input_image", "image_url": URL, "detail": detail}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}),
        ("/v1/responses", {"input": [{"role": "user", "content": [item]}], "max_output_tokens": 1}),
    ):
        answer = httpx.post(url + path, json={"model": "m", **body})
        assert answer.status_code == 200
        assert ("detail" in answer.headers.get("x-llamapipe-unused", "")) is (detail == "high")


def test_what_the_model_takes(url: str) -> None:
    for path in ("/v1/models", "/model_info", "/props"):
        with urllib.request.urlopen(url + path) as answer:
            body = json.load(answer)
        body = body["data"][0] if path == "/v1/models" else body
        if path == "/props":
            assert body["modalities"] == {"vision": True, "audio": False, "video": False}
        else:
            assert body["supports_images"] and not body["supports_audio"]
        if path == "/v1/models":
            assert body["architecture"] == {
                "input_modalities": ["text", "image"],
                "output_modalities": ["text"],
            }
    with urllib.request.urlopen(url + "/metrics") as answer:
        assert b"llamapipe_encoded_media_total" in answer.read()


def test_openais_responses_take_images(url: str) -> None:
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": URL}]
    answer = post_json(
        url, "/v1/responses", {"input": [{"role": "user", "content": parts}], "max_output_tokens": 4}
    )
    assert answer["usage"]["input_tokens"] > 32, answer


def test_anthropics_messages_take_images(url: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
    answer = post_json(url, "/v1/messages", body)
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] > 32
    counted = post_json(url, "/v1/messages/count_tokens", {"messages": body["messages"]})
    assert (
        counted["input_tokens"]
        == answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"]
    )
    source |= {"type": "url", "url": "http://127.0.0.1:1/a.png"}
    assert "no address is fetched" in post_json(url, "/v1/messages", body)["error"]["message"]


def test_ollamas_routes_take_images(url: str) -> None:
    message = {"role": "user", "content": "What is this?", "images": [DATA]}
    options = {"num_predict": 4}
    answer = post_json(url, "/api/chat", {"messages": [message], "stream": False, "options": options})
    assert answer.get("prompt_eval_count", 0) > 32, answer
    body = {"prompt": "What is this?", "images": [DATA], "stream": False, "options": options}
    assert post_json(url, "/api/generate", body)["prompt_eval_count"] > 32
    assert "leave raw" in post_json(url, "/api/generate", {**body, "raw": True})["error"]
    assert "vision" in post_json(url, "/api/show", {})["capabilities"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image", "image": "/etc/hostname"}, "image_url with a data URL"),
        ({"type": "audio", "audio": "/etc/hostname"}, "image_url with a data URL"),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}, "no address is fetched"),
        ({"type": "image_url", "image_url": {"url": "/etc/hostname"}}, "no address is fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "cannot be decoded"),
        ({"type": "image_url", "image_url": 3}, "has no image"),
        ({"type": "image_url"}, "has no image"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "takes no sounds"),
    ],
)
def test_what_is_no_image_is_refused(url: str, part: dict[str, Any], message: str) -> None:
    answer = chat(url, part)
    assert answer["status"] == 400
    assert message in answer["error"]["message"]


BROKEN = base64.b64encode(b"no image").decode()


def message_of(answer: Any) -> str:
    """The message of an error, in the form of any API."""
    assert answer["status"] == 400, answer
    error = answer["error"]
    return error if isinstance(error, str) else str(error["message"])


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_the_place_of_an_image_in_anthropics_requests(url: str, path: str) -> None:
    """The system prompt and the results of tools become messages of their own, and errors name those of the request."""
    source = {"type": "base64", "media_type": "image/png", "data": BROKEN}
    image = {"type": "image", "source": source}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}, image]}
    more: dict[str, Any] = {"system": "Be short.", **({} if "count" in path else {"max_tokens": 2})}
    before = [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [call]}]

    def said(*content: Any) -> str:
        return message_of(
            post_json(url, path, {"messages": [*before, {"role": "user", "content": [*content]}], **more})
        )

    assert said(result).startswith("messages.2.content.0.content.1 has the type 'image'")
    result["content"] = "x"
    text = {"type": "text", "text": "What?"}
    assert said(result, text, image).startswith("messages.2.content.2: the image cannot be decoded")
    source["data"] = "?"
    assert said(result, image).startswith("messages.2.content.1: the text is not base64")
    address = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1:1/a.png"}}
    assert said(result, text, address).startswith(
        "messages.2.content.2: 'http://127.0.0.1:1/a.png': no address"
    )


def test_the_place_of_an_image_in_openais_requests(url: str) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{BROKEN}"}}
    function = {"name": "look", "arguments": "{}"}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "x"}, image]},
    ]
    for stream in (False, True):
        answer = post_json(url, "/v1/chat/completions", {"messages": messages, "stream": stream})
        assert message_of(answer).startswith("messages.3.content.1: the image cannot be decoded")
        assert answer["error"]["param"] == "messages.3.content.1"
    output = [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": URL}]
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    items = [{"role": "user", "content": "Look."}, call]
    result = {"type": "function_call_output", "call_id": "a", "output": output}
    answer = post_json(url, "/v1/responses", {"input": [*items, result], "instructions": "Be short."})
    assert message_of(answer).startswith("input.2.output.1 has the type 'input_image'")
    user = {"role": "user", "content": [{"type": "input_image", "image_url": f"data:;base64,{BROKEN}"}]}
    answer = post_json(
        url,
        "/v1/responses",
        {"input": [*items, {**result, "output": "x"}, user], "instructions": "Be short."},
    )
    assert message_of(answer).startswith("input.3.content.0: the image cannot be decoded")


def test_the_place_of_an_image_in_ollamas_requests(url: str) -> None:
    calls = [{"function": {"name": "look", "arguments": {}}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_name": "look", "content": "x", "images": [DATA, BROKEN]},
    ]
    answer = post_json(url, "/api/chat", {"messages": messages, "stream": False})
    assert message_of(answer).startswith("messages.2.images.1: the image cannot be decoded")
    answer = post_json(
        url, "/api/generate", {"prompt": "x", "images": [BROKEN], "system": "Be short.", "stream": False}
    )
    assert message_of(answer).startswith("images.0: the image cannot be decoded")
