"""The options of a request, one row each: type, range, neutral value, and names in other programs.

Open this file to add an option, or to change a range, a help text or a name. ``SamplingParams`` has a typed field for
each row. Its checks, the numbers of the native struct (``llama/sampling_options.py``), the fields of requests to the
server (``server/requests/sampling.py``), the options of the command line (``cli/options.py``), the hints about names of
other programs and the table in ``docs/sampling.md`` are made from the rows. ``tests/test_sampling_table.py`` compares
them all. CONTRIBUTING.md has the steps.

These rows are separate from the rows of ``_options.py`` because they have other columns. A request option has a neutral
value, a sampler, a place in a native struct and up to five names in APIs and other programs. An engine or server option
has none of these; it has a flag with a name, aliases and an answer to requests over the limit. One type for both would
leave most of its fields empty in every row. Both use ``Kind`` and the same checks.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from functools import partial
from typing import Final

_INT32_MAX = 2**31 - 1


class Kind(Enum):
    """The kind of value that an option holds. Each user of the table decides how it treats a kind."""

    INT = auto()
    SIZE = auto()  # bytes
    FLOAT = auto()
    FLAG = auto()
    TEXT = auto()
    TEXTS = auto()  # one text or several
    TEXT_LIST = auto()
    TOKENS = auto()
    BIASES = auto()  # numbers by token id
    SAMPLERS = auto()  # names of SAMPLER_ORDER
    CONSTRAINT = auto()  # a grammar, or the source of one, such as a schema
    CALLABLES = auto()
    ADAPTER = auto()  # a name, an object, or a mapping of names or objects to scales
    OBJECT = auto()  # a Python object, which has no flag


@dataclass(frozen=True, slots=True)
class SamplingOption:
    """An option of a request.

    - ``low``, ``high``: the range of a number, both ends included. ``optional``: None is also a value.
    - ``neutral``: the value with which the option has no effect, if it has such a value.
    - ``sampler``: the sampler, by its name in ``SAMPLER_ORDER``, that any value other than the default turns on.
    - ``is_native``: ``lp_sampling_options`` has a numeric field of this name.
    - ``metavar``: the name of the value in the command-line help. If None, no command has the option, and
      ``why_no_flag`` says why.
    - ``flags``: llama.cpp's short names, which the command line also accepts.
    - ``fields``: the option's names in requests to the server, all with the same meaning; None means the option's own
      name. If empty, ``why_no_field`` says why, and ``route_fields`` lists the names that single routes use.
    - ``elsewhere``: names in other programs and APIs, for hints; command-line names begin with a dash.
    """

    kind: Kind
    name: str
    help: str
    low: float = 0
    high: float = 0
    _: KW_ONLY
    optional: bool = False
    neutral: object = None
    sampler: str | None = None
    is_native: bool = False
    metavar: str | None = None
    why_no_flag: str = ""
    flags: tuple[str, ...] = ()
    fields: tuple[str, ...] | None = None
    why_no_field: str = ""
    route_fields: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def wire(self) -> tuple[str, ...]:
        """The names of the option in requests to every text route."""
        return (self.name,) if self.fields is None else self.fields


_int = partial(SamplingOption, Kind.INT, metavar="N")
_float = partial(SamplingOption, Kind.FLOAT, metavar="X")
_flag = partial(SamplingOption, Kind.FLAG, metavar="")
_texts = partial(SamplingOption, Kind.TEXTS, metavar="TEXT")
_tokens = partial(SamplingOption, Kind.TOKENS, metavar="ID")
_constraint = partial(SamplingOption, Kind.CONSTRAINT, optional=True)
_ONE_CALLER = "a command shares the engine with nobody"
_EACH_ROUTE = "each API has another name for it"

OPTIONS: Final = (
    _int("max_tokens", "generate at most N tokens; 'none' or -1: until the model stops or the context is full", 1,
        _INT32_MAX, optional=True, flags=("-n",), fields=(), why_no_field=_EACH_ROUTE,
        route_fields=("max_tokens", "max_output_tokens"),
        elsewhere=("--predict", "--n-predict", "n_predict", "num_predict", "max_new_tokens", "max_tokens",
            "max_completion_tokens", "max_output_tokens")),
    _float("temperature", "higher values make the text more varied; 0 always takes the most probable token", 0.0, 1e6,
        neutral=1.0, sampler="temperature", is_native=True, metavar="T", flags=("--temp",), elsewhere=("temp",)),
    _int("top_k", "keep the N most probable tokens (0: off)", -1, _INT32_MAX, neutral=0, sampler="top_k",
        is_native=True),
    _float("top_p", "keep the smallest set of most probable tokens whose probabilities sum to P (1: off)", 0.0, 1.0,
        neutral=1.0, sampler="top_p", is_native=True, metavar="P"),
    _float("min_p", "drop tokens less than P times as probable as the most probable one (0: off)", 0.0, 1.0,
        neutral=0.0, sampler="min_p", is_native=True, metavar="P"),
    _float("typical_p", "keep the most typical tokens whose probabilities sum to P (1: off)", 0.0, 1.0, neutral=1.0,
        sampler="typical_p", is_native=True, metavar="P"),
    _int("min_keep", "keep at least N tokens in top_p, min_p, typical_p and XTC (0: one)", 0, _INT32_MAX, neutral=0,
        is_native=True),
    _float("repeat_penalty", "penalize tokens that have occurred, if above 1 (1: off)", 1e-6, 1e6, neutral=1.0,
        sampler="penalties", is_native=True, fields=("repeat_penalty", "repetition_penalty")),
    _int("repeat_last_n", "apply the penalties to the last N tokens (-1: all)", -1, _INT32_MAX, is_native=True),
    _float("presence_penalty", "subtract X once from the logit of each token that has occurred (0: off)", -1e6, 1e6,
        neutral=0.0, sampler="penalties", is_native=True),
    _float("frequency_penalty", "subtract X from a token's logit for each time it has occurred (0: off)", -1e6, 1e6,
        neutral=0.0, sampler="penalties", is_native=True),
    SamplingOption(Kind.BIASES, "logit_bias", "add X to the logit of a token", optional=True,
        metavar="ID=X"),
    _int("seed", "random seed; the same seed gives the same output (-1: a new one each time)", -1, 2**64 - 1,
        optional=True, flags=("-s",)),
    _texts("stop", "stop before this text", elsewhere=("--reverse-prompt", "-r")),
    _tokens("stop_token_ids", "stop at this token"),
    _flag("ignore_eos", "continue after the model's end-of-generation token", neutral=False),
    _int("min_tokens", "generate at least N tokens", 0, _INT32_MAX, neutral=0),
    _int("reasoning_budget", "end a chat's reasoning after N tokens (-1: never); the answer follows", -1, _INT32_MAX,
        optional=True, elsewhere=("thinking_budget",),
        fields=("reasoning_budget", "reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget")),
    SamplingOption(Kind.TEXT, "reasoning_budget_message", "text before the end of reasoning that reached its budget",
        optional=True, metavar="TEXT"),
    _int("n", "completions per prompt; a prompt of 16 tokens or more is computed only once", 1, 10000, neutral=1,
        elsewhere=("n_cmpl",)),
    _int("logprobs", "report log-probabilities of the tokens and of the N most probable ones", 0, _INT32_MAX,
        optional=True, fields=(), why_no_field=_EACH_ROUTE, route_fields=("top_logprobs", "logprobs"),
        elsewhere=("n_probs",)),
    _int("prompt_logprobs", "report log-probabilities of the prompt's tokens and of the N most probable ones", 0,
        _INT32_MAX, optional=True, metavar=None, why_no_flag="llamapipe score prints them", fields=(),
        why_no_field="only /v1/completions has it", route_fields=("prompt_logprobs",)),
    _constraint("grammar", "constrain the output to this GBNF grammar", metavar="GBNF"),
    _constraint("json_schema", "constrain the output to this JSON schema", metavar="JSON"),
    _constraint("regex", "constrain the output to this regular expression", metavar="REGEX"),
    _constraint("lark", "constrain the output to this Lark grammar", metavar="LARK"),
    _constraint("choice", "generate one of these texts", metavar="TEXT"),
    SamplingOption(Kind.TEXT, "json_whitespace",
        "spaces in JSON that follows a schema: spaced (after colons and commas), compact (none) or flexible",
        metavar="KIND"),
    _float("grammar_timeout", "seconds of processor time for following a constraint", 1e-3, 1e9, optional=True,
        metavar="SECONDS", fields=(), why_no_field="the operator sets it: --grammar-timeout"),
    _tokens("allowed_token_ids", "allow only these tokens", optional=True),
    _texts("bad_words", "never generate this text"),
    SamplingOption(Kind.CALLABLES, "logits_processors", "functions that change rows of logits",
        why_no_flag="it takes Python functions", fields=(), why_no_field="it takes Python functions"),
    SamplingOption(Kind.SAMPLERS, "sampler_order",
        "apply these samplers in this order, separated by commas; others are skipped", optional=True,
        metavar="NAMES", elsewhere=("--samplers", "samplers")),
    _float("dynatemp_range",
        "dynamic temperature: vary it by up to ±T with the entropy of the distribution (0: off)", 0.0, 1e6,
        neutral=0.0, sampler="temperature", is_native=True, metavar="T"),
    _float("dynatemp_exponent", "exponent of the dynamic temperature", 0.0, 1e6, is_native=True),
    _float("top_n_sigma", "keep tokens whose logit is within X standard deviations of the largest (-1: off)", -1e6,
        1e6, neutral=-1.0, sampler="top_n_sigma", is_native=True),
    _float("xtc_probability", "XTC: probability of applying it to a token (0: off)", 0.0, 1.0, neutral=0.0,
        sampler="xtc", is_native=True, metavar="P"),
    _float("xtc_threshold", "XTC: drop every token more probable than P, except the least probable of them", 0.0,
        1.0, is_native=True, metavar="P"),
    _float("dry_multiplier", "DRY: penalty for tokens that extend a repetition (0: off)", 0.0, 1e6, neutral=0.0,
        sampler="dry"),
    _float("dry_base", "DRY: base of the penalty, which grows with the length of the repetition", 1.0, 1e6),
    _int("dry_allowed_length", "DRY: do not penalize repetitions of up to N tokens", 0, _INT32_MAX),
    _int("dry_penalty_last_n", "DRY: search the last N tokens for repetitions (-1: all)", -1, 1 << 20),
    SamplingOption(Kind.TEXT_LIST, "dry_sequence_breakers", "DRY: text that ends a repetition",
        metavar="TEXT"),
    _int("mirostat", "Mirostat version, 1 or 2, instead of the truncating samplers (0: off)", 0, 2, neutral=0,
        is_native=True, elsewhere=("mirostat_mode",)),
    _float("mirostat_tau", "Mirostat target surprise (tau)", 0.0, 1e3, is_native=True),
    _float("mirostat_eta", "Mirostat learning rate (eta)", 0.0, 1e3, is_native=True),
    _float("adaptive_target", "favour tokens of about this probability (-1: off)", -1e6, 1.0, neutral=-1.0,
        is_native=True, metavar="P"),
    _float("adaptive_decay", "decay of the running average of --adaptive-target", 0.0, 0.99, is_native=True),
    _flag("infill", "fill-in-the-middle sampling: stop when an end token is likely enough", neutral=False,
        sampler="infill", is_native=True),
    _int("priority", "requests with a higher priority are admitted and computed first", -1000, 1000, neutral=0,
        metavar=None, why_no_flag=_ONE_CALLER, fields=(), why_no_field="a client must not overtake the others"),
    _flag("cache", "share the KV cells of prefixes with other requests", metavar=None, why_no_flag=_ONE_CALLER,
        fields=("cache_prompt",)),
    SamplingOption(Kind.TEXT, "speculate",
        "guess the next tokens from the text so far (ngram), with the draft model (draft), or never (off); by default "
        "whatever saves time",
        optional=True, metavar="KIND"),
    SamplingOption(Kind.TEXT, "prediction", "the text that the output is expected to be like", optional=True,
        metavar="TEXT", fields=(), why_no_field="it is an object, as in OpenAI's API, or a text",
        route_fields=("prediction",)),
    SamplingOption(Kind.TEXT, "cache_salt", "share KV cells only with requests of the same salt", optional=True,
        why_no_flag=_ONE_CALLER),
    SamplingOption(Kind.ADAPTER, "adapter", "a LoRA, or several with scales", optional=True,
        why_no_flag="--lora loads and applies one", fields=(), why_no_field="its name is that of a model"),
)  # fmt: skip
BY_NAME: Final = {option.name: option for option in OPTIONS}
CONSTRAINTS: Final = tuple(option.name for option in OPTIONS if option.kind is Kind.CONSTRAINT)
# llama.cpp's default order. "infill" is applied only if params ask for it.
SAMPLER_ORDER: Final = (
    "penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature", "infill",
)  # fmt: skip
SWITCHES: Final = {
    sampler: tuple(option.name for option in OPTIONS if option.sampler == sampler)
    for sampler in SAMPLER_ORDER
}
