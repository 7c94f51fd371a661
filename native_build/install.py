"""The whole build: source, libraries, module, and their copies where the package looks for them."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from native_build.errors import BuildError
from native_build.libraries import Libraries, build_libraries
from native_build.module import build_module, file_name
from native_build.options import BuildOptions
from native_build.sources import Source, find_source
from native_build.store import MANIFEST
from native_build.toolchain import Compilers, find_compilers


def build(options: BuildOptions, target: Path, say: Callable[[str], None]) -> None:
    """Build what ``options`` ask for into ``target``: the module, and ``lib`` with the libraries.

    Files are replaced, never written over: a process that uses the old ones keeps them. Raises BuildError.
    """
    if sys.platform == "win32":
        raise BuildError("Windows is not supported yet", "build inside WSL (wsl --install)")
    compilers = find_compilers()
    source = find_source(options.source, say)
    libraries = build_libraries(options, source, compilers, say)
    module = build_module(options, source, compilers, libraries, say)
    _install(options, source, compilers, libraries, module, target)


def _install(
    options: BuildOptions, source: Source, compilers: Compilers, libraries: Libraries, module: Path, target: Path
) -> None:
    folder = target / "lib"
    folder.mkdir(parents=True, exist_ok=True)
    names = {"build.json", "LICENSE.llama.cpp"}
    for built in libraries.folders:
        for path in built.iterdir():
            if path.name != MANIFEST:
                _replace(path, folder / path.name)
                names.add(path.name)
    _replace(source.path / "LICENSE", folder / "LICENSE.llama.cpp")
    _replace(module, target / file_name())
    about = {
        "llama_cpp_commit": source.commit,
        "llama_cpp_source": source.description,
        "backends": list(options.backends),
        "compiler": compilers.version,
        "flags": "" if options.all_variants else compilers.native_flag,
        "cpu_all_variants": options.all_variants,
        "openmp": libraries.facts.get("openmp", False),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "key": libraries.key,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "build.json"
        path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        _replace(path, folder / "build.json")
    for path in folder.iterdir():  # backends of an earlier build that were not asked for now
        if path.name not in names:
            path.unlink()


def _replace(path: Path, target: Path) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".new-")
    os.close(handle)
    shutil.copyfile(path, name)
    os.chmod(name, 0o755 if ".so" in target.name or ".dylib" in target.name else 0o644)
    os.replace(name, target)
