"""How many workers there are, and where each one computes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import socket

import llamapipe
from llamapipe.host.placement import CoreShare, core_shares, n_numa_nodes
from llamapipe.server.workers.process import Placement
from llamapipe.server.workers.supervisor import Supervisor

_ROOT = Path(llamapipe.__file__).parent.parent  # imported from there, whatever the working directory holds
_LIST_GPUS = """\
import sys
sys.path.insert(0, sys.argv[1])
from llamapipe.server.workers.start import print_gpus
print_gpus()
"""


def placements(n: int | None, use_gpus: bool) -> list[Placement]:
    """Where ``n`` workers compute; None: one for each GPU or, without GPUs, for each NUMA node.

    Workers get disjoint cores. With fewer workers than GPUs each gets several; with more, they share them. Raises
    ValueError if there are fewer cores than workers, OSError if the native libraries cannot be loaded.
    """
    shares = None if n is None else core_shares(n)
    gpus = gpu_names() if use_gpus else []
    return placed(shares or core_shares(len(gpus) or n_numa_nodes()), gpus)


def placed(shares: Sequence[CoreShare], gpus: Sequence[str]) -> list[Placement]:
    """A placement for each share; see ``placements``."""
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
    """Names of the GPUs that llama.cpp can use. Asks another process: a supervisor loads no native code.

    Raises OSError if that fails.
    """
    answer = subprocess.run(
        [*_interpreter(), "-c", _LIST_GPUS, str(_ROOT)],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if answer.returncode:
        last = answer.stderr.strip().rpartition("\n")[2]
        raise OSError(f"the devices cannot be listed: {last or f'status {answer.returncode}'}")
    names: list[str] = json.loads(answer.stdout.rpartition("\x1e")[2])
    return names


def print_gpus() -> None:
    """Prints ``gpu_names`` as JSON, after a record separator: drivers may print, too."""
    found = [d.name for d in llamapipe.devices() if d.type == "gpu" and not d.is_software]
    sys.stdout.write("\x1e" + json.dumps(found))


def supervise(
    arguments: Sequence[str], listener: socket, where: Sequence[Placement], announce: Callable[[], None]
) -> None:
    """Runs workers, which are the command ``llamapipe`` with these arguments, until SIGTERM or Ctrl-C.

    For the main thread. Raises WorkerFailedError, OSError.
    """
    script = _ROOT / "llamapipe_command.py"
    program = [str(script)] if script.exists() else ["-m", "llamapipe"]
    Supervisor([*_interpreter(), *program, *arguments], listener, where, announce).run()


def _interpreter() -> list[str]:
    """The interpreter with its own options."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
