"""Turns token pieces into the text a caller sees.

Pieces may split a UTF-8 character, so a character appears once it is complete. No part of a stop string is ever shown.
Everything here is plain Python, fed by one thread at a time.
"""

from llamapipe.text.stream import StopChecker, TextStream, Utf8Assembler

__all__ = ["StopChecker", "TextStream", "Utf8Assembler"]
