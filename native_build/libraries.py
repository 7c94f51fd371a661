"""Builds llama.cpp's libraries with CMake, once per source, flags and compiler."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from native_build import progress, store
from native_build.accelerators import Accelerator, find_accelerator
from native_build.errors import BuildError
from native_build.options import BuildOptions
from native_build.paths import cache_dir
from native_build.sources import Source
from native_build.toolchain import Compilers, find_cmake, find_ninja

# Raise when what is built from the same inputs changes.
RECIPE = 1
INJECTED = Path(__file__).resolve().parent / "llamapipe.cmake"
_CORE = ("llama", "ggml", "ggml-base")
# What people set to influence compilers; CMake reads them too.
_VARIABLES = ("CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "MACOSX_DEPLOYMENT_TARGET", "ARCHFLAGS", "SDKROOT")


@dataclass(frozen=True)
class Libraries:
    """Finished libraries in the cache: folders (the core's first), facts about them, and whether any was compiled."""

    folders: tuple[Path, ...]
    facts: dict[str, object]
    key: str
    compiled: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """Everything that decides what the libraries are."""

    options: BuildOptions
    source: Source
    compilers: Compilers

    @property
    def flags(self) -> tuple[str, ...]:
        flag = "" if self.options.all_variants else self.compilers.native_flag
        c_flags = f"{os.environ.get('CFLAGS', '')} {flag}".strip()
        cxx_flags = f"{os.environ.get('CXXFLAGS', '')} {flag}".strip()
        on_off = {True: "ON", False: "OFF"}
        origin = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
        return (
            "-DCMAKE_BUILD_TYPE=Release",
            "-DBUILD_SHARED_LIBS=ON",
            f"-DCMAKE_C_FLAGS={c_flags}",
            f"-DCMAKE_CXX_FLAGS={cxx_flags}",
            f"-DCMAKE_INSTALL_RPATH={origin}",
            "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
            "-DGGML_BACKEND_DL=ON",
            # llama.cpp refuses GGML_NATIVE together with loadable backends; the flag above does its work.
            "-DGGML_NATIVE=OFF",
            f"-DGGML_CPU_ALL_VARIANTS={on_off[self.options.all_variants]}",
            f"-DGGML_OPENMP={on_off[self.options.openmp]}",
            "-DGGML_BLAS=OFF",
            *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP", "UI")),
            "-DLLAMA_OPENSSL=OFF",
        )

    def key_parts(self) -> dict[str, object]:
        return {
            "recipe": RECIPE,
            "injected": INJECTED.read_text(encoding="utf-8"),
            "flags": self.flags,
            "commands": [self.compilers.c, self.compilers.cxx],
            "compiler": self.compilers.version,
            "cpu": "" if self.options.all_variants else self.compilers.native_identity,
            "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
            "platform": [sys.platform, platform.machine()],
        }


def build_libraries(options: BuildOptions, source: Source, compilers: Compilers, say: Callable[[str], None]) -> Libraries:
    """The core and the backends asked for, from the cache where they are there. Raises BuildError."""
    plan = _Plan(options, source, compilers)
    accelerators = _accelerators(options, compilers)
    key = store.key_of({**plan.key_parts(), "source": source.identity})
    # A tree under development keeps its build folder when a file of it changes, so that only that is compiled.
    place = source.identity if source.pinned else f"path:{source.path}"
    tree = cache_dir() / "build" / store.key_of({**plan.key_parts(), "source": place})
    finished = cache_dir() / "native" / key
    targets = {"core": finished / "core"}
    for name in options.backends[1:]:
        targets[name] = finished / f"{name}-{store.key_of({'accelerator': accelerators[name].identity})}"

    with store.locked(tree.with_suffix(".lock"), say):
        if options.clean:
            for folder in (tree, finished):
                shutil.rmtree(folder, ignore_errors=True)
        compiled = tuple(name for name, target in targets.items() if store.lookup(target) is None)
        for name in targets:
            if name not in compiled:
                say(f"{_TITLES[name]}: cached")
        if compiled:
            _compile(plan, accelerators, tree, {name: targets[name] for name in compiled}, say)
    facts: dict[str, object] = {}
    for target in targets.values():
        manifest = store.lookup(target)
        if manifest is None:
            raise BuildError(f"{target} was changed while it was being used", "run the same command again")
        facts.update(manifest["facts"])
    return Libraries(tuple(targets.values()), facts, key, compiled)


_TITLES = {
    "core": "llama.cpp with its CPU backend",
    "cuda": "CUDA backend",
    "vulkan": "Vulkan backend",
    "metal": "Metal backend",
}


def _accelerators(options: BuildOptions, compilers: Compilers) -> dict[str, Accelerator]:
    if len(options.backends) == 1:
        return {}
    cmake = find_cmake()
    return {name: find_accelerator(name, options, compilers, cmake) for name in options.backends[1:]}


def _compile(
    plan: _Plan, accelerators: dict[str, Accelerator], tree: Path, targets: dict[str, Path], say: Callable[[str], None]
) -> None:
    cmake, ninja = find_cmake(), find_ninja()
    tree.mkdir(parents=True, exist_ok=True)
    log = tree / "build.log"
    wanted = dict(accelerators)
    arguments = [cmake, "-S", str(plan.source.path), "-B", str(tree), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    arguments += [f"-DCMAKE_C_COMPILER={_cmake_command(plan.compilers.c)}"]
    arguments += [f"-DCMAKE_CXX_COMPILER={_cmake_command(plan.compilers.cxx)}"]
    arguments += [f"-DCMAKE_PROJECT_INCLUDE={INJECTED}", f"-DLLAMA_BUILD_COMMIT={plan.source.commit[:9]}"]
    arguments += plan.flags
    for name in ("cuda", "vulkan", "metal"):
        arguments += wanted[name].cmake_arguments if name in wanted else [f"-DGGML_{name.upper()}=OFF"]
    names = " and ".join(_TITLES[name] for name in targets)
    say(f"compiling {names} with {plan.options.n_jobs} jobs; log: {log}")
    environment = dict(os.environ)
    # The flags are given as arguments: from the environment CMake would take them a second time.
    for name in ("CFLAGS", "CXXFLAGS"):
        environment.pop(name, None)
    # An unpacked archive is in no repository: keep CMake's questions from reaching one that is around it.
    environment["GIT_CEILING_DIRECTORIES"] = str(plan.source.path.parent)
    with open(log, "w", encoding="utf-8", errors="replace") as file:
        progress.run(arguments, file, environment, "configuring", None)
        goals = ["llama"] if "core" in targets else [f"ggml-{name}" for name in targets]
        command = [cmake, "--build", str(tree), "--parallel", str(plan.options.n_jobs), "--target", *goals]
        progress.run(command, file, environment, "compiling", say)
    facts = {"openmp": _cache_entry(tree, "GGML_OPENMP_ENABLED") == "ON"}
    for name, target in targets.items():
        about = {"facts": facts if name == "core" else {}, "component": name}
        store.publish(_outputs(tree / "bin", name), about, target)


def _cmake_command(command: tuple[str, ...]) -> str:
    # A list: CMake takes the compiler and its fixed arguments (CXX="ccache g++").
    return ";".join(command)


def _cache_entry(tree: Path, name: str) -> str:
    text = (tree / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace")
    found = re.search(rf"^{name}:\w+=(.*)$", text, re.MULTILINE)
    return found[1] if found else ""


def _outputs(folder: Path, component: str) -> dict[str, Path]:
    """File names to ship → built files. Only the name by which each library is loaded: wheels hold no links."""
    if component != "core":
        return {path.name: path for path in [folder / f"libggml-{component}.so"]}
    files = {path.name: path for path in folder.glob("libggml-cpu*.so")}
    for name in _CORE:
        pattern = f"libllamapipe-{name}.*.dylib" if sys.platform == "darwin" else f"libllamapipe-{name}.so.*"
        # The shortest is the name with the ABI's number alone, which is the one that dependents ask for.
        path = min(folder.glob(pattern), key=lambda found: len(found.name))
        files[path.name] = path
    return files
