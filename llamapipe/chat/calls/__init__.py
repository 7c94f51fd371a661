"""The text formats of tool calls and reasoning: detecting a template's format, writing grammars, and parsing.

``probe`` finds a template's markers, ``grammar`` makes Lark grammars of them, and the readers parse generated text.
Everything here is plain Python on text.
"""
