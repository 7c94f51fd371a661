"""Writes wheels and other archives reproducibly: equal contents give equal files for every user and folder."""

from __future__ import annotations

import base64
import hashlib
import os
import time
import zipfile
from pathlib import Path

from native_build.errors import BuildError

# The first date that a zip archive can hold.
_ZIP_EPOCH = 315532800


def source_date() -> int:
    """Return the time for archives, in seconds since 1970: ``SOURCE_DATE_EPOCH``, else now. Raises BuildError."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return int(time.time())
    if not text.isdecimal():
        raise BuildError(
            f"SOURCE_DATE_EPOCH={text!r} is not a whole number of seconds since 1970",
            "export SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)",
        )
    return int(text)


def write_wheel(tree: Path, target: Path) -> Path:
    """Pack an unpacked wheel with a new RECORD. Files are sorted, have one date, and modes by their kind."""
    info = next(tree.glob("*.dist-info"))
    record = f"{info.name}/RECORD"
    names = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    # The specification recommends the metadata at the end, so that it can be read without the rest.
    names.sort(key=lambda name: name.startswith(f"{info.name}/"))
    lines, date = [], source_date()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            if name == record:
                continue
            data = (tree / name).read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
            archive.writestr(_zip_entry(name, date), data, zipfile.ZIP_DEFLATED)
        lines.append(f"{record},,\n")
        archive.writestr(_zip_entry(record, date), "".join(lines), zipfile.ZIP_DEFLATED)
    return target


def write_zip(tree: Path, target: Path) -> Path:
    """Pack a folder. Files are sorted, have one date, and modes by their kind."""
    date = source_date()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in tree.rglob("*") if path.is_file()):
            name = f"{target.stem}/{path.relative_to(tree).as_posix()}"
            archive.writestr(_zip_entry(name, date), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return target


def _zip_entry(name: str, date: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, time.gmtime(max(date, _ZIP_EPOCH))[:6])
    entry.create_system = 3  # always Unix, on whatever system the archive is written
    entry.external_attr = (0o100755 if ".so" in Path(name).suffixes else 0o100644) << 16
    return entry
