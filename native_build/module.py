"""Builds the cffi module: API mode, out of line, with our own C++ linked in."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterable
from pathlib import Path

from native_build import progress, store
from native_build.errors import BuildError
from native_build.libraries import Libraries
from native_build.options import BuildOptions
from native_build.paths import PACKAGE_NATIVE, PROJECT, cache_dir
from native_build.recipe import Recipe, core_libraries
from native_build.systems import LINUX, MACOS, WINDOWS
from native_build.toolchain import check_python_headers, find_cmake, find_ninja, target_python_headers

# Increase this if equal inputs give a different result.
VERSION = 1
NAME = "llamapipe.native._native"
# Folders of compiled sources; CMakeLists.txt says how they are compiled.
_FOLDERS = (PACKAGE_NATIVE / "src", PACKAGE_NATIVE / "kernels")
_TESTING = "50_testing.h"
_N_TREES = 16
_COMPILED = "compiled.json"
# The configuration that Python's headers need for macOS and the stable ABI.
_MAC_PYCONFIG = """#ifndef Py_PYCONFIG_H
#define Py_PYCONFIG_H
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 8
#define SIZEOF_LONG_LONG 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_FPOS_T 8
#define SIZEOF_OFF_T 8
#define SIZEOF_PID_T 4
#define SIZEOF_UINTPTR_T 8
#define SIZEOF_WCHAR_T 4
#define ALIGNOF_LONG 8
#define ALIGNOF_SIZE_T 8
#define ALIGNOF_MAX_ALIGN_T 16
#define HAVE_LONG_LONG 1
#define HAVE_SSIZE_T 1
#define HAVE_STDARG_PROTOTYPES 1
#define HAVE_STDDEF_H 1
#define HAVE_STDINT_H 1
#define HAVE_INTTYPES_H 1
#define HAVE_SYS_TIME_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_UNISTD_H 1
#define HAVE_WCHAR_H 1
#endif
"""
_CMAKE = PACKAGE_NATIVE / "CMakeLists.txt"


def free_threaded() -> bool:
    """Return whether this Python is built without the GIL; it then has no stable ABI."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def file_name(options: BuildOptions) -> str:
    """Return the module's file name; the same for every version of Python if the stable ABI can be used."""
    return f"_native{sysconfig.get_config_var('EXT_SUFFIX')}" if free_threaded() else options.system.module


def build_module(recipe: Recipe, libraries: Libraries, say: Callable[[str], None]) -> Path:
    """Build the module and return its path in the cache. Raises BuildError with the compiler's first errors."""
    cffi_version = check_cffi()
    name = file_name(recipe.options)
    headers = module_headers(recipe.options)
    headers_of_cdef = sorted((PACKAGE_NATIVE / "cdef").glob("*.h"))
    declarations = _read(p for p in headers_of_cdef if recipe.options.testing or p.name != _TESTING)
    paths = [_CMAKE, *(path for folder in _FOLDERS for path in sorted(folder.iterdir()))]
    sources = _read(paths)
    surroundings = {
        "version": VERSION,
        "libraries": recipe.key,
        "python": [sys.version, str(headers), name],
        "cffi": cffi_version,
        "options": [recipe.options.all_variants, recipe.options.testing],
    }
    key = store.key_of({**surroundings, "declarations": declarations, "sources": sources})
    target = cache_dir() / "module" / key
    # The build folder belongs to this source tree, and keeps objects whose sources have not changed.
    trees = cache_dir() / "module-build"
    tree = trees / store.key_of({**surroundings, "project": str(PROJECT)})
    with store.locked(tree.with_suffix(".lock"), say):
        if not recipe.options.clean and store.lookup(target) is not None:
            say("the cffi module: cached")
            return target / name
        if recipe.options.clean or is_stale(tree, paths):
            shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True, exist_ok=True)
        _generate("\n".join(declarations.values()), tree / "_native.c")
        say(f"compiling the cffi module; log: {tree / 'build.log'}")
        # Before compiling: objects that were compiled before an error can be reused.
        remember(tree, paths)
        _compile(recipe, libraries, headers, tree)
        store.publish({name: tree / name}, {}, target)
    _prune(trees)
    return target / name


def is_stale(tree: Path, paths: Iterable[Path]) -> bool:
    """Return whether sources have changed without being newer than their objects, which Ninja would then keep.

    This happens if an archive is unpacked over another one: its files get the times that the archive records.
    """
    known = tree / _COMPILED
    if not known.exists():
        return tree.exists()
    hashes: dict[str, str] = json.loads(known.read_text(encoding="utf-8"))
    compiled_at = known.stat().st_mtime
    return any(
        hashes.get(_key(path)) != _hash(path) and path.stat().st_mtime <= compiled_at
        for path in paths
        if path.is_file()
    )


def remember(tree: Path, paths: Iterable[Path]) -> None:
    """Record the sources that were compiled in a folder, for ``is_stale``."""
    hashes = {_key(path): _hash(path) for path in paths if path.is_file()}
    (tree / _COMPILED).write_text(json.dumps(hashes), encoding="utf-8")


def _key(path: Path) -> str:
    """Return a source's name with its folder's: two folders may have files with the same name."""
    return f"{path.parent.name}/{path.name}"


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _prune(trees: Path) -> None:
    """Remove the least recently used folders: sources in temporary folders do not come back."""
    for old in sorted((path for path in trees.iterdir() if path.is_dir()), key=_used_at)[:-_N_TREES]:
        shutil.rmtree(old, ignore_errors=True)
        old.with_suffix(".lock").unlink(missing_ok=True)


