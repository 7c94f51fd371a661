"""Batch jobs: kinds of records, order, memory, bad lines, and jobs that are killed and started again."""

from __future__ import annotations

import asyncio
import csv
import datetime
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as arrow
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest
from support.adapters import make_adapter, make_control_vector
from support.control import PATIENCE_S, wait_until
from support.inside import loop_of
from support.run_script import command, environment, run_script

import llamapipe as lp
from llamapipe.cli import main
from llamapipe.jobs.answers import Answerer
from llamapipe.jobs.records import MAX_LINE_BYTES, Record, as_json, count_records, read_records
from llamapipe.jobs.results import ResultFile, open_output
from llamapipe.jobs.run import BatchSummary, EventLoopThread, run_job
from llamapipe.server.batch import BatchRequests

GREEDY = lp.SamplingParams(max_tokens=6, temperature=0.0)
N_KILLS = int(os.environ.get("LLAMAPIPE_KILLS", "8"))
COUNTS = ("seed", "n_prompt_tokens", "n_completion_tokens")
CLI = "import sys; from llamapipe.cli import main; sys.exit(main())"


@pytest.fixture
def talker(demo: lp.Model) -> Iterator[lp.Engine]:
    with lp.Engine(demo, n_ctx=1024, n_seq_max=4) as engine:
        yield engine


@pytest.fixture
def job(talker: lp.Engine, tmp_path: Path) -> Callable[..., tuple[BatchSummary, list[dict[str, Any]]]]:
    """Runs the records of a text, and returns what was done and all results."""

    def run(
        text: str | bytes, name: str = "in.jsonl", **options: Any
    ) -> tuple[BatchSummary, list[dict[str, Any]]]:
        source = tmp_path / name
        source.write_bytes(text.encode() if isinstance(text, str) else text)
        ordered, retry_failed = options.pop("ordered", True), options.pop("retry_failed", False)
        params = options.pop("params", GREEDY)
        answerer = Answerer(talker, params, requests=lambda: BatchRequests(talker).answer, **options)
        results = ResultFile(tmp_path / "out.jsonl")
        try:
            results.begin(answerer.settings(), retry_failed=retry_failed)
            done = run_job(read_records(source), answerer, results, n_ahead=16, ordered=ordered)
        finally:
            results.close()
        return done, [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]

    return run


class Ban:
    """A logits processor with options."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, row: Any) -> None:
        row[self.tokens] = -np.inf


class Biases:
    """One with an array."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __call__(self, row: Any) -> None:
        row[: len(self.values)] += self.values


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


