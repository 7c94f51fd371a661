"""The names that people know from other libraries and programs, with what to use instead.

Open this file to help people who come from another library or program. ``_messages`` shows the advice in errors.
``_sampling_table`` has the names of sampling options elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from llamapipe._sampling_table import BY_NAME, OPTIONS

_ENGINE = "an Engine has it: Engine(model)"
_EMBEDDER = "an Embedder has it: Embedder(model)"
_SCORES = (
    "logits of all tokens are not kept; use Llama.engine.score, or prompt_logprobs, or llamapipe.Pipeline"
)
_GUESSES = (
    "repeated text is guessed without a draft: leave draft_model out, or give it the path of a smaller model"
)
_PLAIN_DICTS = "messages and answers are plain dicts: annotate them with dict[str, Any]"
_OWN_TOKENIZER = "the model file's tokenizer is used"
_NO_STRUCT = "there are no structs of llama_cpp; use Llama.n_ctx(), or the attributes of Llama.engine"
_FLASH_ATTENTION = "flash attention is used where the backend supports it; there is no option"
_COUNTS = "it has n_prompt_tokens, n_cached_tokens and n_completion_tokens"
_IN_CHATS = {f"--{name}": f"type /{name} FILE in the conversation" for name in ("image", "save")}
_ALWAYS_ON = "it is always on; leave the option out"
_LEAVE_OUT = "nothing here needs it; leave the option out"
_TLS = "the server speaks plain HTTP; use a proxy for TLS"
_LOG = "requests and errors are logged on stderr; -v adds llama.cpp's log"
_CORES = "start the process under taskset or numactl; --n-threads limits the threads"
_GUESSED = "how many tokens are guessed follows from measured times; leave the option out"
_GUESSED_FIELD = (
    "leave it out: how many tokens are guessed follows from measured times; speculate switches it off"
)
_DRAFT_MEMORY = "the draft model has the context and the devices of the model; leave the option out"
_DRAFT_HF = "use --draft hf:OWNER/REPO/FILE or --draft hf:OWNER/REPO:QUANT"
_STATES = "--cache-bytes limits saved states; leave the option out"
_NO_PRESETS = "there are no presets of models; use -m hf:OWNER/REPO:QUANT"
_LORA_NAMES = "use --lora NAME=FILE; a request names it as its model"
_PATHS = "a proxy can rewrite paths; or mount llamapipe.server.app(engine) in an application"
_ROUTES_ON = "/slots, /props and /metrics are always on; leave the option out"
_FROM_TEMPLATE = "the chat template determines it; leave the option out"
_ONLY_PROMPT = "generate applies no template and does not repeat the prompt; leave the option out"
_PLACEMENT = "llamapipe.Engine(llamapipe.Model(path, tensor_placement={pattern: device})) places tensors"
_CPU_MOE = "llamapipe.Engine(llamapipe.Model(path, n_cpu_moe=N)) keeps the experts of N layers on the CPU"
_NO_SAMPLING = "temperature 0 always takes the most probable token"
_MEMBER_FORMAT = ("text (its member format)", "output_config (its member format)")
_AT_START = "the model is chosen when the server starts, with -m"
_FROM_MODELFILE = (
    "give llamapipe serve what the Modelfile sets: -m FILE, --system @FILE, --temp T and others, --lora NAME=FILE, "
    "--chat-template FILE (Jinja)"
)
# Of vLLM, in Python.
_ASYNC = "an Engine has the calls of asyncio, too: agenerate, astream, achat"
_CONSTRAINTS = "use SamplingParams(json_schema=…, regex=…, choice=… or grammar=…)"
_PROMPTS = "a prompt is a str or a list of token ids"
_BY_FILE = "the model's file determines it; leave it out"
_NOT_NEEDED = "nothing here needs it; leave it out"
_NO_BEAMS = (
    "there is no beam search; SamplingParams(n=…, logprobs=0) and cumulative_logprob rank several completions"
)
_LORA = "use model.load_adapter(FILE, NAME), at any time, and SamplingParams(adapter=NAME)"
_SPLIT = "a Model has it: Model(path, split_mode=…)"
_TOKENIZER = "the model has it: engine.model.tokenize and detokenize"
_OLLAMA = "start the server with --ollama"

# Options of an Embedder's calls.
_IN_EMBEDDER: Final[Mapping[str, str | tuple[str, ...]]] = {
    **dict.fromkeys(("use_tqdm", "show_progress_bar", "show_progress"), ("progress",)),
    "normalize_embeddings": ("normalize",),
    **dict.fromkeys(("truncate_prompt_tokens", "truncation"), ("truncate",)),
    **dict.fromkeys(("pooling_params", "pooling"), "an Embedder has it: Embedder(model, pooling=…)"),
    **dict.fromkeys(("top_n", "top_k"), "the best ones are first: rerank(…)[:n]"),
}
# By the place of a name: advice, or names here, the first of which that the place knows is meant.
INSTEAD: Final[Mapping[str, Mapping[str, str | tuple[str, ...]]]] = {
    "llamapipe": {
        "Llama": "from llamapipe.compat import Llama",
        **dict.fromkeys(("LLM", "LLMEngine"), "use llamapipe.Engine"),
        **dict.fromkeys(("AsyncLLM", "AsyncLLMEngine"), _ASYNC),
        **dict.fromkeys(("EngineArgs", "AsyncEngineArgs"), "use llamapipe.Engine(…) and llamapipe.EngineTuning"),
        **dict.fromkeys(("GuidedDecodingParams", "StructuredOutputsParams"), _CONSTRAINTS),
        **dict.fromkeys(("TextPrompt", "TokensPrompt"), _PROMPTS),
        **dict.fromkeys(("RequestOutput", "CompletionOutput"), "use llamapipe.Completion and its choices"),
        "LoRARequest": _LORA,
        "BeamSearchParams": _NO_BEAMS,
        "PoolingParams": "use llamapipe.Embedder(path).embed",
        "generate": "use llamapipe.Engine(path).generate",
        "chat": "use llamapipe.Engine(path).chat",
        "embed": "use llamapipe.Embedder(path).embed",
        "serve": "from llamapipe.server import serve",
    },
    "Model": dict.fromkeys(("generate", "stream", "chat", "score"), _ENGINE)
    | dict.fromkeys(("ngl", "num_gpu", "gpu_layers"), ("n_gpu_layers",))
    | {"embed": _EMBEDDER, "model_path": ("path",), "model": ("path",)},
    "Engine": dict.fromkeys(("embed", "rerank"), _EMBEDDER)
    | dict.fromkeys(("max_model_len", "num_ctx"), ("n_ctx",))
    | dict.fromkeys(("max_num_seqs", "n_parallel", "num_parallel"), ("n_seq_max",))
    | {
        "gpu_memory_utilization": ("n_cells",),
        "enable_prefix_caching": ("prefix_cache",),
        "kv_cache_dtype": ("type_k",),
        "num_thread": ("n_threads",),
        "create_chat_completion": "use chat, or llamapipe.compat.Llama, which has llama-cpp-python's methods",
        "create_completion": "use generate, or llamapipe.compat.Llama, which has llama-cpp-python's methods",
        "tokenize": "the model has it: engine.model.tokenize",
        "detokenize": "the model has it: engine.model.detokenize",
        # Of vLLM: options, then methods.
        **dict.fromkeys(
            ("dtype", "quantization", "load_format", "tokenizer", "tokenizer_mode", "generation_config"),
            _BY_FILE,
        ),
        **dict.fromkeys(
            ("trust_remote_code", "enforce_eager", "swap_space", "block_size", "compilation_config", "max_logprobs",
             "disable_log_stats", "enable_chunked_prefill", "structured_outputs_config", "guided_decoding_backend",
             "limit_mm_per_prompt", "distributed_executor_backend"),
            _NOT_NEEDED,
        ),
        **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "lora_modules"), _LORA),
        **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), _SPLIT),
        "data_parallel_size": "start llamapipe serve with --workers N",
        "max_num_batched_tokens": "use tuning=EngineTuning(n_batch=…)",
        "cpu_offload_gb": "a Model has it: Model(path, n_gpu_layers=…)",
        "hf_overrides": "a Model has it: Model(path, kv_overrides=…)",
        "download_dir": "set the environment variable HF_HUB_CACHE",
        "speculative_config": ("draft",),
        **dict.fromkeys(("task", "runner", "convert", "encode", "classify", "reward"), _EMBEDDER),
        "beam_search": _NO_BEAMS,
        "get_tokenizer": _TOKENIZER,
        "get_metrics": ("stats",),
        "abort": "close the stream, or cancel the task that awaits it",
        **dict.fromkeys(("add_request", "enqueue"), "use stream, or call generate from several threads"),
    },
    "Embedder": {
        **dict.fromkeys(("max_model_len", "num_ctx"), ("n_ctx",)),
        **dict.fromkeys(("max_num_seqs", "n_parallel"), ("n_seq_max",)),
        **dict.fromkeys(("pooling_type", "pooler_config", "override_pooler_config"), ("pooling",)),
        **dict.fromkeys(("task", "runner", "convert"), _NOT_NEEDED),
        "encode": ("embed",),
        **dict.fromkeys(("score", "classify"), ("rerank",)),
    },
    **dict.fromkeys(("embed", "aembed", "rerank", "arerank"), _IN_EMBEDDER),
    # Attributes of other libraries' results.
    "Completion": {
        "outputs": ("choices",),
        "usage": _COUNTS,
        **dict.fromkeys(("content", "response"), ("text",)),
        **dict.fromkeys(("prompt", "prompt_token_ids"), "results are in the order of prompts; it has n_prompt_tokens"),
        "metrics": ("timings",),
        "num_cached_tokens": ("n_cached_tokens",),
    },
    "Choice": {"stop_reason": "stop_string and stop_token say what ended it"},
    "TokenLogprob": {
        "token_id": ("id",),
        **dict.fromkeys(("token", "decoded_token"), ("text",)),
        **dict.fromkeys(("top_logprobs", "rank"), ("top",)),
    },
    "ChatCompletion": {"outputs": ("choices",), "usage": _COUNTS, **dict.fromkeys(("text", "response"), ("content",))},
    "Delta": {"content": ("text",)},
    "ChatDelta": {"text": ("content",)},
    # Attributes of llama-cpp-python.
    "Llama": {
        "_scores": _SCORES,
        "_ctx": "there is no llama_cpp context; use Llama.engine, or llamapipe.Pipeline",
        "_batch": "there is no llama_cpp batch; use llamapipe.Pipeline",
        **dict.fromkeys(("context_params", "model_params"), _NO_STRUCT),
        **dict.fromkeys(("n_threads", "n_threads_batch"), "the engine changes it: use Llama.engine.stats().n_threads"),
        # Arguments of the constructor in versions that others maintain.
        **dict.fromkeys(("override_tensor", "tensor_buft_overrides"), _PLACEMENT),
        **dict.fromkeys(("n_cpu_moe", "cpu_moe"), _CPU_MOE),
    },
    "LlamaState": {"scores": _SCORES},
    # Names and modules of llama_cpp.
    "llama_cpp": {
        **dict.fromkeys(("LlamaPromptLookupDecoding", "LlamaDraftModel", "llama_speculative"), _GUESSES),
        **dict.fromkeys(
            ("llama_types", "ChatCompletionRequestMessage", "ChatCompletionTool", "CreateChatCompletionResponse",
             "CreateChatCompletionStreamResponse", "CreateCompletionResponse", "CreateCompletionStreamResponse",
             "CreateEmbeddingResponse"),
            _PLAIN_DICTS,
        ),
        "llama_chat_format": "the model's own template formats chats; Llama(chat_format=…) names another one, and "
        "Llama(chat_template=FILE) gives one",
        "llama_cpp": "llama.cpp's own functions are not here: use llamapipe.Pipeline, which computes batches",
        **dict.fromkeys(
            ("Llava15ChatHandler", "Llava16ChatHandler", "MoondreamChatHandler", "NanoLlavaChatHandler",
             "Llama3VisionAlphaChatHandler", "MiniCPMv26ChatHandler", "Qwen25VLChatHandler", "Gemma3ChatHandler",
             "ObsidianChatHandler", "MTMDChatHandler", "mtmd_cpp", "llava_cpp"),
            "leave chat_handler out and put the projector (mmproj*.gguf) beside the model, or use "
            "llamapipe.Model(FILE, mmproj=FILE)",
        ),
        **dict.fromkeys(
            ("llama_supports_gpu_offload", "llama_supports_mmap", "llama_print_system_info"),
            "llamapipe doctor shows devices and features",
        ),
        "llama_log_set": "llama.cpp's log goes to the logger llamapipe.native of Python's logging",
        **dict.fromkeys(("llama_backend_init", "llama_backend_free", "llama_numa_init"), "leave it out"),
        "LLAMA_DEFAULT_SEED": "it is Llama's default: leave seed out",
        **dict.fromkeys(("llama_grammar", "llama_cache"), "use the classes of llamapipe.compat"),
        **dict.fromkeys(("llama_tokenizer", "LlamaHFTokenizer", "BaseLlamaTokenizer"), _OWN_TOKENIZER),
        "BaseLlamaCache": "prefixes are always cached; LlamaRAMCache is accepted",
    },
    "LlamaRAMCache": {"cache_state": "prefixes are kept by the engine: see Llama.engine.stats()"},
    # Names of sampling options in Python, of llama-cpp-python, Ollama, transformers and vLLM.
    "SamplingParams": {
        **{name: (option.name,) for option in OPTIONS for name in option.elsewhere},
        **dict.fromkeys(("response_format", "format", "guided_json"), ("json_schema",)),
        "guided_regex": ("regex",),
        "guided_choice": ("choice",),
        "guided_grammar": ("grammar",),
        **dict.fromkeys(("structured_outputs", "guided_decoding"), "use json_schema, regex, choice or grammar"),
        "do_sample": _NO_SAMPLING,
        "stream": "use engine.stream or engine.stream_chat",
        **dict.fromkeys(
            ("best_of", "use_beam_search", "beam_width", "num_beams", "length_penalty", "early_stopping"), _NO_BEAMS
        ),
        "lora_request": ("adapter",),
        "thinking_token_budget": ("reasoning_budget",),
        "include_stop_str_in_output": "the text ends before the stop string, which Choice.stop_string names",
        **dict.fromkeys(
            ("skip_special_tokens", "spaces_between_special_tokens"),
            "control tokens are never part of the text; token_ids has them",
        ),
        **dict.fromkeys(("detokenize", "output_kind", "flat_logprobs"), _NOT_NEEDED),
        "truncate_prompt_tokens": "shorten the prompt: engine.model.tokenize(text)[-n:] is one, too",
    },
    # Keys of a file for serve --models.
    "models file": {
        **dict.fromkeys(("path", "model"), ("file",)),
        **dict.fromkeys(("ctx_size", "num_ctx", "max_model_len", "c"), ("n_ctx",)),
        **dict.fromkeys(("parallel", "num_parallel", "np"), ("n_seq_max",)),
        **dict.fromkeys(("gpu_layers", "num_gpu", "ngl"), ("n_gpu_layers",)),
        **dict.fromkeys(("alias", "name"), ("aliases",)),
        "keep_alive": ("ttl",),
        "embedding": ("embeddings",),
        **dict.fromkeys(
            (*BY_NAME, *(name for option in OPTIONS for name in option.elsewhere)),
            "it is no option of one model: serve's options set it for all, requests for themselves",
        ),
    },
    # Keys of a tool, and the type of one that is sent to Anthropic's API.
    "tool": {"input_schema": ("parameters",), "parameters": ("input_schema",)},
    "Anthropic's tools": {"function": "in this API, a tool has name, description and input_schema"},
    "tool choice": {"any": ("required",)},
    # Keywords of calls.
    "call": {
        "system": 'give chat() a message with the role: {"role": "system", "content": …}',
        "use_tqdm": ("progress",),
        "sampling_params": "give SamplingParams as params, the argument after the prompt or the messages",
        "lora_request": "use SamplingParams(adapter=NAME)",
        "continue_final_message": ("continue_last",),
        "add_generation_prompt": "it always is, unless continue_last=True; leave it out",
        "chat_template": "a Model has it: Model(path, chat_template=…)",
        "chat_template_kwargs": ("template_args",),
    },
    # Options of llama.cpp's programs, then of vLLM.
    "command line": {
        **{name: (f"--{option.name.replace('_', '-')}",) for option in OPTIONS for name in option.elsewhere},
        "--ctx-size": ("--n-ctx",),
        "--threads": ("--n-threads",),
        "--threads-batch": ("--n-threads-batch",),
        "--batch-size": ("--n-batch",),
        "--ubatch-size": ("--n-ubatch",),
        "--parallel": ("--n-seq-max",),
        "--gpu-layers": ("--n-gpu-layers",),
        "--cache-type-k": ("--type-k",),
        "--cache-type-v": ("--type-v",),
        "--keep": ("--n-keep",),
        "--grammar-file": ("--grammar @FILE",),
        "--json-schema-file": ("--json-schema @FILE",),
        "--chat-template-file": ("--chat-template",),
        **dict.fromkeys(("--system-prompt", "-sys"), ("--system",)),
        "--api-key": "put the key into the variable LLAMAPIPE_API_KEYS, or into a file: --api-key-file FILE",
        "-to": ("--timeout",),
        **dict.fromkeys(("--no-webui", "--no-ui"), ("--no-page",)),
        "--context-shift": ("--overflow shift",),
        **dict.fromkeys(("--kv-unified", "-kvu"), ("--n-cells",)),
        **dict.fromkeys(("--cache-ram", "-cram"), ("--cache-bytes",)),
        **dict.fromkeys(("--rerank", "--reranking"), ("--embeddings",)),
        "--spm-infill": ("--fim-order",),
        "-rpc": ("--rpc",),
        "--max-model-len": ("--n-ctx",),
        "--max-num-seqs": ("--n-seq-max",),
        "--max-num-batched-tokens": ("--n-batch",),
        "--served-model-name": ("--alias",),
        "--data-parallel-size": ("--workers",),
        "--allowed-origins": ("--cors",),
        "--gpu-memory-utilization": ("--n-cells",),
        **dict.fromkeys(("--speculative-config", "--model-draft", "--spec-draft-model"), ("--draft",)),
        **dict.fromkeys(("--lora-modules", "--enable-lora"), ("--lora",)),
        **dict.fromkeys(("--kv-cache-dtype", "--type_k"), ("--type-k",)),
        "--type_v": ("--type-v",),
        "--model_alias": ("--alias",),
        "--num_ctx": ("--n-ctx",),
        **dict.fromkeys(("--num-predict", "--num_predict"), ("--max-tokens",)),
        "-j": ("--json-schema",),
        "-jf": ("--json-schema @FILE",),
        **dict.fromkeys(("--tool-call-parser", "--enable-auto-tool-choice", "--reasoning-parser"), _FROM_TEMPLATE),
        "--reasoning-format": "each request sets it: the field reasoning_format",
        **dict.fromkeys(("--dtype", "--quantization"), "the file determines it; leave the option out"),
        **dict.fromkeys(("--tensor-parallel-size", "-tp"), "only Python has it: lp.Model(path, split_mode=...)"),
        "--pooling": "the embedding model's file determines it; lp.Embedder(path, pooling=...) sets it",
        **dict.fromkeys(("--no-display-prompt", "-no-cnv", "--no-conversation"), _ONLY_PROMPT),
        **dict.fromkeys(("-st", "--single-turn"), "llamapipe chat MESSAGE answers one message"),
        **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "use -m hf:OWNER/REPO/FILE or -m hf:OWNER/REPO:QUANT"),
        **dict.fromkeys(("-p", "--prompt"), "pass the prompt as an argument, without an option"),
        **dict.fromkeys(("-fa", "--flash-attn"), _FLASH_ATTENTION),
        **dict.fromkeys(("--jinja", "-cb", "--cont-batching", "--metrics"), _ALWAYS_ON),
        **dict.fromkeys(("--slots", "--no-slots", "--props"), _ROUTES_ON),
        "--no-jinja": "templates are always Jinja; leave the option out",
        **dict.fromkeys(
            ("-nocb", "--no-cont-batching"), "requests always share batches; -np 1 computes one at a time"
        ),
        **dict.fromkeys(
            ("--ssl-key-file", "--ssl-cert-file", "--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"), _TLS
        ),
        **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), "use llamapipe chat"),
        **dict.fromkeys(("--models-dir", "--model-dir"), "use --models DIR"),
        "--models-preset": "use --models FILE.toml",
        "--models-max": "use --memory SIZE, which all models together may take",
        "--mlock": "only Python has it: lp.Model(path, use_mlock=True)",
        # Others of llama-server.
        **dict.fromkeys(("--no-mmproj", "--no-mmproj-auto"), ("--mmproj off",)),
        "-mm": ("--mmproj",),
        **dict.fromkeys(("-mmu", "--mmproj-url"), "download the file, or use --mmproj hf:OWNER/REPO/FILE"),
        "--sse-ping-interval": ("--ping",),
        "--mcp-servers-config": ("--mcp",),
        **dict.fromkeys(
            ("--cors-methods", "--cors-headers"),
            "pages of the origins of --cors may use every method and header; leave the option out",
        ),
        "--cors-credentials": "keys are sent in a header, not in cookies; leave the option out",
        "--list-devices": "llamapipe doctor lists them",
        **dict.fromkeys(("-cl", "--cache-list"), "use llamapipe models"),
        "--reuse-port": "--workers N runs several processes on one port",
        "--no-models-autoload": "a model is loaded when a request names it",
        **dict.fromkeys(("-lm", "--load-mode", "--direct-io"), "--no-mmap reads the file into memory"),
        **dict.fromkeys(("-ncffn", "--n-cpu-ffn"), "-ot PATTERN=DEVICE places tensors"),
        **dict.fromkeys(
            ("--ui-config", "--ui-config-file", "--webui-config", "--webui-config-file"),
            "the page keeps its settings in the browser; --no-page turns it off",
        ),
        **dict.fromkeys(
            ("--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default", "--fim-qwen-7b-default",
             "--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "--fim-qwen-30b-default", "--gpt-oss-20b-default",
             "--gpt-oss-120b-default", "--vision-gemma-4b-default", "--vision-gemma-12b-default"),
            _NO_PRESETS,
        ),
        **dict.fromkeys(("-dr", "--docker-repo"), "use -m hf:OWNER/REPO:QUANT"),
        **dict.fromkeys(("-hfd", "-hfrd", "--hf-repo-draft", "--spec-draft-hf"), _DRAFT_HF),
        "-rea": ("--reasoning",),
        "--mirostat-lr": ("--mirostat-eta",),
        "--mirostat-ent": ("--mirostat-tau",),
        "--cors-origins": ("--cors",),
        **dict.fromkeys(("-mu", "--model-url"), "download the file, or use -m hf:OWNER/REPO/FILE"),
        **dict.fromkeys(("-hff", "--hf-file"), "use -m hf:OWNER/REPO/FILE"),
        **dict.fromkeys(("-hft", "--hf-token"), "set the environment variable HF_TOKEN"),
        "--offline": "set the environment variable HF_HUB_OFFLINE=1",
        "--numa": "start the process under numactl",
        **dict.fromkeys(
            ("-C", "-Cb", "-Cr", "-Crb", "--cpu-mask", "--cpu-range", "--cpu-strict", "--cpu-mask-batch",
             "--cpu-range-batch", "--cpu-strict-batch", "--prio", "--poll"),
            _CORES,
        ),
        **dict.fromkeys(
            ("-fit", "--fit", "-fitt", "--fit-target", "-fitc", "--fit-ctx"), "llamapipe doctor -m FILE shows what fits"
        ),
        **dict.fromkeys(
            ("-lv", "--log-verbosity", "--log-file", "--log-disable", "--log-colors", "--log-prefix", "--log-jsonl",
             "--log-timestamps", "--no-log-prefix", "--no-log-timestamps", "--log-level", "--uvicorn-log-level",
             "--disable-log-requests", "--enable-log-requests", "--disable-log-stats"),
            _LOG,
        ),
        **dict.fromkeys(
            ("--cache-reuse", "-sps", "--slot-prompt-similarity", "--cache-prompt", "--cache-idle-slots",
             "--no-cache-idle-slots"),
            "the longest common prefix is always reused; leave the option out",
        ),
        **dict.fromkeys(
            ("--no-cache-prompt", "--no-enable-prefix-caching"), "each request sets it: the field cache_prompt"
        ),
        **dict.fromkeys(
            ("-ctxcp", "--ctx-checkpoints", "--swa-checkpoints", "-cms", "--checkpoint-min-step", "-cpent"), _STATES
        ),
        "--swa-full": "it is the default, and --no-swa-full turns it off; leave the option out",
        "--no-context-shift": "it is the default, --overflow stop; leave the option out",
        **dict.fromkeys(
            ("--warmup", "--no-warmup", "--perf", "--no-perf", "--check-tensors", "-nr", "--no-repack", "--no-host",
             "--op-offload", "--no-op-offload", "--threads-http", "-dt", "--defrag-thold", "--no-kv-unified",
             "--backend-sampling", "-bs", "--repack", "-kvo", "--kv-offload", "-no-kvu"),
            _LEAVE_OUT,
        ),
        **dict.fromkeys(("-nkvo", "--no-kv-offload"), "the KV cache is where the layers are: --n-gpu-layers"),
        **dict.fromkeys(("--lora-init-without-apply", "--lora-scaled"), _LORA_NAMES),
        **dict.fromkeys(
            ("--control-vector-scaled", "--control-vector-layer-range"),
            "only Python has it: model.load_control_vector(path, layers=...)",
        ),
        **dict.fromkeys(
            ("--draft-max", "--draft-min", "--draft-n", "--draft-n-min", "--draft-p-min", "--draft-p-split",
             "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min", "--spec-draft-p-split", "--spec-type",
             "--spec-default", "-lcs", "--lookup-cache-static", "-lcd", "--lookup-cache-dynamic"),
            _GUESSED,
        ),
        **dict.fromkeys(
            ("-cd", "-td", "-tbd", "-devd", "-ngld", "-ctkd", "-ctvd", "--ctx-size-draft", "--gpu-layers-draft",
             "--n-gpu-layers-draft", "--device-draft", "--cache-type-k-draft", "--cache-type-v-draft",
             "--threads-draft", "--spec-draft-ngl", "--spec-draft-device", "--spec-draft-type-k",
             "--spec-draft-type-v", "--spec-draft-threads"),
            _DRAFT_MEMORY,
        ),
        **dict.fromkeys(("--webui", "--ui", "--models-autoload"), _ALWAYS_ON),
        "--sleep-idle-seconds": "use --models FILE.toml with ttl, after which an idle model ends",
        "--path": _PATHS,
        **dict.fromkeys(("--api-prefix", "--root-path"), _PATHS),
        # Others of vLLM.
        **dict.fromkeys(("-dp", "--api-server-count"), ("--workers",)),
        **dict.fromkeys(("--task", "--runner", "--convert"), ("--embeddings",)),
        "--cpu-offload-gb": ("--n-gpu-layers",),
        "--hf-overrides": ("--override-kv",),
        **dict.fromkeys(("--default-chat-template-kwargs", "--chat-template-kwargs"), ("--template-args",)),
        **dict.fromkeys(("-pp", "--pipeline-parallel-size"), "--rpc HOST:PORT places layers on other machines"),
        **dict.fromkeys(
            ("--enable-prefix-caching", "--enable-chunked-prefill", "--enable-request-id-headers",
             "--enable-prompt-tokens-details"),
            _ALWAYS_ON,
        ),
        **dict.fromkeys(
            ("--enforce-eager", "--trust-remote-code", "--swap-space", "--max-logprobs", "--block-size",
             "--guided-decoding-backend", "--structured-outputs-config", "--compilation-config", "--response-role",
             "--chat-template-content-format", "--limit-mm-per-prompt", "--disable-fastapi-docs",
             "--num-scheduler-steps", "--distributed-executor-backend"),
            _LEAVE_OUT,
        ),
        **dict.fromkeys(("--max-loras", "--max-lora-rank", "--max-cpu-loras"), _LORA_NAMES),
        **dict.fromkeys(
            ("--load-format", "--tokenizer", "--tokenizer-mode", "--generation-config"),
            "the file determines it; leave the option out",
        ),
        "--override-generation-config": "--temp, --top-p and others set what a request does not",
        "--download-dir": "set the environment variable HF_HUB_CACHE",
        "--scheduling-policy": "only Python has it: SamplingParams(priority=...)",
        "--uds": "use --host and --port",
        "--middleware": _PATHS,
        "--tags": _LEAVE_OUT,
        "--tools": "--mcp FILE gives /v1/responses the tools of MCP servers",
        **dict.fromkeys(("--device", "-dev"), "only Python has it: lp.Model(path, devices=[...])"),
        **dict.fromkeys(("--split-mode", "-sm"), "only Python has it: lp.Model(path, split_mode=...)"),
        **dict.fromkeys(("--tensor-split", "-ts"), "only Python has it: lp.Model(path, tensor_split=[...])"),
        **dict.fromkeys(("--main-gpu", "-mg"), "only Python has it: lp.Model(path, main_gpu=N)"),
    },
    # Where a command's option has another meaning than the same one of other commands.
    "bench": {"-p": "use --prompt-tokens"},
    "serve": {
        "-p": "use --port",
        # Options of llama-server that requests set here.
        "--grammar-file": "each request sets it: the field grammar",
        "--prefill-assistant": "each request sets it: the field continue_final_message",
        "--no-prefill-assistant": "it is the default; leave the option out",
        "--embd-normalize": "each request sets it: the field embd_normalize",
        "-l": "each request sets it: the field logit_bias",
        **dict.fromkeys(("-e", "--escape", "--no-escape"), _LEAVE_OUT),
        **dict.fromkeys(
            ("-sp", "--special"), "control tokens have no text; the field return_token_ids has their ids"
        ),
        **dict.fromkeys(("-jf", "--json-schema-file"), "each request sets it: the field json_schema"),
        "--reasoning-budget": "use --reasoning N",
        "--version": "use llamapipe --version",
        "--config": "give options, or --models FILE.toml, which lists models",
    },
    "run": {
        **_IN_CHATS,
        **dict.fromkeys(("-m", "--model"), "name the model without an option: llamapipe run MODEL"),
        # Options of ollama run.
        "--format": "use --json-schema",
        "--keepalive": "leave it out: the model is loaded for this command",
        **dict.fromkeys(("--think", "--hidethinking"), "--no-thinking turns reasoning off"),
        "--nowordwrap": "only a terminal gets wrapped lines; leave the option out",
    },
    **dict.fromkeys(
        ("ps", "stop"),
        dict.fromkeys(("--port", "--host", "-p"), "use --url http://HOST:PORT")
        | dict.fromkeys(("--api-key", "--api-key-file"), "put the key into the variable LLAMAPIPE_API_KEY"),
    ),
    "chat": _IN_CHATS | dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive"), _ALWAYS_ON),
    # Commands of Ollama and of other programs, and Ollama's and llama-cli's in a conversation.
    "commands": {
        "list": "use llamapipe models",
        "ls": "use llamapipe models",
        "show": "use llamapipe doctor -m FILE, or -m ollama:NAME",
        "create": f"pass options instead of a Modelfile; {_FROM_MODELFILE}",
        **dict.fromkeys(("cp", "copy"), "serve --alias NAME gives a model another name"),
        "push": "upload files with the program of the Hugging Face Hub",
        **dict.fromkeys(("signin", "signout", "login"), "nothing here needs an account; HF_TOKEN is for the Hub"),
        "help": "use llamapipe --help",
        "version": "use llamapipe --version",
    },
    "conversation": {
        "/set": "options of the command set parameters (llamapipe chat --help), /system TEXT the system message",
        "/read": "llamapipe chat - < FILE reads a message from a file",
        "/show": "llamapipe doctor -m FILE, or -m ollama:NAME, shows what a model is",
    },
    # Paths of Ollama's server, then of llama-server and others.
    "paths": {
        "/v1": "clients have it as their base URL; /v1/models lists the models",
        "/api/chat": f"{_OLLAMA}; or use /v1/chat/completions",
        "/api/generate": f"{_OLLAMA}; or use /v1/completions",
        **dict.fromkeys(("/api/embed", "/api/embeddings"), f"{_OLLAMA}; or use /v1/embeddings"),
        "/api/tags": f"{_OLLAMA}; or use /v1/models",
        **dict.fromkeys(("/api/ps", "/api/show", "/api/version"), f"{_OLLAMA}; or use /model_info"),
        "/api/pull": f"{_OLLAMA}; {_AT_START}",
        "/api/delete": _OLLAMA,
        "/api/copy": f"{_OLLAMA}; --alias gives a model another name",
        "/api/create": f"{_AT_START}; {_FROM_MODELFILE}",
        **dict.fromkeys(("/api/me", "/api/signout"), "this server has no accounts"),
        **dict.fromkeys(
            ("/api/web_search", "/api/web_fetch", "/api/experimental/web_search", "/api/experimental/web_fetch"),
            "tools of MCP servers can search: llamapipe serve --mcp FILE",
        ),
        "/api/push": "upload files with the program of the Hugging Face Hub",
        **dict.fromkeys(("/models/load", "/models/unload"), "start the server with --models for several models"),
        "/generate": "use /v1/completions",
        **dict.fromkeys(("/livez", "/readyz", "/ready", "/live", "/healthz"), "use /health"),
        **dict.fromkeys(("/docs", "/redoc"), "/openapi.json describes the routes"),
        **dict.fromkeys(("/load", "/get_load"), "/metrics and /slots show the load"),
        "/server_info": "use /props or /model_info",
        **dict.fromkeys(("/sleep", "/wake_up", "/is_sleeping"), "a model of serve --models ends after its ttl"),
        **dict.fromkeys(("/pooling", "/embed", "/encode"), "use /v1/embeddings"),
        "/info": "use /model_info",
        "/classify": "use /v1/rerank",
        "/v1/messages/batches": "use /v1/batches, which has OpenAI's format",
        "/v1/complete": "use /v1/messages",
        "/v1/chat/completions/control": "reasoning_budget limits the reasoning",
        **dict.fromkeys(
            ("/v1/chat/completions/render", "/v1/completions/render"), "use /apply-template or /tokenize"
        ),
        "/extras/tokenize/count": "use /tokenize, with prompt",
        "/flush_cache": "use /reset_prefix_cache",
        **dict.fromkeys(("/get_model_info", "/get_server_info"), "use /model_info"),
        "/v1/responses/compact": 'send the conversation itself; truncation: "auto" drops its oldest turns',
        "/invocations": "use /v1/chat/completions or /v1/completions",
    },
    # Fields of requests to other servers.
    "fields": {
        **{name: option.wire or option.route_fields for option in OPTIONS for name in option.elsewhere},
        **dict.fromkeys(
            BY_NAME["max_tokens"].elsewhere, (*BY_NAME["max_tokens"].route_fields, "num_predict", "n_predict")
        ),
        # Fields that the model reads.
        "prompt": ("messages", "input", "content"),
        "messages": ("input", "prompt (routes for chats have messages)"),
        "input": ("content", "prompt", "messages"),
        "content": ("input", "prompt", "messages"),
        "text": ("content", "prompt", "input", "response_format"),
        "system": ("instructions", "messages with the role system"),
        "instructions": ("system", "messages with the role system"),
        **dict.fromkeys(("images", "image_data"), ("messages (a message holds its images)",)),
        "raw": "/v1/completions applies no template",
        # Fields that restrict the answer.
        "format": ("response_format", *_MEMBER_FORMAT),
        "response_format": ("format", *_MEMBER_FORMAT, "json_schema"),
        "json_schema": ("schema", "format", *_MEMBER_FORMAT),
        "guided_json": ("json_schema",),
        "guided_regex": ("regex",),
        "stop": ("stop_sequences",),
        "stop_sequences": ("stop",),
        # How the model reasons.
        **dict.fromkeys(("reasoning", "thinking"), ("reasoning_effort", "think")),
        "reasoning_effort": ("reasoning (its member effort)", "output_config (its member effort)", "think"),
        "enable_thinking": ("chat_template_kwargs (its member enable_thinking)", "think"),
        # Sampling.
        **dict.fromkeys(("rep_pen", "penalty_repeat"), ("repeat_penalty", "repetition_penalty")),
        "typ_p": ("typical_p",),
        "do_sample": _NO_SAMPLING,
        **dict.fromkeys(("penalize_nl", "tfs_z"), "leave it out: llama.cpp no longer has it"),
        "slot_id": ("id_slot",),
        "random_seed": ("seed",),
        **dict.fromkeys(("beam_width", "num_beams"), "there is no beam search; n and logprobs rank several choices"),
        "best_of": "use n and logprobs, which rank several choices",
        "logprob_token_ids": ("top_logprobs",),
        **dict.fromkeys(("detokenize", "safe_prompt"), "leave it out: it has no effect here"),
        **dict.fromkeys(("speculative", "speculative.n_max", "speculative.n_min", "speculative.p_min"), _GUESSED_FIELD),
        "extra_body": "give its members as fields of the body, as OpenAI's client does",
        "options": "give each option as a separate field, such as temperature",
        "think": "give chat_template_kwargs with enable_thinking instead",
        "keep_alive": "leave it out: the model stays loaded until the server ends",
        **dict.fromkeys(("num_ctx", "n_ctx"), "leave it out: --n-ctx sets it when the server starts"),
        "timeout": "leave it out: --timeout sets it when the server starts",
        "api_key": "send the key as 'Authorization: Bearer KEY'",
    },
}  # fmt: skip
