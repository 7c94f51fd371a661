"""@qwen-code/qwen-code: `qwen -p` runs three commands, each in its own turn, over OpenAI's chat API."""

import json
import os
import subprocess
from pathlib import Path

URL, MODEL, BIN = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"], os.environ["AGENT_BIN"]
home = Path(os.environ["HOME"])
(home / ".qwen").mkdir()
settings = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False},
    "security": {"auth": {"selectedType": "openai"}},
}
(home / ".qwen" / "settings.json").write_text(json.dumps(settings))
work = home / "work"
work.mkdir()
done = subprocess.run(
    [f"{BIN}/qwen", "--yolo", "-p", "Write one, two and three into done.txt."],
    cwd=work,
    env={
        **os.environ,
        "PWD": str(work),
        "OPENAI_BASE_URL": f"{URL}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": MODEL,
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
