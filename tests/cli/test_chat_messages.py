"""``llamapipe chat`` without a terminal: one message, lines of a pipe, files, and a context that is full."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.gguf_models import tiny_model
from support.media_models import idefics3_projector, model_with_tile_tokens, png

import llamapipe as lp
from llamapipe.cli.chat import Conversation, Message

ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(lp.__file__).parent.parent),
    "PYTHONWARNINGS": "error",
}
QUESTION = "What does a cow say?"


def chat(*options: str | Path, text: str | bytes = "", status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "llamapipe", "chat", "--temperature", "0", *map(str, options)],
        input=text if isinstance(text, bytes) else text.encode(),
        capture_output=True,
        timeout=120,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == status, done.stderr.decode()
    assert b"Traceback" not in done.stderr
    return subprocess.CompletedProcess(done.args, status, done.stdout.decode(), done.stderr.decode())


def saved(path: Path) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in json.loads(path.read_text())]


def test_a_message_gets_one_answer(demo: lp.Model) -> None:
    with lp.Engine(demo, n_seq_max=1) as engine:
        answer = engine.chat(QUESTION, lp.SamplingParams(temperature=0, max_tokens=None)).content
    for done in (chat(QUESTION, text="not read"), chat("-", text=f"{QUESTION}\n")):
        assert (done.stdout, done.stderr) == (answer.removesuffix("\n") + "\n", "")
    assert "empty" in chat("", status=2).stderr
    assert "unrecognized arguments: two" in chat("one", "two", status=2).stderr


def test_a_message_that_fails_is_a_failure() -> None:
    done = chat("--n-ctx", "64", "word " * 200, status=1)
    assert done.stdout == ""
    assert "n_ctx is 64" in done.stderr and "(-c N)" in done.stderr


def test_lines_in_quotes_are_one_message(tmp_path: Path) -> None:
    lines = f'"""one\ntwo\n"""\n"""three"""\nfour\\\nfive\n/save {tmp_path}/a.json\n"""six\nseven'
    chat("--max-tokens", "2", text=lines)
    users = [content for role, content in saved(tmp_path / "a.json") if role == "user"]
    assert users == ["one\ntwo", "three", "four\nfive"]


def test_the_oldest_turns_leave_a_full_context(tmp_path: Path) -> None:
    lines = "".join(f"{QUESTION} {n}\n" for n in range(12)) + f"/save {tmp_path}/a.json\n"
    done = chat("--n-ctx", "64", "--max-tokens", "8", "--system", "Be brief.", text=lines)
    dropped = [line for line in done.stderr.splitlines() if "dropped: the context has 64 tokens" in line]
    assert dropped and dropped == done.stderr.splitlines()
    messages = saved(tmp_path / "a.json")  # all of them
    assert messages[0] == ("system", "Be brief.") and len(messages) == 25
    assert all(content for _, content in messages)


def test_a_message_over_the_context_drops_nothing(tmp_path: Path) -> None:
    done = chat("--n-ctx", "64", text=f"{QUESTION}\n{'word ' * 200}\n", status=1)
    assert done.stdout
    assert "dropped" not in done.stderr and "n_ctx is 64" in done.stderr


def test_turns_are_hidden_to_half_of_the_context_or_not_at_all() -> None:
    def n_tokens(messages: list[Message]) -> int:
        return sum(len(message["content"]) for message in messages)

    conversation = Conversation("s" * 10)
    for _ in range(4):
        conversation.add("user", "u" * 10)
        conversation.add("assistant", "a" * 10)
    conversation.add("user", "u" * 10)
    assert conversation.fit(n_tokens, 110, 10) == (0, 100)
    assert conversation.fit(n_tokens, 109, 10) == (3, 40)
    conversation.add("user", "u" * 200)
    assert conversation.fit(n_tokens, 109, 10) == (0, 210)
    conversation.take_back()
    assert n_tokens(conversation.visible()) == 40 and len(conversation) == 10


def test_bytes_that_are_not_utf_8() -> None:
    assert "stdin is not UTF-8 text" in chat(text=b"\xff\n", status=2).stderr


