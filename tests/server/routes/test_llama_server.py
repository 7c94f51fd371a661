"""llama-server's own formats: what editors' plug-ins and Continue send, and what they read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest
from support.control import PATIENCE_S, wait_until
from support.gguf_models import infilling_model
from support.served import http_client, refused

import llamapipe as lp
from llamapipe.llama.fim import fim_room
from llamapipe.server.requests.sampling import sampler_names
from llamapipe.server.routes.llama_server import TextLimits

PROMPT: dict[str, Any] = {"prompt": "Once upon a time", "n_predict": 8, "temperature": 0}
GAP: dict[str, Any] = {
    "input_prefix": "Once upon\n",
    "input_suffix": "\nthe end",
    "n_predict": 8,
    "temperature": 0,
}
# What llama.vim sends before and after a key, in its forms of 2026.
EXTRA: list[dict[str, Any]] = [{"filename": "fox.py", "text": "A fox ran.\n" * 5, "time": [1756, 4]}]
VIM_WARM: dict[str, Any] = {
    "id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": EXTRA, "prompt": "", "n_predict": 0,
    "temperature": 0.0, "samplers": [], "cache_prompt": True, "t_max_prompt_ms": 1, "t_max_predict_ms": 1,
    "response_fields": [""],
}  # fmt: skip
VIM: dict[str, Any] = {
    "id_slot": 0, "input_prefix": "Once upon\n", "input_suffix": "\nthe end", "input_extra": EXTRA,
    "prompt": "a ti", "n_predict": 128, "stop": [], "n_indent": 0, "top_k": 40, "top_p": 0.9, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": [
        "content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
        "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
        "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated", "tokens_cached",
    ],
}  # fmt: skip
VSCODE = {
    "input_prefix": "Once upon\n", "input_suffix": "\nthe end", "input_extra": EXTRA, "prompt": "a ti",
    "n_predict": 32, "n_cmpl": 2, "top_k": 40, "top_p": 0.99, "stream": False,
    "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500, "n_indent": 4, "model": "",
}  # fmt: skip
CONTINUE = {
    "prompt": "Once upon a", "stream": True, "n_predict": 8, "temperature": 0.01, "stop": ["zzz"], "top_k": None,
    "frequency_penalty": None, "presence_penalty": None, "min_p": None, "mirostat": None, "top_p": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Engine]:
    path = infilling_model(tmp_path_factory.mktemp("fim") / "fim.gguf", with_files=True)
    with lp.Engine(path, n_ctx=512, n_seq_max=4) as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture(scope="module")
def client(engine: lp.Engine) -> Iterator[httpx.Client]:
    with http_client(engine, model_names=("demo",)) as client:
        yield client


@pytest.fixture(scope="module")
def without(demo: lp.Model) -> Iterator[httpx.Client]:
    """A client of a server whose model cannot fill in."""
    with (
        lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine,
        http_client(engine) as client,
    ):
        yield client


def answer(client: httpx.Client, path: str, body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as stream:
        assert stream.status_code == 200, stream.read()
        data = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
    assert "[DONE]" not in data  # llama-server's streams of this format end without it
    return [json.loads(line) for line in data]


class TestCompletion:
    @pytest.mark.parametrize("path", ["/completion", "/completions"])
    def test_an_answer_is_the_engines(self, client: httpx.Client, engine: lp.Engine, path: str) -> None:
        result = answer(client, path, {**PROMPT, "return_tokens": True})
        expected = engine.generate(PROMPT["prompt"], lp.SamplingParams(max_tokens=8, temperature=0))
        assert (result["content"], result["tokens"]) == (expected.text, expected.token_ids)
        assert result["tokens_predicted"] == result["timings"]["predicted_n"] == 8
        assert result["tokens_evaluated"] == expected.n_prompt_tokens
        timings = result["timings"]
        assert timings["prompt_n"] + timings["cache_n"] == expected.n_prompt_tokens
        assert result["tokens_cached"] == expected.n_prompt_tokens + 8
        assert (result["stop"], result["stop_type"], result["truncated"]) == (True, "limit", False)
        assert (result["model"], result["index"], result["has_new_line"]) == (
            "demo",
            0,
            "\n" in expected.text,
        )
        assert result["prompt"].endswith("Once upon a time")
        settings = result["generation_settings"]
        assert (settings["n_predict"], settings["temperature"], settings["stream"]) == (8, 0, False)
        assert result["generation_settings"]["samplers"][-1] == "infill"

    def test_a_stream_joins_to_the_same_answer(self, client: httpx.Client) -> None:
        whole = answer(client, "/completion", {**PROMPT, "return_tokens": True})
        *parts, last = events(client, "/completion", PROMPT)
        assert "".join(part["content"] for part in parts) == whole["content"]
        assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
        assert {part["stop"] for part in parts} == {False}
        assert (last["stop"], last["content"], last["tokens"], last["stop_type"]) == (True, "", [], "limit")
        assert last.keys() == whole.keys()

    def test_continues_form_is_streamed(self, client: httpx.Client) -> None:
        with client.stream("POST", "/completion", json=CONTINUE) as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            values = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
        assert "".join(value["content"] for value in values)
        assert values[-1]["stop"] is True

    def test_several_prompts_and_choices_are_a_list(self, client: httpx.Client) -> None:
        results = answer(client, "/completion", {**PROMPT, "prompt": ["Once", [1, 5, 7]], "n_cmpl": 2})
        assert [result["index"] for result in results] == [0, 1, 2, 3]
        assert results[0]["content"] == results[1]["content"]
        assert results[2]["tokens_evaluated"] == 3

    def test_a_prompt_may_be_an_object(self, client: httpx.Client) -> None:
        """The form for images and sounds, which also takes text alone."""
        whole = answer(client, "/completion", PROMPT)["content"]
        text = {"prompt_string": PROMPT["prompt"], "multimodal_data": []}
        assert answer(client, "/completion", {**PROMPT, "prompt": text})["content"] == whole
        results = answer(client, "/completion", {**PROMPT, "prompt": [[1, 5], text, "Once"]})
        assert [result["content"] for result in results][1] == whole
        for prompt in ({**text, "multimodal_data": ["aGk="]}, [{**text, "multimodal_data": ["aGk="]}]):
            error = refused(client, "/completion", {**PROMPT, "prompt": prompt})
            assert "/v1/chat/completions takes images" in error["message"]

    def test_other_names_of_limits(self, client: httpx.Client) -> None:
        same = answer(client, "/completion", {**PROMPT, "n_predict": 2, "n_probs": 3})
        other = {"prompt": PROMPT["prompt"], "temperature": 0, "max_completion_tokens": 2, "logprobs": 3}
        result = answer(client, "/completion", other)
        assert result["tokens_predicted"] == 2
        assert result["completion_probabilities"] == same["completion_probabilities"]
        assert refused(client, "/completion", {**other, "logprobs": -1})["param"] == "logprobs"

    def test_why_a_text_ended(self, client: httpx.Client) -> None:
        text = answer(client, "/completion", {**PROMPT, "n_predict": 16})["content"]
        word = text.split()[2]
        result = answer(client, "/completion", {**PROMPT, "n_predict": 16, "stop": ["zzz", word]})
        assert (result["stop_type"], result["stopping_word"]) == ("word", word)
        assert text.startswith(result["content"])
        assert word not in result["content"]
        eos = answer(client, "/completion", {**PROMPT, "logit_bias": [[2, 1000.0]]})
        assert (eos["stop_type"], eos["stopping_word"], eos["content"]) == ("eos", "", "")

    def test_a_full_context_is_named(self, client: httpx.Client) -> None:
        result = answer(client, "/completion", {"prompt": [5] * 505, "ignore_eos": True})
        assert (result["truncated"], result["stop_type"]) == (True, "limit")

    def test_no_tokens_compute_the_prompt_only(self, client: httpx.Client) -> None:
        prompt = [7, *range(300, 360)]
        result = answer(client, "/completion", {"prompt": prompt, "n_predict": 0})
        assert (result["content"], result["tokens_predicted"], result["stop_type"]) == ("", 0, "limit")
        assert result["generation_settings"]["n_predict"] == 0
        assert answer(client, "/completion", {**PROMPT, "prompt": prompt})["timings"]["cache_n"] >= 60
        *_, last = events(client, "/completion", {"prompt": prompt, "n_predict": 0})
        assert (last["content"], last["stop"]) == ("", True)

    def test_fields_of_the_answer_are_chosen(self, client: httpx.Client) -> None:
        paths = ["content", "timings/prompt_n", "generation_settings/n_predict", "prompt", "no/where", ""]
        result = answer(client, "/completion", {**PROMPT, "response_fields": paths})
        assert result.keys() == {"content", "timings/prompt_n", "generation_settings/n_predict", "prompt"}
        assert result["generation_settings/n_predict"] == 8

    def test_each_token_has_probabilities(self, client: httpx.Client) -> None:
        entries = answer(client, "/completion", {**PROMPT, "n_probs": 3})["completion_probabilities"]
        parts = [part for part in events(client, "/completion", {**PROMPT, "n_probs": 3}) if not part["stop"]]
        assert [entry for part in parts for entry in part["completion_probabilities"]] == entries
        assert len(entries) == 8
        for entry in entries:
            assert entry["id"] == entry["top_logprobs"][0]["id"]  # at temperature 0
            assert len(entry["top_logprobs"]) == 3
            assert entry["logprob"] <= 0
            token = entry["token"]
            assert bytes(entry["bytes"]).decode(errors="replace") == token or token.startswith("bytes:")

    def test_biases_are_a_list_or_an_object(self, client: httpx.Client) -> None:
        first = answer(client, "/completion", {**PROMPT, "return_tokens": True})["tokens"][0]
        for biases in ([[first, False]], [[first, -100]], {str(first): -1000}):
            body = {**PROMPT, "return_tokens": True, "logit_bias": biases}
            assert answer(client, "/completion", body)["tokens"][0] != first

    def test_a_seed_is_told_and_gives_the_same_text(self, client: httpx.Client) -> None:
        body = {"prompt": "Once", "n_predict": 12, "temperature": 2}
        result = answer(client, "/completion", body)
        seed = result["generation_settings"]["seed"]
        assert answer(client, "/completion", {**body, "seed": seed})["content"] == result["content"]

    def test_progress_and_timings_come_with_the_stream(self, client: httpx.Client) -> None:
        body = {**PROMPT, "prompt": [9] * 400, "return_progress": True, "timings_per_token": True}
        parts = events(client, "/completion", body)
        told = [event["prompt_progress"] for event in parts if "prompt_progress" in event]
        assert told
        assert told[-1]["total"] == told[-1]["processed"] == 400
        assert all("timings" in event for event in parts)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_ends_its_request(
        self, client: httpx.Client, engine: lp.Engine, stream: bool
    ) -> None:
        body = {"prompt": "Once", "n_predict": -1, "ignore_eos": True, "stream": stream, "n_cmpl": 128}
        before = engine.stats().n_completion_tokens
        leaving = HTTPConnection(client.base_url.host, client.base_url.port or 80, timeout=PATIENCE_S)
        leaving.request("POST", "/completion", json.dumps(body), {"content-type": "application/json"})
        wait_until(lambda: engine.stats().n_active > 0)
        leaving.close()
        wait_until(lambda: engine.stats().n_active + engine.stats().n_queued == 0)
        assert engine.stats().n_completion_tokens - before < 128 * 400


class TestInfill:
    def test_the_prompt_is_the_models(self, client: httpx.Client, engine: lp.Engine) -> None:
        body = {**GAP, "prompt": "a", "input_extra": EXTRA, "filename": "end.py"}
        result = answer(client, "/infill", body)
        prompt = engine.model.tokenize_fim(
            "Once upon\na", "\nthe end", extra=[("fox.py", EXTRA[0]["text"])], filename="end.py"
        )
        expected = engine.generate(prompt, lp.SamplingParams(max_tokens=8, temperature=0))
        assert result["content"] == expected.text
        assert result["prompt"] == engine.model.vocab.detokenize(prompt, unparse_special=True)
        assert (result["truncated"], result["tokens_evaluated"]) == (False, len(prompt))

    def test_llama_vims_form(self, client: httpx.Client) -> None:
        warm = client.post("/infill", json=VIM_WARM)
        assert (warm.status_code, warm.json()) == (200, {})
        unused = warm.headers["x-llamapipe-unused"].split(", ")
        assert set(unused) == {"id_slot", "t_max_prompt_ms", "temperature"}
        result = answer(client, "/infill", VIM)
        assert result.keys() == set(VIM["response_fields"])
        assert isinstance(result["content"], str)
        assert result["tokens_cached"] > 40
        assert result["timings/prompt_n"] < 40  # the other file was computed before

    def test_llama_vscodes_form(self, client: httpx.Client) -> None:
        results = answer(client, "/infill", VSCODE)
        assert [result["index"] for result in results] == [0, 1]
        assert all(result["stop"] for result in results)

    def test_a_long_file_is_cut(self, client: httpx.Client) -> None:
        result = answer(client, "/infill", {**GAP, "input_prefix": "A fox ran.\n" * 500})
        assert result["truncated"] is True
        assert result["tokens_evaluated"] <= fim_room(512, 8)

    def test_the_order_is_the_operators(self, engine: lp.Engine) -> None:
        with http_client(engine, fim_order="spm") as client:
            prompt = engine.model.tokenize_fim("Once", "end", order="spm")
            result = answer(
                client, "/infill", {"input_prefix": "Once", "input_suffix": "end", "n_predict": 1}
            )
            assert result["prompt"] == engine.model.vocab.detokenize(prompt, unparse_special=True)
            text = {"prompt": "Once", "suffix": "end", "max_tokens": 1, "return_token_ids": True}
            assert answer(client, "/v1/completions", text)["choices"][0]["prompt_token_ids"] == prompt

    def test_a_model_that_cannot(self, without: httpx.Client) -> None:
        error = refused(without, "/infill", GAP)
        assert "no tokens for filling in the middle" in error["message"]
        assert error["param"] == "input_prefix"

    def test_a_context_that_is_too_small(self, engine: lp.Engine) -> None:
        with (
            lp.Engine(engine.model, n_ctx=16, n_seq_max=1) as small,
            http_client(small) as client,
        ):
            assert "raise n_ctx" in refused(client, "/infill", {**GAP, "input_extra": EXTRA})["message"]

    @pytest.mark.parametrize(
        "extra", [{}, {"filename": "a"}, {"filename": 1, "text": "b"}, {"text": 4}, "a", 7, None]
    )
    def test_wrong_files_are_refused(self, client: httpx.Client, extra: Any) -> None:
        assert "input_extra" in refused(client, "/infill", {**GAP, "input_extra": [extra]})["param"]


class TestHostile:
    @pytest.mark.parametrize("path", ["/completion", "/infill"])
    @pytest.mark.parametrize(
        "change",
        [
            {"n_predict": -2}, {"n_predict": "8"}, {"n_predict": 10**30}, {"n_predict": True},
            {"n_cmpl": 0}, {"n_cmpl": 10**9}, {"n_cmpl": 129}, {"n_cmpl": 2, "n": 2}, {"n_probs": -1},
            {"n_probs": 1000},
            {"samplers": ["top_x"]}, {"samplers": "kzz"}, {"samplers": [1]}, {"samplers": ["top_k"] * 100},
            {"samplers": ["top_k"], "sampler_order": ["top_k"]}, {"n_indent": -1}, {"n_indent": 1.5},
            {"t_max_predict_ms": -2}, {"t_max_predict_ms": "1"}, {"response_fields": "content"},
            {"response_fields": [1]}, {"logit_bias": [[1]]}, {"logit_bias": [[1, True]]}, {"logit_bias": [[1, 2, 3]]},
            {"logit_bias": [["a", 1e9]]}, {"logit_bias": [[-1, 1]]}, {"logit_bias": [[10**9, 1]]},
            {"logit_bias": [["a" * 70_000, 1.0]]}, {"lora": [{"id": 0, "scale": 0.5}]}, {"n_keep": 5},
            {"min_keep": -1}, {"post_sampling_probs": True}, {"temperature": -1}, {"model": "other"},
            {"id_slot": 0.5}, {"id_slot": "a/b"}, {"unknown": 1}, {"stream": "yes"}, {"grammar": "root ::= ("},
            {"samplers": ["temperature", "infill"], "temperature": 0}, {"input_prefix": 1, "prompt": 5},
        ],
        ids=lambda change: "-".join(f"{name}={value!r}"[:30] for name, value in change.items()),
    )  # fmt: skip
    def test_a_bad_value_is_named(self, client: httpx.Client, path: str, change: dict[str, Any]) -> None:
        body = {**(PROMPT if path == "/completion" else GAP), **change}
        status = 404 if "model" in change else 400
        error = refused(client, path, body, status)
        word = str(error["param"]).partition(".")[0]
        known = {*change, "n", "prompt", "infill"}
        assert word in known or any(name in error["message"] for name in known)
        # A stream is refused before it begins, in the same words.
        assert refused(client, path, {**body, "stream": change.get("stream", True)}, status) == error

    @pytest.mark.parametrize("field", ["input_prefix", "input_suffix"])
    def test_texts_around_the_gap_are_required(self, client: httpx.Client, field: str) -> None:
        body = {name: value for name, value in GAP.items() if name != field}
        assert refused(client, "/infill", body)["param"] == field

    @pytest.mark.parametrize("field", ["input_prefix", "input_suffix", "prompt"])
    def test_long_texts_are_cut_and_others_are_not_kept_waiting(
        self, client: httpx.Client, field: str
    ) -> None:
        assert answer(client, "/infill", {**GAP, field: "ab\n" * 2_000_000})["truncated"]

    def test_many_files_are_cut(self, client: httpx.Client) -> None:
        assert answer(client, "/infill", {**GAP, "input_extra": [{"text": ""}] * 100_000})["truncated"]

    def test_huge_paths_of_fields(self, client: httpx.Client) -> None:
        body = {**PROMPT, "response_fields": ["/".join("x" * 50_000), "content/" * 1000, "content"] * 10}
        assert answer(client, "/completion", body).keys() == {"content"}

    def test_lone_surrogates_are_replaced(self, client: httpx.Client) -> None:
        """They stand for half a character: U+FFFD is taken in their place."""
        texts = []
        for half in ("\ud800", "\ufffd"):
            raw = json.dumps({**GAP, "input_prefix": half, "n_predict": 4, "temperature": 0})
            response = client.post("/infill", content=raw, headers={"content-type": "application/json"})
            assert response.status_code == 200
            texts.append(response.json()["content"])
        assert texts[0] == texts[1]


class TestLimits:
    def pushed(self, n_indent: int | None, text: str) -> str:
        limits, passed = TextLimits(n_indent), ""
        for character in text:
            passed += limits.push(character)
            assert not set(passed) - set(text)
            if limits.is_over:
                return passed
        return passed + limits.finish()

    @pytest.mark.parametrize(
        ("n_indent", "text", "expected"),
        [
            (0, "a\nb\n  c", "a\nb\n  c"),
            (None, "a\n\nb", "a\n\nb"),
            (2, "a\n  b\n    c\n d\n  e", "a\n  b\n    c\n "),
            (2, "a\n\t\tb\n", "a\n\t\tb\n"),
            (2, "a\n  b\n\nc", "a\n  b\n"),  # a blank line is not indented
            (4, "a\n   ", "a\n   "),
            (4, "return x", "return x"),
            (4, "\nx", "\n"),
        ],
    )
    def test_a_line_that_is_indented_less_ends_the_text(
        self, n_indent: int | None, text: str, expected: str
    ) -> None:
        assert self.pushed(n_indent, text) == expected
        limits = TextLimits(n_indent)  # the same in one piece
        assert limits.push(text) + ("" if limits.is_over else limits.finish()) == expected

    def test_a_request_ends_there(self, client: httpx.Client, engine: lp.Engine) -> None:
        body = {
            "prompt": "Once upon a time",
            "n_predict": 64,
            "n_indent": 3,
            "grammar": r'root ::= "a\n  b\n" .*',
        }
        result = answer(client, "/completion", {**body, "grammar": 'root ::= "a\\n   b\\n c" [a-z]*'})
        assert (result["content"], result["stop_type"]) == ("a\n   b\n ", "limit")
        parts = events(client, "/completion", {**body, "grammar": 'root ::= "a\\n   b\\n c" [a-z]*'})
        assert "".join(part["content"] for part in parts) == "a\n   b\n "
        wait_until(lambda: engine.stats().n_active == 0)


class TestSamplers:
    def test_names_are_llama_servers(self) -> None:
        assert sampler_names(["top-k", "typ_p", "TEMP", "adaptive_p", "minp", "nucleus"]) == [
            "top_k", "typical_p", "temperature", "min_p", "top_p",
        ]  # fmt: skip
        assert sampler_names("edskypmxt") == list(
            lp.SamplingParams(sampler_order=sampler_names("edskypmxt")).sampler_order or ()
        )
        assert sampler_names([]) == []

    def test_options_of_samplers_that_are_left_out_are_named(self, client: httpx.Client) -> None:
        body = {**PROMPT, "samplers": ["temperature"], "top_k": 3, "repetition_penalty": 1.2}
        response = client.post("/completion", json=body)
        assert response.status_code == 200
        assert response.headers["x-llamapipe-unused"] == "repetition_penalty, top_k"
        assert response.json()["generation_settings"]["samplers"] == ["temperature"]


class TestServer:
    def test_props_are_those_of_the_engine(self, client: httpx.Client, engine: lp.Engine) -> None:
        result = client.get("/props").json()
        assert (result["total_slots"], result["default_generation_settings"]["n_ctx"]) == (4, 512)
        assert result["default_generation_settings"]["params"]["n_predict"] == -1
        assert result["default_generation_settings"]["params"]["top_k"] == 40
        assert result["chat_template"] == engine.model.chat_template
        assert (result["bos_token"], result["eos_token"], result["model_alias"]) == ("<s>", "</s>", "demo")
        assert math.isfinite(result["default_generation_settings"]["params"]["seed"])

    def test_slots_say_whether_they_are_processing(self, client: httpx.Client) -> None:
        slots = client.get("/slots").json()
        assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
        assert not any(slot["is_processing"] for slot in slots)
        assert all(slot["speculative"] for slot in slots)
        body = {"prompt": "Once", "n_predict": -1, "ignore_eos": True, "stream": True, "n_cmpl": 4}
        with client.stream("POST", "/completion", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            with httpx.Client(base_url=client.base_url) as other:
                wait_until(lambda: any(slot["is_processing"] for slot in other.get("/slots").json()))
                if all(slot["is_processing"] for slot in other.get("/slots").json()):
                    assert other.get("/slots?fail_on_no_slot=1").status_code in (200, 503)
