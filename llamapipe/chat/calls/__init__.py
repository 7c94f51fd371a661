"""The text of tool calls and reasoning: how a template writes them, grammars for them, and reading them.

``probe`` finds a template's markers, ``grammar`` writes them as a Lark grammar, and readers take them apart again.
Everything here is plain Python on text.
"""
