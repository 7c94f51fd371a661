"""Chooses how many guessed tokens a step computes.

Open this file to change where guesses come from, or when they are worth a step's time.

The principle: a step may compute tokens that nobody has sampled yet. The request's sampler guesses which tokens follow
the last one, and the step computes all of them, each with an output row. After the step the sampler draws from these
rows in order. As long as it draws the guessed token, it continues with the next row. After the first other token, the
remaining rows are discarded, and ``Scheduler.commit`` removes their cells. So every token is drawn from the same logits
with the same uniform number as without guesses: guesses change the number of steps of a text, not the text.

Guesses come from (``Sampler.guess``), the surest first:

1. A constraint: text that every continuation has, such as the keys of a JSON object. The text is certain; only its
   tokenization is a guess.
2. ``SamplingParams.prediction``: the text that the caller expects.
3. The request's own prompt and output: the tokens that followed the last three tokens earlier. Texts of other requests
   are never used, because response times would reveal them.
4. A draft model or the model's own MTP layer, if the engine has one (``draft.py``). Its tokens are computed only after
   ``Gate`` has chosen their number.

Cells of wrong guesses are removed. A recurrent state cannot go back. So either llama.cpp keeps the states after each of
the last tokens (``Gate.keeps_states``), which makes every step slower, or the state before the guesses is copied
(``Gate.copies_states``): after a wrong guess the sequence returns to the copy, and computes the right guesses again
with the token after them.

A guess costs time, so ``Gate`` measures the times of steps and how often guesses are right. It chooses the number of
guessed tokens that gives the most tokens per second, which may be none. Guesses are made only for steps in which all
requests decode, because prompts make better use of a step.

The cost of a step is the time of a whole turn of the loop, including planning, delivery and waking callers: a caller
waits for all of these. A draft takes time, too, so it replaces surer and free guesses only where it brings more tokens
per second. The expected gain of drafts may be wrong, so drafts have a credit (``Gate``): they may lose little more than
``_REFILL`` of the time, however bad they are. Pure policy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat
from typing import NamedTuple, Protocol

from llamapipe._engine.policy.core import Request

MOST_GUESSED = 24  # maximum guessed tokens of a request in a step
_LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 15, 19, 23, MOST_GUESSED)
_FASTER, _SLOWER = 0.5, 0.2  # weights of a step that was faster or slower than earlier ones
_N_FIRST = 3  # the first steps with a number of tokens that get the weight of faster steps
_FRESH = 2  # steps after which an unmeasured time is scaled with the measured times
_KEPT = 0.75  # weight of earlier measurements of steps with several passes
_FIRST_SLOPE = 0.1  # assumed time of a further token, as a part of the first token's, until it is measured
_LEAST_PART = 0.25  # assumed least part of a step's time for fewer tokens, until it is measured
_LEAST_GAIN = 1.03
_LEAST_CHANCE = 0.15  # minimum probability of a guessed token to be used
_RETRY = 100  # decisions against guesses before a guess is tried anyway, because the times of steps change
# The maximum of ``Gate._retry``, which doubles with each useless draft. After a longer pause a draft costs more.
_MOST_RETRY = 3200
_LONGEST_PAUSE = 32  # maximum decisions without drafts, after several decisions against them
# The credit of drafts, in times of a step without guesses: the initial one, the part each step adds, the maximum.
_CREDIT, _REFILL, _MOST_CREDIT = 3.0, 0.005, 6.0
_LOOK_AGAIN = 32  # drafts in a row before a step without: the time of a step without drafts may have changed
MOST_COPIES = 4  # maximum copies of states for the requests of a step: each is as large as thousands of cells
FORCED_SHARE = 0.95  # share of forced texts tokenized as guessed; most models were trained so


class Guess(NamedTuple):
    """The tokens that may follow a request's last token, and the share of such guesses that were right.

    ``is_draft``: the tokens are not drafted yet, so only their number counts. ``sure``: the share of drafted tokens
    that become rows because the draft is sure enough of them; ``share`` counts only these.
    """

    request: Request
    tokens: Sequence[int]
    share: float
    is_draft: bool = False
    sure: float = 1.0


class Worth(NamedTuple):
    """The worth of a step's tokens: a draft ends where the next token is not worth computing.

    ``rate``: expected tokens per second with the draft. ``row_s``: seconds of each further row of the step. A token is
    worth its row if its probability is more than ``rate`` times ``row_s``. Both are 0 if every token is worth its row.
    """

    rate: float = 0.0
    row_s: float = 0.0


class Mean:
    """A running mean over about ``n_most`` values, the newest of which counts most.

    It starts as if ``mean`` had been observed ``n`` times.
    """

    __slots__ = ("_n_most", "mean", "n")

    def __init__(self, mean: float, n: float, n_most: float) -> None:
        self.mean, self.n, self._n_most = mean, n, n_most

    def observe(self, value: float) -> None:
        self.n = min(self.n + 1, self._n_most)
        self.mean += (value - self.mean) / self.n


EVERY = Worth()


class Drafter(Protocol):
    """A source of guesses whose tokens take time to make. For the engine thread.

    ``took_s``: measured seconds from ``begin`` to the end of the last ``draft``.
    """

    took_s: float

    def begin(self) -> None:
        """Record that the decision on the next step begins: from now on, time counts as the draft's."""

    def guess(self, request: Request, n: int) -> Guess | None:
        """Return a guess of at most ``n`` tokens that are not drafted yet; None if none can be drafted."""

    def seconds(self, chosen: Mapping[Request, int], whole: bool = False) -> float:
        """Return the expected seconds of ``draft``, with a share, or the ``whole``, of its work for later drafts."""

    def draft(self, chosen: Mapping[Request, int], worth: Worth = EVERY) -> Mapping[Request, Sequence[int]]:
        """Return the drafted tokens of each request: at most the chosen number, perhaps none. Never raises."""

    def close(self) -> None:
        """Free its resources."""


