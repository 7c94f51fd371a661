"""Many nodes behind one router, as discrete events: arrivals, and ends of steps."""

from __future__ import annotations

import gc
import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from simulate.cost import StepCost
from simulate.node import Answer, Node, NodeOptions, quantile_of
from simulate.policies import Nodes, Policy
from simulate.workload import Conversation

QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Outcome:
    """The result of a run. Times are in seconds; times to first token and gaps between tokens at the QUANTILES.

    Only requests that arrive after the warm-up count, and gaps after it. ``n_ended`` of ``n_arrived`` have ended when
    the simulated time ends, with ``n_tokens`` in their answers; ``tokens_per_s``: per second after the warm-up.
    ``last_s``: when the last one ended. ``hit_rate``: the part of prompt tokens that were cached. ``busy``: the part of
    the time in which steps ran. ``backlog``: open requests per node.
    """

    n_nodes: int
    seconds: float
    n_arrived: int
    n_ended: int
    n_steps: int
    n_tokens: int
    last_s: float
    tokens_per_s: float
    first_s: tuple[float, ...]
    gap_s: tuple[float, ...]
    hit_rate: float
    busy: float
    backlog: float


class Cluster:
    """``n_nodes`` equal nodes. ``run`` is called once."""

    def __init__(self, n_nodes: int, cost: StepCost, options: NodeOptions, policy: Policy) -> None:
        self.nodes = Nodes(Node(cost, options) for _ in range(n_nodes))
        self._policy = policy
        self._open: set[Answer] = set()  # requests that count
        self._first_s = array("d")  # from arrival to first token
        self._n_arrived = self._n_ended = self._n_prompt = self._n_cached = self._n_generated = 0
        self._warm_up_s = 0.0
        # (time, order, node or -1 for an arrival): the order makes equal times a stable queue.
        self._events: list[tuple[float, int, int, Conversation | None]] = []
        self._order = count()
        self._next_s = [math.inf] * n_nodes  # time of each node's next event; its other events are stale
        self._now_s = self._last_s = 0.0

    def __repr__(self) -> str:
        return f"<Cluster n_nodes={len(self.nodes)} at {self._now_s:.1f} s>"

    def run(
        self, arrivals: Iterator[tuple[float, Conversation]], seconds: float, warm_up_s: float = 0.0
    ) -> Outcome:
        """Serves conversations until the given time. Requests that arrive in the first ``warm_up_s`` do not count."""
        self._warm_up_s = warm_up_s
        self._next_arrival(arrivals)
        collects = gc.isenabled()
        gc.disable()  # nothing here is cyclic, and the collector would scan millions of objects
        try:
            self._serve(arrivals, seconds)
        finally:
            if collects:
                gc.enable()
        for node in self.nodes:
            node.count(seconds)
        return self._outcome(seconds, warm_up_s)

    def _serve(self, arrivals: Iterator[tuple[float, Conversation]], seconds: float) -> None:
        events, nodes, order = self._events, self.nodes, self._order
        is_warm = False
        while events and events[0][0] <= seconds:
            now_s, _, number, conversation = heappop(events)
            if not is_warm and now_s >= self._warm_up_s:
                is_warm = True
                self._end_warm_up()
            if number >= 0 and self._next_s[number] != now_s:
                continue  # stale: an arrival has cut the node's portion short
            self._now_s = now_s
            if number >= 0:
                node = nodes[number]
                node.finish_step()
                nodes.changed(number)
                self._next_s[number] = node.end_s
                if node.end_s < math.inf:
                    heappush(events, (node.end_s, next(order), number, None))
                continue
            assert conversation is not None
            if number == -2:  # the conversation's first turn: the next one arrives later
                self._next_arrival(arrivals)
            self._submit(conversation)
        if not is_warm:
            self._end_warm_up()

    def _end_warm_up(self) -> None:
        for node in self.nodes:
            node.count(self._warm_up_s)
            node.gaps.clear()

    def _next_arrival(self, arrivals: Iterator[tuple[float, Conversation]]) -> None:
        arrival = next(arrivals, None)
        if arrival is not None:
            heappush(self._events, (arrival[0], next(self._order), -2, arrival[1]))

    def _submit(self, conversation: Conversation) -> None:
        turn = conversation.next_turn()
        if turn is None:
            return

        def ended(answer: Answer) -> None:
            self._last_s = answer.ended_s
            if answer in self._open:
                self._open.remove(answer)
                self._n_ended += 1
                self._count(answer)
            if conversation.n_left > 0:
                at_s = answer.ended_s + conversation.think_s()
                heappush(self._events, (at_s, next(self._order), -1, conversation))

        answer = Answer(self._now_s, *turn, ended)
        if self._now_s >= self._warm_up_s:
            self._n_arrived += 1
            self._open.add(answer)
        number = self._policy.choose(self.nodes, answer)
        node = self.nodes[number]
        node.submit(answer, self._now_s)
        self.nodes.changed(number)
        if node.end_s != self._next_s[number]:
            self._next_s[number] = node.end_s
            heappush(self._events, (node.end_s, next(self._order), number, None))

    def _count(self, answer: Answer) -> None:
        self._first_s.append(answer.first_s - answer.arrived_s)
        self._n_prompt += answer.n_prompt
        self._n_cached += answer.n_cached
        self._n_generated += answer.n_answer

    def _outcome(self, seconds: float, warm_up_s: float) -> Outcome:
        for answer in self._open:
            if answer.first_s == answer.first_s:
                self._first_s.append(answer.first_s - answer.arrived_s)
            else:  # it has waited at least so long
                self._first_s.append(seconds - answer.arrived_s)
        first_s = sorted(self._first_s)
        gaps: Counter[int] = Counter()
        for node in self.nodes:
            gaps.update(node.gaps)
        n_nodes = len(self.nodes)
        return Outcome(
            n_nodes,
            seconds,
            self._n_arrived,
            self._n_ended,
            sum(node.n_steps for node in self.nodes),
            self._n_generated,
            self._last_s,
            self._n_generated / max(seconds - warm_up_s, 1e-9),
            tuple(_quantile(first_s, q) for q in QUANTILES),
            tuple(quantile_of(gaps, q) for q in QUANTILES),
            self._n_cached / max(self._n_prompt, 1),
            sum(node.busy_s for node in self.nodes) / (n_nodes * seconds),
            sum(node.n_open for node in self.nodes) / n_nodes,
        )


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)] if ordered else float("nan")
