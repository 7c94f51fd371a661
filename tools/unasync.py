"""Generates the calls for threads from those for asyncio.

Run it after editing code between ``# ---- asyncio:`` and ``# ---- end of asyncio``. It writes the modules of
``llamapipe/_sync`` again: without ``async`` and ``await``, and with the names for threads in place of those for
asyncio. A line that ends with ``# asyncio`` is left out, and one that begins with ``# threads:`` becomes code::

    python tools/unasync.py           # writes
    python tools/unasync.py --check   # only says whether a file would change, with exit status 1
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "llamapipe"
PART = re.compile(
    r"^ *# ---- asyncio: .*?\n(?P<body>.*?)^ *# ---- end of asyncio\n", re.MULTILINE | re.DOTALL
)


class Module(NamedTuple):
    """One module of ``_sync``: its source, its docstring, what it imports beside the source's imports, its class."""

    source: str
    target: str
    doc: str
    imports: tuple[str, ...]
    head: str = ""


_MAILBOX = "from llamapipe._engine.runtime.mailboxes import ThreadMailbox"
MODULES = (
    Module(
        "_engine/calls/submission.py",
        "_sync/submission.py",
        "Submitting for threads.",
        ("from llamapipe._engine.calls.submission import *", _MAILBOX),
        'class BlockingSubmission(Submission):\n    """``Submission`` with its calls for threads."""\n\n',
    ),
    Module(
        "streams.py",
        "_sync/streams.py",
        "Streams and generations for threads.",
        ("from llamapipe.streams import *", _MAILBOX),
    ),
    Module(
        "engine.py",
        "_sync/engine.py",
        "The calls of ``Engine`` for threads.",
        (
            "from collections.abc import Iterator",
            "from typing import TypeVar",
            "from llamapipe._engine.parts import EngineParts",
            "from llamapipe._sync.streams import *",
            "from llamapipe._sync.submission import BlockingSubmission",
            _MAILBOX,
        ),
        'T = TypeVar("T")\n\n\n'
        'class BlockingCalls(EngineParts):\n    """The calls of ``Engine`` for threads."""\n\n'
        "    _submission: BlockingSubmission\n\n",
    ),
)
CALLS = (
    "generate iter_completed stream infill stream_infill chat stream_chat score score_tokens perplexity start "
    "restore request_batches cache_prefix open_stream generation submit collect iterate enter close"
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
        (r"\bAn asynchronous iterator\b", "An iterator"),
        (r"\bas_async\((\w+)\)", r"\1"),
        (r"\bAwaitable\[([^\[\]]*)\]", r"\1"),
        (r"\bAsyncGenerator\[(.*), None\]", r"Iterator[\1]"),
        (r"\bIterable\[Prompt\] \| AsyncIterable\[Prompt\]", "Iterable[Prompt]"),
        (r"\(Iterable, AsyncIterable\)", "Iterable"),
        (r"\bAsyncMailbox\(running_loop\(\), ", "ThreadMailbox("),
        (r"\bAsyncMailbox\b", "ThreadMailbox"),
        (r"\bAsync(Closing|Stream|ChatStream|Generation)\b", r"\1"),
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


def _imports(tree: ast.Module, text: str) -> str:
    """The imports of a module, also those for types."""
    lines = text.splitlines()
    blocks = [node.body for node in tree.body if isinstance(node, ast.If)]
    nodes = [
        node
        for body in (tree.body, *blocks)
        for node in body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    return "\n".join("\n".join(lines[node.lineno - 1 : node.end_lineno]).strip() for node in nodes)


def _exported(statement: str) -> str:
    """``import *`` written out: every name that a module of ours defines at its top, or private names that are used."""
    match = re.fullmatch(r"from llamapipe\.([\w.]+) import \*", statement)
    if match is None:
        return statement
    path = PACKAGE / f"{match[1].replace('.', '/')}.py"
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return f"from llamapipe.{match[1]} import {', '.join(names)}"


def generate(module: Module) -> str:
    """The text of a module of ``_sync``, as ruff formats it, with the imports that it needs."""
    text = (PACKAGE / module.source).read_text(encoding="utf-8")
    match = PART.search(text)
    assert match is not None, module.source
    imports = "\n".join(map(_exported, module.imports))
    own = "\n".join(line for line in _imports(ast.parse(text), text).splitlines() if "_sync" not in line)
    new = (
        f'"""{module.doc} Made by ``tools/unasync.py`` from ``{module.source}``: edit that file."""\n\n'
        f"{own}\n{imports}\n\n\n{module.head}{for_threads(match['body'])}"
    )
    for command in (["check", "--fix-only", "--select", "F401,F811,I,TC", "--exit-zero"], ["format"]):
        new = subprocess.run(
            [
                sys.executable,
                "-m",
                "ruff",
                *command,
                "--quiet",
                "--stdin-filename",
                str(PACKAGE / module.target),
                "-",
            ],
            input=new,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=True,
        ).stdout
    return new


def main() -> int:
    """Writes the files, or checks them."""
    changed = []
    for module in MODULES:
        path = PACKAGE / module.target
        new = generate(module)
        if not path.exists() or new != path.read_text(encoding="utf-8"):
            changed.append(path)
            if "--check" not in sys.argv:
                path.write_text(new, encoding="utf-8")
    for path in changed:
        print(f"{path.relative_to(PACKAGE.parent)}: {'differs' if '--check' in sys.argv else 'written'}")
    return int(bool(changed) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
