"""Compiles grammars with llguidance and caches them by text and vocabulary.

The compiler checks the caller's text first, because llguidance silently ignores some mistakes. It passes on
llguidance's error messages without the lines that it has added around the caller's text.
"""

from __future__ import annotations

import json
import logging
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from time import thread_time
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from llamapipe.errors import DecodeError, InvalidRequestError
from llamapipe.host.at_exit import awaited_at_exit
from llamapipe.llama.model import Model
from llamapipe.llama.vocab import Vocab
from llamapipe.locks import Lock
from llamapipe.structured._grammar import SchemaGrammar
from llamapipe.structured._guide import DEAD_END, GrammarTokenizer, Guide, llguidance, message_of
from llamapipe.structured._logic import WAYS, without_logic
from llamapipe.structured._rewrite import Node, rewritten
from llamapipe.structured.budget import TooLongError
from llamapipe.structured.schema import (
    Schema,
    resolved,
    schema_object,
    schema_text,
    subschemas,
    with_options,
    without_options,
)

_log = logging.getLogger("llamapipe")

# Longest text of each kind, in characters. The limit bounds the time of a compilation, which cannot be stopped. The
# slowest known texts of this length take 3 to 10 s (design/sampling.md), ordinary texts less than a second.
MAX_CHARS = {"json_schema": 2**17, "regex": 2**16, "lark": 2**15, "choice": 2**17}
N_CACHED = 128  # grammars per vocabulary
# Items of the Earley parser in one step; llguidance's default is 50,000. For an ambiguous grammar, the time of a mask
# grows with the square of this number: a grammar of 60 characters takes 2.6 s at 50,000 and 0.03 s at 5,000. None of
# 250 schemas of jsonschemabench needs 2,000 for its instances, with vocabularies of 2,400 and of 152,000 tokens.
_MOST_ITEMS = 5000
# Work of the lexer in one step; llguidance's default is 200,000. A pattern that counts words, with a `maxLength`, takes
# up to 400,000 for a token. 1,000,000 take 0.15 s.
_LEXER_FUEL = 1_000_000

# Allows every token that continues the text, not only the tokenizer's own choice for forced text. The line follows the
# grammar, so that it shifts no position in an error message.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
# The most subschemas compiled alone to find the place of an error, and the most processor time for this.
_MAX_TRIED = 300
_MAX_WARNINGS = 20  # of one schema
_MAX_SEARCH_S = 2.0


class GuideFactory:
    """A compiled grammar, from which every request gets its own ``Guide``. Any thread.

    ``compile_again``: compiles a second matcher of the grammar, for guides that look ahead. ``is_exhausted``: the
    lexer, which all guides share, has reached its limit. New guides would fail immediately, so use another factory.
    """

    is_exhausted = False

    def __init__(self, start: Any, tokenizer: GrammarTokenizer, compile_again: Callable[[], Any]) -> None:
        self._start = start
        self._tokenizer = tokenizer
        self._compile_again = compile_again
        self._lock = Lock()
        self._second: Any = None

    def new(self) -> Guide:
        """Return a guide at the beginning of the grammar. Takes microseconds."""
        return Guide(self._start, self._tokenizer, self._other, self._exhausted)

    def _exhausted(self) -> None:
        self.is_exhausted = True

    def _other(self) -> Any:
        with self._lock:
            if self._second is None:
                self._second = self._compile_again()
            return self._second


