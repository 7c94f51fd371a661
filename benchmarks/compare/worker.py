"""The loop of every worker: says that it is ready, then answers each line of prompts with what was measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from workload import Work


class Measured(NamedTuple):
    """A round: how long it took, what was generated, when each request's first token came if that is known.

    ``more``: what only this side can tell.
    """

    seconds: float
    n_tokens: int
    first_s: list[float]
    more: dict[str, Any] = {}  # noqa: RUF012 - never changed


Run = Callable[[list[list[int]]], Measured]


def serve(start: Callable[[Path, Work, list[str]], Run]) -> None:
    """``start`` gets the model, the work and the arguments before them."""
    *arguments, model, work = sys.argv[1:]
    run = start(Path(model), Work(**json.loads(work)), arguments)
    _say({})
    for line in sys.stdin:
        measured = run(json.loads(line)["prompts"])
        _say({**measured._asdict(), "more": measured.more})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
