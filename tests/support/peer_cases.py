"""Holds our formats against other projects' cases, and the differences against a written list.

Each case is read (parsed whole and in pieces) and, where a grammar constrains the answer, looked for among the answers
that it allows. ``Differences`` is the list of those that are known, each with its reason.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # run as a program

from llamapipe.chat._call_format import segments
from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.results import ChatMessage
from llamapipe.chat.tools import check_tools
from llamapipe.errors import InvalidRequestError
from support.chat_templates import ByteVocabulary, cuts, renderer, source_of, template, vllm_source
from support.cpp_cases import PeerCase, read_cases
from support.gguf_models import find_source
from support.python_cases import read_python_cases

LIST = Path(__file__).parent.parent / "chat" / "known_differences.txt"
VLLM_LIST = LIST.with_name("known_differences_vllm.txt")
UNEXPLAINED = "no reason yet"
RIGHT, WRONG, REFUSED, UNSTABLE = "right", "wrong", "refused", "unstable"
ALLOWED, FORBIDDEN = "allowed", "forbidden"
_CONTROL = re.compile(r"<[|｜][^<>\s]*[|｜]>|<\|[^<>\s|]*>|<[^<>\s|]*\|>|\[/?[A-Z][A-Z_]+\]")


@dataclass(frozen=True)
class Outcome:
    """What became of a case. ``kind``: "read" or "grammar"; ``detail``: what differs, for people."""

    case: PeerCase
    kind: str
    verdict: str
    detail: str = ""

    @property
    def differs(self) -> bool:
        """Whether this must be on the list."""
        return self.verdict not in (RIGHT, ALLOWED)

    @property
    def name(self) -> str:
        """As in the list."""
        return f"{self.kind} {self.case.template} L{self.case.line} {self.case.key}"


def llama_cpp_cases() -> list[PeerCase]:
    """The cases of the pinned llama.cpp's ``tests/test-chat.cpp``. Raises FileNotFoundError without its source."""
    return read_cases((find_source() / "tests" / "test-chat.cpp").read_text(encoding="utf-8"))


def vllm_outcomes() -> Iterator[Outcome]:
    """How vLLM's cases are read. What a grammar allows is left to llama.cpp's, whose tools have schemas.

    Raises KeyError if no variable names the folder of vLLM's source.
    """
    return (case for case in outcomes(read_python_cases(vllm_source())) if case.kind == "read")


@lru_cache
def vocabulary_of(name: str) -> ByteVocabulary:
    """Bytes, and what the template writes in the manner of control tokens."""
    controls = set(_CONTROL.findall(source_of(name)))
    return ByteVocabulary(sorted(control for control in controls if len(segments(control)) == 1))


@lru_cache
def format_of(name: str, template_args: str = "{}") -> ChatFormat:
    """The format that is found in a template. ``template_args``: the arguments of a case, as JSON."""
    special_id = vocabulary_of(name).special_id
    if template_args == "{}":
        return ChatFormat.of(renderer(name), special_id)
    args = template(name).probed_arguments(json.loads(template_args))
    usual = format_of(name)
    return ChatFormat.of(renderer(name, args), special_id, usual=usual) if args else usual


def outcomes(cases: Iterable[PeerCase]) -> Iterator[Outcome]:
    """One or two of each case."""
    return chain.from_iterable(map(_outcomes, cases))


def _outcomes(case: PeerCase) -> Iterator[Outcome]:
    form = format_of(case.template, json.dumps(case.template_args))
    try:
        if case.tools and not form.supports_tools:
            raise InvalidRequestError("the template has no tool format")
        tail = _tail(case, form)
        answers = {
            answer: parts for parts in cuts(case.text, 4) if (answer := _answer(case, form, tail, parts))
        }
    except InvalidRequestError as error:
        yield Outcome(case, "read", REFUSED, str(error))
        return
    first = next(iter(answers))
    if len(answers) > 1:
        yield Outcome(
            case, "read", UNSTABLE, "\n".join(f"{parts}: {answer}" for answer, parts in answers.items())
        )
    else:
        expected = _expected(case, json.loads(first))
        same = json.loads(first) == expected
        yield Outcome(case, "read", RIGHT if same else WRONG, f"{first}\n{json.dumps(expected)}")
    if (case.tools or case.schema) and not case.is_partial:
        yield _grammar_outcome(case, form, tail)


def _grammar_outcome(case: PeerCase, form: ChatFormat, tail: str) -> Outcome:
    try:
        lark = form.grammar(
            check_tools(case.tools),
            case.tool_choice,
            case.parallel,
            prompt_tail=tail,
            schema=case.schema or None,
            whitespace="flexible",
        )
    except InvalidRequestError as error:
        return Outcome(case, "grammar", REFUSED, str(error))
    if lark is None:
        return Outcome(case, "grammar", ALLOWED)
    vocabulary = vocabulary_of(case.template)
    accepted, may_end = vocabulary.accepted(lark, case.text)
    is_allowed = accepted == case.text and may_end
    rest = case.text[len(accepted) :]
    return Outcome(case, "grammar", ALLOWED if is_allowed else FORBIDDEN, f"{accepted!r} | {rest!r}")


def _tail(case: PeerCase, form: ChatFormat) -> str:
    prompt = template(case.template).render(
        case.messages,
        tools=case.tools or None,
        continue_last=case.continues or False,
        reasoning_opening=form.markers.opening,
        template_args=case.template_args,
    )
    if case.continues:
        return form.continued_tail(prompt, case.messages, bool(case.tools or case.schema), case.continues)
    return prompt


