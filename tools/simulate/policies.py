"""Routing policies. A policy uses only what a router can know: open requests, and the prompts that it has routed."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count
from typing import Protocol

from simulate.node import Answer, Node

_BLOCK = 128  # tokens by which a router compares prompts
_MAX_BLOCKS = 64  # of a prompt
_MAX_KNOWN = 2**21  # blocks that a router remembers


class Nodes(list[Node]):
    """Nodes, indexed by their number of open requests: for each number, a bit set of nodes."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        super().__init__(nodes)
        self._n_open = [0] * len(self)
        self._with = [(1 << len(self)) - 1]  # by number of open requests
        self._least = 0

    def changed(self, number: int) -> None:
        """Updates the index. Call it after each change of a node's open requests."""
        before, after = self._n_open[number], self[number].n_open
        if before == after:
            return
        self._n_open[number] = after
        sets = self._with
        while after >= len(sets):
            sets.append(0)
        sets[before] &= ~(1 << number)
        sets[after] |= 1 << number
        self._least = min(self._least, after)
        while not sets[self._least]:
            self._least += 1

    def least_open(self, first: int) -> int:
        """The node with the fewest open requests; if several, the first one at or after ``first``, cyclically."""
        those = self._with[self._least]
        after = those >> first
        if after:
            return first + (after & -after).bit_length() - 1
        return (those & -those).bit_length() - 1


class Policy(Protocol):
    """Chooses the node of a request."""

    def choose(self, nodes: Nodes, answer: Answer) -> int:
        """The number of the node."""


class Random:
    """Any node."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, nodes: Nodes, answer: Answer) -> int:
        """See Policy."""
        return self._rng.randrange(len(nodes))


class RoundRobin:
    """The nodes in turn."""

    def __init__(self, seed: int) -> None:
        self._numbers = count(seed)

    def choose(self, nodes: Nodes, answer: Answer) -> int:
        """See Policy."""
        return next(self._numbers) % len(nodes)


class LeastLoaded:
    """The node with the fewest open requests; if several, the next in turn."""

    def __init__(self, seed: int) -> None:
        self._numbers = count(seed)

    def choose(self, nodes: Nodes, answer: Answer) -> int:
        """See Policy."""
        return nodes.least_open(next(self._numbers) % len(nodes))


class PrefixAffinity:
    """The node that most recently got the longest matching prefix of the prompt; if none, the least loaded node."""

    def __init__(self, seed: int) -> None:
        self._fallback = LeastLoaded(seed)
        self._known: OrderedDict[int, int] = OrderedDict()  # by prefix: the node that got it last

    def choose(self, nodes: Nodes, answer: Answer) -> int:
        """See Policy."""
        hashes = _prefixes(answer)
        number = self._choose(nodes, answer, hashes)
        for block in hashes:
            self._known[block] = number
            self._known.move_to_end(block)
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)
        return number

    def _choose(self, nodes: Nodes, answer: Answer, hashes: list[int]) -> int:
        for block in reversed(hashes):
            number = self._known.get(block)
            if number is not None and number < len(nodes):
                return number
        return self._fallback.choose(nodes, answer)


class CostBased(PrefixAffinity):
    """The node with the least work before this request's first token: uncached tokens of the prompt, plus open tokens.

    Candidates are the nodes that got a prefix of the prompt, and the least loaded node.
    """

    def _choose(self, nodes: Nodes, answer: Answer, hashes: list[int]) -> int:
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


POLICIES: dict[str, Callable[[int], Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
    "cost-based": CostBased,
}
