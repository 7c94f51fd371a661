"""The harness's model: all requests of a call go to one engine together."""

from __future__ import annotations

import hashlib
import logging
import random
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llamapipe._messages import quoted
from llamapipe._sampling_table import BY_NAME
from llamapipe.arguments import check_flag, check_int
from llamapipe.chat.template import ChatTemplate
from llamapipe.engine import CacheType, Engine, FlashAttention, with_tuning
from llamapipe.errors import InvalidRequestError
from llamapipe.llama.model import Model, demo_model_path
from llamapipe.params import SamplingParams
from llamapipe.results import Score

_INT32_MAX = 2**31 - 1
_DEFAULT_SEQUENCES = 8  # Engine's
_OF_ENGINE = (
    "n_ctx", "n_seq_max", "n_cells", "n_threads", "n_threads_batch", "n_batch", "n_ubatch", "kv_unified", "type_k",
    "type_v", "flash_attn",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Model arguments.

    - ``path``: the model's file, or ``demo`` for the bundled model.
    - ``n_ctx`` (or ``max_length``), ``n_seq_max``, ``n_cells``, ``n_threads``, ``n_threads_batch``, ``n_batch``,
      ``n_ubatch``, ``kv_unified``, ``type_k``, ``type_v``, ``flash_attn``: as for ``Engine`` and
      ``EngineTuning``; ``n_gpu_layers``: as for ``Model``.
    - ``max_gen_toks``: maximum generated tokens if a task sets no limit (default: 256, at most half of ``n_ctx``).
    - ``add_bos_token``: whether texts begin with BOS (default: as the vocabulary says). ``prefix_token_id``: the token
      before a text that is scored from its beginning (default: BOS, else EOS).
    - ``lora``: the GGUF file of an adapter, which all requests use.
    - ``enable_thinking``: passed to chat templates that use it.
    - ``batch_size``: if above 1, the default of ``n_seq_max``; the engine makes its own batches. ``max_batch_size``:
      the same for ``batch_size=auto``. ``device``: ``cpu`` keeps all layers off GPUs; other values have no effect.

    The harness reads numbers from text in its own way, so ``-1`` may come as ``-1.0``.

    Raises TypeError and ValueError naming the argument.
    """

    path: str
    n_ctx: int | None = None
    max_length: int | None = None
    n_seq_max: int | None = None
    n_cells: int | None = None
    n_threads: int | None = None
    n_threads_batch: int | None = None
    n_batch: int = 2048
    n_ubatch: int = 512
    n_gpu_layers: int | None = None
    kv_unified: bool | None = None
    type_k: CacheType = "f16"
    type_v: CacheType = "f16"
    flash_attn: FlashAttention = "auto"
    max_gen_toks: int | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    lora: str | None = None
    enable_thinking: bool | None = None
    batch_size: int | str | None = None
    max_batch_size: int | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        path: object = self.path
        if not isinstance(path, str) or not path:
            raise TypeError(
                f"path must be the file of a model, or demo, not {quoted(self.path)}: --model_args path=model.gguf"
            )
        if self.lora is not None and not isinstance(self.lora, str):
            raise TypeError(f"lora must be the file of an adapter, not {quoted(self.lora)}")
        for name in (
            "n_ctx", "max_length", "n_seq_max", "n_cells", "n_threads", "n_threads_batch", "n_batch", "n_ubatch",
            "max_gen_toks", "max_batch_size",
        ):  # fmt: skip
            self._int(name, 1)
        self._int("n_gpu_layers", -1)
        self._int("prefix_token_id", 0)
        for name in ("kv_unified", "add_bos_token", "enable_thinking"):
            if getattr(self, name) is not None:
                check_flag(name, getattr(self, name))
        if self.n_ctx is not None and self.max_length not in (None, self.n_ctx):
            raise ValueError(
                f"n_ctx is {self.n_ctx} and max_length is {self.max_length}; they mean the same, give one of them"
            )
        self._set("n_ctx", self.max_length if self.n_ctx is None else self.n_ctx)
        if self.device is not None and not isinstance(self.device, str):
            raise TypeError(f"device must be a name such as cpu, not {quoted(self.device)}")
        if self.n_gpu_layers is None:
            self._set("n_gpu_layers", 0 if self.device == "cpu" else -1)
        self._set("n_seq_max", self._sequences())

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Options:
        """Return the options of a command line. Raises TypeError, including for unknown arguments or no ``path``."""
        known = [field.name for field in fields(cls)]
        for name in arguments:
            if name not in known:
                raise TypeError(f"llamapipe has no model argument {quoted(name)}; it has: {', '.join(known)}")
        if "path" not in arguments:
            raise TypeError(
                "llamapipe needs the file of a model: --model_args path=model.gguf (or path=demo)"
            )
        return cls(**arguments)

    def _sequences(self) -> int:
        size = self.batch_size
        if isinstance(size, str) and (size == "auto" or size.startswith("auto:")):
            size = self.max_batch_size
        elif size is not None:
            try:
                size = check_int("batch_size", int(size), 1, _INT32_MAX)
            except (TypeError, ValueError):
                raise ValueError(
                    f"batch_size is {quoted(size)}; it must be a whole number, or auto"
                ) from None
        if self.n_seq_max is not None:
            return self.n_seq_max
        # The harness passes 1 if the user chose no value.
        return _DEFAULT_SEQUENCES if size in (None, 1) else int(size)

    def _int(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is not None:
            self._set(name, check_int(name, value, low, _INT32_MAX))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


# The harness's name: llamapipe's name. An option that a task does not set removes no token.
_CUTS = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "typical_p": "typical_p"}
_PENALTIES = {
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
_NEUTRAL = {name: BY_NAME[name].neutral for name in _CUTS.values()}
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_KNOWN = ("until", *_LENGTHS, "do_sample", "temperature", *_CUTS, *_PENALTIES, "seed", "num_beams")


def sampling_params(gen_kwargs: Mapping[str, Any], default_max_gen_toks: int) -> SamplingParams:
    """Return the params of one request.

    Without sampling, the most probable token is taken. Sampled requests without a ``seed`` get one from Python's
    generator, which the harness seeds. Raises ValueError and TypeError for unsupported arguments, because ignoring them
    would change results.
    """
    if not isinstance(gen_kwargs, Mapping):
        raise TypeError(f"generation arguments must be a dict, not {type(gen_kwargs).__name__}")
    arguments = {name: value for name, value in gen_kwargs.items() if value is not None}
    for name in arguments:
        if name not in _KNOWN:
            raise ValueError(
                f"llamapipe has no generation argument {quoted(name)}; it has: {', '.join(_KNOWN)}"
            )
    if arguments.get("num_beams", 1) != 1:
        raise ValueError(f"num_beams is {arguments['num_beams']}; llamapipe searches no beams, leave it out")
    normal: dict[str, Any] = dict(normalize_gen_kwargs(arguments, default_max_gen_toks))
    sampled = bool(normal["do_sample"])
    temperature = float(normal.get("temperature", 1.0)) if sampled else 0.0
    options = {**_NEUTRAL, **{ours: arguments[name] for name, ours in _CUTS.items() if name in arguments}}
    options |= {ours: arguments[name] for name, ours in _PENALTIES.items() if name in arguments}
    seed = arguments.get("seed")
    return SamplingParams(
        max_tokens=normal["max_gen_toks"],
        temperature=temperature,
        stop=_stops(normal["until"]),
        seed=random.getrandbits(63) if seed is None and sampled else seed,
        repeat_last_n=-1,  # as transformers counts: the whole text
        **options,
    )


def _stops(until: list[Any]) -> list[str]:
    for text in until:
        if not isinstance(text, str):
            raise TypeError(f"until must hold strings, not {type(text).__name__}")
    return [text for text in until if text]  # an empty one means none to the harness


class ModelChat:
    """Renders conversations with the template in use. One thread at a time.

    ``enable_thinking``: passed to templates unless it is None. A BOS that the template writes stays in the text.
    """

    def __init__(self, model: Model, enable_thinking: bool | None = None) -> None:
        self._model = model
        self._name: str | None = None
        self._compiled: dict[str, ChatTemplate] = {}
        self._arguments = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    @property
    def text(self) -> str | None:
        """The source of the template in use; None if the model has none."""
        return self._model.chat_prompts.text(self._name)

    def choose(self, name: str | None) -> str:
        """Use the template with this name from now on, and return it. Raises InvalidRequestError if there is none."""
        self._name = name
        if not self.text:
            named = "" if name is None else f" named {name!r}"
            raise InvalidRequestError(
                f"{self._model.path.name} has no chat template{named}; run without --apply_chat_template"
            )
        return self.text

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        """Return the prompt for a conversation. Without ``add_generation_prompt`` it ends within the last message.

        Raises TypeError and InvalidRequestError, see ``ChatTemplate.render``.
        """
        text = self.choose(self._name)
        if text not in self._compiled:
            self._compiled[text] = self._model.chat_prompts.compile(text, strips_bos=False)
        return self._compiled[text].render(
            messages, continue_last=not add_generation_prompt, template_args=self._arguments
        )


_log = logging.getLogger(__name__)
_DEFAULT_MAX_GEN_TOKS = 256  # the harness's
_PART = 256  # requests between two writes of the harness's cache, where there is one
Tokens = list[int]
Pair = tuple[tuple[str, str] | None, Tokens, Tokens]  # texts (for the cache), a context, its continuation


@register_model("llamapipe")
class LlamapipeLM(TemplateLM):  # type: ignore[misc]
    """``llamapipe-lm-eval --model llamapipe --model_args path=model.gguf``; for the arguments see ``Options``.

    One engine computes all requests of a call together, as many at once as it has sequences. Equal contexts are
    computed once.

    One thread at a time. The model stays loaded until ``close``, garbage collection or the end of the process. Raises
    TypeError and ValueError for bad arguments, and what ``Model`` and ``Engine`` raise.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.options = options = Options.of(arguments)
        path = demo_model_path() if options.path == "demo" else options.path
        self.model = Model(path, n_gpu_layers=-1 if options.n_gpu_layers is None else options.n_gpu_layers)
        try:
            self._prefix = self._choose_prefix()
            self._adapter = None if options.lora is None else self.model.load_adapter(options.lora)
            self.engine = Engine(
                self.model, **with_tuning({name: getattr(options, name) for name in _OF_ENGINE})
            )
        except BaseException:
            self.model.close()
            raise
        # The harness closes nothing.
        self._free = weakref.finalize(self, _close, self.engine, self.model)
        self._chat = ModelChat(self.model, options.enable_thinking)

    def close(self) -> None:
        """Free the engine and the model; a second call does nothing."""
        self._free()

    # ---- properties of the model
    @property
    def max_length(self) -> int:
        """Tokens that one request may use."""
        return self.engine.n_ctx

    @property
    def max_gen_toks(self) -> int:
        """Limit of generated tokens for tasks that set none."""
        limit = self.options.max_gen_toks
        return min(_DEFAULT_MAX_GEN_TOKS, self.max_length // 2) if limit is None else limit

    @property
    def batch_size(self) -> int:
        """The number of requests computed at once."""
        return self.engine.n_seq_max

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        model = self.model
        tokens = [t for t in (model.eos, model.vocab.eot, *sorted(model.vocab.eog_tokens)) if t is not None]
        if not tokens:
            raise ValueError(f"{model.path.name} has no token that ends a text")
        return tokens[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored from its beginning."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """The harness's cache key for prompts made with the chat template, so the template is part of it."""
        text = self._chat.text or ""
        return f"{self.model.path.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def get_model_info(self) -> dict[str, Any]:
        """Return facts that the harness stores with its results."""
        about = self.model.metadata.get("general.name", self.model.path.name)
        facts = {
            "model_name": about,
            "model_num_parameters": self.model.n_params,
            "engine": repr(self.engine),
        }
        return facts if self._adapter is None else {**facts, "lora": self._adapter.path.name}

    # ---- text and tokens
    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **unused: Any,
    ) -> Tokens:
        """Return a text's token ids, with control tokens parsed as in transformers, and never with a second BOS.

        ``add_special_tokens``: whether BOS comes first; None: as the argument ``add_bos_token`` or the vocabulary says.
        No token is added at the end, because a continuation follows.
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
        """Return the text of token ids."""
        ids = [tokens] if isinstance(tokens, int) else tokens
        return self.model.vocab.detokenize(ids, unparse_special=not skip_special_tokens)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the model's chat template, or of the named one, and use that from now on.

        Raises ValueError if there is none.
        """
        if chat_template is False or chat_template is None:
            return None
        return self._chat.choose(chat_template if isinstance(chat_template, str) else None)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt for a conversation. Without ``add_generation_prompt``, its last message is continued.

        Raises ValueError if the model has no template, or if the template refuses the messages.
        """
        return self._chat.render(chat_history, add_generation_prompt)

    # ---- the three kinds of requests
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return each continuation's log-probability given its context, and whether greedy decoding generates it."""
        for request in requests:
            if not request.args[1]:
                raise ValueError(
                    f"the continuation of {quoted(request.args[0])} is empty; there is nothing to score"
                )
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts: every token once, given the preceding tokens that fit into the window."""
        windows: list[Pair] = []
        counts = []
        for request in requests:
            # Without BOS, which would be scored as a part of the text; the prefix takes its place.
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            rolling_windows = get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, context_len=1
            )
            cut = [(None, *make_disjoint_window(window)) for window in rolling_windows]
            windows += cut
            counts.append(len(cut))
        left = iter(self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm))
        totals = [sum(next(left)[0] for _ in range(n)) for n in counts]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate each context's continuation, up to the first of its ``until`` texts or the end of generation."""
        # Check all first: a bad argument must not end a run after hours.
        params = [
            replace(sampling_params(request.args[1], self.max_gen_toks), adapter=self._adapter)
            for request in requests
        ]
        prompts: list[Tokens] = []
        room: list[int] = []
        for request, param in zip(requests, params, strict=True):
            n_prompt = self.max_length - (param.max_tokens or 0)
            if n_prompt < 1:
                raise ValueError(
                    f"max_gen_toks is {param.max_tokens} and n_ctx {self.max_length}, which leaves no place for a "
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
                contexts[part], continuations[part], progress=not disable_tqdm, adapter=self._adapter
            )
            results = [(score.total, score.is_greedy) for score in scores]
            answers += results
            for (texts, _, _), answer in zip(requests[part], results, strict=True):
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    # ---- helpers
    def _parts(self, n: int) -> Iterator[slice]:
        """Split a run into parts if there is a cache, so that a run that ends early keeps its results."""
        step = _PART if self.cache_hook.dbdict is not None else n
        return (slice(first, min(first + step, n)) for first in range(0, n, max(step, 1)))

    def _room(self, texts: tuple[str, str] | None, continuation: Tokens) -> int:
        """Return how many context tokens fit before a continuation, whose last token is never computed."""
        if not continuation:
            raise ValueError(
                f"the continuation of {texts} adds no token to its context, so there is nothing to score"
            )
        room = self.max_length + 1 - len(continuation)
        if room < 1:
            raise ValueError(
                f"a continuation has {len(continuation)} tokens and n_ctx is {self.max_length}; give a larger n_ctx"
            )
        return room

    def _choose_prefix(self) -> int:
        token = self.options.prefix_token_id
        if token is not None:
            if token >= self.model.n_vocab:
                raise ValueError(
                    f"prefix_token_id is {token}; this vocabulary has {self.model.n_vocab} tokens"
                )
            return token
        return self.eot_token_id if self.model.bos is None else self.model.bos


def _close(engine: Engine, model: Model) -> None:
    engine.close(drain=False)
    model.close()


def cut(prompts: Sequence[Tokens], room: Sequence[int]) -> list[Tokens]:
    """Return the last tokens of each prompt that fit, as the harness's own models cut texts."""
    n = sum(len(tokens) > n_max for tokens, n_max in zip(prompts, room, strict=True))
    if n:
        _log.warning(
            "%d of %d contexts are too long and lost their beginning; give a larger n_ctx", n, len(prompts)
        )
    return [tokens[-n_max:] for tokens, n_max in zip(prompts, room, strict=True)]
