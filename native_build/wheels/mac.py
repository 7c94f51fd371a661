"""Checks wheels for macOS without a Mac: ``python -m native_build.wheels.mac WHEEL …``. Needs macholib.

It checks the processor and the oldest system of each program file, whether the libraries and functions that the file
needs exist, and the signature that arm64 requires. It cannot check whether the code works.
"""

from __future__ import annotations

import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from macholib import mach_o
from macholib.MachO import MachO, MachOHeader
from macholib.SymbolTable import SymbolTable

_PROCESSORS = {"x86_64": 0x01000007, "arm64": 0x0100000C}
_FOUND_WHEN_LOADED = 0xFE  # a function from any library in the process: Python's, in the cffi module
_LIBRARY_COMMANDS = (mach_o.LC_LOAD_DYLIB, mach_o.LC_LOAD_WEAK_DYLIB, mach_o.LC_REEXPORT_DYLIB)


def problems(wheel: Path) -> Iterator[str]:
    """Yield the problems of a wheel's program files."""
    major, minor, processor = re.search(r"-macosx_(\d+)_(\d+)_(\w+)\.whl$", wheel.name).groups()  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as packed:
        packed.extractall(name)
        files = sorted(path for path in Path(name).rglob("*") if path.suffix in (".so", ".dylib"))
        if not files:
            yield f"{wheel.name} holds no program file"
        for path in files:
            for header in MachO(str(path)).headers:
                for problem in _problems(header, processor, (int(major), int(minor)), path.parent):
                    yield f"{path.relative_to(name)}: {problem}"


def _problems(header: MachOHeader, processor: str, oldest: tuple[int, int], folder: Path) -> Iterator[str]:
    if header.header.cputype & 0xFFFFFFFF != _PROCESSORS[processor]:
        yield f"is for processor {header.header.cputype:#x}, not for {processor}"
    libraries: list[str] = []
    run_paths: list[str] = []
    signed, version = False, None
    for load, command, data in header.commands:
        if load.cmd in _LIBRARY_COMMANDS:
            libraries.append(bytes(data).rstrip(b"\0").decode())
        elif load.cmd == mach_o.LC_RPATH:
            run_paths.append(bytes(data).rstrip(b"\0").decode())
        elif load.cmd == mach_o.LC_BUILD_VERSION:
            version = (command.minos >> 16, command.minos >> 8 & 0xFF)
        elif load.cmd == mach_o.LC_VERSION_MIN_MACOSX:
            version = (command.version >> 16, command.version >> 8 & 0xFF)
        elif load.cmd == mach_o.LC_CODE_SIGNATURE:
            signed = True
    if version is None or version > oldest:
        yield f"needs macOS {version}, and the wheel is for {oldest}"
    if processor == "arm64" and not signed:
        yield "is not signed"
    for library in libraries:
        if library.startswith("@rpath/"):
            places = [f"{run_path}/{library.removeprefix('@rpath/')}" for run_path in run_paths]
        elif library.startswith("@"):
            places = [library]
        elif library.startswith("/usr/lib/"):
            continue
        else:
            yield f"asks for {library}, which is not of the system"
            continue
        if not any(Path(place.replace("@loader_path", str(folder))).is_file() for place in places):
            yield f"asks for {library}, which is not where it looks ({', '.join(run_paths) or 'no run path'})"
    for name in _found_when_loaded(header):
        if not name.startswith("_Py"):
            yield f"asks for {name}, which no library that it names has"


def _found_when_loaded(header: MachOHeader) -> Iterator[str]:
    table = SymbolTable(header.parent, header)
    for symbol, name in table.undefsyms or ():
        if symbol.n_desc >> 8 & 0xFF == _FOUND_WHEN_LOADED:
            yield name.decode()


def main() -> int:
    """Check the wheels. Return 1 if there is a problem."""
    failed = False
    for wheel in map(Path, sys.argv[1:]):
        lines = list(problems(wheel))
        print("\n".join(lines) or f"{wheel.name}: complete, and for the system that its name says")
        failed |= bool(lines)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