def _answer(case: PeerCase, form: ChatFormat, tail: str, parts: Sequence[str]) -> str:
    """The answer as JSON. Ids that are ours are left out."""
    parser = form.parser(
        check_tools(case.tools),
        case.tool_choice,
        prompt_tail=tail,
        stream_calls=case.is_partial,
        lenient=not case.schema and not case.continues,
        parallel=case.parallel,
        reasoning_format="auto" if case.separates_reasoning or case.schema else "none",
        continues=bool(case.continues),
    )
    answer = ChatMessage([*map(parser.feed, parts), parser.finish(cut_off=case.is_partial)])
    calls = [
        (call.name, call.arguments if call.is_complete else None, call.id if call.id in case.text else "")
        for call in answer.tool_calls
    ]
    return json.dumps([answer.content.strip(), answer.reasoning.strip(), calls])


def _expected(case: PeerCase, answer: list[Any]) -> list[Any]:
    """What the case expects, as ``_answer`` writes it: without what the continued message holds already."""
    before = case.messages[-1] if case.continues else {}
    content = answer[0] if case.any_content else case.content.removeprefix(before.get("content", ""))
    reasoning = case.reasoning.removeprefix(before.get("reasoning_content", ""))
    calls = []
    for i, (name, arguments, id_) in enumerate(case.calls):
        if case.is_partial:
            calls.append([name, None, answer[2][i][2] if i < len(answer[2]) else ""])
            continue
        ours = answer[2][i][2] if i < len(answer[2]) and not id_ else id_
        calls.append([name, json.loads(arguments or "{}"), ours])
    return [content.strip(), reasoning.strip(), calls]


# ---- the list
class Differences:
    """The written list: a reason, then the cases that differ for it, each with its verdict."""

    def __init__(self, text: str) -> None:
        self.head = "".join(line for line in text.splitlines(keepends=True) if line.startswith("# "))
        self.reasons: dict[str, list[tuple[str, str]]] = {}
        reason = ""
        for line in text.splitlines():
            if line.startswith("# ") or not line.strip():
                continue
            if line.startswith("- "):
                reason = line[2:]
                self.reasons.setdefault(reason, [])
            else:
                verdict, _, name = line.strip().partition(" ")
                self.reasons[reason].append((verdict, name))

    def verdicts(self) -> dict[str, str]:
        """The verdict on each case of the list, by its name without the line."""
        return {_key(name): verdict for cases in self.reasons.values() for verdict, name in cases}

    def faults(self, results: Sequence[Outcome]) -> list[str]:
        """Where outcomes and list differ: what became worse, what became better, and what is there no more."""
        listed = self.verdicts()
        texts = []
        for outcome in results:
            known = listed.get(_key(outcome.name), RIGHT if outcome.kind == "read" else ALLOWED)
            if outcome.verdict != known and (outcome.differs or _key(outcome.name) in listed):
                texts.append(f"{outcome.name} is {outcome.verdict}, listed as {known}\n{outcome.detail}")
        here = {_key(outcome.name) for outcome in results}
        texts += [f"{key} is listed, but there is no such case" for key in listed if key not in here]
        return texts

    def renewed(self, results: Sequence[Outcome]) -> str:
        """The list as it has to be after these outcomes. Reasons are kept; what is new has none yet."""
        reason_of = {_key(name): why for why, cases in self.reasons.items() for _, name in cases}
        lines: dict[str, list[str]] = {why: [] for why in [UNEXPLAINED, *self.reasons]}
        for outcome in results:
            if outcome.differs:
                lines[reason_of.get(_key(outcome.name), UNEXPLAINED)].append(
                    f"{outcome.verdict} {outcome.name}"
                )
        parts = [self.head]
        parts += [
            f"- {why}\n" + "".join(f"{case}\n" for case in cases) for why, cases in lines.items() if cases
        ]
        return "\n".join(parts)


def _key(name: str) -> str:
    kind, template_, _, key = name.split()
    return f"{kind} {template_} {key}"


def table(results: Sequence[Outcome]) -> str:
    """A line for each template: how many of its cases are right, wrong, refused, and allowed by the grammar."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in results:
        counts[outcome.case.template][
            outcome.verdict if outcome.kind == "read" else f"{outcome.kind} {outcome.verdict}"
        ] += 1
    columns = (RIGHT, WRONG, REFUSED, UNSTABLE, "grammar allowed", "grammar forbidden", "grammar refused")
    total: Counter[str] = sum(counts.values(), Counter())
    lines = [f"{'template':52}" + "".join(f"{column:>18}" for column in columns)]
    for name, row in [*sorted(counts.items()), ("all", total)]:
        lines.append(f"{name:52}" + "".join(f"{row[column] or '':>18}" for column in columns))
    return "\n".join(lines)


def main() -> None:
    """Prints the table; with names of templates, the cases of these that differ. ``--write`` renews the list.

    ``--vllm``: the cases of vLLM instead of llama.cpp's; LLAMAPIPE_VLLM_SOURCE names the folder of its source.
    """
    wanted = sys.argv[1:]
    path = VLLM_LIST if "--vllm" in wanted else LIST
    results = list(vllm_outcomes() if "--vllm" in wanted else outcomes(llama_cpp_cases()))
    if "--write" in wanted:
        path.write_text(Differences(path.read_text(encoding="utf-8")).renewed(results), encoding="utf-8")
    for outcome in results:
        if outcome.differs and (any(name in outcome.case.template for name in wanted) or "all" in wanted):
            sys.stdout.write(f"{outcome.name} {outcome.verdict}\n{outcome.case.text!r}\n{outcome.detail}\n\n")
    sys.stdout.write(f"{table(results)}\n")


if __name__ == "__main__":
    main()
