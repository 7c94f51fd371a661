"""Lists the formats of strings that are enforced, each as a regular expression for the whole string.

A format is an annotation in JSON Schema: formats that are not listed here are ignored. Those listed allow a subset of
what their RFC allows, so that readers in Python accept every text: no year 0000, no leap seconds, no numbers that
overflow, host names whose last label is a word.
"""

from __future__ import annotations

from typing import Final

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
# Divisible by 4, and by 400 if by 100.
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    rf"02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_ZONE = r"(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?{_ZONE}"
_N = "[0-9]{1,6}"
_DURATION_TIME = rf"T(?:{_N}H(?:{_N}M(?:{_N}S)?)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION_DATE = rf"(?:[0-9]{{1,4}}Y(?:{_N}M(?:{_N}D)?)?|{_N}M(?:{_N}D)?|{_N}D)"
_DURATION = rf"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_N}W)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_WORD_LABEL = r"[a-zA-Z](?:[a-zA-Z0-9]{0,61}[a-zA-Z0-9])?"
_DOMAIN = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9]{0,30}[a-zA-Z0-9])?\.){1,4}[a-zA-Z]{2,24}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]"
_EMAIL = rf"{_ATOM}{{1,24}}(?:\.{_ATOM}{{1,24}}){{0,1}}@{_DOMAIN}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_H}:){{7}}{_H}"]
    + [f"(?:{_H}(?::{_H}){{0,{n}}})?::(?:{_H}(?::{_H}){{0,{5 - n}}})?" for n in range(6)]
    + [f"{_H}(?::{_H}){{6}}::"]
)
_HEX = "[0-9a-fA-F]"
_PORT = r"(?::[1-9][0-9]{0,3})?"
_SEGMENT = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_QUERY = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@/?-]|%[0-9a-fA-F]{2})"
_USER = r"(?:[a-zA-Z0-9._~-]{1,32}(?::[a-zA-Z0-9._~-]{1,32})?@)?"
_HOST = rf"(?:(?:{_LABEL}\.)*{_WORD_LABEL}|{_IPV4})"
_REST = rf"(?:\?{_QUERY}*)?(?:#{_QUERY}*)?"
_SCHEME = r"[a-zA-Z][a-zA-Z0-9+.-]{0,15}"
_URI = rf"{_SCHEME}:(?://{_USER}{_HOST}{_PORT}(?:/{_SEGMENT}*)*|{_SEGMENT}+(?:/{_SEGMENT}*)*){_REST}"


def _uuid(version: str = _HEX, variant: str = _HEX) -> str:
    return f"{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-{variant}{_HEX}{{3}}-{_HEX}{{12}}"


FORMATS: Final[dict[str, str]] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}[tT]{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": rf"(?:{_LABEL}\.){{0,2}}{_WORD_LABEL}",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uuid": _uuid(),
    # Not in JSON Schema; pydantic writes them.
    **{f"uuid{n}": _uuid(str(n), "[89abAB]") for n in range(1, 9)},
    "ipvanyaddress": f"{_IPV4}|{_IPV6}",
    "ipv4network": rf"{_IPV4}(?:/32)?",
    "ipv6network": rf"(?:{_IPV6})(?:/128)?",
    "ipvanynetwork": rf"{_IPV4}(?:/32)?|(?:{_IPV6})(?:/128)?",
    "ipv4interface": rf"{_IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?",
    "ipv6interface": rf"(?:{_IPV6})(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?",
    "ipvanyinterface": rf"{_IPV4}(?:/(?:[12]?[0-9]|3[0-2]))?|(?:{_IPV6})(?:/(?:[1-9]?[0-9]|1[01][0-9]|12[0-8]))?",
    "base64": r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?",
    "base64url": r"(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]=)?",
}
