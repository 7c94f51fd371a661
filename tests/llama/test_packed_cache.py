"""Packed weights on disk: later loads and other processes map them, and nothing that does not fit is used."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier, Event

import gguf
import numpy as np
import pytest
from support.adapters import make_adapter
from support.bert_model import bert_model
from support.gguf_document import Document
from support.gguf_models import Shape, make_model, model_for_kernels, split_model
from support.run_script import Script, run_script
from support.server_process import ServerProcess

import llamapipe as lp
from llamapipe.errors import ModelLoadError
from llamapipe.host import files
from llamapipe.llama._packed_cache import _checksum

Type = gguf.GGMLQuantizationType
MIB = 2**20
OFFSET = 2 * MIB
PROMPT = list(range(40, 80))

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which this processor has kernels for all matrices."""
    return model_for_kernels(tmp_path_factory.mktemp("models") / "model.gguf")


@pytest.fixture(scope="module")
def expected(model_file: Path) -> np.ndarray:
    with lp.Model(model_file) as model:
        assert model.packed_file is None
        return log_probabilities(model)


@pytest.fixture
def path(model_file: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    copy = tmp_path / "model.gguf"
    shutil.copy2(model_file, copy)
    return copy


@pytest.fixture
def parts(model_file: Path, tmp_path: Path) -> list[Path]:
    """The same model in three files."""
    return split_model(model_file, tmp_path / "parts", 10)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "packed"


def log_probabilities(model: lp.Model) -> np.ndarray:
    with lp.Engine(model, n_ctx=128, n_seq_max=1, n_threads=2) as engine:
        return np.array(engine.score_tokens([PROMPT])[0].logprobs)


def file_in(folder: Path) -> Path:
    """The only file of a folder."""
    (file,) = folder.iterdir()
    return file


def load(path: Path, folder: Path) -> tuple[np.ndarray, Path | None]:
    with lp.Model(path, packed_cache=folder) as model:
        assert model.n_packed_tensors > 0
        return log_probabilities(model), model.packed_file


def identity(path: Path) -> tuple[int, int]:
    return path.stat().st_ino, path.stat().st_mtime_ns


def anonymous_bytes() -> int:
    match = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def test_the_first_load_writes_and_others_map(
    path: Path, folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    """Results are the same, bit for bit."""
    written, file = load(path, folder)
    assert file is not None and file == file_in(folder)
    before = identity(file)
    mapped, again = load(path, folder)
    assert again == file and identity(file) == before
    np.testing.assert_array_equal(written, expected)
    np.testing.assert_array_equal(mapped, expected)
    assert not warnings(caplog)


def test_the_file_has_the_packed_weights_and_little_else(path: Path, folder: Path) -> None:
    with lp.Model(path, packed_cache=folder) as model:
        assert file_in(folder).stat().st_size == OFFSET + model.packed_bytes
    with lp.Model(path, packed_cache=folder) as model:
        assert file_in(folder).stat().st_size == OFFSET + model.packed_bytes


def test_no_weights_stay_in_this_process(path: Path, folder: Path) -> None:
    """Neither in the load that packs nor in one that maps; and closing a model ends its mapping."""
    if "san.so" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the sanitizer keeps freed memory")
    lp.Model(path).close()  # what the first load of a process leaves
    before = anonymous_bytes()
    for _ in range(2):
        with lp.Model(path, packed_cache=folder) as model:
            assert anonymous_bytes() - before < 0.5 * model.packed_bytes
            assert str(folder) in Path("/proc/self/maps").read_text()
        assert str(folder) not in Path("/proc/self/maps").read_text()


def test_several_models_map_one_file(path: Path, folder: Path, expected: np.ndarray) -> None:
    with lp.Model(path, packed_cache=folder) as first, lp.Model(path, packed_cache=folder) as second:
        assert first.packed_file == second.packed_file
        first_found = log_probabilities(first)
        first.close()
        np.testing.assert_array_equal(log_probabilities(second), expected)
    np.testing.assert_array_equal(first_found, expected)


def test_a_deleted_file_stays_mapped_and_is_written_again(
    path: Path, folder: Path, expected: np.ndarray
) -> None:
    with lp.Model(path, packed_cache=folder) as model:
        shutil.rmtree(folder)
        np.testing.assert_array_equal(log_probabilities(model), expected)
    values, file = load(path, folder)
    assert file == file_in(folder)
    np.testing.assert_array_equal(values, expected)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.message.startswith("packed_cache")]


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1]))


