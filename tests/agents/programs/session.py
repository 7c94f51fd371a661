"""What the sessions of command-line agents share: three commands, each in its own turn, write a file."""

import os
import subprocess
from pathlib import Path

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
HOME = Path(os.environ["HOME"])
WORK = HOME / "work"
WORK.mkdir()
PROMPT = "Write one, two and three into done.txt."


def run(program: str, *arguments: str, api: str, **variables: str) -> None:
    """Runs an agent in the empty folder, and checks what it has done over an API of the server."""
    done = subprocess.run(
        [f"{os.environ['AGENT_BIN']}/{program}", *arguments],
        cwd=WORK,
        env={**os.environ, "PWD": str(WORK), **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (WORK / "done.txt").read_text() == "one\ntwo\nthree\n", done.stdout + done.stderr
    assert "DONE" in done.stdout, done.stdout
    print(f"did: a session of four turns with three commands ({api}, streamed)")
