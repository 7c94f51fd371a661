"""Reads the cases of vLLM's ``tests/tool_parsers`` and ``tests/reasoning``: a model's text, the expected message.

Open this file if a new version of vLLM writes its cases in a way that is not read any more. Nothing of vLLM is imported
or run: only cases are taken whose text and expectation are constants. They stand in the parameters of tests, in
``ToolParserTestConfig``, in dictionaries with the keys "output", "reasoning" and "content", and in the assertions of
tests. A test without a template in ``TEMPLATES`` has none that a prompt could be made with.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from support.cpp_cases import PeerCase

# By the part of a file's name before "_tool_parser" or "_reasoning_parser": a template of llama.cpp, or one of vLLM.
TEMPLATES = {
    "apertus": "Apertus-8B-Instruct",
    "deepseekr1": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseekv3": "vllm/deepseekv3",
    "deepseekv31": "deepseek-ai-DeepSeek-V3.1",
    "deepseekv32": "deepseek-ai-DeepSeek-V3.2",
    "deepseekv4": "deepseek-ai-DeepSeek-V4",
    "functiongemma": "vllm/functiongemma",
    "gemma4": "vllm/gemma4",
    "gigachat3": "GigaChat3.1-10B-A1.8B",
    "glm47_moe": "GLM-4.7-Flash",
    "glm4_moe": "GLM-4.7-Flash",
    "granite": "vllm/granite",
    "granite4": "ibm-granite-granite-4.0",
    "granite_20b_fc": "vllm/granite_20b_fc",
    "granite_thinking": "ibm-granite-granite-3.3-2B-Instruct",
    "hermes": "vllm/hermes",
    "hunyuan": "vllm/hunyuan_a13b",
    "hunyuan_a13b": "vllm/hunyuan_a13b",
    "hy_v3": "tencent-Hy3",
    "internlm2": "vllm/internlm2_tool",
    "k2_horizon": "IFM-K2-Horizon",
    "kimi_k2": "moonshotai-Kimi-K2",
    "lfm2": "LFM2-8B-A1B",
    "llama3_json": "vllm/llama3.1_json",
    "llama4_pythonic": "vllm/llama4_pythonic",
    "minicpm5xml": "openbmb-MiniCPM5-1B",
    "minimax_m2": "MiniMax-M2",
    "minimax_m3": "MiniMax-M3",
    "nemotron_v3": "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "phi4mini": "vllm/phi4_mini",
    "poolside_v1": "poolside-Laguna-XS.2",
    "pythonic": "vllm/llama3.2_pythonic",
    "qwen3": "Qwen3.5-4B",
    "qwen3coder": "vllm/qwen3coder",
    "step3p5": "StepFun3.5-Flash",
    "xlam": "vllm/xlam_qwen",
}
_WITHOUT_TEMPLATE = ("reasoning/granite",)  # that of Granite 3.2
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_TEXTS = ("model_output", "text", "output")
_ASSERTED = re.compile(r"(?:tool_calls\[(?P<at>\d+)\]\.function\.(?P<what>name|arguments)\)?|\.content)$")
_LEAST = 100  # cases; fewer are a sign that they are written in another way


class _NotConstant(Exception):  # noqa: N818  (not an error: the test computes it)
    pass


def read_python_cases(source: Path) -> list[PeerCase]:
    """The cases below the folder of vLLM's source, each once. Raises ValueError if too few can be read."""
    cases: dict[str, PeerCase] = {}
    for folder, end in (("tool_parsers", "_tool_parser"), ("reasoning", "_reasoning_parser")):
        for path in sorted((source / "tests" / folder).glob(f"test_*{end}.py")):
            name = path.stem.removeprefix("test_").removesuffix(end)
            template = TEMPLATES.get(name)
            if template is not None and f"{folder}/{name}" not in _WITHOUT_TEMPLATE:
                for case in _Module(path, template).cases():
                    cases.setdefault(case.key, case)
    if len(cases) < _LEAST:
        raise ValueError(f"{len(cases)} cases of vLLM were read, of at least {_LEAST}")
    return list(cases.values())


