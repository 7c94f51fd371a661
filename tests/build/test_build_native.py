"""The native build: what its cache keys depend on, what it compiles and what not, and its message for every failure."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.miniature import make_script, make_tree, make_vulkan_sdk

ROOT = Path(__file__).resolve().parents[2]
# At the end: the package under test is the installed one, where there is one.
sys.path.append(str(ROOT))

from native_build import module, progress, sources, store, system, toolchain  # noqa: E402
from native_build.accelerators import find_accelerators  # noqa: E402
from native_build.errors import BuildError  # noqa: E402
from native_build.libraries import Libraries, build_libraries  # noqa: E402
from native_build.options import BuildOptions, with_settings  # noqa: E402
from native_build.paths import cache_dir  # noqa: E402
from native_build.recipe import Recipe  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the build does not support Windows yet")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("LLAMAPIPE_CACHE_DIR", str(folder))
    monkeypatch.delenv("LLAMAPIPE_LLAMA_CPP_DIR", raising=False)
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "llama.cpp")


@pytest.fixture
def said() -> list[str]:
    return []


def recipe_for(tree: Path, options: BuildOptions | None = None) -> Recipe:
    source = sources.find_source(tree, print)
    return Recipe(options or BuildOptions(rpc=False, media=False), source, toolchain.find_compilers())


def build(recipe: Recipe, say: Callable[[str], None]) -> Libraries:
    return build_libraries(recipe, find_accelerators(recipe.options, recipe.compilers), say)


# ---- keys


@pytest.mark.usefixtures("cache")
class TestKey:
    @pytest.fixture
    def recipe(self, tree: Path) -> Recipe:
        return recipe_for(tree)

    def test_is_the_same_for_the_same_build(self, recipe: Recipe, tree: Path) -> None:
        assert recipe.key == recipe_for(tree).key

    @pytest.mark.parametrize("options", [BuildOptions(openmp=True), BuildOptions(all_variants=True)])
    def test_changes_with_an_option(self, recipe: Recipe, options: BuildOptions) -> None:
        assert replace(recipe, options=options).key != recipe.key

    @pytest.mark.parametrize("field", ["version", "native_flags", "native_identity"])
    def test_changes_with_the_compiler_and_the_cpu(self, recipe: Recipe, field: str) -> None:
        change: dict[str, Any] = {field: ("other",) if field == "native_flags" else "other"}
        assert replace(recipe, compilers=replace(recipe.compilers, **change)).key != recipe.key

    def test_a_wheel_does_not_depend_on_this_cpu(self, recipe: Recipe) -> None:
        wheel = replace(recipe, options=BuildOptions(all_variants=True))
        elsewhere = replace(wheel, compilers=replace(recipe.compilers, native_identity="another CPU"))
        assert wheel.key == elsewhere.key
        assert not any("native" in flag for flag in wheel.compiler_flags("CXX"))

    @pytest.mark.parametrize(
        "name", ["CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS", "MACOSX_DEPLOYMENT_TARGET"]
    )
    def test_changes_with_the_environment(
        self, recipe: Recipe, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = recipe.key
        monkeypatch.setenv(name, "-DANOTHER")
        assert recipe.key != before

    @pytest.mark.parametrize(
        "options", [BuildOptions(jobs=1), BuildOptions(("cuda", "vulkan")), BuildOptions(clean=True)]
    )
    def test_of_the_core_is_not_touched_by_backends_and_jobs(
        self, recipe: Recipe, options: BuildOptions
    ) -> None:
        assert replace(recipe, options=options).key == recipe.key

    def test_changes_with_the_source_which_keeps_its_build_folder(self, recipe: Recipe, tree: Path) -> None:
        (tree / "src" / "llama-context.h").write_text("// changed\n")
        changed = recipe_for(tree)
        assert changed.key != recipe.key
        assert changed.tree_key == recipe.tree_key


def test_key_ignores_the_order_of_parts() -> None:
    assert store.key_of({"a": 1, "b": 2}) == store.key_of({"b": 2, "a": 1}) != store.key_of({"a": 1, "b": 3})


# ---- building


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    make_tree(folder / "llama.cpp")
    return folder


class TestCache:
    """One small project for all of these, compiled by whichever test comes first."""

    @pytest.fixture
    def tree(self, place: Path) -> Path:
        return place / "llama.cpp"

    @pytest.fixture
    def cache(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("LLAMAPIPE_CACHE_DIR", str(place / "cache"))
        return place / "cache"

    def test_a_second_build_takes_everything_from_the_cache(
        self, tree: Path, cache: Path, said: list[str]
    ) -> None:
        first = build(recipe_for(tree), said.append)
        said.clear()
        second = build(recipe_for(tree), said.append)
        assert said == ["llama.cpp with its CPU backend: cached"]
        assert second == first

    def test_what_is_cached_does_not_wait_for_another_build(
        self, tree: Path, cache: Path, said: list[str]
    ) -> None:
        recipe = recipe_for(tree)
        build(recipe, said.append)
        said.clear()
        with store.locked(cache / "build" / f"{recipe.tree_key}.lock", said.append):
            build(recipe, said.append)
        assert said == ["llama.cpp with its CPU backend: cached"]

    def test_core_libraries_have_names_of_their_own_and_backends_those_that_the_loader_looks_for(
        self, tree: Path, cache: Path, said: list[str]
    ) -> None:
        built = build(recipe_for(tree), said.append)
        names = {path.name for path in built.folders[0].iterdir()} - {store.MANIFEST}
        if sys.platform == "darwin":
            core = {f"libllamapipe-{name}.0.dylib" for name in ("llama", "ggml", "ggml-base")}
        else:
            core = {f"libllamapipe-{name}.so.0" for name in ("llama", "ggml", "ggml-base")}
        assert names == core | {"libggml-cpu.so"}
        assert not any(path.is_symlink() for path in built.folders[0].iterdir())

    def test_adding_a_backend_leaves_the_core_alone(
        self, tree: Path, cache: Path, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        core = build(recipe_for(tree), said.append).folders[0]
        before = {path.name: path.stat().st_mtime_ns for path in core.iterdir()}
        monkeypatch.setenv("VULKAN_SDK", str(make_vulkan_sdk(tmp_path / "sdk")))
        said.clear()
        built = build(recipe_for(tree, BuildOptions(("vulkan",), rpc=False, media=False)), said.append)
        assert said[0] == "llama.cpp with its CPU backend: cached"
        assert said[1].startswith("compiling the Vulkan backend,")
        assert built.folders[0] == core
        assert {path.name: path.stat().st_mtime_ns for path in core.iterdir()} == before
        assert (built.folders[1] / "libggml-vulkan.so").is_file()
        said.clear()
        build(recipe_for(tree, BuildOptions(("vulkan",), rpc=False, media=False)), said.append)
        assert said == ["llama.cpp with its CPU backend: cached", "the Vulkan backend: cached"]

    def test_ggml_rpc_has_a_name_that_the_loader_does_not_look_for(
        self, tree: Path, cache: Path, said: list[str]
    ) -> None:
        core, rpc = build(recipe_for(tree, BuildOptions(media=False)), said.append).folders
        assert {path.name for path in rpc.iterdir()} == {"libllamapipe-rpc.so", store.MANIFEST}
        assert "rpc" not in " ".join(path.name for path in core.iterdir())
        assert build(recipe_for(tree), said.append).folders == (core,)

    def test_another_shader_compiler_is_another_backend_but_the_same_core(
        self, tree: Path, cache: Path, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sdk = make_vulkan_sdk(tmp_path / "sdk")
        monkeypatch.setenv("VULKAN_SDK", str(sdk))
        options = BuildOptions(("vulkan",), rpc=False, media=False)
        first = build(recipe_for(tree, options), said.append).folders
        make_script(sdk / "bin" / "glslc", "echo miniature glslc 2.0")
        second = build(recipe_for(tree, options), said.append).folders
        assert first[0] == second[0]
        assert first[1] != second[1]

    def test_a_damaged_result_is_built_again(self, tree: Path, cache: Path, said: list[str]) -> None:
        core = build(recipe_for(tree), said.append).folders[0]
        module = core / "libggml-cpu.so"
        whole = module.read_bytes()
        module.write_bytes(whole[: len(whole) // 2])
        assert store.lookup(core) is None
        build(recipe_for(tree), said.append)
        assert module.read_bytes() == whole

    def test_clean_compiles_anew(self, tree: Path, cache: Path, said: list[str]) -> None:
        build(recipe_for(tree), said.append)
        said.clear()
        build(recipe_for(tree, BuildOptions(clean=True, rpc=False, media=False)), said.append)
        assert said[0].startswith("compiling llama.cpp")


def test_a_changed_file_of_a_source_under_development_is_all_that_is_compiled(
    tree: Path, cache: Path, said: list[str]
) -> None:
    recipe = recipe_for(tree)
    build(recipe, said.append)
    (tree / "src" / "llama-context.h").write_text("// changed\n")
    (tree / "llama.c").write_text("int ggml(void); int llama(void) { return ggml() + 1; }\n")
    build(recipe_for(tree), said.append)
    log = (cache / "build" / recipe.tree_key / "build.log").read_text()
    compiled = [line for line in log.splitlines() if "Building C object" in line]
    assert len(compiled) == 1
    assert "llama.c.o" in compiled[0]


def test_two_builds_at_once_compile_once_and_both_succeed(tree: Path, cache: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from native_build import sources, toolchain\n"
        "from native_build.libraries import build_libraries\n"
        "from native_build.options import BuildOptions\n"
        "from native_build.recipe import Recipe\n"
        "source = sources.find_source(Path(sys.argv[2]), print)\n"
        "build_libraries(Recipe(BuildOptions(), source, toolchain.find_compilers()), (), print)\n"
    )
    command = [sys.executable, "-c", program, str(ROOT), str(tree)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sum("compiling llama.cpp" in output for output in outputs) == 1, outputs
    assert sum("cached" in output for output in outputs) == 1, outputs
    assert store.lookup(next((cache / "native").glob("*/core"))) is not None


def test_progress_starts_anew_when_there_turns_out_to_be_more_to_do(tmp_path: Path, said: list[str]) -> None:
    program = "[print(f'[{k}/{n}] step') for n in (2, 40) for k in range(1, n + 1)]"
    with (tmp_path / "log").open("w+") as log:
        progress.run([sys.executable, "-c", program], log, dict(os.environ), "compiling", said.append)
        log.seek(0)
        assert len(log.readlines()) == 42
    assert [text.split(",")[0] for text in said[:3]] == ["compiling 1/2", "compiling 2/2", "compiling 4/40"]
    assert said[-1].startswith("compiling 40/40")
    assert len(said) == 12


def test_a_compiler_error_is_in_the_message_with_the_log(tree: Path, cache: Path, said: list[str]) -> None:
    (tree / "llama.c").write_text("int llama(void) { return missing_name; }\n")
    with pytest.raises(BuildError, match=r"compiling llama\.cpp failed[\s\S]*missing_name") as caught:
        build(recipe_for(tree), said.append)
    assert "build.log" in caught.value.fix


def test_a_result_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "result"
    with pytest.raises(FileNotFoundError):
        store.publish({"a": ROOT / "LICENSE", "b": tmp_path / "missing"}, {}, target)
    assert list(tmp_path.iterdir()) == []
    store.publish({"a": ROOT / "LICENSE"}, {"fact": 1}, target)
    facts = store.lookup(target)
    assert facts is not None
    assert facts["fact"] == 1


# ---- the source


def test_the_pin_is_the_one_that_is_documented() -> None:
    pin = sources.read_pin()
    assert pin.requirement == "xllamacpp==2026.10.11549"
    assert pin.sha256 == "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
    readme = (ROOT / "third_party" / "README.md").read_text(encoding="utf-8")
    assert f"{pin.package} {pin.requirement.split('==')[1]}" in readme
    assert f"`{pin.release}`" in readme


@pytest.mark.parametrize(
    "text", ["", "# llama-cpp-python==1\n", "llama-cpp-python==1\n", "llama-cpp-python==1 --hash=sha256:12\n"]
)
def test_a_pin_without_a_hash_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pin.txt"
    path.write_text(text)
    with pytest.raises(BuildError, match="no line of the form"):
        sources.read_pin(path)


def test_sources_are_taken_in_the_documented_order(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, from_environment = make_tree(tmp_path / "given"), make_tree(tmp_path / "environment")
    checkout = make_tree(tmp_path / "checkout")
    monkeypatch.setenv("LLAMAPIPE_LLAMA_CPP_DIR", str(from_environment))
    monkeypatch.setattr(sources, "CHECKOUT", checkout)
    assert sources.find_source(directory, print).path == directory
    assert sources.find_source(None, print).path == from_environment
    monkeypatch.delenv("LLAMAPIPE_LLAMA_CPP_DIR")
    assert sources.find_source(None, print).path == checkout


class TestPinnedArchive:
    """Fetched by pip itself, from a folder in place of the package index."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    @pytest.fixture(params=["llama-cpp-python==9.9", "xllamacpp==9.9.1234"])
    def requirement(self, request: pytest.FixtureRequest) -> str:
        """Of either kind of archive; only the first tells its commit."""
        text: str = request.param
        return text

    def commit(self, requirement: str) -> str:
        return self.COMMIT if requirement.startswith("llama-cpp-python") else "b1234"

    @pytest.fixture
    def archive(self, requirement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        package, version = requirement.replace("-", "_").split("==")
        vendor = sources.ARCHIVES[requirement.split("==", maxsplit=1)[0]].tree
        backend = (
            "import pathlib\n"
            "def prepare_metadata_for_build_wheel(folder, settings=None):\n"
            f"    info = pathlib.Path(folder, '{package}-{version}.dist-info')\n"
            "    info.mkdir()\n"
            f"    text = 'Metadata-Version: 2.1\\nName: {package}\\nVersion: {version}\\n'\n"
            "    info.joinpath('METADATA').write_text(text)\n"
            "    return info.name\n"
        )
        files = {
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n",
            "pyproject.toml": '[build-system]\nrequires = ["b"]\nbuild-backend = "b"\n',
            f"{package}/__init__.py": "raise RuntimeError\n",
            ".git/modules/vendor/llama.cpp/HEAD": self.COMMIT + "\n",
            f"{vendor}.git": "gitdir: elsewhere\n",
            f"{vendor}docs/big.md": "not needed\n",
        }
        tree = make_tree(tmp_path / "packed")
        files |= {f"{vendor}{p.relative_to(tree)}": p.read_text() for p in tree.rglob("*") if p.is_file()}
        folder = tmp_path / "index"
        folder.mkdir()
        with zipfile.ZipFile(folder / "b-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("b.py", backend)
            wheel.writestr("b-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: b\nVersion: 1.0\n")
            wheel.writestr(
                "b-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr("b-1.0.dist-info/RECORD", "")
        path = folder / f"{package}-{version}.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(f"{package}-{version}/{name}")
                member.size = len(text.encode())
                tar.addfile(member, io.BytesIO(text.encode()))
            link = tarfile.TarInfo(f"{package}-{version}/{vendor}link")
            link.type, link.linkname = tarfile.SYMTYPE, "LICENSE"
            tar.addfile(link)
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
        return path

    def pinned(self, archive: Path) -> str:
        package, _, version = archive.name.removesuffix(".tar.gz").rpartition("-")
        return f"{package.replace('_', '-')}=={version}"

    def pin(self, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sha256: str = "") -> None:
        sha256 = sha256 or hashlib.sha256(archive.read_bytes()).hexdigest()
        path = tmp_path / "pin.txt"
        path.write_text(f"# the pin\n{self.pinned(archive)} \\\n    --hash=sha256:{sha256}\n")
        monkeypatch.setattr(sources.read_pin, "__defaults__", (path,))
        monkeypatch.setattr(sources, "CHECKOUT", tmp_path / "none")
        monkeypatch.setattr(sources, "PATCHES", ())

    def test_only_llama_cpp_is_unpacked_once(
        self, archive: Path, tmp_path: Path, cache: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.pin(archive, tmp_path, monkeypatch)
        source = sources.find_source(None, said.append)
        assert source.commit == self.commit(self.pinned(archive))
        assert source.pinned
        files = {str(path.relative_to(source.path)) for path in source.path.rglob("*") if path.is_file()}
        expected = make_tree(tmp_path / "expected")
        assert files == {str(path.relative_to(expected)) for path in expected.rglob("*") if path.is_file()}
        assert len(said) == 1
        archive.unlink()
        assert sources.find_source(None, said.append) == source
        assert len(said) == 1

    @pytest.mark.usefixtures("cache")
    def test_within_a_build_by_pip(
        self, archive: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What pip tells our build backend is not for the archive's."""
        self.pin(archive, tmp_path, monkeypatch)
        monkeypatch.setenv("_PYPROJECT_HOOKS_BUILD_BACKEND", "native_build.pep517")
        monkeypatch.setenv("_PYPROJECT_HOOKS_BACKEND_PATH", str(ROOT))
        monkeypatch.setenv("_PYPROJECT_HOOKS_BACKEND_PATH_JSON", json.dumps([str(ROOT)]))  # pip 26.3
        assert sources.find_source(None, said.append).commit == self.commit(self.pinned(archive))

    def test_a_changed_hash_is_refused_with_both_hashes(
        self, archive: Path, tmp_path: Path, cache: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.pin(archive, tmp_path, monkeypatch, "f" * 64)
        with pytest.raises(BuildError, match="has changed") as caught:
            sources.find_source(None, said.append)
        assert "f" * 64 in caught.value.problem
        assert hashlib.sha256(archive.read_bytes()).hexdigest() in caught.value.problem
        assert "third_party/README.md" in caught.value.fix
        assert not list(cache.rglob("llama.h"))

    @pytest.mark.usefixtures("cache")
    def test_a_version_that_the_index_does_not_have(
        self, archive: Path, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.pin(archive, tmp_path, monkeypatch)
        archive.unlink()
        with pytest.raises(BuildError, match=r"cannot be fetched: .*No matching distribution"):
            sources.find_source(None, said.append)


def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "evil.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name in ("x/vendor/llama.cpp/../../../escaped.txt", "x/vendor/llama.cpp/good.txt"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    sources._extract(path, sources.ARCHIVES["llama-cpp-python"], tmp_path / "deep" / "target")
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == ["evil.tar.gz", "good.txt"]


# ---- messages of the command line


@pytest.fixture
def run(cache: Path, tmp_path: Path) -> Callable[..., str]:
    """Run ``build_native.py`` to its failure; gives the message."""

    def run(*arguments: str, python: str = sys.executable, **environment: str) -> str:
        done = subprocess.run(
            [python, str(ROOT / "build_native.py"), "--output", str(tmp_path / "out"), *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "LLAMAPIPE_CACHE_DIR": str(cache), **environment},
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        lines = [line for line in done.stderr.splitlines() if not line.startswith("[llamapipe]")]
        assert lines[0].startswith("error: "), done.stderr
        assert sum(line.startswith("error: ") for line in lines) == 1, done.stderr
        assert sum(line.startswith("  fix: ") for line in lines) == 1, done.stderr
        return done.stderr

    return run


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    """A Python in an environment without any package or program."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return str(tmp_path / "bare" / "bin" / "python")


def with_cffi() -> str:
    return sysconfig.get_path("platlib")


def compilers_only(folder: Path) -> str:
    """A PATH on which there is a C and a C++ compiler and nothing else."""
    for name in ("cc", "c++"):
        make_script(folder / name, f'exec "{shutil.which(name)}" "$@"')
    return str(folder)


def test_no_compiler(run: Callable[..., str], tmp_path: Path) -> None:
    message = run(PATH=str(tmp_path))
    assert "no C++ compiler was found (looked for c++, g++, clang++)" in message
    assert f"fix: {system.install_command('compiler')}" in message


def test_a_compiler_that_is_not_there(run: Callable[..., str]) -> None:
    assert "CXX=no-such-compiler: there is no such C++ compiler" in run(CXX="no-such-compiler")


def test_a_compiler_without_cxx17(run: Callable[..., str], tmp_path: Path) -> None:
    old = make_script(tmp_path / "oldc++", "echo 'error: unrecognized -std=c++17' >&2; exit 1")
    assert "cannot compile a C++17 program: error: unrecognized" in run(CXX=str(old))


def test_no_cffi(run: Callable[..., str], bare_python: str) -> None:
    message = run(python=bare_python, PYTHONPATH="")
    assert "the Python package cffi is missing" in message
    assert f"fix: {bare_python} -m pip install cffi" in message


def test_no_cmake(run: Callable[..., str], bare_python: str, tmp_path: Path, tree: Path) -> None:
    path = compilers_only(tmp_path / "bin")
    message = run("--source", str(tree), python=bare_python, PYTHONPATH=with_cffi(), PATH=path)
    assert "CMake 3.21 or newer is missing" in message
    assert f"fix: {bare_python} -m pip install cmake" in message


def test_old_cmake_counts_as_missing(
    run: Callable[..., str], bare_python: str, tmp_path: Path, tree: Path
) -> None:
    path = compilers_only(tmp_path / "bin")
    make_script(tmp_path / "bin" / "cmake", "echo cmake version 3.10.2")
    message = run("--source", str(tree), python=bare_python, PYTHONPATH=with_cffi(), PATH=path)
    assert f"CMake 3.21 or newer is missing (found 3.10 at {path}/cmake)" in message


def test_no_ninja(run: Callable[..., str], bare_python: str, tmp_path: Path, tree: Path) -> None:
    path = compilers_only(tmp_path / "bin")
    make_script(tmp_path / "bin" / "cmake", "echo cmake version 3.99.0")
    message = run("--source", str(tree), python=bare_python, PYTHONPATH=with_cffi(), PATH=path)
    assert "Ninja is missing" in message
    assert f"fix: {bare_python} -m pip install ninja" in message


def test_a_package_build_fetches_only_the_tools_that_are_missing(bare_python: str, tmp_path: Path) -> None:
    program = "from native_build.toolchain import package_requirements as p; print(*p())"

    def required() -> str:
        environment = {**os.environ, "PATH": str(tmp_path / "tools"), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [bare_python, "-c", program], capture_output=True, text=True, env=environment, check=True
        )
        return done.stdout.strip()

    assert required() == "cmake>=3.21 ninja"
    make_script(tmp_path / "tools" / "cmake", "echo cmake version 3.20.9")
    make_script(tmp_path / "tools" / "ninja", "echo 1.11.1")
    assert required() == "cmake>=3.21"
    make_script(tmp_path / "tools" / "cmake", "echo cmake version 4.0.1")
    assert required() == ""


def test_no_python_headers(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"Python's C headers are missing \(no .*Python\.h\)") as caught:
        toolchain.check_python_headers(tmp_path)
    assert caught.value.fix == system.install_command("python headers")


def test_no_network(run: Callable[..., str]) -> None:
    # Port 9 of this machine: nothing listens there.
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}
    message = run(**nowhere, PIP_RETRIES="0", PIP_CONFIG_FILE=os.devnull, NO_PROXY="*")
    assert "the package index cannot be reached" in message
    assert "LLAMAPIPE_LLAMA_CPP_DIR=" in message


def test_a_proxy_that_is_not_there(run: Callable[..., str]) -> None:
    message = run(PIP_PROXY="http://127.0.0.1:9", PIP_RETRIES="0", PIP_FIND_LINKS="", PIP_EXTRA_INDEX_URL="")
    assert "the package index cannot be reached" in message


@pytest.mark.parametrize("chosen_by", ["--source", "LLAMAPIPE_LLAMA_CPP_DIR"])
def test_a_folder_that_is_not_llama_cpp(run: Callable[..., str], chosen_by: str, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    message = run(chosen_by, str(folder)) if chosen_by == "--source" else run(**{chosen_by: str(folder)})
    assert f"{folder} ({chosen_by}) is not a llama.cpp source tree: it has no CMakeLists.txt" in message


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal can be built here")
def test_metal_off_macos(run: Callable[..., str], tree: Path) -> None:
    message = run("--backend", "metal", "--source", str(tree))
    assert "the Metal backend can only be built on macOS, and this is linux" in message


@pytest.mark.parametrize(
    ("missing", "named", "installs"),
    [
        ("headers", "the Vulkan headers are missing", "vulkan"),
        ("settings", "the Vulkan headers are too old: llama.cpp needs VK_EXT_layer_settings", ""),
        ("glslc", "the shader compiler glslc is missing", "shader compiler"),
        ("spirv", "the SPIR-V headers are missing", "spirv headers"),
    ],
)
def test_an_incomplete_vulkan_sdk(
    run: Callable[..., str], tmp_path: Path, tree: Path, missing: str, named: str, installs: str
) -> None:
    system_has = {"headers": "vulkan/vulkan.hpp", "spirv": "spirv/unified1/spirv.hpp"}.get(missing, "none")
    if any((Path(root) / system_has).exists() for root in ("/usr/include", "/usr/local/include")):
        pytest.skip(f"{system_has} is installed system-wide here, so it cannot be missing")
    sdk = make_vulkan_sdk(tmp_path / "sdk", **{missing: False})
    path = compilers_only(tmp_path / "bin")
    make_script(tmp_path / "bin" / "cmake", "echo cmake version 3.99.0")
    message = run("--check", "--backend", "vulkan", VULKAN_SDK=str(sdk), PATH=f"{path}")
    assert named in message
    assert f"fix: {system.install_command(installs) if installs else 'install the SDK from'}" in message


def test_cuda_compiler_that_is_not_there(run: Callable[..., str], tree: Path) -> None:
    message = run("--backend", "cuda", "--source", str(tree), CUDACXX="/no/such/nvcc")
    assert "CUDACXX=/no/such/nvcc: there is no such program" in message


def test_cuda_toolkit_without_headers(run: Callable[..., str], tree: Path, tmp_path: Path) -> None:
    script = (
        "case $1 in --version) echo Cuda release 13.0, V13.0.88;; *) echo no such file >&2; exit 1;; esac"
    )
    nvcc = make_script(tmp_path / "nvcc", script)
    message = run("--backend", "cuda", "--source", str(tree), CUDACXX=str(nvcc))
    assert "is not usable: it has no cuda_runtime.h" in message
    assert "https://developer.nvidia.com/cuda-downloads" in message


def test_a_cache_that_cannot_be_written(run: Callable[..., str], tmp_path: Path, tree: Path) -> None:
    (tmp_path / "file").write_text("")
    message = run("--source", str(tree), LLAMAPIPE_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert "cannot be written: Not a directory" in message
    assert "LLAMAPIPE_CACHE_DIR=" in message


def test_zero_jobs(run: Callable[..., str]) -> None:
    assert "--jobs 0: at least one job is needed" in run("--jobs", "0")


# ---- settings


def test_settings_of_a_package_build() -> None:
    settings = {
        "backend": "vulkan, cpu",
        "all-variants": "on",
        "openmp": "on",
        "jobs": "3",
        "source": "/x",
        "rpc": "off",
        "media": "off",
        "testing": "on",
    }
    options = with_settings(BuildOptions(), settings)
    expected = BuildOptions(
        ("cpu", "vulkan"),
        all_variants=True,
        openmp=True,
        jobs=3,
        source=Path("/x"),
        rpc=False,
        media=False,
        testing=True,
    )
    assert options == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("backends", "cpu", "no build setting 'backends'"),
        ("backend", "rocm", "no backend 'rocm'"),
        ("openmp", "maybe", "'maybe' is neither on nor off"),
        ("jobs", "many", "'many' is not a positive whole number"),
        ("jobs", "0", "'0' is not a positive whole number"),
    ],
)
def test_a_wrong_setting_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        with_settings(BuildOptions(), {name: text})


def test_the_cpu_backend_is_always_built_and_first() -> None:
    assert BuildOptions(("vulkan", "cuda")).backends == ("cpu", "cuda", "vulkan")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLAMAPIPE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "llamapipe"
    monkeypatch.setenv("LLAMAPIPE_CACHE_DIR", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("LLAMAPIPE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir().is_relative_to(Path.home())


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ('ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n', "debian"),
        ('ID="rocky"\nID_LIKE="rhel centos fedora"\n', "fedora"),
        ("ID=fedora\n", "fedora"),
        ('ID="opensuse-tumbleweed"\nID_LIKE="opensuse suse"\n', "suse"),
        ("ID=manjaro\nID_LIKE=arch\n", "arch"),
        ("ID=alpine\n", "alpine"),
        ("ID=unheard-of\n", "debian"),
    ],
)
def test_the_family_of_the_system(text: str, family: str, tmp_path: Path) -> None:
    path = tmp_path / "os-release"
    path.write_text(text)
    assert system.family(path) == family


def test_the_compilers_fault_with_tile_configurations_is_found_by_trying(tmp_path: Path, cache: Path) -> None:
    from native_build.workarounds import workaround_flags

    keeps = make_script(tmp_path / "keeps", "echo 'movw $23130, 30(%rsp)'")
    loses = make_script(tmp_path / "loses", "echo ldtilecfg")
    knows_not = make_script(tmp_path / "knows-not", "exit 1")
    assert workaround_flags([str(keeps)]) == workaround_flags([str(knows_not)]) == ()
    flags = workaround_flags([str(loses)])
    if not flags:
        pytest.skip("only x86-64 has tiles")
    assert flags[0] == "-include"
    assert "ldtilecfg" in Path(flags[1]).read_text()


@pytest.mark.parametrize(
    ("macros", "flags"),
    [
        ("__AVX512F__", ("-march=native",)),
        ("__AVX512FP16__", ("-march=native", "-mno-avx512fp16")),
    ],
)
def test_half_precision_instructions_are_left_out(
    macros: str, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cxx = make_script(
        tmp_path / "c++",
        f'case "$*" in *-mno-*) ;; *march*) echo "#define {macros} 1" ;; esac; cat > /dev/null',
    )
    monkeypatch.setenv("CXX", str(cxx))
    compilers = toolchain.find_compilers()
    assert compilers.native_flags == flags
    assert "AVX512FP16" not in compilers.native_identity


def test_build_facts_can_be_read(tmp_path: Path) -> None:
    installed = ROOT / "llamapipe" / "native" / "lib" / "build.json"
    if not installed.exists():
        pytest.skip("nothing was built into the source tree: python build_native.py")
    facts = json.loads(installed.read_text())
    assert facts["backends"][0] == "cpu"
    assert {
        "llama_cpp_commit",
        "llama_cpp_source",
        "compiler",
        "flags",
        "cpu_all_variants",
        "python",
    } <= facts.keys()


def test_sources_that_changed_without_being_newer_are_compiled(tmp_path: Path) -> None:
    """Of an archive that is unpacked where another one was; Ninja compares times only."""
    source, tree = tmp_path / "a.cpp", tmp_path / "tree"
    assert not module.is_stale(tree, [source])
    tree.mkdir()
    assert module.is_stale(tree, [source])
    source.write_text("int a;")
    module.remember(tree, [source])
    assert not module.is_stale(tree, [source])
    source.write_text("int b;")
    os.utime(source, (1e9, 1e9))
    assert module.is_stale(tree, [source])
    os.utime(source, (4e9, 4e9))
    assert not module.is_stale(tree, [source])
    (tmp_path / "new.cpp").write_text("int c;")
    os.utime(tmp_path / "new.cpp", (1e9, 1e9))
    assert module.is_stale(tree, [source, tmp_path / "new.cpp"])
