"""KV events: what an engine tells routers about the token blocks in its prefix cache, in vLLM's format over ZeroMQ.

``blocks`` turns changes of the prefix tree into events on the engine thread, ``publisher`` sends them from threads of
its own. Needs the extra ``kv-events``.
"""

from __future__ import annotations

from llamapipe.kv_events.options import KvEvents

__all__ = ["KvEvents"]
