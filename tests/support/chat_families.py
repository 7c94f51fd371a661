"""Families of chat templates, and calls as their models write them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from llamapipe.chat.tools import Tool, check_tools

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city"],
}
TOOLS = check_tools([Tool("get_weather", "The weather.", WEATHER), Tool("now", "The time.")])
PARIS: dict[str, Any] = {"city": "Paris"}
FULL: dict[str, Any] = {"city": 'São "Paulo"\n{x}', "unit": "C", "days": 3}
_PARIS = '{"city": "Paris"}'
_FULL = r'{"city": "São \"Paulo\"\n{x}", "unit": "C", "days": 3}'


@dataclass(frozen=True)
class Family:
    """A template, its vocabulary's control tokens, and texts as its models write them."""

    template: str
    tail: str  # the end of a prompt
    specials: tuple[str, ...]
    paris: str  # a call of get_weather with PARIS
    full: str  # the same with FULL
    both: str  # a call with PARIS, then one of now; empty if only one call can be written
    wrong_key: str  # a call up to the wrong name of an argument, which must not be written
    unknown: str  # a call of an unknown tool
    broken: tuple[str, ...]  # no calls, although they begin as such
    think: tuple[str, str] | None = None
    may_talk: bool = True  # text may precede a call
    text: str = ""  # what stands before text that is the answer


