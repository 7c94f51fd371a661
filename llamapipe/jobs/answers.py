"""Answers records of a job, each a prompt or a conversation."""

from __future__ import annotations

import hashlib
import string
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

import numpy as np

from llamapipe._messages import did_you_mean, nearest, quoted
from llamapipe.arguments import check_flag
from llamapipe.chat.media import with_paths_below
from llamapipe.chat.results import ToolCall
from llamapipe.engine import Engine
from llamapipe.gguf.reader import fingerprint
from llamapipe.jobs._tables import RESULT_FIELDS
from llamapipe.jobs.records import Record, as_json, column, is_null
from llamapipe.llama.adapter import Adapter, ControlVector
from llamapipe.params import SamplingParams
from llamapipe.results import TokenLogprob

# Options that a record may set: all of SamplingParams, except those that JSON or a result cannot hold.
_OPTIONS: Final = frozenset(field.name for field in fields(SamplingParams)) - {
    "prompt_logprobs",
    "logits_processors",
}
_CHAT_OPTIONS: Final = frozenset(
    {"tools", "tool_choice", "parallel_tool_calls", "response_format", "template_args"}
)
_KEPT: Final = frozenset({"id", "custom_id", "prompt", "messages"})


@dataclass(frozen=True)
class RecordResult:
    """A record's result in the form for the file, its number of generated tokens, and whether it failed."""

    result: dict[str, Any]
    n_tokens: int = 0
    failed: bool = False

    @property
    def reason(self) -> str:
        """The reason why the record failed: the error's message, or the message in the response to a request."""
        error = self.result.get("error")
        if error is None and isinstance(response := self.result.get("response"), dict):
            body = response.get("body")
            error = body.get("error") if isinstance(body, dict) else None
        message = error.get("message") if isinstance(error, dict) else error
        return str(message or "no reason was given")


_DEEPEST = 8


