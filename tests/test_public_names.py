"""What other programs do with public names as values: read their annotations, and copy or write their fields."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import typing
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import llamapipe as lp
import llamapipe.compat
from llamapipe import errors, lowlevel, telemetry, types


def annotated() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The classes and functions that callers hold, with the methods and properties of the classes."""
    for module in (lp, llamapipe.compat, errors, lowlevel, telemetry, types):
        names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        for name in names:
            value = getattr(module, name)
            if isinstance(value, ModuleType) or not callable(value):
                continue
            if not getattr(value, "__module__", "").startswith("llamapipe"):
                continue
            yield f"{module.__name__}.{name}", value
            for member, method in inspect.getmembers(value) if inspect.isclass(value) else ():
                if not member.startswith("_") or member == "__init__":
                    method_of = method.fget if isinstance(method, property) else method
                    inner = inspect.unwrap(method_of) if callable(method_of) else None
                    if inspect.isfunction(inner) and inner.__module__.startswith("llamapipe"):
                        yield f"{module.__name__}.{name}.{member}", inner


ANNOTATED = dict(annotated())


def test_annotations_resolve() -> None:
    """FastAPI, pydantic, msgspec and others read them at run time."""
    assert len(ANNOTATED) > 300
    unresolved = {}
    for name, value in ANNOTATED.items():
        try:
            typing.get_type_hints(value)
        except Exception as e:
            unresolved[name] = repr(e)
    assert not unresolved


@pytest.mark.parametrize("module", [lowlevel, types], ids=lambda module: module.__name__)
def test_names_that_few_hold_have_one_place_each(module: ModuleType) -> None:
    """``dir(lp)`` shows what programs hold; an error says where the other names are."""
    for name in set(module.__all__) - {"DecodeBatch", "Pipeline"}:
        assert name not in dir(lp)
        with pytest.raises(AttributeError, match=f"it is {module.__name__}.{name}"):
            getattr(lp, name)
    assert module.__name__.rpartition(".")[2] in dir(lp) and len(lp.__all__) < 40


JSON = ("Tool.parameters", "ToolCall.arguments")  # a program takes it apart without a check of each value
KEYS = "SamplingParams.adapter"  # for type checkers a dict of one kind of key is no mapping of several kinds
NOT_CONSTRUCTED = ("Generation.__init__.layout", "StepOutput.__init__.native")  # by callers


def test_callers_pass_nothing_of_any_type() -> None:
    """A type checker must find a wrong argument."""
    loose = [
        place
        for name, value in ANNOTATED.items()
        if "compat" not in name  # has llama-cpp-python's types
        for argument, annotation in getattr(value, "__annotations__", {}).items()
        if argument != "return" and "Any" in str(annotation)
        for place in [f"{name}.{argument}"]
        if not place.replace(".__init__.", ".").endswith((*JSON, KEYS))
        and not place.endswith(NOT_CONSTRUCTED)
    ]
    assert not loose


RESULTS = [
    lp.BatchSummary, types.ChatChoice, lp.ChatCompletion, lp.Choice, lp.Completion, lp.Delta, lp.EngineStats,
    lp.EngineTuning, lp.KvEvents, lowlevel.PipelineStats, lp.Ranked, lp.SamplingParams, lp.Score, types.Timings,
    lp.Token, lp.Tool, lp.ToolCall, types.ToolCallDelta,
]  # fmt: skip


@pytest.mark.parametrize("kind", RESULTS, ids=lambda kind: kind.__name__)
def test_pydantic_knows_the_type(kind: type) -> None:
    pydantic = pytest.importorskip("pydantic")
    pydantic.TypeAdapter(kind)


def test_pydantic_makes_params() -> None:
    pydantic = pytest.importorskip("pydantic")
    params = pydantic.TypeAdapter(lp.SamplingParams).validate_python(
        {"max_tokens": 3, "logit_bias": {1: 2.0}}
    )
    assert params == lp.SamplingParams(max_tokens=3, logit_bias={1: 2.0})


class TestMappings:
    """Fields that are mappings can be copied, pickled and written, and those of frozen types not be changed."""

    params = lp.SamplingParams(logit_bias={5: 1.5, 6: float("-inf")}, adapter={"a": 0.5}, stop=["x"])

    def test_are_copied(self) -> None:
        params = self.params
        for copied in (copy.copy(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
            assert copied == params and hash(copied) == hash(params)
        values = dataclasses.asdict(params)
        assert values["logit_bias"] == {5: 1.5, 6: float("-inf")} and values["adapter"] == {"a": 0.5}
        assert lp.SamplingParams(**values) == params
        assert lp.SamplingParams(*dataclasses.astuple(params)) == params

    def test_are_written(self) -> None:
        text = json.dumps(vars(self.params))
        assert json.loads(text)["logit_bias"] == {"5": 1.5, "6": float("-inf")}
        msgspec = pytest.importorskip("msgspec")
        written = msgspec.json.decode(msgspec.json.encode(self.params))
        assert written["logit_bias"]["5"] == 1.5 and written["adapter"] == {"a": 0.5}
        assert msgspec.to_builtins(self.params)["adapter"] == {"a": 0.5}
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(self.params), strict=False)["adapter"] == {
            "a": 0.5
        }

    @pytest.mark.parametrize("name", ["logit_bias", "adapter"])
    def test_are_not_changed(self, name: str) -> None:
        field: Any = getattr(self.params, name)
        before = dict(field)
        calls: list[Callable[[], object]] = [
            lambda: field.update({7: 1.0}),
            lambda: field.pop(next(iter(field))),
            lambda: field.setdefault(9, 1.0),
            field.clear,
            field.popitem,
            lambda: field.__setitem__(5, 2.0),
            lambda: field.__delitem__(next(iter(field))),
            lambda: field.__ior__({5: 2.0}),
        ]
        for call in calls:
            with pytest.raises(TypeError, match="cannot be changed"):
                call()
        assert field == before

    def test_of_a_summary(self) -> None:
        summary = lp.BatchSummary(n_done=3)
        summary.reasons["too long"] += 2
        assert dataclasses.asdict(summary)["reasons"] == {"too long": 2}
        assert json.loads(json.dumps(dataclasses.asdict(summary)))["n_done"] == 3
        for copied in (copy.deepcopy(summary), pickle.loads(pickle.dumps(summary))):
            assert copied == summary and copied.reasons.most_common() == [("too long", 2)]
