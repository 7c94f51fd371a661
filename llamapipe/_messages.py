"""Texts of error messages about wrong names and values: the value, the nearest known name, what to use instead.

Open this file to change how messages quote values and suggest names: ``did_you_mean`` makes every "did you mean".
``_names_elsewhere`` has the names of other libraries and programs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Final, NoReturn, TypeVar, cast

from llamapipe._names_elsewhere import INSTEAD
from llamapipe._options import ENGINE, MODEL, TUNING
from llamapipe._sampling_table import BY_NAME, OPTIONS

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type)
_MOST_QUOTED = 100  # characters of a value in a message
_MOST_LISTED = 20
_UNREADABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


# ---- names from elsewhere
def instead_of(name: str, place: str, known: Iterable[str] = ()) -> str | None:
    """Return what to use instead of a name from elsewhere: a ``known`` name, or advice; None if no table lists it."""
    advice = INSTEAD.get(place, {}).get(name)
    if advice is None or isinstance(advice, str):
        return advice
    names = set(known)
    return next((f"use {ours}" for ours in advice if ours.partition(" ")[0] in names), None)


# ---- the nearest name
_LEAST_LIKE_PATH = 0.85


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that differs only in case, else the most similar, else the shortest that begins with it.

    Returns None if there is none.
    """
    from difflib import get_close_matches

    if len(name) > _MOST_QUOTED:
        return None
    names = sorted(known)
    same = [other for other in names if other.lower() == name.lower()]
    close = same or get_close_matches(name, names, 1)
    longer = [other for other in names if len(name) > 2 and other.startswith(name)]
    return close[0] if close else min(longer, key=len, default=None)


def did_you_mean(name: str, known: Iterable[str], place: str = "") -> str:
    """Return text to append to a message about an unknown name: what to use instead, the nearest name, or nothing.

    ``place``: the entry of ``INSTEAD`` to look the name up in.
    """
    names = list(known)
    advice = instead_of(name, place, names)
    if advice is not None:
        return f"; {advice}"
    near = nearest(name, names)
    return "" if near is None else f"; did you mean {near}?"


def path_meant(path: str, known: Iterable[str]) -> str | None:
    """Return the known server path that an unknown one probably means; None if there is none.

    The path may contain a typo. The base URL may have parts too many or one too few (``/v1/v1/messages``,
    ``/messages``). Or the end may be missing, if only one path begins like this, or all others begin with that one.
    """
    from difflib import get_close_matches

    if not path or len(path) > _MOST_QUOTED:
        return None
    path, names = path.lower(), sorted(known)
    as_deep = [name for name in names if name.count("/") == path.count("/")]
    if close := get_close_matches(path, as_deep, 1, _LEAST_LIKE_PATH):
        return close[0]
    ends = [name for name in names if name != "/" and path.endswith(name)]
    if "/v1/" in path:  # "/v1/fine_tuning/jobs" is not "/jobs"; "/v1/engines/x/completions" is "/completions"
        ends = [
            name
            for name in ends
            if name.startswith("/v1") or f"/v1{name}" in names or path.count("/") - name.count("/") == 1
        ]
    if ends:
        return max(ends, key=len)
    if whole := [name for name in names if name.endswith(path)]:
        return min(whole, key=len)
    longer = [name for name in names if name.startswith(f"{path}/")]
    return longer[0] if longer and all(name.startswith(longer[0]) for name in longer) else None


def unknown_attribute(owner: str, name: str, known: Iterable[str], place: str = "") -> AttributeError:
    """Make an AttributeError for a missing attribute. It says what to use instead, or names the nearest public one."""
    hint = did_you_mean(name, [other for other in known if not other.startswith("_")], place)
    # With a name and no object, Python's traceback adds no suggestion.
    return AttributeError(f"{owner} has no attribute {quoted(name)}{hint}", name=name)


def explain_attribute(self: object, name: str) -> NoReturn:
    """Raise AttributeError for a missing attribute of a result: use it as the ``__getattr__`` of a class."""
    kind = type(self)
    if name.startswith("_") or hasattr(kind, name):  # private, or a property that raised
        object.__getattribute__(self, name)
    raise unknown_attribute(f"{kind.__name__!r} object", name, dir(self), kind.__name__)


def missing_import(module: str, name: str) -> Exception:
    """Make the error for a name of a llama_cpp module that llamapipe lacks. An AttributeError would lose its text."""
    if name.startswith("__"):
        return AttributeError(name)
    table = INSTEAD["llama_cpp"]
    return ImportError(
        f"llamapipe.compat has no {module}.{name[:_MOST_QUOTED]}: {table.get(name, table[module])}"
    )


