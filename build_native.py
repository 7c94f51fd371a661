"""Build llama.cpp and the cffi module for llamapipe: ``python build_native.py --backend cpu`` (``--help`` for more)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from native_build.cli import main

if __name__ == "__main__":
    sys.exit(main())
