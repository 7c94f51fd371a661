"""The MCP tools in a request to ``/v1/responses``: what the model sees of them, and how its calls are run.

Open it to change what a client may ask of a server, which calls need its approval, or how they appear in the answer.

The model sees the tools of a server as a namespace of functions, named after the server's label, so no other code needs
to know about MCP. When the model has finished, its calls are run one after another, and it continues with their results
until it makes no more calls. In a conversation, a call is an ``mcp_call`` item, which also holds its result. A call
that needs approval is an ``mcp_approval_request`` item, which ends the answer; the call is run when the client sends
``mcp_approval_response``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from llamapipe._messages import did_you_mean, listed, quoted
from llamapipe.server._addresses import Refused, allowed_host
from llamapipe.server._tools import ClientName
from llamapipe.server.endpoint import Exchange
from llamapipe.server.errors import ApiError, as_sent, wrong
from llamapipe.server.mcp.file import HEADER, VALUE
from llamapipe.server.mcp.servers import (
    Image,
    ListedServer,
    McpError,
    McpServer,
    RemoteServers,
    Result,
    Tool,
)
from llamapipe.server.store.answers import Item

_KEYS = ("type", "server_label", "server_url", "server_description", "allowed_tools", "require_approval",
         "headers", "authorization", "connector_id", "tunnel_id", "allowed_callers", "defer_loading")  # fmt: skip
_UNUSED_KEYS = ("allowed_callers", "defer_loading")
_FILTER_KEYS = ("tool_names", "read_only")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Of the connection, or of the protocol.
_NO_HEADERS = ("host", "connection", "content-length", "content-type", "transfer-encoding", "accept", "te", "upgrade",
               "accept-encoding", "mcp-session-id", "mcp-protocol-version", "last-event-id")  # fmt: skip
_DATA = re.compile(r"[A-Za-z0-9+/]+={0,2}")
MOST_SERVERS = 32  # of a request
_NO_ADDRESS = (
    "this server connects to no address of a client's: leave server_url out, and name one of its servers"
)


class Filter(NamedTuple):
    """Selects tools of a server by ``names`` and by ``is_read_only``; None selects all."""

    names: frozenset[str] | None = None
    is_read_only: bool | None = None

    def matches(self, tool: Tool) -> bool:
        """Return whether the filter selects a tool."""
        return (self.names is None or tool.name in self.names) and (
            self.is_read_only is None or tool.is_read_only is self.is_read_only
        )


class Wanted(NamedTuple):
    """A server that a request names, at the field ``place``. ``always``, ``never``: which tools need approval."""

    place: str
    label: str
    server: McpServer
    about: str | None
    allowed: Filter
    always: Filter | None
    never: Filter | None

    def needs_approval(self, tool: Tool) -> bool:
        """Return whether the client must approve a call, which is the default."""
        if self.always is not None and self.always.matches(tool):
            return True
        return self.never is None or not self.never.matches(tool)


class Offered(NamedTuple):
    """The tools of a server that a request may use."""

    wanted: Wanted
    tools: Mapping[str, Tool]


class McpTools:
    """The MCP tools of one request; make it with ``mcp_of``.

    ``wanted``: the servers. ``offered``: the servers whose tools are known.
    """

    def __init__(self, exchange: Exchange, wanted: Sequence[Wanted]) -> None:
        self._exchange = exchange
        self.wanted = wanted
        self.offered: dict[str, Offered] = {}
        self.n_calls = 0
        self._images: dict[str, list[Image]] = {}  # of results, by the id of the call in the conversation

    def __repr__(self) -> str:
        return f"<McpTools {[wanted.label for wanted in self.wanted]} n_calls={self.n_calls}>"

    async def load(self, wanted: Wanted) -> None:
        """Ask a server for its tools.

        Raises McpError; ApiError for a tool that the server does not have, or if llamapipe's server is shutting down.
        """
        there = {
            tool.name: tool
            for tool in await self._exchange.server.ask_tools(wanted.server.tools())
            if _NAME.fullmatch(tool.name)
        }
        for field, rule in (
            ("allowed_tools", wanted.allowed),
            ("require_approval.always", wanted.always),
            ("require_approval.never", wanted.never),
        ):
            # A misspelt name would take a tool away from the model, or run it without the client's approval.
            missing = sorted((rule.names if rule and rule.names else frozenset()) - there.keys())
            if missing:
                hint = did_you_mean(missing[0], there) or f"; it has {listed(sorted(there))}"
                raise wrong(
                    wanted.place,
                    field,
                    f"{field}: the MCP server {quoted(wanted.label)} has no tool {quoted(missing[0])}{hint}",
                )
        tools = {name: tool for name, tool in there.items() if wanted.allowed.matches(tool)}
        self.offered[wanted.label] = Offered(wanted, tools)

    def end(self) -> None:
        """Close the servers that only this answer uses, when it is complete or the client is gone. Does not wait."""
        for wanted in self.wanted:
            wanted.server.end()

    def list_item(self, wanted: Wanted) -> Item:
        """Return the ``mcp_list_tools`` item of a server, without tools if they are not known."""
        offered = self.offered.get(wanted.label)
        return {
            "type": "mcp_list_tools",
            "server_label": wanted.label,
            "tools": [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.input_schema,
                    "annotations": tool.annotations,
                }
                for tool in (() if offered is None else offered.tools.values())
            ],
            "error": None,
        }

    def expanded(self, tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
        """Return the tools of the request with a namespace in place of each server."""
        if not self.wanted:
            return None if tools is None else list(tools)
        expanded: list[Mapping[str, Any]] = []
        waiting = iter(self.wanted)
        for tool in tools or ():
            if tool.get("type") != "mcp":
                expanded.append(tool)
                continue
            offered = self.offered[next(waiting).label]
            functions = [
                {
                    "type": "function",
                    "name": offer.name,
                    "description": offer.description,
                    "parameters": offer.input_schema,
                }
                for offer in offered.tools.values()
            ]
            about = offered.wanted.about
            expanded.append(
                {"type": "namespace", "name": offered.wanted.label, "description": about, "tools": functions}
            )
        return expanded

    def choice(self, tool_choice: Any) -> Any:
        """Return the choice of the request, with namespaces in place of servers."""
        if not self.wanted or not isinstance(tool_choice, Mapping):
            return tool_choice
        if tool_choice.get("type") == "mcp":
            tool = self._allowed("tool_choice", tool_choice)
            if tool["type"] == "function":
                return tool
            return {"type": "allowed_tools", "mode": "required", "tools": [tool]}
        tools = tool_choice.get("tools")
        if tool_choice.get("type") == "allowed_tools" and isinstance(tools, list):
            allowed = [self._allowed(f"tool_choice.tools.{i}", tool) for i, tool in enumerate(tools)]
            return {**tool_choice, "tools": allowed}
        return tool_choice

    def _allowed(self, place: str, tool: Any) -> Any:
        """Return a tool of the request's choice, with a namespace in place of a server. Raises ApiError 400."""
        if not isinstance(tool, Mapping) or tool.get("type") != "mcp":
            return tool
        label, name = tool.get("server_label"), tool.get("name")
        if not isinstance(label, str) or label not in self.offered:
            known = listed(self.offered)
            raise wrong(
                place,
                "server_label",
                f"server_label is {as_sent(label)}; the request has the servers {known}",
            )
        if name is None:
            return {"type": "namespace", "name": label}
        return {"type": "function", "name": name, "namespace": label}

    def later_choice(self, tool_choice: Any, most: int | None) -> Any:
        """Return the ``tool_choice`` after calls have run: none is forced again, and none is allowed at the limit."""
        if tool_choice == "none" or self.n_calls >= self._most(most):
            return "none"
        if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
            return {**tool_choice, "allowed_tools": {**tool_choice["allowed_tools"], "mode": "auto"}}
        return "auto"

    def _most(self, most: int | None) -> int:
        limit = self._exchange.server.settings.max_mcp_calls
        return limit if most is None else min(most, limit)

    def item(self, known: ClientName) -> Item | None:
        """Return the item of a call that the model begins, either to be run or to be approved.

        Returns None if the function is not the tool of a server.
        """
        label = str(known.namespace)
        if (offered := self.offered.get(label)) is None:
            return None
        item = {"server_label": label, "name": known.name, "arguments": ""}
        if offered.wanted.needs_approval(offered.tools[known.name]):
            return {"type": "mcp_approval_request", **item}
        return _to_run(item, None)

    def approved(self, items: Sequence[Item]) -> list[Item]:
        """Return the calls that the client has approved and that have not been run yet. Raises ApiError 400."""
        requests = {item.get("id"): item for item in items if item.get("type") == "mcp_approval_request"}
        ran = {item.get("approval_request_id") for item in items if item.get("type") == "mcp_call"}
        answers: dict[str, bool] = {}
        calls = []
        for item in items:
            if item.get("type") != "mcp_approval_response":
                continue
            asked = item.get("approval_request_id")
            request = requests.get(asked) if isinstance(asked, str) else None
            if request is None:
                raise ApiError(
                    400,
                    f"input: the approval of {quoted(asked)} answers no mcp_approval_request of the conversation",
                    "input",
                )
            is_approved = item.get("approve")
            if not isinstance(is_approved, bool):
                raise ApiError(
                    400,
                    f"input: approve of {quoted(asked)} is {as_sent(is_approved)}; it must be true or false",
                    "input",
                )
            if answers.setdefault(str(asked), is_approved) is not is_approved:
                raise ApiError(400, f"input: {quoted(asked)} is both approved and refused", "input")
            if not is_approved or asked in ran:
                continue
            ran.add(asked)
            label, name, arguments = (request.get(key) for key in ("server_label", "name", "arguments"))
            offered = self.offered.get(str(label))
            if offered is None or name not in offered.tools:
                raise ApiError(
                    400,
                    f"input: {quoted(asked)} asks for the tool {quoted(name)} of the MCP server {quoted(label)}, which "
                    "the request does not have in tools",
                    "tools",
                )
            if not isinstance(arguments, str):
                raise ApiError(400, f"input: the arguments of {quoted(asked)} must be text", "input")
            calls.append(_to_run({"server_label": label, "name": name, "arguments": arguments}, asked))
        return calls

    async def run(self, item: Item, most: int | None) -> None:
        """Run the call of an item, and store the result in it. ``most``: the limit on calls of the request, or None.

        Raises ApiError if llamapipe's server is shutting down.
        """
        limit = self._most(most)
        self.n_calls += 1
        if self.n_calls > limit:
            _fail(item, -32600, f"not run: {limit} calls of tools are the limit for one answer")
            return
        try:
            # Values that JSON cannot express, such as NaN and lone surrogates, would end the connection of all clients.
            arguments = msgspec.json.decode(item["arguments"] or "{}", type=dict[str, Any])
        except (ValueError, RecursionError) as e:
            _fail(item, -32602, f"the arguments cannot be read: {e}")
            return
        try:
            server = self.offered[item["server_label"]].wanted.server
            result = await self._exchange.server.ask_tools(server.call(item["name"], arguments))
        except McpError as e:
            _fail(item, e.code, e.message)
            return
        self._keep_images(item, result)
        text = _text_of(result, self._exchange.server.settings.max_mcp_characters)
        if result.is_error:
            content = [{"type": "text", "text": text}]
            _put(item, None, {"type": "mcp_tool_execution_error", "content": content})
        else:
            _put(item, text, None)

    def _keep_images(self, item: Item, result: Result) -> None:
        """Keep the images of a result for the rest of the answer, if the model takes images."""
        images = [part for part in result.parts if isinstance(part, Image) and _DATA.fullmatch(part.data)]
        if images and self._exchange.server.engine.model.supports_images:
            self._images[item["approval_request_id"] or item["id"]] = images
            self._exchange.hold_more(sum(len(image.data) for image in images))

    def with_images(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the conversation with the images from results of this answer."""
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}, *map(_part_of, images)]}
            if (images := self._images.get(message.get("tool_call_id", ""))) is not None
            else message
            for message in messages
        ]


def mcp_of(exchange: Exchange, tools: Sequence[Mapping[str, Any]] | None) -> McpTools:
    """Return the MCP servers that a request names. Call ``end`` on the result afterwards. Raises ApiError 400."""
    listed_ones, remote = exchange.server.mcp, exchange.server.mcp_remote
    if listed_ones is None and remote is None:
        return McpTools(exchange, ())
    labels = {} if listed_ones is None else listed_ones.labels
    places: dict[str, str] = {}
    named: list[tuple[str, str, Mapping[str, Any]]] = []
    for i, tool in enumerate(tools or ()):
        if tool.get("type") != "mcp":
            continue
        label = _check(f"tools.{i}", tool, labels, remote)
        exchange.note_unused(tuple(f"tools.{key}" for key in _UNUSED_KEYS if tool.get(key)))
        if label in places:
            raise ApiError(400, f"tools: there are two MCP servers called {quoted(label)}", "tools")
        places[label] = f"tools.{i}"
        named.append((places[label], label, tool))
    if len(named) > MOST_SERVERS:
        raise ApiError(
            400, f"tools: there are {len(named)} MCP servers; the limit is {MOST_SERVERS}", "tools"
        )
    for i, tool in enumerate(tools or ()):
        if tool.get("type") == "namespace" and tool.get("name") in tuple(places):
            raise ApiError(
                400, f"tools.{i}: an MCP server has the name {quoted(tool['name'])}, too", f"tools.{i}.name"
            )
    rules = [_rules(place, tool) for place, _, tool in named]  # all is checked before anything is opened
    wanted = []
    for (place, label, tool), rule in zip(named, rules, strict=True):
        if listed_ones is not None and label in labels:
            server: McpServer = ListedServer(listed_ones, label)
        else:
            assert remote is not None
            server = remote.open(label, tool["server_url"], _headers_of(place, tool))
        wanted.append(Wanted(place, label, server, *rule))
    return McpTools(exchange, wanted)


def plain_items(item: Mapping[str, Any]) -> list[Item] | None:
    """Return an MCP call as a function call and its result; None for any other item.

    If the call was approved, this item gives only the result; its ``mcp_approval_request`` gives the call.
    """
    kind = item.get("type")
    if kind == "mcp_approval_request":
        return [_call_of(item)]
    if kind == "mcp_approval_response":
        asked = item.get("approval_request_id")
        if item.get("approve") is True:
            return []
        reason = item.get("reason")
        why = f": {reason}" if isinstance(reason, str) and reason else ""
        return [
            {"type": "function_call_output", "call_id": asked, "output": f"The user refused this call{why}"}
        ]
    if kind != "mcp_call":
        return None
    asked = item.get("approval_request_id")
    output = {
        "type": "function_call_output",
        "call_id": item.get("id") if asked is None else asked,
        "output": _output_of(item),
    }
    return [output] if asked is not None else [_call_of(item), output]


def shown_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Return the tools of a request as its answer repeats them, which is stored and shown.

    The secrets for servers are left out.
    """
    secret = ("headers", "authorization")
    return [
        {key: value for key, value in tool.items() if key not in secret}
        if tool.get("type") == "mcp"
        else tool
        for tool in tools or ()
    ]


# ---- the request
def _check(
    place: str, tool: Mapping[str, Any], labels: Mapping[str, str | None], remote: RemoteServers | None
) -> str:
    """Return the label of a server that a request may use. Raises ApiError 400."""
    for key in tool:
        if key not in _KEYS:
            raise ApiError(400, f"{place}: unknown key {quoted(key)}{did_you_mean(key, _KEYS)}", "tools")
    label, url = tool.get("server_label"), tool.get("server_url")
    if not isinstance(label, str) or not _LABEL.fullmatch(label):
        raise wrong(
            place,
            "server_label",
            "server_label must be text of at most 64 of the characters A-Z, a-z, 0-9, '_', '.' and '-'",
        )
    if url is not None and not isinstance(url, str):
        raise wrong(place, "server_url", "server_url must be text")
    for key in ("connector_id", "tunnel_id"):
        if tool.get(key) is not None:
            raise wrong(place, key, f"{key} is of OpenAI's service; name a server of this one")
    if label in labels:
        what = f"the MCP server {quoted(label)} is one of this server's file, which"
        if url is not None and url != labels[label]:
            raise wrong(place, "server_url", f"{what} says where it is: leave server_url out")
        for key in ("headers", "authorization"):
            if tool.get(key):
                raise wrong(place, key, f"{key}: {what} says what it is told")
        return label
    known = listed(sorted(labels)) or "none"
    if url is None:
        hint = did_you_mean(label, labels)
        raise wrong(
            place, "server_label", f"there is no MCP server {quoted(label)}; the servers are {known}{hint}"
        )
    if remote is None:
        raise wrong(place, "server_url", f"{_NO_ADDRESS} ({known})")
    try:
        if not url.isprintable():  # urlsplit leaves out line ends
            raise Refused("it has control characters or spaces")
        allowed_host(urlsplit(url), remote.hosts, "--mcp-url HOST")
    except (Refused, ValueError) as e:
        raise wrong(place, "server_url", f"{quoted(url[:80])}: {e}") from None
    _headers_of(place, tool)
    return label


def _headers_of(place: str, tool: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that the client wants sent to its server with each request. Raises ApiError 400."""
    headers, token = tool.get("headers") or {}, tool.get("authorization")
    if not isinstance(headers, Mapping) or not all(
        isinstance(value, str) and HEADER.fullmatch(name) and VALUE.fullmatch(value)
        for name, value in headers.items()
    ):
        raise wrong(place, "headers", "headers must be an object of names and texts")
    for name in headers:
        if name.lower() in _NO_HEADERS:
            raise wrong(place, "headers", f"the header {quoted(name)} is not the client's")
    if token is None:
        return dict(headers)
    if not isinstance(token, str) or not VALUE.fullmatch(token):
        raise wrong(place, "authorization", "authorization must be a token")
    return {**headers, "authorization": f"Bearer {token}"}


def _rules(place: str, tool: Mapping[str, Any]) -> tuple[str | None, Filter, Filter | None, Filter | None]:
    """Return a server's description, allowed tools and approval rules, as in ``Wanted``. Raises ApiError 400."""
    about = tool.get("server_description")
    if about is not None and not isinstance(about, str):
        raise wrong(place, "server_description", "server_description must be text")
    allowed = Filter()
    if (allowed_tools := tool.get("allowed_tools")) is not None:
        allowed = _filter(f"{place}.allowed_tools", allowed_tools)
    approval = tool.get("require_approval")
    always: Filter | None = None
    never: Filter | None = None
    if isinstance(approval, Mapping):
        for key in approval:
            if key not in ("always", "never"):
                raise ApiError(
                    400, f"{place}.require_approval: unknown key {quoted(key)}", f"{place}.require_approval"
                )
        always, never = (
            None if (rule := approval.get(key)) is None else _filter(f"{place}.require_approval.{key}", rule)
            for key in ("always", "never")
        )
        if always is not None and never is None:
            never = Filter()  # the others
    elif approval == "never":
        never = Filter()
    elif approval not in (None, "always"):
        raise wrong(
            place,
            "require_approval",
            f"require_approval is {quoted(approval)}; it may be 'always', 'never' or an object",
        )
    return about, allowed, always, never


def _filter(place: str, rule: Any) -> Filter:
    if isinstance(rule, list):
        rule = {"tool_names": rule}
    if not isinstance(rule, Mapping):
        raise ApiError(400, f"{place} must be a list of names, or an object", place)
    for key in rule:
        if key not in _FILTER_KEYS:
            raise ApiError(400, f"{place}: unknown key {quoted(key)}{did_you_mean(key, _FILTER_KEYS)}", place)
    names, is_read_only = rule.get("tool_names"), rule.get("read_only")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ApiError(400, f"{place}: tool_names must be a list of texts", place)
    if not isinstance(is_read_only, bool | None):
        raise ApiError(400, f"{place}: read_only must be true or false", place)
    return Filter(None if names is None else frozenset(names), is_read_only)


# ---- calls and results
def _to_run(call: Item, asked: str | None) -> Item:
    return {"type": "mcp_call", **call, "approval_request_id": asked, "output": None, "error": None}


def _call_of(item: Mapping[str, Any]) -> Item:
    return {
        "type": "function_call",
        "call_id": item.get("id"),
        "name": item.get("name"),
        "namespace": item.get("server_label"),
        "arguments": item.get("arguments"),
    }


def _output_of(item: Mapping[str, Any]) -> str:
    """Return the result of a call as the model sees it."""
    output, error = item.get("output"), item.get("error")
    if isinstance(output, str):
        return output
    if isinstance(error, str):
        return error
    if not isinstance(error, Mapping):
        return ""
    content = error.get("content")
    if isinstance(content, list):
        texts = (part.get("text") for part in content if isinstance(part, Mapping))
        return "\n".join(text for text in texts if isinstance(text, str))
    return str(error.get("message", ""))


def _put(item: Item, output: str | None, error: dict[str, Any] | None) -> None:
    item |= {"output": output, "error": error, "status": "completed" if error is None else "failed"}


def _fail(item: Item, code: int, message: str) -> None:
    _put(item, None, {"type": "mcp_protocol_error", "code": code, "message": message})


def _part_of(image: Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{image.mime_type};base64,{image.data}"}}


def _text_of(result: Result, most: int) -> str:
    """Return a result as text that only names the images, because an item of this kind can hold only text."""
    text = "\n".join(
        f"[image: {part.mime_type}]" if isinstance(part, Image) else part for part in result.parts
    )
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut: the result has {len(text)} characters]"
