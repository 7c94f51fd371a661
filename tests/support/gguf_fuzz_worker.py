"""Loads damaged models and says what became of each; run by test_gguf_fuzz.py in processes of its own.

Arguments: a folder to work in, base files; a draft's is followed by ``=`` and its model's file, which is not damaged.
Standard input: lines of a base's index and a seed. Each is answered with
a line: ``loaded``, ``refused`` or ``wrong`` and a reason.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import llamapipe._engine.assembly
from llamapipe.engine import Engine
from llamapipe.errors import LlamapipeError
from llamapipe.llama import Context, DecodeBatch, Model
from llamapipe.params import SamplingParams
from support.eager_gate import EagerGate
from support.gguf_mutations import mutate

TEXT = "The cat said: 12 <s>\n\t été 😀"


def use(path: Path) -> str:
    """Load, tokenize, take one decode step, write the result as text."""
    with Model(path) as model:
        ids = [*model.tokenize(TEXT), *model.tokenize(TEXT, parse_special=True)][:40] or [0]
        model.detokenize(ids)
        for token in range(model.n_vocab):
            model.piece(token)
        assert model.metadata is not None
        with Context(model, n_ctx=256, n_seq_max=2, n_batch=64, n_threads=1) as context:
            last = len(ids) - 1
            outputs = [i == last for i in range(len(ids))]
            context.decode(DecodeBatch(ids, list(range(len(ids))), [0] * len(ids), outputs))
            context.logits(last)
    return "loaded"


def draft(path: Path, target: Path) -> str:
    """Draft for a model with a draft file."""
    llamapipe._engine.assembly.Gate = EagerGate  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, speculate="draft")
    with Engine(target, n_ctx=64, n_seq_max=2, n_threads=1, draft=path) as engine:
        engine.generate([[40, 41, 42], [70, 71]], params)
        return "loaded" if engine.stats().n_drafted else "loaded without drafts"


def main() -> None:
    """Work off standard input."""
    folder = Path(sys.argv[1])
    names, targets = zip(*(name.partition("=")[::2] for name in sys.argv[2:]), strict=True)
    bases = [Path(name).read_bytes() for name in names]
    path = folder / f"mutant-{os.getpid()}.gguf"
    for line in sys.stdin:
        index, seed = map(int, line.split())
        path.write_bytes(mutate(bases[index], seed)[0])
        try:
            result = draft(path, Path(targets[index])) if targets[index] else use(path)
        except LlamapipeError as error:
            result = f"refused {str(error)[:300]!r}"
        except ValueError as error:
            if not targets[index]:
                raise
            result = f"refused {str(error)[:300]!r}"
        except BaseException as error:
            result = f"wrong {type(error).__name__}: {str(error)[:300]!r}"
        path.unlink()
        sys.stdout.write(result + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
