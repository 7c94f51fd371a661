"""``llamapipe serve --models`` with real processes: loads, forwarding, failures, the end."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters import make_adapter
from support.bert_model import bert_model
from support.chat_templates import template
from support.control import PATIENCE_S, all_results, wait_until
from support.control import Worker as Thread
from support.fleet_servers import LONG, SHORT, PoolServer, pool_server, wait_for_end
from support.gguf_models import infilling_model

import llamapipe as lp
from llamapipe.server.routes.ollama_descriptions import shown_model, with_context_length

HELLO = [{"role": "user", "content": "Hello"}]
OPTIONS = ("--n-ctx", "8192", "--n-seq-max", "4")
TOML = """\
[models.small]
file = "small.gguf"
aliases = ["gpt-4o-mini", "second name"]
n_ctx = 512

[models."other:1b"]
file = "other.gguf"

[models.crashing]
file = "other.gguf"

[models.unasked]
file = "other.gguf"

[models.styled]
file = "other.gguf"
lora = { style = "style.gguf" }
draft = "small.gguf"

[models.fills]
file = "fills.gguf"
chat_template = "tools.jinja"

[models.damaged]
file = "damaged.gguf"

[models.bert]
file = "bert.gguf"
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("small", "other"):
        shutil.copy(lp.demo_model_path(), folder / f"{name}.gguf")
    (folder / "damaged.gguf").write_bytes(lp.demo_model_path().read_bytes()[:100_000])
    bert_model(folder / "bert.gguf")
    infilling_model(folder / "fills.gguf")
    make_adapter(folder / "style.gguf", folder / "other.gguf")
    (folder / "tools.jinja").write_text(template("Qwen-Qwen3-0.6B").text)
    (folder / "models.toml").write_text(TOML)
    return folder


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolServer]:
    log = tmp_path_factory.mktemp("log") / "log"
    with pool_server(models / "models.toml", *OPTIONS, "--ollama", log=log) as server:
        yield server


