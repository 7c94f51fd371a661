"""Bad input to an engine: each has its own clear error, nothing reaches native code, and the engine lives on.

After every test here the same engine continues a prompt exactly as it did before the first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pandas
import pyarrow as arrow
import pytest
from support.bad_values import FLAGS, INF, INTEGERS, NAN, NUMBERS, TOKENS, Bad, names
from support.gguf_models import tiny_model
from support.run_script import run_script

import llamapipe as lp
from llamapipe._options import BY_NAME
from llamapipe._sampling_table import OPTIONS, Kind
from llamapipe.engine import with_tuning
from llamapipe.errors import BackendError, InvalidRequestError, ModelLoadError

N_CTX = 64
GREEDY = lp.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def shared(tiny: lp.Model) -> Iterator[tuple[lp.Engine, list[int]]]:
    with lp.Engine(tiny, n_ctx=N_CTX, n_seq_max=2, n_threads=1) as engine:
        yield engine, engine.generate("still alive", GREEDY).token_ids


@pytest.fixture
def engine(shared: tuple[lp.Engine, list[int]]) -> Iterator[lp.Engine]:
    """An engine that must be as good after the test as before."""
    engine, expected = shared
    yield engine
    assert engine.generate("still alive", GREEDY).token_ids == expected
    assert len(expected) == 8
    engine.check_integrity()
    stats = engine.stats()
    assert (stats.n_active, stats.n_queued) == (0, 0)


# ---- every way to ask for something
def _agenerate(engine: lp.Engine, *arguments: Any, **options: Any) -> Any:
    async def run() -> Any:
        return await engine.agenerate(*arguments, **options)

    return asyncio.run(run())


def _astream(engine: lp.Engine, *arguments: Any, **options: Any) -> Any:
    async def run() -> Any:
        return [delta async for delta in engine.astream(*arguments, **options)]

    return asyncio.run(run())


def _start(engine: lp.Engine, *arguments: Any, **options: Any) -> Any:
    with engine.start(*arguments, **options) as generation:
        return list(generation)


SINGLE = {  # take one prompt
    "stream": lambda engine, *arguments, **options: list(engine.stream(*arguments, **options)),
    "astream": _astream,
    "start": _start,
}
LISTS = {  # take lists of prompts too
    "generate": lambda engine, *arguments, **options: engine.generate(*arguments, **options),
    "agenerate": _agenerate,
}
EVERY = {**SINGLE, **LISTS}
Call = Callable[..., Any]

every_entry = pytest.mark.parametrize("call", EVERY.values(), ids=list(EVERY))
list_entry = pytest.mark.parametrize("call", LISTS.values(), ids=list(LISTS))
single_entry = pytest.mark.parametrize("call", SINGLE.values(), ids=list(SINGLE))


# ---- prompts
# An array of strings is a list of prompts.
NO_PROMPTS = [
    bad for bad in TOKENS if not (isinstance(bad.value, np.ndarray) and bad.value.dtype.kind == "U")
]


@every_entry
@pytest.mark.parametrize(
    "bad", [*NO_PROMPTS, Bad(b"x", TypeError), Bad(bytearray(b"x"), TypeError)], ids=names
)
def test_what_is_no_prompt(engine: lp.Engine, call: Call, bad: Bad) -> None:
    with pytest.raises(bad.error, match=r"^prompt (contains|must be|mixes)"):
        call(engine, bad.value, GREEDY)


@every_entry
@pytest.mark.parametrize("empty", ["", [], (), np.array([], np.int32)], ids=repr)
def test_an_empty_prompt_is_rejected(engine: lp.Engine, call: Call, empty: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^the prompt is empty; give at least one"):
        call(engine, empty, GREEDY)


@list_entry
def test_columns_of_tables(engine: lp.Engine, call: Call) -> None:
    """A column is a list of its values. A table is refused: iterating over it gives the names of its columns."""
    texts = ["a b", "b a"]
    for column in (pandas.Series(["gone", *texts])[1:], arrow.chunked_array([texts])):
        assert [completion.text for completion in engine.generate(column, GREEDY)] == [
            completion.text for completion in engine.generate(texts, GREEDY)
        ]
    for table in (pandas.DataFrame({"text": texts}), arrow.table({"text": texts})):
        with pytest.raises(TypeError, match=r"is a (DataFrame|Table); give one of its columns as a list"):
            call(engine, table)


@list_entry
@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        (["good", ""], InvalidRequestError, "the prompt is empty"),
        (["good", []], InvalidRequestError, "the prompt is empty"),
        (
            ["good", [5, 512]],
            ValueError,
            "prompt contains the token id 512; this vocabulary has the ids 0 to 511",
        ),
        (["good", [5, "x"]], TypeError, r"prompt must be a sequence of token ids \(integers\), not of str"),
        (["good", [[5]]], TypeError, "prompt must be a sequence of token ids"),
        (["good", b"bytes"], TypeError, "prompt must be a sequence of token ids, not bytes"),
        (["good", {"role": "user"}], TypeError, "prompt must be a sequence of token ids, not dict"),
        (["good", 5], TypeError, "prompt mixes token ids and whole prompts"),
        (["good", None], TypeError, "prompt mixes token ids and whole prompts"),
        (["good", "\ud800"], ValueError, "text has a lone surrogate at 0"),
        (["good", "x " * 200], InvalidRequestError, "the prompt has"),
        (
            {"prompt": "good"},
            TypeError,
            "prompt must be a str, a sequence of token ids, or a list of those, not dict",
        ),
        ({"good", "better"}, TypeError, "prompt must be a str, .*, not set"),
    ],
)
def test_one_bad_prompt_of_several(
    engine: lp.Engine, call: Call, prompts: Any, error: type[Exception], message: str
) -> None:
    before = engine.stats().n_requests
    with pytest.raises(error, match=f"^{message}"):
        call(engine, prompts, GREEDY)
    assert engine.stats().n_requests == before, "the good prompt was started"


@single_entry
@pytest.mark.parametrize(
    "prompts", [["one", "two"], [[5], [6]], [[5, 6]], ["one"], np.array(["one"])], ids=str
)
def test_lists_where_one_prompt_is_wanted(engine: lp.Engine, call: Call, prompts: Any) -> None:
    with pytest.raises(TypeError, match=r"^prompt must be a sequence of token ids"):
        call(engine, prompts, GREEDY)


@every_entry
def test_prompts_longer_than_the_context(engine: lp.Engine, call: Call) -> None:
    for n in (N_CTX, N_CTX + 1, 10_000):
        with pytest.raises(InvalidRequestError) as caught:
            call(engine, [5] * n, GREEDY)
        assert str(caught.value) == (
            f"the prompt has {n} tokens; n_ctx is 64 and one must stay free: shorten it, or raise n_ctx"
        )
    with pytest.raises(InvalidRequestError, match="n_ctx is 64"):
        call(engine, "long " * 1000, GREEDY)
    call(engine, [5] * (N_CTX - 1), GREEDY)


@every_entry
@pytest.mark.parametrize("text", ["\ud800", "fine until \udfff"])
def test_a_lone_surrogate_is_rejected(engine: lp.Engine, call: Call, text: str) -> None:
    with pytest.raises(ValueError, match=r"^text has a lone surrogate at \d+, which UTF-8 cannot express"):
        call(engine, text, GREEDY)


@pytest.mark.parametrize("text", ["\0", "a\0b", "\0\0\0", "\x01\x7f\x80", "\uffff\U0010ffff", " ", "\n"])
def test_strange_but_good_texts(engine: lp.Engine, text: str) -> None:
    out = engine.generate(text, GREEDY)
    assert len(out.token_ids) == 8
    assert out.n_prompt_tokens == len(engine.model.tokenize(text))
    assert engine.generate(engine.model.tokenize(text), GREEDY).token_ids == out.token_ids


@pytest.mark.parametrize(
    "prompt",
    [(1, 300), np.array([1, 300]), np.array([1, 300], np.uint16), range(300, 302), [np.int8(1), 300]],
)
def test_other_sequences_of_tokens(engine: lp.Engine, prompt: Any) -> None:
    assert (
        engine.generate(prompt, GREEDY).token_ids
        == engine.generate([int(t) for t in prompt], GREEDY).token_ids
    )


# ---- sampling parameters
OPTIONAL_FIELDS = ("max_tokens", "seed")
# Numbers of which a short answer shows nothing: they are tested where they act.
ELSEWHERE = (
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "n",
    "priority",
    "reasoning_budget",
    "grammar_timeout",
)
# The others, at both ends of their range. For these two, -1 stands for 0 and None. Other kinds: test_params.py.
INTEGER_FIELDS = {
    row.name: (0 if row.name in ("top_k", "seed") else int(row.low), int(row.high))
    for row in OPTIONS
    if row.kind is Kind.INT and row.name not in ELSEWHERE
}
NUMBER_FIELDS = {
    row.name: (row.low, row.high) for row in OPTIONS if row.kind is Kind.FLOAT and row.name not in ELSEWHERE
}
# What has to be on for others to matter.
WITH: dict[str, dict[str, Any]] = {
    "dry": {"dry_multiplier": 0.8},
    "mirostat": {"mirostat": 2},
    "adaptive": {"adaptive_target": 0.5},
    "xtc": {"xtc_probability": 1.0},
    "dynatemp": {"dynatemp_range": 0.5},
}


@pytest.mark.parametrize("bad", INTEGERS, ids=names)
@pytest.mark.parametrize("name", INTEGER_FIELDS)
def test_a_bad_integer_is_rejected(name: str, bad: Bad) -> None:
    if bad.value is None and name in OPTIONAL_FIELDS:
        return
    with pytest.raises(bad.error, match=f"^{name} (is|must be an integer)"):
        lp.SamplingParams(**{name: bad.value})


@pytest.mark.parametrize("bad", NUMBERS, ids=names)
@pytest.mark.parametrize("name", NUMBER_FIELDS)
def test_a_bad_number_is_rejected(name: str, bad: Bad) -> None:
    with pytest.raises(bad.error, match=f"^{name} (is|must be a number)"):
        lp.SamplingParams(**{name: bad.value})


@pytest.mark.parametrize(("name", "limits"), {**INTEGER_FIELDS, **NUMBER_FIELDS}.items())
def test_limits_of_parameters(engine: lp.Engine, name: str, limits: tuple[float, float]) -> None:
    low, high = limits
    for value in (low, high):
        good: dict[str, Any] = {"max_tokens": 4, "ignore_eos": True, "repeat_penalty": 1.1}
        good |= WITH.get(name.split("_", maxsplit=1)[0], {}) | {name: value}
        params = lp.SamplingParams(**good)
        assert getattr(params, name) == value
        assert len(engine.generate("limits", params).token_ids) >= 1
    step: float = 1 if name in INTEGER_FIELDS else 1e-3 * high
    lowest = -1 if name in ("top_k", "seed") else low  # -1 stands for 0 and None there
    for value in (lowest - step, high + step):
        bad: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=rf"^{name} is .*; it must be from "):
            lp.SamplingParams(**bad)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("logit_bias", [1], TypeError, "logit_bias must map token ids to numbers, not be a list"),
        ("logit_bias", "x", TypeError, "logit_bias must map"),
        ("logit_bias", {1: "5"}, TypeError, "logit_bias of token 1 must be a number, not str"),
        ("logit_bias", {1: None}, TypeError, "logit_bias of token 1 must be a number, not NoneType"),
        ("logit_bias", {1: True}, TypeError, "logit_bias of token 1 must be a number, not bool"),
        ("logit_bias", {1: NAN}, ValueError, "logit_bias of token 1 is nan; .*, or minus infinity to forbid"),
        ("logit_bias", {1: INF}, ValueError, "logit_bias of token 1 is inf"),
        ("logit_bias", {1: 1e300}, ValueError, "logit_bias of token 1 is 1e\\+300"),
        ("logit_bias", {1: 10**400}, ValueError, "logit_bias of token 1 is a number of over 300 digits"),
        ("logit_bias", {"1": 1.0}, TypeError, "a token id of logit_bias must be an integer, not str"),
        ("logit_bias", {1.0: 1.0}, TypeError, "a token id of logit_bias must be an integer, not float"),
        ("logit_bias", {True: 1.0}, TypeError, "a token id of logit_bias must be an integer, not bool"),
        ("logit_bias", {-1: 1.0}, ValueError, "a token id of logit_bias is -1"),
        ("logit_bias", {2**31: 1.0}, ValueError, "a token id of logit_bias is 2147483648"),
        ("stop_token_ids", 5, TypeError, "stop_token_ids must be a sequence, not int"),
        ("stop_token_ids", "5", TypeError, "stop_token_ids must be a sequence, not str"),
        ("stop_token_ids", {5: 1.0}, TypeError, "stop_token_ids must be a sequence, not dict"),
        ("stop_token_ids", [1.0], TypeError, "a token id of stop_token_ids must be an integer, not float"),
        ("stop_token_ids", [True], TypeError, "a token id of stop_token_ids must be an integer, not bool"),
        ("stop_token_ids", [-1], ValueError, "a token id of stop_token_ids is -1"),
        ("stop_token_ids", [10**5000], ValueError, "a token id of stop_token_ids is a number of 16610 bits"),
        ("stop", 5, TypeError, "stop must be a sequence, not int"),
        ("stop", b"x", TypeError, "stop must be a sequence, not bytes"),
        ("stop", {"x": 1}, TypeError, "stop must be a sequence, not dict"),
        ("stop", ["x", 5], TypeError, "stop must hold strings, not int"),
        ("stop", [b"x"], TypeError, "stop must hold strings, not bytes"),
        ("stop", [None], TypeError, "stop must hold strings, not NoneType"),
        ("stop", "", ValueError, "stop holds an empty string"),
        ("stop", ["x", ""], ValueError, "stop holds an empty string"),
        ("choice", 5, TypeError, "choice must be a sequence, not int"),
        ("choice", "yes", TypeError, "choice must be a sequence, not str"),
        ("choice", [], ValueError, "choice is empty"),
        ("choice", ["yes", 5], TypeError, "choice must hold strings, not int"),
        ("choice", ["yes", ""], ValueError, "choice holds an empty string"),
        (
            "json_whitespace",
            "none",
            ValueError,
            "json_whitespace is 'none'; it must be 'spaced', 'compact' or 'flexible'",
        ),
        ("json_whitespace", None, ValueError, "json_whitespace is None"),
        (
            "adapter",
            5,
            TypeError,
            "adapter must be a name, an Adapter, a ControlVector or a mapping to scales, not int",
        ),
        ("adapter", "", ValueError, "the name of an adapter has 0 characters"),
        ("adapter", {}, ValueError, "adapter is an empty mapping"),
        ("adapter", {"a": "1"}, TypeError, "the scale of 'a' must be a number"),
        ("adapter", {"a": 1e6}, ValueError, "the scale of 'a' is "),
        ("cache_salt", 5, TypeError, "cache_salt must be a str or None, not int"),
        ("cache_salt", "", ValueError, "cache_salt has 0 characters; leave it out for the common cache"),
        ("cache_salt", "x" * 1025, ValueError, "cache_salt has 1025 characters"),
        (
            "speculate",
            "on",
            ValueError,
            "speculate is 'on'; it must be 'off', 'ngram' or 'draft', or left out",
        ),
        ("speculate", 5, ValueError, "speculate is 5; it must be 'off', 'ngram' or 'draft', or left out"),
        ("prediction", 5, TypeError, "prediction must be a str or None, not int"),
        ("prediction", ["a"], TypeError, "prediction must be a str or None, not list"),
        ("ignore_eos", 1, TypeError, "ignore_eos must be True or False, not int"),
        ("ignore_eos", None, TypeError, "ignore_eos must be True or False, not NoneType"),
        ("ignore_eos", "no", TypeError, "ignore_eos must be True or False, not str"),
    ],
)
def test_other_bad_parameters(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        lp.SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temprature", "best_of", "guided_json", "echo", "stream", "max_new_tokens"])
def test_unknown_parameters_are_never_ignored(engine: lp.Engine, name: str) -> None:
    options: dict[str, Any] = {name: 1}
    with pytest.raises(TypeError, match=name):
        lp.SamplingParams(**options)
    for call in EVERY.values():
        with pytest.raises(TypeError, match=name):
            call(engine, "prompt", **options)


def test_parameters_cannot_be_changed_but_copied(engine: lp.Engine) -> None:
    bias = {5: 1.0}
    params = lp.SamplingParams(logit_bias=bias, stop="x", stop_token_ids=[7])
    bias[5] = NAN
    assert params.logit_bias == {5: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = NAN  # type: ignore[misc]
    with pytest.raises(TypeError):
        params.logit_bias[5] = NAN  # type: ignore[index]
    assert isinstance(params.stop, tuple)
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(pickle.loads(pickle.dumps(params))) == hash(params)
    assert dataclasses.replace(params, temperature=0).stop == ("x",)
    with pytest.raises(ValueError, match=r"^temperature is nan"):
        dataclasses.replace(params, temperature=NAN)


@every_entry
@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_tokens_beyond_the_vocabulary(engine: lp.Engine, call: Call, name: str) -> None:
    value: Any = [5, 512] if name == "stop_token_ids" else {5: 1.0, 512: 1.0}
    with pytest.raises(
        InvalidRequestError, match=f"^{name} holds 512; this vocabulary has the ids 0 to 511$"
    ):
        call(engine, "prompt", lp.SamplingParams(**{name: value}))


@every_entry
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0}, "greedy", 5, 0, "", True, object(), lp.SamplingParams]
)
def test_what_are_no_parameters(engine: lp.Engine, call: Call, params: Any) -> None:
    with pytest.raises(TypeError, match=r"^params must be SamplingParams"):
        call(engine, "prompt", params)


@list_entry
def test_lists_of_parameters(engine: lp.Engine, call: Call) -> None:
    with pytest.raises(
        ValueError, match=r"^there are 2 prompts and 3 params; give one for all, or one for each$"
    ):
        call(engine, ["a", "b"], [GREEDY] * 3)
    with pytest.raises(ValueError, match=r"^there are 1 prompts and 0 params"):
        call(engine, "a", [])
    with pytest.raises(TypeError, match=r"^params must be SamplingParams, not int \(prompt 1 of the list\)$"):
        call(engine, ["a", "b"], [GREEDY, 5])
    assert [len(c.token_ids) for c in call(engine, ["a", "b"], [GREEDY, GREEDY])] == [8, 8]


@pytest.mark.parametrize("extreme", [-INF, -1e6, 1e6])
def test_an_extreme_bias_decides(engine: lp.Engine, extreme: float) -> None:
    first = engine.generate("biased", GREEDY).token_ids[0]
    params = dataclasses.replace(GREEDY, logit_bias={first: extreme})
    assert (first in engine.generate("biased", params).token_ids) == (extreme > 0)


def test_forbidding_every_token_fails_that_request_alone(engine: lp.Engine) -> None:
    nothing = dataclasses.replace(GREEDY, logit_bias=dict.fromkeys(range(512), -INF))
    with pytest.raises(lp.errors.DecodeError, match="leave no token to sample"):
        engine.generate("nothing", nothing)
    with pytest.raises(lp.errors.DecodeError, match="allowed"):
        list(engine.stream("nothing", nothing))
    with (
        engine.start("nothing", nothing) as generation,
        pytest.raises(lp.errors.DecodeError, match="allowed"),
    ):
        generation.next()


# ---- other arguments
@pytest.mark.parametrize("call", [c for c in EVERY.values() if c is not _start])
@pytest.mark.parametrize(
    "bad", [*(b for b in NUMBERS if b.value not in (INF, None)), Bad(-1, ValueError)], ids=names
)
def test_a_bad_timeout_is_rejected(engine: lp.Engine, call: Call, bad: Bad) -> None:
    with pytest.raises(bad.error, match=r"^timeout (is|must be a number)"):
        call(engine, "prompt", GREEDY, timeout=bad.value)


@pytest.mark.parametrize("call", [c for c in EVERY.values() if c is not _start])
@pytest.mark.parametrize("timeout", [INF, 1e300, 10**30, np.float32(100), None])
def test_timeouts_that_never_come(engine: lp.Engine, call: Call, timeout: Any) -> None:
    assert call(engine, "prompt", GREEDY, timeout=timeout)


@pytest.mark.parametrize("flag", FLAGS, ids=names)
def test_a_flag_must_be_true_or_false(engine: lp.Engine, flag: Bad) -> None:
    for name, call in EVERY.items():
        if name != "start":
            with pytest.raises(TypeError, match=r"^block must be True or False"):
                call(engine, "prompt", GREEDY, block=flag.value)
    with pytest.raises(TypeError, match=r"^progress must be True or False"):
        engine.generate("prompt", GREEDY, progress=flag.value)
    with pytest.raises(TypeError, match=r"^drain must be True or False"):
        engine.close(drain=flag.value)
    assert not engine.closed


# ---- generations
@pytest.mark.parametrize("bad", [*TOKENS, Bad("x", TypeError)], ids=names)
def test_what_cannot_be_appended(engine: lp.Engine, bad: Bad) -> None:
    with engine.start("abc", GREEDY) as generation:
        first = generation.next()
        n = generation.n_tokens
        with pytest.raises(bad.error, match=r"^tokens (contains|must be)"):
            generation.append(bad.value)
        assert generation.n_tokens == n
        assert first is not None
        assert generation.next() is not None


@pytest.mark.parametrize("bad", [*INTEGERS, Bad(0, ValueError), Bad(-1, ValueError)], ids=names)
def test_what_cannot_be_trimmed_to(engine: lp.Engine, bad: Bad) -> None:
    with engine.start("abc", GREEDY) as generation:
        generation.next()
        n = generation.n_tokens
        with pytest.raises(bad.error, match=r"^n_keep (is|must be)"):
            generation.trim(bad.value)
        with pytest.raises(ValueError, match=rf"^n_keep is {n + 1}; it must be from 1 to {n}$"):
            generation.trim(n + 1)
        assert generation.n_tokens == n
        assert generation.next() is not None


def test_a_generation_beyond_the_context(engine: lp.Engine) -> None:
    with engine.start([5] * 60, dataclasses.replace(GREEDY, max_tokens=None)) as generation:
        with pytest.raises(
            InvalidRequestError, match=r"^the sequence would have 64 tokens; n_ctx is 64 and one must"
        ):
            generation.append([5] * 4)
        generation.append([5] * 3)
        assert generation.next() is not None
        assert generation.next() is None
        assert generation.finish_reason == "length"


def test_a_prompt_that_leaves_too_little_room(tiny: lp.Model) -> None:
    with lp.Engine(tiny, n_ctx=64, n_seq_max=1, tuning=lp.EngineTuning(min_room=16)) as engine:
        for params in (None, lp.SamplingParams(max_tokens=16), lp.SamplingParams(max_tokens=None)):
            with pytest.raises(
                InvalidRequestError,
                match=r"^the prompt has 49 tokens; n_ctx is 64 and 16 must stay free for the",
            ):
                engine.generate([5] * 49, params)
        for n, most in ((48, 16), (49, 15), (63, 1)):
            done = engine.generate([5] * n, lp.SamplingParams(max_tokens=most, ignore_eos=True))
            assert done.n_completion_tokens == most


# ---- engine options (those of a context are in test_context.py)
@pytest.mark.parametrize("bad", [*INTEGERS, Bad(-1, ValueError)], ids=names)
@pytest.mark.parametrize(
    "name",
    [
        "n_ctx",
        "n_seq_max",
        "n_cells",
        "n_batch",
        "n_ubatch",
        "n_threads",
        "batch_window_us",
        "max_queue",
        "min_room",
    ],
)
def test_bad_sizes_of_an_engine(tiny: lp.Model, name: str, bad: Bad) -> None:
    if bad.value is None and name in ("n_ctx", "n_cells", "n_threads", "max_queue"):
        return
    with pytest.raises(bad.error, match=f"^{name} (is|must be)"):
        lp.Engine(tiny, **with_tuning({name: bad.value}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"n_cells": 100, "n_ctx": 101},
            "n_cells is 100 and n_ctx 101; one request could never use its n_ctx",
        ),
        ({"n_cells": 100, "n_ctx": 50, "kv_unified": False}, "n_cells is 100 but n_ctx . n_seq_max is 400"),
        ({"n_seq_max": 9, "n_batch": 8}, "n_seq_max is 9 and n_batch 8"),
        ({"n_ctx": 64, "min_room": 64}, "min_room is 64 and n_ctx 64; that leaves nothing for a prompt"),
    ],
)
def test_options_of_an_engine_that_do_not_go_together(
    tiny: lp.Model, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        lp.Engine(tiny, **with_tuning(options))


@pytest.mark.parametrize("model", [None, 5])
def test_an_engine_needs_a_model(model: Any) -> None:
    with pytest.raises(TypeError, match=r"^model must be a Model or the path of a GGUF file, not "):
        lp.Engine(model)


@pytest.mark.parametrize("path", ["model.gguf", Path("x")])
def test_an_engine_of_a_file_that_does_not_exist(
    path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # models beside it would be named
    with pytest.raises(lp.errors.ModelLoadError, match="does not exist; check the path"):
        lp.Engine(path)


def test_engines_at_their_limits(make_engine: Callable[..., lp.Engine]) -> None:
    smallest = make_engine(n_ctx=2, n_seq_max=1, n_batch=1, n_ubatch=1)
    assert len(smallest.generate([5], lp.SamplingParams(ignore_eos=True)).token_ids) == 1
    useless = make_engine(n_ctx=1, n_seq_max=1)
    with pytest.raises(InvalidRequestError, match=r"^the prompt has 1 tokens; n_ctx is 1"):
        useless.generate([5])
    widest = make_engine(n_ctx=8, n_seq_max=int(BY_NAME["n_seq_max"].high))
    outs = widest.generate([[5, 6]] * 300, lp.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert len({tuple(out.token_ids) for out in outs}) == 1


# ---- files
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"does not exist; its folder has good\.gguf$"),
        (b"", r"is empty; download or convert it again$"),
        (b"GGUF", r"has 4 bytes, less than a GGUF header of 24$"),
        (b"hello, world", r"is not a GGUF file: it begins with b'hell' instead of b'GGUF'$"),
        (b"<!doctype html><html>", r"looks like a web page, probably an error page of a download"),
        (b"PK\x03\x04" + bytes(100), r"looks like a PyTorch checkpoint or zip archive"),
        (bytes(10_000), r"is not a GGUF file"),
    ],
)
def test_files_that_are_no_models(
    engine: lp.Engine, tmp_path: Path, content: bytes | None, message: str
) -> None:
    tiny_model(tmp_path / "good.gguf")
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    ways: list[Any] = [path, str(path), bytes(path)]
    for way in ways:
        with pytest.raises(ModelLoadError, match=message) as caught:
            lp.Model(way)
        assert str(caught.value).startswith(str(path))


def test_a_file_truncated_anywhere_is_refused(engine: lp.Engine, tmp_path: Path) -> None:
    whole = tiny_model(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for n_bytes in (5, 24, 100, 5_000, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:n_bytes])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
            lp.Model(cut)
    cut.write_bytes(whole)
    with lp.Model(cut):
        pass


def test_folders_and_names_that_cannot_be(engine: lp.Engine, tmp_path: Path) -> None:
    tiny_model(tmp_path / "good.gguf")
    with pytest.raises(ModelLoadError, match=r"is a directory; give one of its files: good\.gguf$"):
        lp.Model(tmp_path)
    with pytest.raises(ModelLoadError, match=r"nor does its folder .*/nowhere; check the path$"):
        lp.Model(tmp_path / "nowhere" / "good.gguf")
    for name in ("", "nul\0.gguf", "x" * 5000, "\ud800.gguf"):
        with pytest.raises(ModelLoadError, match=r"is a directory|cannot be read"):
            lp.Model(name)
    with pytest.raises(ModelLoadError, match="not a regular file"):
        lp.Model("/dev/null")


def test_a_link_to_nowhere_and_one_to_itself(engine: lp.Engine, tmp_path: Path) -> None:
    (tmp_path / "nowhere.gguf").symlink_to(tmp_path / "missing")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    for name in ("nowhere.gguf", "loop.gguf"):
        with pytest.raises(ModelLoadError, match=name):
            lp.Model(tmp_path / name)


def test_files_that_may_not_be_read(tmp_path: Path) -> None:
    """In a process that gives root's rights up, where it has them: root may read everything."""
    secret, folder = tiny_model(tmp_path / "secret.gguf"), tmp_path / "closed"
    folder.mkdir()
    for path in (folder / "inside.gguf", tmp_path / "open.gguf"):
        tiny_model(path)
    tmp_path.chmod(0o755)
    secret.chmod(0o000)
    folder.chmod(0o000)
    try:
        out = run_script(
            """
import os
import llamapipe as lp
lp.Model.demo().close()  # all that is imported and opened when first needed may be out of reach afterwards
os.chdir(sys.argv[1])  # names from here need no right to the folders above
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
for path in ("secret.gguf", "closed/inside.gguf", "open.gguf"):
    try:
        with lp.Model(path) as model:
            say("loaded", model.n_vocab)
    except lp.errors.ModelLoadError as e:
        say(e)
""",
            tmp_path,
        )
    finally:
        folder.chmod(0o755)
    assert out.splitlines() == [
        "secret.gguf cannot be read: no permission; change its mode or owner",
        "closed/inside.gguf cannot be read: no permission; change its mode or owner",
        "loaded 512",
    ]


