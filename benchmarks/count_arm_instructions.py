"""Counts the instructions of products with packed weights on 64-bit ARM: ours for NEON against ggml's, under qemu-user.

    python benchmarks/count_arm_instructions.py

Prints a table in millions: 1,024 rows of 2,048 weights times 1, 4 and 8 rows of activations. Counts are no times: an
emulator knows neither latencies nor caches. Needs ``aarch64-linux-gnu-g++`` and a ``qemu-aarch64`` with plugins
(Debian's package qemu-user; the static one has none); ``QEMU=...`` names another. Compiling takes a minute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0:0] = [str(HERE.parent)]

from native_build.paths import PACKAGE_NATIVE  # noqa: E402
from native_build.sources import find_source  # noqa: E402

COMPILER = "aarch64-linux-gnu-g++"
KERNELS = PACKAGE_NATIVE / "kernels"
# Ours and ggml's for sdot, and ggml's for products of byte matrices: what ggml is compiled for.
LEVELS = {"dotprod": "armv8.2-a+dotprod+fp16", "i8mm": "armv8.6-a+dotprod+fp16+i8mm"}
# ggml's number of the type, and its products for each level.
TYPES = {
    "Q4_0": (2, "q4_0_4x4_q8_0", "q4_0_4x8_q8_0"),
    "Q8_0": (8, "q8_0_4x4_q8_0", "q8_0_4x8_q8_0"),
    "Q4_K": (12, "q4_K_8x4_q8_K", "q4_K_8x8_q8_K"),
    "Q5_K": (13, "q5_K_8x4_q8_K", "q5_K_8x8_q8_K"),
    "Q6_K": (14, "q6_K_8x4_q8_K", "q6_K_8x8_q8_K"),
}
N_ROWS = (1, 4, 8)


def build(folder: Path) -> dict[str, Path]:
    """The programs, by level, and the plugin of qemu."""
    ggml = find_source(None, print).path / "ggml"
    include = [f"-I{path}" for path in (KERNELS, ggml / "include", ggml / "src", ggml / "src" / "ggml-cpu")]
    compile_ = [COMPILER, "-c", "-std=c++17", "-O3", "-ffp-contract=off", *include]
    objects = []
    for path in (
        HERE / "arm_products.cpp",
        *(KERNELS / f"{name}.cpp" for name in ("neon", "quantize", "pack")),
    ):
        objects.append(folder / f"{path.stem}.o")
        subprocess.run([*compile_, path, "-o", objects[-1]], check=True)
    # What ggml's file calls beyond this is not reached.
    link = [
        COMPILER,
        "-static",
        "-Wl,--gc-sections",
        "-Wl,--unresolved-symbols=ignore-all",
        *map(str, objects),
    ]
    more = ["-w", "-DNDEBUG", "-D_GNU_SOURCE", '-DGGML_VERSION=""', '-DGGML_COMMIT=""']
    paths = {}
    for level, processor in LEVELS.items():
        theirs, paths[level] = folder / f"ggml-{level}.o", folder / level
        source = ggml / "src" / "ggml-cpu" / "arch" / "arm" / "repack.cpp"
        subprocess.run([*compile_, *more, f"-march={processor}", source, "-o", theirs], check=True)
        subprocess.run([*link, theirs, "-o", paths[level]], check=True)
    paths["plugin"] = folder / "counter.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", HERE / "qemu_counter.c", "-o", paths["plugin"]], check=True
    )
    return paths


def count(program: Path, plugin: Path, side: str, number: int, n_rows: int) -> float:
    """Millions of instructions of one product: of three, without what one takes with all around it, halved."""
    qemu = [os.environ.get("QEMU", "qemu-aarch64"), "-cpu", "max", "-plugin", str(plugin), str(program)]
    totals = []
    for times in ("1", "3"):
        command = [*qemu, side, str(number), str(n_rows), times]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        match = re.search(r"instructions: (\d+)", done.stderr)
        assert match is not None, done.stderr
        totals.append(int(match[1]))
    return (totals[1] - totals[0]) / 2e6


def main() -> None:
    """Build, count, print."""
    with tempfile.TemporaryDirectory() as name:
        paths = build(Path(name))
        print("| type | rows | ours, sdot | ggml, sdot | ggml, i8mm |\n|---|---|---|---|---|")
        for text, (number, sdot, i8mm) in TYPES.items():
            for n_rows in N_ROWS:
                sides = (("dotprod", "ours"), ("dotprod", sdot), ("i8mm", i8mm))
                counts = [count(paths[level], paths["plugin"], side, number, n_rows) for level, side in sides]
                print(f"| {text} | {n_rows} | {' | '.join(f'{n:.2f}' for n in counts)} |", flush=True)


if __name__ == "__main__":
    main()
