"""Packages with one more backend: found and not imported, loaded from their folder, refused for another llama.cpp.

The module in them is a copy of the CPU's, which registers a second time: a machine without a GPU shows as much.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import llamapipe
from llamapipe.errors import BackendError
from llamapipe.native.backend_packages import usable
from llamapipe.native.load import LIB_DIR, build_info

COUNT = "import llamapipe as lp; print(len(lp.devices()))"


def make_package(folder: Path, backend: str = "vulkan", **changes: Any) -> Path:
    """An installed package for this llamapipe, whose code must not run."""
    package = folder / f"llamapipe_{backend}"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")
    core = build_info()
    build = {name: core.get(name) for name in ("llama_cpp_commit", "llama_cpp_identity")}
    (package / "build.json").write_text(json.dumps({"version": "9.9", **build, **changes}))
    module = next(LIB_DIR.glob("libggml-cpu*.so"))
    shutil.copy(module, package / "lib" / f"libggml-{backend}.so")
    return package


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with the package under test and those in ``folder``."""
    path = os.pathsep.join([str(folder), str(Path(llamapipe.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=folder, timeout=120
    )


@pytest.fixture
def n_devices(tmp_path: Path) -> int:
    """Without packages."""
    (tmp_path / "none").mkdir()
    return int(python(tmp_path / "none", "-c", COUNT).stdout)


def test_a_package_is_loaded_and_not_imported(tmp_path: Path, n_devices: int) -> None:
    make_package(tmp_path)
    done = python(tmp_path, "-c", COUNT)
    assert done.stdout.strip() == str(n_devices + 1), done.stderr


def test_only_the_packages_folder_is_searched(tmp_path: Path, n_devices: int) -> None:
    # Folders without an __init__.py, and modules elsewhere, are not packages of ours.
    (make_package(tmp_path) / "__init__.py").unlink()
    shutil.copy(next(LIB_DIR.glob("libggml-cpu*.so")), tmp_path / "libggml-cuda.so")
    done = python(tmp_path, "-c", COUNT)
    assert done.stdout.strip() == str(n_devices), done.stderr


def test_another_llama_cpp_is_refused_with_both_values_and_the_fix(tmp_path: Path) -> None:
    make_package(tmp_path, llama_cpp_commit="f" * 40, llama_cpp_identity="sha256:" + "e" * 64)
    done = python(tmp_path, "-c", COUNT)
    assert done.returncode != 0
    message = done.stderr.splitlines()[-1]
    own = build_info()
    assert "llamapipe-vulkan 9.9" in message
    assert f"commit fffffffff (sha256 {'e' * 12})" in message
    assert (
        f"commit {own['llama_cpp_commit'][:9]} ({own['llama_cpp_identity'].replace(':', ' ')[:19]})"
        in message
    )
    for fix in ("`nox -s wheel -- --backend vulkan`", "`pip install . -C backend=vulkan`"):
        assert fix in message
    assert "llamapipe[vulkan]" not in message  # it is not published
    doctor = python(tmp_path, "-m", "llamapipe", "doctor", "--json")
    assert doctor.returncode == 1
    finding = {entry["name"]: entry for entry in json.loads(doctor.stdout)["findings"]}["llamapipe-vulkan"]
    assert not finding["ok"]
    assert "fffffffff" in finding["detail"]
    assert "pip install" in finding["fix"]


def test_the_same_commit_with_other_files_is_refused(tmp_path: Path) -> None:
    make_package(tmp_path, llama_cpp_identity="tree:" + "e" * 64)
    assert "was built from another llama.cpp" in python(tmp_path, "-c", COUNT).stderr


def test_a_damaged_package_is_an_error(tmp_path: Path) -> None:
    package = make_package(tmp_path)
    (package / "lib" / "libggml-vulkan.so").unlink()
    assert "is damaged" in python(tmp_path, "-c", COUNT).stderr
    (package / "build.json").write_text("[]")
    assert "is damaged" in python(tmp_path, "-c", COUNT).stderr


def test_without_its_driver_the_log_and_doctor_say_why(tmp_path: Path, n_devices: int) -> None:
    package = make_package(tmp_path, "cuda")
    (package / "lib" / "libggml-cuda.so").write_bytes(b"not a library")
    program = f"import logging; logging.basicConfig(); {COUNT}"
    done = python(tmp_path, "-c", program)
    assert done.stdout.strip() == str(n_devices)
    assert "WARNING:llamapipe.native:the backend of llamapipe-cuda 9.9 is not used:" in done.stderr
    doctor = python(tmp_path, "-m", "llamapipe", "doctor", "--json")
    finding = {entry["name"]: entry for entry in json.loads(doctor.stdout)["findings"]}["llamapipe-cuda"]
    assert doctor.returncode == 1
    assert "libggml-cuda.so" in finding["detail"]
    assert "driver" in finding["fix"]


def test_doctor_lists_a_package_without_devices(tmp_path: Path) -> None:
    make_package(tmp_path, "cuda")
    doctor = python(tmp_path, "-m", "llamapipe", "doctor", "--json")
    finding = {entry["name"]: entry for entry in json.loads(doctor.stdout)["findings"]}["llamapipe-cuda"]
    assert "9.9" in finding["detail"]
    assert "found no device" in finding["detail"]


def test_a_build_with_the_backend_does_not_load_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    core = build_info()
    assert [package.name for package in usable(core)] == ["llamapipe-vulkan"]
    assert usable({**core, "backends": ["cpu", "vulkan"]}) == []
    with pytest.raises(BackendError, match="not recorded"):
        usable({"llama_cpp_commit": core["llama_cpp_commit"]})
