"""Pages of lists, as OpenAI's API divides them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.responses import Response

from llamapipe._messages import did_you_mean, quoted
from llamapipe.server.endpoint import Exchange, JsonResponse
from llamapipe.server.errors import ApiError
from llamapipe.server.requests.items import check_include
from llamapipe.server.store.answers import Item, Page

MOST_DIGITS = 15  # of a number in a query


def listing(entries: Sequence[Item], has_more: bool) -> Response:
    """Return a page of a list in the form of the API."""
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    fields = {"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": has_more}
    return JsonResponse(fields)


def query(exchange: Exchange, *known: str) -> dict[str, str]:
    """Return the query's parameters, the last value of each, and note those of ``include`` that have no effect.

    Raises ApiError 400 for an unknown one.
    """
    parameters: dict[str, str] = {}
    included: list[str] = []
    for written, value in exchange.query_params.multi_items():
        name = written.removesuffix("[]")
        if name not in known and name != "model":
            raise ApiError(
                400, f"the query has an unknown field: {quoted(name)}{did_you_mean(name, known)}", name
            )
        parameters[name] = value
        included += [value] if name == "include" else []
    exchange.note_unused(tuple(f"include.{name}" for name in check_include(included)))
    return parameters


def page_of(parameters: Mapping[str, str], default: int, most: int) -> Page:
    """Return which entries of a list are wanted; ``default``, ``most``: of ``limit``. Raises ApiError 400."""
    order = parameters.get("order", "desc")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order is {quoted(order)}; it may be asc or desc", "order")
    text = parameters.get("limit", str(default))
    if not text.isascii() or not text.isdigit() or len(text) > MOST_DIGITS or not 1 <= int(text) <= most:
        raise ApiError(400, f"limit is {quoted(text)}; it must be from 1 to {most}", "limit")
    if "before" in parameters:
        raise ApiError(400, "before is not supported: turn the order around, and give after", "before")
    return Page(order == "asc", parameters.get("after"), int(text))
