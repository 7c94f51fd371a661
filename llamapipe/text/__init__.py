"""From token pieces to the text a caller sees.

Pieces may split a UTF-8 character: text appears once a character is complete. A stop string is never partly shown.
"""

from llamapipe.text.detokenizer import Utf8Assembler
from llamapipe.text.stop import StopChecker
from llamapipe.text.stream import TextStream

__all__ = ["StopChecker", "TextStream", "Utf8Assembler"]
