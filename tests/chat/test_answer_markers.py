"""Nothing that a template or a model uses as a marker reaches the content: reasoning and texts of every family."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
from support.chat_families import FAMILIES, PARIS, TOOLS
from support.chat_templates import ByteVocabulary, renderer, template
from support.peer_cases import vocabulary_of

from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.results import ChatMessage
from llamapipe.chat.template import ChatTemplate
from llamapipe.errors import InvalidRequestError

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
# Templates that others use and llama.cpp does not have: only what matters here.
OWN = {
    "answer tags": "{% for m in messages %}{% set c = m.content %}{% if m.role == 'user' %}<|user|>{{ c }}"
    "{% else %}<|bot|>{{ c.split('<answer>')[-1].split('</answer>')[0] if '<answer>' in c else c }}<|eos|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|bot|><think>\n{% endif %}",
    "sentences": "{% if thinking %}Write your thoughts after 'Here is my thought process:' and your response after "
    "'Here is my response:'.{% endif %}{% for m in messages %}<|role|>{{ m.role }}<|end|>{{ m.content }}<|eot|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|role|>assistant<|end|>{% endif %}",
    "brackets": "{% for m in messages %}[INST]{{ m.content }}[/INST]{% if m.reasoning_content %}[PLAN]\n"
    "{{ m.reasoning_content }}\n[/PLAN]\n{{ m.content }}{% endif %}{% endfor %}",
}
CONTROL = ("<|user|>", "<|bot|>", "<|eos|>", "<|role|>", "<|end|>", "<|eot|>")


class Said(NamedTuple):
    """What a model writes after a prompt, and what of it a caller sees."""

    template: str
    text: str
    content: str
    reasoning: str = ""
    tail: str = ""  # the end of the prompt, where it has begun the reasoning


SAID = [
    Said("google-gemma-4-31B-it", "<|channel>thought\nWell.\n<channel|>Yes.", "Yes.", "Well."),
    Said("google-gemma-4-31B-it", "<|channel>thought\n<channel|>Yes.", "Yes."),
    Said("google-gemma-4-31B-it", "Yes.<channel|>", "Yes."),
    Said(
        "google-gemma-4-31B-it", "<|channel>Yes, <|channel>thought\nWell.<channel|>no.", "Yes, no.", "Well."
    ),
    Said(
        "google-gemma-4-31B-it",
        "<|channel>thought\nA<channel|>Yes<|channel>thought\nB<channel|>.",
        "Yes.",
        "A\n\nB",
    ),
    Said("google-gemma-4-31B-it", "<|channel>thought\nWell, and so", "", "Well, and so"),
    Said("google-gemma-4-31B-it-interleaved", "<|channel>thought\nWell.\n<channel|>Yes.", "Yes.", "Well."),
    Said(
        "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
        "<|START_THINKING|>Well.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Yes.",
        "Well.",
    ),
    Said("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes."),
    Said("CohereForAI-c4ai-command-r7b-12-2024-tool_use", "<|START_RESPONSE|>Yes. And", "Yes. And"),
    Said(
        "Cohere2MoE",
        "Well.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
        "Yes.",
        "Well.",
        "<|START_THINKING|>",
    ),
    Said("Cohere2MoE", "Well.<|START_TEXT|>Yes.<|END_TEXT|>", "Yes.", "Well.", "<|START_THINKING|>"),
    Said("CohereForAI-c4ai-command-r-plus-tool_use", "<|CHATBOT_TOKEN|>Yes.<|END_OF_TURN_TOKEN|>", "Yes."),
    Said(
        "Kimi-K3",
        "Well.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
        "Yes.",
        "Well.",
        "<|open|>think<|sep|>",
    ),
    Said(
        "Kimi-K3", "<|open|>response<|sep|>Yes.<|close|>response<|sep|>", "Yes.", "", "<|open|>think<|sep|>"
    ),
    Said(
        "muse-glimmer",
        " to=self<|message|>Well.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
        "Yes.",
        "Well.",
    ),
    Said("meetkai-functionary-medium-v3.2", "all\nYes,\nall\nof it.", "Yes,\nall\nof it."),
    Said("meetkai-functionary-medium-v3.2", "allowed", "allowed"),
    Said(
        "Apriel-1.6-15b-Thinker-fixed",
        "Well.\n[BEGIN FINAL RESPONSE]\nYes.",
        "Yes.",
        "Well.",
        "Here are my reasoning steps:\n",
    ),
    Said("MiniMax-M3", "</mm:think>Yes.", "Yes."),
    Said("MiniMax-M3", "<mm:think>Well.</mm:think>Yes.", "Yes.", "Well."),
    Said(
        "Kimi-K3",
        "Well.<|close|>think<|sep|><|open|>response<|sep|>A response, a message.<|close|>response<|sep|>"
        "<|close|>message<|sep|>",
        "A response, a message.",
        "Well.",
        "<|open|>think<|sep|>",
    ),
    Said(
        "Kimi-K3", "<|open|>response<|sep|>Yes.<|close|>response<|sep|>", "Yes.", "", "<|open|>think<|sep|>"
    ),
    Said("Kimi-K2-Thinking", "<think>Well.</think>Yes.", "Yes.", "Well."),
    Said(
        "muse-glimmer",
        " to=self<|message|>Well.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>",
        "Yes.",
        "Well.",
    ),
    Said("muse-glimmer", " to=user<|message|>Yes, to=user.<|eot|>", "Yes, to=user."),
    Said(
        "upstage-Solar-Open-100B",
        "<|think|>Well.<|end|><|begin|>assistant<|content|>Yes.<|end|>",
        "Yes.",
        "Well.",
    ),
    Said("ibm-granite-granite-3.3-2B-Instruct", "<think>Well.</think>Yes.", "Yes.", "Well."),
    Said("Qwen3.5-4B", "<think>\nWell.\n</think>\n\nYes.", "Yes.", "Well.", "<think>\n"),
    Said("Qwen3.5-4B", "\n<think>\nWell.\n</think>\n\nYes.", "Yes.", "Well.", "<think>\n"),
    Said("Qwen3.5-4B", "</think>\n\nYes.", "Yes.", "", "<think>\n\n</think>\n\n"),
    Said(
        "Qwen3.5-4B",
        "Write </think> and <|im_end|> there.",
        "Write </think> and <|im_end|> there.",
        "",
        "</think>\n",
    ),
    Said("inclusionai-ling-3.0-flash", "Yes.<|role_end|>", "Yes.", "", "</think>"),
    Said(
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        "<think>\nWell.\n</think>\n\nYes.",
        "Yes.",
        "Well.",
        "<think>\n",
    ),
    Said("answer tags", "Well.\n</think>\n<answer>\nYes.\n</answer>", "Yes.", "Well.", "<think>\n"),
    Said("answer tags", "</think>Yes: <answer> is a tag.", "Yes: <answer> is a tag.", "", "<think>\n"),
    Said("sentences", "Here is my thought process: Well.\n\nHere is my response: Yes.", "Yes.", "Well."),
    Said("brackets", "[PLAN]\nWell.\n[/PLAN]\nYes.", "Yes.", "Well."),
    Said("Mistral-Small-3.2-24B-Instruct-2506", "[TOOL_CALLS]", ""),
    Said("meta-llama-Llama-3.1-8B-Instruct", "<|python_tag|>print(1)", "print(1)"),
]
_WELL, _AGAIN = "<|channel|>analysis<|message|>Well.<|end|>", "<|start|>assistant"
_FINAL = "<|channel|>final<|message|>Yes."
HARMONY = [
    (f"{_WELL}{_AGAIN}{_FINAL}<|return|>", "Yes."),
    (f"{_WELL}{_AGAIN}<|channel|>commentary to=python code<|message|>x", ""),
    (f"{_WELL}{_AGAIN} to=browser.open<|channel|>analysis<|message|>x", ""),
    (f"<|channel|>commentary to=assistant{_WELL}{_AGAIN}{_FINAL}", "Yes."),
    (
        "<|channel|> analysis<|message|> Well.<|end|><|start|> assistant<|channel|> final<|message|> Yes.",
        "Yes.",
    ),
    (
        f"{_WELL}<|start|>functions.now to=assistant<|channel|>commentary<|message|>5<|end|>{_AGAIN}{_FINAL}",
        "Yes.",
    ),
    (f"{_WELL}{_AGAIN}<|channel|>final<|constrain|>json<|message|>1", "1"),
    (f"{_WELL}Yes.<|channel|>final", "Yes."),
]


def form_of(name: str) -> ChatFormat:
    if name not in OWN:
        return ChatFormat.of(renderer(name), vocabulary_of(name).special_id)
    own = ChatTemplate(OWN[name])

    def render(messages: Any, *, tools: Any = None, add_generation_prompt: bool = True, **args: Any) -> str:
        return own.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, template_args=args
        )

    return ChatFormat.of(render, ByteVocabulary(CONTROL).special_id)


def answer_of(form: ChatFormat, text: str, tail: str, cut_off: bool = False, **options: Any) -> ChatMessage:
    """The answer; the same however the text is cut in three."""
    places = [*itertools.combinations(range(0, len(text) + 1, 3), 2)] if len(text) < 90 else []
    cuts = [[text], list(text), *([text[:a], text[a:b], text[b:]] for a, b in places)]
    answers = []
    for parts in cuts:
        parser = form.parser(options.get("tools", TOOLS), "auto", prompt_tail=tail)
        answer = ChatMessage([*map(parser.feed, parts), parser.finish(cut_off)])
        answers.append((answer.content, answer.reasoning, [(c.name, c.arguments) for c in answer.tool_calls]))
        assert answers[-1] == answers[0], parts
    return answer


@pytest.mark.parametrize("said", SAID, ids=lambda said: f"{said.template}-{said.text[:20]}")
def test_markers_are_no_content(said: Said) -> None:
    form = form_of(said.template)
    for tools in ((), TOOLS) if form.supports_tools else ((),):
        answer = answer_of(form, said.text, said.tail, tools=tools)
        assert (answer.content, answer.reasoning, answer.tool_calls) == (said.content, said.reasoning, ())


@pytest.mark.parametrize(("text", "content"), HARMONY)
def test_messages_of_gpt_oss(text: str, content: str) -> None:
    answer = answer_of(form_of("openai-gpt-oss-120b"), text, "<|start|>assistant")
    assert (answer.content.strip(), answer.reasoning.strip(), answer.tool_calls) == (content, "Well.", ())


# What a model of each family writes before and after JSON that a schema asks for.
AROUND_JSON = {
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": (
        "<|START_THINKING|>Well.<|END_THINKING|><|START_RESPONSE|>",
        "<|END_RESPONSE|>",
    ),
    "Cohere2MoE": ("Well.<|END_THINKING|><|START_TEXT|>", "<|END_TEXT|>"),
    "google-gemma-4-31B-it": ("<|channel>thought\nWell.\n<channel|>", ""),
    "meetkai-functionary-medium-v3.2": ("all\n", ""),
    "Kimi-K3": (
        "Well.<|close|>think<|sep|><|open|>response<|sep|>",
        "<|close|>response<|sep|>",
    ),
    "muse-glimmer": (" to=user<|message|>", "<|eot|>"),
    "answer tags": ("Well.\n</think>\n<answer>\n", "\n</answer>"),
}


@pytest.mark.parametrize("name", AROUND_JSON)
def test_a_schema_leaves_room_for_markers(name: str) -> None:
    before, after = AROUND_JSON[name]
    form = form_of(name)
    vocabulary = vocabulary_of(name) if name not in OWN else ByteVocabulary(CONTROL)
    tail = form.reasoning.start if form.reasoning and before.startswith("Well") else ""
    grammar = form.grammar((), "none", True, prompt_tail=tail, schema=SCHEMA)
    assert grammar is not None and vocabulary.accepts(grammar, f'{before}{{"n":1}}{after}')
    assert not vocabulary.accepts(grammar, f'{before}{{"n":"x"}}{after}')
    assert not vocabulary.accepts(grammar, f"{before}Yes.{after}")


class TestCallsInReasoning:
    """A call inside reasoning that is never closed ends the reasoning; one that is closed was only thought of."""

    CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    TAIL = "<think>\n"

    @pytest.mark.parametrize(
        ("text", "reasoning", "content", "n_calls"),
        [
            (CALL, "", "", 1),
            (f"I look.\n{CALL}", "I look.", "", 1),
            (f"I look.\n{CALL}\n{CALL}\n", "I look.", "", 2),
            (f"I look.\n{CALL}\nThere.", "I look.", "There.", 1),
            (f"A <tool_call> it is.\n{CALL}", "A <tool_call> it is.", "", 1),
            (f"I look. {CALL} Or not.\n</think>\nYes.", f"I look. {CALL} Or not.", "Yes.", 0),
            (f"I look. {CALL} So:\n</think>\n{CALL}", f"I look. {CALL} So:", "", 1),
            (f"{CALL.replace('Paris', '</think>')}", "", "", 0),
            (f"I look. {CALL[:-30]}", f"I look. {CALL[:-30]}", "", 0),
            (
                f"I look. {CALL.replace('weather', 'wether')}",
                f"I look. {CALL.replace('weather', 'wether')}",
                "",
                0,
            ),
        ],
    )
    def test_qwen(self, text: str, reasoning: str, content: str, n_calls: int) -> None:
        answer = answer_of(form_of("Qwen3.5-4B"), text, self.TAIL)
        assert [call.arguments for call in answer.tool_calls] == [PARIS] * n_calls
        if "</think>\n</parameter>" not in text:
            assert (answer.reasoning, answer.content.strip()) == (reasoning, content)

    @pytest.mark.parametrize(
        ("name", "tail", "call"),
        [
            ("Qwen-Qwen3-0.6B", "<think>\n", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
            ("GLM-4.7-Flash", "<think>", "<tool_call>now</tool_call>"),
            ("inclusionai-ling-3.0-flash", "<think>", "<tool_call>now\n</tool_call>"),
            (
                "NVIDIA-Nemotron-Nano-v2",
                "<think>\n",
                '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>',
            ),
        ],
    )
    def test_other_families(self, name: str, tail: str, call: str) -> None:
        form = form_of(name)
        answer = answer_of(form, f"What time is it? {call}", tail)
        assert [call.name for call in answer.tool_calls] == ["now"]
        assert (answer.reasoning, answer.content) == ("What time is it?", "")
        answer = answer_of(form, f"Say {call}?</think>No.", tail)
        assert (answer.tool_calls, answer.reasoning, answer.content) == ((), f"Say {call}?", "No.")

    @pytest.mark.parametrize("choice", ["auto", "required"])
    def test_a_grammar_lets_a_call_end_the_reasoning(self, choice: str) -> None:
        """A control token that begins a call ends the reasoning; text may only write about a call."""
        family = FAMILIES["DeepSeek V3.1"]
        vocabulary = ByteVocabulary(family.specials)
        form = ChatFormat.of(renderer(family.template), vocabulary.special_id)
        for tail, start in (("<think>", ""), ("", "<think>")):
            grammar = form.grammar(TOOLS, choice, True, prompt_tail=tail)
            assert grammar is not None
            assert vocabulary.accepts(grammar, f"{start}I look. {family.paris}")
            assert vocabulary.accepts(grammar, f"{start}I look.</think>{family.paris}")
            assert not vocabulary.accepts(grammar, f"{start}I look. {family.unknown}")
        form, vocabulary = form_of("Qwen3.5-4B"), vocabulary_of("Qwen3.5-4B")
        grammar = form.grammar(TOOLS, choice, True, prompt_tail=self.TAIL)
        assert grammar is not None
        assert vocabulary.accepts(grammar, f"I look. {self.CALL}") == (choice == "auto")
        assert vocabulary.accepts(grammar, f"I know <tool_call> tags.\n</think>\n\n{self.CALL}")

    def test_of_an_answer_that_was_cut_off(self) -> None:
        """Whether the reasoning was to be closed is not known: only a call at its end is one."""
        form = form_of("Qwen3.5-4B")
        assert answer_of(form, f"I look. {self.CALL}", self.TAIL, cut_off=True).tool_calls
        text = f"I look. {self.CALL} Or should I"
        answer = answer_of(form, text, self.TAIL, cut_off=True)
        assert (answer.tool_calls, answer.reasoning, answer.content) == ((), text, "")

    def test_reasoning_is_streamed_up_to_a_call(self) -> None:
        parser = form_of("Qwen3.5-4B").parser(TOOLS, "auto", prompt_tail=self.TAIL)
        assert parser.feed("I know <tool_call> tags. ").reasoning == "I know <tool_call> tags."
        assert not parser.feed(f"Now {self.CALL}").tool_calls
        assert parser.finish().tool_calls


class TestContinuedReasoning:
    """A prompt that ends inside the reasoning of the last message, and the answer that continues it."""

    @pytest.mark.parametrize(
        ("name", "end", "text", "content"),
        [
            ("Qwen3.5-4B", "<think>\nFirst,", " then.\n</think>\n\nYes.", "Yes."),
            ("Qwen-Qwen3-0.6B", "<think>\nFirst,", " then.\n</think>\n\nYes.", "Yes."),
            (
                "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
                "<think>\nFirst,",
                " then.\n</think>\n\nYes.",
                "Yes.",
            ),
            ("google-gemma-4-31B-it", "<|channel>thought\nFirst,", " then.<channel|>Yes.", "Yes."),
            ("Apriel-1.6-15b-Thinker-fixed", "First,", " then.\n[BEGIN FINAL RESPONSE]\nYes.", "Yes."),
            (
                "muse-glimmer",
                " to=self<|message|>First,",
                " then.<|eom|><|start|>assistant to=user<|message|>Yes.",
                "Yes.",
            ),
            (
                "openai-gpt-oss-120b",
                "<|start|>assistant<|channel|>analysis<|message|>First,",
                " then.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
                "Yes.",
            ),
        ],
    )
    def test_every_kind_of_template(self, name: str, end: str, text: str, content: str) -> None:
        form, chat_template = form_of(name), template(name)
        last = {"role": "assistant", "content": "", "reasoning_content": "First,"}
        messages = [{"role": "user", "content": "Really?"}, last]
        prompts = {
            chat_template.render(messages, continue_last=asked, reasoning_opening=form.markers.opening)
            for asked in (True, "reasoning")
        }
        (prompt,) = prompts
        assert prompt.endswith(end)
        tail = form.continued_tail(prompt, messages, False, "reasoning")
        answer = answer_of(form, text, tail)
        assert (answer.reasoning.strip(), answer.content) == ("then.", content)

    def test_without_reasoning_it_is_refused(self) -> None:
        chat_template = template("Qwen3.5-4B")
        messages = [{"role": "user", "content": "Really?"}, {"role": "assistant", "content": "Yes"}]
        with pytest.raises(InvalidRequestError, match="no reasoning_content"):
            chat_template.render(messages, continue_last="reasoning")
        messages[-1]["reasoning_content"] = "Well."
        with pytest.raises(InvalidRequestError, match="has no reasoning"):
            template("google-gemma-2-2b-it").render(messages, continue_last="reasoning")
        assert chat_template.render(messages, continue_last=True).endswith("</think>\n\nYes")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_earlier_reasoning_by_any_name(key: str) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": "", key: "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "call00001"},
    ]
    for name in ("Qwen3.5-4B", "openai-gpt-oss-120b", "Kimi-K3"):
        assert "I look." in template(name).render(messages, tools=[tool.as_openai() for tool in TOOLS])


class TestReasoningFormat:
    @pytest.mark.parametrize(
        ("name", "tail", "text", "content"),
        [
            ("Qwen3.5-4B", "<think>\n", "Well.\n</think>\n\nYes.", "<think>\nWell.\n</think>\n\nYes."),
            ("Qwen-Qwen3-0.6B", "", "<think>\nWell.\n</think>\n\nYes.", "<think>\nWell.\n</think>\n\nYes."),
            (
                "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
                "",
                "<|START_THINKING|>Well.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
                "<|START_THINKING|>Well.<|END_THINKING|>Yes.",
            ),
            (
                "openai-gpt-oss-120b",
                "<|start|>assistant",
                f"{_WELL}{_AGAIN}{_FINAL}",
                f"{_WELL}Yes.",
            ),
            ("Kimi-K3", "<|open|>think<|sep|>", "<|open|>response<|sep|>Yes.", "Yes."),
        ],
    )
    @pytest.mark.parametrize("format_", ["none", "deepseek-legacy"])
    def test_reasoning_stays_in_the_content(
        self, name: str, tail: str, text: str, content: str, format_: str
    ) -> None:
        form = form_of(name)
        for parts in ([text], list(text)):
            parser = form.parser((), "none", prompt_tail=tail, reasoning_format=format_)
            answer = ChatMessage([*map(parser.feed, parts), parser.finish()])
            reasoning = "Well." if format_ == "deepseek-legacy" and "Well" in text else ""
            assert (answer.content, answer.reasoning) == (content, reasoning)

    def test_calls_are_read(self) -> None:
        call = TestCallsInReasoning.CALL
        parser = form_of("Qwen3.5-4B").parser(TOOLS, "auto", prompt_tail="<think>\n", reasoning_format="none")
        answer = ChatMessage([parser.feed(f"Well.\n</think>\n\n{call}"), parser.finish()])
        assert answer.content == "<think>\nWell.\n</think>" and len(answer.tool_calls) == 1
