"""Tools whose schemas no grammar can express, prompts that leave messages out, and tools of render_chat."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.chat_families import FAMILIES
from support.chat_templates import source_of
from support.mcp_tools import MCP_TOOLS
from support.scripted_model import scripted_model

import llamapipe as lp
from llamapipe.chat.tool_schemas import ToolSchemas
from llamapipe.chat.tools import MAX_TOOLS, check_tools
from llamapipe.errors import ConstraintError, InvalidRequestError

HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = lp.SamplingParams(temperature=0, max_tokens=200)
ARGS: dict[str, Any] = {"enable_thinking": False}
BAD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "a": {"$dynamicRef": "#x"},
        "city": {"type": "string"},
    },
    "required": ["n"],
}
PLACE = r"tool 'bad': the JSON schema .*at #/properties/a.*dynamicRef"
GOOD: dict[str, Any] = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
# Of MCP_TOOLS, those that lose their guarantee, and the keyword that is named.
REFUSED: dict[str, str] = {}
# And where each argument is written separately, so that nothing may combine them.
REFUSED_BESIDE_TAGS = {
    "create_issue": "not",
    "puppeteer_click": "if",
    "sequential_thinking": "dependentRequired",
    "send_mail": "oneOf",
    **REFUSED,
}


def function(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.fixture(params=["Hermes", "Qwen3-Coder"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[lp.Engine]:
    """The model calls the tool `bad` with arguments that its schema does not allow."""
    family = FAMILIES[request.param]
    said = family.paris.replace("get_weather", "bad")
    path = scripted_model(tmp_path / "said.gguf", said, family.specials, source_of(family.template))
    with lp.Model(path) as model, lp.Engine(model, n_ctx=2**16, n_seq_max=1) as engine:
        yield engine


def test_such_a_tool_stays_and_a_warning_names_it_once(
    engine: lp.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    tools = [function("good", GOOD), function("bad", BAD)]
    options: list[dict[str, Any]] = [{}, {"response_format": GOOD}, {}]
    for more in options:
        answer = engine.chat(HELLO, GREEDY, tools=tools, template_args=ARGS, **more)
        assert [(call.name, call.arguments) for call in answer.tool_calls] == [("bad", {"city": "Paris"})]
    warned = [record.getMessage() for record in caplog.records if "tool 'bad'" in record.getMessage()]
    assert len(warned) == 1 and "any JSON object" in warned[0]
    assert all(word in warned[0] for word in ("tool 'bad'", "#/properties/a", "dynamicRef"))


@pytest.mark.parametrize(
    ("choice", "strict"), [("required", False), ("bad", False), ("auto", True), ("required", True)]
)
def test_an_error_names_it_where_it_must_be_followed(engine: lp.Engine, choice: str, strict: bool) -> None:
    tools = [function("good", GOOD), function("bad", BAD, strict=strict)]
    with pytest.raises(InvalidRequestError, match=PLACE) as caught:
        engine.chat(HELLO, GREEDY, tools=tools, tool_choice=choice, template_args=ARGS)
    assert len(str(caught.value)) < 400 and "start:" not in str(caught.value)


def test_another_tool_can_be_forced(engine: lp.Engine) -> None:
    tools = [function("good", GOOD), function("bad", BAD)]
    answer = engine.chat(HELLO, GREEDY, tools=tools, tool_choice="good", template_args=ARGS)
    assert [call.name for call in answer.tool_calls] == ["good"]


def test_schemas_as_servers_that_speak_mcp_send_them(
    engine: lp.Engine, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    refused = REFUSED_BESIDE_TAGS if "Qwen3-Coder" in request.node.name else REFUSED
    tools = [*MCP_TOOLS, function("bad", {"type": "object", "properties": {"city": {"type": "string"}}})]
    answer = engine.chat(HELLO, GREEDY, tools=tools, template_args=ARGS)
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("bad", {"city": "Paris"})]
    warned = [record.getMessage() for record in caplog.records if record.getMessage().startswith("tool ")]
    assert len(warned) == len(refused)
    for (name, keyword), message in zip(refused.items(), warned, strict=True):
        assert f"tool {name!r}" in message and keyword in message
    tools.append(function("worse", BAD))
    with pytest.raises(InvalidRequestError, match=r"tool 'worse': .* at #.*dynamicRef"):
        engine.chat(HELLO, GREEDY, tools=tools, tool_choice="worse", template_args=ARGS)


def test_many_tools_have_a_grammar(engine: lp.Engine) -> None:
    """Their schemas are longer than a grammar may be that a caller writes."""
    names = {f"option_{i}": {"type": "string", "description": "What it means. " * 20} for i in range(9)}
    tools = [function(f"tool_{i}", {"type": "object", "properties": names}) for i in range(60)]
    tools.append(function("bad", {"type": "object", "properties": {"city": {"type": "string"}}}))
    constrained, _ = engine._chat_builder._constrain(
        engine._chat_builder.chat_format(), GREEDY, check_tools(tools), "auto", True, ""
    )
    assert constrained.lark is not None and len(constrained.lark) < 80_000


def test_strict_is_checked() -> None:
    with pytest.raises(TypeError, match="strict must be a bool, not str"):
        check_tools([function("f", GOOD, strict="yes")])
    assert [
        tool.strict
        for tool in check_tools([function("f", GOOD, strict=None), function("g", GOOD, strict=True)])
    ] == [
        False,
        True,
    ]


CALL = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": "{}"}}


class TestWhatTemplatesLeaveOut:
    PLAIN = (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.role }}: {{ m.content }}\n"
        "{% endif %}{% endfor %}"
    )

    def warnings(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]

    def test_a_warning_names_them_once(self, demo: lp.Model, caplog: pytest.LogCaptureFixture) -> None:
        history: list[Any] = [
            {"role": "system", "content": "Be brief."},
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "noon"},
            {"role": "critic", "content": "Well."},
        ]
        with lp.Model(demo.path, chat_template=self.PLAIN) as model, lp.Engine(model, n_ctx=512) as engine:
            engine.chat(HELLO, lp.SamplingParams(max_tokens=1))
            assert self.warnings(caplog) == []
            for _ in range(2):
                engine.chat(history, lp.SamplingParams(max_tokens=1))
                model.render_chat(history)
            shown = model.render_chat(history)
        for text in ("Be brief.", "noon", "Well."):  # as text of the user
            assert f"user: {text}" in shown or f"\n{text}" in shown
        (warning,) = self.warnings(caplog)
        assert "tool calls" in warning

    @pytest.mark.parametrize("name", ["Hermes", "Llama", "Mistral list", "DeepSeek V3", "GLM", "gpt-oss"])
    def test_no_warning_where_they_are_shown(
        self, demo: lp.Model, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        history: list[Any] = [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "name": "now", "content": "noon"},
        ]
        with lp.Model(demo.path, chat_template=source_of(FAMILIES[name].template)) as model:
            model.render_chat([{"role": "system", "content": "Be brief."}, *HELLO])
            model.render_chat(history, tools=[function("now", GOOD)])
            with lp.Engine(model, n_ctx=64) as engine:
                assert engine.supports_tools
        assert self.warnings(caplog) == []


def test_render_chat_takes_the_tools_of_chat(engine: lp.Engine) -> None:
    def bad(city: str) -> str:
        """Looks at a city.

        city: its name.
        """
        return city

    text = engine.model.render_chat(HELLO, tools=[bad], **ARGS)
    assert "Looks at a city." in text and "its name." in text
    tokens = engine.model.tokenize_chat(HELLO, tools=[bad], **ARGS)
    assert engine.chat(HELLO, GREEDY, tools=[bad], template_args=ARGS).n_prompt_tokens == len(tokens)
    (tool,) = check_tools([bad])
    for form in (
        tool,
        tool.as_openai(),
        {**tool.as_openai(), "function": {**tool.as_openai()["function"], "strict": True}},
    ):
        assert engine.model.render_chat(HELLO, tools=[form], **ARGS) == text
    assert engine.model.render_chat(HELLO, tools=[], **ARGS) == engine.model.render_chat(HELLO, **ARGS)
    with pytest.raises(TypeError, match=r"tools\[0\] must be a function, a dict or a Tool, not int"):
        engine.model.render_chat(HELLO, tools=[3])  # type: ignore[list-item]


def test_many_such_tools_have_one_limit_of_time(engine: lp.Engine) -> None:
    tools = [function(f"f{i}", {**BAD, "title": f"{i}"}) for i in range(60)]
    params = lp.SamplingParams(max_tokens=4, grammar_timeout=0.02)
    with pytest.raises(ConstraintError, match=r"grammar_timeout is 0\.02 s"):
        engine.chat(HELLO, params, tools=tools, template_args=ARGS)


@pytest.mark.parametrize("engine", ["Hermes"], indirect=True)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_grammars_that_are_too_long_are_not_compiled(
    engine: lp.Engine, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was compiled alone before all were refused: that took 2 s for 500 tools, 10 s for 2000."""
    looked_at: list[object] = []
    monkeypatch.setattr(ToolSchemas, "_fault", lambda *arguments: looked_at.append(arguments))
    tools = [function(f"t{i}", {}) for i in range(300)]
    with pytest.raises(InvalidRequestError, match=r"lark has \d+ characters; the limit is"):
        engine.chat(HELLO, GREEDY, tools=tools, tool_choice=choice, template_args=ARGS)
    assert looked_at == []


def test_too_many_tools() -> None:
    """No more than needed are taken from a generator without an end."""
    with pytest.raises(InvalidRequestError, match=f"the limit is {MAX_TOOLS}"):
        check_tools(function("f", GOOD) for _ in count())