class TestForwarding:
    def test_requests_for_an_unloaded_model_share_one_load(self, server: PoolServer) -> None:
        assert server.states()["small"] == "unloaded"
        answers = all_results([Thread(lambda: server.ask("small")) for _ in range(6)])
        assert {answer.status_code for answer in answers} == {200}
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        assert len(server.pids("small")) == 1
        assert server.states()["small"] == "loaded"

    def test_all_names_of_a_model_are_one_process(self, server: PoolServer) -> None:
        for name in ("gpt-4o-mini", "second name", "small"):
            assert server.ask(name).json()["model"] == name
        assert len(server.pids("small")) == 1
        there = server.client.get("/v1/models/gpt-4o-mini").json()
        assert (there["id"], there["root"]) == ("gpt-4o-mini", "small")
        aliases = server.client.get("/v1/models/small").json()["aliases"]
        assert aliases == ["gpt-4o-mini", "second name"]

    def test_clients_that_choose_from_a_list_find_all_names(self, server: PoolServer) -> None:
        there = {entry["id"]: entry for entry in server.client.get("/v1/models").json()["data"]}
        assert there["gpt-4o-mini"]["root"] == "small"
        assert "root" not in there["small"]
        assert there["style"]["parent"] == "styled"
        tags = {entry["name"]: entry for entry in server.client.get("/api/tags").json()["models"]}
        assert tags["gpt-4o-mini:latest"]["digest"] == tags["small:latest"]["digest"]
        assert tags["style:latest"]["details"]["parent_model"] == "styled:latest"
        assert server.ask("gpt-4o-mini:latest").status_code == 200

    def test_the_name_of_an_adapter_means_its_model(self, server: PoolServer) -> None:
        answers = {name: server.ask(name, max_tokens=16).json() for name in ("styled", "style", "other:1b")}
        assert {name: answer["model"] for name, answer in answers.items()} == {name: name for name in answers}
        texts = {name: answer["choices"][0]["text"] for name, answer in answers.items()}
        assert texts["styled"] == texts["other:1b"] != texts["style"]
        assert len(server.pids("styled")) == 1
        assert server.client.get("/v1/models/styled").json()["adapters"] == ["style"]

    def test_options_of_the_file_come_before_those_of_the_command_line(self, server: PoolServer) -> None:
        for model, n_ctx in (("small", 512), ("other:1b", 8192)):
            info = server.client.get("/model_info", params={"model": model}).json()
            assert info["max_model_len"] == n_ctx
            assert info["n_seq_max"] == 4

    def test_the_process_of_an_embedding_model_has_no_other(self, server: PoolServer) -> None:
        assert (
            server.client.post("/v1/embeddings", json={"input": "Hello", "model": "bert"}).status_code == 200
        )
        info = server.client.get("/model_info", params={"model": "bert"}).json()
        assert info["model_path"] == "bert.gguf"
        assert info["is_generation"] is False
        assert "n_cells" not in info
        mapped = Path(f"/proc/{server.pids('bert')[-1]}/maps")
        if mapped.exists():
            assert "demo.gguf" not in mapped.read_text()

    def test_a_stream_is_the_answer_in_parts(self, server: PoolServer) -> None:
        whole = server.ask("small").json()["choices"][0]["text"]
        answer = server.ask("small", stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole

    def test_ollamas_routes(self, server: PoolServer) -> None:
        asked = {"messages": [{"role": "user", "content": "Hello"}], "options": {"num_predict": 3}}
        answer = server.client.post("/api/chat", json={"model": "other:1b", **asked})
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert lines[-1]["eval_count"] == 3
        assert server.client.post("/api/chat", json={"model": "small:latest", **asked}).status_code == 200
        missing = server.client.post("/api/chat", json={"model": "nothing", **asked})
        assert missing.status_code == 404
        assert "nothing" in missing.json()["error"]

    def test_ollamas_clients_cannot_change_the_list(self, server: PoolServer) -> None:
        pulled = server.client.post("/api/pull", json={"model": "unasked"})
        told = [json.loads(line)["status"] for line in pulled.text.splitlines()]
        assert told == ["pulling manifest", "success"]
        whole = server.client.post("/api/pull", json={"name": "unasked", "stream": False})
        assert whole.json() == {"status": "success"}
        assert server.client.post("/api/pull", json={"model": "nothing"}).status_code == 403
        for method, path, body in (
            ("POST", "/api/copy", {"source": "small", "destination": "x"}),
            ("DELETE", "/api/delete", {"model": "small"}),
        ):
            answer = server.client.request(method, path, json=body)
            assert answer.status_code == 403
            assert "--models" in answer.json()["error"] or "--allow-pull" in answer.json()["error"]

    def test_the_only_model_of_its_kind_needs_no_name(self, server: PoolServer) -> None:
        answer = server.client.post("/v1/embeddings", json={"input": "Hello", "model": "bert"})
        assert len(answer.json()["data"][0]["embedding"]) > 1
        other = server.client.post("/v1/embeddings", json={"input": "Hello"})
        assert {**other.json(), "id": ""} == {**answer.json(), "id": ""}
        missing = server.client.post("/v1/completions", json=SHORT)
        assert missing.status_code == 400
        assert "small" in missing.json()["error"]["message"]

    def test_a_model_does_what_it_can(self, server: PoolServer) -> None:
        """And is not loaded for what it cannot."""
        before = server.pids("bert"), server.pids("unasked")
        wrong = server.ask("bert")
        assert wrong.status_code == 400
        assert "embeds" in wrong.json()["error"]["message"]
        for path in ("/v1/embeddings", "/api/embed"):
            wrong = server.client.post(path, json={"input": "Hello", "model": "unasked"})
            assert wrong.status_code == 400
            assert "generates" in wrong.text
        assert (server.pids("bert"), server.pids("unasked")) == before

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            (b"{", 400), (b"[]", 400), (b'{"model": 5}', 400), (b'{"model": "nothing"}', 404),
            (b'{"model": "small", "max_tokens": "x", "prompt": "a"}', 400), (b"[" * 2000, 400),
        ],
    )  # fmt: skip
    def test_wrong_bodies_are_refused(self, server: PoolServer, body: bytes, status: int) -> None:
        answer = server.client.post("/v1/completions", content=body)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]

    def test_a_request_is_logged_once_and_its_times_are_kept(self, server: PoolServer) -> None:
        for name, model, status in (("logged-once", "small", 200), ("refused-once", "nobody", 404)):
            body = {"model": model, **SHORT}
            answer = server.client.post("/v1/completions", json=body, headers={"x-request-id": name})
            assert answer.status_code == status
            wait_until(partial(self._is_logged, server, name))
        server.client.get("/health")
        assert server.log().count("id=logged-once") == server.log().count("id=refused-once") == 1
        (line,) = (line for line in server.log().splitlines() if "id=logged-once" in line)
        assert "n_completion_tokens=" in line and "generate=" in line
        wait_until(lambda: any(request["id"] == "logged-once" for request in self._requests(server)))
        (logged,) = (request for request in self._requests(server) if request["id"] == "logged-once")
        assert logged["model"] == "small" and logged["phases_ms"]["generate"] > 0

    @staticmethod
    def _is_logged(server: PoolServer, name: str) -> bool:
        return f"id={name}" in server.log()

    @staticmethod
    def _requests(server: PoolServer) -> list[dict[str, Any]]:
        return list(server.client.get("/requests").json()["data"])

    def test_ids_are_those_of_the_client(self, server: PoolServer) -> None:
        answer = server.client.post(
            "/v1/completions", json={"model": "small", **SHORT}, headers={"x-request-id": "mine"}
        )
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert len(answer.headers.get_list("date")) == 1

    def test_a_client_that_hangs_up_frees_its_slot(self, server: PoolServer) -> None:
        generated = 'llamapipe_generated_tokens_total{model="other:1b"}'
        before = server.metric(generated)
        asked = {"model": "other:1b", **LONG, "max_tokens": 8000}
        with server.client.stream("POST", "/v1/completions", json=asked) as answer:
            next(answer.iter_lines())
        wait_until(lambda: server.metric('llamapipe_requests_running{model="other:1b"}') == 0)
        assert 0 < server.metric(generated) - before < 8000

    def test_many_requests_at_once(self, server: PoolServer) -> None:
        async def ask_all() -> list[int]:
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
                asked = [
                    client.post("/v1/completions", json={"model": "other:1b", **SHORT}) for _ in range(200)
                ]
                return [answer.status_code for answer in await asyncio.gather(*asked)]

        assert asyncio.run(ask_all()) == [200] * 200

    def test_a_client_that_does_not_read_slows_only_itself(self, server: PoolServer) -> None:
        asked = {"model": "other:1b", **LONG, "max_tokens": 8000, "logprobs": 5}
        with server.client.stream("POST", "/v1/completions", json=asked) as answer:
            next(answer.iter_lines())
            with httpx.Client(base_url=server.url, timeout=120) as other:
                for name in ("small", "other:1b"):
                    body = {"model": name, **SHORT}
                    assert other.post("/v1/completions", json=body).status_code == 200

    def test_metrics_tell_models_apart(self, server: PoolServer) -> None:
        names = [f'llamapipe_generated_tokens_total{{model="{name}"}}' for name in ("small", "other:1b")]
        before = [server.metric(name) for name in names]
        server.ask("small")
        assert [server.metric(name) for name in names] == [before[0] + 4, before[1]]
        assert server.metric('llamapipe_model_loaded{model="small"}') == 1

    def test_what_a_model_can_do_is_known_without_loading_it(self, server: PoolServer, models: Path) -> None:
        def shown(name: str) -> dict[str, Any]:
            answer: dict[str, Any] = server.client.post("/api/show", json={"model": name}).json()
            return answer

        def served(name: str) -> int:
            return int(server.client.get(f"/v1/models/{name}").json()["context_length"])

        with lp.Model(models / "other.gguf") as model:
            assert shown("unasked") == with_context_length(
                shown_model(model, "completion"), served("unasked")
            )
        with lp.Model(models / "bert.gguf") as model:
            assert shown("bert") == with_context_length(shown_model(model, "embedding"), served("bert"))
        there = {entry["name"]: entry for entry in server.client.get("/api/tags").json()["models"]}
        able = ["completion", "insert", "tools", "thinking"]
        assert there["fills:latest"]["capabilities"] == shown("fills")["capabilities"] == able
        assert "damaged:latest" not in there
        assert server.client.post("/api/show", json={"model": "damaged"}).status_code == 404
        assert server.pids("unasked") == server.pids("fills") == []

    def test_a_gap_goes_to_the_only_model_that_fills_in(self, server: PoolServer) -> None:
        fills = {"input_prefix": "Once upon", "input_suffix": " there was", "n_predict": 3, "temperature": 0}
        asked = [
            server.client.post("/infill", json=body).json() for body in (fills, {**fills, "model": "fills"})
        ]
        assert asked[0]["content"] == asked[1]["content"] and asked[0]["model"] == "fills"
        body = {"prompt": "Once upon", "suffix": " there was", "max_tokens": 3, "temperature": 0}
        assert server.client.post("/v1/fim/completions", json=body).json()["model"] == "fills"


