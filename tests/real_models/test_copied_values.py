"""A mask with a ``format`` bends no value: addresses, links and host names come out as they stand in a text."""

from __future__ import annotations

import json
import sys
from random import Random

import pytest
from support.real_weights import needs_all, real_model

import llamapipe as lp

FIRST = ["john", "anna.k", "maria.de.la", "li", "o.p.q", "sven-erik", "j.m", "fatima", "x1", "bruno_m"]
LAST = ["smith", "lee", "garcia-lopez", "wei", "o.hara", "mueller", "van.der.berg", "aziz", "k99", "rossi"]
PLACES = [
    "my-company.com",
    "uni-mainz.de",
    "mail.bbc.co.uk",
    "dept-3.cs.tu-berlin.de",
    "3com.example",
    "a.b.c.d.org",
]
HOSTS = [
    "www.bbc.co.uk", "my-service", "db-01.eu-central-1.rds.example.com", "xn--bcher-kva.example", "grpc.example.com",
    "localhost", "node-7.cluster-2.internal", "10.0.17.4", "kube-dns.kube-system.svc.cluster.local", "cache01",
]  # fmt: skip
PATHS = [
    "/api",
    "/v1/chat-completions",
    "/health",
    "",
    "/a/b/index.html?id=7&lang=de",
    "/docs#part-2",
    "/x_y/~user/",
]
TEXTS = {
    "email": "On Monday {value} wrote that the parcel had arrived, and thanked the whole team for the quick help.",
    "uri": "The new service answers at {value} since last night, so please change your settings before noon.",
    "hostname": "The machine {value} was restarted twice this week because its disk was full again.",
}
NAMES = {"email": "e-mail address", "uri": "URL", "hostname": "host name"}


def values() -> list[tuple[str, str]]:
    """A hundred values and their formats."""
    rng = Random(51)
    pairs: dict[tuple[str, str], None] = {}
    while len(pairs) < 100:
        kind = ("email", "uri", "hostname")[len(pairs) % 3]
        if kind == "email":
            tag = rng.choice(["", "", "+news", "+a.b"])
            value = f"{rng.choice(FIRST)}.{rng.choice(LAST)}{tag}@{rng.choice(PLACES)}"
        elif kind == "uri":
            port = rng.choice(["", ":8080", ":11434", ":50051"])
            value = f"{rng.choice(['http', 'https'])}://{rng.choice(HOSTS)}{port}{rng.choice(PATHS)}"
        else:
            value = rng.choice(["", "", f"n{rng.randint(1, 40)}-a."]) + rng.choice(HOSTS + PLACES)
        pairs[(kind, value)] = None
    return list(pairs)


def ask(kind: str) -> str:
    return f'Copy the {NAMES[kind]} from this text exactly as it stands there. Answer with JSON: {{"value": "…"}}'


@needs_all
@pytest.mark.timeout(3600)
def test_a_hundred_values_are_copied(capsys: pytest.CaptureFixture[str]) -> None:
    copied: dict[bool, list[bool]] = {}
    wanted = values()
    with lp.Model(real_model("qwen-1.5b")) as model, lp.Engine(model, n_ctx=512, n_seq_max=8) as engine:
        prompts = [
            model.tokenize_chat(
                [{"role": "user", "content": f"{TEXTS[kind].format(value=value)}\n\n{ask(kind)}"}]
            )
            for kind, value in wanted
        ]
        for with_format in (False, True):
            params = [
                lp.SamplingParams(
                    json_schema={
                        "type": "object",
                        "properties": {
                            "value": {"type": "string", **({"format": kind} if with_format else {})}
                        },
                        "required": ["value"],
                        "additionalProperties": False,
                    },
                    temperature=0,
                    max_tokens=80,
                )
                for kind, _ in wanted
            ]
            answers = engine.generate(prompts, params)
            copied[with_format] = [
                answer.finish_reason == "stop" and json.loads(answer.text)["value"] == value
                for answer, (_, value) in zip(answers, wanted, strict=True)
            ]
    with capsys.disabled():
        sys.stdout.write(
            f"\nof 100 values copied: {sum(copied[False])} without, {sum(copied[True])} with format\n"
        )
    bent = [
        value
        for value, plain, masked in zip(wanted, copied[False], copied[True], strict=True)
        if plain and not masked
    ]
    assert bent == []
    assert sum(copied[True]) >= 80
