"""The file of stored answers: who may read it, what fits, what is left after a deletion, a kill and a full disk."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.control import turn
from support.run_script import Script, command, environment

from llamapipe.server.store import answers
from llamapipe.server.store.answers import NewAnswer, Page, Store
from llamapipe.server.store.database import MissingError, StoreError

BIG = 2**30
ALL = (10_000, BIG, "")  # items and bytes that may be read at once, and an answer that is not there


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "answers.db"


@pytest.fixture
def store(file: Path) -> Iterator[Store]:
    with closing(Store(file, BIG, 30)) as store:
        yield store


def write(store: Store, function: Callable[..., Any], *arguments: Any) -> Any:
    return asyncio.run(store.write(function, *arguments))


def answer_of(name: str, text: str = "text", **more: Any) -> NewAnswer:
    items = [{"role": "user", "content": f"{name} asks {text}"}]
    output = [
        {"type": "message", "role": "assistant", "content": f"{name} answers {text}", "id": f"msg_{name}"}
    ]
    return NewAnswer(f"resp_{name}", {"id": f"resp_{name}"}, items, output, **more)


def add(store: Store, name: str, text: str = "text", owner: str = "", **more: Any) -> str:
    write(store, store.add_answer, owner, answer_of(name, text, **more))
    return f"resp_{name}"


def has(store: Store, name: str, owner: str = "") -> bool:
    with suppress(MissingError):
        return bool(store.read(store.answer, owner, f"resp_{name}"))
    return False


def texts(items: list[Any]) -> list[str]:
    return [part["text"] for item in items for part in item["content"]]


def age(file: Path, days: int, where: str = "1") -> None:
    """Makes what is stored older."""
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE threads SET used_at = used_at - {days * 86_400} WHERE {where}")


# ---- the file
def test_only_its_user_may_read_it(store: Store, file: Path) -> None:
    add(store, "a")
    files = [path for path in file.parent.iterdir() if path.is_file()]
    assert {path.name for path in files} == {"answers.db", "answers.db-wal", "answers.db-shm"}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


@pytest.mark.parametrize("suffix", ["", "-wal"])
def test_a_file_that_others_may_use_is_refused(file: Path, suffix: str) -> None:
    other = Path(f"{file}{suffix}")
    other.touch(mode=0o600)
    other.chmod(0o640)
    with pytest.raises(PermissionError, match=r"--store: .* other users may use it \(mode 640\): chmod 600"):
        Store(file, BIG, 30)


def test_a_file_of_another_user_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.touch(mode=0o600)
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(PermissionError, match=f"it belongs to user {me}, and this is user {me + 1}"):
        Store(file, BIG, 30)


def test_what_is_no_file_is_refused(file: Path) -> None:
    target = file.with_name("target")
    target.touch(mode=0o600)
    file.symlink_to(target)
    with pytest.raises(PermissionError, match="it is not a regular file"):
        Store(file, BIG, 30)
    with pytest.raises(PermissionError, match="it is not a regular file"):
        Store(file.parent, BIG, 30)
    with pytest.raises(FileNotFoundError, match=r"--store: .*/no/folder cannot be made: there is no folder"):
        Store(file.parent / "no" / "folder", BIG, 30)


def test_a_file_of_another_program_is_refused(file: Path) -> None:
    file.touch(mode=0o600)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE mine (x)")
    before = file.read_bytes()
    with pytest.raises(StoreError, match="is a database of another program; give another file"):
        Store(file, BIG, 30)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("mine",)]
    file.write_bytes(b"Dear diary, " * 1000)
    with pytest.raises(StoreError, match="file is not a database"):
        Store(file, BIG, 30)
    assert file.read_bytes().startswith(b"Dear diary") and before


def test_a_newer_version_is_refused(file: Path) -> None:
    Store(file, BIG, 30).close()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA user_version = 3")
    with pytest.raises(StoreError, match="has version 3, this llamapipe reads 2"):
        Store(file, BIG, 30)


def test_damage_is_found_at_the_start(file: Path) -> None:
    with closing(Store(file, BIG, 30)) as store:
        for i in range(50):
            add(store, f"a{i}", "x" * 5000)
    whole = file.read_bytes()
    n_found = 0
    for page in range(1, len(whole) // 4096):
        file.write_bytes(whole[: page * 4096] + b"\x7f" * 4096 + whole[(page + 1) * 4096 :])
        with suppress(StoreError):
            Store(file, BIG, 30).close()
            continue
        n_found += 1
    assert n_found > len(whole) // 4096 // 3  # the others hold texts only
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError, match=f"--store: {file}"):
        Store(file, BIG, 30)


def test_a_damaged_row_is_no_error_of_the_request(store: Store, file: Path) -> None:
    for name in "ab":
        add(store, name)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE answers SET body = x'7b22ff' WHERE id = 'resp_a'")
    with pytest.raises(StoreError, match=r"a row is damaged: .* \(restore a copy"):
        store.read(store.answer, "", "resp_a")
    with pytest.raises(StoreError, match="a row is damaged"):
        write(store, store.change_answer, "resp_a", {"status": "failed"})
    assert has(store, "b")
    write(store, store.delete_answer, "", "resp_a")
    assert not has(store, "a") and has(store, "b")


# ---- what fits
def test_the_oldest_go_first(file: Path) -> None:
    with closing(Store(file, 2**20, 30)) as store:
        add(store, "chain", "x" * 1000)
        for i in range(40):
            add(store, f"a{i}", "x" * 20_000)  # twice: 40 KB each
            if i < 20:
                age(file, 1, f"number IN (SELECT thread FROM answers WHERE id = 'resp_a{i}')")
        add(store, "last", previous="resp_chain")
        there = [has(store, f"a{i}") for i in range(40)]
        assert there == sorted(there) and 10 < sum(there) < 26  # the first ones are gone
        assert has(store, "last") == has(store, "chain")
    assert file.stat().st_size < 1.3 * 2**20


def test_a_chain_that_is_used_does_not_lose_its_beginning(file: Path) -> None:
    with closing(Store(file, 2**20, 30)) as store:
        previous = add(store, "c0")
        for i in range(1, 60):
            age(file, 1)
            add(store, f"a{i}", "x" * 20_000)
            previous = add(store, f"c{i}", previous=previous)
        assert not has(store, "a1")
        earlier = store.read(store.earlier, "", previous, None, *ALL)
        assert texts(earlier.items)[0] == "c0 asks text" and len(earlier.items) == 120


def test_the_key_with_the_most_gives_first(file: Path) -> None:
    with closing(Store(file, 2**20, 30)) as store:
        add(store, "small", owner="few")
        age(file, 10)
        for i in range(60):
            add(store, f"a{i}", "x" * 20_000, owner="many")
        assert has(store, "small", "few") and not has(store, "a0", "many") and has(store, "a59", "many")


def test_an_answer_that_is_larger_than_the_store(file: Path) -> None:
    with closing(Store(file, 2**20, 30)) as store:
        add(store, "small")
        with pytest.raises(StoreError, match="it needs more than 1048576 bytes"):
            add(store, "large", "x" * 2**20)
        assert has(store, "small") and not has(store, "large")


def test_room_is_made_of_many_small_answers(file: Path) -> None:
    """The sizes of all are summed once for all that go: a store may have a million answers."""
    with closing(Store(file, 2**20, 30)) as store:
        for i in range(200):
            add(store, f"small{i}", "x" * 1000)
        statements: list[str] = []
        store.writer.set_trace_callback(statements.append)
        add(store, "large", "x" * 2**18)
        assert has(store, "large") and not has(store, "small0")
    assert sum("GROUP BY" in statement for statement in statements) == 1
    assert sum("DELETE FROM threads" in statement for statement in statements) > 10


def test_a_limit_may_be_lowered(file: Path) -> None:
    """A conversation that is larger than the new limit goes, as it would have gone with it."""
    with closing(Store(file, BIG, 30)) as store:
        add(store, "small")
        add(store, "large", "x" * 2**21)
    with closing(Store(file, 2**20, 30)) as store:
        assert not has(store, "large")
        add(store, "next")
        assert has(store, "next")


def test_a_chain_in_a_circle_ends(store: Store) -> None:
    """Only a forged file has one."""
    add(store, "a")
    add(store, "b", previous="resp_a")
    add(store, "a", previous="resp_b")
    assert len(store.read(store.earlier, "", "resp_a", None, *ALL).items) == 4


def test_a_file_that_is_gone_takes_nothing(store: Store, file: Path) -> None:
    """An answer that nobody could find is not said to be stored."""
    add(store, "a")
    aside = file.rename(file.with_suffix(".aside"))
    with pytest.raises(StoreError, match="deleted or replaced"):
        add(store, "b")
    aside.rename(file)
    add(store, "c")
    assert has(store, "a") and not has(store, "b") and has(store, "c")


def test_what_is_too_old_is_gone(file: Path) -> None:
    with closing(Store(file, BIG, 30)) as store:
        add(store, "old")
        conversation = write(store, store.add_conversation, "", {}, [{"role": "user", "content": "a"}])["id"]
        age(file, 29)
        assert has(store, "old")
        age(file, 2)
        assert not has(store, "old")  # also before anything is written
        with pytest.raises(MissingError):
            store.read(store.conversation, "", conversation)
        add(store, "new")
    with closing(Store(file, BIG, 30)), closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT count(*) FROM items").fetchone() == (2,)


def test_a_clock_that_was_ahead(file: Path) -> None:
    """What was stored then is neither kept until that time, nor the last to make room."""
    with closing(Store(file, BIG, 30)) as store:
        add(store, "ahead")
        age(file, -4000)
    with closing(Store(file, BIG, 30)) as store:
        assert has(store, "ahead")
        age(file, 29)
        assert has(store, "ahead")
        age(file, 2)
        assert not has(store, "ahead")


def test_a_clock_that_is_set_ahead_deletes_nothing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store(file, BIG, 30)) as store:
        add(store, "old")
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 4000 * 86_400)
        monkeypatch.setattr(answers, "_AGE_S", 0)
        add(store, "ahead")
        assert not has(store, "old")  # by this clock
        monkeypatch.undo()
        assert has(store, "old") and has(store, "ahead")


@pytest.mark.parametrize("what", ["answer", "conversation", "item"])
def test_what_is_deleted_is_nowhere_in_the_file(file: Path, what: str) -> None:
    secret = "the combination is 7319"
    with closing(Store(file, BIG, 30)) as store:
        add(store, "before")
        item = {"type": "message", "id": "msg_1", "role": "user", "content": secret}
        conversation = write(store, store.add_conversation, "", {}, [item])["id"]
        if what == "answer":
            write(store, store.delete_conversation, "", conversation)
            add(store, "secret", secret)
            write(store, store.delete_answer, "", "resp_secret")
        elif what == "conversation":
            write(store, store.delete_conversation, "", conversation)
        else:
            write(store, store.delete_item, "", conversation, "msg_1")
        write(store, lambda: None)  # after what follows the deletion
        for path in file.parent.iterdir():
            assert secret.encode() not in path.read_bytes(), path.name
        assert has(store, "before")


def test_the_file_shrinks(file: Path) -> None:
    with closing(Store(file, BIG, 30)) as store:
        conversation = write(store, store.add_conversation, "", {}, [])["id"]
        for _ in range(10):
            write(store, store.add_items, "", conversation, [{"role": "user", "content": "x" * 100_000}])
        write(store, store.delete_conversation, "", conversation)
        write(store, lambda: None)
        assert file.stat().st_size < 100_000


# ---- what happens meanwhile
def test_a_deleted_conversation_gets_no_answer(store: Store) -> None:
    conversation = write(store, store.add_conversation, "", {}, [])["id"]
    write(store, store.delete_conversation, "", conversation)
    with pytest.raises(MissingError):
        add(store, "late", conversation=conversation, is_listed=True)
    first = add(store, "first")
    write(store, store.delete_answer, "", first)
    with pytest.raises(MissingError):
        add(store, "late", previous=first)
    assert not has(store, "late")


def test_an_answer_that_failed_is_not_in_the_conversation(store: Store) -> None:
    conversation = write(store, store.add_conversation, "", {}, [])["id"]
    add(store, "failed", conversation=conversation, after=0)
    assert has(store, "failed")
    assert store.read(store.items, "", conversation, Page()) == ([], False)


def test_answers_of_a_conversation_are_continued(store: Store) -> None:
    """An answer's past is what the conversation had before it, not what came later."""
    conversation = write(store, store.add_conversation, "", {}, [{"role": "user", "content": "0"}])["id"]
    after = store.read(store.earlier, "", None, conversation, *ALL).after
    answer = add(store, "one", conversation=conversation, after=after, is_listed=True)
    write(store, store.add_items, "", conversation, [{"role": "user", "content": "later"}])
    earlier = store.read(store.earlier, "", answer, None, *ALL)
    assert texts(earlier.items) == ["0", "one asks text", "one answers text"]
    add(store, "two", previous=answer)
    items, _ = store.read(store.input_items, "", "resp_two", Page(is_ascending=True))
    assert texts(items) == ["0", "one asks text", "one answers text", "two asks text"]


