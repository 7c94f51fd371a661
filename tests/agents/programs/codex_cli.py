"""@openai/codex: `codex exec` runs three commands, each in its own turn, over the Responses API."""

import os
import subprocess
from pathlib import Path

URL, MODEL, BIN = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"], os.environ["AGENT_BIN"]
home = Path(os.environ["HOME"])
(home / ".codex").mkdir()
(home / ".codex" / "config.toml").write_text(
    f"""\
model = "{MODEL}"
model_provider = "llamapipe"
check_for_update_on_startup = false
[analytics]
enabled = false
[feedback]
enabled = false
[model_providers.llamapipe]
name = "llamapipe"
base_url = "{URL}/v1"
wire_api = "responses"
"""
)
work = home / "work"
work.mkdir()
command = [f"{BIN}/codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
done = subprocess.run(
    [*command, "-C", str(work), "Write one, two and three into done.txt."],
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
assert (work / "done.txt").read_text() == "one\ntwo\nthree\n", done.stdout + done.stderr
assert "DONE" in done.stdout, done.stdout
print("did: a session of four turns with three commands (responses, streamed)")
