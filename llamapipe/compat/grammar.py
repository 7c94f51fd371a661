"""Grammars under llama-cpp-python's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from llamapipe.arguments import path_of
from llamapipe.structured.schema import closed_objects


class LlamaGrammar:
    """A constraint of the output: GBNF text, or a JSON schema. Immutable.

    The schema is compiled by llguidance and not turned into GBNF, so all that ``SamplingParams.json_schema`` takes
    works.
    """

    def __init__(self, gbnf: str | None = None, json_schema: object = None) -> None:
        self.gbnf = gbnf
        self.json_schema = json_schema

    def __repr__(self) -> str:
        return f"<LlamaGrammar of {'a JSON schema' if self.gbnf is None else 'GBNF'}>"

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """A grammar in GBNF; it is checked when it is used."""
        del verbose
        if not isinstance(grammar, str):
            raise TypeError(f"grammar must be a str, not {type(grammar).__name__}")
        return cls(gbnf=grammar)

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """A grammar in GBNF, from a file. Raises OSError."""
        return cls.from_string(path_of(file).read_text(encoding="utf-8"), verbose)

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """A grammar for the values of a JSON schema, given as JSON text. Raises ValueError for other text.

        As in llama-cpp-python, objects with ``properties`` have no others, unless ``additionalProperties`` says so.
        """
        del verbose
        return cls(json_schema=closed(json.loads(json_schema)))


def closed(schema: Any) -> Any:
    """A schema whose objects have the listed properties only, as llama-cpp-python reads it."""
    return closed_objects(schema) if isinstance(schema, dict) else schema
