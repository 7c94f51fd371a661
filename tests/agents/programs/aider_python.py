"""aider-chat: its command edits a file by what the model answers."""

import os
import subprocess
import sys
from pathlib import Path

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
work = Path(os.environ["HOME"]) / "work"
work.mkdir()
file = work / "greet.py"
file.write_text('def greet():\n    return "hello"\n')
command = [str(Path(sys.executable).with_name("aider")), "--model", f"openai/{MODEL}"]
options = (
    "--no-git --yes-always --no-check-update --no-show-model-warnings --analytics-disable --no-analytics"
)
options += (
    " --edit-format whole --no-show-release-notes --map-tokens 0 --no-gitignore --no-auto-lint --no-pretty"
)
done = subprocess.run(
    [*command, *options.split(), "--message", 'Make greet return "goodbye" instead of "hello".', "greet.py"],
    cwd=work,
    env={**os.environ, "OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "none"},
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    check=False,
)
assert done.returncode == 0, done.stdout + done.stderr
assert "goodbye" in file.read_text(), done.stdout + done.stderr
print("did: an edit of a file (streamed)")
