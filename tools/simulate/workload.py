"""Synthetic requests: conversations whose lengths and arrivals follow published figures.

Token ids stand for the text. A conversation begins with the tokens of a system prompt that it shares with others; then
comes an id of its own, and after that ids count upwards. So an answer continues its prompt, a later turn begins with
the earlier ones, and no two conversations share more than their system prompt.

Lengths are log-normal. The medians are those of the conversation and coding traces of Azure, November 2023 (Patel et
al., Splitwise, arXiv 2311.18677): prompts of 1,020 and 1,500 tokens, answers of 129 and 13. The spread, the number of
turns and the thinking time are assumptions of ours; change them for your traffic. Arrivals are a Gamma process, as
fitted by BurstGPT (Wang et al., arXiv 2401.17644): with ``burstiness`` 1 it is a Poisson process, above 1 it comes in
bursts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

# The same objects in all sequences: hours of traffic would not fit into memory otherwise.
TOKENS = list(range(2**17))
_FIRST_ID = 2**40  # of conversations; system prompts have the ids before it


@dataclass(frozen=True)
class Workload:
    """A kind of traffic. Lengths in tokens, times in seconds.

    ``prompt``, ``answer``: medians of the new tokens of a turn and of its answer. ``prompt_spread``, ``answer_spread``:
    standard deviations of their logarithms. ``n_turns``: of a conversation, on average (geometric). ``think_s``:
    between an answer and the next turn, on average (exponential). ``system``: the length of a system prompt;
    ``n_systems``: how many there are, the k-th used in proportion to 1/k. ``n_ctx``: conversations end before they
    exceed it.
    """

    prompt: int
    answer: int
    prompt_spread: float = 0.8
    answer_spread: float = 0.8
    n_turns: float = 1.0
    think_s: float = 20.0
    system: int = 0
    n_systems: int = 1
    burstiness: float = 1.0
    n_ctx: int = 4096


WORKLOADS = {
    "conversation": Workload(prompt=1020, answer=129),
    "coding": Workload(prompt=1500, answer=13),
    "chat": Workload(prompt=120, answer=129, n_turns=5, system=400, n_systems=20, burstiness=2.0),
    "agents": Workload(prompt=300, answer=60, n_turns=8, think_s=2.0, system=1500, n_systems=50),
}


class Conversation:
    """One conversation: the tokens of the next prompt, and the length of its answer."""

    def __init__(self, workload: Workload, number: int, rng: random.Random) -> None:
        self._workload = workload
        self._rng = rng
        system = min(int(workload.n_systems ** rng.random()), workload.n_systems)  # Zipf's law, approximately
        self.system = system if workload.system else 0
        self._head = [_FIRST_ID - system, *TOKENS[1 : workload.system]] if workload.system else []
        self.number = number
        self._first = _FIRST_ID + number
        self._n = 0  # tokens after the system prompt
        self.n_left = 1 if workload.n_turns <= 1 else _geometric(workload.n_turns, rng)

    @property
    def n_shared(self) -> int:
        """Number of tokens that it may share with other conversations: the system prompt."""
        return len(self._head)

    def next_turn(self) -> tuple[list[int], int] | None:
        """The prompt's tokens and the number of tokens of the answer. None: the conversation has ended."""
        workload, rng = self._workload, self._rng
        n_new = _length(workload.prompt, workload.prompt_spread, rng)
        n_answer = _length(workload.answer, workload.answer_spread, rng)
        room = workload.n_ctx - len(self._head) - self._n
        if self._n == 0:  # a long prompt is cut, as callers must do
            n_answer = max(min(n_answer, room // 2), 1)
            n_new = max(min(n_new, room - n_answer - 1), 2)
        if self.n_left <= 0 or n_new + n_answer >= room:
            return None
        self.n_left -= 1
        self._n += n_new
        tokens = [*self._head, self._first, *TOKENS[1 : self._n]]
        self._n += n_answer
        return tokens, n_answer

    def think_s(self) -> float:
        """The time until the next turn."""
        return self._rng.expovariate(1 / self._workload.think_s) if self._workload.think_s else 0.0


def arrivals(
    workload: Workload, per_s: float, seconds: float, seed: int
) -> Iterator[tuple[float, Conversation]]:
    """Conversations with the times at which they begin. ``per_s``: requests a second, all turns together."""
    rng = random.Random(seed)
    shape = 1 / workload.burstiness
    mean_s = max(workload.n_turns, 1.0) / per_s
    now_s, number = 0.0, 0
    while True:
        now_s += rng.gammavariate(shape, mean_s / shape)
        if now_s >= seconds:
            return
        yield now_s, Conversation(workload, number, random.Random(rng.getrandbits(64)))
        number += 1


def scaled(workload: Workload, factor: float, n_ctx: int) -> Workload:
    """The same traffic with all lengths multiplied, for models and contexts that are smaller."""
    return replace(
        workload,
        prompt=max(round(workload.prompt * factor), 1),
        answer=max(round(workload.answer * factor), 1),
        system=round(workload.system * factor),
        n_ctx=n_ctx,
    )


def _length(median: int, spread: float, rng: random.Random) -> int:
    return max(round(median * math.exp(rng.gauss(0, spread))), 1)


def _geometric(mean: float, rng: random.Random) -> int:
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))