def damaged(path: Path, damage: Callable[[npt.NDArray[Any]], None]) -> Path:
    """A model whose head is sound and whose weights are not."""
    tiny_model(path)
    for tensor in gguf.GGUFReader(path, "r+").tensors:
        damage(tensor.data)
    return path


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    path = damaged(tmp_path / "nan.gguf", lambda data: data.fill(NAN))
    with lp.Model(path) as model, lp.Engine(model, n_ctx=64, n_seq_max=2, n_threads=1) as engine:
        for params in (GREEDY, lp.SamplingParams(max_tokens=4), lp.SamplingParams(repeat_penalty=1.5)):
            for call in (*LISTS.values(), SINGLE["stream"], SINGLE["astream"], SINGLE["start"]):
                with pytest.raises(
                    lp.errors.DecodeError, match=r"finite; the model or its weights are damaged$"
                ):
                    call(engine, "hello", params)
        engine.check_integrity()
        assert (engine.stats().n_active, engine.stats().n_queued) == (0, 0)


def test_weights_of_random_bytes(tmp_path: Path) -> None:
    """They load: nothing in them tells. Whatever comes out, it is tokens or a DecodeError."""
    rng = np.random.default_rng(5)

    def scramble(data: npt.NDArray[Any]) -> None:
        data.view(np.uint8)[...] = rng.integers(0, 256, data.view(np.uint8).shape, np.uint8)

    for n in range(5):
        with (
            lp.Model(damaged(tmp_path / f"{n}.gguf", scramble)) as model,
            lp.Engine(model, n_ctx=64, n_seq_max=2, n_threads=1) as engine,
        ):
            try:
                tokens = engine.generate("hello", GREEDY).token_ids
            except lp.errors.DecodeError:
                continue
            assert all(0 <= token < 512 for token in tokens)


