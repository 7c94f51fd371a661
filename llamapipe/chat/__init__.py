"""Converts messages to the text of a prompt, and generated text to an answer with reasoning and tool calls.

These modules work on text and import neither the engine nor the model. Callers pass in the parts of the vocabulary that
the modules need. ``chat_format`` makes the grammar and the parser of a template's answers from the markers that
``_template_probe`` and ``_answer_markers`` find.
"""
