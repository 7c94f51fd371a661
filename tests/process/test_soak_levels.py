"""The slopes of the soak test: noise is no growth, and growth is found in noise."""

from __future__ import annotations

import random

import pytest
from soak.levels import slope
from support.run_script import run_script


@pytest.mark.parametrize("per_hour", [0.0, 5.0, -5.0])
def test_a_slope_is_found_within_its_error(per_hour: float) -> None:
    rng = random.Random(1)
    hours = [i / 180 for i in range(360)]  # two hours, a sample every 20 s
    trend = slope(hours, [150 + per_hour * hour + rng.gauss(0, 2) for hour in hours])
    assert abs(trend.per_hour - per_hour) < trend.error < 2
    assert trend.is_above(1.0) == (per_hour > 1)


def test_jumps_of_a_cache_are_no_growth() -> None:
    hours = [i / 180 for i in range(360)]
    assert not slope(hours, [150.0 + 5 * (i // 20 % 2) for i in range(360)]).is_above(1.0)


def test_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="3 samples or more, not 2"):
        slope([0, 1], [0, 1])


def test_a_level_counts_what_is_held() -> None:
    program = """
import numpy as np
from soak.levels import level

before = level(0, 0)
held = np.full(50_000_000, 1, np.uint8)  # of malloc; bytes are not, without the GIL
with open("/dev/null") as file:
    after = level(0, 0)
assert after.n_descriptors - before.n_descriptors == 1
say(45 < after.rss_mb - before.rss_mb < 60, 45 < after.malloc_mb - before.malloc_mb < 60)
"""
    assert run_script(program) == "True True\n"
