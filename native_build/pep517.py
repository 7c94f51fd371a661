"""The package build (PEP 517 and 660): setuptools, with CMake and Ninja fetched only if the system lacks them.

Settings: ``pip install . --config-settings=backend=vulkan``; all of them in ``options.with_settings``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from setuptools import build_meta

from native_build.archives import rewrite_sdist
from native_build.errors import BuildError
from native_build.options import BuildOptions, with_settings
from native_build.toolchain import package_requirements

Settings = Mapping[str, "str | list[str]"]

# What the ``build_native`` command of setup.py builds; the hooks below set it, in the same process.
options = BuildOptions()


@contextmanager
def _settings(given: Settings | None) -> Iterator[dict[str, str | list[str]]]:
    """Takes llamapipe's settings and yields setuptools'. A BuildError ends the process with only its message."""
    global options
    try:
        mine = {
            name: value if isinstance(value, str) else " ".join(value)
            for name, value in (given or {}).items()
            if not name.startswith("--")
        }
        options = with_settings(BuildOptions(), mine)
        # pip shows all output when a build fails. setuptools' lists of files would bury the message.
        yield {
            "--quiet": "on",
            **{name: value for name, value in (given or {}).items() if name.startswith("--")},
        }
    except BuildError as error:
        # pip shows the output of the hook; a traceback would only hide the message.
        print(error, file=sys.stderr, flush=True)
        sys.exit(1)


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """The packages to install before ``build_wheel``."""
    with _settings(config_settings) as rest:
        return build_meta.get_requires_for_build_wheel(rest) + package_requirements()


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """The packages to install before ``build_editable``."""
    with _settings(config_settings) as rest:
        return build_meta.get_requires_for_build_editable(rest) + package_requirements()


def get_requires_for_build_sdist(config_settings: Settings | None = None) -> list[str]:
    """The packages to install before ``build_sdist``, which compiles nothing."""
    with _settings(config_settings) as rest:
        return build_meta.get_requires_for_build_sdist(rest)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    """Write the wheel's metadata."""
    with _settings(config_settings) as rest:
        return build_meta.prepare_metadata_for_build_wheel(metadata_directory, rest)


def prepare_metadata_for_build_editable(
    metadata_directory: str, config_settings: Settings | None = None
) -> str:
    """Write an editable install's metadata."""
    with _settings(config_settings) as rest:
        return build_meta.prepare_metadata_for_build_editable(metadata_directory, rest)


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the native part and the wheel."""
    with _settings(config_settings) as rest:
        return build_meta.build_wheel(wheel_directory, rest, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build the native part in place, and a wheel that points to the source tree."""
    with _settings(config_settings) as rest:
        return build_meta.build_editable(wheel_directory, rest, metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings | None = None) -> str:
    """Pack the sources; equal sources give an equal archive (see ``archives.py``)."""
    with _settings(config_settings) as rest:
        name: str = build_meta.build_sdist(sdist_directory, rest)
        rewrite_sdist(Path(sdist_directory) / name)
        return name
