"""@continuedev/cli: `cn -p` runs three commands, each in its own turn, over OpenAI's chat API."""

import os
import subprocess
from pathlib import Path

URL, MODEL, BIN = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"], os.environ["AGENT_BIN"]
home = Path(os.environ["HOME"])
config = home / "config.yaml"
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
work = home / "work"
work.mkdir()
done = subprocess.run(
    [f"{BIN}/cn", "--config", str(config), "--auto", "-p", "Write one, two and three into done.txt."],
    cwd=work,
    env={
        **os.environ,
        "PWD": str(work),
        "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
        "CONTINUE_GLOBAL_DIR": str(home / ".continue"),
    },
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
assert (work / "done.txt").read_text() == "one\ntwo\nthree\n", done.stdout + done.stderr
assert "DONE" in done.stdout, done.stdout
print("did: a session of four turns with three commands (chat, streamed)")
