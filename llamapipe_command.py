"""The ``llamapipe`` command: imports the package and runs it. Ctrl-C during the import ends it with one line.

This module stands outside the package because importing a module of a package imports the package first.
"""

import os
import sys
import threading
from importlib import import_module

NICE = "LLAMAPIPE_IMPORT_NICE"  # by how much the imports of a process yield to others


def main() -> int:
    """Run the process's command line and return its exit status; see ``llamapipe.cli.main``."""
    try:
        if by := os.environ.pop(NICE, ""):
            _import_at(int(by))
        from llamapipe.cli import main as run
    except KeyboardInterrupt:
        sys.stderr.write("llamapipe: interrupted\n")
        return 130
    return run()


def _import_at(nice: int) -> None:
    """Imports what a server needs in a thread that leaves the cores to others. Linux.

    The main thread keeps its priority: most users may lower one and not raise it again.
    """

    def load() -> None:
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, min(os.getpriority(os.PRIO_PROCESS, me) + nice, 19))
        for name in ("llamapipe.cli", "llamapipe.server.run"):
            import_module(name)

    thread = threading.Thread(target=load, name="llamapipe-import")
    thread.start()
    thread.join()


if __name__ == "__main__":  # a worker of "llamapipe serve --workers"
    sys.exit(main())
