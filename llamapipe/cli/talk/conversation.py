"""The messages of a conversation: which of them the model sees, and files that hold them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Message = dict[str, str]
_ROLES = ("system", "user", "assistant")


class Conversation:
    """All messages so far. The oldest turns are hidden from the model when the context is full; files hold them all.

    ``system``: the system message, which is never hidden. ``messages``: the others; a turn begins with a user's.
    """

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []
        self._first = 0  # the first one that the model sees

    def __repr__(self) -> str:
        return f"<Conversation of {len(self)} messages>"

    def __len__(self) -> int:
        return len(self._head) + len(self.messages)

    @property
    def _head(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def add(self, role: str, content: str) -> None:
        """Appends a message."""
        self.messages.append({"role": role, "content": content})

    def take_back(self) -> None:
        """Removes the last message, which could not be answered."""
        del self.messages[-1]

    def take_back_turn(self) -> str | None:
        """Removes the last turn and returns the user's message, None if there is no answer."""
        if (
            len(self.messages) < 2
            or self.messages[-1]["role"] != "assistant"
            or self.messages[-2]["role"] != "user"
        ):
            return None
        text = self.messages[-2]["content"]
        del self.messages[-2:]
        self._first = min(self._first, len(self.messages))
        return text

    def clear(self) -> None:
        """Removes all messages but the system message."""
        self.messages.clear()
        self._first = 0

    def visible(self) -> list[Message]:
        """What the model sees."""
        return [*self._head, *self.messages[self._first :]]

    def fit(
        self, n_tokens: Callable[[list[Message]], int], n_ctx: int, max_tokens: int | None
    ) -> tuple[int, int]:
        """Hides the oldest turns where ``kept_messages`` drops them. Returns how many, and the prompt's tokens.

        If the last message alone fills the context, nothing is hidden, and the tokens are those of it alone.
        ``n_tokens``: counts the tokens of a prompt.
        """
        from llamapipe.chat.turns import kept_messages

        kept = list(kept_messages(self.visible(), n_tokens, n_ctx, max_tokens))
        first = len(self.messages) + len(self._head) - len(kept)
        n_hidden = sum(message["role"] == "user" for message in self.messages[self._first : first])
        self._first = first
        n = n_tokens(kept)
        return n_hidden, n if n < n_ctx else n_tokens([*self._head, self.messages[-1]])

    def save(self, path: Path) -> None:
        """Writes the messages as JSON. Raises OSError."""
        messages = [*self._head, *self.messages]
        path.write_text(json.dumps(messages, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    def load(self, path: Path) -> None:
        """Replaces all messages by those of a file, as ``save`` writes it. Raises OSError, ValueError."""
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(messages, list):
            raise ValueError(f"{path} holds no list of messages, which /save writes")
        for index, one in enumerate(messages):
            known = isinstance(one, dict) and one.keys() == {"role", "content"}
            role, content = (one["role"], one["content"]) if known else (None, None)
            if role not in _ROLES or not isinstance(content, str) or (role == "system" and index > 0):
                raise ValueError(
                    f'{path}: message {index} must be {{"role": ..., "content": "text"}} and nothing else, with the '
                    "role user or assistant; the first one may have the role system"
                )
        has_system = bool(messages) and messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self.clear()
        for one in messages[has_system:]:
            self.add(one["role"], one["content"])