class TestFailures:
    def test_a_failed_load_is_remembered_with_its_reason(self, server: PoolServer) -> None:
        answers = [server.ask("damaged") for _ in range(3)]
        assert {answer.status_code for answer in answers} == {503}
        assert len({answer.json()["error"]["message"] for answer in answers}) == 1
        assert "truncated" in answers[0].json()["error"]["message"]
        there = server.client.get("/v1/models/damaged").json()["status"]
        assert there["value"] == "unloaded"
        assert there["failed"]
        assert "truncated" in there["error"]

    def test_a_killed_process_costs_its_own_requests_and_comes_back(self, server: PoolServer) -> None:
        server.ask("small")
        server.ask("crashing")
        with (
            httpx.Client(base_url=server.url, timeout=120) as client,
            httpx.Client(base_url=server.url, timeout=120) as others,
            client.stream("POST", "/v1/completions", json={"model": "crashing", **LONG}) as lost,
            others.stream(
                "POST", "/v1/completions", json={"model": "small", **LONG, "max_tokens": 200}
            ) as kept,
        ):
            lost_lines, kept_lines = lost.iter_lines(), kept.iter_lines()
            next(lost_lines)
            next(kept_lines)
            os.kill(server.pids("crashing")[-1], signal.SIGKILL)
            last = [line for line in lost_lines if line][-1]
            assert "ended" in json.loads(last.removeprefix("data: "))["error"]["message"]
            assert [line for line in kept_lines if line][-1] == "data: [DONE]"
        assert server.ask("crashing").status_code == 200
        assert len(server.pids("crashing")) == 2
        assert len(server.pids("small")) == 1

    def test_a_process_that_is_told_to_end_answers_what_it_has_and_the_next_one_the_rest(
        self, server: PoolServer
    ) -> None:
        asked = {"model": "crashing", **LONG, "max_tokens": 8000}
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as other:
            with other.stream("POST", "/v1/completions", json=asked) as answer:
                lines = answer.iter_lines()
                next(lines)
                pid = server.pids("crashing")[-1]
                os.kill(pid, signal.SIGTERM)
                wait_until(lambda: server.states()["crashing"] != "loaded")
                assert server.states()["crashing"] == "unloading"
                waiting = Thread(lambda: server.ask("crashing").status_code)
                assert all("error" not in next(lines) for _ in range(40))
            assert waiting.result() == 200
        assert server.pids("crashing")[-1] != pid

    def test_requests_around_the_end_of_a_process_are_answered(self, server: PoolServer) -> None:
        whole = server.ask("crashing", max_tokens=8).json()["choices"][0]["text"]
        done: Counter[str] = Counter()
        step = threading.Semaphore(0)

        def client(is_stream: bool) -> None:
            with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as http:
                for _ in range(30):
                    body = {"model": "crashing", **SHORT, "max_tokens": 8, "stream": is_stream}
                    answer = http.post("/v1/completions", json=body)
                    outcome = str(answer.status_code)
                    if is_stream:
                        last = [line for line in answer.text.splitlines() if line][-1].removeprefix("data: ")
                        outcome += " whole" if last == "[DONE]" else f" {json.loads(last)['error']['code']}"
                    elif answer.status_code == 200:
                        assert answer.json()["choices"][0]["text"] == whole
                    done[outcome] += 1
                    step.release()

        clients = [Thread(lambda is_stream=is_stream: client(is_stream)) for is_stream in (True, False) * 2]
        for _ in range(4):
            for _ in range(15):
                assert step.acquire(timeout=PATIENCE_S)
            server.wait_for(crashing="loaded")
            os.kill(server.pids("crashing")[-1], signal.SIGKILL)
        all_results(clients)
        assert set(done) <= {"200", "200 whole", "200 model_ended"}, done
        assert done["200"] == 60 and done["200 whole"] > 40

    @staticmethod
    def _has_started(server: PoolServer, n: int) -> bool:
        return len(server.pids("crashing")) == n

    def test_a_request_ends_no_more_than_two_processes(self, server: PoolServer) -> None:
        wait_until(lambda: server.ask("crashing").status_code == 200)
        n = len(server.pids("crashing"))
        asked = Thread(lambda: server.ask("crashing", **{**LONG, "stream": False, "max_tokens": 8000}))
        for i in range(2):
            wait_until(partial(self._has_started, server, n + i))
            server.wait_for(crashing="loaded")
            wait_until(lambda: server.client.get("/v1/models/crashing").json()["n_requests"] == 1)
            assert asked.is_alive()
            os.kill(server.pids("crashing")[-1], signal.SIGKILL)
        answer = asked.result()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_ended"
        assert len(server.pids("crashing")) == n + 1
        assert server.ask("crashing").status_code == 200

    @pytest.mark.parametrize(
        ("path", "body", "error"),
        [
            ("/api/chat", {"messages": HELLO}, '{"error":"'),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 4000}, '"type":"error"'),
            ("/v1/responses", {"input": "Hello", "max_output_tokens": 4000}, '"code":"model_ended"'),
        ],
    )  # fmt: skip
    def test_the_end_of_a_process_is_told_in_each_apis_form(
        self, server: PoolServer, path: str, body: dict[str, Any], error: str
    ) -> None:
        last = ""
        while error not in last:  # an answer may also end by itself before the process does
            wait_until(lambda: server.ask("crashing").status_code == 200)
            body |= {"model": "crashing", "stream": True}
            with server.client.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                lines = answer.iter_lines()
                next(lines)
                os.kill(server.pids("crashing")[-1], signal.SIGKILL)
                last = [line for line in lines if line][-1]
        assert "the next request starts it again" in last

    def test_an_unload_lets_streams_end_and_new_requests_wait_for_the_next_process(
        self, server: PoolServer
    ) -> None:
        # The front process may not know yet that the one before was killed.
        wait_until(lambda: server.ask("crashing").status_code == 200)
        n = len(server.pids("crashing"))
        asked = {"model": "crashing", **LONG, "max_tokens": 500}
        with (
            httpx.Client(base_url=server.url, timeout=120) as client,
            client.stream("POST", "/v1/completions", json=asked) as kept,
        ):
            lines = kept.iter_lines()
            next(lines)
            unloaded = server.client.post("/models/unload", json={"model": "crashing"})
            assert unloaded.json() == {"success": True}
            later = Thread(lambda: server.ask("crashing"))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert later.result().status_code == 200
        assert len(server.pids("crashing")) == n + 1
        told = server.client.get("/requests").json()["data"]
        assert 500 in [entry["n_completion_tokens"] for entry in told]  # by the process that ended


