"""The parts of a server with workers that need no process: when to restart, how metrics add up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import llamapipe as lp
from llamapipe.fleet._totals import Totals, add_families, with_labels
from llamapipe.fleet.placement import free_gpu_memory, gpu_names, place_on_gpus
from llamapipe.fleet.supervisor import Backoff
from llamapipe.host.cores import CoreShare
from llamapipe.native.load import has_gpu_backend
from llamapipe.server.metrics import Family, render


class TestBackoff:
    def test_short_lives_wait_twice_as_long_each_time(self) -> None:
        backoff = Backoff(first_s=0.5, most_s=3.0, long_s=30.0)
        assert [backoff.delay_s(1.0) for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]

    def test_a_long_life_is_followed_at_once(self) -> None:
        backoff = Backoff(first_s=0.5, long_s=30.0)
        backoff.delay_s(1.0)
        assert backoff.delay_s(30.0) == 0
        assert backoff.delay_s(1.0) == 0.5

    def test_attempts_end_and_begin_anew_when_one_was_ready(self) -> None:
        backoff = Backoff(n_attempts=3)
        assert backoff.delay_s(None) is not None
        assert backoff.delay_s(None) is not None
        assert backoff.delay_s(0.1) is not None
        assert [backoff.delay_s(None) is None for _ in range(3)] == [False, False, True]


def families(n: float, usage: float, created: float) -> list[Family]:
    return [
        Family("steps", "Steps.", "counter", [("steps_total", {}, n), ("steps_created", {}, created)]),
        Family("running", "Running.", "gauge", [("running", {}, n)]),
        Family("vllm:kv_cache_usage_perc", "Usage.", "gauge", [("vllm:kv_cache_usage_perc", {}, usage)]),
        Family("times", "Times.", "histogram", [("times_bucket", {"le": "1"}, n), ("times_sum", {}, n)]),
        Family("requests", "Requests.", "counter", [("requests_total", {"path": f"/{n:g}"}, 1.0)]),
    ]


class TestMetrics:
    def test_counts_are_added_and_ratios_averaged(self) -> None:
        samples = {
            (name, *sorted(labels.items())): value
            for family in add_families([families(1, 0.5, 20), families(2, 0.25, 10)], [families(4, 0.9, 15)])
            for name, labels, value in family.samples
        }
        assert samples == {
            ("steps_total",): 7,
            ("steps_created",): 10,
            ("running",): 3,  # not of one that has ended
            ("vllm:kv_cache_usage_perc",): 0.375,
            ("times_bucket", ("le", "1")): 7,
            ("times_sum",): 7,
            ("requests_total", ("path", "/1")): 1,
            ("requests_total", ("path", "/2")): 1,
            ("requests_total", ("path", "/4")): 1,
        }

    def test_no_counter_falls_when_a_process_ends(self) -> None:
        totals = Totals(0)
        totals.keep(with_labels(families(4, 0.9, 15), model="a"), [])
        live = with_labels(families(1, 0.5, 20), model="b")
        for _ in range(2):  # asking changes nothing
            samples = {family.name: family.samples for family in totals.with_live([live])}
            steps = [sample for sample in samples["steps"] if sample[0] == "steps_total"]
            assert sorted((labels["model"], value) for _, labels, value in steps) == [("a", 4), ("b", 1)]
            assert samples["running"] == [("running", {"model": "b"}, 1)]

    def test_requests_to_processes_that_have_ended_stay_among_the_last(self) -> None:
        def told(*times: int) -> list[dict[str, Any]]:
            return [{"id": str(time), "ended_at": time} for time in times]

        totals = Totals(3)
        totals.keep([], told(5, 3))
        totals.keep([], told(4, 1))
        for _ in range(2):
            assert [entry["ended_at"] for entry in totals.requests_with([told(6), told(2)])] == [6, 5, 4]
        assert [entry["ended_at"] for entry in totals.requests_with([])] == [5, 4, 3]

    def test_they_are_rendered_in_prometheus_format(self) -> None:
        text = render(add_families([families(1, 0.5, 20)])).decode()
        assert '# TYPE times histogram\ntimes_bucket{le="1"} 1.0\n' in text
        assert "# TYPE steps_total counter\nsteps_total 1.0\n" in text
        assert "vllm:kv_cache_usage_perc 0.5\n" in text


class TestPlacement:
    SHARES = tuple(CoreShare((core,), 1, (core // 2,)) for core in range(4))

    @pytest.mark.parametrize(
        ("n", "gpus", "expected"),
        [
            (2, "AB", ["A", "B"]),
            (2, "ABC", ["A", "BC"]),
            (1, "AB", ["AB"]),
            (4, "AB", ["A", "B", "A", "B"]),
        ],
    )
    def test_gpus_are_divided_or_shared(self, n: int, gpus: str, expected: list[str]) -> None:
        placements = place_on_gpus(self.SHARES[:n], list(gpus))
        assert ["".join(placement.devices or ()) for placement in placements] == expected
        assert not any(placement.own_weights for placement in placements)

    def test_each_node_has_weights_of_its_own(self) -> None:
        assert all(
            placement.own_weights and placement.devices is None
            for placement in place_on_gpus(self.SHARES, [])
        )
        assert not any(placement.own_weights for placement in place_on_gpus(self.SHARES[:2], []))

    def test_gpus_are_listed_by_another_process(self) -> None:
        assert gpu_names() == [d.name for d in lp.devices() if d.type == "gpu" and not d.is_software]
        there = any(device.has_own_memory for device in lp.devices())
        assert (free_gpu_memory() > 0) == there
        assert has_gpu_backend() >= there

    @pytest.mark.parametrize(
        ("more", "expected"),
        [
            ({}, True),
            ({"type": "igpu"}, False),
            ({"type": "cpu"}, False),
            ({"backend": "MTL"}, False),
            ({"description": "llvmpipe (LLVM 15)"}, False),
            ({"memory_total": 0}, False),
        ],
    )
    def test_whose_memory_is_not_the_systems(self, more: dict[str, Any], expected: bool) -> None:
        device = lp.Device("CUDA0", "H200", "CUDA", "gpu", 2**37, 2**37, True, True, True)
        assert replace(device, **more).has_own_memory is expected
