"""llm: its command with a model of extra-openai-models.yaml: a prompt, a stream, a tool, a schema, embeddings."""

import json
import os
import subprocess
import sys
from pathlib import Path

URL, MODEL = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"]
home = Path(os.environ["HOME"]) / "llm"
home.mkdir()
os.environ["LLM_USER_PATH"] = str(home)
(home / "extra-openai-models.yaml").write_text(
    json.dumps(
        [
            {
                "model_id": "local",
                "model_name": MODEL,
                "api_base": f"{URL}/v1",
                "api_key_name": "none",
                "supports_tools": True,
                "supports_schema": True,
            }
        ]
    )
)
(home / "keys.json").write_text('{"none": "none"}')


def llm(*arguments: str, may_end_early: bool = False) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("llm")), *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    # A small model may call a tool again and again; then llm ends at its limit of five.
    assert done.returncode == 0 or (may_end_early and "Chain limit" in done.stderr), done.stderr
    return done.stdout + done.stderr if may_end_early else done.stdout


assert llm("-m", "local", "-o", "max_tokens", "12", "Name one colour.").strip()
assert llm("-m", "local", "--no-stream", "-o", "max_tokens", "12", "Name one colour.").strip()
city = llm("-m", "local", "--schema", "name, country", "-o", "max_tokens", "60", "Paris: name and country.")
assert "France" in json.loads(city)["country"], city
program = """\
def multiply(a: int, b: int) -> str:
    "Multiply two integers."
    return f"{a} times {b} is {a * b}. Tell the user."
"""
options = ("-o", "temperature", "0", "-o", "max_tokens", "100")
said = llm(
    "-m",
    "local",
    "--functions",
    program,
    "--td",
    *options,
    "What is 12 times 34? Use the tool multiply.",
    may_end_early=True,
)
assert "408" in said, said
print("did: stream, chat, schema, tools")
