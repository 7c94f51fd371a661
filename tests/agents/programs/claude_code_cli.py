"""@anthropic-ai/claude-code: `claude -p` runs three commands, each in its own turn, over the Messages API."""

from session import MODEL, PROMPT, URL, run

models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL")
run(
    *("claude", "-p", PROMPT, "--allowedTools", "Bash"),
    api="messages",
    **dict.fromkeys(models, MODEL),
    ANTHROPIC_BASE_URL=URL,
    ANTHROPIC_API_KEY="none",
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    CLAUDE_CODE_MAX_OUTPUT_TOKENS="1000",
)
