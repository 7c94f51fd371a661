"""Defines how llama.cpp is compiled: CMake's arguments, and the key of the result in the cache."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from native_build.options import BuildOptions
from native_build.sources import Source
from native_build.store import key_of
from native_build.systems import MACOS, WINDOWS, System
from native_build.toolchain import Compilers, uses_zig

# Increase this if equal inputs give a different result: all cached results are then rebuilt.
VERSION = 1
# The following texts go into llama.cpp's build as CMAKE_PROJECT_INCLUDE. Other bindings ship libllama.so.0 and
# libggml-base.so.0 too, and the dynamic loader loads only one library of each name into a process, so llamapipe's have
# other names. Backend modules are opened by path and keep llama.cpp's names, because its loader searches for these.
_NAMES = 'set(CMAKE_SHARED_LIBRARY_PREFIX "libllamapipe-")\n'
# llama.cpp's assertions contain the path of their file. Libraries for other machines must not depend on the folder that
# they were built in. Builds for this machine keep the paths, for debuggers.
_PATHS = """foreach(pair "${CMAKE_SOURCE_DIR}=llama.cpp" "${CMAKE_BINARY_DIR}=build")
  add_compile_options("$<$<COMPILE_LANGUAGE:C,CXX>:-ffile-prefix-map=${pair}>")
  add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffile-prefix-map=${pair}>")