class TestLimits:
    def test_keys_are_checked_by_the_front_process(self, models: Path, tmp_path: Path) -> None:
        (tmp_path / "keys").write_text("first\nsecond\n")
        options = (*OPTIONS, "--api-key-file", str(tmp_path / "keys"), "--max-body-bytes", "1000")
        with pool_server(models / "models.toml", *options, log=tmp_path / "log") as server:
            assert server.ask("small").status_code == 401
            assert server.client.get("/v1/models").status_code == 401
            assert server.pids("small") == []
            server.client.headers["authorization"] = "Bearer first"
            assert server.ask("small", prompt="x" * 1000).status_code == 413
            asked = {"prompt": "Once upon a time, there was a child. " * 12, "max_tokens": 1}
            cached = [self._n_cached(server, key, asked) for key in ("first", "first", "second")]
            assert cached[0] == cached[2] == 0  # each key has a cache
            assert cached[1] > 0

    @staticmethod
    def _n_cached(server: PoolServer, key: str, asked: dict[str, object]) -> int:
        answer = server.client.post(
            "/v1/completions", json={"model": "small", **asked}, headers={"authorization": f"Bearer {key}"}
        )
        n: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return n

    def test_foreign_pages_and_hosts_are_refused(self, server: PoolServer) -> None:
        body = {"model": "small", **SHORT}
        for headers in ({"origin": "https://example.com"}, {"host": "example.com"}):
            assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 403
        near = server.client.post("/v1/completions", json=body, headers={"origin": "http://localhost:3000"})
        assert near.status_code == 200
        assert near.headers.get_list("access-control-allow-origin") == ["http://localhost:3000"]


