"""Defines the options of a build, and reads them from the settings of a package build."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path

from native_build.errors import BuildError
from native_build.systems import System, system_of

BACKENDS = ("cpu", "cuda", "vulkan", "metal")


@dataclass(frozen=True)
class BuildOptions:
    """The options of one build. Every build includes the CPU backend: llama.cpp keeps some tensors there.

    ``all_variants``: one CPU module per instruction set, chosen at run time (for wheels), instead of one for this
    machine. ``cuda_architectures``: in CMake's notation; empty means those of this machine's GPUs, or all usual ones.
    ``rpc``: with ggml-rpc, a library that is opened only when a model is placed on other machines. ``media``: with
    libmtmd, a library that is opened only for models with an ``mmproj``. ``testing``: with the functions that only
    tests and benchmarks call (``cdef/50_testing.h``). ``target``: the machine to build for, as GNU's tools name it
    (``aarch64-linux-gnu``, ``x86_64-windows-gnu``, ``arm64-apple-darwin``); empty means this one. Only the CPU backend
    can be built for another machine.
    """

    backends: tuple[str, ...] = ("cpu",)
    all_variants: bool = False
    openmp: bool = False
    source: Path | None = None
    jobs: int | None = None
    clean: bool = False
    cuda_architectures: str = ""
    rpc: bool = True
    media: bool = True
    testing: bool = False
    target: str = ""

    def __post_init__(self) -> None:
        for name in self.backends:
            if name not in BACKENDS:
                raise BuildError(f"there is no backend {name!r}", f"choose among: {', '.join(BACKENDS)}")
        if self.jobs is not None and self.jobs < 1:
            raise BuildError(f"--jobs {self.jobs}: at least one job is needed", "--jobs 1")
        if self.target and not re.fullmatch(
            r"[a-z0-9_]+-linux-gnu|x86_64-windows-gnu|(x86_64|arm64)-apple-darwin", self.target
        ):
            raise BuildError(
                f"--target {self.target!r} is neither a Linux system with GNU's C library, nor Windows, nor macOS",
                "--target aarch64-linux-gnu, x86_64-windows-gnu, arm64-apple-darwin or x86_64-apple-darwin",
            )
        ordered = tuple(name for name in BACKENDS if name == "cpu" or name in self.backends)
        object.__setattr__(self, "backends", ordered)
        if self.target and self.accelerators:
            raise BuildError(
                f"the {self.accelerators[0]} backend cannot be built for another machine ({self.target})",
                "leave out --target, or build the CPU's backend",
            )

    @property
    def accelerators(self) -> tuple[str, ...]:
        """The backends other than the CPU backend."""
        return self.backends[1:]

    @property
    def system(self) -> System:
        """The system to build for."""
        return system_of(self.target)

    @property
    def machine(self) -> str:
        """The processor to build for, as ``platform.machine()`` names it there."""
        return self.target.partition("-")[0] or platform.machine()

    @property
    def n_jobs(self) -> int:
        """The number of parallel compilations: the option, or by default the cores that this process may use."""
        if self.jobs is not None:
            return self.jobs
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0)) or 1
        return os.cpu_count() or 1


def parse_flag(name: str, text: str) -> bool:
    """Return the value of an on/off setting. Raises BuildError that names the setting."""
    lowered = text.strip().lower()
    if lowered in ("1", "on", "true", "yes"):
        return True
    if lowered in ("0", "off", "false", "no", ""):
        return False
    raise BuildError(f"{name}={text!r} is neither on nor off", f"{name}=on or {name}=off")


def with_settings(options: BuildOptions, settings: dict[str, str]) -> BuildOptions:
    """Return the options with the settings of a package build (``pip install . -C backend=vulkan``) applied.

    The settings are ``backend`` (several with commas or spaces), ``all-variants``, ``openmp``, ``rpc``, ``media``,
    ``testing``, ``source``, ``jobs``, ``cuda-architectures``, ``target``. Raises BuildError for others, so a misspelt
    setting does not go unnoticed.
    """
    for name, text in settings.items():
        if name == "backend":
            options = replace(options, backends=tuple(text.replace(",", " ").split()))
        elif name == "all-variants":
            options = replace(options, all_variants=parse_flag(name, text))
        elif name == "openmp":
            options = replace(options, openmp=parse_flag(name, text))
        elif name == "rpc":
            options = replace(options, rpc=parse_flag(name, text))
        elif name == "media":
            options = replace(options, media=parse_flag(name, text))
        elif name == "testing":
            options = replace(options, testing=parse_flag(name, text))
        elif name == "source":
            options = replace(options, source=Path(text))
        elif name == "jobs":
            options = replace(options, jobs=_positive(name, text))
        elif name == "cuda-architectures":
            options = replace(options, cuda_architectures=text)
        elif name == "target":
            options = replace(options, target=text)
        else:
            known = (
                "backend, all-variants, openmp, rpc, media, testing, source, jobs, cuda-architectures, target"
            )
            raise BuildError(f"there is no build setting {name!r}", f"choose among: {known}")
    return options


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise BuildError(f"{name}={text!r} is not a positive whole number", f"{name}=2")
    return int(text)
