"""Tests fitted step times on held-out runs, and simulated latencies against those that callers of real runs saw."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import llamapipe as lp
from simulate.cluster import QUANTILES, Cluster
from simulate.cost import StepCost, TooLittleDataError
from simulate.node import NodeOptions
from simulate.policies import POLICIES
from simulate.record import Recording, Run, serve
from simulate.workload import Workload, arrivals

SEEN = (
    "tokens/s",
    *(f"first token p{100 * q:.0f}, ms" for q in QUANTILES),
    *(f"gap p{100 * q:.0f}, ms" for q in QUANTILES),
)


def fit(recording: Recording) -> tuple[StepCost, float]:
    """Fits the runs with even seeds. Prints the errors on the other runs, and returns the fit and the average error.

    Raises TooLittleDataError if there are too few steps to fit, or none in other runs.
    """
    held_out = [run for run in recording.runs if run.seed % 2 and run.seconds]
    if not held_out:
        raise TooLittleDataError(
            "the recording has no steps in a run with an odd seed, to test the fit on; record at least 2 runs, or "
            "longer ones (--seconds)"
        )
    runs = [run for run in recording.runs if run.seed % 2 == 0]
    cost = StepCost.fit([x for run in runs for x in run.loads], [x for run in runs for x in run.seconds])
    return cost, print_errors(cost, held_out)


def print_errors(cost: StepCost, runs: Sequence[Run]) -> float:
    """Prints the errors of the fitted times. Returns the average error of a run's time."""
    ratios: dict[tuple[str, int], list[float]] = {}
    single: list[float] = []
    print(f"{'run':>16s} {'steps':>6s} {'seconds':>8s} {'fitted':>7s} {'error':>7s}")
    for run in runs:
        fitted, measured = np.array([cost.seconds(load) for load in run.loads]), np.array(run.seconds)
        ratio = float(fitted.sum() / measured.sum())
        ratios.setdefault((run.traffic, run.seed), []).append(ratio)
        single += list(abs(fitted / measured - 1))
        name = f"{run.traffic} {run.seed}"
        print(
            f"{name:>16s} {len(measured):6d} {measured.sum():8.2f} {fitted.sum():7.2f} {100 * (ratio - 1):+6.1f}%"
        )
    whole = [abs(ratio - 1) for same in ratios.values() for ratio in same]
    error = float(np.mean(whole))
    print(
        f"{len(runs)} runs that were not fitted: time of a run off by {100 * error:.1f} % on average, "
        f"{100 * max(whole):.1f} % at most; of a step, by {100 * np.median(single):.1f} % at the median"
    )
    noise = [max(same) / min(same) - 1 for same in ratios.values() if len(same) > 1]
    if noise:
        print(
            f"noise: {len(noise)} of them were made twice; their errors differ by {100 * np.mean(noise):.1f} %"
        )
    return error


def check(
    model: lp.Model,
    cost: StepCost,
    options: NodeOptions,
    workload: Workload,
    per_s: float,
    warm_up_s: float,
    seconds: float,
    seed: int,
    n_times: int,
    n_threads: int | None,
) -> None:
    """Prints the latencies of real runs, as medians over the runs, and of a simulation of the same arrivals.

    Raises TooLittleDataError if a run received too few tokens.
    """
    measured, runs = [], []
    for _ in range(n_times):
        run, took_s = serve(model, options, workload, per_s, warm_up_s, seconds, seed, n_threads=n_threads)
        if not run.gaps_s or not run.seconds:
            raise TooLittleDataError(
                f"no request arrived in the {seconds:g} s after the warm-up, or each got one token; raise --seconds or "
                "--per-s"
            )
        runs.append(run)
        measured.append(_seen(run.n_tokens / took_s, run.first_s, run.gaps_s))
    print_errors(cost, runs)
    cluster = Cluster(1, cost, options, POLICIES["random"](0))
    outcome = cluster.run(arrivals(workload, per_s, warm_up_s + seconds, seed), math.inf, warm_up_s)
    rate = outcome.n_tokens / (outcome.last_s - warm_up_s)
    simulated = [rate, *(1e3 * s for s in (*outcome.first_s, *outcome.gap_s))]
    busy = cluster.nodes[0].busy_s / outcome.last_s
    print(f"{outcome.n_ended} requests; steps run in {100 * busy:.0f} % of the time")
    print(f"{'':22s} {'simulated':>10s} {'measured':>10s} {'error':>7s}   each run")
    for i, name in enumerate(SEEN):
        values = [row[i] for row in measured]
        middle = float(np.median(values))
        error = f"{100 * (simulated[i] / middle - 1):+6.1f}%"
        print(
            f"{name:22s} {simulated[i]:10.4g} {middle:10.4g} {error}   {' '.join(f'{x:.4g}' for x in values)}"
        )


def _seen(tokens_per_s: float, first_s: Sequence[float], gaps_s: Sequence[float]) -> list[float]:
    times = [*np.quantile(first_s, QUANTILES), *np.quantile(gaps_s, QUANTILES)]
    return [tokens_per_s, *(1e3 * float(s) for s in times)]
