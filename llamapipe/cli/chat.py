"""``llamapipe chat``: a conversation at the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import closing, suppress
from pathlib import Path

import llamapipe as lp
from llamapipe.cli.loading import open_engine, open_model
from llamapipe.cli.options import (
    ENGINE,
    MODEL,
    MODEL_HELP,
    SAMPLING,
    HelpFormatter,
    UsageError,
    add_engine_options,
    add_options,
    defaults_of,
    given,
    model_path,
)
from llamapipe.cli.terminal import Terminal, WordWrap

_DESCRIPTION = "Hold a conversation with a model. Without -m, use the bundled model. Needs the extra 'chat'."
_EPILOG = """\
examples:
  llamapipe chat
  llamapipe chat -m model.gguf --system "Answer in one sentence."

Commands in the conversation: /reset clears it, /system TEXT sets the system message, /save FILE writes the messages as
JSON, /help lists the commands, /exit quits. Ctrl-C stops an answer; Ctrl-D quits."""
_HELP = """\
/reset         clear the conversation
/system TEXT   set the system message and start again
/system        remove it
/save FILE     write the messages as JSON
/help          show this
/exit          quit, as Ctrl-D does
A line that ends with \\ continues on the next one.
Ctrl-C stops an answer."""
_HISTORY_LINES = 1000


def add_parser(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], common: argparse.ArgumentParser
) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "chat",
        parents=[common],
        usage="llamapipe chat [options]",
        allow_abbrev=False,
        help="hold a conversation with a model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("-m", "--model", type=model_path, metavar="FILE", help=MODEL_HELP)
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file, instead of the model's template"
    )
    parser.add_argument(
        "--no-thinking", action="store_true", help="turn off reasoning, if the template supports it"
    )
    add_options(parser, "sampling", SAMPLING, {**defaults_of(lp.SamplingParams), "max_tokens": None})
    add_engine_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    options = given(args, SAMPLING)
    options.setdefault("max_tokens", None)
    try:
        params = lp.SamplingParams(**options)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    engine_options = {"n_seq_max": 1, **given(args, ENGINE)}
    with (
        open_model(args.model, {"chat_template": args.chat_template, **given(args, MODEL)}) as model,
        open_engine(model, engine_options) as engine,
    ):
        conversation = Conversation(engine, params, args.system, args.no_thinking)
        if not sys.stdin.isatty():
            return conversation.read_lines()
        with _line_history():
            return conversation.talk()


class Conversation:
    """The messages so far, and the reader at the terminal."""

    def __init__(
        self, engine: lp.Engine, params: lp.SamplingParams, system: str | None, no_thinking: bool
    ) -> None:
        self._engine = engine
        self._params = params
        self._system = system
        self._args = {"enable_thinking": False} if no_thinking else {}
        self._terminal = Terminal(sys.stdout)
        self._messages: list[dict[str, object]] = []
        self._reset()

    def __repr__(self) -> str:
        return f"<Conversation of {len(self._messages)} messages>"

    def _reset(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def talk(self) -> int:
        """Reads messages until the end of input."""
        terminal = self._terminal
        terminal.line(
            terminal.style(f"{self._engine.model.path.stem}: /help lists commands, Ctrl-D ends", "dim")
        )
        while True:
            try:
                text = self._ask()
            except KeyboardInterrupt:
                terminal.line()
                terminal.line(terminal.style("Ctrl-D or /exit ends", "dim"))
                continue
            except EOFError:
                terminal.line()
                return 0
            if text.startswith("/"):
                if not self._command(text):
                    return 0
            elif text.strip():
                self._answer(text)

    def read_lines(self) -> int:
        """Answers each line of standard input; the first failure ends it."""
        for line in sys.stdin:
            text = line.rstrip("\n")
            if text.startswith("/"):
                if not self._command(text):
                    break
            elif text.strip() and not self._answer(text):
                return 1
        return 0

    def _ask(self) -> str:
        """A message; a line that ends with a backslash continues on the next one."""
        lines: list[str] = []
        prompt = "> "
        while True:
            line = input(prompt)
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
            prompt = ". "

    def _command(self, text: str) -> bool:
        """Runs a command. False if it ends the conversation."""
        terminal = self._terminal
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self._reset()
            terminal.line(terminal.style("forgotten", "dim"))
        elif name == "/system":
            self._system = rest or None
            self._reset()
            terminal.line(
                terminal.style("forgotten; the system message is set" if rest else "forgotten", "dim")
            )
        elif name == "/save":
            self._save(rest)
        else:
            if name != "/help":
                terminal.line(terminal.style(f"there is no command {name}", "yellow"))
            terminal.line(_HELP)
        return True

    def _save(self, name: str) -> None:
        terminal = self._terminal
        if not name:
            terminal.line(terminal.style("/save needs the name of a file", "yellow"))
            return
        path = Path(name).expanduser()
        try:
            path.write_text(json.dumps(self._messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            terminal.line(terminal.style(f"{path}: {error.strerror}", "red"))
        else:
            terminal.line(terminal.style(f"{len(self._messages)} messages in {path}", "dim"))

    def _answer(self, text: str) -> bool:
        """Streams the answer to a message. Ctrl-C stops it; what was written stays in the conversation."""
        terminal = self._terminal
        wrap = WordWrap(terminal)
        self._messages.append({"role": "user", "content": text})
        content: list[str] = []
        n_tokens = 0
        began = time.perf_counter()
        first_s: float | None = None
        note = ""
        try:
            stream = self._engine.stream_chat(self._messages, self._params, template_args=self._args)
            with closing(stream):
                for delta in stream:
                    if first_s is None:
                        first_s = time.perf_counter() - began
                    n_tokens += len(delta.token_ids)
                    if delta.reasoning:
                        wrap.write(terminal.text(delta.reasoning), "dim")
                    if delta.content:
                        content.append(delta.content)
                        wrap.write(terminal.text(delta.content))
                    if delta.finish_reason == "length":
                        note = "ended by the limit of tokens"
        except KeyboardInterrupt:
            note = "stopped"
        except lp.errors.InvalidRequestError as error:
            del self._messages[-1]
            wrap.end()
            hint = "; /reset forgets the conversation" if "n_ctx" in str(error) else ""
            terminal.line(terminal.style(f"{error}{hint}", "red"))
            return False
        wrap.end()
        self._messages.append({"role": "assistant", "content": "".join(content)})
        if terminal.redraws:
            seconds = time.perf_counter() - began
            facts = [f"{n_tokens} tokens", f"{n_tokens / seconds:.0f} tokens/s"]
            if first_s is not None:
                facts.append(f"first after {1e3 * first_s:.0f} ms")
            dot = f" {terminal.symbol('·')} "
            terminal.line(terminal.style(dot.join([*facts, *([note] if note else [])]), "dim"))
        return True


class _line_history:  # noqa: N801  (used like a function)
    """Line editing, with the lines of earlier conversations, where Python has readline."""

    def __init__(self) -> None:
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        self._path = Path(state).expanduser() / "llamapipe" / "chat_history"

    def __enter__(self) -> None:
        with suppress(ImportError, OSError):
            import readline

            readline.set_history_length(_HISTORY_LINES)
            readline.read_history_file(self._path)

    def __exit__(self, *_: object) -> None:
        with suppress(ImportError, OSError):
            import readline

            self._path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(self._path)
            self._path.chmod(0o600)
