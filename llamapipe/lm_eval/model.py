"""The harness's model: all requests of a call go to one engine together."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llamapipe.arguments import quoted
from llamapipe.engine import Engine
from llamapipe.llama.model import Model, demo_model_path
from llamapipe.lm_eval.chat import ModelChat
from llamapipe.lm_eval.generation import sampling_params
from llamapipe.lm_eval.options import Options
from llamapipe.results import Score

_log = logging.getLogger(__name__)
_DEFAULT_MAX_GEN_TOKS = 256  # the harness's
_PART = 256  # requests between two writes of the harness's cache, where there is one

Tokens = list[int]
Pair = tuple[tuple[str, str] | None, Tokens, Tokens]  # texts (for the cache), a context, its continuation


@register_model("llamapipe")
class LlamapipeLM(TemplateLM):  # type: ignore[misc]
    """``llamapipe-lm-eval --model llamapipe --model_args path=model.gguf``; for the arguments see ``Options``.

    One engine computes all requests of a call together, as many at a time as it has sequences, and equal contexts once.

    One thread at a time. Holds the model until ``close``, the end of the process, or its own collection. Raises
    TypeError and ValueError for bad arguments, and what ``Model`` and ``Engine`` raise.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.options = options = Options.of(arguments)
        path = demo_model_path() if options.path == "demo" else options.path
        self.model = Model(path, n_gpu_layers=-1 if options.n_gpu_layers is None else options.n_gpu_layers)
        try:
            self._prefix = self._choose_prefix()
            self.engine = Engine(
                self.model,
                n_ctx=options.n_ctx,
                n_seq_max=options.n_seq_max or 1,
                n_cells=options.n_cells,
                n_batch=options.n_batch,
                n_ubatch=options.n_ubatch,
                n_threads=options.n_threads,
                n_threads_batch=options.n_threads_batch,
                kv_unified=options.kv_unified,
                type_k=options.type_k,
                type_v=options.type_v,
                flash_attn=options.flash_attn,
            )
        except BaseException:
            self.model.close()
            raise
        # The harness closes nothing.
        self._free = weakref.finalize(self, _close, self.engine, self.model)
        self._chat = ModelChat(self.model, options.enable_thinking)

    def close(self) -> None:
        """Frees the engine and the model; a second call does nothing."""
        self._free()

    # ---- properties of the model
    @property
    def max_length(self) -> int:
        """Tokens that one request may use."""
        return self.engine.n_ctx

    @property
    def max_gen_toks(self) -> int:
        """Limit of generated tokens for tasks that set none."""
        given = self.options.max_gen_toks
        return min(_DEFAULT_MAX_GEN_TOKS, self.max_length // 2) if given is None else given

    @property
    def batch_size(self) -> int:
        """Requests computed at once."""
        return self.engine.n_seq_max

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        model = self.model
        found = [t for t in (model.eos, model.vocab.eot, *sorted(model.vocab.eog_tokens)) if t is not None]
        if not found:
            raise ValueError(f"{model.path.name} has no token that ends a text")
        return found[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored from its beginning."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """The harness's cache key for prompts made with the chat template, which is therefore a part of it."""
        text = self._chat.text or ""
        return f"{self.model.path.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def get_model_info(self) -> dict[str, Any]:
        """Facts that the harness writes beside its results."""
        about = self.model.metadata.get("general.name", self.model.path.name)
        return {"model_name": about, "model_num_parameters": self.model.n_params, "engine": repr(self.engine)}

    # ---- text and tokens
    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **unused: Any,
    ) -> Tokens:
        """Token ids of a text, control tokens in it included, as transformers reads it; never with a second BOS.

        ``add_special_tokens``: whether BOS comes first; None: as the argument ``add_bos_token`` or the vocabulary says.
        No token is ever added at the end, because a continuation follows there.
        """
        bos = self.model.bos
        wanted = self.options.add_bos_token if add_special_tokens is None else add_special_tokens
        if wanted is None:
            wanted = self.model.vocab.add_bos
        tokens = self.model.tokenize(string, add_special=False, parse_special=True)
        if wanted and bos is not None and tokens[:1] != [bos]:
            tokens.insert(0, bos)
        return tokens if left_truncate_len is None else tokens[-left_truncate_len:]

    def tok_decode(self, tokens: Sequence[int] | int, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        ids = [tokens] if isinstance(tokens, int) else tokens
        return self.model.vocab.detokenize(ids, unparse_special=not skip_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The text of the model's chat template, or of the one with this name, which is used from now on.

        Raises ValueError if there is none.
        """
        if chat_template is False or chat_template is None:
            return None
        return self._chat.choose(chat_template if isinstance(chat_template, str) else None)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for a conversation. Without ``add_generation_prompt``, its last message is continued.

        Raises ValueError if the model has no template, or if the template refuses the messages.
        """
        return self._chat.render(chat_history, add_generation_prompt)

    # ---- the three kinds of requests
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation given its context, and whether greedy decoding generates it."""
        for request in requests:
            if not request.args[1]:
                raise ValueError(
                    f"the continuation of {quoted(request.args[0])} is empty; there is nothing to score"
                )
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts: every token once, given as many tokens before it as a window has."""
        windows: list[Pair] = []
        counts = []
        for request in requests:
            # Without BOS, which would be scored as a part of the text; the prefix takes its place.
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            found = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            cut = [(None, *make_disjoint_window(window)) for window in found]
            windows += cut
            counts.append(len(cut))
        left = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum(next(left)[0] for _ in range(n)) for n in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The generated continuation of each context, up to the first of its ``until`` or the end of generation."""
        # Check all first: a bad argument must not end a run after hours.
        params = [sampling_params(request.args[1], self.max_gen_toks) for request in requests]
        prompts: list[Tokens] = []
        room: list[int] = []
        for request, mine in zip(requests, params, strict=True):
            n_prompt = self.max_length - (mine.max_tokens or 0)
            if n_prompt < 1:
                raise ValueError(
                    f"max_gen_toks is {mine.max_tokens} and n_ctx {self.max_length}, which leaves no place for a "
                    "prompt; give a smaller max_gen_toks or a larger n_ctx"
                )
            prompts.append(self.tok_encode(request.args[0]) or [self.prefix_token_id])
            room.append(n_prompt)
        prompts = cut(prompts, room)
        texts: list[str] = []
        for part in self._parts(len(requests)):
            outs = self.engine.generate(prompts[part], params[part], progress=not disable_tqdm)
            texts += [out.text for out in outs]
            for request, out in zip(requests[part], outs, strict=True):
                self.cache_hook.add_partial("generate_until", request.args, out.text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **unused: Any
    ) -> list[tuple[float, bool]]:
        continuations = [continuation for _, _, continuation in requests]
        room = [self._room(texts, continuation) for texts, _, continuation in requests]
        contexts = cut([context or [self.prefix_token_id] for _, context, _ in requests], room)
        answers: list[tuple[float, bool]] = []
        for part in self._parts(len(requests)):
            scores: list[Score] = self.engine.score(
                contexts[part], continuations[part], progress=not disable_tqdm
            )
            mine = [(score.total, score.is_greedy) for score in scores]
            answers += mine
            for (texts, _, _), answer in zip(requests[part], mine, strict=True):
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    # ---- helpers
    def _parts(self, n: int) -> Iterator[slice]:
        """Runs all requests together; with a cache, in parts, so that a run that ends early keeps its results."""
        step = _PART if self.cache_hook.dbdict is not None else n
        return (slice(first, min(first + step, n)) for first in range(0, n, max(step, 1)))

    def _room(self, texts: tuple[str, str] | None, continuation: Tokens) -> int:
        """Tokens of a context that fit before a continuation, whose last token is never computed."""
        if not continuation:
            raise ValueError(
                f"the continuation of {texts} adds no token of its own to its context, so there is nothing to score"
            )
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens and n_ctx is {self.max_length}; give a larger n_ctx"
            )
        return room

    def _choose_prefix(self) -> int:
        given = self.options.prefix_token_id
        if given is not None:
            if given >= self.model.n_vocab:
                raise ValueError(
                    f"prefix_token_id is {given}; this vocabulary has {self.model.n_vocab} tokens"
                )
            return given
        return self.eot_token_id if self.model.bos is None else self.model.bos


def _close(engine: Engine, model: Model) -> None:
    engine.close(drain=False)
    model.close()


def cut(prompts: Sequence[Tokens], room: Sequence[int]) -> list[Tokens]:
    """The last tokens of each that fit; the harness's own models cut texts in the same way."""
    n = sum(len(tokens) > n_max for tokens, n_max in zip(prompts, room, strict=True))
    if n:
        _log.warning(
            "%d of %d contexts are too long and lost their beginning; give a larger n_ctx", n, len(prompts)
        )
    return [tokens[-n_max:] for tokens, n_max in zip(prompts, room, strict=True)]