def test_a_page_is_no_larger_than_memory_allows(store: Store) -> None:
    sizes = [10, 5000, 5000, 20_000, 10]
    conversation = write(
        store, store.add_conversation, "", {}, [{"role": "user", "content": "x" * n} for n in sizes]
    )["id"]
    pages, after = [], None
    has_more = True
    while has_more:
        items, has_more = store.read(store.items, "", conversation, Page(True, after, 3, 12_000))
        pages.append([len(text) for text in texts(items)])
        after = items[-1]["id"]
    assert pages == [[10, 5000, 5000], [20_000], [10]]


def test_an_answer_is_replaced_by_that_of_the_next_process(store: Store) -> None:
    """The first one died between its transaction and its answer: the second one neither reads nor leaves its items."""
    conversation = write(store, store.add_conversation, "", {}, [{"role": "user", "content": "0"}])["id"]
    for text in ("first", "second"):
        earlier = store.read(store.earlier, "", None, conversation, 10_000, BIG, "resp_one")
        assert texts(earlier.items) == ["0"]
        add(store, "one", text, conversation=conversation, after=earlier.after, is_listed=True)
    items, _ = store.read(store.items, "", conversation, Page(is_ascending=True))
    assert texts(items) == ["0", "one asks second", "one answers second"]
    for text in ("first", "second"):
        add(store, "two", text)
    items, _ = store.read(store.input_items, "", "resp_two", Page())
    assert texts(items) == ["two asks second"]