HERMES = Family(
    template="Qwen-Qwen3-0.6B",
    tail="<|im_start|>assistant\n",
    specials=(),
    paris=f'<tool_call>\n{{"name": "get_weather", "arguments": {_PARIS}}}\n</tool_call>',
    full=f'<tool_call>\n{{"name": "get_weather", "arguments": {_FULL}}}\n</tool_call>',
    both=f'<tool_call>\n{{"name": "get_weather", "arguments": {_PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    wrong_key='<tool_call>\n{"name": "get_weather", "arguments": {"t',
    unknown=f'<tool_call>\n{{"name": "get_wether", "arguments": {_PARIS}}}\n</tool_call>',
    broken=(
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>\n[]",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": }}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather" "arguments"}\n</tool_call>',
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_PARIS}}} and\n</tool_call>',
        "<tool_call>\nget_weather(city='Paris')\n</tool_call>",
    ),
    think=("<think>\n", "\n</think>\n\n"),
)
LLAMA = Family(
    template="meta-llama-Llama-3.1-8B-Instruct",
    tail="<|start_header_id|>assistant<|end_header_id|>\n\n",
    specials=("<|python_tag|>", "<|eot_id|>"),
    paris=f'{{"name": "get_weather", "parameters": {_PARIS}}}',
    full=f'{{"name": "get_weather", "parameters": {_FULL}}}',
    both="",
    wrong_key='{"name": "get_weather", "parameters": {"t',
    unknown=f'{{"name": "get_wether", "parameters": {_PARIS}}}',
    broken=(
        '{"name"',
        '{"name": "get_weather"',
        '{"name": "get_weather", "parameters": {"city": "Par',
        '{"name": "get_weather", "parameters": {"city": }}',
        '{"name": get_weather}',
    ),
    may_talk=False,
)
PYTHON_TAG = replace(
    LLAMA,
    paris=f"<|python_tag|>{LLAMA.paris}",
    full=f"<|python_tag|>{LLAMA.full}",
    wrong_key=f"<|python_tag|>{LLAMA.wrong_key}",
    unknown=f"<|python_tag|>{LLAMA.unknown}",
    broken=tuple(f"<|python_tag|>{one}" for one in LLAMA.broken),
)
MISTRAL_LIST = Family(
    template="mistralai-Mistral-Nemo-Instruct-2407",
    tail="[/INST]",
    specials=("[TOOL_CALLS]", "[INST]", "[/INST]", "</s>"),
    paris=f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_PARIS}, "id": "abcdefgh1"}}]',
    full=f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_FULL}, "id": "abcdefgh1"}}]',
    both=f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_PARIS}, "id": "abcdefgh1"}}, '
    '{"name": "now", "arguments": {}, "id": "abcdefgh2"}]',
    wrong_key='[TOOL_CALLS][{"name": "get_weather", "arguments": {"t',
    unknown=f'[TOOL_CALLS][{{"name": "get_wether", "arguments": {_PARIS}, "id": "abcdefgh1"}}]',
    broken=(
        "[TOOL_CALLS]",
        "[TOOL_CALLS][",
        "[TOOL_CALLS][]",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Par',
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": }, "id": "abcdefgh1"}]',
    ),
)
MISTRAL_ARGS = Family(
    template="Mistral-Small-3.2-24B-Instruct-2506",
    tail="[/INST]",
    specials=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[INST]", "[/INST]", "</s>"),
    paris=f"[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{_PARIS}",
    full=f"[TOOL_CALLS]get_weather[ARGS]{_FULL}",
    both=f"[TOOL_CALLS]get_weather[ARGS]{_PARIS}[TOOL_CALLS]now[ARGS]{{}}",
    wrong_key='[TOOL_CALLS]get_weather[ARGS]{"t',
    unknown=f"[TOOL_CALLS]get_wether[ARGS]{_PARIS}",
    broken=(
        "[TOOL_CALLS]",
        "[TOOL_CALLS]get_weather",
        "[TOOL_CALLS]get_weather[ARGS]",
        "[TOOL_CALLS]get_weather[ARGS][]",
        '[TOOL_CALLS]get_weather[ARGS]{"city": }',
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Par',
    ),
)
DEVSTRAL = replace(
    MISTRAL_ARGS,
    template="unsloth-mistral-Devstral-Small-2507",
    paris=f"[TOOL_CALLS]get_weather[ARGS]{_PARIS}",
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜Assistant｜>",
)
_ALL, _ALL_END, _ONE, _ONE_END, _SEP, _ = _DEEPSEEK
_V3 = f"{_ALL}{_ONE}function{_SEP}get_weather\n```json\n"
_V3_END = f"\n```{_ONE_END}{_ALL_END}"
DEEPSEEK_V3 = Family(
    template="llama-cpp-deepseek-r1",
    tail="<｜Assistant｜>",
    specials=_DEEPSEEK,
    paris=_V3 + _PARIS + _V3_END,
    full=_V3 + _FULL + _V3_END,
    both=f"{_V3}{_PARIS}\n```{_ONE_END}\n{_ONE}function{_SEP}now\n```json\n{{}}{_V3_END}",
    wrong_key=f'{_V3}{{"t',
    unknown=_V3.replace("weather", "wether") + _PARIS + _V3_END,
    broken=(
        _ALL,
        f"{_ALL}{_ONE}",
        _V3,
        f'{_V3}{{"city": "Par',
        f'{_V3}{{"city": }}{_V3_END}',
        f"{_ALL}{_ONE}function{_SEP}get_weather\n```python\n{{}}{_V3_END}",
    ),
    think=("<think>\n", "\n</think>\n\n"),
)
DEEPSEEK_R1 = replace(DEEPSEEK_V3, template="deepseek-ai-DeepSeek-R1-Distill-Qwen-32B")
_V31 = f"{_ALL}{_ONE}get_weather{_SEP}"
_V31_END = f"{_ONE_END}{_ALL_END}"
DEEPSEEK_V31 = Family(
    template="deepseek-ai-DeepSeek-V3.1",
    tail="<｜Assistant｜>",
    specials=(*_DEEPSEEK, "<think>", "</think>"),
    paris=_V31 + _PARIS + _V31_END,
    full=_V31 + _FULL + _V31_END,
    both=f"{_V31}{_PARIS}{_ONE_END}{_ONE}now{_SEP}{{}}{_V31_END}",
    wrong_key=f'{_V31}{{"t',
    unknown=_V31.replace("weather", "wether") + _PARIS + _V31_END,
    broken=(_ALL, _V31, f'{_V31}{{"city": "Par', f'{_V31}{{"city": }}{_V31_END}'),
    think=("<think>", "</think>"),
)
_XML = "<tool_call>\n<function=get_weather>\n"
_XML_END = "</function>\n</tool_call>"
QWEN_CODER = Family(
    template="Qwen3-Coder",
    tail="<|im_start|>assistant\n",
    specials=(),
    paris=f"{_XML}<parameter=city>\nParis\n</parameter>\n{_XML_END}",
    full=f'{_XML}<parameter=city>\nSão "Paulo"\n{{x}}\n</parameter>\n<parameter=unit>\nC\n</parameter>\n'
    f"<parameter=days>\n3\n</parameter>\n{_XML_END}",
    both=f"{_XML}<parameter=city>\nParis\n</parameter>\n{_XML_END}\n<tool_call>\n<function=now>\n{_XML_END}",
    wrong_key=f"{_XML}<parameter=t",
    unknown=f"<tool_call>\n<function=get_wether>\n<parameter=city>\nParis\n</parameter>\n{_XML_END}",
    broken=(
        "<tool_call>",
        _XML,
        f"{_XML}<parameter=city>\nParis",
        f"{_XML}<parameter=city>\nParis\n</parameter>\n<parameter=days>\nx\n</parameter>\n{_XML_END}",
        "<tool_call>\n{}\n</tool_call>",
    ),
)
_GLM = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>"
GLM = Family(
    template="GLM-4.6",
    tail="<|assistant|>",
    specials=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    paris=f"{_GLM}Paris</arg_value>\n</tool_call>",
    full=f'{_GLM}São "Paulo"\n{{x}}</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    both=f"{_GLM}Paris</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    wrong_key="<tool_call>get_weather\n<arg_key>t",
    unknown="<tool_call>get_wether\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
    broken=("<tool_call>", _GLM, f"{_GLM}Paris</arg_value>\n<arg_key>"),
    think=("<think>", "</think>\n"),
)
_TO = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
HARMONY = Family(
    template="openai-gpt-oss-120b",
    tail="<|start|>assistant",
    specials=(
        "<|start|>",
        "<|end|>",
        "<|message|>",
        "<|channel|>",
        "<|constrain|>",
        "<|return|>",
        "<|call|>",
    ),
    paris=_TO + _PARIS,
    full=_TO + _FULL,
    both="",
    wrong_key=f'{_TO}{{"t',
    unknown=_TO.replace("weather", "wether") + _PARIS,
    broken=(_TO[:-11], _TO, f"{_TO}{{", f'{_TO}{{"city": }}', f"{_TO}[]"),
    think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    may_talk=False,
    text="<|channel|>final<|message|>",
)
FAMILIES = {
    "Hermes": HERMES,
    "Llama": LLAMA,
    "Llama, python tag": PYTHON_TAG,
    "Mistral list": MISTRAL_LIST,
    "Mistral args": MISTRAL_ARGS,
    "Devstral": DEVSTRAL,
    "DeepSeek V3": DEEPSEEK_V3,
    "DeepSeek R1": DEEPSEEK_R1,
    "DeepSeek V3.1": DEEPSEEK_V31,
    "Qwen3-Coder": QWEN_CODER,
    "GLM": GLM,
    "gpt-oss": HARMONY,
}
