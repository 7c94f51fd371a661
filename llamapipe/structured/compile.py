"""Compiles grammars with llguidance and caches them by text and vocabulary.

The compiler checks the caller's text first, because llguidance ignores some mistakes silently. Its error messages are
passed on without the lines that were written around that text.
"""

from __future__ import annotations

import json
import logging
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from llamapipe.errors import DecodeError, InvalidRequestError
from llamapipe.host.at_exit import awaited_at_exit
from llamapipe.llama.model import Model
from llamapipe.llama.vocab import Vocab
from llamapipe.locks import Lock
from llamapipe.structured._grammar import SchemaGrammar
from llamapipe.structured._guide import DEAD_END, GrammarTokenizer, Guide, llguidance, message_of
from llamapipe.structured._rewrite import rewritten
from llamapipe.structured.schema import (
    Schema,
    schema_object,
    schema_text,
    subschemas,
    whitespace_of,
    with_options,
    without_options,
)

_log = logging.getLogger("llamapipe")

# Longest text of each kind, in characters. It bounds the time of a compilation, which cannot be stopped: the slowest
# texts of this length that are known take 3 to 10 s (design/sampling.md), ordinary ones less than a second.
MAX_CHARS = {"json_schema": 2**17, "regex": 2**16, "lark": 2**15, "choice": 2**17}
N_CACHED = 128

# Allows every token that continues the text, not only the tokenizer's own choice for forced text. It stands after the
# grammar, so that it shifts no position in an error message.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_MAX_TRIED = 300


class GuideFactory:
    """A compiled grammar, from which every request gets its own ``Guide``. Any thread.

    ``compile_again``: makes a second matcher of the grammar, if a guide looks ahead.
    """

    def __init__(self, start: Any, tokenizer: GrammarTokenizer, compile_again: Callable[[], Any]) -> None:
        self._start = start
        self._tokenizer = tokenizer
        self._compile_again = compile_again
        self._lock = Lock()
        self._second: Any = None

    def new(self) -> Guide:
        """A guide at the beginning of the grammar; takes microseconds."""
        return Guide(self._start, self._tokenizer, self._other)

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
) -> GuideFactory:
    """Compiles a JSON schema (dict, bool or JSON text), a regular expression, a Lark grammar or texts. Any thread.

    The same text is compiled once per vocabulary, without the GIL. The first grammar of a vocabulary also builds its
    tokenizer. A regular expression must match the whole output, so it needs no ``^`` and ``$``. ``choice``: texts, of
    which the output is one. ``json_whitespace``: see ``SamplingParams``.

    Raises InvalidRequestError with llguidance's message and position if the text cannot be compiled, TypeError for
    other types, ValueError unless exactly one is given, ImportError without llguidance.
    """
    given: dict[str, Any] = {
        kind: source
        for kind, source in (
            ("json_schema", json_schema),
            ("regex", regex),
            ("lark", lark),
            ("choice", choice),
        )
        if source is not None
    }
    if len(given) != 1:
        raise ValueError(
            f"give one of json_schema, regex, lark and choice, not {' and '.join(given) or 'none'}"
        )
    ((kind, source),) = given.items()
    if kind == "json_schema":
        text = schema_text(source)
    elif kind == "choice":
        text = json.dumps([_checked(kind, choice) for choice in source])
    else:
        text = _checked(kind, source)
    _check_length(kind, text)
    compiler = _compiler(model.vocab if isinstance(model, Model) else model, kind)
    return compiler.factory(kind, text, json_whitespace if kind == "json_schema" else "")


class TooLongError(InvalidRequestError):
    """A grammar or a schema over the limit of its length."""


