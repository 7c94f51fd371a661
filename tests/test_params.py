"""SamplingParams as values: limits, equality, hashing, copies and pickles. Bad values: test_bad_input."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from fractions import Fraction
from math import inf, nextafter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamapipe import SamplingParams
from llamapipe._sampling_table import OPTIONS, SAMPLER_ORDER, Kind

make: Callable[..., SamplingParams] = SamplingParams
INT32_MAX = 2**31 - 1
ROWS = {option.name: option for option in OPTIONS}
# At most max_tokens: has a test of its own.
INTEGERS = {
    name: (int(row.low), int(row.high))
    for name, row in ROWS.items()
    if row.kind is Kind.INT and name != "min_tokens"
}
NUMBERS = {name: (float(row.low), float(row.high)) for name, row in ROWS.items() if row.kind is Kind.FLOAT}
OPTIONAL = (
    "max_tokens",
    "seed",
    "reasoning_budget",
    "logit_bias",
    "logprobs",
    "prompt_logprobs",
    "allowed_token_ids",
    "sampler_order",
    "grammar",
)
# Of these only one may be given.
CONSTRAINTS = {
    "grammar": "root ::= [a-z]",
    "json_schema": '{"type": "null"}',
    "regex": "a+",
    "lark": 'start: "a"',
    "choice": ("yes", "no"),
}
FIELDS = {f.name for f in dataclasses.fields(SamplingParams)}

tokens = st.integers(0, INT32_MAX)
values = {
    **{name: st.integers(*limits) for name, limits in INTEGERS.items()},
    # -1 is stored as 0 and None
    **{name: st.integers(0, INTEGERS[name][1]) for name in ("top_k", "seed", "reasoning_budget")},
    **{name: st.floats(*limits) for name, limits in NUMBERS.items()},
    "logit_bias": st.dictionaries(tokens, st.floats(-1e6, 1e6) | st.just(-inf), max_size=4),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    "stop_token_ids": st.lists(tokens, max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "infill": st.booleans(),
    "cache": st.booleans(),
    "cache_salt": st.text(min_size=1, max_size=5) | st.none(),
    "speculate": st.sampled_from([None, "off", "ngram"]),
    "prediction": st.text(max_size=5) | st.none(),
    "reasoning_budget_message": st.text(max_size=5) | st.none(),
    "adapter": st.none()
    | st.sampled_from("ab")
    | st.dictionaries(st.sampled_from("ab"), st.floats(-1000, 1000), min_size=1),
    "grammar_timeout": st.floats(1e-3, 1e9) | st.none(),
    "min_tokens": st.just(0),
    "allowed_token_ids": st.lists(tokens, min_size=1, max_size=3).map(tuple),
    "bad_words": st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    "dry_sequence_breakers": st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    "logits_processors": st.lists(st.sampled_from([print, repr]), max_size=2).map(tuple),
    "sampler_order": st.permutations(SAMPLER_ORDER).map(tuple),
    "grammar": st.just(CONSTRAINTS["grammar"]),
    "json_whitespace": st.sampled_from(["compact", "spaced", "flexible"]),
    **{name: st.none() for name in ("json_schema", "regex", "lark", "choice")},
}
for optional in OPTIONAL:
    values[optional] |= st.none()
options = st.fixed_dictionaries({}, optional=values)


class TestLimits:
    def test_every_field_has_its_test(self) -> None:
        assert values.keys() == FIELDS, f"{__file__}: values, of kinds that are no numbers"

    @pytest.mark.parametrize("name", INTEGERS)
    def test_integers(self, name: str) -> None:
        low, high = INTEGERS[name]
        for value in (low, high, np.int64(low), np.uint64(high)):
            if value == -1 and name in ("top_k", "seed", "reasoning_budget"):  # other words for 0 and None
                continue
            stored = getattr(make(**{name: value}), name)
            assert (stored, type(stored)) == (value, int)
        for value in (low - 1, high + 1):
            with pytest.raises(ValueError, match=f"^{name} is {value}; it must be from {low} to {high}$"):
                make(**{name: value})

    @pytest.mark.parametrize("name", NUMBERS)
    def test_numbers(self, name: str) -> None:
        low, high = NUMBERS[name]
        for value in (low, high, np.float64(high), max(Fraction(1, 2), Fraction(low)), int(high) or low):
            stored = getattr(make(**{name: value}), name)
            assert (stored, type(stored)) == (value, float)
        for value in (nextafter(low, -inf), nextafter(high, inf)):
            with pytest.raises(
                ValueError, match=rf"^{name} is .*; it must be from {low:g} to {high:g}$".replace("+", r"\+")
            ):
                make(**{name: value})

    def test_biases(self) -> None:
        params = make(logit_bias={np.int32(5): np.float32(0.5), 0: -inf, INT32_MAX: 1e6, 7: -1e6})
        assert params.logit_bias == {5: 0.5, 0: -inf, INT32_MAX: 1e6, 7: -1e6}
        assert {type(v) for item in params.logit_bias.items() for v in item} == {int, float}

    @pytest.mark.parametrize("name", OPTIONAL)
    def test_none(self, name: str) -> None:
        assert getattr(make(**{name: None}), name) is None

    @pytest.mark.parametrize("stop", ["END", ["END"], ("END",), iter(["END"]), {"END"}])
    def test_one_stop_string_or_several(self, stop: Any) -> None:
        assert SamplingParams(stop=stop).stop == ("END",)

    def test_other_libraries_ways_to_say_none(self) -> None:
        assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
        assert SamplingParams(seed=-1) == SamplingParams(seed=None)
        assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None) == SamplingParams()

    def test_the_order_of_stop_strings_is_kept(self) -> None:
        assert SamplingParams(stop=["b", "a", "b"]).stop == ("b", "a", "b")

    def test_as_few_tokens_as_there_may_be(self) -> None:
        assert make(min_tokens=5, max_tokens=5).min_tokens == 5
        assert make(min_tokens=INT32_MAX, max_tokens=None).min_tokens == INT32_MAX
        with pytest.raises(ValueError, match=r"^min_tokens is 6, more than max_tokens, which is 5$"):
            make(min_tokens=6, max_tokens=5)
        with pytest.raises(ValueError, match=r"^min_tokens is -1; it must be from 0 to"):
            make(min_tokens=-1)

    @pytest.mark.parametrize("name", ["stop", "bad_words", "dry_sequence_breakers"])
    def test_strings(self, name: str) -> None:
        assert getattr(make(**{name: "x"}), name) == ("x",)
        with pytest.raises(ValueError, match=f"{name} holds an empty string"):
            make(**{name: ["x", ""]})
        with pytest.raises(TypeError, match=f"{name} must hold strings, not int"):
            make(**{name: ["x", 3]})

    @pytest.mark.parametrize("name", CONSTRAINTS)
    def test_one_constraint(self, name: str) -> None:
        assert getattr(make(**{name: CONSTRAINTS[name]}), name) == CONSTRAINTS[name]
        for other in CONSTRAINTS.keys() - {name}:
            with pytest.raises(ValueError, match="are both given"):
                make(**{name: CONSTRAINTS[name], other: CONSTRAINTS[other]})
        with pytest.raises(TypeError, match=f"{name} must be a"):
            make(**{name: 3.5})

    def test_schemas_are_kept_as_text(self) -> None:
        schema = {"type": "array", "items": {"enum": [1, "x", None]}}
        params = make(json_schema=schema)
        assert json.loads(params.json_schema) == schema  # type: ignore[arg-type]
        schema["type"] = "object"
        assert params == make(json_schema={"type": "array", "items": {"enum": [1, "x", None]}})
        circle: dict[str, Any] = {}
        circle["self"] = circle
        for bad, message in (({"type": {1, 2}}, "cannot be written as JSON"), (circle, "nested too deeply")):
            with pytest.raises(ValueError, match=f"json_schema (is )?{message}"):
                make(json_schema=bad)

    def test_orders(self) -> None:
        assert make(sampler_order=["top_k", "temperature"]).sampler_order == ("top_k", "temperature")
        for order, message in (
            (["top_k", "tap_p"], "sampler_order holds 'tap_p'"),
            (["top_k", "top_k"], "holds 'top_k' twice"),
            ("top_k", "must be a sequence"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                make(sampler_order=order)
        with pytest.raises(ValueError, match="xtc_probability is given, but sampler_order leaves 'xtc' out"):
            make(sampler_order=["top_k", "temperature"], xtc_probability=0.5)

    def test_what_is_called_can_be(self) -> None:
        with pytest.raises(TypeError, match="logits_processors must hold callables, not int"):
            make(logits_processors=[3])

    def test_something_is_allowed(self) -> None:
        with pytest.raises(ValueError, match="allowed_token_ids is empty"):
            make(allowed_token_ids=[])


class TestValues:
    @given(fields=options)
    def test_are_what_was_given(self, fields: dict[str, Any]) -> None:
        params = make(**fields)
        assert {name: getattr(params, name) for name in fields} == fields
        for name in FIELDS - fields.keys():
            assert getattr(params, name) == getattr(SamplingParams(), name)

    @given(fields=options)
    def test_equal_ones_are_interchangeable(self, fields: dict[str, Any]) -> None:
        a, b = make(**fields), make(**fields)
        assert a == b
        assert hash(a) == hash(b)
        assert {a: 1}[b] == 1
        assert repr(a) == repr(b)

    @given(fields=options, name=st.sampled_from(sorted(FIELDS)), data=st.data())
    def test_any_field_makes_a_difference(
        self, fields: dict[str, Any], name: str, data: st.DataObject
    ) -> None:
        params = make(**fields)
        other = data.draw(values[name])
        changed = make(**vars(params) | {name: other})
        assert (changed == params) == (other == getattr(params, name))
        assert getattr(changed, name) == other

    @given(fields=options)
    def test_survive_copies_and_pickles(self, fields: dict[str, Any]) -> None:
        params = make(**fields)
        copies = [copy.copy(params), copy.deepcopy(params), dataclasses.replace(params)]
        copies += [pickle.loads(pickle.dumps(params, n)) for n in range(pickle.HIGHEST_PROTOCOL + 1)]
        for copied in copies:
            assert copied == params
            assert hash(copied) == hash(params)
            assert type(copied.logit_bias) is type(params.logit_bias)

    def test_a_pickle_is_checked(self) -> None:
        """What comes from elsewhere is no more to be trusted than what is typed."""
        data = pickle.dumps(SamplingParams(top_k=1234))
        good, bad = (n.to_bytes(2, "little") for n in (1234, 1235))
        assert pickle.loads(data.replace(good, bad)).top_k == 1235
        with pytest.raises(ValueError, match="temperature"):
            pickle.loads(pickle.dumps(SamplingParams(temperature=0.5), 0).replace(b"F0.5", b"F-0.5"))

    def test_the_order_of_biases_makes_no_difference(self) -> None:
        a, b = SamplingParams(logit_bias={1: 2, 3: 4}), SamplingParams(logit_bias={3: 4.0, 1: 2.0})
        assert a == b
        assert hash(a) == hash(b)


class TestFrozen:
    @pytest.mark.parametrize("name", sorted(FIELDS))
    def test_no_field_can_be_changed(self, name: str) -> None:
        params = SamplingParams()
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(params, name, getattr(params, name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(params, name)

    def test_what_was_given_can_be(self) -> None:
        biases, stops, ids = {1: 2.0}, ["a"], [5]
        params = SamplingParams(logit_bias=biases, stop=stops, stop_token_ids=ids)
        biases[3], biases[1] = 4.0, 0.0
        stops.append("b")
        ids.append(6)
        assert (params.logit_bias, params.stop, params.stop_token_ids) == ({1: 2.0}, ("a",), (5,))

    def test_biases_can_only_be_read(self) -> None:
        biases: Any = SamplingParams(logit_bias={1: 2.0}).logit_bias
        with pytest.raises(TypeError):
            biases[1] = 3.0

    def test_every_field_is_described(self) -> None:
        assert SamplingParams.__doc__ is not None
        assert [name for name in FIELDS if f"``{name}``" not in SamplingParams.__doc__] == []