# ---- options of functions
def explains_options(elsewhere: Mapping[str, Iterable[str]] | None = None) -> Callable[[F], F]:
    """Make a decorator that explains unknown keywords. The TypeError names the nearest option, or the class with it.

    ``elsewhere``: the names of other classes' options, by class.
    """

    def decorate(function: F) -> F:
        shown = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

        def explain(keywords: Mapping[str, Any], known: frozenset[str]) -> str:
            return wrong_option(shown, min(keywords.keys() - known), known, elsewhere or {})

        return _wrap(function, explain)

    return decorate


def explains_fields(cls: C) -> C:
    """Apply ``explains_options`` to the constructor of a dataclass."""
    setattr(cls, "__init__", explains_options()(vars(cls)["__init__"]))  # noqa: B010 - mypy refuses to assign it
    return cls


def explains_keywords(function: F) -> F:
    """Explain a method's keywords: if one is a field of ``SamplingParams``, the TypeError shows the intended call."""
    name = function.__name__

    def explain(keywords: Mapping[str, Any], known: frozenset[str]) -> str:
        wrong = [keyword for keyword in keywords if keyword not in known]
        unknown = next((keyword for keyword in wrong if keyword not in BY_NAME), None)
        if unknown is None:
            options = ", ".join(f"{keyword}={quoted(keywords[keyword])}" for keyword in wrong)
            return (
                f"sampling options are fields of SamplingParams: {name}(prompt, lp.SamplingParams({options}))"
            )
        hint = (
            _streaming(name) if unknown == "stream" else did_you_mean(unknown, known | BY_NAME.keys(), "call")
        )
        return f"{name}() has no option {quoted(unknown)}{hint or _all(known - {'prompt', 'params'})}"

    return _wrap(function, explain)


def _streaming(name: str) -> str:
    """Return text to append to a message about ``stream=``, which other libraries' calls have."""
    names = {"generate": "stream", "chat": "stream_chat", "infill": "stream_infill"}
    names |= {f"a{whole}": f"a{stream}" for whole, stream in names.items()}
    if name in names.values():
        return f"; leave it out: {name}() streams"
    return f"; use engine.{names[name]}" if name in names else ""


def wrong_option(name: str, wrong: str, known: Iterable[str], elsewhere: Mapping[str, Iterable[str]]) -> str:
    """Return the message about an unknown option of a function."""
    for owner, names in elsewhere.items():
        if wrong in names:
            return f"{name}() has no option {quoted(wrong)}: it is an option of {owner}"
    return f"{name}() has no option {quoted(wrong)}{did_you_mean(wrong, known, name) or _all(known)}"


def _all(names: Iterable[str]) -> str:
    return f"; it has: {', '.join(sorted(names))}"


