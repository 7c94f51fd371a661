"""`llamapipe.compat.Llama`: threads, options that are refused, chats, tools, embeddings, the README of the original."""

from __future__ import annotations

import gc
import inspect
import json
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import make_adapter
from support.bert_model import bert_model
from support.gguf_models import sliding_window_model
from support.run_script import run_script

import llamapipe as lp
from llamapipe.compat import (
    LLAMA_POOLING_TYPE_LAST,
    LLAMA_POOLING_TYPE_MEAN,
    LLAMA_POOLING_TYPE_NONE,
    Llama,
    LlamaGrammar,
    LlamaRAMCache,
    options,
)
from llamapipe.compat.chats import schema_of

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "UserDetail",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "age": {"type": "integer", "maximum": 99},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    },
}
MESSAGES = [{"role": "user", "content": "Extract Jason is 25 years old"}]
CHOICE_X = {"function": {"name": "x"}}


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with Llama(lp.demo_model_path(), n_ctx=1024, verbose=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path, _ = bert_model(tmp_path_factory.mktemp("bert") / "bert.gguf")
    with Llama(path, embedding=True) as llm:
        yield llm


class TestThreads:
    def test_eight_threads_share_one(self, llm: Any) -> None:
        prompts = [f"Tale {i}" for i in range(64)]
        expected = [llm(prompt, **GREEDY)["choices"][0]["text"] for prompt in prompts]
        with ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(lambda prompt: llm(prompt, **GREEDY)["choices"][0]["text"], prompts))
        # Batches of other shapes round differently; nearly all texts are the same.
        assert sum(a == b for a, b in zip(texts, expected, strict=True)) >= 60
        assert llm.engine.stats().n_requests >= 128

    def test_each_thread_has_a_sequence(self, llm: Any) -> None:
        def evaluate(i: int) -> tuple[int, list[int]]:
            llm.reset()
            llm.eval(llm.tokenize(f"Tale {i}".encode()))
            for _ in range(5):
                llm.eval([llm.sample(temp=0.0)])
            return llm.n_tokens, llm.input_ids.tolist()

        with ThreadPoolExecutor(4) as pool:
            for i, (n, ids) in enumerate(pool.map(evaluate, range(12))):
                prompt = llm.tokenize(f"Tale {i}".encode())
                assert (n, ids[: len(prompt)]) == (len(prompt) + 5, prompt)

    def test_a_stream_that_is_dropped_ends(self, llm: Any) -> None:
        stream = llm("Once", max_tokens=900, stream=True, temperature=0.0)
        next(stream)
        stream.close()
        assert llm.engine.stats().n_active == 0

    def test_closing_waits_for_calls(self) -> None:
        llm: Any = Llama(lp.demo_model_path(), n_ctx=1024)
        stream = llm("Once", max_tokens=200, stream=True)
        next(stream)
        llm.close()
        llm.close()
        assert list(stream)[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        with pytest.raises(lp.errors.EngineClosedError, match="closed"):
            llm("Once")

    def test_one_that_is_dropped_is_freed(self) -> None:
        llm = Llama(lp.demo_model_path())
        llm("a", max_tokens=1)
        del llm
        gc.collect()


def test_any_evaluated_position_can_be_sampled() -> None:
    with closing(Llama(str(lp.demo_model_path()), n_ctx=64, verbose=False)) as llama:
        prompt = llama.tokenize(b"Once upon a time, there was")
        llama.eval(prompt)
        for idx in (0, len(prompt) // 2, len(prompt) - 1):
            token = llama.sample(temp=0.0, idx=idx)
            params = lp.SamplingParams(max_tokens=1, temperature=0)
            assert token == llama.engine.generate(prompt[: idx + 1], params).token_ids[0]
        assert token == llama.sample(temp=0.0) and llama.n_tokens == len(prompt)
        for idx in (-1, len(prompt)):
            with pytest.raises(ValueError, match=f"idx is {idx}, and {len(prompt)} tokens were evaluated"):
                llama.sample(temp=0.0, idx=idx)


class TestOptions:
    def test_the_constructor_has_all_arguments(self) -> None:
        ours = set(inspect.signature(Llama.__init__).parameters)
        assert len(ours - {"self", "n_seq_max", "n_cells", "chat_template", "template_args", "older"}) == 45

    def test_an_adapter_is_applied_to_all_calls(self, tmp_path: Path) -> None:
        file = make_adapter(tmp_path / "a.gguf", lp.demo_model_path(), strength=0.3)
        wanted: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}
        with lp.Model.demo() as model, lp.Engine(model, n_ctx=64) as engine:
            params = lp.SamplingParams(adapter={model.load_adapter(file): 0.5}, **wanted)
            expected = engine.generate("Once upon a time", params)
        arguments: dict[str, Any] = {"lora_path": str(file), "verbose": False}
        with closing(Llama(str(lp.demo_model_path()), n_ctx=64, lora_scale=0.5, **arguments)) as llama:
            assert llama("Once upon a time", **wanted)["choices"][0]["text"] == expected.text
            llama.eval(llama.tokenize(b"Once upon a time"))
            assert llama.sample(temp=0) == expected.token_ids[0]
            state = llama.save_state()
            llama.reset()
            llama.load_state(state)
            assert llama.sample(temp=0) == expected.token_ids[0]
        for more, message in (
            ({"embedding": True}, "not supported with embedding=True"),
            ({"lora_scale": 1e9}, "lora_scale is"),
            ({"lora_base": "m.gguf"}, "lora_base"),
        ):
            with pytest.raises(ValueError, match=message):
                Llama(str(lp.demo_model_path()), **arguments, **more)

    @pytest.mark.parametrize("name", list(options.REFUSED))
    def test_what_cannot_be_honoured_is_refused(self, name: str) -> None:
        nothing = options.REFUSED[name][0]
        other: Any = not nothing if isinstance(nothing, bool) else 7
        arguments: Any = {name: nothing}
        with pytest.raises(ValueError, match=f"{name}=.* is not supported"):
            Llama(lp.demo_model_path(), **arguments | {name: other})
        Llama(lp.demo_model_path(), vocab_only=True, **arguments).close()

    def test_sliding_windows_keep_all_cells_or_the_last(self, tmp_path: Path) -> None:
        path = sliding_window_model(tmp_path / "window.gguf")
        for wanted, kept in ((True, True), (False, False), (None, True)):
            with Llama(str(path), n_ctx=64, n_seq_max=2, swa_full=wanted) as llm:
                assert llm.engine.stats().swa_full is kept

    def test_a_draft_model(self, demo: lp.Model) -> None:
        for draft in (str(lp.demo_model_path()), demo):
            with Llama(str(lp.demo_model_path()), n_ctx=64, draft_model=draft) as llm:
                assert "draft=" in repr(llm.engine)
                llm("Once upon a time", max_tokens=8)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"chat_format": "nonsense"}, "must be one of"),
            ({"chat_format": "functionary"}, "not supported"),
            ({"split_mode": 9}, "split_mode is 9"),
            ({"type_k": 4}, "type_k is 4"),
            ({"pooling_type": 9}, "pooling_type is 9"),
            ({"chat_format": "chatml", "chat_template": "{{ messages }}"}, "give one of them"),
            ({"n_ctx": -1}, "n_ctx"),
        ],
    )
    def test_bad_values(self, arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Llama(lp.demo_model_path(), **arguments)

    def test_unknown_options_are_errors(self) -> None:
        with pytest.raises(TypeError, match="n_cttx"):
            Llama(lp.demo_model_path(), n_cttx=5)

    def test_what_older_programs_give(self) -> None:
        """LangChain's ChatLlamaCpp always gives these; its LlamaCppEmbeddings, another f16_kv and a device."""
        arguments: dict[str, Any] = {
            "n_parts": -1,
            "f16_kv": True,
            "device": None,
            "rope_freq_scale": 1.0,
            "rope_freq_base": 10000.0,
        }
        for both in (True, False):
            Llama(lp.demo_model_path(), **arguments | {"f16_kv": both}).close()
        for name, other in (("f16_kv", 7), ("n_parts", 2), ("device", "cuda")):
            with pytest.raises(ValueError, match=f"{name}=.* is not supported"):
                Llama(lp.demo_model_path(), **arguments | {name: other})

    def test_positions_are_scaled(self) -> None:
        def text(**arguments: Any) -> str:
            with Llama(lp.demo_model_path(), n_ctx=256, **arguments) as llama:
                return str(llama("Once upon a time", max_tokens=24, temperature=0)["choices"][0]["text"])

        own = text()
        assert text(rope_freq_base=10000.0, rope_freq_scale=1.0, yarn_beta_fast=32.0) == own
        changed: list[dict[str, Any]] = [{"rope_freq_base": 300.0}, {"rope_freq_scale": 0.1}]
        assert len({own, *(text(**arguments) for arguments in changed)}) == 3

    def test_memory_is_that_of_one_request_when_contexts_are_large(self) -> None:
        with Llama(lp.demo_model_path(), n_ctx=512) as small, Llama(lp.demo_model_path(), n_ctx=0) as large:
            assert small.engine.n_ctx == 512
            assert large.n_ctx() == large.lp_model.n_ctx_train
        arguments = {"n_seq_max": 8, "n_cells": None, "n_batch": 512, "n_ubatch": 512, "flash_attn": False}
        arguments |= {"n_threads": None, "n_threads_batch": None, "type_k": 8, "type_v": None}
        arguments |= {"rope_scaling_type": 2, "yarn_orig_ctx": 8192}
        engine_options = options.engine_options(arguments, 32768)
        assert (engine_options["n_cells"], engine_options["type_k"]) == (32768, "q8_0")
        assert (engine_options["rope_scaling"], engine_options["yarn_orig_ctx"]) == ("yarn", 8192)
        assert options.engine_options(arguments, 1024)["n_cells"] is None

    @pytest.mark.parametrize(
        "arguments", [{"tfs_z": 0.5}, {"stop": [5]}, {"grammar": "root ::= "}, {"top_p": -1}]
    )
    def test_bad_sampling(self, llm: Any, arguments: dict[str, Any]) -> None:
        with pytest.raises((TypeError, ValueError)):
            llm("a", **arguments)
        with pytest.raises((TypeError, ValueError)):
            llm.create_chat_completion(MESSAGES, **arguments)

    def test_seeds(self) -> None:
        def texts(seed: int) -> list[str]:
            llm: Any
            with Llama(lp.demo_model_path(), seed=seed) as llm:
                return [llm("Once", max_tokens=8)["choices"][0]["text"] for _ in range(3)]

        assert texts(5) == texts(5)
        assert len(set(texts(5))) > 1
        assert len({text for _ in range(3) for text in texts(-1)}) > 3  # random, as 0xFFFFFFFF

    def test_pickling_loads_again(self, llm: Any) -> None:
        again: Any = pickle.loads(pickle.dumps(llm))
        assert again("Once", **GREEDY)["choices"] == llm("Once", **GREEDY)["choices"]
        again.close()

    def test_caches(self, llm: Any) -> None:
        llm.set_cache(LlamaRAMCache(capacity_bytes=1 << 20))
        assert llm.cache.capacity_bytes == 1 << 20
        llm.set_cache(None)
        assert llm.cache is None
        with pytest.raises(TypeError, match="LlamaRAMCache"):
            llm.set_cache("disk")


class TestChats:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("chat_format", [None, "chatml", "chatml-function-calling", "llama-2"])
    def test_a_forced_tool(self, chat_format: str | None, stream: bool) -> None:
        llm: Any
        with Llama(lp.demo_model_path(), n_ctx=1024, chat_format=chat_format) as llm:
            arguments: dict[str, Any] = {"tools": [TOOL], "max_tokens": 200, "temperature": 0.0}
            arguments["tool_choice"] = {"type": "function", "function": {"name": "UserDetail"}}
            if stream:
                parts = list(llm.create_chat_completion(MESSAGES, stream=True, **arguments))
                calls = [call for part in parts for call in part["choices"][0]["delta"].get("tool_calls", [])]
                assert calls[0]["function"]["name"] == "UserDetail"
                text = "".join(call["function"]["arguments"] for call in calls)
                reason = parts[-1]["choices"][0]["finish_reason"]
            else:
                choice = llm.create_chat_completion(MESSAGES, **arguments)["choices"][0]
                (call,) = choice["message"]["tool_calls"]
                assert choice["message"]["content"] is None
                text, reason = call["function"]["arguments"], choice["finish_reason"]
            assert reason == "tool_calls"
            assert set(json.loads(text)) == {"name", "age"}

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("chat_format", [None, "chatml", "chatml-function-calling"])
    def test_a_forced_tool_that_is_cut_off(self, chat_format: str | None, stream: bool) -> None:
        """The call is left out, and no part of it is content."""
        llm: Any
        with Llama(lp.demo_model_path(), n_ctx=1024, chat_format=chat_format) as llm:
            arguments: dict[str, Any] = {"tools": [TOOL], "temperature": 0.0, "stream": stream}
            arguments["tool_choice"] = {"type": "function", "function": {"name": "UserDetail"}}
            for n in (1, 4, 14):
                answer = llm.create_chat_completion(MESSAGES, max_tokens=n, **arguments)
                if stream:
                    parts = [part["choices"][0] for part in answer]
                    assert not any("content" in part["delta"] for part in parts)
                    reason = parts[-1]["finish_reason"]
                else:
                    (choice,) = answer["choices"]
                    assert choice["message"] == {"role": "assistant", "content": ""}
                    reason = choice["finish_reason"]
                assert reason == "length"

    def test_a_template_of_ones_own(self, tmp_path: Path) -> None:
        source = (
            "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]{{ word or '' }}"
        )
        path = tmp_path / "template.jinja"
        path.write_text(source)
        for chat_template in (source, path):
            with Llama(
                lp.demo_model_path(), chat_template=chat_template, template_args={"word": " So"}
            ) as llm:
                prompt = "[user] Extract Jason is 25 years old\n[assistant] So"
                assert llm.create_chat_completion(MESSAGES, max_tokens=1)["usage"]["prompt_tokens"] == len(
                    llm.tokenize(prompt.encode())
                )
                again: Any = pickle.loads(pickle.dumps(llm))
                assert again.lp_model.render_chat(MESSAGES, word=" So") == prompt
                again.close()

    def test_older_names(self, llm: Any) -> None:
        answer = llm.create_chat_completion(
            MESSAGES, functions=[TOOL["function"]], function_call={"name": "UserDetail"}, max_tokens=200
        )
        assert answer["choices"][0]["message"]["function_call"]["name"] == "UserDetail"

    @pytest.mark.parametrize("chat_format", [None, "chatml"])
    def test_json(self, chat_format: str | None) -> None:
        llm: Any
        with Llama(lp.demo_model_path(), n_ctx=1024, chat_format=chat_format) as llm:
            schema = TOOL["function"]["parameters"]
            kinds: list[Any] = [
                {"response_format": {"type": "json_object", "schema": schema}},
                {"grammar": LlamaGrammar.from_json_schema(json.dumps(schema))},
            ]
            for arguments in kinds:
                answer = llm.create_chat_completion(MESSAGES, max_tokens=200, **arguments)
                assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"name", "age"}

    def test_objects_are_closed_as_in_the_original(self) -> None:
        inner: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}}
        free = {"type": "object", "properties": {"c": {}}, "additionalProperties": True}
        properties = {"a": inner, "free": free, "any": {"type": "object"}}
        schema = {"type": "object", "properties": properties}
        closed: dict[str, Any] = {**schema, "additionalProperties": False}
        closed["properties"] = {**properties, "a": {**inner, "additionalProperties": False}}
        assert LlamaGrammar.from_json_schema(json.dumps(schema)).json_schema == closed
        assert schema_of({"type": "json_object", "schema": schema}) == closed
        assert schema_of({"type": "json_schema", "json_schema": {"schema": schema}}) == closed
        assert schema_of({"type": "json_object"}) == {"type": "object"}

    def test_streams_are_the_whole(self, llm: Any) -> None:
        arguments: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": 30,
            "logprobs": True,
            "top_logprobs": 2,
        }
        whole = llm.create_chat_completion(MESSAGES, **arguments)["choices"][0]
        parts = [
            chunk["choices"][0] for chunk in llm.create_chat_completion(MESSAGES, stream=True, **arguments)
        ]
        assert parts[0]["delta"] == {"role": "assistant"}
        assert "".join(chunk["delta"].get("content", "") for chunk in parts) == whole["message"]["content"]
        entries = [entry for chunk in parts if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == [e["token"] for e in whole["logprobs"]["content"]]
        assert parts[-1]["finish_reason"] == whole["finish_reason"]

    def test_openai_types(self, llm: Any) -> None:
        answer = llm.create_chat_completion_openai_v1(MESSAGES, max_tokens=4)
        assert answer.choices[0].message.role == "assistant"
        chunks = list(llm.create_chat_completion_openai_v1(MESSAGES, max_tokens=4, stream=True))
        assert chunks[-1].choices[0].finish_reason == "length"

    def test_what_a_format_cannot_write(self) -> None:
        llm: Any
        with Llama(lp.demo_model_path(), chat_format="chatml") as llm:
            for messages, arguments, message in (
                ([{"role": "tool", "content": "x"}], {}, "role 'tool'"),
                ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "text only"),
                (MESSAGES, {"tools": [TOOL], "tool_choice": "auto"}, "no tool calls"),
                (MESSAGES, {"tools": [TOOL]}, "no tool calls"),
                (MESSAGES, {"tools": [{"name": "x"}], "tool_choice": CHOICE_X}, r"tools\[0\] must be \{"),
                (MESSAGES, {"tools": ["x"], "tool_choice": CHOICE_X}, r"tools\[0\] must be \{.*, not 'x'"),
                ("Hello", {}, "messages must be a list of messages, not str"),
                (["Hello"], {}, r"messages\[0\] must be a dict with role and content, not str"),
                (MESSAGES, {"response_format": {"type": "xml"}}, "its type must be"),
                (MESSAGES, {"tools": [TOOL], "tool_choice": CHOICE_X}, "the tools are"),
            ):
                with pytest.raises((ValueError, TypeError), match=message):
                    llm.create_chat_completion(messages, **arguments)
            assert llm.create_chat_completion(MESSAGES, tools=[TOOL], tool_choice="none", max_tokens=1)
        with pytest.raises(
            ValueError, match="template_args are for a template, and chat_format='chatml' has"
        ):
            Llama(lp.demo_model_path(), chat_format="chatml", template_args={"enable_thinking": False})

    def test_a_grammar_and_a_schema(self, llm: Any) -> None:
        """Neither is dropped without a word."""
        grammar = LlamaGrammar.from_string('root ::= "x"')
        for response_format in ({"type": "json_object"}, {"type": "json_object", "schema": {"type": "null"}}):
            with pytest.raises(ValueError, match="grammar and response_format are given; give one of them"):
                llm.create_chat_completion(MESSAGES, grammar=grammar, response_format=response_format)
        answer = llm.create_chat_completion(MESSAGES, grammar=grammar, response_format={"type": "text"})
        assert answer["choices"][0]["message"]["content"] == "x"
        with pytest.raises(ValueError, match="'false'"):  # it was taken for any object
            llm.create_chat_completion(MESSAGES, response_format={"type": "json_object", "schema": False})


