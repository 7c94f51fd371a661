"""The enforced values of ``format`` in JSON schemas, each with a regular expression for the whole string.

Open this file to add a format or to change the texts that a format allows. A format allows every text that its RFC
allows. It also allows spellings that pydantic's type reads in the same notation, such as a time without a zone or a
UUID without hyphens. A format may be wider if exactness would cost time or exclude texts that people write. A format is
never narrower, because a mask that is too narrow silently turns correct data into wrong data. ``also`` names the
additional texts.

The expressions have the same meaning in Rust, which llguidance uses, and in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_DIGITS = "[0-9]+"
_HEX = "[0-9a-fA-F]"
# Characters beyond ASCII, without spaces, line ends and the dots of other scripts.
_WORDS = (
    r"\u00A1-\u167F\u1681-\u1FFF\u200B-\u2027\u202A-\u202E\u2030-\u205E\u2060-\u2FFF\u3001\u3003-\uD7FF"
    r"\uE000-\uFF0D\uFF0F-\uFF60\uFF62-\U0010FFFF"
)
_DOTS = r"\u3002\uFF0E\uFF61"
_BEYOND = _WORDS + _DOTS

# RFC 3339. A leap year is divisible by 4 and, if divisible by 100, by 400.
_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[048]|[2468][048]|[13579][26])00)"
_DATE = (
    r"(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    rf"02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_HOUR = r"(?:[01][0-9]|2[0-3])"
_MINUTE = r"[0-5][0-9]"
_FRACTION = rf"(?:[.,]{_DIGITS})?"
_SIGN = r"[+\u2212-]"
_ZONE = rf"(?:[zZ]|{_SIGN}{_HOUR}:?{_MINUTE})?"
# A leap second ends a day in UTC. In other zones, it comes at another time of the day.
_TIME = (
    rf"(?:{_HOUR}:{_MINUTE}(?::{_MINUTE}{_FRACTION})?{_ZONE}|23:59:60{_FRACTION}(?:[zZ]|{_SIGN}00:?00)?|"
    rf"{_HOUR}:{_MINUTE}:60{_FRACTION}{_SIGN}(?:(?:0[1-9]|1[0-9]|2[0-3]):?{_MINUTE}|00:?(?:0[1-9]|[1-5][0-9])))"
)
_DATE_TIME = rf"{_DATE}(?:[tT _]{_TIME})?"
_N = rf"{_DIGITS}{_FRACTION}"
_DURATION_TIME = rf"T(?:{_N}H(?:{_N}M)?(?:{_N}S)?|{_N}M(?:{_N}S)?|{_N}S)"
_DURATION_DATE = rf"(?:{_N}Y(?:{_N}M)?(?:{_N}W)?(?:{_N}D)?|{_N}M(?:{_N}W)?(?:{_N}D)?|{_N}W(?:{_N}D)?|{_N}D)"
_DURATION = rf"[+-]?P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})"

# RFC 4291
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_H = f"{_HEX}{{1,4}}"
_IPV6 = "|".join(
    [f"(?:{_H}:){{7}}{_H}", f"(?:{_H}:){{6}}{_IPV4}"]
    # "::" replaces one or more groups; an IPv4 address replaces two.
    + [f"::(?:{_H}:){{0,5}}{_IPV4}", f"::(?:{_H}(?::{_H}){{0,6}})?", f"(?:{_H}:){{7}}:"]
    + [f"{_H}(?::{_H}){{0,{n}}}::(?:{_H}(?::{_H}){{0,{5 - n}}})?" for n in range(6)]
    + [f"{_H}(?::{_H}){{0,{n}}}::(?:{_H}:){{0,{4 - n}}}{_IPV4}" for n in range(5)]
)
_BITS4 = r"(?:3[0-2]|[12]?[0-9])"
_BITS6 = r"(?:[1-9]?[0-9]|1[01][0-9]|12[0-8])"
# RFC 4007: the interface that an address belongs to, such as eth0.
_ZONED = rf"(?:{_IPV6})(?:%[!-$&-.0-~]+)?"
_NET4 = rf"{_IPV4}(?:/(?:{_BITS4}|{_IPV4}))?"
_NET6 = rf"{_ZONED}(?:/{_BITS6})?"


def _labels(letters: str, dots: str = ".", most: str = "*") -> str:
    """Return a pattern for a name of labels, with dots between labels and hyphens only between letters.

    ``most``: a quantifier for the characters between the first and the last letter of a label.
    """
    label = f"[{letters}](?:[{letters}-]{most}[{letters}])?"
    return rf"{label}(?:[{dots}]{label})*"


# RFC 1123, 5321 (and 6531)
_LETTERS = "a-zA-Z0-9"
_ATOM = rf"[{_LETTERS}!#$%&'*+/=?^_`{{|}}~{_BEYOND}-]+"
_QUOTED = rf'"(?:[ !#-\[\]-~{_BEYOND}]|\\[ -~])*"'
_EMAIL = (
    rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@"
    rf"(?:{_labels(_LETTERS + _BEYOND)}|\[(?:{_IPV4}|[iI][pP][vV]6:(?:{_IPV6}))\])"
)

# RFC 3986 and 3987. Many links that people write have brackets, braces, "|" and "^".
_ENCODED = f"%{_HEX}{{2}}"
_IN_NAME = rf"{_LETTERS}._~!$&'()*+,;={_BEYOND}"
_NO_COLON = rf"{_IN_NAME}@|^{{}}\[\]"
_SEGMENT = rf"(?:[{_NO_COLON}:-]|{_ENCODED})"
_PATH = rf"(?:[{_NO_COLON}:/-]|{_ENCODED})*"
_REST = rf"(?:\?(?:[{_NO_COLON}:/?-]|{_ENCODED})*)?(?:#(?:[{_NO_COLON}:/?-]|{_ENCODED})*)?"
_USER = rf"(?:(?:[{_IN_NAME}:-]|{_ENCODED})*@)?"
_HOST = (
    rf"(?:\[(?:(?:{_IPV6})(?:%25(?:[{_LETTERS}._~-]|{_ENCODED})+)?|[vV]{_HEX}+\.[{_LETTERS}._~!$&'()*+,;=:-]+)\]|"
    rf"(?:[{_IN_NAME}-]|{_ENCODED})*)"
)
_PORT = "(?::[0-9]*)?"
_SCHEME = rf"[a-zA-Z][{_LETTERS}+.-]*"
_AUTHORITY = rf"//{_USER}{_HOST}{_PORT}(?:/{_PATH})?"
_ABSOLUTE = rf"/(?:{_SEGMENT}{_PATH})?"
_URI = rf"{_SCHEME}:(?:{_AUTHORITY}|{_ABSOLUTE}|(?:{_SEGMENT}{_PATH})?){_REST}"
_RELATIVE = rf"(?:{_AUTHORITY}|{_ABSOLUTE}|(?:(?:[{_NO_COLON}-]|{_ENCODED})+(?:/{_PATH})?)?){_REST}"
_MULTI_HOST = rf"{_SCHEME}://{_USER}{_HOST}{_PORT}(?:,{_HOST}{_PORT})*(?:/{_PATH})?{_REST}"

# RFC 6570
_VARIABLE = rf"(?:[{_LETTERS}_]|{_ENCODED})(?:\.?(?:[{_LETTERS}_]|{_ENCODED}))*(?::[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = (
    rf"(?:[!#$&'()*+,./0-;=?-\[\]_a-z~{_BEYOND}-]|{_ENCODED}|"
    rf"\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)

# RFC 6901 and draft-bhutton-relative-json-pointer
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_NUMBER = "(?:0|[1-9][0-9]*)"


def _uuid(version: str = _HEX, variant: str = _HEX) -> str:
    groups = (
        f"{_HEX}{{8}}",
        f"{_HEX}{{4}}",
        f"{version}{_HEX}{{3}}",
        f"{variant}{_HEX}{{3}}",
        f"{_HEX}{{12}}",
    )
    hyphenated = "-".join(groups)
    return rf"(?:urn:uuid:)?{hyphenated}|\{{{hyphenated}\}}|{''.join(groups)}"


def _base64(more: str, padding: str = "") -> str:
    """Return a pattern for groups of four characters. ``more``: the characters beyond letters and digits.

    MIME, and therefore Python, writes a newline after some groups and at the end. ``padding``: a quantifier for the
    ``=`` at the end.
    """
    character = f"[A-Za-z0-9{more}]"
    last = rf"(?:{character}{{2}}(?:==){padding}|{character}{{3}}={padding})"
    return rf"(?:{character}{{4}}(?:\r?\n)?)*(?:{last}(?:\r?\n)?)?"


@dataclass(frozen=True)
class Format:
    """An enforced format.

    ``pattern``: a regular expression for the whole string. ``source``: the definition of the format. ``also``: texts
    that the pattern allows beyond the definition.
    """

    pattern: str
    source: str
    also: str = ""


_TIMES = "no zone, no seconds, a zone without colon, `,` for `.`; a leap second at any time of a zone but UTC"
_LINKS = "`[`, `]`, `{`, `}`, `|` and `^` in path, query and fragment"
_ASCII_LINKS = f"characters beyond ASCII; {_LINKS}"
_ZONE_OF = "a zone (RFC 4007), as in `fe80::1%eth0`"
_NETWORKS = "bits of the host, a mask in place of the number of bits"
_LINES = "a line's end after each group of four (RFC 2045)"
FORMATS: Final[dict[str, Format]] = {
    "date": Format(_DATE, "RFC 3339: days of the calendar"),
    "time": Format(_TIME, "RFC 3339", _TIMES),
    "date-time": Format(_DATE_TIME, "RFC 3339", f"only a date; a space or `_` for `T`; {_TIMES}"),
    "duration": Format(
        _DURATION,
        "RFC 3339, appendix A",
        "signs, fractions, units left out between others, weeks beside others",
    ),
    "email": Format(_EMAIL, "RFC 5321", "characters beyond ASCII (RFC 6531); any length"),
    "idn-email": Format(_EMAIL, "RFC 6531", "any length"),
    "hostname": Format(
        rf"{_labels(_LETTERS, most='{0,61}')}\.?", "RFC 1123", "a dot at the end; over 253 characters"
    ),
    "idn-hostname": Format(
        rf"{_labels(_LETTERS + _WORDS, f'.{_DOTS}')}[.{_DOTS}]?",
        "RFC 5890",
        "a dot at the end; labels of any length; what IDNA forbids for single characters and directions",
    ),
    "ipv4": Format(_IPV4, "RFC 2673"),
    "ipv6": Format(_ZONED, "RFC 4291", _ZONE_OF),
    "uri": Format(_URI, "RFC 3986", _ASCII_LINKS),
    "uri-reference": Format(f"{_URI}|{_RELATIVE}", "RFC 3986", _ASCII_LINKS),
    "iri": Format(_URI, "RFC 3987", _LINKS),
    "iri-reference": Format(f"{_URI}|{_RELATIVE}", "RFC 3987", _LINKS),
    "uri-template": Format(_TEMPLATE, "RFC 6570"),
    "json-pointer": Format(_POINTER, "RFC 6901"),
    "relative-json-pointer": Format(
        rf"{_NUMBER}(?:[+-]{_NUMBER})?(?:#|{_POINTER})", "draft-bhutton-relative-json-pointer"
    ),
    "uuid": Format(_uuid(), "RFC 9562", "no hyphens, braces, `urn:uuid:`"),
    # Pydantic writes the following formats. JSON Schema does not define them.
    **{
        f"uuid{n}": Format(_uuid(str(n), "[89abAB]"), "RFC 9562, of that version", "as `uuid`")
        for n in range(1, 9)
    },
    "multi-host-uri": Format(_MULTI_HOST, "RFC 3986, with several hosts between commas", _ASCII_LINKS),
    "ipvanyaddress": Format(f"{_IPV4}|{_ZONED}", "IPv4 or IPv6", _ZONE_OF),
    "ipv4network": Format(_NET4, "RFC 4632", _NETWORKS),
    "ipv6network": Format(_NET6, "RFC 4291", f"bits of the host; {_ZONE_OF}"),
    "ipvanynetwork": Format(f"{_NET4}|{_NET6}", "IPv4 or IPv6", f"{_NETWORKS}; {_ZONE_OF}"),
    "ipv4interface": Format(_NET4, "RFC 4632", _NETWORKS),
    "ipv6interface": Format(_NET6, "RFC 4291", f"bits of the host; {_ZONE_OF}"),
    "ipvanyinterface": Format(f"{_NET4}|{_NET6}", "IPv4 or IPv6", f"{_NETWORKS}; {_ZONE_OF}"),
    "base64": Format(_base64("+/"), "RFC 4648, with padding", _LINES),
    # JWT, JWK and zod write base64url without padding; Python writes it with padding.
    "base64url": Format(_base64("_-", "?"), "RFC 4648, section 5", f"no padding; {_LINES}"),
}
# Formats that allow every string.
ANY_STRING: Final = frozenset({"path", "file-path", "directory-path", "binary", "password"})
