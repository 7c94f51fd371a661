"""The chat templates of the pinned llama.cpp, rendered with jinja2, and a vocabulary of bytes for their grammars."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import llguidance
import pytest

from llamapipe.chat.chat_format import ChatFormat
from llamapipe.chat.parser import ChatParser
from llamapipe.chat.results import ChatMessage
from llamapipe.chat.template import ChatTemplate
from support.gguf_models import find_source

Render = Callable[..., str]


@lru_cache(maxsize=1)
def folder() -> Path | None:
    """Where the templates are; None where llama.cpp's source is not unpacked."""
    try:
        return find_source() / "models" / "templates"
    except FileNotFoundError:
        return None


def vllm_source() -> Path:
    """The folder of vLLM's source, which ``nox -s formats`` names."""
    return Path(os.environ["LLAMAPIPE_VLLM_SOURCE"])


def names() -> list[str]:
    templates = folder()
    return [] if templates is None else sorted(path.stem for path in templates.glob("*.jinja"))


# Templates of formats that none of llama.cpp's shows.
OWN = {
    "pythonic": """
{%- if tools %}<|system|>Call functions as [func_name1(param1=value1), func_name2(...)]: {{ tools | tojson }}{% endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>' }}
    {%- if message.tool_calls %}[
        {%- for call in message.tool_calls %}{{- call.function.name }}(
            {%- for key, value in call.function.arguments.items() %}{{- key }}={{ value | tojson }}
                {%- if not loop.last %}{{- ', ' }}{% endif %}{% endfor %})
            {%- if not loop.last %}{{- ', ' }}{% endif %}{% endfor %}]
    {%- else %}{{- message.content }}{% endif %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
    "functiongemma": """
{%- macro written(value) %}
    {%- if value is string %}<escape>{{ value }}<escape>{% else %}{{ value | tojson }}{% endif %}
{%- endmacro %}
{%- if tools %}<start_of_turn>developer\n{{ tools | tojson }}<end_of_turn>\n{% endif %}
{%- for message in messages %}<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.tool_calls %}
    {%- for call in message.tool_calls %}<start_function_call>call:{{ call.function.name }}{
        {%- for key, value in call.function.arguments | dictsort %}{{- key }}:{{ written(value) }}
            {%- if not loop.last %},{% endif %}{% endfor %}}<end_function_call>{% endfor %}
{%- else %}{{- message.content }}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
}


def source_of(name: str) -> str:
    """The text of a template; skips the test where llama.cpp's source is not unpacked."""
    if name in OWN:
        return OWN[name]
    if name.startswith("vllm/"):
        path = vllm_source() / "examples" / f"tool_chat_template_{name[5:]}.jinja"
        return path.read_text(encoding="utf-8")
    templates = folder()
    if templates is None:
        pytest.skip("llama.cpp's source is not in the cache: run build_native.py")
    return (templates / f"{name}.jinja").read_text(encoding="utf-8")


@lru_cache
def template(name: str) -> ChatTemplate:
    """One of the templates."""
    return ChatTemplate(source_of(name), "<s>", "</s>")


def renderer(name: str, given_args: Mapping[str, Any] | None = None) -> Render:
    """Renders conversations as probes do. ``given_args``: template arguments of the caller."""

    def render(
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        return template(name).render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            template_args={**(given_args or {}), **template_args},
            is_probe=True,
        )

    return render


class ByteVocabulary:
    """Every byte is a token, and every given marker is one control token."""

    bos_token_id: int | None = None

    def __init__(self, specials: Sequence[str] = ()) -> None:
        self.specials = tuple(specials)
        self.tokens = (
            [bytes([i]) for i in range(256)] + [special.encode() for special in specials] + [b"<end>"]
        )
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1
        self._native = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self))

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())

    def special_id(self, text: str) -> int | None:
        return 256 + self.specials.index(text) if text in self.specials else None

    def ids(self, text: str) -> list[int]:
        """The text's bytes, with markers as control tokens."""
        token_ids: list[int] = []
        parts = re.split("|".join(f"({re.escape(s)})" for s in self.specials) or r"(?!)", text)
        for part in filter(None, parts):
            special = self.special_id(part)
            token_ids += list(part.encode()) if special is None else [special]
        return token_ids

    def matcher(self, grammar: str) -> Any:
        """A matcher at the grammar's start; fails if the grammar cannot be compiled."""
        matcher = llguidance.LLMatcher(
            self._native, json.dumps({"grammars": [{"lark_grammar": grammar}]}), log_level=0
        )
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def walk(self, grammar: str, seed: int, most: int = 5000) -> str:
        """Random tokens that the grammar allows, up to an end."""
        picked = random.Random(seed)
        matcher = self.matcher(grammar)
        ids: list[int] = []
        while not matcher.is_stopped():
            allowed = [i for i, bias in enumerate(matcher.compute_logit_bias()) if bias]
            end = self.eos_token_id in allowed and (len(allowed) == 1 or picked.random() < 0.5)
            if end:
                break
            ids.append(picked.choice([i for i in allowed if i != self.eos_token_id]))
            assert matcher.consume_token(ids[-1]) and len(ids) < most, self._text(ids)
        return self._text(ids).decode()

    def _text(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[i] for i in ids)

    def accepts(self, grammar: str, text: str) -> bool:
        """True if the whole text matches."""
        return self.accepted(grammar, text) == (text, True)

    def accepted(self, grammar: str, text: str) -> tuple[str, bool]:
        """The text up to the first token that is not allowed, and whether it may end there."""
        matcher = self.matcher(grammar)
        ids = self.ids(text)
        n = matcher.try_consume_tokens(ids)
        accepting = matcher.is_accepting()
        return self._text(ids[:n]).decode(errors="replace"), accepting


def cuts(text: str, n_random: int = 20, everywhere: bool = False) -> Iterator[list[str]]:
    """The text whole, by characters, and in random parts. ``everywhere``: also cut once at every place."""
    yield [text]
    yield list(text)
    for at in range(1, len(text) if everywhere else 1):
        yield [text[:at], text[at:]]
    for seed in range(n_random):
        picked = random.Random(seed)
        at_all = sorted(picked.sample(range(len(text) + 1), min(len(text), picked.randint(1, 8))))
        yield [text[a:b] for a, b in zip([0, *at_all], [*at_all, len(text)], strict=True)]


def parse_answer(parser: ChatParser, text: str) -> ChatMessage:
    """A whole answer at once."""
    return ChatMessage([parser.feed(text), parser.finish()])


@cache
def form_of(name: str, specials: tuple[str, ...] = ()) -> ChatFormat:
    """What is found by probing a template, where these are control tokens; the probes take a while."""
    return ChatFormat.of(renderer(name), ByteVocabulary(specials).special_id)
