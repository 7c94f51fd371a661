"""Run llama.cpp's tests of llama-server against ``llamapipe serve``, and say why those fail that fail.

    python tools/llama_server_suite.py [options of pytest, and files, such as unit/test_completion.py]

Every test starts a server with llama-server's options, which this file translates. Nothing is downloaded: a test that
wants another model than the bundled one fails, and is counted as such. What else fails has its reason in ``REASONS``,
as docs/coming-from/llama-server.md tells; a failure without one ends the program with status 1. It needs the packages
pytest, requests, openai and filelock.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).resolve()
MODELS = ("test-model-stories260K", "tinyllamas/stories260K.gguf")  # for which the bundled model stands
# An option's name here; "" for one that changes nothing here.
WITH_VALUE = {
    "--port": "--port", "--host": "--host", "--temp": "--temp", "--model": "-m", "--model-draft": "-md",
    "--batch-size": "-b", "--ubatch-size": "-ub", "--threads": "-t", "--n-gpu-layers": "-ngl",
    "-ctk": "-ctk", "-ctv": "-ctv", "-fa": "", "--slot-save-path": "--slot-save-path", "--reasoning": "--reasoning",
    "--chat-template-file": "--chat-template", "--media-path": "--media-path", "--cors-origins": "--cors",
    "--seed": "", "--n-predict": "", "--reasoning-format": "", "--cache-ram": "", "--hf-file": "", "--tags": "",
}  # fmt: skip
WITHOUT = (
    "--offline", "--cont-batching", "--metrics", "--slots", "--no-slots", "--swa-full", "--no-ui", "--jinja",
    "--no-jinja", "--no-mmproj", "--no-cache-idle-slots", "--verbose", "--kv-unified", "--context-shift"
)  # fmt: skip


def serve(arguments: list[str]) -> None:
    """Becomes ``llamapipe serve`` with options of llama-server. Exits with a message for what there is not."""
    options, values = ["--any-model-name"], iter(arguments)
    numbers = {"--ctx-size": 0, "--parallel": 0}
    has_file = False
    for name in values:
        if name in WITHOUT:
            continue
        value = next(values, "")
        if name in numbers:
            numbers[name] = int(value)
        elif name == "--alias":
            for alias in value.split(","):
                options += ["-a", alias]
        elif name == "--api-key":
            os.environ["LLAMAPIPE_API_KEYS"] = value
        elif name == "--hf-repo":
            if not any(part in f"{value} {' '.join(arguments)}" for part in MODELS):
                sys.exit(f"shim: another model: {value}")
        elif name == "--lora":
            options += ["--lora", f"{Path(value).stem}={value}"]
        elif name in WITH_VALUE:
            has_file = has_file or name == "--model"
            value = {"on": "auto"}.get(value, value) if name == "--reasoning" else value
            options += [WITH_VALUE[name], value] if WITH_VALUE[name] else []
        else:
            sys.exit(f"shim: another option: {name}")
    if not has_file and "--hf-repo" not in arguments:
        sys.exit("shim: another option: no model")
    n_slots = numbers["--parallel"] or 4
    options += ["-np", str(n_slots)]
    if numbers["--ctx-size"]:
        # There it is the context of all slots, unless they share the cells.
        shares = numbers["--parallel"] and "--kv-unified" not in arguments
        options += ["-c", str(numbers["--ctx-size"] // n_slots if shares else numbers["--ctx-size"])]
    if "--no-ui" in arguments:
        options.append("--no-page")
    if "--context-shift" in arguments:
        options += ["--overflow", "shift"]
    os.execv(sys.executable, [sys.executable, "-m", "llamapipe", "serve", *options])


def run(source: Path, options: list[str]) -> int:
    """Runs the tests, and prints a table of what failed. The number of failures without a reason."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = folder / "tools" / "server" / "tests"
        shutil.copytree(source / "tools" / "server" / "tests", tests)
        (folder / "models").symlink_to(source / "models")  # their templates
        (tests / "wget.py").write_text(
            "def download(url, out):\n    raise OSError(f'shim: another model: {url}')\n"
        )
        (tests / "no_models.py").write_text(
            "import utils\nutils.ServerPreset.load_all = staticmethod(lambda: None)\n"
        )
        binary = folder / "llama-server"
        binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE}" --serve "$@"\n')
        binary.chmod(0o755)
        report = folder / "report.xml"
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        path = os.pathsep.join([str(tests), *map(os.path.abspath, paths)])
        subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no_models", "--tb=short", f"--junitxml={report}",
             "-o", "junit_logging=all", *options],
            check=False,
            cwd=tests,
            env={**os.environ, "LLAMA_SERVER_BIN_PATH": str(binary), "PYTHONPATH": path},
        )  # fmt: skip
        return told(report)


