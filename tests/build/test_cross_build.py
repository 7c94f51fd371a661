"""A build for another machine: compilers, headers, CMake's arguments, and what comes out of it."""

from __future__ import annotations

import platform
import shutil
import struct
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.miniature import make_script, make_tree

ROOT = Path(__file__).resolve().parents[2]
# At the end: the package under test is the installed one, where there is one.
sys.path.append(str(ROOT))

from native_build import module, sources, toolchain  # noqa: E402
from native_build.cpu_features import required_features  # noqa: E402
from native_build.errors import BuildError  # noqa: E402
from native_build.libraries import build_libraries  # noqa: E402
from native_build.options import BuildOptions, with_settings  # noqa: E402
from native_build.recipe import Recipe  # noqa: E402

TARGET = "aarch64-linux-gnu"
OPTIONS = BuildOptions(target=TARGET, all_variants=True, rpc=False, media=False)
_MACHINE_OF_ELF = {183: "aarch64", 62: "x86_64"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there are cross compilers for Linux only")
needs_compiler = pytest.mark.skipif(
    shutil.which(f"{TARGET}-g++") is None, reason=f"{TARGET}-g++ is missing here (ci/setup_arm64_debian.sh)"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CC", "CXX", "LLAMAPIPE_LLAMA_CPP_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LLAMAPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def machine_of(path: Path) -> str:
    return _MACHINE_OF_ELF[struct.unpack_from("<H", path.read_bytes(), 18)[0]]


def recipe_for(tree: Path, options: BuildOptions = OPTIONS) -> Recipe:
    return Recipe(options, sources.find_source(tree, print), toolchain.find_compilers(options.target))


needs_zig = pytest.mark.skipif(find_spec("ziglang") is None, reason="the package ziglang is missing")


@needs_zig
@pytest.mark.parametrize("processor", ["arm64", "x86_64"])
def test_libraries_for_macos(processor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By zig; for the processor, and found beside the one that asks for them. The current folder stays empty."""
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(Path.home() / ".cache" / "zig"))
    options = BuildOptions(target=f"{processor}-apple-darwin", rpc=False, media=False)
    tree = make_tree(tmp_path / "llama.cpp")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (core,) = build_libraries(recipe_for(tree, options), (), lambda text: None).folders
    names = {f"libllamapipe-{name}.0.dylib" for name in ("llama", "ggml", "ggml-base")}
    assert {path.name for path in core.iterdir() if path.name != "result.json"} == {
        "libggml-cpu.so",
        *names,
    }
    for name in ("libggml-cpu.so", *names):
        data = (core / name).read_bytes()
        magic, kind = struct.unpack_from("<II", data)
        assert (magic, kind) == (0xFEEDFACF, {"x86_64": 0x01000007, "arm64": 0x0100000C}[processor])
        assert b"/ziglang/" not in data and str(tmp_path).encode() not in data  # no path of this machine
    assert b"@rpath/libllamapipe-ggml-base.0.dylib" in (core / "libllamapipe-llama.0.dylib").read_bytes()
    assert b"@loader_path" in (core / "libggml-cpu.so").read_bytes()
    assert list(here.iterdir()) == []


@needs_zig
def test_libraries_for_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By zig, under the names that they are loaded by; each exports its functions, and not what zig puts into all."""
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(Path.home() / ".cache" / "zig"))
    options = BuildOptions(target="x86_64-windows-gnu", rpc=False, media=False)
    tree = make_tree(tmp_path / "llama.cpp")
    (core,) = build_libraries(recipe_for(tree, options), (), lambda text: None).folders
    libraries = list(core.glob("*.dll"))
    names = {"ggml-cpu.dll", *(f"libllamapipe-{name}.dll" for name in ("llama", "ggml", "ggml-base"))}
    assert {path.name for path in libraries} == names
    for path in libraries:
        data = path.read_bytes()
        assert data[(at := struct.unpack_from("<I", data, 0x3C)[0]) : at + 6] == b"PE\0\0\x64\x86"
    base = (core / "libllamapipe-ggml-base.dll").read_bytes()
    assert b"\0base\0" in base and b"\0atexit\0" not in base


@needs_compiler
def test_libraries_are_for_the_target(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "llama.cpp")
    (core,) = build_libraries(recipe_for(tree), (), lambda text: None).folders
    libraries = list(core.glob("*.so*"))
    assert {path.name for path in libraries} == {
        "libggml-cpu.so",
        *(f"libllamapipe-{name}.so.0" for name in ("llama", "ggml", "ggml-base")),
    }
    assert {machine_of(path) for path in libraries} == {"aarch64"}


@needs_compiler
def test_a_build_for_a_target_is_another_one_and_uses_nothing_of_this_machine(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "llama.cpp")
    recipe = recipe_for(tree)
    here = recipe_for(tree, BuildOptions(all_variants=True, rpc=False, media=False))
    assert recipe.key != here.key
    assert not any(
        "native" in flag for flag in recipe_for(tree, BuildOptions(target=TARGET)).compiler_flags("CXX")
    )
    assert f"-DCMAKE_SYSTEM_PROCESSOR={OPTIONS.machine}" in recipe.cmake_arguments
    assert not any("CMAKE_SYSTEM" in argument for argument in here.cmake_arguments)


@pytest.mark.parametrize(("target", "is_same"), [("x86_64-windows-gnu", True), (TARGET, False)])
def test_where_zig_is_does_not_matter(target: str, is_same: bool, tmp_path: Path) -> None:
    """Each environment has its own; another compiler in another place may be another one."""
    source = sources.find_source(make_tree(tmp_path / "source"), print)
    keys = set()
    for place in ("one", "other"):
        compilers = toolchain.Compilers((f"/{place}/zig", "cc"), (f"/{place}/zig", "c++"), "0.17")
        keys.add(Recipe(BuildOptions(target=target), source, compilers).key)
    assert len(keys) == (1 if is_same else 2)


def test_which_variants_of_arm_are_built(tmp_path: Path) -> None:
    """llama.cpp's function that adds a variant, with its call of add_dependencies."""
    cmake = toolchain.find_cmake()
    injected = tmp_path / "injected.cmake"
    compilers = toolchain.Compilers(("cc",), ("c++",), "")
    source = sources.find_source(make_tree(tmp_path / "source"), print)
    injected.write_text(Recipe(OPTIONS, source, compilers).injected)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a.c").write_text("int a(void) { return 1; }\n")
    (tree / "CMakeLists.txt").write_text(
        """cmake_minimum_required(VERSION 3.14...3.28)
project("ggml" C)
function(ggml_add_cpu_backend_variant tag)
  foreach(feature ${ARGN})
    set(USE_${feature} ON)
  endforeach()
  add_library(ggml-cpu-${tag} MODULE a.c)
  target_compile_definitions(ggml-cpu-${tag} PRIVATE I8MM=${USE_MATMUL_INT8} SVE=${USE_SVE})
  add_dependencies(ggml ggml-cpu-${tag})
endfunction()
add_library(ggml SHARED a.c)
ggml_add_cpu_backend_variant(armv8.2_2 DOTPROD FP16_VECTOR_ARITHMETIC)
ggml_add_cpu_backend_variant(armv8.6_1 DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8)
ggml_add_cpu_backend_variant(armv9.2_1 DOTPROD FP16_VECTOR_ARITHMETIC SVE MATMUL_INT8 SME)
"""
    )
    built = tmp_path / "built"
    toolchain._run([cmake, "-S", str(tree), "-B", str(built), f"-DCMAKE_PROJECT_INCLUDE={injected}"])
    done = toolchain._run([cmake, "--build", str(built), "--target", "ggml"])
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in built.glob("libggml-cpu-*.so")} == {
        "libggml-cpu-armv8.2_2",
        "libggml-cpu-armv8.6_0",
        "libggml-cpu-armv8.6_1",
    }


def test_only_arm_has_other_variants_than_llama_cpp(tmp_path: Path) -> None:
    source = sources.find_source(make_tree(tmp_path / "source"), print)
    compilers = toolchain.Compilers(("cc",), ("c++",), "")

    def changes(options: BuildOptions) -> bool:
        return "armv9" in Recipe(options, source, compilers).injected

    assert changes(OPTIONS)
    assert not changes(BuildOptions(target="riscv64-linux-gnu", all_variants=True))
    assert not changes(BuildOptions(target=TARGET))
    assert changes(BuildOptions(all_variants=True)) == (platform.machine() in ("aarch64", "arm64"))


def test_no_cross_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        BuildError, match=rf"no C\+\+ compiler for {TARGET} was found \(looked for {TARGET}-g\+\+\)"
    ) as caught:
        toolchain.find_compilers(TARGET)
    assert "ci/setup_arm64_debian.sh" in caught.value.fix


