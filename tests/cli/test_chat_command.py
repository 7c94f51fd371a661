"""``llamapipe chat``: at a terminal, with Ctrl-C, and with lines from a pipe."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.run_script import heed_ctrl_c

import llamapipe as lp
from llamapipe.cli._terminal import Terminal, WordWrap, width

COMMAND = [sys.executable, "-m", "llamapipe", "chat", "--temperature", "0"]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(lp.__file__).parent.parent),
    "TERM": "xterm-256color",
    "PYTHONWARNINGS": "error",
}
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Talk:
    """A conversation in a pseudo terminal."""

    def __init__(self, columns: int, home: Path, *options: str) -> None:
        master, slave = pty.openpty()
        os.set_blocking(master, True)
        variables = {**ENVIRONMENT, "COLUMNS": str(columns), "XDG_STATE_HOME": str(home)}
        self.child = subprocess.Popen(
            [*COMMAND, *options],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=variables,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,  # noqa: PLW1509
        )
        os.close(slave)
        self.master = master
        self.text = ""
        self.asks_for_pastes = False  # the terminal is asked to mark what is pasted
        self._at = 0

    def until(self, wanted: str, interrupts: bool = False) -> None:
        """Reads until a text appears after what was asked for before.

        ``interrupts``: presses Ctrl-C first, and again if nothing happens: Python does not see one that comes just
        before it waits for a line.
        """
        end = time.monotonic() + 60
        if interrupts:
            self.child.send_signal(signal.SIGINT)
        while (place := self.text.find(wanted, self._at)) < 0:
            left_s = max(end - time.monotonic(), 0)
            ready, _, _ = select.select([self.master], [], [], min(left_s, 5) if interrupts else left_s)
            if interrupts and not ready and left_s > 0:
                self.child.send_signal(signal.SIGINT)
                continue
            assert ready, self.text
            written = os.read(self.master, 4096).decode(errors="replace")
            self.asks_for_pastes |= "\x1b[?2004h" in written
            self.text += CONTROL.sub("", written)
        self._at = place + len(wanted)

    def say(self, line: str) -> None:
        os.write(self.master, line.encode())

    def close(self) -> int:
        """Press Ctrl-D, which is the end only where a line is being read: wait for the prompt before."""
        self.say("\x04")
        status = self.child.wait(60)
        os.close(self.master)
        return status


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Talk]]:
    """Start conversations by width and options; those that a failed test leaves are ended."""
    talks: list[Talk] = []

    def start(columns: int, *options: str) -> Talk:
        talks.append(Talk(columns, tmp_path, *options))
        return talks[-1]

    yield start
    for talk in talks:
        if talk.child.poll() is None:
            talk.child.kill()
            talk.child.wait()


@pytest.mark.parametrize("columns", [60, 120])
def test_a_conversation_fits_the_terminal(start: Callable[..., Talk], columns: int, tmp_path: Path) -> None:
    talk = start(columns)
    talk.until("> ")
    talk.say("Tell me a story about a fox.\n")
    talk.until("tokens/s")
    talk.until("> ")
    talk.say("/system Be brief.\n/nothing\n/help\n")
    talk.until("no command /nothing: /help lists them")
    talk.until("Ctrl-C stops")
    talk.until("> ")
    talk.say(f"/save {tmp_path}/talk.json\n")
    talk.until("1 message saved to")
    talk.until("> ")
    assert talk.close() == 0
    long = [line for line in talk.text.split("\n") if width(line) >= columns and "talk.json" not in line]
    assert not long
    assert json.loads((tmp_path / "talk.json").read_text()) == [{"role": "system", "content": "Be brief."}]
    assert "Tell me a story" in (tmp_path / "llamapipe" / "chat_history").read_text()


def test_ctrl_c_stops_the_answer_and_not_the_program(start: Callable[..., Talk]) -> None:
    talk = start(80, "--ignore-eos", "--n-ctx", "1024", "--max-tokens", "900")
    talk.until("> ")
    talk.say("Tell me a story about a fox.\n")
    talk.until("Once")
    talk.child.send_signal(signal.SIGINT)
    talk.until("stopped")
    talk.until("> ")
    talk.say("/clear\n")
    talk.until("Conversation cleared.")
    talk.until("> ")
    talk.until("Ctrl-D or /bye ends", interrupts=True)
    talk.until("> ")
    assert talk.close() == 0


def test_what_ends_an_answer_is_said(start: Callable[..., Talk]) -> None:
    for options, said in (
        (("--max-tokens", "5"), "ended by the limit of 5 tokens (--max-tokens)"),
        (("--n-ctx", "64"), "ended by the context of 64 tokens: it is full"),
    ):
        talk = start(150, "--ignore-eos", *options)
        talk.until("> ")
        talk.say("Tell me a story about a fox.\n")
        talk.until(said)
        talk.until("> ")
        assert talk.close() == 0


def test_lines_of_a_pipe_are_messages(tmp_path: Path) -> None:
    lines = f"Hello\n\n/save {tmp_path}/a.json\n/exit\nnever read\n"
    done = subprocess.run(
        COMMAND, input=lines, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    messages = json.loads((tmp_path / "a.json").read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[1]["content"] in done.stdout


def test_pasted_lines_are_one_message(start: Callable[..., Talk], tmp_path: Path) -> None:
    if "libedit" in (pytest.importorskip("readline").__doc__ or ""):
        pytest.skip("libedit, in place of GNU readline, does not tell what is pasted")
    talk = start(80, "--max-tokens", "4")
    talk.until("> ")
    assert talk.asks_for_pastes
    talk.say("\x1b[200~first line\nsecond line\x1b[201~\n")
    talk.until("tokens/s")
    talk.until("> ")
    talk.say(f"/save {tmp_path}/talk.json\n")
    talk.until("2 messages saved to")
    talk.until("> ")
    assert talk.close() == 0
    assert json.loads((tmp_path / "talk.json").read_text())[0]["content"] == "first line\nsecond line"


def test_a_command_within_quotes_is_a_message(start: Callable[..., Talk], tmp_path: Path) -> None:
    talk = start(80, "--max-tokens", "4")
    talk.until("> ")
    talk.say('"""/exit\n')
    talk.until(". ")
    talk.say('twice"""\n')
    talk.until("tokens/s")
    talk.until("> ")
    talk.say(f"/save {tmp_path}/talk.json\n")
    talk.until("2 messages saved to")
    talk.until("> ")
    assert talk.close() == 0
    assert json.loads((tmp_path / "talk.json").read_text())[0]["content"] == "/exit\ntwice"


