"""What native code does with sleeping threads, at a moment that a test chooses."""

from __future__ import annotations

from llamapipe._engine.runtime.wakers import LaunchWakeList, Waiter, WakeQueue
from llamapipe.native.load import native


def sleeps(waiter: Waiter) -> bool:
    """Whether a thread sleeps on the waiter."""
    is_asleep: bool = native().lib.lp_waiter_asleep(waiter)
    return is_asleep


def begin_launch(wakes: LaunchWakeList) -> None:
    """Writes the bytes and wakes the first thread, as a launch does at its beginning."""
    native().lib.lp_wake_list_begin(wakes.handle)


def wake_all_if_stalled(wake_queue: WakeQueue) -> None:
    """Wakes all remaining threads if the last woken one takes long, as a launch does while it computes."""
    native().lib.lp_wake_queue_wake_all_if_stalled(wake_queue.handle)


def wake_all(wake_queue: WakeQueue) -> None:
    """Wakes the threads that are left in the queue."""
    native().lib.lp_wake_queue_wake_all(wake_queue.handle)
