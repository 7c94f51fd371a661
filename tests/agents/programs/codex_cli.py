"""@openai/codex: `codex exec` runs three commands, each in its own turn, over the Responses API."""

from session import HOME, MODEL, PROMPT, URL, WORK, run

(HOME / ".codex").mkdir()
(HOME / ".codex" / "config.toml").write_text(
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
options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-C", str(WORK))
run("codex", "exec", *options, PROMPT, api="responses")
