"""The lock of all modules: no interruption leaves it locked, and it excludes."""

from __future__ import annotations

import sys

import pytest
from support.run_script import run_script

STORM = """
import random, signal, threading
from llamapipe.locks import Lock

class Stop(Exception):
    pass

def stop(*_):
    raise Stop

signal.signal(signal.SIGALRM, stop)
lock, rng, n, stopping = Lock(), random.Random(1), 0, False

def contend():
    while not stopping:
        with lock:
            pass

threads = [threading.Thread(target=contend) for _ in range(int(sys.argv[1]))]
for thread in threads:
    thread.start()
while n < 3000:
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-4))
            while True:
                with lock:
                    with lock:
                        pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Stop:
        n += 1
        assert not lock._is_owned(), n
stopping = True
for thread in threads:
    thread.join()
say(n)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs timers that send signals")
@pytest.mark.parametrize("n_threads", [0, 1])
def test_an_interrupted_thread_does_not_keep_it(n_threads: int) -> None:
    """With ``threading.RLock`` this fails at once on Python 3.14 and newer."""
    assert run_script(STORM, n_threads) == "3000\n"


def test_a_lock_excludes_other_threads() -> None:
    program = """
import threading
from llamapipe.locks import Lock
lock, counts = Lock(), [0]

def add():
    for _ in range(20_000):
        with lock:
            n = counts[0]
            counts[0] = n + 1

threads = [threading.Thread(target=add) for _ in range(4)]
sys.setswitchinterval(1e-6)
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
say(counts[0])
"""
    assert run_script(program) == "80000\n"