def compile_guide(
    model: Model | Vocab,
    *,
    json_schema: Schema | None = None,
    regex: str | None = None,
    lark: str | None = None,
    choice: Sequence[str] | None = None,
    json_whitespace: str = "compact",
    space: str = "",
) -> GuideFactory:
    """Compile a JSON schema (dict, bool or JSON text), a regular expression, a Lark grammar or texts. Any thread.

    The same text is compiled once per vocabulary, without the GIL. The first grammar of a vocabulary also builds its
    tokenizer. A regular expression must match the whole output, so it needs no ``^`` and ``$``. ``choice``: the
    output is one of these texts. ``space``: an optional text before the choice. ``json_whitespace``: see
    ``SamplingParams``.

    Raises InvalidRequestError with llguidance's message and position if the text cannot be compiled, TypeError for
    other types, ValueError unless exactly one constraint is given, ImportError without llguidance.
    """
    options = {"json_schema": json_schema, "regex": regex, "lark": lark, "choice": choice}
    sources: dict[str, Any] = {kind: source for kind, source in options.items() if source is not None}
    if len(sources) != 1:
        raise ValueError(
            f"give one of json_schema, regex, lark and choice, not {' and '.join(sources) or 'none'}"
        )
    ((kind, source),) = sources.items()
    if kind == "json_schema":
        text = schema_text(source)
    elif kind == "choice":
        text = json.dumps([_checked(kind, choice) for choice in source])
    else:
        text = _checked(kind, source)
    _check_length(kind, text)
    compiler = _compiler(model.vocab if isinstance(model, Model) else model, kind)
    whitespace = {"json_schema": json_whitespace, "choice": space}.get(kind, "")
    return compiler.factory(kind, text, whitespace)


def _check_length(kind: str, text: str) -> None:
    """Raise TooLongError for a text above its limit.

    The grammar of a chat with tools contains the tools' schemas. The limit for schemas applies to them together.
    """
    lengths = {kind: len(text)}
    if kind == "lark" and len(text) > MAX_CHARS[kind]:
        n_schemas = sum(end - start for start, end, _, _ in _schemas_in(text))
        lengths = {kind: len(text) - n_schemas, "json_schema": n_schemas}
    for name, n in lengths.items():
        if n > MAX_CHARS[name]:
            raise TooLongError(f"{name} has {n} characters; the limit is {MAX_CHARS[name]}")


def prepare_vocabulary(vocab: Vocab) -> None:
    """Read a vocabulary for grammars before requests arrive; a second call does nothing. Any thread.

    llguidance holds the GIL for 0.1 s (32,000 tokens). Without llguidance, does nothing. A failure is only logged,
    because the requests that need the vocabulary, those with a constraint, raise the error.
    """
    try:
        _compiler(vocab, "a grammar")
    except ImportError:
        pass
    except Exception as error:
        _log.warning("the vocabulary cannot be read for grammars: %s", error)


def _checked(kind: str, text: Any) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{kind} must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidRequestError(f"{kind} has a lone surrogate at {e.start}") from None
    if "\0" in text:
        fix = "leave it out" if kind == "choice" else "write it as an escape"
        raise InvalidRequestError(f"{kind} has a NUL character at {text.index(chr(0))}; {fix}")
    return text


@dataclass
class _Entry:
    lock: Lock = field(default_factory=Lock)
    factory: GuideFactory | None = None


