"""The thread that encodes the images and sounds of requests while the engine thread computes steps.

Open this file to change the order in which images are encoded.

The principle: an image delays only its own request. The request waits in ``Waiting.preparing`` until its images are
encoded, and then for a slot. Other requests lose only the cores that encoding takes: the engines of the process give
up these cores while an image is encoded (``process_budget``). Encoding an image, or a tile of one, takes half of the
cores, or all of them if no engine computes when it begins. Requests with equal images share the object that holds the
rows, so each image is encoded once.

Higher priorities come first. Among equal priorities, the shares take turns after each image or tile. Within a share the
oldest request comes first. So a client's image waits for at most one image or tile of each other client.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from llamapipe._engine.policy.core import Request, State
from llamapipe.host.cpu_load import process_budget
from llamapipe.locks import Lock

if TYPE_CHECKING:
    from llamapipe.llama.projector import Projector

ENCODER_THREAD_NAME = "llamapipe-encoder"
Done = Callable[[Request, "Exception | None"], object]


class _Job:
    """A request, and how many of its images and sounds, or parts of them, are encoded."""

    __slots__ = ("done", "n_encoded", "request")

    def __init__(self, request: Request, done: Done) -> None:
        self.request = request
        self.done = done
        self.n_encoded = 0


class MediaEncoder:
    """Encodes images and sounds for one engine. ``n_encoded``: how many so far. The engine thread calls ``put``."""

    def __init__(self, encoder: Projector) -> None:
        self.n_encoded = 0
        self._encoder = encoder
        # By priority, and by share in the order of their turns.
        self._jobs: dict[int, OrderedDict[Hashable, deque[_Job]]] = {}
        # It gets one entry for each turn of a job, and one entry to end the thread.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._lock = Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<MediaEncoder n_turns={self._wakes.qsize()} n_encoded={self.n_encoded}>"

    def put(self, request: Request, done: Done) -> None:
        """Queue a request's images and sounds. Afterwards ``done`` is called with the request and an error or None."""
        with self._lock:
            shares = self._jobs.setdefault(request.spec.priority, OrderedDict())
            shares.setdefault(request.spec.share, deque()).append(_Job(request, done))
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name=ENCODER_THREAD_NAME, daemon=True)
                self._thread.start()
        self._wakes.put(None)

    def _run(self) -> None:
        while True:
            self._wakes.get()
            if self._is_closed:
                return
            self._take_turn(self._next())

    def _next(self) -> _Job:
        with self._lock:
            shares = self._jobs[max(self._jobs)]
            return next(iter(shares.values()))[0]

    def _take_turn(self, job: _Job) -> None:
        """Encode the next part of a job; after the last part, call ``done``."""
        request, error = job.request, None
        if job.n_encoded < len(request.spans) and request.state is not State.FINISHED:
            try:
                with process_budget().take() as n_threads:
                    self.n_encoded += self._encoder.encode(request.spans[job.n_encoded].source, n_threads)
                job.n_encoded += 1
            except Exception as e:
                error = e
        has_more = (
            error is None and job.n_encoded < len(request.spans) and request.state is not State.FINISHED
        )
        priority, share = request.spec.priority, request.spec.share
        with self._lock:
            shares = self._jobs[priority]
            shares.move_to_end(share)
            if not has_more:
                shares[share].remove(job)
                if not shares[share]:
                    del shares[share]
                if not shares:
                    del self._jobs[priority]
        if has_more:
            self._wakes.put(None)
        else:
            job.done(request, error)

    def close(self) -> None:
        """End the thread after the image, sound or part that it is encoding, and wait for it."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        if thread is not None:
            self._wakes.put(None)
            thread.join()
