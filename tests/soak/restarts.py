"""Kills and restarts servers that share one ``--cache-dir``, and compares every answer with a fresh computation.

    python tests/soak/restarts.py --minutes 30 FILE.gguf …

Two servers at a time, each with one of the models. Clients ask at temperature 0 for prompts that continue, repeat and
part from earlier ones, which other processes computed; every few seconds a server is killed, or ended, and another one
starts. A request that its server does not survive is forgotten. Each answer's log-probabilities are then compared with
those of an engine that has no cache: wrong cells move them, rounding does not move them far. The program fails if one
differs by more than ``--most``, and prints the prompt.
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

sys.path[0:0] = [str(Path(__file__).resolve().parents[1])]

import httpx  # noqa: E402
from support.server_process import ServerProcess  # noqa: E402

import llamapipe as lp  # noqa: E402

N_CTX = 1024
N_NEW = 12  # tokens of an answer
_LONGEST = N_CTX - N_NEW - 1
_N_KEPT = 40  # prompts of a model that later ones continue
TEXT = Path(__file__).resolve().parents[2] / "docs"


class Answered(NamedTuple):
    """A prompt, and what a server answered: tokens and their log-probabilities. ``n_cached``: tokens of the prompt."""

    model: str
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    n_cached: int


class Prompts:
    """Prompts of a model that begin alike. Any thread."""

    def __init__(self, text: list[int], seed: int) -> None:
        self._text = text
        self._rng = random.Random(seed)
        self._earlier: list[list[int]] = []
        self._lock = threading.Lock()

    def next(self) -> list[int]:
        """A prompt: new, an earlier one again, a part of it with another end, or all of it with more."""
        with self._lock:
            rng = self._rng
            kind = rng.choices(("new", "again", "parts", "continues"), (2, 3, 4, 4))[0]
            if kind == "new" or not self._earlier:
                return self._some(rng.randrange(80, 500))
            earlier = rng.choice(self._earlier)
            if kind == "parts":
                earlier = earlier[: rng.randrange(1, len(earlier))]
            more = [] if kind == "again" else self._some(rng.randrange(1, 200))
            return (earlier + more)[:_LONGEST]

    def done(self, answered: Answered) -> None:
        """An answer that a later prompt may continue."""
        with self._lock:
            self._earlier.append(answered.prompt + answered.tokens)
            if len(self._earlier) > _N_KEPT:
                del self._earlier[self._rng.randrange(_N_KEPT)]

    def _some(self, n: int) -> list[int]:
        at = self._rng.randrange(len(self._text) - n)
        return self._text[at : at + n]


class Place:
    """Where a server runs: killed and replaced by ``turn``, asked by clients meanwhile."""

    def __init__(self, folder: Path, cache: Path, models: list[str], rng: random.Random) -> None:
        self._folder = folder
        self._cache = cache
        self._models = models
        self._rng = rng
        self._server: ServerProcess | None = None
        self.now: tuple[str, str] | None = None  # address and model
        self.n_reads = 0  # of files, by the servers that have ended

    def turn(self) -> str:
        """Ends the server and starts another one; how it ended."""
        how = self._rng.choice(("killed", "killed", "ended"))
        self.close(how == "ended")
        model = self._rng.choice(self._models)
        size = self._rng.choice(("4MiB", "32MiB", "256MiB"))
        more = self._rng.choice(((), ("--no-swa-full",), ("-np", "2"), ("-ub", "64")))
        arguments = ("-m", model, "-c", str(N_CTX), "-t", "1", "-np", "4", *more)
        cache = ("--cache-dir", str(self._cache), "--cache-dir-bytes", "300MiB", "--cache-bytes", size)
        self._server = ServerProcess(*arguments, *cache, cwd=self._folder)
        self.now = self._server.url, model
        return how

    def close(self, gently: bool = False) -> None:
        """Without another server."""
        self.now = None
        if self._server is not None:
            with suppress(httpx.TransportError):
                self.n_reads += disk_reads(httpx.get(f"{self._server.url}/metrics", timeout=60).text)
            if gently:
                self._server.end()  # it writes what is not on disk
            self._server.kill()


def disk_reads(metrics: str) -> int:
    """What a server's metrics say."""
    value = re.search(r"^llamapipe_disk_reads_total(?:{.*})? (\S+)$", metrics, re.MULTILINE)
    return int(float(value[1])) if value else 0