class _Compiler:
    """One vocabulary's tokenizer and an LRU cache of the grammars compiled for it."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._entries: OrderedDict[tuple[str, str, str], _Entry] = OrderedDict()

    def factory(self, kind: str, text: str, whitespace: str) -> GuideFactory:
        key = (kind, text, whitespace)
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if len(self._entries) > N_CACHED:
                self._entries.popitem(last=False)
        with entry.lock:  # a slow grammar delays only requests for the same grammar
            if entry.factory is None or entry.factory.is_exhausted:
                try:
                    entry.factory = self._compile(kind, text, whitespace)
                except BaseException:
                    with self._lock:
                        if self._entries.get(key) is entry:
                            del self._entries[key]
                    raise
            return entry.factory

    def _compile(self, kind: str, text: str, whitespace: str) -> GuideFactory:
        if kind == "json_schema":
            schema, start = self._schema(schema_object(text), whitespace)
            written = schema.alone()
            start = start or self._matcher(written)
            if start.is_error() and (mended := self._without_empty_definitions(schema)) is not schema:
                schema, written = mended, mended.alone()
                start = self._matcher(written)
            if start.is_error():
                raise InvalidRequestError(self._schema_error(schema.grammar, message_of(start)))
        else:
            schemas: list[_Written] = []
            if kind == "choice":
                written = _grammar(_choice_grammar(json.loads(text), whitespace))
            elif kind == "regex":
                written = _regex_grammar(text)
            else:
                written, schemas = self._with_rewritten_schemas(text)
            start = self._matcher(written)
            if schemas and start.is_error() and _UNSATISFIABLE in message_of(start):
                written, schemas = self._with_rewritten_schemas(text, leaves_out=True)
                start = self._matcher(written)
            if start.is_error():
                # The answers of a chat follow our Lark grammar, which contains the caller's schemas. Report an error in
                # such a schema as an error in a JSON schema, without our lines.
                for schema in schemas:
                    alone = self._matcher(schema.alone())
                    if alone.is_error():
                        raise InvalidRequestError(self._schema_error(schema.grammar, message_of(alone)))
                message = _without_ours(message_of(start), kind)
                if kind == "regex":
                    message = re.sub("^'pattern'", "it", _told(_IN_OUR_LINE.sub("", message)))
                raise InvalidRequestError(f"{kind} cannot be compiled: {message}")
        factory = GuideFactory(start, self._tokenizer, lambda: self._matcher(written))
        # llguidance compiles lazily. Try the first token now, so that a bad grammar fails here, not in a request.
        with awaited_at_exit(), factory.new() as guide:
            try:
                guide.prepare()
            except DecodeError as e:
                place = " at #:" if kind == "json_schema" else ""
                problem = "allows no first token" if DEAD_END in str(e) else "is too large"
                raise InvalidRequestError(f"{kind}{place} {problem}: {e}") from None
            try:
                guide.accept_any()
            except DecodeError as e:
                raise InvalidRequestError(f"{kind} is too large: {e}") from None
        return factory

    def _matcher(self, grammar: str) -> Any:
        library = llguidance("a grammar")
        limits = library.LLParserLimits(
            verbose_errors=False, step_max_items=_MOST_ITEMS, step_lexer_fuel=_LEXER_FUEL
        )
        with awaited_at_exit():
            return library.LLMatcher(self._tokenizer.native, grammar, log_level=0, limits=limits)

    def _schema(self, schema: dict[str, Any], whitespace: str) -> tuple[_Written, Any]:
        """Check a schema and rewrite it with as many alternatives as the grammar can have.

        Returns the rewritten schema, and its matcher if one was compiled, else None.
        """
        result: _Written | None = None
        start = None
        attempts = [(max_ways, False) for max_ways in WAYS]
        if any("contains" in part for _, part in subschemas(schema, logic=True)):
            attempts.insert(0, (WAYS[0], True))
        for max_ways, counts_items in attempts:
            is_last = max_ways == WAYS[-1]
            try:
                last, result = result, _written(schema, whitespace, max_ways, counts_items)
            except InvalidRequestError:
                if is_last:
                    raise
                continue
            if result.is_plain:
                break
            if last is not None and last.grammar.root == result.grammar.root:
                continue
            start = self._matcher(result.alone())
            if not start.is_error() or not (counts_items or _TOO_LARGE.search(message_of(start))):
                break
        assert result is not None
        if result.lark is not None:
            result, start = self._without_empty(result, start)
        for warning in result.warnings[:_MAX_WARNINGS]:
            _log.warning("%s", warning)
        if len(result.warnings) > _MAX_WARNINGS:
            _log.warning("json_schema: %d more warnings of this kind", len(result.warnings) - _MAX_WARNINGS)
        return result, start

    def _without_empty(self, result: _Written, start: Any) -> tuple[_Written, Any]:
        """Leave out the parts for llguidance's compiler that allow nothing, because it refuses a grammar with one.

        Returns the schema, and its matcher.
        """
        start = start or self._matcher(result.alone())
        if not start.is_error() or _UNSATISFIABLE not in message_of(start):
            return result, start
        grammar = SchemaGrammar(self._without_empty_references(result.grammar), result.whitespace)
        result = replace(result, grammar=grammar, lark=grammar.text())
        empty: dict[str, str] = {}
        until_s = thread_time() + _MAX_SEARCH_S
        for key, (pointer, part) in islice(result.grammar.plain.items(), _MAX_TRIED):
            matcher = self._matcher(_bare_json_grammar(part))
            if matcher.is_error() and _UNSATISFIABLE in (message := message_of(matcher)):
                empty[key] = f"json_schema cannot be compiled at {pointer}: {_told(message)}"
            if thread_time() > until_s:
                break
        grammar = SchemaGrammar(result.grammar.root, result.whitespace)
        result = replace(result, grammar=grammar, lark=grammar.text(empty))
        return result, self._matcher(result.alone())

    def _without_empty_definitions(self, schema: _Written) -> _Written:
        """Return the schema with ``false`` for references to definitions that allow nothing.

        llguidance leaves out alternatives and members that allow nothing, but it refuses references to such schemas.
        """
        if schema.lark is not None or _IN_REFERENCE not in message_of(self._matcher(schema.alone())):
            return schema
        root = self._without_empty_references(schema.grammar)
        if root is schema.grammar.root:
            return schema
        return replace(schema, grammar=SchemaGrammar(root, schema.whitespace))

    def _without_empty_references(self, grammar: SchemaGrammar) -> Node:
        """Return the schema of ``_without_empty_definitions``: the same object if no definition is empty.

        A definition that refers to an empty one may allow something without it, such as an array without items. So it
        is looked at again when that reference is ``false``.
        """
        root: Node = json.loads(json.dumps(grammar.root))
        uses: dict[str, list[tuple[Any, int | str]]] = {}  # where each definition is referred to
        for pointer, part in [*subschemas(root)][:_MAX_TRIED]:
            place = resolved(root, part.get("$ref"))
            above, _, name = pointer.rpartition("/")
            holder = resolved(root, quote(above, safe="#/~$"))
            if place is not None and holder is not None and pointer != "#" and place[0] not in grammar.hard:
                name = name.replace("~1", "/").replace("~0", "~")
                key = int(name) if isinstance(holder[1], list) else name
                uses.setdefault(place[0], []).append((holder[1], key))
        until_s = thread_time() + _MAX_SEARCH_S
        empty: set[str] = set()
        n_before = -1
        while len(empty) > n_before:
            n_before = len(empty)
            for pointer in uses.keys() - empty:
                if thread_time() < until_s and self._allows_nothing(root, pointer):
                    empty.add(pointer)
                    for owner, key in uses[pointer]:
                        owner[key] = False
        return root if empty else grammar.root

    def _allows_nothing(self, root: Node, pointer: str) -> bool:
        """Return whether a definition allows nothing, whatever the definitions that it refers to."""
        place = resolved(root, quote(pointer, safe="#/~$"))
        if place is None or not isinstance(place[1], dict):
            return place is not None and place[1] is False
        shared: Node = {key: root[key] for key in ("$schema", "$id", "$defs", "definitions") if key in root}
        matcher = self._matcher(_bare_json_grammar({**shared, **place[1]}))
        message = message_of(matcher) if matcher.is_error() else ""
        return _UNSATISFIABLE in message and _IN_REFERENCE not in message

    def _with_rewritten_schemas(self, lark: str, leaves_out: bool = False) -> tuple[str, list[_Written]]:
        """Return the grammar of a Lark text with its schemas from ``with_options`` rewritten, and these schemas.

        If the i-th schema is itself written in Lark, the text refers to it as ``@json_i``. ``leaves_out``: leave out
        references to definitions that allow nothing.
        """
        parts: list[str] = []
        schemas: list[_Written] = []
        at = 0
        for start, end, schema, whitespace in _schemas_in(lark):
            result, _ = self._schema(schema, whitespace)
            if leaves_out:
                result = self._without_empty_definitions(result)
            plain = f"%json {json.dumps(with_options(result.grammar.root, whitespace))}"
            parts += [lark[at:start], plain if result.lark is None else f"@json_{len(schemas)}"]
            schemas.append(result)
            at = end
        larks = {f"json_{i}": schema.lark for i, schema in enumerate(schemas)}
        others = {name: lark for name, lark in larks.items() if lark is not None}
        return _grammar("".join([*parts, lark[at:]]), others), schemas

    def _schema_error(self, grammar: SchemaGrammar, message: str) -> str:
        """Return the error message with a JSON pointer.

        llguidance does not name the place, so each subschema is compiled alone.
        """
        schema = grammar.root
        shared: dict[str, Any] = {
            key: schema[key] for key in ("$schema", "$id", "$defs", "definitions") if key in schema
        }
        place = ""
        if grammar.is_needed:  # all but the first line of the message quotes our lines
            message = message.split("\n", maxsplit=1)[0]
        until_s = thread_time() + _MAX_SEARCH_S
        for n, (pointer, part) in enumerate(subschemas(schema)):
            if message.startswith(_TOO_DEEP) or n == _MAX_TRIED or thread_time() > until_s:
                break
            if not pointer.startswith(place) or pointer in grammar.hard:
                continue
            matcher = self._matcher(_bare_json_grammar({**shared, **part}))
            if matcher.is_error() and (not place or message_of(matcher) == message):
                place, message = pointer, message_of(matcher)
        if "schema is false" in message:
            message = f"'false' allows no value: {message}"
        return f"json_schema cannot be compiled at {place or '#'}: {_without_ours(_told(message), 'json_schema')}"


def _choice_grammar(texts: list[str], space: str) -> str:
    """Write texts as one terminal, whose automaton shares the texts' prefixes.

    ``space``: an optional text before each of them.
    """
    choices = " | ".join(map(json.dumps, dict.fromkeys(texts)))
    return f"start: CHOICE\nCHOICE: {f'{json.dumps(space)}? ({choices})' if space else choices}"


def _json_grammar(schema: dict[str, Any], whitespace: str) -> str:
    """Write a schema inside a Lark grammar, because forcing can be turned off only there."""
    return _grammar(f"start: %json {json.dumps(with_options(schema, whitespace))}")


def _bare_json_grammar(schema: dict[str, Any]) -> str:
    """Write a schema without a Lark grammar around it, which error messages would quote."""
    return json.dumps({"grammars": [{"json_schema": with_options(schema, "compact")}]})


def _regex_grammar(text: str) -> str:
    with awaited_at_exit():
        written = json.loads(llguidance("regex").LLMatcher.grammar_from_regex(text))
    return _grammar(written["grammars"][0]["lark_grammar"])


def _grammar(lark: str, others: Mapping[str, str] = MappingProxyType({})) -> str:
    """Write the top-level grammar. ``others``: further Lark grammars, by the names that ``lark`` has for them."""
    named = [{"name": name, "lark_grammar": other} for name, other in others.items()]
    return json.dumps({"grammars": [{"lark_grammar": lark + _NO_FORCING}, *named]})


@dataclass(frozen=True)
class _Written:
    """A schema for llguidance. ``lark``: its grammar if llguidance's compiler would not enforce the schema exactly."""

    grammar: SchemaGrammar
    lark: str | None
    whitespace: str
    warnings: list[str]
    is_plain: bool  # True if no keyword was replaced with alternatives, which might be too many

    def alone(self) -> str:
        """Return the grammar of this schema only."""
        return _json_grammar(self.grammar.root, self.whitespace) if self.lark is None else _grammar(self.lark)


