"""What routers and autoscalers read from ``llamapipe serve``, read in the same way.

llm-d's router and the gateway API's inference extension take the sample of each family with the latest time, gauges by
value and sizes from labels. AIBrix takes the first sample, and the models from the label ``model_name``.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.control import PATIENCE_S
from support.kv_subscriber import Subscriber
from support.run_script import environment
from support.server_process import COMMAND, ServerProcess

import llamapipe as lp

EVENTS = ("--kv-events", "tcp://127.0.0.1:0", "--kv-events-replay", "tcp://127.0.0.1:0")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    arguments = ("--alias", "story", "--n-seq-max", "2", "--n-ctx", "4096", *EVENTS, "--kv-block-size", "32")
    with ServerProcess(*arguments, cwd=tmp_path_factory.mktemp("server")) as server:
        yield server


def families(url: str) -> dict[str, Metric]:
    answer = httpx.get(f"{url}/metrics", timeout=PATIENCE_S)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def latest(metrics: dict[str, Metric], name: str) -> Sample:
    family = metrics[name]
    assert family.type == "gauge"
    return max(family.samples, key=lambda sample: sample.timestamp or 0)


def test_the_gauges_follow_the_load(server: ServerProcess) -> None:
    """With three requests for two slots, two run and one waits."""
    body = {"model": "story", "prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}
    before = families(server.url)
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert latest(before, name).value == 0

    def ask() -> int:
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(ask) for _ in range(3)]
        deadline = monotonic() + PATIENCE_S
        while True:
            metrics = families(server.url)
            n_waiting = int(latest(metrics, "vllm:num_requests_waiting").value)
            n_running = int(latest(metrics, "vllm:num_requests_running").value)
            usage = latest(metrics, "vllm:kv_cache_usage_perc").value
            if (n_waiting, n_running) == (1, 2) and usage > 0:
                break
            assert monotonic() < deadline, (n_waiting, n_running, usage)
        assert 0 < usage <= 1
        assert [answer.result() for answer in answers] == [200] * 3
    assert latest(families(server.url), "vllm:num_requests_running").value == 0


def test_sizes_are_in_labels(server: ServerProcess) -> None:
    """Block size and number, as integers; a router divides prompts into blocks of this size."""
    metrics = families(server.url)
    labels = latest(metrics, "vllm:cache_config_info").labels
    assert int(labels["block_size"]) == 32
    assert int(labels["num_gpu_blocks"]) == 2 * 4096 // 32
    adapters = latest(metrics, "vllm:lora_requests_info").labels
    assert int(adapters["max_lora"]) == 0
    assert not adapters["running_lora_adapters"] and not adapters["waiting_lora_adapters"]


def test_metrics_name_the_model(server: ServerProcess) -> None:
    metrics = families(server.url)
    served = {model["id"] for model in httpx.get(f"{server.url}/v1/models").json()["data"]}
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        first = metrics[f"vllm:{name}"].samples[0]
        assert {first.labels["model_name"]} == served == {"story"}


ADDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Once", "max_tokens": 2, "echo": False, "ignore_eos": False},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 2,
        "logprobs": False,
        "ignore_eos": False,
        "continue_final_message": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
    },
    "/v1/responses": {
        "input": "Hello",
        "max_output_tokens": 2,
        "store": True,
        "stream": None,
        "priority": 0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    },
}
COMMON = {"no_stop_trim": False, "skip_special_tokens": True, "return_hidden_states": False}


@pytest.mark.parametrize("path", ADDED)
def test_fields_that_sglang_router_adds(server: ServerProcess, path: str) -> None:
    """It adds them with these values if a client leaves them out. Other values are refused, by name."""
    body = {**ADDED[path], **({} if path == "/v1/responses" else COMMON)}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    only = {name: value for name, value in body.items() if name in (*COMMON, "stream_reasoning")}
    only |= {"priority": False} if "priority" in body else {}
    for name, value in only.items():
        wrong = {**body, name: 7 if name == "priority" else not value}
        answer = httpx.post(f"{server.url}{path}", json=wrong, timeout=PATIENCE_S)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text


def test_the_endpoints_that_probes_ask(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    info = httpx.get(f"{server.url}/model_info").json()
    assert info["is_generation"] is True and info["served_model_names"] == ["story"]


def test_kv_events_of_a_served_model(server: ServerProcess, demo: lp.Model) -> None:
    """The command prints where they are; their topic names the host and the model; blocks are those of the prompt."""
    text = "".join(server.lines)
    match = re.search(r"KV events at (\S+), missed ones at (\S+)", text)
    assert match, text
    prompt = "The quick brown fox jumps over the lazy dog. " * 12
    body = {"model": "story", "prompt": prompt, "max_tokens": 1}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
    tokens = tuple(demo.tokenize(prompt))
    options = lp.KvEvents(match[1], match[2], topic=f"kv@{os.uname().nodename}@story")
    with Subscriber(options) as subscriber:
        assert len(tokens) >= 64
        expected = {tokens[:end] for end in range(32, len(tokens) // 32 * 32 + 1, 32)}
        deadline = monotonic() + PATIENCE_S
        while not expected <= subscriber.index.prefixes:  # events follow the answer
            assert monotonic() < deadline
            subscriber.replay()


def test_wrong_options_for_events(tmp_path: Path) -> None:
    for arguments, text in (
        (("--kv-events", "5557"), "must be tcp://HOST:PORT"),
        (("--kv-block-size", "8"), "need --kv-events ADDRESS"),
    ):
        done = subprocess.run(
            [*COMMAND, *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(),
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 2 and text in done.stderr, done