def _identity(value: object, depth: int = 0, seen: set[int] | None = None) -> object:
    """Return a description of a value for ``repr``, which is the same in every process, unlike addresses and hashes.

    A function is described by its code, its defaults and its closure; an object by its type, the code of ``__call__``
    and its attributes. An object without these is described only by its type.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    seen = set() if seen is None else seen
    if depth == _DEEPEST or id(value) in seen:
        return "..."
    seen.add(id(value))

    def inner(value: object) -> object:
        return _identity(value, depth + 1, seen)

    if isinstance(value, (Adapter, ControlVector)):
        return value.name, value.digest
    if isinstance(value, Mapping):
        return sorted(
            ((repr(inner(key)), inner(item)) for key, item in value.items()), key=lambda pair: pair[0]
        )
    if isinstance(value, (set, frozenset)):
        return sorted(repr(inner(item)) for item in value)
    if isinstance(value, (list, tuple)):
        return [inner(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype != object:
        return str(value.dtype), value.shape, hashlib.sha256(value.tobytes()).digest()
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, inner(list(value.co_consts))
    if isinstance(value, FunctionType):
        cells = [inner(_content(cell)) for cell in value.__closure__ or ()]
        defaults = inner(value.__defaults__), inner(value.__kwdefaults__)
        return value.__module__, value.__qualname__, inner(value.__code__), defaults, cells
    if isinstance(value, MethodType):
        return inner(value.__func__), inner(value.__self__)
    if isinstance(value, partial):
        return inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, type):
        return value.__module__, value.__qualname__
    kind = type(value)
    call = next((vars(base)["__call__"] for base in kind.__mro__ if "__call__" in vars(base)), None)
    return (
        inner(kind),
        inner(call) if isinstance(call, FunctionType) else None,
        inner(getattr(value, "__dict__", None)),
    )


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the closure's cell is still empty
        return None


AnswerRequest = Callable[[Record], Awaitable[RecordResult]]


class Answerer:
    """Turns records into results with one engine; for one event loop.

    ``params``: options for records that do not set them. ``template``: makes the prompt from a record's columns, as
    ``str.format`` does; then columns are not read as options. ``system``: a system message, which turns prompts into
    conversations. ``chat``: prompts are user messages. ``keep``: names of columns that are copied to the result.
    ``requests``: called once, at the first record in OpenAI's batch format; returns the function that answers such
    records.

    ``media_path``: the folder of the images and sounds that a conversation names by path; None: paths are not allowed.
    ``columns``: the columns that the template and ``keep`` name. Raises ValueError for a bad template, for params that
    the engine refuses, and for a column with the name of a result's field; TypeError.
    """

    def __init__(
        self,
        engine: Engine,
        params: SamplingParams,
        template: str | None = None,
        system: str | None = None,
        chat: bool = False,
        keep: Collection[str] = (),
        requests: Callable[[], AnswerRequest] | None = None,
        media_path: Path | None = None,
    ) -> None:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        for name, text in (("template", template), ("system", system)):
            if text is not None and not isinstance(text, str):
                raise TypeError(f"{name} must be a str, not {type(text).__name__}")
        check_flag("chat", chat)
        names = _names(keep)
        if taken := RESULT_FIELDS.intersection(names):
            raise ValueError(f"keep has {quoted(min(taken))}, which is a field of results: rename the column")
        self._engine, self._params, self._keep = engine, params, names
        self._template, self._system, self._chat = template, system, chat or system is not None
        self._open_requests, self._media_path = requests, media_path
        self._answer_request: AnswerRequest | None = None
        self.columns = [*([] if template is None else check_template(template)), *names]
        engine.check_params(params)  # a schema that cannot be compiled would fail every record

    def __repr__(self) -> str:
        return f"<Answerer template={self._template!r} chat={self._chat}>"

    def settings(self) -> int:
        """Return 32 bits that very likely change with the model, adapters, the chat template, the template or options.

        The bits depend on contents, not names: on the files of the projector and of loaded adapters, which records may
        name, and on the code and values of a logits processor.
        """
        options = {
            field.name: value
            for field in fields(self._params)
            if (value := getattr(self._params, field.name)) != field.default
        }
        processors = [_identity(processor) for processor in options.pop("logits_processors", None) or ()]
        options.pop("adapter", None)
        model = self._engine.model
        parts = (self._template, self._system, self._chat, sorted(self._keep), options, processors)
        adapters = sorted((adapter.name, adapter.digest) for adapter in model.adapters.loaded())
        chosen = _identity(self._params.adapter)
        projector = None if model.projector is None else fingerprint(model.projector.path)
        text = repr((*parts, model.chat_template, adapters, chosen, projector))
        return zlib.crc32(text.encode("utf-8", "surrogatepass"), zlib.crc32(model.fingerprint))

    async def answer(self, record: Record) -> RecordResult:
        """Answer a record; an error becomes its result.

        Raises only EngineClosedError, and BackendError if the engine has failed: no other record could be answered.
        """
        row = record.fields
        start = {"index": record.index} | record.names
        try:
            if record.problem is not None:
                raise ValueError(record.problem)
            start |= {name: as_json(column(row, name)) for name in self._keep}
            if self._template is None and "custom_id" in row and ("url" in row or "body" in row):
                answer = await self._request(record)
                if answer.failed and self._engine.failure is not None:
                    raise self._engine.failure
                kept = {name: start[name] for name in self._keep}
                return replace(answer, result=answer.result | kept)
            result, n = await self._complete(row)
        except Exception as error:  # whatever the error is, the other records continue
            failure = self._engine.failure
            if self._engine.closed or failure is error:
                raise
            if failure is not None:
                raise failure from failure.__cause__
            details = {"type": type(error).__name__, "message": str(error)}
            return RecordResult(start | {"error": details}, failed=True)
        return RecordResult(start | result, n)

    async def _request(self, record: Record) -> RecordResult:
        if self._answer_request is None:
            if self._open_requests is None:
                raise ValueError(
                    "requests in OpenAI's batch format need the command llamapipe batch; a record here has a prompt or "
                    "messages"
                )
            self._answer_request = self._open_requests()
        return await self._answer_request(record)

    async def _complete(self, record: dict[str, Any]) -> tuple[dict[str, Any], int]:
        if self._template is not None:
            prompt: Any = fill(self._template, record)
            options: dict[str, Any] = {}
        else:
            prompt, options = record.get("prompt"), {k: v for k, v in record.items() if k not in _KEPT}
        messages = record.get("messages") if self._template is None else None
        if (prompt is None) == (messages is None):
            misspelt = next((key for key in record if nearest(key, ("prompt", "messages"))), None)
            hint = did_you_mean(misspelt, ("prompt", "messages")) if prompt is None and misspelt else ""
            raise ValueError(
                f"a record must have either a prompt or messages, or be made by a template{hint}"
            )
        if isinstance(prompt, list) and not (prompt and all(type(token) is int for token in prompt)):
            raise TypeError("prompt must be a text or a list of token ids; give each prompt its record")
        if messages is not None and not (
            isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
        ):
            raise TypeError("messages must be a list of objects with role and content")
        chats = messages is not None or self._chat
        known = _OPTIONS | (_CHAT_OPTIONS if chats else frozenset())
        if wrong := sorted(options.keys() - known - set(self._keep)):
            hint = (
                did_you_mean(wrong[0], known | _KEPT, "SamplingParams")
                or "; to copy the column to the result, name it in keep"
            )
            raise ValueError(f"{quoted(wrong[0])} is not an option of SamplingParams{hint}")
        if isinstance(biases := options.get("logit_bias"), Mapping):
            options["logit_bias"] = {_token_id(key): bias for key, bias in biases.items()}
        params = replace(self._params, **{k: v for k, v in options.items() if k in _OPTIONS})
        out: Any
        if not chats:
            out = await self._engine.agenerate(prompt, params)
            result: dict[str, Any] = {"text": out.text}
            choice: Any = out
        else:
            if messages is None:
                messages = [{"role": "user", "content": prompt}]
            else:
                messages = with_paths_below(messages, self._media_path)
            if self._system is not None:
                messages = [{"role": "system", "content": self._system}, *messages]
            chat = {k: v for k, v in options.items() if k in _CHAT_OPTIONS}
            out = await self._engine.achat(messages, params, **chat)
            choice = out.choices[0]
            result = {"text": choice.content}
            if choice.reasoning:
                result["reasoning"] = choice.reasoning
            if choice.tool_calls:
                result["tool_calls"] = [_call(call) for call in choice.tool_calls]
        if len(out.choices) > 1:
            texts = [choice.content if chats else choice.text for choice in out.choices]
            result = {"texts": texts}
        elif choice.logprobs is not None:
            result["logprobs"] = logprob_records(choice.logprobs)
        n = sum(len(choice.token_ids) for choice in out.choices)
        counts = {"n_prompt_tokens": out.n_prompt_tokens, "n_completion_tokens": n}
        return result | {"finish_reason": choice.finish_reason, "seed": choice.seed} | counts, n


def _names(keep: Any) -> tuple[str, ...]:
    """Return the checked names of columns. Raises TypeError."""
    names = tuple(keep) if isinstance(keep, Iterable) and not isinstance(keep, str) else (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError("keep must be a list of the names of columns")
    return names


def logprob_records(entries: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
    """Return tokens' log-probabilities in a form for JSON."""
    return [
        {
            "id": token.id,
            "text": token.text,
            "logprob": token.logprob,
            "top": {t.text: t.logprob for t in token.top},
        }
        for token in entries
    ]


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "name": call.name, "arguments": call.arguments}


