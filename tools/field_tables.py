"""Write the tables of docs/reference/server.md from the types of requests, the tables that the server uses.

    python tools/field_tables.py

A test fails if the page says something else than the types.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from page_sections import with_section

sys.path.append(str(Path(__file__).resolve().parent.parent))  # after an installed llamapipe

from llamapipe.server._fields import Fate, Only, Unused, fates, inner_types
from llamapipe.server.requests.ollama_models import Options, _Table
from llamapipe.server.requests.sampling import Sampling
from llamapipe.server.requests.text_options import Streamed
from llamapipe.server.routes.anthropic import CountRequest, MessagesRequest
from llamapipe.server.routes.chat import ChatRequest
from llamapipe.server.routes.completions import CompletionRequest
from llamapipe.server.routes.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from llamapipe.server.routes.llama_server import InfillRequest, LlamaCompletionRequest, LlamaServerRequest
from llamapipe.server.routes.mistral import FimRequest
from llamapipe.server.routes.ollama import EmbedRequest, GenerateRequest, Generates, OllamaChatRequest
from llamapipe.server.routes.responses import ResponsesRequest

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "server.md"
BEGIN, END = "<!-- fields: python tools/field_tables.py -->\n", "<!-- end of fields -->\n"
_WIDTH = 120
_SAMPLING = "[sampling options](../sampling.md#all-options)"
# The title of each table, its type, and the type whose fields another table has.
TABLES: tuple[tuple[str, type[msgspec.Struct], type[msgspec.Struct] | None], ...] = (
    (f"Sampling: {_SAMPLING}, and these", Sampling, _Table),
    ("`/v1/chat/completions` and `/v1/completions`, besides those of sampling", Streamed, Sampling),
    ("`/v1/chat/completions` also", ChatRequest, Streamed),
    ("`/v1/completions` also", CompletionRequest, Streamed),
    ("`/completion` and `/infill`, besides those of sampling", LlamaServerRequest, Sampling),
    ("`/completion` also", LlamaCompletionRequest, LlamaServerRequest),
    ("`/infill` also", InfillRequest, LlamaServerRequest),
    ("`/v1/fim/completions`, besides those of sampling", FimRequest, Sampling),
    ("`/v1/responses`", ResponsesRequest, None),
    ("`/v1/messages`", MessagesRequest, None),
    ("`/v1/embeddings`", EmbeddingRequest, None),
    ("`/v1/rerank`", RerankRequest, None),
    ("`/v1/score`", ScoreRequest, None),
    ("`/api/chat` and `/api/generate`", Generates, None),
    (f"`options` of `/api/chat` and `/api/generate`, besides {_SAMPLING}", Options, _Table),
    ("`/api/chat` also", OllamaChatRequest, Generates),
    ("`/api/generate` also", GenerateRequest, Generates),
    ("`/api/embed`", EmbedRequest, None),
)


def section() -> str:
    """The tables, as Markdown."""
    parts = [_table(title, kind, base) for title, kind, base in TABLES]
    shared = fates(CountRequest).keys() <= fates(MessagesRequest).keys()
    assert shared, "count_tokens has a field that messages do not have"
    return "\n".join(parts)


def _table(title: str, kind: type[msgspec.Struct], base: type[msgspec.Struct] | None) -> str:
    fields = shown(kind, base)
    lines = [f"### {title}", ""]
    lines += _wrapped("Honoured", [f"`{name}`" for name, fate in fields if fate is None])
    unused = [_with_values(name, fate) for name, fate in fields if isinstance(fate, Unused)]
    lines += _wrapped("Unused", unused)
    refused = [(name, fate) for name, fate in fields if isinstance(fate, Only)]
    plain = [_with_values(name, fate) for name, fate in refused if not fate.instead]
    lines += _wrapped("Accepted only with these values", plain)
    instead: dict[str, list[str]] = {}
    for name, fate in refused:
        if fate.instead:
            instead.setdefault(fate.instead, []).append(_with_values(name, fate))
    if instead:
        lines += ["| accepted only with | instead |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {text} |" for text, names in instead.items()]
        lines.append("")
    return "\n".join(lines)


def shown(kind: type[msgspec.Struct], base: type[msgspec.Struct] | None) -> list[tuple[str, Fate]]:
    """The fields of a table: those of its type that no other table of the same route has."""
    elsewhere = _declared_anew(kind)
    if base is not None:
        alike = {name for name, fate in fates(base).items() if fates(kind)[name] == fate}
        elsewhere |= alike - _declared_anew(base)
    return [(name, fate) for name, fate in all_fields(kind) if name.partition(".")[0] not in elsewhere]


def _declared_anew(kind: type[msgspec.Struct]) -> set[str]:
    """The fields that have another fate in a type of a table built on this one's: only those tables have them."""
    built_on = [fates(other) for _, other, base in TABLES if base is kind and kind is not _Table]
    return {name for name, fate in fates(kind).items() if any(other[name] != fate for other in built_on)}


def all_fields(kind: type[msgspec.Struct], place: str = "") -> Iterator[tuple[str, Fate]]:
    """Every field of a type with its fate; of an object that is honoured, its fields."""
    # Options has a table.
    inner = {name: struct for name, struct in inner_types(kind).items() if struct is not Options}
    for name, fate in fates(kind).items():
        if name in inner and fate is None:
            if takes_other_values(kind, name):
                yield f"{place}{name}", fate
            yield from all_fields(inner[name], f"{place}{name}.")
        else:
            yield f"{place}{name}", fate


def takes_other_values(kind: type[msgspec.Struct], name: str) -> bool:
    """Whether a field may have another value than its object, such as a text."""
    hints = get_type_hints(kind)
    (field,) = (field for field in msgspec.structs.fields(kind) if field.encode_name == name)
    return str in get_args(hints[field.name])


def _with_values(name: str, fate: Unused | Only) -> str:
    values = [_written(value) for value in fate.neutral if not isinstance(value, float) or value % 1]
    if isinstance(fate, Only) and not values:
        values = ["null"]
    return f"`{name}` ({', '.join(values)})" if values else f"`{name}`"


def _written(value: Any) -> str:
    return f"`{json.dumps(value)}`"


def _wrapped(head: str, names: list[str]) -> list[str]:
    """A paragraph in lines of the page's width."""
    if not names:
        return []
    lines = [f"{head}:"]
    for i, name in enumerate(names):
        word = name + ("," if i < len(names) - 1 else ".")
        if len(lines[-1]) + 1 + len(word) > _WIDTH:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return [*lines, ""]


def with_tables(page: str) -> str:
    """The page's text with the tables as they are now. Raises ValueError if it has no place for them."""
    return with_section(page, BEGIN, END, f"\n{section()}\n")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
