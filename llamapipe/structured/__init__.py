"""Structured output: constraints on the tokens a request may generate.

JSON schemas, regular expressions and Lark grammars are compiled by llguidance (extra ``structured``). GBNF grammars are
run by llama.cpp, after a check that keeps its aborts and endless loops out.
"""
