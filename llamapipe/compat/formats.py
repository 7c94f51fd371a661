"""The chat formats that llama-cpp-python knows by name, which write a conversation as text.

Use these formats for models whose file has no chat template. Each format is the one that its models were trained with.
docs/coming-from/llama-cpp-python.md names the formats that llama-cpp-python writes differently or without the system
message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llamapipe._messages import quoted


@dataclass(frozen=True)
class Format:
    """The text of a message of each role, with ``{}`` for its content, and the start of the answer.

    ``default``: the system message of conversations that lack one; None if such conversations have no system part.
    ``system`` is None if the system message is written at the start of the first user message. ``stop``: the texts that
    end an answer.
    """

    system: str | None
    user: str
    assistant: str
    answer: str
    default: str | None = None
    stop: tuple[str, ...] = ()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt. Raises ValueError for messages with another role or without text, TypeError."""
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise TypeError(f"messages must be a list of messages, not {type(messages).__name__}")
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                kind = type(message).__name__
                raise TypeError(f"messages[{i}] must be a dict with role and content, not {kind}")
        system = (
            "\n".join(_content(message) for message in messages if message.get("role") == "system")
            or self.default
        )
        begun = [] if system is None or self.system is None else [self.system.replace("{}", system)]
        parts = begun
        before = f"{system}\n\n" if self.system is None and system else ""
        for message in messages:
            role = message.get("role")
            if role == "user":
                parts.append(self.user.replace("{}", before + _content(message)))
                before = ""
            elif role == "assistant":
                parts.append(self.assistant.replace("{}", _content(message)))
            elif role != "system":
                raise ValueError(f"this chat format has no messages of the role {quoted(role)}")
        return "".join([*parts, self.answer])


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts):
        raise ValueError("this chat format takes messages of text only")
    return "".join(str(part["text"]) for part in parts)


def _headed(name: str) -> str:
    """Return the header of a message of Llama 3."""
    return f"<|start_header_id|>{name}<|end_header_id|>\n\n"


_CHATML = (
    "<|im_start|>system\n{}<|im_end|>\n",
    "<|im_start|>user\n{}<|im_end|>\n",
    "<|im_start|>assistant\n{}<|im_end|>\n",
    "<|im_start|>assistant\n",
)
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
FORMATS: Final[dict[str, Format]] = {
    "alpaca": Format("{}\n\n", "### Instruction: {}\n\n", "### Response: {}</s>", "### Response:", ""),
    "baichuan": Format("{}", "<reserved_102>{}", "<reserved_103>{}", "<reserved_103>"),
    "baichuan-2": Format("{}", "<reserved_106>{}", "<reserved_107>{}", "<reserved_107>"),
    "chatglm3": Format(
        "<|system|>\n{}", "<|user|>\n {}", "<|assistant|>\n {}", "<|assistant|>", "", ("</s>",)
    ),
    "chatml": Format(*_CHATML, "", ("<|im_end|>",)),
    "gemma": Format(
        None,
        "<start_of_turn>user\n{}<end_of_turn>\n",
        "<start_of_turn>model\n{}<end_of_turn>\n",
        "<start_of_turn>model\n",
        stop=("<end_of_turn>\n",),
    ),
    "intel": Format("### System:\n{}\n", "### User:\n{}\n", "### Assistant:\n{}\n", "### Assistant:\n"),
    "llama-3": Format(
        _headed("system") + "{}<|eot_id|>",
        _headed("user") + "{}<|eot_id|>",
        _headed("assistant") + "{}<|eot_id|>",
        _headed("assistant"),
        stop=("<|eot_id|>",),
    ),
    "mistral-instruct": Format(None, "[INST] {}", " [/INST]{}</s>", " [/INST]", stop=("</s>",)),
    "mistrallite": Format(
        "<|system|>{}</s>", "<|prompter|>{} ", "</s>\n<|assistant|>{} ", "</s>\n<|assistant|>", ""
    ),
    "oasst_llama": Format(
        "[INST] <<SYS>>\n{}\n<</SYS>>\n\n", "<|prompter|>{}</s>", "<|assistant|>{}</s>", "<|assistant|>", ""
    ),
    "open-orca": Format(
        "{}<|end_of_turn|>\n",
        "User: {}<|end_of_turn|>\n",
        "Assistant: {}<|end_of_turn|>\n",
        "Assistant: ",
        stop=("User",),
    ),
    "openbuddy": Format("{}\n", "User: {}\n", "Assistant: {}\n", "Assistant:"),
    "openchat": Format(
        "{}<|end_of_turn|>",
        "GPT4 Correct User: {}<|end_of_turn|>",
        "GPT4 Correct Assistant: {}<|end_of_turn|>",
        "GPT4 Correct Assistant:",
        stop=("<|end_of_turn|>",),
    ),
    "phind": Format(
        "### System Prompt\n{}\n\n", "### User Message: {}\n\n", "### Assistant: {}\n\n", "### Assistant:"
    ),
    "pygmalion": Format(
        "<|system|>{}\n\n", "<|user|>\n{}\n\n", "<|model|>\n{}\n\n", "<|model|>\n", "", ("\n",)
    ),
    "qwen": Format(*_CHATML, "You are a helpful assistant.", ("<|endoftext|>",)),
    "redpajama-incite": Format("{}\n", "<human>: {}\n", "<bot>: {}\n", "<bot>:", "", ("<human>",)),
    "saiga": Format("<s>system\n{}</s>", "<s>user\n{}</s>", "<s>bot\n{}</s>", "<s>bot"),
    "snoozy": Format("{}\n", "### Prompt: {}\n", "### Response: {}\n", "### Response:", stop=("###",)),
    "vicuna": Format("{} ", "USER: {} ", "ASSISTANT: {}</s>", "ASSISTANT:", _VICUNA),
    "zephyr": Format(
        "<|system|>\n{}</s>\n",
        "<|user|>\n{}</s>\n",
        "<|assistant|>\n{}</s>\n",
        "<|assistant|>\n",
        "",
        ("</s>",),
    ),
    "llama-2": Format(None, "<s>[INST] {} [/INST]", " {} </s>", "", stop=("</s>",)),
}

# ChatML with tool calls as in Hermes and Qwen models, the form that most ChatML models know.
FUNCTION_CALLING: Final = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You may call functions. Their signatures are within <tools></tools>:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

Write each call as a JSON object within <tool_call></tool_call>:
<tool_call>
{"name": <name>, "arguments": <object>}
</tool_call><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% elif message.role == 'assistant' -%}
<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}
{% endif -%}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES: Final = {"chatml-function-calling": FUNCTION_CALLING}
UNSUPPORTED: Final = ("functionary", "functionary-v1", "functionary-v2")


def template_of(
    name: str | None, chat_template: str | os.PathLike[str] | None
) -> str | os.PathLike[str] | None:
    """Return ``Model``'s ``chat_template`` for ``Llama``'s format and ``chat_template``; None for the file's own.

    Raises ValueError for an unknown or unsupported format, and if both arguments are given.
    """
    if name is None:
        return chat_template
    if name in UNSUPPORTED:
        raise ValueError(
            f"chat_format={quoted(name)} is not supported; leave it out to use the model's own template"
        )
    if name not in FORMATS and name not in TEMPLATES:
        known = ", ".join(sorted([*FORMATS, *TEMPLATES]))
        raise ValueError(f"chat_format is {quoted(name)}; it must be one of {known}")
    if chat_template is not None:
        raise ValueError(f"chat_format={quoted(name)} and a chat_template are given; give one of them")
    return TEMPLATES.get(name)
