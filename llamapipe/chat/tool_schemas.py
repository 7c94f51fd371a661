"""Decides which tools keep the guarantee that their arguments match their schemas.

Open this file to change what happens to a tool whose schema no grammar can express.

With ``tool_choice="auto"``, such a schema does not make the chat fail unless the tool is ``strict``. Only the tool
loses the guarantee: its arguments may then be any JSON object. MCP servers send such schemas. In all other cases, the
schema raises an error that names the tool.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from time import thread_time
from typing import TYPE_CHECKING

from llamapipe._messages import quoted
from llamapipe.errors import InvalidRequestError
from llamapipe.locks import Lock
from llamapipe.params import SamplingParams
from llamapipe.structured.budget import GrammarBudget, TooLongError

if TYPE_CHECKING:
    from llamapipe.chat._call_format import CallFormat
    from llamapipe.chat.chat_format import ChatFormat
    from llamapipe.chat.tools import Tool

Compile = Callable[["Sequence[Tool]"], SamplingParams]
_RelaxedKey = tuple["CallFormat | None", str]
_MAX_REMEMBERED = 256
_MANY = 64  # tools; checking each of more tools alone takes over a second
_TOGETHER = "with the other tools,"  # begins the reason for a tool whose schema can be compiled alone
_MAX_MESSAGE = 300  # characters of the compiler's message that an error shows


class ToolSchemas:
    """Finds and remembers the tools whose schemas cannot be followed. Any thread.

    ``check``: raises InvalidRequestError for params whose constraint cannot be compiled.
    """

    def __init__(self, check: Callable[[SamplingParams], object]) -> None:
        self._check = check
        self._lock = Lock()
        # By the format of calls and the list of tools: the reasons why tools were relaxed, by the tools' names.
        self._relaxed: OrderedDict[_RelaxedKey, Mapping[str, str]] = OrderedDict()
        self._warned: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ToolSchemas n_remembered={len(self._relaxed)}>"

    def followed(
        self,
        chat_format: ChatFormat,
        tools: Sequence[Tool],
        tool_choice: str,
        compiled: Compile,
        limit_s: float | None = None,
    ) -> tuple[SamplingParams, Sequence[Tool]]:
        """Return the params that ``compiled`` makes from the tools, and the tools with the schemas in the grammar.

        ``limit_s``: the processor time in seconds for finding the schemas that cannot be followed; None for no limit.

        Raises InvalidRequestError, which names the tool, for a schema that must be followed but cannot be,
        ConstraintError over the limit.
        """
        began_s, budget = thread_time(), GrammarBudget(limit_s)

        def check_time() -> None:
            budget.spent_s = thread_time() - began_s
            if (late := budget.error()) is not None:
                raise late

        key = chat_format.calls, json.dumps([(tool.name, tool.parameters, tool.strict) for tool in tools])
        with self._lock:
            reasons = self._relaxed.get(key, {}) if tool_choice == "auto" else {}
        try:
            return self._made(chat_format, tools, reasons, compiled)
        except InvalidRequestError as e:
            error = e
        used = [tool for tool in tools if tool_choice in ("auto", "required", tool.name)]
        if isinstance(error, TooLongError) and len(used) > _MANY:  # do not check so many tools one by one
            if tool_choice != "auto":
                raise error
            least = {tool.name: f"{_TOGETHER} {error}" for tool in used if not tool.strict}
            try:
                self._made(chat_format, tools, least, compiled)
            except TooLongError as e:
                raise e from None
            except InvalidRequestError:
                pass  # the fault is in the schema of a strict tool
        reasons = {}
        for tool in used:  # one compilation has its own limits, but there may be a thousand tools
            check_time()
            if reason := self._fault(chat_format, tool):
                reasons[tool.name] = reason
        for tool in used:
            if tool.name in reasons and (tool_choice != "auto" or tool.strict):
                raise InvalidRequestError(f"tool {quoted(tool.name)}: {reasons[tool.name]}") from None
        if tool_choice != "auto":
            raise error
        attempts = [reasons] if reasons else []
        # The other schemas compile alone, but together they may be too large. The longest lose their guarantee first.
        longest = sorted((t for t in used if not t.strict), key=lambda t: -len(json.dumps(t.parameters)))
        n = 1
        while n < 2 * len(longest):
            too_large = {tool.name: f"{_TOGETHER} {error}" for tool in longest[:n]}
            attempts.append(reasons | too_large)
            n *= 2
        for reasons in attempts:
            check_time()
            try:
                result = self._made(chat_format, tools, reasons, compiled)
            except InvalidRequestError as e:
                error = e
                continue
            self._remember(key, reasons)
            return result
        raise error

    def _made(
        self,
        chat_format: ChatFormat,
        tools: Sequence[Tool],
        reasons: Mapping[str, str],
        compiled: Compile,
    ) -> tuple[SamplingParams, Sequence[Tool]]:
        grammar_tools = [
            chat_format.relaxed(tool, keeps_types=not reasons[tool.name].startswith(_TOGETHER))
            if tool.name in reasons
            else tool
            for tool in tools
        ]
        return compiled(grammar_tools), grammar_tools

    def _fault(self, chat_format: ChatFormat, tool: Tool) -> str | None:
        """Return the reason why the schema of a tool cannot be compiled alone; None if it can."""
        from llamapipe.structured.schema import closed_objects, schema_object

        try:
            schema = closed_objects(schema_object(tool.parameters))
            self._check(SamplingParams(json_schema=schema))
            lark = chat_format.grammar((tool,), tool.name, False, prompt_tail="")
            self._check(SamplingParams(lark=lark))
        except InvalidRequestError as e:
            return _short(str(e).removeprefix(f"tool {quoted(tool.name)}: "))
        return None

    def _remember(self, key: _RelaxedKey, reasons: Mapping[str, str]) -> None:
        new = []
        with self._lock:
            self._relaxed[key] = reasons
            if len(self._relaxed) > _MAX_REMEMBERED:
                self._relaxed.popitem(last=False)
            for named_reason in reasons.items():
                if named_reason not in self._warned:
                    new.append(named_reason)
                    self._warned[named_reason] = None
            while len(self._warned) > _MAX_REMEMBERED:
                self._warned.popitem(last=False)
        for name, reason in new:
            logging.getLogger("llamapipe").warning(
                "tool %r: %s; its arguments are any JSON object, which may not match the schema", name, reason
            )


def _short(message: str) -> str:
    """Return the first line of a message, without the option's name for the schema."""
    line = message.partition("\n")[0]
    if line.startswith("json_schema"):
        line = f"the JSON schema{line.removeprefix('json_schema')}"
    elif line.startswith("lark"):
        line = f"the grammar of its calls{line.removeprefix('lark')}"
    return line if len(line) <= _MAX_MESSAGE else f"{line[:_MAX_MESSAGE]}..."
