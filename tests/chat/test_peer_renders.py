"""Renders of every template of the pinned llama.cpp, compared with llama.cpp's own, through the peer's wheel.

Of 280, 271 are equal. Four differ because reasoning is on unless it is switched off, as in most templates. Three show
what llama.cpp leaves out: a tool call in a message whose content is null, the tools of a template that reads another
name, the turn of a tool. Two are refused: one by both, one whose template wants a description of each parameter.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.chat_templates import names, source_of
from support.conversations import CONVERSATIONS

import llamapipe as lp
from llamapipe.errors import InvalidRequestError

LEAST, ALL = 264, 280


def theirs(template: str, model: Path) -> dict[str, str | None]:
    """llama.cpp's rendering of each conversation, None where it refuses one."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(model), 256, 1, False
    params.use_jinja, params.chat_template = True, template
    server = xllamacpp.Server(params)
    return {name: applied(server.listening_address, one) for name, one in CONVERSATIONS.items()}


def applied(address: str, conversation: dict[str, Any]) -> str | None:
    body = json.dumps(conversation).encode()
    request = urllib.request.Request(f"{address}/apply-template", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            text: str = json.loads(answer.read())["prompt"]
            return text
    except urllib.error.HTTPError:
        return None


def ours(template: str, model: Path) -> dict[str, str | None]:
    made: dict[str, str | None] = {}
    with lp.Model(model, chat_template=template) as one:
        for name, conversation in CONVERSATIONS.items():
            try:
                made[name] = one.render_chat(**conversation)
            except InvalidRequestError:
                made[name] = None
    return made


def test_renders_are_those_of_llama_cpp() -> None:
    pytest.importorskip("xllamacpp", reason="the peer is not installed: pip install xllamacpp")
    model = lp.demo_model_path()
    if not names():
        pytest.skip("llama.cpp's source is not in the cache: run build_native.py")
    same: list[str] = []
    different: list[str] = []
    for name in names():
        template = source_of(name)
        left, right = ours(template, model), theirs(template, model)
        for key in CONVERSATIONS:
            (same if left[key] == right[key] else different).append(f"{name} {key}")
    print(f"{len(same)} of {len(same) + len(different)} equal; different: {different}")  # noqa: T201
    assert len(same) + len(different) == ALL
    assert len(same) >= LEAST, different
