"""Output that follows a grammar: JSON schemas, regular expressions and Lark by llguidance; checks of GBNF."""
