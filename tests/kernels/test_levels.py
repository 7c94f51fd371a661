"""The kernels for CPUs that this machine may not be: their loops with plain vectors, against those for AVX2."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llamapipe.native._cpu_features import missing_features

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from native_build.sources import find_source  # noqa: E402
from native_build.toolchain import find_compilers  # noqa: E402

KERNELS = ROOT / "llamapipe" / "native" / "kernels"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernels for x86")
@pytest.mark.skipif(bool(missing_features(["avx2", "fma", "f16c"])), reason="needs a CPU with AVX2")
def test_every_level_gives_the_same_bits(tmp_path: Path) -> None:
    program = tmp_path / "levels"
    ggml = find_source(None, print).path / "ggml"
    folders = [f"-I{folder}" for folder in (KERNELS, ggml / "include", ggml / "src")]
    sources = [
        Path(__file__).with_name("levels.cpp"),
        *(KERNELS / f"{n}.cpp" for n in ("avx2", "pack", "quantize")),
    ]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off"]
    subprocess.run([*find_compilers().cxx, *flags, *folders, *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    numbers = [int(n) for n in re.findall(r"type \d+: (\d+) numbers are equal", done.stdout)]
    assert len(numbers) == 11
    assert min(numbers) > 100
