"""Runs the whole build: source, libraries, module, and their copies where the package looks for them."""

from __future__ import annotations

import errno
import json
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from native_build.accelerators import Accelerator, find_accelerators
from native_build.archives import source_date
from native_build.cpu_features import required_features
from native_build.errors import BuildError
from native_build.libraries import Libraries, build_libraries
from native_build.licences import llama_cpp_licence
from native_build.module import build_module, check_cffi, module_headers
from native_build.options import BuildOptions
from native_build.paths import cache_dir
from native_build.recipe import Recipe
from native_build.sources import find_source
from native_build.store import MANIFEST
from native_build.systems import is_program
from native_build.toolchain import Compilers, find_cmake, find_compilers, find_ninja, macros

# Errors that the user has to fix: a full disk, or a folder without write permission.
_NOT_OURS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


def build(options: BuildOptions, target: Path, say: Callable[[str], None]) -> None:
    """Build the module into ``target``, and the libraries into its folder ``lib``, as ``options`` ask.

    Files are replaced, never overwritten: a process that uses the old files keeps them. Raises BuildError.
    """
    try:
        _build(options, target, say)
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        problem = f"{error.filename or cache_dir()} cannot be written: {error.strerror}"
        raise BuildError(
            problem, "make room, or choose another cache: LLAMAPIPE_CACHE_DIR=/path/to/folder"
        ) from None


def _build(options: BuildOptions, target: Path, say: Callable[[str], None]) -> None:
    # Every requirement is checked before compiling, which takes minutes.
    compilers, accelerators = _requirements(options)
    recipe = Recipe(options, find_source(options.source, say), compilers)
    libraries = build_libraries(recipe, accelerators, say)
    module = build_module(recipe, libraries, say)

    folder = target / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    files = [path for built in libraries.folders for path in built.iterdir() if path.name != MANIFEST]
    for path in files:
        _replace(path, folder / path.name)
    _replace(module, target / module.name)
    with tempfile.TemporaryDirectory() as scratch:
        about = Path(scratch) / "build.json"
        about.write_text(json.dumps(_facts(recipe, libraries), indent=1) + "\n", encoding="utf-8")
        _replace(about, folder / about.name)
        licence = Path(scratch) / "LICENSE.llama.cpp"
        licence.write_text(llama_cpp_licence(recipe.source.path), encoding="utf-8")
        _replace(licence, folder / licence.name)
    kept = {"build.json", "LICENSE.llama.cpp", *(path.name for path in files)}
    for path in folder.iterdir():
        if (
            path.name not in kept
        ):  # left by an earlier build: a backend that this build omits would still be loaded
            path.unlink()


def check(options: BuildOptions) -> None:
    """Raise BuildError if a build with ``options`` lacks a requirement. Fetch and compile nothing."""
    _requirements(options)
    find_cmake()
    find_ninja()


def _requirements(options: BuildOptions) -> tuple[Compilers, tuple[Accelerator, ...]]:
    if sys.platform == "win32":
        raise BuildError(
            "llamapipe is not built on Windows, but for it, on Linux",
            "build_native.py --target x86_64-windows-gnu on Linux, or inside WSL (wsl --install)",
        )
    compilers = find_compilers(options.target)
    accelerators = find_accelerators(options, compilers)
    check_cffi()
    module_headers(options)
    return compilers, accelerators


def _facts(recipe: Recipe, libraries: Libraries) -> dict[str, object]:
    """Return facts about the build, for ``llamapipe doctor`` and for the check before the package loads the library."""
    return {
        "llama_cpp_commit": recipe.source.commit,
        "llama_cpp_identity": recipe.source.identity,
        "llama_cpp_source": recipe.source.description,
        "backends": list(recipe.options.backends),
        "compiler": recipe.compilers.version,
        # Only names: a wheel must not contain paths of the machine that built it.
        "flags": " ".join(
            Path(flag).name if flag[0] == "/" else flag for flag in recipe.compiler_flags("CXX")
        ),
        "cpu_all_variants": recipe.options.all_variants,
        "cpu_features": required_features(
            [
                *macros(recipe.compilers.c, recipe.compiler_flags("C")),
                *macros(recipe.compilers.cxx, recipe.compiler_flags("CXX")),
            ],
            None if recipe.options.target else Path("/proc/cpuinfo"),
        ),
        "openmp": libraries.openmp,
        "rpc": recipe.options.rpc,
        "media": recipe.options.media,
        "python": platform.python_version(),
        "platform": f"{recipe.options.system.cmake_name} {recipe.options.machine}",
        "date": time.strftime("%Y-%m-%d", time.gmtime(source_date())),
    }


def _replace(path: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
        copy = Path(scratch) / target.name
        shutil.copyfile(path, copy)
        copy.chmod(0o755 if is_program(target.name) else 0o644)
        copy.replace(target)