def ask(place: Place, prompts: dict[str, Prompts]) -> Answered | None:
    """One request; None if there is no server, or it ended."""
    if (now := place.now) is None:
        time.sleep(0.05)  # noqa: TID251  (a client that tries again)
        return None
    url, model = now
    prompt = prompts[model].next()
    fields = {"n_predict": N_NEW, "temperature": 0, "ignore_eos": True, "n_probs": 1, "return_tokens": True}
    try:
        answer = httpx.post(f"{url}/completion", json={"prompt": prompt, **fields}, timeout=300)
    except httpx.TransportError:
        return None
    if answer.status_code == 503:  # it ends
        return None
    body = answer.raise_for_status().json()
    logprobs = [entry["logprob"] for entry in body["completion_probabilities"]]
    if len(body["tokens"]) != N_NEW:  # it ended meanwhile
        return None
    answered = Answered(model, prompt, body["tokens"], logprobs, body["timings"]["cache_n"])
    prompts[model].done(answered)
    return answered


def difference(engine: lp.Engine, answered: Answered) -> float:
    """Largest difference of a token's log-probability, or of that of the best token, from a fresh computation."""
    params = lp.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    done = engine.generate(answered.prompt + answered.tokens, params)
    assert done.prompt_logprobs is not None
    largest = 0.0
    for theirs, ours in zip(answered.logprobs, done.prompt_logprobs[-N_NEW:], strict=True):
        assert ours is not None
        best = max(entry.logprob for entry in (ours.top or [ours]))
        largest = max(largest, abs(ours.logprob - theirs), abs(best - theirs))
    return largest


def stories(model: lp.Model) -> list[int]:
    """Tokens of real text."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(TEXT.rglob("*.md")))
    return model.tokenize(text[:400_000])


def answers(args: argparse.Namespace, models: dict[str, lp.Model]) -> Iterator[Answered]:
    """What the servers answer, until the time is over."""
    names = list(models)
    prompts = {name: Prompts(stories(model), args.seed) for name, model in models.items()}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.clients) as pool:
        folder = Path(name)
        places = [Place(folder, folder / "cache", names, random.Random(args.seed + i)) for i in range(2)]
        end = time.monotonic() + 60 * args.minutes
        rng = random.Random(args.seed)
        turns: Counter[str] = Counter()

        def turn() -> None:
            while (left := end - time.monotonic()) > 0:
                turns[rng.choice(places).turn()] += 1
                time.sleep(min(rng.uniform(0.2, args.between), left))  # noqa: TID251  (how long a server lives)

        try:
            for place in places:
                place.turn()
            turner = pool.submit(turn)
            while time.monotonic() < end and not turner.done():
                asked = [pool.submit(ask, rng.choice(places), prompts) for _ in range(2 * args.clients)]
                yield from (done for future in asked if (done := future.result()) is not None)
            turner.result()
        finally:
            for place in places:
                place.close()
        n_reads = sum(place.n_reads for place in places)
        sys.stdout.write(f"servers: {dict(turns)}; {n_reads} files were read\n")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="+")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--between", type=float, default=12.0, help="seconds between two kills, at most")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument(
        "--most", type=float, default=0.05, help="difference of log-probabilities that is rounding"
    )
    parser.add_argument("--seed", type=int, default=1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers are ended then, too
    args = parser.parse_args()
    n = n_cached = n_wrong = 0
    largest = dict.fromkeys(args.model, 0.0)
    with ExitStack() as stack:
        models = {name: stack.enter_context(lp.Model(name)) for name in args.model}
        engines = {
            name: stack.enter_context(
                lp.Engine(model, n_ctx=N_CTX, n_seq_max=1, n_threads=1, prefix_cache=False)
            )
            for name, model in models.items()
        }
        for answered in answers(args, models):
            by = difference(engines[answered.model], answered)
            n += 1
            n_cached += answered.n_cached
            largest[answered.model] = max(largest[answered.model], by)
            if by > args.most:
                n_wrong += 1
                sys.stdout.write(f"differs by {by:.2f}: {answered}\n")
                sys.stdout.flush()
    told = f"{n} answers, {n_cached} cached tokens, {n_wrong} answers differ; largest differences: {largest}"
    sys.stdout.write(told + "\n")
    return 1 if n_wrong or not n_cached else 0


if __name__ == "__main__":
    sys.exit(main())
