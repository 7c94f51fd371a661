"""The prefix cache on disk: what an engine finds of an earlier one, and what damaged files and full disks do."""

from __future__ import annotations

import os
import random
import shutil
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest
from support.control import wait_until
from support.engine_harness import AsItIs
from support.gguf_models import tiny_architecture
from support.inside import disk_cache_of
from support.mtp_models import mtp_model
from support.plain import PlainLoop, greedy, plain_loop
from support.run_script import command, environment, run_script

import llamapipe as lp
from llamapipe import cache_file
from llamapipe._engine.policy.prefix_tree import n_common
from llamapipe._engine.runtime import disk_cache, loop
from llamapipe._engine.runtime.disk_cache import CachedSequence, DiskCache
from llamapipe._engine.runtime.snapshot import SnapshotFormat
from llamapipe.host import files
from llamapipe.llama.native_pipeline import SavedCells
from llamapipe.work.tenant import Tenant, is_of, tenant

MakeEngine = Callable[..., lp.Engine]
BUDGET = 2**24


def prompt(first: int, n: int = 150) -> list[int]:
    """Prompts that share nothing."""
    return [5 + (first * 7 + i * (first + 1)) % 200 for i in range(n)]


def ask(engine: lp.Engine, tokens: list[int], salt: str | None = None, n: int = 1) -> lp.Completion:
    return engine.generate(tokens, lp.SamplingParams(max_tokens=n, temperature=0, cache_salt=salt))


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"), key=lambda path: path.stat().st_mtime_ns)


def has_files(folder: Path, n: int) -> bool:
    return len(files_of(folder)) >= n


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without work writes at once."""
    monkeypatch.setattr(loop, "REST_S", 0.01)


@pytest.fixture
def only_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without work writes nothing."""
    monkeypatch.setattr(loop, "REST_S", 1e6)


def kept(make_engine: MakeEngine, folder: Path, *prompts: list[int], **options: Any) -> None:
    """Computes prompts with an engine that is closed then."""
    with make_engine(cache_bytes=BUDGET, cache_dir=folder, **options) as engine:
        for tokens in prompts:
            ask(engine, tokens)


