"""``format`` in JSON schemas: no value that its RFC allows, that people write or that pydantic reads is left out.

``nox -s schemas`` makes thousands of values for each format and holds the masks against the JSON-Schema-Test-Suite,
too; elsewhere it is a hundred.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import logging
import os
import re
import sys
import uuid
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pydantic
import pytest
from pydantic import TypeAdapter
from support.format_values import GRAMMARS, values
from support.guided import accepts

import llamapipe as lp
from llamapipe.chat._lark import json_value
from llamapipe.structured.compile import GuideFactory, compile_guide
from llamapipe.structured.formats import ANY_STRING, FORMATS

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from format_table import PAGE, with_table

N_VALUES = int(os.environ.get("LLAMAPIPE_FORMAT_VALUES", "100"))
SUITE = os.environ.get("LLAMAPIPE_SCHEMA_SUITE", "")


def compiled(demo: lp.Model, name: str, **more: Any) -> GuideFactory:
    return compile_guide(demo, json_schema={"type": "string", "format": name, **more})


def allows(demo: lp.Model, factory: GuideFactory, text: str) -> bool:
    with factory.new() as guide:
        return accepts(demo, guide, json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize("name", GRAMMARS)
def test_values_made_by_the_grammar_of_the_rfc(demo: lp.Model, name: str) -> None:
    factory = compiled(demo, name)
    for text in values(name, N_VALUES):
        assert allows(demo, factory, text), text


WRITTEN: dict[str, list[str]] = {
    "email": [
        "john.m.smith@my-company.com", "anna.k.lee@uni-mainz.de", "a.b.c.d.e@x.io", "a+b+c@mail.example.co.uk",
        "first.last+tag@sub-domain.department.uni-berlin.de", "x@123.com", "o'brien@irish-mail.ie", "root@localhost",
        "user@xn--mller-kva.example", "very.long.name.with.many.dots.in.it@a.b.c.d.e.f.g.example.museum",
        "müller@büro-süd.de", '"john doe"@example.org', "me@[192.168.0.1]", "me@[IPv6:2001:db8::1]",
        "no-reply_99@mail-out-2.eu-west-1.amazonses.com", "a@b", "#!$%&'*+-/=?^_`{}|~@example.org", "1@2.de",
    ],
    "hostname": [
        "www.bbc.co.uk", "localhost", "my-service", "db-01.eu-central-1.rds.amazonaws.com", "xn--bcher-kva.example",
        "3com.com", "a.b.c.d.e.f.g.h.example.org", "example.xn--p1ai", "ec2-54-210-1-2.compute-1.amazonaws.com", "x",
        "127.0.0.1", "example.com.", f"{'a' * 63}.de", "0", "node1", "kube-dns.kube-system.svc.cluster.local",
    ],
    "idn-hostname": ["münchen.de", "例え.テスト", "пример.рф", "www.straße-süd.example", "실례.테스트", "a.b"],
    "uri": [
        "http://127.0.0.1:11434/api", "https://grpc.example.com:50051/v1", "http://my-service:8080/health",
        "file:///etc/hosts", "http://[::1]:65535/", "http://[2001:db8::ff00:42:8329]/x", "https://user:p%40ss@host/a",
        "https://a.b.c.d.e.f.example.org/", "https://example.xn--p1ai/", "http://localhost", "http://localhost:3000",
        "mailto:john.m.smith@my-company.com", "urn:isbn:0451450523", "tel:+49-30-1234567", "data:text/plain,hi%20you",
        "git+ssh://git@github.com:22/a/b.git", "ldap://[2001:db8::7]/c=GB?objectClass?one",
            "redis://:pw@cache-1:6379/0",
        "https://de.wikipedia.org/wiki/München", "https://example.com/a?b[]=1&c=%C3%BC#frag/ment?", "about:blank",
        "https://fonts.example.com/css?family=A|B", "jdbc:postgresql://db-1.internal:5432/app", "s3://my-bucket/k.txt",
        "https://very-long-subdomain-name-that-people-use-for-previews-1234567.vercel.app/", "ws://my_host:1/",
        "x-very-long-scheme-of-a-custom-application-123:open", "https://example.com./", "chrome://settings/?x",
        "https://api.example.com/users/{id}", "http://192.168.1.20:11434/v1", "magnet:?xt=urn:btih:c12fe1c06bba254a",
    ],
    "uri-reference": ["../a/b.html", "#top", "?q=1", "/a/b", "//cdn.example.com/x.js", "", "a/b:c", "https://x.y/z"],
    "iri": ["https://例え.テスト/パス?q=値#部", "http://müller.de/straße"],
    "iri-reference": ["/straße", "../ü#ö"],
    "uri-template": ["https://api.example.com/users/{id}", "/a{?q*,page:3}{#frag}", "{+path}/x{;a,b.c}", "/plain"],
    "ipv4": ["0.0.0.0", "255.255.255.255", "192.168.1.20"],
    "ipv6": ["::", "::1", "::ffff:1.2.3.4", "64:ff9b::192.0.2.33", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "FE80::ab",
             "1:2:3:4:5:6:77.77.88.88", "1::8", "2001:db8:85a3:0:0:8a2e:370:7334", "fe80::1%eth0", "fe80::a%12"],
    "date": ["2024-02-29", "0000-02-29", "9999-12-31"],
    "time": ["08:30:06Z", "23:59:60Z", "23:59:59.123456789012-05:30", "08:30:06", "08:30", "15:59:60-08:00", "08:30z"],
    "date-time": [
        "2024-02-29T23:59:59Z", "2024-12-31t00:00:00.1+14:00", "1998-12-31T23:59:60Z", "1990-12-31T15:59:60-08:00",
        "2024-05-01T10:00:00", "2024-05-01 10:00", "2024-05-01T10:00:00+0100", "2024-05-01",
    ],
    "duration": ["P1Y2M3DT4H5M6S", "PT36H", "P4W", "PT0.5S", "-P1D", "P1Y3D", "PT1H30S", "P2M1W", "P1000000000D",
        "PT0S"],
    "uuid": ["2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2EB8AA08AA9811EAB4AA73B441D16380",
        "00000000-0000-0000-0000-000000000000",
             "urn:uuid:2eb8aa08-aa98-11ea-b4aa-73b441d16380"],
    "uuid4": ["98d80576-482e-427f-8434-7f86890ab222"],
    "json-pointer": ["", "/a~1b/0", "/", "//x", "/ä\"\\"],
    "relative-json-pointer": ["0", "1/a", "2#", "0+1/b"],
    "multi-host-uri": ["postgres://u:p@h-1:5432,h-2:5433/db?x=y", "mongodb://[::1],b.example.com:27017",
        "redis://localhost"],
    "ipv4network": ["10.0.0.0/8", "192.168.0.0/255.255.0.0", "10.0.0.1"],
    "ipv6network": ["2001:db8::/32", "::/0", "fe80::1%eth0/64"],
    "base64": ["", "aGk=", "YQ==", "aGVsbG8h", "a+/=", "aGVsbG8h\n", "aGk=\n", "aGVs\r\nbG8h"],
    "base64url": ["", "a-_=", "a-_", "YQ", "YQ==", "eyJhbGciOiJIUzI1NiJ9"],
}  # fmt: skip
WRONG: dict[str, list[str]] = {
    "email": ["a", "@b.de", "a@", ".a@b.de", "a.@b.de", "a..b@c.de", "a@b..de", "a@-b.de", "a@b-.de", "a b@c.de",
              "a@b c.de", "a@b.de.", "a@b_c.de", "a@[1.2.3]", "a@[256.1.1.1]", "a@b@c.de", "John <a@b.de>", "a@b.de\n"],
    "hostname": ["", ".", "-a.com", "a-.com", "a_b.com", "a..b", ".a", f"{'a' * 64}.de", "a b", "münchen.de"],
    "uri": ["", "//example.com", "/a", "abc", "a b:c", "1a:b", "http://a b/", "http://a/\\", "http://a/<b>",
        "http://[::1",
            "http://[:1]/", "http://a:b/", "http://a/%zz", "http://a/#b#c", 'http://a/"', ":x", "http://a/\n"],
    "uri-reference": ["a b", "%", "\\\\a\\b", "http://a:b/"],
    "uri-template": ["{", "}", "{a", "{a b}", "{a:0}", "{a,}", "a b", "{=%}"],
    "ipv4": ["256.0.0.1", "01.0.0.1", "1.1.1", "1.1.1.1.", "1"],
    "ipv6": ["", ":", ":::", "1::2::3", "12345::", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", "1:2:3:4:5:6:7:8::",
        "::1.2.3.256",
             "1:2:3:4:5:6:7:1.2.3.4", "fe80::1%", "::1%a%b", "::1%a b", "::1%a/64", "::g"],
    "date": ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "2024-1-1", "20240101", "24-01-01", "2024-01-01T"],
    "time": ["24:00:00Z", "08:60:00Z", "08:30:61Z", "22:59:60Z", "23:58:60+00:00", "8:30:06Z", "08:30:06+24:00",
        "08", ""],
    "date-time": ["2023-02-29T00:00:00Z", "2024-02-29T24:00:00Z", "2024-02-29T", "2024-02-29T10Z", "1700000000",
        "2024"],
    "duration": ["P", "PT", "PT1D", "1Y", "P1", "P1YT", "P2D1Y", "P1D2H", "p1d", "01:30:00"],
    "uuid": ["2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08-aa98-11ea-b4aa73b441d16380", "g" * 32, ""],
    "uuid4": ["2eb8aa08-aa98-11ea-b4aa-73b441d16380", "98d80576-482e-427f-c434-7f86890ab222"],
    "json-pointer": ["a", "/~", "/~2", "#/a"],
    "relative-json-pointer": ["", "/a", "-1", "01", "0##", "1a"],
    "ipv4network": ["10.0.0.0/33", "10.0.0/8"],
    "ipv6network": ["::/129"],
    "base64": ["aGk", "a", "a-_=", "aG k", "=aGk", "\n", "aGk=\n\n", "aG\nk="],
    "base64url": ["a+/=", "a", "YQ=", "abcde"],
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() | WRONG.keys()))
def test_what_people_write(demo: lp.Model, name: str) -> None:
    factory = compiled(demo, name)
    for text in WRITTEN.get(name, ()):
        assert allows(demo, factory, text), text
    for text in WRONG.get(name, ()):
        assert not allows(demo, factory, text), text


def test_dates_and_addresses_are_exact(demo: lp.Model) -> None:
    def is_date(text: str) -> bool:
        try:
            return bool(datetime.date.fromisoformat(text.replace("0000", "2000")))
        except ValueError:
            return False

    date = re.compile(FORMATS["date"].pattern)
    days = [f"{year:04}-02-{day}" for year in range(10_000) for day in (28, 29)]
    days += [f"2023-{month:02}-{day:02}" for month in range(14) for day in range(33)]
    assert all(bool(date.fullmatch(day)) == is_date(day) for day in days)
    rng = Random(1)
    for name, kind, letters in (
        ("ipv6", ipaddress.IPv6Address, "0:1f::.1"),
        ("ipv4", ipaddress.IPv4Address, "0125.."),
    ):
        address = re.compile(FORMATS[name].pattern)
        whole = values(name, 500)
        for text in whole + [mutated(rng, text, letters) for text in whole * 11]:
            try:
                kind(text)
                is_right = True
            except ValueError:
                is_right = False
            assert bool(address.fullmatch(text)) == is_right, text


def mutated(rng: Random, text: str, letters: str) -> str:
    """The text with one to three changes."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(["", rng.choice(letters)]) + text[at + rng.randint(0, 1) :]
    return text


