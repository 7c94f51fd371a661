"""Chat: from messages to the text of a prompt, and from generated text to an answer with reasoning and tool calls.

Nothing here knows an engine or a model: modules work on text, and on what the caller says of a vocabulary. The
subpackage ``calls`` knows how templates write tool calls.
"""
