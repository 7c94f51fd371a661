"""Writes the statements of a release: ``python -m native_build.wheels.statements FOLDER [--site FOLDER]``.

For the wheels and the source archive in FOLDER, it writes an SBOM (CycloneDX), the provenance (SLSA), the release notes
(a section of CHANGELOG.md), and an archive of the documentation site. With ``SOURCE_DATE_EPOCH``, equal files give
equal statements. The release workflow signs the files, not this program.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType, Pedigree
from cyclonedx.model.dependency import Dependency
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.metadata import Metadata

from native_build.archives import source_date, write_zip
from native_build.cli import say
from native_build.errors import BuildError
from native_build.patches import PATCHES
from native_build.paths import PROJECT
from native_build.sources import Pin, find_source, read_pin
from native_build.wheels.backend import project_version
from native_build.wheels.check import archives, members

_LLAMA_CPP = "llama.cpp"
# The namespace of the documents' identifiers; not an address.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "llamapipe")
_BUILD_TYPE = "urn:llamapipe:nox-release:1"


@dataclass(frozen=True)
class Vendored:
    """Third-party code that is compiled with llama.cpp: a file, the pattern of the version in it, the licence."""

    name: str
    path: str
    version: str
    licence: str


_VENDORED = (
    Vendored("stb_image", "vendor/stb/stb_image.h", r"stb_image - v([\d.]+)", "MIT OR Unlicense"),
    Vendored("miniaudio", "vendor/miniaudio/miniaudio.h", r"miniaudio - v([\d.]+)", "Unlicense OR MIT-0"),
    Vendored(
        "xxHash",
        "vendor/hash/xxhash/xxhash.h",
        r"XXH_VERSION_MAJOR +(\d+)\s+#define XXH_VERSION_MINOR +(\d+)\s+#define XXH_VERSION_RELEASE +(\d+)",
        "BSD-2-Clause",
    ),
    Vendored("sha1", "vendor/hash/sha1/sha1.c", "", "Public domain"),
    Vendored("sha256", "vendor/hash/sha256/sha256.c", "", "Public domain"),
    Vendored("rotate-bits", "vendor/hash/rotate-bits/rotate-bits.h", "", "MIT"),
    Vendored("subprocess.h", "vendor/sheredom/subprocess.h", "", "Unlicense"),
    Vendored("llamafile sgemm", "ggml/src/ggml-cpu/llamafile/sgemm.cpp", "", "MIT"),
)


# ---- the SBOM


def sbom(folder: Path, pin: Pin, source: Path) -> str:
    """Return the SBOM of the archives in ``folder``, whose llama.cpp is in ``source``: JSON, CycloneDX 1.6."""
    name, own_version = "llamapipe", project_version()
    licences = LicenseFactory()
    product = Component(
        name=name,
        version=own_version,
        type=ComponentType.LIBRARY,
        bom_ref=f"{name}=={own_version}",
        licenses=[licences.make_from_string("MIT")],
        purl=PackageURL("pypi", None, name, own_version),
    )
    bom = Bom(serial_number=uuid.uuid5(_NAMESPACE, _digests(folder)))
    bom.metadata.timestamp = datetime.fromtimestamp(source_date(), timezone.utc)
    bom.metadata.component = product
    product.components.update(_file(path) for path in archives(folder))
    llama_cpp = _llama_cpp(pin, licences)
    vendored = list(_vendored(source, licences))
    required = list(_required(archives(folder)))
    bom.components.update([llama_cpp, *vendored, *required])
    bom.dependencies.add(_depends(product, [llama_cpp, *required]))
    bom.dependencies.add(_depends(llama_cpp, vendored))
    for component in (*vendored, *required):
        bom.dependencies.add(Dependency(component.bom_ref))
    text: str = JsonV1Dot6(bom).output_as_string(indent=2)
    return f"{text}\n"


def _digests(folder: Path) -> str:
    return " ".join(f"{path.name}={_sha256(path)}" for path in archives(folder))


def _file(path: Path) -> Component:
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=_sha256(path))]
    return Component(name=path.name, type=ComponentType.FILE, bom_ref=path.name, hashes=hashes)


def _llama_cpp(pin: Pin, licences: LicenseFactory) -> Component:
    """Return llama.cpp as it is compiled: from a pinned archive of the package index, with our patches."""
    package, _, number = pin.requirement.partition("==")
    archive = ExternalReference(
        type=ExternalReferenceType.SOURCE_DISTRIBUTION,
        url=XsUri(PackageURL("pypi", None, package, number).to_string()),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=pin.sha256)],
    )
    changed = ", ".join(sorted({patch.path for patch in PATCHES}))
    return Component(
        name=_LLAMA_CPP,
        version=pin.release,
        type=ComponentType.LIBRARY,
        bom_ref=_LLAMA_CPP,
        licenses=[licences.make_from_string("MIT")],
        purl=PackageURL("github", "ggml-org", _LLAMA_CPP, pin.release),
        external_references=[archive],
        pedigree=Pedigree(notes=f"Changed by native_build/patches.py: {changed}") if changed else None,
    )


def _vendored(source: Path, licences: LicenseFactory) -> Iterator[Component]:
    for library in _VENDORED:
        path = source / library.path
        if not path.is_file():  # a different llama.cpp may lack the file
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        match = re.search(library.version, text) if library.version else None
        yield Component(
            name=library.name,
            version=".".join(match.groups()) if match else None,
            type=ComponentType.LIBRARY,
            bom_ref=f"{_LLAMA_CPP}/{library.path}",
            licenses=[licences.make_from_string(library.licence)],
        )


def _required(paths: list[Path]) -> Iterator[Component]:
    """Yield the packages that the archives require. Packages that only extras require are optional."""
    scopes: dict[str, ComponentScope] = {}
    texts: dict[str, set[str]] = {}
    for path in paths:
        for requirement in _metadata(path).requires_dist or ():
            needed = requirement.marker is None or "extra" not in str(requirement.marker)
            scope = ComponentScope.REQUIRED if needed else ComponentScope.OPTIONAL
            if not requirement.name.startswith("llamapipe"):
                scopes[requirement.name] = (
                    scope if needed else scopes.get(requirement.name, ComponentScope.OPTIONAL)
                )
                texts.setdefault(requirement.name, set()).add(str(requirement))
    for name in sorted(scopes):
        yield Component(
            name=name,
            type=ComponentType.LIBRARY,
            bom_ref=f"pypi/{name}",
            scope=scopes[name],
            purl=PackageURL("pypi", None, name),
            properties=[Property(name="llamapipe:requirement", value=text) for text in sorted(texts[name])],
        )


def _metadata(path: Path) -> Metadata:
    """Return the package's metadata from a wheel or a source archive."""
    inside = r"[^/]+\.dist-info/METADATA" if path.suffix == ".whl" else r"[^/]+/PKG-INFO"
    for name, data in members(path):
        if re.fullmatch(inside, name):
            return Metadata.from_email(data, validate=False)
    raise BuildError(f"{path.name} has no metadata", "build it again")


