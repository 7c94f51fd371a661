"""Kinds of calls over every feature, chosen at random, from threads and coroutines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

import llamapipe as lp
from llamapipe.errors import LlamapipeError

_LARK = 'start: item ("," item)*\nitem: /[a-z]{1,4}/ | "(" start ")"'
_GBNF = 'root ::= item ("," item)*\nitem ::= [a-z] [a-z]? | "[" root "]"'
# A template with a place for tools and their calls, which the bundled model's own lacks.
TEMPLATE = (
    "{% if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
Kind = Callable[["Traffic", random.Random], object]


class Traffic:
    """The engines, and one method for each kind of call. Any thread."""

    def __init__(
        self, engine: lp.Engine, small: lp.Engine, embedder: lp.Embedder, model: lp.Model, adapter: Path
    ) -> None:
        self.engine = engine
        self.small = small  # has too few KV cells for its slots, and so preempts
        self.embedder = embedder
        self.model = model
        self.adapter = adapter
        self.counts: Counter[str] = Counter()
        self._pin = engine.cache_prefix(list(range(400, 440)))
        self._n_adapters = itertools.count()
        self._kept_adapter = model.load_adapter(adapter, "kept")

    def run(self, seed: int, end: float, only: str) -> None:
        """Makes one call after another until ``end``, of the kinds whose names contain ``only``."""
        rng = random.Random(seed)
        kinds = {name: share for name, (share, _) in SYNC.items() if only in name}
        while kinds and time.monotonic() < end:
            name = rng.choices(list(kinds), list(kinds.values()))[0]
            SYNC[name][1](self, rng)
            self.counts[name] += 1

    async def arun(self, seed: int, end: float, only: str) -> None:
        """The same with coroutines."""
        rng = random.Random(seed)
        kinds = [name for name in ASYNC if only in name]
        while kinds and time.monotonic() < end:
            name = rng.choice(kinds)
            await ASYNC[name](self, rng)
            self.counts[name] += 1

    def prompt(self, rng: random.Random) -> list[int]:
        """Token ids; half of them begin alike, so that prefixes are shared, saved and evicted."""
        shared = list(range(400, 400 + rng.randrange(8, 60))) if rng.random() < 0.5 else []
        return [*shared, *(rng.randrange(300, 2000) for _ in range(rng.randrange(2, 40)))]

    def close(self) -> None:
        """Give the pinned prefix and the adapter back."""
        self._pin.release()
        self._kept_adapter.close()

    def new_name(self) -> str:
        """A name that no adapter has had."""
        return f"adapter-{next(self._n_adapters)}"


def _params(rng: random.Random, **more: Any) -> lp.SamplingParams:
    options: dict[str, Any] = {"max_tokens": rng.randrange(1, 24), "seed": rng.randrange(2**32)}
    if rng.random() < 0.3:
        options.update(rng.choice(_OPTIONS))
    return lp.SamplingParams(**{**options, **more})


def _single(rng: random.Random, **more: Any) -> lp.SamplingParams:
    """For streams and generations, which are one completion of a prompt that is not scored."""
    return _params(rng, n=1, prompt_logprobs=None, **more)


_OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1},
    {"dry_multiplier": 0.8},
    {"xtc_probability": 0.5},
    {"mirostat": 2},
    {"logit_bias": {400: 5.0, 401: -5.0}},
    {"logprobs": 5},
    {"prompt_logprobs": 2, "cache": False},
    {"stop": ["e", "the "]},
    {"bad_words": ["the", "and"]},
    {"n": 3},
    {"priority": 2},
    {"cache": False},
    {"min_tokens": 1, "ignore_eos": True},
]


def _list(traffic: Traffic, rng: random.Random) -> object:
    return traffic.engine.generate([traffic.prompt(rng) for _ in range(rng.randrange(1, 12))], _params(rng))


def _text(traffic: Traffic, rng: random.Random) -> object:
    return traffic.engine.generate(f"Once upon {rng.random()} times", _params(rng))


def _preempted(traffic: Traffic, rng: random.Random) -> object:
    params = lp.SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
    return traffic.small.generate([traffic.prompt(rng) for _ in range(6)], params)


def _stream(traffic: Traffic, rng: random.Random) -> None:
    for _ in traffic.engine.stream(traffic.prompt(rng), _single(rng)):
        pass


def _left_stream(traffic: Traffic, rng: random.Random) -> None:
    stream = traffic.engine.stream(traffic.prompt(rng), _single(rng, max_tokens=100, ignore_eos=True))
    for _ in range(rng.randrange(1, 5)):
        next(stream, None)
    if rng.random() < 0.5:
        stream.close()  # otherwise the garbage collector does


def _generation(traffic: Traffic, rng: random.Random) -> None:
    with traffic.engine.start(
        traffic.prompt(rng), _single(rng, max_tokens=20, ignore_eos=True)
    ) as generation:
        generation.next()
        with generation.fork(seed=1) as other:
            other.next()
            other.trim(3)
            other.append([300, 301])
            other.next()
        saved = generation.snapshot()
    with traffic.engine.restore(saved, _single(rng, max_tokens=200)) as restored:
        restored.next()


def _score(traffic: Traffic, rng: random.Random) -> object:
    return traffic.engine.score([traffic.prompt(rng) for _ in range(4)], [[300, 301], [302]] * 2)


def _constrained(traffic: Traffic, rng: random.Random) -> object:
    word = "".join(rng.choices("abcdef", k=4))
    kind = rng.choice(
        (
            {"regex": f"({word}|[a-c]{{2,5}})"},
            {"lark": _LARK},
            {"grammar": _GBNF},
            {
                "json_schema": {
                    "type": "object",
                    "properties": {word: {"enum": [word, 1]}},
                    "required": [word],
                }
            },
            {"allowed_token_ids": [300, 301, rng.randrange(302, 500)]},
        )
    )
    return traffic.engine.generate(
        traffic.prompt(rng), _params(rng, n=1, ignore_eos=False, min_tokens=0, **kind)
    )


def _json(traffic: Traffic, rng: random.Random) -> object:
    return traffic.engine.generate(
        "An object:", _single(rng, json_schema={"type": "object"}, ignore_eos=False, min_tokens=0)
    )


def _predicted(traffic: Traffic, rng: random.Random) -> object:
    return traffic.engine.generate("The fox", _single(rng, prediction="sat by the tree. " * 3))


def _adapter(traffic: Traffic, rng: random.Random) -> object:
    return traffic.engine.generate(
        traffic.prompt(rng), _params(rng, adapter={"kept": rng.choice((0.5, 1.0))})
    )


def _new_adapter(traffic: Traffic, rng: random.Random) -> None:
    with traffic.model.load_adapter(traffic.adapter, traffic.new_name()) as adapter:
        traffic.engine.generate(traffic.prompt(rng), _single(rng, adapter=adapter))


def _processor(traffic: Traffic, rng: random.Random) -> object:
    def process(logits: Any) -> None:
        logits[300:400] = -np.inf

    return traffic.engine.generate(traffic.prompt(rng), _params(rng, logits_processors=[process]))


def _broken_processor(traffic: Traffic, rng: random.Random) -> None:
    def process(logits: Any) -> None:
        raise RuntimeError("broken")

    with contextlib.suppress(RuntimeError):
        traffic.engine.generate(traffic.prompt(rng), _params(rng, logits_processors=[process]))


def _chat(traffic: Traffic, rng: random.Random) -> None:
    messages = [{"role": "user", "content": f"Say {rng.randrange(1000)}"}]
    if rng.random() < 0.5:
        traffic.engine.chat(messages, _params(rng, max_tokens=8, n=1))
    else:
        for _ in traffic.engine.stream_chat(messages, lp.SamplingParams(max_tokens=8)):
            pass


def _tools(traffic: Traffic, rng: random.Random) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": f"f{rng.randrange(9)}", "parameters": parameters}}
    messages = [{"role": "user", "content": "Call it"}]
    traffic.engine.chat(messages, lp.SamplingParams(max_tokens=20), tools=[tool], tool_choice="required")


def _timeout(traffic: Traffic, rng: random.Random) -> None:
    with contextlib.suppress(TimeoutError):
        params = lp.SamplingParams(max_tokens=100, ignore_eos=True)
        traffic.engine.generate([traffic.prompt(rng)] * 3, params, timeout=rng.random() * 0.01)


def _refused(traffic: Traffic, rng: random.Random) -> None:
    bad: Any = rng.choice(([10**9], [-1], "a" * 10**5, [], 3, {"a": 1}, [300] * 5000))
    with contextlib.suppress(ValueError, TypeError, LlamapipeError):
        traffic.engine.generate(bad)
    with contextlib.suppress(ValueError, TypeError, LlamapipeError):
        traffic.engine.generate([300], lp.SamplingParams(regex="(" * rng.randrange(1, 50)))


def _engine(traffic: Traffic, rng: random.Random) -> None:
    with lp.Engine(traffic.model, n_ctx=64, n_seq_max=2, cache_bytes=0) as engine:
        engine.start([300, 301], lp.SamplingParams(max_tokens=20, ignore_eos=True)).next()


def _model(traffic: Traffic, rng: random.Random) -> None:
    batch = lp.DecodeBatch([300, 301], [0, 0], [0, 1], [True, True])
    with (
        lp.Model(traffic.model.path) as model,
        lp.Pipeline(model, n_ctx=64, n_seq_max=2) as pipeline,
        pipeline.submit(batch) as output,
    ):
        assert output.logits.shape[0] == 2


def _embed(traffic: Traffic, rng: random.Random) -> object:
    return traffic.embedder.embed([f"the fox sat by tree {rng.randrange(99)}"] * rng.randrange(1, 9))


SYNC: dict[str, tuple[int, Kind]] = {  # with their shares
    "list": (20, _list),
    "text": (20, _text),
    "preempted": (2, _preempted),
    "stream": (20, _stream),
    "stream that is left": (10, _left_stream),
    "generation, fork, snapshot": (6, _generation),
    "scores": (6, _score),
    "constrained": (10, _constrained),
    "JSON": (5, _json),
    "predicted": (5, _predicted),
    "adapter": (5, _adapter),
    "adapter loaded and closed": (2, _new_adapter),
    "processor": (5, _processor),
    "broken processor": (2, _broken_processor),
    "chat": (10, _chat),
    "tools": (3, _tools),
    "timeout": (5, _timeout),
    "refused": (5, _refused),
    "engine opened and closed": (1, _engine),
    "model and pipeline opened and closed": (1, _model),
    "embeddings": (5, _embed),
}


async def _agenerate(traffic: Traffic, rng: random.Random) -> None:
    await asyncio.gather(*(traffic.engine.agenerate(traffic.prompt(rng), _params(rng)) for _ in range(8)))


async def _astream(traffic: Traffic, rng: random.Random) -> None:
    async for _ in traffic.engine.astream(traffic.prompt(rng), _single(rng)):
        pass


async def _cancelled(traffic: Traffic, rng: random.Random) -> None:
    params = lp.SamplingParams(max_tokens=100, ignore_eos=True)
    task = asyncio.ensure_future(traffic.engine.agenerate([traffic.prompt(rng)] * 4, params))
    await asyncio.sleep(rng.random() * 0.02)  # noqa: TID251  (cancelled at any moment)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _achat(traffic: Traffic, rng: random.Random) -> None:
    await traffic.engine.achat([{"role": "user", "content": "Hello"}], lp.SamplingParams(max_tokens=6))


async def _aembed(traffic: Traffic, rng: random.Random) -> None:
    await traffic.embedder.aembed(["the owl ran", "the night"])


ASYNC: dict[str, Callable[[Traffic, random.Random], Coroutine[Any, Any, None]]] = {
    "agenerate": _agenerate,
    "astream": _astream,
    "cancelled coroutine": _cancelled,
    "achat": _achat,
    "aembed": _aembed,
}


def bert(folder: Path) -> Path:
    """An embedding model in ``folder``."""
    from support.bert_model import bert_model

    return bert_model(folder / "bert.gguf")[0]
