"""Turns token pieces into the text that a caller sees.

Pieces may split a UTF-8 character, so a character appears once it is complete. No part of a complete stop string is
shown. The classes are plain Python. Feed each object from one thread at a time.
"""

from llamapipe.text.stream import StopChecker, TextStream, Utf8Assembler

__all__ = ["StopChecker", "TextStream", "Utf8Assembler"]
