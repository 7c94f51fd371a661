"""The harness's own client of OpenAI's completions, against the server, gives the plug-in's numbers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.plain_scores import BOUND

import llamapipe as lp
from llamapipe.server import serve

pytest.importorskip(
    "lm_eval",
    reason='needs lm-evaluation-harness: nox -s lm_eval, or pip install "llamapipe[lm-eval]"',
)
pytest.importorskip("tenacity", reason='needs the client of the harness: nox -s lm_eval, or "lm-eval[api]"')

import lm_eval
from lm_eval.tasks import TaskManager

from llamapipe.lm_eval import LlamapipeLM

pytestmark = pytest.mark.lm_eval

TASKS = ["llamapipe_questions", "llamapipe_stories", "llamapipe_answers"]


def numbers(model: Any, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=TASKS,
        task_manager=TaskManager(include_path=str(Path(__file__).parent / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    kept: dict[str, Any] = results["results"]
    samples = {task: [sample["filtered_resps"] for sample in results["samples"][task]] for task in TASKS}
    return {"results": kept, "samples": samples}


def test_scores_and_answers_are_those_of_the_plug_in(demo: lp.Model) -> None:
    options: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1, "flash_attn": "off"}
    # The client asks for tokens without BOS.
    with closing(LlamapipeLM(path="demo", add_bos_token=False, **options)) as plug_in:
        ours = numbers(plug_in)
    with lp.Engine(demo, n_seq_max=16, **options) as engine, serve(engine) as server:
        over_http = numbers(
            "local-completions",
            {
                "model": "demo",
                "base_url": f"{server.url}/v1/completions",
                "tokenizer_backend": "remote",
                "max_length": 1024,
                "max_retries": 1,
                "num_concurrent": 4,
            },
        )
    for task in TASKS:
        left, right = ours["results"][task], over_http["results"][task]
        for metric in left:
            if isinstance(left[metric], float):
                assert right[metric] == pytest.approx(left[metric], rel=1e-5), (task, metric)
    answers = "llamapipe_answers"
    assert ours["samples"][answers] == over_http["samples"][answers]
    questions = "llamapipe_questions"
    pairs = zip(flat(ours["samples"][questions]), flat(over_http["samples"][questions]), strict=True)
    for own_value, theirs in pairs:
        assert theirs == pytest.approx(own_value, abs=BOUND * 10)


def flat(samples: list[Any]) -> list[tuple[float, bool]]:
    """The log-likelihood of each choice of each question, and whether it is what the model would say."""
    return [choice for sample in samples for choice in sample]
