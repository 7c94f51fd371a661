"""The repository uses one vocabulary: none of its former invented words comes back."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OLD_WORDS = (
    "cohort",
    "cohorts",
    "undrawn",
    "filler",
    "fillers",
    "intake",
    "heir",
    "outbox",
    "bequeath",
    "RecipeBook",
    "StepPlan",
    "WakeList",
    "n_enough",
    "least_copy",
    "whoever",
    "somebody",
)
PATTERN = re.compile(rf"\b({'|'.join(OLD_WORDS)})\b", re.IGNORECASE)


def _tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = listing.stdout.decode().split("\0")
    return [
        name
        for name in names
        if name and not name.startswith("benchmarks/notebook/") and name != "tests/test_words.py"
    ]


def test_no_tracked_text_file_holds_an_old_word() -> None:
    found = []
    for name in _tracked():
        path = ROOT / name
        if not path.is_file():
            continue  # deleted in the working tree
        data = path.read_bytes()
        if b"\0" in data:
            continue  # binary
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            found += [f"{name}:{number}: {match}" for match in PATTERN.findall(line)]
    assert not found, "\n".join(found)
