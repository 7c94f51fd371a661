"""Little stories: fills the sentences of `plots.py`, and recognizes every sentence it can write."""

import random
import re
from dataclasses import dataclass

from .plots import ENDINGS, HABITS, NAMES, OPENINGS, PLOTS, WORDS

PRONOUNS = {"he": ("he", "him", "his"), "she": ("she", "her", "her")}


@dataclass(frozen=True)
class Story:
    """One story: its text and its subject."""

    text: str
    name: str
    kind: str
    adj: str


def _article(text: str) -> str:
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def _invented_name(rng: random.Random) -> str:
    """A name that is on no list, so that the model learns to repeat names."""
    syllables = (rng.choice("bdfgjklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 2, 3))))
    return ("".join(syllables) + rng.choice(["", "", "n", "s", "x"])).capitalize()


def _cast(rng: random.Random) -> dict[str, str]:
    """Slot values for one story: words that occur twice differ (hero and friend, place and place2 …)."""
    slots: dict[str, str] = {}
    for key, values in WORDS.items():
        chosen = rng.sample(values, min(3, len(values)))
        for suffix, word in zip(("", "2", "3"), chosen, strict=False):
            slots[key + suffix] = word
    hero, friend = rng.choice(["he", "she"]), rng.choice(["he", "she"])
    slots["N"] = _invented_name(rng) if rng.random() < 0.15 else rng.choice(NAMES[hero])
    slots["F"] = rng.choice([name for name in NAMES[friend] if name != slots["N"]])
    slots["fkind"] = slots["kind2"]
    for prefix, gender in (("", hero), ("f", friend)):
        for slot, word in zip(("he", "him", "his"), PRONOUNS[gender], strict=True):
            slots[prefix + slot] = word
            slots[(prefix + slot).capitalize()] = word.capitalize()
    return slots


def story(rng: random.Random) -> Story:
    """A new story; `rng` decides everything."""
    slots = _cast(rng)
    parts = [rng.choice(OPENINGS)]
    if rng.random() < 0.7:
        parts.append(rng.choice(HABITS))
    parts += [rng.choice(stage) for stage in rng.choice(list(PLOTS.values()))]
    parts.append(rng.choice(ENDINGS))
    if rng.random() < 0.5:
        parts.append("The end.")
    text = _article(" ".join(parts).format(**slots))
    return Story(text, slots["N"], slots["kind"], slots["adj"])


def sentence_patterns() -> list[re.Pattern[str]]:
    """One pattern for each thing a story can say; a correct story is a chain of these, see `read`."""
    words: dict[str, str] = {}
    for key, values in WORDS.items():
        for suffix in ("", "2", "3"):
            words[key + suffix] = "(?:" + "|".join(map(re.escape, values)) + ")"
    names = "|".join(NAMES["he"] + NAMES["she"])
    words |= {"fkind": words["kind"], "N": f"(?P<N>{names})", "F": f"(?P<F>{names})"}
    for prefix in ("", "f"):
        for slot, forms in zip(("he", "him", "his"), zip(*PRONOUNS.values(), strict=True), strict=True):
            words[prefix + slot] = "(?:" + "|".join(forms) + ")"
            words[(prefix + slot).capitalize()] = "(?:" + "|".join(form.capitalize() for form in forms) + ")"

    patterns = []
    alternatives = [text for plot in PLOTS.values() for stage in plot for text in stage]
    for text in [*OPENINGS, *HABITS, *alternatives, *ENDINGS, "The end."]:
        used: set[str] = set()
        out = []
        for piece in re.split(r"(\{\w+\})", re.sub(r"\b([Aa]) (?=\{)", r"\1(?:n)? ", text)):
            if not piece.startswith("{"):
                out.append(re.escape(piece).replace(re.escape("(?:n)?"), "(?:n)?"))
                continue
            slot = piece[1:-1]
            out.append(f"(?P={slot})" if slot in used else words[slot])
            if slot in ("N", "F"):
                used.add(slot)
        patterns.append(re.compile("".join(out)))
    return patterns


def read(text: str) -> tuple[str, list[str]]:
    """Reads `text` as a chain of sentences of the grammar, each with one hero and one friend.

    Returns the rest from the first wrong sentence (empty if all are correct), and the names in it.
    """
    patterns = sentence_patterns()
    rest = text.strip()
    names: list[str] = []
    while rest:
        matches = [match for pattern in patterns if (match := pattern.match(rest))]
        if not matches:
            break
        match = max(matches, key=lambda m: m.end())
        names += [name for name in match.groupdict().values() if name and name not in names]
        rest = rest[match.end() :].lstrip()
    return rest, names