def describers(pid: int) -> list[int]:
    """The processes with which a front process finds out what models can do."""
    pids = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with suppress(OSError):  # it has ended
                if b"_describe" in Path(f"/proc/{child}/cmdline").read_bytes():
                    pids.append(int(child))
    return pids


def test_what_models_can_do_is_found_out_before_a_client_asks(models: Path, tmp_path: Path) -> None:
    with pool_server(models / "models.toml", *OPTIONS, "--ollama", log=tmp_path / "log") as server:
        wait_until(lambda: describers(server.process.pid))
        pids = describers(server.process.pid)
        server.process.terminate()
        assert server.process.wait(60) == 0
        wait_for_end(pids)


def test_the_end_drains_and_leaves_no_process(models: Path, tmp_path: Path) -> None:
    with pool_server(models / "models.toml", *OPTIONS, log=tmp_path / "log") as server:
        server.ask("small")
        asked = {"model": "small", **LONG, "max_tokens": 300}
        with server.client.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.terminate()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(60) == 0
        wait_for_end(server.pids("small"))


def test_who_waits_for_a_load_is_told_that_the_server_ends(models: Path, tmp_path: Path) -> None:
    with (
        pool_server(models / "models.toml", *OPTIONS, log=tmp_path / "log") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as other,
    ):
        asked = Thread(lambda: server.ask("small"))
        wait_until(lambda: server.pids("small"))
        (pid,) = server.pids("small")
        os.kill(pid, signal.SIGSTOP)
        try:
            assert other.get("/v1/models/small").json()["status"]["value"] == "loading"
            for _ in range(2):
                server.process.send_signal(signal.SIGINT)
                wait_until(lambda: is_refused(server.url))  # the port is closed: it heeded the first one
            answer = asked.result()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the server is shutting down"
        assert server.process.wait(60) == 0
        wait_for_end([pid])


