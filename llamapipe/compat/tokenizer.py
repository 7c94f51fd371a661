"""Converts text to tokens and back, in bytes, as llama-cpp-python does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llamapipe.arguments import check_tokens
from llamapipe.llama.model import Model

if TYPE_CHECKING:
    from llamapipe.compat.base import LlamaBase
else:
    LlamaBase = Any  # base.py imports this module; annotations still resolve


class LlamaTokenizer:
    """The tokenizer of a ``Llama``, or of a ``llamapipe.Model``. Any thread. Raises TypeError for other objects."""

    def __init__(self, llama: LlamaBase | Model) -> None:
        model = getattr(llama, "lp_model", llama)
        if not isinstance(model, Model):
            raise TypeError(f"llama must be a Llama or a llamapipe.Model, not {type(llama).__name__}")
        self._model = model
        self._vocab = model.vocab

    def __repr__(self) -> str:
        return f"<LlamaTokenizer n_vocab={self._vocab.n_vocab}>"

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Return the tokens of UTF-8 text. Raises TypeError for a str, UnicodeDecodeError for other bytes."""
        if not isinstance(text, bytes):
            raise TypeError(f"text must be bytes, not {type(text).__name__}: write text.encode()")
        return self._vocab.tokenize(text.decode(), add_special=add_bos, parse_special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the bytes of tokens; control tokens have none unless ``special``. ``prev_tokens`` has no effect."""
        del prev_tokens
        piece = self._vocab.written_piece if special else self._vocab.piece
        text = b"".join(piece(token) for token in tokens)
        # SentencePiece vocabularies begin a text with a space.
        return text[1:] if len(tokens) and tokens[0] == self._vocab.bos and text[:1] == b" " else text

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Return the tokens of a str."""
        return self.tokenize(text.encode("utf-8", "ignore"), add_bos, special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without bytes that do not form characters."""
        return self.detokenize(tokens).decode("utf-8", "ignore")


class PromptMaker:
    """Makes the tokens of a prompt, parsing special tokens. With a suffix, the model fills the gap before it.

    ``spm_infill``: the suffix is written before the prefix.
    """

    def __init__(self, model: Model, tokenizer: LlamaTokenizer, spm_infill: bool) -> None:
        self._vocab, self._tokenizer, self._spm = model.vocab, tokenizer, spm_infill
        self._fim = model.vocab.fim_tokens

    def __repr__(self) -> str:
        return f"<PromptMaker fim={self._fim}>"

    def tokens(self, prompt: str | Sequence[int], suffix: str | None) -> list[int]:
        """Return the tokens; a prompt of tokens is returned unchanged. Raises TypeError and ValueError."""
        if isinstance(prompt, (bytes, bytearray)):  # bytes would count as token ids
            raise TypeError("prompt must be a str or a list of token ids, not bytes: write prompt.decode()")
        if not isinstance(prompt, Iterable):
            raise TypeError(f"prompt must be a str or a list of token ids, not {type(prompt).__name__}")
        if suffix is None:
            if isinstance(prompt, str):
                tokens = self._tokenizer.encode(prompt)
            else:
                tokens = check_tokens("prompt", prompt, self._vocab.n_vocab)
            bos = self._vocab.bos
            return [bos] if not tokens and bos is not None else tokens
        if not isinstance(prompt, str):
            raise TypeError("suffix needs a prompt that is a str")
        if self._fim is None:
            raise ValueError("suffix needs a model with tokens for filling in the middle; this one has none")
        before = [self._fim.prefix, *self._tokenizer.encode(prompt, False, False)]
        after = [self._fim.suffix, *self._tokenizer.encode(suffix, False, False)]
        start = [self._vocab.bos] if self._vocab.add_bos and self._vocab.bos is not None else []
        return start + (after + before if self._spm else before + after) + [self._fim.middle]
