"""The parser of a GGUF file's head: arrays of strings, lengths that cannot be, files that end too early."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_document import ARRAY, STRING, Document, unpack
from support.gguf_models import tiny_model

from llamapipe.errors import ModelLoadError
from llamapipe.gguf.check import check_gguf
from llamapipe.gguf.reader import Array, parse_head


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_model(tmp_path_factory.mktemp("model") / "m.gguf", "builtin-bpe").read_bytes()


def test_every_truncation(tmp_path: Path, model: bytes) -> None:
    data = model
    whole, spans = unpack(data)
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    size = len(data)
    for cut in [*range(size - 1, spans[-1].end, -4999), *range(spans[-1].end, 3, -13)]:
        os.truncate(path, cut)
        with pytest.raises(ModelLoadError, match=r"truncated|claims|less than a GGUF header"):
            check_gguf(path)
    path.write_bytes(data[:-1])
    last = whole.tensors[-1].name.decode()
    with pytest.raises(
        ModelLoadError, match=f"'{last}' is missing: the file ends at byte {size - 1} but .* {size}:"
    ):
        check_gguf(path)


def test_lengths_and_types_that_cannot_be(tmp_path: Path, model: bytes) -> None:
    """Every length, count and type of the head, made huge: refused at once, whatever it is about."""
    path = tmp_path / "m.gguf"
    _, spans = unpack(model)
    chosen = [span for span in spans if span.what in ("count", "length", "type")]
    # Most are lengths of pieces and merges; the ends and a sample of the middle will do.
    for span in [*chosen[:400:7], *chosen[-150:]]:
        data = bytearray(model)
        data[span.start : span.end] = b"\xff" * (span.end - span.start - 1) + b"\x7f"
        path.write_bytes(data)
        try:
            check_gguf(path)
        except ModelLoadError:
            continue
        assert span.what == "type", span  # types of tensors that are not known yet are let through


_STRINGS = st.one_of(
    st.binary(max_size=12),
    st.binary(min_size=250, max_size=260),
    st.sampled_from(
        [b"", b"\0", b"\0" * 6, b"x" + b"\0" * 9, b"a" * 256, b"b" * 70_000, bytes([5]) + bytes(7) + b"hello"]
    ),
)


@settings(max_examples=200, deadline=None)
@given(
    usual=st.lists(
        st.binary(min_size=1, max_size=9).map(lambda text: text.replace(b"\0", b"0")), max_size=90
    ),
    odd=st.lists(st.tuples(st.integers(0, 90), _STRINGS), max_size=12),
    shift=st.integers(0, 3),
    tail=st.integers(0, 40),
)
def test_arrays_of_strings(
    tmp_path_factory: pytest.TempPathFactory,
    usual: list[bytes],
    odd: list[tuple[int, bytes]],
    shift: int,
    tail: int,
) -> None:
    strings = list(usual)
    for at, text in odd:
        strings.insert(at, text)
    document = Document()
    document.put("k" * (1 + shift), STRING, b"moves what follows")
    document.put("strings", ARRAY, strings, STRING)
    document.put("after", ARRAY, list(range(tail)), 0)
    path = tmp_path_factory.getbasetemp() / "strings.gguf"
    document.write(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
        head = parse_head(buffer)
        array, after = head.entries["strings"].value, head.entries["after"].value
        assert isinstance(array, Array)
        assert isinstance(after, Array)
        assert array.count == len(strings)
        assert array.lengths.tolist() == [len(text) for text in strings]
        assert [bytes(buffer[a : a + n]) for a, n in zip(array.starts, array.lengths, strict=True)] == strings
        assert head.strings(array) == [text.split(b"\0")[0] for text in strings]
        assert after.data.tolist() == list(range(tail))
        del head, array, after  # views into the mapping
