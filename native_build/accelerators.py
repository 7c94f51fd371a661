"""What the GPU backends need beyond a C++ compiler: checked before anything is compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from native_build.errors import BuildError
from native_build.options import BuildOptions
from native_build.system import install_command
from native_build.toolchain import Compilers, cmake_version


@dataclass(frozen=True)
class Accelerator:
    """A GPU backend that can be built here: CMake arguments, and what its result depends on."""

    name: str
    cmake_arguments: tuple[str, ...]
    identity: dict[str, str] = field(default_factory=dict)


def find_accelerator(name: str, options: BuildOptions, compilers: Compilers, cmake: str) -> Accelerator:
    """Check that backend ``name`` can be built; raises BuildError naming what is missing."""
    return _FINDERS[name](options, compilers, cmake)


def _cuda(options: BuildOptions, compilers: Compilers, cmake: str) -> Accelerator:
    nvcc = _find_nvcc()
    version = _output([nvcc, "--version"])
    if "release" not in version:
        raise BuildError(f"the CUDA compiler {nvcc} does not run", "reinstall the CUDA toolkit, or set CUDACXX=/path/to/nvcc")
    root = Path(os.path.realpath(nvcc)).parent.parent
    for candidate in (root, *map(Path, filter(None, (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"))))):
        if list(candidate.glob("**/include/cuda_runtime.h")) or list(candidate.glob("include/cuda_runtime.h")):
            break
    architectures = options.cuda_architectures or os.environ.get("CUDAARCHS", "")
    if not architectures and not options.all_variants and _has_nvidia_gpu() and cmake_version(cmake) >= (3, 24):
        architectures = "native"
    arguments = ["-DGGML_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DGGML_CUDA_NCCL=OFF"]
    if architectures:
        arguments.append(f"-DCMAKE_CUDA_ARCHITECTURES={architectures}")
    present = _output(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]) if architectures == "native" else ""
    return Accelerator(
        "cuda", tuple(arguments), {"nvcc": version, "architectures": architectures or "portable", "present": present}
    )


def _find_nvcc() -> str:
    if given := os.environ.get("CUDACXX"):
        if found := shutil.which(given):
            return found
        raise BuildError(f"CUDACXX={given}: there is no such program", "unset CUDACXX, or set it to nvcc's path")
    folders = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/opt/cuda"]
    for folder in filter(None, folders):
        if found := shutil.which("nvcc", path=os.path.join(folder, "bin")):
            return found
    if found := shutil.which("nvcc"):
        return found
    raise BuildError(
        "the CUDA toolkit is missing (no nvcc on PATH, in CUDA_PATH or in /usr/local/cuda)",
        "install it from https://developer.nvidia.com/cuda-downloads, or set CUDACXX=/path/to/nvcc",
    )


def _has_nvidia_gpu() -> bool:
    return "GPU" in _output(["nvidia-smi", "-L"])


def _vulkan(options: BuildOptions, compilers: Compilers, cmake: str) -> Accelerator:
    sdk = os.environ.get("VULKAN_SDK", "")
    extra = [f"-I{sdk}/include"] if sdk else []
    header = _preprocess(compilers, extra, "#include <vulkan/vulkan_core.h>\nversion VK_HEADER_VERSION_COMPLETE_ VK_HEADER_VERSION\n")
    if header is None:
        raise BuildError("the Vulkan headers are missing (no vulkan/vulkan_core.h)", install_command("vulkan"))
    glslc = shutil.which("glslc", path=os.path.join(sdk, "bin")) if sdk else None
    glslc = glslc or shutil.which("glslc")
    if glslc is None:
        raise BuildError("the shader compiler glslc is missing", install_command("shader compiler"))
    spirv = _preprocess(compilers, extra, "#include <spirv/unified1/spirv.hpp>\n")
    if spirv is None:
        raise BuildError("the SPIR-V headers are missing (no spirv/unified1/spirv.hpp)", install_command("spirv headers"))
    identity = {"glslc": _output([glslc, "--version"]), "headers": header.strip().splitlines()[-1], "sdk": sdk}
    return Accelerator("vulkan", ("-DGGML_VULKAN=ON", f"-DVulkan_GLSLC_EXECUTABLE={glslc}"), identity)


def _preprocess(compilers: Compilers, extra: list[str], program: str) -> str | None:
    done = subprocess.run(
        [*compilers.cxx, *extra, "-x", "c++", "-E", "-P", "-"], input=program, capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


def _metal(options: BuildOptions, compilers: Compilers, cmake: str) -> Accelerator:
    if sys.platform != "darwin":
        raise BuildError(
            f"the Metal backend can only be built on macOS (this is {sys.platform})",
            "choose another backend: python build_native.py --backend cpu",
        )
    return Accelerator("metal", ("-DGGML_METAL=ON", "-DGGML_METAL_EMBED_LIBRARY=ON"))


_FINDERS: dict[str, Callable[[BuildOptions, Compilers, str], Accelerator]] = {
    "cuda": _cuda,
    "vulkan": _vulkan,
    "metal": _metal,
}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return ""
