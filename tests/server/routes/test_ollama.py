"""Ollama's API: what its clients send and read, what is named as unused, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.bert_model import bert_model
from support.chat_families import FAMILIES, FULL, WEATHER
from support.chat_templates import template
from support.control import Gate, wait_until
from support.gguf_models import infilling_model, tiny_model
from support.scripted_model import scripted_model
from support.served import http_client

import llamapipe as lp
from llamapipe.server.routes.ollama import engine_messages

COW = [{"role": "user", "content": "What does a cow say?"}]
GREEDY = {"temperature": 0, "num_predict": 8}
CHAT: dict[str, Any] = {"model": "demo", "messages": COW, "options": GREEDY}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "What does a cow say?", "options": GREEDY}
BOTH = [("/api/chat", CHAT), ("/api/generate", TEXT)]
on_both = pytest.mark.parametrize(("path", "body"), BOTH, ids=["chat", "generate"])
COUNTS = ("total_duration", "prompt_eval_duration", "prompt_eval_count", "eval_count", "eval_duration")


@contextmanager
def served(engine: lp.Engine, embedder: lp.Embedder | None = None, **settings: Any) -> Iterator[httpx.Client]:
    names = {"model_names": ("demo", "tagged:1b"), "embedding_names": ("bert",)}
    with http_client(engine, embedder=embedder, ollama=True, **{**names, **settings}) as client:
        yield client


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Engine]:
    path = infilling_model(tmp_path_factory.mktemp("models") / "demo.gguf")
    with lp.Model(path) as model, lp.Engine(model, n_ctx=256, n_seq_max=4) as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Embedder]:
    with lp.Embedder(bert_model(tmp_path_factory.mktemp("models") / "bert.gguf")[0]) as embedder:
        yield embedder


@pytest.fixture(scope="module")
def client(engine: lp.Engine, embedder: lp.Embedder) -> Iterator[httpx.Client]:
    with served(engine, embedder) as client:
        yield client


def lines(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a stream; the last one is done, and no other."""
    answer = client.post(path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/x-ndjson")
    parts: list[dict[str, Any]] = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in parts] == [False] * (len(parts) - 1) + [True]
    return parts


def whole(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json={**body, "stream": False})
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json"), answer.text
    result: dict[str, Any] = answer.json()
    return result


def refused(client: httpx.Client, path: str, body: Any, status: int = 400) -> str:
    answer = client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert list(answer.json()) == ["error"] and isinstance(error, str)
    return error


def text_of(line: dict[str, Any]) -> str:
    return str(line["message"]["content"] if "message" in line else line["response"])


