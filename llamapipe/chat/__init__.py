"""Chat: from messages to the text of a prompt, and from generated text to an answer with reasoning and tool calls.

Modules here work on text and import neither the engine nor the model: callers pass in what they need of the
vocabulary. ``chat_format`` makes the grammar and the parser of a template's answers, from the markers that
``_call_format`` finds.
"""
