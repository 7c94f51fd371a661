"""The kernels of each CPU level give the same bits, also those for CPUs that this machine is not."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.kernel_types import NUMBERS, kernel_types
from support.tiles import needs_tiles

from llamapipe.native.load import missing_features

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.append(str(ROOT))

from native_build import store  # noqa: E402
from native_build.paths import cache_dir  # noqa: E402
from native_build.sources import find_source  # noqa: E402
from native_build.toolchain import find_compilers  # noqa: E402

KERNELS = ROOT / "llamapipe" / "native" / "kernels"


IS_ARM = platform.machine() in ("aarch64", "arm64")
pytestmark = [pytest.mark.native, pytest.mark.timeout(1800)]  # a compiler runs
needs_avx2 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or bool(missing_features(["avx2", "fma", "f16c"])),
    reason="needs a CPU with AVX2",
)


def run(tmp_path: Path, program: str, *kernels: str, for_arm: bool = False) -> str:
    """What a C++ program of this folder, compiled with these kernels, says; ``for_arm``: emulated, where need be."""
    compiler, start = list(find_compilers().cxx), []
    if for_arm and not IS_ARM:
        cross, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static")
        if cross is None or emulator is None:
            pytest.skip("no compiler and emulator for ARM here: ci/setup_arm64_debian.sh")
        compiler, start = [cross, "-static"], [emulator, "-cpu", "max"]
    llama = find_source(None, print)
    folders = [
        f"-I{folder}" for folder in (KERNELS, llama.path / "ggml" / "include", llama.path / "ggml" / "src")
    ]
    sources = [HERE / f"{program}.cpp", *(KERNELS / f"{name}.cpp" for name in kernels)]
    # Not with a sanitizer's flags, which make plain vectors of every type half an hour's work for the compiler: the
    # library has the same kernels.
    compiler += ["-std=c++17", "-O1", "-ffp-contract=off"]
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    headers = [path for folder in (HERE, KERNELS) for path in sorted(folder.glob("*.hpp"))]
    texts = [path.read_text(encoding="utf-8") for path in [*sources, *headers]]
    key = store.key_of({"compiler": [compiler, version], "llama": llama.identity, "texts": texts})
    built = cache_dir() / "level-programs" / key
    if store.lookup(built) is None:  # it takes the compiler minutes
        subprocess.run([*compiler, *folders, *sources, "-o", tmp_path / program], check=True)
        store.publish({program: tmp_path / program}, {}, built)
    done = subprocess.run([*start, built / program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("level", [pytest.param("avx2", marks=needs_avx2), "neon"])
def test_every_level_gives_the_same_bits(level: str, tmp_path: Path) -> None:
    """Of products with packed weights: loops with plain vectors against those for AVX2, and for NEON."""
    out = run(tmp_path, "levels", level, "pack", "quantize", for_arm=level == "neon")
    n_equal = {int(kind): int(n) for kind, n in re.findall(r"type (\d+): (\d+) numbers are equal", out)}
    assert n_equal.keys() == {NUMBERS[name] for name in kernel_types()}, (
        "PANELS has other types than the native library: run python build_native.py --backend cpu"
    )
    assert min(n_equal.values()) > 100


@needs_tiles
def test_tiles_give_the_same_bits_in_pieces(tmp_path: Path) -> None:
    out = run(tmp_path, "tiles", "avx512", "pack", "quantize", "tile_products")
    n_equal = {int(kind): int(n) for kind, n in re.findall(r"type (\d+): (\d+) numbers are equal", out)}
    assert n_equal.keys() == {NUMBERS[name] for name in kernel_types()}
    assert min(n_equal.values()) > 100


@needs_avx2
def test_every_level_multiplies_floats_in_the_same_order(tmp_path: Path) -> None:
    out = run(tmp_path, "float_levels", "float_products_avx2", "float_products_avx512")
    counts = {name: int(n) for name, n in re.findall(r"(\S+): (\d+) numbers are equal", out)}
    has_avx512 = not missing_features(["avx512f", "avx512dq", "avx512bw", "avx512vl"])
    assert list(counts) == ["avx2", "avx512"][: 1 + has_avx512]
    assert min(counts.values()) > 10_000


@needs_avx2
def test_every_level_changes_states_in_the_same_order(tmp_path: Path) -> None:
    out = run(tmp_path, "linear_levels", "linear_avx2", "linear_avx512")
    counts = {name: int(n) for name, n in re.findall(r"(\S+): (\d+) numbers are equal", out)}
    has_avx512 = not missing_features(["avx512f", "avx512dq", "avx512bw", "avx512vl"])
    assert list(counts) == ["avx2", "avx512"][: 1 + has_avx512]
    assert min(counts.values()) > 1_000_000
