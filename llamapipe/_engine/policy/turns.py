"""Chooses the adapters of the next step.

Open this file to change how requests with different adapters share a context.

The principle: llama.cpp computes a step with one set of adapters. After a change it plans its graphs again, which takes
about as long as a small step. So sets take turns; the requests of the other sets keep their slots and skip steps.

How long a set stays: until its steps have taken ``_WORTH`` times as long as a change, which is measured. So changes
take at most one part in ``_WORTH + 1`` of the time. The set stays no longer, because the streams of other sets pause
during its turn. If pauses are limited (``max_itl_s``), the turns of a round fit in the limit.

Which set is next: the set with the request of the highest priority. Among equal priorities, a set with a request that
has no token yet comes first, then the set that has waited longest. A set that has waited a whole round comes before
both.

When a set is interrupted:

- A set with a higher priority takes over after the step.
- So does a set with a request without any token, if the current set has no such request and its steps have taken
  ``_WORTH_FIRST`` times as long as a change. Otherwise the first token of the last of k sets would wait for k - 1 whole
  turns. The interrupted set keeps its place: its waiting time counts from the start of its turn.
- A set with a lower priority gets a step when it has waited ``_PATIENCE`` rounds, so that no set starves.

With the limit, a stream comes before a step after which its pause would be too long. It also comes before prompts: if
the prompts of k sets came one after another, the stream of the first set would wait for k - 1 of them. A prompt yields
to streams for at most ``_PATIENCE_FIRST`` times the limit, so it cannot starve.

Where our kernels compute a model, the rows of a step can have different LoRAs (``kernels/row_adapters.hpp``). Then one
set is the carrier of the steps. Requests whose LoRAs change only matrices of the carrier can share its steps, and so
can requests without adapters. If a set carries all requests that could compute, it is chosen immediately, and nobody
waits. Turns remain for control vectors, experts, and LoRAs of which none carries the others. A carrier that no request
uses is dropped when steps without adapters have taken ``_WORTH`` times as long as a change.

One context per set would need no changes, but would divide KV cells and buffers. For that, use one engine per set over
the same model.

All times are measured on the observed steps. Pure policy.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

_WORTH = 20
_WORTH_FIRST = 4
_PATIENCE = 10
_PATIENCE_FIRST = 3
_FIRST_CHANGE_S = 0.02  # the assumed time of a change until one is measured
_KEPT = 0.7  # weight of earlier measurements when a new one is added


class Claim(NamedTuple):
    """The claim of a set of adapters to the next step.

    ``priority``: the highest priority of its requests. ``awaits_first``: a request has no token yet. ``streams``: a
    request has tokens already.
    """

    priority: int = 0
    awaits_first: bool = False
    streams: bool = False


class SetTurns:
    """Chooses the set of each step. ``max_itl_s``: maximum seconds between two tokens of a stream; None: no limit."""

    def __init__(self, max_itl_s: float | None = None) -> None:
        self.change_s = _FIRST_CHANGE_S
        self.n_changes = 0
        self._max_itl_s = max_itl_s
        self._now_s = 0.0
        self._spent_s = 0.0  # since the last change
        self._idle_s = 0.0  # since a step used adapters
        self._n_steps = 0
        # The first step after the change: its tokens and seconds.
        self._first: tuple[int, float] | None = None
        self._step_s = {False: 0.0, True: 0.0}  # of the last step with prompts, and without
        self._since: dict[Hashable, float] = {}  # by set: when it began to wait
        self._credit_s: dict[Hashable, float] = {}  # added to the wait of sets whose turn was cut short

    def __repr__(self) -> str:
        return (
            f"<SetTurns n_changes={self.n_changes} change_s={self.change_s:.4f} waiting={len(self._since)}>"
        )

    def stay_s(self, n_sets: int) -> float:
        """Return the seconds that a set stays while ``n_sets`` sets have requests."""
        stay_s = _WORTH * self.change_s
        if self._max_itl_s is not None and n_sets > 1:
            others_s = self._max_itl_s - self.change_s - self._step_s[True]
            stay_s = min(stay_s, others_s / (n_sets - 1))
        return stay_s

    def choose(self, current: Hashable, ready: Mapping[Hashable, Claim]) -> Hashable:
        """Return the set of the next step. ``ready``: the sets with requests to compute, and their claims."""
        others = [other for other in ready if other != current]
        self._since = {other: self._since.get(other, self._now_s) for other in others}
        self._credit_s = {other: self._credit_s.get(other, 0.0) for other in others}
        if not others or (current in ready and not self._n_steps):
            return current
        chosen = self._by_turns(current, others, ready)
        if self._max_itl_s is not None:
            chosen = self._before_late(chosen, current, others, ready)
        if chosen != current:
            self._since[current] = self._now_s
        return chosen

    def _by_turns(
        self, current: Hashable, others: Sequence[Hashable], ready: Mapping[Hashable, Claim]
    ) -> Hashable:
        stay_s = self.stay_s(len(ready))
        round_s = len(others) * (max(stay_s, 0.0) + self.change_s)

        def is_starving(other: Hashable) -> bool:
            return self._waited_s(other) > _PATIENCE * round_s

        def rank(other: Hashable) -> tuple[bool, int, bool, bool, float]:
            waited_s, claim = self._waited_s(other), ready[other]
            return is_starving(other), claim.priority, waited_s > round_s, claim.awaits_first, waited_s

        best = max(others, key=rank)
        if current not in ready:
            return best
        current_claim, best_claim = ready[current], ready[best]
        if best_claim.priority > current_claim.priority:
            return best
        # With a limit, a step that does not fit in the turn is too long.
        next_s = self._step_s[not current_claim.awaits_first] if self._max_itl_s is not None else 0.0
        if self._spent_s + next_s > stay_s:
            return best if best_claim.priority == current_claim.priority or is_starving(best) else current
        may_cut_in = (
            best_claim.priority == current_claim.priority
            and best_claim.awaits_first
            and not current_claim.awaits_first
        )
        if may_cut_in and self._spent_s >= _WORTH_FIRST * self.change_s:
            self._credit_s[current] = self._spent_s
            return best
        return current

    def _before_late(
        self, chosen: Hashable, current: Hashable, others: Sequence[Hashable], ready: Mapping[Hashable, Claim]
    ) -> Hashable:
        """Return the set whose streams would wait too long if ``chosen`` came first; else ``chosen``."""
        assert self._max_itl_s is not None
        claim = ready[chosen]
        streams = [
            other for other in others if ready[other].streams and ready[other].priority == claim.priority
        ]
        if not streams:
            return chosen
        latest = max(streams, key=self._waited_s)
        next_s = self._step_s[not claim.awaits_first] + self.change_s * (chosen != current)
        own_s = self.change_s + self._step_s[True]
        if self._now_s - self._since[latest] + next_s + own_s <= self._max_itl_s:
            return chosen
        if chosen != current and self._waited_s(chosen) > _PATIENCE_FIRST * self._max_itl_s:
            return chosen
        return latest

    def _waited_s(self, other: Hashable) -> float:
        return self._now_s - self._since[other] + self._credit_s[other]

    def is_idle(self, is_used: bool) -> bool:
        """Return whether steps without adapters have taken long enough to drop the carrier.

        ``is_used``: a request uses adapters now, so the time starts from 0.
        """
        if is_used:
            self._idle_s = 0.0
        return self._idle_s > _WORTH * self.change_s

    def note_change(self) -> None:
        """Record that the next step is the first with another set."""
        self.n_changes += 1
        self._spent_s, self._n_steps, self._first, self._idle_s = 0.0, 0, None, 0.0

    def observe(self, n_tokens: int, only_decodes: bool, seconds: float) -> bool:
        """Learn the time of a step. Return whether it was the first step after a change, which takes longer."""
        is_first = self._n_steps == 0 and self.n_changes > 0
        self._now_s += seconds
        self._spent_s += seconds
        self._idle_s += seconds
        self._n_steps += 1
        self._step_s[only_decodes] = max(seconds - self.change_s * is_first, 0.0)
        if is_first:
            self._first = (n_tokens, seconds) if only_decodes else None
        elif self._first is not None:
            # The time of a change is the first step's time minus that of the second step, which computes as much.
            first, self._first = self._first, None
            if only_decodes and first[0] == n_tokens:
                change_s = min(max(first[1] - seconds, 0.0), 10 * self.change_s)
                self.change_s = _KEPT * self.change_s + (1 - _KEPT) * change_s
        return is_first
