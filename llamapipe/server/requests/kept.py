"""Connects a request to the store: what the answer continues, and what is kept of it.

Open it to change which answers are stored, and what a request sees of earlier ones.

An answer is stored when it ends, before the client learns that it has ended, so the client's next request finds it in
any process. If it cannot be stored, it is sent nevertheless and says so. If the client hangs up first, nothing is
stored. An answer in the background is stored before it begins and updated when it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from llamapipe._messages import quoted
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import QUOTA, ApiError
from llamapipe.server.store.answers import Item, NewAnswer, Store, TooMuchError, UnfinishedError
from llamapipe.server.store.database import Database, FullError, MissingError, StoreError
from llamapipe.server.store.files import InUseError
from llamapipe.server.store.runs import Runs

T = TypeVar("T")
NOT_STORED = b"x-llamapipe-not-stored"
NO_STORE = "this server stores no answers (llamapipe serve --store FILE does)"


def store_of(exchange: Exchange) -> Store:
    """Return the server's store. Raises ApiError 404 if it has none."""
    store = exchange.gate.store
    if store is None:
        raise ApiError(404, NO_STORE, code="not_found")
    return store


async def read(
    exchange: Exchange, store: Database, function: Callable[..., T], *arguments: Any, param: str | None = None
) -> T:
    """Run a database's ``function(owner, *arguments)``, which reads, in a thread. Raises ApiError."""
    owner = exchange.gate.owner_of(exchange)
    try:
        return await exchange.gate.convert(store.read, function, owner, *arguments, size=0)
    except MissingError as e:
        raise missing_error(e, param) from None
    except UnfinishedError as e:
        raise ApiError(400, f"{e}: wait until its status is completed", param) from None
    except StoreError as e:
        store.tell(e)
        raise ApiError(500, f"what is stored cannot be read: {e}", code="store_failed") from None


async def write(
    exchange: Exchange, store: Database, function: Callable[..., T], *arguments: Any, param: str | None = None
) -> T:
    """Run a database's ``function(owner, *arguments)``, which writes. Raises ApiError."""
    try:
        return await store.write(function, exchange.gate.owner_of(exchange), *arguments)
    except MissingError as e:
        raise missing_error(e, param) from None
    except InUseError:
        raise ApiError(
            400, "a batch that has not ended reads this file: cancel the batch first", "id"
        ) from None
    except FullError as e:
        raise _full_error(e) from None
    except StoreError as e:
        store.tell(e)
        raise ApiError(507, f"the change cannot be stored: {e}", code="store_failed") from None


def _full_error(error: FullError) -> ApiError:
    """Return the error for data that does not fit into a client's share."""
    if error.is_too_large:
        return ApiError(413, str(error), code="too_large")
    if error.fits_later:
        return ApiError(429, f"{error}; try again later", code="too_many_requests")
    return ApiError(429, f"You exceeded your current quota: {error}", code=QUOTA)


def missing_error(error: MissingError, param: str | None = None) -> ApiError:
    """Return the error for an id that does not exist or belongs to another key."""
    if param == "previous_response_id":  # clients know this status and this code
        return ApiError(
            400,
            f"Previous response with id {quoted(error.id)} not found: it was deleted, is too old or was not stored; "
            "send the whole input",
            param,
            "previous_response_not_found",
        )
    kind = "Response" if error.kind == "answer" else error.kind.capitalize()
    if param == "after" and error.kind != "item":  # what is to be listed is named in the path
        param = None
    return ApiError(404, f"{kind} with id {quoted(error.id)} not found", param, "not_found")