# ---- pydantic
UNITS = (
    "[+-]?P"
    + "".join(f"(?:[0-9.,]+{unit})?" for unit in "YMWD")
    + "(?:T(?:[0-9.,]+H)?(?:[0-9.,]+M)?(?:[0-9.,]+S)?)?"
)
NUMBER = r"[+-]?[0-9.,_]*"  # read as seconds since 1970
TYPES: dict[str, tuple[Any, str, str]] = {
    # the type, letters for changes, and texts that it reads although they are of another notation, or repairs
    "date": (datetime.date, "0129-", rf"{NUMBER}|.{{10}}[T _].*"),
    "time": (datetime.time, "0123:.+-Z ", NUMBER),
    "date-time": (datetime.datetime, "0123:.+-TZ _", NUMBER),
    "duration": (datetime.timedelta, "019PTYMWDHS-", rf"(?!{UNITS}$).*|.*T|.*[.,](?![0-9]).*"),
    "uuid": (uuid.UUID, "09af-{}", ""),
    "uuid4": (pydantic.UUID4, "09af-", ""),
    "ipv4": (ipaddress.IPv4Address, "0129.", ""),
    "ipv6": (ipaddress.IPv6Address, "09af:.%", ""),
    "ipv4network": (ipaddress.IPv4Network, "0129./", r".*/0[0-9]+"),
    "ipv6interface": (ipaddress.IPv6Interface, "09af:./%", r".*/0[0-9]+"),
    "email": (pydantic.EmailStr, "abc019.-_+@ü", ""),
    "uri": (
        pydantic.AnyUrl,
        "abc019.-_/:?#&=%[]@ü|{",
        r"(?s:.*%(?![0-9a-fA-F]{2}).*|.*#.*#.*|.*[][{}|^@].*|.*:[^/]*:.*|[a-zA-Z0-9+.-]*:[^?#]*[][].*)",
    ),
    "multi-host-uri": (pydantic.PostgresDsn, "abc019.-_/:,&=", r"[^:]*:(?!//).*|.*\\.*"),
}
SEEDS = {
    **WRITTEN,
    "uri": [text for text in WRITTEN["uri"] if text[:4] in ("http", "ftp:", "file", "s3:/")],
    "multi-host-uri": ["postgres://u:p@h-1:5432,h-2:5433/db", "postgresql+asyncpg://u:p@localhost/db",
        "postgres://a,b/c"],
    "ipv6interface": ["2001:db8::1/64"],
    "uuid4": ["98d80576-482e-427f-8434-7f86890ab222"],
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_what_pydantic_reads(demo: lp.Model, name: str) -> None:
    kind, letters, elsewhere = TYPES[name]
    adapter = TypeAdapter(kind)
    assert adapter.json_schema()["format"] == name
    factory = compile_guide(demo, json_schema=adapter.json_schema())
    rng, n_read = Random(7), 0
    whole = values(name, N_VALUES) if name in GRAMMARS else SEEDS[name]
    for i in range(10 * N_VALUES):
        text = rng.choice(SEEDS[name] if i % 2 else whole)
        if i % 4:
            text = mutated(rng, text, letters)
        try:
            adapter.validate_python(text)
        except pydantic.ValidationError:
            continue
        if text != text.strip() or (elsewhere and re.fullmatch(elsewhere, text)):
            continue
        n_read += 1
        assert allows(demo, factory, text), text
    assert n_read > N_VALUES


def test_what_pydantic_writes(demo: lp.Model) -> None:
    class Record(pydantic.BaseModel):
        when: datetime.datetime
        day: datetime.date
        hour: datetime.time
        took: datetime.timedelta
        id: uuid.UUID
        ip: pydantic.IPvAnyAddress
        net: ipaddress.IPv4Network
        card: ipaddress.IPv6Interface
        url: pydantic.HttpUrl
        raw: pydantic.Base64Bytes

    factory = compile_guide(demo, json_schema=Record.model_json_schema(mode="serialization"))
    rng = Random(3)
    for host in values("hostname", N_VALUES):
        zone = rng.choice(
            [
                None,
                datetime.timezone.utc,
                datetime.timezone(datetime.timedelta(minutes=rng.randint(-1439, 1439))),
            ]
        )
        when = datetime.datetime.fromtimestamp(rng.randint(-(10**10), 10**11), datetime.timezone.utc)
        when = when.replace(tzinfo=zone, microsecond=rng.choice([0, rng.randrange(10**6)]))
        record = Record(
            when=when,
            day=when.date(),
            hour=when.timetz(),
            took=datetime.timedelta(
                days=rng.randint(-400, 4000), microseconds=rng.choice([0, rng.randint(-(10**12), 10**12)])
            ),
            id=uuid.UUID(int=rng.getrandbits(128)),
            ip=ipaddress.ip_address(rng.getrandbits(rng.choice([32, 128])) | 1),
            net=ipaddress.IPv4Network((rng.getrandbits(32), rng.randint(0, 32)), strict=False),
            card=ipaddress.IPv6Interface((rng.getrandbits(128), rng.randint(0, 128))),
            url=pydantic.HttpUrl(f"https://{host}.example:{rng.randint(1, 65535)}/a-b?c=d"),
            raw=base64.b64encode(rng.randbytes(rng.randint(0, 200))),
        )
        text = record.model_dump_json()
        with factory.new() as guide:
            assert accepts(demo, guide, text), text


# ---- beside other keywords
MAIL = "john.m.smith@my-company.com"
COMBINED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"format": "email", "maxLength": 27, "minLength": 1}, [MAIL], [f"x{MAIL}", ""]),
    ({"format": "uri", "maxLength": 2083, "minLength": 1}, ["http://my-service:8080/health"], ["",
        f"http://{'a' * 2080}"]),
    ({"format": "email", "minLength": 8}, [MAIL], ["a@b.com"]),
    ({"format": "uri-reference", "minLength": 1}, ["a"], [""]),
    ({"format": "email", "pattern": "@my-company"}, [MAIL], ["john@other.com"]),
    ({"format": "email", "pattern": "@my-company", "maxLength": 26}, [MAIL[1:]], [MAIL]),
    ({"format": "email", "pattern": "^(?=.*m)[a-z.]+@"}, [MAIL], ["john1@other.com"]),
    # Values that are listed come first: nobody lists what must not come.
    ({"format": "email", "enum": [MAIL, "nobody"]}, [MAIL, "nobody"], ["x@y.com"]),
    ({"format": "uuid", "const": "none"}, ["none"], ["2eb8aa08-aa98-11ea-b4aa-73b441d16380"]),
    ({"format": "email", "anyOf": [{"maxLength": 9}, {"pattern": "^john"}]}, [MAIL, "a@my-b.com"[:9]],
        ["jane.m@my-company.com"]),
    ({"type": ["string", "null"], "format": "email"}, [MAIL, None], ["x"]),
    # zod
    ({"format": "base64url", "pattern": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2,3})?$"}, ["YQ", "YWJj"], ["YQ=="]),
    ({"anyOf": [{"type": "string", "format": "date"}, {"type": "string", "format": "uri"}]}, ["2024-02-29", "a:b"],
        ["x"]),
]  # fmt: skip


