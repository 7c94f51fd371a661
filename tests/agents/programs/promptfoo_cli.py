"""promptfoo: `promptfoo eval` asks by the chat API, the newer one and Anthropic's, with a tool and a schema."""

import json
import os
import subprocess
from pathlib import Path

URL, MODEL, BIN = os.environ["AGENT_URL"], os.environ["AGENT_MODEL"], os.environ["AGENT_BIN"]
work = Path(os.environ["HOME"]) / "work"
work.mkdir()
openai = {"apiBaseUrl": f"{URL}/v1", "apiKey": "none", "temperature": 0, "max_tokens": 60}
schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "country": {"type": "string"}},
    "required": ["name", "country"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": schema}}
settings = {
    "prompts": ["{{city}}: its name and country, as JSON."],
    "providers": [
        {"id": f"openai:chat:{MODEL}", "label": "chat", "config": {**openai, "response_format": form}},
        {
            "id": f"openai:responses:{MODEL}",
            "label": "responses",
            "config": {**openai, "max_output_tokens": 60},
        },
        {
            "id": f"anthropic:messages:{MODEL}",
            "label": "anthropic",
            "config": {"apiBaseUrl": URL, "apiKey": "none", "max_tokens": 60, "temperature": 0},
        },
    ],
    "tests": [
        {"vars": {"city": "Paris"}, "assert": [{"type": "contains", "value": "France"}]},
        {"vars": {"city": "Rome"}, "assert": [{"type": "contains", "value": "Ital"}]},
    ],
}
(work / "promptfooconfig.json").write_text(json.dumps(settings))
options = "--no-cache --no-share --no-table --no-progress-bar --max-concurrency 1 --output out.json"
done = subprocess.run(
    [f"{BIN}/promptfoo", "eval", "-c", "promptfooconfig.json", *options.split()],
    cwd=work,
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    check=False,
)
assert (work / "out.json").is_file(), done.stdout + done.stderr
results = json.loads((work / "out.json").read_text())["results"]
stats = results["stats"]
assert stats["successes"] == 6, json.dumps([result.get("error") for result in results["results"]])
print("did: six answers checked; chat with a schema, responses, anthropic")
