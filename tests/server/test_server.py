"""The server over real connections: what its routes answer, refuse, and do when a client goes away."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from support.gguf_models import infilling_model
from support.inside import loop_of
from support.served import http_client, refused

import llamapipe as lp
from llamapipe import server as package
from llamapipe.server import ServerSettings, serve

GREEDY = {"temperature": 0, "max_tokens": 12}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def engine(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=512, n_seq_max=8, max_queue=64) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: lp.Engine) -> Iterator[httpx.Client]:
    with http_client(engine, model_names=("story", "other")) as client:
        yield client


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


class TestCompletions:
    def test_text_is_the_engines(self, client: httpx.Client, engine: lp.Engine) -> None:
        answer = client.post("/v1/completions", json={"prompt": "Once upon", **GREEDY}).json()
        expected = engine.generate("Once upon", lp.SamplingParams(temperature=0, max_tokens=12))
        assert answer["choices"][0]["text"] == expected.text
        assert answer["usage"]["completion_tokens"] == 12
        assert answer["model"] == "story"

    def test_a_stream_joins_to_the_same_text(self, client: httpx.Client) -> None:
        body = {"prompt": ["Once upon", "The cat"], "n": 2, "seed": 7, "max_tokens": 9}
        whole = client.post("/v1/completions", json=body).json()
        texts = [""] * 4
        for event in events(client, "/v1/completions", body):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == [choice["text"] for choice in whole["choices"]]

    def test_tokens_and_text_are_the_same_prompt(self, client: httpx.Client, demo: lp.Model) -> None:
        as_text = client.post("/v1/completions", json={"prompt": "Once upon", **GREEDY}).json()
        tokens = demo.tokenize("Once upon")
        as_tokens = client.post("/v1/completions", json={"prompt": tokens, **GREEDY}).json()
        assert as_text["choices"] == as_tokens["choices"]

    def test_a_rendered_prompt_is_the_conversation(self, client: httpx.Client, demo: lp.Model) -> None:
        text = demo.render_chat(HELLO)
        whole = client.post("/v1/completions", json={"prompt": text, **GREEDY}).json()
        tokens = demo.tokenize_chat(HELLO)
        assert whole["usage"]["prompt_tokens"] == len(tokens)
        with_bos = client.post("/v1/completions", json={"prompt": f"<s>{text}", **GREEDY}).json()
        assert with_bos["choices"] == whole["choices"]
        plain = client.post("/v1/completions", json={"prompt": text, "parse_special": False, **GREEDY}).json()
        assert plain["usage"]["prompt_tokens"] > len(tokens)

    def test_vllms_clients_count_a_conversation(self, client: httpx.Client, demo: lp.Model) -> None:
        unchanged: dict[str, Any] = {
            "continue_final_message": False,
            "chat_template": None,
            "mm_processor_kwargs": {},
        }
        body = {"messages": HELLO, "add_generation_prompt": True, **unchanged}
        assert client.post("/tokenize", json=body).json()["tokens"] == demo.tokenize_chat(HELLO)
        open_turn = [*HELLO, {"role": "assistant", "content": "Once up"}]
        more = {"messages": open_turn, "continue_final_message": True, "add_generation_prompt": False}
        tokens = client.post("/tokenize", json={**body, **more}).json()["tokens"]
        assert demo.detokenize(tokens).endswith("Once up")
        for change in ({"continue_final_message": True}, {"chat_template": "x"}, {"add_special": True}):
            assert refused(client, "/tokenize", {**body, **change})["param"] in change

    @pytest.mark.parametrize("as_tokens", [False, True])
    @pytest.mark.parametrize("stream", [False, True])
    def test_echo_with_logprobs_scores_the_prompt(
        self, client: httpx.Client, engine: lp.Engine, demo: lp.Model, stream: bool, as_tokens: bool
    ) -> None:
        tokens = demo.tokenize("Once upon a time")
        prompt = tokens if as_tokens else "Once upon a time"
        body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
        if stream:
            choices = [event["choices"][0] for event in events(client, "/v1/completions", body)]
            choice = choices[0]
        else:
            choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == "Once upon a time"
        logprobs = choice["logprobs"]["token_logprobs"]
        if as_tokens:  # a BOS of the caller is a token of the answer
            assert logprobs.pop(0) is None
        assert logprobs == pytest.approx(engine.score_tokens(tokens).logprobs.tolist(), abs=1e-4)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("prompts", "more"),
        [
            (["Is it so? Answer:", "é 漢字 🦊🦊? Answer:"], {"choice": ["yes", "no", "née"], "n": 2}),
            ([" Once", "Once", "  ", "<s>Once"], {"max_tokens": 5, "n": 3, "seed": 7}),
            (["a</s>b c", "</s></s>Once", "<s>x</s> 漢</s>字"], {"max_tokens": 5, "temperature": 0}),
            (["a</s>b c"], {"max_tokens": 5, "parse_special": False}),
            (["Once 🦊"], {"max_tokens": 0}),
        ],
    )
    def test_offsets_of_an_echo_are_those_of_its_text(
        self, client: httpx.Client, prompts: list[str], more: dict[str, Any], stream: bool
    ) -> None:
        body = {"prompt": prompts, "echo": True, "logprobs": 0, **more}
        n = len(prompts) * more.get("n", 1)
        texts = [""] * n
        tokens: list[list[str]] = [[] for _ in range(n)]
        offsets: list[list[int]] = [[] for _ in range(n)]
        choices = [choice for event in events(client, "/v1/completions", body) for choice in event["choices"]]
        if not stream:
            choices = client.post("/v1/completions", json=body).json()["choices"]
        for choice in choices:
            i, logprobs = choice["index"], choice["logprobs"] or {"tokens": [], "text_offset": []}
            texts[i] += choice["text"]
            tokens[i] += logprobs["tokens"]
            offsets[i] += logprobs["text_offset"]
        for i, text in enumerate(texts):
            prompt = prompts[i // more.get("n", 1)]
            assert text.startswith(prompt) and tokens[i]
            assert sorted(offsets[i]) == offsets[i]
            for token, offset in zip(tokens[i], offsets[i], strict=True):
                shown = token if text.startswith(token, offset) else token.removeprefix(" ")
                is_split = token.startswith("bytes:") or offset == len(text)
                assert is_split or text.startswith(shown, offset), (text, token, offset)
            # What was generated begins where the prompt ends.
            n_before = sum(offset < len(prompt) for offset in offsets[i])
            alone = {**body, "prompt": prompt, "echo": False, "n": 1, "logprobs": 0}
            if len(tokens[i]) > n_before:
                assert offsets[i][n_before] == len(prompt)
            if "seed" not in more and "max_tokens" not in more:
                first = client.post("/v1/completions", json=alone).json()["choices"][0]["logprobs"]
                assert first["text_offset"][0] == 0

    def test_best_of_returns_the_most_probable(self, client: httpx.Client) -> None:
        body = {"prompt": "Once upon", "seed": 3, "max_tokens": 8, "logprobs": 0}
        every = client.post("/v1/completions", json={**body, "n": 4}).json()["choices"]
        best = client.post("/v1/completions", json={**body, "n": 1, "best_of": 4}).json()["choices"]
        means = [sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in every]
        assert best[0]["text"] == every[means.index(max(means))]["text"]

    def test_usage_in_a_stream(self, client: httpx.Client) -> None:
        body = {"prompt": "Once upon", **GREEDY, "stream_options": {"include_usage": True}}
        *parts, last = events(client, "/v1/completions", body)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 12
        # Clients of llama-server take an event that has it for the last one.
        assert not any("usage" in part for part in parts)

    @pytest.mark.parametrize(
        ("change", "param"),
        [
            ({"max_tokenz": 3}, "max_tokenz"),
            ({"max_tokens": "x"}, "max_tokens"),
            ({"max_tokens": -2}, "max_tokens"),
            ({"temperature": -1}, "temperature"),
            ({"n": 0}, "n"),
            ({"n": 1000}, "n"),
            ({"n": 3, "best_of": 2}, "best_of"),
            ({"logprobs": 1000}, "logprobs"),
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [1, [2]]}, "prompt"),
            ({"prompt": [10**9]}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"suffix": "b"}, "suffix"),
        ],
    )
    def test_a_bad_field_is_named(self, client: httpx.Client, change: dict[str, Any], param: str) -> None:
        assert refused(client, "/v1/completions", {"prompt": "a", **change})["param"] == param

    def test_a_prompt_over_the_context_names_both_numbers(self, client: httpx.Client) -> None:
        error = refused(client, "/v1/completions", {"prompt": [5] * 600})
        assert error["code"] == "context_length_exceeded"
        assert "600" in error["message"]
        # The words by which agents know that they must make the conversation shorter.
        assert error["message"].startswith("this model's maximum context length is 512 tokens: ")

    def test_a_suffix_is_filled_in_to(self, tmp_path: Path) -> None:
        with (
            lp.Engine(infilling_model(tmp_path / "fim.gguf")) as engine,
            http_client(engine) as client,
        ):
            fim = engine.model.vocab.fim_tokens
            assert fim is not None
            before, after = (engine.model.tokenize(text, add_special=False) for text in ("Once", "end"))
            prompt = [engine.model.bos, fim.prefix, *before, fim.suffix, *after, fim.middle]
            expected = client.post("/v1/completions", json={"prompt": prompt, **GREEDY}).json()
            answer = client.post("/v1/completions", json={"prompt": "Once", "suffix": "end", **GREEDY}).json()
            assert answer["choices"] == expected["choices"]


class TestChat:
    def test_an_answer_is_the_engines(self, client: httpx.Client, engine: lp.Engine) -> None:
        answer = client.post("/v1/chat/completions", json={"messages": HELLO, "temperature": 0}).json()
        expected = engine.chat(HELLO, lp.SamplingParams(temperature=0, max_tokens=None))
        assert answer["choices"][0]["message"]["content"] == expected.content
        assert answer["choices"][0]["finish_reason"] == "stop"

    def test_a_stream_joins_to_the_same_answer(self, client: httpx.Client) -> None:
        body = {"messages": HELLO, "seed": 5, "n": 2}
        whole = client.post("/v1/chat/completions", json=body).json()
        texts = ["", ""]
        for event in events(client, "/v1/chat/completions", body):
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == [choice["message"]["content"] for choice in whole["choices"]]

    @pytest.mark.parametrize("parts", [False, True])
    def test_a_prediction_changes_only_the_steps(self, client: httpx.Client, parts: bool) -> None:
        body: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 40}
        plain = client.post("/v1/chat/completions", json=body).json()
        text = plain["choices"][0]["message"]["content"]
        content = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}] if parts else text
        body["prediction"] = {"type": "content", "content": content}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert "x-llamapipe-unused" not in client.post("/v1/chat/completions", json=body).headers
        assert answer["choices"][0]["message"]["content"] == text
        details = answer["usage"].pop("completion_tokens_details")
        assert details.keys() == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
        assert 0 <= details["accepted_prediction_tokens"] <= answer["usage"]["completion_tokens"]
        assert details["rejected_prediction_tokens"] >= 0
        assert "completion_tokens_details" not in plain["usage"]
        last = list(
            events(client, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
        )[-1]
        assert last["usage"]["completion_tokens_details"].keys() == details.keys()
        body = {"prompt": "Once upon a time", "max_tokens": 10, "prediction": " there was a girl"}
        body["stream_options"] = {"include_usage": True}
        last = list(events(client, "/v1/completions", body))[-1]
        assert last["usage"]["completion_tokens_details"].keys() == details.keys()

    def test_a_schema_holds(self, client: httpx.Client) -> None:
        schema = {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        }
        body = {
            "messages": HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        }
        content = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert json.loads(content) in ({"a": 1}, {"a": 2})

    def test_logprobs_have_one_entry_for_each_token(self, client: httpx.Client) -> None:
        body = {"messages": HELLO, "logprobs": True, "top_logprobs": 3, "max_tokens": 5, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body).json()
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]
        assert all(len(entry["top_logprobs"]) == 3 for entry in entries)

    def test_options_without_effect_are_named(self, client: httpx.Client) -> None:
        answer = client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, "store": True})
        assert answer.headers["x-llamapipe-unused"] == "store"

    @pytest.mark.parametrize(
        "change",
        [
            {"messages": []},
            {"messages": [{"role": "user"}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            {"messages": "hello"},
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
            {"tool_choice": "required"},
            {"top_logprobs": 2},
            {"modalities": ["audio"]},
            {"response_format": {"type": "json_schema"}},
            {"reasoning_effort": "extreme"},
        ],
    )
    def test_what_cannot_be_done_is_refused(self, client: httpx.Client, change: dict[str, Any]) -> None:
        assert refused(client, "/v1/chat/completions", {"messages": HELLO, **change})["message"]


class TestOtherRoutes:
    def test_models_are_listed_and_cannot_be_deleted(self, client: httpx.Client) -> None:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["story", "other"]
        assert client.get("/v1/models/other").json()["id"] == "other"
        assert client.get("/v1/models/gpt").status_code == 404
        assert (
            "'story'" in refused(client, "/v1/completions", {"prompt": "a", "model": "gpt"}, 404)["message"]
        )
        assert client.delete("/v1/models/story").status_code == 403

    def test_both_dialects_of_tokenizing(self, client: httpx.Client, demo: lp.Model) -> None:
        tokens = demo.tokenize("Hello there")
        vllm = client.post("/tokenize", json={"prompt": "Hello there"}).json()
        assert (vllm["tokens"], vllm["count"], vllm["max_model_len"]) == (tokens, len(tokens), 512)
        llama = client.post("/tokenize", json={"content": "Hello there"}).json()
        assert llama == {"tokens": demo.tokenize("Hello there", add_special=False)}
        assert client.post("/detokenize", json=llama).json()["content"].strip() == "Hello there"
        chat = client.post("/tokenize", json={"messages": HELLO}).json()
        assert chat["tokens"] == demo.tokenize_chat(HELLO)
        prompt = client.post("/apply-template", json={"messages": HELLO}).json()["prompt"]
        assert prompt == demo.render_chat(HELLO)
        assert client.get("/tokenizer_info").json()["bos_token"] == "<s>"

    def test_texts_with_token_ids_are_tokenized(self, client: httpx.Client, demo: lp.Model) -> None:
        """llama-server's ``content`` may mix them."""
        answer = client.post("/tokenize", json={"content": [5, "Hello there", 7], "add_special": True})
        assert answer.json()["tokens"] == [5, *demo.tokenize("Hello there", add_special=False), 7]
        for content in ([5, 10**6], [5, [6]], [True]):
            assert refused(client, "/tokenize", {"content": content})["param"].startswith("content")

    def test_a_template_takes_the_body_of_a_chat(self, client: httpx.Client, demo: lp.Model) -> None:
        """As llama-server does: what the prompt depends on is applied, what only an answer needs is named."""
        open_turn = [*HELLO, {"role": "assistant", "content": "Once up"}]
        whole = demo.render_chat(HELLO)
        begun = whole + "Once up"
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        prompts = (
            ({"messages": HELLO, "add_generation_prompt": False}, demo.render_chat(HELLO, add_generation_prompt=False)),
            ({"messages": open_turn, "continue_final_message": True, "add_generation_prompt": False}, begun),
            ({"messages": open_turn, "continue_final_message": "content"}, begun),
            ({"messages": [*HELLO, {**open_turn[-1], "prefix": True}]}, begun),
            ({"messages": HELLO, "tools": [tool], "tool_choice": "none", "reasoning_effort": "none"}, whole),
        )  # fmt: skip
        for body, prompt in prompts:
            answer = client.post("/apply-template", json=body)
            assert answer.json()["prompt"] == prompt, body
            assert "x-llamapipe-unused" not in answer.headers
        more = {"temperature": 0, "max_tokens": 5, "stream": True, "reasoning_format": "none", "n_predict": 3}
        answer = client.post("/apply-template", json={"messages": HELLO, **more})
        assert set(answer.headers["x-llamapipe-unused"].split(", ")) == more.keys()
        for change in ({"truncation": "auto"}, {"chat_template": "x"}, {"continue_final_message": True}):
            assert refused(client, "/apply-template", {"messages": HELLO, **change})["param"] in change

    def test_what_is_counted_is_what_is_continued(self, client: httpx.Client, demo: lp.Model) -> None:
        messages = [*HELLO, {"role": "assistant", "content": "Once up", "prefix": True}]
        path = "/v1/chat/completions"
        n = client.post(f"{path}/input_tokens", json={"messages": messages}).json()["input_tokens"]
        whole = client.post(path, json={"messages": messages, "max_tokens": 1}).json()
        assert n == whole["usage"]["prompt_tokens"]

    @pytest.mark.parametrize("path", ["", "/input_tokens"])
    def test_a_prefix_is_true_in_the_last_message(self, client: httpx.Client, path: str) -> None:
        def error(**changed: Any) -> dict[str, Any]:
            last = {"role": "assistant", "content": "Once", "prefix": True}
            return refused(client, f"/v1/chat/completions{path}", {"messages": [*HELLO, last], **changed})

        early = {"role": "assistant", "content": "a", "prefix": True}
        assert error(messages=[*HELLO, early, *HELLO])["param"] == f"messages.{len(HELLO)}.prefix"
        wrong = {"role": "assistant", "content": "a", "prefix": "yes"}
        assert error(messages=[*HELLO, wrong])["message"].startswith(
            f"messages.{len(HELLO)}.prefix is 'yes'; it"
        )

    def test_metrics_count_what_was_answered(self, client: httpx.Client) -> None:
        client.post("/v1/completions", json={"prompt": "a", **GREEDY})
        text = client.get("/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(values['vllm:num_requests_running{model_name="story"}']) == 0
        assert float(values["llamapipe_generated_tokens_total"]) >= 12
        assert float(values["llamapipe_queue_seconds_count"]) >= 1
        assert float(values['llamapipe_requests_total{path="/v1/completions",status="200"}']) >= 1

    def test_the_page_and_its_files_are_served_without_a_key(self, engine: lp.Engine) -> None:
        with http_client(engine, api_keys=("one",)) as client:
            page = client.get("/")
            assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
            names = re.findall(r'"page/([a-z.]+)"', page.text)
            assert set(names) == {"page.css", "page.js"}
            for name in (*names, "api.js", "requests.js", "timeline.js"):
                assert client.get(f"/page/{name}").status_code == 200
            for name in ("app.py", "..%2fapp.py", "%2e%2e/app.py"):
                assert client.get(f"/page/{name}").status_code == 404
            assert client.get("/timeline").status_code == 401
        with serve(engine, settings=ServerSettings(page=False)) as server:
            assert httpx.get(server.url).status_code == 404

    def test_metrics_may_be_open(self, engine: lp.Engine) -> None:
        for is_open, status in ((True, 200), (False, 401)):
            settings = ServerSettings(api_keys=("one", "two"), open_metrics=is_open)
            with serve(engine, settings=settings) as server:
                assert httpx.get(f"{server.url}/metrics").status_code == status
                assert httpx.get(f"{server.url}/requests").status_code == 401

    def test_the_timeline_shows_the_last_steps(self, client: httpx.Client, engine: lp.Engine) -> None:
        first = client.get("/timeline").json()
        client.post("/v1/completions", json={"prompt": "Once upon", **GREEDY})
        later = client.get(f"/timeline?after={first['now']}").json()
        shown = {later["stages"][span[0]] for span in later["spans"]}
        assert {"launch", "sample", "deliver"} <= shown
        assert all(first["now"] < span[3] <= later["now"] for span in later["spans"])
        assert later["stats"]["n_completion_tokens"] - first["stats"]["n_completion_tokens"] == 12
        assert client.get("/timeline?after=x").status_code == 400

    def test_an_unknown_path_answers_in_the_apis_shape(self, client: httpx.Client) -> None:
        assert refused(client, "/v1/nothing", {}, 404)["message"]
        assert client.get("/v1/completions").status_code == 405

    def test_a_request_id_comes_back(self, client: httpx.Client) -> None:
        assert client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
        assert client.get("/health", headers={"x-request-id": "a\tb"}).headers["x-request-id"] != "a\tb"

    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b"[" * 100_000])
    def test_a_body_that_is_no_request_is_refused(self, client: httpx.Client, body: bytes) -> None:
        assert client.post("/v1/completions", content=body).status_code == 400


