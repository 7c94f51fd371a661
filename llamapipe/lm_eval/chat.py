"""The chat templates of a model as the harness uses them: chosen by name, and with a last message to continue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llamapipe.chat.template import ChatTemplate
from llamapipe.errors import InvalidRequestError

if TYPE_CHECKING:
    from llamapipe.llama.model import Model


class ModelChat:
    """Renders conversations with the template in use. One thread at a time.

    ``enable_thinking``: given to templates, unless it is None. A BOS that the template writes stays in the text.
    """

    def __init__(self, model: Model, enable_thinking: bool | None = None) -> None:
        self._model = model
        self._name: str | None = None
        self._compiled: dict[str, ChatTemplate] = {}
        self._arguments = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    @property
    def text(self) -> str | None:
        """The source of the template in use, None where the model has none."""
        return self._model.chat_prompts.text(self._name)

    def choose(self, name: str | None) -> str:
        """Uses the template of this name from now on, and returns it. Raises InvalidRequestError if there is none."""
        self._name = name
        if not self.text:
            named = "" if name is None else f" named {name!r}"
            raise InvalidRequestError(
                f"{self._model.path.name} has no chat template{named}; run without --apply_chat_template"
            )
        return self.text

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """The prompt for a conversation; without ``add_generation_prompt`` it ends inside the last message.

        Raises TypeError and InvalidRequestError, see ``ChatTemplate.render``.
        """
        text = self.choose(self._name)
        if text not in self._compiled:
            self._compiled[text] = self._model.chat_prompts.compiled(text, strips_bos=False)
        return self._compiled[text].render(
            messages, continue_last=not add_generation_prompt, template_args=self._arguments
        )
