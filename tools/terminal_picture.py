"""Run a command and draw what it prints as a terminal, in SVG: the pictures of the documentation.

    python tools/terminal_picture.py docs/tutorial-demo.svg --lines 30 -- llamapipe demo

Paths of the machine are not drawn: give arguments without them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from html import escape
from pathlib import Path

LINE, WIDTH, MARGIN = 18, 7.8, 16  # pixels: of a line, of a character at 13 pixels, around the text
STYLE = (
    "text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#e6e6e6;white-space:pre}"
    ".p{fill:#7fd1ff}"
)


def picture(command: str, lines: list[str]) -> str:
    """An SVG of a command and its lines of output."""
    shown = [f"$ {command}", *lines]
    width = round(max(map(len, shown)) * WIDTH + 2 * MARGIN)
    height = len(shown) * LINE + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1d1f21"/>',
    ]
    for number, line in enumerate(shown):
        kind = ' class="p"' if number == 0 else ""
        y = MARGIN + number * LINE + 13
        parts.append(f'<text x="{MARGIN}" y="{y}" xml:space="preserve"{kind}>{escape(line)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Runs the command and writes the picture; the exit status is the command's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--lines", type=int, help="draw only this many lines")
    parser.add_argument("--skip", type=int, default=0, help="leave out this many lines at the start")
    parser.add_argument("--columns", type=int, default=100, help="cut lines after this many characters")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    done = subprocess.run(args.command, capture_output=True, text=True, check=False)
    lines = [line[: args.columns].rstrip() for line in done.stdout.rstrip().splitlines()[args.skip :]]
    args.output.write_text(picture(" ".join(args.command), lines[: args.lines]), encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
