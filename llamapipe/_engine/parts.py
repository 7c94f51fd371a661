"""The parts of an engine that its calls for asyncio and its blocking calls share."""

from __future__ import annotations

from llamapipe._engine.calls.chat import ChatBuilder
from llamapipe._engine.calls.prompts import RequestBuilder
from llamapipe._engine.calls.submission import Submission
from llamapipe._engine.runtime.snapshot import Snapshot, SnapshotFormat, unpack
from llamapipe._engine.runtime.state_layout import StateLayout
from llamapipe._engine.runtime.thread import EngineThread
from llamapipe.llama.adapter import AdapterSet
from llamapipe.llama.context import state_version
from llamapipe.llama.fim import FimText, fim_prompt, fim_room
from llamapipe.llama.model import Model
from llamapipe.llama.rope import Rope
from llamapipe.native.not_copyable import NotCopyable
from llamapipe.params import SamplingParams
from llamapipe.work.long_work import LongWork


class EngineParts(NotCopyable):
    """The parts that ``Engine`` creates, and the helper methods that both kinds of calls share."""

    model: Model
    n_ctx: int
    n_seq_max: int
    _engine_thread: EngineThread
    _request_builder: RequestBuilder
    _chat_builder: ChatBuilder
    _submission: Submission
    _long_work: LongWork
    _n_positions: int
    _rope: Rope
    _types: tuple[str, str]
    _state_layout: StateLayout | None

    def _fim_tokens(self, text: FimText, params: SamplingParams | None) -> list[int]:
        """Return the token ids of a fill-in-the-middle prompt that leaves room for the ``max_tokens`` of ``params``."""
        if params is None:
            params = SamplingParams()
        elif not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, not {type(params).__name__}")
        return fim_prompt(self.model.vocab, text, fim_room(self.n_ctx, params.max_tokens)).tokens

    def _snapshot_format(self, adapters: AdapterSet | None) -> SnapshotFormat:
        layout = SnapshotFormat(
            self._rope.fingerprint(self.model, self._n_positions),
            state_version(),
            *self._types,
            self._state_layout,
        )
        return layout if adapters is None else layout._replace(adapters=adapters.key.digest)

    def _unpack(self, snapshot: bytes | bytearray | memoryview, params: SamplingParams | None) -> Snapshot:
        adapters = None if params is None else self._request_builder.adapters(params)
        return unpack(bytes(snapshot), self._snapshot_format(adapters), self.model.n_vocab)
