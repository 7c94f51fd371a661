"""What to do instead of an option or a command that llama.cpp, vLLM or Ollama has and llamapipe has not."""

from __future__ import annotations

from collections.abc import Container, Iterable
from difflib import SequenceMatcher

from llamapipe.arguments import nearest

_FLASH_ATTENTION = "flash attention is used where the backend supports it; there is no option"
_PROMPT = "pass the prompt as an argument, without an option"
_HUB = "use -m hf:OWNER/REPO/FILE or -m hf:OWNER/REPO:QUANT"
_ALWAYS_ON = "it is always on; leave the option out"
_TLS = "the server speaks plain HTTP; use a proxy for TLS"
_UNSUPPORTED = "llamapipe does not support it"
# Options of llama.cpp and vLLM that have another name here.
_RENAMED = {
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--ctx-size": "--n-ctx",
    "--threads": "--n-threads",
    "--threads-batch": "--n-threads-batch",
    "--batch-size": "--n-batch",
    "--ubatch-size": "--n-ubatch",
    "--parallel": "--n-seq-max",
    "--gpu-layers": "--n-gpu-layers",
    "--cache-type-k": "--type-k",
    "--cache-type-v": "--type-v",
    "--keep": "--n-keep",
    "--reverse-prompt": "--stop",
    "-r": "--stop",
    "--samplers": "--sampler-order",
    "--grammar-file": "--grammar @FILE",
    "--json-schema-file": "--json-schema @FILE",
    "--chat-template-file": "--chat-template",
    "--system-prompt": "--system",
    "-sys": "--system",
    "--api-key": "--api-key-file",
    "-to": "--timeout",
    "--no-webui": "--no-page",
    "--no-ui": "--no-page",
    "--context-shift": "--overflow shift",
    "--kv-unified": "--n-cells",
    "-kvu": "--n-cells",
    "--cache-ram": "--cache-bytes",
    "-cram": "--cache-bytes",
    "--rerank": "--embeddings",
    "--reranking": "--embeddings",
    "-rpc": "--rpc",
    # vLLM's
    "--max-model-len": "--n-ctx",
    "--max-num-seqs": "--n-seq-max",
    "--max-num-batched-tokens": "--n-batch",
    "--served-model-name": "--alias",
    "--data-parallel-size": "--workers",
    "--allowed-origins": "--cors",
}
# llama.cpp's options without another name, and what to do.
_REMARKS = {
    "-hf": _HUB,
    "-hfr": _HUB,
    "--hf-repo": _HUB,
    "-p": _PROMPT,
    "--prompt": _PROMPT,
    "-fa": _FLASH_ATTENTION,
    "--flash-attn": _FLASH_ATTENTION,
    "--jinja": _ALWAYS_ON,
    "-cb": _ALWAYS_ON,
    "--cont-batching": _ALWAYS_ON,
    "--metrics": _ALWAYS_ON,
    "--slots": "/metrics and /model_info are always on; leave the option out",
    "--props": "/metrics and /model_info are always on; leave the option out",
    "--ssl-key-file": _TLS,
    "--ssl-cert-file": _TLS,
    "-cnv": "use llamapipe chat",
    "--conversation": "use llamapipe chat",
    "-i": "use llamapipe chat",
    "--interactive": "use llamapipe chat",
    "--lora": _UNSUPPORTED,
    "--mmproj": _UNSUPPORTED,
    "--model-draft": _UNSUPPORTED,
    "-md": _UNSUPPORTED,
    "--override-kv": _UNSUPPORTED,
    "--override-tensor": _UNSUPPORTED,
    "-ot": _UNSUPPORTED,
    "--mlock": "only Python has it: lp.Model(path, use_mlock=True)",
    "--device": "only Python has it: lp.Model(path, devices=[...])",
    "-dev": "only Python has it: lp.Model(path, devices=[...])",
    "--split-mode": "only Python has it: lp.Model(path, split_mode=...)",
    "-sm": "only Python has it: lp.Model(path, split_mode=...)",
    "--tensor-split": "only Python has it: lp.Model(path, tensor_split=[...])",
    "-ts": "only Python has it: lp.Model(path, tensor_split=[...])",
    "--main-gpu": "only Python has it: lp.Model(path, main_gpu=N)",
    "-mg": "only Python has it: lp.Model(path, main_gpu=N)",
}
# What an option means for one command, where llama.cpp's program for it, or a typo, means that.
_OF_COMMAND = {
    ("bench", "-p"): "use --prompt-tokens",
    ("serve", "-p"): "use --port",
    ("chat", "-cnv"): _ALWAYS_ON,
    ("chat", "--conversation"): _ALWAYS_ON,
    ("chat", "-i"): _ALWAYS_ON,
    ("chat", "--interactive"): _ALWAYS_ON,
}
_SAMPLING = {"-n": "max_tokens", "--temp": "temperature", "-s": "seed"}
_LEAST_LIKE = 0.7  # a suggestion that is less like the option misleads
# Commands of Ollama and of other programs.
_COMMANDS = {
    "run": "use llamapipe chat -m FILE",
    "pull": "-m hf:OWNER/REPO/FILE downloads a model at its first use",
    "list": "use llamapipe models",
    "ls": "use llamapipe models",
    "ps": "ask the running server: curl 127.0.0.1:8080/model_info",
    "show": "ask the running server: curl 127.0.0.1:8080/model_info",
    "create": "pass options instead of a Modelfile; llamapipe chat --help lists them",
    "rm": "models are files; llamapipe models --json lists their paths",
    "help": "use llamapipe --help",
    "version": "use llamapipe --version",
}


def about_option(wrong: str, command: str, known: Iterable[str], fields: Container[str] = ()) -> str:
    """What to add to a message about an unknown option: its name here, a remark, or the nearest name; or nothing.

    ``known``: the options of the command. ``fields``: the fields of requests, if the command is a server.
    """
    if (command, wrong) in _OF_COMMAND:
        return f"; {_OF_COMMAND[command, wrong]}"
    known = set(known)
    ours = _RENAMED.get(wrong)
    if ours is not None and ours.partition(" ")[0] in known:
        return f"; use {ours}"
    field = _SAMPLING.get(wrong) or (ours or wrong).lstrip("-").replace("-", "_")
    if field in fields:
        return f"; each request sets it: the field {field}"
    if wrong in _REMARKS:
        return f"; {_REMARKS[wrong]}"
    if ours is not None or not wrong.startswith("--"):
        return ""
    near = nearest(wrong[2:], [name[2:] for name in known if name.startswith("--")])
    if near is None or not (near.startswith(wrong[2:]) or _likeness(near, wrong[2:]) >= _LEAST_LIKE):
        return ""
    return f"; did you mean --{near}?"


def about_command(wrong: str, commands: Iterable[str]) -> str:
    """What to add to a message about an unknown command: what to use instead, the nearest name, or all names."""
    if wrong in _COMMANDS:
        return f"; {_COMMANDS[wrong]}"
    names = list(commands)
    near = nearest(wrong, names)
    return f"; commands: {', '.join(names)}" if near is None else f"; did you mean {near}?"


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