def _check_length(kind: str, text: str) -> None:
    """Raises TooLongError for a text over its limit.

    The grammar of a chat with tools holds their schemas, for which the limit of schemas is meant.
    """
    lengths = {kind: len(text)}
    if kind == "lark" and len(text) > MAX_CHARS[kind]:
        n_schemas = sum(end - start for start, end, _, _ in _schemas_in(text))
        lengths = {kind: len(text) - n_schemas, "json_schema": n_schemas}
    for name, n in lengths.items():
        if n > MAX_CHARS[name]:
            raise TooLongError(f"{name} has {n} characters; the limit is {MAX_CHARS[name]}")


def prepare_vocabulary(vocab: Vocab) -> None:
    """Reads a vocabulary for grammars before requests come; a second call does nothing. Any thread.

    llguidance holds the interpreter's lock meanwhile: 0.1 s for 32,000 tokens. Without llguidance this does nothing. A
    failure is logged: only requests with a constraint need the vocabulary, and they raise the error.
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
        raise InvalidRequestError(
            f"{kind} has a NUL character at {text.index(chr(0))}; write it as an escape"
        )
    return text


class _Entry:
    def __init__(self) -> None:
        self.lock = Lock()
        self.factory: GuideFactory | None = None


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
            if entry.factory is None:
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
            grammar, lark = _written(schema_object(text), whitespace)
            written = _json_grammar(grammar.root, whitespace) if lark is None else _grammar(lark)
            start = self._matcher(written)
            if start.is_error():
                raise InvalidRequestError(self._schema_error(grammar, message_of(start)))
        elif kind == "choice":
            written = _grammar(_choice_grammar(json.loads(text)))
            start = self._matcher(written)
            if start.is_error():
                raise InvalidRequestError(f"choice cannot be compiled: {message_of(start)}")
        elif kind == "regex":
            written = _regex_grammar(text)
            start = self._matcher(written)
            if start.is_error():
                raise InvalidRequestError(
                    f"regex cannot be compiled: {_without_ours(message_of(start), kind)}"
                )
        else:
            text, schemas = _with_rewritten_schemas(text)
            others = {f"json_{i}": lark for i, (_, lark) in enumerate(schemas) if lark is not None}
            written = _grammar(text, others)
            start = self._matcher(written)
            if start.is_error():
                # The answers of a chat follow a Lark grammar that we wrote around the caller's schemas. An error about
                # a schema there is told as one about a schema, and quotes none of our lines.
                for grammar, lark in schemas:
                    alone = self._matcher(
                        _json_grammar(grammar.root, "compact") if lark is None else _grammar(lark)
                    )
                    if alone.is_error():
                        raise InvalidRequestError(self._schema_error(grammar, message_of(alone)))
                raise InvalidRequestError(
                    f"lark cannot be compiled: {_without_ours(message_of(start), kind)}"
                )
        factory = GuideFactory(start, self._tokenizer, lambda: self._matcher(written))
        # llguidance compiles lazily. Try the first token now, so that a bad grammar fails here and not in a request.
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
        limits = library.LLParserLimits(verbose_errors=False)
        with awaited_at_exit():
            return library.LLMatcher(self._tokenizer.native, grammar, log_level=0, limits=limits)

    def _schema_error(self, grammar: SchemaGrammar, message: str) -> str:
        """The error message with a JSON pointer. llguidance names no place, so each subschema is compiled alone."""
        schema = grammar.root
        shared: dict[str, Any] = {
            key: schema[key] for key in ("$schema", "$id", "$defs", "definitions") if key in schema
        }
        found = ""
        if grammar.is_needed:  # the rest of the message quotes our lines
            message = message.split("\n", maxsplit=1)[0]
        for n, (pointer, part) in enumerate(subschemas(schema)):
            if n == _MAX_TRIED:
                break
            if not pointer.startswith(found) or pointer in grammar.hard:
                continue
            matcher = self._matcher(_bare_json_grammar({**shared, **part}))
            if matcher.is_error() and (not found or message_of(matcher) == message):
                found, message = pointer, message_of(matcher)
        if message.startswith("Resource "):
            message = f"'$ref' to another document: {message}; put what it refers to into '$defs'"
        elif "schema is false" in message:
            message = f"'false' allows no value: {message}"
        return f"json_schema cannot be compiled at {found or '#'}: {_without_ours(message, 'json_schema')}"


def _choice_grammar(texts: list[str]) -> str:
    """Texts as one terminal: the automaton of a terminal shares what they begin with."""
    return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, dict.fromkeys(texts)))}"


def _json_grammar(schema: dict[str, Any], whitespace: str) -> str:
    """A schema inside a Lark grammar: only there can forcing be turned off."""
    return _grammar(f"start: %json {json.dumps(with_options(schema, whitespace))}")


def _bare_json_grammar(schema: dict[str, Any]) -> str:
    """A schema without a Lark grammar around it, which error messages would quote."""
    return json.dumps({"grammars": [{"json_schema": with_options(schema, "compact")}]})


def _regex_grammar(text: str) -> str:
    with awaited_at_exit():
        written = json.loads(llguidance("regex").LLMatcher.grammar_from_regex(text))
    return _grammar(written["grammars"][0]["lark_grammar"])


def _grammar(lark: str, others: Mapping[str, str] = MappingProxyType({})) -> str:
    """``others``: further Lark grammars, by the names with which ``lark`` refers to them."""
    named = [{"name": name, "lark_grammar": other} for name, other in others.items()]
    return json.dumps({"grammars": [{"lark_grammar": lark + _NO_FORCING}, *named]})


def _written(schema: dict[str, Any], whitespace: str) -> tuple[SchemaGrammar, str | None]:
    """A checked schema, rewritten; and the Lark of a schema that llguidance's compiler does not follow exactly."""
    try:
        grammar = SchemaGrammar(rewritten(schema), whitespace)
        return grammar, grammar.text() if grammar.is_needed else None
    except RecursionError:
        raise InvalidRequestError("json_schema at #: it is nested too deeply") from None


