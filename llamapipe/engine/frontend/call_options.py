"""The options of a call, checked."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from llamapipe.arguments import check_choice, check_flag, check_float
from llamapipe.engine.frontend.queue_limit import ExpiredError

OnError = Literal["raise", "return"]
OnTimeout = Literal["raise", "return"]
ON = ("raise", "return")


@dataclass(frozen=True)
class CallOptions:
    """How a call waits, and what it does with failures.

    ``deadline``: a time of ``perf_counter``. ``names_prompts``: errors name the index of their prompt. ``operation``:
    its name for observers.
    """

    block: bool = True
    timeout: float | None = None
    deadline: float | None = None
    on_error: OnError = "raise"
    on_timeout: OnTimeout = "raise"
    names_prompts: bool = False
    operation: str = "text_completion"

    def expired(self) -> ExpiredError:
        """The error for a call whose deadline passed."""
        return ExpiredError(f"not finished within the timeout of {self.timeout} s; the rest was cancelled")


def call_options(
    timeout: float | None,
    block: bool,
    on_error: OnError = "raise",
    on_timeout: OnTimeout = "raise",
    names_prompts: bool = False,
    operation: str = "text_completion",
) -> CallOptions:
    """Checked options of a call, whose time starts now."""
    deadline = None
    if timeout is not None:
        seconds = min(check_float("timeout", timeout, 0, math.inf), threading.TIMEOUT_MAX)
        deadline = perf_counter() + seconds
    check_choice("on_timeout", on_timeout, ON)
    return CallOptions(
        check_flag("block", block), timeout, deadline, on_error, on_timeout, names_prompts, operation
    )


def left_s(deadline: float | None) -> float | None:
    """Seconds until a time of ``perf_counter``; None: no limit."""
    return None if deadline is None else max(deadline - perf_counter(), 0.0)
