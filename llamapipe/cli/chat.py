"""``llamapipe chat``: holds a conversation at the terminal.

``Session`` answers messages and runs commands such as ``/save``, ``Conversation`` holds the messages, ``read_entry``
reads them from a terminal or a pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import llamapipe as lp
from llamapipe._messages import instead_of, nearest, with_flags
from llamapipe.arguments import path_of
from llamapipe.cli._terminal import Terminal, WordWrap
from llamapipe.cli.options import (
    ENGINE,
    MODEL,
    SAMPLING,
    add_chat_template,
    add_engine_options,
    add_model,
    add_options,
    defaults_of,
    open_engine,
    open_model,
    read_options,
    template_problem,
)
from llamapipe.cli.parser import UsageError, check_text, read_stdin, stdin_is_terminal, usage_errors, utf8
from llamapipe.ollama_models import StoredModel, stored_model

USAGE = "llamapipe chat [options] [MESSAGE]"
DESCRIPTION = """\
Hold a conversation with a model, or answer one message. Without -m, use the bundled model. Needs the extra 'chat'.
If standard input is not a terminal and no message is given, each of its lines is a message, or a command such as
/clear; a backslash at the end continues a line, and \"\"\" begins and ends several. Standard input is not read if a
message is given."""
EPILOG = """\
examples:
  llamapipe chat
  llamapipe chat -m model.gguf --system "Answer in one sentence."
  llamapipe chat -m model.gguf "Why is the sky blue?"
  git diff | llamapipe chat -m model.gguf --system "Review this change." -

