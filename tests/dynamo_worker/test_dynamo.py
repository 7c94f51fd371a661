"""NVIDIA Dynamo's frontend with our workers: ``nox -s dynamo``."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.control import PATIENCE_S
from support.dynamo_processes import Cluster

import llamapipe as lp

pytest.importorskip("dynamo.common.backend", reason="ai-dynamo is not installed: nox -s dynamo")
pytestmark = pytest.mark.dynamo

N_STREAMS, N_TOKENS = 24, 900
WORKER = ("--n-seq-max", str(N_STREAMS), "--n-ctx", "1024")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
PROMPTS = [
    f"Once upon a time, {name} had {n} "
    for n in range(2, 6)
    for name in ("Tom", "Mia", "Ben", "Sue", "Max", "Ann")
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as running:
        yield running


def stream(
    cluster: Cluster, prompt: str, after_each: Callable[[int], None], **options: Any
) -> tuple[str, Any]:
    """The text of a stream and its finish reason. ``after_each`` is called with the number of events so far."""
    text, reason, n = "", None, 0
    body = {"model": "story", "prompt": prompt, "temperature": 0, "stream": True, **options}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                assert not line.startswith("event: error"), (line, text)
                continue
            n += 1
            for choice in json.loads(line[6:])["choices"]:
                text += choice["text"]
                reason = choice.get("finish_reason") or reason
            after_each(n)
    return text, reason


def run_streams(cluster: Cluster, when_running: Callable[[], None]) -> list[tuple[str, Any]]:
    """Runs all streams at once. Calls ``when_running`` when each has begun, before half of them have ended."""
    begun = Semaphore(0)

    def run(prompt: str) -> tuple[str, Any]:
        def after_each(n: int) -> None:
            if n == 3:
                begun.release()

        try:
            return stream(cluster, prompt, after_each, max_tokens=N_TOKENS, ignore_eos=True)
        except BaseException:
            begun.release()  # do not wait for a stream that failed
            raise

    with ThreadPoolExecutor(N_STREAMS) as pool:
        futures = [pool.submit(run, prompt) for prompt in PROMPTS]
        for _ in futures:
            assert begun.acquire(timeout=PATIENCE_S)
        assert sum(future.done() for future in futures) < N_STREAMS / 2
        when_running()
        return [future.result(PATIENCE_S) for future in futures]


def test_streams_survive_the_death_of_a_worker(cluster: Cluster) -> None:
    cluster.start(2, *WORKER)
    undisturbed = run_streams(cluster, lambda: None)
    assert {reason for _, reason in undisturbed} == {"length"}
    assert len({text for text, _ in undisturbed}) == N_STREAMS
    exit_status: list[int] = []
    disturbed = run_streams(cluster, lambda: exit_status.append(cluster.workers[0].signal(signal.SIGKILL)))
    assert exit_status == [-signal.SIGKILL]
    assert disturbed == undisturbed
    counted = text_string_to_metric_families(httpx.get(f"{cluster.url}/metrics").text)
    moved = [
        sample.value for f in counted for sample in f.samples if sample.name.endswith("model_migration_total")
    ]
    assert sum(moved) >= 1  # the dead worker had requests, and the other one continued them


def test_answers_are_those_of_the_engine(cluster: Cluster) -> None:
    cluster.start(1, *WORKER)
    params = lp.SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    messages = [{"role": "user", "content": "Tell a story."}]
    with lp.Model.demo() as model, lp.Engine(model, n_ctx=1024) as engine:
        completion = engine.generate("Once upon a time", params)
        chat = engine.chat(messages, params)
    answer = cluster.complete(prompt="Once upon a time", logprobs=2, **GREEDY).json()
    assert answer["choices"][0]["text"] == completion.text
    assert answer["choices"][0]["finish_reason"] == completion.finish_reason == "length"
    assert answer["usage"]["completion_tokens"] == completion.n_completion_tokens
    logprobs = answer["choices"][0]["logprobs"]
    assert completion.logprobs is not None
    expected = [entry.logprob for entry in completion.logprobs]
    assert logprobs["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    answer = cluster.complete("/v1/chat/completions", messages=messages, **GREEDY).json()
    assert answer["choices"][0]["message"]["content"] == chat.content
    assert answer["usage"]["prompt_tokens"] == chat.n_prompt_tokens
    stopped = cluster.complete(prompt="Once upon a time", temperature=0, max_tokens=40, stop=["named"]).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert "named" in completion.text and stopped["choices"][0]["text"] == completion.text.split("named")[0]


def test_an_adapter_is_a_model(cluster: Cluster) -> None:
    file = lp.demo_model_path().with_name("letters.gguf")
    cluster.start(1, *WORKER, "--lora", f"letters={file}")
    known = httpx.get(f"{cluster.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert {model["id"] for model in known} == {"story", "letters"}
    with lp.Model.demo() as model, lp.Engine(model, n_ctx=1024) as engine:
        model.load_adapter(file, "letters")
        texts = {}
        for name, adapter in (("story", None), ("letters", "letters")):
            params = lp.SamplingParams(temperature=0, max_tokens=12, adapter=adapter)
            texts[name] = engine.generate("Dear Mia,", params).text
    assert len(set(texts.values())) == 2
    for name, text in texts.items():
        answer = cluster.complete(model=name, prompt="Dear Mia,", **GREEDY).json()
        assert answer["choices"][0]["text"] == text
    assert cluster.complete(model="other", prompt="Dear Mia,", **GREEDY).status_code == 404


def test_a_refused_request_names_the_option_and_hurts_no_other(cluster: Cluster) -> None:
    cluster.start(1, *WORKER)
    alone = stream(cluster, PROMPTS[0], lambda n: None, max_tokens=200)

    def disturb(n: int) -> None:
        if n == 2:
            refused = cluster.complete(prompt="Once", n=2, max_tokens=5)
            assert refused.status_code == 400 and "n is 2" in refused.text
            refused = cluster.complete(prompt="Once", guided_regex="(", **GREEDY)
            assert refused.status_code == 400 and "regex" in refused.text
            refused = cluster.complete(prompt="Once " * 4000, **GREEDY)
            assert refused.status_code == 400

    assert stream(cluster, PROMPTS[0], disturb, max_tokens=200) == alone


def test_a_client_that_hangs_up_frees_its_slot(cluster: Cluster) -> None:
    cluster.start(1, "--n-seq-max", "1", "--n-ctx", "256", "--overflow", "shift")

    class HungUpError(Exception):
        pass

    def hang_up(n: int) -> None:
        if n == 300:  # the context is full by then: this request would never end
            raise HungUpError

    with pytest.raises(HungUpError):
        stream(cluster, PROMPTS[0], hang_up, ignore_eos=True, max_tokens=1_000_000)
    assert (
        cluster.complete(prompt="Once upon a time", **GREEDY).json()["choices"][0]["finish_reason"]
        == "length"
    )


def test_sigterm_finishes_running_requests(cluster: Cluster) -> None:
    cluster.start(1, *WORKER)
    alone = stream(cluster, PROMPTS[0], lambda n: None, max_tokens=N_TOKENS, ignore_eos=True)

    def terminate(n: int) -> None:
        if n == 2:
            cluster.workers[0].process.send_signal(signal.SIGTERM)

    assert stream(cluster, PROMPTS[0], terminate, max_tokens=N_TOKENS, ignore_eos=True) == alone
    assert cluster.workers[0].process.wait(PATIENCE_S) == 0
