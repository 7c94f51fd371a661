"""Steps and times with guessed tokens, over those without: JSON, rewritten code, answers from a text, prose.

    python benchmarks/bench_steps.py qwen2.5-coder.gguf
    python benchmarks/bench_steps.py qwen2.5-coder.gguf --works json prediction --at-once 1 8 --rounds 5
    python benchmarks/bench_steps.py qwen2.5-coder-1.5b.gguf --draft qwen2.5-coder-0.5b.gguf --works draft draft-prose
    python benchmarks/bench_steps.py smollm2.gguf --against trained.gguf random.gguf --at-once 1 4 8 16
    python benchmarks/bench_steps.py smollm2.gguf --against trained.gguf --scripted 0 0.2 0.4 0.6 0.8
    python benchmarks/bench_steps.py qwen2.5-coder.gguf --llama-server PATH --at-once 1 4
    python benchmarks/bench_steps.py smollm2.gguf --llama-server PATH --against trained.gguf --at-once 1 4

With and without in turns in one process; medians. The number of steps hardly depends on the machine, the time does.
The model is one that follows instructions in ChatML. With ``--llama-server``, code is rewritten by servers instead:
`llamapipe serve`, and llama-server without drafts and with each of its n-gram drafts, in turns. With ``--against``,
engines with these drafts write answers of 256 tokens, in turns with an engine that has none; ``mtp`` is one of them.
With both, servers write such answers, each with the first of these drafts and without; they are started again in each
round, because equal processes differ by up to a sixth, by where their weights are in memory. With ``--scripted``, the
tokens of the first draft are replaced by tokens of which these shares are right: from which share on does it pay, and
from which one should it by what its parts take?
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[0:0] = [str(Path(__file__).resolve().parent.parent)]

from local_server import SERVE, cpu_seconds, post, running  # noqa: E402

import llamapipe as lp  # noqa: E402
from llamapipe._engine.policy.speculation import Gate  # noqa: E402
from llamapipe._engine.runtime import draft as draft_module  # noqa: E402
from llamapipe._engine.runtime import loop as loop_module  # noqa: E402
from llamapipe.gguf.draft_file import target_layers  # noqa: E402
from llamapipe.llama.batch import DecodeBatch  # noqa: E402
from llamapipe.llama.context import Context  # noqa: E402

CODE = """def total_price(items, tax_rate):
    subtotal = 0
    for item in items:
        subtotal += item.price * item.quantity
    tax = subtotal * tax_rate
    return subtotal + tax


def average_price(items):
    if not items:
        return 0
    total = 0
    for item in items:
        total += item.price
    return total / len(items)


def most_expensive(items):
    best = None
    for item in items:
        if best is None or item.price > best.price:
            best = item
    return best
"""
NAMES = ("products", "articles", "goods", "entries", "orders", "lines", "books", "tickets")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["administrator", "regular_user", "guest"]},
        "city": {"type": "string", "maxLength": 30},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "role", "city", "active"],
    "additionalProperties": False,
}
TEXT = """The mill museum at Oster Bridge is open from April to October, Tuesday to Sunday, from ten to five. In winter
it opens only for groups of eight or more, who must write to the office two weeks before their visit. Adults pay
seven euros, students and pensioners five, and children under twelve nothing. A family ticket for two adults and up to
four children costs fifteen euros. Dogs may come along on a lead, but not into the grinding room, because the belts of
the stones run without covers. The great wheel turns every day at eleven and at three for about twenty minutes, unless
the river is too low, which in August happens often. Visitors who want to bake their own bread can book the course on
Saturday mornings; it costs twenty euros and includes flour, an apron and coffee. The car park behind the church is
free, and from the railway station a path along the river leads to the mill in a quarter of an hour."""
QUESTIONS = (
    "When is the museum open?",
    "Who may visit in winter, and what must they do?",
    "What do tickets cost?",
    "Where may dogs not go, and why?",
    "When does the great wheel turn?",
    "What does the course on Saturdays include?",
    "Where can one park?",
    "How does one get there by train?",
)
LLAMA_SERVER_NGRAMS = ("ngram-mod", "ngram-simple", "ngram-map-k", "ngram-cache")
TOPICS = (
    "rivers", "winter", "bread", "old maps", "trains", "gardens", "the moon", "wool",
    "clocks", "islands", "paper", "bees", "bridges", "salt", "lighthouses", "rain",
)  # fmt: skip
# Nothing that train_eagle3.py asks about.
NEW_TOPICS = (
    "lighthouses", "pottery", "a talking fox", "soap", "railway stations", "solar panels", "owls", "harbours",
)  # fmt: skip
TASKS = ("Tell me a story about", "What should a beginner know about", "Explain how people use")


def chat(text: str) -> str:
    """A conversation of one turn."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def code(i: int, source: str = CODE) -> str:
    """A prompt for the code with another name in it."""
    ask = f"Rename the parameter `items` to `{NAMES[i]}` everywhere in this code. Reply with the code only."
    return chat(ask + "\n```python\n" + source + "```") + "```python\n"


