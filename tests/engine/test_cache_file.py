"""What an engine has cached, in a file for the next one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import llamapipe as lp
from llamapipe import cache_file
from llamapipe.work.tenant import Tenant, tenant

MakeEngine = Callable[..., lp.Engine]
PARAMS = lp.SamplingParams(max_tokens=8, temperature=0)


def prompt(first: int, n: int = 100) -> list[int]:
    return [5 + (first * 7 + i) % 200 for i in range(n)]


def n_cached(engine: lp.Engine, tokens: list[int], salt: str | None = None) -> int:
    params = lp.SamplingParams(max_tokens=1, cache_salt=salt)
    return engine.generate(tokens, params).n_cached_tokens


def test_a_conversation_continues_in_another_engine(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Its cells come from the file, the generated ones, too, and the text is the same."""
    path = tmp_path / "cache"
    first = make_engine(n_seq_max=2, cache_bytes=2**24)
    before = first.generate(prompt(0), PARAMS)
    asked = prompt(0) + before.token_ids + prompt(1, 5)
    first.save_cache(path)
    expected = first.generate(asked, PARAMS).token_ids
    assert path.stat().st_mode & 0o777 == 0o600
    for options in ({"n_seq_max": 2}, {"n_seq_max": 5}, {"n_seq_max": 1}):
        second = make_engine(**options, cache_bytes=2**24)
        second.load_cache(path)
        done = second.generate(asked, PARAMS)
        assert done.n_cached_tokens >= 107  # of 113
        assert done.token_ids == expected
        second.check_integrity()


def test_all_that_fits_is_kept_once(make_engine: MakeEngine, tmp_path: Path) -> None:
    """In slots and in host memory; what another sequence begins with is in that one."""
    path = tmp_path / "cache"
    first = make_engine(n_seq_max=2, cache_bytes=2**24)
    for i in range(6):
        n_cached(first, prompt(i))
    n_cached(first, prompt(5, 120))
    first.save_cache(path)
    assert len(list(cache_file.read(path))) == 6
    second = make_engine(n_seq_max=2, cache_bytes=2**24)
    second.load_cache(path)
    assert [n_cached(second, prompt(i)) for i in range(6)] == [99] * 6
    room = second.stats().cache_bytes
    small = make_engine(n_seq_max=2, cache_bytes=room // 4)
    small.load_cache(path)
    assert 0 < small.stats().cache_bytes <= room // 4
    assert n_cached(small, prompt(5)) == 99  # those used last
    for i in range(6):
        n_cached(small, prompt(i))
    small.save_cache(path)
    assert path.stat().st_size <= room // 4 + 2**12


def test_caches_of_others_stay_apart(make_engine: MakeEngine, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    first = make_engine(cache_bytes=2**24)
    token = tenant.set(Tenant("me", "mine", None))
    try:
        n_cached(first, prompt(0), "salt")
    finally:
        tenant.reset(token)
    n_cached(first, prompt(1), "salt")
    first.save_cache(path)
    second = make_engine(cache_bytes=2**24)
    second.load_cache(path)
    assert n_cached(second, prompt(0), "salt") == 0
    assert n_cached(second, prompt(1)) == 0
    assert n_cached(second, prompt(1), "salt") == 99


def test_files_that_do_not_fit(make_engine: MakeEngine, demo: lp.Model, tmp_path: Path) -> None:
    """A damaged one raises, a cut one loses its end, and one of another model is refused."""
    path = tmp_path / "cache"
    first = make_engine(cache_bytes=2**24)
    for i in range(2):
        n_cached(first, prompt(i))
    first.save_cache(path)
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    second = make_engine(cache_bytes=2**24)
    second.load_cache(path)
    assert (n_cached(second, prompt(0)), n_cached(second, prompt(1))) == (99, 0)
    for place in (20, 500):  # in what tells whose cells they are, and in the cells
        path.write_bytes(data[:place] + b"x" + data[place + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            make_engine(cache_bytes=2**24).load_cache(path)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="another model"):
        make_engine(demo, cache_bytes=2**24).load_cache(path)
    none = make_engine(cache_bytes=2**24, prefix_cache=False)
    none.load_cache(path)
    none.save_cache(path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize("at", [3, 11])  # the last byte of the head's length, and of the snapshot's
def test_a_damaged_length(tmp_path: Path, at: int) -> None:
    """No memory is asked for that the file cannot fill."""
    path = tmp_path / "cache"
    with cache_file.written(path) as write:
        write(None, {}, [b"cells"])
    assert list(cache_file.read(path)) == [(None, {}, b"cells")]
    data = bytearray(path.read_bytes())
    data[at] = 0xFF
    path.write_bytes(data)
    assert list(cache_file.read(path)) == []
