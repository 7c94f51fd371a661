"""`llamapipe.compat.Llama` against llama-cpp-python itself, both in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import llamapipe as lp
from llamapipe import compat
from llamapipe.compat import (
    Llama,
    LlamaGrammar,
    LlamaRAMCache,
    LlamaTokenizer,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from llamapipe.compat.formats import FORMATS
from llamapipe.compat.options import CONSTANTS

llama_cpp = pytest.importorskip(
    "llama_cpp", reason="llama-cpp-python is not installed; `nox -s tests` builds it"
)
PROMPTS = ["Once upon a time", "The little fox", "a", "é ☃ 日本", "Two  spaces\n\n and lines"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "repeat_penalty": 1.0}


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    with Llama(lp.demo_model_path(), n_ctx=512, flash_attn=True, verbose=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs() -> Iterator[Any]:
    llm = llama_cpp.Llama(
        str(lp.demo_model_path()), n_ctx=512, flash_attn=True, logits_all=True, verbose=False
    )
    yield llm
    llm.close()


def without_ids(answer: Any) -> Any:
    """An answer without what differs from call to call."""
    if isinstance(answer, dict):
        return {k: without_ids(v) for k, v in answer.items() if k not in ("id", "created")}
    if isinstance(answer, list):
        return [without_ids(item) for item in answer]
    return pytest.approx(answer, abs=0.02) if isinstance(answer, float) else answer


def is_near_tie(llm: Any, prompt: str, own: Any, other: Any, options: dict[str, Any]) -> bool:
    """Whether two answers part at tokens of nearly the same probability: the two libraries round differently."""
    texts = [
        answer["choices"][0]["text"].removeprefix(prompt if options.get("echo") else "")
        for answer in (own, other)
    ]
    n_shared = next(i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b)
    probabilities = llm(prompt, **{**options, "echo": False, "logprobs": 5})["choices"][0]["logprobs"]
    text = ""
    for token, top in zip(probabilities["tokens"], probabilities["top_logprobs"], strict=True):
        if len(text + token) > n_shared:
            logprobs = [logprob for piece, logprob in top.items() if texts[1].startswith(text + piece)]
            return bool(logprobs) and max(top.values()) - max(logprobs) < 0.05
        text += token
    return False


class TestTokens:
    @pytest.mark.parametrize("special", [False, True])
    @pytest.mark.parametrize("add_bos", [False, True])
    def test_texts(self, ours: Any, theirs: Any, add_bos: bool, special: bool) -> None:
        rng = random.Random(3)
        texts = [
            *PROMPTS,
            "<|im_start|>user</s><s>",
            "".join(chr(rng.randrange(32, 3000)) for _ in range(50)),
        ]
        for text in texts:
            tokens = ours.tokenize(text.encode(), add_bos, special)
            assert tokens == theirs.tokenize(text.encode(), add_bos, special)
            for shown in (False, True):
                assert ours.detokenize(tokens, special=shown) == theirs.detokenize(tokens, special=shown)

    def test_numbers(self, ours: Any, theirs: Any) -> None:
        for name in ("n_ctx", "n_embd", "n_vocab", "token_bos", "token_eos", "token_nl"):
            assert getattr(ours, name)() == getattr(theirs, name)(), name
        assert ours.metadata == theirs.metadata


class TestCompletions:
    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_greedy(self, ours: Any, theirs: Any, prompt: str) -> None:
        for options in ({}, {"max_tokens": 40}, {"echo": True}, {"stop": ["e", "\n"]}):
            arguments = {**GREEDY, **options}
            own, other = without_ids(ours(prompt, **arguments)), without_ids(theirs(prompt, **arguments))
            assert own == other or is_near_tie(ours, prompt, own, other, arguments), options

    def test_log_probabilities(self, ours: Any, theirs: Any) -> None:
        for echo in (False, True):
            arguments = {**GREEDY, "logprobs": 3, "max_tokens": 8, "echo": echo}
            own, original = ours(PROMPTS[0], **arguments), theirs(PROMPTS[0], **arguments)
            got, expected = own["choices"][0]["logprobs"], original["choices"][0]["logprobs"]
            for name in ("tokens", "text_offset"):
                assert got[name] == expected[name]
            assert got["token_logprobs"] == [
                None if x is None else pytest.approx(float(x), abs=0.05) for x in expected["token_logprobs"]
            ]
            assert [top and top.keys() for top in got["top_logprobs"]] == [
                top and top.keys() for top in expected["top_logprobs"]
            ]

    def test_streams(self, ours: Any, theirs: Any) -> None:
        arguments = {**GREEDY, "max_tokens": 30, "stream": True}
        own, original = list(ours(PROMPTS[0], **arguments)), list(theirs(PROMPTS[0], **arguments))
        assert "".join(chunk["choices"][0]["text"] for chunk in own) == "".join(
            chunk["choices"][0]["text"] for chunk in original
        )
        assert without_ids(own[-1]) == without_ids(original[-1])
        assert without_ids(own[0]) == without_ids(original[0])

    def test_grammar_and_bias(self, ours: Any, theirs: Any) -> None:
        gbnf = 'root ::= ("yes" | "no") "!"'
        own = ours(PROMPTS[0], grammar=LlamaGrammar.from_string(gbnf), **GREEDY)
        original = theirs(
            PROMPTS[0], grammar=llama_cpp.LlamaGrammar.from_string(gbnf, verbose=False), **GREEDY
        )
        assert without_ids(own) == without_ids(original)
        bias = dict.fromkeys(ours.tokenize(b"zoo", add_bos=False), 50.0)
        arguments = {**GREEDY, "logit_bias": bias}
        assert without_ids(ours(PROMPTS[0], **arguments)) == without_ids(theirs(PROMPTS[0], **arguments))

    def test_processors_and_criteria_see_the_same(self, ours: Any, theirs: Any) -> None:
        def run(llm: Any, processors: Any, criteria: Any) -> tuple[Any, list[Any]]:
            seen: list[Any] = []

            def forbid_last(ids: Any, scores: Any) -> Any:
                seen.append(ids.tolist())
                scores[ids[-1]] = -1e9
                return scores

            def long_enough(ids: Any, scores: Any) -> bool:
                return len(ids) > 20 and scores.shape == (llm.n_vocab(),)

            arguments = {"logits_processor": processors([forbid_last]), "max_tokens": 40}
            done = llm(PROMPTS[0], stopping_criteria=criteria([long_enough]), **arguments, **GREEDY)
            return without_ids(done), seen

        own = run(ours, LogitsProcessorList, StoppingCriteriaList)
        original = run(theirs, llama_cpp.LogitsProcessorList, llama_cpp.StoppingCriteriaList)
        assert own[0] == original[0]
        assert own[1][: len(original[1])] == original[1][: len(own[1])]

    def test_a_prompt_that_does_not_fit(self, ours: Any, theirs: Any) -> None:
        for llm in (ours, theirs):
            with pytest.raises(ValueError, match=r"context"):
                llm("word " * 600)


class TestNames:
    def test_constants(self) -> None:
        theirs = {name: getattr(llama_cpp, name, None) for name in CONSTANTS}
        assert {**theirs, "GGML_TYPE_BF16": CONSTANTS["GGML_TYPE_BF16"]} == CONSTANTS
        assert compat.__version__ == llama_cpp.__version__

    def test_attributes(self, ours: Any, theirs: Any) -> None:
        for name in ("cache", "chat_handler"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.tokenizer_.encode("a b") == theirs.tokenizer_.encode("a b")
        assert LlamaTokenizer(ours).encode("a b") == llama_cpp.LlamaTokenizer(theirs).encode("a b")
        assert LlamaRAMCache().cache_size == llama_cpp.LlamaRAMCache().cache_size

    @pytest.mark.parametrize("pooling", [-1, 0, 1, 3])
    def test_shapes_of_embeddings(self, pooling: int) -> None:
        shapes = []
        for library in (compat, llama_cpp):
            llm = library.Llama(
                str(lp.demo_model_path()), embedding=True, pooling_type=pooling, verbose=False
            )
            vectors, n = llm.embed(["hello there", "a"], return_count=True)
            embedding = llm.create_embedding("a")["data"][0]["embedding"]
            shapes.append(
                (llm.pooling_type(), [np.shape(vector) for vector in vectors], n, np.shape(embedding))
            )
            llm.close()
        assert shapes[0] == shapes[1]


class TestLowLevel:
    def test_generate(self, ours: Any, theirs: Any) -> None:
        tokens = ours.tokenize(b"Once upon a time")

        def first(llm: Any, n: int) -> list[int]:
            generated = []
            for token in llm.generate(list(tokens), temp=0.0, repeat_penalty=1.0):
                generated.append(token)
                if len(generated) == n:
                    break
            return generated

        assert first(ours, 12) == first(theirs, 12)

    def test_eval_and_sample(self, ours: Any, theirs: Any) -> None:
        for llm in (ours, theirs):
            llm.reset()
            llm.eval(ours.tokenize(b"The little fox"))
        for _ in range(6):
            token = theirs.sample(temp=0.0)
            # The same, or as good but for rounding: attention is not computed by the same loops.
            logits = ours.eval_logits[-1]
            assert logits[token] >= max(logits) - 0.2
            assert logits[ours.sample(temp=0.0)] == max(logits)
            for llm in (ours, theirs):
                llm.eval([token])
                assert llm.n_tokens == len(llm.eval_tokens)
        assert ours.input_ids.tolist() == theirs.input_ids[: theirs.n_tokens].tolist()
        logits = theirs.eval_logits[-1]
        assert ours.eval_logits[-1] == pytest.approx(logits, abs=0.2)

    def test_states(self, ours: Any) -> None:
        ours.reset()
        ours.eval(ours.tokenize(b"The little fox"))
        state, expected = ours.save_state(), ours.sample(temp=0.0)
        ours.reset()
        ours.load_state(state)
        assert (ours.n_tokens, ours.sample(temp=0.0)) == (state.n_tokens, expected)


class TestChats:
    MESSAGES: ClassVar[tuple[dict[str, Any], ...]] = (
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    )
    # These write something else: see docs/coming-from/llama-cpp-python.md.
    OTHER: ClassVar[set[str]] = {
        "alpaca",
        "intel",
        "llama-2",
        "openbuddy",
        "open-orca",
        "openchat",
        "phind",
        "snoozy",
        "zephyr",
    }

    @pytest.mark.parametrize("name", sorted(FORMATS))
    def test_formats(self, name: str) -> None:
        from llama_cpp import llama_chat_format

        original = {"vicuna": "format", "oasst_llama": "format_oasst_llama"}.get(name)
        if original is None:
            words = name.replace("-", "_")
            original = {
                "llama_2": "format_llama2",
                "llama_3": "format_llama3",
                "baichuan_2": "format_baichuan2",
                "open_orca": "format_open_orca",
                "redpajama_incite": "format_redpajama_incite",
            }.get(words, f"format_{words}")
        if name in self.OTHER:
            return
        plain = list(self.MESSAGES)
        system = (
            [] if name in ("vicuna", "gemma", "mistral-instruct") else [{"role": "system", "content": "S."}]
        )
        for messages in (plain, system + plain):
            # The original calls the assistant "bot" in this format.
            theirs = [
                m | {"role": "bot"} if name == "saiga" and m["role"] == "assistant" else m for m in messages
            ]
            expected = getattr(llama_chat_format, original)(theirs)
            assert FORMATS[name].render(messages) == expected.prompt
            assert list(FORMATS[name].stop) == (
                []
                if expected.stop is None
                else [expected.stop]
                if isinstance(expected.stop, str)
                else expected.stop
            )

    def test_the_models_template(self, ours: Any, theirs: Any) -> None:
        arguments: dict[str, Any] = {"messages": list(self.MESSAGES), "max_tokens": 12, "temperature": 0.0}
        own, original = ours.create_chat_completion(**arguments), theirs.create_chat_completion(**arguments)
        assert without_ids(own)["choices"][0]["message"] == without_ids(original)["choices"][0]["message"]
        assert own["usage"] == original["usage"]
