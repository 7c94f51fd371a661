"""What pyproject.toml cannot say: a build step for the native part, and a wheel of one platform for every Python 3."""

import atexit
import shutil
import tempfile
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.build import build

from native_build import pep517
from native_build.cli import say
from native_build.install import build as build_native
from native_build.module import file_name, free_threaded
from native_build.paths import PACKAGE_NATIVE


class BinaryDistribution(Distribution):
    """A distribution for one platform, although setuptools compiles nothing."""

    def has_ext_modules(self) -> bool:
        """Whether the wheel depends on the platform."""
        return True


class BuildNative(Command):
    """Builds llama.cpp and the cffi module into the wheel, or in place for an editable install."""

    editable_mode = False

    def initialize_options(self) -> None:
        """Set what ``finalize_options`` fills in."""
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        """Take the folder that the wheel is made from."""
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        """Build."""
        build_native(pep517.options, self._target(), say)

    def _target(self) -> Path:
        return PACKAGE_NATIVE if self.editable_mode else Path(str(self.build_lib)) / "llamapipe" / "native"

    def get_source_files(self) -> list[str]:
        """Nothing beyond MANIFEST.in."""
        return []

    def get_outputs(self) -> list[str]:
        """What was built, once it is."""
        built = [*(self._target() / "lib").glob("*"), self._target() / file_name()]
        return [str(path) for path in built if path.exists()]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing is mapped: an editable build writes into the source tree itself."""
        return {}


# First, so that a message about a missing tool is not buried under a list of copied files.
build.sub_commands.insert(0, ("build_native", None))

# Not in the source tree: what an earlier build left there would go into the wheel.
scratch = tempfile.mkdtemp(prefix="llamapipe-build-")
atexit.register(shutil.rmtree, scratch, ignore_errors=True)

options: dict[str, dict[str, str]] = {"build": {"build_base": scratch}}
if not free_threaded():
    options["bdist_wheel"] = {"py_limited_api": "cp310"}
    if pep517.options.target:
        options["bdist_wheel"]["plat_name"] = f"linux_{pep517.options.machine}"

setup(
    distclass=BinaryDistribution,
    cmdclass={"build_native": BuildNative},
    options=options,
)
