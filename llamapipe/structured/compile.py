"""Compiles grammars with llguidance, once for each text and vocabulary."""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from typing import Any

from llamapipe.errors import DecodeError, InvalidRequestError
from llamapipe.llama.model import Model
from llamapipe.llama.vocab import Vocab
from llamapipe.structured.guide import Guide, message_of
from llamapipe.structured.library import llguidance
from llamapipe.structured.schema import Schema, schema_object, schema_text, subschemas
from llamapipe.structured.tokenizer import GrammarTokenizer

# Longest text of each kind, in characters: what llguidance compiles in about a second at worst (a Lark grammar of many
# alternatives takes time in their square).
MAX_CHARS = {"json_schema": 2**17, "regex": 2**16, "lark": 2**15}
N_CACHED = 128

# At most one of these where JSON may have spaces: enough for every usual layout, and a model that has nothing left to
# say cannot go on with spaces for ever.
_SPACE = r"\x20{1,2}|\n[\x20\t]{0,40}"
# Any token that continues the text is allowed, not only the one that the tokenizer would take for forced text. Placed
# behind the grammar, where it moves no position in a message.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
_MAX_TRIED = 300


class GuideFactory:
    """A compiled grammar: makes the guides of any number of requests. Any thread."""

    def __init__(self, start: Any, tokenizer: GrammarTokenizer) -> None:
        self._start = start
        self._tokenizer = tokenizer

    def new(self) -> Guide:
        """The state of one request, at the grammar's beginning; costs microseconds."""
        return Guide(self._start, self._tokenizer)


def compile_guide(
    model: Model | Vocab,
    *,
    json_schema: Schema | None = None,
    regex: str | None = None,
    lark: str | None = None,
) -> GuideFactory:
    """Compiles one of a JSON schema (dict, bool or JSON text), a regular expression and a Lark grammar. Any thread.

    The same text for the same vocabulary is compiled once; llguidance gives up the GIL meanwhile. The first grammar of
    a vocabulary also builds its tokenizer. A regular expression is of the whole output: it needs no ``^`` and ``$``.

    Raises InvalidRequestError with llguidance's message and position for what it cannot compile, TypeError for other
    types, ValueError unless exactly one is given, ImportError without llguidance.
    """
    given = {
        k: v for k, v in (("json_schema", json_schema), ("regex", regex), ("lark", lark)) if v is not None
    }
    if len(given) != 1:
        raise ValueError(f"give one of json_schema, regex and lark, not {' and '.join(given) or 'none'}")
    ((kind, source),) = given.items()
    text = schema_text(source) if kind == "json_schema" else _checked(kind, source)
    if len(text) > MAX_CHARS[kind]:
        raise InvalidRequestError(f"{kind} has {len(text)} characters; the limit is {MAX_CHARS[kind]}")
    return _compiler(model.vocab if isinstance(model, Model) else model, kind).factory(kind, text)


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
        self.lock = threading.Lock()
        self.factory: GuideFactory | None = None


class _Compiler:
    """One vocabulary's tokenizer and the grammars compiled for it, the last ones used."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()

    def factory(self, kind: str, text: str) -> GuideFactory:
        key = (kind, text)
        with self._lock:
            entry = self._entries.setdefault(key, _Entry())
            self._entries.move_to_end(key)
            if len(self._entries) > N_CACHED:
                self._entries.popitem(last=False)
        with entry.lock:  # a slow grammar holds up only those who want the same one
            if entry.factory is None:
                try:
                    entry.factory = self._compile(kind, text)
                except BaseException:
                    with self._lock:
                        if self._entries.get(key) is entry:
                            del self._entries[key]
                    raise
            return entry.factory

    def _compile(self, kind: str, text: str) -> GuideFactory:
        if kind == "json_schema":
            schema = schema_object(text)
            start = self._matcher(_json_grammar(schema))
            if start.is_error():
                raise InvalidRequestError(self._schema_error(schema, message_of(start)))
        else:
            start = self._matcher(_regex_grammar(text) if kind == "regex" else _grammar(text))
            if start.is_error():
                raise InvalidRequestError(
                    f"{kind} cannot be compiled: {_without_ours(message_of(start), kind)}"
                )
        factory = GuideFactory(start, self._tokenizer)
        # Much is compiled only when it is reached; what cannot even begin is the caller's mistake, not the request's.
        with factory.new() as guide:
            try:
                guide.prepare()
            except DecodeError as e:
                raise InvalidRequestError(f"{kind} allows no first token: {e}") from None
            try:
                guide.accept_any()
            except DecodeError as e:
                raise InvalidRequestError(f"{kind} is too large: {e}") from None
        return factory

    def _matcher(self, grammar: str) -> Any:
        library = llguidance("a grammar")
        limits = library.LLParserLimits(verbose_errors=False)
        return library.LLMatcher(self._tokenizer.native, grammar, log_level=0, limits=limits)

    def _schema_error(self, schema: dict[str, Any], message: str) -> str:
        """What llguidance has against a schema, and where: it names no place, so each part is tried alone."""
        shared: dict[str, Any] = {
            key: schema[key] for key in ("$schema", "$id", "$defs", "definitions") if key in schema
        }
        found = ""
        for n, (pointer, part) in enumerate(subschemas(schema)):
            if n == _MAX_TRIED:
                break
            if not pointer.startswith(found):
                continue
            matcher = self._matcher(_bare_json_grammar({**shared, **part}))
            if matcher.is_error() and (not found or message_of(matcher) == message):
                found, message = pointer, message_of(matcher)
        place = f" at {found}" if found else ""
        return f"json_schema cannot be compiled{place}: {_without_ours(message, 'json_schema')}"


def _json_grammar(schema: dict[str, Any]) -> str:
    """A schema inside a Lark grammar, which is where forcing can be turned off."""
    return _grammar(f"start: %json {json.dumps(_with_options(schema))}")


def _bare_json_grammar(schema: dict[str, Any]) -> str:
    """A schema as it is: its error messages do not quote the grammar around it."""
    return json.dumps({"grammars": [{"json_schema": _with_options(schema)}]})


def _with_options(schema: dict[str, Any]) -> dict[str, Any]:
    options = {"whitespace_pattern": _SPACE, "lenient": False, "coerce_one_of": False}
    return {**schema, "x-guidance": options}


def _regex_grammar(text: str) -> str:
    written = json.loads(llguidance("regex").LLMatcher.grammar_from_regex(text))
    return _grammar(written["grammars"][0]["lark_grammar"])


def _grammar(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark + _NO_FORCING}]})


def _without_ours(message: str, kind: str) -> str:
    """Without the quoted lines that were written around the caller's text."""
    if kind != "lark":  # a Lark grammar of one line is all ours; what is said about the text comes before it
        message = message.partition("\n   1 | start: ")[0]
    return "\n".join(line for line in message.splitlines() if not line.endswith(_NO_FORCING.strip()))


_compilers: weakref.WeakKeyDictionary[Vocab, _Compiler] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _compiler(vocab: Vocab, kind: str) -> _Compiler:
    with _lock:
        found = _compilers.get(vocab)
        if found is None:
            found = _compilers[vocab] = _Compiler(GrammarTokenizer(vocab, kind))
        return found