class TestEmbeddings:
    def test_vectors(self, bert: Any) -> None:
        texts = ["hello world", "goodbye"]
        with lp.Embedder(bert.model_path) as embedder:
            expected = embedder.embed(texts, normalize=False)
        vectors, n = bert.embed(texts, return_count=True)
        assert np.allclose(vectors, expected, atol=1e-4)
        assert np.allclose(bert.embed(texts[0]), expected[0], atol=1e-4)
        answer = bert.create_embedding(texts)
        assert [entry["index"] for entry in answer["data"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == n
        assert len(bert.create_embedding("hello")["data"][0]["embedding"]) == bert.n_embd()
        assert np.linalg.norm(bert.embed("hello", normalize=True)) == pytest.approx(1, abs=1e-5)

    def test_a_file_that_names_no_pooling(self, bert: Any) -> None:
        """One vector for each token, as llama.cpp does it."""
        llm: Any
        with Llama(lp.demo_model_path(), embedding=True) as llm:
            n = len(llm.tokenize(b"hello there"))
            vectors = llm.embed("hello there")
            assert llm.pooling_type() == LLAMA_POOLING_TYPE_NONE
            assert np.shape(vectors) == np.shape(llm.embed(["hello there"])[0]) == (n, llm.n_embd())
            assert np.shape(llm.create_embedding("hello there")["data"][0]["embedding"]) == (n, llm.n_embd())
            assert np.allclose(np.linalg.norm(llm.embed("hello there", normalize=True), axis=1), 1)
        with Llama(lp.demo_model_path(), embedding=True, pooling_type=LLAMA_POOLING_TYPE_LAST) as llm:
            assert llm.pooling_type() == LLAMA_POOLING_TYPE_LAST
            assert np.allclose(llm.embed("hello there"), vectors[-1], atol=1e-4)
        assert bert.pooling_type() == LLAMA_POOLING_TYPE_MEAN  # as the file says

    def test_long_texts(self, bert: Any) -> None:
        text = "hello " * 2000
        assert len(bert.embed(text)) == bert.n_embd()
        with pytest.raises(ValueError, match="tokens"):
            bert.embed(text, truncate=False)

    def test_without_the_option(self, llm: Any) -> None:
        with pytest.raises(RuntimeError, match="embedding=True"):
            llm.embed("a")


def test_logits_processors_see_all_tokens(demo: lp.Model) -> None:
    """Also after a sequence was changed, and in a fork."""
    seen: list[list[int]] = []

    def processor(tokens: list[int], row: Any) -> None:
        assert row.shape == (demo.n_vocab,)
        seen.append(list(tokens))

    params = lp.SamplingParams(max_tokens=6, temperature=0.0, logits_processors=[processor], ignore_eos=True)
    with lp.Engine(demo, n_ctx=256, n_seq_max=2) as engine:
        prompt = demo.tokenize("Once")
        done = engine.generate(prompt, params)
        assert seen == [prompt + done.token_ids[:i] for i in range(6)]
        seen.clear()
        with engine.start(prompt, lp.SamplingParams(temperature=0.0, logits_processors=[processor])) as g:
            first = [g.next().id for _ in range(3)]  # type: ignore[union-attr]
            g.trim(len(prompt) + 1)
            g.append(prompt)
            g.next()
        assert seen[-1] == prompt + first[:1] + prompt


def test_arrays_of_tokens(llm: Any) -> None:
    """What ``input_ids`` returns."""
    llm.reset()
    llm.eval(llm.tokenize(b"Once upon"))
    ids = llm.input_ids
    assert llm.detokenize(ids) == llm.detokenize(ids.tolist()) == b"Once upon"
    assert llm.detokenize(ids[:0]) == b""
    assert llm(ids, **GREEDY)["choices"] == llm(ids.tolist(), **GREEDY)["choices"]


def test_bytes_are_no_prompt(llm: Any) -> None:
    with pytest.raises(TypeError, match="not bytes"):
        llm(b"Once", max_tokens=1)


def test_logprobs_of_an_echo_without_tokens(llm: Any) -> None:
    biases = {llm.token_eos(): 100.0}
    (choice,) = llm("", echo=True, logprobs=1, max_tokens=1, temperature=0, logit_bias=biases)["choices"]
    assert choice["text"] == "" and choice["logprobs"]["tokens"] == []


def test_a_misspelt_option_of_the_constructor() -> None:
    with pytest.raises(TypeError, match="'n_ctxx'; did you mean n_ctx"):
        Llama(lp.demo_model_path(), n_ctxx=5)
    for name, instead in (
        ("override_tensor", "tensor_placement="),
        ("n_cpu_moe", "Model(path, n_cpu_moe=N)"),
    ):
        with pytest.raises(TypeError, match=f"'{name}'; .*{re.escape(instead)}"):
            Llama(lp.demo_model_path(), **{name: None})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", None),
        ("temperature", "hot"),
        ("top_k", None),
        ("max_tokens", "5"),
        ("logit_bias", 5),
        ("tool_choice", {}),
        ("tool_choice", {"type": "function"}),
        ("function_call", {}),
        ("response_format", "json"),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
    ],
)
def test_errors_name_the_argument(llm: Any, name: str, value: Any) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises((TypeError, ValueError), match=f"^{name} "):
        llm.create_chat_completion(messages, **{name: value})
    if name in ("temperature", "top_k", "max_tokens", "logit_bias"):
        with pytest.raises((TypeError, ValueError), match=f"^{name} "):
            llm("Hello", **{name: value})


def test_what_the_original_takes(llm: Any) -> None:
    """Floats as limits, and a choice of tools where there are none."""
    messages = [{"role": "user", "content": "Hello"}]
    short = llm.create_chat_completion(messages, max_tokens=2.0, temperature=0, tool_choice="get_weather")
    assert short["usage"]["completion_tokens"] <= 2
    assert llm("Once", max_tokens=-1.0, temperature=0)["choices"]


def test_one_that_is_dropped_prints_nothing_while_an_engine_uses_its_model() -> None:
    program = """
import gc
import llamapipe as lp
from llamapipe.compat import Llama

llama = Llama(sys.argv[1], n_ctx=64, verbose=False)
engine = lp.Engine(llama.lp_model, n_ctx=64)
del llama
gc.collect()
say(engine.generate("Once", lp.SamplingParams(max_tokens=1)).n_completion_tokens)
"""
    assert run_script(program, lp.demo_model_path(), flags=("-W", "ignore")) == "1\n"