class Kept:
    """One answer's connection to the store; make it with ``connect_to_store``.

    ``earlier``: the items that come before the input. ``id``: the answer's id without its prefix. ``is_stored``:
    whether it will be or was stored. ``previous``, ``conversation``: the id of the answer or conversation that it
    continues.
    """

    def __init__(
        self, exchange: Exchange, previous: str | None, conversation: str | None, is_stored: bool
    ) -> None:
        self._exchange = exchange
        self._after: int | None = None
        self.previous = previous
        self.conversation = conversation
        self.earlier: Sequence[Item] = ()
        self.is_stored = is_stored
        self.id = exchange.gate.answer_id(exchange) if is_stored else exchange.id

    def __repr__(self) -> str:
        return f"<Kept {self.id} n_earlier={len(self.earlier)}>"

    async def load(self, n_items: int) -> None:
        """Read the items that the answer continues. ``n_items``: the number of items in its input. Raises ApiError."""
        exchange = self._exchange
        if self.previous is None and self.conversation is None:
            return
        settings, store = exchange.gate.settings, store_of(exchange)
        param = "conversation" if self.previous is None else "previous_response_id"
        most = (settings.max_messages - n_items, settings.max_body_bytes, f"resp_{self.id}")
        try:
            context = await read(
                exchange, store, store.earlier, self.previous, self.conversation, *most, param=param
            )
        except TooMuchError as e:
            raise ApiError(
                400,
                f"{param}: there are {e.n_items} items of {e.n_bytes} bytes before the input; this server takes "
                f"{settings.max_messages} in all (--max-messages), {settings.max_body_bytes} bytes (--max-body-bytes): "
                "start again with a summary",
                param,
            ) from None
        self.earlier, self._after = context.items, context.after
        exchange.hold_more(context.n_bytes)

    async def keep(self, response: Mapping[str, Any], items: Sequence[Item], output: Sequence[Item]) -> None:
        """Store the finished answer. If that fails, ``is_stored`` and a header say so."""
        if not self.is_stored:
            return
        exchange, store = self._exchange, self._exchange.gate.store
        assert store is not None
        answer = self._new_answer(response, items, output)
        if answer.worker is not None:
            await write(exchange, store, store.add_answer, answer)
            return
        try:
            await store.write(store.add_answer, exchange.gate.owner_of(exchange), answer)
        except MissingError as e:
            self._note_not_stored(f"{e} any longer")
        except StoreError as e:
            store.tell(e)
            self._note_not_stored(str(e))

    async def keep_for_later(
        self, response: Mapping[str, Any], items: Sequence[Item], body: bytes, events: Sequence[bytes]
    ) -> None:
        """Store an answer to be computed later from a request's body. Raises ApiError.

        ``events``: see ``Runs.add``.
        """
        settings, store = self._exchange.gate.settings, store_of(self._exchange)
        answer = self._new_answer(response, items, ())._replace(is_listed=False)
        limits = settings.max_background, settings.store_bytes
        await write(self._exchange, store, Runs(store).add, answer, body, events, *limits)

    def _new_answer(
        self, response: Mapping[str, Any], items: Sequence[Item], output: Sequence[Item]
    ) -> NewAnswer:
        is_listed = self.conversation is not None and response["status"] != "failed"
        body = {name: value for name, value in response.items() if name != "output"}
        worker = self._exchange.gate.inside_of(self._exchange).worker
        return NewAnswer(
            response["id"],
            body,
            items,
            output,
            self.previous,
            self.conversation,
            self._after,
            is_listed,
            worker,
        )

    def _note_not_stored(self, why: str) -> None:
        self.is_stored = False
        reason = " ".join(why.encode("ascii", "replace").decode().split())
        self._exchange.answer_headers.append((NOT_STORED, reason.encode()))


def connect_to_store(
    exchange: Exchange,
    stores: bool | None,
    previous: str | None,
    conversation: str | Mapping[str, Any] | None,
) -> Kept:
    """Return the connection of a request to the store. Raises ApiError 400, 404."""
    if previous is not None and conversation is not None:
        raise ApiError(
            400, "previous_response_id and conversation do not go together: give one of them", "conversation"
        )
    if isinstance(conversation, Mapping):
        names, conversation = conversation.keys(), conversation.get("id")
        if not isinstance(conversation, str) or len(names) > 1:
            raise ApiError(400, 'conversation must be an id, or {"id": "conv_…"}', "conversation")
    if exchange.gate.store is None:
        for name, stored_id in (("previous_response_id", previous), ("conversation", conversation)):
            if stored_id is not None:
                raise ApiError(400, f"{name} is not supported: {NO_STORE}; send the whole input", name)
        return Kept(exchange, None, None, False)
    if stores is False and conversation is not None:
        raise ApiError(
            400,
            "store is false, and the answer would be stored in the conversation; leave one of them out",
            "store",
        )
    return Kept(exchange, previous, conversation, stores is not False)


async def resolve_references(exchange: Exchange, items: Sequence[Item], param: str) -> list[Item]:
    """Return the items with stored ones in place of references to them. Raises ApiError 404, which names ``param``.

    Without a store, references are left as they are.
    """
    places = {i: item_id for i, item in enumerate(items) if (item_id := _reference(item)) is not None}
    if not places or exchange.gate.store is None:
        return list(items)
    store = exchange.gate.store
    stored = await read(exchange, store, store.read_referenced, list(places.values()), param=param)
    whole = list(items)
    for i, item in zip(places, stored, strict=True):
        whole[i] = item
    return whole


def _reference(item: Mapping[str, Any]) -> str | None:
    """Return the id of a reference, which may leave out its type."""
    item_id = item.get("id")
    is_one = item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item)
    return item_id if is_one and isinstance(item_id, str) else None
