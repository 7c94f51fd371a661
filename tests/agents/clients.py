"""The clients whose programs are run, the packages they are installed from, and what they must not do."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# A chat template that says, by its last token, how many results of tools there are.
TEMPLATE = Path(__file__).with_name("turns.jinja")
Call = tuple[str, Mapping[str, Any]]
# The rows of the table at the end: client, version, result, seconds, what it did.
ROWS = pytest.StashKey[list[tuple[str, str, str, str, str]]]()

# Nothing leaves the machine: what honours proxies finds none, and reports and updates are off by documented names.
QUIET = {
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
    "ANONYMIZED_TELEMETRY": "False",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "NO_COLOR": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OTEL_SDK_DISABLED": "true",
    "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
}


@dataclass(frozen=True)
class Client:
    """A client's program, and what it needs.

    ``packages`` are pinned; ``kind`` is what installs them: ``pip``, ``npm``, or ``java`` (nothing). ``calls``: the
    program talks with a scripted model that calls these tools, one a turn, instead of a real one. What a small real
    model says after it got a tool's result is not checked: it may call the tool once more. ``servers``: commands of MCP
    servers among the packages, which the server runs.
    """

    name: str
    kind: str
    program: str
    packages: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    servers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    timeout_s: float = 420

    @property
    def version(self) -> str:
        """The version of what the client is named after."""
        return self.packages[0].rsplit("=" if self.kind == "pip" else "@", 1)[1] if self.packages else "17"


def _commands(tool: str, argument: str, **others: str) -> tuple[Call, ...]:
    return tuple((tool, {argument: f"echo {n} >> done.txt", **others}) for n in ("one", "two", "three"))


def said(calls: Sequence[Call]) -> list[str]:
    """The texts of a scripted model with ``TEMPLATE``: three turns with a call each, the last, one without tools."""
    turns = [
        f"Next. <tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
        for tool, arguments in calls
    ]
    return [*turns, "All of it ran: DONE.", "A short title"]


CLIENTS = (
    Client("openai (PyPI)", "pip", "openai_python.py", ("openai==3.57.0",)),
    Client("openai (npm)", "npm", "openai_node.mjs", ("openai@6.49.0",)),
    Client(
        "ai-sdk",
        "npm",
        "ai_sdk.mjs",
        (
            "ai@6.0.326",
            "@ai-sdk/openai@3.0.141",
            "@ai-sdk/openai-compatible@2.0.92",
            "@ai-sdk/anthropic@3.0.140",
            "zod@4.6.7",
        ),
    ),
    Client(
        "@langchain/openai",
        "npm",
        "langchain_node.mjs",
        ("@langchain/openai@1.5.8", "@langchain/core@1.4.0", "zod@4.6.7"),
    ),
    Client("codex", "npm", "codex_cli.py", ("@openai/codex@0.171.0",), _commands("exec_command", "cmd")),
    Client(
        "opencode",
        "npm",
        "opencode_cli.py",
        ("opencode-ai@1.18.33",),
        _commands("bash", "command"),
    ),
    Client(
        "claude-code",
        "npm",
        "claude_code_cli.py",
        ("@anthropic-ai/claude-code@2.1.197",),
        _commands("Bash", "command"),
    ),
    Client(
        "qwen-code",
        "npm",
        "qwen_code_cli.py",
        ("@qwen-code/qwen-code@0.24.4",),
        _commands("run_shell_command", "command"),
        timeout_s=900,  # its prompt has 76 kB, and the scripted model a token for each byte
    ),
    Client(
        "continue",
        "npm",
        "continue_cli.py",
        ("@continuedev/cli@1.5.47",),
        _commands("Bash", "command"),
    ),
    Client("promptfoo", "npm", "promptfoo_cli.py", ("promptfoo@0.121.20",)),
    Client("litellm", "pip", "litellm_python.py", ("litellm==1.110.2",)),
    Client("litellm proxy", "pip", "litellm_proxy.py", ("litellm[proxy]==1.108.7", "anthropic==2.14.0")),
    Client("pydantic-ai", "pip", "pydantic_ai_python.py", ("pydantic-ai-slim[openai,anthropic]==2.68.0",)),
    Client("openai-agents", "pip", "openai_agents_python.py", ("openai-agents==0.24.0",)),
    Client(
        "openai-agents, MCP",
        "pip",
        "openai_agents_mcp.py",
        ("openai-agents==0.24.0", "mcp-server-time==2026.10.19"),
        (
            ("get_current_time", {"timezone": "Asia/Tokyo"}),
            ("convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}),
            ("get_current_time", {"timezone": "UTC"}),
        ),
        servers={"time": ("venv/bin/mcp-server-time", "--local-timezone", "UTC")},
    ),
    Client(
        "openai (npm), MCP",
        "npm",
        "openai_mcp_node.mjs",
        (
            "openai@6.49.0",
            "@modelcontextprotocol/server-everything@2026.8.31",
            "@modelcontextprotocol/server-memory@2026.8.31",
            "@modelcontextprotocol/server-filesystem@2026.8.31",
        ),
        (
            ("get-sum", {"a": 2, "b": 3}),
            ("read_graph", {}),
            ("list_allowed_directories", {}),
        ),
        servers={
            "everything": ("node_modules/.bin/mcp-server-everything",),
            "memory": ("node_modules/.bin/mcp-server-memory",),
            "files": ("node_modules/.bin/mcp-server-filesystem", "."),
        },
    ),
    Client("smolagents", "pip", "smolagents_python.py", ("smolagents[openai]==1.26.0",)),
    Client("instructor", "pip", "instructor_python.py", ("instructor==1.17.0",)),
    Client("aider", "pip", "aider_python.py", ("aider-chat==0.86.2",)),
    Client("llm", "pip", "llm_python.py", ("llm==0.36",)),
    Client("dspy", "pip", "dspy_python.py", ("dspy==3.4.1",)),
    Client("haystack", "pip", "haystack_python.py", ("haystack-ai==3.4.1",)),
    Client("autogen", "pip", "autogen_python.py", ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5")),
    Client("crewai", "pip", "crewai_python.py", ("crewai==1.15.30",)),
    Client("guidance", "pip", "guidance_python.py", ("guidance==0.3.1", "openai==3.57.0", "jsonschema")),
    Client(
        "inspect-ai",
        "pip",
        "inspect_python.py",
        ("inspect-ai==0.3.285", "openai==3.57.0", "anthropic==2.14.0"),
    ),
    Client("lm-eval", "pip", "lm_eval_python.py", ("lm-eval[api]==0.4.13",)),
    Client("guidellm", "pip", "guidellm_python.py", ("guidellm==0.8.1",)),
    # What tells agents to shorten a conversation.
    Client(
        "pi, cline, opencode",
        "npm",
        "full_context_node.mjs",
        ("@earendil-works/pi-ai@1.6.0", "@cline/llms@0.0.86", "opencode-ai@1.18.33"),
    ),
    Client(
        "LangChain, OpenHands",
        "pip",
        "full_context_python.py",
        (
            "langchain-openai==1.7.4",
            "langchain-anthropic==1.7.10",
            "litellm>=1.105",
            "openhands-sdk==1.58.2; python_version >= '3.12'",
        ),
    ),
    Client("JDK HttpClient", "java", "Client.java"),
)
