"""Implements the command line of ``build_native.py``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from native_build.errors import BuildError
from native_build.install import build, check
from native_build.options import BACKENDS, BuildOptions
from native_build.paths import PACKAGE_NATIVE, cache_dir
from native_build.sources import find_source


def main(arguments: Sequence[str] | None = None) -> int:
    """Build, or report in one message why that is impossible. Return the exit status."""
    parsed = _parser().parse_args(arguments)
    try:
        if parsed.print_source:
            print(find_source(parsed.source, say).path)
            return 0
        options = BuildOptions(
            backends=tuple(name for group in parsed.backend or [["cpu"]] for name in group),
            all_variants=parsed.all_variants,
            openmp=parsed.openmp,
            rpc=parsed.rpc,
            media=parsed.media,
            testing=parsed.testing,
            source=parsed.source,
            jobs=parsed.jobs,
            clean=parsed.clean,
            cuda_architectures=parsed.cuda_architectures,
            target=parsed.target,
        )
        if parsed.check:
            check(options)
            say(f"{', '.join(options.backends)}: all requirements of the build are present")
            return 0
        start = time.monotonic()
        build(options, parsed.output, say)
        say(f"done in {time.monotonic() - start:.1f} s: {', '.join(options.backends)} in {parsed.output}")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"[llamapipe] {text}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="build_native.py",
        description="Build llama.cpp and the cffi module into the source tree (or another folder).",
        epilog=f"Results are cached in {cache_dir()} (LLAMAPIPE_CACHE_DIR chooses another folder).",
    )
    parser.add_argument(
        "--backend",
        action="append",
        nargs="+",
        choices=BACKENDS,
        metavar="|".join(BACKENDS),
        help="backends to build, one or more; the CPU's is always built (default: cpu)",
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="a llama.cpp source tree, instead of the pinned one"
    )
    parser.add_argument(
        "--output", type=Path, default=PACKAGE_NATIVE, metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="compilations at once (default: the cores available)"
    )
    parser.add_argument("--clean", action="store_true", help="delete the cached result of this build first")
    parser.add_argument(
        "--all-variants",
        action="store_true",
        help="one CPU module per instruction set, chosen at run time (for wheels), instead of one for this machine",
    )
    parser.add_argument(
        "--openmp",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="OpenMP threads in the CPU backend instead of ggml's own (default: off, see design/build.md)",
    )
    parser.add_argument(
        "--rpc",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ggml-rpc, for models on several machines (default: on; it is opened only when it is used)",
    )
    parser.add_argument(
        "--media",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="libmtmd, for images and sounds (default: on; it is opened only for a model with mmproj)",
    )
    parser.add_argument(
        "--testing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="the entries that only tests and benchmarks call (default: on here, off where a package is built)",
    )
    parser.add_argument(
        "--cuda-architectures",
        default="",
        metavar="LIST",
        help="as CMake spells them, e.g. '90;120' (default: the GPUs present, else all usual ones)",
    )
    parser.add_argument(
        "--target",
        default="",
        metavar="SYSTEM",
        help="build for another machine, with the compiler SYSTEM-g++, e.g. aarch64-linux-gnu (default: this one)",
    )
    parser.add_argument(
        "--check", action="store_true", help="build nothing; check that all requirements are present"
    )
    parser.add_argument(
        "--print-source", action="store_true", help="print the source tree's folder (fetched if need be)"
    )
    return parser
