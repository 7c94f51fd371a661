"""Texts of the formats of JSON Schema, made by the grammar of the RFC that defines the format.

Nothing of the library is used. A name is that of the grammar's rule.
"""

from __future__ import annotations

import calendar
from datetime import date
from functools import cache

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

_HEX = "[0-9A-Fa-f]"
# RFC 3987's ucschar, and letters that people write
_UCSCHAR = (
    "äöüßéñçøåłčğžдляΩλ中文日本語한국어עבריתعربيहिन्दी\u00a1\u0101\ufdf0\uffef\U00010000\U0001f600\U000e1000"
)

# ---- RFC 3339
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]{1,12})?"
_FULL_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-]{_HOUR_MINUTE})"


def _leap_second(offset: int, fraction: str, utc: str) -> str:
    """Return 23:59:60 of UTC in a time zone that is some minutes ahead."""
    minutes = (23 * 60 + 59 + offset) % (24 * 60)
    zone = f"{'-' if offset < 0 else '+'}{abs(offset) // 60:02}:{abs(offset) % 60:02}" if offset else utc
    return f"{minutes // 60:02}:{minutes % 60:02}:60{fraction}{zone}"


def _run(units: str) -> str:
    """Neighbours among these, as in dur-hour = 1*DIGIT "H" [dur-minute]."""
    runs = [""]
    for unit in reversed(units):
        runs.append(f"[0-9]{{1,12}}{unit}(?:{runs[-1]})?")
    return f"(?:{'|'.join(runs[1:])})"


_DUR_TIME = f"T{_run('HMS')}"
_DURATION = f"P(?:{_run('YMD')}(?:{_DUR_TIME})?|{_DUR_TIME}|[0-9]{{1,12}}W)"

# ---- RFC 2673, 4291
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"
_H16 = f"{_HEX}{{1,4}}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"


def _up_to(n: int) -> str:
    return f"(?:(?:{_H16}:){{0,{n - 1}}}{_H16})?" if n else ""


_IPV6 = [f"(?:{_H16}:){{6}}{_LS32}", f"{_up_to(6)}::{_H16}", f"{_up_to(6)}::", f"(?:{_H16}:){{7}}:"]
_IPV6 += [f"{_up_to(n)}::(?:{_H16}:){{{5 - n}}}{_LS32}" for n in range(6)]
_ANY_IPV6 = f"(?:{'|'.join(_IPV6)})"


# ---- RFC 1123, 5321, 6531, 5890
def _domain(more: str = "") -> str:
    letter, inner = f"[0-9A-Za-z{more}]", f"[-0-9A-Za-z{more}]"
    label = f"{letter}(?:(?:{inner}{{0,18}}|{inner}{{61}}){letter})?"
    return rf"{label}(?:\.{label}){{0,9}}"


def _mailbox(more: str = "") -> str:
    atom = rf"[0-9A-Za-z!#$%&'*+\-/=?^_`{{|}}~{more}]{{1,30}}"
    quoted = rf'"(?:[ !#-\[\]-~{more}]|\\[ -~]){{0,9}}"'
    return rf"(?:{atom}(?:\.{atom}){{0,5}}|{quoted})@(?:{_domain(more)}|\[(?:{_IPV4}|IPv6:{_ANY_IPV6})\])"


# ---- RFC 3986, 3987
def _uri(more: str = "") -> tuple[list[str], list[str]]:
    """Kinds of URIs, and of references."""

    def text(also: str, low: int = 0) -> str:
        return rf"(?:[-0-9A-Za-z._~!$&'()*+,;={also}{more}]|%{_HEX}{{2}}){{{low},8}}"

    future = rf"\[[vV]{_HEX}{{1,2}}\.[-0-9A-Za-z._~!$&'()*+,;=:]{{1,5}}\]"
    hosts = [_IPV4, rf"\[{_ANY_IPV6}\]", future, text(""), rf"{_domain()}\.?"]
    user, port = f"(?:{text(':')}@)?", "(?::(?:|0|80|8080|50051|65535))?"
    path = f"(?:/{text(':@')}){{0,4}}"
    rest = rf"(?:\?{text(':@/?')})?(?:#{text(':@/?')})?"
    scheme = r"(?:https?|ftp|urn|git\+ssh|[A-Za-z][-0-9A-Za-z+.]{0,20}):"
    parts = [f"//{user}{host}{port}{path}{rest}" for host in hosts]  # of hier-part and relative-part
    parts.append(f"(?:/{text(':@', 1)}{path}|/?){rest}")
    uris = [scheme + part for part in (*parts, f"{text(':@', 1)}{path}{rest}")]
    return uris, [*uris, *parts, f"{text('@', 1)}{path}{rest}"]