class StepTimes:
    """The smoothed seconds of a step, by its number of tokens.

    The first step with a number of tokens may be slow because its graph is new. So this step and the next two have the
    weight one half. ``least_part``: the minimum time for fewer tokens than were measured, as a fraction of the time of
    the smallest measured number.

    A processor may run at half its speed for seconds. So unmeasured times keep their ratio to measured ones. Otherwise
    a number measured in a slow phase would look slow forever, because nothing tries it again.
    """

    def __init__(self, least_part: float = _LEAST_PART) -> None:
        self._least_part = least_part
        self._n_seen: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._seen_at: dict[int, int] = {}  # in observed steps
        self._n_steps = 0
        self._ns: list[int] = []  # sorted keys

    def __repr__(self) -> str:
        return f"<StepTimes { {n: round(self._seconds[n], 5) for n in self._ns} }>"

    def observe(self, n: int, seconds: float) -> None:
        before = self._seconds.get(n)
        expected = self.of(n) if before is None else before
        if expected:
            # A step that waited for a core says little, so slow steps count less than fast ones.
            seconds = min(seconds, 2 * expected)
        if before is None:
            self._ns.insert(bisect_left(self._ns, n), n)
            self._seconds[n] = (seconds + expected) / 2 if 0 < expected < seconds else seconds
            self._n_seen[n] = 1
        else:
            weight = _FASTER if seconds < before or self._n_seen[n] < _N_FIRST else _SLOWER
            self._seconds[n] = before + weight * (seconds - before)
            self._n_seen[n] += 1
            if len(self._ns) > 1:
                self._rescale(n, self._seconds[n] / before)
        self._n_steps += 1
        self._seen_at[n] = self._n_steps

    def _rescale(self, n: int, ratio: float) -> None:
        """Scale old times like that of ``n``: of larger numbers up to a fresh one, of smaller ones if none is fresh."""
        oldest = self._n_steps - _FRESH
        at = bisect_left(self._ns, n)
        for m in self._ns[at + 1 :]:
            if self._seen_at[m] > oldest:
                break
            self._seconds[m] *= ratio
        smaller = self._ns[:at]
        if all(self._seen_at[m] <= oldest for m in smaller):
            for m in smaller:
                self._seconds[m] *= ratio

    def of(self, n: float) -> float:
        """Return the expected seconds of a step with ``n`` tokens; 0 if nothing was measured."""
        ns, seconds = self._ns, self._seconds
        if not ns:
            return 0.0
        i = bisect_left(ns, n)
        if i < len(ns) and ns[i] == n:
            return seconds[ns[i]]
        if i == 0:
            return seconds[ns[0]] * max(n / ns[0], self._least_part)
        if i < len(ns):
            low, high = ns[i - 1], ns[i]
            return seconds[low] + (seconds[high] - seconds[low]) * (n - low) / (high - low)
        last = ns[-1]
        slope = _FIRST_SLOPE * seconds[ns[0]] / ns[0]
        if len(ns) > 1:
            slope = max((seconds[last] - seconds[ns[0]]) / (last - ns[0]), slope)
        return seconds[last] + slope * (n - last)