def told(report: Path) -> int:
    """Prints what a report holds."""
    counts: Counter[str] = Counter()
    unknown = []
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        kinds = {child.tag for child in case}
        if "skipped" in kinds:  # slow ones
            counts["skipped by the suite itself"] += 1
        elif not kinds & {"failure", "error"}:
            counts["passed"] += 1
        else:
            text = "".join(ElementTree.tostring(case, "unicode", "text"))
            reason = reason_of(name, text)
            counts[reason or "without a reason"] += 1
            if reason is None:
                unknown.append(name)
    for kind, n in counts.most_common():
        print(f"{n:5d}  {kind}")
    for name in unknown:
        print(f"without a reason: {name}")
    return len(unknown)


def reason_of(name: str, text: str) -> str | None:
    """Why a test failed, None: that is not known."""
    if "shim: another model" in text:
        return "needs another model"
    if (option := re.search(r"shim: another option: (.*)", text)) is not None:
        return f"needs {option[1]}"
    return next((reason for pattern, reason in REASONS.items() if re.search(pattern, name)), None)


# Why tests fail, by a pattern of their names. The first that matches is meant.
_MODEL = "expects a text, a number of tokens or control tokens of its model"
_AS_OPENAI = 'the first event of a chat has the content "", as OpenAI\'s; null there'
_TAKEN = "two answers in a row are taken"
_STATUS = "a request that cannot be answered gets 400, there 500, or 200 as if it had a message"
_TOOLS = "tools with a template that has no place for them get 400"
_ON = "expects that a route is off without an option"
_SEED = "expects a seed or a limit of tokens that the server sets"
_HEADERS = "expects a header of llama-server"
_CORS = "pages of other sites get 403, there 200 without the header that lets them read"
_OWN = "features of llama-server: several addresses, tags, tools, a proxy, Google's API, pages"
_INSIDE = "looks into llama-server's log, its slots or __verbose"
_PROGRESS = "counts steps of a prompt, which are planned otherwise here"
_TIMES = "Anthropic's last event has the times here"
_CACHED = "a prompt of fewer tokens than a cached prefix has"
_BEFORE = "log-probabilities are the model's own, before any sampler"
REASONS: dict[str, str] = {
    r"_multiple_addresses|_aliases_and_tags|_mcp|test_proxy|_gcp|_tools_builtin|_router|static_assets": _OWN,
    r"test_server_props|stream_vs_non_stream": _SEED,
    r"test_server_slots|metrics_disabled": _ON,
    r"metrics_prometheus_format|predicted_total_matches": _HEADERS,
    r"cors_options": _CORS,
    r"populates_logit_bias|no_logit_bias|prefill|vllm_compat|verbose_debug|clear_and_restore": _INSIDE,
    r"return_progress|on_prompt_progress|llama_telemetry": _PROGRESS,
    r"anthropic_messages_streaming": _TIMES,
    r"processed_and_cached": _CACHED,
    r"completion_stream\[[BY]|with_timings_per_token|logprobs_stream|without_tool_call.*STREAMED": _AS_OPENAI,
    r"invalid_chat_completion_req": _TAKEN,
    r"tool_result_with_image|vision_format_accepted|anthropic_empty_messages": _STATUS,
    r"streaming_content_block_indices": _TOOLS,
    r"chat_completion\[|openai_library|multiple_choices": _MODEL,
    r"test_slot_|ctx_shift|test_infill|tool_use_basic|tool_streaming|parallel_slots|cached_tokens": _MODEL,
    r"n_probs_post": _BEFORE,
    r"response_format|test_completion\[|completion_stream\[|rate_excludes|unified|response_fields|n_probs": _MODEL,
    r"prompt_cache": _MODEL,
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    sys.path.insert(0, str(HERE.parent.parent))
    from native_build.sources import find_source

    sys.exit(min(run(find_source(None, print).path, sys.argv[1:]), 1))