def person(i: int) -> str:
    """A prompt for JSON."""
    return chat(f"Make up person number {i} as JSON with name, age, role, city and active.")


def program(i: int) -> str:
    """A prompt for code that repeats nothing that is given."""
    return chat(
        f"Write a Python class for a shop that sells {NAMES[i]}, with five methods. Code only, no comments."
    )


def prose(i: int) -> str:
    """A prompt for a text that repeats nothing."""
    return chat(f"Write three sentences about {TOPICS[i]}.")


def summary(i: int) -> str:
    """A prompt for a summary of a given text."""
    return chat(f"Summarize this text in {i + 3} sentences.\n\n{TEXT}")


def answer(i: int) -> str:
    """A prompt for an answer from a given text."""
    return chat(f"{TEXT}\n\n{QUESTIONS[i]} Answer with the sentences of the text that say so.")


# The prompt, the options, and those with guesses.
Work = tuple[Callable[[int], str], dict[str, Any], dict[str, Any]]
WORKS: dict[str, Work] = {
    "json": (person, {"json_schema": SCHEMA, "temperature": 0.8, "max_tokens": 120}, {}),
    "prediction": (code, {"temperature": 0, "max_tokens": 200, "stop": "```"}, {"prediction": CODE}),
    "ngram": (code, {"temperature": 0, "max_tokens": 200, "stop": "```"}, {}),
    "summary": (summary, {"temperature": 0, "max_tokens": 200}, {}),
    "answer": (answer, {"temperature": 0, "max_tokens": 120}, {}),
    "prose": (prose, {"temperature": 0.8, "max_tokens": 80}, {}),
    "draft": (program, {"temperature": 0, "max_tokens": 200}, {"speculate": "draft"}),
    "draft-prose": (prose, {"temperature": 0.8, "max_tokens": 80}, {"speculate": "draft"}),
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path, help="a draft model, which the last two works need")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS)[:-2])
    parser.add_argument("--at-once", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kernels", choices=("auto", "ggml"), default="auto")
    parser.add_argument(
        "--against", nargs="+", metavar="DRAFT", help="compare engines with and without these"
    )
    parser.add_argument("--llama-server", type=Path, help="rewrite code by servers; this is llama-server")
    parser.add_argument(
        "--scripted", nargs="+", type=float, metavar="SHARE", help="of right tokens of the first of --against"
    )
    args = parser.parse_args()
    if args.scripted:
        with lp.Model(args.model, kernels=args.kernels) as model:
            rows, first_s, again_s = print_costs(model, Path(args.against[0]))
            compare_scripted(model, args.against[0], args.scripted, args.rounds, rows, first_s, again_s)
        return
    if args.llama_server and args.against:
        for n in args.at_once:
            compare_drafting_servers(args.model, args.against[0], args.llama_server, n, args.rounds)
        return
    if args.llama_server:
        for n in args.at_once:
            compare_servers(args.model, args.llama_server, n, args.rounds)
        return
    if args.against:
        with lp.Model(args.model, kernels=args.kernels, load_mtp="mtp" in args.against) as model:
            for draft in args.against:
                if draft != "mtp":
                    print_costs(model, Path(draft))
            for n in args.at_once:
                compare_drafts(model, args.against, n, args.rounds)
        return
    print(
        "work        at once   tokens  steps without, with, ratio    seconds without, with; speed  right guesses  equal"
    )
    with lp.Model(args.model, kernels=args.kernels) as model:
        for name in args.works:
            for n in args.at_once:
                compare(model, name, n, args.rounds, args.draft)


def compare(model: lp.Model, name: str, n: int, rounds: int, draft: Path | None) -> None:
    """Prints one line: medians of rounds in turns."""
    prompt, options, guessing = WORKS[name]
    prompts = [model.tokenize(prompt(i), parse_special=True) for i in range(n)]
    ways = {"off": {"speculate": "off"}, "on": guessing}
    params = {
        way: [lp.SamplingParams(**options, **more, seed=i) for i in range(n)] for way, more in ways.items()
    }
    steps: dict[str, list[int]] = {way: [] for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    texts: dict[str, list[str]] = {}
    with lp.Engine(model, n_ctx=1024, n_seq_max=n, draft=draft) as engine:
        engine.generate(
            prompts, [lp.SamplingParams(max_tokens=1, json_schema=options.get("json_schema"))] * n
        )
        for i in range(rounds):
            for way in list(ways)[:: -1 if i % 2 else 1]:
                before, began_s = engine.stats(), time.perf_counter()
                done = engine.generate(prompts, params[way])
                seconds[way].append(time.perf_counter() - began_s)
                steps[way].append(engine.stats().steps - before.steps)
                texts[way] = [completion.text for completion in done]
        stats = engine.stats()
    n_tokens = sum(len(completion.token_ids) for completion in done)
    off, on = (statistics.median(steps[way]) for way in ways)
    off_s, on_s = (statistics.median(seconds[way]) for way in ways)
    ratio = statistics.median(a / b for a, b in zip(seconds["off"], seconds["on"], strict=True))
    n_equal = sum(a == b for a, b in zip(texts["off"], texts["on"], strict=True))
    print(
        f"{name:<12}{n:>6}{n_tokens:>10}{off:>11.0f}{on:>8.0f}{on / off:>9.2f}"
        f"{off_s:>14.2f}{on_s:>8.2f}{ratio:>9.2f}{stats.n_accepted:>12} of {stats.n_drafted:<6}{n_equal} of {n}",
        flush=True,
    )


def times_of_process() -> None:
    """Lets gates and drafts learn from the process's time: as they would on a machine where nothing else runs."""
    for module in (draft_module, loop_module):
        module.perf_counter = time.process_time  # type: ignore[attr-defined]


def compare_drafts(model: lp.Model, drafts: list[str], n: int, rounds: int) -> None:
    """Prints a line for each draft: its engine's speed over that of an engine without, medians of rounds in turns.

    Times are of the process, so that others on the machine count less, also for the gate. Each round has other
    questions.
    """
    times_of_process()
    ways: list[str | None] = [None, *drafts]
    asked = itertools.cycle(f"{task} {topic}." for task in TASKS for topic in NEW_TOPICS)
    steps, seconds = dict.fromkeys(ways, 0), {way: [] for way in ways}  # type: dict[Any, int], dict[Any, list[float]]
    n_equal = dict.fromkeys(ways, 0)
    with contextlib.ExitStack() as stack:
        engines = {
            way: stack.enter_context(
                lp.Engine(model, n_ctx=512, n_seq_max=n, draft=way, n_threads=1, cache_bytes=0)
            )
            for way in ways
        }
        for i in range(rounds + 1):  # the first one warms up
            prompts = [model.tokenize_chat([{"role": "user", "content": next(asked)}]) for _ in range(n)]
            plain = lp.SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, speculate="off")
            drafted = replace(plain, speculate="draft")
            texts: dict[str | None, list[tuple[int, ...]]] = {}
            for way in ways[:: -1 if i % 2 else 1]:
                before, began_s = engines[way].stats(), time.process_time()
                done = engines[way].generate(prompts, plain if way is None else drafted)
                seconds[way].append(time.process_time() - began_s)
                steps[way] += engines[way].stats().steps - before.steps
                texts[way] = [tuple(completion.token_ids) for completion in done]
            for way in ways:
                n_equal[way] += sum(a == b for a, b in zip(texts[None], texts[way], strict=True))
        for way in drafts:
            stats = engines[way].stats()
            ratios = [a / b for a, b in zip(seconds[None][1:], seconds[way][1:], strict=True)]
            right = stats.n_accepted_by_model / max(stats.n_drafted_by_model, 1)
            speed = n * 256 / statistics.median(seconds[None][1:])
            print(
                f"{Path(way).name:<20}{n:>3} at once: {statistics.median(ratios):.3f} times as fast "
                f"({min(ratios):.2f} to {max(ratios):.2f}), {speed:.0f} tokens/s without, "
                f"{steps[way] / steps[None]:.2f} of the steps, {right:.2f} of {stats.n_drafted_by_model} right, "
                f"{n_equal[way]} of {n * (rounds + 1)} texts equal",
                flush=True,
            )


class Script:
    """What a scripted draft says: tokens of a known text, and wrong ones in between."""

    def __init__(self) -> None:
        self.text: Sequence[int] = ()
        self.share = 0.0
        self.rng = random.Random(1)

    def token(self, place: int) -> int:
        """A token for a place of the text."""
        token = self.text[min(place, len(self.text) - 1)]
        return token if self.rng.random() < self.share else token + 1 if token < 1000 else token - 1


def compare_scripted(
    model: lp.Model,
    draft: str,
    shares: Sequence[float],
    rounds: int,
    rows: Sequence[float],
    first_s: float,
    again_s: float,
) -> None:
    """Prints a line for each share of right tokens: the speed of one request over that without a draft.

    The draft computes as it always does, then its tokens are replaced. Once one token is drafted for every step, and
    once the gate decides.
    """
    times_of_process()
    script = Script()
    decode, choose = draft_module.Eagle3Draft._decode, Gate.choose

    def decoded(self: Any, entries: Any) -> Any:
        ends = decode(self, entries)
        return [(request, script.token(len(self._held[request.slot].tokens)), 0.5) for request, *_ in ends]

    def always_one(self: Gate, n_decoding: int, guesses: Any, n_room: int) -> Any:
        self.drafted = {guess.request.slot for guess in guesses}
        return self.drafter.draft({guess.request: 1 for guess in guesses}) if self.drafter else {}

    draft_module.Eagle3Draft._decode = decoded  # type: ignore[method-assign]
    asked = [f"{task} {topic}." for task in TASKS for topic in NEW_TOPICS]
    prompts = [model.tokenize_chat([{"role": "user", "content": question}]) for question in asked]
    plain = lp.SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, speculate="off")
    ways: list[tuple[str, float]] = [("plain", 0.0)]
    ways += [("one", share) for share in shares] + [("gate", share) for share in shares]
    seconds: dict[tuple[str, float], list[float]] = {way: [] for way in ways}
    counts: dict[tuple[str, float], list[int]] = {way: [0, 0, 0, 0] for way in ways}
    options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 1, "n_threads": 1, "cache_bytes": 0}
    with contextlib.ExitStack() as stack:
        engines = {
            way: stack.enter_context(lp.Engine(model, **options, draft=None if way[0] == "plain" else draft))
            for way in ways
        }
        for i in range(rounds + 1):  # the first one warms up
            for way in [ways[0], *ways[1:][:: -1 if i % 2 else 1]]:
                engine, (kind, script.share) = engines[way], way
                Gate.choose = always_one if kind == "one" else choose  # type: ignore[method-assign]
                before, began_s = engine.stats(), time.process_time()
                tokens = engine.generate(
                    prompts[i], plain if kind == "plain" else replace(plain, speculate="draft")
                )
                seconds[way].append(time.process_time() - began_s)
                after = engine.stats()
                if kind == "plain":
                    script.text = [*prompts[i], *tokens.token_ids]
                is_equal = [*prompts[i], *tokens.token_ids] == script.text
                spent = (after.steps - before.steps, after.n_drafted - before.n_drafted)
                for j, n in enumerate((*spent, after.n_accepted - before.n_accepted, is_equal)):
                    counts[way][j] += n if i or j == 3 else 0
    for way in ways[1:]:
        kind, share = way
        ratios = [a / b for a, b in zip(seconds["plain", 0.0][1:], seconds[way][1:], strict=True)]
        lengths = range(1, 2 if kind == "one" else len(rows))
        expected = [
            sum(share**k for k in range(n + 1)) * rows[0] / (rows[n] + first_s + (n - 1) * again_s)
            for n in lengths
        ]
        if kind == "gate":
            expected.append(1.0)
        steps, n_drafted, n_right, n_equal = counts[way]
        print(
            f"{kind:<5}{share:.2f} right: {statistics.median(ratios):.3f} times as fast ({min(ratios):.2f} to "
            f"{max(ratios):.2f}), by arithmetic {max(expected):.3f}; {steps / 256 / rounds:.2f} of the steps, "
            f"{n_right} of {n_drafted} right, {n_equal} of {rounds + 1} texts equal",
            flush=True,
        )


