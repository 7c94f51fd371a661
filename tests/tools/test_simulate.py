"""Engines in virtual time: step costs, one node, clusters, and a short recording of a real engine."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import llamapipe as lp

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.append(str(TOOLS))

from simulate.cluster import Cluster, Outcome  # noqa: E402
from simulate.cost import Load, Pass, StepCost, cut  # noqa: E402
from simulate.node import Answer, Node, NodeOptions  # noqa: E402
from simulate.plots import plot  # noqa: E402
from simulate.policies import POLICIES, Nodes  # noqa: E402
from simulate.record import Recording, record  # noqa: E402
from simulate.workload import WORKLOADS, Conversation, Workload, arrivals  # noqa: E402

COST = StepCost(
    step_s=0.001, plan_s=0.0002, output_s=1e-5, prompt_s=0.001, copy_s=1e-4, copied_s=1e-6, pass_s=0.001,
    tokens_s=(0.001, 0.0005, 0.0005, 0.0003, 0.0003, 0.0002, 0.0002, 0.0001, 0.0001), cell_s=5e-6, prompt_cell_s=1e-8,
)  # fmt: skip
SMALL = NodeOptions(n_ctx=1024, n_seq_max=4, cell_bytes=100, cache_bytes=2**20)


def run(
    policy: str,
    n_nodes: int = 4,
    seed: int = 3,
    per_s: float = 4.0,
    seconds: float = 120,
    warm_up_s: float = 0,
    max_portion: int = 2**30,
) -> tuple[Outcome, Counter[int]]:
    """The outcome of a cluster, and the gaps of all nodes."""
    workload = Workload(prompt=60, answer=20, n_turns=4, think_s=1, system=200, n_systems=8, n_ctx=1024)
    cluster = Cluster(n_nodes, COST, SMALL, POLICIES[policy](seed))
    for node in cluster.nodes:
        node.max_portion = max_portion
    outcome = cluster.run(arrivals(workload, per_s * n_nodes, 60, seed), seconds, warm_up_s)
    gaps: Counter[int] = Counter()
    for node in cluster.nodes:
        node.scheduler.check_integrity()
        gaps.update(node.gaps)
    return outcome, +gaps


def served(policy: str = "random", n_nodes: int = 4) -> Outcome:
    return run(policy, n_nodes)[0]


def random_load(rng: random.Random) -> Load:
    n, prompts = rng.randrange(1, 17), rng.choice([0, 0, 1, 2])
    if not prompts and rng.random() < 0.5:
        return Load(True, (Pass(n, 1, n * rng.randrange(1, 1000)),), n, 0)
    passes = [Pass(n, 1, n * rng.randrange(1, 1000))]
    passes += [Pass(1, (k := rng.randrange(2, 512)), k * rng.randrange(1, 1000)) for _ in range(prompts)]
    return Load(False, tuple(passes), n + prompts, prompts, *rng.choice([(0, 0), (1, rng.randrange(900))]))


def test_a_fit_finds_the_weights() -> None:
    rng = random.Random(0)
    loads = [random_load(rng) for _ in range(4000)]
    fitted = StepCost.fit(loads, [COST.seconds(load) for load in loads])
    for load in loads[:200]:
        assert fitted.seconds(load) == pytest.approx(COST.seconds(load), rel=5e-3)


def test_a_fit_meets_the_mean() -> None:
    """If a few steps are slow, the fit must match the sum of all steps, not that of the fast ones."""
    rng = random.Random(2)
    loads = [random_load(rng) for _ in range(4000)]
    times = [COST.seconds(load) * (4 if rng.random() < 0.1 else 1) for load in loads]
    fitted = StepCost.fit(loads, times)
    assert sum(fitted.seconds(load) for load in loads) == pytest.approx(sum(times), rel=0.02)


def test_weights_are_not_negative() -> None:
    rng = random.Random(1)
    loads = [Load(True, (Pass(rng.randrange(1, 9), 1, 100),), 1, 0) for _ in range(500)]
    fitted = StepCost.fit(loads, [0.01 / load.passes[0].n_seqs for load in loads])
    assert min(*fitted.tokens_s, fitted.step_s, fitted.pass_s, fitted.cell_s) >= 0


def test_passes() -> None:
    """Decoding sequences in a row are one pass, with the first token of a prompt after them. A gap splits them."""
    assert cut([(0, 5, 1), (1, 7, 1)], 512) == (Pass(2, 1, 14),)
    assert cut([(0, 5, 1), (2, 7, 1)], 512) == (Pass(1, 1, 6), Pass(1, 1, 8))
    assert cut([(0, 5, 1), (1, 0, 3)], 512) == (Pass(2, 1, 7), Pass(1, 2, 5))
    assert cut([(3, 0, 600)], 512) == (Pass(1, 512, 512 * 513 // 2), Pass(1, 88, 88 * 512 + 88 * 89 // 2))
    assert [p.n_tokens for p in cut([(0, 0, 300), (1, 0, 200)], 512)] == [200, 100]
    assert [p.n_tokens for p in cut([(0, 0, 300), (1, 0, 300)], 512)] == [256, 44]


def test_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="5 steps are too few"):
        StepCost.fit([Load(True, (Pass(1, 1, 1),), 1, 0)] * 5, [0.1] * 5)


def test_one_request_takes_the_time_of_its_steps() -> None:
    node = Node(COST, SMALL)
    ended: list[Answer] = []
    answer = Answer(0.0, list(range(1, 101)), 3, ended.append)
    node.submit(answer, 0.0)
    times = []
    while node.end_s < 1e300:
        times.append(node.end_s)
        node.finish_step()
    loads = [
        Load(False, (Pass(1, 100, 5050),), 1, 1),
        Load(False, (Pass(1, 1, 101),), 1, 0),
        Load(True, (Pass(1, 1, 102),), 1, 0),
    ]
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
    traffic = list(arrivals(workload, 10, 400, 1))
    assert [at for at, _ in traffic] == sorted(at for at, _ in traffic)
    assert len(traffic) == pytest.approx(4000 / max(workload.n_turns, 1), rel=0.2)
    answers = [turn[1] for _, conversation in traffic if (turn := conversation.next_turn()) is not None]
    assert np.median(answers) == pytest.approx(workload.answer, rel=0.2)


def test_everything_is_served() -> None:
    outcome = served()
    assert outcome.n_ended == outcome.n_arrived > 500
    assert outcome.backlog == 0 and 0 < outcome.busy < 1
    assert outcome.first_s[0] > COST.step_s


@pytest.mark.parametrize("policy", POLICIES)
def test_a_seed_gives_the_same_run(policy: str) -> None:
    assert served(policy) == served(policy)


@pytest.mark.parametrize(("seconds", "warm_up_s"), [(30, 0), (120, 0), (30, 20.3)])
def test_portions_change_nothing(seconds: float, warm_up_s: float) -> None:
    """Steps in portions give the same results as single steps, also if the simulated time ends within a portion."""
    whole, gaps = run("cost-based", per_s=8, seconds=seconds, warm_up_s=warm_up_s)
    single, single_gaps = run("cost-based", per_s=8, seconds=seconds, warm_up_s=warm_up_s, max_portion=1)
    assert whole.n_steps == single.n_steps > 2000 and gaps == single_gaps
    assert np.hstack(list(asdict(whole).values())) == pytest.approx(
        np.hstack(list(asdict(single).values())), rel=1e-9
    )


def test_routing_by_prefix_finds_more_of_them() -> None:
    hits = {
        policy: served(policy, n_nodes=8).hit_rate for policy in ("random", "prefix-affinity", "cost-based")
    }
    assert hits["prefix-affinity"] > hits["random"] + 0.05
    assert hits["cost-based"] > hits["random"] + 0.05


def test_the_least_loaded_node() -> None:
    rng = random.Random(4)
    nodes = Nodes(Node(COST, SMALL) for _ in range(70))
    for _ in range(2000):
        number, first = rng.randrange(70), rng.randrange(70)
        nodes[number].n_open = max(nodes[number].n_open + rng.choice([-1, 1, 1]), 0)
        nodes.changed(number)
        expected = min(range(first, first + 70), key=lambda i: nodes[i % 70].n_open) % 70
        assert nodes.least_open(first) == expected


@pytest.fixture(scope="module")
def recording(demo: lp.Model) -> Recording:
    return record(demo, NodeOptions(n_ctx=512, n_seq_max=4), 2, 1.0, 1, n_threads=1)


def test_a_short_recording(recording: Recording, tmp_path: Path) -> None:
    assert [(run.traffic, run.seed) for run in recording.runs] == [
        ("streams", 0),
        ("agents", 1),
        ("agents", 1),
    ]
    assert recording.options.cell_bytes > 0
    for run in recording.runs:
        assert len(run.loads) == len(run.seconds) > 50
        assert run.first_s and run.gaps_s and any(load.repeats for load in run.loads)
        assert any(load.n_prompts for load in run.loads)
        assert all(sum(p.n_seqs for p in load.passes) >= load.n_outputs for load in run.loads)
    recording.save(tmp_path / "recording.json")
    assert Recording.load(tmp_path / "recording.json") == recording


def test_the_stored_fit() -> None:
    """The figures in docs/scale.md come from this file."""
    path = TOOLS / "simulate" / "15m-q8_0-step-cost.json"
    assert json.loads(path.read_text())["held_out_error"] <= 0.1
    output = simulate("run", path, "--workload", "chat", "--scale", 0.25, "--nodes", 2, "--seconds", 20)
    assert "2 nodes" in output and "nan" not in output


def simulate(*arguments: object, error: str = "") -> str:
    """The output of the command; ``error``: what its message has, if it must fail."""
    done = subprocess.run(
        [sys.executable, str(TOOLS / "simulate"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode != 0) == bool(error), done.stderr
    assert error in done.stderr and "Traceback" not in done.stderr
    return done.stdout


def test_too_little_to_measure_is_an_error(demo: lp.Model, recording: Recording, tmp_path: Path) -> None:
    only_fitted = Recording(recording.model, recording.options, recording.runs[:1])
    only_fitted.save(tmp_path / "recording.json")
    cost = tmp_path / "cost.json"
    simulate("fit", tmp_path / "recording.json", "-o", cost, error="record at least 2 runs")
    for wrong in (1, "x"):
        simulate("record", demo.path, "--runs", wrong, "-o", cost, error="must be a whole number, at least 2")
    simulate("run", tmp_path / "missing.json", error="missing.json")
    recording.save(tmp_path / "recording.json")
    simulate("fit", tmp_path / "recording.json", "-o", cost)
    short = ("--per-s", 0.001, "--warm-up", 0.1, "--seconds", 0.1, "--times", 1, "--threads", 1)
    simulate("check", demo.path, cost, *short, error="raise --seconds or --per-s")
    simulate("capacity", cost, "--seconds", 1e-6, error="nothing was generated in 1e-06 s")
    simulate("run", cost, "--per-s", 0, error="must be a number above 0")
    simulate("check", demo.path, cost, "--times", 0, error="at least 1")


def test_a_plot_leaves_out_what_has_no_logarithm(tmp_path: Path) -> None:
    def row(load: float, first: float) -> dict[str, object]:
        first_s, gap_s = (first, first, first), (0.0, 0.0, 0.0)
        return {"load": load, "tokens_per_s": 10 * first, "first_s": first_s, "gap_s": gap_s}

    result = {
        "arguments": {"workload": "chat", "first": 2.0, "gap": 0.2, "node_cost": 1.0},
        "fit": {"model": "demo", "held_out_error": 0.1},
        "capacity_per_s": 1.0,
        "rows": [row(0.1, 0.0), row(0.2, float("nan")), row(0.5, 0.7), row(1.0, 1.5)],
    }
    names = {path.name: path for path in plot([result], tmp_path)}
    assert set(names) == {"load-chat.svg", "cost.svg"}
    for name, n_dots in (("load-chat.svg", 3 * 2), ("cost.svg", 2)):  # two loads have values; no gap has
        picture = ElementTree.parse(names[name]).getroot()
        assert len(list(picture.iter("{http://www.w3.org/2000/svg}circle"))) == n_dots


def test_the_command_line(demo: lp.Model, recording: Recording, tmp_path: Path) -> None:
    recording.save(tmp_path / "recording.json")
    cost, capacity, policies = (tmp_path / f"{name}.json" for name in ("cost", "capacity", "policies"))
    output = simulate("fit", tmp_path / "recording.json", "-o", cost)
    assert "2 runs that were not fitted" in output and "noise: 1 of them" in output
    output = simulate(
        *("check", demo.path, cost, "--workload", "conversation", "--scale", 0.1),  # no pauses between turns
        *("--per-s", 8, "--warm-up", 1, "--seconds", 1, "--times", 1, "--threads", 1),
    )
    assert all(f"gap p{p}, ms" in output for p in (50, 95, 99)) and "tokens/s" in output
    # From here on, steps that take longer: the bundled model would serve hundreds of requests a second.
    cost.write_text(json.dumps(json.loads(cost.read_text()) | {"cost": asdict(COST)}))
    short = ("--scale", 0.1, "--seconds", 10)
    output = simulate("capacity", cost, *short, "--node-cost", 1, "-o", capacity)
    assert "a million generated tokens" in output and "chat, load 1.2" in output
    output = simulate("policies", cost, *short, "--nodes", 2, 4, "-o", policies)
    assert "cost-based, 2" in output and "random, 4" in output
    assert "4 nodes" in simulate("run", cost, *short, "--nodes", 4, "--processes", 2)
    simulate("plot", capacity, policies, tmp_path)
    for name, n_lines, label in (
        ("load-chat", 6, "p99"),
        ("policies-chat", 15, "cost-based"),
        ("cost", 1, "chat"),
    ):
        picture = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == n_lines
        assert label in texts and any("demo" in str(text) for text in texts)
