"""A misspelt name: the error says it and the nearest one that exists."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock, create_autospec

import pytest
from support.run_script import run_script

import llamapipe as lp
from llamapipe.llama.model import ENGINE_OPTIONS, MODEL_OPTIONS, TUNING_OPTIONS
from llamapipe.server.settings import ServerSettings

PATH = lp.demo_model_path()


@pytest.fixture(scope="module")
def open_engine(demo: lp.Model) -> Any:
    with lp.Engine(demo, n_ctx=256) as engine:
        yield engine


Engine: Any = lp.Engine
Model: Any = lp.Model
Params: Any = lp.SamplingParams
ONE = lp.SamplingParams(max_tokens=1)
LOGPROBS = lp.SamplingParams(max_tokens=1, logprobs=1)


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [
        (lambda: lp.Engin, "Engin", "Engine"),  # type: ignore[attr-defined]
        (lambda: lp.SamplingParam, "SamplingParam", "SamplingParams"),  # type: ignore[attr-defined]
        (lambda: Engine(PATH, n_ctxx=64), "n_ctxx", "n_ctx"),
        (lambda: Engine(PATH, n_thread=1), "n_thread", "n_threads"),
        (lambda: Engine(PATH, temperature=1), "temperature", "an option of SamplingParams"),
        (lambda: Engine(PATH, n_gpu_layers=1), "n_gpu_layers", "an option of Model"),
        (lambda: Engine(PATH, type_k="q8"), "'q8'", "q8_0"),
        (lambda: Engine(PATH, overflow="shft"), "'shft'", "shift"),
        (lambda: Model(PATH, n_gpu_layer=1), "n_gpu_layer", "n_gpu_layers"),
        (lambda: Model(PATH, n_ctx=64), "n_ctx", "an option of Engine"),
        (lambda: Model.from_pretrained("a/b", local_files_onl=True), "local_files_onl", "local_files_only"),
        (lambda: lp.Embedder(PATH, poolin="mean"), "poolin", "pooling"),  # type: ignore[call-arg]
        (lambda: Params(max_token=3), "max_token", "max_tokens"),
        (lambda: Params(temp=3), "temp", "use temperature"),
        (lambda: Params(num_predict=3), "num_predict", "use max_tokens"),
        (lambda: Params(n_predict=3), "n_predict", "use max_tokens"),
        (lambda: Params(response_format={}), "response_format", "use json_schema"),
        (lambda: Engine(PATH, max_model_len=64), "max_model_len", "use n_ctx"),
        (lambda: Engine(PATH, n_parallel=2), "n_parallel", "use n_seq_max"),
        (lambda: Engine(PATH, enforce_eager=True), "enforce_eager", "leave it out"),
        (lambda: Engine(PATH, dtype="auto"), "dtype", "the model's file determines it"),
        (lambda: Engine(PATH, enable_lora=True), "enable_lora", "model.load_adapter"),
        (lambda: Engine(PATH, tensor_parallel_size=2), "tensor_parallel_size", "Model(path, split_mode=…)"),
        (
            lambda: Engine(PATH, max_num_batched_tokens=64),
            "max_num_batched_tokens",
            "EngineTuning(n_batch=…)",
        ),
        (lambda: Engine(PATH, task="embed"), "task", "Embedder(model)"),
        (lambda: lp.Embedder(PATH, max_model_len=64), "max_model_len", "use n_ctx"),  # type: ignore[call-arg]
        (lambda: lp.LoRARequest, "LoRARequest", "model.load_adapter"),  # type: ignore[attr-defined]
        (lambda: lp.AsyncLLM, "AsyncLLM", "agenerate"),  # type: ignore[attr-defined]
        (lambda: lp.GuidedDecodingParams, "GuidedDecodingParams", "json_schema"),  # type: ignore[attr-defined]
        (lambda: lp.BeamSearchParams, "BeamSearchParams", "no beam search"),  # type: ignore[attr-defined]
        (lambda: Params(best_of=2), "best_of", "no beam search"),
        (lambda: Params(structured_outputs={}), "structured_outputs", "regex, choice or grammar"),
        (lambda: Params(skip_special_tokens=False), "skip_special_tokens", "token_ids has them"),
        (lambda: Params(include_stop_str_in_output=True), "include_stop_str_in_output", "Choice.stop_string"),
        (lambda: Params(lora_request=1), "lora_request", "use adapter"),
        (lambda: Params(thinking_token_budget=1), "thinking_token_budget", "use reasoning_budget"),
        (lambda: Engine(PATH, draft="ngram"), "'ngram'", "leave draft out"),
        (lambda: Model(model_path=PATH), "model_path", "use path"),
        (lambda: Model(PATH, ngl=1), "ngl", "use n_gpu_layers"),
        (lambda: Params(top_K=3), "top_K", "top_k"),
        (lambda: Params(max_tokens=-1), "max_tokens", "or None for no limit"),
        (lambda: lp.Llama, "Llama", "from llamapipe.compat import Llama"),  # type: ignore[attr-defined]
        (lambda: Params(sampler_order=["topk"]), "'topk'", "top_k"),
        (lambda: ServerSettings(max_request=3), "max_request", "max_requests"),  # type: ignore[call-arg]
        (lambda: lp.run_batch([], None, progres=True), "progres", "progress"),  # type: ignore[call-overload]
    ],
)
def test_names_and_options(call: Callable[[], Any], wrong: str, right: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError), match=wrong) as raised:
        call()
    assert right in str(raised.value).partition(wrong)[2]


@pytest.mark.parametrize(
    ("call", "wrong", "right"),
    [
        (lambda e: e.genrate("a"), "genrate", "generate"),
        (lambda e: e.model.tokenise("a"), "tokenise", "tokenize"),
        (lambda e: e.model.generate("a"), "generate", "Engine(model)"),
        (lambda e: e.embed("a"), "embed", "Embedder(model)"),
        (lambda e: e.tokenize("a"), "tokenize", "engine.model.tokenize"),
        (lambda e: e.create_chat_completion([]), "create_chat_completion", "llamapipe.compat.Llama"),
        (lambda e: e.generate("a", stream=True), "stream", "use engine.stream"),
        (lambda e: e.infill("a", "b", stream=True), "'stream'", "use engine.stream_infill"),
        (lambda e: e.stream_chat("a", stream=True), "'stream'", "leave it out: stream_chat() streams"),
        (lambda e: asyncio.run(e.achat("a", stream=True)), "'stream'", "use engine.astream_chat"),
        (lambda e: e.start("a", stream=True), "'stream'", "it has: "),
        (lambda e: e.chat("a", system="b"), "system", '"role": "system"'),
        (lambda e: e.generate("a", ONE).content, "content", "use text"),
        (lambda e: e.generate("a", ONE).usage, "usage", "n_prompt_tokens"),
        (lambda e: e.generate("a", ONE).prompt, "'prompt'", "in the order of prompts"),
        (lambda e: e.generate("a", ONE).choices[0].stop_reason, "stop_reason", "stop_string"),
        (lambda e: e.generate("a", ONE).choices[0].txt, "txt", "text"),
        (lambda e: e.generate("a", LOGPROBS).logprobs[0].decoded_token, "decoded_token", "use text"),
        (lambda e: e.generate("a", LOGPROBS).logprobs[0].rank, "rank", "use top"),
        (lambda e: e.generate("a", use_tqdm=False), "use_tqdm", "use progress"),
        (lambda e: e.generate("a", lora_request=None), "lora_request", "SamplingParams(adapter=NAME)"),
        (lambda e: e.chat("a", sampling_params=ONE), "sampling_params", "as params"),
        (lambda e: e.chat("a", continue_final_message=True), "continue_final_message", "use continue_last"),
        (lambda e: e.beam_search("a"), "beam_search", "no beam search"),
        (lambda e: e.get_tokenizer(), "get_tokenizer", "engine.model.tokenize"),
        (lambda e: e.chat("a", ONE).text, "text", "use content"),
        (lambda e: e.chat("a", ONE).contents, "contents", "did you mean content"),
        (lambda e: next(e.stream("a", ONE)).content, "content", "use text"),
        (lambda e: next(e.stream_chat("a", ONE)).text, "text", "use content"),
        (lambda e: e.chat("a", stream=True), "stream", "engine.stream_chat"),
        (lambda e: e.stream("a").cancle(), "cancle", "cancel"),
        (lambda e: e.generate("a", max_token=3), "max_token", "max_tokens"),
        (lambda e: e.generate("a", on_error="retrun"), "'retrun'", "return"),
        (lambda e: e.score("a", "b", timeot=3), "timeot", "timeout"),
        (lambda e: e.score("a", "b", temperature=3), "temperature", "it has: "),
        (lambda e: e.perplexity("a b", n_windw=3), "n_windw", "n_window"),
        (lambda e: e.cache_prefix("a", timeot=3), "timeot", "timeout"),
        (lambda e: e.chat("a", tool=[]), "tool", "tools"),
        (lambda e: e.chat([{"rol": "user", "content": "a"}]), "'rol'", "'role'"),
        (lambda e: e.chat([{"role": "usr", "content": "a"}]), "'usr'", "user"),
        (lambda e: e.chat([{"role": "user", "contents": "a"}]), "'contents'", "'content'"),
        (lambda e: e.chat([{"role": "user", "content": [{"type": "txt", "text": "a"}]}]), "'txt'", "text"),
        (lambda e: e.chat([{"role": "user", "content": [{"type": "text", "txt": "a"}]}]), "'txt'", "'text'"),
        (lambda e: e.chat("a", tools=[{"type": "function", "function": {"nam": "f"}}]), "'nam'", "name"),
        (
            lambda e: e.chat("a", tools=[lp.Tool("weather", "", {})], tool_choice="wether"),
            "'wether'",
            "weather",
        ),
        (
            lambda e: e.chat("a", tools=[lp.Tool("weather", "", {})], tool_choice="requird"),
            "'requird'",
            "required",
        ),
        (
            lambda e: e.chat("a", tools=[lp.Tool("weather", "", {})], tool_choice="any"),
            "'any'",
            "use required",
        ),
    ],
)
def test_calls(open_engine: Any, call: Callable[[Any], Any], wrong: str, right: str) -> None:
    pytest.importorskip("jinja2")
    with pytest.raises((TypeError, ValueError, AttributeError), match=wrong) as raised:
        call(open_engine)
    assert right in str(raised.value).partition(wrong)[2]


def test_a_batch_record(open_engine: Any) -> None:
    (result,) = lp.run_batch([{"prompt": "a", "max_token": 3}], open_engine)
    assert "'max_token' is not an option of SamplingParams; did you mean max_tokens?" in str(result["error"])
    (result,) = lp.run_batch([{"prompt": "a", "num_predict": 3}], open_engine)
    assert "'num_predict' is not an option of SamplingParams; use max_tokens" in str(result["error"])
    (result,) = lp.run_batch([{"promt": "a"}], open_engine)
    assert "; did you mean prompt?" in str(result["error"])


def test_roles_of_templates_own_are_no_typos(open_engine: Any) -> None:
    pytest.importorskip("jinja2")
    for role in ("ipython", "function", "environment", "critic"):
        assert open_engine.chat([{"role": role, "content": "a"}], lp.SamplingParams(max_tokens=1)).choices


def test_options_named_in_hints_exist() -> None:
    assert set(ENGINE_OPTIONS) <= inspect.signature(lp.Engine).parameters.keys()
    assert set(TUNING_OPTIONS) <= inspect.signature(lp.EngineTuning).parameters.keys()
    parameters = inspect.signature(lp.Model).parameters.keys()
    assert parameters - {"path", "progress"} == MODEL_OPTIONS


def test_private_names_and_failing_properties_keep_their_own_errors(demo: lp.Model) -> None:
    assert not hasattr(demo, "_repr_html_") and not hasattr(demo, "__len__")
    half_made = lp.Stream.__new__(lp.Stream)
    with pytest.raises(AttributeError, match="_stream"):
        _ = lp.ChatStream.__new__(lp.ChatStream).n_cached_tokens
    assert half_made.n_cached_tokens == 0


def test_tab_shows_the_public_names_and_help_the_options() -> None:
    assert dir(lp) == sorted(lp.__all__)
    assert {"generate", "chat", "stream", "score", "stats", "close"} <= set(dir(lp.Engine))
    for what in (lp, lp.Engine, lp.SamplingParams, lp.Model, lp.Embedder, lp.Engine.generate, lp.run_batch):
        assert inspect.getdoc(what), what
    assert list(inspect.signature(lp.Engine).parameters)[:3] == ["model", "n_ctx", "n_seq_max"]
    assert list(inspect.signature(lp.SamplingParams).parameters)[:2] == ["max_tokens", "temperature"]
    assert "max_tokens: 'int | None' = 256" in str(inspect.signature(lp.SamplingParams))


def test_async_methods_are_still_coroutine_functions() -> None:
    """Mocks, FastAPI and retry decorators ask for it."""
    for name in ("agenerate", "achat", "ascore"):
        assert inspect.iscoroutinefunction(getattr(lp.Engine, name))
    mocked = create_autospec(lp.Engine, instance=True)
    assert isinstance(mocked.agenerate, AsyncMock) and not isinstance(mocked.generate, AsyncMock)


def test_a_package_that_was_not_imported() -> None:
    out = run_script("""
import llamapipe as lp
for name in ("compat", "dynamo", "lm_eval", "ray", "server"):
    try:
        getattr(lp, name)
    except AttributeError as error:
        print(error)
import llamapipe.compat
print(lp.compat.Llama.__name__)
""")
    assert out.splitlines() == [
        *(
            f"llamapipe.{name} is not imported yet: import llamapipe.{name}"
            for name in ("compat", "dynamo", "lm_eval", "ray", "server")
        ),
        "Llama",
    ]