@pytest.mark.parametrize("case", COMBINED, ids=lambda case: json.dumps(case[0]))
def test_beside_other_keywords(demo: lp.Model, case: tuple[dict[str, Any], list[Any], list[Any]]) -> None:
    schema, right, wrong = case
    factory = compile_guide(demo, json_schema={"type": "string", **schema})
    for value in right + wrong:
        with factory.new() as guide:
            assert accepts(demo, guide, json.dumps(value)) == (value in right), value


def test_without_a_type_only_strings_are_restricted(demo: lp.Model) -> None:
    factory = compile_guide(demo, json_schema={"format": "email"})
    for text, expected in ((f'"{MAIL}"', True), ('"x"', False), ("1", True), ("[1]", True)):
        with factory.new() as guide:
            assert accepts(demo, guide, text) is expected, text


def test_names_of_properties(demo: lp.Model) -> None:
    factory = compile_guide(demo, json_schema={"type": "object", "propertyNames": {"format": "email"}})
    for text, expected in ((f'{{"{MAIL}":1}}', True), ('{"x":1}', False)):
        with factory.new() as guide:
            assert accepts(demo, guide, text) is expected, text


def warnings(demo: lp.Model, caplog: pytest.LogCaptureFixture, schema: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "llamapipe"):
        for _ in range(2):
            compile_guide(demo, json_schema=schema)
    return [record.getMessage() for record in caplog.records]