_TOO_DEEP = "recursion limit exceeded"
# Patterns of llguidance's errors that do not name the fix, and our texts in their place.
_TOLD: Final = (
    (
        r"^Resource '(?:json-schema:///)?([^']*)'",
        r"'$ref' to another document, '\1'; put what it refers to into '$defs'",
    ),
    (
        r"^Anchor '([^']*)' does not exist",
        r"'$ref' to the anchor '\1', which is not found here; refer to it by a JSON pointer, such as '#/$defs/\1'",
    ),
    (
        r'^Unimplemented keys: \["([^"]*)"',
        r"'\1' is not supported; leave it out, and look for it in the result",
    ),
    (
        r"^patternProperty regexes (.*) and (.*) are not disjoint",
        r"'patternProperties': \1 and \2 may match the same name; write patterns that exclude each other",
    ),
    (
        r"^circular references with sibling keys",
        r"'$ref' in a circle, together with other keywords; move these into the schema that it refers to",
    ),
    (
        r"^Schema intersection stack level exceeded",
        r"'allOf' or '$ref' combines too many schemas, or one with itself; write what they say in one schema",
    ),
    (
        r"(?s)^regex parse error:\n(.*)\nerror: ([^\n]*)(?:\n.*)?$",  # reason first, as some callers show one line
        r"'pattern' is not a regular expression that can be followed: \2:\n\1",
    ),
    (
        r"^lookarounds not supported yet; (?:Word|NotWord|Start|End)\w* in regex (/.*)",
        r"'pattern' has '\\b', '\\B', or '^' or '$' between other characters, in \1; leave it out",
    ),
    (
        r"^Unable to determine if regex is empty",
        r"'pattern' is too complex together with 'format', a length or another pattern; leave one of them out",
    ),
    (
        r"^min/maxProperties only supported when all keys",
        r"'minProperties' and 'maxProperties' need all 'properties' in 'required' here; leave the count out",
    ),
    (
        rf"^{_TOO_DEEP}.*",
        "it has more than 126 levels of objects and lists, llguidance's limit; move inner schemas to '$defs'",
    ),
    (
        r"^Unknown format: (.*)",
        r"'format' is \1 in a document that '$ref' names; copy what is needed into '$defs'",
    ),
)

