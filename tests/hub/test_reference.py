"""Which files of a repository a name stands for."""

from __future__ import annotations

import pytest

from llamapipe.hub import Reference, choose, parse

NAMES = ["README.md", "model-Q4_K_M.gguf", "model-Q8_0.gguf", "mmproj-f16.gguf", "big/a-00001-of-00002.gguf"]
PARTS = ["big/a-00001-of-00002.gguf", "big/a-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf:a/b", Reference("a/b", None)),
        ("hf:a/b/c.gguf", Reference("a/b", "c.gguf")),
        ("hf:a/b/dir/*Q4*", Reference("a/b", "dir/*Q4*")),
        ("hf:a/b:Q4_K_M", Reference("a/b", ":Q4_K_M")),
        ("hf:a/b/c:d.gguf", Reference("a/b", "c:d.gguf")),
    ],
)
def test_references(text: str, expected: Reference) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text", ["hf:", "hf:a", "hf:/b", "hf:a/", "hf:a/b/", "a/b", "hf:a/b:", "hf:a/:Q8_0", "hf:a/b:Q8_0/c.gguf"]
)
def test_bad_references(text: str) -> None:
    with pytest.raises(ValueError, match="write hf:OWNER/REPO"):
        parse(text)


@pytest.mark.parametrize(
    ("names", "pattern", "expected"),
    [
        (["x.gguf", "mmproj.gguf", "imatrix.gguf", "a.txt"], None, ["x.gguf"]),
        (NAMES, "*Q4_K_M.gguf", ["model-Q4_K_M.gguf"]),
        (NAMES, "mmproj-f16.gguf", ["mmproj-f16.gguf"]),
        ([*NAMES, PARTS[1]], "big/*", PARTS),
        ([*NAMES, PARTS[1]], "a-00001-of-*", PARTS),
        (NAMES, ":q4_k_m", ["model-Q4_K_M.gguf"]),
        (["x.q8_0.gguf", "mmproj-Q8_0.gguf", "q8_0_x.gguf", "xq8_0.gguf"], ":Q8_0", ["x.q8_0.gguf"]),
        (["a-Q4_K_M-00001-of-00001.gguf", "a-Q4_K_M_L.gguf"], ":Q4_K_M", ["a-Q4_K_M-00001-of-00001.gguf"]),
        (["d/x-Q8_0.gguf", "d/y.gguf"], "*q8_0.gguf".upper().replace("GGUF", "gguf"), ["d/x-Q8_0.gguf"]),
    ],
)
def test_one_model_matches(names: list[str], pattern: str | None, expected: list[str]) -> None:
    assert choose(names, pattern, "a/b") == expected


@pytest.mark.parametrize(
    ("names", "pattern", "message"),
    [
        (["a.txt"], None, "a/b has no GGUF file; it has none"),
        (NAMES, "*Q2*", "no GGUF file that matches '[*]Q2[*]'; it has big/a-0.*model-Q8_0.gguf"),
        (NAMES, ":Q2_K", "no GGUF file that matches 'Q2_K'; it has big/a-0.*model-Q8_0.gguf"),
        (["a-Q8_0.gguf", "b/a-Q8_0.gguf"], ":Q8_0", "has 2 models; name one of a-Q8_0.gguf, b/a-Q8_0.gguf"),
        (NAMES[:3], None, "has 2 models; name one of model-Q4_K_M.gguf, model-Q8_0.gguf"),
        (NAMES, "big/*", "a-00002-of-00002.gguf is missing"),
        ([f"m{i}.gguf" for i in range(50)], None, "and 30 more"),
    ],
)
def test_a_pattern_that_fits_no_file_or_several(names: list[str], pattern: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(names, pattern, "a/b")