def print_costs(model: lp.Model, draft: Path) -> tuple[list[float], float, float]:
    """Prints and returns what a step of several rows and a step of an EAGLE-3 draft take.

    Prints also what right guesses then bring.
    Least seconds of the process, one thread. The first guess of a step also computes the tokens since the last one.
    A step of the model comes before each draft, as in an engine: what the draft reads is then no longer in the
    processor's caches.
    """
    with (
        lp.Model(draft) as head,
        Context(model, n_ctx=512, n_threads=1, n_states=4) as target,
        Context(head, n_ctx=512, n_threads=1, n_ubatch=64, drafts_for=target) as drafting,
    ):
        target.keep_states(512, target_layers(head.file_metadata))
        prompt = [i % 5000 + 100 for i in range(200)]
        target.decode(DecodeBatch.of_tokens(prompt, 0))

        def least(compute: Callable[[], None], after: Callable[[], object]) -> float:
            times = []
            for _ in range(40):
                began_s = time.process_time()
                compute()
                times.append(time.process_time() - began_s)
                after()
            return min(times)

        def steps(n: int) -> float:
            batch = DecodeBatch(prompt[:n], range(200, 200 + n), [0] * n, [True] * n)
            return least(lambda: target.decode(batch), lambda: target.seq_remove(0, 200))

        rows = [steps(n) for n in range(1, 6)]
        target.decode(DecodeBatch.of_tokens(prompt[:4], 200))

        step = DecodeBatch(prompt[:1], [204], [0], [True])

        def drafts(n: int, before: int) -> float:
            first = 1 if before < 0 else 150

            def draft() -> None:
                drafting.draft(prompt[:n], [*range(first, first + n)], [0] * n, [True] * n, [before] * n)
                drafting.best(n - 1)

            def after() -> None:
                drafting.seq_remove(0, first)
                if before < 0:
                    target.decode(step)
                    target.seq_remove(0, 204)

            return least(draft, after)

        first_s, again_s = drafts(2, -1), drafts(1, 0)
    print("rows of a step, milliseconds:", *(f"{1e3 * seconds:.2f}" for seconds in rows))
    print(
        f"a draft step: {1e3 * first_s:.2f} for the first guess (two tokens), {1e3 * again_s:.2f} for each other"
    )
    for n in range(1, 5):
        took = rows[n] + first_s + (n - 1) * again_s
        shares = [i / 100 for i in range(101)]
        even = next((a for a in shares if sum(a**k for k in range(n + 1)) * rows[0] >= took), None)
        gains = ", ".join(
            f"{a}: {sum(a**k for k in range(n + 1)) * rows[0] / took:.2f}" for a in (0.4, 0.6, 0.8)
        )
        print(f"{n} guesses pay from a share of right ones of {even} on; speed by share {gains}")
    return rows, first_s, again_s


