"""Compares two builds of wheels and source archives: ``python -m native_build.wheels.compare FOLDER FOLDER``.

The status is 0 if both folders hold the same files, byte for byte. Otherwise the program lists each difference.
"""

from __future__ import annotations

import hashlib
import sys
import tarfile
import zipfile
from pathlib import Path

# A member of an archive: a hash of its content, and all that the archive records of it except its date.
_Member = tuple[str, int]


def differences(first: Path, second: Path) -> list[str]:
    """Return the differences between two archives; empty if they are equal byte for byte."""
    if first.read_bytes() == second.read_bytes():
        return []
    a, b = _members(first), _members(second)
    lines = [f"{first.name}: only one has {name}" for name in sorted(a.keys() ^ b.keys())]
    for name in sorted(a.keys() & b.keys()):
        if a[name][0] != b[name][0]:
            lines.append(f"{first.name}: {name} has other contents")
        elif a[name][1] != b[name][1]:
            lines.append(f"{first.name}: {name} has mode {a[name][1]:o} or {b[name][1]:o}")
    return lines or [f"{first.name}: only dates, order or compression differ"]


def compare(first: Path, second: Path) -> list[str]:
    """Return the differences between two folders of archives."""
    names = {path.name for path in first.iterdir()}, {path.name for path in second.iterdir()}
    lines = [f"only one build has {name}" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        lines += differences(first / name, second / name)
    return lines


def _members(path: Path) -> dict[str, _Member]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return {
                entry.filename: (_digest(wheel.read(entry)), entry.external_attr >> 16)
                for entry in wheel.infolist()
            }
    with tarfile.open(path) as archive:
        members = {}
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            members[member.name] = (_digest(file.read() if file else b""), member.mode)
        return members


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def main() -> int:
    """Compare two folders. Return 1 if they differ or hold nothing."""
    first, second = map(Path, sys.argv[1:3])
    lines = compare(first, second)
    for line in lines:
        print(line)
    names = sorted(path.name for path in first.iterdir())
    if not lines:
        for name in names:
            print(f"equal: {name}")
    return int(bool(lines) or not names)


if __name__ == "__main__":
    sys.exit(main())