class TestLimits:
    def test_a_key_is_asked_for_everywhere_but_for_health(self, engine: lp.Engine) -> None:
        with http_client(engine, api_keys=("one", "two")) as client:
            assert client.get("/health").status_code == 200
            answer = client.get("/v1/models")
            assert answer.status_code == 401 and "asks for an API key" in answer.text
            for headers in ({"authorization": "Bearer two"}, {"x-api-key": "one"}):
                assert client.get("/v1/models", headers=headers).status_code == 200
            answer = client.get("/v1/models", headers={"authorization": "Bearer three"})
            assert answer.status_code == 401 and "is not one of this server's" in answer.text

    @pytest.mark.parametrize(
        "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
    )
    def test_each_of_several_keys_has_a_prefix_cache(self, engine: lp.Engine, path: str) -> None:
        """Nobody learns what another client has asked. With one key, all clients are one."""
        text = f"The key to the archive of {path} is under the third stone, and nobody else may know that."
        body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        if path == "/v1/completions":
            body = {"prompt": text, "max_tokens": 2}
        elif path == "/v1/responses":
            body = {"input": text, "max_output_tokens": 2}
        body["model"] = engine.model.path.stem

        def n_cached(client: httpx.Client, key: str) -> int:
            answer = client.post(path, json=body, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
            return int(details.get("cached_tokens", details.get("cache_read_input_tokens", 0)))

        keys = (f"one{path}", f"two{path}")
        for served, asks in ((keys, (*keys, *keys)), (keys[:1], keys[:1] * 2)):
            with http_client(engine, api_keys=served) as client:
                counts = [n_cached(client, key) for key in asks]
            assert counts[-1] > 30 if len(asks) == 2 else counts[:2] == [0, 0] and min(counts[2:]) > 30

    def test_a_large_body_is_refused(self, engine: lp.Engine) -> None:
        with http_client(engine, max_body_bytes=1000) as client:
            assert client.post("/v1/completions", json={"prompt": "a" * 1000}).status_code == 413

            def chunks() -> Iterator[bytes]:
                yield b'{"prompt": "'
                yield b"a" * 2000

            assert client.post("/v1/completions", content=chunks()).status_code == 413

    def test_strict_refuses_options_without_effect(self, engine: lp.Engine) -> None:
        with http_client(engine, strict=True) as c:
            assert refused(c, "/v1/completions", {"prompt": "a", "user": "me"})["param"] == "user"

    def test_a_full_queue_asks_to_come_back(self, demo: lp.Model) -> None:
        with (
            lp.Engine(demo, n_ctx=512, n_seq_max=1, max_queue=1) as engine,
            http_client(engine) as client,
        ):
            answer = client.post("/v1/completions", json={"prompt": ["a"] * 20, "max_tokens": 4})
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"


class TestClientsThatLeave:
    def test_a_hang_up_cancels_the_request(self, engine: lp.Engine, client: httpx.Client) -> None:
        before = engine.stats().n_completion_tokens
        body = {"prompt": "Once upon", "max_tokens": 500, "ignore_eos": True, "stream": True}
        for _ in range(5):
            with client.stream("POST", "/v1/completions", json=body) as answer:
                next(answer.iter_lines())
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        while engine.stats().n_active:
            pass
        assert engine.stats().n_completion_tokens - before < 5 * 500
        engine.check_integrity()

    def test_many_streams_at_once_are_all_answered(self, client: httpx.Client) -> None:
        def read(i: int) -> int:
            return len(events(client, "/v1/completions", {"prompt": f"Number {i}", "max_tokens": 8}))

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(read, range(32)))

    def test_closing_drains(self, engine: lp.Engine) -> None:
        body = {"prompt": "Once upon", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with (
            serve(engine) as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
            client.stream("POST", "/v1/completions", json=body) as answer,
            ThreadPoolExecutor(1) as pool,
        ):
            lines = answer.iter_lines()
            next(lines)
            closing = pool.submit(server.close)
            assert list(lines)[-2] == "data: [DONE]"
            closing.result()


def test_public_names_of_the_server_are_no_modules() -> None:
    # `app` was one, as soon as another name had been imported: the module of the same name.
    assert not [name for name in package.__all__ if isinstance(getattr(package, name), ModuleType)]


def test_health_tells_that_the_engine_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise OSError("the device is lost")

    with (
        lp.Model.demo() as model,
        lp.Engine(model, n_ctx=64, n_seq_max=1) as engine,
        http_client(engine) as client,
    ):
        assert client.get("/health").status_code == 200
        assert engine.failure is None
        monkeypatch.setattr(loop_of(engine).in_flight, "launch", lost)
        assert client.post("/v1/completions", json={"prompt": "Once"}).status_code == 500
        for path in ("/health", "/ping"):
            answer = client.get(path)
            assert answer.status_code == 503
            assert "the device is lost" in answer.json()["error"]["message"]
        assert "the device is lost" in str(engine.failure)