def _depends(component: Component, on: list[Component]) -> Dependency:
    return Dependency(component.bom_ref, dependencies=[Dependency(other.bom_ref) for other in on])


# ---- the provenance


def provenance(paths: Sequence[Path], pin: Pin, arguments: Sequence[str], commit: str) -> str:
    """Return what these files were built from: an in-toto statement with SLSA's provenance, version 1, in JSON.

    ``arguments``: the arguments of ``nox -s release``; ``commit``: the clone's commit, empty if it is not known.
    """
    package, _, number = pin.requirement.partition("==")
    inputs: list[dict[str, Any]] = [
        {"uri": PackageURL("pypi", None, package, number).to_string(), "digest": {"sha256": pin.sha256}}
    ]
    if commit:
        inputs.insert(0, {"name": "llamapipe", "digest": {"gitCommit": commit}})
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": _sha256(path)}} for path in paths],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": _BUILD_TYPE,
                "externalParameters": {"arguments": list(arguments), "version": project_version()},
                "internalParameters": {"sourceDateEpoch": source_date(), "tools": _tools()},
                "resolvedDependencies": inputs,
            },
            "runDetails": {"builder": {"id": f"{_BUILD_TYPE}:unsigned"}},
        },
    }
    return json.dumps(statement, indent=2, sort_keys=True) + "\n"


def _tools() -> dict[str, str]:
    """Return the versions of the tools that determine the files, byte for byte."""
    tools = {
        "python": platform.python_version(),
        "platform": f"{platform.machine()} {'-'.join(platform.libc_ver())}",
    }
    for name in ("cffi", "scikit-build-core", "auditwheel", "ziglang"):
        try:
            tools[name] = version(name)
        except PackageNotFoundError:
            continue
    for compiler in ("c++", "aarch64-linux-gnu-g++"):
        if text := _first_line([compiler, "--version"]):
            tools[compiler] = text
    return tools


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROJECT)
    except OSError:
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


# ---- the release notes


def notes(changelog: str, number: str) -> str:
    """Return a version's section of a changelog, without its heading; "Unreleased" if the version has no section.

    Raises BuildError if there is neither section.
    """
    for heading in (number, "Unreleased"):
        match = re.search(
            rf"^## \[{re.escape(heading)}\].*?\n(.*?)(?=^## |^\[[^\]]+\]: |\Z)",
            changelog,
            re.MULTILINE | re.DOTALL,
        )
        if match and match[1].strip():
            return f"# llamapipe {number}\n\n{match[1].strip()}\n"
    raise BuildError(
        f"CHANGELOG.md has no section [{number}], and none of what is unreleased",
        "write it: this becomes the release's notes",
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(
    folder: Path, site: Path | None, arguments: Sequence[str], tell: Callable[[str], None]
) -> list[Path]:
    """Write the statements and pack the site. Return the paths of the files. Raises BuildError."""
    stem = f"llamapipe-{project_version()}"
    pin = read_pin()
    commit = _first_line(["git", "rev-parse", "HEAD"])
    if commit and _first_line(["git", "status", "--porcelain", "--untracked-files=no"]):
        tell("the clone has changes that are not committed, so the provenance names no commit")
        commit = ""
    changelog = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    paths = [
        _written(folder / f"{stem}.cdx.json", sbom(folder, pin, find_source(None, tell).path)),
        _written(folder / f"{stem}-notes.md", notes(changelog, project_version())),
    ]
    if site is not None:
        paths.append(write_zip(site, folder / f"{stem}-docs.zip"))
    statement = provenance([*archives(folder), *paths], pin, arguments, commit)
    return [*paths, _written(folder / f"{stem}.provenance.json", statement)]


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def main() -> int:
    """Write the statements and list them. Return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m native_build.wheels.statements",
        description=f"{__doc__} Other arguments are those of nox -s release, which the provenance names.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--site", type=Path, help="the folder of the documentation's pages")
    args, arguments = parser.parse_known_args()
    try:
        for path in write(args.folder.resolve(), args.site, arguments, say):
            print(path.name)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
