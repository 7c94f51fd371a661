"""Engines in virtual time: step costs, one node, clusters, and a short recording of a real engine."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import llamapipe as lp

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))

from simulate.cluster import Cluster, Outcome  # noqa: E402
from simulate.cost import Load, StepCost  # noqa: E402
from simulate.node import Answer, Node, NodeOptions  # noqa: E402
from simulate.policies import POLICIES  # noqa: E402
from simulate.record import Recording, record  # noqa: E402
from simulate.workload import WORKLOADS, Conversation, Workload, arrivals  # noqa: E402

COST = StepCost(0.002, (0.001, 0.0005, 0.0005, 0.0003, 0.0, 0.0, 0.0), 1e-7, 0.001, 1e-4, 1e-9)
SMALL = NodeOptions(n_ctx=1024, n_seq_max=4, cell_bytes=100, cache_bytes=2**20)


def served(policy: str = "random", n_nodes: int = 4, seed: int = 3) -> Outcome:
    workload = Workload(prompt=60, answer=20, n_turns=4, think_s=1, system=200, n_systems=8, n_ctx=1024)
    cluster = Cluster(n_nodes, COST, SMALL, POLICIES[policy](seed))
    outcome = cluster.run(arrivals(workload, 4.0 * n_nodes, 60, seed), 120)
    for node in cluster.nodes:
        node.scheduler.check_integrity()
    return outcome


def test_a_fit_finds_the_weights() -> None:
    rng = random.Random(0)
    loads = []
    for _ in range(2000):
        n, prompts = rng.randrange(0, 17), rng.choice([0, 0, rng.randrange(1, 512)])
        loads.append(Load(n, n * rng.randrange(1, 1000), prompts, prompts * rng.randrange(1, 1000)))
    fitted = StepCost.fit(loads, [COST.seconds(load) for load in loads])
    for load in loads[:200]:
        assert fitted.seconds(load) == pytest.approx(COST.seconds(load), rel=1e-3)


def test_weights_are_not_negative() -> None:
    rng = random.Random(1)
    loads = [Load(rng.randrange(1, 9), 100, 0, 0) for _ in range(500)]
    fitted = StepCost.fit(loads, [0.01 / load.n_decode for load in loads])
    assert min(*fitted.decode_s, fitted.constant_s, fitted.cell_s) >= 0


def test_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="5 steps are too few"):
        StepCost.fit([Load(1, 1, 0, 0)] * 5, [0.1] * 5)


def test_one_request_takes_the_time_of_its_steps() -> None:
    node = Node(COST, SMALL)
    ended: list[Answer] = []
    answer = Answer(0.0, list(range(1, 101)), 3, ended.append)
    node.submit(answer, 0.0)
    times = []
    while node.end_s < 1e300:
        times.append(node.end_s)
        node.finish_step()
    loads = [Load(0, 0, 100, 100 * 101 // 2), Load(1, 101, 0, 0), Load(1, 102, 0, 0)]
    assert times == pytest.approx(np.cumsum([COST.seconds(load) for load in loads]))
    assert ended == [answer] and (answer.first_s, answer.ended_s) == (times[0], times[2])
    assert node.n_open == node.n_open_tokens == 0 and sum(node.gaps.values()) == 2


def test_turns_continue_their_conversation() -> None:
    conversation = Conversation(WORKLOADS["agents"], 7, random.Random(5))
    turns = []
    while (turn := conversation.next_turn()) is not None:
        turns.append(turn)
    assert len(turns) > 1
    for (tokens, n_answer), (longer, _) in pairwise(turns):
        assert longer[: len(tokens)] == tokens and len(longer) > len(tokens) + n_answer
    other = Conversation(WORKLOADS["agents"], 8, random.Random(5)).next_turn()
    assert other is not None
    n_system = WORKLOADS["agents"].system
    assert other[0][:n_system] == turns[0][0][:n_system] and other[0][n_system] != turns[0][0][n_system]


@pytest.mark.parametrize("name", WORKLOADS)
def test_lengths_and_rates(name: str) -> None:
    workload = WORKLOADS[name]
    made = list(arrivals(workload, 10, 400, 1))
    assert [at for at, _ in made] == sorted(at for at, _ in made)
    assert len(made) == pytest.approx(4000 / max(workload.n_turns, 1), rel=0.2)
    answers = [turn[1] for _, conversation in made if (turn := conversation.next_turn()) is not None]
    assert np.median(answers) == pytest.approx(workload.answer, rel=0.2)


def test_everything_is_served() -> None:
    outcome = served()
    assert outcome.n_ended == outcome.n_arrived > 500
    assert outcome.backlog == 0 and 0 < outcome.busy < 1
    assert outcome.first_s[0] > COST.constant_s


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_gives_the_same_run(policy: str) -> None:
    assert served(policy) == served(policy)


def test_routing_by_prefix_finds_more_of_them() -> None:
    hits = {
        policy: served(policy, n_nodes=8).hit_rate for policy in ("random", "prefix-affinity", "cost-based")
    }
    assert hits["prefix-affinity"] > hits["random"] + 0.05
    assert hits["cost-based"] > hits["random"] + 0.05


def test_a_short_recording(demo: lp.Model, tmp_path: Path) -> None:
    options = NodeOptions(n_ctx=256, n_seq_max=4)
    recording = record(demo, options, 2, 0.5, n_threads=1)
    assert recording.options.cell_bytes > 0 and all(
        len(run.loads) == len(run.seconds) > 50 for run in recording.runs
    )
    assert any(load.n_prompt for run in recording.runs for load in run.loads)
    recording.save(tmp_path / "recording.json")
    assert Recording.load(tmp_path / "recording.json") == recording


def test_the_command_line(demo: lp.Model, tmp_path: Path) -> None:
    options = NodeOptions(n_ctx=512, n_seq_max=4)
    record(demo, options, 2, 1.0, n_threads=1).save(tmp_path / "recording.json")
    cost = tmp_path / "cost.json"
    for *arguments, expected in (
        ("fit", tmp_path / "recording.json", "-o", cost, "1 runs that were not fitted"),
        (
            "capacity",
            cost,
            "--scale",
            "0.1",
            "--seconds",
            "20",
            "--node-cost",
            "1",
            "a million generated tokens",
        ),
        ("policies", cost, "--scale", "0.1", "--seconds", "5", "--nodes", "2", "cost-based, 2"),
        ("run", cost, "--scale", "0.1", "--seconds", "5", "--nodes", "4", "--processes", "2", "4 nodes"),
    ):
        done = subprocess.run(
            [sys.executable, str(TOOLS / "simulate"), *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
