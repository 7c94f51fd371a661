"""The demo model's vocabulary: pieces learned by pair merging, encoded by llama.cpp's SPM rule.

llama.cpp's rule (`llm_tokenizer_spm_session`): write a space as U+2581, start from characters, join the
neighbours whose concatenation is the piece with the highest score, the leftmost among equals, until none is
left; a character without a piece becomes its UTF-8 bytes. Each learned piece's score is minus its rank.
"""

import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

SPACE = "\u2581"
CONTROLS = ["<unk>", "<s>", "</s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
UNK, BOS, EOS, EOT = range(4)
FIRST_BYTE = len(CONTROLS)
FIRST_PIECE = FIRST_BYTE + 256
# Merges stay within such a chunk, so that no piece crosses a word's start and digits stay single.
CHUNK = re.compile(rf"{SPACE}?[A-Za-z']+|{SPACE}?.", re.DOTALL)
CONTROL_SPLIT = re.compile("(" + "|".join(map(re.escape, CONTROLS[1:])) + ")")


def learn(texts: Iterable[str], n_vocab: int) -> list[str]:
    """Pieces, best first: printable ASCII, a space joined to digits and marks, then merges of frequent pairs.

    Returns at most `n_vocab - FIRST_PIECE` pieces (fewer when every word has become one piece).
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(CHUNK.findall(text.replace(" ", SPACE)))
    merged = [SPACE + mark for mark in '0123456789"(']
    words = {word: list(word) for word in counts if re.fullmatch(rf"{SPACE}?[A-Za-z']+", word)}
    single = [SPACE] + [chr(code) for code in range(33, 127)]
    while FIRST_PIECE + len(single) + len(merged) < n_vocab:
        pairs: Counter[str] = Counter()
        for word, parts in words.items():
            for left, right in itertools.pairwise(parts):
                pairs[left + right] += counts[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        if best not in merged:  # another pair gives the same piece
            merged.append(best)
        for parts in words.values():
            i = 0
            while i + 1 < len(parts):
                if parts[i] + parts[i + 1] == best:
                    parts[i : i + 2] = [best]
                i += 1
        words = {word: parts for word, parts in words.items() if len(parts) > 1}
    return merged + single


@dataclass
class Tokenizer:
    """Encodes and decodes with a list of learned pieces; ids: control tokens, 256 bytes, pieces by rank."""

    pieces: list[str]
    _ids: dict[str, int] = field(init=False, repr=False)
    _cache: dict[str, list[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._ids = {text: i for i, text in enumerate(self.texts())}

    def texts(self) -> list[str]:
        """The text of every id, as in the GGUF file."""
        return [*CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256)), *self.pieces]

    def scores(self) -> list[float]:
        """The score of every id."""
        return [0.0] * FIRST_PIECE + [-float(rank) for rank in range(len(self.pieces))]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; the names of control tokens in it become these tokens."""
        out: list[int] = []
        for part in CONTROL_SPLIT.split(text):
            if part in CONTROLS:
                out.append(CONTROLS.index(part))
                continue
            # No piece has a space after its first character, so parts between spaces never join.
            for chunk in re.findall(rf"{SPACE}?[^{SPACE}]+|{SPACE}", part.replace(" ", SPACE)):
                if chunk not in self._cache:
                    self._cache[chunk] = self._merge(chunk)
                out += self._cache[chunk]
        return out

    def encode_cut(self, text: str, at: int) -> list[int]:
        """Ids of `text` as if a prompt ended at character `at`; a place inside a control token's name is moved."""
        for match in CONTROL_SPLIT.finditer(text):
            if match.start() < at < match.end():
                at = match.start()
        return self.encode(text[:at]) + self.encode(text[at:])

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, control tokens by their names."""
        raw, texts = b"", self.texts()
        for i in ids:
            is_byte = FIRST_BYTE <= i < FIRST_PIECE
            raw += bytes([i - FIRST_BYTE]) if is_byte else texts[i].replace(SPACE, " ").encode()
        return raw.decode(errors="replace")

    def _merge(self, chunk: str) -> list[int]:
        parts: list[str] = list(chunk)
        after = list(range(1, len(parts) + 1))
        before = list(range(-1, len(parts) - 1))
        queue: list[tuple[int, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(parts):
                text = parts[left] + parts[right]
                if text in self._ids:
                    heapq.heappush(queue, (self._ids[text], left, right, len(text)))

        for i in range(len(parts) - 1):
            offer(i, i + 1)
        while queue:
            _, left, right, size = heapq.heappop(queue)
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != size:
                continue  # one side was joined with another piece in the meantime
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[left] < len(parts):
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])

        out: list[int] = []
        for part in parts:
            if part in self._ids:
                out.append(self._ids[part])
            elif part:
                out += [FIRST_BYTE + byte for byte in part.encode()]
        return out
