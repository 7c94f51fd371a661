"""Types of pydantic's fields: each is generated, wildly, and what is generated validates.

``nox -s schemas`` runs it with the oldest and the newest supported pydantic and 20 answers for each type; elsewhere it
is two.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import os
import pathlib
import re
import typing
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import jsonschema
import pytest
from support.guided import accepts

import llamapipe as lp
from llamapipe.structured.compile import compile_guide
from llamapipe.structured.schema import closed_objects

pydantic = pytest.importorskip("pydantic")

N_ANSWERS = int(os.environ.get("LLAMAPIPE_PYDANTIC_ANSWERS", "2"))
Field = pydantic.Field


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2**60 + 1


class Point(NamedTuple):
    x: int
    y: float


class Typed(TypedDict, total=False):
    a: int
    b: Literal["x"]


class Inner(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    name: str
    n: int = 3


class Tree(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    value: bool
    left: Tree | None = None


class Cat(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    kind: Literal["dog"]
    good: bool


SHORT = {"max_length": 3}
# Everything that the class checks is in its schema.
WHOLE: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "None": None,
    "bytes": bytes,
    "Any": Any,
    "Path": pathlib.Path,
    "UUID": uuid.UUID,
    "UUID1": pydantic.UUID1,
    "UUID4": pydantic.UUID4,
    "UUID5": pydantic.UUID5,
    "IPv4Address": ipaddress.IPv4Address,
    "IPv6Address": ipaddress.IPv6Address,
    "IPv4Interface": ipaddress.IPv4Interface,
    "IPv6Interface": ipaddress.IPv6Interface,
    "IPvAnyAddress": pydantic.IPvAnyAddress,
    "IPvAnyInterface": pydantic.IPvAnyInterface,
    "SecretStr": pydantic.SecretStr,
    "SecretBytes": pydantic.SecretBytes,
    "Base64Bytes": pydantic.Base64Bytes,
    "Enum": Colour,
    "IntEnum beyond 2**53": Level,
    "Literal": Literal["a", 2, None, True],
    "Literal beyond 2**53": Literal[9007199254740993],
    "int of 64 bits": Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    "int without sign": Annotated[int, Field(ge=0, lt=2**64)],
    "int near 2**63": Annotated[int, Field(ge=2**63, le=2**63 + 5)],
    "PositiveInt": pydantic.PositiveInt,
    "NegativeInt": pydantic.NegativeInt,
    "multiple": Annotated[int, Field(multiple_of=7)],
    "NonNegativeFloat": pydantic.NonNegativeFloat,
    "float in bounds": Annotated[float, Field(gt=0, le=0.3)],
    "float in narrow bounds": Annotated[float, Field(gt=7, le=7.5)],
    "StrictBool": pydantic.StrictBool,
    "constr": Annotated[str, Field(pattern=r"^[a-z]+\d?$", max_length=5)],
    "str of a length": Annotated[str, Field(min_length=2, max_length=4)],
    "list": list[int],
    "list of a length": Annotated[list[str], Field(min_length=1, max_length=2)],
    "set": set[int],
    "set of an Enum": set[Colour],
    "frozenset": frozenset[Literal["a", "b", "c"]],
    "set of a length": Annotated[set[Colour], Field(min_length=2)],
    "deque": collections.deque[int],
    "Sequence": typing.Sequence[bool],
    "tuple": tuple[int, str],
    "tuple of any length": tuple[bool, ...],
    "dict": Annotated[dict[str, int], Field(max_length=2)],
    "dict of an Enum": dict[Colour, int],
    "dict of a Literal": dict[Literal["a", "b"], bool],
    "dict of UUID": Annotated[dict[uuid.UUID, int], Field(min_length=1, max_length=2)],
    "dict of a pattern": dict[Annotated[str, Field(pattern="^x[0-9]$")], int],
    "defaultdict": collections.defaultdict[str, bool],
    "Optional": int | None,
    "Union": int | str | list[bool],
    "NamedTuple": Point,
    "TypedDict": Typed,
    "model": Inner,
    "list of models": list[Inner],
    "recursive": Tree,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
}
# The class checks more than its schema says: a scheme, a date that is past, a double's range, UTF-8 or padding in
# base64; or less than the RFC of a format allows: no leap second, no year 0000, no duration of a billion years.
SCHEMA_ONLY: dict[str, Any] = {
    "date": datetime.date,
    "datetime": datetime.datetime,
    "time": datetime.time,
    "timedelta": datetime.timedelta,
    "AwareDatetime": pydantic.AwareDatetime,
    "IPv4Network": ipaddress.IPv4Network,
    "IPv6Network": ipaddress.IPv6Network,
    "IPvAnyNetwork": pydantic.IPvAnyNetwork,
    "AnyUrl": pydantic.AnyUrl,
    "Decimal": decimal.Decimal,
    "condecimal": Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2)],
    "Decimal in bounds": Annotated[decimal.Decimal, Field(ge=0, lt=10)],
    "HttpUrl": pydantic.HttpUrl,
    "PostgresDsn": pydantic.PostgresDsn,
    "Base64Str": pydantic.Base64Str,
    "Base64UrlBytes": pydantic.Base64UrlBytes,
    "Pattern": re.Pattern,
    "Json": pydantic.Json,
    "ByteSize": pydantic.ByteSize,
    "PastDate": pydantic.PastDate,
    "FutureDate": pydantic.FutureDate,
    "FilePath": pydantic.FilePath,
    "complex": complex,
    "FiniteFloat": pydantic.FiniteFloat,
    "Fraction": fractions.Fraction,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[lp.Engine]:
    with lp.Model.demo() as model, lp.Engine(model, n_ctx=512, n_seq_max=8) as opened:
        yield opened


def test_there_are_sixty_fields() -> None:
    assert len(WHOLE) >= 60


@pytest.mark.parametrize("name", [*WHOLE, *SCHEMA_ONLY])
def test_what_is_generated_validates(engine: lp.Engine, name: str) -> None:
    kind = {**WHOLE, **SCHEMA_ONLY}[name]
    try:
        model = pydantic.create_model("Answer", value=(kind, ...))
        schema = model.model_json_schema()
    except pydantic.errors.PydanticUserError:
        pytest.skip(f"pydantic {pydantic.VERSION} has no schema of it")
    # Nothing else makes a model of stories end a string, a list, a number or a duration soon.
    bias = {b'"': 8.0, b"}": 14.0, b"]": 13.0, **({b"D": 8.0, b"S": 8.0} if name == "timedelta" else {})}
    if name.endswith(("Url", "Dsn", "time")):  # schemes, hosts and fractions of seconds have no longest text
        bias |= {b'"': 13.0, b":": 5.0}
    if name.endswith("time"):  # a zone ends the fraction
        bias |= {b"Z": 12.0, b"+": 12.0, b"-": 12.0}
    ends = {
        token: bias[piece]
        for token in range(engine.model.n_vocab)
        if (piece := engine.model.piece(token)) in bias
    }
    params = [
        lp.SamplingParams(
            json_schema=model,
            temperature=1.3,
            top_k=0,
            top_p=1,
            min_p=0,
            seed=seed,
            max_tokens=450,
            logit_bias={token: more + seed % 5 for token, more in ends.items()},
        )
        for seed in range(N_ANSWERS)
    ]
    for out in engine.generate(["An answer: "] * N_ANSWERS, params):
        assert out.finish_reason == "stop", out.text
        if name in WHOLE:
            model.model_validate_json(out.text)
        else:
            jsonschema.validate(json.loads(out.text), schema, jsonschema.Draft202012Validator)


class Letter(str, enum.Enum):
    A = "a"
    B = "b c"


class Renamed(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    x: int = Field(alias="a-x")
    y: str | None = None


class Open(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    model_config = pydantic.ConfigDict(extra="allow")
    a: int


class Items(pydantic.RootModel[list[int]]):  # type: ignore[name-defined, misc]
    pass


DECIMAL, UTC = decimal.Decimal, datetime.timezone.utc
# Values of a type, which the mask must allow as pydantic writes them.
WRITTEN: list[tuple[Any, list[Any]]] = [
    (Annotated[str, Field(pattern="^a+$")], ["a", "aa"]),
    (pydantic.constr(min_length=1, max_length=3), ["a", "日本語"]),
    (
        decimal.Decimal,
        [*map(DECIMAL, ("1.5", "-0.001", "1E+5", "123456789012345678901234567890.5", "0", "-0"))],
    ),
    (
        Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2)],
        [*map(DECIMAL, ("1234.56", "-0.5", "9999"))],
    ),
    (Annotated[decimal.Decimal, Field(max_digits=3)], [*map(DECIMAL, ("999", "1.23", "0.001"))]),
    (Annotated[decimal.Decimal, Field(gt=DECIMAL("0.1"), multiple_of=DECIMAL("0.05"))], [DECIMAL("0.15")]),
    (datetime.date, [datetime.date(2024, 2, 29), datetime.date.min, datetime.date.max]),
    (
        datetime.datetime,
        [datetime.datetime(1, 1, 1, tzinfo=UTC), datetime.datetime(2024, 1, 1, 1, 1, 1, 123, tzinfo=UTC)],
    ),
    (datetime.time, [datetime.time(1, 2, 3), datetime.time(1, 2, 3, 5, tzinfo=UTC)]),
    (datetime.timedelta, [datetime.timedelta(days=400, hours=2), datetime.timedelta(microseconds=-1)]),
    (Literal["a", 1, True, None, 'é"\\\n'], ["a", 1, True, None, 'é"\\\n']),
    (
        list[Annotated[Cat | Dog, Field(discriminator="kind")]],
        [[Cat(kind="cat", lives=9), Dog(kind="dog", good=True)]],
    ),
    (dict[int, str], [{1: "a", -5: "b"}, {}]),
    (dict[float, int], [{1.5: 1}]),
    (dict[datetime.date, int], [{datetime.date(2024, 1, 1): 1}]),
    (dict[Letter, int], [{Letter.A: 1, Letter.B: 2}, {Letter.B: 1, Letter.A: 3}]),
    (dict[Annotated[str, Field(pattern="^x")], int], [{"x": 1, "xy": 2}]),
    (Annotated[dict[str, int], Field(min_length=1, max_length=2)], [{"a": 1}, {"a": 1, "b": 2}]),
    (pydantic.conlist(int, min_length=1, max_length=2), [[1], [1, 2]]),
    (Annotated[list[int], Field(max_length=0)], [[]]),
    (Annotated[int, Field(multiple_of=5)], [0, 5, -10]),
    (Annotated[float, Field(multiple_of=0.01)], [1.25, -0.07]),
    (pydantic.conint(ge=-(2**63), le=2**63 - 1), [-(2**63), 2**63 - 1]),
    (float, [1.0, 1e300, -1.5e-7]),
    (Letter, [*Letter]),
    (str | None, [None, "null"]),
    (Renamed, [Renamed(**{"a-x": 1}), Renamed(**{"a-x": 1, "y": "z"})]),
    (Open, [Open(a=1, b="x")]),
    (Items, [Items([1, 2])]),
    (Tree, [Tree(value=True, left=Tree(value=False))]),
    (tuple[()], [()]),
    (Point, [Point(1, 2.5)]),
    (set[Letter], [set(), {Letter.A}, {*Letter}]),
    (list[int] | list[str], [[1], ["a"], []]),
    (pydantic.JsonValue, [{"a": [1, None, "x"]}, 1]),
    (pydantic.AnyUrl, [pydantic.AnyUrl("mailto:a@b.c"), pydantic.AnyUrl("http://[::1]:8/ä?b#c")]),
    (ipaddress.IPv6Address, [ipaddress.ip_address("fe80::1%eth0")]),
]


def test_what_pydantic_writes_is_allowed(demo: lp.Model) -> None:
    for kind, values in WRITTEN:
        adapter = pydantic.TypeAdapter(kind)
        factory = compile_guide(demo, json_schema=closed_objects(adapter.json_schema()))
        for value in values:
            text = adapter.dump_json(value, by_alias=True).decode()
            adapter.validate_json(text)
            assert accepts(demo, factory.new(), text), (kind, text)