endforeach()
"""
# llama.cpp's variants for 64-bit ARM on Linux, with two changes. Variants with SME are left out: GCC before 14 cannot
# compile them, and only KleidiAI, which is not built, has code for SME. One variant is added for processors that have
# 8-bit matrix products but no SVE: AmpereOne, and Apple's since the M2, which run containers on a Mac. llama.cpp has no
# option for the list, but the function that adds a variant calls `add_dependencies`.
_ARM_VARIANTS = """if(PROJECT_NAME STREQUAL "ggml" AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  function(add_dependencies target)
    set(others ${ARGN})
    list(FILTER others EXCLUDE REGEX "^ggml-cpu-armv9")
    if(others)
      _add_dependencies(${target} ${others})
    endif()
    if(others STREQUAL "ggml-cpu-armv8.2_2")
      ggml_add_cpu_backend_variant(armv8.6_0 DOTPROD FP16_VECTOR_ARITHMETIC MATMUL_INT8)
    endif()
  endfunction()
endif()
"""
# ggml names its libraries differently on Windows, where they export all their symbols. The exports must not include
# symbols that the linker adds to each library: the next library would have them twice.
_WINDOWS_LIBRARIES = r"""if(PROJECT_NAME STREQUAL "llama.cpp")
  file(WRITE "${CMAKE_BINARY_DIR}/llamapipe_own.cpp" [[
__asm__(".section .drectve,\"yn\"\n"
        ".ascii \" -exclude-symbols:_CRT_INIT,__mingw_module_is_dll,__unw_getcontext,atexit,unw_getcontext\"\n"
        ".text\n");
]])
  function(llamapipe_library target)
    if(TARGET ${target})
      set_target_properties(${target} PROPERTIES PREFIX "libllamapipe-")
      target_sources(${target} PRIVATE "${CMAKE_BINARY_DIR}/llamapipe_own.cpp")
    endif()
  endfunction()
  cmake_language(DEFER CALL llamapipe_library ggml-base)
  cmake_language(DEFER CALL llamapipe_library ggml)
  cmake_language(DEFER CALL llamapipe_library llama)
  cmake_language(DEFER CALL llamapipe_library mtmd)
endif()
"""
# CMake links modules on macOS as bundles, which zig cannot link; dlopen() also opens dynamic libraries. CMake 3.25
# detects only on a Mac that libraries can refer to each other by run paths. zig cannot read archives of GNU's ar.
_MAC_MODULES = """foreach(language C CXX)
  set(CMAKE_SHARED_MODULE_CREATE_${language}_FLAGS "-dynamiclib")
  set(CMAKE_SHARED_LIBRARY_RUNTIME_${language}_FLAG "-Wl,-rpath,")
  set(CMAKE_${language}_ARCHIVE_CREATE "${CMAKE_${language}_COMPILER} ar qc <TARGET> <LINK_FLAGS> <OBJECTS>")
  set(CMAKE_${language}_ARCHIVE_FINISH "${CMAKE_${language}_COMPILER} ranlib <TARGET>")
endforeach()
"""
# Like `_ARM_VARIANTS`, for Apple's processors. zig's clang takes a processor's name instead of an architecture.
_MAC_VARIANTS = """if(PROJECT_NAME STREQUAL "ggml")
  function(add_dependencies target)
    set(others ${ARGN})
    list(REMOVE_ITEM others "ggml-cpu-apple_m4")
    if(others)
      _add_dependencies(${target} ${others})
    endif()
  endfunction()
  function(target_compile_options target)
    set(options ${ARGN})
    list(TRANSFORM options REPLACE "^-march=armv8[.]2-a[+]dotprod$" "-mcpu=apple_m1")
    list(TRANSFORM options REPLACE "^-march=armv8[.]6-a[+]dotprod[+]i8mm$" "-mcpu=apple_m2")
    _target_compile_options(${target} ${options})
  endfunction()
endif()
"""
# Environment variables that change the compilation. CMake reads the last three itself.
_VARIABLES = ("CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "MACOSX_DEPLOYMENT_TARGET", "SDKROOT")
_LEFT_OUT = ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER", "APP", "UI")


@dataclass(frozen=True)
class Recipe:
    """All inputs that the core libraries and the CPU modules depend on."""

    options: BuildOptions
    source: Source
    compilers: Compilers

    @property
    def tuning(self) -> tuple[str, ...]:
        """The compiler flags for this machine's instruction sets; empty if the sets are chosen at run time."""
        return () if self.options.all_variants else self.compilers.native_flags

    def compiler_flags(self, language: str) -> list[str]:
        """Return the user's flags for ``language`` (C or CXX), then llamapipe's."""
        flags = [
            *shlex.split(os.environ.get("CPPFLAGS", "")),
            *shlex.split(os.environ.get(f"{language}FLAGS", "")),
        ]
        return [*flags, *self.compilers.workarounds, *self.tuning]

    @property
    def cmake_arguments(self) -> tuple[str, ...]:
        """The arguments that all backends share. Another backend changes none of them, so the core is not rebuilt."""
        return (
            # A list: a compiler command may have fixed arguments (CXX="ccache g++").
            f"-DCMAKE_C_COMPILER={';'.join(self.compilers.c)}",
            f"-DCMAKE_CXX_COMPILER={';'.join(self.compilers.cxx)}",
            f"-DCMAKE_C_FLAGS={shlex.join(self.compiler_flags('C'))}",
            f"-DCMAKE_CXX_FLAGS={shlex.join(self.compiler_flags('CXX'))}",
            *self.target_arguments,
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_INSTALL_RPATH={self.options.system.origin}",
            "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
            "-DBUILD_SHARED_LIBS=ON",
            "-DGGML_BACKEND_DL=ON",
            # llama.cpp refuses GGML_NATIVE with loadable backends; `tuning` replaces it.
            "-DGGML_NATIVE=OFF",
            f"-DGGML_CPU_ALL_VARIANTS={_on(self.options.all_variants)}",
            f"-DGGML_OPENMP={_on(self.options.openmp)}",
            "-DGGML_BLAS=OFF",
            "-DLLAMA_OPENSSL=OFF",
            *(f"-DLLAMA_BUILD_{part}=OFF" for part in _LEFT_OUT),
        )

    @property
    def target_arguments(self) -> tuple[str, ...]:
        """CMake's arguments for another machine; none for this one."""
        if not self.options.target:
            return ()
        # This machine's libraries and headers must not be used for the other machine.
        modes = (f"-DCMAKE_FIND_ROOT_PATH_MODE_{kind}=ONLY" for kind in ("LIBRARY", "INCLUDE", "PACKAGE"))
        mac: list[str] = []
        if self.options.system is MACOS:
            # CMake requires this tool but never runs it, because no run path is changed.
            mac.append("-DCMAKE_INSTALL_NAME_TOOL=none")
            # zig links what it compiles itself, such as libc++, with debugging information, which names folders of this
            # machine. -S leaves it out.
            flags = f"{os.environ.get('LDFLAGS', '')} -Wl,-S".strip()
            mac += [f"-DCMAKE_{kind}_LINKER_FLAGS={flags}" for kind in ("SHARED", "MODULE")]
        return (
            f"-DCMAKE_SYSTEM_NAME={self.options.system.cmake_name}",
            f"-DCMAKE_SYSTEM_PROCESSOR={self.options.machine}",
            f"-DCMAKE_FIND_ROOT_PATH=/usr/{self.options.target}",
            "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER",
            *modes,
            *mac,
        )

    @property
    def injected(self) -> str:
        """The CMake code that is run inside llama.cpp's build."""
        parts = [_NAMES]
        if self.options.all_variants:
            parts.append(_PATHS)
            parts += [_ARM_VARIANTS] if self.options.machine in ("aarch64", "arm64") else []
        if self.options.system is WINDOWS:
            parts.append(_WINDOWS_LIBRARIES)
        if self.options.system is MACOS and self.options.target:
            parts.append(_MAC_MODULES)
            if self.options.all_variants and self.options.machine == "arm64":
                parts.append(_MAC_VARIANTS)
        return "".join(parts)

    @property
    def key(self) -> str:
        """The key of the result in the cache: equal for builds whose results are interchangeable."""
        return key_of({**self._parts(), "source": self.source.identity})

    @property
    def tree_key(self) -> str:
        """The name of the folder to compile in.

        The name stays the same when files of an unpinned source change, so that only changed files are compiled.
        """
        place = self.source.identity if self.source.pinned else str(self.source.path)
        return key_of({**self._parts(), "source": place})

    def _parts(self) -> dict[str, object]:
        arguments = self.cmake_arguments
        if uses_zig(self.options.target):  # zig is a Python package, so its path depends on the environment
            arguments = tuple(text.replace(self.compilers.c[0], "zig") for text in arguments)
        return {
            "version": VERSION,
            "injected": self.injected,
            "arguments": arguments,
            "compilers": self.compilers.version,
            "instructions": self.compilers.native_identity if self.tuning else "",
            "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
            "platform": [sys.platform, self.options.machine],
        }


def core_libraries(folder: Path, system: System) -> dict[str, Path]:
    """Return, by the file name to ship, the libraries that every backend and the cffi module link to."""
    return versioned(folder, system, "llama", "ggml", "ggml-base")


def versioned(folder: Path, system: System, *names: str) -> dict[str, Path]:
    """Return, by the file name to ship, the files of these libraries.

    Libraries are shipped under the one name that dependents ask for, which ends with the ABI number: a wheel cannot
    hold symbolic links.
    """
    files = {}
    for name in names:
        path = min(folder.glob(system.library.format(name)), key=lambda library: len(library.name))
        files[path.name] = path
    return files


def _on(value: bool) -> str:
    return "ON" if value else "OFF"
