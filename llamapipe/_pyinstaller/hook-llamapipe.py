"""PyInstaller's hook for llamapipe: modules are imported, and libraries opened, by names that only a run shows."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

import llamapipe


def _imports(name: str) -> bool:
    """Return whether the packages that a module needs are installed: those of extras may not be."""
    if "_pyinstaller" in name or name.endswith("__main__"):
        return False
    try:
        import_module(name)
    except ImportError:
        return False
    return True


# Packages of extras that are imported by name; pyarrow is left out, as it would double the program's size.
_EXTRAS = ("llguidance", "tqdm.auto", "opentelemetry.trace", "zmq")
hiddenimports = [*collect_submodules("llamapipe", filter=_imports), "_cffi_backend"]
hiddenimports += filter(_imports, _EXTRAS)
# The models of the demo, the server's page, and the record of the build.
datas = collect_data_files("llamapipe", excludes=["**/cdef/**", "**/src/**", "**/kernels/**"])
if "llguidance" in hiddenimports:
    datas += copy_metadata("llguidance")  # it reads its own version
# llama.cpp's libraries find each other, and ggml its backends, in the folder that they were installed in.
_native = Path(llamapipe.__file__).parent / "native" / "lib"
binaries = [(str(file), "llamapipe/native/lib") for file in _native.glob("*.so*")]
for _package in ("llamapipe_cuda", "llamapipe_vulkan"):
    if find_spec(_package):
        hiddenimports.append(_package)
        datas += collect_data_files(_package)
