"""litellm's proxy before the server: OpenAI's client and Anthropic's both through the proxy, a tool, streams."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import anthropic
import httpx
import openai

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
home = Path(os.environ["HOME"])
config = home / "litellm.yaml"
config.write_text(
    f"""\
model_list:
  - model_name: chat
    litellm_params: {{model: openai/{MODEL}, api_base: {URL}/v1, api_key: none}}
  - model_name: vllm
    litellm_params: {{model: hosted_vllm/{MODEL}, api_base: {URL}/v1, api_key: none}}
  - model_name: claude
    litellm_params: {{model: anthropic/{MODEL}, api_base: {URL}, api_key: none}}
litellm_settings: {{telemetry: false}}
"""
)
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
command = [str(Path(sys.executable).with_name("litellm")), "--config", str(config), "--telemetry", "False"]
proxy = subprocess.Popen(
    [*command, "--host", "127.0.0.1", "--port", str(port)],
    stdout=(home / "proxy.log").open("wb"),
    stderr=subprocess.STDOUT,
    env={**os.environ, "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"},
)
base = f"http://127.0.0.1:{port}"
try:
    end = time.monotonic() + 300
    while True:
        try:
            if httpx.get(f"{base}/health/liveliness").status_code == 200:
                break
        except httpx.TransportError:
            pass
        assert proxy.poll() is None and time.monotonic() < end, (home / "proxy.log").read_text()[-3000:]
        with contextlib.suppress(subprocess.TimeoutExpired):
            proxy.wait(0.5)
    tool = {"name": "multiply", "description": "Multiply two integers."}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    }
    question = [{"role": "user", "content": "What is 12 times 34? Use the tool."}]
    openai_client = openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0)
    anthropic_client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
    for name in ("chat", "vllm", "claude"):
        stream = openai_client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "Name one fruit."}],
            max_tokens=12,
            stream=True,
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices), name
        called = openai_client.chat.completions.create(
            model=name,
            messages=question,
            tools=[{"type": "function", "function": {**tool, "parameters": schema}}],
            tool_choice="required",
            max_tokens=100,
        )
        assert called.choices[0].message.tool_calls[0].function.name == "multiply", name
        with anthropic_client.messages.stream(
            model=name, max_tokens=12, messages=[{"role": "user", "content": "Name one fruit."}]
        ) as events:
            assert events.get_final_text(), name
        used = anthropic_client.messages.create(
            model=name,
            max_tokens=100,
            messages=question,
            tools=[{**tool, "input_schema": schema}],
            tool_choice={"type": "any"},
        )
        assert any(block.type == "tool_use" for block in used.content), (name, used)
finally:
    proxy.terminate()
    proxy.wait()
print("did: streams and tools through the proxy, to openai, hosted_vllm and anthropic, by both clients")
