"""@qwen-code/qwen-code: `qwen -p` runs three commands, each in its own turn, over OpenAI's chat API."""

import json

from session import HOME, MODEL, PROMPT, URL, run

(HOME / ".qwen").mkdir()
settings = {
    "privacy": {"usageStatisticsEnabled": False},
    "telemetry": {"enabled": False},
    "general": {"enableAutoUpdate": False},
    "security": {"auth": {"selectedType": "openai"}},
}
(HOME / ".qwen" / "settings.json").write_text(json.dumps(settings))
keys = {"OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}
run("qwen", "--yolo", "-p", PROMPT, api="chat", **keys)
