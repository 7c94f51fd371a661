"""What Python and C++ both name has one value, and tests' entries are apart from those of the library."""

from __future__ import annotations

import re
from pathlib import Path

from llamapipe._sampling_table import SAMPLER_ORDER
from llamapipe.errors import NoToken
from llamapipe.llama.native_pipeline import mode_names
from llamapipe.native.load import enum_names, native

ROOT = Path(__file__).resolve().parents[2]
CDEF = ROOT / "llamapipe" / "native" / "cdef"


def test_reasons_for_no_token_have_the_same_names_and_values() -> None:
    assert enum_names("lp_no_token") == {code.value: f"LP_{code.name}" for code in NoToken}


def test_samplers_have_the_same_names_in_the_same_order() -> None:
    names = enum_names("lp_sampler_name")
    expected = [f"LP_SAMPLER_{name.upper()}" for name in SAMPLER_ORDER]
    assert [names[i] for i in range(len(names))] == expected, (
        f"change lp_sampler_name in {CDEF / '30_sampling.h'}, then run: python build_native.py --backend cpu"
    )
    assert len(SAMPLER_ORDER) <= native().lib.LP_MAX_SAMPLERS


def test_modes_are_named_after_their_constants() -> None:
    assert sorted(mode_names().values()) == ["direct", "events", "host", "sync"]


def test_the_library_calls_no_entry_that_is_for_tests() -> None:
    entries = re.findall(r"\b(lp_\w+)\(", (CDEF / "50_testing.h").read_text(encoding="utf-8"))
    assert len(entries) > 5
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "llamapipe").rglob("*.py"))
    assert not {entry for entry in entries if f"{entry}(" in text}
