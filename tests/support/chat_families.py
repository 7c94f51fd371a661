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
    broken: tuple[str, ...]  # no calls, although they begin as such
    think: tuple[str, str] | None = None
    may_talk: bool = True  # text may precede a call
    text: str = ""  # what stands before text that is the answer

    @property
    def unknown(self) -> str:
        """A call of an unknown tool."""
        return self.paris.replace("weather", "wether")

    def visible(self, text: str) -> str:
        """What a user sees of text that is no call: no control token, and of a message to a tool only what it says."""
        if self.template == HARMONY.template:
            text = "" if self.unknown in text else text.partition("<|message|>")[2]
        for control in self.specials:
            text = text.replace(control, "")
        return text


def _of_json(begin: str, end: str, *, broken: tuple[str, ...], **texts: Any) -> Family:
    """A family whose arguments are JSON between two texts. ``broken``: besides calls that end early or lack a value."""
    of_json: dict[str, Any] = {
        "paris": begin + _PARIS + end,
        "full": begin + _FULL + end,
        "wrong_key": f'{begin}{{"t',
        "broken": (*broken, begin, f'{begin}{{"city": "Par', f'{begin}{{"city": }}{end}'),
    }
    return Family(**of_json | texts)


HERMES = _of_json(
    '<tool_call>\n{"name": "get_weather", "arguments": ',
    "}\n</tool_call>",
    template="Qwen-Qwen3-0.6B",
    tail="<|im_start|>assistant\n",
    specials=(),
    both=f'<tool_call>\n{{"name": "get_weather", "arguments": {_PARIS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    broken=(
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>\n[]",
        '<tool_call>\n{"name": "get_weather" "arguments"}\n</tool_call>',
        f'<tool_call>\n{{"name": "get_weather", "arguments": {_PARIS}}} and\n</tool_call>',
        "<tool_call>\nget_weather(city='Paris')\n</tool_call>",
    ),
    think=("<think>\n", "\n</think>\n\n"),
)
LLAMA = _of_json(
    '{"name": "get_weather", "parameters": ',
    "}",
    template="meta-llama-Llama-3.1-8B-Instruct",
    tail="<|start_header_id|>assistant<|end_header_id|>\n\n",
    specials=("<|python_tag|>", "<|eot_id|>"),
    both="",
    broken=('{"name"', '{"name": "get_weather"', '{"name": get_weather}'),
    may_talk=False,
)
PYTHON_TAG = replace(
    LLAMA,
    paris=f"<|python_tag|>{LLAMA.paris}",
    full=f"<|python_tag|>{LLAMA.full}",
    wrong_key=f"<|python_tag|>{LLAMA.wrong_key}",
    broken=tuple(f"<|python_tag|>{text}" for text in LLAMA.broken),
)
MISTRAL_LIST = _of_json(
    '[TOOL_CALLS][{"name": "get_weather", "arguments": ',
    ', "id": "abcdefgh1"}]',
    template="mistralai-Mistral-Nemo-Instruct-2407",
    tail="[/INST]",
    specials=("[TOOL_CALLS]", "[INST]", "[/INST]", "</s>"),
    both=f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {_PARIS}, "id": "abcdefgh1"}}, '
    '{"name": "now", "arguments": {}, "id": "abcdefgh2"}]',
    broken=("[TOOL_CALLS]", "[TOOL_CALLS][", "[TOOL_CALLS][]"),
)
MISTRAL_ARGS = _of_json(
    "[TOOL_CALLS]get_weather[ARGS]",
    "",
    template="Mistral-Small-3.2-24B-Instruct-2506",
    tail="[/INST]",
    specials=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[INST]", "[/INST]", "</s>"),
    paris=f"[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{_PARIS}",
    both=f"[TOOL_CALLS]get_weather[ARGS]{_PARIS}[TOOL_CALLS]now[ARGS]{{}}",
    broken=("[TOOL_CALLS]", "[TOOL_CALLS]get_weather", "[TOOL_CALLS]get_weather[ARGS][]"),
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
DEEPSEEK_V3 = _of_json(
    _V3,
    _V3_END,
    template="llama-cpp-deepseek-r1",
    tail="<｜Assistant｜>",
    specials=_DEEPSEEK,
    both=f"{_V3}{_PARIS}\n```{_ONE_END}\n{_ONE}function{_SEP}now\n```json\n{{}}{_V3_END}",
    broken=(
        _ALL,
        f"{_ALL}{_ONE}",
        f"{_ALL}{_ONE}function{_SEP}get_weather\n```python\n{{}}{_V3_END}",
    ),
    think=("<think>\n", "\n</think>\n\n"),
)
DEEPSEEK_R1 = replace(DEEPSEEK_V3, template="deepseek-ai-DeepSeek-R1-Distill-Qwen-32B")
_V31 = f"{_ALL}{_ONE}get_weather{_SEP}"
_V31_END = f"{_ONE_END}{_ALL_END}"
DEEPSEEK_V31 = _of_json(
    _V31,
    _V31_END,
    template="deepseek-ai-DeepSeek-V3.1",
    tail="<｜Assistant｜>",
    specials=(*_DEEPSEEK, "<think>", "</think>"),
    both=f"{_V31}{_PARIS}{_ONE_END}{_ONE}now{_SEP}{{}}{_V31_END}",
    broken=(_ALL,),
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
    broken=("<tool_call>", _GLM, f"{_GLM}Paris</arg_value>\n<arg_key>"),
    think=("<think>", "</think>\n"),
)
_TO = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
HARMONY = _of_json(
    _TO,
    "",
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
    both="",
    broken=(_TO[:-11], f"{_TO}{{", f"{_TO}[]"),
    think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    may_talk=False,
    text="<|channel|>final<|message|>",
)
_LFM, _LFM_END = "<|tool_call_start|>[", "]<|tool_call_end|>"
LFM = Family(
    template="LFM2.5-8B-A1B",
    tail="<|im_start|>assistant\n",
    specials=("<|tool_call_start|>", "<|tool_call_end|>", "<|im_start|>", "<|im_end|>"),
    paris=f"{_LFM}get_weather(city='Paris'){_LFM_END}",
    full=f'{_LFM}get_weather(city="São \\"Paulo\\"\\n{{x}}", unit="C", days=3){_LFM_END}',
    both=f'{_LFM}get_weather(city="Paris"), now(){_LFM_END}',
    wrong_key=f"{_LFM}get_weather(t",
    broken=(
        _LFM,
        f"{_LFM}get_weather",
        f"{_LFM}get_weather(",
        f"{_LFM}get_weather(city='Par",
        f"{_LFM}get_weather(city=Paris){_LFM_END}",
        f"{_LFM}get_weather('Paris'){_LFM_END}",
    ),
    think=("<think>", "</think>"),
)
LFM_HIDDEN = replace(LFM, template="LFM2-8B-A1B", think=None)
PYTHONIC = Family(
    template="pythonic",
    tail="<|assistant|>",
    specials=(),
    paris="[get_weather(city='Paris')]",
    full='[get_weather(city="São \\"Paulo\\"\\n{x}", unit=\'C\', days=3)]',
    both="[get_weather(city='Paris'), now()]",
    wrong_key="[get_weather(t",
    broken=("[get_weather(", "[get_weather(city='Par", "[get_weather(city=Paris)]", "[get_weather(1)]"),
    may_talk=False,
)
_GEMMA, _GEMMA_END = "<|tool_call>call:get_weather{", "}<tool_call|>"
GEMMA = Family(
    template="google-gemma-4-31B-it",
    tail="<|turn>model\n",
    specials=("<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>"),
    paris=f'{_GEMMA}city:<|"|>Paris<|"|>{_GEMMA_END}',
    full=f'{_GEMMA}city:<|"|>São "Paulo"\n{{x}}<|"|>,days:3,unit:<|"|>C<|"|>{_GEMMA_END}',
    both=f'{_GEMMA}city:<|"|>Paris<|"|>{_GEMMA_END}<|tool_call>call:now{{}}<tool_call|>',
    wrong_key=f"{_GEMMA}t",
    broken=(
        "<|tool_call>",
        "<|tool_call>call:get_weather",
        _GEMMA,
        f'{_GEMMA}city:<|"|>Par',
        f"{_GEMMA}city:Paris{_GEMMA_END}",
        f'{_GEMMA}city:<|"|>Paris<|"|><tool_call|>',
    ),
)
FUNCTION_GEMMA = replace(
    GEMMA,
    template="functiongemma",
    tail="<start_of_turn>model\n",
    specials=("<start_function_call>", "<end_function_call>", "<escape>"),
    **{
        field: text.replace("<|tool_call>", "<start_function_call>")
        .replace("<tool_call|>", "<end_function_call>")
        .replace('<|"|>', "<escape>")
        for field in ("paris", "full", "both", "wrong_key")
        for text in (getattr(GEMMA, field),)
    },
    broken=("<start_function_call>", "<start_function_call>call:get_weather{city:<escape>Par"),
)
_DSML = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
_DSML_END = "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
DSML = Family(
    template="deepseek-ai-DeepSeek-V3.2",
    tail="<｜Assistant｜>",
    specials=("<think>", "</think>", "<｜Assistant｜>"),
    paris=f"{_DSML}Paris{_DSML_END}",
    full=f'{_DSML}São "Paulo"\n{{x}}</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3'
    '</｜DSML｜parameter>\n<｜DSML｜parameter name="unit" string="true">C' + _DSML_END,
    both=f"{_DSML}Paris{_DSML_END}".replace(
        "\n</｜DSML｜function", '\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function'
    ),
    wrong_key=_DSML.replace('city" string="true">', "t"),
    broken=(
        "<｜DSML｜function_calls>",
        _DSML,
        f"{_DSML}Paris</｜DSML｜parameter>",
        _DSML.replace("city", "days").replace("true", "false") + "x" + _DSML_END,
    ),
    think=("<think>", "</think>"),
)
_K2 = "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
_K2_END = "<|tool_call_end|><|tool_calls_section_end|>"
KIMI = _of_json(
    _K2,
    _K2_END,
    template="Kimi-K2-Instruct",
    tail="<|im_assistant|>assistant<|im_middle|>",
    specials=(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        "<|tool_call_argument_begin|>",
    ),
    paris=_K2.replace(":0", ":12") + _PARIS + _K2_END,
    both=f"{_K2}{_PARIS}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}{_K2_END}",
    broken=(_K2[:30],),
)
_COHERE, _COHERE_END = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": ',
    "}\n]<|END_ACTION|>",
)
COHERE = _of_json(
    _COHERE,
    _COHERE_END,
    template="CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    tail="<|CHATBOT_TOKEN|>",
    specials=(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "<|END_OF_TURN_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
    ),
    paris=_COHERE.replace('"0"', '"7"') + _PARIS + _COHERE_END,
    both=_COHERE
    + _PARIS
    + '},\n    {"tool_call_id": "1", "tool_name": "now", "parameters": {}'
    + _COHERE_END,
    broken=("<|START_ACTION|>",),
    think=("<|START_THINKING|>", "<|END_THINKING|>"),
)
_M3 = "]<]minimax[>["
_M3_ALL, _M3_END = f'{_M3}<tool_call>\n{_M3}<invoke name="get_weather">', f"{_M3}</invoke>\n{_M3}</tool_call>"
MINIMAX = Family(
    template="MiniMax-M3",
    tail="]~b]ai\n",
    specials=(_M3,),
    paris=f"{_M3_ALL}{_M3}<city>Paris{_M3}</city>{_M3_END}",
    full=f'{_M3_ALL}{_M3}<city>São "Paulo"\n{{x}}{_M3}</city>{_M3}<days>3{_M3}</days>{_M3}<unit>C{_M3}</unit>{_M3_END}',
    both=f'{_M3_ALL}{_M3}<city>Paris{_M3}</city>{_M3}</invoke>\n{_M3}<invoke name="now">{_M3_END}',
    wrong_key=f"{_M3_ALL}{_M3}<t",
    broken=(
        f"{_M3}<tool_call>",
        _M3_ALL,
        f"{_M3_ALL}{_M3}<city>Paris",
        f"{_M3_ALL}{_M3}<city>Paris{_M3}</town>{_M3_END}",
        f"{_M3_ALL}{_M3}<days>x{_M3}</days>{_M3_END}",
    ),
    think=("<mm:think>", "</mm:think>"),
)
_SOLAR = "<|tool_calls|><|tool_call:begin|>abcdefgh1<|tool_call:name|>get_weather<|tool_call:args|>"
_SOLAR_END = "<|tool_call:end|><|calls|>"
SOLAR = _of_json(
    _SOLAR,
    _SOLAR_END,
    template="upstage-Solar-Open-100B",
    tail="<|begin|>assistant",
    specials=(
        "<|tool_calls|>",
        "<|tool_call:begin|>",
        "<|tool_call:name|>",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
    ),
    both=f"{_SOLAR}{_PARIS}<|tool_call:end|>{_SOLAR.replace('get_weather', 'now')[14:]}{{}}{_SOLAR_END}",
    broken=("<|tool_calls|>",),
)
_CPM, _CPM_END = '<function name="get_weather"><param name="city">', "</param></function>"
MINICPM = Family(
    template="openbmb-MiniCPM5-1B",
    tail="<|im_start|>assistant\n",
    specials=(),
    paris=f"{_CPM}Paris{_CPM_END}",
    full=f'{_CPM}<![CDATA[São "Paulo"\n{{x}}]]></param><param name="days">3</param><param name="unit">C{_CPM_END}',
    both=f'{_CPM}Paris{_CPM_END}\n<function name="now"></function>',
    wrong_key='<function name="get_weather"><param name="t',
    broken=(
        '<function name="',
        _CPM,
        f"{_CPM}Paris</param>",
        f"{_CPM}<![CDATA[Paris]]{_CPM_END}",
        f'<function name="get_weather"><param name="days">x{_CPM_END}',
    ),
    think=("<think>\n", "\n</think>\n\n"),
)
_IFM = "<ifm|tool_calls>\n<ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_value>"
_IFM_END = "</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>"
HORIZON = Family(
    template="IFM-K2-Horizon",
    tail="<|ifm|assistant|>",
    specials=(),
    paris=f"{_IFM}Paris{_IFM_END}",
    full=f'{_IFM}São "Paulo"\n{{x}}</ifm|arg_value>\n<ifm|arg_key>days</ifm|arg_key>\n<ifm|arg_value>3'
    f"</ifm|arg_value>\n<ifm|arg_key>unit</ifm|arg_key>\n<ifm|arg_value>C{_IFM_END}",
    both=f"{_IFM}Paris{_IFM_END}".replace(
        "\n</ifm|tool_calls", "\n<ifm|tool_call>now\n</ifm|tool_call>\n</ifm|tool_calls"
    ),
    wrong_key=f"{_IFM[: _IFM.index('city')]}t",
    broken=("<ifm|tool_calls>", _IFM, f"{_IFM}Paris</ifm|arg_value>\n<ifm|arg_key>"),
    think=("<ifm|think>\n", "</ifm|think>"),
)
_K3, _K3_KEY = (
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>',
    '<|open|>argument key="',
)
_K3_CITY = f'{_K3}{_K3_KEY}city" type="string"<|sep|>'
_K3_END = "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
KIMI_3 = Family(
    template="Kimi-K3",
    tail="<|open|>response<|sep|>",
    specials=("<|open|>", "<|close|>", "<|sep|>"),
    paris=f"{_K3_CITY}Paris{_K3_END}",
    full=f'{_K3_CITY}São "Paulo"\n{{x}}<|close|>argument<|sep|>{_K3_KEY}unit" type="string"<|sep|>C'
    f'<|close|>argument<|sep|>{_K3_KEY}days" type="number"<|sep|>3{_K3_END}',
    both=f"{_K3_CITY}Paris{_K3_END}".replace(
        "<|close|>tools", '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools'
    ),
    wrong_key=f"{_K3}{_K3_KEY}t",
    broken=(
        "<|open|>tools<|sep|>",
        _K3,
        f"{_K3_CITY}Paris<|close|>argument<|sep|>",
        f'{_K3}{_K3_KEY}days" type="number"<|sep|>x{_K3_END}',
    ),
    think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
)
_MUSE = ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="'
_MUSE_END = "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
MUSE = Family(
    template="muse-glimmer",
    tail="<|start|>assistant",
    specials=("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    paris=f'{_MUSE}city">Paris{_MUSE_END}',
    full=f'{_MUSE}city">São "Paulo"\n{{x}}</atem:parameter>\n<atem:parameter name="unit">C</atem:parameter>\n'
    f'<atem:parameter name="days">3{_MUSE_END}',
    both=f'{_MUSE}city">Paris{_MUSE_END}<|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n'
    '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls>',
    wrong_key=f"{_MUSE}t",
    broken=(" to=get_weather<|message|>", _MUSE, f'{_MUSE}city">Paris</atem:parameter>\n'),
    may_talk=False,
    text=" to=user<|message|>",
)
FUNCTIONARY = _of_json(
    "get_weather\n",
    "",
    template="meetkai-functionary-medium-v3.2",
    tail="<|start_header_id|>assistant<|end_header_id|>\n\n>>>",
    specials=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    both=f"get_weather\n{_PARIS}>>>now\n{{}}",
    broken=("get_weather",),
    may_talk=False,
    text="all\n",
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
    "LFM 2.5": LFM,
    "LFM 2": LFM_HIDDEN,
    "pythonic": PYTHONIC,
    "Gemma 4": GEMMA,
    "FunctionGemma": FUNCTION_GEMMA,
    "DeepSeek V3.2": DSML,
    "Kimi K2": KIMI,
    "Command R7B": COHERE,
    "MiniMax M3": MINIMAX,
    "Solar": SOLAR,
    "MiniCPM 5": MINICPM,
    "K2 Horizon": HORIZON,
    "Kimi K3": KIMI_3,
    "Muse Glimmer": MUSE,
    "functionary 3.2": FUNCTIONARY,
}