def _used_at(tree: Path) -> float:
    log = tree / "build.log"
    return log.stat().st_mtime if log.exists() else tree.stat().st_mtime


def module_headers(options: BuildOptions) -> Path:
    """Return the folder of the ``Python.h`` to compile with. Raises BuildError if there is none."""
    if not options.target:
        return check_python_headers()
    if free_threaded():
        raise BuildError(
            "a free-threaded Python cannot build for another machine: it has no stable ABI",
            f"build with an ordinary one, or on a machine for {options.target}",
        )
    return _mac_headers() if options.system is MACOS else target_python_headers(options.target)


def _mac_headers() -> Path:
    """Write this Python's headers, with a configuration for macOS, to the cache. Return the folder."""
    here = check_python_headers()
    target = cache_dir() / "include" / f"python-macos-{sys.version_info[0]}.{sys.version_info[1]}"
    with store.locked(target.with_name(f"{target.name}.lock"), print):
        shutil.copytree(here, target, ignore=shutil.ignore_patterns("pyconfig*.h"), dirs_exist_ok=True)
        (target / "pyconfig.h").write_text(_MAC_PYCONFIG, encoding="utf-8")
    return target


def check_cffi() -> str:
    """Return the version of cffi. Raises BuildError if it is not installed."""
    try:
        import cffi
    except ImportError:
        fix = f"{sys.executable} -m pip install cffi"
        raise BuildError("the Python package cffi is missing", fix) from None
    return str(cffi.__version__)


def _read(paths: Iterable[Path]) -> dict[str, str]:
    return {_key(path): path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def _generate(declarations: str, target: Path) -> None:
    from cffi import FFI

    ffi = FFI()
    try:
        ffi.cdef(declarations)
    except Exception as error:  # cffi's parser raises many kinds of exceptions
        raise BuildError(
            f"cffi cannot read llamapipe/native/cdef: {error}", "correct the declaration"
        ) from None
    # cffi's C code uses the stable ABI by default if this Python has one.
    ffi.set_source(NAME, '#include "native.h"\n')
    with contextlib.redirect_stdout(io.StringIO()):  # cffi prints the file's name
        ffi.emit_c_code(str(target))  # does not touch an equal file


def _compile(recipe: Recipe, libraries: Libraries, headers: Path, tree: Path) -> None:
    cmake, ninja = find_cmake(), find_ninja()
    system = recipe.options.system
    flags = _path_maps(recipe, tree)
    # Debian's pyconfig.h includes <aarch64-linux-gnu/python3.x/pyconfig.h>.
    if recipe.options.target and system is LINUX:
        flags += ["-idirafter", str(headers.parent)]
    configure = [
        cmake,
        *("-S", str(PACKAGE_NATIVE), "-B", str(tree), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"),
        # A list, because a compiler command may have fixed arguments (CXX="ccache g++").
        f"-DCMAKE_C_COMPILER={';'.join(recipe.compilers.c)}",
        f"-DCMAKE_CXX_COMPILER={';'.join(recipe.compilers.cxx)}",
        f"-DCMAKE_C_FLAGS={shlex.join([*recipe.compiler_flags('C'), *flags])}",
        f"-DCMAKE_CXX_FLAGS={shlex.join([*recipe.compiler_flags('CXX'), *flags])}",
        *recipe.target_arguments,
        f"-DLLAMAPIPE_GENERATED={tree / '_native.c'}",
        f"-DLLAMAPIPE_FILE_NAME={file_name(recipe.options)}",
        f"-DLLAMAPIPE_LLAMA_SOURCE={recipe.source.path}",
        f"-DLLAMAPIPE_PYTHON_INCLUDE={headers}",
        f"-DLLAMAPIPE_LIBRARIES={';'.join(map(str, _linked(recipe, libraries, headers)))}",
        f"-DLLAMAPIPE_TESTING={'ON' if recipe.options.testing else 'OFF'}",
    ]
    # Flags are given as arguments; from the environment CMake would take them a second time.
    environment = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "CXXFLAGS")}
    make = [cmake, "--build", str(tree), "--parallel", str(recipe.options.n_jobs)]
    with (tree / "build.log").open("w", encoding="utf-8", errors="replace") as log:
        progress.run(configure, log, environment, "configuring the cffi module", None)
        progress.run(make, log, environment, "compiling the cffi module", None)
    warnings = [
        line for line in (tree / "build.log").read_text(errors="replace").splitlines() if "warning:" in line
    ]
    if warnings:
        print("\n".join(warnings), file=sys.stderr)


def _linked(recipe: Recipe, libraries: Libraries, headers: Path) -> list[Path]:
    """Return the libraries to link: llama.cpp's, and on Windows the one with Python's stable ABI."""
    linked = list(core_libraries(libraries.folders[0], recipe.options.system).values())
    return [*linked, headers / "python3.lib"] if recipe.options.system is WINDOWS else linked


def _path_maps(recipe: Recipe, tree: Path) -> list[str]:
    """Return flags that keep this machine's paths out of a module for other machines (see ``recipe.py``)."""
    if not recipe.options.all_variants:
        return []
    folders = {recipe.source.path: "llama.cpp", PROJECT: "llamapipe", tree: "build"}
    return [f"-ffile-prefix-map={folder}={name}" for folder, name in folders.items()]
