"""Converts sampling arguments and grammars of llama-cpp-python to ``SamplingParams``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from llamapipe._messages import quoted
from llamapipe.arguments import check_float, check_int, path_of
from llamapipe.params import SamplingParams
from llamapipe.structured.schema import closed_objects


class LlamaGrammar:
    """A constraint on the output: GBNF text, or a JSON schema. Immutable.

    The schema is compiled by llguidance and not converted to GBNF, so every schema that ``SamplingParams.json_schema``
    accepts works.
    """

    def __init__(self, gbnf: str | None = None, json_schema: object = None) -> None:
        self.gbnf = gbnf
        self.json_schema = json_schema

    def __repr__(self) -> str:
        return f"<LlamaGrammar of {'a JSON schema' if self.gbnf is None else 'GBNF'}>"

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """Make a constraint from a grammar in GBNF, which is checked when it is used."""
        del verbose
        if not isinstance(grammar, str):
            raise TypeError(f"grammar must be a str, not {type(grammar).__name__}")
        return cls(gbnf=grammar)

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """Read a grammar in GBNF from a file. Raises OSError."""
        return cls.from_string(path_of(file).read_text(encoding="utf-8-sig"), verbose)

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """Make a constraint from a JSON schema, given as JSON text. Raises ValueError for other text.

        As in llama-cpp-python, objects with ``properties`` allow no others, unless ``additionalProperties`` says so.
        """
        del verbose
        return cls(json_schema=close_schema(json.loads(json_schema)))


def close_schema(schema: Any) -> Any:
    """Return a schema whose objects allow only the listed properties, as in llama-cpp-python."""
    return closed_objects(schema) if isinstance(schema, dict) else schema


Ids = npt.NDArray[np.intc]
Row = npt.NDArray[np.float32]
LogitsProcessor = Callable[[Ids, Row], Row]
StoppingCriteria = Callable[[Ids, Row], bool]
# Of ``create_completion``, ``create_chat_completion`` and, but for ``temperature``, the low-level calls.
COMMON_OPTIONS: Final = frozenset({
    "temperature", "top_p", "top_k", "min_p", "typical_p", "frequency_penalty", "presence_penalty", "repeat_penalty",
    "tfs_z", "mirostat_mode", "mirostat_tau", "mirostat_eta", "stopping_criteria", "logits_processor", "grammar",
})  # fmt: skip
SAMPLING_OPTIONS: Final = COMMON_OPTIONS - {"temperature"} | {"penalize_nl"}


class LogitsProcessorList(list[LogitsProcessor]):
    """Processors that are applied one after the other."""

    def __call__(self, input_ids: Ids, scores: Row) -> Row:
        """Return the scores after all processors."""
        for processor in self:
            scores = _scores_of(processor, input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Criteria, any of which stops generation."""

    def __call__(self, input_ids: Ids, logits: Row) -> bool:
        """Return whether generation stops before the next token."""
        return any(criterion(input_ids, logits) for criterion in self)


class MinTokensLogitsProcessor:
    """Forbids a token until ``min_tokens`` tokens have been generated. Use one object per request."""

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: Ids, scores: Row) -> Row:
        """Return the scores, with the token forbidden if it is too early."""
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


def most_tokens(max_tokens: int | None) -> int | None:
    """Return ``max_tokens`` of a call; None for no limit. Raises TypeError."""
    if max_tokens is None:
        return None
    number = check_float("max_tokens", max_tokens, -math.inf, math.inf)  # the original takes floats
    return math.ceil(number) if 0 < number < 2**63 else None


def sampling_params(
    *,
    max_tokens: int | None,
    seed: int | None,
    last_n: int,
    end: int | None,
    temperature: float = 0.8,
    top_k: int = 40,
    tfs_z: float = 1.0,
    mirostat_mode: int = 0,
    penalize_nl: bool = True,
    json_schema: Any = None,
    grammar: LlamaGrammar | None = None,
    logit_bias: Mapping[Any, float] | None = None,
    logits_processor: LogitsProcessor | None = None,
    stopping_criteria: StoppingCriteria | None = None,
    **options: Any,
) -> SamplingParams:
    """Return the params of a call. ``last_n``: tokens that penalties look at; ``end``: ends generation.

    ``options``: those with the names and defaults of ``SamplingParams``.

    Raises TypeError and ValueError as ``SamplingParams`` does, and ValueError for features that llama.cpp no longer
    has.
    """
    if tfs_z != 1.0:
        raise ValueError(
            f"tfs_z is {quoted(tfs_z)}; llama.cpp no longer has tail-free sampling, only 1.0 works"
        )
    temperature = check_float("temperature", temperature, -math.inf, math.inf)
    if not penalize_nl:
        raise ValueError("penalize_nl=False: llama.cpp no longer exempts line ends from penalties")
    if logit_bias is not None and not isinstance(logit_bias, Mapping):
        raise TypeError(
            f"logit_bias must be a dict from token ids to biases, not {type(logit_bias).__name__}"
        )
    values: dict[str, Any] = {}
    if grammar is not None:
        if not isinstance(grammar, LlamaGrammar):
            raise TypeError(
                "grammar must be a LlamaGrammar of llamapipe.compat, such as LlamaGrammar.from_string(text), not "
                f"{type(grammar).__name__}"
            )
        if json_schema is not None:
            raise ValueError("grammar and response_format are given; give one of them")
        values = {"grammar": grammar.gbnf, "json_schema": grammar.json_schema}
    elif json_schema is not None:
        values = {"json_schema": json_schema}
    if logits_processor is not None or stopping_criteria is not None:
        if stopping_criteria is not None and (end is None or values):
            reason = "a grammar" if values else "a model without an end token"
            raise ValueError(f"stopping_criteria cannot be used with {reason}")
        values["logits_processors"] = [_as_ours(logits_processor, stopping_criteria, end)]
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        repeat_last_n=last_n,
        temperature=max(temperature, 0.0) if temperature >= 0 else 1.0,
        top_k=max(check_int("top_k", top_k, -(2**31), 2**31 - 1), 0),
        mirostat=mirostat_mode,
        logit_bias=None if logit_bias is None else {int(k): float(v) for k, v in logit_bias.items()},
        **values,
        **options,
    )


def _as_ours(
    processor: LogitsProcessor | None, criterion: StoppingCriteria | None, end: int | None
) -> Callable[[list[int], Row], None]:
    """Make a logits processor for the engine. When the criterion holds, only ``end`` can be the next token."""

    def process(tokens: list[int], row: Row) -> None:
        ids = np.array(tokens, np.intc)
        if criterion is not None and criterion(ids, row):
            row[:] = -np.inf
            row[end] = 0.0
        elif processor is not None and (scores := _scores_of(processor, ids, row)) is not row:
            row[:] = scores

    return process


def _scores_of(processor: LogitsProcessor, ids: Ids, row: Row) -> Row:
    """Return what a processor returns. Raises TypeError for None, ValueError for another shape."""
    scores: Any = processor(ids, row)
    if scores is None:  # numpy would write NaN into the row
        raise TypeError(
            "the logits processor returned None; return the scores, also if they were changed in place"
        )
    if np.shape(scores) != row.shape:
        raise ValueError(
            f"the logits processor returned scores of the shape {np.shape(scores)}; it must be {row.shape}"
        )
    return scores  # type: ignore[no-any-return]