class TestAnswers:
    @on_both
    def test_a_stream_joins_to_the_answer_of_the_engine(
        self, client: httpx.Client, engine: lp.Engine, path: str, body: dict[str, Any]
    ) -> None:
        expected = engine.chat(COW, lp.SamplingParams(temperature=0, max_tokens=8))
        parts = lines(client, path, body)
        assert "".join(map(text_of, parts)) == expected.content
        assert text_of(parts[-1]) == ""
        once = whole(client, path, body)
        assert text_of(once) == expected.content
        for last in (parts[-1], once):
            assert (last["model"], last["done_reason"], last["load_duration"]) == ("demo", "stop", 0)
            assert last["prompt_eval_count"] == expected.n_prompt_tokens
            assert last["eval_count"] == expected.n_completion_tokens
            assert all(isinstance(last[name], int) and last[name] > 0 for name in COUNTS)
            assert last["created_at"].endswith("Z")
            assert ("context" in last) == (path == "/api/generate")

    @on_both
    def test_the_limit_of_tokens(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        def end(n: int) -> tuple[str, int]:
            last = lines(client, path, {**body, "options": {**GREEDY, "num_predict": n}})[-1]
            return last["done_reason"], last["eval_count"]

        assert [end(n) for n in (2, 0, -1, -2)] == [("length", 2), ("length", 0), ("stop", 5), ("stop", 5)]

    def test_a_system_message(self, client: httpx.Client) -> None:
        message = {"role": "system", "content": "You are a fox."}
        by_chat = whole(client, "/api/chat", {**CHAT, "messages": [message, *COW]})
        by_text = whole(client, "/api/generate", {**TEXT, "system": "You are a fox."})
        assert text_of(by_chat) == text_of(by_text)
        assert by_chat["prompt_eval_count"] == by_text["prompt_eval_count"]

    def test_raw_text_is_continued(self, client: httpx.Client, engine: lp.Engine) -> None:
        expected = engine.generate("Once upon", lp.SamplingParams(temperature=0, max_tokens=8))
        answer = whole(client, "/api/generate", {**TEXT, "prompt": "Once upon", "raw": True})
        assert text_of(answer) == expected.text
        assert (answer["prompt_eval_count"], answer["done_reason"]) == (expected.n_prompt_tokens, "length")
        assert "context" not in answer

    def test_a_text_is_filled_in(self, client: httpx.Client) -> None:
        body = {**TEXT, "prompt": "Once", "suffix": "time."}
        tokens = whole(client, "/api/generate", body)["prompt_eval_count"]
        same = {"prompt": "Once", "suffix": "time.", "temperature": 0, "max_tokens": 8}
        other = client.post("/v1/completions", json=same).json()
        assert text_of(whole(client, "/api/generate", body)) == other["choices"][0]["text"]
        assert tokens == other["usage"]["prompt_tokens"]

    def test_a_long_text_around_a_gap_is_cut(self, client: httpx.Client) -> None:
        body = {**TEXT, "prompt": "moo " * 400, "suffix": " moo" * 400}
        assert 100 < whole(client, "/api/generate", body)["prompt_eval_count"] < 256
        assert "maximum context length is 256 tokens" in refused(
            client, "/api/generate", {**body, "truncate": False}
        )

    def test_context_continues_a_conversation(self, client: httpx.Client, engine: lp.Engine) -> None:
        first = whole(client, "/api/generate", TEXT)
        prompt = engine.model.tokenize_chat(COW)
        assert first["context"][: len(prompt)] == prompt
        assert len(first["context"]) == len(prompt) + first["eval_count"]
        second = whole(client, "/api/generate", {**TEXT, "prompt": "And a dog?", "context": first["context"]})
        asked = engine.model.tokenize_chat([{"role": "user", "content": "And a dog?"}])
        assert second["prompt_eval_count"] == len(first["context"]) + len(asked) - 1  # one BOS
        expected = engine.generate(
            [*first["context"], *asked[1:]], lp.SamplingParams(temperature=0, max_tokens=8)
        )
        assert text_of(second) == expected.text

    def test_context_loses_its_oldest_tokens(self, client: httpx.Client) -> None:
        context = [5] * 250
        answer = whole(client, "/api/generate", {**TEXT, "context": context})
        assert answer["prompt_eval_count"] == 128
        assert "n_ctx is 256" in refused(
            client, "/api/generate", {**TEXT, "context": context, "truncate": False}
        )

    def test_a_full_conversation_loses_its_oldest_turns(self, client: httpx.Client) -> None:
        turns = [{"role": role, "content": "moo " * 20} for _ in range(6) for role in ("user", "assistant")]
        body = {**CHAT, "messages": [*turns, *COW]}
        assert text_of(whole(client, "/api/chat", body)) != ""
        assert "n_ctx is 256" in refused(client, "/api/chat", {**body, "truncate": False})

    def test_unusual_conversations(self, client: httpx.Client) -> None:
        def prompt(*messages: dict[str, Any]) -> int:
            return int(whole(client, "/api/chat", {**CHAT, "messages": messages})["prompt_eval_count"])

        assert prompt({"role": "system", "content": "Be kind."}) > 0
        empty, begun = ({"role": "assistant", "content": text} for text in ("", "A cow"))
        assert prompt(*COW) <= prompt(*COW, empty) < prompt(*COW, begun)

    @on_both
    def test_without_a_prompt_the_model_is_loaded(
        self, client: httpx.Client, path: str, body: dict[str, Any]
    ) -> None:
        for keep_alive, reason in ((None, "load"), ("5m", "load"), (0, "unload"), ("0", "unload")):
            answer = client.post(path, json={"model": "demo", "keep_alive": keep_alive})
            reply = answer.json()
            assert (answer.status_code, reply["done"], reply["done_reason"]) == (200, True, reason)
            assert text_of(reply) == ""

    @on_both
    @pytest.mark.parametrize("n", [None, 2])
    def test_log_probabilities_are_the_engines(
        self, client: httpx.Client, engine: lp.Engine, path: str, body: dict[str, Any], n: int | None
    ) -> None:
        expected = engine.chat(COW, lp.SamplingParams(temperature=0, max_tokens=8, logprobs=n or 0))
        asked = {**body, "logprobs": True, "top_logprobs": n}
        for replies in (lines(client, path, asked), [whole(client, path, asked)]):
            entries = [entry for line in replies for entry in line.get("logprobs", ())]
            assert [entry["logprob"] for entry in entries] == pytest.approx(
                [entry.logprob for entry in expected.choices[0].logprobs or ()], abs=1e-4
            )
            assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in entries)
            assert all(len(entry["top_logprobs"]) == (n or 0) for entry in entries)

    @on_both
    def test_json_and_schemas(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {"n": {"enum": [7]}},
            "required": ["n"],
        }
        schema["additionalProperties"] = False
        asked = {**body, "options": {"temperature": 0, "num_predict": 40}}
        assert json.loads(text_of(whole(client, path, {**asked, "format": schema}))) == {"n": 7}
        assert text_of(whole(client, path, {**asked, "format": "json"})).startswith("{")
        plain = text_of(whole(client, path, asked))
        assert text_of(whole(client, path, {**asked, "format": ""})) == plain
        # The schema {} allows any JSON, and nothing else, whatever the model prefers.
        anything = {
            **body,
            "options": {**GREEDY, "logit_bias": {" the": 1000.0}, "num_predict": 4},
            "format": {},
        }
        assert text_of(whole(client, path, anything)).lstrip()[:1] in '{["-0123456789tfn'
        assert not text_of(whole(client, path, anything)).lstrip().startswith("the")
        assert "format" in refused(client, path, {**asked, "format": {"type": "no such type"}})

    def test_a_schema_for_raw_text(self, client: httpx.Client) -> None:
        body = {**TEXT, "raw": True, "format": {"enum": ["fox"]}}
        assert text_of(whole(client, "/api/generate", body)) == '"fox"'