def _wrap(function: F, explain: Callable[[Mapping[str, Any], frozenset[str]], str]) -> F:
    """Wrap a function so that it checks its keywords first. A coroutine function stays one."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    known = frozenset(names) - {"self", "cls"}

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        if not keywords.keys() <= known:
            raise TypeError(explain(keywords, known))
        return function(*arguments, **keywords)

    @wraps(function)
    async def acall(*arguments: Any, **keywords: Any) -> Any:
        if not keywords.keys() <= known:
            raise TypeError(explain(keywords, known))
        return await function(*arguments, **keywords)

    return cast(F, acall if iscoroutinefunction(function) else call)


# ---- the command line
_LEAST_LIKE = 0.7  # a suggestion that is less like the option misleads


def about_option(wrong: str, command: str, known: Iterable[str], fields: Container[str]) -> str:
    """Return what to add to a message about an unknown option: its name here, advice, the nearest name, or nothing.

    ``known``: the options of the command. ``fields``: the fields of requests, if the command is a server.
    """
    from difflib import SequenceMatcher

    known = set(known)
    table = INSTEAD["command line"]
    ours = names[0] if isinstance(names := table.get(wrong), tuple) else None
    advice = instead_of(wrong, command) or (instead_of(wrong, "command line", known) if ours else None)
    if advice is not None:
        return f"; {advice}"
    flags = {flag: option.name for option in OPTIONS for flag in option.flags}
    field = flags.get(wrong) or (ours or wrong).lstrip("-").replace("-", "_")
    if field in fields:
        return f"; each request sets it: the field {field}"
    if isinstance(remark := table.get(wrong), str):
        return f"; {remark}"
    if ours is not None or not wrong.startswith("--"):
        return ""
    near = nearest(wrong[2:], [name[2:] for name in known if name.startswith("--")])
    if near is None:
        return ""
    is_like = near.startswith(wrong[2:]) or SequenceMatcher(None, near, wrong[2:]).ratio() >= _LEAST_LIKE
    return f"; did you mean --{near}?" if is_like else ""


# Options of engines and models that errors name, and that commands have under the same names, with dashes.
ON_COMMAND_LINE: Final = frozenset(
    option.name
    for option in (*ENGINE, *TUNING, *MODEL)
    if "_" in option.name and option.metavar is not None and not option.is_off and not option.flag
) | {"chat_template", "grammar_timeout", "max_queue"}
_ADVICE = re.compile(r"\b(?:raise|larger|smaller|set|leave|give|use) ")
_FIRST = re.compile(r"[a-z]+(?:_[a-z]+)*\b")
_NAME = re.compile(r"(?<![-'\w])[a-z]+(?:_[a-z]+)+(?!['=\w])")


def too_long(what: str, n_ctx: int, advice: str = "", room: int = 1) -> str:
    """Describe the problem with a prompt that leaves too little room in its context; ``what`` says how long it is."""
    free = "one must stay free" if room == 1 else f"{room} must stay free for the answer (min_room)"
    return f"{what}; n_ctx is {n_ctx} and {free}: shorten it, {advice}or raise n_ctx"


# Another fix, for conversations: see ``truncation`` of ``Engine.chat``.
DROP_TURNS = 'set truncation="auto" to drop the oldest turns, '


# Fixes for a model without a projector: for programs, and for the operators of commands.
GIVE_PROJECTOR = "give Model(…, mmproj=FILE) the model's second file, if it has one"
_START_WITH_PROJECTOR = "start with --mmproj FILE, the model's second file, if it has one"


def with_flags(text: str, known: Container[str] | None = None) -> str:
    """Return an error's text in which advice about an engine's option also names the command-line flag.

    ``known``: the options that the command has; None means all.
    """

    def named(match: re.Match[str]) -> str:
        flag = f"--{match[0].replace('_', '-')}"
        return (
            f"{match[0]} ({flag})"
            if match[0] in ON_COMMAND_LINE and (known is None or flag in known)
            else match[0]
        )

    if known is None or "--mmproj" in known:
        text = text.replace(GIVE_PROJECTOR, _START_WITH_PROJECTOR)
    advice = _ADVICE.search(text)
    return text if advice is None else text[: advice.end()] + _NAME.sub(named, text[advice.end() :])


def as_options(text: str, options: Mapping[str, str]) -> str:
    """Return the text of an error about arguments from a command line, with the options that the user typed.

    ``options``: the command's options, by the names of their arguments.
    """
    first = _FIRST.match(text)
    if first is not None and first[0] in options:
        text = options[first[0]] + text[first.end() :]
    return _NAME.sub(lambda match: options.get(match[0], match[0]), text)


# ---- values
def shown(n: int) -> str:
    """Return a number as text for a message: Python refuses to write integers of over 4,300 digits."""
    return str(n) if abs(n) < 10**40 else f"{'-' if n < 0 else ''}a number of {n.bit_length()} bits"


def readable(name: str) -> str:
    r"""Return a file's name, or another name from outside, in a form that every output accepts.

    Bytes that are not UTF-8 (in Python, lone surrogates) and control characters become escapes: ``bad\xff``.
    """
    return _UNREADABLE.sub(lambda match: _escape(match[0]), name)


def _escape(character: str) -> str:
    code = ord(character)
    return (
        f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else character.encode("unicode_escape").decode()
    )


def quoted(value: object) -> str:
    """Return a value as Python writes it, for a message, cut after about 100 characters."""
    if isinstance(value, int):
        return shown(value) if type(value) is int else repr(value)
    is_text = isinstance(value, (str, bytes, bytearray))
    try:
        text = repr(value[:_MOST_QUOTED] if is_text and len(value) > _MOST_QUOTED else value)  # type: ignore[arg-type, index]
    except (ValueError, RecursionError):  # integers of over 4,300 digits in it; lists in lists
        return f"a {type(value).__name__} that is too large to show"
    if is_text and len(value) > _MOST_QUOTED:  # type: ignore[arg-type]
        return f"{text[:-1]}…{text[-1]}"
    return text if len(text) <= _MOST_QUOTED + 2 else f"{text[:_MOST_QUOTED]}…"


def size_text(n_bytes: float) -> str:
    """Return a number of bytes in readable form, such as ``1.5 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n_bytes >= size:
            return f"{n_bytes / size:,.1f} {unit}"
    return f"{n_bytes:.0f} bytes"


def listed(names: Iterable[object]) -> str:
    """Return values for a message, the first 20 of them."""
    texts = [quoted(name) for name in names]
    more = len(texts) - _MOST_LISTED
    return ", ".join(texts[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
