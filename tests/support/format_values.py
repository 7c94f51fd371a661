"""Random texts of the formats of JSON Schema, each made by the grammar of the RFC that defines the format.

Nothing of the library is used. A rule is a function of a ``random.Random``; its name is that of the grammar's rule.
"""

from __future__ import annotations

import calendar
import string
from collections.abc import Callable
from random import Random
from typing import Final

Rule = Callable[[Random], str]
ALPHA = string.ascii_letters
DIGIT = string.digits
HEXDIG = string.hexdigits
ALNUM = ALPHA + DIGIT
SUB_DELIMS = "!$&'()*+,;="
UNRESERVED = ALNUM + "-._~"
# RFC 3987's ucschar, and letters that people write
UCSCHAR = (
    "äöüßéñçøåłčğžдляΩλ中文日本語한국어עבריתعربيहिन्दी\u00a1\u0101\ufdf0\uffef\U00010000\U0001f600\U000e1000"
)


def chars(rng: Random, alphabet: str, low: int, high: int) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(low, high)))


def maybe(rng: Random, rule: Rule, odds: float = 0.5) -> str:
    return rule(rng) if rng.random() < odds else ""


# ---- RFC 3339
def full_date(rng: Random) -> str:
    year = rng.choice([rng.randint(0, 9999), rng.randint(1900, 2100), 0, 4, 400, 1900, 2000, 9999])
    month = rng.randint(1, 12)
    is_leap = calendar.isleap(year or 400)
    days = [31, 29 if is_leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
    return f"{year:04}-{month:02}-{rng.choice([1, days[month - 1], rng.randint(1, days[month - 1])]):02}"


def full_time(rng: Random) -> str:
    fraction = maybe(rng, lambda r: "." + chars(r, DIGIT, 1, 12))
    if rng.random() < 0.1:  # a leap second: 23:59:60 of UTC
        offset = rng.randint(-23 * 60 - 59, 23 * 60 + 59)
        minutes = (23 * 60 + 59 + offset) % (24 * 60)
        zone = f"{'-' if offset < 0 else '+'}{abs(offset) // 60:02}:{abs(offset) % 60:02}"
        if offset == 0:
            zone = rng.choice(["Z", "z", "+00:00", "-00:00"])
        return f"{minutes // 60:02}:{minutes % 60:02}:60{fraction}{zone}"
    zone = rng.choice(["Z", "z", f"{rng.choice('+-')}{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"])
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}{fraction}{zone}"


def date_time(rng: Random) -> str:
    return full_date(rng) + rng.choice("Tt") + full_time(rng)


def duration(rng: Random) -> str:
    def number(unit: str) -> str:
        return chars(rng, DIGIT, 1, rng.choice([1, 2, 4, 12])) + unit

    def run(units: str) -> str:  # neighbours, as dur-hour = 1*DIGIT "H" [dur-minute]
        first = rng.randrange(len(units))
        return "".join(number(unit) for unit in units[first : rng.randint(first + 1, len(units))])

    kind = rng.randrange(4)
    if kind == 0:
        return "P" + number("W")
    date = run("YMD") if kind != 1 else ""
    return f"P{date}T{run('HMS')}" if kind != 2 else f"P{date}"


# ---- RFC 1123, 5321, 6531, 5890
def sub_domain(rng: Random, letters: str = ALNUM) -> str:
    n = rng.choice([1, 2, 3, 8, 20, 63])
    label = "".join(rng.choices(letters + "-", k=n))
    return rng.choice(letters) + label[1:-1] + rng.choice(letters) if n > 1 else rng.choice(letters)


def domain(rng: Random, letters: str = ALNUM) -> str:
    labels = [sub_domain(rng, letters) for _ in range(rng.choice([1, 2, 3, 4, 7, 20]))]
    while sum(map(len, labels)) + len(labels) > 254:
        del labels[0]
    return ".".join(labels)


def u_domain(rng: Random) -> str:
    return domain(rng, ALNUM + UCSCHAR)