def limit_to_undoable(slots: Sequence[int], n_guessed: Sequence[int]) -> list[int]:
    """Return how many guessed tokens each request may have in a step, if kept states undo wrong guesses.

    llama.cpp computes rows of several sequences together only if the sequences have equally many rows and consecutive
    seq_ids. Before each such ubatch it moves the states of its sequences side by side, but not the states kept for
    going back. So no ubatch of several sequences may follow one with guesses: all guesses are in one ubatch, or only
    the last two requests have guesses.
    """
    n, first = len(slots), slots[0]
    if n <= 2:
        return list(n_guessed)
    if all(n_guessed) and list(slots) == list(range(first, first + n)):
        return [min(n_guessed)] * n
    return [0] * (n - 2) + list(n_guessed[-2:])


def alternatives(guesses: Sequence[Guess]) -> list[Sequence[Guess]]:
    """Return the sets of guesses to choose from, with one guess per request; the last set has the most drafts."""
    ready = {guess.request: guess for guess in guesses if not guess.is_draft}
    drafts = {guess.request: guess for guess in guesses if guess.is_draft}
    if not ready or not drafts:
        return [guesses]
    choices: list[Sequence[Guess]] = [list(ready.values())]
    if not drafts.keys() <= ready.keys():
        choices.append(list({**drafts, **ready}.values()))
    better = {
        request: draft
        for request, draft in drafts.items()
        if request not in ready or draft.share * draft.sure > ready[request].share
    }
    if not better.keys().isdisjoint(ready):
        choices.append(list({**ready, **better}.values()))
    return choices


class _Choice(NamedTuple):
    """The number of tokens of each guess that are worth computing, and the expected tokens per second (``speed``).

    ``attempt``: the numbers to try if none are worth computing; their speed is ``attempt_speed``. ``row_s``: see Worth.
    """

    guesses: Sequence[Guess]
    chosen: Mapping[Request, int]
    speed: float
    attempt: Mapping[Request, int]
    attempt_speed: float
    row_s: float

    @property
    def drafts(self) -> dict[Request, int]:
        """The numbers of tokens to draft."""
        return {
            g.request: self.chosen[g.request] for g in self.guesses if g.is_draft and g.request in self.chosen
        }

    def with_attempt(self) -> _Choice:
        """Return this choice with the numbers of ``attempt``."""
        return self._replace(chosen=self.attempt)