def test_a_wait_that_is_cancelled_stores_nothing(store: Store, file: Path) -> None:
    async def run() -> None:
        with closing(sqlite3.connect(file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            task = asyncio.ensure_future(store.write(store.add_answer, "", answer_of("a")))
            await turn()  # it is given to the thread that writes
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            other.execute("ROLLBACK")
        await store.write(lambda: None)

    asyncio.run(run())
    assert not has(store, "a")


def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="shutting down"):
        add(store, "a")
    with pytest.raises(StoreError, match="shutting down"):
        has(store, "a")


# ---- processes
WRITER = """
import asyncio
from pathlib import Path
from llamapipe.server.store.answers import NewAnswer, Store

async def main(file, name, n):
    store = Store(Path(file), 2**30, 30)
    previous = None
    for i in range(int(n)):
        given = [{"role": "user", "content": f"{name} {i} {part}"} for part in range(3)]
        output = [{"type": "message", "role": "assistant", "content": f"{name} {i} {part}"} for part in range(3, 6)]
        answer = NewAnswer(f"resp_{name}_{i}", {"id": i}, given, output, previous)
        await store.write(store.add_answer, "", answer)
        previous = answer.id
        say(i)
    store.close()

asyncio.run(main(*sys.argv[1:]))
"""


def check_chain(store: Store, name: str, n_told: int) -> int:
    """Every answer that was told is there, whole and once; at most one more. Returns how many there are."""
    n = n_told
    while has(store, f"{name}_{n}"):
        n += 1
    assert n <= n_told + 1
    if n:
        earlier = store.read(store.earlier, "", f"resp_{name}_{n - 1}", None, *ALL)
        assert texts(earlier.items) == [f"{name} {i} {part}" for i in range(n) for part in range(6)]
    return n


@pytest.mark.parametrize("n_told", [1, 2, 40])
def test_a_kill_leaves_whole_answers(file: Path, n_told: int) -> None:
    with Script(WRITER, file, "a", 100_000) as program:
        for i in range(n_told):
            program.expect(str(i))
        program.send(signal.SIGKILL)
        program.end(-signal.SIGKILL)
    with closing(Store(file, BIG, 30)) as store, closing(sqlite3.connect(file)) as connection:
        n = 0
        while has(store, f"a_{n}"):
            n += 1
        assert n >= n_told
        check_chain(store, "a", n)
        assert connection.execute("SELECT count(*) FROM items").fetchone() == (6 * n,)
        assert connection.execute("SELECT count(*) FROM answers").fetchone() == (n,)
        add(store, "next", previous=f"resp_a_{n - 1}")


def test_processes_share_a_file_from_its_beginning(file: Path) -> None:
    """Four make it at the same time."""
    n = 25
    programs = [
        subprocess.Popen(
            command(WRITER, file, name, n), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        for name in "abcd"
    ]
    for program in programs:
        _, errors = program.communicate(timeout=120)
        assert program.returncode == 0, errors.decode()
    with closing(Store(file, BIG, 30)) as store:
        assert [check_chain(store, name, n) for name in "abcd"] == [n] * 4


FULL = """
import asyncio, resource, signal
from pathlib import Path
from llamapipe.server.store.answers import NewAnswer, Store, StoreError

def answer(i):
    return NewAnswer(f"resp_{i}", {"id": i}, [{"role": "user", "content": "x" * 50_000}], [])

async def main(file):
    store = Store(Path(file), 2**30, 30)
    await store.write(store.add_answer, "", answer(0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    n = 1
    try:
        while n < 100:
            await store.write(store.add_answer, "", answer(n))
            n += 1
    except StoreError as e:
        say(n, e)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    await store.write(store.add_answer, "", answer(1000))
    found = [store.read(store.answer, "", f"resp_{i}")["id"] for i in (*range(n), 1000)]
    say(found == [*range(n), 1000])
    store.close()

asyncio.run(main(sys.argv[1]))
"""


def test_a_disk_that_is_full(file: Path) -> None:
    """No file of the process may grow: what was there stays, and when there is room again, it is used."""
    done = subprocess.run(
        command(FULL, file), capture_output=True, text=True, env=environment(), timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told, whole = done.stdout.splitlines()
    assert 1 <= int(told.split()[0]) < 100 and whole == "True"
