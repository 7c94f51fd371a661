"""The tables of fields: the page says what the server does, and every field that clients' libraries know has a fate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_message_create_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from llamapipe.server._fields import Fate, Only, Unused, fates, fit_to_type, unused_fields
from llamapipe.server._tools import custom_input
from llamapipe.server.errors import ApiError
from llamapipe.server.routes.anthropic import CountRequest, MessagesRequest
from llamapipe.server.routes.chat import ChatRequest
from llamapipe.server.routes.completions import CompletionRequest
from llamapipe.server.routes.responses import ResponsesRequest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from field_tables import PAGE, TABLES, all_fields, shown, with_tables


class Inner(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    kept: int | None = None
    aside: Annotated[int | None, Unused(1)] = None


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    a: int = 0
    inner: Inner | None = None
    free: dict[str, Any] | None = None
    store: Annotated[bool | None, Unused(False)] = None
    only: Annotated[Any, Only(-1, False, instead="give a")] = None
    never: Annotated[Any, Only(instead="give b")] = None


def test_the_page_has_the_tables_of_the_types() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_tables(text), "run: python tools/field_tables.py"


BASES = {kind: base for _, kind, base in TABLES}


@pytest.mark.parametrize(
    "kind", [kind for kind in BASES if kind not in BASES.values()], ids=lambda kind: kind.__name__
)
def test_the_tables_of_a_route_do_not_contradict_each_other(kind: type[msgspec.Struct]) -> None:
    """Each field is in one of them, with the fate that it has in this route."""
    table: type[msgspec.Struct] | None = kind
    rows: list[tuple[str, Fate]] = []
    while table in BASES:
        base = BASES[table]
        rows += shown(table, base)
        table = base
    # The options of sampling have a page.
    other_page = {name for name, fate in (fates(table) if table else {}).items() if fates(kind)[name] == fate}
    assert len(rows) == len(dict(rows))
    assert dict(rows) == {name: fate for name, fate in all_fields(kind) if name not in other_page}


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
        (ResponsesRequest, response_create_params.ResponseCreateParamsStreaming),
        (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
        (MessagesRequest, beta_message_create_params.MessageCreateParamsStreaming),
        (CountRequest, message_count_tokens_params.MessageCountTokensParams),
    ],
    ids=lambda kind: f"{kind.__module__.split('.')[-2]}.{kind.__name__}",
)
def test_every_field_of_a_clients_types_has_a_fate(kind: type[msgspec.Struct], params: Any) -> None:
    known = set(get_type_hints(params)) - {"model"}
    headers = {"betas", "user_profile_id", "workspace_id"}  # the client sends them as headers
    assert known - headers <= set(fates(kind))


def test_unused_fields_are_named_unless_they_are_neutral() -> None:
    assert unused_fields(Body(a=1, store=False, only=-1)) == ()
    assert unused_fields(Body(store=True, inner=Inner(kept=2, aside=3))) == ("store", "inner.aside")
    assert unused_fields(Body(inner=Inner(aside=1))) == ()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (Body(only=3), "only is 3; leave it out, or set it to -1 or false: give a"),
        (Body(only=0), "only is 0; leave it out, or set it to -1 or false: give a"),  # 0 is no false
        (Body(never=[]), "never is not supported: give b"),
    ],
)
def test_other_values_are_refused(body: Body, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        unused_fields(body)
    assert (caught.value.message, caught.value.status) == (message, 400)
    assert caught.value.param == message.partition(" ")[0]


def test_nulls_are_left_out_where_the_server_knows_the_type() -> None:
    body = {"a": None, "x": None, "inner": {"kept": None, "y": None}, "free": {"const": None}}
    assert fit_to_type(body, Body) == ({"inner": {}, "free": {"const": None}}, ())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "a\\nb', "a\nb"),
        ('{"input": "a\\', "a"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "', ""),
        ('{"inp', ""),
        ("", ""),
    ],
)
def test_the_text_of_a_custom_tool_also_where_the_call_was_cut(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


def test_equal_numbers_are_told_once() -> None:
    class Numbers(msgspec.Struct):
        a: Annotated[float | None, Only(1.0, 1, 0.0, 0)] = None
        b: Annotated[float | None, Only(1.0)] = None

    for request, allowed in ((Numbers(a=2), "1 or 0"), (Numbers(b=2), "1.0")):
        with pytest.raises(ApiError, match=f"leave it out, or set it to {allowed}$"):
            unused_fields(request)
