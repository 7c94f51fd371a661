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
    # The folder of a script is searched first. Where that is site-packages, it would go before PYTHONPATH and the
    # standard library, unlike in the process that starts the workers.
    if sys.path[0] in sys.path[1:]:
        del sys.path[0]
    sys.exit(main())