class TestKinds:
    def test_prompts_and_conversations(self, job: Any, talker: lp.Engine) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        done, results = job(
            lines(
                {"prompt": "The cat"},
                "A dog",
                {"id": "x", "messages": messages},
                {"prompt": "Once", "max_tokens": 3},
            )
        )
        assert (done.n_done, done.n_failed) == (4, 0)
        assert done.n_cut == sum(result["finish_reason"] == "length" for result in results) >= 1
        expected = [completion.text for completion in talker.generate(["The cat", "A dog"], GREEDY)]
        assert [result["text"] for result in results[:2]] == expected
        assert results[2]["text"] == talker.chat(messages, GREEDY).content
        assert (results[2]["id"], results[2]["index"]) == ("x", 2)
        assert results[3]["n_completion_tokens"] == 3
        assert done.n_tokens == sum(result["n_completion_tokens"] for result in results)

    def test_requests_are_answered_as_the_server_answers_them(self, job: Any) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0}
        record = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
        many: list[dict[str, Any]] = [
            record,
            record | {"custom_id": "b", "body": {"messages": 5}},
            record | {"custom_id": "c", "url": "/v1/nowhere"},
        ]
        many += [record | {"custom_id": "d", "body": body | {"stream": True}}, {"custom_id": "e", "url": 5}]
        done, results = job(lines(*many))
        assert [result["custom_id"] for result in results] == list("abcde")
        assert [(result["response"] or {}).get("status_code") for result in results] == [
            200,
            400,
            404,
            None,
            None,
        ]
        assert results[0]["response"]["body"]["choices"][0]["message"]["content"]
        assert "whole answers" in results[3]["error"]["message"]
        assert (done.n_done, done.n_failed, done.n_tokens, done.n_cut) == (5, 4, 6, 1)

    def test_columns_and_a_template(self, job: Any, talker: lp.Engine) -> None:
        text = 'id,animal,"max_tokens"\n1,cat,many\n2,"a, b",\n3,dog\n'
        done, results = job(text, "in.csv", template="The {animal} said {{")
        expected = talker.generate(["The cat said {", "The a, b said {"], GREEDY)
        assert [result.get("text") for result in results] == [expected[0].text, expected[1].text, None]
        assert [result.get("id") for result in results] == ["1", "2", None]
        assert "2 values, the header names 3" in results[2]["error"]["message"]
        assert done.n_failed == 1

    def test_columns_with_the_names_of_requests(self, job: Any) -> None:
        text = "id,custom_id,animal\n1,a,cat\n2,b,dog\n"
        _, results = job(text, "in.csv", template="The {animal}")
        assert [(result["index"], result["id"], result["custom_id"]) for result in results] == [
            (0, "1", "a"),
            (1, "2", "b"),
        ]
        assert job(text, "in.csv", template="The {animal}")[0].n_done == 0

    def test_a_system_message_makes_conversations(self, job: Any, talker: lp.Engine) -> None:
        _, results = job(lines("Hello"), system="Be brief.")
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        assert results[0]["text"] == talker.chat(messages, GREEDY).content

    def test_several_texts_and_log_probabilities(self, job: Any) -> None:
        records = [{"prompt": "a", "n": 3}, {"prompt": "a", "logprobs": 2}]
        _, results = job(lines(*records))
        assert len(results[0]["texts"]) == 3
        n_tokens = results[1]["n_completion_tokens"]
        assert [len(entry["top"]) for entry in results[1]["logprobs"]] == [2] * n_tokens
        _, results = job(lines(*records, {"prompt": "a", "prompt_logprobs": 2}))
        assert "is not an option" in results[2]["error"]["message"]

    def test_bad_records_fail_alone(self, job: Any) -> None:
        bad = [
            '{"prompt": "a"',
            "5",
            "[]",
            "{}",
            '{"prompt": "a", "messages": []}',
            '{"prompt": "a", "max_tokns": 3}',
        ]
        bad += [
            '{"prompt": "a", "temperature": -1}',
            '{"prompt": 5}',
            '{"prompt": ["a", "b"]}',
            '{"prompt": []}',
            '{"messages": [[]]}',
            '{"messages": "hi"}',
            '{"prompt": "\\ud800"}',
            "[" * 5000,
        ]
        text = "\n\n".join(f'{line}\n"fine"' for line in bad).encode() + b'\n{"prompt": "\xff"}'
        done, results = job(text)
        assert (done.n_done, done.n_failed) == (2 * len(bad) + 1, len(bad) + 1)
        assert ["error" in result for result in results] == [True, False] * len(bad) + [True]
        assert "did you mean max_tokens?" in results[10]["error"]["message"]

    def test_a_bad_line_is_found_by_its_number(self, job: Any) -> None:
        _, results = job('\n\n"fine"\n{"prompt": a}\n[]\n')
        assert [result["index"] for result in results] == [0, 1, 2]
        message = results[1]["error"]["message"]
        assert message.startswith("line 4 is not JSON: ")
        assert message.endswith(", at character 12")
        assert results[2]["error"]["message"] == "line 5 is a list; write each record on a separate line"

    def test_a_null_makes_no_prompt(self, job: Any) -> None:
        _, results = job(lines({"text": None}, {"text": ""}, {"txt": 1}), template="T: {text}")
        assert results[0]["error"]["message"] == "the column 'text' is null"
        assert "error" not in results[1]
        assert results[2]["error"]["message"] == "the record has no column 'text'; it has 'txt'"

    def test_kept_columns_are_in_the_results(self, job: Any) -> None:
        records = [{"prompt": "a", "label": ["pos"], "max_tokens": 2}, {"prompt": "b"}]
        _, results = job(lines(*records), keep=["label", "max_tokens"])
        assert (results[0]["label"], results[0]["max_tokens"]) == (["pos"], 2)
        assert results[0]["n_completion_tokens"] == 2
        assert results[1]["error"]["message"] == "the record has no column 'label'; it has 'prompt'"

    def test_a_column_without_a_use_names_the_way_out(self, job: Any) -> None:
        _, results = job(lines({"prompt": "a", "label": 1}))
        assert "to copy the column to the result, name it in keep" in results[0]["error"]["message"]

    def test_kept_columns_of_requests(self, job: Any) -> None:
        body = {"prompt": "a", "max_tokens": 1}
        record = {"custom_id": "a", "url": "/v1/completions", "body": body, "label": 5}
        _, results = job(lines(record), keep=["label"])
        assert (results[0]["label"], results[0]["response"]["status_code"]) == (5, 200)

    @pytest.mark.parametrize("ending", ["jsonl.gz", "csv.gz"])
    def test_compressed_files_are_read(self, job: Any, tmp_path: Path, ending: str) -> None:
        text = b'prompt\na\n"b\nc"\n' if ending == "csv.gz" else b'"a"\n{"prompt": "b\\nc"}\n'
        name = f"in.{ending}"
        _, results = job(gzip.compress(text), name)
        assert len(results) == 2
        assert not any("error" in result for result in results)
        assert count_records(tmp_path / name) == 2
        with pytest.raises(ValueError, match=r"damaged or not a gzip file"):
            job(gzip.compress(text)[:-9], name)
        with pytest.raises(ValueError, match=r"damaged or not a gzip file"):
            job(text, name)

    def test_a_line_that_is_too_long(self, tmp_path: Path) -> None:
        path = tmp_path / "long.jsonl"
        path.write_bytes(b'"' + b"a" * (MAX_LINE_BYTES + 5) + b'"\n"b"\n')
        first, second = read_records(path)
        assert "longer than" in str(first.problem)
        assert second == Record(1, {"prompt": "b"})

    def test_a_csv_file_with_a_long_text(self, tmp_path: Path) -> None:
        """Python's own limit, 128 KiB, would end the job."""
        path = tmp_path / "long.csv"
        path.write_text(f"id,text\n1,{'a ' * 2**17}\n2,b\n")
        assert [record.id for record in read_records(path)] == ["1", "2"]

    @pytest.mark.parametrize(("header", "name"), [("text,id,text", "text"), ("a,,b,", None)])
    def test_a_csv_file_with_two_columns_of_a_name(
        self, tmp_path: Path, header: str, name: str | None
    ) -> None:
        """Only the values of the last one would be read; spreadsheets leave the names of empty columns out."""
        path = tmp_path / "twice.csv"
        path.write_text(header + "\n" + "x," * header.count(",") + "y\n")
        if name is None:
            assert len(list(read_records(path))) == 1
        else:
            with pytest.raises(ValueError, match=f"names two columns '{name}'; rename one"):
                list(read_records(path))

    @pytest.mark.parametrize(
        ("text", "message"), [("prompt,a,a\nx,1,2\n", "names two columns"), ("", "no header")]
    )
    def test_a_wrong_header_is_told_at_once(
        self, talker: lp.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
    ) -> None:
        """Not after a model is loaded, and a file for the results made."""
        (tmp_path / "in.csv").write_text(text)
        with pytest.raises(ValueError, match=message):
            lp.run_batch(tmp_path / "in.csv", talker, GREEDY, output=tmp_path / "out.jsonl")
        words = ["batch", str(tmp_path / "in.csv"), "-o", str(tmp_path / "out.jsonl"), "-m", "nowhere.gguf"]
        assert main(words) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out.jsonl").exists()

    def test_columns_of_a_format_are_columns_of_the_template(self, talker: lp.Engine) -> None:
        assert Answerer(talker, GREEDY, "{a!r:>{b}} {c:{d}.{e}}").columns == ["a", "b", "c", "d", "e"]
        records: list[Any] = [{"a": "x", "b": 3}, {"a": "x", "b": None}, {"a": "x"}]
        results = list(lp.run_batch(records, talker, GREEDY, template="{a:>{b}}"))
        assert [result.get("error", {}).get("message") for result in results] == [
            None,
            "the column 'b' is null",
            "the record has no column 'b'; it has 'a'",
        ]

    @pytest.mark.parametrize(
        "template", ["{}", "{0}", "{a.b}", "{a[0]}", "{", "}", "{a!z}", "{a:>{b.c}}", "{a:{}}", "{a:{b:{c}}}"]
    )
    def test_wrong_templates_are_refused(self, talker: lp.Engine, template: str) -> None:
        with pytest.raises(ValueError, match=r"template|brace|'[{}]'"):
            Answerer(talker, GREEDY, template)


class TestOrder:
    @pytest.mark.parametrize("ordered", [True, False])
    def test_results_are_in_the_order_that_is_asked_for(self, job: Any, ordered: bool) -> None:
        rng = random.Random(5)
        records = [{"prompt": f"Tale {i}", "max_tokens": rng.choice((1, 40))} for i in range(60)]
        _, results = job(lines(*records), ordered=ordered)
        order = [result["index"] for result in results]
        assert sorted(order) == list(range(60))
        assert (order == list(range(60))) is ordered

    def test_records_are_read_as_they_are_needed(self, talker: lp.Engine, tmp_path: Path) -> None:
        results, n_read = ResultFile(tmp_path / "out.jsonl"), 0
        results.begin(0)

        def endless() -> Iterator[Record]:
            nonlocal n_read
            for index in range(200):
                n_read += 1
                assert n_read <= results.n_done + 9
                yield Record(index, {"prompt": "a", "max_tokens": 2})

        run_job(endless(), Answerer(talker, GREEDY), results, n_ahead=8)
        assert results.n_done == 200
        results.close()


