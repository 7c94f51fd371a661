"""Renders of every template of the pinned llama.cpp, compared with llama.cpp's own, through the peer's wheel.

Of 292, 279 are equal. Four differ because reasoning is on unless it is switched off, as in most templates. Three show
what llama.cpp leaves out: a tool call in a message whose content is null, the tools of a template that reads another
name, the turn of a tool. Seven are refused: one by both, one whose template wants a description of each parameter, two
whose template wants the reasoning of each answer, three of a translator that wants languages with each message.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.chat_templates import names, source_of
from support.conversations import CONVERSATIONS

import llamapipe as lp
from llamapipe.errors import InvalidRequestError

LEAST, ALL = 272, 292


def theirs(templates: dict[str, str], model: Path) -> dict[str, dict[str, str | None]]:
    """llama.cpp's rendering of each conversation by each template, None where it refuses one.

    In another process: closing one of these servers sometimes waits forever for its thread.
    """
    program = Path(__file__).parents[1] / "support" / "peer_renders.py"
    request = json.dumps({"model": str(model), "templates": templates, "conversations": CONVERSATIONS})
    done = subprocess.run(
        [sys.executable, program], input=request, stdout=subprocess.PIPE, text=True, check=True, timeout=240
    )
    return {name: renders for line in done.stdout.splitlines() for name, renders in json.loads(line).items()}


def ours(template: str, model: Path) -> dict[str, str | None]:
    renders: dict[str, str | None] = {}
    with lp.Model(model, chat_template=template) as loaded:
        for name, conversation in CONVERSATIONS.items():
            try:
                renders[name] = loaded.render_chat(**conversation)
            except InvalidRequestError:
                renders[name] = None
    return renders


def test_renders_are_those_of_llama_cpp() -> None:
    pytest.importorskip("xllamacpp", reason="the peer is not installed: pip install xllamacpp")
    model = lp.demo_model_path()
    if not names():
        pytest.skip("llama.cpp's source is not in the cache: run build_native.py")
    same: list[str] = []
    different: list[str] = []
    templates = {name: source_of(name) for name in names()}
    peer = theirs(templates, model)
    for name, template in templates.items():
        left, right = ours(template, model), peer[name]
        for key in CONVERSATIONS:
            (same if left[key] == right[key] else different).append(f"{name} {key}")
    print(f"{len(same)} of {len(same) + len(different)} equal; different: {different}")  # noqa: T201
    assert len(same) + len(different) == ALL
    assert len(same) >= LEAST, different
