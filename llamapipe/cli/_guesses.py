"""Measures whether guesses pay off for a file of prompts: ``llamapipe bench --prompts FILE``.

The same records are answered alternately with and without guesses, with the same seeds, so both ways compute the same
texts and only the time differs. An engine stops guessing when guesses make steps too slow; then both ways are equally
fast.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import llamapipe as lp
from llamapipe.cli._terminal import Terminal
from llamapipe.jobs.answers import Answerer
from llamapipe.jobs.records import Record
from llamapipe.jobs.run import answers

_ROUNDS = 3
_PAYS = 1.03  # the smallest speedup that is not noise


@dataclass(frozen=True)
class Guessed:
    """Medians for ``n`` concurrent requests: tokens per second without and with guesses, and one round's guesses."""

    n: int
    plain: float
    guessed: float
    n_drafted: int
    n_accepted: int

    @property
    def gain(self) -> float:
        """The speedup from guesses."""
        return self.guessed / self.plain


def measure(engine: lp.Engine, records: Sequence[Record], max_tokens: int, n: int, folder: Path) -> Guessed:
    """Answer the records, ``n`` at a time, with and without guesses. Raises ValueError if a record fails."""

    def seconds(speculate: Literal["off"] | None) -> tuple[float, int]:
        params = lp.SamplingParams(max_tokens=max_tokens, seed=1, cache=False, speculate=speculate)
        answerer = Answerer(engine, params, media_path=folder)
        began = time.perf_counter()
        n_tokens = 0
        for record, answer in answers(records, answerer, n_ahead=n, ordered=False):
            if answer.failed:
                raise ValueError(f"record {record.index}: {answer.reason}")
            n_tokens += answer.n_tokens
        return time.perf_counter() - began, n_tokens

    seconds("off")  # warms the engine up, and fails early if a record is wrong
    plain, guessed = [], []
    before = engine.stats()
    for _ in range(_ROUNDS):
        plain_s, n_tokens = seconds("off")
        guessed_s, n_guessed = seconds(None)
        plain.append(n_tokens / plain_s)
        guessed.append(n_guessed / guessed_s)
    after = engine.stats()
    return Guessed(
        n,
        median(plain),
        median(guessed),
        (after.n_drafted - before.n_drafted) // _ROUNDS,
        (after.n_accepted - before.n_accepted) // _ROUNDS,
    )


def show(terminal: Terminal, measured: Sequence[Guessed], why_none: str) -> None:
    """Show the table and the verdict. ``why_none``: why the engine does not guess, if it does not."""
    terminal.line(
        terminal.style(" requests   without guesses      with guesses   times   right guesses", "dim")
    )
    for entry in measured:
        terminal.line(
            f"{entry.n:9}  {entry.plain:7,.0f} tokens/s  {entry.guessed:7,.0f} tokens/s  {entry.gain:6.2f}"
            f"   {entry.n_accepted:,} of {entry.n_drafted:,}"
        )
    terminal.line()
    terminal.line(verdict(measured, why_none))


def verdict(measured: Sequence[Guessed], why_none: str) -> str:
    """Return whether guesses pay off, in one sentence."""
    if why_none:
        return f"The engine guesses nothing: {why_none}"
    pays = [entry for entry in measured if entry.gain >= _PAYS]
    if pays:
        times = ", ".join(f"{entry.gain:.2f} times as fast with {entry.n} at once" for entry in pays)
        return f"Guesses pay for these prompts: {times}."
    if not any(entry.n_drafted for entry in measured):
        return "Guesses do not pay: these texts repeat nothing, so there is nothing to guess from."
    return "Guesses do not pay for these prompts; they cost nothing either, since the engine stops guessing."


def as_json(measurement: Guessed) -> str:
    """Return the measurement as one line of JSON."""
    return json.dumps(
        {
            "n": measurement.n,
            "tokens_per_s_without": measurement.plain,
            "tokens_per_s_with": measurement.guessed,
            "gain": measurement.gain,
            "n_drafted": measurement.n_drafted,
            "n_accepted": measurement.n_accepted,
        }
    )