def _token_id(key: object) -> object:
    """Return the token id that a JSON key, always a text, stands for."""
    return int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key


def check_template(template: str) -> list[str]:
    """Return the columns that a template names. Raises ValueError if it has fields that are not names of columns."""
    try:
        fields = list(_template_fields(template))
    except ValueError as error:
        raise ValueError(f"the template is {quoted(template)}: {error}") from None
    for name, conversion in fields:
        # Only names are allowed: attributes and items of a column's value are not columns.
        if not name or not set(name).isdisjoint(".[]") or name.isdigit():
            raise ValueError(f"the template has {{{name}}}; write the name of a column, and {{{{ for a brace")
        if conversion not in (None, *"ars"):
            raise ValueError(f"the template has {{{name}!{conversion}}}; after ! there may be a, r or s")
    return [name for name, _ in fields]


def _template_fields(template: str, is_format: bool = False) -> Iterator[tuple[str, str | None]]:
    """Yield the name and the conversion of each field, including fields in formats, as in ``{text:>{width}}``."""
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        yield name, conversion
        if is_format and "{" in (form or ""):
            raise ValueError(f"the format of {{{name}}}, which is in a format, may not have fields")
        yield from _template_fields(form or "", is_format=True)


def fill(template: str, columns: Mapping[str, Any]) -> str:
    """Return the prompt that a template makes of a record's columns. Raises ValueError if one is missing or null."""
    for name, _ in _template_fields(template):
        if is_null(column(columns, name)):
            raise ValueError(f"the column {quoted(name)} is null")
    return template.format_map(columns)
