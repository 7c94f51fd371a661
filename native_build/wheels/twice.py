"""Builds everything twice and compares: ``python -m native_build.wheels.twice FOLDER [options of make]``.

The second build differs from the first in everything that must not matter: it starts from the unpacked source archive,
in a different folder, with an empty cache, a different umask and a different time zone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from native_build.paths import PROJECT, cache_dir
from native_build.wheels.compare import compare


def unpack_as_clone(archive: Path, folder: Path) -> Path:
    """Unpack a source archive without the file that packing added. Return the folder of the sources."""
    with tarfile.open(archive) as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extractall(folder, filter="data")
        else:
            packed.extractall(folder)
    source = folder / archive.name.removesuffix(".tar.gz")
    (source / "PKG-INFO").unlink()
    return source


def main() -> int:
    """Build twice and compare. Return 1 if the builds differ."""
    folder, options = Path(sys.argv[1]).resolve(), sys.argv[2:]
    shutil.rmtree(folder, ignore_errors=True)
    first, second = folder / "first", folder / "second"
    make = [sys.executable, "-m", "native_build.wheels.make"]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    subprocess.run([*make, str(first), "--sdist", *options], check=True, env=environment, cwd=PROJECT)

    source = unpack_as_clone(next(first.glob("*.tar.gz")), folder / "elsewhere")
    cache = folder / "cache"
    for name in ("source", "vulkan-headers"):  # inputs that need not be fetched again
        if (cache_dir() / name).is_dir():
            shutil.copytree(cache_dir() / name, cache / name)
    environment.update(PYTHONPATH=str(source), LLAMAPIPE_CACHE_DIR=str(cache), TZ="Pacific/Kiritimati")
    os.umask(0o077)
    subprocess.run([*make, str(second), "--sdist", *options], check=True, env=environment, cwd=source)

    lines = compare(first, second)
    for line in lines:
        print(line)
    for path in sorted(first.iterdir()):
        print(f"{'differs' if any(path.name in line for line in lines) else 'equal'}: {path.name}")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