def is_refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


def test_processes_end_with_a_front_process_that_is_killed(models: Path, tmp_path: Path) -> None:
    with pool_server(models / "models.toml", *OPTIONS, log=tmp_path / "log") as server:
        server.ask("small")
        server.process.kill()
        wait_for_end(server.pids("small"))


def test_sighup_reads_the_list_again(models: Path, tmp_path: Path) -> None:
    listed = models / "changing.toml"
    listed.write_text("[models.kept]\nfile = 'small.gguf'\n[models.gone]\nfile = 'other.gguf'\n")
    with pool_server(listed, *OPTIONS, log=tmp_path / "log") as server:
        server.ask("kept")
        asked = {"model": "gone", **LONG, "max_tokens": 300}
        with server.client.stream("POST", "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            listed.write_text("[models.kept]\nfile = 'small.gguf'\n[models.new]\nfile = 'other.gguf'\n")
            server.process.send_signal(signal.SIGHUP)
            with httpx.Client(base_url=server.url, timeout=120) as other:
                wait_until(lambda: other.get("/v1/models/new").status_code == 200)
                assert other.post("/v1/completions", json={**SHORT, "model": "gone"}).status_code == 404
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.states() == {"kept": "loaded", "new": "unloaded"}
        assert server.ask("new").status_code == 200
        wait_for_end(server.pids("gone"))
        listed.write_text("nonsense")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "stay as they are" in server.log())
        assert server.ask("kept").status_code == 200
        assert len(server.pids("kept")) == 1


class Watcher:
    """A client of ``/models/sse``, which reads as llama.cpp's own tests of its router do."""

    def __init__(self, server: PoolServer) -> None:
        self.events: list[dict[str, Any]] = []
        self._client = httpx.Client(base_url=server.url, timeout=120)
        self._stream = self._client.stream("GET", "/models/sse")
        self.answer = self._stream.__enter__()  # from here on it is told everything
        self._thread = Thread(self._read)

    def _read(self) -> None:
        for line in self.answer.iter_lines():
            if line.startswith("data: "):
                self.events.append(json.loads(line.removeprefix("data: ")))

    def wait_for(self, model: str, event: str, status: str | None = None) -> dict[str, Any]:
        events: list[dict[str, Any]] = []

        def is_there() -> bool:
            events[:] = [
                told
                for told in self.events
                if (told["model"], told["event"]) == (model, event)
                and (status is None or told["data"]["status"] == status)
            ]
            return bool(events)

        wait_until(is_there)
        return events[-1]

    def close(self) -> None:
        """Waits for the end of the stream."""
        self._thread.result()
        self._stream.__exit__(None, None, None)
        self._client.close()


