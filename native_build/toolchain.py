"""Finds compilers and build tools. One message names a missing tool and how to install it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from native_build.errors import BuildError
from native_build.paths import cache_dir
from native_build.system import install_command
from native_build.workarounds import workaround_flags

# The pinned llama.cpp requires 3.14, its Vulkan backend 3.19. Versions before 3.21 were not tested.
MIN_CMAKE = (3, 21)

# With these instructions, ggml processes half-precision rows 128 values at a time and the remaining values one by one:
# all values of an attention head of size 64. Without them it processes 64 values at a time, in single precision.
_HALF_PRECISION = "#define __AVX512FP16__ 1"


def cross_setup(target: str) -> str:
    """Return the command that installs the requirements of ``--target``."""
    if "-apple-" in target:
        return f"{sys.executable} -m pip install ziglang"
    script = "windows" if "-windows-" in target else "arm64"
    return f"sudo ci/setup_{script}_debian.sh    (elsewhere a cross compiler: CC=... CXX=...)"


# Without these flags, zig adds checks of undefined behaviour to code that it does not optimize.
_ZIG_FLAGS = ("-fno-sanitize=undefined",)
# Instruction sets of zig's builds without variants, which do not use this machine's: AVX2 and FMA, or Apple's M1.
_ZIG_LEVELS = {"x86_64": ("-march=x86_64_v3",), "arm64": ("-mcpu=apple_m1",)}
# zig's names of Apple's systems. The wheel's tag has the same version (systems.py).
_ZIG_TARGETS = {"arm64-apple-darwin": "aarch64-macos.11.0", "x86_64-apple-darwin": "x86_64-macos.11.0"}
_CXX17 = "#include <filesystem>\n#include <string_view>\nint main() { return std::string_view().empty() ? 0 : 1; }\n"


@dataclass(frozen=True)
class Compilers:
    """The C and C++ compiler commands and their properties.

    ``version``: changes with the compilers. ``native_identity``: changes with this machine's instructions, which
    ``native_flags`` enable. ``workarounds``: flags that avoid known compiler bugs.
    """

    c: tuple[str, ...]
    cxx: tuple[str, ...]
    version: str
    native_flags: tuple[str, ...] = ()
    native_identity: str = ""
    workarounds: tuple[str, ...] = ()


def uses_zig(target: str) -> bool:
    """Return whether zig compiles for a target; CC and CXX can name other compilers."""
    return any(part in target for part in ("-windows-", "-apple-")) and not {"CC", "CXX"} & set(os.environ)


def find_compilers(target: str = "") -> Compilers:
    """Return the compilers from ``CC``/``CXX``, else the system's. Raises BuildError if they are missing or too old.

    With a ``target`` (``aarch64-linux-gnu``), the compilers are for that target and use none of this machine's
    instructions. For macOS and Windows, zig's clang is used: GCC stores 32-byte vectors on a stack that Windows aligns
    to 16 bytes (GCC bug 54412).
    """
    if target:
        fix = cross_setup(target)
        if uses_zig(target):
            cxx, c = _zig("c++", target), _zig("cc", target)
        else:
            cxx = _command("CXX", (f"{target}-g++",), f"C++ compiler for {target}", fix)
            c = _command("CC", (f"{target}-gcc",), f"C compiler for {target}", fix)
        machine = _first_line([*cxx, "-dumpmachine"])
        if _processor(machine) != _processor(target):
            raise BuildError(
                f"the C++ compiler ({shlex.join(cxx)}) compiles for {machine}, not for {target}",
                "unset CC and CXX, or set them to compilers for it",
            )
    else:
        cxx = _command("CXX", ("c++", "g++", "clang++"), "C++ compiler")
        c = _command("CC", ("cc", "gcc", "clang"), "C compiler")
    if (done := _compile(cxx, ["-std=c++17", "-x", "c++"], _CXX17)).returncode != 0:
        raise BuildError(
            f"the C++ compiler ({shlex.join(cxx)}) cannot compile a C++17 program: {_first_error(done.stderr)}",
            f"{install_command('compiler')}    (GCC 9 or Clang 9 at least; CXX=... chooses another)",
        )
    if (done := _compile(c, ["-x", "c"], "#include <stdlib.h>\n")).returncode != 0:
        raise BuildError(
            f"the C compiler ({shlex.join(c)}) cannot compile a C program: {_first_error(done.stderr)}",
            f"{install_command('compiler')}    (CC=... chooses another)",
        )
    # Without -E, zig creates an empty a.o in the current folder.
    version = " / ".join(_first_line([*command, "--version", "-E"]) for command in (c, cxx))
    version += " / " + _first_line([*cxx, "-dumpmachine"])
    if uses_zig(target):
        level = _ZIG_LEVELS[target.partition("-")[0]]
        return Compilers(c, cxx, version, level, " ".join(level))
    flags, identity = ((), "") if target else _native(cxx)
    return Compilers(c, cxx, version, flags, identity, workaround_flags(cxx))


def _processor(target: str) -> str:
    return target.partition("-")[0].replace("arm64", "aarch64")  # as Apple names it


def _zig(compiler: str, target: str) -> tuple[str, ...]:
    """Return the command of a compiler in the package ``ziglang``. Raises BuildError if it is not installed."""
    if (spec := find_spec("ziglang")) is None or spec.origin is None:
        raise BuildError(
            "zig, which compiles for macOS and Windows, is missing",
            f"{sys.executable} -m pip install ziglang",
        )
    name = _ZIG_TARGETS.get(target, target)
    return (str(Path(spec.origin).parent / "zig"), compiler, "-target", name, *_ZIG_FLAGS)


def _command(variable: str, names: Sequence[str], what: str, fix: str = "") -> tuple[str, ...]:
    if command := shlex.split(os.environ.get(variable, "")):
        if shutil.which(command[0]):
            return tuple(command)
        raise BuildError(
            f"{variable}={command[0]}: there is no such {what}", f"unset {variable}, or set it to one"
        )
    for name in names:
        if path := shutil.which(name):
            return (path,)
    raise BuildError(
        f"no {what} was found (looked for {', '.join(names)})", fix or install_command("compiler")
    )


def _native(cxx: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the flags for this machine's instruction sets, and a text of the macros that the compiler then defines."""
    for flag in ("-march=native", "-mcpu=native"):
        defined = macros(cxx, (flag,))
        if _HALF_PRECISION in defined:
            without = (flag, "-mno-avx512fp16")
            return without, "\n".join(macros(cxx, without))
        if defined:
            return (flag,), "\n".join(defined)
    return (), ""


