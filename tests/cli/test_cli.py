"""The command line, run for real in processes of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.run_script import heed_ctrl_c
from support.screen import Screen, run_in_terminal

import llamapipe as lp
from llamapipe.cli import _parser, main
from llamapipe.cli.options import ENGINE, MODEL, SAMPLING, TEXTS
from llamapipe.cli.serve import _open_served
from llamapipe.structured import compile as grammars

PACKAGE = Path(lp.__file__).parent
STORY = "Once upon a time, there was a little fox named Lily."
GREEDY = ["--temperature", "0", "--max-tokens", "16"]


def environment(package: Path = PACKAGE, **more: str) -> dict[str, str]:
    """That of a user at a terminal who has `package` installed."""
    unset = ("NO_COLOR", "COLUMNS", "LINES", "PYTHONUNBUFFERED", "PYTHONIOENCODING", "PYTHONUTF8")
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    return {
        **kept,
        "PYTHONPATH": str(package.parent),
        "TERM": "xterm-256color",
        "PYTHONWARNINGS": "error",
        **more,
    }


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "llamapipe", *map(str, arguments)]


def run(
    *arguments: str | Path,
    cwd: Path,
    stdin: str = "",
    package: Path = PACKAGE,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command(*arguments),
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=240,
        cwd=cwd,
        env=environment(package, **(variables or {})),
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done


def ok(*arguments: str | Path, cwd: Path, stdin: str = "", variables: Mapping[str, str] | None = None) -> str:
    """The output of a command that must succeed in silence on stderr."""
    done = run(*arguments, cwd=cwd, stdin=stdin, variables=variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


class TestUsage:
    def test_version(self, tmp_path: Path) -> None:
        assert ok("--version", cwd=tmp_path) == f"llamapipe {lp.__version__}\n"

    def test_help_names_every_command(self, tmp_path: Path) -> None:
        text = ok("--help", cwd=tmp_path)
        assert all(
            re.search(rf"^ +{name} ", text, re.MULTILINE) for name in ("demo", "generate", "trace", "doctor")
        )

    @pytest.mark.parametrize("name", ["demo", "generate", "trace", "doctor"])
    def test_help_of_every_command(self, name: str, tmp_path: Path) -> None:
        assert ok(name, "--help", cwd=tmp_path).startswith(f"usage: llamapipe {name} ")

    def test_help_of_generate_names_every_option_with_its_default(self, tmp_path: Path) -> None:
        text = ok("generate", "--help", cwd=tmp_path, variables={"COLUMNS": "200"})
        for option in [*SAMPLING, *ENGINE, *MODEL]:
            assert re.search(rf"^  .*{option.flags[-1]}( |$)", text, re.MULTILINE), option.name
            assert all(f" {alias} " in text for alias in option.aliases)
        assert re.search(
            rf"--temperature T\s+.*\(default: {lp.SamplingParams().temperature}\)$", text, re.MULTILINE
        )

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("dance",),
            ("demo", "--tempo"),
            ("generate",),
            ("demo", "--runs", "0"),
            ("demo", "--pace", "-1"),
        ],
    )
    def test_wrong_usage_is_2(self, arguments: tuple[str, ...], tmp_path: Path) -> None:
        done = run(*arguments, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert "usage: llamapipe" in done.stderr

    def test_a_wrong_option_prints_the_usage_of_its_command_and_the_nearest_option(
        self, tmp_path: Path
    ) -> None:
        done = run("generate", "--temprature", "0", STORY, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: llamapipe generate [options]")
        assert "did you mean --temperature?" in done.stderr

    def test_every_sampling_parameter_has_an_option(self) -> None:
        """But those whose results the command does not print, a Python function, and what concerns other callers."""
        fields = {field.name for field in dataclasses.fields(lp.SamplingParams)}
        fields -= {"prompt_logprobs", "logits_processors", "priority", "cache", "cache_salt", "adapter"}
        assert {option.name for option in [*TEXTS, *SAMPLING]} == fields


class TestGenerate:
    def test_several_texts_and_log_probabilities(self, tmp_path: Path) -> None:
        record = json.loads(
            ok(
                "generate",
                "--n",
                "3",
                "--logprobs",
                "2",
                "-n",
                "4",
                "--ignore-eos",
                "--json",
                STORY,
                cwd=tmp_path,
            )
        )
        assert len(record["texts"]) == 3
        assert record["n_completion_tokens"] == 12
        assert [len(entry["top"]) for entry in record["logprobs"]] == [2] * 4
        assert ok("generate", "--n", "3", "-n", "4", STORY, cwd=tmp_path).count("---\n") == 2
        assert "--json" in run("generate", "--logprobs", "2", STORY, cwd=tmp_path).stderr

    def test_streams_one_prompt(self, tmp_path: Path) -> None:
        with subprocess.Popen(
            command("generate", "--max-tokens", "none", "--ignore-eos", "--n-ctx", "512", STORY),
            stdout=subprocess.PIPE,
            cwd=tmp_path,
            env=environment(),
        ) as process:
            assert process.stdout is not None
            first = process.stdout.read(1)
            ended = process.poll()
            rest = process.stdout.read()
        assert first
        assert ended is None  # text came while the command was still at work
        assert len(rest) > 500
        assert rest.endswith(b"\n")

    def test_says_what_the_library_says(self, tmp_path: Path) -> None:
        with lp.Model.demo() as model, lp.Engine(model, n_seq_max=1) as engine:
            text = engine.generate(STORY, lp.SamplingParams(temperature=0, max_tokens=16)).text
        assert ok("generate", *GREEDY, STORY, cwd=tmp_path) == text.removesuffix("\n") + "\n"

    def test_a_seed_repeats_and_another_differs(self, tmp_path: Path) -> None:
        def text(seed: str) -> str:
            return ok("generate", "--temperature", "1.5", "--top-k", "0", "--seed", seed, "A", cwd=tmp_path)

        assert text("7") == text("7") != text("8")

    def test_several_prompts_in_labelled_blocks(self, tmp_path: Path) -> None:
        text = ok("generate", *GREEDY, STORY, "1, 2, 3,", cwd=tmp_path)
        alone = ok("generate", *GREEDY, "1, 2, 3,", cwd=tmp_path)
        assert re.fullmatch(rf"\[1\] {re.escape(STORY)}\n.+\n\n\[2\] 1, 2, 3,\n.+\n", text, re.DOTALL)
        assert text.endswith(alone)

    def test_json_lines(self, tmp_path: Path) -> None:
        lines = ok("generate", *GREEDY, "--json", STORY, "1, 2, 3,", cwd=tmp_path).splitlines()
        first, second = map(json.loads, lines)
        assert (first["index"], second["index"]) == (0, 1)
        assert (first["prompt"], second["prompt"]) == (STORY, "1, 2, 3,")
        assert first["n_completion_tokens"] == 16
        assert first["finish_reason"] == "length"
        assert first["n_prompt_tokens"] > 5
        assert isinstance(first["seed"], int)
        assert first["text"]

    def test_prompts_from_files_and_stdin(self, tmp_path: Path) -> None:
        (tmp_path / "one.txt").write_text("1, 2,\n3,\n")
        text = ok("generate", *GREEDY, "--json", "-", "-f", "one.txt", cwd=tmp_path, stdin="A, B,\n")
        assert [json.loads(line)["prompt"] for line in text.splitlines()] == ["A, B,", "1, 2,\n3,"]

    def test_stdin_is_the_prompt_where_none_is_given(self, tmp_path: Path) -> None:
        text = ok("generate", *GREEDY, "--json", cwd=tmp_path, stdin="A, B,\n")
        assert json.loads(text)["prompt"] == "A, B,"
        text = ok("generate", *GREEDY, "--json", "--lines", cwd=tmp_path, stdin="A, B,\n1, 2,\n")
        assert [json.loads(line)["prompt"] for line in text.splitlines()] == ["A, B,", "1, 2,"]

    def test_an_open_stdin_is_not_read_where_a_prompt_is_given(self, tmp_path: Path) -> None:
        reader, writer = os.pipe()
        try:
            done = subprocess.run(
                command("generate", *GREEDY, STORY),
                stdin=reader,
                capture_output=True,
                timeout=240,
                cwd=tmp_path,
                env=environment(),
                check=False,
            )
        finally:
            os.close(reader)
            os.close(writer)
        assert (done.returncode, done.stderr) == (0, b"")

    def test_a_prompt_from_each_line(self, tmp_path: Path) -> None:
        text = ok("generate", *GREEDY, "--json", "--lines", "-f", "-", cwd=tmp_path, stdin="A, B,\n\n1, 2,\n")
        assert [json.loads(line)["prompt"] for line in text.splitlines()] == ["A, B,", "1, 2,"]

    def test_stop_is_not_shown(self, tmp_path: Path) -> None:
        whole = ok("generate", *GREEDY, "1, 2, 3,", cwd=tmp_path)
        stop = whole[len(whole) // 2 :][:2]
        shown = ok("generate", *GREEDY, "--stop", stop, "1, 2, 3,", cwd=tmp_path)
        assert shown.removesuffix("\n") == whole[: whole.index(stop)]

    @pytest.mark.parametrize("options", [(), ("--n", "2"), ("--n-seq-max", "1")])
    def test_stats_are_those_of_the_records(self, options: tuple[str, ...], tmp_path: Path) -> None:
        words = ("generate", *GREEDY, *options, "--stats", "--lines", "--json", "-")
        done = run(*words, cwd=tmp_path, stdin=f"{STORY}\n{STORY}\nA\n")
        records = [json.loads(line) for line in done.stdout.splitlines()]
        n_prompt = sum(record["n_prompt_tokens"] for record in records)
        n_generated = sum(record["n_completion_tokens"] for record in records)
        assert done.returncode == 0
        assert done.stderr.startswith(f"{n_prompt} prompt tokens, {n_generated} generated in ")
        streamed = run("generate", *GREEDY, "--stats", "A", cwd=tmp_path).stderr
        assert streamed.startswith(f"{records[2]['n_prompt_tokens']} prompt tokens, 16 generated in ")

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (["--top-p", "7"], "--top-p is 7.0"),
            (["--temperature", "nan"], "temperature"),
            (["--temperature", "hot"], "--temperature"),
            (["--max-tokens", "-3"], "--max-tokens is -3"),
            (["--max-tokens", "few"], "none"),
            (["--logit-bias", "x"], "ID=NUMBER"),
            (["--logit-bias", "3=x"], "ID=NUMBER"),
            (["--stop", ""], "stop"),
            (["--n-seq-max", "0"], "--n-seq-max is 0"),
            (["--n-ctx", "-5"], "--n-ctx is -5"),
            (["--n-gpu-layers", "some"], "--n-gpu-layers"),
        ],
    )
    def test_a_bad_value_is_wrong_usage(self, arguments: list[str], named: str, tmp_path: Path) -> None:
        done = run("generate", *arguments, STORY, cwd=tmp_path)
        assert done.returncode == 2
        assert named in done.stderr
        assert "usage: llamapipe generate" in done.stderr

    def test_a_missing_model(self, tmp_path: Path) -> None:
        done = run("generate", "-m", "nowhere.gguf", STORY, cwd=tmp_path)
        assert done.returncode == 1
        assert done.stdout == ""
        assert "nowhere.gguf" in done.stderr
        assert len(done.stderr.splitlines()) == 1

    def test_files_that_are_no_models(self, tmp_path: Path) -> None:
        (tmp_path / "text.gguf").write_text("hello")
        whole = lp.demo_model_path().read_bytes()
        (tmp_path / "half.gguf").write_bytes(whole[: len(whole) // 2])
        for name in ("text.gguf", "half.gguf", "."):
            done = run("generate", "-m", name, STORY, cwd=tmp_path)
            assert done.returncode == 1
            assert done.stderr.startswith("llamapipe: ")

    def test_a_missing_prompt_file(self, tmp_path: Path) -> None:
        done = run("generate", "-f", "nowhere.txt", cwd=tmp_path)
        assert done.returncode == 1
        assert "nowhere.txt" in done.stderr

    def test_a_prompt_file_that_is_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "prompt").write_bytes(b"\xff\xfe")
        done = run("generate", "-f", "prompt", cwd=tmp_path)
        assert done.returncode == 2
        assert "UTF-8" in done.stderr

    def test_a_prompt_longer_than_the_context(self, tmp_path: Path) -> None:
        done = run("generate", "--n-ctx", "64", STORY * 50, cwd=tmp_path)
        assert done.returncode == 1
        assert "64" in done.stderr

    def test_a_failed_line_gives_an_error_record_and_the_others_continue(self, tmp_path: Path) -> None:
        lines = f"{STORY}\n{STORY * 50}\n{STORY}\n"
        arguments = ("generate", *GREEDY, "--n-ctx", "64", "--lines", "--json", "-")
        done = run(*arguments, cwd=tmp_path, stdin=lines)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == 1
        assert ["error" in record for record in records] == [False, True, False]
        assert "n_ctx is 64" in records[1]["error"]["message"]
        assert records[1]["error"]["message"].endswith("raise n_ctx (--n-ctx)")
        assert records[0]["text"] == records[2]["text"]

    @pytest.mark.parametrize("locale", ["C", "POSIX"])
    def test_prompts_are_utf_8_in_every_locale(self, locale: str, tmp_path: Path) -> None:
        variables = {"LC_ALL": locale, "PYTHONUTF8": "0"}
        text = ok("generate", *GREEDY, "--json", "é", "-", cwd=tmp_path, stdin="é", variables=variables)
        assert [json.loads(line)["prompt"] for line in text.splitlines()] == ["é", "é"]

    def test_ctrl_c_is_130(self, tmp_path: Path) -> None:
        with subprocess.Popen(
            command("generate", "--max-tokens", "none", "--ignore-eos", STORY),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=environment(),
            preexec_fn=heed_ctrl_c,  # noqa: PLW1509
        ) as process:
            assert process.stdout is not None
            process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        assert errors == b"llamapipe: interrupted\n"
        assert process.returncode == 130

    @pytest.mark.parametrize("module", ["llamapipe.cli", "llamapipe.cli.generate", "llamapipe.engine"])
    def test_ctrl_c_during_the_import_is_130(self, tmp_path: Path, module: str) -> None:
        program = (
            "import os, signal, sys\n"
            "class Interrupt:\n"
            "    def find_spec(self, name, *others):\n"
            "        if name == sys.argv[-1]:\n"
            "            os.kill(os.getpid(), signal.SIGINT)\n"
            "sys.meta_path.insert(0, Interrupt())\n"
            "from llamapipe_command import main\n"
            "sys.exit(main())\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, "generate", "--help", module],
            capture_output=True,
            check=False,
            cwd=tmp_path,
            env=environment(),
            preexec_fn=heed_ctrl_c,
        )
        assert (done.returncode, done.stderr) == (130, b"llamapipe: interrupted\n")

    def test_a_reader_that_goes_away_is_141_in_silence(self, tmp_path: Path) -> None:
        with subprocess.Popen(
            command("generate", "--max-tokens", "none", "--ignore-eos", STORY),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=environment(),
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(1)
            process.stdout.close()
            errors = process.stderr.read()
            process.wait(timeout=60)
        assert errors == b""
        assert process.returncode == 141

    @pytest.mark.parametrize("arguments", [("--help",), ("generate", *GREEDY, STORY), ("doctor", "--json")])
    def test_no_reader_from_the_start(self, arguments: tuple[str, ...], tmp_path: Path) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        try:
            done = subprocess.run(
                command(*arguments),
                stdout=writer,
                stderr=subprocess.PIPE,
                timeout=240,
                cwd=tmp_path,
                env=environment(),
                check=False,
            )
        finally:
            os.close(writer)
        assert (done.returncode, done.stderr) == (141, b"")

    def test_a_closed_stdin(self, tmp_path: Path) -> None:
        for words, status in ((("generate", *GREEDY, STORY), 0), (("generate",), 2), (("chat",), 2)):
            done = subprocess.run(
                ["sh", "-c", 'exec "$@" <&-', "sh", *command(*words)],
                capture_output=True,
                cwd=tmp_path,
                env=environment(),
                timeout=240,
                check=False,
            )
            assert done.returncode == status and b"Traceback" not in done.stderr

    def test_a_closed_stdout(self, tmp_path: Path) -> None:
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" >&-', "sh", *command("generate", *GREEDY, STORY)],
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            env=environment(),
            timeout=240,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")

    def test_a_closed_stderr(self, tmp_path: Path) -> None:
        """Its messages are discarded, and are not written among the output."""
        for words, status, text in (
            (("generate", *GREEDY, STORY), 0, b"."),
            (("generate", "-m", "nowhere.gguf", STORY), 1, b""),
            (("generate", "--nothing"), 2, b""),
        ):
            done = subprocess.run(
                ["sh", "-c", 'exec "$@" 2>&-', "sh", *command(*words)],
                stdout=subprocess.PIPE,
                cwd=tmp_path,
                env=environment(),
                timeout=240,
                check=False,
            )
            assert done.returncode == status
            assert text in done.stdout if text else not done.stdout

    def test_output_that_is_not_unicode(self, tmp_path: Path) -> None:
        text = ok(
            "generate",
            *GREEDY,
            STORY,
            "é" * 80,
            cwd=tmp_path,
            variables={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        )
        assert "[2] ??" in text


class TestDemo:
    def test_completes_in_plain_labelled_lines(self, tmp_path: Path) -> None:
        text = ok("demo", "--runs", "1", cwd=tmp_path)
        assert "\x1b" not in text
        for title in ("a story", "counting", "a question"):
            assert re.search(rf"^  {title} +[│|] .*\btokens$", text, re.MULTILINE)
        assert re.search(r"^  counting +[│|] . cancelled at \d+ tokens$", text, re.MULTILINE)
        assert "exactly the same as before" in text
        assert re.search(r"^ +16  Once upon a time", text, re.MULTILINE)
        rows = [re.findall(r"\d+(?:\.\d+)?(?= x| ms| s\b|  )", line) for line in text.splitlines()[-8:]]
        assert sum(len(row) >= 3 for row in rows) == 3  # one by one, concurrent, speed-up
        assert all(len(line) < 60 for line in text.splitlines()[-8:])

    def test_is_side_by_side_on_a_terminal(self, tmp_path: Path) -> None:
        arguments = command("demo", "--runs", "1", "--pace", "200")
        status, written = run_in_terminal(arguments, columns=80, lines=24, env=environment(), cwd=tmp_path)
        assert status == 0
        screen = Screen(80)
        screen.feed(written)
        assert screen.cursor_visible
        assert screen.n_redraws > 10
        assert screen.n_styled > 10
        heads = [
            i for i, line in enumerate(screen.lines) if re.fullmatch(r"a story +counting +a question", line)
        ]
        assert len(heads) == 2  # each picture was redrawn in its place
        first, second = (screen.lines[head : head + 10] for head in heads)
        assert len(re.findall(r"✓ \d+ tokens", first[9])) == 3
        assert re.match(r"✓ \d+ tokens +■ cancelled at \d+ tokens +✓ \d+ tokens", second[9])
        assert any(re.match(r"  speed-up( +\d+\.\d x){3}", line) for line in screen.lines)

    def test_no_color_keeps_the_columns(self, tmp_path: Path) -> None:
        arguments = command("demo", "--runs", "1", "--pace", "1000")
        status, written = run_in_terminal(
            arguments, columns=90, lines=40, env=environment(NO_COLOR="1"), cwd=tmp_path
        )
        assert status == 0
        screen = Screen(90)
        screen.feed(written)
        assert screen.n_styled == 0
        assert screen.n_redraws > 10

    @pytest.mark.parametrize(("columns", "term"), [(50, "xterm"), (90, "dumb")])
    def test_a_narrow_or_dumb_terminal_gets_lines(self, columns: int, term: str, tmp_path: Path) -> None:
        arguments = command("demo", "--runs", "1", "--pace", "0")
        _, written = run_in_terminal(
            arguments, columns=columns, lines=40, env=environment(TERM=term), cwd=tmp_path
        )
        assert re.search(r"counting +│ . cancelled at \d+ tokens", written)

    def test_ctrl_c_shows_the_cursor_again(self, tmp_path: Path) -> None:
        status, written = run_in_terminal(
            command("demo", "--pace", "5"),
            columns=90,
            lines=40,
            env=environment(),
            cwd=tmp_path,
            interrupt_at="2 tokens",
        )
        assert status == 130
        screen = Screen(90)
        screen.feed(written)
        assert screen.cursor_visible
        assert screen.lines[-2] == "llamapipe: interrupted"


class TestDoctor:
    def test_all_is_well(self, tmp_path: Path) -> None:
        text = ok("doctor", cwd=tmp_path)
        for name in (
            "llamapipe",
            "python",
            "numpy",
            "cffi",
            "build",
            "CPU features",
            "llama.cpp",
            "native module",
            "device CPU",
            "demo model",
            "KV cache",
        ):
            assert re.search(rf"^✓ {name} ", text, re.MULTILINE), name
        assert text.endswith("No problems found.\n")

    def test_json(self, tmp_path: Path) -> None:
        report = json.loads(ok("doctor", "--json", cwd=tmp_path))
        assert report["ok"] is True
        assert report["build"]["llama_cpp_commit"]
        assert [device["name"] for device in report["devices"]] == [device.name for device in lp.devices()]

    @staticmethod
    def copy(to: Path) -> Path:
        """The package without its native module."""
        return shutil.copytree(
            PACKAGE, to / "llamapipe", ignore=shutil.ignore_patterns("_native*", "__pycache__")
        )

    def test_a_missing_native_module_and_how_to_build_it(self, tmp_path: Path) -> None:
        done = run("doctor", cwd=tmp_path, package=self.copy(tmp_path))
        assert done.returncode == 1
        assert "■ native module" in done.stdout
        assert "python build_native.py" in done.stdout
        assert done.stdout.endswith("Problems found: native module\n")

    def test_a_source_tree_that_shadows_the_installation_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "clone").mkdir()
        package = self.copy(tmp_path / "clone")
        program = "import llamapipe; llamapipe.devices()"
        path = os.pathsep.join([str(package.parent), str(PACKAGE.parent)])
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environment(PYTHONPATH=path),
            check=False,
        )
        assert done.returncode == 1
        assert f"shadows the installation in {PACKAGE.parent}" in done.stderr
        assert f"imported from {package.parent}" in done.stderr

    def test_a_native_module_that_ends_the_process(self, tmp_path: Path) -> None:
        package = self.copy(tmp_path)
        (package / "native" / "_native.py").write_text(
            "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
        )
        done = run("doctor", "--json", cwd=tmp_path, package=package)
        assert done.returncode == 1
        wrong = [finding for finding in json.loads(done.stdout)["findings"] if not finding["ok"]]
        assert [finding["name"] for finding in wrong] == ["native module"]
        assert "another processor" in wrong[0]["detail"]
        assert "build_native.py" in wrong[0]["fix"]

    def test_a_damaged_demo_model(self, tmp_path: Path) -> None:
        package = shutil.copytree(
            PACKAGE, tmp_path / "llamapipe", ignore=shutil.ignore_patterns("__pycache__")
        )
        for model in (package / "data").glob("*.gguf"):
            model.write_bytes(b"GGUF")
        done = run("doctor", cwd=tmp_path, package=package)
        assert done.returncode == 1
        assert done.stdout.endswith("Problems found: demo model\n")


class TestTrace:
    def test_it_writes_both_kinds(self, tmp_path: Path) -> None:
        text = ok("trace", "--requests", "3", "--max-tokens", "8", "--n-threads", "1", cwd=tmp_path)
        assert all(stage in text for stage in ("plan", "launch", "compute", "sample", "deliver"))
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert (tmp_path / "trace.svg").read_text(encoding="utf-8").startswith("<svg")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("-o", "x.png"), "neither .json"),
            (("--requests", "0"), "at least 1"),
            (("--steps", "-1"), "at least 1"),
            (("-o", "nowhere/x.json"), "-o nowhere/x.json: there is no folder nowhere"),
            (("--rows", "4", "--n-threads", "1", "--type-k", "q8_0"), "--type-k and --rows do not go"),
        ],
    )
    def test_wrong_usage(self, arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
        done = run("trace", *arguments, cwd=tmp_path)
        assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize("missing", ["lm_eval", "jinja2"])
def test_the_harness_command_names_its_extra(missing: str, tmp_path: Path) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from llamapipe.cli.lm_eval import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment(PYTHONWARNINGS="default"),  # the harness has some of its own
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("llamapipe-lm-eval: ")
    assert done.stderr.rstrip().splitlines()[-1].endswith('pip install "llamapipe[lm-eval]"')


def test_a_server_is_prepared_for_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a request has to read the vocabulary")

    with _open_served(_parser().parse_args(["serve", "--n-ctx", "128"])) as (engine, _):
        assert engine is not None
        monkeypatch.setattr(grammars, "GrammarTokenizer", read)
        out = engine.generate("Count:", lp.SamplingParams(max_tokens=4, regex=" [0-9]+"))
    assert out.text.strip().isdecimal()


def test_a_server_switches_threads_often(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    before = sys.getswitchinterval()
    monkeypatch.setattr("llamapipe.server.run_server", lambda *_: seen.append(sys.getswitchinterval()))
    try:
        assert main(["serve", "--port", "0", "--n-ctx", "128"]) == 0
    finally:
        sys.setswitchinterval(before)
    assert seen and seen[0] < 0.001
