"""The thread that encodes the images and sounds of requests while the engine thread computes steps.

Open this file to change the order in which images are encoded. A request waits in ``Waiting.encoding`` until its images
are encoded, and then for a slot. So an image delays only its own request, apart from the cores that encoding takes: the
engines of the process give these up while it lasts (``process_budget``). An image, or a tile of one, takes half of the
cores, or all of them if no engine computes when it begins. Higher priorities come first, then the oldest request.
Requests with equal images share the object that holds the rows, so an image is encoded once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from queue import PriorityQueue
from typing import NamedTuple, Protocol

from llamapipe._engine.request import Embeddings, Request, State
from llamapipe.host.cpu_load import process_budget
from llamapipe.locks import Lock

ENCODER_THREAD_NAME = "llamapipe-encoder"
Done = Callable[[Request, "Exception | None"], object]


class Encoder(Protocol):
    """What encodes."""

    def encode(self, media: Embeddings, n_threads: int) -> bool:
        """Encodes one image, sound, or part of one. False if that was done before. Raises DecodeError."""


class _Job(NamedTuple):
    """The order of jobs, then what is to be done; None ends the thread."""

    order: tuple[int, int]
    work: tuple[Request, Done] | None


class MediaEncoder:
    """Encodes for one engine. ``n_encoded``: images, sounds and parts of them so far. ``put``: the engine thread."""

    def __init__(self, encoder: Encoder) -> None:
        self.n_encoded = 0
        self._encoder = encoder
        self._jobs: PriorityQueue[_Job] = PriorityQueue()
        self._numbers = count()
        self._lock = Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MediaEncoder n_jobs={self._jobs.qsize()} n_encoded={self.n_encoded}>"

    def put(self, request: Request, done: Done) -> None:
        """Encodes the images and sounds of a request, then calls ``done`` with it and None, or an error."""
        self._jobs.put(_Job((-request.spec.priority, next(self._numbers)), (request, done)))
        with self._lock:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=ENCODER_THREAD_NAME, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (work := self._jobs.get().work) is not None:
            request, done = work
            error = None
            try:
                for span in request.spans:
                    if request.state is State.FINISHED or self._is_closed:
                        break
                    with process_budget().taken() as n_threads:
                        self.n_encoded += self._encoder.encode(span.source, n_threads)
            except Exception as e:
                error = e
            done(request, error)
            del request, done, work

    def close(self) -> None:
        """Ends the thread, after the part that it encodes just now."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            self._jobs.put(_Job((-(2**62), 0), None))
            thread.join()