def test_formats_that_are_not_enforced_are_named_once(
    demo: lp.Model, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "format": "regex"},
            "b": {"type": "string", "format": "colour"},
            "c": {"type": "string", "format": "date", "pattern": "(?=2)"},
            "d": {"type": "integer", "format": "int64"},
            "e": {"type": "string", "format": "date"},
            "f": {"enum": ["x"], "format": "colour"},
            **{name: {"type": "string", "format": name} for name in ANY_STRING},
        },
    }
    (message,) = warnings(demo, caplog, schema)
    named = ["'regex' is not known (at '#/properties/a')", "'colour' is not known (at '#/properties/b')"]
    named.append("'date' is used with a 'pattern' that has look-around (at '#/properties/c')")
    assert re.search("not enforced, .*: (.*); check", message)[1].split("; ") == named  # type: ignore[index]
    many = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "format": "x" * 999} for i in range(90)},
    }
    (message,) = warnings(demo, caplog, many)
    assert len(message) < 1500 and "; and 85 more" in message
    for fine in ({"type": "string", "format": "email"}, {"type": "number", "format": "float"}):
        assert warnings(demo, caplog, fine) == []
    factory = compile_guide(demo, json_schema={"type": "string", "format": "regex"})
    assert allows(demo, factory, "anything\n[")


