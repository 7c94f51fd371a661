"""The file of results: whole lines, each index once, continued where a job that was killed had stopped."""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_ID = "batch_req_"  # before the index, in OpenAI's format


class ResultFile:
    """Appends results to ``path``. One thread.

    A file that is there already is read first: ``has`` says which records it holds, and a line that was not finished is
    cut off. Raises ValueError if the file holds other lines, BlockingIOError if another process writes it, OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_done = 0
        self._marks = array("L")  # by index: 0 is missing, else made of the record's id
        self._file: BinaryIO = path.open("a+b", buffering=0)
        try:
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self._file.close()
            raise BlockingIOError(f"{path} is being written by another process") from None
        except BaseException:
            self._file.close()
            raise

    def __repr__(self) -> str:
        return f"<ResultFile {self.path.name!r} n_done={self.n_done}>"

    def has(self, index: int, name: object) -> bool:
        """Whether the record is there. Raises ValueError if it is there under another id."""
        mark = self._marks[index] if index < len(self._marks) else 0
        if mark not in (0, _mark(name)):
            raise ValueError(
                f"record {index + 1} has the id {name!r}, and {self.path} has it with another one: the input "
                "has changed; give another output file"
            )
        return mark != 0

    def write(self, index: int, name: object, result: Mapping[str, Any]) -> None:
        """Appends the result of a record. Raises OSError, for example when the disk is full."""
        line = json.dumps(result, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        start = self._file.seek(0, os.SEEK_END)
        view = memoryview(line)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            self._file.truncate(start)
            raise
        self._note(index, _mark(name))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        self._file.close()

    def _note(self, index: int, mark: int) -> None:
        if index >= len(self._marks):
            self._marks.extend([0] * (index + 1 - len(self._marks)))
        self.n_done += self._marks[index] == 0
        self._marks[index] = mark

    def _read(self) -> None:
        self._file.seek(0)
        whole = 0  # bytes up to the last line end
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                index, name = self._place(line, number)
                self._note(index, _mark(name))
        self._file.truncate(whole)

    def _place(self, line: bytes, number: int) -> tuple[int, object]:
        """The index and id of the record in a line."""
        try:
            value = json.loads(line)
            index = value["index"] if "index" in value else value["id"].removeprefix(_ID)
            return int(index), value.get("custom_id", value.get("id"))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f"{self.path}, line {number}, is no result of a batch job; give another output file"
            ) from None


def request_id(index: int) -> str:
    """The ``id`` of a result in OpenAI's format."""
    return f"{_ID}{index}"


def _mark(name: object) -> int:
    return 1 if name is None else zlib.crc32(repr(name).encode("utf-8", "surrogatepass")) | 2
