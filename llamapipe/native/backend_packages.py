"""Backend packages: ``llamapipe-cuda`` and ``llamapipe-vulkan`` add a backend to an installed llamapipe.

A package is a folder with a backend module of llama.cpp and a record of its build. It is found by its name and never
imported. A backend module shares structs with the core libraries, so both must be built from the same llama.cpp source;
a module of another version would corrupt memory instead of failing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from llamapipe.errors import BackendError

NAMES = ("cuda", "vulkan")


@dataclass(frozen=True)
class BackendPackage:
    """An installed backend package. ``build``: the record of its build (version, commit, identity of the source)."""

    backend: str
    folder: Path
    build: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The package's name for pip."""
        return f"llamapipe-{self.backend}"

    @property
    def version(self) -> str:
        """The version of the package and of the llamapipe that it belongs to."""
        return str(self.build.get("version", "?"))

    @property
    def module(self) -> Path:
        """The backend module, in the package's own folder."""
        return self.folder / "lib" / f"libggml-{self.backend}.so"

    @property
    def commit(self) -> str:
        """The abbreviated llama.cpp commit that the package was built from."""
        return str(self.build.get("llama_cpp_commit", "unknown"))[:9]

    def problem(self, core: Mapping[str, Any]) -> str:
        """Return why the package cannot be used with the core that ``core`` records, and the fix; empty if it can."""
        if not self.build or not self.module.is_file():
            return (
                f"{self.name} in {self.folder} is damaged; install its wheel again: `pip install --force-reinstall "
                f"--no-deps WHEEL`, or do without it: `pip uninstall {self.name}`"
            )
        wanted, identity = core.get("llama_cpp_identity"), self.build.get("llama_cpp_identity")
        if wanted is not None and wanted == identity:
            return ""
        return (
            f"{self.name} {self.version} in {self.folder} was built from another llama.cpp: it has "
            f"{_source(self.build)}, llamapipe has {_source(core)}; install wheels of both from one release, or from "
            f"one source tree (`nox -s wheel -- --backend {self.backend}` builds them), or `pip uninstall {self.name}` "
            f"and build llamapipe with the backend: `pip install . -C backend={self.backend}`"
        )


def installed_packages() -> list[BackendPackage]:
    """Return the backend packages on Python's search path; none on systems where llama.cpp cannot load them."""
    if sys.platform == "win32":
        return []
    packages = (_find(backend) for backend in NAMES)
    return [package for package in packages if package is not None]


def usable(core: Mapping[str, Any]) -> list[BackendPackage]:
    """Return the packages to load with the core that ``core`` records, except those whose backend the core contains.

    Raises BackendError if a package was built from another llama.cpp or is damaged.
    """
    packages = [
        package for package in installed_packages() if package.backend not in core.get("backends", ())
    ]
    for package in packages:
        if problem := package.problem(core):
            raise BackendError(problem)
    return packages


def _find(backend: str) -> BackendPackage | None:
    spec = find_spec(f"llamapipe_{backend}")  # a top-level name, so nothing is imported
    if spec is None or spec.origin is None:  # a folder without an __init__.py is not our package
        return None
    folder = Path(spec.origin).parent
    try:
        build = json.loads((folder / "build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        build = {}
    return BackendPackage(backend, folder, build if isinstance(build, dict) else {})


def _source(build: Mapping[str, Any]) -> str:
    commit = str(build.get("llama_cpp_commit", "unknown"))[:9]
    identity = str(build.get("llama_cpp_identity", "not recorded"))
    kind, _, digest = identity.partition(":")
    return f"commit {commit} ({kind} {digest[:12]})" if digest else f"commit {commit} ({identity})"
