"""Makes prompts for filling in the middle, from the text around a gap and from other files.

Open this file to change how such a prompt is written, or what is left out of a file that is longer than the context. A
model that can fill in has one token each for the text before the gap, the text after it and the gap; some models also
have tokens that separate files. The prompt is the same as in llama.cpp's server.

An editor sends nearly the same prompt with each keystroke, and the prefix cache keeps the common beginning. So every
number that decides what is left out is rounded to a step: the cut stays in place for many keystrokes, then moves by a
whole step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from llamapipe.arguments import check_choice, check_int
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.vocab import FimTokens, Vocab

FimOrder = Literal["psm", "spm"]
# Names and texts of files, the oldest first. A mapping comes from a request's JSON.
FimExtra: TypeAlias = Iterable[tuple[str, str] | Mapping[str, str]]
_STEP = 256  # tokens; text is left out in multiples of this number
_STEPS = 16  # minimum number of steps in a prompt
_SUFFIX_SHARE = 4  # the suffix gets up to a quarter of the room even if the prefix could fill it
_MOST_CHARACTERS = 16  # assumed average per token; longer texts are cut before they are tokenized
# llama.cpp's server writes these names where a client gives none.
_PROJECT, _THIS_FILE, _OTHER_FILE = "myproject\n", "filename", "tmp"
_SNIPPET = "\n\n--- snippet ---\n\n"  # separates files for models without a token for that


class FimText(NamedTuple):
    """A gap to fill. ``extra``: other files, the most important last. ``filename``: the gap's file."""

    prefix: str
    suffix: str
    extra: tuple[tuple[str, str], ...] = ()
    filename: str | None = None
    order: FimOrder = "psm"


class FimPrompt(NamedTuple):
    """The tokens of a prompt. ``is_cut``: whether some text did not fit and was left out."""

    tokens: list[int]
    is_cut: bool


def fim_text(prefix: Any, suffix: Any, extra: Any, filename: Any, order: Any) -> FimText:
    """Return the checked arguments. Raises TypeError, ValueError."""
    for name, value in (("prefix", prefix), ("suffix", suffix), ("filename", filename)):
        if not isinstance(value, str) and (value is not None or name != "filename"):
            raise TypeError(f"{name} must be a str, not {type(value).__name__}")
    check_choice("order", order, get_args(FimOrder))
    if isinstance(extra, (str, bytes, Mapping)) or not isinstance(extra, Iterable):
        raise TypeError(
            f"extra must be a list of (filename, text), not {type(extra).__name__}: extra=[('utils.py', text)]"
        )
    return FimText(prefix, suffix, tuple(_file(item, i) for i, item in enumerate(extra)), filename, order)


def _file(item: Any, index: int) -> tuple[str, str]:
    if isinstance(item, Mapping):
        wrong = [key for key in item if key not in ("filename", "text")]
        if wrong or "text" not in item:
            raise ValueError(f"extra {index} must have the keys filename and text")
        name, text = item.get("filename", _OTHER_FILE), item["text"]
    elif isinstance(item, Sequence) and not isinstance(item, (str, bytes)) and len(item) == 2:
        name, text = item
    else:
        raise TypeError(f"extra {index} must be (filename, text), not {type(item).__name__}")
    if not isinstance(name, str) or not isinstance(text, str):
        raise TypeError(
            f"extra {index} must hold two str, not {type(name).__name__} and {type(text).__name__}"
        )
    return name, text


