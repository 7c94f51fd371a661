"""KV events: tell routers which token blocks an engine's prefix cache holds, in vLLM's format over ZeroMQ.

A block is ``block_size`` tokens and all tokens before them. Its hash covers its tokens and the hash of the block before
it, so equal prefixes have equal hashes in every process. A block counts as stored while at least one holder in the tree
begins with the block and has computed it. Changes are collected on the engine thread, and ``take`` returns their net
effect: a block that was removed and stored again since the last call is not mentioned. Nothing is lost if ``take`` is
called late, and there are never more pending changes than blocks in the cache.

The publisher has two threads: one sends batches, the other answers requests for missed batches. A message has three
frames: the topic, the batch's number (eight bytes, big-endian, from 0), and the batch in MessagePack: ``[time, [event,
…]]``, where an event is an array that begins with its name. A subscriber that finds a gap in the numbers has missed
batches, and asks for them at the replay endpoint. If some of these batches are no longer kept, the answer begins with
one batch that clears all blocks and then stores the blocks that existed at that time. An answer has an empty frame and
then the frames of a message, as in vLLM since 0.26; number -1 with an empty batch ends it. The first batch and the last
one clear all blocks, because a subscriber may hold blocks of an earlier engine at this address.

Needs the extra ``kv-events``.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from struct import Struct
from typing import Any, NamedTuple, Protocol

from llamapipe.arguments import check_flag, check_int
from llamapipe.locks import Lock

EVENTS_THREAD_NAME = "llamapipe-kv-events"
BLOCK_SIZE = 16  # vLLM's default; routers read it from the events
_ADDRESS = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.]+\]|[^\[\]:/\s]+):(?P<port>\d{1,5})|ipc://\S+")
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class KvEvents:
    """KV events of an engine: ``EngineTuning(kv_events=lp.KvEvents("tcp://127.0.0.1:5557"))``. Frozen.

    - ``endpoint``: the ZeroMQ address of the PUB socket, ``tcp://HOST:PORT`` or ``ipc://PATH``. Port 0 means any free
      port. There is no authentication: use loopback, or a network that only the router can reach.
    - ``replay_endpoint``: the address of a ROUTER socket where subscribers ask for batches that they missed.
    - ``topic``: the first frame of each message. Default: ``kv@HOSTNAME@MODEL``, with the name of the model's file.
    - ``block_size``: tokens in a block. Events describe whole blocks only.
    - ``n_replay``: batches that are kept for replays. The blocks of older batches are kept in one batch.
    - ``connect``: connect the PUB socket to the endpoint, where the router listens, instead of listening there.

    Raises TypeError or ValueError naming the field.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str | None = None
    block_size: int = BLOCK_SIZE
    n_replay: int = 10_000
    connect: bool = False

    def __post_init__(self) -> None:
        _check_address("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_address("replay_endpoint", self.replay_endpoint)
        if self.topic is not None and not isinstance(self.topic, str):
            raise TypeError(f"topic must be a string or None, not {type(self.topic).__name__}")
        check_int("block_size", self.block_size, 1, 4096)
        check_int("n_replay", self.n_replay, 1, 10_000_000)
        check_flag("connect", self.connect)


def _check_address(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {type(value).__name__}")
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match["port"] or 0) > _LARGEST_PORT:
        raise ValueError(f"{name} is {value!r}; it must be tcp://HOST:PORT or ipc://PATH")


class Holder(Protocol):
    """A sequence in the tree. ``n``: the number of its computed tokens, which changes between calls."""

    @property
    def n(self) -> int:
        """The number of computed tokens."""

    def __hash__(self) -> int: ...


class Block(NamedTuple):
    """A stored block. ``depth``: number of blocks before it; ``parent``: the hash of the block before it."""

    depth: int
    parent: int | None
    tokens: tuple[int, ...]


class Stored(NamedTuple):
    """Consecutive blocks are now in the cache. ``parent``: the hash of the block before them."""

    hashes: list[int]
    parent: int | None
    tokens: list[int]


class Removed(NamedTuple):
    """Blocks are no longer in the cache."""

    hashes: list[int]


class Cleared(NamedTuple):
    """No block is in the cache."""


Event = Stored | Removed | Cleared


class BlockTracker:
    """The blocks of one prefix tree, which calls ``inserted``, ``extended`` and ``removed``. One thread."""

    def __init__(self, block_size: int) -> None:
        from hashlib import blake2b  # importing it takes a while, and only publishers need it

        self.block_size = block_size
        self._digest = partial(blake2b, digest_size=8)
        self._pack = Struct(f"<Q{block_size}i").pack
        self._held: dict[Holder, list[int]] = {}  # the hashes of each holder's computed blocks
        self._growing: dict[Holder, tuple[Sequence[int], int]] = {}  # tokens in the tree, not all computed
        self._n_holders: dict[int, int] = {}  # number of holders by block hash
        self._new: dict[int, Block] = {}  # stored since the last ``take``, by hash
        self._gone: dict[int, int] = {}  # removed since the last ``take``: hash to depth

    def __repr__(self) -> str:
        return f"<BlockTracker n={len(self._n_holders)} n_new={len(self._new)} n_gone={len(self._gone)}>"

    # ---- calls from the tree
    def on_insert(self, holder: Holder, tokens: Sequence[int]) -> None:
        """Record that a holder with these tokens was added to the tree."""
        self._growing[holder] = tokens, len(tokens)

    def on_extend(self, holder: Holder, tokens: Sequence[int]) -> None:
        """Record that a holder now has these tokens, which begin with its earlier tokens."""
        self._growing[holder] = tokens, len(tokens)

    def on_remove(self, holder: Holder) -> None:
        """Record that a holder was removed from the tree."""
        self._growing.pop(holder, None)
        for depth, block in enumerate(self._held.pop(holder, ())):
            n = self._n_holders[block] = self._n_holders[block] - 1
            if not n:
                del self._n_holders[block]
                if self._new.pop(block, None) is None:
                    self._gone[block] = depth

    # ---- events
    def take(self) -> list[Event]:
        """Return the changes since the last call: removed blocks, then stored blocks, parents first."""
        self._grow()
        events: list[Event] = []
        if self._gone:
            events.append(Removed(sorted(self._gone, key=self._gone.__getitem__, reverse=True)))
            self._gone.clear()
        if self._new:
            by_depth = sorted(self._new.items(), key=lambda item: item[1].depth)
            events += chains(by_depth)
            self._new.clear()
        return events

    def _grow(self) -> None:
        """Hash the blocks computed since the last call."""
        size = self.block_size
        for holder, (tokens, n_tokens) in list(self._growing.items()):
            n = min(holder.n, n_tokens) // size
            held = self._held.setdefault(holder, [])
            for depth in range(len(held), n):
                self._hold(held, depth, tokens[depth * size : (depth + 1) * size])
            if n == n_tokens // size:
                del self._growing[holder]

    def _hold(self, held: list[int], depth: int, tokens: Sequence[int]) -> None:
        parent = held[-1] if held else None
        digest = self._digest(self._pack(parent or 0, *tokens)).digest()
        block = int.from_bytes(digest, "little")
        held.append(block)
        n = self._n_holders.get(block, 0)
        self._n_holders[block] = n + 1
        if not n and self._gone.pop(block, None) is None:
            self._new[block] = Block(depth, parent, tuple(tokens))


def chains(blocks: Iterable[tuple[int, Block]]) -> list[Stored]:
    """Return the smallest list of events that stores these blocks. Parents must come before their children."""
    events: list[Stored] = []
    by_end: dict[int | None, Stored] = {}
    for key, block in blocks:
        event = None if block.parent is None else by_end.pop(block.parent, None)
        if event is None:
            event = Stored([], block.parent, [])
            events.append(event)
        event.hashes.append(key)
        event.tokens.extend(block.tokens)
        by_end[key] = event
    return events


_MAX_WAITING = 64  # batches; while this many wait, the tracker collects changes
_MAX_UNSENT = 100_000  # batches that wait for one slow subscriber; it misses later batches
_LINGER_MS = 200  # time to send the last batches when the engine closes
_JOIN_S = 5.0
_N_REPLAYED = 3  # frames of a request for a replay
_REPLAY_END = (-1).to_bytes(8, "big", signed=True)
_log = logging.getLogger("llamapipe.kv_events")


class Publisher:
    """The sockets and threads of one engine's events. ``put`` and ``flush`` are for the engine thread.

    ``options``: the options, with the addresses in use. ``tracker``: the source of events for ``flush``. ``n_put``:
    number of batches put so far, and the number of the next batch. Raises OSError if an address cannot be used,
    ImportError without the extra ``kv-events``.
    """

    def __init__(self, options: KvEvents, model_name: str) -> None:
        self._zmq = zmq = _module("zmq")
        self._encode = _module("msgspec").msgpack.Encoder().encode
        self.tracker = BlockTracker(options.block_size)
        self.n_put = 0
        self._queue: SimpleQueue[list[Event] | None] = SimpleQueue()
        self._lock = Lock()  # guards the state that the two threads share
        self._kept: deque[tuple[int, bytes, list[Event]]] = deque()
        self._base: dict[int, Block] = {}  # blocks that were stored by batches before the kept ones
        self._closed = False
        self._context = zmq.Context()
        self._replay: Any = None
        topic = options.topic
        if topic is None:
            from socket import gethostname  # every engine imports this module, but few publish

            topic = f"kv@{gethostname()}@{model_name}"
        self._topic = topic.encode()
        self._n_kept = options.n_replay
        try:
            self._pub = self._socket(zmq.PUB, options.endpoint, options.connect)
            options = replace(options, endpoint=self._pub.last_endpoint.decode(), topic=topic)
            if options.replay_endpoint is not None:
                self._replay = self._socket(zmq.ROUTER, options.replay_endpoint)
                options = replace(options, replay_endpoint=self._replay.last_endpoint.decode())
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.options = options
        targets = (self._run,) if self._replay is None else (self._run, self._answer)
        self._threads = [
            threading.Thread(target=target, name=EVENTS_THREAD_NAME, daemon=True) for target in targets
        ]
        for thread in self._threads:
            thread.start()
        self._put([Cleared()])

    def __repr__(self) -> str:
        return f"<Publisher {self.options.endpoint} n_put={self.n_put}>"

    def _socket(self, kind: int, address: str, connect: bool = False) -> Any:
        zmq = self._zmq
        socket = self._context.socket(kind)
        socket.linger = _LINGER_MS
        socket.sndhwm = _MAX_UNSENT
        socket.ipv6 = "[" in address
        try:
            if connect:
                socket.connect(address)
            else:
                socket.bind(address)
        except zmq.ZMQError as e:
            raise OSError(e.errno, f"cannot use {address} for KV events: {e.strerror}") from None
        return socket

    # ---- the engine thread
    def flush(self) -> None:
        """Send the changes since the last call, without waiting. While many batches wait, changes are collected."""
        if self._queue.qsize() < _MAX_WAITING:
            events = self.tracker.take()
            if events:
                self._put(events)

    def _put(self, events: list[Event]) -> None:
        self.n_put += 1
        self._queue.put(events)

    def close(self) -> None:
        """Send a last batch and close the sockets. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._put([Cleared()])
        self._queue.put(None)
        for thread in self._threads:
            thread.join(_JOIN_S)

    # ---- the publishing thread
    def _run(self) -> None:
        number = 0
        try:
            while (events := self._queue.get()) is not None:
                payload = self._encode([time.time(), [self._array(event) for event in events]])
                with self._lock:  # so that a replay falls between two batches
                    self._keep(number, payload, events)
                self._pub.send_multipart([self._topic, number.to_bytes(8, "big"), payload])
                number += 1
        except Exception:
            _log.exception("KV events are not published any longer")
        finally:
            self._pub.close()
            self._context.term()  # ends the other thread, too

    def _array(self, event: Event) -> list[object]:
        if isinstance(event, Stored):
            size = self.tracker.block_size
            return ["BlockStored", event.hashes, event.parent, event.tokens, size, None, None, None]
        if isinstance(event, Removed):
            return ["BlockRemoved", event.hashes, None]
        return ["AllBlocksCleared"]

    def _keep(self, number: int, payload: bytes, events: list[Event]) -> None:
        self._kept.append((number, payload, events if self._replay is not None else []))
        if len(self._kept) > self._n_kept:
            apply(self._base, self._kept.popleft()[2], self.tracker.block_size)

    # ---- the replay thread
    def _answer(self) -> None:
        replay, zmq = self._replay, self._zmq
        try:
            while True:
                frames = replay.recv_multipart()
                if len(frames) != _N_REPLAYED or len(frames[2]) != len(_REPLAY_END):
                    _log.warning("a request for KV events is not an empty frame and a number of eight bytes")
                    continue
                for number, payload in self._since(int.from_bytes(frames[2], "big")):
                    replay.send_multipart([*frames[:2], self._topic, number.to_bytes(8, "big"), payload])
                replay.send_multipart([*frames[:2], b"", _REPLAY_END, b""])
        except zmq.ContextTerminated:
            pass
        except Exception:
            _log.exception("KV events are not replayed any longer")
        finally:
            replay.close()

    def _since(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from a number onward.

        If some are no longer kept, a batch that stores all earlier blocks comes first.
        """
        with self._lock:
            kept = [(number, payload) for number, payload, _ in self._kept if number >= first]
            oldest = self._kept[0][0] if self._kept else 0
            base = list(self._base.items()) if first < oldest else None
        if base is None:
            return kept
        events = [self._array(Cleared()), *map(self._array, chains(base))]
        return [(oldest - 1, self._encode([time.time(), events])), *kept]


def apply(blocks: dict[int, Block], events: Iterable[Event], size: int) -> None:
    """Apply events to the blocks. Parents stay before their children."""
    for event in events:
        if isinstance(event, Stored):
            parent = event.parent
            for i, key in enumerate(event.hashes):
                blocks[key] = Block(0, parent, tuple(event.tokens[i * size : (i + 1) * size]))
                parent = key
        elif isinstance(event, Removed):
            for key in event.hashes:
                blocks.pop(key, None)
        else:
            blocks.clear()


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(
            f'kv_events needs {name}, which is not installed: pip install "llamapipe[kv-events]"'
        ) from None
