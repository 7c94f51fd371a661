"""Converts messages to the text of a prompt, and generated text to an answer with reasoning and tool calls.

These modules work on text and import neither the engine nor the model: callers pass in what the modules need from the
vocabulary. ``chat_format`` makes the grammar and the parser of a template's answers from the markers that
``_call_format`` finds.
"""
