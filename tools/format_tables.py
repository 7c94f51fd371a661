"""Write the tables of docs/models-and-formats.md from what is found in llama.cpp's templates and from its cases.

    python tools/format_tables.py

It needs llama.cpp's source in the cache, which ``build_native.py`` puts there. A test fails if the page says something
else. ``tests/support/peer_cases.py`` has the cases, ``tests/chat/known_differences.txt`` those that differ.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from page_sections import cell, with_section

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after an installed llamapipe
sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from support.chat_templates import names
from support.peer_cases import (
    ALLOWED,
    LIST,
    RIGHT,
    VLLM_LIST,
    Differences,
    Outcome,
    format_of,
    llama_cpp_cases,
    outcomes,
)

from llamapipe.chat._call_format import CallFormat, Slot
from llamapipe.chat.chat_format import ChatFormat

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models-and-formats.md"
BEGIN, END = "<!-- {}: python tools/format_tables.py -->\n", "<!-- end of {} -->\n"
_STYLES = {
    "JSON": "a JSON object",
    "NAMED": "a name, then JSON",
    "TAGGED": "a name, then each argument between markers",
    "PYTHON": "as in Python",
    "QUOTED": "a name, then members whose strings are between markers",
    "NESTED": "a name, then arguments and their parts between markers",
}


def with_tables(text: str, results: Sequence[Outcome]) -> str:
    """The page with the tables as templates and cases say them."""
    for name, lines in (
        ("templates", _templates(results)),
        ("differences", _differences(LIST)),
        ("differences from vLLM", _differences(VLLM_LIST)),
    ):
        text = with_section(text, BEGIN.format(name), END.format(name), "\n".join(lines) + "\n")
    return text


def _templates(results: Sequence[Outcome]) -> Iterable[str]:
    yield "| template | reasoning, marks of the text | a call | several | ids | read | allowed |"
    yield "|---|---|---|---|---|---|---|"
    counts = Counter((outcome.case.template, outcome.kind) for outcome in results)
    good = Counter(
        (outcome.case.template, outcome.kind) for outcome in results if outcome.verdict in (RIGHT, ALLOWED)
    )
    for name in names():
        form = format_of(name)
        n, n_grammar = counts[name, "read"], counts[name, "grammar"]
        cells = (
            f"`{name}`",
            ", ".join(_marks(form)),
            *_calls(form),
            f"{good[name, 'read']} of {n}" if n else "",
            f"{good[name, 'grammar']} of {n_grammar}" if n_grammar else "",
        )
        yield "| " + " | ".join(cells) + " |"


def _marks(form: ChatFormat) -> Iterable[str]:
    if form.reasoning is not None:
        yield f"{_code(form.reasoning.start)} … {_code(form.reasoning.end)}"
    if form.markers.text_starts:
        end = f" … {_code(form.markers.text_end)}" if form.markers.text_end else " …"
        yield _code(form.markers.text_starts[-1]) + end


def _calls(form: ChatFormat) -> tuple[str, str, str]:
    """How a call is written, whether an answer may have several, and whether the model writes ids."""
    if form.calls is None:
        return ("a message of harmony", "yes", "") if form.supports_tools else ("not read", "", "")
    style = _STYLES.get(form.calls.style.name, form.calls.style.name.lower())
    return style, "yes" if form.calls.parallel else "no", "yes" if _has_ids(form.calls) else ""


def _has_ids(calls: CallFormat) -> bool:
    in_head = Slot.ID in calls.head or bool(calls.id_head)
    return in_head or any(member.role == "id" for member in calls.members)


def _code(text: str) -> str:
    return f"`{cell(text.strip())}`"


def _differences(path: Path) -> Iterable[str]:
    yield "| read | allowed | reason |"
    yield "|---|---|---|"
    for reason, cases in Differences(path.read_text(encoding="utf-8")).reasons.items():
        kinds = Counter(name.partition(" ")[0] for _, name in cases)
        yield f"| {kinds['read'] or ''} | {kinds['grammar'] or ''} | {reason} |"


if __name__ == "__main__":
    written = with_tables(PAGE.read_text(encoding="utf-8"), list(outcomes(llama_cpp_cases())))
    PAGE.write_text(written, encoding="utf-8")
