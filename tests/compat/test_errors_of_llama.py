"""Errors of `llamapipe.compat` speak of what its users wrote: `Llama` and its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import llamapipe as lp
from llamapipe.compat import Llama, LlamaTokenizer, LogitsProcessorList

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
HELLO = [{"role": "user", "content": "Hello"}]
LONG = [{"role": "user", "content": "hi " * 600}]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with Llama(lp.demo_model_path(), n_ctx=256, verbose=False) as llm:
        yield llm


class TestChats:
    @pytest.mark.parametrize("options", [{}, {"tool_choice": "auto"}, {"tool_choice": "weather"}])
    def test_tools_without_a_place_in_the_template(self, llm: Any, options: dict[str, Any]) -> None:
        with pytest.raises(
            ValueError, match=r"pass chat_format='chatml-function-calling', or a chat_template"
        ):
            llm.create_chat_completion(HELLO, tools=[TOOL], max_tokens=2, **options)
        assert llm.create_chat_completion(HELLO, tools=[TOOL], tool_choice="none", max_tokens=2)["choices"]

    def test_the_chat_format_that_the_message_names(self) -> None:
        llm: Any
        with Llama(lp.demo_model_path(), n_ctx=1024, chat_format="chatml-function-calling") as llm:
            assert llm.create_chat_completion(HELLO, tools=[TOOL], max_tokens=2)["choices"]

    @pytest.mark.parametrize("chat_format", [None, "chatml"])
    @pytest.mark.parametrize("messages", [LONG, [{"role": "user", "content": "hi " * 60_000}]])
    def test_a_conversation_that_is_too_long(self, chat_format: str | None, messages: Any) -> None:
        llm: Any
        with Llama(lp.demo_model_path(), n_ctx=256, chat_format=chat_format) as llm:
            for stream in (False, True):
                with pytest.raises(
                    ValueError, match=r"n_ctx is 256 and one must stay free: shorten it, or raise n_ctx$"
                ):
                    list(llm.create_chat_completion(messages, stream=stream))

    @pytest.mark.parametrize(
        "misplaced", [{"schema": {}}, {"json_schema": 5}, {"json_schema": {"name": "x"}}]
    )
    def test_a_schema_in_the_wrong_place(self, llm: Any, misplaced: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"json_schema needs \{'type': 'json_schema', 'json_schema': "):
            llm.create_chat_completion(HELLO, response_format={"type": "json_schema", **misplaced})


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm("Hello"),
        lambda llm: llm.create_chat_completion(HELLO),
        lambda llm: llm.tokenize(b"Hello"),
        lambda llm: llm.detokenize([300]),
        lambda llm: llm.generate([300]),
        lambda llm: llm.eval([300]),
        lambda llm: llm.save_state(),
        lambda llm: llm.embed("Hello"),
        lambda llm: llm.engine,
    ],
)
def test_calls_after_close(call: Callable[[Any], Any]) -> None:
    llm = Llama(lp.demo_model_path(), embedding=True)
    _ = llm.engine
    llm.close()
    with pytest.raises(lp.errors.EngineClosedError, match=r"^this Llama is closed; make another$"):
        call(llm)


class TestLogitsProcessors:
    @pytest.mark.parametrize(
        "wrap",
        [
            lambda processor: processor,
            lambda processor: LogitsProcessorList([processor, lambda ids, scores: scores * 2]),
        ],
    )
    def test_one_that_returns_nothing(self, llm: Any, wrap: Any) -> None:
        with pytest.raises(TypeError, match="the logits processor returned None; return the scores"):
            llm("Hello", logits_processor=wrap(lambda ids, scores: None))

    def test_one_that_returns_another_shape(self, llm: Any) -> None:
        with pytest.raises(ValueError, match=rf"shape \(5,\); it must be \({llm.n_vocab()},\)"):
            llm("Hello", logits_processor=lambda ids, scores: scores[:5])

    def test_one_that_returns_a_new_row(self, llm: Any) -> None:
        token = llm.tokenize(b"zoo", add_bos=False)[0]

        def only(ids: Any, scores: Any) -> Any:
            return [0.0 if i == token else -1e9 for i in range(len(scores))]

        text = llm("Hello", logits_processor=only, max_tokens=1)["choices"][0]["text"]
        assert text.encode() == llm.detokenize([token])


@pytest.mark.parametrize(
    "name",
    [
        "n_ctx",
        "n_batch",
        "n_ubatch",
        "n_seq_max",
        "split_mode",
        "pooling_type",
        "type_k",
        "last_n_tokens_size",
        "seed",
    ],
)
@pytest.mark.parametrize(("value", "kind"), [("7", "str"), ([], "list"), (1.5, "float"), (True, "bool")])
def test_options_that_are_no_integers(name: str, value: Any, kind: str) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(TypeError, match=f"^{name} must be an integer, not {kind}$"):
        Llama(lp.demo_model_path(), **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "a str or a list of token ids, not NoneType"),
        (5, "a str or a list of token ids, not int"),
        ({}, "a sequence of token ids, not dict"),
        ([1.5], r"a sequence of token ids \(integers\), not of float"),
    ],
)
def test_prompts_of_other_types(llm: Any, prompt: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^prompt must be {message}$"):
        llm(prompt)


def test_token_ids_outside_the_vocabulary(llm: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompt contains the token id 99999"):
        llm([99_999])


@pytest.mark.parametrize(
    ("call", "method", "wrong", "right"),
    [
        (lambda llm: llm("a", temprature=0), "create_completion", "temprature", "temperature"),
        (lambda llm: llm("a", max_token=3), "create_completion", "max_token", "max_tokens"),
        (lambda llm: llm.create_completion("a", top_n=3), "create_completion", "top_n", "top_"),
        (lambda llm: llm.create_chat_completion([], tool=[]), "create_chat_completion", "tool", "tools"),
        (lambda llm: llm.embed("a", normalise=True), "embed", "normalise", "normalize"),
        (lambda llm: llm.create_embedding("a", mdel="m"), "create_embedding", "mdel", "model"),
        (lambda llm: llm.generate([5], topp=1.0), "generate", "topp", "top_p"),
        (lambda llm: llm.sample(top_kk=1), "sample", "top_kk", "top_k"),
    ],
)
def test_misspelt_options(llm: Any, call: Callable[[Any], Any], method: str, wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=rf"^{method}\(\) has no option '{wrong}'; did you mean {right}"):
        call(llm)


class TestTokenizer:
    def test_it_takes_a_llama(self, llm: Any) -> None:
        expected = llm.tokenizer().encode("Once upon")
        assert (
            LlamaTokenizer(llm).encode("Once upon")
            == LlamaTokenizer(llm.lp_model).encode("Once upon")
            == expected
        )

    def test_it_takes_nothing_else(self) -> None:
        with pytest.raises(TypeError, match=r"^llama must be a Llama or a llamapipe\.Model, not str$"):
            LlamaTokenizer("model.gguf")  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["create_completion", "create_chat_completion"])
def test_messages_quote_a_piece_of_a_long_value(llm: Any, method: str) -> None:
    call = getattr(llm, method)
    arguments = {"prompt": "a"} if method == "create_completion" else {"messages": HELLO}
    long = "x" * 100_000
    values = (long, {long: 1}, [long], [{"type": long}], {"type": "function", "function": {"name": long}})
    said: list[tuple[str, str]] = []
    for name in inspect.signature(call).parameters:
        for value in values:
            try:
                call(**{**arguments, "max_tokens": 1, name: value})
            except (TypeError, ValueError) as e:
                said.append((name, str(e)))
    assert len(said) > 100
    assert [name for name, message in said if len(message) > 2500] == []
