"""Finds the command that installs a missing requirement on this system."""

from __future__ import annotations

import sys
from pathlib import Path

# Package names by group of operating systems.
_PACKAGES = {
    "compiler": {
        "debian": "g++",
        "fedora": "gcc-c++",
        "arch": "gcc",
        "suse": "gcc-c++",
        "alpine": "build-base",
    },
    "python headers": {
        "debian": "python3-dev",
        "fedora": "python3-devel",
        "arch": "python",
        "suse": "python3-devel",
        "alpine": "python3-dev",
    },
    "shader compiler": {
        "debian": "glslc",
        "fedora": "glslc",
        "arch": "shaderc",
        "suse": "shaderc",
        "alpine": "shaderc",
    },
    "vulkan": {
        "debian": "libvulkan-dev",
        "fedora": "vulkan-loader-devel vulkan-headers",
        "arch": "vulkan-icd-loader vulkan-headers",
        "suse": "vulkan-devel",
        "alpine": "vulkan-loader-dev vulkan-headers",
    },
    "spirv headers": {
        "debian": "spirv-headers",
        "fedora": "spirv-headers-devel",
        "arch": "spirv-headers",
        "suse": "spirv-headers",
        "alpine": "spirv-headers",
    },
}
_COMMANDS = {
    "debian": "sudo apt-get install",
    "fedora": "sudo dnf install",
    "arch": "sudo pacman -S",
    "suse": "sudo zypper install",
    "alpine": "sudo apk add",
}
_FAMILIES = {
    "debian": "debian",
    "ubuntu": "debian",
    "fedora": "fedora",
    "rhel": "fedora",
    "centos": "fedora",
    "arch": "arch",
    "suse": "suse",
    "opensuse": "suse",
    "alpine": "alpine",
}
_MACOS = {
    "compiler": "xcode-select --install",
    "python headers": "xcode-select --install",
    "shader compiler": "brew install shaderc",
    "vulkan": "brew install vulkan-headers vulkan-loader",
    "spirv headers": "brew install spirv-headers",
}


def family(os_release: Path = Path("/etc/os-release")) -> str:
    """Return the group of Linux distributions that this system belongs to; Debian's if it is not recognised."""
    try:
        lines = os_release.read_text().splitlines()
    except OSError:
        return "debian"
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    for name in (fields.get("ID", "") + " " + fields.get("ID_LIKE", "")).replace('"', "").split():
        if name.split("-")[0] in _FAMILIES:
            return _FAMILIES[name.split("-")[0]]
    return "debian"


def install_command(thing: str) -> str:
    """Return the command that installs ``thing``, a key of the tables above, on this system."""
    if sys.platform == "darwin":
        return _MACOS[thing]
    name = family()
    return f"{_COMMANDS[name]} {_PACKAGES[thing][name]}"