def compare_servers(model: Path, llama_server: Path, n: int, rounds: int) -> None:
    """Prints the tokens a second of each server, and ours over each of the others."""
    theirs = [llama_server, "-m", model, "-np", n, "-c", n * 1024, "-t", 2, "-tb", 2]
    theirs += ["--cache-ram", 0, "-no-kvu"]
    ours = [*SERVE, "-m", model, "--n-seq-max", n, "--n-ctx", 1024, "--n-threads", 2]
    commands = {"llamapipe": ours, "llama-server": theirs}
    commands |= {f"{kind}": [*theirs, "--spec-type", kind] for kind in LLAMA_SERVER_NGRAMS}
    rates: dict[str, list[float]] = {name: [] for name in commands}
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(n))
        ports = {name: stack.enter_context(running(*command)).port for name, command in commands.items()}
        for i in range(rounds + 1):
            for name, port in ports.items():
                began_s = time.perf_counter()
                n_tokens = sum(pool.map(rewrite, [port] * n, range(n), [i] * n))
                if i:
                    rates[name].append(n_tokens / (time.perf_counter() - began_s))
    for name, values in rates.items():
        ratio = statistics.median(a / b for a, b in zip(rates["llamapipe"], values, strict=True))
        print(
            f"{n} at once, {name:<14}{statistics.median(values):8.1f} tokens/s, ours {ratio:.2f} times that",
            flush=True,
        )


