"""Jobs of Ray Data with real actors: rows that fail, killed actors, programs that are stopped and run again."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from support.ray_programs import RayProgram

import llamapipe as lp

pytest.importorskip("ray", reason='needs Ray: nox -s ray, or pip install "llamapipe[ray]"')

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]
N_PROMPTS = int(os.environ.get("LLAMAPIPE_RAY_PROMPTS", "2000"))
GREEDY = lp.SamplingParams(max_tokens=16, temperature=0.0)

JOB = """
start()
folder, n_actors = sys.argv[1], int(sys.argv[2])
spec = lr.EngineSpec(lp.demo_model_path(), {"n_ctx": 128, "n_seq_max": 16})
out = lr.complete(
    ray.data.read_parquet(f"{folder}/in"), spec, prompt="Number {number} is", id="id", actors=(1, n_actors),
    params=lp.SamplingParams(max_tokens=16, temperature=0.0), checkpoint=f"{folder}/checkpoint",
)
out.write_parquet(f"{folder}/out")
print("complete")
"""


def prompts(folder: Path, n: int) -> None:
    """Four files, in the middle of which is a row without a number."""
    (folder / "in").mkdir()
    for part in range(4):
        ids = list(range(part * n // 4, (part + 1) * n // 4))
        numbers = [None if i == n // 2 else str(i % 1000) for i in ids]
        parquet.write_table(
            arrow.table({"id": ids, "number": arrow.array(numbers, arrow.string())}),
            folder / "in" / f"{part}.parquet",
        )


def n_written(folder: Path) -> int:
    """The rows whose checkpoints are there."""
    paths = [path for path in folder.glob("checkpoint/*.parquet") if ".pending" not in path.name]
    try:
        return sum(parquet.read_metadata(path).num_rows for path in paths)
    except OSError:  # one was moved
        return n_written(folder)


def wait_for_rows(program: RayProgram, folder: Path, n: int) -> None:
    program.wait_until(lambda: n_written(folder) >= n)


def test_every_row_once_with_an_actor_killed_and_the_program_stopped(tmp_path: Path) -> None:
    prompts(tmp_path, N_PROMPTS)
    with RayProgram(tmp_path, JOB, tmp_path, 2) as program:
        wait_for_rows(program, tmp_path, N_PROMPTS // 10)
        victims = program.workers(r"MapBatches\(Completer\)")
        assert victims, program.output
        victims[0].kill()
        wait_for_rows(program, tmp_path, N_PROMPTS // 2)
        program.kill()
    n_before = n_written(tmp_path)
    assert N_PROMPTS // 2 <= n_before < N_PROMPTS
    before = {path.name for path in tmp_path.glob("out/*.parquet")}
    with RayProgram(tmp_path, JOB, tmp_path, 2) as program:
        assert "complete" in program.end()
    rows = parquet.read_table(tmp_path / "out").to_pylist()
    assert sorted(row["id"] for row in rows) == list(range(N_PROMPTS))
    failed = [row for row in rows if row["error"] is not None]
    assert [row["id"] for row in failed] == [N_PROMPTS // 2]
    assert failed[0]["error"] == "ValueError: the column 'number' is null" and failed[0]["text"] is None
    after = {path.name for path in tmp_path.glob("out/*.parquet")}
    assert before & after, "nothing was left of the first run"
    with lp.Engine(lp.demo_model_path(), n_ctx=128, n_seq_max=16) as engine:
        n_texts = min(N_PROMPTS, 1000)
        expected = engine.generate([f"Number {i} is" for i in range(n_texts)], GREEDY)
    texts = {row["id"]: row["text"] for row in rows}
    for i in range(n_texts):
        if i != N_PROMPTS // 2:
            assert texts[i] == expected[i].text


def test_a_job_goes_on_with_as_few_cpus_as_the_warning_says(tmp_path: Path) -> None:
    n = 1000
    prompts(tmp_path, n)
    with RayProgram(tmp_path, JOB.replace("start()", "start(num_cpus=2)"), tmp_path, 1) as program:
        program.wait_for("Ray has 2 CPUs, and this job needs 3")
    with RayProgram(tmp_path, JOB.replace("start()", "start(num_cpus=3)"), tmp_path, 1) as program:
        wait_for_rows(program, tmp_path, n // 4)
        program.kill()
    with RayProgram(tmp_path, JOB.replace("start()", "start(num_cpus=3)"), tmp_path, 1) as program:
        output = program.end()
    assert "complete" in output and "this job needs" not in output
    ids = parquet.read_table(tmp_path / "out", columns=["id"])["id"].to_pylist()
    assert sorted(ids) == list(range(n))
