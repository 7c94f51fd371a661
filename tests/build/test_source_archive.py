"""The source archive holds all that the tests and the documentation need: part of the tests runs from it, alone."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import llamapipe

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "benchmarks", "ci", "docs", "examples", "llamapipe", "native_build", "tests", "third_party", "tools"
)  # fmt: skip
# The links and paths of every page, the layers of the package, and two parts that use its data and native module.
FAST = (
    "tests/docs/test_links.py",
    "tests/test_layers.py",
    "tests/gguf/test_gguf_check.py",
    "tests/structured/test_gbnf.py",
)
PICTURE = re.compile(r"!\[[^\]]*\]\(([^()\s]+)\)|<(?:img|source)\b[^>]*?\bsrc(?:set)?=\"([^\"\s]+)")


def run(command: list[str], cwd: Path) -> str:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTEST_ADDOPTS")
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive's folder, made from this tree, in which it leaves nothing."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed: pip install --group test")
    scratch = tmp_path_factory.mktemp("sdist")
    # Its list of files in a new folder: an old list would keep names that MANIFEST.in has lost.
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(scratch)]
    run([*command, "sdist", "--formats", "gztar", "--dist-dir", str(scratch)], ROOT)
    (archive,) = scratch.glob("*.tar.gz")
    run(["tar", "-xzf", archive.name], scratch)
    return scratch / archive.name.removesuffix(".tar.gz")


def test_it_holds_every_file_of_the_project(unpacked: Path) -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no clone, or no git: nothing says which files are the project's")
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *FOLDERS]
    listed = run(command, ROOT).split("\0")
    expected = {name for name in listed if name and (ROOT / name).exists()}
    assert len(expected) > 300
    assert not sorted(name for name in expected if not (unpacked / name).is_file())


def test_it_holds_the_pictures_of_the_readme(unpacked: Path) -> None:
    found = [a or b for a, b in PICTURE.findall((unpacked / "README.md").read_text(encoding="utf-8"))]
    assert found
    assert not [name for name in found if "://" not in name and not (unpacked / name).is_file()]


def test_it_holds_nothing_that_was_built(unpacked: Path) -> None:
    names = run(["tar", "-tzf", f"{unpacked.name}.tar.gz"], unpacked.parent).splitlines()
    assert len(names) > 300
    built = (".so", ".dylib", ".pyc", ".o")
    assert not [name for name in names if name.endswith(built) or "native/lib" in name]


def test_all_tests_can_be_collected_from_it(unpacked: Path) -> None:
    out = run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"], unpacked
    )
    assert re.search(r"^\d{4,} tests collected", out, re.MULTILINE), out[-2000:]


def test_part_of_the_tests_passes_in_it(unpacked: Path) -> None:
    # A build would take minutes; the native module of the package under test is the same.
    native = Path(llamapipe.__file__).parent / "native"
    shutil.copytree(native / "lib", unpacked / "llamapipe" / "native" / "lib")
    for module in native.glob("_native*.so"):
        shutil.copy(module, unpacked / "llamapipe" / "native")
    out = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FAST], unpacked)
    assert re.search(r"^\d+ passed", out, re.MULTILINE)
    assert "failed" not in out