def test_a_conversation_goes_on_from_a_file(tmp_path: Path) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    chat("--system", "Be brief.", text=f"{QUESTION}\n/save {first}\n")
    assert len(saved(first)) == 3
    for options, lines in (((), f"/load {first}\n"), (("--load", first), "")):
        done = chat(*options, text=f"{lines}And a dog?\n/save {second}\n")
        assert "5 messages saved to" in done.stdout
        assert saved(second)[:3] == saved(first)
    assert "cleared; the system message is removed" in chat("--load", first, text="/system\n").stdout
    assert "do not go together" in chat("--load", first, "--system", "x", status=2).stderr
    nested, more = "[" * 100_000, '[{"role": "user", "content": "x", "name": "y"}]'
    for wrong in (
        "{",
        "{}",
        '["a"]',
        '[{"role": "user"}]',
        '[{"role": "tool", "content": "x"}]',
        nested,
        more,
    ):
        second.write_text(wrong)
        assert str(second) in chat("--load", second, status=2).stderr
        assert str(second) in chat(text=f"/load {second}\n", status=2).stderr


@pytest.mark.parametrize(
    "command", ["/load", "/save ~nobody-here/x.json", "/load nowhere.json", "/etc/fstab: what?"]
)
def test_a_command_of_a_pipe_that_fails_ends_it(command: str) -> None:
    done = chat(text=f"{command}\n{QUESTION}\n", status=2)
    assert done.stdout == ""
    assert done.stderr.startswith("usage: ")


def test_a_model_that_cannot_chat_says_so_at_the_start(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny.gguf")
    assert (
        "has no chat template; give one with --chat-template FILE" in chat("-m", model, "a", status=1).stderr
    )
    (tmp_path / "bad.j").write_text("{% for")
    done = chat("--chat-template", tmp_path / "bad.j", "a", status=2)
    assert "--chat-template: the chat template cannot be compiled" in done.stderr
    assert "there is no file chatml" in chat("--chat-template", "chatml", "a", status=2).stderr


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/reset", "Conversation cleared."),
        ("/clear", "Conversation cleared."),
        ("/help", "/load FILE"),
        ("/?", "/load FILE"),
    ],
)
def test_what_commands_say(command: str, said: str) -> None:
    done = chat(text=f"{command}\n")
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize("command", ["/bye", "/exit", "/quit"])
def test_commands_that_quit(command: str) -> None:
    assert chat(text=f"{command}\n{QUESTION}\n").stdout == ""


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("/claer", "did you mean /clear?"),
        ("/set parameter seed 1", "options of the command set parameters"),
        ("/show info", "llamapipe doctor -m FILE, or -m ollama:NAME, shows"),
        ("/etc/fstab: what is it?", 'write """ before and after it'),
        ("/regen", "there is no answer yet"),
        ("/wxyz", "/help lists them"),
    ],
)
def test_commands_that_do_not_exist_get_a_hint(command: str, hint: str) -> None:
    assert hint in chat(text=f"{command}\n", status=2).stderr


def test_an_answer_is_replaced_by_another(tmp_path: Path) -> None:
    lines = f"{QUESTION}\n/regen\n/save {tmp_path}/a.json\n"
    assert "2 messages saved" in chat(text=lines).stdout
    assert saved(tmp_path / "a.json")[0] == ("user", QUESTION)


def test_the_context_that_cuts_an_answer_is_named() -> None:
    done = chat("--n-ctx", "64", "--ignore-eos", "Tell me a story about a fox.")
    assert done.stdout
    assert done.stderr == "the answer was ended by the context of 64 tokens: it is full (-c N sets it)\n"
    assert chat("--max-tokens", "4", "Tell me a story about a fox.").stderr == ""


def test_an_image_goes_with_the_next_message(tmp_path: Path) -> None:
    model = model_with_tile_tokens(tmp_path / "text.gguf")
    options = ("-m", model, "--mmproj", idefics3_projector(tmp_path / "mmproj.gguf"), "--max-tokens", "4")
    (tmp_path / "a.png").write_bytes(png(200, 120))
    lines = f"/image {tmp_path / 'a.png'}\nWhat is this?\n/regen\nWhy?\n/save {tmp_path / 'c.json'}\n"
    done = chat(*options, text=lines)
    assert "a.png goes with the next message." in done.stdout
    (_, question), *others = saved(tmp_path / "c.json")
    assert [part["type"] for part in question] == ["image", "text"]  # type: ignore[index]
    assert len(others) == 3
    assert "5 messages saved" not in chat(*options, text=f"/load {tmp_path / 'c.json'}\nAnd?\n").stderr
    assert "cannot be read" in chat(*options, text="/image nowhere.png\n", status=2).stderr
    assert "this model takes no images" in chat(text=f"/image {tmp_path / 'a.png'}\n", status=2).stderr