class TestOptions:
    @on_both
    def test_ollamas_defaults_hold(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "num_predict": 8}
        texts = {
            text_of(whole(client, path, {**body, "options": {"seed": 5, **options}}))
            for options in (defaults, {"num_predict": 8})
        }
        assert len(texts) == 1

    @on_both
    def test_every_option_of_the_table(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        options: dict[str, Any] = {
            "temperature": 0.5, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.9, "repeat_penalty": 1.1,
            "repeat_last_n": 16, "presence_penalty": 0.5, "frequency_penalty": 0.5, "seed": 3, "stop": ["\n", "zebra"],
            "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "dry_multiplier": 0.5, "xtc_probability": 0.1,
            "top_n_sigma": 2.0, "logit_bias": {"moo": 1.0}, "ignore_eos": False, "num_predict": 3,
        }  # fmt: skip
        answer = client.post(path, json={**body, "options": options})
        assert answer.status_code == 200
        assert "x-llamapipe-unused" not in answer.headers

    @on_both
    def test_what_loads_a_model_is_named(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        options = {**GREEDY, "num_ctx": 4096.0, "num_gpu": 1, "num_thread": 2, "tfs_z": 1.0, "numa": False}
        answer = client.post(path, json={**body, "options": options, "keep_alive": "5m", "shift": True})
        assert answer.status_code == 200
        named = set(answer.headers["x-llamapipe-unused"].split(", "))
        assert named == {"options.num_ctx", "options.num_gpu", "options.num_thread", "keep_alive", "shift"}
        for neutral in (-1, ""):
            assert "x-llamapipe-unused" not in client.post(path, json={**body, "keep_alive": neutral}).headers
        answer = client.post(path, json={**body, "options": GREEDY, "top_logprobs": 3})  # without logprobs
        assert answer.headers["x-llamapipe-unused"] == "top_logprobs"

    @on_both
    @pytest.mark.parametrize(
        ("sent", "same"),
        [
            ({"num_predict": 4.0}, {"num_predict": 4}),
            ({"num_predict": 4.7}, {"num_predict": 4}),
            ({"num_predict": "4"}, {"num_predict": 4}),
            ({"temperature": "0.5"}, {"temperature": 0.5}),
            ({"temperature": -1}, {"temperature": 0}),
            ({"temperature": 2, "top_k": -1}, {"temperature": 2, "top_k": 0}),
            ({"top_p": 7, "min_p": -2}, {"top_p": 1, "min_p": 0}),
            ({"stop": ""}, {}),
            ({"stop": ["", " the"]}, {"stop": [" the"]}),
            ({"ignore_eos": "true"}, {"ignore_eos": True}),
            ({"use_mmap": 1, "num_ctx": "2048"}, {}),
        ],
        ids=str,
    )
    def test_numbers_and_texts_are_taken_as_ollama_takes_them(
        self, client: httpx.Client, path: str, body: dict[str, Any], sent: Any, same: Any
    ) -> None:
        asked = {"seed": 5, "num_predict": 8}
        assert text_of(whole(client, path, {**body, "options": {**asked, **sent}})) == text_of(
            whole(client, path, {**body, "options": {**asked, **same}})
        )

    @on_both
    def test_what_ollama_does_not_read_is_named(
        self, client: httpx.Client, path: str, body: dict[str, Any]
    ) -> None:
        others = {"temperature": 0, "top_p": 0.5, "max_output_tokens": 5, "tool_choice": "auto", "user": None}
        request = {**body, **others, "options": {**GREEDY, "num_predict": 3, "unknown_x": 1}}
        answer = client.post(path, json=request)
        assert answer.status_code == 200
        named = {"temperature", "top_p", "max_output_tokens", "tool_choice", "options.unknown_x"}
        assert set(answer.headers["x-llamapipe-unused"].split(", ")) == named

    def test_a_strict_server_refuses_them(self, engine: lp.Engine) -> None:
        with served(engine, strict=True) as client:
            body = {**CHAT, "options": {"num_ctx": 4096}}
            assert "options.num_ctx has no effect here" in refused(client, "/api/chat", body)
            assert "temperature has no effect here" in refused(
                client, "/api/chat", {**CHAT, "temperature": 1}
            )

    @on_both
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"model": 3}, "model: Expected `str`"),
            ({"model": None}, "missing field: model"),
            ({"stream": "yes"}, "stream: Expected `bool"),
            ({"format": "yaml"}, "format: "),
            ({"format": 7}, "format: "),
            ({"format": ["json"]}, "format: "),
            ({"top_logprobs": 21}, "top_logprobs is 21; it must be from 0 to 20"),
            ({"_debug_render_only": True}, "_debug_render_only is true; leave it out, or set it to false: /app"),
            ({"think": "hard"}, "think: "),
            ({"think": 3}, "think: "),
            ({"think": True}, "does not support thinking"),
            ({"keep_alive": "soon"}, "keep_alive is 'soon'"),
            ({"keep_alive": {}}, "keep_alive: "),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is 21"),
            ({"logprobs": True, "top_logprobs": -1}, "top_logprobs is -1"),
            ({"options": []}, "options: "),
            ({"options": {"temperature": "hot"}}, "options.temperature: "),
            ({"options": {"temperature": 1e9}}, "temperature is 1"),
            ({"options": {"repeat_last_n": -7}}, "repeat_last_n is -7"),
            ({"options": {"num_predict": 10**30}}, "options.num_predict is"),
            ({"options": {"num_predict": 2**40}}, "options.num_predict is"),
            ({"options": {"num_predict": "three"}}, "options.num_predict: "),
            ({"options": {"num_ctx": "many"}}, "options.num_ctx: "),
            ({"options": {"seed": "1.5"}}, "options.seed: "),
            ({"options": {"stop": 5}}, "options.stop: "),
            ({"options": {"stop": ["a"] * 2000}}, "stop has 2000 texts"),
            ({"options": {"n": 2}}, "options.n is 2"),
            ({"options": {"top_kk": 2}}, "did you mean top_k"),
            ({"options": {"max_tokens": 2}}, "options.max_tokens; use num_predict"),
            ({"format": "yaml"}, "format: Invalid enum value 'yaml'; it may be '', 'json'"),
            ({"options": {"temprature": 2}}, "did you mean temperature"),
            ({"formatt": "json"}, "did you mean format"),
        ],
        ids=str,
    )  # fmt: skip
    def test_wrong_values_are_refused(
        self, client: httpx.Client, path: str, body: dict[str, Any], change: dict[str, Any], message: str
    ) -> None:
        assert message in refused(client, path, {**body, **change})

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"messages": "hello"}, "messages: "),
            ({"messages": ["hello"]}, "messages[0]: "),
            ({"messages": [{}]}, "role"),
            ({"messages": [{"role": "user", "content": 5}]}, "content must be text"),
            ({"messages": [{"role": "usr", "content": "x"}]}, "did you mean user"),
            (
                {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
                "messages.0.images.0 is an image; only",
            ),
            ({"messages": [{"role": "assistant", "thinking": 3}, *COW]}, "messages.0.thinking must be text"),
            ({"messages": [{"role": "assistant", "tool_calls": "x"}, *COW]}, "tool_calls must be a list"),
            ({"messages": [{"role": "assistant", "tool_calls": [1]}, *COW]}, "tool_calls[0]"),
            ({"tools": {}}, "tools: "),
            ({"tools": [{}]}, "tool"),
            ({"tools": [{"function": {"name": "f"}}]}, "no place for them"),
            ({"prompt": "x"}, "unknown field: prompt; use messages"),
            ({"system": "x"}, "unknown field: system; use messages with the role system"),
            ({"mesages": []}, "did you mean messages"),
        ],
        ids=str,
    )
    def test_wrong_chats_are_refused(
        self, client: httpx.Client, change: dict[str, Any], message: str
    ) -> None:
        assert message in refused(client, "/api/chat", {**CHAT, **change})

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"prompt": 3}, "prompt: "),
            ({"context": ["a"]}, "context[0]: "),
            ({"context": [-1]}, "context contains the token id -1"),
            ({"context": [10**9]}, "context contains the token id 1000000000"),
            ({"context": [10**30]}, "context"),
            ({"raw": True, "system": "x"}, "leave system and context out"),
            ({"raw": True, "context": [1]}, "leave system and context out"),
            ({"raw": True, "think": True}, "only a model that answers messages thinks"),
            ({"template": "{{ .Prompt }}"}, "--chat-template"),
            ({"images": ["aGk="]}, "images.0 is an image; only text is supported"),
            ({"width": 512}, "makes no images"),
            ({"prompt": "moo " * 300}, "n_ctx is 256"),
            ({"messages": []}, "unknown field: messages"),
        ],
        ids=str,
    )
    def test_wrong_prompts_are_refused(
        self, client: httpx.Client, change: dict[str, Any], message: str
    ) -> None:
        assert message in refused(client, "/api/generate", {**TEXT, **change})


