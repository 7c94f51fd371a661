"""Builds the cffi module: API mode, out of line, with our own C++ linked in."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from native_build import store
from native_build.errors import BuildError
from native_build.libraries import Libraries
from native_build.options import BuildOptions
from native_build.paths import PACKAGE_NATIVE, PROJECT, cache_dir
from native_build.recipe import Recipe, core_libraries
from native_build.toolchain import check_python_headers, target_python_headers

# Increase this when equal inputs give a different result.
VERSION = 1
NAME = "llamapipe.native._native"
_CAPTURE: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
# Our own C++. A file of kernels chooses its instruction sets itself, so all are compiled with the same flags.
_FOLDERS = (PACKAGE_NATIVE / "src", PACKAGE_NATIVE / "kernels")
_TESTING = "50_testing.h"
_FLAGS = ("-O3", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")


def free_threaded() -> bool:
    """Whether this Python is built without the GIL; it has no stable ABI then."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def file_name() -> str:
    """The module's file name; the same for every version of Python if the stable ABI can be used."""
    return f"_native{sysconfig.get_config_var('EXT_SUFFIX')}" if free_threaded() else "_native.abi3.so"


def build_module(recipe: Recipe, libraries: Libraries, say: Callable[[str], None]) -> Path:
    """The compiled module, in the cache. Raises BuildError with the compiler's first errors."""
    cffi_version = check_cffi()
    headers = module_headers(recipe.options)
    headers_of_cdef = sorted((PACKAGE_NATIVE / "cdef").glob("*.h"))
    declarations = _read(p for p in headers_of_cdef if recipe.options.testing or p.name != _TESTING)
    sources = _read(path for folder in _FOLDERS for path in sorted(folder.iterdir()))
    key = store.key_of(
        {
            "version": VERSION,
            "declarations": declarations,
            "sources": sources,
            "libraries": recipe.key,
            "python": [sys.version, str(headers), file_name()],
            "cffi": cffi_version,
            "flags": [_FLAGS, _link_flags(), recipe.options.all_variants, recipe.options.testing],
        }
    )
    target = cache_dir() / "module" / key
    with store.locked(target.with_suffix(".lock"), say):
        if not recipe.options.clean and store.lookup(target) is not None:
            say("the cffi module: cached")
            return target / file_name()
        say("compiling the cffi module")
        with tempfile.TemporaryDirectory(prefix="llamapipe-module-") as name:
            scratch = Path(name)
            _generate("\n".join(declarations.values()), scratch / "_native.c")
            objects = _compile(recipe, headers, scratch)
            core = core_libraries(libraries.folders[0]).values()
            built = _link(recipe, [*objects, *core], scratch / file_name())
            store.publish({file_name(): built}, {}, target)
    return target / file_name()


def module_headers(options: BuildOptions) -> Path:
    """The folder of the ``Python.h`` to compile with; raises BuildError if there is none."""
    if not options.target:
        return check_python_headers()
    if free_threaded():
        raise BuildError(
            "a free-threaded Python cannot build for another machine: it has no stable ABI",
            f"build with an ordinary one, or on a machine for {options.target}",
        )
    return target_python_headers(options.target)


def check_cffi() -> str:
    """The version of cffi; raises BuildError if it is not installed."""
    try:
        import cffi
    except ImportError:
        fix = f"{sys.executable} -m pip install cffi"
        raise BuildError("the Python package cffi is missing", fix) from None
    return str(cffi.__version__)


def _read(paths: Iterable[Path]) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}


def _generate(declarations: str, target: Path) -> None:
    from cffi import FFI

    ffi = FFI()
    try:
        ffi.cdef(declarations)
    except Exception as error:  # cffi's parser raises many kinds
        raise BuildError(
            f"cffi cannot read llamapipe/native/cdef: {error}", "correct the declaration"
        ) from None
    # cffi's C code uses the stable ABI by default if this Python has one.
    ffi.set_source(NAME, '#include "native.h"\n')
    with contextlib.redirect_stdout(io.StringIO()):  # cffi announces the file's name
        ffi.emit_c_code(str(target))


def _compile(recipe: Recipe, headers: Path, scratch: Path) -> list[Path]:
    tree = recipe.source.path
    ours = [*_FOLDERS, tree / "include", tree / "ggml" / "include", headers]
    # llama.cpp's internal headers, for functions without a public counterpart: after our own, without their warnings.
    internal = [tree / "src", tree / "ggml" / "src", tree / "tools" / "mtmd"]
    include = [
        *(f"-I{path}" for path in ours),
        *(part for path in internal for part in ("-isystem", str(path))),
    ]
    if recipe.options.target:  # Debian's pyconfig.h includes <aarch64-linux-gnu/python3.x/pyconfig.h>
        include += ["-idirafter", str(headers.parent)]
    include += _path_maps(recipe, scratch)
    if recipe.options.testing:
        include.append("-DLP_TESTING")
    objects, running = [], []
    sources = [path for folder in _FOLDERS for path in sorted(folder.glob("*.cpp"))]
    for path in [scratch / "_native.c", *sources]:
        if path.suffix == ".c":
            command = [*recipe.compilers.c, *_FLAGS, *recipe.compiler_flags("C")]
        else:
            command = [*recipe.compilers.cxx, "-std=c++17", *_FLAGS, *recipe.compiler_flags("CXX")]
        objects.append(scratch / f"{path.name}.o")
        command += [*include, "-c", str(path), "-o", str(objects[-1])]
        running.append((path.name, subprocess.Popen(command, **_CAPTURE)))
    results = [(name, *process.communicate(), process.returncode) for name, process in running]
    for name, output, _, code in results:
        _check(code, output, f"compiling {name}")
    return objects


def _path_maps(recipe: Recipe, scratch: Path) -> list[str]:
    """Flags that keep this machine's folders out of a module for other machines (see ``recipe.py``)."""
    if not recipe.options.all_variants:
        return []
    folders = {recipe.source.path: "llama.cpp", PROJECT: "llamapipe", scratch: "build"}
    return [f"-ffile-prefix-map={folder}={name}" for folder, name in folders.items()]


def _link(recipe: Recipe, inputs: list[Path], target: Path) -> Path:
    given = shlex.split(os.environ.get("LDFLAGS", ""))
    command = [*recipe.compilers.cxx, *_link_flags(), *map(str, inputs), *given, "-o", str(target)]
    done = subprocess.run(command, check=False, **_CAPTURE)
    _check(done.returncode, done.stdout, "linking the cffi module")
    return target


def _link_flags() -> list[str]:
    if sys.platform == "darwin":
        return ["-bundle", "-undefined", "dynamic_lookup", "-Wl,-rpath,@loader_path/lib"]
    # ggml keeps pointers into the module (kernels/weight_buffer.cpp): it is never unloaded.
    return ["-shared", "-pthread", "-Wl,-rpath,$ORIGIN/lib", "-Wl,--as-needed", "-Wl,-z,nodelete"]


def _check(code: int, output: str, what: str) -> None:
    if code != 0:
        lines = output.splitlines()
        errors = [line for line in lines if "error" in line or "undefined" in line] or lines
        listed = "\n    ".join(errors[:8])
        raise BuildError(f"{what} failed:\n    {listed}", "correct it and run the same command again")
    if output.strip():
        print(output, file=sys.stderr)
