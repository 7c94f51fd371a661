"""Ollama's own client, for threads and asyncio: every call of its page, and what else it can ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from support.served import ollama_server

ollama = pytest.importorskip("ollama", reason="needs ollama: nox -s clients")

pytestmark = pytest.mark.clients
SKY = [{"role": "user", "content": "Why is the sky blue?"}]
GREEDY = {"temperature": 0, "num_predict": 4}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ollama_server(tmp_path_factory.mktemp("models")) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with ollama.Client(host=url, headers={"x-some-header": "some-value"}) as client:
        yield client


def test_chat(client: Any) -> None:
    answer: Any = client.chat(model="gemma4", messages=SKY, options=GREEDY)
    assert isinstance(answer, ollama.ChatResponse)
    assert answer["message"]["content"] == answer.message.content != ""
    assert answer.done and answer.done_reason == "length"
    assert answer.eval_count == 4 and answer.prompt_eval_count > 10 and answer.total_duration > 0
    assert client.chat(model="gemma4:latest", messages=[*SKY, answer.message], options=GREEDY).done


def test_chat_streamed(client: Any) -> None:
    whole = client.chat(model="gemma4", messages=SKY, options=GREEDY)
    parts = list(client.chat(model="gemma4", messages=SKY, options=GREEDY, stream=True))
    assert "".join(part["message"]["content"] for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 4


def test_generate(client: Any) -> None:
    first = client.generate(model="gemma4", prompt="Why is the sky blue?", options=GREEDY)
    assert first["response"] == client.chat(model="gemma4", messages=SKY, options=GREEDY).message.content
    second = client.generate(model="gemma4", prompt="And now?", context=first.context, options=GREEDY)
    assert second.prompt_eval_count > first.prompt_eval_count
    parts = client.generate(
        model="gemma4", prompt="Once", suffix="the end.", options=GREEDY, stream=True, keep_alive="5m"
    )
    assert "".join(part["response"] for part in parts)
    assert client.generate(model="gemma4", prompt="Once", raw=True, options=GREEDY).context is None
    loaded = client.generate(model="gemma4", keep_alive=-1)
    assert (loaded.response, loaded.done_reason) == ("", "load")


def test_lists(client: Any) -> None:
    models = client.list().models
    assert [model.model for model in models] == ["gemma4:latest", "bert:latest"]
    assert all(model.size > 0 and model.digest and model.modified_at for model in models)
    assert models[0].details.family == "llama"
    loaded = client.ps().models
    assert [model.model for model in loaded] == ["gemma4:latest", "bert:latest"]
    assert loaded[0].expires_at.year > 2100 and loaded[0].context_length == 4096
    shown = client.show("gemma4")
    assert {"completion", "tools", "insert", "thinking"} <= set(shown.capabilities)
    assert shown.modelinfo["llama.context_length"] == 4096 and shown.template  # what is served


def test_embed(client: Any) -> None:
    single = client.embed(model="bert", input="The sky is blue because of rayleigh scattering")
    several = client.embed(
        model="bert", input=["The sky is blue", "Grass is green"], dimensions=8, truncate=True
    )
    assert len(single.embeddings) == 1 and [len(row) for row in several.embeddings] == [8, 8]
    assert len(client.embeddings(model="bert", prompt="The sky").embedding) == len(single.embeddings[0])


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
      a: the first number
      b: the second number
    """
    return a + b


def test_tools_formats_and_thinking(client: Any) -> None:
    options = {**GREEDY, "num_predict": 200}
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"const": 3}}, "required": ["n"]}
    schema["additionalProperties"] = False
    answer = client.chat(model="gemma4", messages=SKY, format=schema, options=options, think=False)
    assert answer.message.content == '{"n": 3}'
    assert client.generate(model="gemma4", prompt="JSON", format="json", options=GREEDY, think=False).response
    assert client.chat(model="gemma4", messages=SKY, tools=[add], options=GREEDY, think=True).done
    call = ollama.Message.ToolCall(
        function=ollama.Message.ToolCall.Function(name="add", arguments={"a": 1, "b": 2})
    )
    messages = [
        *SKY,
        ollama.Message(role="assistant", content="", tool_calls=[call]),
        ollama.Message(role="tool", content="3", tool_name="add"),
    ]
    assert client.chat(model="gemma4", messages=messages, tools=[add], options=GREEDY).done
    answer = client.chat(model="gemma4", messages=SKY, options=GREEDY, logprobs=True, top_logprobs=2)
    assert len(answer.logprobs) == 4 and len(answer.logprobs[0].top_logprobs) == 2


def test_options(client: Any) -> None:
    options = ollama.Options(
        num_ctx=8192, num_batch=512, num_gpu=1, main_gpu=0, low_vram=False, use_mmap=True, num_thread=2, num_keep=4,
        seed=1, num_predict=4, top_k=20, top_p=0.9, typical_p=0.9, repeat_last_n=32, temperature=0.5,
        repeat_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, mirostat=0, mirostat_tau=5.0, mirostat_eta=0.1,
        penalize_newline=True, tfs_z=1.0, stop=["zebra"], numa=False, f16_kv=True, vocab_only=False,
    )  # fmt: skip
    assert client.chat(model="gemma4", messages=SKY, options=options).eval_count == 4


def test_files(client: Any) -> None:
    """A model that is served is there; for the rest the operator must say yes."""
    assert client.pull("gemma4").status == "success"
    assert [part.status for part in client.pull("gemma4", stream=True)] == ["pulling manifest", "success"]
    calls = [("pull", "hf.co/owner/repo:Q8_0"), ("copy", "gemma4", "user/gemma4"), ("delete", "gemma4")]
    for name, *arguments in calls:
        with pytest.raises(ollama.ResponseError, match="start it with --allow-") as caught:
            getattr(client, name)(*arguments)
        assert caught.value.status_code == 403


def test_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="is not served here") as caught:
        client.chat("does-not-yet-exist")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="is not served here"):
        list(client.chat("does-not-yet-exist", messages=SKY, stream=True))
    # A number out of range is the nearest one within it, as for Ollama.
    assert client.chat("gemma4", messages=SKY, options={"temperature": -1, "num_predict": 2}).done
    with pytest.raises(ollama.ResponseError, match="only text is supported"):
        client.generate("gemma4", "x", images=[b"abc"])
    with pytest.raises(ollama.ResponseError, match="Not Found; "):
        client.create(model="example", from_="gemma4", system="You are Mario from Super Mario Bros.")
    with pytest.raises(ollama.ResponseError, match="Not Found; "):
        client.push("user/gemma4")


def test_asyncio(url: str) -> None:
    async def run() -> None:
        async with ollama.AsyncClient(host=url) as client:
            answers = await asyncio.gather(
                *(client.chat(model="gemma4", messages=SKY, options=GREEDY) for _ in range(4))
            )
            assert len({answer.message.content for answer in answers}) == 1
            text = ""
            async for part in await client.chat(model="gemma4", messages=SKY, options=GREEDY, stream=True):
                text += part["message"]["content"]
            assert text == answers[0].message.content
            parts = [
                part.response
                async for part in await client.generate(
                    "gemma4", SKY[0]["content"], options=GREEDY, stream=True
                )
            ]
            assert "".join(parts) == text
            assert (await client.list()).models[0].model == "gemma4:latest"
            assert (await client.show("gemma4")).capabilities
            assert (await client.ps()).models
            assert (await client.embed("bert", ["a", "b"])).embeddings
            with pytest.raises(ollama.ResponseError):
                await client.chat("does-not-yet-exist")

    asyncio.run(run())