def test_a_terminal_gets_joiners_and_no_controls() -> None:
    """Persian words, Indic letters and emoji of several parts need characters that show nothing themselves."""

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal(Screen(), {"TERM": "xterm"})
    for text, columns in (
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", 7),
        ("\u0915\u094d\u200d\u0937", 2),
        ("\U0001f469\u200d\U0001f4bb", 4),  # one picture, where a terminal joins them
        ("\u2764\ufe0f", 1),
        ("co\u00adop", 4),
    ):
        assert terminal.text(text) == text
        assert width(text) == columns
    for character in "\x1b\x07\r\x7f\x9b\u202e\u2066\U000e0041":
        assert terminal.text(f"a{character}b") == "a\N{REPLACEMENT CHARACTER}b"


def test_words_are_wrapped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen:
        encoding = "utf-8"
        text = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

    monkeypatch.setenv("COLUMNS", "12")
    screen = Screen()
    wrap = WordWrap(Terminal(screen, {"TERM": "xterm"}))  # type: ignore[arg-type]
    for piece in ("one tw", "o three", " four\nfi", "ve ", "x" * 30, " 漢字漢字漢字"):
        wrap.write(piece)
    wrap.end()
    lines = screen.text.splitlines()
    assert all(width(line) < 12 for line in lines)
    assert "".join(screen.text.split()) == "onetwothreefourfive" + "x" * 30 + "漢字漢字漢字"
    assert [line.rstrip() for line in lines[:3]] == ["one two", "three four", "five"]
