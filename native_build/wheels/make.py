"""Builds a release: ``python -m native_build.wheels.make FOLDER [--backend vulkan] [--sdist] [--target NAME]``.

FOLDER gets the wheel for every Python with the GIL, a wheel for each free-threaded Python on PATH, and the wheels of
the requested backends. With ``--sdist`` it also gets the source archive, from which the wheels are then built.

``--target`` names the machines that the wheels are for, by default ``here``. Each other machine gets one wheel, for
every Python with the GIL. ``all`` means this machine and all targets whose compilers and headers are installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from native_build.cli import say
from native_build.errors import BuildError
from native_build.module import module_headers
from native_build.options import BuildOptions
from native_build.paths import PROJECT
from native_build.toolchain import find_compilers, uses_zig
from native_build.wheels.backend import KINDS, build_backend_wheel
from native_build.wheels.interpreters import Interpreter, find_interpreters
from native_build.wheels.repair import repair

# cffi supports no earlier free-threaded Python.
FREE_THREADED_SINCE = (3, 14)


HERE = "here"
# Machines that a wheel can be built for on a different machine.
TARGETS = ("aarch64-linux-gnu", "x86_64-windows-gnu", "arm64-apple-darwin", "x86_64-apple-darwin")


def make(
    folder: Path,
    options: BuildOptions,
    sdist: bool = False,
    targets: Sequence[str] = (HERE,),
) -> list[Path]:
    """Build everything. Return the paths of the files. Raises BuildError."""
    paths = []
    with tempfile.TemporaryDirectory(prefix="llamapipe-make-") as name:
        scratch = Path(name)
        source = PROJECT
        if sdist:
            _build(sys.executable, PROJECT, scratch / "sdist", "--sdist")
            archive = next((scratch / "sdist").glob("*.tar.gz"))
            paths.append(_place(archive, folder))
            _run(["tar", "-xzf", str(archive), "-C", str(scratch)], "unpacking the source archive")
            source = scratch / archive.name.removesuffix(".tar.gz")
        if HERE in targets:
            paths.append(_wheel(sys.executable, source, scratch / "stable", folder))
            for interpreter in filter(_needs_its_own, find_interpreters()):
                say(f"the wheel for Python {interpreter.name}")
                python = _environment(interpreter, scratch / interpreter.name)
                paths.append(_wheel(python, source, scratch / f"wheel-{interpreter.name}", folder))
        for target in (name for name in targets if name != HERE):
            say(f"the wheel for {target}")
            paths.append(_wheel(sys.executable, source, scratch / target, folder, target))
        for backend in options.accelerators:
            backend_options = BuildOptions(
                backends=(backend,), all_variants=True, cuda_architectures=options.cuda_architectures
            )
            paths.append(repair(build_backend_wheel(backend_options, scratch / backend, say), folder))
    return paths


def buildable(tell: Callable[[str], None]) -> list[str]:
    """Return this machine and the targets whose compilers and headers are installed; ``tell`` reports missing ones."""
    targets = [HERE]
    for target in TARGETS:
        options = BuildOptions(target=target)
        if (options.system, options.machine) == (BuildOptions().system, BuildOptions().machine):
            continue
        try:
            find_compilers(target)
            module_headers(options)
        except BuildError as error:
            tell(f"no wheel for {target}: {error}")
        else:
            targets.append(target)
    return targets


def _needs_its_own(interpreter: Interpreter) -> bool:
    if not interpreter.free_threaded:
        return False
    if interpreter.version[:2] < FREE_THREADED_SINCE:
        say(f"no wheel for Python {interpreter.name}: cffi does not support it")
        return False
    return True


def _environment(interpreter: Interpreter, folder: Path) -> str:
    _run([interpreter.path, "-m", "venv", str(folder)], f"an environment of Python {interpreter.name}")
    python = str(folder / "bin" / "python")
    _run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", "build"], "installing `build`")
    return python


def _wheel(python: str, source: Path, scratch: Path, folder: Path, target: str = "") -> Path:
    settings = ["--config-setting=all-variants=on"]
    settings += [f"--config-setting=target={target}"] if target else []
    if uses_zig(target):  # zig is in this environment, but not in a package build's
        settings += ["--no-isolation", "--skip-dependency-check"]
    _build(python, source, scratch, "--wheel", *settings)
    return repair(next(scratch.glob("*.whl")), folder)


def _build(python: str, source: Path, target: Path, *options: str) -> None:
    command = [python, "-m", "build", *options, "--outdir", str(target), str(source)]
    _run(command, f"python -m build {options[0]}")


def _place(path: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(path, folder / path.name))


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=None, text=True, check=False)
    if done.returncode != 0:
        last = "\n    ".join(done.stdout.strip().splitlines()[-12:])
        raise BuildError(f"{what} failed:\n    {last}", "correct it and run the same command again")


def main() -> int:
    """Build and list the files. Return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m native_build.wheels.make", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", action="append", default=[], choices=sorted(KINDS))
    parser.add_argument("--cuda-architectures", default="", metavar="LIST")
    parser.add_argument("--sdist", action="store_true")
    parser.add_argument(
        "--target", action="append", metavar="SYSTEM", help=f"{HERE}, all, or such as {', '.join(TARGETS)}"
    )
    args = parser.parse_args()
    try:
        targets = args.target or [HERE]
        targets = buildable(say) if "all" in targets else targets
        for target in targets:
            BuildOptions(target="" if target == HERE else target)  # refuses a wrong target before building
        options = BuildOptions(
            backends=tuple(args.backend),
            all_variants=True,
            cuda_architectures=args.cuda_architectures,
        )
        for path in make(args.folder.resolve(), options, args.sdist, targets):
            print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
