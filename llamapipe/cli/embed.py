"""``llamapipe embed``: computes embeddings of texts, or sorts documents by relevance."""

from __future__ import annotations

import argparse
import json
import sys

import llamapipe as lp
from llamapipe.arguments import path_of
from llamapipe.cli._terminal import Terminal
from llamapipe.cli.options import (
    EMBEDDER,
    MODEL,
    add_files,
    add_model,
    add_options,
    defaults_of,
    open_model,
    read_options,
)
from llamapipe.cli.parser import UsageError, check_folder, read_texts, usage_errors

USAGE = "llamapipe embed [options] [TEXT ...]"
DESCRIPTION = """\
Print the embedding of each text as a JSON line, or save all embeddings as an array. With --rerank, print the
texts in the order of their relevance to a query."""
EPILOG = """\
examples:
  llamapipe embed -m bge.gguf "a text" "another one"
  llamapipe embed -m bge.gguf --lines -f texts.txt -o vectors.npy
  llamapipe embed -m reranker.gguf --rerank "What is a panda?" --lines -f documents.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="a text; - (or none, in a pipe) reads it from stdin"
    )
    add_model(parser)
    add_files(parser, "read a text from a file")
    parser.add_argument("--lines", action="store_true", help="take each line of a file or of stdin as a text")
    parser.add_argument(
        "-o", "--output", type=path_of, metavar="FILE.npy", help="save float32 (texts, width) for numpy.load"
    )
    parser.add_argument("--rerank", metavar="QUERY", help="print the texts by their relevance to this query")
    parser.add_argument("--no-normalize", action="store_true", help="do not scale vectors to length 1")
    parser.add_argument(
        "--truncate", action="store_true", help="truncate texts that are too long (default: they are errors)"
    )
    add_options(parser, "embedder", EMBEDDER, defaults_of(lp.Embedder))
    add_options(parser, "model", MODEL, defaults_of(lp.Model))


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    texts = read_texts(args.texts, args.file, args.lines)
    if args.output is not None and args.output.suffix != ".npy":
        raise UsageError(f"-o {args.output}: the name must end with .npy")
    for option, is_given in (("-o", args.output is not None), ("--no-normalize", args.no_normalize)):
        if is_given and args.rerank is not None:
            raise UsageError(f"{option} and --rerank do not go together: --rerank prints texts, not vectors")
    if args.output is not None:
        check_folder(args.output)
    terminal = Terminal(sys.stdout)
    with open_model(args.model, read_options(args, MODEL)) as model, _embedder(model, args) as embedder:
        if args.rerank is not None:
            for ranked in embedder.rerank(args.rerank, texts, truncate=args.truncate):
                terminal.line(f"{ranked.score:10.4f}  {_short(terminal, texts[ranked.index])}")
            return 0
        vectors = embedder.embed(texts, not args.no_normalize, truncate=args.truncate, progress=False)
        if isinstance(vectors, list):
            raise UsageError("--pooling none gives a vector for each token; choose mean, cls or last")
        if args.output is not None:
            import numpy as np

            np.save(args.output, vectors)
            print(f"{len(texts)} vectors of {vectors.shape[1]} in {args.output}", file=sys.stderr)
            return 0
        for index, vector in enumerate(vectors):
            terminal.line(json.dumps({"index": index, "embedding": [round(float(x), 7) for x in vector]}))
    return 0


def _embedder(model: lp.Model, args: argparse.Namespace) -> lp.Embedder:
    options = read_options(args, EMBEDDER)
    if options.get("n_ctx") == 0:
        options["n_ctx"] = model.n_ctx_train
    with usage_errors():
        return lp.Embedder(model, **options)


def _short(terminal: Terminal, text: str) -> str:
    return terminal.clip(terminal.text(" ".join(text.split())), 12)
