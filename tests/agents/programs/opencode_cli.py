"""opencode-ai: `opencode run` runs three commands, each in its own turn, by its provider of OpenAI's chat API."""

import json

from session import MODEL, PROMPT, URL, WORK, run

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
(WORK / "opencode.json").write_text(json.dumps(settings))
run("opencode", "run", PROMPT, api="chat")
