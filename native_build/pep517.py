"""Implements the package build (PEP 517 and 660): scikit-build-core packs what ``native_build`` compiles.

``native_build`` runs CMake itself, as for ``build_native.py``. Both share the cache and the messages, and llama.cpp's
libraries are built before the cffi module. CMake and Ninja are fetched only if the system lacks them.

Settings: ``pip install . --config-settings=backend=vulkan``. ``options.with_settings`` lists all of them.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from scikit_build_core import build as backend

from native_build.archives import source_date
from native_build.cli import say
from native_build.errors import BuildError
from native_build.install import build
from native_build.options import BuildOptions, with_settings
from native_build.paths import PACKAGE_NATIVE
from native_build.toolchain import package_requirements

Settings = Mapping[str, "str | list[str]"]


@contextmanager
def _options(config_settings: Settings | None, testing: bool = False) -> Iterator[BuildOptions]:
    """Read the settings. ``testing``: that setting's default. A BuildError ends the process with its message."""
    try:
        settings = (config_settings or {}).items()
        yield with_settings(
            BuildOptions(testing=testing),
            {name: text if isinstance(text, str) else " ".join(text) for name, text in settings},
        )
    except BuildError as error:
        # pip shows the hook's output, in which a traceback would hide the message.
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """Return the packages to install before ``build_wheel``."""
    with _options(config_settings):
        return package_requirements()


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """Return the packages to install before ``build_editable``."""
    with _options(config_settings):
        return package_requirements()


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the native part and the wheel."""
    with (
        _options(config_settings) as options,
        tempfile.TemporaryDirectory(prefix="llamapipe-build-") as native,
    ):
        build(options, Path(native), say)
        settings: dict[str, list[str] | str] = {f"wheel.force-include.{native}": "llamapipe/native"}
        if options.target:
            settings["wheel.tags"] = f"cp310-abi3-{options.system.wheel_tag.format(options.machine)}"
        return backend.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the native part in place, as ``build_native.py`` does, and a wheel that refers to the source tree."""
    with _options(config_settings, testing=True) as options:
        build(options, PACKAGE_NATIVE, say)
        return backend.build_editable(wheel_directory, {}, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings | None = None) -> str:
    """Pack the sources without compiling anything; equal sources give an equal archive."""
    with _options(config_settings):
        source_date()
        return backend.build_sdist(sdist_directory)
