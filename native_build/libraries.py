"""Builds llama.cpp's libraries with CMake, or takes them from the cache."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from native_build import progress, store
from native_build.accelerators import Accelerator
from native_build.errors import BuildError
from native_build.options import BACKENDS
from native_build.paths import cache_dir
from native_build.recipe import Recipe, core_libraries, versioned
from native_build.systems import System
from native_build.toolchain import find_cmake, find_ninja

_TITLES = {
    "core": "llama.cpp with its CPU backend",
    "cuda": "the CUDA backend",
    "vulkan": "the Vulkan backend",
    "metal": "the Metal backend",
    "rpc": "the RPC backend",
    "media": "the media library",
}


@dataclass(frozen=True)
class Libraries:
    """Finished libraries in the cache: their folders (the core's first), and whether they use OpenMP."""

    folders: tuple[Path, ...]
    openmp: bool


def build_libraries(
    recipe: Recipe, accelerators: Sequence[Accelerator], say: Callable[[str], None]
) -> Libraries:
    """Build the core and these backends, but only those that the cache lacks. Raises BuildError."""
    tree = cache_dir() / "build" / recipe.tree_key
    finished = cache_dir() / "native" / recipe.key
    targets = {"core": finished / "core"}
    for accelerator in accelerators:
        targets[accelerator.name] = finished / f"{accelerator.name}-{store.key_of({**accelerator.identity})}"

    if recipe.options.clean or not all(store.lookup(target) for target in targets.values()):
        # Only processes that compile take the lock: finished libraries can be used while another backend is compiled.
        with store.locked(tree.with_suffix(".lock"), say):
            if recipe.options.clean:
                shutil.rmtree(tree, ignore_errors=True)
                shutil.rmtree(finished, ignore_errors=True)
            missing = {name: target for name, target in targets.items() if store.lookup(target) is None}
            _say_cached([name for name in targets if name not in missing], say)
            if missing:
                _compile(recipe, accelerators, tree, missing, say)
    else:
        _say_cached(targets, say)
    manifest = store.lookup(targets["core"])
    if manifest is None:
        raise BuildError(f"{targets['core']} was removed while it was in use", "run the same command again")
    return Libraries(tuple(targets.values()), bool(manifest["openmp"]))


def _say_cached(names: Iterable[str], say: Callable[[str], None]) -> None:
    for name in names:
        say(f"{_TITLES[name]}: cached")


def _compile(
    recipe: Recipe,
    accelerators: Sequence[Accelerator],
    tree: Path,
    targets: dict[str, Path],
    say: Callable[[str], None],
) -> None:
    cmake, ninja = find_cmake(), find_ninja()
    tree.mkdir(parents=True, exist_ok=True)
    injected = tree / "llamapipe.cmake"
    if not injected.exists():
        injected.write_text(recipe.injected, encoding="utf-8")
    configure = [
        cmake,
        "-S",
        str(recipe.source.path),
        "-B",
        str(tree),
        "-G",
        "Ninja",
        *recipe.cmake_arguments,
    ]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DCMAKE_PROJECT_INCLUDE={injected}"]
    configure += [f"-DLLAMA_BUILD_COMMIT={recipe.source.commit[:9]}"]
    # Only backends that are compiled now are enabled: llama.cpp's build makes the core wait for all enabled backends.
    configure += [f"-DGGML_{name.upper()}=OFF" for name in (*BACKENDS[1:], "rpc") if name not in targets]
    configure += ["-DLLAMA_BUILD_MTMD=OFF"] if "media" not in targets else []
    for accelerator in accelerators:
        configure += accelerator.cmake_arguments if accelerator.name in targets else ()
    n_jobs = recipe.options.n_jobs
    goals = ["llama"] if "core" in targets else []
    goals += ["mtmd" if name == "media" else f"ggml-{name}" for name in targets if name != "core"]
    make = [cmake, "--build", str(tree), "--parallel", str(n_jobs), "--target", *goals]
    log = tree / "build.log"
    say(f"compiling {' and '.join(_TITLES[name] for name in targets)}, {n_jobs} at a time; log: {log}")
    with log.open("w", encoding="utf-8", errors="replace") as file:
        progress.run(configure, file, _environment(recipe), "configuring llama.cpp", None)
        progress.run(make, file, _environment(recipe), "compiling llama.cpp", say)
    for name, target in targets.items():
        openmp = _cmake_variable(tree, "GGML_OPENMP_ENABLED") == "ON"
        store.publish(
            _outputs(tree / "bin", name, recipe.options.system), {"component": name, "openmp": openmp}, target
        )


def _environment(recipe: Recipe) -> dict[str, str]:
    # Flags are passed as arguments. CMake would apply them a second time from the environment.
    environment = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "CXXFLAGS")}
    # llama.cpp's build asks git for its commit. An unpacked archive must not get the commit of an enclosing repository.
    environment["GIT_CEILING_DIRECTORIES"] = str(recipe.source.path.parent)
    return environment


def _cmake_variable(tree: Path, name: str) -> str:
    try:
        text = (tree / "CMakeCache.txt").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    entry = re.search(rf"^{name}:\w+=(.*)$", text, re.MULTILINE)
    return entry[1] if entry else ""


def _outputs(folder: Path, component: str, system: System) -> dict[str, Path]:
    if component == "rpc":  # renamed: under ggml's name, ggml's loader would open it with the other backends
        built = folder / system.backend.format("rpc")
        return {f"libllamapipe-rpc{built.suffix}": built}
    if component == "media":
        return versioned(folder, system, "mtmd")
    pattern = system.backend.format("cpu*" if component == "core" else component)
    files = {path.name: path for path in folder.glob(pattern)}
    return {**files, **core_libraries(folder, system)} if component == "core" else files