class Gate:
    """Chooses how many guessed tokens a step computes, and counts them.

    ``n_most``: maximum guessed tokens of a step; 0: none. ``splits``: if one sequence has more tokens than the others,
    the extra tokens are a separate ubatch, and so another pass over the weights (KV in streams). ``drafter``: makes the
    tokens of drafts. ``no_guesses``: why ``n_most`` is 0. ``has_window``: wrong guesses must be removed before another
    ubatch reuses the cells that fell out of the window because of them. So all guesses of a step have equally many
    tokens, which makes them one ubatch, and none is made while another step may be in flight. ``keeps_states``: kept
    states undo wrong guesses (see ``limit_to_undoable``). ``copies_states``: copies of the earlier states undo them.
    ``n_longest``: maximum guessed tokens of a request.

    Drafts have a credit, in times of a step without guesses. A draft and its rows spend credit. Each right token earns
    its request's part of such a step's time. The credit starts at ``_CREDIT``, and each step adds ``_REFILL``. A draft
    that may cost more than the credit is not made, whatever its expected gain. A draft that is only tried also pays for
    the prompt that it computes first. The very first draft, whose time is unknown, costs at most the credit: otherwise
    its prompt would end drafts for thousands of steps.
    """

    def __init__(
        self,
        n_most: int = 0,
        splits: bool = False,
        drafter: Drafter | None = None,
        no_guesses: str = "",
        has_window: bool = False,
        keeps_states: bool = False,
        copies_states: bool = False,
        n_longest: int = MOST_GUESSED,
    ) -> None:
        self.no_guesses = no_guesses
        self.has_window = has_window
        self.keeps_states = keeps_states
        self.copies_states = copies_states
        self._copy_s = 0.0  # seconds to copy a state
        self._has_copied = False
        self.n_longest = n_longest
        self.times = StepTimes()
        self.n_most = n_most
        self.n_drafted = self.n_accepted = self.n_forced = self.n_steps_saved = 0
        self.n_drafted_by_model = self.n_accepted_by_model = 0  # only tokens of the drafter
        self.drafter = drafter
        self.drafted: Collection[int] = ()  # the slots for which the drafter made the last chosen tokens
        self._pause = self._n_paused = 0  # decisions to make without drafts, and how many of these were made
        self._n_without = 0  # decisions since the last draft
        self._retry = _RETRY  # decisions since the last draft after which a draft is tried anyway
        self._n_in_a_row = 0  # drafts since the last decision that left them out
        self._credit = _CREDIT  # the time that drafts may still lose, in times of a step without guesses
        self._apart_s = 0.0  # seconds of drafts in the next step's turn, which do not count as the step's
        self._has_drafts = False  # whether the next step has drafted tokens
        self._n_known = 0  # ``n_accepted`` at the last step
        self._splits = splits
        self._n_refused = 0
        self._expected_s = 0.0  # expected seconds of the last chosen step's passes; 0: there is one pass
        self._factor = 1.0  # measured time of several passes, divided by the sum of their expected times

    def __repr__(self) -> str:
        return f"<Gate n_drafted={self.n_drafted} n_accepted={self.n_accepted} {self.times!r}>"

    @property
    def considers_drafts(self) -> bool:
        """Whether the next decision considers drafts."""
        return (
            self.drafter is not None
            and self._n_paused >= self._pause
            and self._credit > 0
            and self._n_in_a_row < _LOOK_AGAIN
        )

    def next_drafter(self) -> Drafter | None:
        """Return the drafter if the next decision considers drafts, else None."""
        if self.drafter is None:
            return None
        if self.considers_drafts:
            self._n_paused = 0
            self.drafter.begin()
            return self.drafter
        self._n_paused += 1
        self._n_without += 1
        self._n_in_a_row = 0
        return None

    def choose(self, n_decoding: int, guesses: Sequence[Guess], n_room: int) -> dict[Request, Sequence[int]]:
        """Choose the guessed tokens, at most ``n_room``, to compute in a step of ``n_decoding`` decoding requests.

        Return them by request. A request may have two guesses: one with its tokens, and a draft.
        """
        plain_s = self.times.of(n_decoding)
        if plain_s <= 0:
            return {}
        choices = [self._best(n_decoding, these, n_room, plain_s) for these in alternatives(guesses)]
        best = max(choices, key=lambda choice: choice.speed)
        has_drafts = any(guess.is_draft for guess in guesses)
        is_attempt = False
        if has_drafts and not best.drafts:
            self._n_without += 1
            self._pause = min(2 * self._pause + 1, _LONGEST_PAUSE)
            attempt = choices[-1].with_attempt()
            if self._n_without >= self._retry and self._affords(plain_s, attempt.drafts):
                best = attempt
                is_attempt = True
                self._retry = min(2 * self._retry, _MOST_RETRY)
        elif best.drafts:
            self._pause, self._retry = 0, _RETRY
        if not best.chosen:
            self._n_refused += 1
            if self._n_refused < _RETRY or has_drafts:
                return {}
            best = best.with_attempt()
        self._n_refused = 0
        return self._make_guesses(n_decoding, best, is_attempt)

    def _affords(self, plain_s: float, drafts: Mapping[Request, int]) -> bool:
        """Return whether the credit pays for drafts that are only tried, including their whole prompts."""
        if not drafts or self.drafter is None:
            return False
        return self.drafter.seconds(drafts, whole=True) <= self._credit * plain_s

    def _best(self, n_decoding: int, guesses: Sequence[Guess], n_room: int, plain_s: float) -> _Choice:
        """Return the lengths of these guesses that bring the most tokens per second, if guesses are worth computing."""
        drafting = {guess.request for guess in guesses if guess.is_draft}
        best: Mapping[Request, int] = {}
        attempt: Mapping[Request, int] = {}
        best_speed, attempt_speed, row_s = _LEAST_GAIN * n_decoding / plain_s, 0.0, 0.0
        n_longest = max((len(guess.tokens) for guess in guesses), default=0)
        # No length brings more tokens than this, and a greater length never takes less time.
        n_at_best = n_decoding + sum(1 / (1 - min(guess.share * guess.sure, 0.99)) - 1 for guess in guesses)
        for length in _LENGTHS:
            chosen, n_expected, n_rows = _cut(guesses, length)
            if sum(chosen.values()) > min(self.n_most, n_room):
                break
            seconds = step_s = self._seconds(n_decoding, chosen, n_rows)
            if drafting and self.drafter is not None:
                seconds += self.drafter.seconds({r: n for r, n in chosen.items() if r in drafting})
            if self.copies_states:
                seconds += self._return_seconds(n_decoding, guesses, chosen)
            if drafting and seconds > (1 + self._credit) * plain_s:  # too expensive if all guesses are wrong
                break
            speed = (n_decoding + n_expected) / seconds
            if speed > best_speed:
                best, best_speed = chosen, speed
            if speed > attempt_speed:
                attempt, attempt_speed = chosen, speed
                row_s = max(step_s - plain_s, 0.0) / n_rows if n_rows else 0.0
            if length >= n_longest or n_at_best <= max(best_speed, attempt_speed) * seconds:
                break
        return _Choice(guesses, best, best_speed, attempt, attempt_speed, row_s)

    def _make_guesses(self, n_decoding: int, best: _Choice, is_attempt: bool) -> dict[Request, Sequence[int]]:
        """Return the tokens of the chosen guesses by request. This makes the tokens of drafts."""
        drafting = best.drafts
        self.drafted = {request.slot for request in drafting}
        chosen = dict(best.chosen)
        tokens = {guess.request: guess.tokens for guess in best.guesses if guess.request in chosen}
        if drafting and self.drafter is not None:
            # Where rows of equal length are one pass over the weights, a draft that ends earlier adds a pass.
            is_even = n_decoding > 1 and (self._splits or self.has_window or self.keeps_states)
            worth = EVERY if is_even else Worth(max(best.speed, best.attempt_speed), best.row_s)
            expected_s = self.drafter.seconds(drafting, whole=is_attempt)
            drafted = self.drafter.draft(drafting, worth)
            self._apart_s += self.drafter.took_s
            if not expected_s:  # the first draft: nothing was known, and it includes the prompts
                expected_s = min(self.drafter.took_s, self._credit * self.times.of(n_decoding))
            self._spend(n_decoding, expected_s)
            if self.copies_states:
                self._spend(n_decoding, self._return_seconds(n_decoding, best.guesses, chosen))
            self._n_without = 0
            self._n_in_a_row += 1
            tokens = {r: drafted.get(r, ()) if r in drafting else tokens[r] for r in tokens}
            chosen = {r: min(chosen[r], len(tokens[r])) for r in chosen if tokens[r]}
            self._has_drafts = any(r in drafting for r in chosen)
        is_split = self._is_split(n_decoding, chosen)
        self._expected_s = self._seconds(n_decoding, chosen) / self._factor if is_split else 0.0
        return {request: tokens[request][:n] for request, n in chosen.items()}

    def _spend(self, n_decoding: int, seconds: float) -> None:
        """Charge lost seconds to the credit of drafts; negative seconds are a gain."""
        plain_s = self.times.of(n_decoding)
        if plain_s > 0:
            self._credit = min(self._credit - seconds / plain_s, _MOST_CREDIT)

    def _is_split(self, n_decoding: int, chosen: Mapping[Request, int]) -> bool:
        """Return whether the step takes several passes because its sequences have different numbers of tokens."""
        return self._splits and (len(chosen) < n_decoding or len(set(chosen.values())) > 1)

    def _seconds(self, n_decoding: int, chosen: Mapping[Request, int], n_rows: float | None = None) -> float:
        """Return the expected seconds of a step with these guesses; ``n_rows``: the expected rows, None: all tokens."""
        if not self._is_split(n_decoding, chosen):
            return self.times.of(n_decoding + (sum(chosen.values()) if n_rows is None else n_rows))
        lengths = [*chosen.values(), *repeat(0, n_decoding - len(chosen))]
        seconds, n_before = 0.0, -1
        for length in sorted(set(lengths)):
            seconds += self.times.of(sum(n >= length for n in lengths) * (length - n_before))
            n_before = length
        return seconds * self._factor

    def _return_seconds(
        self, n_decoding: int, guesses: Sequence[Guess], chosen: Mapping[Request, int]
    ) -> float:
        """Return the expected seconds for copying states, and for returning to them after wrong guesses."""
        seconds = 0.0
        for guess in guesses:
            n = chosen.get(guess.request, 0)
            if n:
                share = guess.share
                wrong = 1 - share**n
                seconds += (1 + wrong) * self._copy_s
                if wrong > 0:
                    # The expected number of right guesses before the wrong one, and the token after them.
                    n_again = 1 + sum(i * share**i * (1 - share) for i in range(n)) / wrong
                    before = 0.0 if self._splits and n_decoding > 1 else self.times.of(n_decoding)
                    n_next = n_again + (1 if self._splits and n_decoding > 1 else n_decoding)
                    seconds += wrong * (self.times.of(round(n_next)) - before)
        return seconds

    def observe_copies(self, n: int, seconds: float) -> None:
        """Learn the time that copying ``n`` states took."""
        each_s = seconds / n
        if not self._has_copied:  # the first copy touches new pages, which takes longer than the copy itself
            self._has_copied = True
            return
        if self._copy_s:
            each_s = min(each_s, 2 * self._copy_s)
        faster = each_s < self._copy_s or not self._copy_s
        self._copy_s += (1.0 if not self._copy_s else _FASTER if faster else _SLOWER) * (
            each_s - self._copy_s
        )

    def observe(self, n_decoding: int, n_guessed: int, seconds: float) -> None:
        """Learn from a step in which requests only decoded. ``seconds``: the time of its turn of the loop.

        ``n_accepted`` already counts the step's right tokens.
        """
        seconds -= self._apart_s
        self._apart_s = 0.0
        n_right, self._n_known = self.n_accepted - self._n_known, self.n_accepted
        if seconds <= 0:  # the times come from two clocks, or a clock was changed
            return
        if not n_guessed or not self._expected_s:
            self.times.observe(n_decoding + n_guessed, seconds)
            usual_s = self.times.of(n_decoding + n_guessed)
        else:
            ratio = min(max(seconds / self._expected_s, 0.25), 4.0)
            self._factor = _KEPT * self._factor + (1 - _KEPT) * ratio
            usual_s = self._expected_s * self._factor
        if self.drafter is None:
            return
        plain_s = self.times.of(n_decoding)
        if self._has_drafts:
            # Charge the usual time of such steps: this one may have waited for a core.
            self._spend(n_decoding, usual_s - plain_s * (1 + n_right / n_decoding))
        self._has_drafts = False
        self._spend(n_decoding, -_REFILL * plain_s)


def _cut(guesses: Sequence[Guess], length: int) -> tuple[dict[Request, int], float, float]:
    """Cut each guess to at most ``length`` tokens.

    Return the number of tokens by request, the expected number of right tokens, and that of rows.
    """
    chosen: dict[Request, int] = {}
    n_expected = n_rows = 0.0
    for request, tokens, share, _, sure in guesses:
        chance, of_row, n = share, sure, 0
        while n < min(length, len(tokens)) and chance >= _LEAST_CHANCE:
            n_expected += chance * of_row
            n_rows += of_row
            chance *= share
            of_row *= sure
            n += 1
        if n:
            chosen[request] = n
    return chosen, n_expected, n_rows
