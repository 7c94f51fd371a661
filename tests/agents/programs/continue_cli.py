"""@continuedev/cli: `cn -p` runs three commands, each in its own turn, over OpenAI's chat API."""

from session import HOME, MODEL, PROMPT, URL, run

config = HOME / "config.yaml"
config.write_text(
    f"""\
name: llamapipe
version: 1.0.0
schema: v1
models:
  - name: {MODEL}
    provider: openai
    model: {MODEL}
    apiBase: {URL}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""
)
run(
    *("cn", "--config", str(config), "--auto", "-p", PROMPT),
    api="chat",
    CONTINUE_CLI_ENABLE_TELEMETRY="0",
    CONTINUE_GLOBAL_DIR=str(HOME / ".continue"),
)
