"""``llamapipe generate``: continues one prompt as a stream, or many concurrently."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llamapipe as lp
from llamapipe._messages import with_flags
from llamapipe.arguments import path_of
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.options import (
    ENGINE,
    MODEL,
    SAMPLING,
    TEXTS,
    add_adapters,
    add_engine_options,
    add_files,
    add_model,
    add_options,
    defaults_of,
    load_adapters,
    open_engine,
    open_model,
    read_options,
)
from llamapipe.cli.parser import UsageError, read_texts, usage_errors
from llamapipe.jobs.answers import logprob_records
from llamapipe.types import ChatChoice

USAGE = "llamapipe generate [options] [PROMPT ...]"
DESCRIPTION = (
    "Continue one or more prompts. One prompt is streamed; several run concurrently and are printed in order."
)
EPILOG = """\
examples:
  llamapipe generate "Once upon a time, a little fox"
  llamapipe generate -m model.gguf --temperature 0 --max-tokens 64 "The capital of France is" "2 + 2 ="
  llamapipe generate -m model.gguf --lines -f questions.txt --json > answers.jsonl
  git diff | llamapipe generate -m model.gguf
  llamapipe generate -m model.gguf --image cat.jpg "What is in this picture?"
"""
_N_SLOTS = defaults_of(lp.Engine)["n_seq_max"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="text to continue; - (or none, in a pipe) reads it from stdin",
    )
    add_model(parser)
    add_adapters(parser, "all are applied")
    add_files(parser, "read a prompt from a file")
    parser.add_argument(
        "--image",
        type=path_of,
        action="append",
        default=[],
        metavar="FILE",
        help="ask about an image: each prompt is then a message of a user that begins with it (repeatable; needs a "
        "model with a projector and a chat template)",
    )
    parser.add_argument(
        "--lines", action="store_true", help="take each line of a file or of stdin as a prompt"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per line and prompt, in order; a failed prompt gives an error record",
    )
    parser.add_argument("--stats", action="store_true", help="print tokens and times on stderr at the end")
    add_options(parser, "sampling", [*TEXTS, *SAMPLING], defaults_of(lp.SamplingParams))
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    prompts = read_texts(args.prompts, args.file, args.lines)
    with usage_errors():
        params = lp.SamplingParams(**read_options(args, [*TEXTS, *SAMPLING]))
    if params.logprobs is not None and not args.json:
        raise UsageError("--logprobs needs --json")
    start = time.perf_counter()
    with (
        open_model(
            args.model, {**({"mmproj": True} if args.image else {}), **read_options(args, MODEL)}
        ) as model,
        # More slots than prompts would only cost memory.
        open_engine(
            model, {"n_seq_max": min(_N_SLOTS, len(prompts) * params.n), **read_options(args, ENGINE)}
        ) as engine,
    ):
        if adapters := load_adapters(model, args):
            params = replace(params, adapter=dict.fromkeys(adapters, 1.0))
        loaded = time.perf_counter()
        asks = _Asks(engine, params, args.image)
        if len(prompts) == 1 and params.n == 1 and not args.json:
            counts = _stream(asks, prompts[0])
        else:
            counts = asyncio.run(_all(asks, prompts, as_json=args.json))
        if args.stats:
            seconds = time.perf_counter() - loaded
            print(
                f"{counts.prompt} prompt tokens, {counts.generated} generated in {seconds:.2f} s: "
                f"{counts.generated / seconds:.0f} tokens/s, {engine.stats().steps} steps; "
                f"loaded in {loaded - start:.2f} s",
                file=sys.stderr,
            )
    return 1 if counts.failed else 0


@dataclass
class _Counts:
    """Numbers of prompt tokens, generated tokens and failed prompts, the same as in the JSON records.

    The engine's own count of prompt tokens differs: it includes only the tokens that were computed.
    """

    prompt: int = 0
    generated: int = 0
    failed: int = 0


@dataclass(frozen=True)
class _Asks:
    """Completes prompts, or asks about images."""

    engine: lp.Engine
    params: lp.SamplingParams
    images: Sequence[Path]

    def messages(self, prompt: str) -> list[dict[str, Any]]:
        images = [{"type": "image", "image": path} for path in self.images]
        return [{"role": "user", "content": [*images, {"type": "text", "text": prompt}]}]

    async def whole(self, prompt: str) -> lp.Completion | lp.ChatCompletion:
        if self.images:
            return await self.engine.achat(self.messages(prompt), self.params)
        return await self.engine.agenerate(prompt, self.params)

    def n_tokens(self, prompt: str) -> int:
        if self.images:
            return self.engine.count_chat_tokens(self.messages(prompt))
        return len(self.engine.model.tokenize(prompt))

    def pieces(self, prompt: str) -> Generator[tuple[str, int]]:
        """Yield each new piece of text, and how many tokens it has."""
        if self.images:
            with closing(self.engine.stream_chat(self.messages(prompt), self.params)) as chat:
                for answer in chat:
                    yield answer.reasoning + answer.content, len(answer.token_ids)
            return
        with closing(self.engine.stream(prompt, self.params)) as deltas:
            for delta in deltas:
                yield delta.text, len(delta.token_ids)


def _stream(asks: _Asks, prompt: str) -> _Counts:
    terminal = Terminal(sys.stdout)
    counts = _Counts(prompt=asks.n_tokens(prompt))
    ended = True
    with closing(asks.pieces(prompt)) as pieces:
        for text, n in pieces:
            counts.generated += n
            if text:
                terminal.write(terminal.text(text))
                ended = text.endswith("\n")
    if not ended:
        terminal.line()
    return counts


async def _all(asks: _Asks, prompts: list[str], *, as_json: bool) -> _Counts:
    """Run all prompts concurrently and print the results in order.

    With ``as_json``, a failed prompt gives an error record and the others continue; without it, the error is raised.
    """
    counts = _Counts()
    terminal = Terminal(sys.stdout)
    # JSON escapes preserve characters that the output's encoding lacks, as with LC_ALL=C without UTF-8 mode.
    escapes = (sys.stdout.encoding or "ascii").lower() != "utf-8"
    tasks = [asyncio.create_task(asks.whole(prompt)) for prompt in prompts]
    try:
        for index, (prompt, task) in enumerate(zip(prompts, tasks, strict=True)):
            try:
                out = await task
            except (lp.errors.LlamapipeError, ValueError) as error:
                if not as_json:
                    raise
                counts.failed += 1
                failure = {"type": type(error).__name__, "message": with_flags(str(error))}
                record = {"index": index, "prompt": prompt, "error": failure}
                terminal.line(json.dumps(record, ensure_ascii=escapes))
                continue
            counts.prompt += out.n_prompt_tokens
            counts.generated += out.n_completion_tokens
            if as_json:
                terminal.line(json.dumps(_record(index, prompt, out), ensure_ascii=escapes))
                continue
            title = " ".join(prompt.split())
            title = title if len(title) <= 70 else title[:69] + terminal.symbol("…")
            terminal.line(terminal.style(f"[{index + 1}] {terminal.text(title)}", "bold", "cyan"))
            for choice in out.choices:
                if choice.index:
                    terminal.line(terminal.style("---", "dim"))
                terminal.line(terminal.text(_text(choice)))
            if index + 1 < len(prompts):
                terminal.line()
    finally:
        for task in tasks:
            task.cancel()
    return counts


def _text(choice: lp.Choice | ChatChoice) -> str:
    return choice.content if isinstance(choice, ChatChoice) else choice.text


def _record(index: int, prompt: str, out: lp.Completion | lp.ChatCompletion) -> dict[str, Any]:
    first, *others = out.choices
    record = {
        "index": index,
        "prompt": prompt,
        "text": _text(first),
        "finish_reason": first.finish_reason,
        "n_prompt_tokens": out.n_prompt_tokens,
        "n_completion_tokens": out.n_completion_tokens,
        "seed": first.seed,
    }
    if others:
        record["texts"] = [_text(choice) for choice in out.choices]
    if first.logprobs is not None:
        record["logprobs"] = logprob_records(first.logprobs)
    return record
