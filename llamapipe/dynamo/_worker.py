"""``EngineWorker``: one engine, whose methods Dynamo's runtime calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from functools import reduce
from operator import or_
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.llm import ModelInput, ModelRuntimeConfig, ModelType, WorkerType, register_model
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

import llamapipe as lp
from llamapipe.dynamo._arguments import WorkerOptions, parser, worker_options
from llamapipe.dynamo._requests import chunk, last_chunk, sampling_params
from llamapipe.llama.vocab import Vocab
from llamapipe.streams import AsyncStream
from llamapipe.structured.compile import prepare_vocabulary
from llamapipe.work.long_work import takes_long

_log = logging.getLogger(__name__)
_DEAD = (lp.errors.EngineClosedError, lp.errors.BackendError)  # another worker can continue the request
_BLOCK_TOKENS = 16  # the unit in which the frontend counts KV cells
_ENDPOINTS = {"chat": ModelType.Chat, "completions": ModelType.Completions}


class EngineWorker(LLMEngine):  # type: ignore[misc]
    """Serves any number of concurrent requests in token ids with one engine.

    For the methods, see ``dynamo.common.backend.LLMEngine``.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._undo = ExitStack()
        self._engine: lp.Engine | None = None
        self._streams: dict[str, AsyncStream] = {}

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[EngineWorker, WorkerConfig]:
        """Return an unstarted worker and its configuration for the runtime."""
        options = worker_options(parser().parse_args(argv))
        return cls(options), WorkerConfig(**options.registration)

    async def start(self, worker_id: int) -> EngineConfig:
        """Load the model, make the engine, and write the tokenizer files for the frontend."""
        engine = await asyncio.to_thread(self._open)
        self._engine = engine
        _log.info("serving %r as %s", engine, self._options.name)
        return EngineConfig(
            model=str(self._options.folder),
            served_model_name=self._options.name,
            llm=LlmRegistration(
                context_length=engine.n_ctx,
                kv_cache_block_size=_BLOCK_TOKENS,
                total_kv_blocks=engine.n_cells // _BLOCK_TOKENS,
                max_num_seqs=engine.n_seq_max,
            ),
        )

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        """Register each adapter as a model of the frontend. An alias would not do: requests would not have its name."""
        engine = self._engine
        assert engine is not None
        if not engine.adapters:
            return
        config = ModelRuntimeConfig()
        config.context_length = engine.n_ctx
        config.max_num_seqs = engine.n_seq_max
        config.total_kv_blocks = engine.n_cells // _BLOCK_TOKENS
        config.tool_call_parser = self._options.registration["tool_call_parser"]
        config.reasoning_parser = self._options.registration["reasoning_parser"]
        types = [_ENDPOINTS[name.strip()] for name in self._options.registration["endpoint_types"].split(",")]
        for adapter in engine.adapters:
            await register_model(
                ModelInput.Tokens,
                reduce(or_, types),
                endpoint,
                str(self._options.folder),
                worker_type=WorkerType.Aggregated,
                kv_cache_block_size=_BLOCK_TOKENS,
                runtime_config=config,
                lora_name=adapter.name,
                base_model_path=str(self._options.folder),
                ignore_weights=True,
            )

    def _open(self) -> lp.Engine:
        engine = self._options.open_engine(self._undo)
        engine.model.save_tokenizer(self._options.folder)
        prepare_vocabulary(engine.model.vocab)
        return engine

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any, None]:
        """Yield the chunks of one request."""
        engine = self._engine
        if engine is None or engine.closed:
            raise EngineShutdown("the engine is not running")
        prompt = _with_bos(request["token_ids"], engine.model.vocab)
        try:
            params = sampling_params(request, [adapter.name for adapter in engine.adapters])
            if takes_long(prompt, params):  # compiling a constraint would block the event loop
                await engine.offload(engine.check_params, params)
            stream = engine.astream(prompt, params)
        except _DEAD as error:
            raise EngineShutdown(str(error)) from error
        except (ValueError, TypeError) as error:
            raise InvalidArgument(str(error)) from error
        request_id = context.id()
        n_generated = 0
        self._streams[request_id] = stream
        try:
            async with stream:
                if context.is_stopped():
                    stream.cancel()
                async for delta in stream:
                    n_generated += len(delta.token_ids)
                    yield chunk(delta, len(prompt), n_generated, params.logprobs is not None)
                    if delta.finish_reason is not None:
                        return
            yield last_chunk("cancelled", len(prompt), n_generated)
        except _DEAD as error:
            raise EngineShutdown(str(error)) from error
        except ValueError as error:
            raise InvalidArgument(str(error)) from error
        finally:
            if self._streams.get(request_id) is stream:  # else a retry of the same request came meanwhile
                del self._streams[request_id]

    async def abort(self, context: Any) -> None:
        """Cancel a request whose client disconnected; its slot is free within a step."""
        stream = self._streams.get(context.id())
        if stream is not None:
            stream.cancel()

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return a request for one token, which the runtime sends when there are no other requests."""
        assert self._engine is not None
        bos = self._engine.model.vocab.bos
        payload: dict[str, Any] = build_health_check_payload(0 if bos is None else bos)
        return payload

    async def cleanup(self) -> None:
        """Close the engine and its model, even if ``start`` failed. Running requests are finished first."""
        await asyncio.to_thread(self._undo.close)


def _with_bos(tokens: Sequence[int], vocab: Vocab) -> list[int]:
    """Return the prompt, with a BOS if the model requires one: Dynamo's frontend adds none to plain prompts."""
    prompt = list(tokens)
    if vocab.add_bos and vocab.bos is not None and prompt[:1] != [vocab.bos]:
        prompt.insert(0, vocab.bos)
    return prompt