def compare_drafting_servers(model: Path, draft: str, llama_server: Path, n: int, rounds: int) -> None:
    """Prints the tokens a second of processor time of each server, one thread, and ours with the draft over each.

    Each round starts each server again.
    """
    theirs = [llama_server, "-m", model, "-np", n, "-c", n * 512, "-t", 1, "-tb", 1]
    theirs += ["--cache-ram", 0, "-no-kvu"]
    ours = [*SERVE, "-m", model, "--n-seq-max", n, "--n-ctx", 512, "--n-threads", 1, "--cache-bytes", 0]
    if draft == "mtp":
        drafting = ["--spec-type", "draft-mtp"]
    else:
        with lp.Model(draft) as head:
            kind = "draft-eagle3" if head.architecture == "eagle3" else "draft-simple"
        drafting = ["-md", draft, "--spec-type", kind, "-td", "1", "-tbd", "1"]
    commands = {"llamapipe, draft": [*ours, "--draft", draft], "llamapipe": ours, "llama-server": theirs}
    for n_most in (1, 3):  # 3 is its default
        commands[f"llama-server, {n_most} drafted"] = [*theirs, *drafting, "--spec-draft-n-max", n_most]
    rates: dict[str, list[float]] = {name: [] for name in commands}
    asked = itertools.cycle(f"{task} {topic}." for task in TASKS for topic in NEW_TOPICS)
    with ThreadPoolExecutor(n) as pool:
        for i in range(rounds):
            warming, prompts = ([chat(next(asked)) for _ in range(n)] for _ in range(2))
            for name, command in list(commands.items())[:: -1 if i % 2 else 1]:
                with running(*command) as (port, pid):
                    list(pool.map(write, [port] * n, warming, [64] * n))
                    before_s = cpu_seconds(pid)
                    n_tokens = sum(pool.map(write, [port] * n, prompts, [256] * n))
                    rates[name].append(n_tokens / (cpu_seconds(pid) - before_s))
    for name, values in rates.items():
        ratios = [a / b for a, b in zip(rates["llamapipe, draft"], values, strict=True)]
        print(
            f"{n} at once, {name:<24}{statistics.median(values):8.1f} tokens/s, ours {statistics.median(ratios):.2f} "
            f"times that ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def write(port: int, prompt: str, n: int) -> int:
    """Lets a server write ``n`` tokens; returns their number."""
    return complete(port, {"prompt": prompt, "max_tokens": n, "temperature": 0, "ignore_eos": True})


def rewrite(port: int, i: int, version: int) -> int:
    """Has a server rewrite a version of the code that is new to it; the number of its tokens.

    Some of llama-server's drafts come from earlier requests: the same code again would be no draft but a memory.
    """
    names = r"\b(item|subtotal|tax|total|best|[a-z]+_[a-z]+)\b"
    prompt = code(i, re.sub(names, rf"\1_{version}{i}", CODE))
    return complete(port, {"prompt": prompt, "max_tokens": 200, "temperature": 0, "stop": ["```"]})


def complete(port: int, body: dict[str, Any]) -> int:
    """Asks a server for a completion; returns the number of its tokens."""
    return int(post(port, "/v1/completions", body)["usage"]["completion_tokens"])


if __name__ == "__main__":
    main()