def test_a_compiler_for_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = make_script(tmp_path / "c++", "echo riscv64-linux-gnu")
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(BuildError, match=f"compiles for riscv64-linux-gnu, not for {TARGET}"):
        toolchain.find_compilers(TARGET)


def test_headers_of_the_target(cache: Path) -> None:
    with pytest.raises(BuildError, match=f"Python's C headers for {TARGET} are missing") as caught:
        module.module_headers(OPTIONS)
    assert "ci/setup_arm64_debian.sh" in caught.value.fix
    headers = cache / "roots" / TARGET / "usr" / "include" / "python3.12"
    headers.mkdir(parents=True)
    (headers / "Python.h").write_text("")
    assert module.module_headers(OPTIONS) == headers


def test_a_free_threaded_python_builds_for_its_own_machine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_threaded", lambda: True)
    with pytest.raises(BuildError, match="a free-threaded Python cannot build for another machine"):
        module.module_headers(OPTIONS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"target": "aarch64"},
            "'aarch64' is neither a Linux system with GNU's C library, nor Windows, nor macOS",
        ),
        ({"target": "aarch64-apple-darwin"}, "is neither a Linux system"),
        ({"target": "arm64-windows-gnu"}, "is neither a Linux system"),
        ({"target": TARGET, "backend": "vulkan"}, "the vulkan backend cannot be built for another machine"),
    ],
)
def test_targets_that_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        with_settings(BuildOptions(), settings)


def test_a_cross_build_requires_all_features_that_its_flags_name() -> None:
    macros = ["#define __ARM_FEATURE_DOTPROD 1", "#define __aarch64__ 1"]
    assert required_features(macros, None) == ["asimddp"]
