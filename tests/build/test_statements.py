"""What goes with a release: what it is made of, where it comes from, what is new."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import llamapipe

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib is not installed: pip install --group test")

from cyclonedx.schema import SchemaVersion  # noqa: E402
from cyclonedx.validation.json import JsonStrictValidator  # noqa: E402

from native_build.archives import write_wheel, write_zip  # noqa: E402
from native_build.errors import BuildError  # noqa: E402
from native_build.sources import Pin  # noqa: E402
from native_build.wheels.statements import notes, provenance, sbom  # noqa: E402

PIN = Pin("xllamacpp==2026.10.11549", "c" * 64)
WHEEL = "llamapipe-0.1.0-cp310-abi3-manylinux_2_35_x86_64.whl"
METADATA = """Metadata-Version: 2.4
Name: llamapipe
Version: 0.1.0
Requires-Dist: numpy>=1.23
Requires-Dist: jinja2>=3.1.6; extra == "chat"
Requires-Dist: tomli>=2; python_version < "3.11" and extra == "server"
Requires-Dist: jinja2>=3.1.6; extra == "server"
Requires-Dist: llamapipe-cuda==0.1.0; sys_platform == "linux" and extra == "cuda"
"""


@pytest.fixture(autouse=True)
def date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A folder with one wheel."""
    tree, folder = tmp_path / "tree", tmp_path / "dist"
    info = tree / "llamapipe-0.1.0.dist-info"
    info.mkdir(parents=True)
    folder.mkdir()
    (info / "METADATA").write_text(METADATA)
    write_wheel(tree, folder / WHEEL)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree of llama.cpp with two libraries by others."""
    texts = {
        "stb/stb_image.h": "/* stb_image - v2.30 - public domain image loader */\n",
        "hash/xxhash/xxhash.h": "#define XXH_VERSION_MAJOR    0\n#define XXH_VERSION_MINOR    8\n"
        "#define XXH_VERSION_RELEASE  3\n",
    }
    for name, text in texts.items():
        path = tmp_path / "llama.cpp" / "vendor" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "llama.cpp"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- what it is made of


def test_the_sbom_names_files_llama_cpp_and_packages(dist: Path, source: Path) -> None:
    text = sbom(dist, PIN, source)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom: dict[str, Any] = json.loads(text)
    product = bom["metadata"]["component"]
    assert (product["name"], product["version"]) == ("llamapipe", llamapipe.__version__)
    (file,) = product["components"]
    assert (file["name"], file["hashes"]) == (WHEEL, [{"alg": "SHA-256", "content": sha256(dist / WHEEL)}])
    components = {component["bom-ref"]: component for component in bom["components"]}
    llama_cpp = components["llama.cpp"]
    assert llama_cpp["purl"] == "pkg:github/ggml-org/llama.cpp@b11549"
    (archive,) = llama_cpp["externalReferences"]
    assert archive["hashes"] == [{"alg": "SHA-256", "content": PIN.sha256}]
    versions = {name: component.get("version") for name, component in components.items() if "vendor/" in name}
    assert versions == {
        "llama.cpp/vendor/stb/stb_image.h": "2.30",
        "llama.cpp/vendor/hash/xxhash/xxhash.h": "0.8.3",
    }
    scopes = {ref: component["scope"] for ref, component in components.items() if ref.startswith("pypi/")}
    assert scopes == {"pypi/numpy": "required", "pypi/jinja2": "optional", "pypi/tomli": "optional"}
    depends = {entry["ref"]: entry.get("dependsOn", []) for entry in bom["dependencies"]}
    assert set(depends[product["bom-ref"]]) == {"llama.cpp", *scopes}
    assert set(depends["llama.cpp"]) == set(versions)


def test_a_package_that_is_required_and_in_an_extra_is_required(dist: Path, source: Path) -> None:
    info = dist.parent / "tree" / "llamapipe-0.1.0.dist-info"
    (info / "METADATA").write_text(METADATA + 'Requires-Dist: numpy>=2; extra == "media"\n')
    write_wheel(info.parent, dist / WHEEL)
    (numpy,) = (
        component
        for component in json.loads(sbom(dist, PIN, source))["components"]
        if component["name"] == "numpy"
    )
    assert numpy["scope"] == "required"
    assert [entry["value"] for entry in numpy["properties"]] == ["numpy>=1.23", 'numpy>=2; extra == "media"']


def test_equal_files_have_equal_sboms(dist: Path, source: Path) -> None:
    first = sbom(dist, PIN, source)
    assert sbom(dist, PIN, source) == first
    other = dist / WHEEL.replace("x86_64", "aarch64")
    other.write_bytes((dist / WHEEL).read_bytes())
    assert json.loads(sbom(dist, PIN, source))["serialNumber"] != json.loads(first)["serialNumber"]


# ---- where it comes from


def test_provenance_names_each_file_and_what_it_was_built_from(dist: Path) -> None:
    text = provenance([dist / WHEEL], PIN, ["--target", "all"], "a" * 40)
    statement = json.loads(text)
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    assert statement["subject"] == [{"name": WHEEL, "digest": {"sha256": sha256(dist / WHEEL)}}]
    definition = statement["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["arguments"] == ["--target", "all"]
    assert definition["internalParameters"]["sourceDateEpoch"] == 1700000000
    assert definition["resolvedDependencies"] == [
        {"name": "llamapipe", "digest": {"gitCommit": "a" * 40}},
        {"uri": "pkg:pypi/xllamacpp@2026.10.11549", "digest": {"sha256": PIN.sha256}},
    ]
    assert str(Path.home()) not in text
    without = json.loads(provenance([dist / WHEEL], PIN, [], ""))
    (only,) = without["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert only["uri"].startswith("pkg:pypi/")


# ---- what is new

CHANGELOG = """# Changelog

