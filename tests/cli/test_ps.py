"""``llamapipe ps``, ``stop`` and ``batch --follow`` ask a server: addresses and keys that cannot work are named."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from llamapipe.cli import main

NOWHERE = ["ps", "--url", "http://127.0.0.1:9"]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8080",
        "http://localhost:x",
        "http://local host:8080",
        "http://[::1",
        "http://a..b:80",
        "http://",
    ],
)
def test_an_address_that_is_none(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", "--url", url]) == 2
    assert f"--url is {url!r}; write http://HOST:PORT" in capsys.readouterr().err


def test_the_end_of_a_line_is_no_part_of_a_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server strips its keys, too."""
    monkeypatch.setenv("LLAMAPIPE_API_KEY", "secret\n")
    assert main(NOWHERE) == 1
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["\N{CYRILLIC SMALL LETTER A}", "\xe4", "a\nb"])
def test_a_key_that_no_server_can_have(
    key: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAPIPE_API_KEY", key)
    assert main(NOWHERE) == 2
    assert "the variable LLAMAPIPE_API_KEY must hold a key in printable ASCII" in capsys.readouterr().err


def test_a_refusal_without_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Another program's 401 may have no message."""
    body = b'{"error": {"message": null}}'
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:

        def refuse() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.0 401 No\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

        refused = pool.submit(refuse)
        assert main(["ps", "--url", f"http://127.0.0.1:{other.getsockname()[1]}"]) == 1
        refused.result()
    assert ": 401 No; put the key into the variable LLAMAPIPE_API_KEY\n" in capsys.readouterr().err


def test_another_program_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as pool:

        def greet() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        greeted = pool.submit(greet)
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        assert main(["ps", "--url", url]) == 1
        greeted.result()
    assert f"{url} does not answer as an HTTP server does: SSH-2.0-OpenSSH\n" in capsys.readouterr().err