Commands in the conversation: /clear clears it, /regen answers again, /system TEXT sets the system message, /save FILE
writes the messages as JSON, /load FILE continues from them, /help lists the commands, /bye quits. Ctrl-C stops an
answer; Ctrl-D quits."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_model(parser)
    add_chat_arguments(parser)


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that ``chat`` and ``run`` share."""
    parser.add_argument(
        "message", nargs="?", metavar="MESSAGE", help="answer this and exit; - reads it from stdin"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="the system message (default: none, or that of Ollama's model)"
    )
    parser.add_argument(
        "--load", type=path_of, metavar="FILE", help="continue a conversation saved with /save"
    )
    add_chat_template(parser)
    parser.add_argument(
        "--no-thinking", action="store_true", help="turn off reasoning, if the template supports it"
    )
    add_options(parser, "sampling", SAMPLING, {**defaults_of(lp.SamplingParams), "max_tokens": None})
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    stored = None if args.model is None else stored_model(args.model)
    set_there = {} if stored is None else stored.sampling
    options = {"max_tokens": None, **set_there, **read_options(args, SAMPLING)}
    with usage_errors():
        params = lp.SamplingParams(**options)
    conversation = _begin_conversation(args, stored)
    message = args.message
    if message is not None:
        message = read_stdin().removesuffix("\n") if message == "-" else check_text(message)
    if message is not None and not message.strip():
        raise UsageError("the message is empty")
    if message is None and sys.stdin is None:
        raise UsageError("there is no standard input to read messages from; pass one as an argument")
    engine_options = {"n_seq_max": 1, **read_options(args, ENGINE)}
    with open_model(args.model, {"chat_template": args.chat_template, **read_options(args, MODEL)}) as model:
        if (problem := template_problem(model, args.chat_template)) is not None:
            raise lp.errors.InvalidRequestError(
                f"{problem}; give one with --chat-template FILE, or use llamapipe generate"
            )
        with open_engine(model, engine_options) as engine:
            session = Session(engine, params, conversation, args.no_thinking)
            if message is not None:
                session.answer(message)
            elif not stdin_is_terminal():
                session.read_lines()
            else:
                with line_history():
                    session.talk()
    return 0


def _begin_conversation(args: argparse.Namespace, stored: StoredModel | None) -> Conversation:
    """Return the conversation to continue. As in ``ollama run``, a new one has the system message of the Modelfile."""
    system = args.system if args.system is not None or stored is None else stored.text("system") or None
    conversation = Conversation(system)
    if args.load is not None:
        if args.system is not None:
            raise UsageError("--load and --system do not go together: the file has its own system message")
        with usage_errors("--load: "):
            conversation.load(args.load)
    return conversation


# ---- the conversation
_HELP = """\
/clear         clear the conversation; also /reset
/regen         answer the last message again
/system TEXT   set the system message and start again
/system        remove it
/image FILE    add an image to the next message
/save FILE     write the messages as JSON
/load FILE     continue from the messages in a file
/help          show this; also /?
/bye           quit, as Ctrl-D does; also /exit and /quit
A line that ends with \\ continues on the next one.
\"""            begins and ends a message of several lines
Ctrl-C stops an answer."""
_COMMANDS = sorted(set(re.findall(r"/[a-z?]+", _HELP)))


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
        self._images: list[dict[str, str]] = []  # for the next message

    def __repr__(self) -> str:
        return f"<Session of {self._conversation!r}>"

    def talk(self) -> None:
        """Read messages from the terminal until the end of input."""
        terminal = self._terminal
        terminal.line(terminal.style(f"{self._engine.model.name}: /help lists commands, Ctrl-D ends", "dim"))
        while True:
            try:
                entry = read_entry(read_typed_line)
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
            if not self._enter(entry):
                return

    def read_lines(self) -> None:
        """Answer the messages of standard input. Raises the error of the first message or command that fails."""
        self._is_piped = True
        while True:
            try:
                entry = read_entry(read_piped_line)
            except EOFError:
                return
            if not self._enter(entry):
                return

    def _enter(self, entry: Entry) -> bool:
        """Run a command, or answer a message. False if the conversation ends."""
        if entry.is_command:
            return self._command(entry.text)
        if entry.text.strip():
            self._answer_here(entry.text)
        return True

    def _answer_here(self, text: Content) -> None:
        """Answer a message, and at a terminal show any error. Ctrl-C stops the answer; text already written stays."""
        if self._is_piped:
            self.answer(text)
            return
        began = time.perf_counter()
        terminal, facts = self._terminal, _Facts()
        try:
            self.answer(text, facts)
        except KeyboardInterrupt:
            facts.note = "stopped"
        except lp.errors.InvalidRequestError as error:
            self._note(with_flags(str(error)), "red")
            return
        if terminal.redraws:
            shown = facts.parts(time.perf_counter() - began)
            _line(terminal, f" {terminal.symbol('·')} ".join(shown), "dim")

    def answer(self, text: Content, facts: _Facts | None = None) -> None:
        """Stream the answer to a message. Raises as ``Engine.stream_chat``, and KeyboardInterrupt."""
        terminal, conversation = self._terminal, self._conversation
        facts = facts or _Facts()
        wrap = WordWrap(terminal)
        content: list[str] = []
        if self._images and isinstance(text, str):
            text = [*self._images, {"type": "text", "text": text}]
            self._images = []
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
        """Report why an answer ended early, in the line below it or on stderr."""
        n = self._params.max_tokens
        if facts.n_tokens == n:
            facts.note = f"ended by the limit of {n} tokens (--max-tokens)"
            return
        facts.note = f"ended by the context of {self._engine.n_ctx} tokens: it is full (-c N sets it)"
        if not self._terminal.redraws:
            self._note(f"the answer was {facts.note}", "dim")

    def _make_room(self) -> None:
        """Hide the oldest turns if the context is full. Raises InvalidRequestError if that does not help."""
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
        return self._engine.count_chat_tokens(messages, self._args)

    def _command(self, text: str) -> bool:
        """Run a command. False if it ends the conversation."""
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
        elif name == "/image":
            self._image(rest)
        elif name in ("/save", "/load"):
            self._file(name, rest)
        elif name == "/regen":
            self._regenerate()
        elif name in ("/help", "/?"):
            self._terminal.line(_HELP)
        else:
            self._show_failure(f"there is no command {name}: {_hint(name)}", "yellow")
        return True

    def _regenerate(self) -> None:
        text = self._conversation.take_back_turn()
        if text is None:
            self._show_failure("/regen: there is no answer yet", "yellow")
        else:
            self._answer_here(text)

    def _image(self, name: str) -> None:
        from llamapipe.media.decode import Given

        projector = self._engine.model.projector
        if projector is None or not projector.sees:
            self._show_failure(
                "/image: this model takes no images; start with --mmproj FILE, if it has one", "yellow"
            )
            return
        try:
            path = Path(name).expanduser().absolute()
            projector.media(Given("image", path, "/image"))
        except (ValueError, RuntimeError, ImportError) as error:
            self._show_failure(str(error), "red")
            return
        self._images.append({"type": "image", "image": str(path)})
        self._say(f"{path.name} goes with the next message.")

    def _file(self, command: str, name: str) -> None:
        """Save the conversation to a file, or load it."""
        if not name:
            self._show_failure(f"{command} needs the name of a file", "yellow")
            return
        conversation, path = self._conversation, Path(name)
        try:
            path = path.expanduser()
            if command == "/save":
                conversation.save(path)
            else:
                conversation.load(path)
        except OSError as error:
            self._show_failure(f"{path}: {error.strerror}", "red")
        except (ValueError, RuntimeError) as error:  # also of the name of a user who is not there
            self._show_failure(str(error), "red")
        else:
            n, action = len(conversation), "saved to" if command == "/save" else "loaded from"
            self._say(f"{n} message{'s' * (n != 1)} {action} {path}")

    def _say(self, text: str) -> None:
        """Show the result of a command."""
        _line(self._terminal, text, "dim")

    def _show_failure(self, text: str, style: str) -> None:
        """Show why a command failed. Raises UsageError if messages come from a pipe."""
        if self._is_piped:
            raise UsageError(text)
        self._note(text, style)

    def _note(self, text: str, style: str) -> None:
        """Show a note that is not part of the answer, on stderr."""
        _line(self._notes, text, style)