def test_a_conversation_continues_after_a_restart(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Its cells come from a file, the generated ones, too, and the text is the same."""
    first = make_engine(n_seq_max=2, cache_bytes=BUDGET, cache_dir=tmp_path)
    before = ask(first, prompt(0), n=40)
    asked = [*prompt(0), *before.token_ids, *prompt(1, 5)]
    expected = ask(first, asked, n=8).token_ids
    first.close()
    (path,) = files_of(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    for options in ({"n_seq_max": 2}, {"n_seq_max": 5}, {"n_seq_max": 1}, {"n_cells": 600}):
        second = make_engine(**options, cache_bytes=BUDGET, cache_dir=tmp_path)
        done = ask(second, asked, n=8)
        assert done.n_cached_tokens == len(asked) - 1
        assert done.token_ids == expected
        assert second.stats().n_disk_reads == 1
        second.check_integrity()
        second.close()
    assert len(files_of(tmp_path)) == 1  # what grew was not worth another one


def test_a_sequence_that_grew_replaces_its_file(make_engine: MakeEngine, tmp_path: Path) -> None:
    for n in (100, 200, 230):
        kept(make_engine, tmp_path, prompt(0, n))
        (path,) = files_of(tmp_path)
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        assert ask(engine, prompt(0, 200)).n_cached_tokens == 199  # a beginning of it serves as well
        assert ask(engine, [*prompt(0, 130), *prompt(1, 50)]).n_cached_tokens >= 128
    assert path.exists()


WINDOW, RECURRENT, HYBRID, LATENT = "gemma3-270m", "rwkv7-0.4b", "qwen3.5-0.8b", "glm-4.7-flash"
COMMON, PROMPT = 100, 140


@pytest.fixture(scope="module", params=[WINDOW, RECURRENT, HYBRID, LATENT])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lp.Model]:
    """A window, states alone, states and cells with positions of several kinds, and keys without values."""
    folder = tmp_path_factory.mktemp("models")
    with lp.Model(tiny_architecture(folder / f"{request.param}.gguf", request.param)) as loaded:
        yield loaded


def prompt_of(which: int) -> list[int]:
    """Prompts that share their first tokens."""
    return [20 + (i * 11 + i * i + (which * 37 if i >= COMMON else 0)) % 150 for i in range(PROMPT)]


def n_computed(engine: lp.Engine, tokens: list[int], plain: PlainLoop) -> int:
    """The tokens that an engine computes of a prompt whose answer is right."""
    before = engine.stats().n_prompt_tokens
    assert plain.agrees(tokens, engine.generate(tokens, greedy(6)).token_ids)
    return engine.stats().n_prompt_tokens - before


def test_states_are_kept_too(
    make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, tmp_path: Path
) -> None:
    """The next engine computes the last few tokens of a prompt, and of a new one those that differ."""
    options: dict[str, Any] = {"n_seq_max": 2, "cache_bytes": 2**26, "cache_dir": tmp_path}
    first = make_engine(model, **options)
    for which in (1, 2):
        n_computed(first, prompt_of(which), plain)
    first.close()
    others: list[dict[str, Any]] = [{"n_seq_max": 2}, {"n_seq_max": 5}, {"kv_unified": True}]
    for which, more in enumerate(others, 3):
        with make_engine(model, **{**options, **more}) as engine:
            assert n_computed(engine, prompt_of(2), plain) <= 4
            assert n_computed(engine, prompt_of(which), plain) <= PROMPT - COMMON + 1
            engine.check_integrity()


def test_a_model_with_an_mtp_layer(make_engine: MakeEngine, tmp_path: Path) -> None:
    """It keeps several states of each sequence; a file has one."""
    with (
        lp.Model(mtp_model(tmp_path / "model.gguf", 0.6), load_mtp=True) as model,
        plain_loop(model) as plain,
    ):
        options: dict[str, Any] = {"cache_bytes": 2**26, "cache_dir": tmp_path / "cache", "draft": "mtp"}
        with make_engine(model, **options) as engine:
            n_computed(engine, prompt_of(1), plain)
        with make_engine(model, **options) as engine:
            assert n_computed(engine, prompt_of(1), plain) <= 4
            assert engine.stats().n_disk_reads == 1
            engine.check_integrity()


def test_cells_of_an_unknown_form(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("llamapipe.engine.state_layout", lambda pipeline: None)
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        ask(engine, prompt(0))
    assert "cache_dir has no effect" in caplog.text and files_of(tmp_path) == []


def test_a_sequence_whose_state_is_of_a_later_place(
    make_engine: MakeEngine, model: lp.Model, plain: PlainLoop, tmp_path: Path
) -> None:
    """A stop string ends a text late. Its cells are kept, and continue from other states."""
    first = make_engine(model, n_seq_max=1, cache_bytes=2**26, cache_dir=tmp_path)
    told = first.generate(prompt_of(1), greedy(12))
    stop = told.text[3:9]
    first.reset_prefix_cache()
    assert first.generate(prompt_of(1), greedy(12, stop=stop)).finish_reason == "stop"
    first.close()
    second = make_engine(model, n_seq_max=3, cache_bytes=2**26, cache_dir=tmp_path)
    again = [*prompt_of(1), *told.token_ids]
    assert n_computed(second, again, plain) <= 4 + len(told.token_ids)
    assert second.stats().n_disk_reads == 1
    second.check_integrity()


def test_what_is_evicted_from_host_memory_is_read_again(
    make_engine: MakeEngine, tmp_path: Path, only_evicted: None
) -> None:
    """At most three sequences fit into host memory and one into the slot; the others are on disk, and none is lost."""
    engine = make_engine(n_seq_max=1, cache_bytes=BUDGET, cache_dir=tmp_path / "sizes")
    ask(engine, prompt(0))
    ask(engine, prompt(1))
    size = engine.stats().cache_bytes
    engine.close()
    engine = make_engine(n_seq_max=1, cache_bytes=3 * size + 100, cache_dir=tmp_path / "cache")
    expected = [ask(engine, prompt(0), n=4).token_ids]
    for i in range(1, 8):
        expected.append(ask(engine, prompt(i), n=4).token_ids)
        wait_until(partial(has_files, tmp_path / "cache", max(i - 3, 0)))
    for i in range(8):
        done = ask(engine, prompt(i), n=4)
        assert done.n_cached_tokens == 149 and done.token_ids == expected[i]
    engine.check_integrity()


def test_a_state_that_is_evicted_is_read_again(
    make_engine: MakeEngine, tmp_path: Path, only_evicted: None
) -> None:
    """Of a model that has nothing else."""
    path = tiny_architecture(tmp_path / "model.gguf", RECURRENT)
    with lp.Model(path) as model, plain_loop(model) as plain:
        options = {"n_seq_max": 1, "cache_dir": tmp_path / "cache"}
        engine = make_engine(model, cache_bytes=BUDGET, **options)
        n_computed(engine, prompt(0), plain)
        size = engine.stats().cache_bytes  # of several states
        engine.close()
        shutil.rmtree(tmp_path / "cache")
        engine = make_engine(model, cache_bytes=4 * size, **options)
        for i in range(6):
            n_computed(engine, prompt(i), plain)
        wait_until(lambda: files_of(tmp_path / "cache"))
        assert n_computed(engine, prompt(0), plain) < 150
        engine.close()


def test_an_engine_without_work_writes(make_engine: MakeEngine, tmp_path: Path, at_once: None) -> None:
    """So what a killed process had computed is there, but for what came last."""
    engine = make_engine(n_seq_max=2, cache_bytes=BUDGET, cache_dir=tmp_path)
    for i in range(5):
        ask(engine, prompt(i))
    wait_until(lambda: len(files_of(tmp_path)) == 5)
    ask(engine, prompt(4, 155))  # has grown too little
    ask(engine, prompt(5))
    wait_until(lambda: len(files_of(tmp_path)) == 6)
    assert engine.stats().n_disk_writes == 6
    other = make_engine(cache_bytes=BUDGET, cache_dir=tmp_path)  # at the same time
    assert [ask(other, prompt(i)).n_cached_tokens for i in range(6)] == [149] * 6
    ask(other, prompt(6))
    wait_until(lambda: len(files_of(tmp_path)) == 7)
    disk = disk_cache_of(engine)
    wait_until(lambda: disk.find(prompt(6), None, 149) is not None)  # each look in vain lets it look again
    assert ask(engine, prompt(6)).n_cached_tokens == 149 and engine.stats().n_disk_reads == 1


def test_when_it_is_written(make_engine: MakeEngine, tmp_path: Path, at_once: None) -> None:
    """Not at all, or only at the end, without what was evicted before; and in the background again."""
    options: dict[str, Any] = {"n_seq_max": 1, "cache_bytes": BUDGET, "cache_dir": tmp_path}
    with make_engine(**options) as engine:
        engine.set_cache_writes("never")
        for i in range(3):
            ask(engine, prompt(i))
        size = engine.stats().cache_bytes // 2
    assert files_of(tmp_path) == []
    engine = make_engine(**{**options, "cache_bytes": 4 * size})
    engine.set_cache_writes("at_close")
    for i in range(8):
        ask(engine, prompt(i))
    assert engine.stats().n_disk_writes == 0
    engine.close()
    n = len(files_of(tmp_path))
    assert 2 <= n <= 5
    with make_engine(**options) as engine:
        engine.set_cache_writes("never")
        n_cached = [ask(engine, prompt(i)).n_cached_tokens for i in range(8)]
        assert n_cached == [0] * (8 - n) + [149] * n
        assert len(files_of(tmp_path)) == n
        engine.set_cache_writes("always")
        wait_until(lambda: len(files_of(tmp_path)) == 8)
        with pytest.raises(ValueError, match="when is 'later'; it must be one of"):
            engine.set_cache_writes("later")  # type: ignore[arg-type]
    engine.set_cache_writes("never")  # has no effect any more
    with pytest.raises(ValueError, match="needs an engine with cache_dir"):
        make_engine().set_cache_writes("never")


def test_what_was_used_last_is_kept_at_the_end(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Each sequence once, whether in a slot or in host memory; and those used last, if there is no room for all."""
    options: dict[str, Any] = {"n_seq_max": 2, "cache_bytes": 2**26, "n_ctx": 1600}
    engine = make_engine(**options, cache_dir=tmp_path / "all")
    engine.set_cache_writes("at_close")
    for i in range(6):
        ask(engine, prompt(i, 1500))
    ask(engine, prompt(5, 1550))  # it begins with another one
    engine.close()
    assert len(files_of(tmp_path / "all")) == 6
    n_bytes = sum(path.stat().st_size for path in files_of(tmp_path / "all"))
    options |= {"cache_dir": tmp_path / "some", "cache_dir_bytes": max(n_bytes // 2, 2**20)}
    assert n_bytes > 2**21
    for first in (0, 6):
        engine = make_engine(**options)
        engine.set_cache_writes("at_close")
        for i in range(first, first + 6):
            ask(engine, prompt(i, 1500))
        engine.close()
        assert sum(path.stat().st_size for path in files_of(tmp_path / "some")) <= n_bytes // 2
        with make_engine(**options) as engine:
            engine.set_cache_writes("never")
            is_cached = [ask(engine, prompt(i, 1500)).n_cached_tokens > 1400 for i in range(12)]
        assert [i for i in range(12) if is_cached[i]] == [*range(first + 6 - sum(is_cached), first + 6)]
        assert sum(is_cached) >= 2


def test_files_are_deleted_without_an_engine(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Those of the wanted keys, of all forms of cells; and what a killed process was writing."""
    for type_k in ("f16", "f32"):
        with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path, type_k=type_k) as engine:
            ask(engine, prompt(0), "a")
            token = tenant.set(Tenant(cache="b"))
            ask(engine, prompt(1))
            tenant.reset(token)
    folder = files_of(tmp_path)[0].parent
    (folder / ".x.part").touch()
    (folder / "damaged.kv").touch()
    (folder / "link.kv").symlink_to(files_of(tmp_path)[0])
    os.mkfifo(folder / "pipe.kv")
    (tmp_path / "lock").touch()
    cache_file.forget(tmp_path, is_of("b"))
    assert not (folder / ".x.part").exists()
    for name in ("damaged.kv", "link.kv", "pipe.kv"):  # nobody uses them
        (folder / name).unlink()
    assert len(files_of(tmp_path)) == 2
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        token = tenant.set(Tenant(cache="b"))
        assert ask(engine, prompt(1)).n_cached_tokens == 0
        tenant.reset(token)
        assert ask(engine, prompt(0), "a").n_cached_tokens == 149
    cache_file.forget(tmp_path, is_of(None))
    cache_file.forget(tmp_path / "none", is_of(None))
    assert len(files_of(tmp_path)) == 1  # what was computed again
    cache_file.forget(tmp_path, is_of("b"))
    assert files_of(tmp_path) == []


def test_what_is_not_for_others(make_engine: MakeEngine, demo: lp.Model, tmp_path: Path) -> None:
    """Other models, salts, tenants, types and kernels of cells; and the tenant alone forgets its own."""
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        ask(engine, prompt(0), "a")
        token = tenant.set(Tenant(cache="b"))
        ask(engine, prompt(1))
        tenant.reset(token)
        ask(engine, prompt(2))
    for options in ({"type_k": "f32"}, {"flash_attn": "off"}, {"rope_freq_base": 5000.0}):
        with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path, **options) as other:
            assert [ask(other, prompt(i), salt).n_cached_tokens for i, salt in ((0, "a"), (2, None))] == [
                0,
                0,
            ]
    with make_engine(demo, cache_bytes=BUDGET, cache_dir=tmp_path) as other:
        assert ask(other, prompt(2)).n_cached_tokens == 0
    shutil.rmtree(tmp_path)
    kept(make_engine, tmp_path, prompt(2))
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        ask(engine, prompt(0), "a")
        token = tenant.set(Tenant(cache="b"))
        ask(engine, prompt(1))
        tenant.reset(token)
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        assert [ask(engine, prompt(i)).n_cached_tokens for i in (0, 1)] == [0, 0]
        assert ask(engine, prompt(0), "b").n_cached_tokens == 0
        assert ask(engine, prompt(0), "a").n_cached_tokens == 149
        engine.reset_prefix_cache()  # of those without a tenant, whatever their salts
        assert [ask(engine, prompt(i), salt).n_cached_tokens for i, salt in ((0, "a"), (2, None))] == [0, 0]
        token = tenant.set(Tenant(cache="b"))
        assert ask(engine, prompt(1)).n_cached_tokens == 149
        engine.reset_prefix_cache()
        tenant.reset(token)
        assert files_of(tmp_path) == []


def test_a_clock_that_is_put_back(make_engine: MakeEngine, tmp_path: Path) -> None:
    """A file of a later time is not the last to go for ever: it counts as used when it is first seen."""
    long = partial(prompt, n=5000)
    options: dict[str, Any] = {"n_ctx": 5100, "n_seq_max": 1, "cache_bytes": 2**26, "cache_dir": tmp_path}
    with make_engine(**options) as engine:
        ask(engine, long(0))
    (later,) = files_of(tmp_path)
    os.utime(later, (2**32, 2**32))
    options["cache_dir_bytes"] = int(2.5 * later.stat().st_size)
    for i in (1, 2):
        with make_engine(**options) as engine:
            ask(engine, long(i))
    with make_engine(**options) as engine:
        assert [ask(engine, long(i)).n_cached_tokens for i in (1, 2)] == [4999] * 2
    assert not later.exists()


def test_the_folder_has_a_limit(make_engine: MakeEngine, tmp_path: Path) -> None:
    """The file that was used least recently goes first, also one of another model."""
    long = partial(prompt, n=5000)
    options: dict[str, Any] = {"n_ctx": 5100, "n_seq_max": 1, "cache_bytes": 2**26, "cache_dir": tmp_path}
    with make_engine(**options) as engine:
        ask(engine, long(0))
    (path,) = files_of(tmp_path)
    options["cache_dir_bytes"] = n_bytes = int(3.5 * path.stat().st_size)
    with make_engine(**{**options, "type_k": "bf16"}) as engine:
        ask(engine, long(1))
    for i in (2, 3):
        with make_engine(**options) as engine:
            ask(engine, long(i))
        with make_engine(**options) as engine:
            assert ask(engine, long(0)).n_cached_tokens == 4999  # so it stays
    with make_engine(**options) as engine:
        ask(engine, long(4))
    assert sum(file.stat().st_size for file in files_of(tmp_path)) <= n_bytes
    assert len([*tmp_path.iterdir()]) == 2
    with make_engine(**options) as engine:
        assert [ask(engine, long(i)).n_cached_tokens for i in (0, 3, 4)] == [4999] * 3
    options |= {"cache_dir": tmp_path / "small", "cache_dir_bytes": 2**20}
    with make_engine(**options) as engine:
        ask(engine, long(0))
    assert files_of(tmp_path / "small") == []


def test_damaged_files_are_deleted(
    make_engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a file holds, the text is right, and the process lives."""
    kept(make_engine, tmp_path / "whole", prompt(0))
    (whole,) = files_of(tmp_path / "whole")
    content, random_ = whole.read_bytes(), random.Random(1)
    expected = ask(make_engine(), prompt(0), n=4).token_ids
    n_begin = content.index(b"llpsnap")
    damages: list[bytes] = [b"", content[:10], content[:-1], content + b"x", bytes(len(content))]
    # The last byte of a length: no memory is asked for that the file cannot fill.
    damages += [content[:at] + b"\xff" + content[at + 1 :] for at in (11, 23)]
    for _ in range(30):
        at, changed = random_.randrange(len(content)), bytearray(content)
        changed[at if random_.random() < 0.5 else at % (n_begin + 300)] ^= 1 << random_.randrange(8)
        damages.append(bytes(changed))
    for i, damaged in enumerate(damages):
        path = tmp_path / str(i) / whole.parent.name / whole.name
        path.parent.mkdir(parents=True)
        path.write_bytes(damaged)
        path.chmod(0o600)
        with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path / str(i)) as engine:
            done = ask(engine, prompt(0), n=4)
            assert done.token_ids == expected and done.n_cached_tokens == 0
            engine.check_integrity()


def test_forged_heads_change_no_text(make_engine: MakeEngine, tmp_path: Path) -> None:
    """A head that says more than its file has costs a read; one of other types is none."""
    import json
    from zlib import crc32

    kept(make_engine, tmp_path, prompt(0))
    (path,) = files_of(tmp_path)
    content = path.read_bytes()
    magic, n_head, _, n_snapshot = cache_file._START.unpack_from(content)
    head = json.loads(content[cache_file._START.size :][:n_head])
    snapshot = content[cache_file._START.size + n_head :]
    expected = ask(make_engine(), prompt(1), n=4).token_ids
    blocks = bytes(8 * (150 // 64)).hex()
    others: list[Any] = [
        [*head[:1], "150", *head[2:]],
        [*head[:3], [[10, 0], [5, 0]], *head[4:]],
        [*head[:3], [10], *head[4:]],
        [*head[:3], [[]], *head[4:]],
        [*head[:5], "zz", head[6]],
        [*head[:5], blocks + "00" * 8, head[6]],
        [*head[:6], [["a", 1]]],
        [{"hex": 1}, *head[1:]],
        [{}, *head[1:]],
        {},
        None,
    ]
    hashes = cache_file.hashes_of(prompt(1), 150)
    others.append([*head[:5], b"".join(value.to_bytes(8, "little") for value in hashes).hex(), head[6]])
    for other in others:
        text = json.dumps(other).encode()
        path.write_bytes(cache_file._START.pack(magic, len(text), crc32(text), n_snapshot) + text + snapshot)
        with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
            done = ask(engine, prompt(1), n=4)
            assert done.token_ids == expected and done.n_cached_tokens == 0
            engine.reset_prefix_cache()
            path.parent.mkdir(exist_ok=True)


def test_files_that_others_could_have_written(make_engine: MakeEngine, tmp_path: Path) -> None:
    kept(make_engine, tmp_path, prompt(0))
    (path,) = files_of(tmp_path)
    aside = tmp_path / "aside"
    path.rename(aside)

    def is_used() -> bool:
        with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
            is_hit = ask(engine, prompt(0)).n_cached_tokens > 0
        for left in path.parent.iterdir():
            left.unlink()
        return is_hit

    path.symlink_to(aside)
    assert not is_used()
    os.mkfifo(path)
    assert not is_used()
    shutil.copy(aside, path)
    path.chmod(0o622)
    assert not is_used()
    shutil.copy(aside, path)
    path.chmod(0o600)
    assert is_used()


@pytest.mark.parametrize("kind", ["link", "open", "file", "inside", "other"])
def test_folders_that_are_refused(make_engine: MakeEngine, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "cache"
    if kind == "link":
        (tmp_path / "real").mkdir()
        folder.symlink_to(tmp_path / "real")
    elif kind == "open":
        folder.mkdir()
        folder.chmod(0o777)
    elif kind == "file":
        folder.touch()
    elif kind == "inside":
        kept(make_engine, folder, prompt(0))
        (path,) = files_of(folder)
        path.parent.chmod(0o777)
    elif os.geteuid():
        pytest.skip("only root can give a folder to another user")
    else:
        folder.mkdir(0o700)
        os.chown(folder, 12345, -1)
    with pytest.raises(ValueError, match=r"cache_dir: .*folder of your own"):
        make_engine(cache_dir=folder)


def test_options_that_do_not_fit(make_engine: MakeEngine, tmp_path: Path) -> None:
    for options in ({"prefix_cache": False}, {"prefix_cache": "exact"}, {"cache_bytes": 0}):
        with pytest.raises(ValueError, match="cache_dir needs"):
            make_engine(cache_dir=tmp_path, **options)
    for name in ("", "a\0b"):
        with pytest.raises(ValueError, match="cache_dir"):
            make_engine(cache_dir=name)
    with pytest.raises(TypeError, match="cache_dir must be"):
        make_engine(cache_dir=3)


def test_a_folder_that_disappears(
    make_engine: MakeEngine, tmp_path: Path, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that are gone are computed again, and the folder is made again."""
    folder = tmp_path / "cache"
    kept(make_engine, folder, prompt(0), prompt(1))
    engine = make_engine(cache_bytes=BUDGET, cache_dir=folder)
    shutil.rmtree(folder)
    assert ask(engine, prompt(0)).n_cached_tokens == 0
    wait_until(lambda: files_of(folder))
    shutil.rmtree(folder)
    engine.reset_prefix_cache()
    folder.touch()
    ask(engine, prompt(2))
    wait_until(lambda: "are not written" in caplog.text)
    assert ask(engine, prompt(3)).n_cached_tokens == 0


def test_a_full_disk_is_told_once(tmp_path: Path) -> None:
    program = f"""
import resource, threading
import llamapipe as lp
from llamapipe._engine.runtime import disk_cache, loop
loop.REST_S = 0.01
disk_cache._RETRY_S = 0.0
failed, write = threading.Semaphore(0), disk_cache.DiskCache._write
def write_and_tell(*arguments):
    write(*arguments)
    failed.release()
disk_cache.DiskCache._write = write_and_tell
with lp.Engine(lp.demo_model_path(), n_ctx=512, cache_dir={str(tmp_path)!r}) as engine:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    for i in range(4):
        engine.generate([i + 5] * 100, lp.SamplingParams(max_tokens=2))
        assert failed.acquire(timeout=60)
"""
    done = subprocess.run(
        command(program), env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr.count("are not written") == 1
    assert list(tmp_path.glob("*/*")) == []


def test_a_disk_that_is_nearly_full(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The cache gives way: its oldest files go, and if that is not enough, nothing is written."""
    kept(make_engine, tmp_path, prompt(0))
    (first,) = files_of(tmp_path)
    usage, taken = shutil.disk_usage(tmp_path), int(1.5 * first.stat().st_size)

    def nearly_full(n_free: int) -> Any:
        used = sum(path.stat().st_size for path in files_of(tmp_path))
        return usage._replace(total=2**20, free=n_free + 2**14 - used)

    monkeypatch.setattr(shutil, "disk_usage", lambda path: nearly_full(taken))
    kept(make_engine, tmp_path, prompt(1))
    (second,) = files_of(tmp_path)
    assert second != first
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        assert ask(engine, prompt(1)).n_cached_tokens == 149
    monkeypatch.setattr(shutil, "disk_usage", lambda path: nearly_full(1000))
    kept(make_engine, tmp_path, prompt(2))
    assert files_of(tmp_path) == [] and "nearly full" in caplog.text


def test_a_disk_that_hangs_delays_one_request(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others go on, and that one for a while; then it computes."""
    kept(make_engine, tmp_path, prompt(0))
    answered = threading.Event()
    read = DiskCache._read

    def late(self: DiskCache, entry: disk_cache.Entry) -> CachedSequence | None:
        answered.wait()
        return read(self, entry)

    monkeypatch.setattr(DiskCache, "_read", late)
    engine = make_engine(cache_bytes=BUDGET, cache_dir=tmp_path)
    stream = engine.stream(prompt(0), lp.SamplingParams(max_tokens=2, temperature=0))
    assert ask(engine, prompt(1)).n_cached_tokens == 0
    assert engine.stats().n_queued == 1
    cancelled = engine.stream(prompt(0))
    cancelled.close()
    monkeypatch.setattr(loop, "PATIENCE_S", 0.05)
    answered.set()
    assert list(stream) and ask(engine, prompt(0)).n_cached_tokens == 149
    answered.clear()
    engine.close()
    engine = make_engine(cache_bytes=BUDGET, cache_dir=tmp_path)
    assert ask(engine, prompt(0)).n_cached_tokens == 0
    answered.set()


def test_requests_with_the_same_prefix_share_a_read(make_engine: MakeEngine, tmp_path: Path) -> None:
    kept(make_engine, tmp_path, prompt(0))
    engine = make_engine(cache_bytes=BUDGET, cache_dir=tmp_path, n_seq_max=4)
    done = engine.generate([[*prompt(0), i] for i in range(20)], lp.SamplingParams(max_tokens=1))
    assert all(completion.n_cached_tokens == 150 for completion in done)
    assert engine.stats().n_disk_reads == 1


KILLED = """
import os, signal, sys, threading
import llamapipe as lp
from llamapipe._engine.runtime import loop
from llamapipe._engine.runtime.disk_cache import DiskCache
from support.control import wait_until
loop.REST_S = 0.001
first, n_lines = int(sys.argv[2]), int(sys.argv[3])
n_files = 0
def look(frame, event, argument):
    global n_files, n_lines
    if frame.f_code is not DiskCache._write_file.__code__:
        return None
    n_files += event == "call"
    n_lines -= event == "line" and n_files == 2
    if not n_lines:
        os.kill(os.getpid(), signal.SIGKILL)
    return look
threading.settrace(look)
with lp.Engine(lp.demo_model_path(), n_ctx=512, n_threads=1, cache_dir=sys.argv[1]) as engine:
    for i in range(first, first + 2):
        engine.generate([i + 1, *(5 + j * j % 200 for j in range(300))], lp.SamplingParams(max_tokens=2))
        wait_until(lambda: engine.stats().n_disk_writes > i - first)
"""


def test_processes_that_are_killed(tmp_path: Path) -> None:
    """Two on one folder, killed at a line of a write: what is left is whole, and nothing else stays."""
    n_before = 9  # lines up to the one that makes a file under another name
    for round_ in range(4):
        running = [
            subprocess.Popen(
                command(KILLED, tmp_path, 40 * round_ + 20 * k, n_before + 2 * round_ + k), env=environment()
            )
            for k in range(2)
        ]
        for process in running:
            assert process.wait(120) == -signal.SIGKILL
    with (
        lp.Engine(lp.demo_model_path(), n_ctx=512) as plain,
        lp.Engine(lp.demo_model_path(), n_ctx=512, cache_dir=tmp_path) as engine,
    ):
        assert [path for path in tmp_path.glob("*/*") if path.suffix != ".kv"] == []
        n_found = 0
        for round_ in range(4):
            for first in (40 * round_, 40 * round_ + 20):
                tokens = [first + 1, *(5 + j * j % 200 for j in range(300))]
                done = ask(engine, tokens, n=8)
                n_found += done.n_cached_tokens > 0
                assert done.token_ids == ask(plain, tokens, n=8).token_ids
        assert n_found == engine.stats().n_disk_reads == 8


def test_a_file_that_is_taken_for_a_dead_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process looks at it between its creation and its lock."""
    path, lock = tmp_path / "a.part", files.lock
    looks: Iterator[Callable[[Path], None]] = iter([cache_file.remove_if_dead])

    def late(descriptor: int, wait: bool = True) -> None:
        for look in looks:
            look(path)
        lock(descriptor, wait)

    monkeypatch.setattr(files, "lock", late)
    descriptor = cache_file.create_locked(path)
    cache_file.remove_if_dead(path)
    assert path.stat().st_ino == os.fstat(descriptor).st_ino
    os.close(descriptor)
    cache_file.remove_if_dead(path)
    assert not path.exists()


def test_another_process_finds_it(tmp_path: Path) -> None:
    """Hashes of texts differ there."""
    program = f"""
import llamapipe as lp
with lp.Engine(lp.demo_model_path(), n_ctx=512, cache_dir={str(tmp_path)!r}) as engine:
    done = engine.generate([9] * 200, lp.SamplingParams(max_tokens=1, cache_salt="é"))
    print(done.n_cached_tokens)
"""
    assert [run_script(program).split() for _ in range(2)] == [["0"], ["199"]]


def test_lookups_find_the_longest_prefix(tmp_path: Path) -> None:
    """As often as a file has 64 tokens more; random sequences that share beginnings."""
    layout = SnapshotFormat(bytes(16), 1, "f16", "f16", cast(Any, AsItIs()))
    random_ = random.Random(5)
    cache = DiskCache(tmp_path, 2**30, layout, "", 1000, 1000, can_cut=True)
    written: list[tuple[list[int], str | None]] = []
    for _ in range(60):
        base, key = random_.choice(written) if written else ([], None)
        if random_.random() < 0.3:
            key = random_.choice([None, "a", "b"])
        tokens = base[: random_.randrange(len(base) + 1)]
        tokens += [random_.randrange(3) for _ in range(random_.randrange(64, 300))]
        tokens = tokens[:1000]
        written.append((tokens, key))
        cache.write(CachedSequence(tokens, key, SavedCells.of_bytes(b"x"), []))
        cache.wait_for_room(monotonic() + 60)
    wait_until(lambda: not cache._writes and cache._written is None)
    again = DiskCache(tmp_path, 2**30, layout, "", 1000, 1000, can_cut=True)
    assert repr(cache).endswith(f"n={len(files_of(tmp_path))}>")
    for _ in range(300):
        base, key = random_.choice(written)
        tokens = base[: random_.randrange(len(base) + 1)] + [random_.randrange(3) for _ in range(100)]
        most = max(n_common(tokens, other, 0) for other, of in written if of == key)
        for lookup in (cache, again):
            match = lookup.find(tokens, key, len(tokens))
            n = 0 if match is None else match[0]
            assert most - 64 < n <= most or (n == 0 and most < 128), (n, most)
    cache.close()
    again.close()
    assert stat.S_IMODE(tmp_path.stat().st_mode) & 0o22 == 0


def test_a_read_that_fails_harms_no_other(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without memory or file descriptors, a request computes its tokens. The file stays, and the next one uses it."""
    kept(make_engine, tmp_path, prompt(0), prompt(1))

    def fails(*_: object) -> Any:
        raise error

    for error in (MemoryError(), OSError(24, "Too many open files"), SystemError("a defect")):
        with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(disk_cache, "open_private" if isinstance(error, OSError) else "unpack", fails)
                assert ask(engine, prompt(0)).n_cached_tokens == 0
            assert ask(engine, prompt(1)).n_cached_tokens == 149
        assert len(files_of(tmp_path)) == 2


def test_a_write_that_fails_harms_no_read(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: None
) -> None:
    kept(make_engine, tmp_path, prompt(0))
    failed = threading.Event()

    def fails(*_: object) -> Any:
        failed.set()
        raise MemoryError

    monkeypatch.setattr(disk_cache, "parts_of", fails)
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        ask(engine, prompt(1))
        assert failed.wait(60)
        assert ask(engine, prompt(0)).n_cached_tokens == 149
    assert len(files_of(tmp_path)) == 1  # no writes for a while


def test_a_process_that_may_not_have_more_threads(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(make_engine, tmp_path, prompt(0))

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            assert ask(engine, prompt(0)).n_cached_tokens == 0
        assert ask(engine, prompt(1)).n_cached_tokens == 0
    assert len(files_of(tmp_path)) == 2


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A disk that hangs: set when it reads, and to be set when it may answer."""
    began, may_answer, read = threading.Event(), threading.Event(), DiskCache._read

    def late(self: DiskCache, entry: disk_cache.Entry) -> CachedSequence | None:
        sequence = read(self, entry)
        began.set()
        may_answer.wait()
        return sequence

    monkeypatch.setattr(DiskCache, "_read", late)
    yield began, may_answer
    may_answer.set()


def test_what_is_read_while_it_is_forgotten_is_not_kept(
    make_engine: MakeEngine, tmp_path: Path, held: tuple[threading.Event, threading.Event]
) -> None:
    kept(make_engine, tmp_path, prompt(0))
    began, may_answer = held
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        stream = engine.stream([*prompt(0, 120), 9], lp.SamplingParams(max_tokens=1))
        assert began.wait(60)
        engine.reset_prefix_cache()
        assert files_of(tmp_path) == []
        may_answer.set()
        assert len(list(stream)) <= 1
        assert ask(engine, prompt(0)).n_cached_tokens == 120  # what the request computed
        engine.check_integrity()


def test_what_is_read_before_its_file_is_deleted_is_not_kept(
    make_engine: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(make_engine, tmp_path, prompt(0))
    forget = DiskCache.forget

    def late(self: DiskCache, is_wanted: Callable[[Hashable], bool]) -> None:
        assert ask(engine, [*prompt(0, 100), 9]).n_cached_tokens == 100
        forget(self, is_wanted)

    monkeypatch.setattr(DiskCache, "forget", late)
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        engine.reset_prefix_cache()
        assert ask(engine, prompt(0)).n_cached_tokens == 0


def test_a_file_that_cannot_be_deleted_keeps_no_others(make_engine: MakeEngine, tmp_path: Path) -> None:
    kept(make_engine, tmp_path, *(prompt(i) for i in range(4)))
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        stays = files_of(tmp_path)[0]
        stays.unlink()
        stays.mkdir()  # which unlink refuses
        with pytest.raises(IsADirectoryError):
            engine.reset_prefix_cache()
        assert files_of(tmp_path) == [stays]


def test_nobody_waits_for_a_disk_that_is_known_to_hang(
    make_engine: MakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held: tuple[threading.Event, threading.Event],
) -> None:
    kept(make_engine, tmp_path, prompt(0), prompt(1))
    monkeypatch.setattr(loop, "PATIENCE_S", 0.01)
    with make_engine(cache_bytes=BUDGET, cache_dir=tmp_path) as engine:
        assert ask(engine, prompt(0)).n_cached_tokens == 0
        monkeypatch.setattr(loop, "PATIENCE_S", 1e6)
        assert ask(engine, prompt(1)).n_cached_tokens == 0
