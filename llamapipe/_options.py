"""The options of engines, models, embedders and servers, one row each: type, range, command-line names, help.

Open this file to add an option, or to change a range, a help text or a name. An option consists of a row here, a typed
field or argument where callers set it (``Engine``, ``EngineTuning``, ``Model``, ``Embedder``, ``ServerSettings``), and
the code that uses it. The row determines its check (``arguments.int_of`` and the functions next to it), its flag in
every command, the flag that an error names, the default that the help shows, and its rows in
``docs/reference/options.md`` and ``docs/guides/server.md``. ``tests/test_options.py`` compares them all.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Final

from llamapipe._sampling_table import Kind

MTP_CHOICES: Final = ("auto", "mtp")  # values of the option ``draft`` that are not models

_INT32_MAX = 2**31 - 1
_SECONDS = 1e6
_MOST_SOUND_S = 1800
_MOST_SEQUENCES = 256  # llama.cpp's limit for one llama_context


@dataclass(frozen=True, slots=True)
class Option:
    """An option of an engine, a model, an embedder or a server.

    - ``low``, ``high``: the range of a number, both ends included. ``optional``: None is also a value.
    - ``choices``: the allowed values, if the option is a text with only a few values.
    - ``help``, ``metavar``: used on the command line; if ``metavar`` is None, no command has the option.
    - ``flag``: the flag's name, if it is not the option's name with dashes. ``aliases``: llama.cpp's names for the
      flag.
    - ``is_off``: the flag begins with ``--no-`` and turns the option off. ``repeats``: each use of the flag adds a
      value.
    - ``none``: the help text for the default None.
    - ``over``: the server's answer to requests over the limit.
    """

    kind: Kind
    name: str
    help: str = ""
    low: float = 0
    high: float = 0
    _: KW_ONLY
    optional: bool = False
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    flag: str = ""
    aliases: tuple[str, ...] = ()
    is_off: bool = False
    repeats: bool = False
    none: str = ""
    over: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """All names of the option on the command line, the longest last."""
        return (*self.aliases, self.flag or f"--{self.name.replace('_', '-')}")


_int = partial(Option, Kind.INT, metavar="N")
_size = partial(Option, Kind.SIZE, metavar="SIZE")
_float = partial(Option, Kind.FLOAT, metavar="X")
_seconds = partial(Option, Kind.FLOAT, metavar="S")
_flag = partial(Option, Kind.FLAG, metavar="")
_texts = partial(Option, Kind.TEXTS, repeats=True)
_text = partial(Option, Kind.TEXT)
_object = partial(Option, Kind.OBJECT)
_CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl")

ENGINE: Final = (
    _int("n_ctx", "context of each request in tokens, prompt and output together; 0: the model's (default: the "
        "model's, at most 4096)", 1, 2**26, optional=True, aliases=("-c",)),
    _int("n_seq_max", "requests that run at the same time", 1, _MOST_SEQUENCES, aliases=("-np",)),
    _int("n_threads", "CPU threads while one request runs (default, and -1: adapts to the load)", 1, 512,
        optional=True, aliases=("-t",)),
    _int("n_cells", "KV cells that all requests share (default: n_ctx for each request)", 1, _INT32_MAX,
        optional=True),
    _text("type_k", "type of the keys in the KV cache, such as q8_0", choices=_CACHE_TYPES, metavar="TYPE",
        aliases=("-ctk",)),
    _text("type_v", "type of the values in the KV cache", choices=_CACHE_TYPES, metavar="TYPE", aliases=("-ctv",)),
    _text("flash_attn", "flash attention; auto: where the backend supports it", choices=("auto", "on", "off")),
    _object("prefix_cache", "keep the KV cells of ended requests for those that begin with the same tokens"),
    _size("cache_bytes", "host memory for cached prefixes that have lost their slot, such as 2GiB; 0: none (default: a "
        "tenth of the free memory)", 0, 2**63 - 1, optional=True),
    _text("cache_dir", "keep cached prefixes in this folder, so that they are there after a restart", optional=True,
        metavar="DIR"),
    _size("cache_dir_bytes", "most of the disk for --cache-dir, of all models that use it (default: 10GiB)", 2**20,
        2**63 - 1, optional=True),
    Option(Kind.FLOAT, "max_itl_ms",
        "compute prompts in chunks so that streams wait at most MS milliseconds between tokens", 1, 1e6, optional=True,
        metavar="MS"),
    _flag("batch_invariant",
        "give the same text for a request whatever else runs; refuse models whose texts could differ"),
    _text("draft", "what guesses several tokens for each step, where that saves time: a smaller model of the same "
        "family, an EAGLE-3 or DFlash draft, a Gemma 4 assistant, mtp (the model's own MTP layer), or auto (that "
        "layer, if it has one)",
        optional=True, metavar="FILE", aliases=("-md", "--model-draft")),
    _text("rope_scaling", "how positions are scaled for contexts longer than the model's (default: as the file says)",
        optional=True, choices=("none", "linear", "yarn", "longrope"), metavar=""),
    _float("rope_freq_base", "base of the rotations of positions (default: the file's)", 1.5, 1e15, optional=True),
    _float("rope_freq_scale", "factor of positions: 0.25 is for four times the model's context (default: the file's)",
        0.001, 1000, optional=True),
    _int("yarn_orig_ctx", "context in tokens that the model was trained with, for --rope-scaling yarn (default: the "
        "file's)", 1, 2**26, optional=True),
    _text("overflow", "what to do when the output fills the context: stop, recompute or shift",
        choices=("stop", "recompute", "shift"), metavar="MODE"),
    _int("n_keep", "tokens at the start that --overflow keeps", 0, _INT32_MAX),
    _int("max_queue", "requests that wait for a slot", 1, _INT32_MAX, optional=True, metavar=None),
    _object("adapters", "adapters that requests may name (default: all that the model has loaded)"),
    _object("tuning", "an EngineTuning, with options that few programs need"),
)  # fmt: skip
TUNING: Final = (
    _int("n_batch", "maximum tokens in one step", 1, 2**20, aliases=("-b",)),
    _int("n_ubatch", "maximum tokens in one physical batch (ubatch)", 1, 2**20, aliases=("-ub",)),
    _int("n_threads_batch", "CPU threads for prompts, and while several requests run (default: as --n-threads)", 1,
        512, optional=True, aliases=("-tb",)),
    _flag("kv_unified", "one KV cache for all requests, or one for each (default: one for all if n_cells is given)",
        optional=True, metavar=None),
    _flag("swa_full", "let sliding-window layers keep the cells of the last window only: less memory, and cached "
        "prefixes continue at fewer places", optional=True, flag="--no-swa-full", is_off=True),
    _size("moe_cache_size", "memory of the GPUs, such as 2GiB, for experts that --n-cpu-moe keeps on the CPU and that "
        "were used last (default: none)", 1, 2**63 - 1, optional=True),
    _float("yarn_ext_factor", "share of YaRN's mix of scaled and unscaled positions; 0: all are scaled", 0, 10,
        optional=True),
    _float("yarn_attn_factor", "factor of YaRN's attention, beside the one that follows from the scale", 0.01, 100,
        optional=True),
    _float("yarn_beta_fast", "rotations in the trained context from which YaRN leaves positions alone", 0.01, 1e4,
        optional=True),
    _float("yarn_beta_slow", "rotations in the trained context up to which YaRN scales positions", 0.01, 1e4,
        optional=True),
    _int("min_room", "tokens of the context that a prompt must leave for its answer; a request that asks for fewer "
        "needs no more than these", 1, 2**26),
    _int("batch_window_us", "microseconds that an idle engine waits for more requests to join a step", 0, 1_000_000,
        metavar=None),
    _int("pipeline_depth", "steps in flight at once (default: 2 on a device, 1 on a CPU)", 1, 2, optional=True,
        metavar=None),
    _text("ring", "how outputs are read; off: from llama.cpp's own buffer", choices=("auto", "events", "sync", "off")),
    _text("graph_sampling", "sample in the compute graph; auto: on GPUs", choices=("auto", "on", "off")),
    _object("kv_events", "publish what the prefix cache holds, for routers"),
    _object("trace", "record a timeline; a path: write it there when the engine closes"),
)  # fmt: skip
MODEL: Final = (
    _int("n_gpu_layers", "layers computed on the GPU; -1: all", -1, _INT32_MAX, aliases=("-ngl",)),
    _flag("use_mmap", "read the weights into memory instead of mapping the file", flag="--no-mmap", is_off=True),
    _text("kernels", "kernels for matrix products on the CPU: auto (llamapipe's where it has them) or ggml",
        choices=("auto", "ggml"), metavar="WHICH"),
    _text("packed_cache", "keep packed weights in this folder, so that later starts map them and processes share them; "
        "auto: in the user's cache; off: nowhere (default)", optional=True, metavar="FOLDER"),
    _text("mmproj", "the model's second file, a GGUF file with an encoder of images or sounds, for messages with "
        "these; hf:OWNER/REPO[/FILE] of the hub; off: none (default: the one mmproj*.gguf beside the model, if it "
        "fits)", metavar="FILE"),
    _int("image_min_tokens", "tokens that an image has at least, for projectors that keep its proportions (default: "
        "the projector's)", 1, 65_536, optional=True),
    _int("image_max_tokens", "tokens that an image has at most, for the same: fewer take less time and show less "
        "(default: the projector's)", 1, 65_536, optional=True),
    _flag("load_mtp", "also load the layers that predict the token after the next (MTP)", metavar=None),
    _texts("rpc", "also place layers on this `llamapipe rpc-worker` (repeatable)", metavar="HOST:PORT"),
    _int("n_cpu_moe", "keep the experts of the first N layers on the CPU", 0, _INT32_MAX, optional=True,
        aliases=("-ncmoe",)),
    _texts("tensor_placement", "place tensors whose names match a regular expression on this device, such as "
        "exps=CPU (repeatable; the first that matches counts)", metavar="PATTERN=DEVICE", flag="--override-tensor",
        aliases=("-ot",)),
    _texts("kv_overrides", "change a value of the file's metadata; TYPE is int, float, bool or str (repeatable)",
        metavar="KEY=TYPE:VALUE", flag="--override-kv"),
    _object("devices", "devices to place layers on (default: all)"),
    _text("split_mode", "how a model is divided among devices", choices=("none", "layer", "row", "tensor")),
    _int("main_gpu", "the device that split_mode none uses", 0, 1023, metavar=None),
    _object("tensor_split", "the share of each device"),
    _object("chat_template", "used instead of the file's: Jinja source, or the path of a file with it"),
    _text("tool_calls", "what is read as a call of a tool: lenient also takes an answer of plain JSON",
        choices=("lenient", "strict")),
    _flag("use_mlock", "lock the weights in memory", metavar=None),
    _flag("vocab_only", "load no weights, for tokenizing only", metavar=None),
)  # fmt: skip
EMBEDDER: Final = (
    _text("pooling", "how a text's rows become one vector: mean, cls or last; rank, for rerankers; none keeps them all "
        "(default: the model's)", choices=("none", "mean", "cls", "last", "rank"), optional=True, metavar="NAME"),
    _int("n_ctx", "maximum tokens of a text; 0: the model's context (default: the model's, at most 2048)", 1, 2**20,
        optional=True, aliases=("-c",)),
    _int("n_seq_max", "texts that are computed together", 1, _MOST_SEQUENCES, metavar=None),
    _int("n_threads", "compute threads (default, and -1: automatic)", 1, 512, optional=True, aliases=("-t",)),
)  # fmt: skip
SERVER: Final = (
    _seconds("ping_s", "seconds after which a silent stream sends a sign of life; 0: never", 0.0, _SECONDS,
        flag="--ping"),
    _flag("strict",
        "refuse fields without effect, such as store; otherwise the header x-llamapipe-unused names them"),
    _flag("any_model_name", "any name of a model means the one that is served, as in llama-server"),
    _text("fim_order", "what a prompt for filling in begins with: psm, the prefix, or spm, the suffix",
        choices=("psm", "spm"), metavar=""),
    _object("sampling", "options of SamplingParams where a request gives none; on the command line, those of samplers",
        optional=True),
    _text("reasoning", "where a request says nothing about it: off (no reasoning), auto (as the template has it) or N "
        "(at most N tokens)", metavar="off|auto|N"),
    _text("template_args", "arguments of the chat template, as a JSON object, where a request gives no others",
        optional=True, metavar="JSON"),
    _text("system", "system prompt of conversations that have none; @FILE: the text of a file", optional=True,
        metavar="TEXT|@FILE"),
    _int("keep_requests", "requests whose times, without texts, are kept for /requests; 0: none", 0, 10_000),
    _text("store", "keep answers of /v1/responses and conversations in this file, which is made if there is none",
        optional=True, metavar="FILE"),
    _int("store_days", "with --store: days without use after which answers are deleted", 1, 36_500),
    _text("mcp", "a file of MCP servers (mcpServers), whose tools requests to /v1/responses may use", optional=True,
        metavar="FILE"),
    _flag("page", "do not serve the page at /", flag="--no-page", is_off=True),
)  # fmt: skip
ACCESS: Final = (
    _texts("cors_origins", "allow requests from web pages of this origin; '*': all (repeatable)", metavar="ORIGIN",
        flag="--cors"),
    _texts("allow_hosts", "allow requests to this name, for example behind a proxy; '*': any (repeatable; default on "
        "loopback: localhost and names that cannot be registered; else any)", metavar="NAME", flag="--allow-host"),
    _flag("open_metrics", "answer /metrics without an API key, for programs that collect them"),
    _flag("allow_pull", "with --ollama: clients may download models of the Hugging Face Hub, and copy the model's "
        "name"),
    _flag("allow_delete", "with --ollama: clients may delete what was downloaded"),
    _text("slot_save_path", "clients may save conversations in this folder, as with llama-server (POST /slots/{id})",
        optional=True, metavar="DIR"),
    _flag("slot_transfer", "with --slot-save-path: clients may download saved conversations, and upload ones that they "
        "saved elsewhere"),
    _text("lora_path", "clients may load and unload the LoRAs in this folder (/v1/load_lora_adapter)", optional=True,
        metavar="DIR"),
    _text("media_path", "images may be named by file:// addresses of files in this folder", optional=True,
        metavar="DIR"),
    _texts("media_urls", "images may be named by addresses of this host (HOST or HOST:PORT; repeatable), which the "
        "server fetches", metavar="HOST", flag="--media-url"),
    _texts("mcp_urls", "requests may name MCP servers at addresses of this host (HOST or HOST:PORT; repeatable)",
        metavar="HOST", flag="--mcp-url"),
)  # fmt: skip
LIMITS: Final = (
    _int("max_requests", "requests served at once; more are answered with 429", 1, _INT32_MAX,
        over="429 with `Retry-After`"),
    _int("max_n", "choices of one request", 1, 10_000, over="400"),
    _int("max_messages", "messages of one conversation, and parts of them, or texts to embed, rank or score", 1,
        _INT32_MAX, over="400"),
    _int("max_text_characters", "refuse longer texts and conversations, which cannot fit the context, before they are "
        "tokenized; also the most tokens to detokenize", 1, _INT32_MAX, over="400"),
    _size("max_body_bytes", "largest request body", 1, _INT32_MAX, over="413"),
    _size("max_bodies_bytes", "total size of the bodies of unanswered requests; more are answered with 503", 1, 2**62,
        over="503 with `Retry-After`"),
    _size("store_bytes", "size of the file of --store", 2**20, 2**62,
        over="the least recently used answers are deleted"),
    _size("files_bytes", "with --store: total size of uploaded files and results of batches; each API key has an equal "
        "part", 2**20, 2**62, over="429 with the code `insufficient_quota`; 413 for a file that alone is larger"),
    _int("max_background", "answers in the background that one API key may have waiting and computed", 0, _INT32_MAX,
        over="429 with `Retry-After`"),
    _int("max_connections_per_address", "connections of one address; the next one replaces an idle one; 0: any number",
        0, _INT32_MAX, over="the oldest without a running request is closed; 503 if all have one"),
    _seconds("timeout_s", "seconds a request may take, with fetching and decoding images", 0.001, _SECONDS,
        optional=True, flag="--timeout", none="no limit", over="504"),
    _seconds("head_timeout_s", "seconds in which a request's head must arrive", 0.001, _SECONDS,
        flag="--head-timeout", over="408"),
    _seconds("body_timeout_s", "seconds in which a request's body must arrive", 0.001, _SECONDS,
        flag="--body-timeout", over="408"),
    _seconds("max_sound_s", f"longest sound, in seconds, at most {_MOST_SOUND_S}", 0.001, _MOST_SOUND_S,
        flag="--max-sound", over="400"),
    _seconds("grammar_timeout_s", "seconds of processor time that a request's schema or grammar may take", 0.001, 1e9,
        optional=True, flag="--grammar-timeout", over="400"),
    _seconds("mcp_timeout_s", "seconds in which an MCP server must start, and answer a call", 0.001, _SECONDS,
        flag="--mcp-timeout", over="an error in the call's item; 424 for a server that does not start"),
    _int("max_mcp_calls", "calls of MCP tools in one answer", 1, 10_000, over="the model continues without tools"),
    _int("max_mcp_characters", "characters of the result of an MCP tool", 1, _INT32_MAX, over="the rest is cut off"),
    _int("retry_after_s", "seconds in the Retry-After header of answers 429 and 503", 0, 86_400, metavar=None),
)  # fmt: skip
BY_NAME: Final = {option.name: option for option in (*ENGINE, *TUNING, *MODEL, *SERVER, *ACCESS, *LIMITS)}
EMBEDDER_BY_NAME: Final = {option.name: option for option in EMBEDDER}
