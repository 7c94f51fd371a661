"""Builds the cffi module: API mode, out of line, with our own C++ linked in."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from native_build import store
from native_build.errors import BuildError
from native_build.libraries import Libraries
from native_build.options import BuildOptions
from native_build.paths import PACKAGE_NATIVE, cache_dir
from native_build.sources import Source
from native_build.toolchain import Compilers, check_python_headers

RECIPE = 1
NAME = "llamapipe.native._native"


def free_threaded() -> bool:
    """Whether this Python is built without the GIL; it has no stable ABI then."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def file_name() -> str:
    """The module's file name: one for every version of Python where the stable ABI can be used."""
    return f"_native{sysconfig.get_config_var('EXT_SUFFIX')}" if free_threaded() else "_native.abi3.so"


def build_module(
    options: BuildOptions, source: Source, compilers: Compilers, libraries: Libraries, say: Callable[[str], None]
) -> Path:
    """The compiled module in the cache. Raises BuildError with the compiler's first errors."""
    ffi_class = _cffi()
    headers = check_python_headers()
    declarations = _read(sorted((PACKAGE_NATIVE / "cdef").glob("*.h")))
    sources = sorted((PACKAGE_NATIVE / "src").glob("*"))
    if not declarations:
        raise BuildError(f"{PACKAGE_NATIVE / 'cdef'} holds no declarations", "git checkout -- llamapipe/native")
    flags = _flags(options, compilers)
    key = store.key_of(
        {
            "recipe": RECIPE,
            "declarations": declarations,
            "sources": _read(sources),
            "libraries": libraries.key,
            "python": [sys.version, sys.platform, str(headers), file_name()],
            "cffi": _cffi_version(),
            "flags": flags,
        }
    )
    target = cache_dir() / "module" / key
    with store.locked(cache_dir() / "module" / f"{key}.lock", say):
        if not options.clean and store.lookup(target) is not None:
            say("cffi module: cached")
            return target / file_name()
        say("compiling the cffi module")
        with tempfile.TemporaryDirectory(prefix="llamapipe-module-") as scratch:
            built = _compile(ffi_class, declarations, Path(scratch), source, compilers, flags, headers, libraries)
            store.publish({file_name(): built}, {"facts": {}}, target)
    return target / file_name()


def _cffi() -> Any:
    try:
        from cffi import FFI
    except ImportError:
        raise BuildError("the Python package cffi is missing", f"{sys.executable} -m pip install cffi") from None
    return FFI


def _cffi_version() -> str:
    import cffi

    return str(cffi.__version__)


def _read(paths: Sequence[Path]) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def _flags(options: BuildOptions, compilers: Compilers) -> tuple[str, ...]:
    tuning = () if options.all_variants or not compilers.native_flag else (compilers.native_flag,)
    given = shlex.split(os.environ.get("CPPFLAGS", ""))
    return ("-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", *tuning, *given)


def _compile(
    ffi_class: Any,
    declarations: dict[str, str],
    scratch: Path,
    source: Source,
    compilers: Compilers,
    flags: tuple[str, ...],
    headers: Path,
    libraries: Libraries,
) -> Path:
    ffi = ffi_class()
    try:
        ffi.cdef("\n".join(declarations[name] for name in sorted(declarations)))
    except Exception as error:  # cffi's parser raises many kinds
        raise BuildError(f"cffi cannot read llamapipe/native/cdef: {error}", "correct the declaration") from None
    # Whether the stable ABI is used is decided by Py_LIMITED_API, which cffi sets unless this Python has no GIL.
    ffi.set_source(NAME, '#include "native.h"\n', py_limited_api=not free_threaded())
    generated = scratch / "_native.c"
    ffi.emit_c_code(str(generated))

    tree = source.path
    include = [PACKAGE_NATIVE / "src", tree / "include", tree / "ggml" / "include", headers]
    # Internal headers: llama-context.h for the one accessor that has no public counterpart.
    internal = [tree / "src", tree / "ggml" / "src"]
    arguments = [*flags, *(f"-I{path}" for path in include), *(f"-isystem{path}" for path in internal)]
    jobs: list[tuple[str, list[str]]] = [
        ("_native.c", [*compilers.c, *shlex.split(os.environ.get("CFLAGS", "")), *arguments, "-c", str(generated)])
    ]
    for path in sorted((PACKAGE_NATIVE / "src").glob("*.cpp")):
        extra = shlex.split(os.environ.get("CXXFLAGS", ""))
        jobs.append((path.name, [*compilers.cxx, "-std=c++17", *extra, *arguments, "-c", str(path)]))
    objects = [scratch / f"{name}.o" for name, _ in jobs]
    running = [
        subprocess.Popen([*command, "-o", str(target)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for (_, command), target in zip(jobs, objects, strict=True)
    ]
    for (name, _), process in zip(jobs, running, strict=True):
        output, _ = process.communicate()
        _check(process.returncode, output, f"compiling {name}")
    built = scratch / file_name()
    command = [*compilers.cxx, *_link_flags(), *map(str, objects), *_core(libraries)]
    command += [*shlex.split(os.environ.get("LDFLAGS", "")), "-o", str(built)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    _check(done.returncode, done.stdout, "linking the cffi module")
    return built


def _check(code: int, output: str, what: str) -> None:
    if code != 0:
        errors = [line for line in output.splitlines() if "error" in line or "undefined" in line] or output.splitlines()
        raise BuildError(f"{what} failed:\n    " + "\n    ".join(errors[:8]), "correct it and run the same command again")
    if output.strip():
        print(output, file=sys.stderr)


def _link_flags() -> list[str]:
    if sys.platform == "darwin":
        return ["-bundle", "-undefined", "dynamic_lookup", "-Wl,-rpath,@loader_path/lib"]
    return ["-shared", "-Wl,-rpath,$ORIGIN/lib", "-Wl,--as-needed", "-pthread"]


def _core(libraries: Libraries) -> list[str]:
    return [str(path) for path in sorted(libraries.folders[0].iterdir()) if path.name.startswith("libllamapipe-")]