def with_header(file: Path, at: int, value: bytes) -> None:
    """Changes a field of the header, and the checksum with it."""
    with file.open("r+b") as f:
        header = bytearray(f.read(80))
        header[at : at + len(value)] = value
        n_bytes = file.stat().st_size - OFFSET
        checksum = _checksum(bytes(header), lambda i: os.pread(f.fileno(), 4096, OFFSET + i), n_bytes)
        f.seek(0)
        f.write(header + checksum)


def lose_the_end(file: Path) -> None:
    """As a copy that was interrupted, where the size was set at first."""
    size = file.stat().st_size
    os.truncate(file, size - 8192)
    os.truncate(file, size)


def lose_the_weights(file: Path) -> None:
    size = file.stat().st_size
    os.truncate(file, OFFSET)
    os.truncate(file, size)


def grow(file: Path) -> None:
    """A terabyte of nothing, which takes no space."""
    os.truncate(file, OFFSET + 2**40)
    with_header(file, 72, struct.pack("<Q", 2**40))


def make_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit of the header": (lambda file: flip(file, 70), "damaged"),
    "the checksum": (lambda file: flip(file, 90), "damaged"),
    "empty": (lambda file: os.truncate(file, 0), "damaged"),
    "the end is missing": (lambda file: os.truncate(file, file.stat().st_size - 4096), "bytes instead of"),
    "the end is zero": (lose_the_end, "damaged"),
    "all weights are zero": (lose_the_weights, "damaged"),
    "far longer": (grow, "another version"),
    "a pipe": (make_pipe, "not a regular file"),
    "longer": (lambda file: os.truncate(file, file.stat().st_size + 1), "bytes instead of"),
    "another format": (lambda file: with_header(file, 0, b"llamapipe packed weights 0"), "another format"),
    "another model": (lambda file: with_header(file, 32, bytes(32)), "was replaced"),
    "another layout": (lambda file: with_header(file, 64, struct.pack("<Q", 1)), "another version"),
    "group may write": (lambda file: file.chmod(0o664), "other users may write"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_does_not_fit_is_written_again(
    path: Path, folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    load(path, folder)
    file = file_in(folder)
    before = file.stat().st_ino
    change, why = DAMAGES[damage]
    with file.open("rb"):  # or the new file could get the number of the old one
        change(file)
        values, again = load(path, folder)
        assert again == file_in(folder) and file.stat().st_ino != before
    np.testing.assert_array_equal(values, expected)
    (message,) = warnings(caplog)
    assert why in message and str(file) in message
    caplog.clear()
    np.testing.assert_array_equal(load(path, folder)[0], expected)
    assert not warnings(caplog)


def test_a_file_of_another_user_is_not_used(
    path: Path, folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    load(path, folder)
    os.chown(file_in(folder), 12345, -1)
    np.testing.assert_array_equal(load(path, folder)[0], expected)
    assert "belongs to user 12345" in caplog.text


@pytest.mark.parametrize("name", ["", ".partial"])
def test_a_link_is_not_followed(
    path: Path, folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    load(path, folder)
    file = file_in(folder)
    other = folder.parent / "other"
    file.rename(other)
    content = other.read_bytes()
    file.with_name(file.name + name).symlink_to(other)
    values, mapped = load(path, folder)
    assert mapped is None and other.read_bytes() == content
    np.testing.assert_array_equal(values, expected)
    (message,) = warnings(caplog)
    assert message.endswith(f"cannot be used: {file}{name} is a symbolic link")


def test_a_folder_in_its_place(
    path: Path, folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    load(path, folder)
    file = file_in(folder)
    file.unlink()
    file.mkdir()
    values, mapped = load(path, folder)
    assert mapped is None and file_in(folder) == file
    np.testing.assert_array_equal(values, expected)
    (message,) = warnings(caplog)
    assert "not a regular file" in message


def test_a_second_name_of_another_file_is_not_emptied(
    path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(path, folder)
    file = file_in(folder)
    other = folder.parent / "other"
    other.write_bytes(b"kept")
    file.unlink()
    file.with_name(file.name + ".partial").hardlink_to(other)
    assert load(path, folder)[1] is None
    assert other.read_bytes() == b"kept" and "several names" in caplog.text


KILLED = """
import os, signal, sys
import llamapipe as lp
path, folder, name = sys.argv[1:]
call = getattr(os, name)

def last(*arguments):
    if name == "pwrite":
        call(arguments[0], arguments[1][:-1], *arguments[2:])
    os.kill(os.getpid(), signal.SIGKILL)

setattr(os, name, last)
lp.Model(path, packed_cache=folder)
"""


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_a_load_that_is_killed_while_it_writes(
    path: Path, folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    run_script(KILLED, path, folder, call, exit_code=-signal.SIGKILL)
    assert file_in(folder).name.endswith(".partial")
    for _ in range(2):
        values, file = load(path, folder)
        assert file == file_in(folder)
        np.testing.assert_array_equal(values, expected)
    assert not warnings(caplog)


def test_a_load_that_waits_for_one_that_is_killed_writes_the_file(
    path: Path, folder: Path, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import llamapipe as lp
def progress(fraction):
    say("loading")
    sys.stdin.readline()
lp.Model(sys.argv[1], packed_cache=sys.argv[2], progress=progress)
"""
    waits, killed = Event(), Event()

    def pause(seconds: float) -> None:
        waits.set()
        assert killed.wait(60)

    monkeypatch.setattr("llamapipe.llama._packed_cache.time.sleep", pause)
    with Script(program, path, folder) as other, ThreadPoolExecutor(1) as pool:
        other.expect("loading")
        waiting = pool.submit(load, path, folder)
        assert waits.wait(60)
        other.send(signal.SIGKILL)
        killed.set()
        values, file = waiting.result()
    assert file == file_in(folder)
    np.testing.assert_array_equal(values, expected)


def test_a_partial_file_that_is_replaced_is_not_taken(
    path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody deletes files while they are written, and another load begins."""

    def progress(fraction: float) -> None:
        partial = file_in(folder)
        if partial.stat().st_size == 0:
            partial.unlink()
            partial.write_bytes(b"of another load")

    with lp.Model(path, packed_cache=folder, progress=progress) as model:
        assert model.packed_file is None
    assert file_in(folder).read_bytes() == b"of another load"
    (message,) = warnings(caplog)
    assert "deleted meanwhile" in message


def test_what_a_killed_load_left_is_overwritten(
    path: Path, folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    load(path, folder)
    file = file_in(folder)
    partial = file.with_name(file.name + ".partial")
    file.rename(partial)
    os.truncate(partial, partial.stat().st_size + 12345)
    for _ in range(2):
        values, again = load(path, folder)
        assert again == file == file_in(folder)
        np.testing.assert_array_equal(values, expected)
    assert not warnings(caplog)


def test_a_replaced_model_does_not_get_the_weights_of_the_old_one(
    path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if it differs in one tensor only, which the samples of the fingerprint may miss."""
    load(path, folder)
    file = file_in(folder)
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    with path.open("r+b") as f:
        f.seek(int(tensor.data_offset))
        f.write(bytes(4096))
    with lp.Model(path) as model:
        expected = log_probabilities(model)
    values, again = load(path, folder)
    assert again is not None and again in folder.iterdir()
    np.testing.assert_array_equal(values, expected)
    assert again != file or "was replaced" in caplog.text


def test_a_model_that_is_replaced_while_it_is_loaded_leaves_no_file(path: Path, folder: Path) -> None:
    def progress(fraction: float) -> None:
        os.utime(path, ns=(1, 1))

    with pytest.raises(ModelLoadError, match="replaced or written to"):
        lp.Model(path, packed_cache=folder, progress=progress)
    assert not list(folder.iterdir())


def test_a_load_that_is_stopped_leaves_no_file(path: Path, folder: Path) -> None:
    def progress(fraction: float) -> None:
        if fraction > 0.5:
            raise ValueError("stop")

    for _ in range(2):
        with pytest.raises(ValueError, match="stop"):
            lp.Model(path, packed_cache=folder, progress=progress)
        assert not list(folder.iterdir())
    load(path, folder)
    with pytest.raises(ValueError, match="stop"):
        lp.Model(path, packed_cache=folder, progress=progress)
    assert len(list(folder.iterdir())) == 1


def test_a_full_disk_costs_the_file_and_not_the_load(
    path: Path, folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    """The size of this process's files is limited instead: the system answers with an error, too."""
    code = f"""
import logging, resource, signal, sys
import numpy as np
import llamapipe as lp
logging.basicConfig(stream=sys.stdout)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({4 * MIB}, resource.RLIM_INFINITY))
with lp.Model({str(path)!r}, packed_cache={str(folder)!r}) as model:
    with lp.Engine(model, n_ctx=128, n_seq_max=1, n_threads=2) as engine:
        found = engine.score_tokens([{PROMPT}])[0].logprobs
    print(model.packed_file, model.n_packed_tensors > 0, [float(x).hex() for x in found])
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert f"{os.strerror(errno.EFBIG)}" in answer and answer.count("WARNING:llamapipe:packed_cache") == 1
    assert "None True" in answer and str([x.hex() for x in expected.tolist()]) in answer
    assert not list(folder.iterdir())


def test_a_folder_that_cannot_be_written(
    path: Path, tmp_path: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a file is expected to be a folder, as root may write to every folder."""
    (tmp_path / "file").write_text("")
    values, file = load(path, tmp_path / "file" / "packed")
    assert file is None and len(warnings(caplog)) == 1
    np.testing.assert_array_equal(values, expected)


def test_a_read_only_folder_that_has_the_file(path: Path, folder: Path, expected: np.ndarray) -> None:
    load(path, folder)
    folder.chmod(0o500)
    try:
        values, file = load(path, folder)
    finally:
        folder.chmod(0o700)
    assert file == file_in(folder)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(("mode", "expected_mode"), [(0o644, 0o644), (0o640, 0o600)])
def test_who_may_read_the_model_may_read_the_file(
    parts: list[Path], folder: Path, mode: int, expected_mode: int
) -> None:
    """All of its parts."""
    parts[-1].chmod(mode)
    mask = os.umask(0o022)
    try:
        load(parts[0], folder)
    finally:
        os.umask(mask)
    assert file_in(folder).stat().st_mode & 0o777 == expected_mode


def test_loads_at_the_same_time_write_one_file(path: Path, folder: Path, expected: np.ndarray) -> None:
    """All but one wait, then they map it."""
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: load(path, folder), range(4)))
    for values, file in results:
        assert file == file_in(folder)
        np.testing.assert_array_equal(values, expected)


def test_loads_at_the_same_time_share_what_replaces_a_file_that_does_not_fit(
    path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As workers that start after an update: all have opened the old file before one has packed."""
    load(path, folder)
    with_header(file_in(folder), 64, struct.pack("<Q", 1))
    all_have_opened = Barrier(3)

    def start(_: int) -> lp.Model:
        waits = [all_have_opened]

        def progress(fraction: float) -> None:
            while waits:
                waits.pop().wait(60)

        return lp.Model(path, packed_cache=folder, progress=progress)

    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        models = [stack.enter_context(model) for model in pool.map(start, range(3))]
        assert [model.packed_file for model in models] == [file_in(folder)] * 3
        maps = Path("/proc/self/maps").read_text().splitlines()
        inodes = {int(line.split()[4]) for line in maps if str(folder) in line}
    assert inodes == {file_in(folder).stat().st_ino}
    assert all("another version" in message for message in warnings(caplog))


def test_a_load_within_a_load_does_not_wait_for_it(path: Path, folder: Path) -> None:
    inner: list[Path | None] = []

    def progress(fraction: float) -> None:
        if not inner:
            with lp.Model(path, packed_cache=folder) as model:
                inner.append(model.packed_file)

    with lp.Model(path, packed_cache=folder, progress=progress) as model:
        assert model.packed_file == file_in(folder)
    assert inner == [None]


def test_a_load_that_hangs_is_not_waited_for_without_end(
    path: Path,
    folder: Path,
    expected: np.ndarray,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load(path, folder)
    partial = Path(f"{file_in(folder)}.partial")
    file_in(folder).rename(partial)
    monkeypatch.setattr("llamapipe.llama._packed_cache._WAIT_S", 0.1)
    with partial.open("r+b") as other:
        files.lock(other.fileno())
        values, file = load(path, folder)
    assert file is None and "another load" in caplog.text
    np.testing.assert_array_equal(values, expected)


OTHER = """
import re, sys
from pathlib import Path
import llamapipe as lp
path, folder = sys.argv[1:]
with lp.Model(path, packed_cache=folder) as model:
    with lp.Engine(model, n_ctx=128, n_seq_max=1, n_threads=2) as engine:
        text = str([float(x).hex() for x in engine.score_tokens([list(range(40, 80))])[0].logprobs])
    print(text, flush=True)
    for line in sys.stdin:
        sizes, here = {}, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                here = line.endswith(str(model.packed_file))
            elif here and (found := re.match(r"(Rss|Pss|Private_Dirty):\\s+(\\d+) kB", line)):
                sizes[found[1]] = sizes.get(found[1], 0) + int(found[2])
        print(sizes["Rss"], sizes["Pss"], sizes["Private_Dirty"], flush=True)
"""


@pytest.mark.parametrize("is_split", [False, True], ids=["one file", "parts"])
def test_processes_share_the_pages(
    path: Path, parts: list[Path], folder: Path, expected: np.ndarray, is_split: bool
) -> None:
    """Each of two counts half of the weights (Pss), though all are in memory, and none are its own."""
    if not Path("/proc/self/smaps").exists():
        pytest.skip("no /proc/self/smaps")
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", OTHER, str(parts[0] if is_split else path), str(folder)]
    others = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    try:
        text = str([x.hex() for x in expected.tolist()])
        assert [_line(other) for other in others] == [text, text]
        n_bytes = file_in(folder).stat().st_size - OFFSET
        for other in others:
            assert other.stdin is not None
            other.stdin.write("\n")
            other.stdin.flush()
            rss, pss, dirty = (1024 * int(n) for n in _line(other).split())
            assert rss > 0.9 * n_bytes and 0.4 * n_bytes < pss < 0.6 * n_bytes and dirty == 0
    finally:
        for other in others:
            other.communicate()
    assert [other.returncode for other in others] == [0, 0]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_the_users_cache(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAPIPE_CACHE_DIR", str(tmp_path / "mine"))
    on: list[bool | str] = [True, "auto"]
    for value in on:
        with lp.Model(path, packed_cache=value) as model:
            assert model.packed_file == file_in(tmp_path / "mine" / "packed")
    off: list[bool | str | None] = [None, False, "off"]
    for none in off:
        with lp.Model(path, packed_cache=none) as model:
            assert model.packed_file is None


def test_where_nothing_is_packed_nothing_is_written(path: Path, folder: Path) -> None:
    with lp.Model(path, packed_cache=folder, vocab_only=True) as model:
        assert model.packed_file is None
    assert not folder.exists()


def test_options_that_rule_a_cache_out_are_refused(path: Path, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"packed_cache maps .* kernels='ggml' does not allow"):
        lp.Model(path, packed_cache=folder, kernels="ggml")
    with pytest.raises(ValueError, match="use_mmap=False does not allow"):
        lp.Model(path, packed_cache=folder, use_mmap=False)
    with pytest.raises(ValueError, match="use_mlock=True does not allow"):
        lp.Model(path, packed_cache=folder, use_mlock=True)
    with pytest.raises(ValueError, match="packed_cache is empty"):
        lp.Model(path, packed_cache="")
    with pytest.raises(TypeError, match="packed_cache must be a folder"):
        lp.Model(path, packed_cache=3)  # type: ignore[arg-type]


def test_a_mapped_file_needs_no_free_memory(
    path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system may drop its pages, as those of the model's file."""
    load(path, folder)
    monkeypatch.setattr("llamapipe.llama.model.free_memory", lambda: 0)
    assert load(path, folder)[1] is not None
    assert "not packed" not in caplog.text


# ---- models
def test_a_model_in_parts(
    parts: list[Path], folder: Path, tmp_path: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    """It has the weights of the same model in one file; copies with its times are the same model."""
    assert len(parts) == 3
    written, file = load(parts[0], folder)
    assert file is not None and file == file_in(folder)
    before = identity(file)
    (tmp_path / "other").mkdir()
    copies = [Path(shutil.copy2(part, tmp_path / "other")) for part in parts]
    for path in (parts[0], copies[0]):
        mapped, again = load(path, folder)
        assert again == file and identity(file) == before
        np.testing.assert_array_equal(mapped, expected)
    np.testing.assert_array_equal(written, expected)
    assert not warnings(caplog)


def test_a_part_that_changed(
    parts: list[Path], folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    _, file = load(parts[0], folder)
    os.utime(parts[1], ns=(1, 1))
    assert load(parts[0], folder)[1] == file
    (message,) = warnings(caplog)
    assert "was replaced" in message
    tensor = next(t for t in gguf.GGUFReader(parts[2]).tensors if t.name == "blk.1.ffn_up.weight")
    with parts[2].open("r+b") as f:
        f.seek(int(tensor.data_offset))
        f.write(bytes(4096))
    with lp.Model(parts[0]) as model:
        changed = log_probabilities(model)
    assert (changed != expected).any()
    for _ in range(2):
        np.testing.assert_array_equal(load(parts[0], folder)[0], changed)


def test_a_missing_part(
    parts: list[Path], folder: Path, expected: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    load(parts[0], folder)
    before = identity(file_in(folder))
    away = parts[1].rename(folder.parent / "away")
    with pytest.raises(ModelLoadError, match=f"{parts[1].name} does not exist"):
        lp.Model(parts[0], packed_cache=folder)
    away.rename(parts[1])
    np.testing.assert_array_equal(load(parts[0], folder)[0], expected)
    assert identity(file_in(folder)) == before and not warnings(caplog)


def test_a_time_far_in_the_future(path: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """64 bits of nanoseconds end in the year 2262."""
    os.utime(path, (10**10, 10**10))
    for _ in range(2):
        assert load(path, folder)[1] == file_in(folder)
    assert not warnings(caplog)


def quantized_bert(path: Path) -> Path:
    """Its matrices as Q8_0."""
    document = Document.read(bert_model(path)[0])
    for tensor in document.tensors:
        if tensor.name.startswith(b"blk.") and len(tensor.dims) == 2:
            values = np.frombuffer(tensor.data, np.float32).reshape(tensor.dims[::-1])
            tensor.kind = int(Type.Q8_0)
            tensor.data = gguf.quants.quantize(values, Type.Q8_0).tobytes()
    return document.write(path)


def experts(path: Path) -> Path:
    shape = Shape(layers=2, width=256, heads=4, heads_kv=2, ffn=512, context=128, experts=4, experts_used=2)
    return make_model(path, shape=shape, type_name="q4_k_m", vocab="builtin-spm")


def vectors(model: lp.Model) -> np.ndarray:
    with lp.Embedder(model, n_threads=1) as embedder:
        return np.array(embedder.embed(["the fox ran by the river", "owls"]))


def adapted(model: lp.Model) -> np.ndarray:
    """With a LoRA for all of a text, and one that its second half invokes."""
    adapter_file = model.path.with_name("adapter.gguf")
    logprobs = []
    for invocation in (None, PROMPT[20:22]):
        file = make_adapter(
            adapter_file, model.path, invocation=invocation, matrices=r"blk\..\.(ffn_gate|attn_q)\.weight"
        )
        with (
            model.load_adapter(file, "a"),
            lp.Engine(model, n_ctx=128, n_seq_max=2, n_threads=1, adapters=["a"]) as engine,
        ):
            logprobs.append(engine.score_tokens([PROMPT], adapter="a")[0].logprobs)
    return np.array(logprobs)


def n_mapped(file: Path | None, pid: int | str = "self") -> int:
    """How often a process maps a file of packed weights; None: any of a folder ``packed``."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    return maps.count("/packed/" if file is None else f"{file}\n")


def drafted(model: lp.Model) -> np.ndarray:
    """With the same file as the draft model, mapped once more."""
    with lp.Engine(
        model, n_ctx=128, n_seq_max=1, n_threads=1, batch_invariant=True, draft=model.path
    ) as engine:
        assert n_mapped(model.packed_file) == (0 if model.packed_file is None else 2)
        params = lp.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        return np.array(engine.generate(PROMPT, params).token_ids)


USES: dict[str, tuple[Callable[[Path], Path] | None, Callable[[lp.Model], np.ndarray]]] = {
    "an encoder": (quantized_bert, vectors),
    "a decoder's vectors": (None, vectors),
    "experts": (experts, log_probabilities),
    "adapters": (None, adapted),
    "a draft": (None, drafted),
}


@pytest.mark.parametrize("use", USES)
def test_what_a_model_computes_does_not_depend_on_the_file(
    path: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, use: str
) -> None:
    make, compute = USES[use]
    file = path if make is None else make(tmp_path / "made.gguf")
    with lp.Model(file) as model:
        expected = compute(model)
    for _ in range(2):
        with lp.Model(file, packed_cache=folder) as model:
            assert model.n_packed_tensors > 0 and model.packed_file == file_in(folder)
            np.testing.assert_array_equal(compute(model), expected)
    assert not warnings(caplog)


def test_the_model_for_embeddings_takes_the_folder(path: Path, folder: Path, tmp_path: Path) -> None:
    options = ["-m", str(path), "--embeddings", str(path), "--packed-cache", str(folder), "-c", "128"]
    with ServerProcess(*options, cwd=tmp_path) as server:
        assert n_mapped(file_in(folder), server.process.pid) == 2
