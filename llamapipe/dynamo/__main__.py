"""``python -m llamapipe.dynamo``: runs a worker until a signal stops it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from llamapipe._lazy import needs_extra
from llamapipe.cli.parser import UsageError
from llamapipe.dynamo._arguments import parser
from llamapipe.errors import LlamapipeError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker and return the exit status: 0 after a signal, 1 if it failed, 2 for wrong usage."""
    command = parser()
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = command.parse_args(arguments)
    if args.verbose:
        logging.getLogger("llamapipe").setLevel(logging.DEBUG)
    try:
        _run(arguments)
    except UsageError as error:
        command.print_usage(sys.stderr)
        sys.stderr.write(f"llamapipe: {error} (see {command.prog} --help)\n")
        return 2
    except KeyboardInterrupt:
        return 130
    except (LlamapipeError, OSError, ValueError, ImportError) as error:
        if args.verbose:
            raise
        sys.stderr.write(f"llamapipe: {error}\n")
        return 1
    return 0


def _run(argv: list[str]) -> None:
    with needs_extra("llamapipe.dynamo", "dynamo"):
        from dynamo.common.backend.run import run

        from llamapipe.dynamo._worker import EngineWorker
    run(EngineWorker, argv)


if __name__ == "__main__":
    sys.exit(main())
