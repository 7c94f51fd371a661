"""`llamapipe score`, `embed`, `bench`, `tune`, `models` and `completion`, each as a process."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bert_model import bert_model
from support.gguf_models import tiny_model
from support.run_script import command, environment
from support.small_hub import small_hub

import llamapipe as lp
from llamapipe.cli._guesses import Guessed, verdict
from llamapipe.cli.bench import Speed
from llamapipe.cli.tune import least_disturbed

CLI = "import sys; from llamapipe.cli import main; sys.exit(main())"


def run(*words: object, status: int = 0, env: Mapping[str, str] | None = None, text: str = "") -> str:
    """What a command prints; on stderr if it fails."""
    done = subprocess.run(
        command(CLI, *map(str, words)),
        env=environment(env),
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if status == 0 else done.stderr


class TestScore:
    def test_continuations_are_ordered(self, demo: lp.Model) -> None:
        said = run("score", "What does a cow say? A cow says", " meow", " moo", "--json")
        records = [json.loads(line) for line in said.splitlines()]
        assert [record["continuation"] for record in records] == [" moo", " meow"]
        with lp.Engine(demo, n_ctx=256) as engine:
            (score,) = engine.score("What does a cow say? A cow says", [" moo"])
        assert records[0]["logprob"] == pytest.approx(score.total, abs=1e-3)
        plain = run("score", "What does a cow say? A cow says", " meow", " moo").splitlines()
        assert plain[0].endswith(" moo  greedy")

    def test_perplexity(self, demo: lp.Model, tmp_path: Path) -> None:
        text = "Once upon a time there was a fox. " * 20
        (tmp_path / "text.txt").write_text(text)
        record = json.loads(run("score", "-f", tmp_path / "text.txt", "-c", "128", "--json"))
        with lp.Engine(demo, n_ctx=128) as engine:
            assert record["perplexity"] == pytest.approx(engine.perplexity(text), rel=1e-3)

    def test_stdin_is_a_text(self, tmp_path: Path) -> None:
        text = "Once upon a time there was a fox.\n"
        (tmp_path / "text.txt").write_text(text)
        expected = json.loads(run("score", "-f", tmp_path / "text.txt", "--json"))["perplexity"]
        for words in ((), ("-f", "-")):
            assert json.loads(run("score", *words, "--json", text=text)) == {
                "file": "-",
                "perplexity": expected,
            }

    def test_a_wrong_window_is_named_as_the_option(self) -> None:
        assert "--window is 3; it must be from 4 to" in run("score", "--window", 3, status=2, text="A fox.")
        assert "n_window" not in run("score", "--window", 16, status=1, text="A fox.")

    def test_continuations_have_no_window(self) -> None:
        said = run("score", "-m", "none.gguf", "--window", 16, "A cow says", " moo", status=2)
        assert "--window is for the perplexity of texts" in said

    @pytest.mark.parametrize("words", [(), ("one",), ("a", "b", "-f", "x")])
    def test_wrong_usage(self, words: tuple[str, ...]) -> None:
        assert "llamapipe score" in run("score", *words, status=2)


class TestEmbed:
    def test_vectors(self, tmp_path: Path) -> None:
        path, _ = bert_model(tmp_path / "bert.gguf")
        with lp.Embedder(path) as embedder:
            expected = embedder.embed(["hello world", "bye"])
        records = [json.loads(line) for line in run("embed", "-m", path, "hello world", "bye").splitlines()]
        assert np.allclose([record["embedding"] for record in records], expected, atol=1e-5)
        out = tmp_path / "vectors.npy"
        for words in (("-f", "-"), ()):
            run("embed", "-m", path, "--lines", *words, "-o", out, text="hello world\nbye\n")
            assert np.allclose(np.load(out), expected, atol=1e-5)
            out.unlink()
        run("embed", "-m", path, "-c", "0", "-t", "-1", "hello world")
        assert ".npy" in run("embed", "-m", path, "a", "-o", tmp_path / "v.txt", status=2)
        assert "tokens" in run("embed", "-m", path, "hello " * 900, status=1)
        run("embed", "-m", path, "hello " * 900, "--truncate")

    def test_options_that_would_do_nothing(self, tmp_path: Path) -> None:
        """They are refused before a model is loaded, and so is a folder that is not there."""
        nowhere = tmp_path / "nowhere" / "v.npy"
        said = run("embed", "-m", "none.gguf", "a", "-o", nowhere, status=2)
        assert f"-o {nowhere}: there is no folder {nowhere.parent}" in said
        for words in (("-o", tmp_path / "v.npy"), ("--no-normalize",)):
            said = run("embed", "-m", "none.gguf", "--rerank", "a", "b", *words, status=2)
            assert f"{words[0]} and --rerank do not go together" in said

    def test_reranking(self, tmp_path: Path) -> None:
        path, _ = bert_model(tmp_path / "rank.gguf", "rank", rank_head=True)
        with lp.Embedder(path) as embedder:
            expected = [ranked.index for ranked in embedder.rerank("hello", ["bye", "hello", "world"])]
        lines = run("embed", "-m", path, "--rerank", "hello", "bye", "hello", "world").splitlines()
        assert [["bye", "hello", "world"].index(line.split()[-1]) for line in lines] == expected


class TestMeasures:
    def test_bench(self) -> None:
        options = ("--requests", "1,3", "--prompt-tokens", "8", "-n", "4")
        records = [json.loads(line) for line in run("bench", *options, "--json").splitlines()]
        assert [record["n"] for record in records] == [1, 3]
        assert all(record["tokens_per_s"] > 0 and record["first_token_s"] > 0 for record in records)
        assert run("bench", *options).count("tokens/s") == 3
        assert "1,4,16" in run("bench", "--requests", "1,x", status=2)

    def test_tune_prints_a_call_that_works(self) -> None:
        said = run("tune", "--slots", "2", "--prompt-tokens", "8", "-n", "4", "-c", "64")
        call = next(line for line in said.splitlines() if line.startswith("lp.Engine("))
        with eval(call, {"lp": lp}) as engine:
            assert engine.n_ctx == 64
            assert engine.generate("a", lp.SamplingParams(max_tokens=2)).n_completion_tokens <= 2
        assert "--n-ctx" in run("tune", "-c", "16", status=2)

    def test_whether_guesses_pay(self, tmp_path: Path) -> None:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text(
            '{"prompt": "A cow says moo. A cow says moo. A cow says", "temperature": 0}\n{"prompt": "Once"}\n'
        )
        options = ("--prompts", prompts, "--requests", "1,2", "-n", "8", "-c", "128")
        records = [json.loads(line) for line in run("bench", *options, "--json").splitlines()]
        assert [record["n"] for record in records] == [1, 2]
        for record in records:
            assert record["gain"] == pytest.approx(
                record["tokens_per_s_with"] / record["tokens_per_s_without"]
            )
            assert 0 <= record["n_accepted"] <= record["n_drafted"]
        assert "Guesses" in run("bench", *options).splitlines()[-1]
        prompts.write_text('{"prompt": "Once", "temperature": -1}\n')
        assert "record 0: temperature" in run("bench", *options, status=1)
        assert "no_such" in run("bench", "--prompts", tmp_path / "no_such.jsonl", status=1)

    @pytest.mark.parametrize(
        ("gains", "n_drafted", "why_none", "said"),
        [
            ((1.5, 1.0), 9, "", "pay for these prompts: 1.50 times as fast with 1 at once."),
            ((1.0, 0.9), 9, "", "do not pay for these prompts"),
            ((1.0, 1.0), 0, "", "nothing to guess from"),
            ((1.0, 1.0), 0, "it is a hybrid", "guesses nothing: it is a hybrid"),
        ],
    )
    def test_what_is_said_of_guesses(
        self, gains: tuple[float, float], n_drafted: int, why_none: str, said: str
    ) -> None:
        measured = [Guessed(n, 100, 100 * gain, n_drafted, 0) for n, gain in zip((1, 4), gains, strict=True)]
        assert said in verdict(measured, why_none)

    def test_a_disturbed_measurement_is_repeated(self) -> None:
        def measured(*others: float) -> tuple[float, int]:
            speeds = iter([Speed(1, 1, other) for other in others])
            best = least_disturbed(lambda: next(speeds)).n_other_cores
            return best, len(list(speeds))

        assert measured(0.1, 9) == (0.1, 1)
        assert measured(2, 0.2, 9) == (0.2, 1)
        assert measured(2, 1, 3, 9) == (1, 1)  # three times at most


class TestModels:
    def test_the_cache_is_listed(self, tmp_path: Path) -> None:
        data = tiny_model(tmp_path / "one.gguf").read_bytes()
        parts = {f"big-0000{i}-of-00002.gguf": data for i in (1, 2)}
        env = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
        assert run("models", env=env) == ""
        with small_hub({"some/model": {"m-Q8_0.gguf": data, "README.md": b"#"}, "some/split": parts}) as hub:
            env["HF_ENDPOINT"] = hub.url
            run("bench", "-m", "hf:some/model", "--requests", "1", "-n", "1", "--prompt-tokens", "1", env=env)
            program = "from llamapipe.hub import model_file; model_file('some/split', progress=False)"
            subprocess.run(command(program), env=environment(env), check=True)
        records: list[Any] = [json.loads(line) for line in run("models", "--json", env=env).splitlines()]
        names = ["hf:some/model/m-Q8_0.gguf", "hf:some/split/big-00001-of-00002.gguf"]
        assert [record["model"] for record in records] == names
        assert [record["size_bytes"] for record in records] == [len(data), 2 * len(data)]
        run("score", "-m", records[0]["model"], "a", "b", env=env | {"HF_HUB_OFFLINE": "1"})


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion(shell: str, tmp_path: Path) -> None:
    script = run("completion", shell)
    assert "generate" in script
    if (program := shutil.which(shell)) is not None and shell != "tcsh":
        (tmp_path / "script").write_text(script)
        subprocess.run([program, "-n", str(tmp_path / "script")], check=True)


@pytest.mark.parametrize(
    "words", ["generate -f fiv", "chat -m fiv", "serve --chat-template fiv", "batch fiv"]
)
def test_completion_of_file_names(words: str, tmp_path: Path) -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("needs bash")
    (tmp_path / "five.txt").write_text("")
    (tmp_path / "script").write_text(run("completion", "bash"))
    line = ["llamapipe", *words.split()]
    program = (
        f"source ./script; COMP_WORDS=({' '.join(line)}); COMP_CWORD={len(line) - 1}; "
        'COMPREPLY=(); _shtab_llamapipe; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run([bash, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "five.txt\n"
