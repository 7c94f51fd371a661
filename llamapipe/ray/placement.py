"""How the cores of a machine are divided among the actors there."""

from __future__ import annotations

import math
from typing import Any

from llamapipe.host.cores import usable_cores


def n_sharing(ray: Any, n_actors: int) -> int:
    """About how many actors run on one machine: their number over that of the machines."""
    n_machines = sum(1 for node in ray.nodes() if node["Alive"]) if ray.is_initialized() else 1
    return -(-n_actors // max(n_machines, 1))


def cores_of_actor(num_cpus: float | None, n_sharing: int) -> int | None:
    """The cores that this process may compute on: those that Ray reserved for it, or its part of the machine's.

    None: all of them, as long as other work leaves them.
    """
    if num_cpus:
        return math.ceil(num_cpus)
    return max(usable_cores() // n_sharing, 1) if n_sharing > 1 else None
