"""Collects the arguments of a chat template: those that a request gives, and those that stand for other fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llamapipe.arguments import quoted
from llamapipe.server.errors import ApiError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # how much a model reasons
_RESERVED = ("self", "messages", "tools", "add_generation_prompt")  # parameters of Model.render_chat


def template_args(given: Mapping[str, Any] | None, effort: str | None, field: str) -> dict[str, Any]:
    """The template's arguments, with the effort in ``field``. Raises ApiError 400.

    "none" turns the reasoning off, where a template can; the others are given to it as ``reasoning_effort``.
    """
    args = dict(given or {})
    if effort is None:
        return args
    if effort not in EFFORTS:
        raise ApiError(400, f"{field} is {quoted(effort)}; it may be {', '.join(EFFORTS)}", field)
    if effort == "none":
        args.setdefault("enable_thinking", False)
    else:
        args.setdefault("reasoning_effort", effort)
    return args


def check_template_args(names: Iterable[str]) -> None:
    """Raises ApiError 400 for an argument of the template that is a field of the request."""
    for name in names:
        if name in _RESERVED:
            raise ApiError(
                400,
                f"chat_template_kwargs may not hold {quoted(name)}: the request and the template define it",
                "chat_template_kwargs",
            )
