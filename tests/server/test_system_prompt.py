"""The operator's system prompt: which conversations get it, in each API, and what errors about messages say."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.scripted_model import scripted_model

import llamapipe as lp
from llamapipe.cli import serve as serve_command
from llamapipe.cli._models_file import entries_of
from llamapipe.cli.parser import UsageError
from llamapipe.server import ServerSettings, serve

SOURCE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM = "Answer in one short sentence."
HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Engine]:
    path = scripted_model(tmp_path_factory.mktemp("m") / "m.gguf", "Yes.", (), SOURCE)
    with lp.Engine(path, n_ctx=1024, n_seq_max=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: lp.Engine) -> Iterator[str]:
    settings = ServerSettings(model_names=("m",), ollama=True, system=SYSTEM)
    with serve(engine, settings=settings) as server:
        yield server.url


def n_tokens(engine: lp.Engine, system: str) -> int:
    return len(engine.model.tokenize_chat([{"role": "system", "content": system}, *HELLO]))


OTHER = "Answer in French, please."


def test_the_prompt_that_is_shown_is_the_one_that_is_computed(engine: lp.Engine) -> None:
    with serve(engine, settings=ServerSettings(model_names=("m",), system=SYSTEM)) as server:
        shown = httpx.post(f"{server.url}/apply-template", json={"messages": HELLO}).json()["prompt"]
        tokens = httpx.post(f"{server.url}/tokenize", json={"messages": HELLO}).json()["tokens"]
    assert shown == f"[system]{SYSTEM}\n[user]Hello\n[assistant]"
    assert tokens == engine.model.tokenize_chat([{"role": "system", "content": SYSTEM}, *HELLO])


@pytest.mark.parametrize("own", [None, OTHER])
def test_openais_routes_have_it(engine: lp.Engine, url: str, own: str | None) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    expected = n_tokens(engine, own or SYSTEM)
    messages = HELLO if own is None else [{"role": "system", "content": own}, *HELLO]
    done = client.chat.completions.create(model="m", messages=messages)
    assert done.usage is not None
    assert done.usage.prompt_tokens == expected
    response = client.responses.create(model="m", input="Hello", instructions=own)
    assert response.usage is not None
    assert response.usage.input_tokens == expected
    counted = client.responses.input_tokens.count(model="m", input="Hello", instructions=own)
    assert counted.input_tokens == expected


def test_streams_have_it(engine: lp.Engine, url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    events = list(
        client.chat.completions.create(
            model="m", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    assert events[-1].usage is not None
    assert events[-1].usage.prompt_tokens == n_tokens(engine, SYSTEM)


@pytest.mark.parametrize("own", [None, OTHER])
def test_anthropics_routes_have_it(engine: lp.Engine, url: str, own: str | None) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    more: Any = {} if own is None else {"system": own}
    message = client.messages.create(model="m", max_tokens=9, messages=HELLO, **more)
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == n_tokens(
        engine, own or SYSTEM
    )
    counted = client.messages.count_tokens(model="m", messages=HELLO, **more)
    assert counted.input_tokens == n_tokens(engine, own or SYSTEM)


@pytest.mark.parametrize("own", [None, OTHER])
def test_ollamas_routes_have_it(engine: lp.Engine, url: str, own: str | None) -> None:
    def ask(path: str, **body: Any) -> Any:
        answer = httpx.post(f"{url}/api/{path}", json={"model": "m", "stream": False} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    messages = HELLO if own is None else [{"role": "system", "content": own}, *HELLO]
    assert ask("chat", messages=messages)["prompt_eval_count"] == n_tokens(engine, own or SYSTEM)
    first = ask("generate", prompt="Hello", system=own or "")
    assert first["prompt_eval_count"] == n_tokens(engine, own or SYSTEM)
    # The context of an earlier answer begins with a system prompt, and with the BOS token.
    again = ask("generate", prompt="Hello", context=first["context"])
    assert again["prompt_eval_count"] == len(first["context"]) + len(engine.model.tokenize_chat(HELLO)) - 1


def test_errors_have_the_places_of_the_request(url: str) -> None:
    bad = [*HELLO, {"role": "wizard"}, {"role": "user", "content": 5}]
    for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens"):
        answer = httpx.post(f"{url}{path}", json={"messages": bad})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith("messages[1]"), answer.text
    empty = httpx.post(f"{url}/v1/chat/completions", json={"messages": []})
    assert "messages is empty" in empty.json()["error"]["message"]
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    image = httpx.post(
        f"{url}/v1/chat/completions", json={"messages": [*HELLO, {"role": "user", "content": [part]}]}
    )
    assert image.json()["error"]["param"] == "messages.1.content.0", image.text


def test_a_developer_message_is_one(engine: lp.Engine, url: str) -> None:
    messages = [*HELLO, {"role": "developer", "content": OTHER}]
    answer = httpx.post(f"{url}/v1/chat/completions/input_tokens", json={"messages": messages}).json()
    assert answer["input_tokens"] == len(engine.model.tokenize_chat(messages))


def test_the_system_prompt_must_be_a_text() -> None:
    with pytest.raises(TypeError, match="system must be"):
        ServerSettings(system=5)  # type: ignore[arg-type]


def test_the_file_of_the_option(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text(SYSTEM + "\n", encoding="utf-8")
    parser = argparse.ArgumentParser()
    serve_command.add_arguments(parser)
    args = parser.parse_args(["--system", f"@{tmp_path / 'system.txt'}"])
    assert serve_command.settings_fields(args)["system"] == SYSTEM
    assert serve_command.settings_fields(parser.parse_args(["--system", SYSTEM]))["system"] == SYSTEM
    with pytest.raises(UsageError, match=r"--system: .*none\.txt cannot be read"):
        serve_command.settings_fields(parser.parse_args(["--system", f"@{tmp_path / 'none.txt'}"]))


def test_a_file_beside_the_list(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(
        '[models.a]\nfile = "a.gguf"\nsystem = "@system.txt"\n[models.b]\nfile = "b.gguf"\nsystem = "Hi"\n'
    )
    prompts = {entry.name: entry.options["system"] for entry in entries_of([str(tmp_path / "m.toml")])}
    assert prompts == {"a": f"@{tmp_path / 'system.txt'}", "b": "Hi"}
