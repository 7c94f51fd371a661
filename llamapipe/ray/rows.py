"""Turns the rows of a table into records of a batch job, and the answers into columns."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as arrow

from llamapipe.arguments import listed, quoted
from llamapipe.jobs.answers import Answer, check_template, filled
from llamapipe.jobs.records import Record
from llamapipe.params import SamplingParams

_COLUMNS = {
    "text": arrow.string(),
    "finish_reason": arrow.string(),
    "seed": arrow.uint64(),
    "n_prompt_tokens": arrow.int64(),
    "n_completion_tokens": arrow.int64(),
    "error": arrow.string(),
}
_CHAT_COLUMNS = {"reasoning": arrow.string(), "tool_calls": arrow.string()}
_TEXTS = {"texts": arrow.list_(arrow.string())}
_LOGPROBS = {"logprobs": arrow.string()}
_JSON = ("tool_calls", "logprobs")


@dataclass(frozen=True)
class RowFormat:
    """Which columns a row's request is made of, and which columns its answer has.

    - ``prompt``: a column of texts or of lists of token ids; or a template of columns, ``"Translate: {text}"``.
    - ``messages``: a column of conversations, in place of ``prompt``: lists of objects, or JSON.
    - ``options``: a column of options of ``SamplingParams`` for single rows: objects, or JSON. Null is none.
    - ``params``: for rows that do not say otherwise. ``prefix``: before the name of each column that is added.

    Raises TypeError and ValueError.
    """

    prompt: str | None = None
    messages: str | None = None
    options: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    prefix: str = ""

    def __post_init__(self) -> None:
        for name in ("prompt", "messages", "options", "prefix"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name == "prefix"):
                raise TypeError(f"{name} must be a str, not {type(value).__name__}")
        if not isinstance(self.params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(self.params).__name__}")
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt, a column or a template, or messages, a column")
        for name in ("prompt_logprobs", "logits_processors"):
            if getattr(self.params, name):
                raise ValueError(f"params has {name}, for which a table of answers has no column")
        if self.is_template:
            check_template(str(self.prompt))
            if not self.fields:
                raise ValueError(
                    f"the template {quoted(self.prompt)} names no column, so all prompts would be the same"
                )

    @property
    def is_template(self) -> bool:
        """Whether ``prompt`` is a template."""
        return self.prompt is not None and "{" in self.prompt

    @property
    def needed(self) -> list[str]:
        """The columns that rows must have."""
        return [
            *self.fields,
            *([] if self.options is None or self.options in self.fields else [self.options]),
        ]

    @property
    def fields(self) -> list[str]:
        """The columns that the prompt or the conversation is made of."""
        if not self.is_template:
            return [str(self.prompt if self.messages is None else self.messages)]
        names = (name for _, name, _, _ in string.Formatter().parse(str(self.prompt)))
        return list(dict.fromkeys(name for name in names if name))

    @property
    def added(self) -> dict[str, arrow.DataType]:
        """The columns that answers have, without the prefix. The same for all rows of a job."""
        columns = dict(_COLUMNS)
        if self.messages is not None:
            columns |= _CHAT_COLUMNS
        if self.params.n > 1 or self.options is not None:
            columns |= _TEXTS
        if self.params.logprobs is not None or self.options is not None:
            columns |= _LOGPROBS
        return columns

    def check_columns(self, names: Sequence[str]) -> None:
        """Raises ValueError if a column is missing, or is there that answers would replace."""
        have = listed(names) or "none"
        for name in self.needed:
            if name not in names:
                kind = "" if name != self.prompt else "; a template names columns in braces: {text}"
                raise ValueError(f"there is no column {quoted(name)}; the rows have {have}{kind}")
        for name in self.added:
            if self.prefix + name in names:
                raise ValueError(
                    f"the rows have a column {quoted(self.prefix + name)} already, which answers would replace; "
                    f"prefix='answer_' names theirs 'answer_{name}'"
                )

    def records(self, table: arrow.Table) -> list[Record]:
        """The request of each row. A row that is wrong says so as its ``problem``."""
        rows = table.select(self.needed).to_pylist()
        return [self._record(index, row) for index, row in enumerate(rows)]

    def _record(self, index: int, row: Mapping[str, Any]) -> Record:
        try:
            options = {} if self.options is None else _options(row[self.options])
            if self.is_template:
                return Record(index, {"prompt": filled(str(self.prompt), row), **options})
            if self.prompt is not None:
                if row[self.prompt] is None:
                    raise ValueError(f"the column {quoted(self.prompt)} is null")
                return Record(index, {"prompt": row[self.prompt], **options})
            messages = _loaded(row[str(self.messages)])
            if messages is None:
                raise ValueError(f"the column {quoted(self.messages)} is null")
            return Record(index, {"messages": _without_nulls(messages), **options})
        except (TypeError, ValueError, RecursionError) as error:
            return Record(index, {}, str(error))

    def columns(self, answers: Iterable[Answer]) -> list[tuple[str, arrow.Array]]:
        """The columns of the answers, with the prefix."""
        results = [_row(answer.result) for answer in answers]
        return [
            (self.prefix + name, arrow.array([row.get(name) for row in results], kind))
            for name, kind in self.added.items()
        ]


def _row(result: Mapping[str, Any]) -> dict[str, Any]:
    row = dict(result)
    if "error" in row:
        row["error"] = f"{row['error']['type']}: {row['error']['message']}"
    if "texts" in row:
        row["text"] = row["texts"][0]
    for name in _JSON:
        if name in row:
            row[name] = json.dumps(row[name], ensure_ascii=False)
    return {name: _text(value) if isinstance(value, str) else value for name, value in row.items()}


def _text(text: str) -> str:
    """A text that Arrow can hold: lone surrogates, as in the message of an error, are replaced."""
    return text.encode("utf-8", "replace").decode()


def _loaded(value: object) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _options(value: object) -> dict[str, Any]:
    """The options of a row. Rows of a table have all fields that any has, so a null there is no option."""
    options = _loaded(value)
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise TypeError(f"options must be an object, not {type(options).__name__}")
    for name in ("prompt", "messages", "id", "custom_id"):
        if name in options:
            raise ValueError(f"{quoted(name)} is no option")
    return options if isinstance(value, str) else {k: v for k, v in options.items() if v is not None}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