A paragraph.

## [Unreleased]

### Added

- Something that nobody has yet.

## [0.2.0] - 2026-12-24

### Fixed

- `[x]` is a list: see [the page](docs/x.md).

## [0.1.0] - 2026-12-01

First release.

[0.1.0]: https://example.org/0.1.0
"""


def test_notes_are_the_section_of_the_version() -> None:
    assert notes(CHANGELOG, "0.2.0") == (
        "# llamapipe 0.2.0\n\n### Fixed\n\n- `[x]` is a list: see [the page](docs/x.md).\n"
    )
    assert notes(CHANGELOG, "0.1.0") == "# llamapipe 0.1.0\n\nFirst release.\n"


def test_a_version_without_a_section_has_the_unreleased_one() -> None:
    assert notes(CHANGELOG, "0.3.0").splitlines()[-1] == "- Something that nobody has yet."
    assert "0.2.0" not in notes(CHANGELOG, "0.3.0")
    # 0.2.0 is no pattern that 0x2y0 matches.
    assert "nobody has yet" in notes(CHANGELOG.replace("[0.2.0]", "[0x2y0]"), "0.2.0")


def test_a_changelog_without_either_is_an_error() -> None:
    with pytest.raises(BuildError, match=r"no section \[0.3.0\]"):
        notes("# Changelog\n\n## [Unreleased]\n\n## [0.1.0]\n\nFirst release.\n", "0.3.0")


# ---- the site


def test_the_site_is_packed_under_its_name_with_one_date(tmp_path: Path) -> None:
    for name in ("index.html", "guides/a.html"):
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    packed = write_zip(tmp_path / "site", tmp_path / "llamapipe-0.1.0-docs.zip")
    with zipfile.ZipFile(packed) as archive:
        assert archive.namelist() == [
            "llamapipe-0.1.0-docs/guides/a.html",
            "llamapipe-0.1.0-docs/index.html",
        ]
        assert {entry.date_time for entry in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}
