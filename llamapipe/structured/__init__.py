"""Structured output: constraints on the tokens that a request may generate.

llguidance (extra ``structured``) compiles JSON schemas, regular expressions and Lark grammars; a ``Guide`` follows one
request through the result. GBNF grammars run in llama.cpp, after a check that refuses grammars on which llama.cpp would
abort or loop forever.
"""
