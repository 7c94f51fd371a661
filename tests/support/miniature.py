"""A source tree with llama.cpp's layout and targets that compiles in a second: the build's own machinery is real."""

from __future__ import annotations

from pathlib import Path

_CMAKE = """
cmake_minimum_required(VERSION 3.14...3.28)
project("llama.cpp" C CXX)
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(WIN32)
    set(CMAKE_SHARED_LIBRARY_PREFIX "")
    set(CMAKE_SHARED_MODULE_PREFIX "")
endif()
set(GGML_OPENMP_ENABLED ${GGML_OPENMP} CACHE INTERNAL "")
foreach(name ggml-base ggml llama)
    add_library(${name} SHARED ${name}.c)
    set_target_properties(${name} PROPERTIES VERSION 0.1.2 SOVERSION 0)
endforeach()
target_link_libraries(ggml ggml-base)
target_link_libraries(llama ggml)
add_library(ggml-cpu MODULE ggml-cpu.c)
target_link_libraries(ggml-cpu ggml-base)
add_dependencies(ggml ggml-cpu)
if(GGML_VULKAN)
    add_library(ggml-vulkan MODULE ggml-vulkan.c)
    target_link_libraries(ggml-vulkan ggml-base)
    add_dependencies(ggml ggml-vulkan)
endif()
if(GGML_RPC)
    add_library(ggml-rpc MODULE ggml-rpc.c)
    target_link_libraries(ggml-rpc ggml-base)
endif()
"""
_FILES = {
    "CMakeLists.txt": _CMAKE,
    "LICENSE": "MIT",
    "ggml-base.c": "int base(void) { return 1; }",
    "ggml.c": "int base(void); int ggml(void) { return base(); }",
    "llama.c": "int ggml(void); int llama(void) { return ggml(); }",
    "ggml-cpu.c": "int base(void); int cpu(void) { return base(); }",
    "ggml-vulkan.c": "int base(void); int vulkan(void) { return base(); }",
    "ggml-rpc.c": "int base(void); int rpc(void) { return base(); }",
    "include/llama.h": "",
    "ggml/include/ggml.h": "",
    "src/llama-context.h": "",
}


def make_tree(folder: Path) -> Path:
    """Write the tree into ``folder``."""
    for name, text in _FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


def make_vulkan_sdk(
    folder: Path, *, headers: bool = True, settings: bool = True, glslc: bool = True, spirv: bool = True
) -> Path:
    """Write as much of a Vulkan SDK as the build looks at before it compiles."""
    if headers:
        extension = "#define VK_EXT_layer_settings 1\n" if settings else ""
        _write(folder / "include/vulkan/vulkan.hpp", f"#define VK_HEADER_VERSION 999\n{extension}")
    if spirv:
        _write(folder / "include/spirv/unified1/spirv.hpp", "\n")
    if glslc:
        make_script(folder / "bin/glslc", "echo miniature glslc 1.0")
    return folder


def make_script(path: Path, command: str) -> Path:
    """Write an executable shell script."""
    _write(path, f"#!/bin/sh\n{command}\n")
    path.chmod(0o755)
    return path


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