def macros(cxx: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Return the ``#define`` lines of a compiler with these flags, sorted; empty if it does not accept the flags."""
    return sorted(_try(cxx, [*flags, "-x", "c++", "-E", "-dM", "-"], "").stdout.splitlines())


def target_root(target: str) -> Path:
    """Return the folder with a target machine's packages: Python, its headers, libraries to run it with."""
    return cache_dir() / "roots" / target


def target_python_headers(target: str) -> Path:
    """Return the folder of another machine's ``Python.h``. Raises BuildError if it is missing.

    The version of Python does not matter: the module uses the stable ABI.
    """
    include = target_root(target) / "usr" / "include"
    if not (headers := sorted(include.glob("python3.*/Python.h"))):
        raise BuildError(
            f"Python's C headers for {target} are missing (none in {include})", cross_setup(target)
        )
    return headers[-1].parent


def check_python_headers(include: Path | None = None) -> Path:
    """Return the folder of ``Python.h``; None: this Python's own. Raises BuildError if the file is missing."""
    include = include or Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").is_file():
        raise BuildError(
            f"Python's C headers are missing (no {include / 'Python.h'})", install_command("python headers")
        )
    return include


def find_cmake() -> str:
    """Return the path of a CMake that is new enough. Raises BuildError, with pip's command, if there is none."""
    cmake, old = find_tool("cmake"), ""
    if cmake:
        version = cmake_version(cmake)
        if version >= MIN_CMAKE:
            return cmake
        old = f" (found {'.'.join(map(str, version)) if version else 'one that does not run'} at {cmake})"
    least = ".".join(map(str, MIN_CMAKE))
    raise BuildError(f"CMake {least} or newer is missing{old}", f"{sys.executable} -m pip install cmake")


def find_ninja() -> str:
    """Return the path of Ninja. Raises BuildError, with pip's command, if it is missing."""
    ninja = find_tool("ninja")
    if ninja and _run([ninja, "--version"]).returncode == 0:
        return ninja
    raise BuildError("the build tool Ninja is missing", f"{sys.executable} -m pip install ninja")


def find_tool(name: str) -> str | None:
    """Find a program in this Python's folder (a virtual environment need not be activated) or on PATH."""
    scripts = sysconfig.get_path("scripts")
    return shutil.which(name, path=scripts) or shutil.which(name)


def cmake_version(cmake: str) -> tuple[int, ...]:
    """Return (major, minor) of a CMake; () if it does not run."""
    match = re.search(r"cmake version (\d+)\.(\d+)", _run([cmake, "--version"]).stdout)
    return (int(match[1]), int(match[2])) if match else ()


def package_requirements() -> list[str]:
    """Return the tools that a package build must fetch from the package index because the system lacks usable ones."""
    needed = []
    try:
        find_cmake()
    except BuildError:
        needed.append(f"cmake>={'.'.join(map(str, MIN_CMAKE))}")
    try:
        find_ninja()
    except BuildError:
        needed.append("ninja")
    return needed


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "error" in line]
    return (lines or text.strip().splitlines() or ["no message"])[0]


def _first_line(command: Sequence[str]) -> str:
    return next(iter(_run(command).stdout.splitlines()), "?")


def _compile(
    command: Sequence[str], arguments: Sequence[str], program: str
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:  # zig needs an output file: it has no -fsyntax-only
        return _try(command, [*arguments, "-S", "-o", str(Path(folder) / "program.s"), "-"], program)


def _try(command: Sequence[str], arguments: Sequence[str], program: str) -> subprocess.CompletedProcess[str]:
    return _run([*command, *arguments], program)


def _run(command: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    try:
        # The messages are parsed, so they must be in English.
        environment = {**os.environ, "LC_ALL": "C"}
        return subprocess.run(
            command, input=text, capture_output=True, text=True, check=False, env=environment
        )
    except OSError as error:
        return subprocess.CompletedProcess(list(command), 127, "", str(error))