def test_a_client_lets_the_list_be_read_again(models: Path, tmp_path: Path) -> None:
    listed = models / "reloaded.toml"
    listed.write_text("[models.kept]\nfile = 'small.gguf'\n[models.gone]\nfile = 'other.gguf'\n")
    with pool_server(listed, *OPTIONS, log=tmp_path / "log") as server:
        server.ask("kept")
        listed.write_text("[models.kept]\nfile = 'small.gguf'\n[models.new]\nfile = 'bert.gguf'\n")
        assert set(server.states()) == {"kept", "gone"}
        data = server.client.get("/models", params={"reload": "1"}).json()["data"]
        there = {entry["id"]: entry for entry in data}
        assert {name: entry["status"]["value"] for name, entry in there.items()} == {
            "kept": "loaded",
            "new": "unloaded",
        }
        kept = there["kept"]
        assert kept["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
        assert (kept["context_length"], kept["tags"], kept["can_remove"]) == (8192, [], False)
        listed.write_text("[models.kept]\nfile = 3\n")
        answer = server.client.get("/models", params={"reload": "1"})
        assert (
            answer.status_code == 500 and "the models stay as they are" in answer.json()["error"]["message"]
        )
        assert str(listed) not in answer.text and str(listed) in server.log()
        assert set(server.states()) == {"kept", "new"}
        assert len(server.pids("kept")) == 1


def test_who_watches_is_told_of_states_and_of_the_list(models: Path, tmp_path: Path) -> None:
    listed = models / "watched.toml"
    listed.write_text(
        "[models.a]\nfile = 'small.gguf'\n[models.b]\nfile = 'other.gguf'\n[models.bad]\nfile = 'damaged.gguf'\n"
    )
    options = ("--ollama", "--allow-pull", "--allow-delete")
    with pool_server(listed, *OPTIONS, *options, log=tmp_path / "log") as server:
        watcher = Watcher(server)
        assert watcher.answer.headers["content-type"].startswith("text/event-stream")
        server.ask("a")
        watcher.wait_for("a", "model_status", "loaded")
        loads = [event["data"] for event in watcher.events if event["data"]["status"] == "loading"]
        assert loads[0]["progress"]["stages"] == ["text_model"]
        values = [load["progress"]["value"] for load in loads]
        assert values == sorted(values)
        os.kill(server.pids("a")[0], signal.SIGKILL)
        ended = watcher.wait_for("a", "model_status", "unloaded")["data"]
        assert ended["exit_code"] != 0
        assert "signal 9" in ended["error"]
        server.ask("a")
        server.client.post("/models/unload", json={"model": "a"})
        wait_until(lambda: watcher.events[-1]["data"] == {"status": "unloaded", "exit_code": 0})
        for n in (1, 2):  # each failure is told, also one that is remembered
            server.client.post("/models/load", json={"model": "bad"})
            wait_until(
                lambda n=n: (
                    n  # type: ignore[misc]
                    == sum(
                        "error" in event.get("data", {}) and event["model"] == "bad"
                        for event in watcher.events
                    )
                )
            )
        server.client.post("/api/copy", json={"source": "a", "destination": "copied"})
        watcher.wait_for("*", "models_reload")
        listed.write_text("[models.a]\nfile = 'small.gguf'\nkeep = true\naliases = ['alias']\n")
        server.process.send_signal(signal.SIGHUP)
        watcher.wait_for("b", "model_remove")
        server.process.terminate()
        watcher.close()
        assert server.process.wait(60) == 0


def test_copies_are_names_until_the_server_ends(models: Path, tmp_path: Path) -> None:
    listed = models / "copied.toml"
    text = "[models.a]\nfile = 'small.gguf'\n[models.styled]\nfile = 'other.gguf'\nlora = {style = 'style.gguf'}\n"
    listed.write_text(text)
    options = ("--ollama", "--allow-pull", "--allow-delete")
    with pool_server(listed, *OPTIONS, *options, log=tmp_path / "log") as server:

        def copy(source: str, destination: str) -> int:
            return server.client.post(
                "/api/copy", json={"source": source, "destination": destination}
            ).status_code

        def delete(name: str) -> int:
            return server.client.request("DELETE", "/api/delete", json={"model": name}).status_code

        def names() -> set[str]:
            return {entry["name"] for entry in server.client.get("/api/tags").json()["models"]}

        server.ask("a")
        assert copy("a", "user/mine") == copy("a:latest", "user/mine:latest") == copy("a", "a") == 200
        asked = {"prompt": "Once", "stream": False, "options": {"num_predict": 2}}
        for name in ("user/mine", "user/mine:latest"):
            answer = server.client.post("/api/generate", json={"model": name, **asked})
            assert (answer.status_code, answer.json()["model"]) == (200, name)
            assert server.ask(name).json()["model"] == name
            assert server.client.post("/api/show", json={"model": name}).status_code == 200
        assert len(server.pids("a")) == 1  # the process that was there
        assert "user/mine:latest" in names()
        assert copy("nothing", "x") == 404
        assert copy("a", "no name!") == copy("style", "x") == 400
        assert copy("a", "styled") == copy("a", "style") == 403  # names of the list
        assert copy("styled", "user/mine") == 200  # moved, as Ollama does
        assert server.ask("user/mine").status_code == 200
        assert len(server.pids("styled")) == 1
        listed.write_text(text + "ttl = 1000\n[models.new]\nfile = 'small.gguf'\naliases = ['third']\n")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "third:latest" in names())
        assert server.ask("user/mine").status_code == 200
        assert len(server.pids("styled")) == len(server.pids("a")) == 1  # a ttl needs no other process
        listed.write_text(text + "[models.new]\nfile = 'small.gguf'\naliases = ['user/mine']\n")
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.client.get("/v1/models/user/mine").json()["root"] == "new")
        assert delete("user/mine") == 403  # the list has it now
        assert copy("a", "gone") == delete("gone") == 200
        assert delete("gone") == server.ask("gone").status_code == 404
        assert delete("a") == 403


