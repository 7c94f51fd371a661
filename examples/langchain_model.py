"""LangChain: a chat model over an engine, in process; invoke, stream, and concurrent prompts with abatch."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from pydantic import PrivateAttr

import llamapipe as lp


class ChatLlamapipe(BaseChatModel):
    """A chat model over an engine. All chains, threads and tasks may share it."""

    max_tokens: int = 64
    temperature: float = 0.0
    _engine: lp.Engine = PrivateAttr()

    def __init__(self, engine: lp.Engine, **fields: Any) -> None:
        super().__init__(**fields)
        self._engine = engine

    @property
    def _llm_type(self) -> str:
        return "llamapipe"

    def _asked(
        self, messages: list[BaseMessage], stop: list[str] | None
    ) -> tuple[list[dict[str, Any]], lp.SamplingParams]:
        sent = convert_to_openai_messages(messages)
        assert isinstance(sent, list)
        return sent, lp.SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, stop=stop)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _result(self._engine.chat(*self._asked(messages, stop)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _result(await self._engine.achat(*self._asked(messages, stop)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with self._engine.stream_chat(*self._asked(messages, stop)) as deltas:
            for delta in deltas:
                yield ChatGenerationChunk(message=AIMessageChunk(content=delta.content))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with self._engine.astream_chat(*self._asked(messages, stop)) as deltas:
            async for delta in deltas:
                yield ChatGenerationChunk(message=AIMessageChunk(content=delta.content))


def _result(answer: lp.ChatCompletion) -> ChatResult:
    counts = (answer.n_prompt_tokens, answer.n_completion_tokens)
    message = AIMessage(
        content=answer.content,
        usage_metadata={"input_tokens": counts[0], "output_tokens": counts[1], "total_tokens": sum(counts)},
        response_metadata={"finish_reason": answer.finish_reason},
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def main() -> None:
    """Asks one question in each way, then many questions concurrently."""
    with lp.Engine(lp.demo_model_path()) as engine:
        model = ChatLlamapipe(engine, max_tokens=24)
        whole = model.invoke("What does a cow say?")
        streamed = "".join(str(chunk.content) for chunk in model.stream("What does a cow say?"))
        print(repr(whole.content), whole.usage_metadata)
        print("streamed the same:", streamed == whole.content)
        before = engine.stats()
        animals = ["cow", "cat", "dog", "duck", "bird", "fox", "sheep", "horse"]
        answers = asyncio.run(model.abatch([f"What does a {animal} say?" for animal in animals]))
        after = engine.stats()
        n_tokens = after.n_completion_tokens - before.n_completion_tokens
        print(f"{len(answers)} answers, {n_tokens} tokens in {after.steps - before.steps} steps")


main()