# ---- RFC 6570, 6901, draft-bhutton-relative-json-pointer, 4648
_VARSPEC = r"[0-9A-Za-z_]{1,5}(?:\.[0-9A-Za-z_]{1,5}){0,2}(?:\*|:[1-9][0-9]{0,3})?"
_EXPRESSION = rf"\{{[+#./;?&=,!@|]?{_VARSPEC}(?:,{_VARSPEC}){{0,2}}\}}"
_TEMPLATE = rf"(?:[!#$&(-;=?-\[\]_a-z~{_UCSCHAR}]|%{_HEX}{{2}}|{_EXPRESSION}){{0,8}}"
_POINTER = r"(?:/(?:[^/~\x7f]|~[01]){0,5}){0,4}"  # llguidance has U+007F in JSON strings as an escape only
_RELATIVE = rf"(?:0|[1-9][0-9]{{0,6}})(?:[+-](?:0|[1-9][0-9]?))?(?:#|{_POINTER})"


def _base64(last: str) -> str:
    letter = f"[0-9A-Za-z{last}]"
    return f"(?:{letter}{{4}}){{0,5}}(?:{letter}[AQgw]==|{letter}{{2}}[AEIMQUYcgkosw048]=)?"


def _matching(*patterns: str) -> st.SearchStrategy[str]:
    return st.one_of([st.from_regex(pattern, fullmatch=True) for pattern in patterns])


def _last_day(day: date) -> date:
    return day.replace(day=calendar.monthrange(day.year, day.month)[1])


(_URI, _URI_REFERENCE), (_IRI, _IRI_REFERENCE) = _uri(), _uri(_UCSCHAR)
_LEAP_YEAR = st.dates(date(2000, 1, 1), date(2000, 12, 31))
_DATES = st.dates() | st.dates().map(_last_day) | _LEAP_YEAR.map(_last_day)
_LEAP_DAYS = st.sampled_from([f"{year}-02-29" for year in ("0000", "0004", "1904", "2000", "9996")])
_FULL_DATE = _DATES.map(str) | _LEAP_YEAR.map(lambda day: f"0000{day:-%m-%d}") | _LEAP_DAYS
_TIME = _matching(_FULL_TIME) | st.builds(
    _leap_second,
    st.just(0) | st.integers(-1439, 1439),
    _matching(_FRACTION),
    st.sampled_from(["Z", "z", "+00:00", "-00:00"]),
)
_VALUES = {
    "date": _FULL_DATE,
    "time": _TIME,
    "date-time": st.tuples(_FULL_DATE, st.sampled_from("Tt"), _TIME).map("".join),
    "duration": _matching(_DURATION),
    "email": _matching(_mailbox()),
    "hostname": _matching(_domain()).filter(lambda text: len(text) <= 253),
    "idn-email": _matching(_mailbox(_UCSCHAR)),
    "idn-hostname": _matching(_domain(_UCSCHAR)).filter(lambda text: len(text) <= 253),
    "ipv4": _matching(_IPV4),
    "ipv6": _matching(*_IPV6),
    "uri": _matching(*_URI),
    "uri-reference": _matching(*_URI_REFERENCE),
    "iri": _matching(*_IRI),
    "iri-reference": _matching(*_IRI_REFERENCE),
    "uri-template": _matching(_TEMPLATE),
    "json-pointer": _matching(_POINTER),
    "relative-json-pointer": _matching(_RELATIVE),
    "uuid": _matching(f"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"),
    "base64": _matching(_base64("+/")),
    "base64url": _matching(_base64("_-")),
}
GRAMMARS = sorted(_VALUES)


@cache
def values(name: str, n: int) -> list[str]:
    """``n`` texts of a format, the same each time on a quiet machine: Hypothesis counts how long it takes."""
    texts: list[str] = []

    @settings(
        max_examples=n,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(_VALUES[name])
    def collect(text: str) -> None:
        texts.append(text)

    collect()
    return texts
