"""What clients of llama-server and Ollama send: the same where it means the same, otherwise an error that says more."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.control import wait_until
from support.served import http_client, refused

import llamapipe as lp
from llamapipe._messages import path_meant
from llamapipe.server import ServerSettings, serve

HELLO = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"messages": HELLO, "max_tokens": 4, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
on_both = pytest.mark.parametrize(("path", "body"), ROUTES, ids=["chat", "text"])


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: lp.Engine) -> Iterator[httpx.Client]:
    with http_client(engine, model_names=("demo",)) as client:
        yield client


class TestPaths:
    @pytest.mark.parametrize(
        ("method", "path", "hint"),
        [
            ("POST", "/api/chat", "use /v1/chat/completions"),
            ("POST", "/api/generate", "use /v1/completions"),
            ("POST", "/api/embed", "use /v1/embeddings"),
            ("GET", "/api/tags", "use /v1/models"),
            ("POST", "/api/pull", "with -m"),
            ("GET", "/v1", "/v1/models lists the models"),
            ("POST", "/api/create", "--system @FILE, --temp T and others, --lora NAME=FILE"),
            ("POST", "/api/blobs/sha256:0a", "--system @FILE, --temp T and others, --lora NAME=FILE"),
            ("POST", "/api/me", "no accounts"),
            ("POST", "/v1/messages/batches", "use /v1/batches"),
            ("POST", "/v1/chat/completions/render", "use /apply-template"),
            ("GET", "/readyz", "use /health"),
            ("GET", "/docs", "/openapi.json describes the routes"),
            ("GET", "/load", "/metrics and /slots"),
            ("POST", "/classify", "use /v1/rerank"),
            ("POST", "/embed", "use /v1/embeddings"),
            ("GET", "/info", "use /model_info"),
            ("POST", "/v1/responses/compact", 'truncation: "auto" drops its oldest turns'),
            ("POST", "/openai/deployments/x/chat/completions", "did you mean /chat/completions?"),  # Azure's
            ("POST", "/v1/engines/x/completions", "did you mean /completions?"),
            ("GET", "/user/me/proxy/8080/health", "did you mean /health?"),
            ("POST", "/v1/chat/completion", "did you mean /v1/chat/completions?"),
            ("POST", "/v1/chat", "did you mean /v1/chat/completions?"),
            ("POST", "/v1/Completions", "did you mean /v1/completions?"),
            ("POST", "/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
            ("POST", "/openai/v1/responses", "did you mean /v1/responses?"),
            ("POST", "/v1/tokenize", "did you mean /tokenize?"),
            ("GET", "/tokenizer_inf", "did you mean /tokenizer_info?"),
        ],
    )
    def test_an_unknown_one_names_the_one_here(
        self, client: httpx.Client, method: str, path: str, hint: str
    ) -> None:
        answer = client.request(method, path)
        assert answer.status_code == 404
        error = answer.json()["error"]
        # Ollama's clients expect a text.
        message = error if path.startswith("/api/") else error["message"]
        assert message.startswith(f"{method} {path}: Not Found; ")
        assert hint in message
        assert answer.headers["x-request-id"]

    def test_errors_of_anthropics_api_are_in_its_format(self, client: httpx.Client) -> None:
        for method, path, status, kind, hint in (
            ("POST", "/v1/v1/messages", 404, "not_found_error", "did you mean /v1/messages?"),
            ("POST", "/messages", 404, "not_found_error", "did you mean /v1/messages?"),
            ("GET", "/v1/messages", 405, "invalid_request_error", "use POST"),
        ):
            answer = client.request(method, path, headers={"anthropic-version": "2023-06-01"})
            assert answer.status_code == status
            said = answer.json()
            assert (said["type"], said["error"]["type"]) == ("error", kind)
            assert said["error"]["message"].endswith(f"; {hint}")

    @pytest.mark.parametrize(
        "path",
        [
            *("/", "/v1/nothing/resp_1", "/v1/nothing", "/favicon.ico", "/v1/images/generations", "/" * 90),
            "/v1/moderations",
        ],
    )
    def test_no_hint_is_better_than_a_wrong_one(self, engine: lp.Engine, path: str) -> None:
        with serve(engine, settings=ServerSettings(page=False)) as server:
            answer = httpx.get(server.url + path)
        assert answer.status_code == 404
        assert answer.json()["error"]["message"].endswith(": Not Found")
        assert path_meant("/v1/fine_tuning/jobs", ["/jobs"]) is None  # the page's route

    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("GET", "/v1/chat/completions", "POST"),
            ("PUT", "/completion", "POST"),
            ("POST", "/lora-adapters", "GET; each request chooses its adapters with lora"),
            ("POST", "/health", "GET"),
            ("POST", "/v1/models/demo", "DELETE or GET"),
            ("GET", "/api/chat", "POST"),
            ("POST", "/api/delete", "DELETE"),
            ("POST", "/api/tags", "GET"),
        ],
    )
    def test_a_wrong_method_names_the_right_one(
        self, engine: lp.Engine, method: str, path: str, allowed: str
    ) -> None:
        with serve(engine, settings=ServerSettings(ollama=True)) as server:
            answer = httpx.request(method, server.url + path)
        assert answer.status_code == 405
        methods = answer.headers["allow"].split(", ")
        assert [method for method in methods if method != "HEAD"] == allowed.partition(";")[0].split(" or ")
        assert ("HEAD" in methods) == ("GET" in methods)
        error = answer.json()["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert message == f"{method} {path}: Method Not Allowed; use {allowed}"

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/nothing", "/api/nothing"])
    def test_a_method_or_path_that_is_not_served(self, client: httpx.Client, path: str) -> None:
        answer = client.put(path, headers={"x-request-id": "seven"})
        is_known = "nothing" not in path
        assert (answer.status_code, answer.headers["x-request-id"]) == (405 if is_known else 404, "seven")
        assert ("allow" in answer.headers) == is_known
        assert isinstance(answer.json()["error"], str if path.startswith("/api/") else dict)

    @pytest.mark.parametrize(
        ("path", "body"), [*ROUTES, ("/v1/models", None), ("/health", None), ("/models", None)]
    )
    def test_a_slash_at_the_end(self, client: httpx.Client, path: str, body: dict[str, Any] | None) -> None:
        method = "GET" if body is None else "POST"
        answers = [client.request(method, route, json=body) for route in (path, f"{path}/", f"{path}//")]
        assert [answer.status_code for answer in answers] == [200] * 3
        first, *others = (answer.json() for answer in answers)
        for name in ("choices", "data", "status"):
            assert all(other.get(name) == first.get(name) for other in others)

    def test_polling_is_not_logged(self, client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
        def lines() -> list[logging.LogRecord]:
            """Those of this test: an answer is logged after it was sent, so another test's may come late."""
            return [record for record in caplog.records if "id=polling" in record.getMessage()]

        with caplog.at_level("DEBUG", "llamapipe.server"):
            for path in ("/timeline", "/health", "/metrics", "/v1/models", "/nothing"):
                client.get(path, headers={"x-request-id": "polling"})
            wait_until(lambda: len(lines()) == 5)
        levels = {record.getMessage().split()[1]: record.levelname for record in lines()}
        assert levels == {
            "/timeline": "DEBUG",
            "/health": "DEBUG",
            "/metrics": "DEBUG",
            "/v1/models": "INFO",
            "/nothing": "INFO",
        }

    @pytest.mark.parametrize(
        ("alias", "path", "body"),
        [
            ("/chat/completions", "/v1/chat/completions", CHAT),
            ("/responses", "/v1/responses", {"input": "Hello", "max_output_tokens": 4, "temperature": 0}),
            ("/rerank", "/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/reranking", "/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/v1/reranking", "/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/models", "/v1/models", None),
            ("/v1/health", "/health", None),
        ],
    )
    def test_an_alias_answers_as_its_route(
        self, client: httpx.Client, alias: str, path: str, body: dict[str, Any] | None
    ) -> None:
        method = "GET" if body is None else "POST"
        answers = [client.request(method, route, json=body) for route in (alias, path)]
        assert answers[0].status_code == answers[1].status_code
        first, second = (answer.json() for answer in answers)
        for name in ("choices", "data", "status", "error"):
            assert first.get(name) == second.get(name)
        documented = client.get("/openapi.json").json()["paths"]
        first, second = (documented[route][method.lower()] for route in (alias, path))
        for name in ("responses", "requestBody", "security"):
            assert first.get(name) == second.get(name)

    def test_health_needs_no_key_by_either_path(self, engine: lp.Engine) -> None:
        with serve(engine, settings=ServerSettings(api_keys=("one",))) as server:
            assert httpx.get(f"{server.url}/v1/health").status_code == 200
            assert httpx.get(f"{server.url}/models").status_code == 401