class TestNames:
    @pytest.mark.parametrize("name", ["demo", "demo:latest", "tagged:1b"])
    def test_with_and_without_latest(self, client: httpx.Client, name: str) -> None:
        assert whole(client, "/api/chat", {**CHAT, "model": name})["model"] == name

    def test_names_of_ollamas_lists_in_other_apis(self, client: httpx.Client, engine: lp.Engine) -> None:
        """Programs list models with /api/tags and chat with /v1."""
        question = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        for path in ("/v1/chat/completions", "/v1/messages"):
            answer = client.post(path, json={"model": "demo:latest", **question})
            assert (answer.status_code, answer.json()["model"]) == (200, "demo:latest")
        models = [client.get(f"/v1/models/{name}").json() for name in ("demo:latest", "demo", "bert:latest")]
        assert models[0] == models[1] and models[2]["id"] == "bert"
        assert client.post("/v1/embeddings", json={"model": "bert:latest", "input": "a"}).status_code == 200
        assert client.post("/v1/messages", json={"model": "tagged:latest", **question}).status_code == 404
        with http_client(engine, model_names=("demo",)) as other:
            body = {"model": "demo:latest", **question}
            assert other.post("/v1/chat/completions", json=body).status_code == 404

    @on_both
    @pytest.mark.parametrize("name", ["tagged", "tagged:latest", "demo:1b", "other", "", "a" * 5000])
    def test_others_are_not_found(
        self, client: httpx.Client, path: str, body: dict[str, Any], name: str
    ) -> None:
        error = refused(client, path, {**body, "model": name}, status=404)
        assert "is not served here; there is 'demo', 'tagged:1b'" in error
        assert len(error) < 1000

    def test_each_model_for_what_it_does(self, client: httpx.Client, engine: lp.Engine) -> None:
        assert "embeds texts" in refused(client, "/api/chat", {**CHAT, "model": "bert"})
        assert "generates texts" in refused(client, "/api/embed", {"model": "demo", "input": "x"})
        refused(client, "/api/embed", {"model": "other", "input": "x"}, status=404)
        refused(client, "/api/show", {"model": "other"}, status=404)
        assert "use input" in refused(client, "/api/embed", {"model": "bert", "prompt": "x"})
        for path, body, message in (
            (
                "/v1/embeddings",
                {"model": "demo", "input": "x"},
                "'demo' generates texts; one that embeds them is 'bert'",
            ),
            (
                "/v1/completions",
                {"model": "bert", "prompt": "x"},
                "'bert' embeds texts; one that generates them is 'demo'",
            ),
            ("/v1/embeddings", {"model": "other", "input": "x"}, "(--embeddings-alias gives it other names)"),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 404
            assert message in answer.json()["error"]["message"]
        with served(engine) as alone:
            assert "--embeddings" in refused(alone, "/api/embed", {"model": "demo", "input": "x"})
            assert "--embeddings" in refused(alone, "/api/embed", {"model": "bert", "input": "x"}, status=404)

    def test_models_are_listed(self, client: httpx.Client, engine: lp.Engine, embedder: lp.Embedder) -> None:
        models = client.get("/api/tags").json()["models"]
        assert [model["name"] for model in models] == ["demo:latest", "tagged:1b", "bert:latest"]
        assert [model["capabilities"] for model in models] == [["completion", "insert"]] * 2 + [["embedding"]]
        assert models[0]["details"]["family"] == "llama"
        assert models[0]["details"]["quantization_level"] == "Q8_0"
        assert models[0]["details"]["parameter_size"] == "2.23M"
        assert models[0]["digest"] == models[1]["digest"] != models[2]["digest"]
        assert all(len(model["digest"]) == 64 and model["size"] > 0 for model in models)
        loaded = client.get("/api/ps").json()["models"]
        # An alias has no memory, so a model is there once.
        assert [model["name"] for model in loaded] == [models[0]["name"], models[2]["name"]]
        assert [model["context_length"] for model in loaded] == [engine.n_ctx, embedder.n_ctx]
        assert loaded[0]["size_vram"] == 0

    @pytest.mark.parametrize("field", ["model", "name"])
    def test_a_model_is_shown_with_its_sizes(self, client: httpx.Client, field: str) -> None:
        shown = client.post("/api/show", json={field: "demo:latest"}).json()
        assert shown["capabilities"] == ["completion", "insert"]
        info = shown["model_info"]
        assert info["general.architecture"] == "llama"
        assert (info["llama.context_length"], info["general.file_type"]) == (256, 7)  # trained with 1024
        served = [
            client.get("/api/tags").json()["models"][0]["details"],
            client.get("/api/ps").json()["models"][0],
        ]
        assert [entry["context_length"] for entry in (shown["details"], *served)] == [256] * 3
        assert client.get("/props").json()["default_generation_settings"]["n_ctx"] == 256
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 256
        assert info["general.parameter_count"] > 2_000_000
        assert "<|assistant|>" in shown["template"]
        assert client.post("/api/show", json={field: "bert"}).json()["capabilities"] == ["embedding"]
        assert "model is missing" in refused(client, "/api/show", {})

    def test_a_model_without_a_template(self, tmp_path: Path) -> None:
        path = tiny_model(tmp_path / "tiny.gguf")
        with lp.Engine(path, n_ctx=64, n_seq_max=1) as engine, served(engine, model_names=()) as client:
            assert client.get("/api/tags").json()["models"][0]["capabilities"] == ["completion"]
            body = {"model": "tiny", "prompt": "abc", "options": {"num_predict": 3, "temperature": 0}}
            answer = whole(client, "/api/generate", body)
            assert (answer["eval_count"], answer["done_reason"]) == (3, "length")
            assert "no chat template" in refused(client, "/api/generate", {**body, "system": "x"})
            assert "chat template" in refused(client, "/api/chat", {**CHAT, "model": "tiny"})


FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": WEATHER}
TOOLS = [{"type": "function", "function": FUNCTION}]


class TestThinkingAndTools:
    @contextmanager
    def model_that_says(self, path: Path, name: str, text: str) -> Iterator[httpx.Client]:
        family = FAMILIES[name]
        model_path = scripted_model(path / "demo.gguf", text, family.specials, template(family.template).text)
        with lp.Engine(model_path, n_ctx=8192, n_seq_max=2) as engine, served(engine) as client:
            yield client

    def test_calls_come_whole_with_objects(self, tmp_path: Path) -> None:
        family = FAMILIES["Hermes"]
        with self.model_that_says(tmp_path, "Hermes", family.full) as client:
            assert "tools" in client.post("/api/show", json={"model": "demo"}).json()["capabilities"]
            body = {**CHAT, "tools": TOOLS, "options": {"temperature": 0}}
            streamed = [line for line in lines(client, "/api/chat", body) if "tool_calls" in line["message"]]
            assert len(streamed) == 1
            once = whole(client, "/api/chat", body)
            for message in (streamed[0]["message"], once["message"]):
                (call,) = message["tool_calls"]
                assert call["function"] == {"index": 0, "name": "get_weather", "arguments": FULL}
                assert call["id"]
            assert once["done_reason"] == "stop"
            # The tool's result, in the form of this API: without ids.
            answer = {"role": "assistant", "content": "", "tool_calls": [{"function": call["function"]}]}
            result = {"role": "tool", "tool_name": "get_weather", "content": "sunny"}
            assert whole(client, "/api/chat", {**body, "messages": [*COW, answer, result]})["done"]

    def test_a_call_that_comes_whole_took_its_time(self, tmp_path: Path) -> None:
        said = json.dumps(
            {"name": "get_weather", "arguments": FULL}
        )  # not marked: nothing of it is sent before its end
        with self.model_that_says(tmp_path, "Hermes", said) as client:
            body = {**CHAT, "tools": TOOLS, "options": {"temperature": 0}}
            for last in (whole(client, "/api/chat", body), lines(client, "/api/chat", body)[-1]):
                assert last["eval_count"] > 8 and last["eval_duration"] > 1000 * last["eval_count"]
            asked = {"messages": COW, "tools": TOOLS, "temperature": 0, "stream": True}
            events = client.post("/v1/chat/completions", json=asked).text.split("data: ")
            (times,) = [json.loads(event)["timings"] for event in events if '"timings"' in event]
            assert times["predicted_ms"] > 1e-3 * times["predicted_n"] > 8e-3

    def test_a_tool_needs_no_type(self, tmp_path: Path) -> None:
        with self.model_that_says(tmp_path, "Hermes", FAMILIES["Hermes"].full) as client:
            body = {**CHAT, "tools": [{"function": FUNCTION}], "options": {"temperature": 0}}
            assert whole(client, "/api/chat", body)["message"]["tool_calls"]

    def test_thinking_is_apart(self, tmp_path: Path) -> None:
        text = "<think>\nA cow.\n</think>\n\nIt says moo."
        with self.model_that_says(tmp_path, "Hermes", text) as client:
            assert "thinking" in client.post("/api/show", json={"model": "demo"}).json()["capabilities"]
            options = {"options": {"temperature": 0}}
            for think in (None, True, "high"):
                parts = lines(client, "/api/chat", {**CHAT, **options, "think": think})
                thinking = "".join(line["message"].get("thinking", "") for line in parts)
                assert (thinking.strip(), "".join(map(text_of, parts)).strip()) == ("A cow.", "It says moo.")
                once = whole(client, "/api/generate", {**TEXT, **options, "think": think})
                assert (once["thinking"].strip(), once["response"].strip()) == ("A cow.", "It says moo.")
            without = whole(client, "/api/chat", {**CHAT, **options, "think": False})
            assert without["prompt_eval_count"] != once["prompt_eval_count"]  # the template closes it
            answer = {"role": "assistant", "content": "It says moo.", "thinking": "A cow."}
            assert whole(client, "/api/chat", {**CHAT, "messages": [*COW, answer, *COW]})["done"]

    def test_messages_for_templates(self) -> None:
        call = {"function": {"index": 0, "name": "f", "arguments": {}}}
        other = {"function": {"name": "g", "arguments": {}}, "id": "own"}
        messages = engine_messages(
            [
                {"role": "assistant", "content": None, "thinking": "Hm.", "tool_calls": [call, other, call]},
                {"role": "tool", "tool_name": "g", "content": "1"},
                {"role": "tool", "tool_name": "f", "content": "2"},
                {"role": "tool", "content": "3", "images": []},
            ]
        )
        assert messages[0]["content"] == "" and messages[0]["reasoning_content"] == "Hm."
        assert [call["id"] for call in messages[0]["tool_calls"]] == ["call_0_0", "own", "call_0_2"]
        assert messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
        assert [message["tool_call_id"] for message in messages[1:]] == ["own", "call_0_0", "call_0_2"]
        assert [message.get("name") for message in messages[1:]] == ["g", "f", None]
        assert not any({"tool_name", "images", "thinking"} & message.keys() for message in messages)


class TestEmbeddings:
    def test_one_and_several(self, client: httpx.Client, embedder: lp.Embedder) -> None:
        expected = embedder.embed(["a", "b c"])
        several = client.post("/api/embed", json={"model": "bert", "input": ["a", "b c"]}).json()
        assert np.allclose(several["embeddings"], expected, atol=1e-5)
        assert several["prompt_eval_count"] == sum(map(len, embedder.tokens(["a", "b c"])))
        single = client.post("/api/embed", json={"model": "bert:latest", "input": "a"}).json()
        assert np.allclose(single["embeddings"], expected[:1], atol=1e-5)
        old = client.post("/api/embeddings", json={"model": "bert", "prompt": "a"}).json()
        assert old == {"embedding": pytest.approx(embedder.embed("a", normalize=False).tolist(), abs=1e-5)}

    def test_short_vectors_and_long_texts(self, client: httpx.Client) -> None:
        body = {"model": "bert", "input": "moo " * 500, "dimensions": 5}
        (row,) = client.post("/api/embed", json=body).json()["embeddings"]
        assert sum(x * x for x in row) == pytest.approx(1)
        assert len(row) == 5
        assert "n_ctx" in refused(client, "/api/embed", {**body, "truncate": False})

    def test_nothing_to_embed(self, client: httpx.Client) -> None:
        empty: Any
        for empty in ("", []):
            assert (
                client.post("/api/embed", json={"model": "bert", "input": empty}).json()["embeddings"] == []
            )
        assert client.post("/api/embeddings", json={"model": "bert"}).json() == {"embedding": []}

    @pytest.mark.parametrize(
        "change",
        [{"input": 3}, {"input": [3]}, {"input": None}, {"dimensions": -1}, {"dimensions": 10**6}, {"prompt": "a"}],
    )  # fmt: skip
    def test_wrong_values_are_refused(self, client: httpx.Client, change: dict[str, Any]) -> None:
        assert refused(client, "/api/embed", {"model": "bert", "input": "a", **change})


class TestServer:
    def test_the_root_and_the_version(self, client: httpx.Client, engine: lp.Engine) -> None:
        assert client.get("/").text == "Ollama is running"
        head = client.head("/")
        assert (head.status_code, head.text) == (200, "")
        html = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
        assert client.get("/", headers=html).text.startswith("<!doctype html>")
        assert client.get("/page/api.js").status_code == 200
        assert set(client.get("/api/version").json()) == {"version", "llamapipe"}
        with served(engine, page=False) as client:
            assert client.get("/", headers=html).text == "Ollama is running"

    def test_only_with_the_option(self, engine: lp.Engine) -> None:
        with http_client(engine) as client:
            assert "start the server with --ollama" in refused(client, "/api/chat", CHAT, status=404)
            assert client.get("/").text.startswith("<!doctype html>")

    def test_keys_are_asked_for(self, engine: lp.Engine) -> None:
        with served(engine, api_keys=("k",)) as client:
            assert client.get("/").text == "Ollama is running"
            for path, body in BOTH:
                assert "API key" in refused(client, path, body, status=401)
                key = {"authorization": "Bearer k"}
                assert client.post(path, json=body, headers=key).status_code == 200
            assert client.get("/api/tags").status_code == 401

    @pytest.mark.parametrize(
        "headers",
        [{"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"host": "evil.example"}],
        ids=str,
    )
    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("POST", "/api/chat"),
            ("POST", "/api/generate"),
            ("POST", "/api/embed"),
            ("GET", "/api/tags"),
            ("GET", "/"),
        ],
    )  # fmt: skip
    def test_pages_of_other_sites(
        self, client: httpx.Client, engine: lp.Engine, headers: dict[str, str], method: str, path: str
    ) -> None:
        before = engine.stats().n_prompt_tokens
        answer = client.request(method, path, headers=headers, json=CHAT)
        assert answer.status_code == 403
        assert isinstance(answer.json()["error"], str if path != "/" else dict)
        assert engine.stats().n_prompt_tokens == before

    def test_bodies_that_are_no_json(self, client: httpx.Client) -> None:
        for body in (b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"model": "demo",', b"{" * 300):
            answer = client.post("/api/chat", content=body)
            assert answer.status_code == 400 and isinstance(answer.json()["error"], str)

    @on_both
    def test_a_client_that_goes_away(self, engine: lp.Engine, path: str, body: dict[str, Any]) -> None:
        endless = {**body, "options": {"ignore_eos": True, "num_predict": 200}}
        with served(engine) as client:
            with client.stream("POST", path, json=endless) as answer:
                next(answer.iter_lines())
            wait_until(lambda: engine.stats().n_active == 0)

    @on_both
    def test_a_silent_stream_sends_an_empty_part(
        self, engine: lp.Engine, path: str, body: dict[str, Any]
    ) -> None:
        with (
            served(engine, ping_s=0.01) as client,
            Gate(engine) as gate,
            client.stream("POST", path, json=body) as answer,
        ):
            gate.wait()
            received = answer.iter_lines()
            for _ in range(2):
                part = json.loads(next(received))
                assert text_of(part) == "" and not part["done"]
            gate.open()
            assert json.loads(list(received)[-1])["done"]

    def test_an_error_in_a_stream_is_a_line(self, engine: lp.Engine) -> None:
        with (
            Gate(engine),
            served(engine, ping_s=0.01, timeout_s=0.2) as client,
            client.stream("POST", "/api/chat", json=CHAT) as answer,
        ):
            parts = [json.loads(line) for line in answer.iter_lines()]
        assert answer.status_code == 200
        assert list(parts[-1]) == ["error"]

    def test_the_document_has_the_routes(self, client: httpx.Client) -> None:
        paths = client.get("/openapi.json").json()["paths"]
        assert "application/x-ndjson" in paths["/api/chat"]["post"]["responses"]["200"]["content"]
        assert {"/api/generate", "/api/embed", "/api/show", "/api/tags", "/api/ps"} <= set(paths)


def test_thousands_of_results_find_their_calls() -> None:
    """By their names, in any order, in a time that is linear: this runs in the event loop."""
    n = 5000
    calls = [{"function": {"name": f"f{i % 100}", "arguments": {}}} for i in range(n)]
    results = [{"role": "tool", "tool_name": f"f{99 - i % 100}", "content": ""} for i in range(n)]
    unknown = [{"role": "tool", "tool_name": "g", "content": ""}] * n
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": calls},
        *unknown,
        *results,
        {"role": "tool", "content": ""},
    ]
    converted = engine_messages(messages)
    assert not any("tool_call_id" in message for message in converted[1 : n + 1])
    ids = [message["tool_call_id"] for message in converted[n + 1 : -1]]
    assert ids[:100] == [f"call_0_{99 - i}" for i in range(100)] and len(set(ids)) == n
    assert "tool_call_id" not in converted[-1]
