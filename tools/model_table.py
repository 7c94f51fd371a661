"""Write the table of architectures in docs/which-models.md: what the engine does with a model of each.

    python tools/model_table.py           # writes the table
    python tools/model_table.py --check   # fails if the page says something else

Each model is made: the layers of an architecture of ``model_shapes.py`` with tiny widths. What the table says is asked
of an engine, or measured: prompt tokens computed beyond those that no earlier prompt had.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from make_model import TINY, make_model
from model_shapes import ARCHITECTURES
from page_sections import with_section

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after an installed llamapipe

import llamapipe as lp
from llamapipe.gguf.adapter import ROWS_ARE_TOKENS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "which-models.md"
BEGIN, END = "<!-- models: python tools/model_table.py -->\n", "<!-- end of models -->\n"
# What people call models of a preset. The first is dense.
NAMES = {
    "tiny": "Llama 3, Qwen 2.5 and 3, Mistral, SmolLM",
    "gemma3-270m": "Gemma 3",
    "gemma4-e2b": "Gemma 4 E2B, E4B",
    "gpt-oss-20b": "gpt-oss 20B, 120B",
    "glm-4.7-flash": "GLM 4.7 Flash, DeepSeek V3",
    "qwen3.5-0.8b": "Qwen 3.5",
    "qwen3.6-35b-a3b": "Qwen 3.6 A3B",
    "lfm2-1.2b": "LFM 2",
    "granite4-h-1b": "Granite 4 h",
    "nemotron-h-8b": "Nemotron-H",
    "mamba2-1.3b": "Mamba 2",
    "rwkv7-0.4b": "RWKV 7",
}
FIRST = lp.SamplingParams(max_tokens=1, temperature=0)


def table(folder: Path) -> str:
    """Return the table. ``folder``: for the models."""
    lines = [
        "| models | architecture | memory | again | third | guesses | LoRAs in one step | `batch_invariant` |",
        "|---|---|---|---:|---:|---|---|---|",
    ]
    for preset, names in NAMES.items():
        shape = replace(TINY, context=2048) if preset == "tiny" else ARCHITECTURES[preset].shrunk()
        path = folder / f"{preset}.gguf"
        make_model(path, shape=shape, type_name="f16", vocab="builtin-spm")
        with lp.Model(path) as model:
            lines.append(f"| {names} | {' | '.join(_row(model))} |")
    return "\n".join(lines) + "\n"


def _row(model: lp.Model) -> list[str]:
    architecture = str(model.metadata["general.architecture"])
    with lp.Engine(model, n_ctx=1024, n_seq_max=8, n_threads=1, cache_bytes=2**28) as engine:
        beyond = _beyond(engine)
        why = engine.stats().no_guesses
    return [
        f"`{architecture}`",
        _memory(model, architecture),
        *map(str, beyond),
        why.partition(":")[0] or "yes",
        "yes" if architecture in ROWS_ARE_TOKENS else "they take turns",
        "yes" if _is_invariant(model) else "refused",
    ]


def _memory(model: lp.Model, architecture: str) -> str:
    if model.has_only_states:
        return "a state for each request"
    if model.is_recurrent:
        return "cells, and a state for each request"
    if model.n_swa:
        return "cells, windows"
    return "cells, latent" if f"{architecture}.attention.kv_lora_rank" in model.metadata else "cells"


def _beyond(engine: lp.Engine) -> tuple[int, int]:
    """Return the tokens computed too much: of a prompt again, and of a third one that parts after 600."""

    def computed(tokens: list[int]) -> int:
        before = engine.stats().n_prompt_tokens
        engine.generate(tokens, FIRST)
        return engine.stats().n_prompt_tokens - before

    def tokens(n: int, seed: int) -> list[int]:
        return [20 + (i * 11 + i * i + seed * 37) % 150 for i in range(n)]

    shared = tokens(600, 1)
    prompt = shared + tokens(20, 2)
    computed(prompt)
    again = computed(prompt)
    computed(shared + tokens(20, 3))
    return again, computed(shared + tokens(20, 4)) - 20


def _is_invariant(model: lp.Model) -> bool:
    try:
        lp.Engine(model, n_ctx=64, n_seq_max=2, n_threads=1, batch_invariant=True).close()
    except (ValueError, lp.errors.LlamapipeError):
        return False
    return True


def main() -> int:
    """Run the command line. Return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        written = with_section(text, BEGIN, END, table(Path(folder)))
    if check:
        if written != text:
            print(f"{PAGE.name} says something else: python tools/model_table.py", file=sys.stderr)
        return written != text
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
