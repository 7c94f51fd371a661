"""The options that every call has: how long it waits, and whether it raises or returns failures.

Open this file to add such an option, or to change what a deadline does.

The principle: a deadline is a point in time, fixed once when the call begins. All waiting and work for the call ends at
that point, so the parts of a call share one timeout.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from llamapipe.arguments import check_choice, check_flag, check_float
from llamapipe.wanted import Limit, limited

OnError = Literal["raise", "return"]
OnTimeout = Literal["raise", "return"]
ERROR_MODES = ("raise", "return")


@dataclass(frozen=True)
class CallOptions:
    """The checked options of one call.

    ``deadline``: a time of ``perf_counter``; None: no limit. ``names_prompts``: errors name the index of their prompt.
    ``operation``: the call's name for observers.
    """

    block: bool = True
    timeout: float | None = None
    deadline: float | None = None
    on_error: OnError = "raise"
    on_timeout: OnTimeout = "raise"
    names_prompts: bool = False
    operation: str = "text_completion"

    def expired_error(self) -> ExpiredError:
        """Return the error for a call whose deadline has passed."""
        return ExpiredError(f"not finished within the timeout of {self.timeout} s; the rest was cancelled")

    def in_time(self) -> limited:
        """If ``on_timeout`` is ``"raise"``, end long work in the ``with`` block at the deadline with ExpiredError."""
        return limited(Limit(self._check, self.deadline if self.on_timeout == "raise" else None))

    def _check(self) -> None:
        is_over = self.deadline is not None and perf_counter() >= self.deadline
        if is_over and self.on_timeout == "raise":
            raise self.expired_error()


def call_options(
    timeout: float | None,
    block: bool,
    on_error: OnError = "raise",
    on_timeout: OnTimeout = "raise",
    names_prompts: bool = False,
    operation: str = "text_completion",
) -> CallOptions:
    """Return the checked options of a call, whose timeout starts now. Raises TypeError, ValueError."""
    deadline = None
    if timeout is not None:
        seconds = min(check_float("timeout", timeout, 0, math.inf), threading.TIMEOUT_MAX)
        deadline = perf_counter() + seconds
    check_choice("on_timeout", on_timeout, ERROR_MODES)
    return CallOptions(
        check_flag("block", block), timeout, deadline, on_error, on_timeout, names_prompts, operation
    )


class ExpiredError(TimeoutError):
    """Raised when the deadline of a call has passed."""