def local_part(rng: Random, more: str = "") -> str:
    if rng.random() < 0.2:
        return '"' + "".join(_quoted(rng, more) for _ in range(rng.randint(0, 9))) + '"'
    atext = ALNUM + "!#$%&'*+-/=?^_`{|}~" + more
    return ".".join(
        chars(rng, atext, 1, rng.choice([1, 3, 12, 30])) for _ in range(rng.choice([1, 1, 2, 3, 6]))
    )


def _quoted(rng: Random, more: str) -> str:
    if rng.random() < 0.2:
        return "\\" + chr(rng.randint(32, 126))
    qtext = "".join(chr(n) for n in range(32, 127) if chr(n) not in '"\\')
    return rng.choice(qtext + more)


def mailbox(rng: Random) -> str:
    literal = rng.random() < 0.1
    address = "IPv6:" + ipv6(rng) if rng.random() < 0.5 else ipv4(rng)
    return f"{local_part(rng)}@{f'[{address}]' if literal else domain(rng)}"


def u_mailbox(rng: Random) -> str:
    return f"{local_part(rng, UCSCHAR)}@{u_domain(rng)}" if rng.random() < 0.8 else mailbox(rng)


# ---- RFC 2673, 4291
def ipv4(rng: Random) -> str:
    return ".".join(str(rng.choice([0, 1, 9, 10, 99, 100, 127, 199, 200, 249, 250, 255])) for _ in range(4))


def ipv6(rng: Random) -> str:
    ends_in_ipv4 = rng.random() < 0.25
    n = 6 if ends_in_ipv4 else 8
    groups = [chars(rng, HEXDIG, 1, 4) for _ in range(n)]
    if ends_in_ipv4:
        groups.append(ipv4(rng))
    if rng.random() < 0.3:
        return ":".join(groups)
    first = rng.randint(0, n - 1)
    last = rng.randint(first + 1, n)  # these are zero
    return ":".join(groups[:first]) + "::" + ":".join(groups[last:])


# ---- RFC 3986, 3987
class Uri:
    def __init__(self, more: str = "") -> None:
        self._more = more

    def _text(self, rng: Random, more: str, low: int = 0, high: int = 8) -> str:
        alphabet = UNRESERVED + SUB_DELIMS + more + self._more
        return "".join(
            "%" + chars(rng, HEXDIG, 2, 2) if rng.random() < 0.1 else rng.choice(alphabet)
            for _ in range(rng.randint(low, high))
        )

    def host(self, rng: Random) -> str:
        future = f"[{rng.choice('vV')}{chars(rng, HEXDIG, 1, 2)}.{chars(rng, UNRESERVED + SUB_DELIMS + ':', 1, 5)}]"
        return rng.choice(
            [ipv4(rng), f"[{ipv6(rng)}]", future, self._text(rng, ""), domain(rng), domain(rng) + "."]
        )

    def authority(self, rng: Random) -> str:
        user = maybe(rng, lambda r: self._text(r, ":") + "@", 0.3)
        port = maybe(rng, lambda r: ":" + r.choice(["", "0", "80", "8080", "50051", "65535"]))
        return f"{user}{self.host(rng)}{port}"

    def path_abempty(self, rng: Random) -> str:
        return "".join("/" + self._text(rng, ":@") for _ in range(rng.randint(0, 4)))

    def hier_part(self, rng: Random) -> str:
        return rng.choice(
            [
                f"//{self.authority(rng)}{self.path_abempty(rng)}",
                f"//{self.authority(rng)}{self.path_abempty(rng)}",
                f"/{self._text(rng, ':@', 1)}{self.path_abempty(rng)}",
                f"{self._text(rng, ':@', 1)}{self.path_abempty(rng)}",
                "/",
                "",
                f"//{self.path_abempty(rng)}",
            ]
        )

    def rest(self, rng: Random) -> str:
        query = maybe(rng, lambda r: "?" + self._text(r, ":@/?"))
        return query + maybe(rng, lambda r: "#" + self._text(r, ":@/?"))

    def uri(self, rng: Random) -> str:
        scheme = rng.choice(
            [
                "http",
                "https",
                "ftp",
                "urn",
                "git+ssh",
                "a",
                rng.choice(ALPHA) + chars(rng, ALNUM + "+-.", 0, 20),
            ]
        )
        return f"{scheme}:{self.hier_part(rng)}{self.rest(rng)}"

    def reference(self, rng: Random) -> str:
        if rng.random() < 0.3:
            return self.uri(rng)
        relative_part = [
            f"//{self.authority(rng)}{self.path_abempty(rng)}",
            f"/{self._text(rng, ':@', 1)}{self.path_abempty(rng)}",
            f"{self._text(rng, '@', 1)}{self.path_abempty(rng)}",
            "/",
            "",
        ]
        return rng.choice(relative_part) + self.rest(rng)