# ---- a callback that raises
def test_progress_of_a_load(tiny: lp.Model) -> None:
    for use_mmap in (False, True):
        seen: list[float] = []
        with lp.Model(tiny.path, use_mmap=use_mmap, progress=seen.append):
            assert seen == sorted(seen)
            assert seen[0] == 0.0
            assert seen[-1] == 1.0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, MemoryError, StopIteration])
@pytest.mark.parametrize("last", [False, True], ids=["at the first call", "at the last call"])
def test_a_progress_function_that_raises_stops_the_load(
    engine: lp.Engine, tiny: lp.Model, error: type[BaseException], last: bool
) -> None:
    calls: list[float] = []
    raised = error("out of patience")

    def progress(fraction: float) -> None:
        calls.append(fraction)
        if fraction == 1.0 or not last:
            raise raised

    with pytest.raises(error) as caught:
        lp.Model(tiny.path, progress=progress)
    assert caught.value is raised
    assert calls[-1] == (1.0 if last else 0.0)
    assert last or len(calls) == 1
    with lp.Model(tiny.path) as model:
        assert model.n_vocab == 512


def test_nothing_is_kept_of_a_load_that_was_stopped(tiny: lp.Model) -> None:
    class Owner:
        def progress(self, fraction: float) -> None:
            raise ValueError("stop")

    owner = Owner()
    alive = weakref.ref(owner)
    gc.disable()  # freed at once, not by the next collection
    try:
        with pytest.raises(ValueError, match="stop") as caught:
            lp.Model(tiny.path, progress=owner.progress)
        del owner, caught
        assert alive() is None
    finally:
        gc.enable()


def test_a_progress_function_may_load_another_model(tiny: lp.Model) -> None:
    inner: list[lp.Model] = []

    def progress(fraction: float) -> None:
        if not inner:
            with pytest.raises(ValueError, match="inner"):
                lp.Model(tiny.path, progress=raise_inner)
            inner.append(lp.Model(tiny.path))

    def raise_inner(fraction: float) -> None:
        raise ValueError("inner")

    with lp.Model(tiny.path, progress=progress) as model:
        assert model.tokenize("hello") == inner[0].tokenize("hello")
    inner[0].close()


def test_errors_are_of_one_family() -> None:
    for name in ("ModelLoadError", "BackendError", "InvalidRequestError", "ContextFullError", "DecodeError"):
        assert issubclass(getattr(lp.errors, name), lp.errors.LlamapipeError)
    assert issubclass(InvalidRequestError, ValueError)
    assert not issubclass(BackendError, ValueError)
