"""Schemas of Python functions and models whose annotations are out of the ordinary."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypedDict, TypeVar

import pydantic
import pytest
from typing_extensions import NotRequired, Required

from llamapipe.chat.tools import check_tools
from llamapipe.errors import InvalidRequestError

T = TypeVar("T")


class Weather(pydantic.BaseModel):
    """Where and how long."""

    city: str
    days: int = pydantic.Field(ge=1)


class Box(pydantic.BaseModel, Generic[T]):
    x: T


class Options(TypedDict, total=False):
    a: Required[int]
    b: int


class Whole(TypedDict):
    a: NotRequired[int]
    b: int


@dataclass
class Broken:
    x: Missing  # type: ignore[name-defined]  # noqa: F821


def parameters(tool: Any) -> dict[str, Any]:
    return check_tools([tool])[0].parameters


def test_a_pydantic_model_is_a_tool() -> None:
    (tool,) = check_tools([Weather])
    assert (tool.name, tool.description) == ("Weather", "Where and how long.")
    assert tool.parameters["properties"]["days"] == {"minimum": 1, "title": "Days", "type": "integer"}
    assert tool.parameters["required"] == ["city", "days"]


def test_a_partial_has_the_name_of_its_function() -> None:
    def look_up(x: int, y: int) -> None:
        """Looks something up."""

    (tool,) = check_tools([functools.partial(look_up, y=3)])
    assert (tool.name, tool.description) == ("look_up", "Looks something up.")


def test_annotations_that_cannot_be_hashed() -> None:
    def f(x: Annotated[int, {"min": 1}], y: Annotated[str, "a text"]) -> None: ...

    assert parameters(f)["properties"] == {
        "x": {"type": "integer"},
        "y": {"type": "string", "description": "a text"},
    }


def test_required_in_annotations_that_are_text() -> None:
    def f(x: Options, y: Whole) -> None: ...

    shared = parameters(f)["$defs"]
    assert (shared["Options"]["required"], shared["Whole"]["required"]) == (["a"], ["b"])


def test_generic_models_have_names_that_references_can_have() -> None:
    def f(x: Box[int]) -> None: ...

    assert parameters(f)["properties"]["x"]["$ref"] == "#/$defs/Box_int_"


def test_an_annotation_that_does_not_exist() -> None:
    def f(x: Broken) -> None: ...

    with pytest.raises(InvalidRequestError, match="annotations of Broken cannot be read"):
        check_tools([f])
