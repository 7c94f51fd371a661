"""The argument parser of the command and its subcommands, whose messages suggest the option that was meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn


class CommandParser(argparse.ArgumentParser):
    """The parser of one subcommand.

    Argparse reports unknown options with the usage of the whole program. This parser reports them itself, with its own
    usage and the nearest option.
    """

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse `args`; arguments that the subcommand does not know are an error."""
        values, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._reject(unknown)
        return values, unknown

    def _reject(self, unknown: Sequence[str]) -> NoReturn:
        message = f"unrecognized arguments: {' '.join(unknown)}"
        wrong = next((text.partition("=")[0] for text in unknown if text.startswith("-")), None)
        if wrong is not None:
            near = difflib.get_close_matches(wrong, self._option_string_actions, n=1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.error(f"{message} (see {self.prog} --help)")