@pytest.mark.parametrize("name", ["email", "uri", "hostname", "date-time", "ipv6"])
def test_arguments_of_calls(demo: lp.Model, name: str) -> None:
    tool = {"type": "object", "properties": {"to": {"type": "string", "format": name}}, "required": ["to"]}
    factory = compile_guide(demo, lark=f"start: {json_value(tool)}")
    for texts, expected in ((WRITTEN[name], True), (WRONG[name], False)):
        for text in texts:
            with factory.new() as guide:
                written = json.dumps({"to": text}, ensure_ascii=False)
                assert accepts(demo, guide, written) is expected, text


# ---- the JSON-Schema-Test-Suite's tests of formats
KNOWN = {  # how many of its wrong texts are allowed; the documentation says which
    "duration": 1,
    "time": 7,
    "uuid": 1,
    "idn-hostname": 25,
    "ipv6": 1,  # a zone
}


@pytest.mark.skipif(not SUITE, reason="nox -s schemas fetches the suite")
def test_masks_agree_with_the_suite(demo: lp.Model) -> None:
    allowed: Counter[str] = Counter()
    n = 0
    for path in sorted(Path(SUITE, "draft2020-12", "optional", "format").glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            name = group["schema"].get("format")
            texts = [test for test in group["tests"] if name in FORMATS and isinstance(test["data"], str)]
            factory = compiled(demo, name) if texts else None
            for test in texts:
                assert factory is not None
                n += 1
                is_allowed = allows(demo, factory, test["data"])
                assert is_allowed or not test["valid"], (name, test)
                allowed[name] += is_allowed and not test["valid"]
    assert n > 300
    assert {name: count for name, count in allowed.items() if count > KNOWN.get(name, 0)} == {}


def test_the_documentation_lists_what_is_enforced() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "run: python tools/format_table.py"