def _with_rewritten_schemas(lark: str) -> tuple[str, list[tuple[SchemaGrammar, str | None]]]:
    """A Lark grammar whose schemas, those of ``with_options``, are rewritten; and what was written for each of them.

    The grammar refers to the Lark of the i-th schema, if there is one, as ``@json_i``.
    """
    parts: list[str] = []
    schemas: list[tuple[SchemaGrammar, str | None]] = []
    at = 0
    for start, end, schema, whitespace in _schemas_in(lark):
        grammar, own = _written(schema, whitespace)
        plain = f"%json {json.dumps(with_options(grammar.root, whitespace))}"
        parts += [lark[at:start], plain if own is None else f"@json_{len(schemas)}"]
        schemas.append((grammar, own))
        at = end
    return "".join([*parts, lark[at:]]), schemas


def _schemas_in(lark: str) -> Iterator[tuple[int, int, dict[str, Any], str]]:
    """The elements of a Lark grammar that ``with_options`` made: start, end, schema and kind of spaces."""
    at = 0
    for found in re.finditer(r"%json (?=\{)", lark):
        if found.start() < at:
            continue  # inside a schema
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
        except ValueError:
            continue
        whitespace = whitespace_of(schema)
        if whitespace is not None:
            at = end
            yield found.start(), end, without_options(schema) or {}, whitespace


def _without_ours(message: str, kind: str) -> str:
    """The message without quotes of the lines that were added to the caller's text."""
    if kind != "lark":  # the one-line Lark grammar is ours; the message about the text precedes it
        message = message.partition("\n   1 | start: ")[0]
    return "\n".join(line for line in message.splitlines() if not line.endswith(_NO_FORCING.strip()))


_compilers: weakref.WeakKeyDictionary[Vocab, _Compiler] = weakref.WeakKeyDictionary()
_lock = Lock()


def _compiler(vocab: Vocab, kind: str) -> _Compiler:
    with _lock:
        found = _compilers.get(vocab)
        if found is None:
            found = _compilers[vocab] = _Compiler(GrammarTokenizer(vocab, kind))
        return found
