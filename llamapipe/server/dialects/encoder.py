"""The interface of answer encoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

from llamapipe.results import ChatDelta, Delta

Part_contra = TypeVar("Part_contra", ChatDelta, Delta, contravariant=True)
PromptAt = Literal["begin", "end"] | None


class Counts(NamedTuple):
    """The token counts so far, over all prompts and choices.

    ``n_prompt``: tokens of the prompts, including the ``n_cached`` tokens. ``n_drafted``, ``n_accepted``: drafted
    tokens that were computed, and those that were accepted.
    """

    n_prompt: int
    n_cached: int = 0
    n_completion: int = 0
    n_drafted: int = 0
    n_accepted: int = 0


class Encoder(Protocol[Part_contra]):
    """Encodes one streamed answer. Each method returns the bytes to send, which may be empty.

    ``prompt_at``: the method that gets the prompt's tokens, if any.
    """

    prompt_at: PromptAt = None

    def begin(self, index: int, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Begin choice ``index``, when its first token arrives: return its role, if no part has the role."""
        return b""

    def part(self, index: int, part: Part_contra, counts: Counts) -> bytes:
        """Encode a part of a choice: text, reasoning, calls, log-probabilities. The last part has a finish reason."""
        raise NotImplementedError

    def end(self, counts: Counts, prompt: Sequence[int]) -> bytes:
        """End the stream, after all choices are complete."""
        return b""
