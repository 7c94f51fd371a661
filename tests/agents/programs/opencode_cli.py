"""opencode-ai: `opencode run` runs three commands, each in its own turn, by its provider of OpenAI's chat API."""

import json
import os
import subprocess
from pathlib import Path

URL, MODEL, BIN = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"], os.environ["AGENT_BIN"]
work = Path(os.environ["HOME"]) / "work"
work.mkdir()
provider = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "llamapipe",
    "options": {"baseURL": f"{URL}/v1", "apiKey": "none"},
    "models": {MODEL: {"name": MODEL, "limit": {"context": 60000, "output": 2000}}},
}
settings = {
    "autoupdate": False,
    "share": "disabled",
    "provider": {"llamapipe": provider},
    "model": f"llamapipe/{MODEL}",
    "small_model": f"llamapipe/{MODEL}",
    "permission": {"bash": "allow", "edit": "allow"},
}
(work / "opencode.json").write_text(json.dumps(settings))
done = subprocess.run(
    [f"{BIN}/opencode", "run", "Write one, two and three into done.txt."],
    cwd=work,
    env={**os.environ, "PWD": str(work)},
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
assert (work / "done.txt").read_text() == "one\ntwo\nthree\n", done.stdout + done.stderr
assert "DONE" in done.stdout, done.stdout
print("did: a session of four turns with three commands (chat, streamed)")
