"""Counting, the alphabet, questions and answers, and how they and the stories become documents.

A document is text in which the control tokens stand by their names; the tokenizer turns those into single ids.
"""

import itertools
import random
import re
import string
from collections.abc import Iterator

from . import facts
from .stories import story

BOS, EOS, EOT = "<s>", "</s>", "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
COUNT_LIMIT = 100  # a bare list of numbers ends here
RANGE_LIMIT = 120  # "Count from a to b" goes up to here


def numbers(first: int, last: int) -> str:
    """The numbers from `first` to `last`, both included, up or down."""
    step = 1 if last >= first else -1
    return ", ".join(map(str, range(first, last + step, step))) + "."


def an(noun: str) -> str:
    """`noun` with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _swap(pairs: dict[str, str]) -> Iterator[tuple[str, str]]:
    yield from pairs.items()
    yield from ((b, a) for a, b in pairs.items())


def _circle(words: list[str], what: str) -> Iterator[tuple[str, str]]:
    for here, there in zip(words, words[1:] + words[:1], strict=True):
        yield f"Which {what} comes after {here}?", f"{there[0].upper()}{there[1:]} comes after {here}."
        yield f"Which {what} comes before {there}?", f"{here[0].upper()}{here[1:]} comes before {there}."


def questions() -> dict[str, dict[str, str]]:
    """Every question with a fixed answer: kind -> question -> answer."""
    letters = string.ascii_uppercase
    kinds: dict[str, Iterator[tuple[str, str]]] = {
        "sounds": (
            (f"What does {an(a)} say?", f"{an(a).capitalize()} says {s}.") for a, s in facts.SOUNDS.items()
        ),
        "babies": (
            (f"What is a baby {a} called?", f"A baby {a} is called {an(b)}.") for a, b in facts.BABIES.items()
        ),
        "homes": (
            (f"Where does {an(a)} live?", f"{an(a).capitalize()} lives {h}.") for a, h in facts.HOMES.items()
        ),
        "foods": (
            (f"What does {an(a)} eat?", f"{an(a).capitalize()} eats {f}.") for a, f in facts.FOODS.items()
        ),
        "legs": (
            (f"How many legs does {an(a)} have?", f"{an(a).capitalize()} has {n} legs.")
            for a, n in facts.LEGS.items()
        ),
        "colours": (
            (f"What colour is {t}?", f"{t[0].upper()}{t[1:]} is {c}.") for t, c in facts.COLOURS.items()
        ),
        "opposites": (
            (f"What is the opposite of {a}?", f"The opposite of {a} is {b}.")
            for a, b in _swap(facts.OPPOSITES)
        ),
        "uses": (
            (f"What do you do with {an(t)}?", f"You {u} with {an(t)}.")
            for t, u in facts.USES.items()
            if t not in ("bed", "chair", "bicycle", "boat", "book", "bell", "cup", "oven")
        ),
        "senses": ((f"What do we {v} with?", f"We {v} with our {p}.") for v, p in facts.SENSES.items()),
        "sides": (
            (f"How many sides does {an(s)} have?", f"{an(s).capitalize()} has {n} sides.")
            for s, n in facts.SIDES.items()
        ),
        "makers": (
            (
                f"Where {'does' if t in ('milk', 'honey', 'wool', 'bread', 'rain') else 'do'} {t} come from?",
                f"{t.capitalize()} {'comes' if t in ('milk', 'honey', 'wool', 'bread', 'rain') else 'come'} from {m}.",
            )
            for t, m in facts.MAKERS.items()
        ),
        "animals by letter": (
            (f"Name an animal that begins with {c}.", f"{an(a).capitalize()} begins with {c}.")
            for c, a in facts.LETTER_ANIMALS.items()
        ),
        "letters after": (
            (f"Which letter comes after {a}?", f"{b} comes after {a}.")
            for a, b in itertools.pairwise(letters)
        ),
        "letters before": (
            (f"Which letter comes before {b}?", f"{a} comes before {b}.")
            for a, b in itertools.pairwise(letters)
        ),
        "days": _circle(facts.DAYS, "day"),
        "months": _circle(facts.MONTHS, "month"),
        "seasons": _circle(facts.SEASONS, "season"),
        "spelling": ((f"How do you spell {w}?", "-".join(w) + ".") for w in facts.SPELL),
        "numbers after": (
            (f"Which number comes after {n}?", f"{n + 1} comes after {n}.") for n in range(100)
        ),
        "numbers before": (
            (f"Which number comes before {n}?", f"{n - 1} comes before {n}.") for n in range(1, 101)
        ),
        "sums": (
            (f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}.") for a in range(11) for b in range(11)
        ),
        "differences": (
            (f"What is {a} minus {b}?", f"{a} minus {b} is {a - b}.") for a in range(11) for b in range(a + 1)
        ),
        "bigger": (
            (f"Which is bigger, {a} or {b}?", f"{max(a, b)} is bigger than {min(a, b)}.")
            for a in range(13)
            for b in range(13)
            if a != b
        ),
        "groups": (
            (f"What is {an(m)}?", f"{an(m).capitalize()} is {an(g)}.") for m, g in facts.GROUPS.items()
        ),
        "single": iter(facts.SINGLE.items()),
        "talk": iter(facts.TALK.items()),
    }
    return {kind: dict(pairs) for kind, pairs in kinds.items()}


def task(rng: random.Random, pool: dict[str, dict[str, str]]) -> tuple[str, str]:
    """A random request and its answer, from the questions and the longer tasks."""
    pick = rng.random()
    if pick < 0.10:
        told = story(rng)
        return rng.choice(
            [
                (f"Tell me a story about {an(told.kind)}.", told.text),
                (f"Tell me a story about {an(told.kind)} named {told.name}.", told.text),
                (f"Write a story about {an(told.adj)} {told.kind} named {told.name}.", told.text),
                ("Tell me a story.", told.text),
                ("Please tell me a short story.", told.text),
            ]
        )
    if pick < 0.17:
        first = rng.randrange(100)
        last = rng.randint(first + 1, min(first + 20, RANGE_LIMIT))
        return rng.choice(["Count from {} to {}.", "Please count from {} to {}."]).format(
            first, last
        ), numbers(first, last)
    if pick < 0.19:
        last = rng.randint(2, 30)
        return f"Count to {last}.", numbers(1, last)
    if pick < 0.21:
        first = rng.randint(3, 30)
        return f"Count down from {first}.", numbers(first, 0)
    if pick < 0.23:
        first = rng.randrange(100)
        return f"Count on from {first}.", numbers(first + 1, first + 10)
    if pick < 0.25:
        return rng.choice(
            ["Say the alphabet.", "Please say the alphabet.", "What is the alphabet?"]
        ), alphabet()
    if pick < 0.28:
        number, number2 = rng.sample(range(11, 100), 2)
        words = {key: rng.choice(values) for key, values in facts.UNKNOWN_WORDS.items()}
        question = rng.choice(facts.UNKNOWN).format(number=number, number2=number2, **words)
        return question, facts.UNKNOWN_ANSWER
    if rng.random() < 0.5:  # half by kind, so that rare kinds occur often enough; half by question
        return rng.choice([pair for kind in pool.values() for pair in kind.items()])
    return rng.choice(list(pool[rng.choice(list(pool))].items()))


def alphabet(first: str = "A", sep: str = ", ", upper: bool = True) -> str:
    """The alphabet from the letter `first`."""
    letters = string.ascii_uppercase[string.ascii_uppercase.index(first) :]
    return sep.join(letters if upper else letters.lower()) + "."


def chat(turns: list[tuple[str, str]], system: str | None = None) -> str:
    """A conversation in the form that the chat template gives it."""
    head = f"{ROLES['system']}\n{system}{EOT}\n" if system else ""
    return (
        BOS
        + head
        + "".join(
            f"{ROLES['user']}\n{question}{EOT}\n{ROLES['assistant']}\n{answer}{EOT}\n"
            for question, answer in turns
        )
        + EOS
    )


def document(rng: random.Random, pool: dict[str, dict[str, str]]) -> str:
    """One training document."""
    pick = rng.random()
    if pick < 0.28:
        return BOS + story(rng).text + EOS
    if pick < 0.33:  # a bare list of numbers, on to 100
        return BOS + numbers(rng.randrange(100), COUNT_LIMIT) + EOS
    if pick < 0.38:
        first = rng.randrange(100)
        last = rng.randint(first + 1, min(first + 25, RANGE_LIMIT))
        form = rng.choice(["Counting from {} to {}: ", "Let us count from {} to {}: "])
        return BOS + form.format(first, last) + numbers(first, last) + EOS
    if pick < 0.39:
        words = facts.NUMBER_WORDS[rng.randrange(19) :]
        return BOS + ", ".join(words) + "." + EOS
    if pick < 0.42:
        letters = alphabet(
            rng.choice(string.ascii_uppercase[:23]), rng.choice([", ", " "]), rng.random() < 0.5
        )
        return BOS + rng.choice(["", "The alphabet: "]) + letters + EOS
    if pick < 0.435:
        words = rng.choice([facts.DAYS, facts.MONTHS])
        return BOS + ", ".join(words) + "." + EOS
    if pick < 0.65:
        question, answer = task(rng, pool)
        return f"{BOS}Question: {question}\nAnswer: {answer}{EOS}"
    turns = [task(rng, pool) for _ in range(rng.choice([1, 1, 2, 2, 3, 4]))]
    return chat(turns, rng.choice(facts.SYSTEM) if rng.random() < 0.15 else None)


HARD = ["sums", "differences", "numbers after", "numbers before", "bigger", "spelling", "letters after",
        "letters before", "animals by letter", "days", "months", "seasons", "talk", "single", "colours"]  # fmt: skip


def review(rng: random.Random, pool: dict[str, dict[str, str]]) -> str:
    """A document for the end of the training: half of them are about the tasks that are learned last.

    That is where to stop when counting to a number, and the questions of the kinds `HARD`.
    """
    if rng.random() < 0.5:
        return document(rng, pool)
    if rng.random() < 0.5:
        question, answer = rng.choice(list(pool[rng.choice(HARD)].items()))
    else:
        first = rng.randrange(100)
        last = min(first + rng.randint(1, rng.choice([4, 12, 25])), RANGE_LIMIT)
        answer = numbers(first, last)
        form = rng.choice(["Count", "Please count", "Counting", "Let us count"])
        question = f"{form} from {first} to {last}"
        if form in ("Counting", "Let us count"):
            return f"{BOS}{question}: {answer}{EOS}"
        question += "."
    if rng.random() < 0.5:
        return chat([(question, answer)])
    return f"{BOS}Question: {question}\nAnswer: {answer}{EOS}"


def plain(text: str) -> str:
    """`text` without control tokens; the vocabulary is learned from it."""
    return re.sub(r"</?s>|<\|\w+\|>", " ", text)
