"""``python -m llamapipe.dynamo``."""

from __future__ import annotations

import sys

from llamapipe.dynamo.arguments import main

if __name__ == "__main__":
    sys.exit(main())
