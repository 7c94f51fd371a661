"""One chat template: the names and settings it is written for, the forms of messages it is given, its limits."""

from __future__ import annotations

import datetime
import sys
from contextlib import suppress
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

from llamapipe.chat import sandbox as sandbox_module
from llamapipe.chat.sandbox import sandbox
from llamapipe.chat.template import ChatTemplate
from llamapipe.errors import InvalidRequestError

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "The answer is "}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
EACH = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"


def peak_bytes() -> int:
    """The most memory that this process had, on Linux since ``forget_peak``; 0 on Windows, where Python cannot ask."""
    if sys.platform == "win32":
        return 0
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of Darwin, in bytes


def forget_peak() -> int:
    """Lets the peak be what the process has now, where the system can; returns ``peak_bytes``."""
    with suppress(OSError):  # no such file, or not for this process
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> int:
    """All limits are an eighth, so that values of an eighth reach the same ones in an eighth of the time."""
    scale = 8
    monkeypatch.setattr(sandbox_module, "MAX_ITERATIONS", sandbox_module.MAX_ITERATIONS // scale)
    monkeypatch.setattr(sandbox_module, "MAX_SIZE", sandbox_module.MAX_SIZE // scale)
    monkeypatch.setattr(sandbox_module, "MAX_SECONDS", sandbox_module.MAX_SECONDS / scale)
    return scale


def shown(text: str, *messages: dict[str, Any], continue_last: bool = False, **names: Any) -> str:
    template = ChatTemplate(text, "<s>", "</s>")
    return template.render(messages or [USER], continue_last=continue_last, template_args=names)


class TestNames:
    def test_names_of_transformers(self) -> None:
        assert shown("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}") == "<s>Hi</s>"
        assert shown("{{ tools is defined }} {{ add_generation_prompt }}") == "False True"
        assert shown("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().astimezone().year)
        assert shown("{{ thinking }}", thinking=False) == "False"
        assert shown("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
        assert shown("{{ messages[0].content | tojson }}", {**USER, "content": "<é>'"}) == '"<é>\'"'

    def test_tags_of_transformers(self) -> None:
        assert shown("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "Hi!"
        assert (
            shown("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
        )

    def test_blocks_take_their_line_with_them(self) -> None:
        assert shown("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"

    def test_a_bos_that_tokenizing_adds_is_left_out(self) -> None:
        assert ChatTemplate("{{ bos_token }}a", "<s>", strips_bos=True).render([USER]) == "a"
        assert ChatTemplate("{{ bos_token }}a", "<s>").render([USER]) == "<s>a"


class TestForms:
    def test_parts_of_text_are_joined(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        assert shown(EACH, {"role": "user", "content": parts}) == "[user: ab]"

    def test_a_template_of_parts_gets_parts(self) -> None:
        source = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
        assert shown(source) == "<Hi>"

    def test_arguments_are_objects_unless_the_template_needs_text(self) -> None:
        message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        start = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        end = "{% endfor %}{% endfor %}"
        assert shown(start + "{{ c.function.arguments | tojson }}" + end, USER, message) == '{"a": 1}'
        assert shown(start + "{{ '' + c.function.arguments }}" + end, USER, message) == '{"a": 1}'

    def test_calls_are_shown_where_a_template_asks_for_no_content(self) -> None:
        source = "{% for m in messages if m.content is none %}{{ m.tool_calls[0].function.name }}{% endfor %}"
        assert shown(source, USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}) == "f"

    def test_a_system_message_moves_where_a_template_has_no_place_for_it(self) -> None:
        source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        assert shown(source + "{{ m.content }}{% endfor %}", SYSTEM, USER) == "Be brief.\nHi"

    def test_developers_are_the_system_where_a_template_does_not_know_them(self) -> None:
        message = {"role": "developer", "content": "Be brief."}
        assert shown(EACH, message, USER).startswith("[system: Be brief.]")
        assert shown(EACH + "{# developer #}", message, USER).startswith("[developer: Be brief.]")

    def test_a_message_is_continued_where_it_ends(self) -> None:
        source = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}end"
        again = {"role": "assistant", "content": "Hi"}
        assert shown(source, USER, again, continue_last=True) == "[Hi][Hi"
        assert shown(source, USER, ANSWER, continue_last=True) == "[Hi][The answer is "
        assert ANSWER["content"] == "The answer is "
        with pytest.raises(InvalidRequestError, match="does not show the last message"):
            shown("{{ messages[0].content }}", USER, ANSWER, continue_last=True)


class TestLimits:
    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
            ("{{ messages[0].content.missing.more }}", "has no attribute 'missing'"),
            ("{{ messages.__class__.__base__ }}", "'__class__'"),
            ("{{ messages.append(1) }}", "append"),
            ("{% include 'etc' %}", "refuses|loader"),
        ],
    )
    def test_what_a_template_may_not_do(self, source: str, message: str) -> None:
        with pytest.raises(InvalidRequestError, match=message):
            shown(source)

    @pytest.mark.parametrize("source", ["{{ ''.format.__globals__ }}", "{{ '{0.__class__}'.format(1) }}"])
    def test_what_a_template_does_not_see(self, source: str) -> None:
        assert shown(source) == ""

    @pytest.mark.parametrize("source", ["{% if %}", "{% for %}", "{{ a b }}", "{{ " + "(" * 5000])
    def test_a_template_that_cannot_be_compiled(self, source: str) -> None:
        with pytest.raises(InvalidRequestError, match="cannot be compiled"):
            ChatTemplate(source)

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(10**9) %}{% endfor %}",
            "{% set x = range(1000) | list %}{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
            "{{ 'a' * 10**10 }}",
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x=ns.x.replace('a','aa') %}{% endfor %}",
            "{{ 2 ** (10 ** 9) }}",
            "{{ 'a'.ljust(10**10) }}",
            "{{ '%9999999999d' % 1 }}",
            "{{ '{:9999999999}'.format(1) }}",
            "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
            "{{ 'a' | center(10**10) }}",
            "{{ (range(100000) | list) | join('a' * 100000) }}",
            "{{ '{:{}}'.format('x', 10**9) }}",
            "{{ ('{0:9999}' * 100000).format(1) }}",
            "{{ (1).to_bytes(10**9, 'big') }}",
            "{{ 'x'.encode() * 10**9 }}",
            "{{ ('a' * 10**6).translate('a'.maketrans({'a': 'b' * 10**4})) }}",
            "{{ '\t'.expandtabs(tabsize=10**9) }}",
            "{{ ('a' * 10000) | replace(old='a', new='b' * 100000) }}",
            "{{ range(100000) | list | tojson(indent=10000) }}",
            "{{ range(100) | list | tojson(indent='x' * 10**7) }}",
            "{{ (['X' * 10**6] * 1000) | sort }}",
            "{{ ([{'k': 'X' * 10**6}] * 1000) | groupby('k') }}",
            "{{ (['X' * 30000000] * 100) | unique | list | length }}",
            "{{ ('f' * 4000000) | int(base=16) // 3 }}",
            "{% set ns = namespace(a=1) %}{% for i in range(60) %}{% set ns.a = dict(a=ns.a, b=ns.a) %}{% endfor %}",
            "{{ ('ab ' * 7000000) | sort }}",
            "{{ ('ab ' * 7000000) | title }}",
            "{{ ('ab ' * 7000000) | wordcount }}",
            "{{ ('ab ' * 7000000) | urlencode }}",
            "{{ ('ab ' * 7000000).split() | length }}",
            "{{ ('ab ' * 7000000).split(' ') | length }}",
            "{{ ('ab\\n' * 7000000).splitlines() | length }}",
            "{{ '-'.join('ab ' * 7000000) }}",
            "{{ ('&' * 60000000) | e }}",
            "{{ ('\\0' * 60000000) | tojson }}",
            "{{ ['\\0' * 60000000] ~ '' }}",
            "{{ '%s' % (['\\0' * 30000000],) }}",
            "{{ [0] * 50000000 }}",
            "{{ ((([0] * 3000) | map('string') | list) * 3000) | map('upper') | list | length }}",
            "{% set x = 'a' * 30000000 %}" + "{% set y = x[1:] %}{% set z = y[1:] %}" * 3,
            "{{ (2 ** 4000 ~ '') * 60000 }}",
            "{% for i in range(100000) %}{{ 2 ** 4000 }}{% endfor %}",
        ],
    )
    def test_a_template_cannot_use_up_the_machine(self, source: str) -> None:
        before = forget_peak()
        with pytest.raises(InvalidRequestError):
            shown(source)
        assert peak_bytes() - before < 400 * 2**20

    @pytest.mark.parametrize("name", sorted(sandbox.filters))
    def test_no_filter_takes_long_for_a_long_value(self, name: str, scale: int) -> None:
        """Of a text or a list, it is refused, fails, or is done at once."""
        arguments = {
            "map": "('upper')",
            "replace": "('a', 'bb')",
            "join": "('ab')",
            "batch": "(2)",
            "slice": "(2)",
        }
        for text, n in (("'aB '", 7000000), ("[[1, 'aB']]", 2000000), ("'aB'", 400000)):
            value = f"{text} * {n // scale}"
            before, began_s = forget_peak(), thread_time()
            with suppress(InvalidRequestError):
                shown(f"{{{{ ({value}) | {name}{arguments.get(name, '')} | string | length }}}}")
            assert thread_time() - began_s < 20 / scale, (name, value)
            assert peak_bytes() - before < 500 * 2**20 // scale, (name, value)

    @pytest.mark.parametrize("name", [n for n in dir(str) if not n.startswith("_")])
    def test_no_method_takes_long_for_a_long_text(self, name: str, scale: int) -> None:
        for arguments in ("", "'a'", "'a', 'bbb'", "10000", "9999, 'a'"):
            before, began_s = forget_peak(), thread_time()
            with suppress(InvalidRequestError):
                shown(f"{{{{ (('aB ' * {7000000 // scale}).{name}({arguments}) ~ '') | length }}}}")
            assert thread_time() - began_s < 20 / scale, (name, arguments)
            assert peak_bytes() - before < 500 * 2**20 // scale, (name, arguments)

    def test_what_templates_need_stays_allowed(self) -> None:
        assert shown("{{ {'a': [1]} | tojson(indent=4) }}") == '{\n    "a": [\n        1\n    ]\n}'
        assert (
            shown("{{ 'a-b' | replace('-', new='+') }}{{ ['b', 'A'] | sort | join }}{{ '12' | int // 5 }}")
            == "a+bAb2"
        )
        assert shown("{{ '%05.2f' % 1.5 }}{{ '{:>4}'.format(7) }}{{ 'x'.center(3) }}") == "01.50   7 x "
