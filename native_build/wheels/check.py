"""Checks the files of a release and writes their hashes: ``python -m native_build.wheels.check FOLDER``."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from native_build.paths import PROJECT, cache_dir
from native_build.wheels.backend import KINDS, project_version

SUMS = "SHA256SUMS"


def problems(folder: Path) -> Iterator[str]:
    """Yield the problems of the archives in ``folder``: contents, metadata, versions."""
    version = project_version()
    settings = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    for backend in KINDS:
        if f"llamapipe-{backend}=={version}" not in settings:
            yield f"pyproject.toml: the extra {backend} does not require llamapipe-{backend}=={version}"
    paths = archives(folder)
    if not paths:
        yield f"{folder} holds neither wheels nor a source archive"
    for path in paths:
        if path.name.split("-")[1].removesuffix(".tar.gz") != version:
            yield f"{path.name} is not of version {version}"
        names = []
        for name, data in members(path):
            names.append(name)
            if any(place in data for place in _places()) and not name.endswith((".md", ".svg", ".json")):
                yield f"{path.name}: {name} contains a path of this machine"
        if path.suffix == ".whl":
            yield from _wheel_problems(path.name, names)


def _wheel_problems(wheel: str, names: list[str]) -> Iterator[str]:
    for licence in ("LICENSE", "LICENSE.llama.cpp"):
        if not any(name.endswith(f".dist-info/licenses/{licence}") for name in names):
            yield f"{wheel} lacks {licence} in its metadata"
    for name in names:
        if name.endswith((".pyc", ".pth", ".o")):
            yield f"{wheel} holds {name}"
    if "-linux_" in wheel:
        yield f"{wheel} is for this machine alone: auditwheel gave it no manylinux tag"
    modules = [name for name in names if re.search(r"/lib/(lib)?ggml-\w+[^/]*\.(so|dll)$", name)]
    if not modules or (wheel.startswith("llamapipe_") and len(modules) != 1):
        yield f"{wheel} holds the backend modules {modules}"


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the files in a wheel or source archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            yield from ((name, wheel.read(name)) for name in wheel.namelist())
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                yield member.name, file.read()


def _places() -> list[bytes]:
    return [
        str(path).encode() for path in (PROJECT, cache_dir(), Path.home() / ".cache") if len(path.parts) > 2
    ]


def archives(folder: Path) -> list[Path]:
    """Return the wheels and the source archive in a folder, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".tar.gz")))


def _tools(paths: list[Path]) -> Iterator[list[str]]:
    yield ["twine", "check", "--strict", *map(str, paths)]
    for path in paths:
        if "-abi3-" in path.name:
            yield ["abi3audit", "--strict", "--summary", str(path)]


def main() -> int:
    """Check the archives, print their hashes and write these to the folder. Return 1 if there is a problem."""
    folder = Path(sys.argv[1]).resolve()
    failed = False
    for text in problems(folder):
        print(f"problem: {text}")
        failed = True
    if f"## [{project_version()}]" not in (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8"):
        print(f"note: CHANGELOG.md has no section [{project_version()}] yet")
    paths = archives(folder)
    for command in _tools(paths) if paths else ():
        print(f"$ {' '.join(Path(word).name for word in command)}", flush=True)
        failed |= subprocess.run([sys.executable, "-m", *command], check=False).returncode != 0
    # The hashes also cover the other files of the release.
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != SUMS)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")
    print("".join(lines), end="")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
