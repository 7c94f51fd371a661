"""Ends a program at random instants of a call on another thread: the process must end without a signal.

    python exits.py N_INSTANTS SEED MODEL EMBEDDING_MODEL [CALL ...]

A daemon thread makes the call; the main thread lets it run for a random part of the time that it takes, then ends. One
process imports the package and is forked for each run. At the first instants of each call, a run imports what the call
needs and loads the native module itself; before the others the process that is forked has done so, which halves a run's
time. It never opens a model.

With 0 instants there is one run for each call or, without names of calls, for four of them at once on one engine; they
are not timed before. Prints the number of runs. A signal, a hang, an exit code other than 0 and anything on stderr are
printed and end this program with code 1.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

sys.path.append(str(Path(__file__).resolve().parents[2]))  # after an installed llamapipe

import numpy as np

import llamapipe as lp
from llamapipe.llama import Context, DecodeBatch

_HANG_S = 60
_TIMED = 3
_TOGETHER = 4
_SHORT_S = 0.4  # most calls take less
_ROUND = 10  # instants of each call
# For results of batch jobs; removed by the process that was started, not by its forks.
_FOLDER = "EXITS_FOLDER"
_MOST_TEXT = 2000  # of what a run wrote
_AT_ONCE = os.cpu_count() or 1
_WORDS = lp.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_FEW = lp.SamplingParams(max_tokens=3)
_TURNS = [{"role": "user", "content": "What is the weather in Rome?"}]
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{3,9}$"}, "n": {"type": "integer"}},
}
_LONG = "The quick brown fox jumps over the lazy dog; \u00e9t\u00e9 \ud55c\uad6d\uc5b4. " * 4000


# With a place for tools, so that any model may be given some.
_TEMPLATE = """\
{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for one in messages %}<|im_start|>{{ one.role }}
{{ one.content or "" }}{% for call in one.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def weather(city: str) -> str:
    """Tells the weather."""
    return city


def _with(**options: Any) -> lp.SamplingParams:
    return lp.SamplingParams(max_tokens=12, **options)


async def _astream(engine: lp.Engine) -> None:
    async for _ in engine.astream("Once", _WORDS):
        pass


def _processed(tokens: Any, logits: Any) -> None:
    logits[np.argsort(logits)[:-3]] = -np.inf


def _fork_and_restore(engine: lp.Engine) -> None:
    generation = engine.start("Once", _WORDS)
    generation.next()
    forked = generation.fork()
    forked.next()
    engine.restore(generation.snapshot(), _WORDS).next()


def _batch(engine: lp.Engine) -> None:
    output = Path(os.environ[_FOLDER]) / f"{os.getpid()}.jsonl"
    lp.run_batch([f"Once {i}" for i in range(8)], engine, _WORDS, output=output)


def _served(engine: lp.Engine) -> None:
    import json
    import urllib.request

    from llamapipe.server import serve

    server = serve(engine)
    body = {"messages": _TURNS, "max_tokens": 8, "response_format": {"type": "json_object"}}
    asked = urllib.request.Request(
        f"{server.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with (
        suppress(OSError),
        urllib.request.urlopen(asked, timeout=_HANG_S) as answer,
    ):  # 500: the interpreter ends
        answer.read()
    server.close()


def _decoded(model: lp.Model) -> None:
    with Context(model, n_ctx=512) as context:
        context.decode(DecodeBatch.of_tokens(range(5, 300)))


def _piped(model: lp.Model) -> None:
    with lp.Pipeline(model, n_ctx=512) as pipeline:
        pipeline.submit(DecodeBatch.of_tokens(range(5, 300))).wait()


def _opened(model: lp.Model) -> None:
    with lp.Engine(model, n_ctx=256, n_seq_max=4) as engine:
        engine.generate("Once", _WORDS)


def _refused(engine: lp.Engine) -> None:
    with suppress(ValueError):
        engine.check_params(_with(json_schema={"type": "object", "properties": {"a": {"type": "x"}}}))


def _embedder(path: str) -> None:
    with lp.Embedder(path) as embedder:
        embedder.embed(["a fox", "an owl"] * 20)


def _compat(path: str) -> None:
    from llamapipe.compat import Llama

    llama = Llama(path, n_ctx=256, verbose=False)
    llama("Once", max_tokens=8)
    llama.close()


# What is called with an engine, with a model, with the path of a model, and with that of an embedding model.
ENGINE: dict[str, Callable[[lp.Engine], object]] = {
    "generate": lambda e: e.generate(["Once", "Twice", "Thrice"], _WORDS),
    "generate long": lambda e: e.generate("abc " * 200, _WORDS),
    "agenerate": lambda e: asyncio.run(e.agenerate(["Once", "Twice"], _WORDS)),
    "stream": lambda e: list(e.stream("Once", _WORDS)),
    "astream": lambda e: asyncio.run(_astream(e)),
    "iter_completed": lambda e: list(e.iter_completed(["Once", "Twice"], _WORDS)),
    "start": lambda e: list(e.start("Once", _WORDS)),
    "fork, snapshot, restore": _fork_and_restore,
    "cache_prefix": lambda e: e.cache_prefix("abc " * 100).release(),
    "score": lambda e: e.score("Once upon", [" a", " the", " time"]),
    "perplexity": lambda e: e.perplexity("abc " * 100),
    "logprobs": lambda e: e.generate("Once", _with(logprobs=5)),
    "schema": lambda e: e.generate("Once", _with(json_schema=_SCHEMA)),
    "schema, checked": lambda e: e.check_params(_with(json_schema=_SCHEMA)),
    "schema, async": lambda e: asyncio.run(e.agenerate("Once", _with(json_schema=_SCHEMA))),
    "schema, refused": _refused,
    "regex": lambda e: e.generate("Once", _with(regex=r"[a-z]{3,40}@[a-z]+\.(com|org)")),
    "lark": lambda e: e.generate("Once", _with(lark='start: word+\nword: /[a-z]+/ " "')),
    "grammar": lambda e: e.generate("Once", _with(grammar='root ::= [a-z]+ " " root | "."')),
    "processor": lambda e: e.generate("Once", _with(logits_processors=[_processed])),
    "chat": lambda e: e.chat(_TURNS, _WORDS),
    "achat": lambda e: asyncio.run(e.achat(_TURNS, _WORDS)),
    "stream_chat": lambda e: list(e.stream_chat(_TURNS, _WORDS)),
    "chat, tools": lambda e: e.chat(_TURNS, _FEW, tools=[weather]),
    "chat, a required tool": lambda e: e.chat(_TURNS, _FEW, tools=[weather], tool_choice="required"),
    "batch": _batch,
    "serve": _served,
    "close": lambda e: e.close(),
}
MODEL: dict[str, Callable[[lp.Model], object]] = {
    "tokenize": lambda m: m.vocab.detokenize(m.vocab.tokenize(_LONG)),
    "render_chat": lambda m: m.tokenize_chat([*_TURNS, {"role": "assistant", "content": _LONG}]),
    "Engine": _opened,
    "Context": _decoded,
    "Pipeline": _piped,
}
PATH: dict[str, Callable[[str], object]] = {
    "Model": lambda path: lp.Model(path).close(),
    "Model, read": lambda path: lp.Model(path, use_mmap=False).close(),
    "Llama": _compat,
}
NAMES = [*ENGINE, *MODEL, *PATH, "Embedder"]


def _prepared(name: str, path: str, embedding_path: str) -> Callable[[], object]:
    """The call, with what it needs made on this thread."""
    if name in ENGINE:
        return partial(ENGINE[name], _engine(path))
    if name in MODEL:
        return partial(MODEL[name], _model(path))
    return partial(PATH[name], path) if name in PATH else partial(_embedder, embedding_path)


# One of each in a process, until the interpreter clears its modules.
@cache
def _model(path: str) -> lp.Model:
    return lp.Model(path, chat_template=_TEMPLATE)


@cache
def _engine(path: str) -> lp.Engine:
    return lp.Engine(_model(path), n_ctx=512, n_cells=1024, n_seq_max=4, n_threads=1)


def _make(call: Callable[[], object], begun: threading.Event) -> None:
    """The call, whose errors say no more than that the interpreter ends."""
    begun.set()
    try:
        call()
    except lp.errors.EngineClosedError:
        pass
    except RuntimeError as e:
        if "shutdown" not in str(e):  # CPython refuses new threads then, and the import of concurrent.futures
            raise


def _duration_s(name: str, path: str, embedding_path: str) -> float:
    """How long the call takes in a process of its own: the median of some."""
    durations_s = []
    for _ in range(_TIMED):
        with tempfile.TemporaryFile("w+") as file:
            pid = os.fork()
            if pid == 0:
                call = _prepared(name, path, embedding_path)
                began_s = time.perf_counter()
                call()
                file.write(str(time.perf_counter() - began_s))
                file.flush()
                os._exit(0)
            os.waitpid(pid, 0)
            file.seek(0)
            durations_s.append(float(file.read()))  # it fails if the call did
    return median(durations_s)


def _begin(names: Sequence[str], path: str, embedding_path: str, delay_s: float) -> None:
    """In the child: starts the calls, waits, and returns to the end of the program."""
    faulthandler.enable()
    signal.alarm(_HANG_S)
    calls = [_prepared(name, path, embedding_path) for name in names]
    begun = threading.Event()
    for call in calls:
        threading.Thread(target=_make, args=(call, begun), daemon=True).start()
    begun.wait()
    time.sleep(delay_s)  # noqa: TID251  (the program ends at any moment of the calls)


def _warm() -> None:
    """Loads what the calls load, but starts no thread. What is here now is not collected at the end of a run."""
    import llguidance  # noqa: F401

    import llamapipe.chat
    import llamapipe.compat
    import llamapipe.server  # noqa: F401
    from llamapipe.native.load import native

    native()
    gc.collect()
    gc.freeze()


def _say(*lines: str) -> None:
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()  # or a child writes it again


def main(n: int, seed: int, path: str, embedding_path: str, *names: str) -> int:
    """Returns the exit code; 0 in the children, whose ends are the subject."""
    os.environ[_FOLDER] = tempfile.mkdtemp()
    rng = random.Random(seed)
    running: dict[int, tuple[str, BinaryIO]] = {}
    n_runs, failed = 0, []

    def wait_for_one() -> None:
        pid, status = os.wait()
        what, file = running.pop(pid)
        with file:
            file.seek(0)
            text = file.read().decode(errors="replace")
        if status or text:
            failed.append(f"{what}: exit code {os.waitstatus_to_exitcode(status)}\n{text[-_MOST_TEXT:]}")

    def begin(called: Sequence[str], delay_s: float) -> bool:
        """Starts a run. True in the child."""
        nonlocal n_runs
        file = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the run has ended)
        pid = os.fork()
        if pid == 0:
            os.dup2(file.fileno(), 2)
            _begin(called, path, embedding_path, delay_s)
            return True
        running[pid] = f"{' and '.join(called)} after {delay_s * 1e3:.1f} ms", file
        n_runs += 1
        while len(running) >= _AT_ONCE:
            wait_for_one()
        return False

    called = list(names or NAMES)
    rng.shuffle(called)
    n_at_once = 1 if names else _TOGETHER
    for i in range(0, 0 if n else len(called), n_at_once):
        if begin(called[i : i + n_at_once], rng.random() * _SHORT_S):
            return 0
    durations_s: dict[str, float] = {}
    for n_before in range(0, n, _ROUND):  # in rounds, so that a sweep that is stopped has tried every call
        n_instants = min(_ROUND, n - n_before)
        kind = "warm" if n_before else "cold"
        if n_before == _ROUND:
            durations_s.clear()
            _warm()
        for name in names or NAMES:
            if name not in durations_s:
                durations_s[name] = _duration_s(name, path, embedding_path)
            duration_s = durations_s[name]
            began_s, n_failed = time.perf_counter(), len(failed)
            for _ in range(n_instants):
                if begin([name], rng.random() * duration_s * 1.1):
                    return 0
            while running:
                wait_for_one()
            took_s, n_new = time.perf_counter() - began_s, len(failed) - n_failed
            _say(
                f"{name}, {kind}: {duration_s * 1e3:.0f} ms, {n_instants} instants in {took_s:.1f} s, {n_new} failed"
            )
    while running:
        wait_for_one()
    shutil.rmtree(os.environ[_FOLDER])
    _say(f"{n_runs} exits", *failed)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
