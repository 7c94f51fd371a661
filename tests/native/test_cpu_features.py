"""A library built for another processor is refused before it is loaded: it would end the process with SIGILL."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import llamapipe
from llamapipe.native.load import REBUILD, build_info, missing_cpu_features, missing_features

PACKAGE = Path(llamapipe.__file__).parent
X86 = (
    "processor\t: 0\nmodel name\t: a: b\nflags\t\t: fpu sse4_2 avx2\nbugs\t\t: spectre_v1\n\nprocessor\t: 1\n"
)
ARM = "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd sve\nCPU part\t: 0xd0c\n"
# The only native module here kills its process, as instructions do that a processor lacks.
KILLER = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
PROGRAM = """
import llamapipe as lp
try:
    lp.devices()
except lp.errors.BackendError as error:
    print(error)
"""
lists_features = pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists(), reason="this system does not list its processor's features"
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package whose native module ends the process; its record is that of the package under test."""
    copy = tmp_path / "site" / "llamapipe"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("_native*", "__pycache__", "lib"))
    (copy / "native" / "_native.py").write_text(KILLER)
    (copy / "native" / "lib").mkdir()
    record(copy, build_info())
    return copy


def record(package: Path, build: object) -> None:
    (package / "native" / "lib" / "build.json").write_text(json.dumps(build))


def run(package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=package.parent,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
    )


@lists_features
def test_a_library_for_another_processor_is_not_loaded(package: Path) -> None:
    required = [*build_info().get("cpu_features", []), "avx8192", "amx_fp64"]
    record(package, {**build_info(), "cpu_features": required})
    done = run(package, "-c", PROGRAM)
    assert (done.returncode, done.stderr) == (0, "")
    assert "built for another processor: this one lacks amx_fp64, avx8192;" in done.stdout
    assert f"; {REBUILD}; " in done.stdout
    assert "--config-settings=all-variants=on" in done.stdout


@pytest.mark.parametrize("features", [None, [], "avx8192", {"avx8192": True}])
def test_a_record_without_features_is_not_checked(features: object, package: Path) -> None:
    record(package, {**build_info(), "cpu_features": features})
    assert run(package, "-c", PROGRAM).returncode < 0  # it was loaded


@lists_features
def test_the_doctor_names_the_features_that_are_missing(package: Path) -> None:
    record(package, {**build_info(), "cpu_features": ["avx8192"]})
    done = run(package, "-m", "llamapipe", "doctor", "--json")
    wrong = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"] if not finding["ok"]}
    assert (done.returncode, set(wrong)) == (1, {"CPU features", "native module"})
    assert wrong["CPU features"]["detail"] == "built for another processor: this one lacks avx8192"
    assert wrong["CPU features"]["fix"] == REBUILD


def test_this_processor_has_what_this_build_requires() -> None:
    assert missing_cpu_features(build_info()) == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (X86, ["amx_tile", "sve"]),
        (ARM, ["amx_tile", "avx2"]),
        (X86.replace("fpu", "fpu " + "padding " * 2000), ["amx_tile", "sve"]),  # longer than one read
        ("cpu\t\t: POWER9\nclock\t\t: 2300MHz\n", []),  # a system that lists no features
        ("flags\t\t: cut off", []),
        ("", []),
    ],
)
def test_features_are_read_from_the_first_core(text: str, missing: list[str], tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert missing_features(["avx2", "amx_tile", "sve"], str(cpuinfo)) == missing


def test_a_system_without_the_list_is_not_refused(tmp_path: Path) -> None:
    assert missing_features(["avx8192"], str(tmp_path / "cpuinfo")) == []
    assert missing_features(["avx8192"], str(tmp_path)) == []  # cannot be read


def test_the_check_takes_less_than_a_millisecond() -> None:
    def once() -> float:
        start = time.perf_counter()
        missing_cpu_features({**build_info(), "cpu_features": ["avx8192"]})
        return time.perf_counter() - start

    assert min(once() for _ in range(20)) < 1e-3
