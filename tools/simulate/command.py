"""The command line of the simulation."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from simulate.cluster import Cluster, Outcome
from simulate.cost import StepCost, TooLittleDataError
from simulate.node import NodeOptions
from simulate.policies import POLICIES
from simulate.workload import WORKLOADS, Workload, arrivals, scaled

_COLUMNS = (
    f"{'':22s} {'requests/s':>10s} {'tokens/s':>9s} {'first token s, p50 p95 p99':>28s} {'gap ms, p50 p95 p99':>22s} "
    f"{'hits':>5s} {'busy':>5s} {'open':>6s}"
)
_LEAST_PER_S = 1e-3  # requests a second; at a lower rate, a node is reported to serve none
_SWEEP = tuple(i / 10 for i in range(1, 13))  # parts of the capacity at which latencies are simulated


def main(doc: str) -> None:
    """Parses arguments and runs a subcommand."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = _command(commands, "record", "model", out=True)
    command.add_argument("--runs", type=_at_least(2), default=16, help="half are fitted, half are held out")
    command.add_argument("--again", type=int, default=2, help="held-out runs to repeat, to measure the noise")
    command.add_argument("--seconds", type=float, default=10.0, help="duration of each run")
    command.add_argument("--n-ctx", type=int, default=4096)
    command.add_argument("--n-seq-max", type=int, default=16)
    command.add_argument("--cache-mib", type=int, default=256, help="host memory for the prefix cache")
    command.add_argument("--threads", type=int)
    command = _command(commands, "fit", "recording", out=True)
    command = _command(commands, "check", "model", "cost")
    _traffic(command, per_s=2.0, seconds=60.0)
    command.add_argument(
        "--times", type=_at_least(1), default=3, help="number of real runs, to show the noise"
    )
    command.add_argument("--warm-up", type=float, default=20.0, help="seconds at the start that do not count")
    command.add_argument("--threads", type=int)
    command = _command(commands, "capacity", "cost", out=True, needs_out=False)
    _traffic(command, per_s=None, seconds=900.0)
    command.add_argument(
        "--first", type=float, default=2.0, help="limit for the time to first token, p95, in seconds"
    )
    command.add_argument(
        "--gap", type=float, default=0.2, help="limit for gaps between tokens, p99, in seconds"
    )
    command.add_argument("--node-cost", type=float, help="cost of a node per hour, in your currency")
    for name in ("policies", "run"):
        command = _command(commands, name, "cost", out=True, needs_out=False)
        _traffic(command, per_s=0.5, seconds=3600.0 if name == "run" else 900.0)
        command.add_argument("--nodes", type=int, nargs="+", default=[40])
        more = (
            "processes that share the work"
            if name == "policies"
            else "processes that divide nodes and traffic, each with its own router"
        )
        command.add_argument("--processes", type=int, default=1, help=more)
        if name == "run":
            command.add_argument("--policy", choices=list(POLICIES), default="cost-based")
    command = commands.add_parser("plot")
    command.add_argument("results", type=Path, nargs="+", help="files of capacity -o and policies -o")
    command.add_argument("folder", type=Path, help="where to write the pictures")
    args = parser.parse_args()
    try:
        globals()[f"_{args.command}"](args)
    except (TooLittleDataError, OSError) as error:
        parser.exit(1, f"error: {error}\n")


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a whole number, at least {least}")
        return int(text)

    return number


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a number above 0")
    return number


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    *files: str,
    out: bool = False,
    needs_out: bool = True,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name)
    for file in files:
        parser.add_argument(file, type=Path)
    if out:
        parser.add_argument("-o", "--output", type=Path, required=needs_out)
    return parser


def _traffic(parser: argparse.ArgumentParser, per_s: float | None, seconds: float) -> None:
    parser.add_argument("--workload", choices=list(WORKLOADS), default="chat")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for all lengths")
    if per_s is not None:
        parser.add_argument("--per-s", type=_above_zero, default=per_s, help="requests a second per node")
    parser.add_argument("--seconds", type=_above_zero, default=seconds)
    parser.add_argument("--seed", type=int, default=1)


def _record(args: argparse.Namespace) -> None:
    import llamapipe as lp
    from simulate.record import record

    with lp.Model(args.model) as model:
        options = NodeOptions(args.n_ctx, args.n_seq_max, cache_bytes=args.cache_mib * 2**20)
        recording = record(model, options, args.runs, args.seconds, args.again, n_threads=args.threads)
    recording.save(args.output)
    n_steps = sum(len(run.loads) for run in recording.runs)
    print(f"{n_steps} steps of {len(recording.runs)} runs in {args.output}")


def _fit(args: argparse.Namespace) -> None:
    from simulate.record import Recording
    from simulate.validate import fit

    recording = Recording.load(args.recording)
    cost, error = fit(recording)
    fields = {
        "model": recording.model,
        "options": asdict(recording.options),
        "cost": asdict(cost),
        "held_out_error": round(error, 4),
    }
    args.output.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> tuple[StepCost, NodeOptions]:
    fields = json.loads(path.read_text(encoding="utf-8"))
    cost = {**fields["cost"], "tokens_s": tuple(fields["cost"]["tokens_s"])}
    return StepCost(**cost), NodeOptions(**fields["options"])


def _workload(args: argparse.Namespace, options: NodeOptions) -> Workload:
    return scaled(WORKLOADS[args.workload], args.scale, options.n_ctx)


def _check(args: argparse.Namespace) -> None:
    import llamapipe as lp
    from simulate.validate import check

    cost, options = _read(args.cost)
    workload = _workload(args, options)
    with lp.Model(args.model) as model:
        times = (args.warm_up, args.seconds, args.seed, args.times)
        check(model, cost, options, workload, args.per_s, *times, args.threads)