# ---- RFC 6570, 6901, draft-bhutton-relative-json-pointer, RFC 9562, 4648
def uri_template(rng: Random) -> str:
    def varname() -> str:
        return ".".join(chars(rng, ALNUM + "_", 1, 5) for _ in range(rng.randint(1, 3)))

    def expression() -> str:
        modifier = ["", "", "*", f":{rng.randint(1, 9999)}"]
        names = ",".join(varname() + rng.choice(modifier) for _ in range(rng.randint(1, 3)))
        return "{" + maybe(rng, lambda r: r.choice("+#./;?&=,!@|")) + names + "}"

    literals = [chr(n) for n in range(33, 127) if chr(n) not in "\"'%<>\\^`{|}"] + [*UCSCHAR]
    parts = []
    for _ in range(rng.randint(0, 8)):
        encoded = "%" + chars(rng, HEXDIG, 2, 2)
        parts.append(rng.choice([expression(), rng.choice(literals), encoded]))
    return "".join(parts)


def json_pointer(rng: Random) -> str:
    plain = [
        chr(rng.choice([rng.randint(0, 0x2E), rng.randint(0x30, 0x7D), rng.randint(0x80, 0xD7FF)]))
        for _ in range(6)
    ]
    return "".join(
        "/" + "".join(rng.choice([*plain, "~0", "~1", "a", "0"]) for _ in range(rng.randint(0, 5)))
        for _ in range(rng.randint(0, 4))
    )


def relative_json_pointer(rng: Random) -> str:
    up = str(rng.choice([0, 1, 7, 10, rng.randint(0, 10**6)]))
    step = maybe(rng, lambda r: r.choice("+-") + str(r.randint(0, 20)), 0.3)
    return up + step + ("#" if rng.random() < 0.3 else json_pointer(rng))


def uuid(rng: Random) -> str:
    return "-".join(chars(rng, HEXDIG, n, n) for n in (8, 4, 4, 4, 12))


def base64(rng: Random, last: str = "+/") -> str:
    alphabet = ALNUM + last
    quads = chars(rng, alphabet, 0, 5) * 4
    return quads + rng.choice(
        [
            "",
            chars(rng, alphabet, 1, 1) + rng.choice("AQgw") + "==",
            chars(rng, alphabet, 2, 2) + rng.choice("AEIMQUYcgkosw048") + "=",
        ]
    )


_URI, _IRI = Uri(), Uri(UCSCHAR)
VALUES: Final[dict[str, Rule]] = {
    "date": full_date,
    "time": full_time,
    "date-time": date_time,
    "duration": duration,
    "email": mailbox,
    "idn-email": u_mailbox,
    "hostname": domain,
    "idn-hostname": u_domain,
    "ipv4": ipv4,
    "ipv6": ipv6,
    "uri": _URI.uri,
    "uri-reference": _URI.reference,
    "iri": _IRI.uri,
    "iri-reference": _IRI.reference,
    "uri-template": uri_template,
    "json-pointer": json_pointer,
    "relative-json-pointer": relative_json_pointer,
    "uuid": uuid,
    "base64": base64,
    "base64url": lambda rng: base64(rng, "-_"),
}
