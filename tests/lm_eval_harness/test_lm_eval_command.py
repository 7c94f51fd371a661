"""The command of lm-evaluation-harness with our model, from end to end, on the tasks of this repository."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.plain_scores import BOUND, PlainScores

import llamapipe as lp

pytestmark = pytest.mark.lm_eval

pytest.importorskip(
    "lm_eval",
    reason='needs lm-evaluation-harness: nox -s lm_eval, or pip install "llamapipe[lm-eval]"',
)

TASKS = Path(__file__).parent / "tasks"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
N_QUESTIONS = 49


@pytest.fixture(scope="module")
def plain(demo: lp.Model) -> Iterator[PlainScores]:
    plain = PlainScores(demo, 256)
    yield plain
    plain.close()


@pytest.fixture(scope="module")
def command() -> list[str]:
    """The command that the package installs; in a source tree, the module."""
    path = Path(sys.executable).parent / "llamapipe-lm-eval"
    return [str(path)] if path.exists() else [sys.executable, "-m", "llamapipe.lm_eval"]


class TestCommand:
    """``lm_eval`` in a process of its own, on the tasks of this repository."""

    @pytest.fixture
    def run(self, tmp_path: Path) -> Callable[..., str]:
        def run(command: Sequence[str], *arguments: str, expect: int = 0) -> str:
            done = subprocess.run(
                [*command, *arguments],
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
                # Of a source tree, what this process imported.
                env={"PYTHONPATH": str(Path(lp.__file__).parents[1]), **os.environ, **OFFLINE},
            )
            assert done.returncode == expect, done.stderr
            return done.stdout if expect == 0 else done.stderr

        return run

    def test_all_tasks(
        self, command: list[str], run: Callable[..., str], plain: PlainScores, tmp_path: Path, demo: lp.Model
    ) -> None:
        options = ["--include_path", str(TASKS), "--tasks", "llamapipe_demo", "--log_samples"]
        out = run(
            command, "--model", "llamapipe", "--model_args", "path=demo,n_ctx=256,n_threads=1", *options,
            "--output_path", "results",
        )  # fmt: skip
        table = {
            (task, metric): float(value)
            for task, metric, value in _rows(out)
        }  # fmt: skip
        assert len(table) == 6, out
        # By chance one of four.
        assert table["llamapipe_questions", "acc"] >= 0.9
        assert table["llamapipe_answers", "exact_match"] >= 0.9

        n_scores = 0
        for sample in _samples(tmp_path, "questions"):
            for answer, (context, continuation) in zip(sample["resps"], _arguments(sample), strict=True):
                (logprob, greedy), n_scores = answer[0], n_scores + 1
                whole, first = demo.tokenize(context + continuation), demo.tokenize(context)
                plain.assert_is((float(logprob), greedy == "True"), first, whole[len(first) :])
        assert n_scores == 4 * N_QUESTIONS

        right = 0
        samples = _samples(tmp_path, "answers")
        for sample in samples:
            ((context, options_),) = _arguments(sample)
            right += sample["resps"][0][0] == plain.text(demo.tokenize(context), options_["until"], 40)
        assert right >= len(samples) - 1  # near ties may go either way

        total, n_bytes = 0.0, 0
        for sample in _samples(tmp_path, "stories"):
            ((text,),) = _arguments(sample)
            expected, n_tokens = plain.rolling(text, 256)
            assert float(sample["resps"][0][0]) == pytest.approx(expected, abs=BOUND * math.sqrt(n_tokens))
            total, n_bytes = total + expected, n_bytes + len(text.encode())
        bits = -total / n_bytes / math.log(2)
        assert table["llamapipe_stories", "bits_per_byte"] == pytest.approx(bits, abs=2e-3)

    def test_with_the_chat_template_and_few_shots(self, command: list[str], run: Callable[..., str]) -> None:
        out = run(
            command, "--model", "llamapipe", "--model_args", "path=demo", "--batch_size", "16", "--limit", "10",
            "--include_path", str(TASKS), "--tasks", "llamapipe_questions,llamapipe_answers",
            "--apply_chat_template", "--system_instruction", "Be brief.", "--gen_kwargs", "max_gen_toks=20",
        )  # fmt: skip
        assert "batch_size: 16" in out
        assert len(list(_rows(out))) == 3

    def test_a_wrong_argument(self, command: list[str], run: Callable[..., str]) -> None:
        err = run(
            command, "--model", "llamapipe", "--model_args", "path=demo,n_cxt=1", "--include_path", str(TASKS),
            "--tasks", "llamapipe_stories", expect=1,
        )  # fmt: skip
        assert "llamapipe has no model argument 'n_cxt'; it has: path, n_ctx," in err

    def test_the_harness_itself_starts_without_us(self) -> None:
        """Nothing of an installed llamapipe runs before it is imported."""
        program = "import lm_eval.models, sys; print('llamapipe' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/"
        )
        assert done.stdout == "False\n"


def _rows(out: str) -> Iterator[tuple[str, str, str]]:
    """Of the printed table: task, metric and value; the task's name is only in its first row."""
    task = ""
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 9 and re.fullmatch(r"[0-9.]+", cells[6]):
            task = cells[0] or task
            yield task, cells[4], cells[6]


def _samples(folder: Path, name: str) -> list[dict[str, Any]]:
    (path,) = folder.glob(f"results/**/samples_llamapipe_{name}_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _arguments(sample: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(arguments.values()) for arguments in sample["arguments"].values()]
