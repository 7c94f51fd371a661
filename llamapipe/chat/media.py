"""Takes images and sounds out of messages before a template sees them, and finds their places in its output.

Open this file to change which parts of a message are images or sounds, and how a prompt refers to them.

The number of an image or a sound, between two marks, replaces it. A mark is a character that the conversation does not
contain. A template copies marks and number like any other text. So templates need no support for images, and a caller's
text cannot pass for an image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llamapipe.chat.control_text import unused_mark
from llamapipe.errors import InvalidRequestError
from llamapipe.media.decode import Given, is_media, media_in, path_below
from llamapipe.structured.schema import check_depth


def _place(index: int, i: int) -> str:
    return f"messages[{index}]: part {i} of the content"


def _parts(messages: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield the index of a message, the index of a part in its content, and the part, for all parts."""
    for index, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        for i, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
            yield index, i, part


def _changed(messages: Sequence[Any], change: Callable[[int, int, Any], list[Any]]) -> list[Any]:
    """Return the messages with each part of a content replaced by the parts that ``change`` returns for it.

    ``change`` gets the index of the message, the index of the part, and the part.
    """
    return [
        {
            **message,
            "content": [new for i, part in enumerate(message["content"]) for new in change(index, i, part)],
        }
        if isinstance(message, Mapping) and isinstance(message.get("content"), (list, tuple))
        else message
        for index, message in enumerate(messages)
    ]


def first_media(messages: Any) -> tuple[str, str] | None:
    """Return the place and the part's type of the first image or sound in messages; None if there is none."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        return None
    media = ((_place(index, i), part["type"]) for index, i, part in _parts(messages) if is_media(part))
    return next(media, None)


def with_paths_below(messages: Any, folder: Path | None) -> Any:
    """Return a client's messages with each path of an image or a sound resolved below ``folder``.

    Raises as ``path_below`` does. ``check_messages`` finds all other faults of messages.
    """
    if first_media(messages) is None:
        return messages

    def resolved(index: int, i: int, part: Any) -> list[Any]:
        value = part.get(part["type"]) if is_media(part) and part["type"] in ("image", "audio") else None
        if not isinstance(value, str) or value[:5].lower() == "data:":
            return [part]
        return [{**part, part["type"]: path_below(_place(index, i), value, folder)}]

    return _changed(messages, resolved)


def taken_media(messages: Any) -> tuple[Any, str, list[Given]]:
    """Return the messages with text in place of media, the mark around the media's numbers, and the media.

    The messages must have at least one image or sound. Raises InvalidRequestError and TypeError, which name the place.
    """
    media: list[Given] = []
    numbers: dict[tuple[int, int], int] = {}
    for index, i, part in _parts(messages):
        if is_media(part):
            medium = media_in(part, _place(index, i))
            assert medium is not None
            numbers[index, i] = len(media)
            media.append(medium)
    others = _changed(messages, lambda index, i, part: [] if (index, i) in numbers else [part])
    check_depth("messages are", others)
    mark = unused_mark(others).character

    def marked(index: int, i: int, part: Any) -> list[Any]:
        n = numbers.get((index, i))
        return [part if n is None else {"type": "text", "text": f"{mark}{n}{mark}"}]

    return _changed(messages, marked), mark, media


def check_shown(messages: Any, mark: str, tokens: Sequence[int], places: Sequence[str]) -> None:
    """Raise InvalidRequestError if a template left out an image or a sound, or wrote it twice.

    ``tokens``: the result of ``tokenized``. ``places``: the places of all media of the call, by their numbers,
    including media of messages that were dropped.
    """
    pattern = re.compile(f"{mark}([0-9]+){mark}")
    texts = (text for message in messages for text in _texts(message.get("content")))
    asked = sorted(int(number) for text in texts for number in pattern.findall(text))
    shown = sorted(-1 - token for token in tokens if token < 0)
    if asked != shown:
        first = next((number for number in asked if shown.count(number) != 1), asked[0])
        raise InvalidRequestError(
            f"{places[first]}: the chat template shows {len(shown)} of the {len(asked)} images and sounds in the "
            "messages, and not this one; put them into messages of the user, or give another chat_template"
        )


def _texts(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, (list, tuple)) else ()
    return [part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
