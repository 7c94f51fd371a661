"""Every option of a request has a row in the table, and everything that names options follows the rows."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import msgspec
import pytest

import llamapipe as lp
from llamapipe._sampling_table import BY_NAME, OPTIONS, SAMPLER_ORDER, SWITCHES, Kind, SamplingOption
from llamapipe.cli.options import SAMPLING, TEXTS
from llamapipe.compat.sampling import COMMON_OPTIONS
from llamapipe.native.load import native
from llamapipe.server.requests.sampling import Sampling
from llamapipe.server.routes.completions import CompletionRequest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from option_table import PAGE, with_tables  # noqa: E402

NUMBERS = (Kind.INT, Kind.FLOAT, Kind.FLAG)
every_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)


# Where to add what a test misses.
HEADER, SOURCE = "llamapipe/native/cdef/30_sampling.h", "llamapipe/native/src/sampler_options.cpp"
BUILD = "then run: python build_native.py --backend cpu"


def default(option: SamplingOption) -> object:
    return lp.SamplingParams.__dataclass_fields__[option.name].default


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    assert len(BY_NAME) == len(OPTIONS)
    fields = {field.name for field in dataclasses.fields(lp.SamplingParams)}
    assert BY_NAME.keys() == fields, "llamapipe/_sampling_table.py (rows), llamapipe/params.py (fields)"


@every_option
def test_the_docstring_tells_of_it(option: SamplingOption) -> None:
    assert re.search(rf"``{option.name}``", lp.SamplingParams.__doc__ or ""), "llamapipe/params.py"


@every_option
def test_a_default_and_a_neutral_value_are_in_the_range(option: SamplingOption) -> None:
    if option.kind in (Kind.INT, Kind.FLOAT):
        for value in (default(option), option.neutral):
            assert value is None or option.low <= float(str(value)) <= option.high
    assert (default(option) is None) <= option.optional


@every_option
def test_a_request_has_a_field_for_it_or_the_row_says_why_not(option: SamplingOption) -> None:
    fields = Sampling.__struct_fields__
    assert bool(option.wire) != bool(option.why_no_field)
    assert not [name for name in option.wire if name not in fields]
    assert not [name for name in option.route_fields if name in fields]
    assert any(
        name in CompletionRequest.__struct_fields__ for name in option.wire or option.route_fields
    ) or (not option.route_fields)


def test_a_request_to_the_server_has_no_option_without_a_row() -> None:
    known = {name for option in OPTIONS for name in option.wire}
    refused = {name for name in BY_NAME if not BY_NAME[name].wire}
    assert set(Sampling.__struct_fields__) & set(BY_NAME) <= known | refused


@every_option
def test_a_command_has_it_or_the_row_says_why_not(option: SamplingOption) -> None:
    commands = {row.name for row in [*TEXTS, *SAMPLING]}
    assert (option.name in commands) == (option.metavar is not None) == (not option.why_no_flag)


def test_the_native_struct_has_the_numbers_that_the_rows_name() -> None:
    fields = native().ffi.typeof("lp_sampling_options").fields
    numbers = {name for name, field in fields if field.type.kind == "primitive"}
    lengths = {"n_biases", "n_allowed", "n_bad_words", "n_end_tokens", "n_order", "n_reasoning_close"}
    # Made from several options: of logits_processors and constraints; from logprobs; with the end tokens.
    derived = {"needs_row", "has_guide", "n_logprobs", "min_tokens", "reasoning_budget", "reasoning_is_open"}
    named = {option.name for option in OPTIONS if option.is_native}
    assert numbers - lengths - derived == named, f"{HEADER}: lp_sampling_options; {BUILD}"


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.is_native], ids=lambda option: option.name
)
def test_the_native_default_is_neutral(option: SamplingOption) -> None:
    defaults = native().lib.lp_sampling_default_options()
    assert hasattr(defaults, option.name), f"{HEADER}: lp_sampling_options; {BUILD}"
    if option.neutral is not None:
        value = getattr(defaults, option.name)
        assert value == pytest.approx(option.neutral), f"{SOURCE}: lp_sampling_default_options; {BUILD}"


def test_every_sampler_is_turned_on_by_an_option() -> None:
    assert SWITCHES.keys() == set(SAMPLER_ORDER) and all(SWITCHES.values())
    assert {option.sampler for option in OPTIONS} == {None, *SAMPLER_ORDER}


def test_options_of_llama_cpp_python_have_a_row() -> None:
    theirs = {name for option in OPTIONS for name in (option.name, *option.elsewhere)}
    gone = {"tfs_z"}  # refused: llama.cpp has no such sampler any more
    assert COMMON_OPTIONS - theirs == gone | {"stopping_criteria", "logits_processor"}


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(PAGE), "run: python tools/option_table.py"


def test_the_page_has_the_order() -> None:
    order = ", ".join(name for name in SAMPLER_ORDER if name != "infill")  # which the page names after it
    assert f"`{order}`" in " ".join(PAGE.read_text(encoding="utf-8").split()), (
        "docs/sampling.md: list the samplers at its top"
    )


@every_option
def test_types_of_fields_follow_the_kind(option: SamplingOption) -> None:
    kinds = {Kind.INT: int, Kind.FLOAT: float, Kind.FLAG: bool, Kind.TEXT: str}
    if option.kind in kinds and option.name != "json_whitespace":
        for name in option.wire:
            field = next(entry for entry in msgspec.structs.fields(Sampling) if entry.name == name)
            assert field.type == kinds[option.kind] | None and field.default is None
