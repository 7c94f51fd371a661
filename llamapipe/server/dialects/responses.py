"""Answers of ``/v1/responses``, in the format of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamapipe.chat.results import ToolCallDelta
from llamapipe.llama.vocab import Vocab
from llamapipe.results import ChatDelta
from llamapipe.server._times import RequestTimes
from llamapipe.server._tools import ClientName, Tools, custom_input
from llamapipe.server.dialects.encoder import Counts, Encoder
from llamapipe.server.dialects.logprobs import chat_logprobs
from llamapipe.server.json_bytes import typed_event

Item = dict[str, Any]
_CUT = ("length", "timeout")
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "mcp_list_tools": "mcpl",
    "mcp_approval_request": "mcpr",
    "mcp_call": "mcp",
}


class ResponsesEncoder(Encoder[ChatDelta]):
    """Encodes the answer to one request, complete or streamed. Its output has items, one of which is open at a time.

    The server may run tools and let the model continue. Then the parts of several texts follow each other, and the
    server adds items between them. ``answer_id``: the answer's id without a prefix. ``fields``: the fields of the
    response that the request defines. ``item_of``: returns the item of a call that the client does not run, else None.
    ``is_stream``: whether methods return events; otherwise they return no bytes. ``tools``: the request's tools, with
    the client's names. ``needs_client``: the client must run or approve a call. ``n_output``: the number of tokens so
    far.
    """

    def __init__(
        self,
        answer_id: str,
        fields: Mapping[str, Any],
        vocab: Vocab,
        tools: Tools,
        times: RequestTimes,
        item_of: Callable[[ClientName], Item | None] = lambda _: None,
        is_stream: bool = True,
    ) -> None:
        self.tools = tools
        self.output: list[Item] = []
        self.needs_client = False
        self.n_output = 0
        self.finish_reason: str | None = None
        self.error: dict[str, Any] | None = None
        self._id = answer_id
        self._fields = fields
        self._vocab = vocab
        self._times = times
        self._item_of = item_of
        self._is_stream = is_stream
        self._n_events = self._n_reasoning = 0
        self._open: Item | None = None
        self._call_index = -1  # of the open call
        self._arguments = ""  # of the open call, as the model writes them
        self._calls: list[tuple[int, Item]] = []  # calls that the server must run, with their places

    def __repr__(self) -> str:
        return f"<ResponsesEncoder {self._id} {self.status} n_items={len(self.output)}>"

    # ---- the response
    @property
    def is_cut(self) -> bool:
        """Whether the text ended at a limit."""
        return self.finish_reason in _CUT

    @property
    def status(self) -> str:
        """The status of the response."""
        if self.error is not None:
            return "failed"
        if self.finish_reason is None:
            return "in_progress"
        return "incomplete" if self.is_cut else "completed"

    def response(self, n_prompt: int = 0, n_cached: int = 0) -> dict[str, Any]:
        """Return the response so far. ``n_prompt``: the tokens of all prompts, including the ``n_cached`` tokens."""
        status = self.status
        is_done = status != "in_progress"
        usage = {
            "input_tokens": n_prompt,
            "input_tokens_details": {"cached_tokens": n_cached, "cache_write_tokens": 0},
            "output_tokens": self.n_output,
            "output_tokens_details": {"reasoning_tokens": self._n_reasoning},
            "total_tokens": n_prompt + self.n_output,
        }
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            **self._fields,
            "completed_at": int(time.time()) if is_done else None,
            "status": status,
            "error": self.error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self.output,
            "usage": usage if is_done else None,
        }

    # ---- streamed
    def begin(self, index: int, counts: Counts, prompt: Sequence[int]) -> bytes:
        """Return the events with the response without output. A second call returns nothing."""
        if self._n_events:
            return b""
        return b"".join(
            self._event(kind, response=self.response() | {"output": []})
            for kind in ("created", "in_progress")
        )

    def sign_of_life(self) -> bytes:
        """Return an event without new information, or nothing before the first events."""
        return (
            self._event("in_progress", response=self.response() | {"output": []}) if self._n_events else b""
        )

    def part(self, index: int, part: ChatDelta, counts: Counts) -> bytes:
        """Return the events for a part."""
        events = b""
        self.n_output += len(part.token_ids)
        if part.reasoning:
            self._n_reasoning += len(part.token_ids)
            events += self._text("reasoning", "reasoning_text", part.reasoning)
        if part.content:
            entries = part.logprobs
            logprobs = [] if entries is None else chat_logprobs(entries, self._vocab)["content"]
            events += self._text("message", "output_text", part.content, logprobs=logprobs)
        for call in part.tool_calls:
            events += self._call(call)
        self.finish_reason = part.finish_reason
        return events if part.finish_reason in (None, "cancelled") else events + self.close()

    def last(self, response: Mapping[str, Any]) -> bytes:
        """Return the event that ends the stream, with the whole response and llama-server's ``timings``.

        ``end`` does not return it, because the model may continue, and the response is stored before it is sent.
        """
        times = {}
        if self._times.was_computed:
            times["timings"] = self._times.timings(response["usage"]["input_tokens"], self.n_output)
        return self._event(self.status, response=response, **times)

    def _text(self, kind: str, part_kind: str, text: str, **more: list[Any]) -> bytes:
        """Return events for the text of an item, and open the item if necessary.

        ``more``: lists to which the text's parts are added, such as log-probabilities.
        """
        events = b""
        if self._open is None or self._open["type"] != kind:
            item: Item = {"type": kind, "content": []}
            part: dict[str, Any] = {"type": part_kind, "text": ""}
            if kind == "message":
                item["role"] = "assistant"
                part |= {"annotations": [], "logprobs": []}
            else:
                item["summary"] = []
            events = self.open(item) + self.progress("content_part.added", content_index=0, part=part)
            item["content"].append(part)
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        for name, entries in more.items():
            part[name] += entries
        return events + self.progress(f"{part_kind}.delta", content_index=0, delta=text, **more)

    def _call(self, part: ToolCallDelta) -> bytes:
        events = b""
        if self._open is None or "content" in self._open or self._call_index != part.index:
            events = self.open(self._begin_call(part))
        item = self._open
        assert item is not None
        self._arguments += part.arguments
        if item["type"] == "custom_tool_call" or not part.arguments:
            return events
        item["arguments"] += part.arguments
        if item["type"] == "mcp_approval_request":
            return events
        return events + self.progress(f"{item['type']}_arguments.delta", delta=part.arguments)

    def _begin_call(self, part: ToolCallDelta) -> Item:
        """Return the item of a call that begins, without arguments."""
        self._call_index, self._arguments = part.index, ""
        known = self.tools.client_name(str(part.name))
        item = self._item_of(known)
        self.needs_client = self.needs_client or item is None or item["type"] != "mcp_call"
        if item is not None:
            return item
        namespace = {} if known.namespace is None else {"namespace": known.namespace}
        kind, filled = ("custom_tool_call", "input") if known.is_custom else ("function_call", "arguments")
        return {"type": kind, "call_id": part.id, "name": known.name, **namespace, filled: ""}

    # ---- items
    def open(self, item: Item) -> bytes:
        """Close the open item, and open another one."""
        events = self.close()
        place = len(self.output)
        item |= {"id": f"{_ID_PREFIXES[item['type']]}_{self._id}_{place}", "status": "in_progress"}
        self._open = item
        events += self._event("output_item.added", output_index=place, item=item)
        if item["type"] == "mcp_call":
            events += self.progress("mcp_call.in_progress")
            if item["arguments"]:
                events += self.progress("mcp_call_arguments.delta", delta=item["arguments"])
        return events

    def fill(self, fields: Mapping[str, Any]) -> None:
        """Add new fields to the open item."""
        assert self._open is not None
        self._open |= fields

    def progress(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the open item."""
        assert self._open is not None
        return self._event(kind, item_id=self._open["id"], output_index=len(self.output), **fields)

    def close(self) -> bytes:
        """Close the open item, if any. ``end_call`` closes a call that the server runs."""
        item = self._open
        if item is None:
            return b""
        kind, events = item["type"], b""
        if kind in ("function_call", "mcp_call"):
            name = {"name": item["name"]} if kind == "function_call" else {}
            events = self.progress(f"{kind}_arguments.done", **name, arguments=item["arguments"])
        elif kind == "custom_tool_call":
            # The model writes the input as a JSON string, so it is sent when it is complete.
            item["input"] = text = custom_input(self._arguments)
            events = self.progress(f"{kind}_input.delta", delta=text)
            events += self.progress(f"{kind}_input.done", input=text)
        elif "content" in item:
            part = item["content"][0]
            more = {"logprobs": part["logprobs"]} if kind == "message" else {}
            events = self.progress(f"{part['type']}.done", content_index=0, text=part["text"], **more)
            events += self.progress("content_part.done", content_index=0, part=part)
        self._open = None
        self.output.append(item)
        place = len(self.output) - 1
        if kind == "mcp_call":
            self._calls.append((place, item))
            return events
        item["status"] = "incomplete" if self.is_cut else "completed"
        return events + self._event("output_item.done", output_index=place, item=item)

    def take_calls(self) -> list[tuple[int, Item]]:
        """Return the calls that the server must run, with their places in the output. Returns each call only once."""
        calls, self._calls = self._calls, []
        return calls

    def end_call(self, place: int, item: Item) -> bytes:
        """Return the events that end a call, whose item has a result or an error, or neither if it was not run."""
        events = b""
        if item["status"] != "incomplete":
            events = self._event(f"mcp_call.{item['status']}", item_id=item["id"], output_index=place)
        return events + self._event("output_item.done", output_index=place, item=item)

    def _event(self, kind: str, **fields: Any) -> bytes:
        event = {"type": f"response.{kind}", **fields, "sequence_number": self._n_events}
        self._n_events += 1
        return typed_event(event) if self._is_stream else b""
