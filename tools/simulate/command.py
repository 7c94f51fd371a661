"""The command line of the simulation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from simulate.cluster import QUANTILES, Cluster, Outcome
from simulate.cost import StepCost
from simulate.node import NodeOptions
from simulate.policies import POLICIES
from simulate.record import Recording, Run, record, serve
from simulate.workload import WORKLOADS, Workload, arrivals, scaled

_COLUMNS = (
    f"{'':22s} {'requests/s':>10s} {'tokens/s':>9s} {'first token s, p50 p95 p99':>28s} {'gap ms, p50 p95 p99':>22s} "
    f"{'hits':>5s} {'busy':>5s} {'open':>6s}"
)


def main(doc: str) -> None:
    """Parses arguments and runs a subcommand."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = _command(commands, "record", "model", out=True)
    one.add_argument("--runs", type=int, default=16)
    one.add_argument("--seconds", type=float, default=10.0, help="of each run")
    _engine_options(one)
    one = _command(commands, "fit", "recording", out=True)
    one = _command(commands, "check", "model", "cost")
    _traffic(one, per_s=2.0, seconds=60.0)
    _engine_options(one)
    one = _command(commands, "capacity", "cost")
    _traffic(one, per_s=0.0, seconds=900.0)
    one.add_argument(
        "--first", type=float, default=2.0, help="most seconds to the first token, 95 of 100 requests"
    )
    one.add_argument("--gap", type=float, default=0.2, help="most seconds between tokens, 99 of 100 gaps")
    one.add_argument("--node-cost", type=float, help="of a node for an hour, in your currency")
    for name in ("policies", "run"):
        one = _command(commands, name, "cost", out=name == "policies")
        _traffic(one, per_s=0.5, seconds=3600.0 if name == "run" else 900.0)
        one.add_argument("--nodes", type=int, nargs="+", default=[40])
        one.add_argument(
            "--processes", type=int, default=1, help="that divide nodes and traffic, each with a router"
        )
        if name == "run":
            one.add_argument("--policy", choices=list(POLICIES), default="cost-based")
    args = parser.parse_args()
    globals()[f"_{args.command}"](args)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, *files: str, out: bool = False
) -> argparse.ArgumentParser:
    made = commands.add_parser(name)
    for file in files:
        made.add_argument(file, type=Path)
    if out:
        made.add_argument("-o", "--output", type=Path, required=name != "policies")
    return made


def _traffic(parser: argparse.ArgumentParser, per_s: float, seconds: float) -> None:
    parser.add_argument("--workload", choices=list(WORKLOADS), default="chat")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths")
    parser.add_argument("--per-s", type=float, default=per_s, help="requests a second and node")
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--seed", type=int, default=1)


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--n-ctx", type=int, default=4096)
    parser.add_argument("--n-seq-max", type=int, default=16)
    parser.add_argument("--threads", type=int)


def _record(args: argparse.Namespace) -> None:
    import llamapipe as lp

    with lp.Model(args.model) as model:
        options = NodeOptions(n_ctx=args.n_ctx, n_seq_max=args.n_seq_max)
        recording = record(model, options, args.runs, args.seconds, n_threads=args.threads)
    recording.save(args.output)
    print(
        f"{sum(len(run.loads) for run in recording.runs)} steps of {len(recording.runs)} runs in {args.output}"
    )


def _fit(args: argparse.Namespace) -> None:
    """Fits every second run, and prints the errors on the others."""
    recording = Recording.load(args.recording)
    cost = _fitted(recording.runs[0::2])
    cost.save(args.output)
    _print_errors(cost, recording.runs[1::2])
    fields = json.loads(args.output.read_text(encoding="utf-8"))
    fields = {"model": recording.model, "options": asdict(recording.options), "cost": fields}
    args.output.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _fitted(runs: Sequence[Run]) -> StepCost:
    return StepCost.fit([x for run in runs for x in run.loads], [x for run in runs for x in run.seconds])


def _print_errors(cost: StepCost, runs: Sequence[Run]) -> None:
    whole, single = [], []
    for run in runs:
        predicted = np.array([cost.seconds(load) for load in run.loads])
        measured = np.array(run.seconds)
        whole.append(abs(predicted.sum() / measured.sum() - 1))
        single += list(abs(predicted / measured - 1))
    print(
        f"{len(runs)} runs that were not fitted: time of a run off by {100 * np.mean(whole):.1f} % on average, "
        f"{100 * max(whole):.1f} % at most; of a step, by {100 * np.median(single):.1f} % at the median"
    )


def _read(path: Path) -> tuple[StepCost, NodeOptions]:
    fields = json.loads(path.read_text(encoding="utf-8"))
    cost = {**fields["cost"], "decode_s": tuple(fields["cost"]["decode_s"])}
    return StepCost(**cost), NodeOptions(**fields["options"])


def _workload(args: argparse.Namespace, options: NodeOptions) -> Workload:
    return scaled(WORKLOADS[args.workload], args.scale, options.n_ctx)


