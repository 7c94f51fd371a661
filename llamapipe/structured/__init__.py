"""Structured output: constraints on the tokens that a request may generate.

JSON schemas, regular expressions and Lark grammars are compiled by llguidance (extra ``structured``); a ``Guide``
follows one request through the result. GBNF grammars run in llama.cpp, after a check that refuses grammars on which it
would abort or loop forever.
"""
