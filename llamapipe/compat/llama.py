"""``Llama``: the class of llama-cpp-python, with an engine that all threads share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from llamapipe._messages import explains_options
from llamapipe.compat.base import LlamaBase, LlamaState
from llamapipe.compat.chats import ChatCall, choice_of, schema_of, tools_of
from llamapipe.compat.responses import (
    LogprobWriter,
    chat_choice,
    chat_chunks,
    completion_choice,
    completion_chunks,
    head,
    usage,
)
from llamapipe.compat.sampling import (
    COMMON_OPTIONS,
    LlamaGrammar,
    LogitsProcessor,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    most_tokens,
)
from llamapipe.embedding import Embedder
from llamapipe.params import SamplingParams
from llamapipe.text.stream import TextOffsets, prompt_offsets

# Programs import these from here, as from llama_cpp.llama.
__all__ = [
    "Llama", "LlamaGrammar", "LlamaState", "LogitsProcessor", "LogitsProcessorList", "MinTokensLogitsProcessor",
    "StoppingCriteria", "StoppingCriteriaList",
]  # fmt: skip
Answer = dict[str, Any]


# Answers are typed as Any, because ``stream`` decides whether they are a dictionary or an iterator of them.
class Llama(LlamaBase):
    """A model with the constructor and the methods of llama-cpp-python 0.3.36. Any thread.

    Calls from many threads run together: up to ``n_seq_max`` at a time, each with a context of ``n_ctx`` tokens, in
    ``n_cells`` KV cells that they share. ``reset``, ``eval``, ``sample``, ``generate`` and the states work on the
    calling thread's own sequence. ``chat_template``: Jinja source or the path of a file, in place of the model's own.
    ``template_args``: arguments for the chat template, such as ``{"enable_thinking": False}``. Close the object, or use
    ``with``.

    Raises ValueError for options that llamapipe cannot honour, ModelLoadError, BackendError if memory runs out.
    """

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        additional_files: Sequence[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Llama:
        """Load a model from the Hugging Face Hub; ``filename`` may be a pattern. Needs the extra ``hub``.

        The other parts of a split model are found automatically. Raises as ``Model.from_pretrained`` does.
        """
        from llamapipe.hub import model_file

        if local_dir is not None or cache_dir is not None or local_dir_use_symlinks != "auto":
            raise ValueError(
                "local_dir and cache_dir are not supported; set the environment variable HF_HUB_CACHE"
            )
        if additional_files:
            raise ValueError(
                "additional_files is not supported; parts of a split model are found by themselves"
            )
        path = model_file(repo_id, filename, progress=bool(kwargs.get("verbose", True)))
        return cls(model_path=os.fspath(path), **kwargs)

    # ---- completions
    def __call__(self, prompt: str, *args: Any, **kwargs: Any) -> Any:
        """Do the same as ``create_completion``."""
        return self.create_completion(prompt, *args, **kwargs)

    @explains_options()
    def create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = None,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteria | None = None,
        logits_processor: LogitsProcessor | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> Any:
        """Continue a prompt; return a dictionary in the form of OpenAI's API, or its chunks if ``stream``.

        ``max_tokens``: None or 0 to generate until the context is full. ``suffix``: the text after the gap, for models
        that fill in the middle. ``echo``: include the prompt in the text. Raises TypeError for unknown options,
        ValueError for a prompt that does not fit.
        """
        arguments = locals()
        _ = self.lp_model  # raises if it is closed
        names = COMMON_OPTIONS | {"stop", "logprobs", "logit_bias"}
        tokens = self._prompts.tokens(prompt, suffix)
        room = self._n_ctx - len(tokens)
        if room <= 0:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; the context has {self._n_ctx}: raise n_ctx"
            )
        n = most_tokens(max_tokens)
        n = None if n is None else min(n, room)
        echoed = logprobs if echo else None
        params = self._params(n, seed, prompt_logprobs=echoed, **{name: arguments[name] for name in names})
        start = head("text_completion", "cmpl", model or self.model_path)
        text = prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
        writer = None
        if logprobs is not None:
            known: list[int] = []
            if echo:  # the token that begins all texts is not shown
                vocab = self.lp_model.vocab
                pieces = ((vocab.piece(token), vocab.written_piece(token)) for token in tokens)
                known = prompt_offsets(text, pieces)[tokens[0] == vocab.bos :]
            writer = LogprobWriter(self._tokenizer, TextOffsets(len(text), known=known))
        if stream:
            if echo:
                raise ValueError("echo and stream cannot be used together")
            return self._stream(start, tokens, params, writer)
        completion = self.engine.generate(tokens, params)
        scores: Any = None
        if writer is not None:
            first = None if not echo or tokens[0] == self.lp_model.bos else tokens[0]
            scores = writer.write([*(completion.prompt_logprobs or ()), *(completion.logprobs or ())], first)
            if echo and scores["tokens"]:  # OpenAI's API has none for the first
                scores["token_logprobs"][0] = scores["top_logprobs"][0] = None
        choice = completion_choice((text if echo else "") + completion.text, scores, completion.finish_reason)
        return start | {"choices": [choice], "usage": usage(len(tokens), completion.n_completion_tokens)}

    def _stream(
        self, start: Answer, tokens: list[int], params: SamplingParams, writer: LogprobWriter | None
    ) -> Iterator[Answer]:
        with closing(self.engine.stream(tokens, params)) as stream:
            yield from completion_chunks(start, stream, writer)

    @explains_options()
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Mapping[str, Any]] | None = None,
        function_call: str | Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        response_format: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: LogitsProcessor | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
    ) -> Any:
        """Answer a conversation; return a dictionary in the form of OpenAI's API, or its chunks if ``stream``.

        Needs the extra ``chat``. ``functions`` and ``function_call``: older names of ``tools`` and ``tool_choice``.
        Raises ValueError for a conversation that does not fit, or that the chat format cannot write.
        """
        arguments = locals() | {"stopping_criteria": None}
        params = self._params(
            most_tokens(max_tokens),
            seed,
            stop=stop,
            logit_bias=logit_bias,
            logprobs=(top_logprobs or 0) if logprobs else None,
            json_schema=schema_of(response_format),
            **{name: arguments[name] for name in COMMON_OPTIONS},
        )
        call = ChatCall(
            self.engine,
            self._named,
            messages,
            params,
            tools_of(functions, tools),
            choice_of(function_call, tool_choice, bool(tools or functions)),
            self._template_args,
        )
        name = model or self.model_path
        if stream:
            return chat_chunks(head("chat.completion.chunk", "chatcmpl", name), call.deltas())
        completion = call.whole()
        return head("chat.completion", "chatcmpl", name) | {
            "choices": [chat_choice(completion.choices[0])],
            "usage": usage(completion.n_prompt_tokens, completion.n_completion_tokens),
        }

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """Do the same as ``create_chat_completion``, with the types of ``openai``. Needs that package."""
        try:
            from openai.types.chat import ChatCompletion, ChatCompletionChunk
        except ImportError:
            raise ImportError("create_chat_completion_openai_v1 needs openai: pip install openai") from None
        answer = self.create_chat_completion(*args, **kwargs)
        if isinstance(answer, dict):
            return ChatCompletion(**answer)
        return (ChatCompletionChunk(**chunk) for chunk in answer)

    # ---- embeddings
    @explains_options()
    def create_embedding(self, input: str | list[str], model: str | None = None) -> Answer:  # noqa: A002
        """Return embeddings in the form of OpenAI's API."""
        vectors, n_tokens = self.embed([input] if isinstance(input, str) else input, return_count=True)
        data = [
            {"object": "embedding", "embedding": vector, "index": index}
            for index, vector in enumerate(vectors)
        ]
        counts = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": model or self.model_path, "usage": counts}

    @explains_options()
    def embed(
        self,
        input: str | list[str],  # noqa: A002
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """Return the embedding of a text, ``n_embd`` floats, or a list of embeddings for a list of texts.

        With pooling ``none``, which applies to models whose file names no pooling, a text's embedding is a list of
        ``n_tokens`` lists. ``truncate``: cut a text that is too long. Raises RuntimeError without ``embedding=True``,
        ValueError for a text that is too long if not ``truncate``.
        """
        if not self._embedding:
            raise RuntimeError("embeddings need Llama(..., embedding=True)")
        _ = self.lp_model  # raises if it is closed
        texts = [input] if isinstance(input, str) else list(input)
        embedder = self._embed()
        prompts = [self._tokenizer.encode(text, special=False) for text in texts]
        if truncate:
            prompts = [prompt[: embedder.n_ctx] for prompt in prompts]
        vectors = [vector.tolist() for vector in embedder.embed(prompts, normalize)]
        result = vectors[0] if isinstance(input, str) else vectors
        return (result, sum(map(len, prompts))) if return_count else result

    def _embed(self) -> Embedder:
        with self._lock:
            if self._embedder is None:
                n = min(self._n_batch, self._n_ctx, self.lp_model.n_ctx_train)
                threads = self._options["n_threads"]
                embedder = Embedder(self.lp_model, self._pooling, n_ctx=n, n_threads=threads)
                self._embedder = self._owned.enter_context(embedder)
            return self._embedder
