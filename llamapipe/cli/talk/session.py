"""A conversation at the terminal, or with lines of a pipe."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import llamapipe as lp
from llamapipe.cli.options import UsageError
from llamapipe.cli.talk.conversation import Conversation, Message
from llamapipe.cli.talk.reader import piped_line, read_entry, typed_line
from llamapipe.cli.terminal import Terminal, WordWrap

_HELP = """\
/clear         clear the conversation; also /reset
/regen         answer the last message again
/system TEXT   set the system message and start again
/system        remove it
/save FILE     write the messages as JSON
/load FILE     continue from the messages in a file
/help          show this; also /?
/bye           quit, as Ctrl-D does; also /exit and /quit
A line that ends with \\ continues on the next one.
\"""            begins and ends a message of several lines
Ctrl-C stops an answer."""
_COMMANDS = (
    "/clear",
    "/reset",
    "/regen",
    "/system",
    "/save",
    "/load",
    "/help",
    "/?",
    "/bye",
    "/exit",
    "/quit",
)
_ELSEWHERE = {  # commands of Ollama and llama-cli
    "/set": "options of the command set parameters (llamapipe chat --help), /system TEXT the system message",
    "/read": "llamapipe chat - < FILE reads a message from a file",
}


class Session:
    """Reads the messages of a conversation, answers them, and runs commands such as ``/save``."""

    def __init__(
        self,
        engine: lp.Engine,
        params: lp.SamplingParams,
        conversation: Conversation,
        no_thinking: bool,
    ) -> None:
        self._engine = engine
        self._params = params
        self._conversation = conversation
        self._args: dict[str, Any] = {"enable_thinking": False} if no_thinking else {}
        self._terminal = Terminal(sys.stdout)
        self._notes = Terminal(sys.stderr)
        self._is_piped = False

    def __repr__(self) -> str:
        return f"<Session of {self._conversation!r}>"

    def talk(self) -> None:
        """Reads messages from the terminal until the end of input."""
        terminal = self._terminal
        terminal.line(
            terminal.style(f"{self._engine.model.path.stem}: /help lists commands, Ctrl-D ends", "dim")
        )
        while True:
            try:
                entry = read_entry(typed_line)
            except KeyboardInterrupt:
                terminal.line()
                terminal.line(terminal.style("Ctrl-D or /bye ends", "dim"))
                continue
            except EOFError:
                terminal.line()
                return
            except UsageError as error:  # not UTF-8
                self._note(str(error), "red")
                continue
            if entry.is_command:
                if not self._command(entry.text):
                    return
            elif entry.text.strip():
                self._answer_here(entry.text)

    def read_lines(self) -> None:
        """Answers the messages of standard input. Raises what the first failure raises, also that of a command."""
        self._is_piped = True
        while True:
            try:
                entry = read_entry(piped_line)
            except EOFError:
                return
            if entry.is_command:
                if not self._command(entry.text):
                    return
            elif entry.text.strip():
                self.answer(entry.text)

    def _answer_here(self, text: str) -> None:
        """Answers a message, and shows what went wrong. Ctrl-C stops the answer; what was written stays."""
        began = time.perf_counter()
        terminal, facts = self._terminal, _Facts()
        try:
            self.answer(text, facts)
        except KeyboardInterrupt:
            facts.note = "stopped"
        except lp.errors.InvalidRequestError as error:
            self._note(str(error), "red")
            return
        if terminal.redraws:
            shown = facts.shown(time.perf_counter() - began)
            _line(terminal, f" {terminal.symbol('·')} ".join(shown), "dim")

    def answer(self, text: str, facts: _Facts | None = None) -> None:
        """Streams the answer to a message. Raises as ``Engine.stream_chat``, and KeyboardInterrupt."""
        terminal, conversation = self._terminal, self._conversation
        facts = facts or _Facts()
        wrap = WordWrap(terminal)
        content: list[str] = []
        conversation.add("user", text)
        is_cut = False
        began = time.perf_counter()
        try:
            self._make_room()
            stream = self._engine.stream_chat(conversation.visible(), self._params, template_args=self._args)
            with closing(stream):
                for delta in stream:
                    if facts.first_s is None:
                        facts.first_s = time.perf_counter() - began
                    facts.n_tokens += len(delta.token_ids)
                    if delta.reasoning:
                        wrap.write(terminal.text(delta.reasoning), "dim")
                    if delta.content:
                        content.append(delta.content)
                        wrap.write(terminal.text(delta.content))
                    is_cut = delta.finish_reason == "length"
        except lp.errors.InvalidRequestError:
            conversation.take_back()
            raise
        except KeyboardInterrupt:
            wrap.end()
            conversation.add("assistant", "".join(content))
            raise
        wrap.end()
        conversation.add("assistant", "".join(content))
        if is_cut:
            self._say_why(facts)

    def _say_why(self, facts: _Facts) -> None:
        """Notes what ended an answer early: for the line below it, or on stderr."""
        n = self._params.max_tokens
        if facts.n_tokens == n:
            facts.note = f"ended by the limit of {n} tokens (--max-tokens)"
            return
        facts.note = f"ended by the context of {self._engine.n_ctx} tokens: it is full (-c N sets it)"
        if not self._terminal.redraws:
            self._note(f"the answer was {facts.note}", "dim")

    def _make_room(self) -> None:
        """Hides the oldest turns where the context is full. Raises InvalidRequestError if that does not help."""
        n_ctx = self._engine.n_ctx
        n_hidden, n_tokens = self._conversation.fit(self._count, n_ctx, self._params.max_tokens)
        if n_tokens >= n_ctx:
            raise lp.errors.InvalidRequestError(
                f"the message has {n_tokens} tokens, with the template; n_ctx is {n_ctx} and one must stay free: "
                "shorten it, or start with a larger context (-c N)"
            )
        if n_hidden:
            turns = "oldest turn was" if n_hidden == 1 else f"{n_hidden} oldest turns were"
            self._note(f"the {turns} dropped: the context has {n_ctx} tokens (-c N sets it)", "dim")

    def _count(self, messages: list[Message]) -> int:
        return len(self._engine.model.tokenize_chat(messages, **self._args))

    def _command(self, text: str) -> bool:
        """Runs a command. False if it ends the conversation."""
        conversation = self._conversation
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name in ("/bye", "/exit", "/quit"):
            return False
        if name in ("/clear", "/reset"):
            conversation.clear()
            self._say("Conversation cleared.")
        elif name == "/system":
            conversation.system = rest or None
            conversation.clear()
            self._say(f"Conversation cleared; the system message is {'set' if rest else 'removed'}.")
        elif name in ("/save", "/load"):
            self._file(name, rest)
        elif name == "/regen":
            self._regenerate()
        elif name in ("/help", "/?"):
            self._terminal.line(_HELP)
        else:
            self._failed(f"there is no command {name}: {_hint(name)}", "yellow")
        return True

    def _regenerate(self) -> None:
        """Answers the last message again."""
        text = self._conversation.take_back_turn()
        if text is None:
            self._failed("/regen: there is no answer yet", "yellow")
        elif self._is_piped:
            self.answer(text)
        else:
            self._answer_here(text)

    def _file(self, command: str, name: str) -> None:
        """Saves the conversation to a file, or loads it."""
        if not name:
            self._failed(f"{command} needs the name of a file", "yellow")
            return
        conversation, path = self._conversation, Path(name)
        try:
            path = path.expanduser()
            if command == "/save":
                conversation.save(path)
            else:
                conversation.load(path)
        except OSError as error:
            self._failed(f"{path}: {error.strerror}", "red")
        except (ValueError, RuntimeError) as error:  # also of the name of a user who is not there
            self._failed(str(error), "red")
        else:
            n, done = len(conversation), "saved to" if command == "/save" else "loaded from"
            self._say(f"{n} message{'s' * (n != 1)} {done} {path}")

    def _say(self, text: str) -> None:
        """Shows what a command did."""
        _line(self._terminal, text, "dim")

    def _failed(self, text: str, style: str) -> None:
        """Shows why a command failed. Raises UsageError if messages come from a pipe."""
        if self._is_piped:
            raise UsageError(text)
        self._note(text, style)

    def _note(self, text: str, style: str) -> None:
        """Shows what is no answer, on stderr."""
        _line(self._notes, text, style)


def _line(terminal: Terminal, text: str, style: str) -> None:
    """Writes a line, in several where the terminal is narrow."""
    wrap = WordWrap(terminal)
    wrap.write(text, style)
    wrap.end()


def _hint(name: str) -> str:
    """What to type instead of a command that does not exist."""
    if (elsewhere := _ELSEWHERE.get(name)) is not None:
        return elsewhere
    if "/" in name[1:]:
        return 'to send a message that begins with a slash, write """ before and after it'
    near = get_close_matches(name, _COMMANDS, n=1)
    return f"did you mean {near[0]}?" if near else "/help lists them"


@dataclass
class _Facts:
    """What is shown after an answer."""

    n_tokens: int = 0
    first_s: float | None = None
    note: str = ""

    def shown(self, seconds: float) -> list[str]:
        """The parts of the line."""
        facts = [f"{self.n_tokens} tokens", f"{self.n_tokens / seconds:.0f} tokens/s"]
        if self.first_s is not None:
            facts.append(f"first after {1e3 * self.first_s:.0f} ms")
        return [*facts, self.note] if self.note else facts
