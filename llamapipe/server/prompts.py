"""Turns the prompts of a request into token ids: text, tokens, lists of them, and text to be filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llamapipe.errors import InvalidRequestError
from llamapipe.server.errors import ApiError
from llamapipe.server.wire.openai import Prompt

if TYPE_CHECKING:
    from llamapipe.server.state import ServerState

_LONG = 4096  # characters; a longer text is tokenized in a thread, to keep the event loop free


async def tokenized(
    state: ServerState, text: str, add_special: bool = True, parse_special: bool = True
) -> list[int]:
    """The tokens of a text, with at most one BOS. Raises ValueError for text that the vocabulary cannot express.

    A text of more than ``max_text_characters`` is refused if it cannot fit the context, before it is tokenized.

    Clients of this API render templates themselves. So the text of a control token becomes that token, as on other
    servers.
    """
    vocab = state.engine.model.vocab
    refuse_long(state, "text", len(text))
    if len(text) < _LONG:
        tokens = vocab.tokenize(text, add_special, parse_special)
    else:
        tokens = await state.in_thread(vocab.tokenize, text, add_special, parse_special, size=len(text))
    return tokens[1:] if vocab.bos is not None and tokens[:2] == [vocab.bos] * 2 else tokens


def refuse_long(state: ServerState, what: str, n_characters: int) -> None:
    """Raises InvalidRequestError for a text that cannot fit the context, if it is longer than the server allows."""
    most, n_ctx = state.settings.max_text_characters, state.engine.n_ctx
    if n_characters > most and state.engine.model.vocab.least_tokens(n_characters) >= n_ctx:
        raise InvalidRequestError(
            f"the {what} has {n_characters} characters and cannot fit n_ctx, which is {n_ctx}; the limit of this "
            f"server for such a one is {most} (--max-text-characters): shorten it"
        )


def refuse_long_chat(state: ServerState, messages: Sequence[Mapping[str, Any]]) -> None:
    """The same for the contents of a conversation, before it is rendered."""
    refuse_long(state, "conversation", sum(_n_characters(one.get("content")) for one in messages))


def _n_characters(content: object) -> int:
    """The characters of a message's content: text, or parts with text."""
    if isinstance(content, list):
        content = [part.get("text") if isinstance(part, dict) else part for part in content]
        return sum(len(text) for text in content if isinstance(text, str))
    return len(content) if isinstance(content, str) else 0


def check_n_messages(state: ServerState, given: object, name: str) -> None:
    """Raises ApiError 400 for a conversation of more messages than the server allows, before any is looked at."""
    most = state.settings.max_messages
    if isinstance(given, list) and len(given) > most:
        raise ApiError(
            400,
            f"{name} has {len(given)} items; the limit of this server is {most} (--max-messages): send the last ones",
            name,
        )


async def prompts_of(
    state: ServerState,
    given: Prompt,
    name: str,
    add_special: bool = True,
    parse_special: bool = True,
    suffix: str | None = None,
    n_last: int | None = None,
) -> list[list[int]]:
    """Each prompt as token ids. Raises ApiError 400, with the prompt's index, for a bad prompt.

    ``n_last``: use the last so many tokens; -1: as many as fit.
    """
    if n_last is not None and n_last < -1:
        raise ApiError(
            400, f"truncate_prompt_tokens is {n_last}; it must be -1 or more", "truncate_prompt_tokens"
        )
    if n_last == -1:
        n_last = state.engine.n_ctx - 1
    if isinstance(given, str):
        items: list[str | list[int]] = [given]
    elif not given:
        raise ApiError(400, f"{name} is empty; give at least one", name)
    elif all(isinstance(item, int) for item in given):
        items = [given]  # type: ignore[list-item]
    elif any(isinstance(item, int) for item in given):
        raise ApiError(400, f"{name} mixes token ids and whole prompts", name)
    else:
        items = given  # type: ignore[assignment]
    prompts: list[list[int]] = []
    for index, item in enumerate(items):
        try:
            if isinstance(item, str):
                tokens = await _text(state, item, add_special, parse_special, suffix)
            elif suffix is not None:
                raise ApiError(400, "suffix needs a prompt of text, not of token ids", "suffix")
            else:
                tokens = item
            if n_last:
                tokens = tokens[-n_last:]
            _check(state, tokens)
        except ValueError as e:
            place = f" ({name} {index} of the list)" if len(items) > 1 else ""
            code = "context_length_exceeded" if "n_ctx" in str(e) else None
            raise ApiError(400, f"{e}{place}", name, code) from None
        prompts.append(tokens)
    return prompts


def _check(state: ServerState, tokens: list[int]) -> None:
    n_vocab, n_ctx = state.engine.model.n_vocab, state.engine.n_ctx
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token")
    if len(tokens) >= n_ctx:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; n_ctx is {n_ctx} and one must stay free: "
            "shorten it, or raise n_ctx"
        )
    wrong = next((token for token in tokens if not 0 <= token < n_vocab), None)
    if wrong is not None:
        raise ValueError(f"the token id {wrong} is not in the vocabulary, which has ids 0 to {n_vocab - 1}")


async def _text(
    state: ServerState, text: str, add_special: bool, parse_special: bool, suffix: str | None
) -> list[int]:
    if suffix is None:
        return await tokenized(state, text, add_special, parse_special)
    fim = state.engine.model.vocab.fim_tokens
    if fim is None:
        raise ApiError(400, "suffix: this model has no tokens for filling in the middle", "suffix")
    before = await tokenized(state, text, False, parse_special)
    after = await tokenized(state, suffix, False, parse_special)
    vocab = state.engine.model.vocab
    bos = [vocab.bos] if add_special and vocab.add_bos and vocab.bos is not None else []
    return [*bos, fim.prefix, *before, fim.suffix, *after, fim.middle]


def n_prompts(given: Prompt) -> int:
    """How many prompts a request gives, without a look at each: their number is checked before any is tokenized."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return 1
    return len(given)


def total_choices(state: ServerState, n: int) -> None:
    """Raises ApiError 400 if a request asks for more choices than the server allows."""
    most = state.settings.max_n
    if n > most:
        raise ApiError(
            400, f"the request asks for {n} choices in all; the limit of this server is {most}", "n"
        )
