"""A build records the processor features that were compiled in, by which a loaded library is checked."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
from support.miniature import make_tree

ROOT = Path(__file__).resolve().parents[2]
# At the end: the package under test is the installed one, where there is one.
sys.path.append(str(ROOT))

from native_build import sources, toolchain  # noqa: E402
from native_build.cpu_features import required_features  # noqa: E402
from native_build.options import BuildOptions  # noqa: E402
from native_build.recipe import Recipe  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the build does not support Windows yet")


@pytest.mark.parametrize(
    ("defined", "listed", "required"),
    [
        (["__AVX2__ 1", "__FMA__ 1", "__AMX_TILE__ 1"], "flags\t\t: fpu avx2 fma avx", ["avx2", "fma"]),
        (["__ARM_FEATURE_SVE 1", "__aarch64__ 1"], "Features\t: fp asimd sve", ["sve"]),
        (["__AVX2__ 1"], "cpu\t: POWER9", []),
        (["__AVX2__X 1", "X__AVX2__ 1", "x __AVX2__ 1"], "flags\t\t: avx2", []),
    ],
)
def test_required_are_features_compiled_in_and_listed_here(
    defined: list[str], listed: str, required: list[str], tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\n{listed}\n\nprocessor\t: 1\n")
    assert required_features([f"#define {text}" for text in defined], cpuinfo) == required
    assert required_features(["#define __AVX2__ 1"], tmp_path / "nothing") == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86 compilers")
@pytest.mark.parametrize(
    ("all_variants", "flags", "required", "not_required"),
    [
        (True, "", set(), {"pni", "avx2"}),
        (True, "-mavx2", {"pni", "avx2"}, {"avx512f"}),
        (False, "-mno-sse3", set(), {"pni", "avx2"}),  # stays in force beside -march=native
    ],
)
def test_the_flags_of_the_build_decide(
    all_variants: bool,
    flags: str,
    required: set[str],
    not_required: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CPPFLAGS", raising=False)
    monkeypatch.setenv("CXXFLAGS", flags)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu pni ssse3 avx avx2 avx512f popcnt\n")
    tree = sources.find_source(make_tree(tmp_path / "llama.cpp"), print)
    recipe = Recipe(BuildOptions(all_variants=all_variants), tree, toolchain.find_compilers())
    macros = toolchain.macros(recipe.compilers.cxx, recipe.compiler_flags("CXX"))
    features = set(required_features(macros, cpuinfo))
    assert required <= features and not features & not_required
