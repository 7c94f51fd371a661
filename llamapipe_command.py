"""The ``llamapipe`` command: imports the package and runs it. Ctrl-C during the import ends it with one line.

This module stands outside the package because importing a module of a package imports the package first.
"""

import sys


def main() -> int:
    """Run the process's command line and return its exit status; see ``llamapipe.cli.main``."""
    try:
        from llamapipe.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("llamapipe: interrupted\n")
        return 130
    return run()


if __name__ == "__main__":  # a worker of "llamapipe serve --workers"
    sys.exit(main())