class TestAgain:
    def test_what_is_there_is_not_done_again(self, job: Any, tmp_path: Path) -> None:
        records = [{"id": f"r{i}", "prompt": f"Tale {i}"} for i in range(20)]
        _, whole = job(lines(*records))
        out = tmp_path / "out.jsonl"
        kept = out.read_bytes().splitlines(keepends=True)
        out.write_bytes(b"".join(kept[:7]) + kept[7][:-9])  # killed while it wrote a line
        done, results = job(lines(*records))
        assert (done.n_done, done.n_skipped) == (13, 7)
        assert [result["text"] for result in results] == [result["text"] for result in whole]
        assert job(lines(*records))[0].n_done == 0

    def test_another_input_is_refused(self, job: Any) -> None:
        job(lines({"id": "a", "prompt": "a"}))
        for other in ({"id": "b", "prompt": "a"}, {"id": "a", "prompt": "b"}):
            with pytest.raises(ValueError, match="record 1 has changed since its result was written"):
                job(lines(other))

    @pytest.mark.parametrize(
        "options",
        [
            {"template": "A {prompt}"},
            {"chat": True},
            {"keep": ["prompt"]},
            {"params": lp.SamplingParams(top_k=5)},
        ],
        ids=str,
    )
    def test_other_settings_are_refused(self, job: Any, options: dict[str, Any]) -> None:
        job(lines({"prompt": "a"}))
        with pytest.raises(ValueError, match="another model, template or options"):
            job(lines({"prompt": "a"}), **options)

    def test_another_model_is_refused(self, talker: lp.Engine, tiny: lp.Model, tmp_path: Path) -> None:
        out = tmp_path / "out.jsonl"
        lp.run_batch(["a"], talker, GREEDY, output=out)
        with lp.Engine(tiny, n_ctx=256) as engine, pytest.raises(ValueError, match="another model"):
            lp.run_batch(["a"], engine, GREEDY, output=out)

    def test_another_file_behind_an_adapters_name_is_refused(self, tmp_path: Path) -> None:
        """Also where only records name it."""
        out, model_path = tmp_path / "out.jsonl", lp.demo_model_path()
        with lp.Model(model_path) as model:
            n_embd = model.n_embd
        makers: list[Callable[[Path, int], Path]] = [
            lambda path, seed: make_adapter(path, model_path, seed=seed),
            lambda path, seed: make_control_vector(path, n_embd, [1], seed=seed),
        ]
        for make, load in zip(makers, ("load_adapter", "load_control_vector"), strict=True):
            files = [make(tmp_path / f"{load}-{seed}.gguf", seed) for seed in (1, 2)]
            for records, params in (
                (["a", "b"], lp.SamplingParams(max_tokens=2, adapter="style")),
                ([{"prompt": "a", "adapter": "style"}], GREEDY),
            ):
                out.unlink(missing_ok=True)
                for file, is_same in ((files[0], True), (files[0], True), (files[1], False)):
                    with lp.Model(model_path) as model, lp.Engine(model, n_ctx=64) as engine:
                        getattr(model, load)(file, name="style")
                        if is_same:
                            assert lp.run_batch(records, engine, params, output=out).n_failed == 0
                        else:
                            with pytest.raises(ValueError, match="another model"):
                                lp.run_batch(records, engine, params, output=out)

    def test_another_logits_processor_of_the_same_type_is_refused(
        self, talker: lp.Engine, tmp_path: Path
    ) -> None:
        def ban(token: int) -> Callable[[Any], None]:
            def processor(row: Any) -> None:
                row[token] = -np.inf

            return processor

        def favour(row: Any, token: int = 5) -> None:
            row[token] += 1

        pairs: list[tuple[Callable[[], Any], Callable[[], Any]]] = [
            (lambda: ban(5), lambda: ban(6)),
            (lambda: Ban([5]), lambda: Ban([6])),
            (lambda: Ban([5]).__call__, lambda: Ban([6]).__call__),
            (lambda: partial(favour, token=5), lambda: partial(favour, token=6)),
            (lambda: lambda row: row.fill(0), lambda: lambda row: row.fill(1)),
            (lambda: Biases(np.zeros(3)), lambda: Biases(np.ones(3))),
        ]
        for i, (make, make_other) in enumerate(pairs):
            out = tmp_path / f"{i}.jsonl"

            def run(processor: Any, out: Path = out) -> BatchSummary:
                params = lp.SamplingParams(max_tokens=2, logits_processors=[processor])
                return lp.run_batch(["a"], talker, params, output=out)

            assert run(make()).n_done == 1
            assert run(make()).n_skipped == 1  # the same one, made anew
            with pytest.raises(ValueError, match="another model"):
                run(make_other())

    def test_a_logits_processor_is_known_in_another_process(self) -> None:
        """Neither addresses nor hashes of texts are looked at."""
        program = """
import llamapipe as lp
from llamapipe.jobs.answers import Answerer
class Ban:
    def __init__(self, words):
        self.words, self.me = words, self
    def __call__(self, row):
        row[3] = 0
def first(row, words=frozenset("abcdef")):
    return [one for one in words if one in {"x", "y", "z"}]
with lp.Model.demo() as model, lp.Engine(model, n_ctx=64) as engine:
    params = lp.SamplingParams(logits_processors=[Ban(set("abcdef")), first, lambda row: None])
    say(Answerer(engine, params).settings())
"""
        assert run_script(program) == run_script(program)

    def test_failures_that_were_there_count_and_can_be_tried_again(self, job: Any) -> None:
        records: list[Any] = [f"Tale {i}" for i in range(9)]
        records[2] = records[5] = {"prompt": 5}
        done, _ = job(lines(*records))
        assert (done.n_done, done.n_failed) == (9, 2)
        done, results = job(lines(*records))
        assert (done.n_done, done.n_skipped, done.n_skipped_failed, len(results)) == (0, 9, 2, 9)
        records[5] = "Mended"
        done, results = job(lines(*records), retry_failed=True)
        assert (done.n_done, done.n_failed, done.n_skipped) == (2, 1, 7)
        assert [result["index"] for result in results] == [0, 1, 3, 4, 6, 7, 8, 2, 5]
        assert ["error" in result for result in results] == [False] * 7 + [True, False]

    def test_failed_requests_are_tried_again(self, job: Any) -> None:
        bad = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": 5}}
        assert job(lines(bad, bad | {"url": 7}))[0].n_failed == 2
        good = bad | {"body": {"prompt": "a", "max_tokens": 1}}
        done, results = job(lines(good, good), retry_failed=True)
        assert (done.n_done, done.n_failed, len(results)) == (2, 0, 2)

    def test_another_file_is_refused_and_kept(self, job: Any, tmp_path: Path) -> None:
        (tmp_path / "out.jsonl").write_text('{"name": "precious"}\nno line end')
        with pytest.raises(ValueError, match=r"line 1, is not a result of this batch job"):
            job(lines("a"))
        assert (tmp_path / "out.jsonl").read_text() == '{"name": "precious"}\nno line end'

    @pytest.mark.parametrize(
        "text",
        [
            '{"name": "precious"}',
            '{"id": "mine"}',
            "{x",
            '{"index" : 1}',
            '{"index": -5, "digest": "0000000000000001"}\n',
        ],
    )
    def test_a_file_without_a_line_end_is_refused_and_kept(self, job: Any, tmp_path: Path, text: str) -> None:
        (tmp_path / "out.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"line 1, is not a result of this batch job"):
            job(lines("a"))
        assert (tmp_path / "out.jsonl").read_text() == text

    @pytest.mark.parametrize("text", ['{"ind', '{"index": 0, "te', '{"id": "batch_req_0", "cus'])
    def test_the_beginning_of_a_result_is_cut_off(self, job: Any, tmp_path: Path, text: str) -> None:
        (tmp_path / "out.jsonl").write_text(text)
        assert job(lines("a"))[0].n_done == 1

    def test_a_link_stays_one_when_failures_are_removed(self, job: Any, tmp_path: Path) -> None:
        target = tmp_path / "target.jsonl"
        target.touch(mode=0o640)
        (tmp_path / "out.jsonl").symlink_to(target)
        job(lines("a", {"prompt": 5}))
        done, results = job(lines("a", "b"), retry_failed=True)
        assert (done.n_done, len(results), (tmp_path / "out.jsonl").is_symlink()) == (1, 2, True)
        assert target.stat().st_mode & 0o777 == 0o640

    def test_a_file_has_one_writer(self, tmp_path: Path) -> None:
        first = ResultFile(tmp_path / "out.jsonl")
        with pytest.raises(BlockingIOError, match="written by another process"):
            ResultFile(tmp_path / "out.jsonl")
        first.close()
        ResultFile(tmp_path / "out.jsonl").close()


def batch(folder: Path, *options: str) -> subprocess.Popen[str]:
    """The command, over in.jsonl."""
    words = [
        "batch",
        str(folder / "in.jsonl"),
        "-o",
        str(folder / "out.jsonl"),
        "--max-tokens",
        "12",
        *options,
    ]
    return subprocess.Popen(
        command(CLI, *words), env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


class TestCommand:
    @pytest.mark.timeout(300 + 3 * N_KILLS)
    def test_killed_again_and_again(self, tmp_path: Path) -> None:
        rng, n = random.Random(7), 40 * N_KILLS
        (tmp_path / "in.jsonl").write_text(lines(*({"id": i, "prompt": f"Tale {i}"} for i in range(n))))
        out = tmp_path / "out.jsonl"
        for _ in range(N_KILLS):
            # When some more results are there, so that every kill hits a job at work.
            wanted = (out.stat().st_size if out.exists() else 0) + rng.randrange(1, 4000)
            with batch(tmp_path, *rng.choice(([], ["--unordered"]))) as process:
                while process.poll() is None and (not out.exists() or out.stat().st_size < wanted):
                    pass
                process.kill()
        with batch(tmp_path) as process:
            _, said = process.communicate()
        assert process.returncode == 0, said
        results = [json.loads(line) for line in out.read_bytes().splitlines()]
        assert Counter(result["id"] for result in results) == Counter(range(n))
        assert all(result["id"] == result["index"] for result in results)
        assert "were there already" in said

    def test_an_interrupt_leaves_whole_lines(self, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text(lines(*({"prompt": f"Tale {i}"} for i in range(3000))))
        out = tmp_path / "out.jsonl"
        with batch(tmp_path) as process:
            while process.poll() is None and (not out.exists() or not out.stat().st_size):
                pass
            process.send_signal(signal.SIGINT)
            _, said = process.communicate()
        assert process.returncode == 130, said
        assert out.read_bytes().endswith(b"\n")
        assert "Traceback" not in said

    def test_wrong_usage(self, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text(lines("a"))
        for options, message in (
            (["--template", "{"], "the template is '{'"),
            (["--temperature", "-1"], "temperature"),
        ):
            with batch(tmp_path, *options) as process:
                _, said = process.communicate()
            assert process.returncode == 2
            assert message in said
        (tmp_path / "in.txt").write_text("a")
        words = ["batch", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.jsonl")]
        done = subprocess.run(
            command(CLI, *words), env=environment(), text=True, capture_output=True, check=False
        )
        assert (done.returncode, "must end with .jsonl, .csv," in done.stderr) == (2, True)

    def test_standard_input_names_of_requests_and_failures(self, tmp_path: Path) -> None:
        body = {"model": "gpt-x", "prompt": "a", "max_tokens": 1}
        records = [{"custom_id": "a", "url": "/v1/completions", "body": body}]
        records.append({"custom_id": "b", "url": "/v1/embeddings", "body": {"model": "e", "input": "a"}})
        out = tmp_path / "out.jsonl"

        def run(*options: str) -> tuple[int, str]:
            words = ["batch", "-", "-o", str(out), *options]
            done = subprocess.run(
                command(CLI, *words),
                env=environment(),
                text=True,
                input=lines(*records),
                capture_output=True,
                check=False,
            )
            return done.returncode, done.stderr

        assert run()[0] == 1
        statuses = [json.loads(line)["response"] for line in out.read_text().splitlines()]
        assert [status["status_code"] for status in statuses] == [404, 404]
        assert "--alias" in statuses[0]["body"]["error"]["message"]
        status, said = run()
        assert status == 1
        assert "2 were there already, 2 of them failed (--retry-failed answers them again)" in said
        demo = str(lp.demo_model_path())
        status, said = run(
            "--retry-failed", "--alias", "gpt-x", "--embeddings", demo, "--embeddings-alias", "e"
        )
        assert status == 0, said
        first, second = map(json.loads, out.read_text().splitlines())
        assert first["response"]["body"]["model"] == "gpt-x"
        assert len(second["response"]["body"]["data"][0]["embedding"]) > 10

    def test_a_pipe_that_stays_open(self, tmp_path: Path) -> None:
        """An answer is written although no further record has come; then Ctrl-C ends the command."""
        out = tmp_path / "out.jsonl"
        words = ["batch", "-", "-o", str(out), "--max-tokens", "4"]
        with subprocess.Popen(
            command(CLI, *words),
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdin is not None
            for n in (1, 2):
                process.stdin.write(lines(f"Tale {n}"))
                process.stdin.flush()
                wait_until(
                    lambda n=n: (
                        process.poll() is not None  # type: ignore[misc]
                        or (out.exists() and out.read_bytes().count(b"\n") == n)
                    )
                )
            process.send_signal(signal.SIGINT)
            process.wait()
            assert process.stderr is not None
            said = process.stderr.read()
        assert process.returncode == 130, said
        assert "rror" not in said

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
    def test_a_named_pipe_that_stays_open(self, tmp_path: Path) -> None:
        """Its records are not counted first, which would take them, and do not wait for one another."""
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        os.mkfifo(source)
        assert count_records(source) is None
        with batch(tmp_path) as process:
            with source.open("w") as pipe:
                pipe.write(lines("Tale"))
                pipe.flush()
                wait_until(lambda: process.poll() is not None or (out.exists() and out.stat().st_size > 0))
            _, said = process.communicate()
        assert process.returncode == 0, said
        assert len(out.read_bytes().splitlines()) == 1

    def test_a_closed_standard_input(self, tmp_path: Path) -> None:
        words = ["batch", "-", "-o", str(tmp_path / "out.jsonl")]
        done = subprocess.run(
            command(CLI, *words),
            env=environment(),
            text=True,
            capture_output=True,
            check=False,
            preexec_fn=lambda: os.close(0),
        )
        assert done.returncode == 2
        assert "there is no standard input" in done.stderr

    def test_what_is_refused_before_a_model_is_loaded(self, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text(lines("a"))
        (tmp_path / "out.csv").write_text("x")
        for out, options, status, message in (
            ("out.csv", ["--retry-failed"], 2, "--retry-failed needs an OUT that ends with .jsonl"),
            ("out.csv", [], 0, "is complete already"),
            ("new.jsonl", ["--embeddings", str(tmp_path / "in.jsonl")], 1, "in.jsonl"),
        ):
            words = ["batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / out), *options]
            done = subprocess.run(
                command(CLI, *words), env=environment(), text=True, capture_output=True, check=False
            )
            assert (done.returncode, message in done.stderr) == (status, True), done.stderr
        assert (tmp_path / "new.jsonl").read_text() == ""

    @pytest.mark.parametrize("ending", ["jsonl", "csv"])
    def test_a_wrong_option_overwrites_nothing(self, tmp_path: Path, ending: str) -> None:
        (tmp_path / "in.jsonl").write_text(lines("a"))
        out = tmp_path / f"out.{ending}"
        out.write_text("something else")
        words = ["batch", str(tmp_path / "in.jsonl"), "-o", str(out), "--max-tokens", "2", "--overwrite"]
        for bad in (["--template", "{"], []):
            done = subprocess.run(
                command(CLI, *words, *bad), env=environment(), text=True, capture_output=True, check=False
            )
            assert done.returncode == (2 if bad else 0), done.stderr
            assert ("something else" in out.read_text()) is bool(bad)

    def test_a_full_disk(self, tmp_path: Path) -> None:
        """Files may have 2,000 bytes: the command fails, and later goes on with what fitted."""
        (tmp_path / "in.jsonl").write_text(lines(*({"prompt": f"Tale {i}"} for i in range(50))))
        limited = (
            "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); "
        )
        words = ["batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--max-tokens", "12"]
        done = subprocess.run(
            command(limited + CLI, *words), env=environment(), text=True, capture_output=True, check=False
        )
        assert done.returncode == 1
        assert "File too large" in done.stderr
        assert (tmp_path / "out.jsonl").read_bytes().endswith(b"}\n")
        with batch(tmp_path) as process:
            process.communicate()
        assert process.returncode == 0
        assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 50


class TestPython:
    def test_results_of_any_iterable(self, talker: lp.Engine) -> None:
        ids = talker.model.tokenize("Once")
        records: list[Any] = ["The cat", ids, {"prompt": "A", "max_tokens": 2, "id": 7}, 5, {"animal": "dog"}]
        results = list(lp.run_batch(iter(records), talker, GREEDY))
        assert [result["index"] for result in results] == list(range(5))
        assert results[0]["text"] == talker.generate("The cat", GREEDY).text
        assert results[1]["text"] == talker.generate(ids, GREEDY).text
        assert (results[2]["id"], results[2]["n_completion_tokens"]) == (7, 2)
        assert "not int" in results[3]["error"]["message"]
        assert "either a prompt or messages" in results[4]["error"]["message"]
        (named,) = lp.run_batch([{"custom_id": "a", "url": "/v1/completions", "body": {}}], talker)
        assert "llamapipe batch" in named["error"]["message"]

    def test_few_are_ahead_and_closing_cancels_them(self, talker: lp.Engine) -> None:
        n_read = 0

        def endless() -> Iterator[str]:
            nonlocal n_read
            while True:
                n_read += 1
                yield "Once upon a time"

        results = lp.run_batch(endless(), talker, lp.SamplingParams(max_tokens=400, ignore_eos=True))
        assert n_read == 0
        next(results)
        assert n_read == 16
        results.close()  # type: ignore[attr-defined]
        wait_until(lambda: talker.stats().n_active == talker.stats().n_queued == 0)

    def test_a_reader_that_fails(self, talker: lp.Engine) -> None:
        def broken() -> Iterator[str]:
            yield from ["a", "b"]
            raise OSError("the disk is gone")

        with pytest.raises(OSError, match="the disk is gone"):
            list(lp.run_batch(broken(), talker, GREEDY))
        wait_until(lambda: talker.stats().n_active == talker.stats().n_queued == 0)

    def test_nulls_of_pandas(self, talker: lp.Engine, tmp_path: Path) -> None:
        nulls = [None, float("nan"), pandas.NA, pandas.NaT, np.float32("nan")]
        results = list(lp.run_batch([{"text": null} for null in nulls], talker, template="T: {text}"))
        assert {result["error"]["message"] for result in results} == {"the column 'text' is null"}
        assert len(results) == len(nulls)
        kept = [*nulls, float("inf"), np.float64(0.5), [float("nan")]]
        records = [{"prompt": "a", "max_tokens": 1, "label": label} for label in kept]
        lp.run_batch(records, talker, output=tmp_path / "out.jsonl", keep=(name for name in ["label"]))  # type: ignore[call-overload]
        labels = [strict(line)["label"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert labels == [None] * 6 + [0.5, "[nan]"]

    def test_rows_that_are_read_one_by_one(self, talker: lp.Engine) -> None:
        """As from a data set of Hugging Face, which may not fit into memory."""

        class Rows:
            column_names = ("prompt",)

            def __iter__(self) -> Iterator[dict[str, str]]:
                yield {"prompt": "a"}

            def to_list(self) -> list[Any]:
                raise AssertionError

        assert len(list(lp.run_batch(Rows(), talker, GREEDY))) == 1

    def test_records_and_output_in_one_file(self, talker: lp.Engine, tmp_path: Path) -> None:
        path = tmp_path / "one.jsonl"
        path.write_text('"a"')
        with pytest.raises(ValueError, match="records and output are the same file"):
            lp.run_batch(path, talker, output=path)
        with pytest.raises(ValueError, match=r"retry_failed needs an output that ends with \.jsonl"):
            lp.run_batch(["a"], talker, output=tmp_path / "x.csv", retry_failed=True)
        assert path.read_text() == '"a"'

    def test_a_closed_engine(self, demo: lp.Model) -> None:
        with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine:
            results = lp.run_batch(["a"] * 100, engine, GREEDY)
            next(results)
        with pytest.raises(lp.errors.EngineClosedError):
            list(results)

    @pytest.mark.parametrize("kind", ["prompts", "requests"])
    def test_an_engine_that_has_failed(
        self, demo: lp.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        """The job ends and resumes with another engine: no other record is written as failed."""

        def lost(*_: object) -> None:
            raise OSError("the device is lost")

        body = {"prompt": "a", "max_tokens": 2, "temperature": 0}
        records: list[dict[str, Any]] = [body] * 40
        if kind == "requests":
            records = [{"custom_id": f"{i}", "url": "/v1/completions", "body": body} for i in range(40)]
        (tmp_path / "in.jsonl").write_text(lines(*records))

        def run(engine: lp.Engine, on_progress: Callable[[BatchSummary], object]) -> BatchSummary:
            answerer = Answerer(engine, GREEDY, requests=lambda: BatchRequests(engine).answer)
            with open_output(tmp_path / "out.csv") as results:
                results.begin(answerer.settings())
                source = read_records(tmp_path / "in.jsonl")
                return run_job(source, answerer, results, n_ahead=8, on_progress=on_progress)

        with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine:

            def lose(summary: BatchSummary) -> None:
                if summary.n_done == 10:
                    monkeypatch.setattr(loop_of(engine).in_flight, "launch", lost)

            with pytest.raises(lp.errors.BackendError, match="the device is lost"):
                run(engine, lose)
        assert not (tmp_path / "out.csv").exists()
        with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine:
            done = run(engine, lambda _: None)
        assert done.n_failed == done.n_skipped_failed == 0
        assert done.n_done + done.n_skipped == 40
        assert 10 <= done.n_skipped < 40

    def test_inside_a_running_event_loop(self, talker: lp.Engine) -> None:
        """As in a notebook."""

        async def cell() -> list[lp.BatchResult]:
            return list(lp.run_batch(["a", "b"], talker, GREEDY))

        assert len(asyncio.run(cell())) == 2

    def test_a_file_in_and_a_file_out(self, talker: lp.Engine, tmp_path: Path) -> None:
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text(lines("a", {"prompt": 5}, "b"))
        summary = lp.run_batch(source, talker, GREEDY, output=out)
        assert (summary.n_done, summary.n_failed, summary.n_skipped) == (3, 1, 0)
        again = lp.run_batch(["a", {"prompt": 5}, "b", "c"], talker, GREEDY, output=str(out))
        assert (again.n_done, again.n_skipped) == (1, 3)

    def test_a_column_of_a_table(self, talker: lp.Engine) -> None:
        texts = ["The cat", "A dog"]
        expected = [completion.text for completion in talker.generate(texts, GREEDY)]
        column = pandas.Series(["gone", *texts])[1:]
        for table_column in (column, arrow.chunked_array([texts])):
            assert [result["text"] for result in lp.run_batch(table_column, talker, GREEDY)] == expected

    @pytest.mark.parametrize(
        ("records", "message"), [("text", "one str"), (Path("a.txt"), "must end with"), (5, "not iterable")]
    )
    def test_wrong_records_are_refused(self, talker: lp.Engine, records: Any, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            list(lp.run_batch(records, talker))


class TestTables:
    @pytest.mark.parametrize("ending", ["csv", "parquet"])
    def test_tables_in_and_out(self, talker: lp.Engine, tmp_path: Path, ending: str) -> None:
        source, out = tmp_path / f"in.{ending}", tmp_path / f"out.{ending}"
        rows = [{"id": i, "animal": name} for i, name in enumerate(["cat", "d\nog", "", "fox"] * 700)]
        if ending == "csv":
            with source.open("w", newline="") as file:
                writer = csv.DictWriter(file, ["id", "animal"])
                writer.writeheader()
                writer.writerows(rows)
        else:
            parquet.write_table(arrow.Table.from_pylist(rows), source)
        assert (count_records(source) or 0) >= len(rows)
        params = lp.SamplingParams(max_tokens=1, temperature=0.0)
        summary = lp.run_batch(source, talker, params, output=out, template="The {animal}")
        assert (summary.n_done, summary.n_failed) == (2800, 0)
        table = arrow_csv.read_csv(out) if ending == "csv" else parquet.read_table(out)
        results = table.to_pylist()
        assert table.column_names == ["index", "id", "text", "finish_reason", *COUNTS, "error"]
        assert [result["index"] for result in results] == list(range(2800))
        assert [int(result["id"]) for result in results] == list(range(2800))
        assert results[0]["text"] == talker.generate("The cat", params).text
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == [out.name]
        with pytest.raises(FileExistsError, match="complete already"):
            lp.run_batch(source, talker, params, output=out, template="The {animal}")

    def test_kept_columns_have_the_types_of_their_values(self, talker: lp.Engine, tmp_path: Path) -> None:
        values = {"whole": 5, "part": 0.5, "flag": True, "name": "x", "list": [1, "a"], "empty": None}
        records = [{"prompt": "a", **values}, {"prompt": "b", **values, "part": 2, "name": 7}]
        params = lp.SamplingParams(max_tokens=1)
        lp.run_batch(records, talker, params, output=tmp_path / "out.parquet", keep=list(values))
        table = parquet.read_table(tmp_path / "out.parquet")
        kept = ["whole", "part", "flag", "name", "list", "empty"]
        assert sorted(table.column_names[1:7]) == sorted(kept)
        assert [str(table.schema.field(name).type) for name in kept] == [
            "int64",
            "double",
            "bool",
            "string",
            "string",
            "string",
        ]
        assert table.select(kept).to_pylist() == [
            {"whole": 5, "part": 0.5, "flag": True, "name": "x", "list": '[1, "a"]', "empty": None},
            {"whole": 5, "part": 2.0, "flag": True, "name": "7", "list": '[1, "a"]', "empty": None},
        ]
        for numbers, kind in (([2**63, 1], "string"), ([2**60, 1], "int64"), ([2**60, 0.5], "string")):
            out = tmp_path / f"{numbers[0]}-{numbers[1]}.parquet"
            lp.run_batch([{"prompt": "a", "n": n} for n in numbers], talker, params, output=out, keep=["n"])
            column = parquet.read_table(out).column("n")
            assert (str(column.type), [float(n) for n in column.to_pylist()]) == (
                kind,
                list(map(float, numbers)),
            )
        lp.run_batch(records, talker, params, output=tmp_path / "out.csv", keep=["list", "part"])
        with (tmp_path / "out.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(row["list"], row["part"]) for row in rows] == [('[1, "a"]', "0.5"), ('[1, "a"]', "2")]

    @pytest.mark.parametrize("name", ["text", "error", "digest"])
    def test_columns_with_the_names_of_results_are_not_kept(self, talker: lp.Engine, name: str) -> None:
        with pytest.raises(ValueError, match=f"keep has '{name}', which is a field of results"):
            lp.run_batch([], talker, keep=[name])

    def test_a_table_appears_at_the_end(self, talker: lp.Engine, tmp_path: Path) -> None:
        out = tmp_path / "out.parquet"

        def stopped() -> Iterator[str]:
            for i in range(40):
                yield f"Tale {i}"
            raise OSError("stopped")

        with pytest.raises(OSError, match="stopped"):
            lp.run_batch(stopped(), talker, GREEDY, output=out)
        assert not out.exists()
        n_there = len((tmp_path / "out.parquet.jsonl").read_bytes().splitlines())
        summary = lp.run_batch([f"Tale {i}" for i in range(40)], talker, GREEDY, output=out)
        assert (summary.n_skipped, summary.n_done) == (n_there, 40 - n_there)
        assert parquet.read_table(out).num_rows == 40

    def test_what_is_no_table(self, talker: lp.Engine, tmp_path: Path) -> None:
        (tmp_path / "in.parquet").write_text("no table")
        with pytest.raises(ValueError, match="cannot be read as Parquet"):
            list(lp.run_batch(tmp_path / "in.parquet", talker))

    def test_without_pyarrow_the_extra_is_named(
        self, talker: lp.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ImportError, match=r"llamapipe\[parquet\]"):
            list(lp.run_batch(tmp_path / "in.parquet", talker))
        with pytest.raises(ImportError, match=r"llamapipe\[parquet\]"):
            lp.run_batch(["a"], talker, output=tmp_path / "out.parquet")
        assert not list(tmp_path.iterdir())


# ---- what callers give by mistake, and ids that JSON does not have
@pytest.mark.parametrize(
    "options",
    [
        {"params": {"max_tokens": 2}},
        {"params": {}},
        {"system": 5},
        {"template": 5},
        {"chat": "no"},
        {"ordered": 0},
        {"progress": 1},
        {"keep": "label"},
        {"keep": [5]},
        {"keep": 5},
        {"retry_failed": 1},
        {"records": pandas.DataFrame({"text": ["a"]})},
        {"records": arrow.table({"text": ["a"]})},
        {"records": {"prompt": "a"}},
    ],
    ids=str,
)
def test_arguments_of_a_wrong_type_are_refused(talker: lp.Engine, options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"records": ["a"], "engine": talker} | options
    with pytest.raises(TypeError, match=next(iter(options))):
        lp.run_batch(**arguments)


def test_ids_that_are_no_json(talker: lp.Engine, tmp_path: Path) -> None:
    ids = [uuid.UUID(int=5), datetime.date(2026, 1, 2), Decimal("1.5"), b"x", (1, 2), {1: 2}, {(1, 2): 3}]
    ids += [np.int64(7), nested(100_000)]
    records = [{"prompt": "a", "id": id_, "max_tokens": 1} for id_ in ids]
    out = tmp_path / "out.jsonl"
    assert lp.run_batch(records, talker, output=out) == BatchSummary(
        n_done=len(ids), n_tokens=len(ids), n_cut=len(ids)
    )
    written = [json.loads(line)["id"] for line in out.read_bytes().splitlines()]
    assert written[:7] == [str(ids[0]), "2026-01-02", "1.5", "b'x'", [1, 2], {"1": 2}, "{(1, 2): 3}"]
    assert written[7:] == [7, "list"]
    assert lp.run_batch(records, talker, output=out) == BatchSummary(n_skipped=len(ids))


def strict(line: str) -> Any:
    """A line of JSON, which has neither NaN nor Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(line, parse_constant=refuse)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_kept_values_of_numpy_stay_what_they_are() -> None:
    """Their text is another type, and leaves out most of a long array."""
    long = np.arange(5000, dtype=np.float32)
    for value, expected in (
        (long, long.tolist()),
        (np.array([["a", None]], object), [["a", None]]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.float32(1.5), 1.5),
        (np.longdouble(1.5), 1.5),
        (np.array([1.5, 2], np.longdouble), [1.5, 2.0]),
        (np.where(long < 2, long, np.nan), [0.0, 1.0, *[None] * 4998]),
        (np.array([[np.inf, 1]]), [[None, 1.0]]),
        (np.bool_(True), True),
        ({"a": np.array([True]), "b": np.int8(3)}, {"a": [True], "b": 3}),
        (np.datetime64("2020-01-01T00:00:00", "ns"), "2020-01-01T00:00:00.000000000"),
        (np.array(["2020-01-01"], "datetime64[ns]"), ["2020-01-01T00:00:00.000000000"]),
    ):
        assert repr(as_json(value)) == repr(expected)


def test_ids_of_parquet(talker: lp.Engine, tmp_path: Path) -> None:
    table = arrow.table({"prompt": ["a", "b"], "id": [datetime.date(2026, 1, 2), None]})
    parquet.write_table(table, tmp_path / "in.parquet")
    out = tmp_path / "out.jsonl"
    assert lp.run_batch(tmp_path / "in.parquet", talker, GREEDY, output=out).n_failed == 0
    assert [json.loads(line)["id"] for line in out.read_bytes().splitlines()] == ["2026-01-02", None]


def test_records_with_images_are_known_in_another_process() -> None:
    """By their content: the text of an image has its address, and that of an array leaves out most of it."""
    program = """
import numpy as np
from PIL import Image
from llamapipe.jobs.records import Record

class Other:
    pass

array = np.zeros((64, 64, 3), np.uint8)
changed = array.copy()
changed[32, 32] = 9
colours = [Image.new("P", (8, 8)) for _ in range(2)]
for i, image in enumerate(colours):
    image.putpalette([i] * 768)
for value in (*colours, array, changed, *map(Image.fromarray, (array, changed)), memoryview(b"x"), Other(),
              np.array(["a", Other()], object), np.array([1.5], np.longdouble)):
    print(Record(0, {"messages": [{"role": "user", "content": [{"type": "image", "image": value}]}]}).digest)
"""
    # Other objects begin at other addresses.
    digests = [run_script(f"kept = [bytearray({n}) for _ in range(999)]\n{program}") for n in (9, 5000)]
    assert digests[0] == digests[1]
    assert len(set(digests[0].split())) == 10


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_half_an_emoji_leaves_a_file_that_others_can_read(
    talker: lp.Engine, tmp_path: Path, ending: str
) -> None:
    """JSON can escape a lone surrogate; UTF-8, and so every reader of the results, cannot have one."""
    records = [{"prompt": "a", "id": "\ud83d!", "name": ["\ud83d\ude00"]}, {"prompt": "b\ud83d"}]
    (tmp_path / "in.jsonl").write_text(lines(*records))
    out = tmp_path / f"out.{ending}"
    for _ in range(2 if ending == "jsonl" else 1):
        done = lp.run_batch(tmp_path / "in.jsonl", talker, GREEDY, output=out, keep=["name"])
    assert done.n_done + done.n_skipped == 2
    if ending == "parquet":
        table = parquet.read_table(out).to_pylist()
        assert (table[0]["id"], table[0]["name"]) == ("\N{REPLACEMENT CHARACTER}!", '["\N{GRINNING FACE}"]')
    else:
        assert "\N{REPLACEMENT CHARACTER}!" in out.read_text(encoding="utf-8")
        assert "\N{GRINNING FACE}" in out.read_text(encoding="utf-8")


def test_half_an_emoji_in_lines_that_another_program_wrote(talker: lp.Engine, tmp_path: Path) -> None:
    """The table is written from them after the last record: an error there would come again at each start."""
    (tmp_path / "in.jsonl").write_text(lines({"prompt": "a", "id": "half"}))
    out = tmp_path / "out.csv"
    lp.run_batch(tmp_path / "in.jsonl", talker, GREEDY, output=tmp_path / "out.csv.jsonl")
    written = (tmp_path / "out.csv.jsonl").read_bytes()
    (tmp_path / "out.csv.jsonl").write_bytes(written.replace(b"half", b"\xed\xa0\xbd!"))
    assert lp.run_batch(tmp_path / "in.jsonl", talker, GREEDY, output=out).n_skipped == 1
    assert "?!," in out.read_text(encoding="utf-8")


def test_biases_of_a_line(job: Callable[..., Any], talker: lp.Engine) -> None:
    token = talker.model.tokenize(" the", add_special=False)[0]
    line = {"prompt": "Once", "logit_bias": {str(token): 100.0}, "max_tokens": 2}
    _, results = job(json.dumps(line))
    assert results[0]["text"] == " the the"


class TestBeforeTheFirstRecord:
    """What would fail every record is refused at once, and writes no result."""

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("in.jsonl", lines({"a": "x", "id": 1}, {"b": "y"})),
            ("in.csv", "a,b\nx,y\n"),
        ],
    )
    def test_columns_that_are_missing_are_named(
        self, talker: lp.Engine, tmp_path: Path, name: str, text: str
    ) -> None:
        source, out = tmp_path / name, tmp_path / "out.jsonl"
        source.write_text(text)
        with pytest.raises(ValueError, match=r"in\.\w+ has no column 'c'; it has 'a'"):
            lp.run_batch(source, talker, GREEDY, output=out, template="{a} {c}")
        with pytest.raises(ValueError, match="has no column 'd'"):
            lp.run_batch(source, talker, GREEDY, output=out, template="{a}", keep=["d"])
        assert not out.exists()
        done = lp.run_batch(source, talker, GREEDY, output=out, template="{b}")  # some records have it
        assert done.n_done - done.n_failed == 1

    @pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
    def test_a_named_pipe_is_read_once(self, talker: lp.Engine, tmp_path: Path) -> None:
        source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        os.mkfifo(source)
        with ThreadPoolExecutor(1) as pool:
            writes = pool.submit(source.write_text, lines({"a": "x"}, {"a": "y"}))
            done = lp.run_batch(source, talker, GREEDY, output=out, template="{a}")
            writes.result()
        assert (done.n_done, done.n_failed) == (2, 0)

    def test_params_are_checked(self, talker: lp.Engine) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "x"}}}
        with pytest.raises(ValueError, match="json_schema"):
            lp.run_batch(["a"], talker, lp.SamplingParams(json_schema=schema))

    def test_the_command_needs_no_model_for_it(self, tmp_path: Path) -> None:
        (tmp_path / "in.jsonl").write_text(lines({"text": "a"}))
        with batch(tmp_path, "--template", "{txt}", "--model", str(tmp_path / "in.jsonl")) as process:
            _, said = process.communicate()
        assert process.returncode == 2
        assert "has no column 'txt'; it has 'text'" in said
        assert not (tmp_path / "out.jsonl").exists()


def test_records_of_csv_with_line_ends_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('a,b\n1,"two\nlines ""x\n"""\n\n3,5" pipe\n')
    assert count_records(path) == len(list(read_records(path))) == 2
    path.write_bytes(b"a\n\xff\n")
    assert count_records(path) is None


def test_reasons_of_failures(job: Any) -> None:
    """Messages that differ in their numbers only are one reason."""
    done, _ = job(lines("a", {"prompt": "b" * 3000}, {"prompt": "b" * 4000}, {"other": 1}))
    assert done.n_failed == 3
    ((first, n_first), (second, n_second)) = done.reasons.most_common()
    assert (n_first, n_second) == (2, 1)
    assert "n_ctx" in first
    assert "'other' is not an option" in second or "a prompt or messages" in second


def test_the_command_tells_reasons_and_how_to_continue(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(lines("a", {"prompt": "b", "temperature": -1}))
    with batch(tmp_path) as process:
        _, said = process.communicate()
    assert process.returncode == 1
    assert "1 failed: temperature" in said
    (tmp_path / "in.jsonl").write_text(lines(*({"prompt": f"Tale {i}"} for i in range(3000))))
    out = tmp_path / "out.jsonl"
    out.unlink()
    with batch(tmp_path) as process:
        while process.poll() is None and (not out.exists() or not out.stat().st_size):
            pass
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130, said
    assert "of 3,000 records" in said
    assert "the same command continues" in said


def test_a_line_of_progress_a_minute_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from llamapipe.cli import batch as command_module

    now_s = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    shown = command_module._Shown(1000, can_retry=True)
    summary = BatchSummary()
    for i in range(1, 151):
        now_s[0], summary.n_done, summary.n_tokens = float(i), i, 10 * i
        shown.show(summary)
    assert capsys.readouterr().err.splitlines() == [
        "60 of 1,000, 10 tokens/s, 15:40 left",
        "120 of 1,000, 10 tokens/s, 14:40 left",
    ]


def test_a_system_exit_on_the_event_loop_reaches_the_caller() -> None:
    """The loop would end with it: at the interpreter's exit, calls of an engine raise it on all threads."""

    async def leave() -> None:
        raise SystemExit(3)

    async def answer() -> str:
        return "on"

    with EventLoopThread() as event_loop:
        with pytest.raises(SystemExit):
            event_loop.start(leave()).result(PATIENCE_S)
        assert event_loop.start(answer()).result(PATIENCE_S) == "on"
