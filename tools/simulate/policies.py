"""How a router chooses a node. A policy sees what a router could know: open requests, and the prompts it has sent."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from simulate.node import Answer, Node

_BLOCK = 128  # tokens by which a router compares prompts
_MAX_BLOCKS = 64  # of a prompt
_MAX_KNOWN = 2**21  # blocks that a router remembers


class Policy(Protocol):
    """Chooses the node of a request."""

    def choose(self, nodes: Sequence[Node], answer: Answer) -> int:
        """The number of the node."""


class Random:
    """Any node."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, nodes: Sequence[Node], answer: Answer) -> int:
        """See Policy."""
        return self._rng.randrange(len(nodes))


class RoundRobin:
    """One node after the other."""

    def __init__(self, seed: int) -> None:
        self._numbers = count(seed)

    def choose(self, nodes: Sequence[Node], answer: Answer) -> int:
        """See Policy."""
        return next(self._numbers) % len(nodes)


class LeastLoaded:
    """The node with the fewest open requests; of several, the next in turn."""

    def __init__(self, seed: int) -> None:
        self._numbers = count(seed)

    def choose(self, nodes: Sequence[Node], answer: Answer) -> int:
        """See Policy."""
        first = next(self._numbers) % len(nodes)
        return _least(nodes, first, lambda node: node.n_open)


class PrefixAffinity:
    """The node that has had the longest prefix of the prompt; without one, the least loaded."""

    load_weight = 0.0

    def __init__(self, seed: int) -> None:
        self._fallback = LeastLoaded(seed)
        self._known: OrderedDict[int, int] = OrderedDict()  # the node that was sent this prefix last

    def choose(self, nodes: Sequence[Node], answer: Answer) -> int:
        """See Policy."""
        hashes = _prefixes(answer)
        number = self._choose(nodes, answer, hashes)
        for each in hashes:
            self._known[each] = number
            self._known.move_to_end(each)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return number

    def _choose(self, nodes: Sequence[Node], answer: Answer, hashes: list[int]) -> int:
        for each in reversed(hashes):
            number = self._known.get(each)
            if number is not None and number < len(nodes):
                return number
        return self._fallback.choose(nodes, answer)


class CostBased(PrefixAffinity):
    """The node with the least work before this request's first token: tokens it must compute, and those that are open.

    Compared are the nodes that had a prefix of the prompt and the least loaded one.
    """

    def _choose(self, nodes: Sequence[Node], answer: Answer, hashes: list[int]) -> int:
        other = self._fallback.choose(nodes, answer)
        best, least = other, float(answer.n_prompt + nodes[other].n_open_tokens)
        for i in range(len(hashes) - 1, -1, -1):
            number = self._known.get(hashes[i])
            if number is None or number >= len(nodes):
                continue
            work = answer.n_prompt - _BLOCK * (i + 1) + nodes[number].n_open_tokens
            if work < least:
                best, least = number, work
        return best


def _prefixes(answer: Answer) -> list[int]:
    """A hash for each prefix of whole blocks."""
    tokens, hashes, last = answer.tokens, [], 0
    for begin in range(0, min(len(tokens) - _BLOCK + 1, _MAX_BLOCKS * _BLOCK), _BLOCK):
        last = hash((last, *tokens[begin : begin + _BLOCK]))
        hashes.append(last)
    return hashes


def _least(nodes: Sequence[Node], first: int, load: Callable[[Node], float]) -> int:
    order = range(first, first + len(nodes))
    return min(order, key=lambda i: load(nodes[i % len(nodes)])) % len(nodes)


POLICIES: dict[str, Callable[[int], Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
    "cost-based": CostBased,
}