class TestFields:
    @pytest.mark.parametrize(
        ("path", "field", "hint"),
        [
            ("/v1/completions", "max_new_tokens", "use max_tokens"),
            ("/v1/chat/completions", "num_predict", "use max_tokens"),
            ("/v1/responses", "n_predict", "use max_output_tokens"),
            ("/v1/completions", "mirostat_mode", "use mirostat"),
            ("/v1/chat/completions", "options", "each option as a separate field"),
            ("/v1/chat/completions", "think", "chat_template_kwargs"),
            ("/v1/chat/completions", "keep_alive", "the model stays loaded"),
            ("/v1/chat/completions", "format", "use response_format"),
            ("/v1/completions", "max_tokenz", "did you mean max_tokens?"),
            ("/v1/chat/completions", "temp", "use temperature"),
            ("/v1/chat/completions", "max_output_tokens", "use max_tokens"),
            ("/v1/chat/completions", "prompt", "use messages"),
            ("/v1/chat/completions", "input", "use messages"),
            ("/v1/chat/completions", "images", "use messages (a message holds its images)"),
            ("/v1/responses", "content", "use input"),
            ("/tokenize", "input", "use content"),
            ("/v1/chat/completions", "system", "use messages with the role system"),
            ("/v1/chat/completions", "stop_sequences", "use stop"),
            ("/v1/chat/completions", "thinking", "use reasoning_effort"),
            ("/v1/chat/completions", "enable_thinking", "use chat_template_kwargs"),
            ("/v1/chat/completions", "timeout", "--timeout sets it"),
            ("/v1/completions", "tfs_z", "leave it out"),
            ("/v1/chat/completions", "best_of", "use n and logprobs"),
            ("/v1/chat/completions", "logprob_token_ids", "use top_logprobs"),
            ("/v1/completions", "random_seed", "use seed"),
            ("/v1/completions", "detokenize", "leave it out"),
            ("/v1/chat/completions", "speculative.n_max", "speculate switches it off"),
            ("/v1/responses", "messages", "use input"),
            ("/v1/responses", "system", "use instructions"),
            ("/v1/responses", "response_format", "use text (its member format)"),
            ("/v1/responses", "reasoning_effort", "use reasoning (its member effort)"),
            ("/completion", "messages", "use prompt (routes for chats have messages)"),
            ("/completion", "slot_id", "use id_slot"),
            ("/tokenize", "text", "use content"),
        ],
    )
    def test_an_unknown_one_names_the_one_here(
        self, client: httpx.Client, path: str, field: str, hint: str
    ) -> None:
        others = {"/v1/responses": {"input": "a"}, "/completion": {"prompt": "a"}, "/tokenize": {}}
        bodies = {**dict(ROUTES), **others}
        error = refused(client, path, {**bodies[path], field: 1})
        assert error["message"].startswith(f"unknown field: {field}; ")
        assert hint in error["message"]

    def test_an_adapter_of_a_server_without_any(self, client: httpx.Client) -> None:
        error = refused(client, "/v1/completions", {**dict(ROUTES)["/v1/completions"], "lora": [{"id": 0}]})
        assert error["message"] == "there is no adapter 0; start with --lora NAME=FILE"

    @pytest.mark.parametrize(
        ("path", "change", "message"),
        [
            (
                "/v1/chat/completions",
                {"response_format": {"type": "json"}},
                "response_format.type: Invalid enum value 'json'; it may be 'text', 'json_object', 'json_schema'",
            ),
            (
                "/v1/responses",
                {"text": {"format": {"type": "json_schema", "json_schema": {}}}},
                "unknown field: text.format.json_schema; use schema",
            ),
            (
                "/v1/responses",
                {
                    "tools": [{"type": "function", "name": "f"}],
                    "tool_choice": {"type": "function", "function": {"name": "f"}},
                },
                'tool_choice must have the form {"type": "function", "name": …} in this API',
            ),
            (
                "/v1/chat/completions",
                {
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                    "tool_choice": {"type": "function", "name": "f"},
                },
                'tool_choice must have the form {"type": "function", "function": {"name": …}} in this API',
            ),
            (
                "/v1/responses",
                {
                    "tools": [{"type": "function", "name": "f"}],
                    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}, {}]},
                },
                'tool_choice.tools.1 must have the form {"type": "function", "name": …} in this API',
            ),
            (
                "/v1/responses",
                {"tools": [{"type": "function", "function": {"name": "f"}}]},
                "tools.0: unknown key 'function'; in this API, name and parameters are at the same level as type",
            ),
        ],
    )
    def test_a_form_of_another_api_is_told_apart(
        self, client: httpx.Client, path: str, change: dict[str, Any], message: str
    ) -> None:
        body = {**dict(ROUTES), "/v1/responses": {"input": "a"}}[path]
        assert refused(client, path, {**body, **change})["message"] == message

    @on_both
    def test_no_limit_of_tokens(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        limited = {**body, "ignore_eos": True, "max_tokens": -1}
        answer = client.post(path, json=limited).json()
        assert answer["usage"]["total_tokens"] == 256  # until the context ends
        assert answer["choices"][0]["finish_reason"] == "length"

    @on_both
    def test_a_wrong_limit_is_named_as_the_client_named_it(
        self, client: httpx.Client, path: str, body: dict[str, Any]
    ) -> None:
        error = refused(client, path, {**body, "max_tokens": -2})
        assert error["param"] == "max_tokens"
        assert error["message"] == "max_tokens is -2; it must be 0 or more, or -1 for no limit"

    @pytest.mark.parametrize(
        ("path", "body", "field"),
        [
            ("/v1/chat/completions", {**CHAT, "max_completion_tokens": 2**31}, "max_completion_tokens"),
            ("/v1/completions", {"prompt": "a", "repeat_penalty": -1}, "repeat_penalty"),
            ("/v1/completions", {"prompt": "a", "repetition_penalty": -1}, "repetition_penalty"),
            ("/completion", {"prompt": "a", "n_predict": 2**31}, "n_predict"),
            ("/v1/responses", {"input": "a", "max_output_tokens": 2**31}, "max_output_tokens"),
            ("/v1/responses", {"input": "a", "temperature": -1}, "temperature"),
            (
                "/v1/messages",
                {
                    "model": "demo",
                    "max_tokens": 1,
                    "messages": CHAT["messages"],
                    "stop_sequences": ["a"] * 1025,
                },
                "stop_sequences",
            ),
        ],
    )
    def test_a_wrong_value_is_named_as_the_client_named_it(
        self, client: httpx.Client, path: str, body: dict[str, Any], field: str
    ) -> None:
        error = refused(client, path, body)
        assert error["message"].startswith(f"{field} ")
        assert error.get("param", field) == field

    def test_of_two_limits_the_smaller_holds(self, client: httpx.Client) -> None:
        for pair, n in (((-1, 3), 3), ((2, -1), 2), ((3, 2), 2), ((0, -1), 0)):
            limits = {"max_tokens": pair[0], "max_completion_tokens": pair[1], "ignore_eos": True}
            answer = client.post(ROUTES[0][0], json={**CHAT, **limits}).json()
            assert answer["usage"]["completion_tokens"] == n
        error = refused(client, ROUTES[0][0], {**CHAT, "max_completion_tokens": -5})
        assert error["param"] == "max_completion_tokens"

    @on_both
    def test_the_cache_can_be_left_out(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        text = "The fox and the owl and the cat and the dog went to the wood. " * 5
        long = {"prompt": text} if "prompt" in body else {"messages": [{"role": "user", "content": text}]}
        n_cached = [
            client.post(path, json={**body, **long, **more}).json()["usage"]["prompt_tokens_details"]
            for more in ({}, {"cache_prompt": True}, {"cache_prompt": False})
        ]
        assert n_cached[1]["cached_tokens"] > 20
        assert n_cached[2]["cached_tokens"] == 0

    @on_both
    def test_values_that_ask_for_what_is_done_anyway(
        self, client: httpx.Client, path: str, body: dict[str, Any]
    ) -> None:
        same = {
            "n_keep": 0,
            "return_tokens": False,
            "post_sampling_probs": False,
        }
        assert client.post(path, json={**body, **same}).status_code == 200
        for field, value in same.items():
            error = refused(client, path, {**body, field: True if value is False else 3})
            assert error["param"] == field
            assert f"leave it out, or set it to {str(value).lower()}" in error["message"]

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/completion"])
    def test_min_keep_leaves_more_than_one_token(self, client: httpx.Client, path: str) -> None:
        asked = {"messages": HELLO} if "chat" in path else {"prompt": "Once upon a time"}
        body = {**asked, "top_p": 0, "temperature": 5, "seed": 4, "ignore_eos": True, "max_tokens": 12}

        def text(**more: int) -> object:
            answer = client.post(path, json={**body, **more}).json()
            first = answer.get("choices", [answer])[0]
            return first.get("message") or first.get("text") or first["content"]

        assert text() == text(min_keep=1) != text(min_keep=30) == text(min_keep=30)

    @on_both
    def test_answers_say_what_computed_them(
        self, client: httpx.Client, path: str, body: dict[str, Any]
    ) -> None:
        fingerprint = client.post(path, json=body).json()["system_fingerprint"]
        assert fingerprint.endswith(f"-llamapipe-{lp.__version__}")
        assert {event["system_fingerprint"] for event in self._events(client, path, body, False)} == {
            fingerprint
        }
        assert client.get("/props").json()["build_info"] == fingerprint

    @on_both
    def test_what_llama_servers_clients_send_beside_it(
        self, client: httpx.Client, path: str, body: dict[str, Any]
    ) -> None:
        sent = {
            "id_slot": 3,
            "verbose": True,
            "response_fields": ["content"],
            "t_max_prompt_ms": 500,
            "sse_ping_interval": 3,
        }
        answer = client.post(path, json={**body, **sent})
        assert answer.status_code == 200
        assert set(answer.headers["x-llamapipe-unused"].split(", ")) == sent.keys()

    @on_both
    def test_answers_say_their_times(self, client: httpx.Client, path: str, body: dict[str, Any]) -> None:
        body = self._longer(body)
        client.post(path, json=body)
        answer = client.post(path, json=body)
        whole, usage = answer.json()["timings"], answer.json()["usage"]
        assert whole["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
        assert whole["cache_n"] + whole["prompt_n"] == usage["prompt_tokens"]
        assert whole["predicted_n"] == usage["completion_tokens"] == 4
        assert whole["queue_ms"] >= 0 < whole["prompt_ms"]
        parts = [part.split(";") for part in answer.headers["server-timing"].split(", ")]
        assert [part[0] for part in parts] == ["load", "prepare", "queue", "prompt", "generate", "cached"]
        assert parts[-1][1] == f'desc="{whole["cache_n"]} tokens"'
        told = [
            [
                event.get("timings", {}).get("predicted_n")
                for event in self._events(client, path, body, per_token)
            ]
            for per_token in (False, True)
        ]
        assert [n for n in told[0] if n is not None] == [4]  # the last event
        assert sorted({n for n in told[1] if n is not None}) == [1, 2, 3, 4]

    @staticmethod
    def _longer(body: dict[str, Any]) -> dict[str, Any]:
        """With a prompt that is worth caching."""
        text = "One day a cow went for a walk and met a cat. " * 6
        if "prompt" in body:
            return {**body, "prompt": text, "ignore_eos": True}
        return {**body, "messages": [{"role": "user", "content": text}], "ignore_eos": True}

    @staticmethod
    def _events(
        client: httpx.Client, path: str, body: dict[str, Any], per_token: bool
    ) -> list[dict[str, Any]]:
        text = client.post(path, json={**body, "stream": True, "timings_per_token": per_token}).text
        return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]

    @on_both
    def test_progress_begins_with_what_was_cached(
        self, client: httpx.Client, path: str, body: dict[str, Any]
    ) -> None:
        body = self._longer(body)
        client.post(path, json=body)
        text = client.post(path, json={**body, "stream": True, "return_progress": True}).text
        parts = [json.loads(line[6:]) for line in text.splitlines() if "prompt_progress" in line]
        told = [event["prompt_progress"] for event in parts]
        assert told[0]["processed"] == told[0]["cache"] > 0
        assert told[-1]["processed"] == told[-1]["total"] > told[0]["cache"]

    @on_both
    def test_the_log_says_where_the_time_went(
        self, client: httpx.Client, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
    ) -> None:
        with caplog.at_level("INFO", logger="llamapipe.server"):
            client.post(path, json=body, headers={"x-request-id": "timed"})
            wait_until(lambda: "id=timed" in caplog.text)  # after the answer, as other tests' lines may be
        (line,) = (record.getMessage() for record in caplog.records if "id=timed" in record.getMessage())
        assert re.search(
            r"n_completion_tokens=4 n_cached_tokens=\d+ prepare=\d+ queue=\d+ prompt=\d+", line
        ), line

    @on_both
    def test_the_last_requests_tell_their_times(
        self, engine: lp.Engine, path: str, body: dict[str, Any]
    ) -> None:
        with http_client(engine, keep_requests=3, api_keys=("secret",)) as client:
            key = {"authorization": "Bearer secret"}

            def last_requests() -> list[dict[str, Any]]:
                return list(client.get("/requests", headers=key).json()["data"])

            for i in range(3):
                client.post(path, json=body, headers={**key, "x-request-id": f"r{i}"})
            client.post(path, json={**body, "temperature": -1}, headers={**key, "x-request-id": "bad"})
            client.post(path, json=body)  # without a key: nobody fills the list so
            assert client.get("/requests").status_code == 401
            wait_until(lambda: last_requests() and last_requests()[0]["id"] == "bad")
            told = last_requests()
            assert [(request["id"], request["status"]) for request in told] == [
                ("bad", 400),
                ("r2", 200),
                ("r1", 200),
            ]
            last = told[1]
            assert last["n_completion_tokens"] == 4 and last["model"] == "demo" and last["path"] == path
            assert list(last["phases_ms"]) == ["load", "prepare", "queue", "prompt", "generate"]
            assert last["phases_ms"][last["slowest"]] == max(last["phases_ms"].values())
            assert sum(last["phases_ms"].values()) <= last["total_ms"] + 1
            assert not {"Hello", "Once"} & set(re.findall(r"\w+", str(told)))

    @on_both
    def test_llama_servers_names_of_options(
        self, client: httpx.Client, path: str, body: dict[str, Any]
    ) -> None:
        plain = {name: value for name, value in body.items() if name != "max_tokens"}
        answer = client.post(path, json={**plain, "n_predict": 3, "n_probs": 2, "samplers": "k", "top_k": 1})
        assert answer.status_code == 200, answer.text
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        assert usage["completion_tokens"] <= 3
        tops = choice["logprobs"].get("top_logprobs") or [
            entry["top_logprobs"] for entry in choice["logprobs"]["content"]
        ]
        assert all(len(top) >= 2 for top in tops)
        named = client.post(path, json={**body, "samplers": ["top_k"], "top_p": 0.5})
        assert set(named.headers["x-llamapipe-unused"].split(", ")) == {"top_p", "temperature"}

    def test_the_tokens_of_an_input_are_counted(self, client: httpx.Client, engine: lp.Engine) -> None:
        chat = [{"role": "user", "content": "Hello"}]
        counted = {"object": "response.input_tokens", "input_tokens": len(engine.model.tokenize_chat(chat))}
        for path, body in (("chat/completions", {"messages": chat}), ("responses", {"input": "Hello"})):
            for start in ("/", "/v1/"):
                assert client.post(f"{start}{path}/input_tokens", json=body).json() == counted

    @pytest.mark.parametrize("path", ["/v1/completions", "/completion"])
    def test_a_prompt_of_tokens_and_texts(self, client: httpx.Client, engine: lp.Engine, path: str) -> None:
        """llama-server's: a list with ids is one prompt."""
        tokenize = engine.model.tokenize
        ids = [*tokenize("Once upon"), *tokenize(" a time", add_special=False), 5]
        mixed = ["Once upon", *tokenize(" a time", add_special=False), 5]
        params = {"max_tokens": 4, "temperature": 0}

        def answer(prompt: Any) -> list[str]:
            result = client.post(path, json={**params, "prompt": prompt}).json()
            if path == "/completion":
                return [entry["content"] for entry in (result if isinstance(result, list) else [result])]
            return [choice["text"] for choice in result["choices"]]

        (expected,) = answer(ids)
        assert answer(mixed) == [expected]
        assert answer([mixed, "Once upon"]) == [expected, *answer("Once upon")]
        assert answer([*ids[:-1], ""]) == answer(ids[:-1])
        assert client.post(path, json={"prompt": [5, [6]]}).status_code == 400
        if path == "/v1/completions":
            told = client.post(path, json={**params, "prompt": ["Once", 5], "echo": True}).json()
            assert told["choices"][0]["text"].startswith(
                engine.model.vocab.detokenize([*tokenize("Once")[1:], 5])
            )

    @on_both
    def test_too_long_a_prompt_has_the_type_of_the_routes_api(
        self, client: httpx.Client, engine: lp.Engine, path: str, body: dict[str, Any]
    ) -> None:
        text = "Hello. " * engine.n_ctx
        long = {"prompt": text} if "prompt" in body else {"messages": [{"role": "user", "content": text}]}
        for route, kind in ((path, "invalid_request_error"), (path[3:], "exceed_context_size_error")):
            error = refused(client, route, {**body, **long})
            assert (error["type"], error["code"]) == (kind, "context_length_exceeded")
            assert error["n_prompt_tokens"] > error["n_ctx"] == engine.n_ctx
            assert ('set truncation="auto" to drop the oldest turns' in error["message"]) == (
                "messages" in long
            )

    @on_both
    def test_adaptive_sampling_is_the_engines(
        self, client: httpx.Client, engine: lp.Engine, path: str, body: dict[str, Any]
    ) -> None:
        options: dict[str, Any] = {
            "seed": 1,
            "temperature": 3.0,
            "adaptive_target": 0.3,
            "adaptive_decay": 0.0,
            "max_tokens": 20,
            "ignore_eos": True,
        }
        choice = client.post(path, json={**body, **options}).json()["choices"][0]
        params = lp.SamplingParams(**options)
        if "prompt" in body:
            assert choice["text"] == engine.generate(body["prompt"], params).text
        else:
            assert choice["message"]["content"] == engine.chat(HELLO, params).content
        assert refused(client, path, {**body, "adaptive_target": 3})["param"] == "adaptive_target"


class TestMessages:
    """They name options, not calls of Python, which a client of the server cannot change."""

    def test_a_prompt_over_the_context(self, client: httpx.Client) -> None:
        message = refused(client, "/v1/completions", {"prompt": [5] * 300})["message"]
        assert message == (
            "this model's maximum context length is 256 tokens: prompt is too long: 300 tokens > 256 maximum: the "
            "prompt has 300 tokens; n_ctx is 256 and one must stay free: shorten it, or raise n_ctx (--n-ctx)"
        )

    def test_a_context_with_too_little_room(self, demo: lp.Model) -> None:
        """An agent hears that it must shorten its conversation, and gets no answer of a token."""
        talk = [
            {"role": role, "content": "One day a cow went for a walk. " * 2}
            for role in ("user", "assistant") * 7 + ("user",)
        ]
        tuning = lp.EngineTuning(min_room=160)
        with (
            lp.Engine(demo, n_ctx=512, n_seq_max=1, tuning=tuning) as engine,
            http_client(engine, ollama=True) as client,
        ):
            n = len(engine.model.tokenize_chat(talk))
            assert 512 - 160 < n < 512
            error = refused(client, "/v1/chat/completions", {"messages": talk})
            assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == (
                "context_length_exceeded",
                n,
                512,
            )
            assert f"prompt is too long: {n} tokens > 352 maximum" in error["message"]
            body = {"messages": talk, "temperature": 0, "max_tokens": 4}
            assert client.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 4
            body = {"messages": talk, "temperature": 0, "truncation": "auto"}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["usage"]["prompt_tokens"] <= 352
            kept = {"model": "demo", "messages": talk, "truncate": False}
            assert "leave truncate out" in client.post("/api/chat", json=kept).json()["error"]

    def test_a_full_queue(self, demo: lp.Model) -> None:
        with (
            lp.Engine(demo, n_ctx=512, n_seq_max=1, max_queue=1) as engine,
            http_client(engine) as client,
        ):
            error = refused(client, "/v1/completions", {"prompt": ["a"] * 20}, 429)
        assert error["message"] == (
            "20 requests are submitted at once and max_queue is 1: that never fits; "
            "submit fewer at once, or raise max_queue (--max-queue)"
        )


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_of_a_conversation_that_was_shortened(client: httpx.Client, stream: bool) -> None:
    """Its tokens are those that were computed."""
    turns = [{"role": role, "content": "word " * 20} for _ in range(8) for role in ("user", "assistant")]
    body = {**CHAT, "messages": [*turns, *HELLO], "truncation": "auto", "return_token_ids": True}
    if stream:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        lines = client.post("/v1/chat/completions", json={**body, **more}).text.split("\n\n")
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        ids, n = events[0]["choices"][0]["prompt_token_ids"], events[-1]["usage"]["prompt_tokens"]
    else:
        answer = client.post("/v1/chat/completions", json=body).json()
        ids, n = answer["prompt_token_ids"], answer["usage"]["prompt_tokens"]
    assert len(ids) == n < 256


def test_vllms_clients_reset_the_prefix_cache(client: httpx.Client, engine: lp.Engine) -> None:
    """As vLLM's benchmark does between two runs: without a body; it looks at the status."""
    text = "A long story about a fox who lived in the wood and met a bear. " * 4

    def n_cached() -> int:
        answer = client.post("/v1/completions", json={**TEXT, "prompt": text})
        n: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return n

    n_cached()
    assert n_cached() > 30
    answer = client.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()) == (200, {})
    assert n_cached() == 0
    assert client.post("/reset_prefix_cache?reset_running_requests=false&model=demo").status_code == 200
    assert n_cached() == 0
    assert client.post("/reset_prefix_cache?reset_external=true").status_code == 400
    assert client.post("/reset_prefix_cache?model=other").status_code == 404
    with engine.cache_prefix(text):
        client.post("/reset_prefix_cache")
        assert n_cached() > 30  # who pinned it needs it
    engine.check_integrity()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 2}),
        ("/v1/messages", {"model": "demo", "messages": HELLO, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"model": "demo", "messages": HELLO}),
    ],
)
def test_arguments_that_the_template_does_not_read(
    client: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    """They are named; switches of reasoning, which clients send to all models, are not."""
    args = {"enable_thinking": False, "custom": 1, "a\r\nset-cookie: b": 2, **{f"x{i}": i for i in range(99)}}
    answer = client.post(path, json={**body, "chat_template_kwargs": args})
    assert answer.status_code == 200, answer.text
    names = answer.headers["x-llamapipe-unused"].split(", ")
    assert names[:2] == ["chat_template_kwargs.custom", "chat_template_kwargs"] and len(names) == 8
    assert "set-cookie" not in answer.headers
    known = client.post(path, json={**body, "chat_template_kwargs": {"enable_thinking": False}})
    assert "x-llamapipe-unused" not in known.headers


def test_documents_need_a_place(client: httpx.Client) -> None:
    documents = [{"title": "a", "text": "The fox is red."}]
    error = refused(client, "/v1/chat/completions", {**CHAT, "documents": documents})
    assert error["param"] == "documents" and "put them into a message" in error["message"]
    template = "{% for d in documents or [] %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    bodies: list[dict[str, Any]] = [CHAT, {**CHAT, "documents": documents}, {**CHAT, "documents": []}]
    with (
        lp.Model(lp.demo_model_path(), chat_template=template) as model,
        lp.Engine(model, 256, 1) as engine,
        http_client(engine, model_names=("demo",)) as other,
    ):
        answers = [other.post("/v1/chat/completions", json=body).json() for body in bodies]
    n = [answer["usage"]["prompt_tokens"] for answer in answers]
    assert n[1] > n[0] == n[2]
