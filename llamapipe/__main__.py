"""``python -m llamapipe``: the same as the ``llamapipe`` command."""

import sys

from llamapipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
