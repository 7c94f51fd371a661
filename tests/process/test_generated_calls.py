"""Generated calls of every public method: each gives an answer or an error of its own, and the engine goes on.

LLAMAPIPE_CALLS sets how many; `nox -s fuzz` makes 100,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.bert_model import bert_model

import llamapipe as lp
from llamapipe.errors import LlamapipeError

N_CALLS = int(os.environ.get("LLAMAPIPE_CALLS", "1500"))
ERRORS = (TypeError, ValueError, LlamapipeError, TimeoutError)
SHORT = lp.SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
PROMPT = [310, 320, 330]

# ---- values
_text = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=["Cs", "Cc", "Co"]), max_size=5),
    st.sampled_from(["\0", "a\0b", "", "x" * 5000, "<s>", "{{", "😀"]),
)
_integers = st.one_of(
    st.integers(-3, 70), st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**63, 2**64, 10**30, -(10**4000)])
)
_floats = st.one_of(st.floats(), st.sampled_from([1e300, -0.0, 5e-324]))
_arrays = st.one_of(
    st.builds(
        lambda dtype, n, step: np.arange(400, 400 + n).astype(dtype)[::step],
        st.sampled_from(
            ["i1", "u1", ">i2", "i4", ">i4", "i8", "u8", "f4", "f8", "c8", "?", "U3", "O", "M8[s]"]
        ),
        st.integers(0, 12),
        st.sampled_from([1, 2, -1]),
    ),
    st.sampled_from([np.array(5), np.zeros((2, 3), np.int32), np.int64(400), np.float32("nan"), np.bool_(1)]),
)
_leaves = st.one_of(st.none(), st.booleans(), _integers, _floats, _text, st.binary(max_size=5), _arrays)
_junk = st.one_of(
    _leaves,
    st.recursive(
        _leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_text, inner, max_size=3),
        max_leaves=6,
    ),
    st.sampled_from([object(), int, print, {1, 2}, range(300, 310), iter(()), Ellipsis, 1j, NotImplemented]),
)
_prompts = st.one_of(
    st.sampled_from(["abc", "Once upon a time", PROMPT, np.array(PROMPT, np.int32), tuple(PROMPT)]),
    st.lists(st.integers(300, 2000), max_size=70),
    st.lists(st.lists(st.integers(300, 2000), min_size=1, max_size=4), max_size=4),
    _text,
)
_fields = list(lp.SamplingParams.__dataclass_fields__)


@st.composite
def _options(draw: st.DrawFn) -> Any:
    """SamplingParams with junk in up to three fields; short, unless junk says otherwise."""
    given_fields = draw(st.lists(st.sampled_from(_fields), max_size=3, unique=True))
    return {"max_tokens": 2, "grammar_timeout": 2.0, **{name: draw(_junk) for name in given_fields}}


_messages = st.one_of(
    st.just([{"role": "user", "content": "Hello"}]),
    st.lists(st.fixed_dictionaries({"role": _text, "content": _junk}), max_size=3),
)
# By the names of parameters; anything else gets junk.
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "prompt": _prompts,
    "prompts": st.lists(_prompts, max_size=3),
    "continuation": _prompts,
    "tokens": _prompts,
    "text": _text,
    "texts": st.one_of(_text, st.lists(_text, max_size=3)),
    "ids": _prompts,
    "messages": _messages,
    "timeout": st.one_of(st.none(), st.floats(0.001, 5)),
    "snapshot": st.binary(max_size=200),
    "token": _integers,
    "n_keep": _integers,
    "documents": st.lists(_text, max_size=3),
    "query": _text,
    "on_error": st.sampled_from(["raise", "return"]),
    "on_timeout": st.sampled_from(["raise", "return"]),
    "n_ahead": st.integers(1, 20),
    "tools": st.sampled_from([None, [], [len]]),
    "tool_choice": st.sampled_from(["auto", "none"]),
    "template_args": st.sampled_from([None, {}]),
    **dict.fromkeys(
        "block normalize truncate parallel_tool_calls add_special parse_special".split(), st.booleans()
    ),
}
METHODS = {
    "engine": (
        "generate stream start score score_tokens perplexity iter_completed chat stream_chat cache_prefix restore "
        "check_params stats check_integrity agenerate astream ascore achat astream_chat aiter_completed"
    ),
    "generation": "next append trim fork snapshot cancel close",
    "model": "tokenize detokenize piece is_eog render_chat tokenize_chat",
    "embedder": "embed rerank tokenize tokens aembed arerank",
}
CALLS = [(owner, name) for owner, names in METHODS.items() for name in names.split()]


class Owners:
    """What the calls are made on."""

    def __init__(self, folder: Path) -> None:
        self.model = lp.Model.demo()
        self.engine = lp.Engine(self.model, n_ctx=64, n_seq_max=4, max_queue=64, cache_bytes=1_000_000)
        self.embedder = lp.Embedder(bert_model(folder / "bert.gguf")[0], n_threads=1)
        self.expected = self.engine.generate(PROMPT, SHORT).token_ids
        self.n = self.n_answered = 0

    def check(self) -> None:
        """Everything still works, and nothing is left."""
        assert self.engine.generate(PROMPT, SHORT).token_ids == self.expected
        self.engine.check_integrity()

    def close(self) -> None:
        """All of them."""
        self.check()
        for owner in (self.embedder, self.engine, self.model):
            owner.close()


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owners]:
    all_owners = Owners(tmp_path_factory.mktemp("models"))
    yield all_owners
    all_owners.close()
    # Neither only good values nor only junk.
    assert all_owners.n / 5 < all_owners.n_answered < all_owners.n * 4 / 5


def use(result: Any) -> None:
    """Reads what a call returned, and closes it."""
    if isinstance(result, lp.Generation):
        with result:
            result.next()
    elif inspect.isawaitable(result) or isinstance(result, AsyncIterator):
        asyncio.run(_read(result))
    elif isinstance(result, Iterator):
        for _ in result:
            pass
    elif hasattr(result, "release"):
        result.release()


async def _read(result: Any) -> None:
    if inspect.isawaitable(result):
        await result
    else:
        async for _ in result:
            pass


@settings(
    max_examples=N_CALLS,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore")
def test_every_call_is_answered(owners: Owners, data: st.DataObject) -> None:
    owner_name, name = data.draw(st.sampled_from(CALLS))
    owner = owners.engine.start(PROMPT, SHORT) if owner_name == "generation" else getattr(owners, owner_name)
    method = getattr(owner, name)
    keywords: dict[str, Any] = {}
    for parameter in inspect.signature(method).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        needed = parameter.default is parameter.empty
        if not needed and parameter.name != "params" and data.draw(st.integers(0, 3)):
            continue
        if parameter.name == "params" and data.draw(st.integers(0, 9)):
            try:
                keywords["params"] = lp.SamplingParams(**data.draw(_options()))
            except ERRORS:
                keywords["params"] = SHORT
            continue
        good = GOOD.get(parameter.name, _junk)
        keywords[parameter.name] = data.draw(good if data.draw(st.integers(0, 4)) else _junk)
    if keywords.get("timeout", 0) is None:
        keywords["timeout"] = 5.0  # junk may ask for endless texts
    try:
        with contextlib.suppress(*ERRORS):
            use(method(**keywords))
            owners.n_answered += 1
    finally:
        if owner_name == "generation":
            owner.close()
    owners.n += 1
    if owners.n % 50 == 0:
        owners.check()