def _simulated(
    cost: StepCost,
    options: NodeOptions,
    workload: Workload,
    policy: str,
    n_nodes: int,
    args: argparse.Namespace,
    seed: int,
) -> Outcome:
    seconds = args.seconds
    made = arrivals(workload, args.per_s * n_nodes, seconds, seed)
    return Cluster(n_nodes, cost, options, POLICIES[policy](seed)).run(made, seconds, seconds / 10)


def _check(args: argparse.Namespace) -> None:
    """Compares a real run with the simulation of the same arrivals."""
    import llamapipe as lp

    cost, options = _read(args.cost)
    options = replace(options, n_ctx=args.n_ctx, n_seq_max=args.n_seq_max)
    workload = _workload(args, options)
    with lp.Model(args.model) as model:
        run, options = serve(
            model, options, workload, args.per_s, args.seconds, args.seed, n_threads=args.threads
        )
    cluster = Cluster(1, cost, options, POLICIES["random"](0))
    made = arrivals(workload, args.per_s, args.seconds, args.seed)
    outcome = cluster.run(made, args.seconds + 60, 0.0)
    _print_errors(cost, [run])
    for name, measured, simulated in (
        ("first token", run.first_s, outcome.first_s),
        ("gap", run.gaps_s, outcome.gap_s),
    ):
        pairs = zip(QUANTILES, simulated, strict=True)
        found = ", ".join(
            f"p{100 * q:.0f} {1e3 * np.quantile(measured, q):.1f} / {1e3 * s:.1f}" for q, s in pairs
        )
        print(f"{name}, ms, measured / simulated: {found}  ({len(measured)} measured)")


def _capacity(args: argparse.Namespace) -> None:
    """Finds, by halving, the most requests a second that one node serves within the limits."""
    cost, options = _read(args.cost)
    workload = _workload(args, options)
    low, high = 0.0, 0.05
    outcomes: dict[float, Outcome] = {}

    def is_served(per_s: float) -> bool:
        args.per_s = per_s
        made = outcomes[per_s] = _simulated(cost, options, workload, "random", 1, args, args.seed)
        return (
            made.first_s[1] <= args.first
            and made.gap_s[2] <= args.gap
            and made.n_ended > 0.9 * made.n_arrived
        )

    while is_served(high):
        low, high = high, 2 * high
    while high - low > 0.02 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if is_served(middle) else (low, middle)
    print(_COLUMNS)
    if low in outcomes:
        _print_outcome(args.workload, low, outcomes[low])
        if args.node_cost is not None:
            print(
                f"a million generated tokens cost {args.node_cost / (outcomes[low].tokens_per_s * 3600) * 1e6:.2f}"
            )
    else:
        print("no rate is served within the limits")


def _policies(args: argparse.Namespace) -> None:
    cost, options = _read(args.cost)
    workload = _workload(args, options)
    print(_COLUMNS)
    rows = []
    with ProcessPoolExecutor(args.processes) as pool:
        for n_nodes in args.nodes:
            jobs = {
                name: pool.submit(_simulated, cost, options, workload, name, n_nodes, args, args.seed)
                for name in POLICIES
            }
            for name, job in jobs.items():
                outcome = job.result()
                _print_outcome(f"{name}, {n_nodes}", args.per_s, outcome)
                rows.append({"policy": name, "nodes": n_nodes, **asdict(outcome)})
    if args.output is not None:
        args.output.write_text(
            json.dumps({"traffic": asdict(workload), "per_s": args.per_s, "rows": rows}, indent=1)
        )


def _run(args: argparse.Namespace) -> None:
    cost, options = _read(args.cost)
    workload = _workload(args, options)
    print(_COLUMNS)
    for n_nodes in args.nodes:
        n_parts = min(args.processes, n_nodes)
        began_s = perf_counter()
        with ProcessPoolExecutor(n_parts) as pool:
            parts = [n_nodes // n_parts + (i < n_nodes % n_parts) for i in range(n_parts)]
            jobs = [
                pool.submit(_simulated, cost, options, workload, args.policy, n, args, args.seed + i)
                for i, n in enumerate(parts)
            ]
            for n, job in zip(parts, jobs, strict=True):
                _print_outcome(f"{args.policy}, {n}", args.per_s, job.result())
        n_steps = sum(job.result().n_steps for job in jobs)
        print(
            f"{n_nodes} nodes, {args.seconds / 3600:g} hours, {n_steps} steps in {perf_counter() - began_s:.0f} s"
        )


def _print_outcome(name: str, per_s: float, outcome: Outcome) -> None:
    first = " ".join(f"{s:8.3f}" for s in outcome.first_s)
    gap = " ".join(f"{1e3 * s:6.1f}" for s in outcome.gap_s)
    print(
        f"{name:22s} {per_s * outcome.n_nodes:10.2f} {outcome.tokens_per_s:9.0f} {first:>28s} {gap:>22s} "
        f"{100 * outcome.hit_rate:4.0f}% {100 * outcome.busy:4.0f}% {outcome.backlog:6.1f}",
        flush=True,
    )
