"""Schemas of Python functions and models whose annotations are out of the ordinary."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypedDict, TypeVar

import annotated_types
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
class Point:
    x: int


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


def test_limits_of_pydantic_are_kept() -> None:
    def f(
        days: Annotated[int, pydantic.Field(ge=1, le=7, description="How many")],
        name: Annotated[str | None, annotated_types.MaxLen(5)],
        places: Annotated[list[Point], pydantic.Field(min_length=1)],
        place: Annotated[Options, pydantic.Field(description="Where")],
    ) -> None: ...

    assert parameters(f)["properties"] == {
        "days": {"type": "integer", "minimum": 1, "maximum": 7, "description": "How many"},
        "name": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}]},
        "places": {"type": "array", "items": {"$ref": "#/$defs/Point"}, "minItems": 1},
        "place": {"$ref": "#/$defs/Options", "description": "Where"},
    }


def test_limits_that_pydantic_refuses_are_named() -> None:
    def f(x: Annotated[str, pydantic.Field(pattern="(")]) -> None: ...

    with pytest.raises(InvalidRequestError, match=r"(?s)argument 'x': no JSON schema for .*unclosed"):
        check_tools([f])


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


def plain(city: str, days: int = 1) -> None:
    """The weather of a city.

    city: its name.
    days: how many days,
        today included.
    """


def google(city: str, days: int = 1) -> None:
    """The weather: of a city.

    Note that: this is text.

    Args:
        city (str): Its name.
            days: are not part of it.
        days (Optional[int (or so)], optional): How many
            days.

    Returns:
        city: nothing.
    """


def numpy_style(city: str, days: int, x: float, y: float) -> None:
    """The weather of a city.

    Parameters
    ----------
    city : str
        Its name.

        In English.
    days : int, optional
        How many.
    x, y : float
        Where.

    Returns
    -------
    days : int
        Nothing.
    """


def sphinx(city: str, days: int) -> None:
    """The weather of a city.

    :param str city: Its name
        in English.
    :type city: str
    :param days: How many.
    :returns: city: nothing.
    """


@pytest.mark.parametrize(
    ("function", "description", "expected"),
    [
        (plain, "The weather of a city.", ["its name.", "how many days, today included."]),
        (
            google,
            "The weather: of a city.\n\nNote that: this is text.",
            ["Its name. days: are not part of it.", "How many days."],
        ),
        (numpy_style, "The weather of a city.", ["Its name. In English.", "How many.", "Where.", "Where."]),
        (sphinx, "The weather of a city.", ["Its name in English.", "How many."]),
    ],
)
def test_lines_about_arguments_are_their_descriptions(
    function: Any, description: str, expected: list[str]
) -> None:
    (tool,) = check_tools([function])
    assert tool.description == description
    assert [schema["description"] for schema in tool.parameters["properties"].values()] == expected
