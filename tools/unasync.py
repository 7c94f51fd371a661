"""Makes the calls for threads from those for asyncio: one is written, the other derived.

Run it after editing a part that is marked ``# ---- asyncio:``. It writes the part below, from ``# ---- threads:`` to
``# ---- end``, anew: without ``async`` and ``await``, and with the names for threads in the place of those for asyncio.
A line that ends with ``# asyncio`` is left out, and one that begins with ``# threads:`` becomes code::

    python tools/unasync.py           # writes
    python tools/unasync.py --check   # only says whether a file would change, with exit status 1
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "llamapipe"
FILES = [PACKAGE / name for name in ("engine.py", "streams.py", "_engine/submit.py")]
PARTS = re.compile(
    r"(?P<source>^ *# ---- asyncio: .*?\n)(?P<body>.*?)"
    r"(?P<made>^ *# ---- threads: .*?\n)(?:.*?)(?P<end>^ *# ---- end of what tools/unasync.py makes\n)",
    re.MULTILINE | re.DOTALL,
)
CALLS = (
    "generate iter_completed stream infill stream_infill chat stream_chat score score_tokens perplexity start "
    "restore cache_prefix open_stream generation submit collect iterate enter close"
).split()
RULES = [
    (re.compile(pattern, re.MULTILINE), new)
    for pattern, new in (
        (r"^.*  # asyncio\n", ""),
        (r"^( *)# threads: ", r"\1"),
        (r"\bnote_waiting_task\b", "note_waiting_thread"),
        (r"\basync (def|with|for)\b", r"\1"),
        # Work that would block an event loop, run elsewhere: here it is a plain call.
        (r"\bawait (?:self\._long_work\.run_off_loop|to_thread)\(\s*([\w.]+)(?:,\s*|(?=\)))", r"\1("),
        (r"\bawait ", ""),
        (r"\bAwaitable\[([^\[\]]*)\]", r"\1"),
        (r"\bAsyncGenerator\[(.*), None\]", r"Iterator[\1]"),
        (r"\bIterable\[Prompt\] \| AsyncIterable\[Prompt\]", "Iterable[Prompt]"),
        (r"\(Iterable, AsyncIterable\)", "Iterable"),
        (r"\bAsyncMailbox\(running_loop\(\), ", "ThreadMailbox("),
        (r"\bAsyncMailbox\b", "ThreadMailbox"),
        (r"\bAsync(Stream|ChatStream|Generation)\b", r"\1"),
        (r"\bStopAsyncIteration\b", "StopIteration"),
        (r"\b(__)a(next|iter|enter|exit)__\b", r"\1\2__"),
        (r"\baclosing\b", "closing"),
        (r"\bOneTask\b", "OneCall"),
        (r"\b_one_task\b", "_one_call"),
        (rf"\b(_?)a({'|'.join(CALLS)})\b", r"\1\2"),
        (rf"\b(_?)a({'|'.join(CALLS)})\b", r"\1\2"),
    )
]


def for_threads(text: str) -> str:
    """A part for asyncio as one for threads."""
    for pattern, new in RULES:
        text = pattern.sub(new, text)
    return text


def regenerated(text: str) -> str:
    """The text of a module, with its parts for threads made anew, as ruff formats them."""
    made = PARTS.sub(lambda m: m["source"] + m["body"] + m["made"] + for_threads(m["body"]) + m["end"], text)
    command = [sys.executable, "-m", "ruff", "format", "--quiet", "--stdin-filename", str(FILES[0]), "-"]
    return subprocess.run(
        command, input=made, capture_output=True, text=True, encoding="utf-8", check=True
    ).stdout


def main() -> int:
    """Writes the files, or checks them."""
    changed = []
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        new = regenerated(text)
        if new != text:
            changed.append(path)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    for path in changed:
        print(f"{path.relative_to(PACKAGE.parent)}: {'differs' if '--check' in sys.argv else 'written'}")
    return int(bool(changed) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
