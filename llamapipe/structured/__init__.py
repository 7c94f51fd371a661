"""Structured output: constraints on the tokens a request may generate.

JSON schemas, regular expressions and Lark grammars are compiled by llguidance (extra ``structured``); a ``Guide``
follows one request through the result. GBNF grammars run in llama.cpp, after a check that refuses any grammar on which
llama.cpp would abort or loop forever.
"""
