"""Describes models and their capabilities to Ollama's clients, without reading weights.

Open it for ``/api/show`` and the capabilities in ``/api/tags`` of models that are not loaded. A child process loads
each file's vocabulary and tries its chat template, just as a server with the model would. If a file makes llama.cpp end
that process, nothing else is affected.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from llamapipe.errors import LlamapipeError
from llamapipe.fleet.command import command_calling
from llamapipe.gguf.check import check_gguf
from llamapipe.llama.model import Model
from llamapipe.server.requests.ollama_models import modelfile_of, modelfiles
from llamapipe.server.routes.ollama_descriptions import shown_model

_MOST_S = 300.0
_START = "\x1e"  # marks our own output lines: libraries may print others


class Asked(NamedTuple):
    """A file to describe. ``template``: the chat template to use instead of the file's; None: use the file's."""

    file: str
    embeds: bool
    template: str | None


async def describe(asked: Sequence[Asked]) -> list[dict[str, Any] | None]:
    """Return the answer of ``/api/show`` for each file; None for a file that cannot be described.

    If the task is cancelled, the child process ends.
    """
    answers: list[dict[str, Any] | None] = []
    while len(answers) < len(asked):
        lines = await _run(asked[len(answers) :])
        answers += lines
        if len(answers) < len(asked):  # the next file ended the child process
            answers.append(None)
    return answers


async def _run(asked: Sequence[Asked]) -> list[dict[str, Any] | None]:
    try:
        process = await asyncio.create_subprocess_exec(
            *command_calling(main), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )
    except OSError:
        return []
    try:
        out, _ = await asyncio.wait_for(process.communicate(json.dumps(asked).encode()), _MOST_S)
    except asyncio.TimeoutError:
        return []
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    lines = [line[1:] for line in out.decode(errors="replace").split("\n") if line.startswith(_START)]
    return [json.loads(line) for line in lines]


def main() -> None:
    """Run in the child process: read a JSON list of files to describe, and write a line for each."""
    if hasattr(os, "nice"):
        os.nice(10)
    for fields in json.load(sys.stdin):
        asked = Asked(*fields)
        try:
            answer = _describe(asked)
        except (LlamapipeError, OSError, ValueError, ImportError):
            answer = None
        sys.stdout.write(f"{_START}{json.dumps(answer)}\n")
        sys.stdout.flush()


def _describe(asked: Asked) -> dict[str, Any]:
    with Model(asked.file, vocab_only=True, chat_template=asked.template) as model:
        kind = "embedding" if asked.embeds else "completion"
        answer = shown_model(model, kind, modelfile_of(modelfiles(model.path), model.name))
        n_params = sum(math.prod(tensor.dims) for tensor in check_gguf(model.path).tensors)
        answer["model_info"]["general.parameter_count"] = n_params
        return answer
