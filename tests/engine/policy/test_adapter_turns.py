"""Sets of adapters take turns: how long one stays, which is next, and what a change is measured to take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from itertools import groupby

import pytest

from llamapipe._engine.policy.turns import Claim, SetTurns

STEP_S = 0.05


class Played:
    """Steps of equal length, each computed with the set whose turn it is."""

    def __init__(
        self,
        priorities: Mapping[Hashable, int],
        max_itl_s: float | None = None,
        change_s: float = 0.02,
        prompt_s: float = STEP_S,
    ) -> None:
        self.turns = SetTurns(max_itl_s)
        self.ready = {name: Claim(priority) for name, priority in priorities.items()}
        self.waits: dict[
            Hashable, int
        ] = {}  # sets with a request without a token, and its steps until it has one
        self.change_s = change_s
        self.prompt_s = prompt_s
        self.now: Hashable = None
        self.steps: list[Hashable] = []
        self.seconds = 0.0
        self.gaps: list[float] = []  # between two tokens of a set's stream
        self._last: dict[Hashable, float] = {}  # when it had its last token

    def play(self, n: int) -> list[Hashable]:
        """The sets of the next steps."""
        for _ in range(n):
            ready = {
                name: claim._replace(awaits_first=name in self.waits, streams=name in self._last)
                for name, claim in self.ready.items()
            }
            chosen = self.turns.choose(self.now, ready)
            is_first = chosen != self.now
            if is_first:
                self.now = chosen
                self.turns.note_change()
            has_prompt = chosen in self.waits
            step_s = (self.prompt_s if has_prompt else STEP_S) + self.change_s * is_first
            self.turns.observe(4, not has_prompt, step_s)
            self.seconds += step_s
            self.steps.append(chosen)
            if has_prompt:
                self.waits[chosen] -= 1
                if not self.waits[chosen]:
                    del self.waits[chosen]
            if chosen in self._last:
                self.gaps.append(self.seconds - self._last[chosen])
            if chosen not in self.waits:
                self._last[chosen] = self.seconds
        return self.steps[-n:]

    def runs(self) -> list[tuple[Hashable, int]]:
        """The turns that have ended: their sets and lengths."""
        runs: list[list[object]] = []
        for name in self.steps:
            if runs and runs[-1][0] == name:
                runs[-1][1] += 1  # type: ignore[operator]
            else:
                runs.append([name, 1])
        return [(name, n) for name, n in runs[:-1]]  # type: ignore[misc]


def test_one_set_stays() -> None:
    played = Played({"a": 0})
    assert set(played.play(1000)) == {"a"}
    assert played.turns.n_changes == 1


@pytest.mark.parametrize("change_s", [0.005, 0.02, 0.1])
def test_changes_take_a_small_part_of_the_time(change_s: float) -> None:
    played = Played(dict.fromkeys("abc", 0), change_s=change_s)
    played.play(2000)
    played.steps.clear()
    played.play(2000)
    n_changes = len(played.runs())
    assert n_changes * change_s <= 0.055 * 2000 * STEP_S
    assert played.turns.change_s == pytest.approx(change_s, rel=0.05)
    assert all(n <= 20 * change_s / STEP_S + 2 for _, n in played.runs())


def test_sets_come_round_in_turn() -> None:
    played = Played(dict.fromkeys("abcd", 0))
    played.play(400)
    order = [name for name, _ in played.runs()]
    assert order == [order[i % 4] for i in range(len(order))]


def test_a_limit_on_pauses_makes_turns_shorter() -> None:
    played = Played(dict.fromkeys("abc", 0), max_itl_s=0.4)
    played.play(500)
    for n in (n for _, n in played.runs()):
        assert 2 * (n * STEP_S + 0.02) <= 0.4 + 2 * STEP_S
    assert Played(dict.fromkeys("ab", 0), max_itl_s=0.001).play(4) in (["a", "b"] * 2, ["b", "a"] * 2)


def test_a_set_without_requests_is_left_at_once() -> None:
    played = Played({"a": 0, "b": 0})
    first = played.play(1)[0]
    del played.ready[first]
    assert first not in played.play(3)


def test_a_higher_priority_takes_over_after_the_step_and_stays() -> None:
    played = Played({"a": 0})
    played.play(1)
    played.ready["b"] = Claim(1)
    assert played.play(50) == ["b"] * 50


def test_a_lower_priority_does_not_starve() -> None:
    played = Played({"a": 1, "b": 0})
    played.play(3000)
    turns = [n for name, n in played.runs() if name == "b"]
    assert 10 < len(turns) < 50
    assert set(turns) == {1}


def test_first_tokens_do_not_wait_for_whole_turns() -> None:
    played = Played(dict.fromkeys("abcd", 0))
    played.waits = dict.fromkeys("abcd", 1)
    played.play(9)
    # Two steps are worth the change; the last one has its first token after six steps, not after three turns.
    assert [n for _, n in played.runs()] == [2, 2, 2]
    assert not played.waits
    played.play(200)
    order = [name for name, _ in played.runs()]
    assert order[:4] == order[4:8]


def test_a_first_token_comes_while_another_set_has_its_turn() -> None:
    played = Played({"a": 0, "b": 0})
    played.play(60)
    now, other = played.steps[-1], "ab"[played.steps[-1] == "a"]
    while played.play(1) != [other]:
        pass
    played.waits[now] = 1
    assert played.play(2) == [other, now]


def test_a_long_prompt_is_not_cut_in_on() -> None:
    played = Played({"a": 0, "b": 0})
    played.waits = {"a": 6, "b": 1}
    first = played.play(1)[0]
    played.waits[first] = 5
    assert played.play(5) == [first] * 5


@pytest.mark.parametrize("n_steps", [1, 3])
@pytest.mark.parametrize("sets", ["ab", "abc", "abcd"])
def test_prompts_of_others_make_no_stream_wait_longer_than_the_limit(sets: str, n_steps: int) -> None:
    played = Played(dict.fromkeys(sets, 0), max_itl_s=0.6, prompt_s=0.2)
    played.waits = dict.fromkeys(sets, n_steps)
    played.play(200)
    assert not played.waits
    assert 0.3 < max(played.gaps) <= 0.6 * 1.05
    without = Played(dict.fromkeys(sets, 0), prompt_s=0.2)
    without.waits = dict.fromkeys(sets, n_steps)
    without.play(200)
    assert max(without.gaps) > max(played.gaps)


def test_a_limit_that_is_too_short_starves_no_prompt() -> None:
    played = Played(dict.fromkeys("abcd", 0), max_itl_s=0.1, prompt_s=0.3)
    played.waits = dict.fromkeys("abcd", 5)
    played.play(60)
    assert not played.waits


@pytest.mark.parametrize("max_itl_s", [None, 0.6])
def test_endless_first_tokens_do_not_starve_a_set(max_itl_s: float | None) -> None:
    played = Played(dict.fromkeys("abc", 0), max_itl_s)
    for _ in range(3000):
        for name in "bc":
            played.waits.setdefault(name, 1)
        played.play(1)
    waits = [
        sum(n for _, n in group)
        for is_a, group in groupby(played.runs(), lambda run: run[0] == "a")
        if not is_a
    ]
    most_s = 3 * 20 * 0.02 if max_itl_s is None else max_itl_s
    assert max(waits[1:]) * STEP_S <= 1.3 * most_s
    share = len(played.runs()) * 0.02 / (3000 * STEP_S)
    assert share <= 1 / 4
