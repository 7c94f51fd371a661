"""The parser of a subcommand."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import llamapipe as lp
from llamapipe.cli.usage.hints import about_option
from llamapipe.cli.usage.texts import names_model

_SHORT = re.compile(r"-[A-Za-z]+")
_GIVEN_ONCE = ("model", "embeddings", "chat_template")


class CommandParser(argparse.ArgumentParser):
    """The parser of one subcommand.

    Argparse reports unknown options with the usage of the whole program. This parser reports them itself, with its own
    usage and what to use instead.
    """

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse `args`; arguments that the subcommand does not know are an error."""
        self._check_options(sys.argv[1:] if args is None else args)
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._reject(unknown)
        return values, unknown

    def _check_options(self, args: Sequence[str]) -> None:
        """Refuses unknown short options, and a second model.

        Argparse would read ``-fa on`` as ``-f a`` and ``-n`` as the beginning of ``-np``, and use the last model.
        """
        given: set[str] = set()
        for text in args:
            if text == "--":
                return
            action = self._option_string_actions.get(text.partition("=")[0])
            if action is None:
                if _SHORT.fullmatch(text):
                    self._reject([text])
            elif action.dest in _GIVEN_ONCE:
                if action.dest in given:
                    self.error(f"{'/'.join(action.option_strings)} is given twice; give one file")
                given.add(action.dest)

    def _reject(self, unknown: Sequence[str]) -> NoReturn:
        message = f"unrecognized arguments: {' '.join(unknown)}"
        wrong = next((text.partition("=")[0] for text in unknown if text.startswith("-")), None)
        if wrong is not None:
            command = self.prog.rpartition(" ")[2]
            fields = vars(lp.SamplingParams)["__dataclass_fields__"] if command == "serve" else ()
            message += about_option(wrong, command, self._option_string_actions, fields)
        elif names_model(unknown[0]) and "-m" in self._option_string_actions:
            message += "; pass a model with -m"
        self.error(f"{message} (see {self.prog} --help)")
