"""Reads the command line: a command's parser, and the texts in arguments, files and standard input."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import llamapipe as lp
from llamapipe._messages import about_option

_SHORT = re.compile(r"-[A-Za-z]+")
_GIVEN_ONCE = ("model", "embeddings", "chat_template")


class UsageError(Exception):
    """The command line is invalid. The exit status is 2."""


@contextmanager
def usage_errors(where: str = "") -> Iterator[None]:
    """Turn TypeError and ValueError, except llamapipe's own, into UsageError. ``where``: precedes the message."""
    try:
        yield
    except lp.errors.LlamapipeError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}{error}") from error


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks in descriptions and examples, but wraps paragraphs that are wider than the terminal."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            lines = paragraph.splitlines()
            is_prose = not any(line.startswith(" ") for line in lines)
            if is_prose and any(len(line) > width for line in lines):
                paragraphs.append(textwrap.fill(" ".join(lines), width))
            else:
                paragraphs.append(paragraph)
        return super()._fill_text("\n\n".join(paragraphs), width, indent)


class CommandParser(argparse.ArgumentParser):
    """The parser of one subcommand.

    Argparse reports unknown options with the usage of the whole program. This parser reports them itself, with its own
    usage and a suggestion.
    """

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse ``args``; arguments that the subcommand does not know are an error."""
        self._check_options(sys.argv[1:] if args is None else args)
        values, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._take_texts(values, unknown):
            self._reject(unknown)
        return values, []

    def options(self) -> dict[str, str]:
        """Return each argument's option: the last of its names, because llama.cpp's names come before ours."""
        return {
            action.dest: action.option_strings[-1]
            for action in reversed(self._actions)
            if action.option_strings
        }

    def _take_texts(self, values: argparse.Namespace, unknown: Sequence[str]) -> bool:
        """Take texts after options, as in ``run MODEL -n 5 MESSAGE``. Return False if ``unknown`` has anything else.

        By then argparse has assigned the texts before the options, perhaps none, to the command's last argument.
        """
        last = next(reversed(self._get_positional_actions()), None)
        if last is None or any(text.startswith("-") and text != "-" for text in unknown):
            return False
        before = getattr(values, last.dest)
        if last.nargs == "*":
            setattr(values, last.dest, [*before, *unknown])
            return True
        if last.nargs == "?" and before is None and len(unknown) == 1:
            setattr(values, last.dest, unknown[0])
            return True
        return False

    def _check_options(self, args: Sequence[str]) -> None:
        """Refuse unknown short options, and a second model.

        Argparse would read ``-fa on`` as ``-f a`` and ``-n`` as the beginning of ``-np``, and use the last model.
        """
        dests: set[str] = set()
        for text in args:
            if text == "--":
                return
            action = self._option_string_actions.get(text.partition("=")[0])
            if action is None:
                if _SHORT.fullmatch(text):
                    self._reject([text])
            elif action.dest in _GIVEN_ONCE:
                if action.dest in dests:
                    self.error(f"{'/'.join(action.option_strings)} is given twice; give one file")
                dests.add(action.dest)

    def _reject(self, unknown: Sequence[str]) -> NoReturn:
        message = f"unrecognized arguments: {' '.join(unknown)}"
        wrong = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if wrong:
            command = self.prog.rpartition(" ")[2]
            fields = vars(lp.SamplingParams)["__dataclass_fields__"] if command == "serve" else ()
            for name in dict.fromkeys(wrong):
                hint = about_option(name, command, self._option_string_actions, fields)
                message += hint if len(wrong) == 1 or not hint else f"; {name}: {hint.removeprefix('; ')}"
        elif "-m" in self._option_string_actions and (
            self.prog.endswith(" serve") or names_model(unknown[0])
        ):
            message += "; pass a model with -m"
        self.error(f"{message} (see {self.prog} --help)")


def check_folder(file: Path) -> None:
    """Raise UsageError if the file of ``-o`` has no folder: the end of a long computation would be too late."""
    if not file.parent.is_dir():
        raise UsageError(f"-o {file}: there is no folder {file.parent}")


# ---- texts: arguments, files, standard input; UTF-8 in every locale
def read_texts(arguments: list[str], files: list[Path], lines: bool) -> list[str]:
    """Read all texts in the order of the command line, then files; ``-``: standard input. Raises UsageError, OSError.

    Without arguments and files, standard input is read if it is not a terminal. ``lines``: each line is a text.
    """
    texts: list[str] = []
    if not arguments and not files and not stdin_is_terminal() and (piped := read_stdin()):
        texts = _split(piped, lines)
    for text in arguments:
        texts += _split(read_stdin(), lines) if text == "-" else [check_text(text)]
    for file in files:
        texts += _split(read_file(file), lines)
    if not texts:
        raise UsageError("no text given; pass one as an argument, with -f FILE, or - for stdin")
    return texts


def check_text(text: str) -> str:
    """Check a text of the command line. Raises UsageError if it is not UTF-8, or is a model's name without ``-m``."""
    if names_model(text):
        raise UsageError(f"{text} names a model: pass it with -m")
    return utf8(os.fsencode(text), "the text")


def names_model(text: str) -> bool:
    """Return whether an argument is surely the name of a model and not a text."""
    return text.lower().endswith(".gguf") and not any(map(str.isspace, text))


def stdin_is_terminal() -> bool:
    """Return whether a person is typing; also True if there is no standard input."""
    return sys.stdin is None or sys.stdin.isatty()


def read_file(file: Path) -> str:
    """Read all of a file; ``-`` is standard input. Raises OSError, UsageError if it is not UTF-8."""
    return read_stdin() if str(file) == "-" else utf8(file.read_bytes(), str(file))


def read_stdin() -> str:
    """Read all of standard input. Raises UsageError if it is not UTF-8."""
    return "" if sys.stdin is None else utf8(sys.stdin.buffer.read(), "stdin")


def utf8(data: bytes, name: str) -> str:
    """Decode a text, and convert its line ends to Unix's. Raises UsageError, which calls it ``name``.

    A byte order mark, with which programs on Windows begin files, is not part of the text.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8 text: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _split(text: str, lines: bool) -> list[str]:
    """Return one text, without the line end that editors add, or one text for each line that is not blank."""
    if lines:
        return [line for line in text.split("\n") if line.strip()]
    return [text.removesuffix("\n")]
