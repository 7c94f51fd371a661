"""Checks the requirements of the GPU backends beyond a C++ compiler, before anything is compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from native_build.errors import BuildError
from native_build.options import BuildOptions
from native_build.paths import cache_dir
from native_build.system import install_command
from native_build.toolchain import Compilers, cmake_version, find_cmake


@dataclass(frozen=True)
class Machine:
    """The machine's tools and options that a backend's check reads."""

    options: BuildOptions
    compilers: Compilers

    def preprocess(self, flags: Sequence[str], program: str) -> str | None:
        """Return the output of the C++ preprocessor for ``program``; None if a header is missing."""
        command = [*self.compilers.cxx, *flags, "-x", "c++", "-E", "-P", "-"]
        done = subprocess.run(command, input=program, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else None


@dataclass(frozen=True)
class Accelerator:
    """A GPU backend that can be built here: its CMake arguments, and the inputs that its result depends on."""

    name: str
    cmake_arguments: tuple[str, ...]
    identity: dict[str, str] = field(default_factory=dict)


# ggml-rpc is not a GPU but is built like one. RDMA is off: its library would be needed wherever the result runs.
_RPC = Accelerator("rpc", ("-DGGML_RPC=ON", "-DGGML_RPC_RDMA=OFF"))
# libmtmd turns images and sounds into embeddings. Video is off: libmtmd would start ffmpeg for it.
_MEDIA = Accelerator("media", ("-DLLAMA_BUILD_MTMD=ON", "-DMTMD_VIDEO=OFF"))


def find_accelerators(options: BuildOptions, compilers: Compilers) -> tuple[Accelerator, ...]:
    """Return the chosen GPU backends, ggml-rpc and libmtmd.

    Raises BuildError, which names the missing requirement, if one cannot be built here.
    """
    machine = Machine(options, compilers)
    accelerators = tuple(_FINDERS[name](machine) for name in options.accelerators)
    return (*accelerators, *((_RPC,) if options.rpc else ()), *((_MEDIA,) if options.media else ()))


def _cuda(machine: Machine) -> Accelerator:
    nvcc = _find_nvcc()
    version = re.search(r"release [\d.]+, V[\d.]+", _output([nvcc, "--version"]))
    if version is None:
        raise BuildError(
            f"the CUDA compiler {nvcc} does not run", "set CUDACXX=/path/to/nvcc of a whole CUDA toolkit"
        )
    _check_cuda_headers(nvcc)
    architectures = machine.options.cuda_architectures or os.environ.get("CUDAARCHS", "")
    present = ""
    if not architectures and not machine.options.all_variants and cmake_version(find_cmake()) >= (3, 24):
        present = _output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]).strip()
        # Compiling takes minutes for the GPUs in this machine, but an hour for every GPU that llama.cpp supports.
        architectures = "native" if re.match(r"\d+\.\d+", present) else ""
    arguments = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DGGML_CUDA_NCCL=OFF"]
    if architectures:
        arguments.append(f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")
    identity = {"nvcc": version[0], "architectures": architectures, "gpus": present}
    if not _has_cuda_driver(nvcc):  # only memory pools need the driver
        arguments.append("-DGGML_CUDA_NO_VMM=ON")
        identity["vmm"] = "off"
    return Accelerator("cuda", tuple(arguments), identity)


def _has_cuda_driver(nvcc: str) -> bool:
    """Return whether there is a driver library, or a stub of it, to link to."""
    toolkit = Path(nvcc).resolve().parent.parent
    stubs = [*toolkit.glob("targets/*/lib/stubs/libcuda.so"), *toolkit.glob("lib*/stubs/libcuda.so")]
    return bool(stubs) or "libcuda.so" in _output(["ldconfig", "-p"])


def _find_nvcc() -> str:
    if program := os.environ.get("CUDACXX"):
        if path := shutil.which(program):
            return path
        raise BuildError(
            f"CUDACXX={program}: there is no such program", "unset CUDACXX, or set it to nvcc's path"
        )
    folders = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/opt/cuda"]
    for folder in filter(None, folders):
        if path := shutil.which("nvcc", path=str(Path(folder) / "bin")):
            return path
    if path := shutil.which("nvcc"):
        return path
    raise BuildError(
        "the CUDA toolkit is missing (no nvcc in CUDA_PATH, in /usr/local/cuda or on PATH)",
        "install it from https://developer.nvidia.com/cuda-downloads, or set CUDACXX=/path/to/nvcc",
    )


def _check_cuda_headers(nvcc: str) -> None:
    for header in ("cuda_runtime.h", "cublas_v2.h", "cuda.h"):
        command = [nvcc, "-x", "cu", "-E", "-"]
        done = subprocess.run(
            command, input=f"#include <{header}>\n", capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BuildError(
                f"the CUDA toolkit of {nvcc} is not usable: it has no {header}, or does not take this C++ compiler"
                f" ({_first_error(done.stderr)})",
                "install the whole toolkit from https://developer.nvidia.com/cuda-downloads,\n"
                "or set NVCC_CCBIN to a C++ compiler that it supports",
            )


def _vulkan(machine: Machine) -> Accelerator:
    sdk = os.environ.get("VULKAN_SDK", "")
    include = f"{sdk}/include" if sdk else ""
    version = _vulkan_headers(machine, include)
    unpacked = cache_dir() / "vulkan-headers" / "include"  # unpacked by ci/setup_vulkan_debian.sh
    if version is None and not sdk and unpacked.is_dir():
        include = str(unpacked)
        version = _vulkan_headers(machine, include)
    if version is None:
        version = _vulkan_headers(machine, include, any_version=True)
        if version is None:
            raise BuildError(
                "the Vulkan headers are missing (no vulkan/vulkan.hpp)", install_command("vulkan")
            )
        raise BuildError(
            "the Vulkan headers are too old: llama.cpp needs VK_EXT_layer_settings"
            f" (these are version {version} of theirs; 309 is new enough)",
            "install the SDK from https://vulkan.lunarg.com/sdk/home and set VULKAN_SDK=/path/to/its/x86_64;\n"
            "on Debian, ci/setup_vulkan_debian.sh unpacks newer headers",
        )
    glslc = shutil.which("glslc", path=str(Path(sdk) / "bin")) if sdk else None
    glslc = glslc or shutil.which("glslc")
    if glslc is None:
        raise BuildError("the shader compiler glslc is missing", install_command("shader compiler"))
    flags = [f"-I{include}"] if include else []
    if machine.preprocess(flags, "#include <spirv/unified1/spirv.hpp>\n") is None:
        fix = install_command("spirv headers")
        raise BuildError("the SPIR-V headers are missing (no spirv/unified1/spirv.hpp)", fix)
    arguments = ["-DGGML_VULKAN=ON", f"-DVulkan_GLSLC_EXECUTABLE={glslc}"]
    if include:
        arguments.append(f"-DVulkan_INCLUDE_DIR={include}")
    identity = {"glslc": _output([glslc, "--version"]), "headers": version, "sdk": sdk}
    return Accelerator("vulkan", tuple(arguments), identity)


def _vulkan_headers(machine: Machine, include: str, any_version: bool = False) -> str | None:
    """Return the version of the Vulkan headers; None if there are none, or none that are new enough."""
    flags = [f"-I{include}"] if include else []
    program = "#include <vulkan/vulkan.hpp>\nfound VK_EXT_layer_settings VK_HEADER_VERSION\n"
    header = machine.preprocess(flags, program)
    if header is None:
        return None
    if "found VK_EXT_layer_settings" in header and not any_version:  # an undefined macro is not replaced
        return None
    return header.split()[-1]


def _metal(_: Machine) -> Accelerator:
    if sys.platform != "darwin":
        raise BuildError(
            f"the Metal backend can only be built on macOS, and this is {sys.platform}",
            "choose another backend: python build_native.py --backend cpu",
        )
    return Accelerator("metal", ("-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"))


_FINDERS: dict[str, Callable[[Machine], Accelerator]] = {"cuda": _cuda, "vulkan": _vulkan, "metal": _metal}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "error" in line]
    return (lines or text.strip().splitlines() or ["no message"])[0]
