"""@anthropic-ai/claude-code: `claude -p` runs three commands, each in its own turn, over the Messages API."""

import os
import subprocess
from pathlib import Path

URL, MODEL, BIN = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"], os.environ["AGENT_BIN"]
work = Path(os.environ["HOME"]) / "work"
work.mkdir()
models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL")
done = subprocess.run(
    [f"{BIN}/claude", "-p", "Write one, two and three into done.txt.", "--allowedTools", "Bash"],
    cwd=work,
    env={
        **os.environ,
        "PWD": str(work),
        **dict.fromkeys(models, MODEL),
        "ANTHROPIC_BASE_URL": URL,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1000",
    },
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
assert (work / "done.txt").read_text() == "one\ntwo\nthree\n", done.stdout + done.stderr
assert "DONE" in done.stdout, done.stdout
print("did: a session of four turns with three commands (messages, streamed)")
