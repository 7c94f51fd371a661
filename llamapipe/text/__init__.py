"""From token pieces to the text a caller sees: whole characters, and nothing of a stop string."""

from llamapipe.text.detokenizer import Utf8Assembler
from llamapipe.text.stop import StopChecker
from llamapipe.text.stream import TextStream

__all__ = ["StopChecker", "TextStream", "Utf8Assembler"]
