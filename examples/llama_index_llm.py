"""LlamaIndex: an LLM over an engine, in process; a query engine over documents, and concurrent completions."""

import asyncio
from typing import Any

from llama_index.core import Document, SummaryIndex
from llama_index.core.llms import (
    CompletionResponse,
    CompletionResponseGen,
    CustomLLM,
    LLMMetadata,
)
from llama_index.core.llms.callbacks import llm_completion_callback
from pydantic import PrivateAttr

import llamapipe as lp


class LlamapipeLLM(CustomLLM):
    """An LLM over an engine. All indexes, threads and tasks may share it."""

    max_tokens: int = 64
    _engine: lp.Engine = PrivateAttr()

    def __init__(self, engine: lp.Engine, **fields: Any) -> None:
        super().__init__(**fields)
        self._engine = engine

    @property
    def metadata(self) -> LLMMetadata:
        """The sizes that LlamaIndex needs to split documents into chunks that fit."""
        name = self._engine.model.path.stem
        return LLMMetadata(context_window=self._engine.n_ctx, num_output=self.max_tokens, model_name=name)

    @property
    def _params(self) -> lp.SamplingParams:
        return lp.SamplingParams(max_tokens=self.max_tokens, temperature=0)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """One completion."""
        return CompletionResponse(text=self._engine.generate(prompt, self._params).text)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """One completion, without blocking the event loop."""
        return CompletionResponse(text=(await self._engine.agenerate(prompt, self._params)).text)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Yields the text so far, with the new text as its delta."""

        def parts() -> CompletionResponseGen:
            text = ""
            with self._engine.stream(prompt, self._params) as deltas:
                for delta in deltas:
                    text += delta.text
                    yield CompletionResponse(text=text, delta=delta.text)

        return parts()


async def ask_all(llm: LlamapipeLLM, prompts: list[str]) -> list[CompletionResponse]:
    """Completes all prompts concurrently."""
    return list(await asyncio.gather(*(llm.acomplete(prompt) for prompt in prompts)))


def main() -> None:
    """Queries an index, streams, and completes several prompts concurrently."""
    with lp.Engine(lp.demo_model_path()) as engine:
        llm = LlamapipeLLM(engine, max_tokens=24)
        documents = [Document(text="The fox was hungry and went to look for food. " * 3)]
        query_engine = SummaryIndex.from_documents(documents).as_query_engine(llm=llm)
        print("index:", repr(str(query_engine.query("What did the fox look for?"))))
        whole = llm.complete("1, 2, 3,").text
        *_, last = llm.stream_complete("1, 2, 3,")
        print(repr(whole), "streamed the same:", last.text == whole)
        before = engine.stats()
        answers = asyncio.run(ask_all(llm, [f"{n}, {n + 1}, {n + 2}," for n in range(8)]))
        after = engine.stats()
        n_tokens = after.n_completion_tokens - before.n_completion_tokens
        print(f"{len(answers)} answers, {n_tokens} tokens in {after.steps - before.steps} steps")


main()