def _tools(calls: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Tools that may be called so, with arguments of the types that are expected."""
    properties: dict[str, dict[str, Any]] = {}
    for name, arguments, _ in calls:
        kinds = properties.setdefault(name, {})
        for key, value in json.loads(arguments).items():
            kinds[key] = {"type": _TYPES[type(value)]} if type(value) in _TYPES else {}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "",
                "parameters": {"type": "object", "properties": kinds},
            },
        }
        for name, kinds in properties.items()
    ]


class _Module:
    """A file of tests."""

    def __init__(self, path: Path, template: str) -> None:
        self._tree = ast.parse(path.read_text(encoding="utf-8"))
        self._template = template
        self._names: dict[str, Any] = {}
        self._lines: dict[str, int] = {}
        self._lists: dict[str, ast.List] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if isinstance(node.value, ast.List):
                    self._lists[node.targets[0].id] = node.value
                try:
                    self._names.setdefault(node.targets[0].id, self._value(node.value))
                    self._lines.setdefault(node.targets[0].id, node.lineno)
                except _NotConstant:
                    pass

    def cases(self) -> Iterator[PeerCase]:
        """Those with constants."""
        for name, value in self._names.items():
            if isinstance(value, dict) and {"output", "content"} <= value.keys() and "STREAM" not in name:
                reasoning = value.get("reasoning", value.get("reasoning_content"))
                if value["content"] is None and reasoning is None and value["output"]:
                    continue  # it is only about the reasoning's end
                yield self._case(self._lines[name], value["output"], value["content"], reasoning, [])
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef):
                yield from self._asserted(node)
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Attribute) and node.func.attr == "parametrize":
                yield from self._parameters(node)
            elif isinstance(node.func, ast.Name) and node.func.id == "ToolParserTestConfig":
                yield from self._configured(node)

    def _case(
        self,
        line: int,
        text: str,
        content: str | None,
        reasoning: str | None,
        calls: list[tuple[str, str, str]],
        any_content: bool = False,
    ) -> PeerCase:
        return PeerCase(
            self._template,
            line,
            text,
            tools=_tools(calls),
            parallel=True,
            separates_reasoning=True,
            content=content or "",
            reasoning=reasoning or "",
            calls=calls,
            any_content=any_content,
        )

    def _parameters(self, node: ast.Call) -> Iterator[PeerCase]:
        """The cases of a test with parameters."""
        arguments = {keyword.arg: keyword.value for keyword in node.keywords}
        names, values = (
            arguments.get(key, node.args[i] if i < len(node.args) else None)
            for i, key in enumerate(("argnames", "argvalues"))
        )
        if isinstance(values, ast.Name):
            values = self._lists.get(values.id)
        if names is None or not isinstance(values, ast.List):
            return
        try:
            named = self._value(names)
        except _NotConstant:
            return
        named = [name.strip() for name in named.split(",")] if isinstance(named, str) else list(named)
        for row in values.elts:
            try:
                case = dict(zip(named, self._value(row), strict=False))
                text = case["model_output"]
                calls = [self._call(call) for call in case["expected_tool_calls"]]
            except (_NotConstant, KeyError, TypeError, ValueError):
                continue
            if calls:  # the others are about broken calls, on which everybody differs
                is_compared = "expected_content" in case
                yield self._case(row.lineno, text, case.get("expected_content"), None, calls, not is_compared)

    @staticmethod
    def _call(call: Any) -> tuple[str, str, str]:
        call = call.get("function", call)
        arguments = call["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        json.loads(text)
        return call["name"], text, ""

    def _configured(self, node: ast.Call) -> Iterator[PeerCase]:
        """The cases of a suite that many parsers share."""
        settings: dict[str, Any] = {}
        for keyword in node.keywords:
            try:
                settings[keyword.arg or ""] = self._value(keyword.value)
            except _NotConstant:
                continue
        text = settings["no_tool_calls_output"]
        yield self._case(node.lineno, text, text, None, [])
        arguments = settings.get("single_tool_call_expected_args", {"city": "Tokyo"})
        name = settings.get("single_tool_call_expected_name", "get_weather")
        yield self._case(
            node.lineno,
            settings["single_tool_call_output"],
            settings.get("single_tool_call_expected_content"),
            None,
            [(name, json.dumps(arguments), "")],
        )

    def _asserted(self, node: ast.FunctionDef) -> Iterator[PeerCase]:
        """The case of a test that gives a parser one text, and compares every call with constants."""
        texts: list[str] = []
        asserted: dict[str, dict[int, Any]] = {"name": {}, "arguments": {}, "content": {}}
        for child in ast.walk(node):
            if isinstance(child, ast.AugAssign):
                return
            if isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) in _TEXTS:
                try:
                    texts.append(self._value(child.value))
                except _NotConstant:
                    return
            if isinstance(child, ast.Assert) and isinstance(child.test, ast.Compare):
                match = _ASSERTED.search(ast.unparse(child.test.left))
                if match and isinstance(child.test.ops[0], (ast.Eq, ast.Is)):
                    try:
                        value = self._value(child.test.comparators[0])
                    except _NotConstant:
                        return
                    asserted[match["what"] or "content"][int(match["at"] or 0)] = value
        names, arguments = asserted["name"], asserted["arguments"]
        if (
            len(texts) != 1
            or not names
            or sorted(names) != list(range(len(names)))
            or names.keys() != arguments.keys()
        ):
            return
        calls = [(names[i], json.dumps(arguments[i]), "") for i in range(len(names))]
        if all(isinstance(value, dict) for value in arguments.values()):
            content = asserted["content"]
            if (content.get(0) or "") in texts[0]:
                yield self._case(node.lineno, texts[0], content.get(0), None, calls, not content)

    # ---- constants
    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self._names:
            return self._names[node.id]
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self._value(element) for element in node.elts]
        if isinstance(node, ast.Dict) and None not in node.keys:
            keys = [self._value(key) for key in node.keys if key is not None]
            return dict(zip(keys, map(self._value, node.values), strict=True))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left: Any = self._value(node.left)
            right: Any = self._value(node.right)
            if type(left) is type(right) and type(left) in (str, list):
                return left + right
        if isinstance(node, ast.JoinedStr):
            return "".join(self._part(part) for part in node.values)
        if isinstance(node, ast.Call):
            return self._called(node)
        raise _NotConstant

    def _part(self, node: ast.expr) -> str:
        if isinstance(node, ast.FormattedValue) and node.format_spec is None and node.conversion == -1:
            return str(self._value(node.value))
        return str(self._value(node))

    def _called(self, node: ast.Call) -> Any:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        keywords: Mapping[str, Any] = {}
        if name in ("ToolCall", "FunctionCall"):
            keywords = {keyword.arg or "": self._value(keyword.value) for keyword in node.keywords}
            return dict(keywords)
        if name == "dumps" and node.args:
            return json.dumps(self._value(node.args[0]))
        if name == "param":
            return [self._value(argument) for argument in node.args]
        raise _NotConstant
