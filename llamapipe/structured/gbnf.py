"""Checks a GBNF grammar before llama.cpp reads it.

It refuses grammars that would crash llama.cpp's parser, make it loop forever, or be silently read as something else.
The text is read without recursion, and every error names its line and column.
"""

from __future__ import annotations

from collections.abc import Iterator

from llamapipe.arguments import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.vocab import Vocab
from llamapipe.structured.gbnf_reader import GbnfReader
from llamapipe.structured.gbnf_rules import TERMINAL, Alternative, Rules

MAX_BYTES = 2**18
# Ways to reach a first character. llama.cpp keeps a stack for each and compares every stack with all others.
MAX_STACKS = 5000
MAX_CHAIN = 1000  # rules that begin with each other; llama.cpp recurses through them


def check_gbnf(text: str, vocab: Vocab | None = None) -> None:
    r"""Refuses a GBNF text that llama.cpp's parser cannot handle safely. Any thread, pure Python.

    llama.cpp crashes on deep brackets and long chains of rules (stack overflow). It never returns from ``{3,1}``, from
    left recursion after rules that may be empty, or from rules whose alternatives double with each level. It reads
    ``{1,3000}`` as ``{1,}`` and keeps the last of two rules with the same name. All of these are errors here. With
    ``vocab``, ``<[id]>`` and ``<text>`` must be tokens of that vocabulary.

    A grammar that passes can still take very long to run: llama.cpp tries every way to match a token, and eight
    ``[ \t]*`` in a row have too many ways for a token of many spaces.

    Raises InvalidRequestError with line and column, TypeError if ``text`` is not a str.
    """
    if not isinstance(text, str):
        raise TypeError(f"grammar must be a str, not {type(text).__name__}")
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError as e:
        raise InvalidRequestError(f"grammar: a lone surrogate at {e.start}") from None
    if n_bytes > MAX_BYTES:
        raise InvalidRequestError(f"grammar: the text has {n_bytes} bytes; the limit is {MAX_BYTES}")
    reader = GbnfReader(text)
    if "\0" in text:
        raise reader.error("a NUL character", text.index("\0"))
    rules = reader.read()
    for name, rule in rules.names.items():
        if rule not in rules.alternatives:
            raise reader.error(f"the rule {quoted(name)} is not defined", rules.first_used[name])
    if "root" not in rules.names:
        raise InvalidRequestError("grammar: the rule 'root' is not defined; it is where the text begins")
    if vocab is not None:
        _check_tokens(rules, reader, vocab)
    _check_beginnings(rules)


def _check_tokens(rules: Rules, reader: GbnfReader, vocab: Vocab) -> None:
    for at, token in rules.tokens:
        if isinstance(token, str):
            if len(vocab.tokenize(token, add_special=False, parse_special=True)) != 1:
                raise reader.error(f"{token} is not one token of this vocabulary", at)
        elif token >= vocab.n_vocab:
            raise reader.error(f"token {token}; this vocabulary has the ids 0 to {vocab.n_vocab - 1}", at)


def _check_beginnings(rules: Rules) -> None:
    """Refuses left recursion, long chains of rules, and too many ways to begin."""
    empty = _nullable(rules)
    edges = {
        rule: [edge for one in alternatives for edge in _first(one, empty)]
        for rule, alternatives in rules.alternatives.items()
    }
    direct = {rule for rule, alternatives in rules.alternatives.items() if [] in alternatives}
    names = {rule: name for name, rule in rules.names.items()}
    n_stacks: dict[int, int] = {}
    chain: dict[int, int] = {}
    for group in _components({rule: [to for to, _ in out] for rule, out in edges.items()}):
        members = set(group)
        inner = [(rule, to, last) for rule in group for to, last in edges[rule] if to in members]
        # A rule that ends with itself, after rules that may be empty, is not left recursion. llama.cpp refuses some of
        # these all the same: it only knows rules with an empty alternative of their own as empty.
        grows = any(not last for _, _, last in inner)
        if grows or (inner and _cycle_for_llama(rules, members, direct)):
            known = ", ".join(sorted(names[rule] for rule in group if rule in names))
            raise InvalidRequestError(
                f"grammar: left recursion: {known or 'a repetition of what may be empty'} can begin with itself; "
                "let it begin with something that is never empty"
            )
        ways = sum(len(rules.alternatives[rule]) for rule in group)
        ways += sum(n_stacks[to] for rule in group for to, _ in edges[rule] if to not in members)
        length = len(group) + max(
            (chain[to] for r in group for to, _ in edges[r] if to not in members), default=0
        )
        for rule in group:
            n_stacks[rule], chain[rule] = ways, length
        if ways > MAX_STACKS or length > MAX_CHAIN:
            what = (
                f"{MAX_STACKS} ways to begin"
                if ways > MAX_STACKS
                else f"{MAX_CHAIN} rules that begin with one another"
            )
            named = next((names[rule] for rule in group if rule in names), None)
            where = f"the rule {quoted(named)}" if named else "a repetition or bracket"
            raise InvalidRequestError(f"grammar: {where} has more than {what}")


def _nullable(rules: Rules) -> set[int]:
    """Rules that may be empty, directly or through other rules."""
    users: dict[int, list[tuple[int, int]]] = {}
    missing: dict[tuple[int, int], int] = {}
    found: list[int] = []
    for rule, alternatives in rules.alternatives.items():
        for i, one in enumerate(alternatives):
            if TERMINAL in one:
                continue
            missing[rule, i] = len(one)
            if not one:
                found.append(rule)
            for to in one:
                users.setdefault(to, []).append((rule, i))
    empty: set[int] = set()
    while found:
        rule = found.pop()
        if rule in empty:
            continue
        empty.add(rule)
        for user in users.get(rule, ()):
            missing[user] -= 1
            if missing[user] == 0:
                found.append(user[0])
    return empty


def _first(one: Alternative, empty: set[int]) -> Iterator[tuple[int, bool]]:
    """The rules that an alternative can begin with; True if the rule is its last symbol."""
    for i, to in enumerate(one):
        if to == TERMINAL:
            return
        yield to, i == len(one) - 1
        if to not in empty:
            return


def _cycle_for_llama(rules: Rules, members: set[int], direct: set[int]) -> bool:
    """True if llama.cpp's own search finds a cycle here. It skips only rules that have an empty alternative."""
    edges = {
        rule: [to for one in rules.alternatives[rule] for to, _ in _first(one, direct) if to in members]
        for rule in members
    }
    return any(len(group) > 1 or group[0] in edges[group[0]] for group in _components(edges))


def _components(edges: dict[int, list[int]]) -> Iterator[list[int]]:
    """The strongly connected components, each after all it leads to: Tarjan's algorithm without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    held: list[int] = []
    on_hold: set[int] = set()
    for start, out in edges.items():
        if start in index:
            continue
        work = [(start, iter(out))]
        index[start] = low[start] = len(index)
        held.append(start)
        on_hold.add(start)
        while work:
            node, targets = work[-1]
            for to in targets:
                if to not in index:
                    index[to] = low[to] = len(index)
                    held.append(to)
                    on_hold.add(to)
                    work.append((to, iter(edges[to])))
                    break
                if to in on_hold:
                    low[node] = min(low[node], index[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    group = [held.pop()]
                    while group[-1] != node:
                        group.append(held.pop())
                    on_hold.difference_update(group)
                    yield group
