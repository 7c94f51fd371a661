"""Prompt tokens that models of every kind of memory compute beyond the ideal, where prompts begin alike.

    python benchmarks/bench_states.py
    python benchmarks/bench_states.py --architectures qwen3.5-0.8b gemma3-270m --model gemma-3-270m.gguf

The models are made: the layers of each architecture of ``tools/model_shapes.py`` with tiny widths. The numbers do not
depend on the machine. The ideal is what no earlier request of the work has computed. The program
fails if a number is above its goal.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0:0] = [str(ROOT), str(ROOT / "tools")]

from make_model import make_model  # noqa: E402
from model_shapes import ARCHITECTURES  # noqa: E402

import llamapipe as lp  # noqa: E402

# Later turns have no reasoning, which ~ begins and ends, as in the templates of Qwen 3 and others.
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] "
    "{% if message.role == 'assistant' %}{{ message.content.split('~')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] ~{% endif %}"
)
SYSTEM = (
    "You are a helpful assistant. Answer in one sentence, with plain words, and say so if you do not know. "
    * 4
)
ANSWER = lp.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
FIRST = lp.SamplingParams(max_tokens=1, temperature=0)
INTERVAL = 512  # tokens between two states of a long prompt
Work = Callable[[lp.Engine], tuple[int, int]]  # tokens computed, and the ideal


def random_tokens(n: int, seed: int) -> list[int]:
    """Tokens that every vocabulary has."""
    return [20 + (i * 11 + i * i + seed * 37) % 150 for i in range(n)]


def computed(engine: lp.Engine, work: Callable[[], object]) -> int:
    """The prompt tokens that some work computes."""
    before = engine.stats().n_prompt_tokens
    work()
    return engine.stats().n_prompt_tokens - before


def again(engine: lp.Engine) -> tuple[int, int]:
    """The same prompt again."""
    prompt = random_tokens(619, 1)
    engine.generate(prompt, ANSWER)
    return computed(engine, lambda: engine.generate(prompt, ANSWER)), 0


def parts(engine: lp.Engine, which: int, shared: int) -> tuple[int, int]:
    """Prompts of 620 tokens, or 20 more than they share, of which one after another parts from the first."""
    base = random_tokens(620, 2)
    engine.generate(base, ANSWER)
    for i in range(1, which):
        prompt, n_before = base[:shared] + random_tokens(20, 2 + i), engine.stats().n_prompt_tokens
        engine.generate(prompt, ANSWER)
    return engine.stats().n_prompt_tokens - n_before, 20


def eight(engine: lp.Engine) -> tuple[int, int]:
    """Eight at once that share 600 tokens."""
    shared = random_tokens(600, 4)
    prompts = [shared + random_tokens(20, 5 + i) for i in range(8)]
    return computed(engine, lambda: engine.generate(prompts, FIRST)), 760


def several(engine: lp.Engine) -> tuple[int, int]:
    """Four answers to one prompt."""
    params = lp.SamplingParams(max_tokens=8, n=4, seed=1, ignore_eos=True)
    return computed(engine, lambda: engine.generate(random_tokens(600, 6), params)), 600


def fork(engine: lp.Engine) -> tuple[int, int]:
    """A generation and three forks of it."""

    def work() -> None:
        with engine.start(random_tokens(600, 7), ANSWER) as generation:
            generation.next()
            forks = [generation.fork() for _ in range(3)]
            for sequence in (generation, *forks):
                sequence.next()
            for other in forks:
                other.close()

    return computed(engine, work), 600


def restored(engine: lp.Engine) -> tuple[int, int]:
    """A snapshot that goes back to where its prompt ended."""
    with engine.start(random_tokens(600, 8), ANSWER) as generation:
        for _ in range(8):
            generation.next()
        snapshot = generation.snapshot()
    engine.reset_prefix_cache()

    def work() -> None:
        with engine.restore(snapshot, ANSWER) as other:
            other.next()
            other.trim(600)
            other.append([40, 41])
            other.next()

    return computed(engine, work), 2


def chat(engine: lp.Engine, then: Sequence[dict[str, str]]) -> tuple[int, int]:
    """A conversation, then another one that begins as it does."""
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "What is rain?"}]
    engine.chat(first, ANSWER)
    model, messages = engine.model, [*first[: 2 if len(then) != 1 else 1], *then]
    known, wanted = model.tokenize_chat(first), model.tokenize_chat(messages)
    n_shared = sum(
        1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(known, wanted, strict=False))
    )
    return computed(engine, lambda: engine.chat(messages, ANSWER)), len(wanted) - n_shared


OTHER = [{"role": "user", "content": "What is snow, and who was the first to draw it?"}]
TURN = [
    {"role": "assistant", "content": "It is water that falls."},
    {"role": "user", "content": "And what is snow?"},
]
# The name, the work, and the most tokens beyond the ideal; below 1: as a share of it.
WORKS: dict[str, tuple[Work, float]] = {
    "same prompt again": (again, 8),
    "second that parts after 600": (lambda engine: parts(engine, 2, 600), INTERVAL),
    "third that parts after 600": (lambda engine: parts(engine, 3, 600), 8),
    "second that parts after 300": (lambda engine: parts(engine, 2, 300), INTERVAL),
    "third that parts after 300": (lambda engine: parts(engine, 3, 300), 8),
    "eight at once that share 600": (eight, 0.05),
    "n=4 of 600": (several, 0.05),
    "three forks of 600": (fork, 0.05),
    "snapshot, back to its prompt": (restored, 8),
    "chat regenerated": (lambda engine: chat(engine, ()), 8),
    "chat, another last message": (lambda engine: chat(engine, OTHER), 8),
    "chat, second turn": (lambda engine: chat(engine, TURN), 8),
}  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--architectures", nargs="*", choices=list(ARCHITECTURES), default=list(ARCHITECTURES)
    )
    parser.add_argument("--model", nargs="*", type=Path, default=(), help="files to be measured as well")
    parser.add_argument(
        "--last-window", action="store_true", help="windows keep no other cells (swa_full=False)"
    )
    args = parser.parse_args()
    missed = []
    print(f"{'tokens beyond the ideal':<23}" + "".join(f"{i:>6}" for i in range(1, len(WORKS) + 1)))
    for i, name in enumerate(WORKS, 1):
        print(f"{i:>6}: {name}")
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "model.gguf"
        for name in (*args.architectures, *args.model):
            if isinstance(name, str):
                make_model(small, shape=ARCHITECTURES[name].shrunk(), type_name="f16", vocab="builtin-spm")
            path = small if isinstance(name, str) else name
            numbers = []
            with lp.Model(path, chat_template=TEMPLATE) as model:
                for work, (run, goal) in WORKS.items():
                    tuning = lp.EngineTuning(swa_full=False if args.last_window and model.n_swa else None)
                    with lp.Engine(
                        model, n_ctx=1024, n_seq_max=8, n_threads=1, cache_bytes=2**30, tuning=tuning
                    ) as engine:
                        n, ideal = run(engine)
                    numbers.append(n - ideal)
                    if n - ideal > (goal * ideal if goal < 1 else goal):
                        missed.append(f"{name}: {work}: {n} of {ideal}")
            label = name if isinstance(name, str) else name.stem
            print(f"{label:<23}" + "".join(f"{number:>6}" for number in numbers), flush=True)
    if missed:
        sys.exit("above their goals:\n" + "\n".join(missed))


if __name__ == "__main__":
    main()