BROKEN = """\
import os, sys
if "--worker" in sys.orig_argv:
    from llamapipe._engine.runtime.executor import StepExecutor
    launch = StepExecutor.launch
    def broken(*arguments):
        if os.path.exists(os.environ["BREAK"]):
            os.unlink(os.environ["BREAK"])
            raise OSError("the device is lost")
        return launch(*arguments)
    StepExecutor.launch = broken
"""


ENDING = """\
import os, sys
if "--worker" in sys.orig_argv:
    open(os.environ["END"]).close()
    os._exit(7)
"""


def test_all_requests_that_wait_for_a_load_are_told_why_it_failed(models: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(ENDING)
    path = os.pathsep.join([str(tmp_path), str(Path(lp.__file__).parent.parent)])
    os.mkfifo(tmp_path / "end")  # a process that opens it waits for the other end
    variables = {"PYTHONPATH": path, "END": str(tmp_path / "end")}
    with pool_server(models / "models.toml", *OPTIONS, log=tmp_path / "log", **variables) as server:
        asking = [Thread(lambda: server.ask("small")) for _ in range(12)]
        wait_until(lambda: server.client.get("/v1/models/small").json()["n_requests"] == len(asking))
        (tmp_path / "end").write_text("")
        for answer in all_results(asking):
            assert answer.status_code == 503
            assert "its process ended with status 7" in answer.json()["error"]["message"]
        assert "Traceback" not in server.log()


def test_a_model_whose_engine_has_failed_is_started_again(models: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path), str(Path(lp.__file__).parent.parent)])
    variables = {"PYTHONPATH": path, "BREAK": str(tmp_path / "break")}
    with pool_server(models / "models.toml", *OPTIONS, log=tmp_path / "log", **variables) as server:
        assert server.ask("small").status_code == server.ask("other:1b").status_code == 200
        (tmp_path / "break").touch()
        assert server.ask("small").status_code == 500
        server.wait_for(small="unloaded")
        status = server.client.get("/v1/models/small").json()["status"]
        assert "the device is lost" in status["error"]
        assert server.ask("small").status_code == 200
        assert len(server.pids("small")) == 2
        assert len(server.pids("other:1b")) == 1
