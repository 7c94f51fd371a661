"""Model files that are truncated, replaced or written to while they are loaded, or while they are in use."""

from __future__ import annotations

import mmap
import os
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.gguf_models import Shape, make_model, tiny_model
from support.run_script import run_script

import llamapipe as lp
from llamapipe.errors import ModelLoadError
from llamapipe.native.load import native

Change = Callable[[Path], object]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def replace(path: Path) -> None:
    copy = path.with_suffix(".new")
    shutil.copy(path, copy)
    copy.replace(path)


def touch(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"GGUF")
    os.utime(path, ns=(1, 1))


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def change_during_load(path: Path, change: Change, use_mmap: bool) -> None:
    """The change happens when llama.cpp reports progress for the first time."""
    changes = [change]

    def progress(fraction: float) -> None:
        while changes:
            changes.pop()(path)

    with lp.Model(path, progress=progress, use_mmap=use_mmap):
        pass


def repacked_model(path: Path) -> Path:
    """A model whose weights are read during the load, because the CPU backend stores them in another order."""
    shape = Shape(layers=2, width=256, heads=4, heads_kv=2, ffn=256, context=128)
    return make_model(path, shape=shape, type_name="q4_k_m")


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("make", [tiny_model, repacked_model])
def test_truncated_while_it_is_loaded(tmp_path: Path, make: Callable[[Path], Path], use_mmap: bool) -> None:
    path = make(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match="while it was loaded"):
        change_during_load(path, cut, use_mmap)


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize(
    ("change", "what"),
    [(replace, "replaced or written to"), (touch, "replaced or written to"), (extend, "bytes and has")],
)
def test_changed_while_it_is_loaded(tmp_path: Path, change: Change, what: str, use_mmap: bool) -> None:
    path = tiny_model(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=rf"{what}.* while it was loaded; load it again"):
        change_during_load(path, change, use_mmap)
    with lp.Model(path):  # complete now
        pass


def test_removed_while_it_is_loaded(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=r"cannot be read any more: .* while it was loaded"):
        change_during_load(path, Path.unlink, True)


_MANY_LOADS = """
import os, random, sys, threading
from pathlib import Path
import llamapipe as lp
from llamapipe.errors import ModelLoadError
path, whole = Path(sys.argv[1]), Path(sys.argv[1]).read_bytes()
ended = threading.Event()

def spoil():
    rng = random.Random(1)
    while not ended.is_set():
        os.truncate(path, rng.randrange(len(whole)))
        with path.open("r+b") as file:
            file.write(whole)

thread = threading.Thread(target=spoil)
thread.start()
refused = 0
for _ in range(300):
    try:
        lp.Model(path).close()
    except ModelLoadError:
        refused += 1
ended.set()
thread.join()
lp.Model(path).close()
say("refused" if refused > 50 else f"only {refused} were refused")
"""


def test_truncated_again_and_again(tmp_path: Path) -> None:
    """At any instant: while our check reads it, while llama.cpp does, between them."""
    path = repacked_model(tmp_path / "tiny.gguf")
    assert run_script(_MANY_LOADS, path) == "refused\n"


def test_in_use_without_a_mapping(tmp_path: Path) -> None:
    path = tiny_model(tmp_path / "tiny.gguf")
    params = lp.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with lp.Model(path, use_mmap=False) as model, lp.Engine(model, n_ctx=64) as engine:
        expected = engine.generate("abc", params).token_ids
        os.truncate(path, 100)
        assert engine.generate("abc", params).token_ids == expected


def test_the_guard_leaves_other_handlers_alone() -> None:
    """A fault of a thread that loads nothing goes to the handler that was there, here Python's."""
    done = run_script(
        """
import mmap, os, signal, subprocess, sys, tempfile
program = '''
import faulthandler, mmap, os, sys, tempfile, threading
from llamapipe.native.load import native
if sys.argv[1] == "handler":
    faulthandler.enable()
assert native().lib.lp_mapping_guard_begin([], 0) == 0
file = tempfile.TemporaryFile()
file.truncate(8192)
mapped = mmap.mmap(file.fileno(), 8192)
os.ftruncate(file.fileno(), 0)
thread = threading.Thread(target=lambda: mapped[4096])
thread.start()
thread.join()
'''
for kind in ("handler", "default"):
    done = subprocess.run([sys.executable, "-c", program, kind], capture_output=True, text=True)
    assert done.returncode == -signal.SIGBUS, done
    assert ("Fatal Python error: Bus error" in done.stderr) == (kind == "handler"), done.stderr
say("ended")
"""
    )
    assert done == "ended\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to find the file")
def test_the_guard_covers_threads_that_read_the_loaded_file(tmp_path: Path) -> None:
    """ggml converts weights in threads of its own where the CPU has AMX."""
    path = tmp_path / "with spaces (deleted).gguf"
    path.write_bytes(b"x" * 4 * mmap.PAGESIZE)
    module = native()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        name = module.ffi.new("char[]", os.fsencode(os.path.realpath(path)))
        assert module.lib.lp_mapping_guard_begin([name], 1) == 0
        os.truncate(path, mmap.PAGESIZE)
        with ThreadPoolExecutor(2) as pool:
            values = list(pool.map(lambda page: mapped[page * mmap.PAGESIZE], [3, 1, 2, 0]))
        assert module.lib.lp_mapping_guard_end() > 0
    assert values == [0, 0, 0, ord("x")]


def test_guards_of_one_thread_nest() -> None:
    lib = native().lib
    assert lib.lp_mapping_guard_begin([], 0) == 0
    assert lib.lp_mapping_guard_begin([], 0) == 0
    assert lib.lp_mapping_guard_end() == 0
    assert lib.lp_mapping_guard_end() == 0