def _simulated(
    cost: StepCost,
    options: NodeOptions,
    workload: Workload,
    policy: str,
    n_nodes: int,
    per_s: float,
    seconds: float,
    seed: int,
) -> Outcome:
    traffic = arrivals(workload, per_s * n_nodes, seconds, seed)
    return Cluster(n_nodes, cost, options, POLICIES[policy](seed)).run(traffic, seconds, seconds / 10)


def _capacity(args: argparse.Namespace) -> None:
    """Finds by bisection the highest rate of requests that one node serves within the limits."""
    cost, options = _read(args.cost)
    workload = _workload(args, options)
    outcomes: dict[float, Outcome] = {}

    def simulate(per_s: float) -> Outcome:
        if per_s not in outcomes:
            outcomes[per_s] = _simulated(cost, options, workload, "random", 1, per_s, args.seconds, args.seed)
        return outcomes[per_s]

    def is_served(per_s: float) -> bool:
        outcome = simulate(per_s)
        # Comparisons with NaN are false.
        is_late = outcome.first_s[1] > args.first or outcome.gap_s[2] > args.gap
        return not is_late and outcome.n_ended >= 0.9 * outcome.n_arrived

    low, high = 0.0, 0.05
    while is_served(high):
        low, high = high, 2 * high
    while high - low > 0.02 * high and high > _LEAST_PER_S:
        middle = (low + high) / 2
        low, high = (middle, high) if is_served(middle) else (low, middle)
    if low == 0.0:
        print("no rate is served within the limits")
        return
    if not outcomes[low].tokens_per_s:
        raise TooLittleDataError(f"nothing was generated in {args.seconds:g} s; raise --seconds")
    print(_COLUMNS)
    _print_outcome(args.workload, low, outcomes[low])
    if args.node_cost is not None:
        price = args.node_cost / (outcomes[low].tokens_per_s * 3600) * 1e6
        print(f"a million generated tokens cost {price:.2f}")
    if args.output is not None:
        rows = [{"load": load, "per_s": load * low, **asdict(simulate(load * low))} for load in _SWEEP]
        _write(args, workload, rows, capacity_per_s=low)
        for row in rows:
            _print_outcome(f"{args.workload}, load {row['load']:.1f}", row["per_s"], simulate(row["per_s"]))


def _policies(args: argparse.Namespace) -> None:
    cost, options = _read(args.cost)
    workload = _workload(args, options)
    print(_COLUMNS)
    rows = []
    with ProcessPoolExecutor(args.processes) as pool:
        jobs = {
            (name, n): pool.submit(
                _simulated, cost, options, workload, name, n, args.per_s, args.seconds, args.seed
            )
            for n in args.nodes
            for name in POLICIES
        }
        for (name, n), job in jobs.items():
            _print_outcome(f"{name}, {n}", args.per_s, job.result())
            rows.append({"policy": name, "nodes": n, **asdict(job.result())})
    if args.output is not None:
        _write(args, workload, rows)


def _write(
    args: argparse.Namespace, workload: Workload, rows: Iterable[dict[str, Any]], **more: float
) -> None:
    """Writes results with the fit, arguments and traffic that they belong to."""
    arguments = {name: value for name, value in vars(args).items() if name not in ("output", "cost")}
    fit = json.loads(args.cost.read_text(encoding="utf-8"))
    results = {"fit": fit, "arguments": arguments, "traffic": asdict(workload), **more, "rows": list(rows)}
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _run(args: argparse.Namespace) -> None:
    cost, options = _read(args.cost)
    workload = _workload(args, options)
    print(_COLUMNS)
    rows = []
    for n_nodes in args.nodes:
        n_parts = min(args.processes, n_nodes)
        began_s = perf_counter()
        with ProcessPoolExecutor(n_parts) as pool:
            parts = [n_nodes // n_parts + (i < n_nodes % n_parts) for i in range(n_parts)]
            jobs = [
                pool.submit(
                    _simulated,
                    cost,
                    options,
                    workload,
                    args.policy,
                    n,
                    args.per_s,
                    args.seconds,
                    args.seed + i,
                )
                for i, n in enumerate(parts)
            ]
            for n, job in zip(parts, jobs, strict=True):
                _print_outcome(f"{args.policy}, {n}", args.per_s, job.result())
                rows.append({"policy": args.policy, "nodes": n, **asdict(job.result())})
        took_s = perf_counter() - began_s
        n_steps = sum(job.result().n_steps for job in jobs)
        n_requests = sum(job.result().n_ended for job in jobs)
        print(
            f"{n_nodes} nodes, {args.seconds / 3600:g} hours, {n_requests:,} requests, {n_steps:,} steps in "
            f"{took_s:.0f} s"
        )
    if args.output is not None:
        _write(args, workload, rows)


def _plot(args: argparse.Namespace) -> None:
    from simulate.plots import plot

    for path in plot([json.loads(path.read_text(encoding="utf-8")) for path in args.results], args.folder):
        print(path)


def _print_outcome(name: str, per_s: float, outcome: Outcome) -> None:
    first = " ".join(f"{s:8.3f}" for s in outcome.first_s)
    gap = " ".join(f"{1e3 * s:6.1f}" for s in outcome.gap_s)
    print(
        f"{name:22s} {per_s * outcome.n_nodes:10.2f} {outcome.tokens_per_s:9.0f} {first:>28s} {gap:>22s} "
        f"{100 * outcome.hit_rate:4.0f}% {100 * outcome.busy:4.0f}% {outcome.backlog:6.1f}",
        flush=True,
    )