# The place of a regex in the one line of Lark that we write for it, and its text, which the message repeats.
_IN_OUR_LINE = re.compile(r'^at 1\([0-9]+\): invalid regex ".*" \(in regex\): ')


def _told(message: str) -> str:
    """Return the message with the fix, if llguidance does not name it."""
    for pattern, told in _TOLD:
        if (matched := re.search(pattern, message)) is not None:
            return matched.expand(told)
    return message


_UNSATISFIABLE = "Unsatisfiable schema"
_IN_REFERENCE = "while processing"  # in a message about a part that another one refers to
# Errors of llguidance about too many alternatives, or about combinations that it does not support.
_TOO_LARGE = re.compile(
    "too large|stack level|Unable to determine|not disjoint|circular|grammar.symbols|only supported when all keys"
)


def _written(schema: dict[str, Any], whitespace: str, max_ways: int, counts_items: bool) -> _Written:
    try:
        plain, warnings = without_logic(schema, max_ways, counts_items)
        root, more = rewritten(plain)
        grammar = SchemaGrammar(root, whitespace)
        lark = grammar.text() if grammar.is_needed else None
        return _Written(grammar, lark, whitespace, [*warnings, *more], plain == schema)
    except RecursionError:
        raise InvalidRequestError(
            "json_schema at #: it is nested too deeply for its keywords; move inner schemas to '$defs'"
        ) from None


def _schemas_in(lark: str) -> Iterator[tuple[int, int, dict[str, Any], str]]:
    """Yield the start, end, schema and whitespace of each ``%json`` element of ``with_options`` in a grammar."""
    at = 0
    for match in re.finditer(r"%json (?=\{)", lark):
        if match.start() < at:
            continue  # inside a schema
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, match.end())
        except ValueError:
            continue
        original = without_options(schema)
        if original is not None:
            at = end
            yield match.start(), end, *original


def _without_ours(message: str, kind: str) -> str:
    """Return the message without quoting the lines that were added to the caller's text."""
    if kind != "lark":  # drop our one-line Lark grammar, which follows the message about the text
        message = message.partition("\n   1 | start: ")[0]
    return "\n".join(line for line in message.splitlines() if not line.endswith(_NO_FORCING.strip()))


_compilers: weakref.WeakKeyDictionary[Vocab, _Compiler] = weakref.WeakKeyDictionary()
_lock = Lock()


def _compiler(vocab: Vocab, kind: str) -> _Compiler:
    with _lock:
        compiler = _compilers.get(vocab)
        if compiler is None:
            compiler = _compilers[vocab] = _Compiler(GrammarTokenizer(vocab, kind))
        return compiler
