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
    "benchmarks", "ci", "deploy", "docs", "examples", "llamapipe", "native_build", "tests", "third_party", "tools"
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


def packed(source: Path, folder: Path) -> Path:
    """The source archive of ``source``, in ``folder``."""
    if importlib.util.find_spec("scikit_build_core") is None:
        pytest.skip("scikit-build-core is not installed: pip install --group test")
    program = "import sys; from native_build.pep517 import build_sdist; build_sdist(sys.argv[1])"
    run([sys.executable, "-c", program, str(folder)], source)
    (archive,) = folder.glob("*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive's folder, made from this tree, in which it leaves nothing."""
    scratch = tmp_path_factory.mktemp("sdist")
    archive = packed(ROOT, scratch)
    run(["tar", "-xzf", archive.name], scratch)
    return scratch / archive.name.removesuffix(".tar.gz")


def test_the_archive_holds_every_file_of_the_project(unpacked: Path) -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no clone, or no git: nothing says which files are the project's")
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", *FOLDERS]
    listed = run(command, ROOT).split("\0")
    expected = {name for name in listed if name and (ROOT / name).exists()}
    assert len(expected) > 300
    assert not sorted(name for name in expected if not (unpacked / name).is_file())


def test_the_archive_holds_the_pictures_of_the_readme(unpacked: Path) -> None:
    pictures = [a or b for a, b in PICTURE.findall((unpacked / "README.md").read_text(encoding="utf-8"))]
    assert pictures
    assert not [name for name in pictures if "://" not in name and not (unpacked / name).is_file()]


def test_the_archive_holds_nothing_that_was_built(unpacked: Path) -> None:
    names = run(["tar", "-tzf", f"{unpacked.name}.tar.gz"], unpacked.parent).splitlines()
    assert len(names) > 300
    built = (".so", ".dylib", ".pyc", ".o")
    assert not [name for name in names if name.endswith(built) or "native/lib" in name]


def copied_as_clone(unpacked: Path, folder: Path, private: bool = False) -> Path:
    """The sources as a clone has them, without what packing added; ``private``: with other modes and dates."""
    left_out = shutil.ignore_patterns("PKG-INFO", "lib", "_native*.so", "__pycache__")
    source = Path(shutil.copytree(unpacked, folder, ignore=left_out))
    if private:
        for path in source.rglob("*"):
            path.chmod(path.stat().st_mode & 0o700)
            os.utime(path, (86400, 86400))
    return source


def test_two_archives_of_the_same_sources_are_the_same(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    contents = []
    for name in ("one", "two"):
        source = copied_as_clone(unpacked, tmp_path / name / "tree", private=name == "two")
        contents.append(packed(source, tmp_path / name).read_bytes())
    assert contents[0] == contents[1]


@pytest.mark.timeout(1800)  # compiles llama.cpp if it is not in the cache
def test_a_wheel_is_built_from_it_away_from_the_clone(unpacked: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("cffi") is None or importlib.util.find_spec("pip") is None:
        pytest.skip("a build without isolation needs cffi and pip")
    source = copied_as_clone(unpacked, tmp_path / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    run([*command, "--wheel-dir", str(tmp_path), str(source)], tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "site")], tmp_path)
    program = (
        "import llamapipe as lp; print(lp.__file__)\n"
        "with lp.Model.demo() as model, lp.Engine(model) as engine:\n"
        "    print(engine.generate('Once', lp.SamplingParams(max_tokens=4)).finish_reason)"
    )
    environment = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    out = run([sys.executable, "-c", environment + program], tmp_path).splitlines()
    assert out == [str(tmp_path / "site" / "llamapipe" / "__init__.py"), "length"]


def test_all_tests_can_be_collected_from_it(unpacked: Path) -> None:
    # To rewrite assertions, which do not run, would take longer than all else.
    options = ["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider"]
    out = run([sys.executable, "-m", "pytest", *options, "tests"], unpacked)
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
