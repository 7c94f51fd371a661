"""Simulates engines under load.

python tools/simulate record MODEL.gguf -o recording.json       # measure a real engine's steps
python tools/simulate fit recording.json -o cost.json           # fit their times; print the error on held-out runs
python tools/simulate check MODEL.gguf cost.json                # compare real runs with the simulated one
python tools/simulate capacity cost.json                        # highest rate that one node serves within limits
python tools/simulate policies cost.json --nodes 40             # compare routing policies
python tools/simulate run cost.json --nodes 1000 --processes 2  # simulate a large cluster
python tools/simulate plot capacity.json policies.json FOLDER   # draw the files of capacity -o and policies -o
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parents[2]))  # after an installed llamapipe

from simulate.command import main

if __name__ == "__main__":
    main(__doc__ or "")
