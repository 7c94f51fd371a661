"""The JSON-Schema-Test-Suite, draft 2020-12: masks against instances that others wrote.

The suite is in the source archive of jsonschema. ``nox -s schemas`` fetches it and names its folder in
LLAMAPIPE_SCHEMA_SUITE; without it these tests are skipped.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.guided import accepts

import llamapipe as lp
from llamapipe.errors import InvalidRequestError
from llamapipe.structured.compile import GuideFactory, compile_guide

SUITE = os.environ.get("LLAMAPIPE_SCHEMA_SUITE", "")
pytestmark = pytest.mark.skipif(not SUITE, reason="nox -s schemas fetches the suite")
# How many of the suite's schemas compile. It was 164 of 368 before propertyNames, uniqueItems and unknown formats.
FLOOR = 198
# Instances on which the mask and the suite differ, by cause.
FORMATS = "a known format is enforced, which the suite takes for an annotation"
SPELLING = "an integer is written without a fraction"
UNIQUE = "uniqueItems is enforced for listed values only"
KEYWORD = re.compile(
    r"'([\w$]+)'|Unimplemented keys: \[\"|\b(oneOf|patternProperty|minProperties|maxProperties)\b"
)
POINTER = re.compile(r"^json_schema (?:cannot be compiled )?at #")


def groups() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(Path(SUITE, "draft2020-12").glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield path.stem, group


def orders(value: Any, most: int = 200) -> list[str]:
    """A value as compact JSON, with its members in every order."""
    if isinstance(value, dict):
        found = []
        for members in itertools.permutations(value.items()):
            for inner in itertools.product(*(orders(one, 20) for _, one in members)):
                names = [json.dumps(name, ensure_ascii=False) for name, _ in members]
                pairs = zip(names, inner, strict=True)
                found.append("{" + ",".join(f"{name}:{text}" for name, text in pairs) + "}")
                if len(found) == most:
                    return found
        return found
    if isinstance(value, list):
        lists = itertools.product(*(orders(one, 20) for one in value))
        return ["[" + ",".join(texts) + "]" for texts in itertools.islice(lists, most)]
    return [json.dumps(value, ensure_ascii=False)]


def cause(file: str, test: dict[str, Any], text: str) -> str | None:
    """Why the mask may differ from the suite."""
    if test["valid"] and file == "format":
        return FORMATS
    if test["valid"] and re.search(r"\d\.0\b", text):
        return SPELLING
    return UNIQUE if not test["valid"] and file == "uniqueItems" else None


def test_masks_agree_with_the_suite(demo: lp.Model, capsys: pytest.CaptureFixture[str]) -> None:
    n_schemas = n_compiled = n_instances = 0
    differences: Counter[str] = Counter()
    refusals: list[str] = []
    for file, group in groups():
        n_schemas += 1
        try:
            factory = compile_guide(demo, json_schema=group["schema"])
        except InvalidRequestError as error:
            refusals.append(str(error))
            continue
        n_compiled += 1
        for test in group["tests"]:
            n_instances += 1
            allowed = [text for text in orders(test["data"]) if _allows(demo, factory, text)]
            if bool(allowed) == test["valid"]:
                continue
            why = cause(file, test, json.dumps(test["data"]))
            assert why is not None, (file, group["description"], test, group["schema"])
            differences[why] += 1
    for message in refusals:
        assert POINTER.match(message) and KEYWORD.search(message), message
    report = [f"{n_compiled} of {n_schemas} schemas compile; {n_instances} instances, of which differ:"]
    report += [f"  {n}: {why}" for why, n in differences.items()]
    with capsys.disabled():
        sys.stdout.write("\n" + "\n".join(report) + "\n")
    assert n_compiled >= FLOOR


def _allows(model: lp.Model, factory: GuideFactory, text: str) -> bool:
    with factory.new() as guide:
        return accepts(model, guide, text)
