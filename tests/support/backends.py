"""What the device that tests run on can do, and how much to ask of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

T = TypeVar("T", bound=Callable[..., object])

# The backend whose build is tested: set by nox. A software device computes a thousand times slower than the CPU itself.
BACKEND = os.environ.get("LLAMAPIPE_TEST_BACKEND", "cpu")
ON_DEVICE = BACKEND != "cpu"
# CI's share on a software device: each path once instead of every combination of paths (LLAMAPIPE_DEVICE_TESTS=few).
FEW = ON_DEVICE and os.environ.get("LLAMAPIPE_DEVICE_TESTS") == "few"


def device_unless_few(test: T) -> T:
    """Mark a test for devices that takes minutes on a software one, where it runs unless few are asked for."""
    return test if FEW else pytest.mark.device(test)


# The ways outputs can take: on a CPU the ring is host memory, and there is nothing to wait for.
RINGS = ("events",) if FEW else ("events", "sync", "off") if ON_DEVICE else ("auto", "off")


# How far rounding may move a logit where a step is computed together with others.
BOUND = 0.15 if ON_DEVICE else 0.02
# For tests of the same tokens, alone and among others.
same_rounding = pytest.mark.skipif(
    ON_DEVICE, reason="this device rounds a step of several sequences otherwise than a step of one"
)


def examples(n: int) -> int:
    """How many examples a property test draws: fewer where a step takes tens of milliseconds."""
    return n if not ON_DEVICE else 2 if FEW else max(n // 12, 3)


def assert_near(rows: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    """The same rows but for rounding: where batches were cut otherwise, sums are added up in another order.

    Rows of another place differ by more than their own size, those of one place by a hundredth of it on a device.
    """
    assert rows.shape == expected.shape
    distance = np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.all(distance < 0.05), distance
