"""What models write, as other projects' suites have it: our parsers and grammars against their expectations.

The cases of llama.cpp's ``tests/test-chat.cpp`` are read from its pinned source, those of vLLM's ``tests/tool_parsers``
and ``tests/reasoning`` from the folder that LLAMAPIPE_VLLM_SOURCE names. ``known_differences.txt`` and
``known_differences_vllm.txt`` list those on which we differ, each with its reason: a case that becomes worse or better
than its line fails. To see some: ``python -m support.peer_cases Qwen3.5`` in ``tests/``. ``docs/models-and-formats.md``
has the counts.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.chat_templates import folder
from support.peer_cases import (
    LIST,
    UNEXPLAINED,
    UNSTABLE,
    VLLM_LIST,
    Differences,
    llama_cpp_cases,
    outcomes,
    table,
    vllm_outcomes,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from format_tables import PAGE, with_tables

pytestmark = pytest.mark.skipif(folder() is None, reason="llama.cpp's source is not in the cache")


def test_cases_of_llama_cpp(capsys: pytest.CaptureFixture[str]) -> None:
    results = list(outcomes(llama_cpp_cases()))
    with capsys.disabled():
        sys.stdout.write(f"\n{table(results)}\n")
    assert not [outcome.name for outcome in results if outcome.verdict == UNSTABLE]
    known = Differences(LIST.read_text(encoding="utf-8"))
    assert UNEXPLAINED not in known.reasons
    faults = known.faults(results)
    assert not faults, "\n".join(["run: python -m support.peer_cases --write (in tests/)", *faults])
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page, results) == page, "run: python tools/format_tables.py"


@pytest.mark.skipif("LLAMAPIPE_VLLM_SOURCE" not in os.environ, reason="nox -s formats fetches vLLM's source")
def test_cases_of_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    results = list(vllm_outcomes())
    with capsys.disabled():
        sys.stdout.write(f"\n{table(results)}\n")
    assert not [outcome.name for outcome in results if outcome.verdict == UNSTABLE]
    known = Differences(VLLM_LIST.read_text(encoding="utf-8"))
    assert UNEXPLAINED not in known.reasons
    faults = known.faults(results)
    assert not faults, "\n".join(["run: python -m support.peer_cases --vllm --write (in tests/)", *faults])