def _line(terminal: Terminal, text: str, style: str) -> None:
    """Write a line, wrapped if the terminal is narrow."""
    wrap = WordWrap(terminal)
    wrap.write(text, style)
    wrap.end()


def _hint(name: str) -> str:
    """Return a suggestion for a command that does not exist."""
    if (advice := instead_of(name, "conversation")) is not None:
        return advice
    if "/" in name[1:]:
        return 'to send a message that begins with a slash, write """ before and after it'
    near = nearest(name, _COMMANDS)
    return f"did you mean {near}?" if near else "/help lists them"


@dataclass
class _Facts:
    """The figures that are shown after an answer."""

    n_tokens: int = 0
    first_s: float | None = None
    note: str = ""

    def parts(self, seconds: float) -> list[str]:
        """Return the parts of the line."""
        facts = [f"{self.n_tokens} tokens", f"{self.n_tokens / seconds:.0f} tokens/s"]
        if self.first_s is not None:
            facts.append(f"first after {1e3 * self.first_s:.0f} ms")
        return [*facts, self.note] if self.note else facts


# ---- its messages
Content = str | list[dict[str, str]]  # text, or parts, of which some are paths of images
Message = dict[str, Any]
_ROLES = ("system", "user", "assistant")


class Conversation:
    """All messages so far. The oldest turns are hidden from the model when the context is full; files hold them all.

    ``system``: the system message, which is never hidden. ``messages``: the others; a turn begins with a user's
    message.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []
        self._first = 0  # the first one that the model sees

    def __repr__(self) -> str:
        return f"<Conversation of {len(self)} messages>"

    def __len__(self) -> int:
        return len(self._head) + len(self.messages)

    @property
    def _head(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def add(self, role: str, content: Content) -> None:
        """Append a message."""
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Remove the last message, which could not be answered."""
        del self.messages[-1]

    def take_back_turn(self) -> Content | None:
        """Remove the last turn and return the user's message, None if there is no answer."""
        if (
            len(self.messages) < 2
            or self.messages[-1]["role"] != "assistant"
            or self.messages[-2]["role"] != "user"
        ):
            return None
        text: Content = self.messages[-2]["content"]
        del self.messages[-2:]
        self._first = min(self._first, len(self.messages))
        return text

    def clear(self) -> None:
        """Remove all messages except the system message."""
        self.messages.clear()
        self._first = 0

    def visible(self) -> list[Message]:
        """Return the messages that the model sees."""
        return [*self._head, *self.messages[self._first :]]

    def fit(
        self, n_tokens: Callable[[list[Message]], int], n_ctx: int, max_tokens: int | None
    ) -> tuple[int, int]:
        """Hide the oldest turns if ``kept_messages`` drops them. Return how many, and the prompt's number of tokens.

        If the last message alone fills the context, nothing is hidden, and the number is that of the system message and
        the last message. ``n_tokens``: counts the tokens of a prompt.
        """
        from llamapipe.chat.messages import kept_messages

        kept = list(kept_messages(self.visible(), n_tokens, n_ctx, max_tokens))
        first = len(self.messages) + len(self._head) - len(kept)
        n_hidden = sum(message["role"] == "user" for message in self.messages[self._first : first])
        self._first = first
        n = n_tokens(kept)
        return n_hidden, n if n < n_ctx else n_tokens([*self._head, self.messages[-1]])

    def save(self, path: Path) -> None:
        """Write the messages as JSON. Raises OSError."""
        messages = [*self._head, *self.messages]
        path.write_text(json.dumps(messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Replace all messages with those in a file that ``save`` wrote. Raises OSError, ValueError."""
        try:
            messages = json.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(messages, list):
            raise ValueError(f"{path} holds no list of messages, which /save writes")
        for index, entry in enumerate(messages):
            known = isinstance(entry, dict) and entry.keys() == {"role", "content"}
            role, content = (entry["role"], entry["content"]) if known else (None, None)
            if role not in _ROLES or not _is_content(role, content) or (role == "system" and index > 0):
                raise ValueError(
                    f'{path}: message {index} must be {{"role": ..., "content": "text"}} and nothing else, with the '
                    "role user or assistant; the first one may have the role system"
                )
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self.clear()
        for message in messages[has_system:]:
            self.add(message["role"], message["content"])


def _is_content(role: str | None, content: object) -> bool:
    """Return whether a message in a file may have this content: text, or in a user's message also image parts."""
    if role != "user" or not isinstance(content, list):
        return isinstance(content, str)
    kinds = (part.get("type") if isinstance(part, dict) else None for part in content)
    return bool(content) and all(
        kind in ("text", "image") and part.keys() == {"type", kind} and isinstance(part[kind], str)
        for kind, part in zip(kinds, content, strict=True)
    )


# ---- how they are read
_HISTORY_LINES = 1000
_QUOTES = '"""'


class Entry(NamedTuple):
    """A line that was entered: a message, or a command such as ``/help``."""

    text: str
    is_command: bool


def read_entry(read_line: Callable[[str], str]) -> Entry:
    """Read one entry: a line, lines continued by backslashes, or lines between triple quotes.

    ``read_line``: shows a prompt and reads a line. Its EOFError is passed on before the first line, and later ends the
    entry. Raises UsageError for bytes that are not UTF-8.
    """
    line = read_line("> ")
    is_quoted = line.startswith(_QUOTES)
    lines = [line.removeprefix(_QUOTES)]
    with suppress(EOFError):
        if is_quoted:
            while not lines[-1].rstrip().endswith(_QUOTES):
                lines.append(read_line(". "))
        else:
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1][:-1]
                lines.append(read_line(". "))
    if is_quoted:
        return Entry("\n".join(lines).rstrip().removesuffix(_QUOTES).strip("\n"), False)
    text = "\n".join(lines)
    return Entry(text, text.startswith("/") and "\n" not in text)


def read_typed_line(prompt: str) -> str:
    """Read a line typed at the terminal, or pasted lines. Raises EOFError, UsageError if they are not UTF-8."""
    try:
        line = input(prompt)
    except UnicodeDecodeError as error:
        raise UsageError(f"the line is not UTF-8 text: {error}") from None
    return utf8(line.encode(sys.stdin.encoding or "utf-8", "surrogateescape"), "the line")


def read_piped_line(_: str) -> str:
    """Read a line of standard input. Raises EOFError, UsageError if it is not UTF-8."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return utf8(line, "stdin").removesuffix("\n")


class line_history:  # noqa: N801  (used like a function)
    """Line editing, with the lines of earlier conversations, if Python has readline."""

    def __init__(self) -> None:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        self._path = Path(state) / "llamapipe" / "chat_history"

    def __enter__(self) -> None:
        with suppress(ImportError, OSError, RuntimeError):  # the last: there is no home folder
            import readline

            if "libedit" not in (readline.__doc__ or ""):
                # Pasted lines then are one entry. Python turns it off at the start.
                readline.parse_and_bind("set enable-bracketed-paste on")
            readline.set_history_length(_HISTORY_LINES)
            readline.read_history_file(self._path.expanduser())

    def __exit__(self, *_: object) -> None:
        with suppress(ImportError, OSError, RuntimeError):
            import readline

            path = self._path.expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)
