"""What a build puts where, and what is in the installed package."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import llamapipe
from llamapipe.native.load import missing_features

ROOT = Path(__file__).resolve().parents[2]
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build into a folder of its own (from the cache, after the first), over the rest of another backend's."""
    folder = tmp_path_factory.mktemp("native")
    (folder / "lib").mkdir()
    (folder / "lib" / "libggml-vulkan.so").write_bytes(b"of an earlier build")
    command = [sys.executable, str(ROOT / "build_native.py"), "--backend", "cpu", "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(1800)  # compiles llama.cpp if it is not in the cache
def test_a_build_gives_exactly_the_files_that_are_loaded(built: Path) -> None:
    lib = {path.name for path in (built / "lib").iterdir()}
    suffix = "0.dylib" if sys.platform == "darwin" else "so.0"
    core = {f"libllamapipe-{name}.{suffix}" for name in ("llama", "ggml", "ggml-base")}
    assert lib == core | {
        "libggml-cpu.so",
        "libllamapipe-rpc.so",
        f"libllamapipe-mtmd.{suffix}",
        "build.json",
        "LICENSE.llama.cpp",
    }
    modules = [path.name for path in built.iterdir() if path.is_file()]
    assert len(modules) == 1
    assert modules[0].startswith("_native.")
    assert modules == ["_native.abi3.so"] or FREE_THREADED
    assert not any(path.is_symlink() for path in built.rglob("*"))


@pytest.mark.timeout(1800)
def test_the_module_finds_its_libraries_beside_itself(built: Path) -> None:
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('llamapipe.native._native', sys.argv[1])\n"
        "native = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(native)\n"
        "assert native.lib.lp_load_backends(sys.argv[2].encode()) >= 1\n"
    )
    module = next(path for path in built.iterdir() if path.is_file())
    # An empty environment: nothing but the paths inside the files can lead to the libraries.
    cffi = sysconfig.get_path("platlib")
    done = subprocess.run(
        [sys.executable, "-c", program, str(module), str(built / "lib")],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": cffi},
        cwd=built.parent,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(1800)
def test_a_build_says_what_it_is(built: Path) -> None:
    facts = json.loads((built / "lib" / "build.json").read_text())
    assert facts["backends"] == ["cpu"]
    assert facts["cpu_all_variants"] is False
    assert isinstance(facts["openmp"], bool)
    assert facts["llama_cpp_commit"]
    assert facts["llama_cpp_source"]
    assert facts["compiler"]
    assert facts["cpu_features"] == sorted(set(facts["cpu_features"]))
    assert missing_features(facts["cpu_features"]) == []  # never refused where it was built
    if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
        assert facts["cpu_features"]


@pytest.fixture(scope="module")
def installed() -> dict[str, Path]:
    """The installed package's files, by their path in it."""
    if Path(llamapipe.__file__).is_relative_to(ROOT / "llamapipe"):
        pytest.skip("the source tree is being tested; `nox -s tests` tests an installed package")
    files = importlib.metadata.files("llamapipe") or []
    return {file.as_posix(): Path(str(file.locate())) for file in files if "__pycache__" not in file.parts}


def test_an_installed_package_has_what_it_needs_and_nothing_else(installed: dict[str, Path]) -> None:
    assert {
        "llamapipe/py.typed",
        "llamapipe/data/demo.gguf",
        "llamapipe/data/letters.gguf",
        "llamapipe/native/lib/build.json",
    } <= installed.keys()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in installed)
    assert "llamapipe/native/lib/LICENSE.llama.cpp" in installed
    top = {name.split("/")[0] for name in installed if not name.startswith("..")}
    # Above all no .pth file: Python would read it at every start.
    assert {name for name in top if not name.endswith(".dist-info")} == {"llamapipe", "llamapipe_command.py"}
    assert not [name for name in installed if name.endswith(".pth")]
    assert not [name for name in installed if "/cdef/" in name or "/src/" in name]
    assert not any(path.is_symlink() for path in installed.values())


def test_the_commands_are_installed_beside_python(installed: dict[str, Path]) -> None:
    names = {path.name for name, path in installed.items() if name.startswith("..")}
    assert {"llamapipe", "llamapipe-lm-eval"} <= names


def test_versions_agree(installed: dict[str, Path]) -> None:
    assert importlib.metadata.version("llamapipe") == llamapipe.__version__


@pytest.mark.skipif(FREE_THREADED, reason="this Python has no stable ABI")
def test_one_wheel_serves_every_python(installed: dict[str, Path]) -> None:
    wheel = next(path for name, path in installed.items() if name.endswith(".dist-info/WHEEL"))
    tags = [line for line in wheel.read_text().splitlines() if line.startswith("Tag: ")]
    assert tags
    assert all(tag.startswith("Tag: cp310-abi3-") for tag in tags)
    assert "llamapipe/native/_native.abi3.so" in installed
