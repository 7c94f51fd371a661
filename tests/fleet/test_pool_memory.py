"""A pool's budget of memory: who makes room for whom, and when a model is ended."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic

import httpx
import pytest
from support.control import PATIENCE_S, until, wait_until
from support.fleet_servers import LONG, PoolServer, has_ended, pool_server

import llamapipe as lp
from llamapipe.cli import main
from llamapipe.cli._models_file import entries_of, look, read_facts
from llamapipe.cli.options import byte_count, byte_count_or_zero
from llamapipe.cli.parser import UsageError
from llamapipe.fleet.budget import Budget, Memory, Tenure
from llamapipe.fleet.catalog import ModelEntry
from llamapipe.fleet.command import command_with
from llamapipe.fleet.placement import Placement
from llamapipe.fleet.pool import _PATIENCE_S, ModelState, Pool
from llamapipe.host.cores import CoreShare
from llamapipe.host.memory import resident_bytes
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.ollama_models import kept_s

OPTIONS = ("--n-ctx", "8192", "--n-seq-max", "2")
COMMON = {"n_ctx": 8192, "n_seq_max": 2}


def held(n_bytes: int, used_at: float, may_end: bool, gpu_bytes: int = 0) -> Tenure:
    return Tenure(Memory(n_bytes, gpu_bytes), used_at, may_end)


class TestWhoGoes:
    @pytest.mark.parametrize(
        ("needed", "budget", "there", "expected"),
        [
            (10, None, [held(100, 0, True)], []),
            (10, 20, [], []),
            (10, 20, [held(10, 0, False)], []),
            (10, 20, [held(10, 2, True), held(10, 1, True)], [1]),  # the least recently used
            (20, 20, [held(10, 2, True), held(10, 1, True)], [1, 0]),
            (5, 20, [held(10, 2, True), held(8, 1, True)], [1]),  # no more than needed
            (10, 20, [held(10, 1, False), held(10, 2, True)], [1]),  # never a busy one
            (10, 20, [held(15, 1, False), held(5, 2, True)], None),
        ],
    )
    def test_choose(
        self, needed: int, budget: int | None, there: list[Tenure], expected: list[int] | None
    ) -> None:
        assert Budget(budget).choose(Memory(needed), there) == expected

    @pytest.mark.parametrize(
        ("needed", "budget", "there", "expected"),
        [
            (Memory(1, 10), Budget(), [held(1, 0, True, 100)], []),
            (
                Memory(1, 10),
                Budget(None, 20),
                [held(9, 1, True), held(1, 2, True, 15)],
                [1],
            ),  # only what helps
            (Memory(10, 10), Budget(20, 20), [held(15, 1, True), held(1, 2, True, 15)], [0, 1]),
            (Memory(10, 10), Budget(20, 20), [held(15, 1, True, 15), held(1, 2, True, 5)], [0]),
            (Memory(0, 10), Budget(20, 20), [held(15, 1, True), held(1, 2, False, 15)], None),
        ],
    )
    def test_gpus(
        self, needed: Memory, budget: Budget, there: list[Tenure], expected: list[int] | None
    ) -> None:
        assert budget.choose(needed, there) == expected

    @pytest.mark.parametrize(
        ("is_gpu", "budget_text", "options"),
        [
            (False, "3.0 GiB are allowed", "raise --memory, or give it a smaller n_ctx or n_seq_max"),
            (True, "3.0 GiB of the memory", "give it a smaller n_gpu_layers, n_ctx or n_seq_max"),
        ],
    )
    def test_refusals_name_need_limit_and_options(self, is_gpu: bool, budget_text: str, options: str) -> None:
        gib = 2**30

        def why(needed: int, limit: int | None, pinned: int) -> str | None:
            if is_gpu:
                return Budget(None, limit).refusal(Memory(1, needed), Memory(1, pinned))
            return Budget(limit).refusal(Memory(needed, 1), Memory(pinned, 1))

        assert why(4 * gib, None, 0) is why(3 * gib, 3 * gib, 0) is why(2 * gib, 3 * gib, gib) is None
        text = why(5 * gib // 2, 3 * gib, gib)
        assert text is not None and text.endswith(options)
        assert "2.5 GiB" in text and budget_text in text and "pinned models have 1.0 GiB" in text
        assert "pinned" not in (why(4 * gib, 3 * gib, 0) or "pinned")


class TestTheList:
    def written(self, folder: Path, text: str) -> Path:
        (folder / "models.toml").write_text(text)
        return folder / "models.toml"

    def test_a_folder_has_a_model_for_each_file(self, tmp_path: Path) -> None:
        (tmp_path / "split").mkdir()
        for name in (
            "a.gguf",
            "mmproj-a.gguf",
            "notes.txt",
            "split/b-00001-of-00002.gguf",
            "split/b-00002-of-00002.gguf",
        ):
            (tmp_path / name).touch()
        assert {entry.name: Path(entry.file).name for entry in entries_of([str(tmp_path)])} == {
            "a": "a.gguf",
            "b": "b-00001-of-00002.gguf",
        }
        (tmp_path / "split" / "a.gguf").touch()
        with pytest.raises(UsageError, match="one name"):
            entries_of([str(tmp_path)])

    def test_a_table_says_all(self, tmp_path: Path) -> None:
        text = """
            [models."qwen2.5:7b"]
            file = "hf:a/b/c.gguf"
            aliases = ["gpt"]
            n-ctx = 100
            type_k = "q8_0"
            max_itl_ms = 20
            use_mmap = false
            keep = true
            preload = true
            ttl = 60
            embeddings = false
            draft = "small.gguf"
            mmproj = "eyes.gguf"
            lora = { style = "style.gguf" }
            cache_dir = "kept"
        """
        assert entries_of([str(self.written(tmp_path, text))]) == [
            ModelEntry(
                "qwen2.5:7b", "hf:a/b/c.gguf", ("gpt",),
                {"n_ctx": 100, "type_k": "q8_0", "max_itl_ms": 20.0, "use_mmap": False,
                 "draft": str(tmp_path / "small.gguf"), "mmproj": str(tmp_path / "eyes.gguf"),
                 "cache_dir": str(tmp_path / "kept"),
                 "lora": [("style", str(tmp_path / "style.gguf"))]},
                False, True, True, 60.0, ("style",),
            )
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "table"),
            ("x", "no TOML"),
            ("y = 1\n[models.a]\nfile = 'a'", "'y'"),
            ("models = 1", "table"),
            ("[models.a]", "file is missing"),
            ("[models.a]\nfile = 'a'\nn_ctxx = 1", "did you mean n_ctx"),
            ("[models.a]\nfile = 'a'\nn_ctx = 'x'", "must be a number"),
            ("[models.a]\nfile = 'a'\nn_ctx = 1.5", "n_ctx"),
            ("[models.a]\nfile = 'a'\nn_ctx = -5", "n_ctx is -5; it must be 0 or more"),
            ("[models.a]\nfile = 'a'\nmax_itl_ms = nan", "0 or more"),
            ("[models.a]\nfile = 'a'\naliases = 'b'", "list of names"),
            ("[models.a]\nfile = 'a'\nttl = -1", "ttl"),
            ("[models.a]\nfile = 'a'\nttl = inf", "ttl must be seconds .* to 100000000"),
            ("[models.a]\nfile = 'a'\nttl = nan", "ttl must be seconds"),
            (f"[models.a]\nfile = 'a'\nttl = {10**400}", "ttl must be seconds"),
            (f"[models.a]\nfile = 'a'\nttl = {'9' * 5000}", "no TOML"),
            (f"[models.a]\nfile = {'[' * 5000}", "no TOML"),
            ("[models.a]\nfile = 'a'\nn_ctx = 1\nn-ctx = 2", "n-ctx and n_ctx, which are one option"),
            ("[models.a]\nfile = 'a'\nrpc = 'host:1'", r'list of texts, such as \["HOST:PORT"\]'),
            ("[models.a]\nfile = 'a'\nrpc = [1979-05-27]", "list of texts"),
            ("[models.a]\nfile = 'a'\nkeep = 1", "true or false"),
            ("[models.a]\nfile = 'a'\ntype_k = 1", "text"),
            ("[models.a]\nfile = 'a'\nlora = 'x'", "table of names"),
            ("[models.a]\nfile = 'a'\ndraft = 1", "text"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path: Path, text: str, expected: str) -> None:
        with pytest.raises(UsageError, match=expected):
            entries_of([str(self.written(tmp_path, text))])

    def test_two_models_have_no_common_name(self) -> None:
        entries = [ModelEntry("a", "x"), ModelEntry("b", "y", ("a",))]
        with pytest.raises(ValueError, match="'a'"):
            Pool(entries, [], Placement(CoreShare((), 1)), None)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (["-m", "demo"], "-m and --models"),
            (["--workers", "2"], "--workers and --models"),
            (["--draft", "demo"], "--draft and --models"),
            (["--lora", "a=b"], "--lora and --models"),
            (["--memory", "900TiB"], "at most"),
            (["--memory", "x"], "not a size"),
        ],
    )
    def test_options_that_do_not_go_together(
        self, tmp_path: Path, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = self.written(tmp_path, "[models.a]\nfile = 'a.gguf'")
        assert main(["serve", "--models", str(path), *options]) == 2
        assert expected in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("text", "expected"),
        [("1000", 1000), ("1k", 1024), ("1.5 GiB", 3 * 2**29), ("2GB", 2**31), ("3M", 3 * 2**20)],
    )
    def test_sizes_have_units(self, text: str, expected: int) -> None:
        assert byte_count(text) == byte_count_or_zero(text) == expected

    @pytest.mark.parametrize("text", ["", "0", "-1", "1X", "GiB", "1e9"])
    def test_what_is_no_size(self, text: str) -> None:
        with pytest.raises(argparse.ArgumentTypeError, match="not a size"):
            byte_count(text)

    def test_zero_is_a_size_where_it_means_none(self) -> None:
        assert byte_count_or_zero("0") == 0


@pytest.mark.parametrize(
    ("keep_alive", "expected"),
    [
        (0, 0),
        (5, 5),
        (-1, None),
        ("5m", 300),
        ("1h30m", 5400),
        ("0", 0),
        ("-1s", None),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        (10**400, None),
        (-(10**400), None),
    ],
)
def test_how_long_a_client_keeps_a_model(keep_alive: object, expected: float | None) -> None:
    assert kept_s(keep_alive) == expected


@pytest.mark.parametrize("keep_alive", ["x", "5 minutes", [], True, None])
def test_what_is_no_duration(keep_alive: object) -> None:
    with pytest.raises(ApiError, match="keep_alive"):
        kept_s(keep_alive)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("a", "b", "c"):
        shutil.copy(lp.demo_model_path(), folder / f"{name}.gguf")
    table = "[models.{0}]\nfile = '{0}.gguf'\n{1}\n"
    extra = {
        "a": "",
        "b": "ttl = 3600",
        "c": "",
        "pinned": "keep = true",
        "large": "n_ctx = 8192\nn_seq_max = 64",
    }
    shutil.copy(lp.demo_model_path(), folder / "pinned.gguf")
    shutil.copy(lp.demo_model_path(), folder / "large.gguf")
    (folder / "models.toml").write_text("".join(table.format(*values) for values in extra.items()))
    return folder


@pytest.fixture(scope="module")
def one_bytes(models: Path) -> int:
    return read_facts(COMMON, ModelEntry("a", str(models / "a.gguf"))).n_bytes


def test_what_a_model_took_before_does_not_keep_it_out(models: Path) -> None:
    """It fitted by its file, and took more than the budget while it ran."""

    async def run() -> None:
        async def unknown(entry: ModelEntry) -> None:
            raise AssertionError(entry)

        placement = Placement(CoreShare((0,), 1))
        pool = Pool([ModelEntry("a", str(models / "a.gguf"))], ["x"], placement, unknown, Budget(100))  # type: ignore[arg-type]
        (model,) = pool.models
        model.measured_bytes = 110
        await pool._make_room(model, Memory(90))
        assert model.memory == Memory(100)
        with pytest.raises(ApiError, match="allowed"):
            await pool._make_room(model, Memory(101))

    asyncio.run(run())


def test_a_load_that_nobody_waits_for_ends_no_other_model(models: Path) -> None:
    """Its client hangs up while it waits for a model that has a request."""
    entries = [ModelEntry(name, str(models / f"{name}.gguf")) for name in "ab"]
    n_bytes = read_facts(COMMON, entries[0]).n_bytes

    async def run() -> None:
        pool = Pool(
            entries, ["x"], Placement(CoreShare((), 1)), partial(look, COMMON), Budget(int(1.5 * n_bytes))
        )
        busy, wanted = pool.models
        busy.state, busy.memory, busy.n_users = ModelState.LOADED, Memory(n_bytes), 1
        busy.loaded_at = monotonic()
        async with pool.lease(wanted):
            await until(lambda: pool._turn.locked())
            assert wanted.state is ModelState.LOADING
            (load,) = pool._tasks._running
        await asyncio.wait_for(asyncio.wait([load]), PATIENCE_S)
        assert (busy.state, wanted.state) == (ModelState.LOADED, ModelState.UNLOADED)
        assert wanted.failure is None and pool.used == Memory(n_bytes)

    asyncio.run(run())


def test_a_process_that_cannot_be_started_is_a_failed_load(models: Path) -> None:
    entry = ModelEntry("a", str(models / "a.gguf"))

    async def run() -> None:
        pool = Pool([entry], ["/no/such/program"], Placement(CoreShare((), 1)), partial(look, COMMON))
        with pytest.raises(
            ApiError, match=r"cannot be loaded: its process cannot be started: .*no/such/program"
        ):
            await pool.load(pool.find("a"))
        (model,) = pool.models
        assert model.state is ModelState.UNLOADED and pool.used == Memory()
        with pytest.raises(ApiError, match="no/such/program"):  # it is not tried again at once
            async with pool.lease(model) as ready:
                await ready

    asyncio.run(run())


def test_models_share_the_memory_of_gpus(models: Path) -> None:
    """As if there were a GPU with room for one of two; a third has no layers there."""
    file = str(models / "a.gguf")
    entries = [
        ModelEntry("a", file),
        ModelEntry("b", str(models / "b.gguf")),
        ModelEntry("host", str(models / "c.gguf"), options={"n_gpu_layers": 0}),
        ModelEntry("large", file, options={"n_ctx": 8192, "n_seq_max": 64}),
    ]
    facts = read_facts(COMMON, entries[0], has_gpus=True)
    assert facts.gpu_bytes > 0
    assert read_facts(COMMON, entries[2], has_gpus=True).gpu_bytes == 0
    assert read_facts({**COMMON, "n_gpu_layers": 0}, entries[0], has_gpus=True).gpu_bytes == 0
    command = command_with(["serve", "--models", str(models), *OPTIONS])
    look_at = partial(look, COMMON, has_gpus=True)
    budget = int(1.5 * facts.gpu_bytes)

    async def run() -> None:
        pool = Pool(entries, command, Placement(CoreShare((), 1)), look_at, Budget(2**40, budget))
        for name, there in (("a", "a"), ("host", "a host"), ("b", "host b")):
            await pool.load(pool.find(name))
            assert {m.name for m in pool.models if m.process is not None} == set(there.split())
            assert 0 < pool.used.gpu_bytes <= budget
        with pytest.raises(ApiError, match=r"layers on GPUs need .* n_gpu_layers \(--n-gpu-layers\), n_ctx"):
            await pool.load(pool.find("large"))
        await pool.close()
        assert pool.used == Memory()

    asyncio.run(run())


@pytest.fixture
def server(models: Path, one_bytes: int, tmp_path: Path) -> Iterator[PoolServer]:
    """With room for two models."""
    budget = str(int(2.5 * one_bytes))
    with pool_server(
        models / "models.toml", *OPTIONS, "--memory", budget, "--ollama", log=tmp_path / "log"
    ) as server:
        yield server


class TestRoom:
    def test_the_estimate_is_about_what_a_process_takes(self, server: PoolServer, one_bytes: int) -> None:
        server.ask("a", max_tokens=100)
        there = resident_bytes(server.pids("a")[0])
        assert 0.5 * one_bytes < there < 1.2 * one_bytes
        assert server.metric('llamapipe_model_memory_bytes{model="a"}') >= 0.9 * there

    def test_the_least_recently_used_model_goes(self, server: PoolServer) -> None:
        for name in ("a", "b", "a"):
            assert server.ask(name).status_code == 200
        assert server.loaded() == ["a", "b"]
        assert server.ask("c").status_code == 200
        assert server.loaded() == ["a", "c"]
        assert has_ended(server.pids("b")[0])
        log = server.log()
        assert log.index("b is unloaded") < log.index("c loads")  # never both
        generated = 'llamapipe_generated_tokens_total{model="b"}'
        assert server.metric(generated) == 4  # its counters remain
        assert server.ask("b").status_code == 200
        assert server.metric(generated) == 8

    def test_a_busy_model_stays_and_the_next_one_waits(self, server: PoolServer) -> None:
        for name in "ab":  # loaded first: an answer may end while the other model loads
            assert server.ask(name).status_code == 200
        clients = [httpx.Client(base_url=server.url, timeout=120) for _ in range(2)]
        streams = [
            client.stream("POST", "/v1/completions", json={"model": name, **LONG, "max_tokens": 8000})
            for client, name in zip(clients, "ab", strict=True)
        ]
        with ThreadPoolExecutor() as threads, clients[0], clients[1]:
            lines = [stream.__enter__().iter_lines() for stream in streams]
            for stream_lines in lines:
                next(stream_lines)
            asked_at = monotonic()
            waiting = threads.submit(server.ask, "c")
            server.wait_for(c="loading")
            assert not waiting.done()
            streams[1].__exit__(None, None, None)  # b becomes idle
            waited_s = monotonic() - asked_at
            assert waiting.result().status_code == 200
            # After this time a model that is never idle may have to go instead.
            assert server.loaded() == ["a", "c"] or waited_s > _PATIENCE_S
            streams[0].__exit__(None, None, None)

    def test_models_that_are_never_idle_make_room_in_the_end(self, server: PoolServer) -> None:
        asked = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True}
        ended = Event()

        def always(name: str) -> set[int]:
            """Asks again and again; three of these leave a model no idle moment, or few."""
            statuses = set()
            with httpx.Client(base_url=server.url, timeout=120) as client:
                while not ended.is_set():
                    statuses.add(client.post("/v1/completions", json={"model": name, **asked}).status_code)
            return statuses

        server.ask("a")
        server.ask("b")
        with ThreadPoolExecutor(8) as threads:
            others = [threads.submit(always, name) for name in "aaabbb"]
            try:
                assert server.ask("c").status_code == 200
            finally:
                ended.set()
            assert [other.result() for other in others] == [{200}] * 6  # none was cut, all were answered

    def test_a_conversation_survives_its_model(self, server: PoolServer) -> None:
        """Evicted and loaded again, hardly any of it is computed again; each key has a cache."""
        said = "Once upon a time there was a fox who lived in a wood. " * 40

        def told(text: str) -> tuple[str, int, int]:
            answer = server.client.post(
                "/v1/completions",
                json={"model": "a", "prompt": text, "max_tokens": 50, "ignore_eos": True, "temperature": 0},
            ).json()
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return answer["choices"][0]["text"], usage["prompt_tokens"], cached

        text, n_first, _ = told(said)
        for name in ("b", "c"):
            server.ask(name)
        assert server.loaded() == ["b", "c"]
        _, n, n_cached = told(said + text)
        assert n > n_first > 400
        assert n - n_cached <= 0.05 * n
        assert len(server.pids("a")) == 2

    def test_cached_prefixes_are_forgotten_if_a_client_asks(self, server: PoolServer) -> None:
        """Of a model that is loaded, and of one that has left them in a file; neither is loaded for it."""
        n_cached(server, "a")
        assert n_cached(server, "a") > 100
        assert server.client.post("/reset_prefix_cache", params={"model": "a"}).status_code == 200
        assert n_cached(server, "a") == 0
        for name in ("b", "c"):
            server.ask(name)
        server.wait_for(a="unloaded")
        assert server.client.post("/reset_prefix_cache", params={"model": "nothing"}).status_code == 404
        assert server.client.post("/reset_prefix_cache").status_code == 200
        assert server.loaded() == ["b", "c"]
        assert n_cached(server, "a") == 0

    def test_a_model_that_can_never_fit_is_refused_at_once(self, server: PoolServer) -> None:
        server.ask("a")
        answer = server.ask("large")
        assert answer.status_code == 503
        assert "--memory" in answer.json()["error"]["message"]
        assert server.loaded() == ["a"]

    def test_a_pinned_model_stays(self, server: PoolServer) -> None:
        for name in ("pinned", "a", "b", "c"):
            assert server.ask(name).status_code == 200
        assert server.loaded() == ["c", "pinned"]


class TestHowLong:
    def test_ollamas_clients_say_how_long(self, server: PoolServer) -> None:
        asked = {"model": "a", "prompt": "Once", "stream": False, "options": {"num_predict": 2}}
        answer = server.client.post("/api/generate", json={**asked, "keep_alive": "1h"})
        assert "x-llamapipe-unused" not in answer.headers
        body = answer.json()
        assert body["load_duration"] > 50_000_000
        assert body["total_duration"] > body["load_duration"]
        again = server.client.post("/api/generate", json={**asked, "keep_alive": ""}).json()  # as if left out
        assert again["load_duration"] < 50_000_000
        (there,) = server.client.get("/api/ps").json()["models"]
        assert there["name"] == "a:latest"
        assert there["context_length"] == 8192
        unloaded = server.client.post("/api/generate", json={"model": "a", "keep_alive": 0})
        assert unloaded.json()["done_reason"] == "unload"
        server.wait_for(a="unloaded")
        assert server.client.get("/api/ps").json() == {"models": []}
        wrong = server.client.post("/api/generate", json={**asked, "keep_alive": "long"})
        assert wrong.status_code == 400

    def test_an_empty_chat_loads(self, server: PoolServer) -> None:
        answer = server.client.post("/api/chat", json={"model": "a", "messages": [], "stream": False})
        assert answer.json()["done_reason"] == "load"
        assert server.loaded() == ["a"]
        assert {entry["name"] for entry in server.client.get("/api/tags").json()["models"]} >= {
            "a:latest",
            "b:latest",
        }

    def test_clients_load_and_unload(self, server: PoolServer) -> None:
        assert server.client.post("/models/load", json={"model": "b"}).json() == {"success": True}
        server.wait_for(b="loaded")
        assert server.client.post("/models/load", json={"model": "b"}).status_code == 400
        assert server.client.post("/models/unload", json={"model": "b"}).json() == {"success": True}
        server.wait_for(b="unloaded")
        assert server.client.post("/models/unload", json={"model": "b"}).status_code == 400
        assert server.client.post("/models/unload", json={"model": "nothing"}).status_code == 404

    def test_the_command_line_lists_and_stops_models(
        self, server: PoolServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.ask("a")
        asked = {"model": "a", **LONG, "max_tokens": 8000}
        with server.client.stream("POST", "/v1/completions", json=asked) as answer:
            parts = answer.iter_lines()
            next(parts)
            assert main(["ps", "--url", server.url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[2:] for line in lines[:2]] == [
            ["loaded", "1", "request", "a"],
            ["unloaded", "0", "requests", "b"],
        ]
        monkeypatch.setenv("LLAMAPIPE_URL", server.url)
        assert main(["stop", "a"]) == 0
        server.wait_for(a="unloaded")
        assert main(["ps", "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[0])["state"] == "unloaded"
        assert main(["stop", "a"]) == 1
        assert "unloaded already" in capsys.readouterr().err
        for url, status, text in (
            ("localhost", 2, "http://"),
            ("http://127.0.0.1:9", 1, "cannot be reached"),
        ):
            assert main(["ps", "--url", url]) == status
            assert text in capsys.readouterr().err


def test_a_stream_has_signs_of_life_while_its_model_loads(
    models: Path, one_bytes: int, tmp_path: Path
) -> None:
    budget = str(int(1.5 * one_bytes))
    options = (*OPTIONS, "--memory", budget, "--ping", "0.05", "--ollama")
    with (
        pool_server(models / "models.toml", *options, log=tmp_path / "log") as server,
        httpx.Client(base_url=server.url, timeout=120) as other,
    ):
        asked = {"prompt": "Once", "max_tokens": 4, "stream": True}
        lines = server.ask("a", **asked).text.splitlines()
        assert any(line.startswith(": loading a ") for line in lines)
        assert lines[-2] == "data: [DONE]" or lines[-1] == "data: [DONE]"
        # An error that comes when the stream has begun is an event of it.
        with server.client.stream(
            "POST", "/v1/completions", json={"model": "b", **asked, "max_tokens": -7}
        ) as late:
            text = "".join(late.iter_text())
        events = [line for line in text.splitlines() if line.startswith("data: ")]
        assert "max_tokens" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        assert other.get("/health").status_code == 200
        # Lines of JSON have no comments: there it is a part without text.
        messages = [{"role": "user", "content": "Once"}]
        for path, body in (
            ("/api/chat", {"model": "a", "messages": messages}),
            ("/api/generate", {"model": "b", "prompt": "Once"}),
        ):
            late = server.client.post(path, json={**body, "options": {"num_predict": 3, "temperature": 0}})
            assert late.headers["content-type"] == "application/x-ndjson"
            parts = [json.loads(line) for line in late.text.splitlines()]
            texts = [(part.get("message") or {"content": part.get("response")})["content"] for part in parts]
            assert texts[0] == ""
            assert parts[0]["model"] == body["model"]
            assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
            assert parts[-1]["eval_count"] == 3
            assert parts[-1]["load_duration"] > 0
        late = server.client.post(
            "/api/generate", json={"model": "a", "prompt": "x", "raw": True, "system": "y"}
        )
        assert "raw" in json.loads(late.text.splitlines()[-1])["error"]


TOLD = "Once upon a time there was a fox who lived in a wood. " * 20


def n_cached(server: PoolServer, name: str) -> int:
    """The tokens of a text that a model had cached."""
    usage = server.ask(name, prompt=TOLD).json()["usage"]
    n: int = usage["prompt_tokens_details"]["cached_tokens"]
    return n


def unload(server: PoolServer, name: str) -> None:
    server.client.post("/models/unload", json={"model": name})
    server.wait_for(**{name: "unloaded"})


def files_of(folder: Path) -> list[Path]:
    """The cached prefixes in a folder."""
    return [*folder.glob("*/*.kv")]


def test_what_is_kept_ends_with_the_server(models: Path, tmp_path: Path) -> None:
    """The files are in a folder that only its user can read; one that a killed server left behind is deleted later."""
    folder = tmp_path / "cache" / "evicted"
    (folder / "left").mkdir(parents=True)
    (folder / "left" / "lock").touch()
    with pool_server(
        models / "models.toml", *OPTIONS, log=tmp_path / "log", LLAMAPIPE_CACHE_DIR=str(tmp_path / "cache")
    ) as server:
        (own,) = [path for path in folder.iterdir() if path.is_dir()]
        assert own.name != "left"
        assert own.stat().st_mode & 0o777 == 0o700
        server.ask("a", prompt=TOLD)
        (kept,) = [path for path in own.iterdir() if path.name != "lock"]
        assert kept.stat().st_mode & 0o777 == 0o700
        assert files_of(kept) == []  # nobody asked for writes while it runs
        unload(server, "a")
        assert [path.stat().st_mode & 0o777 for path in files_of(kept)] == [0o600]
        server.ask("a")
        os.kill(server.pids("a")[-1], signal.SIGTERM)  # by itself: what it had is not kept
        server.wait_for(a="unloaded")
        assert len(files_of(kept)) == 1
    assert [path for path in folder.iterdir() if path.is_dir()] == []


def test_a_folder_that_the_operator_gives(models: Path, tmp_path: Path) -> None:
    """It outlives the server, and serves models that are loaded or not; no model has another one then."""
    where = {"LLAMAPIPE_CACHE_DIR": str(tmp_path / "cache")}
    (models / "kept.toml").write_text(
        f"[models.a]\nfile = 'a.gguf'\ncache_dir = {str(tmp_path / 'a')!r}\n"
        "[models.b]\nfile = 'b.gguf'\n[models.c]\nfile = 'c.gguf'\ncache_bytes = 0\n"
    )
    with pool_server(models / "kept.toml", *OPTIONS, log=tmp_path / "log", **where) as server:
        for name in "abc":
            server.ask(name, prompt=TOLD)
            unload(server, name)
        assert len(files_of(tmp_path / "a")) == 1
        assert len([*tmp_path.glob("cache/evicted/*/*/*/*.kv")]) == 1  # of b; c has no memory for them
    folder = tmp_path / "all"
    listed = models / "both.toml"
    listed.write_text((models / "kept.toml").read_text().split("[models.c]")[0])
    options = (*OPTIONS, "--cache-dir", str(folder))
    for _ in range(2):
        with pool_server(listed, *options, log=tmp_path / "log", **where) as server:
            assert n_cached(server, "a") > 100
            n_cached(server, "b")
            assert [path for path in tmp_path.glob("cache/evicted/*") if path.is_dir()] == []
        assert len(files_of(folder)) == 1
    with pool_server(listed, *options, log=tmp_path / "log", **where) as server:
        assert n_cached(server, "b") > 100
        unload(server, "b")
        assert server.client.post("/reset_prefix_cache", params={"model": "b"}).status_code == 200
        assert (len(files_of(tmp_path / "a")), files_of(folder)) == (1, [])
        assert n_cached(server, "b") == 0


def test_models_end_by_themselves_and_start_early(models: Path, tmp_path: Path) -> None:
    (models / "short.toml").write_text("[models.a]\nfile = 'a.gguf'\nttl = 0.2\npreload = true\n")
    with pool_server(models / "short.toml", *OPTIONS, log=tmp_path / "log") as server:
        wait_until(lambda: len(server.pids("a")) == 1)
        server.wait_for(a="unloaded")
        assert server.ask("a").status_code == 200
        server.wait_for(a="unloaded")
        assert len(server.pids("a")) == 2


def test_a_request_waits_for_its_model_as_long_as_it_may(models: Path, tmp_path: Path) -> None:
    with pool_server(models / "models.toml", *OPTIONS, "--timeout", "0.2", log=tmp_path / "log") as server:
        answer = server.ask("a")
        assert answer.status_code == 504
        assert "not loaded within 0.2 s" in answer.json()["error"]["message"]
        server.wait_for(a="loaded")  # for the next one


def test_two_models_with_room_for_one_are_loaded_once_each(
    models: Path, one_bytes: int, tmp_path: Path
) -> None:
    """Also where a load takes longer than the patience with busy models: each answers before it ends."""
    program = "import llamapipe.fleet.pool as pool\npool._PATIENCE_S = 0.05\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    path = os.pathsep.join([str(tmp_path), str(Path(lp.__file__).parent.parent)])
    budget = ("--memory", str(int(1.5 * one_bytes)))
    with (
        pool_server(
            models / "models.toml", *OPTIONS, *budget, log=tmp_path / "log", PYTHONPATH=path
        ) as server,
        ThreadPoolExecutor() as threads,
    ):
        answers = [threads.submit(server.ask, name) for name in "abc"]
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert [len(server.pids(name)) for name in "abc"] == [1] * 3


def test_models_of_one_file_share_packed_weights(tmp_path: Path) -> None:
    with lp.Model.demo() as model:
        if not model.n_packed_tensors:
            pytest.skip("this processor has no kernels")
    tables = ["[models.a]", "[models.b]", "[models.plain]\npacked_cache = 'off'\nkernels = 'ggml'"]
    listed = tmp_path / "models.toml"
    listed.write_text("\n".join(f"{table}\nfile = {str(lp.demo_model_path())!r}" for table in tables))
    folder = tmp_path / "packed"
    with pool_server(listed, "--packed-cache", str(folder), *OPTIONS, log=tmp_path / "log") as server:
        texts = [server.ask(name).json()["choices"][0]["text"] for name in ("a", "b", "plain")]
        assert texts[0] == texts[1]
        (file,) = folder.iterdir()
        maps = {n: Path(f"/proc/{server.pids(n)[0]}/maps").read_text() for n in ("a", "b", "plain")}
        assert {n: str(file) in text for n, text in maps.items()} == {"a": True, "b": True, "plain": False}
        assert "packed_cache:" not in server.log()


def test_a_file_that_is_gone_is_listed_no_longer(models: Path, tmp_path: Path) -> None:
    shutil.copy(lp.demo_model_path(), tmp_path / "here.gguf")
    shutil.copy(lp.demo_model_path(), tmp_path / "gone.gguf")
    with pool_server(tmp_path, *OPTIONS, "--ollama", log=tmp_path / "log") as server:

        def names() -> list[str]:
            return sorted(entry["name"] for entry in server.client.get("/api/tags").json()["models"])

        assert server.ask("gone").status_code == 200
        (tmp_path / "gone.gguf").unlink()
        assert server.ask("gone").status_code == 200  # its process has it
        server.client.post("/models/unload", json={"model": "gone"})
        server.wait_for(gone="unloaded")
        answer = server.ask("gone")
        assert answer.status_code == 503
        assert "does not exist" in answer.json()["error"]["message"]
        assert names() == ["here:latest"]
        assert server.client.post("/api/show", json={"model": "gone"}).status_code == 404