def fim_room(n_ctx: int, n_new: int | None) -> int:
    """Return how many tokens a prompt may have if ``n_new`` are to be generated; None: a quarter of ``n_ctx``.

    A prompt always gets at least half of the context. Requests whose ``n_new`` differs by only a few tokens get the
    same room, so they share a prefix.
    """
    step = _step(n_ctx)
    return n_ctx - min(_round_up(max(n_ctx // 4 if n_new is None else n_new, 1), step), n_ctx // 2)


def fim_prompt(vocab: Vocab, text: FimText, n_max: int | None = None) -> FimPrompt:
    """Make a prompt of at most ``n_max`` tokens; None: no limit. Names of control tokens in the text stay text.

    If not everything fits, the prefix keeps its end and the suffix its beginning. The suffix gets a quarter of the
    room, or more if the prefix leaves it. The rest holds whole files of ``extra``, beginning with the last one.

    Raises InvalidRequestError if the model has no tokens that mark a gap, or if no text would fit.
    """
    fim = fim_tokens_of(vocab)
    bos = [vocab.bos] if vocab.add_bos and vocab.bos is not None else []
    head, tail = _around_files(vocab, fim, text)
    if n_max is None:
        before, after = (vocab.tokenize(part, add_special=False) for part in (text.prefix, text.suffix))
        files, is_cut = [_other_file(vocab, fim, *file) for file in text.extra], False
    else:
        n_marks = len(head) + len(tail) + len(bos) + 3
        room = check_int("n_max", n_max, 1, 2**31 - 1) - n_marks
        if room < _SUFFIX_SHARE:
            raise InvalidRequestError(
                f"a prompt for filling in may have {n_max} tokens here, and its marks take {n_marks}: raise n_ctx"
            )
        before, after, files, is_cut = _cut(vocab, fim, text, room, _step(n_max))
    ends = [fim.prefix, *before], [fim.suffix, *after]
    first, second = ends if text.order == "psm" else ends[::-1]
    others = [token for file in files for token in file]
    return FimPrompt([*head, *others, *tail, *bos, *first, *second, fim.middle], is_cut)


def fim_tokens_of(vocab: Vocab) -> FimTokens:
    """Return the tokens that mark a gap. Raises InvalidRequestError if the model has none."""
    if vocab.fim_tokens is None:
        raise InvalidRequestError(
            "this model has no tokens for filling in the middle (before, after and between the texts); use one that "
            "was trained for it, such as Qwen2.5-Coder, or give a prompt of text"
        )
    return vocab.fim_tokens


def _around_files(vocab: Vocab, fim: FimTokens, text: FimText) -> tuple[list[int], list[int]]:
    """Return the tokens before and after the other files, if there are any or the file has a name."""
    if not text.extra and text.filename is None:
        return [], []
    head = [] if fim.repository is None else [fim.repository, *vocab.tokenize(_PROJECT, add_special=False)]
    name = _THIS_FILE if text.filename is None else text.filename
    return head, [] if fim.file is None else _file_head(vocab, fim.file, name)


def _other_file(vocab: Vocab, fim: FimTokens, name: str, text: str) -> list[int]:
    start = (
        vocab.tokenize(_SNIPPET, add_special=False) if fim.file is None else _file_head(vocab, fim.file, name)
    )
    return start + vocab.tokenize(text, add_special=False)


def _file_head(vocab: Vocab, file: int, name: str) -> list[int]:
    return [file, *vocab.tokenize(f"{name}\n", add_special=False)]


# ---- what is left out
def _step(n: int) -> int:
    return max(min(_STEP, n // _STEPS), 1)


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


def _cut(
    vocab: Vocab, fim: FimTokens, text: FimText, room: int, step: int
) -> tuple[list[int], list[int], list[list[int]], bool]:
    """Return the tokens that fit into ``room``: before the gap, after it, other files; and whether text was cut."""
    most = room * _MOST_CHARACTERS
    start = _round_up(max(len(text.prefix) - most, 0), step * _MOST_CHARACTERS)
    before = vocab.tokenize(text.prefix[start:], add_special=False)
    after = vocab.tokenize(text.suffix[:most], add_special=False)
    is_cut = start > 0 or len(text.suffix) > most
    # Each number changes only when a text has grown by a step, not with each keystroke.
    n_after = min(
        _round_up(len(after), step), max(room // _SUFFIX_SHARE, room - _round_up(len(before), step))
    )
    is_cut |= len(after) > n_after
    del after[n_after:]
    n_dropped = min(_round_up(max(len(before) - (room - n_after), 0), step), len(before))
    is_cut |= n_dropped > 0
    n_left = room - n_after - _round_up(len(before) - n_dropped, step)
    del before[:n_dropped]
    files: list[list[int]] = []
    for name, content in reversed(text.extra):
        if len(name) + len(content) > most or len(file := _other_file(vocab, fim, name, content)) > n_left:
            is_cut = True
            break
        n_left -= len(file)
        files.insert(0, file)
    return before, after, files, is_cut
