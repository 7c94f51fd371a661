"""Chooses the cores and GPUs of processes. Open it to change how workers share a machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import llamapipe
from llamapipe.fleet.command import command_calling
from llamapipe.host.cores import CoreShare, core_shares, n_numa_nodes
from llamapipe.native.load import has_gpu_backend


@dataclass(frozen=True)
class Placement:
    """The cores and devices of a worker. ``devices``: names of its devices; None: all of them."""

    share: CoreShare
    devices: tuple[str, ...] | None = None
    own_weights: bool = False


def placements(n: int | None, use_gpus: bool) -> list[Placement]:
    """Return where ``n`` workers compute; None: one worker per GPU or, without GPUs, per NUMA node.

    Workers get disjoint cores. With fewer workers than GPUs, each gets several GPUs; with more, workers share GPUs.
    Raises ValueError if there are fewer cores than workers, OSError if the native libraries cannot be loaded.
    """
    shares = None if n is None else core_shares(n)
    gpus = gpu_names() if use_gpus else []
    return place_on_gpus(shares or core_shares(len(gpus) or n_numa_nodes()), gpus)


def place_on_gpus(shares: Sequence[CoreShare], gpus: Sequence[str]) -> list[Placement]:
    """Return a placement for each share; see ``placements``."""
    if not gpus:
        own_weights = len({share.nodes for share in shares}) > 1
        return [Placement(share, None, own_weights) for share in shares]
    n, n_gpus = len(shares), len(gpus)
    if n > n_gpus:
        return [Placement(share, (gpus[i % n_gpus],)) for i, share in enumerate(shares)]
    return [
        Placement(share, tuple(gpus[i * n_gpus // n : (i + 1) * n_gpus // n]))
        for i, share in enumerate(shares)
    ]


def gpu_names() -> list[str]:
    """Return the names of the GPUs that llama.cpp can use. Raises OSError if that fails."""
    return [name for name, _ in _gpus()]


def free_gpu_memory() -> int:
    """Return the total free bytes of the GPUs with dedicated memory; 0 if there are none.

    Raises OSError if that fails.
    """
    return sum(n_bytes for _, n_bytes in _gpus()) if has_gpu_backend() else 0


def _gpus() -> list[tuple[str, int]]:
    """Return the name of each GPU and the free bytes of its dedicated memory.

    A child process finds the GPUs, because a supervisor loads no native code.
    """
    answer = subprocess.run(
        command_calling(print_gpus),
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if answer.returncode:
        last = answer.stderr.strip().rpartition("\n")[2]
        raise OSError(f"the devices cannot be listed: {last or f'status {answer.returncode}'}")
    return [(name, n_bytes) for name, n_bytes in json.loads(answer.stdout.rpartition("\x1e")[2])]


def print_gpus() -> None:
    """Print the GPUs as JSON after a record separator, because drivers also print."""
    gpus = [device for device in llamapipe.devices() if device.type == "gpu" and not device.is_software]
    entries = [(gpu.name, gpu.memory_free if gpu.has_own_memory else 0) for gpu in gpus]
    sys.stdout.write("\x1e" + json.dumps(entries))
