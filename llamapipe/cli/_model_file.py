"""Reports on a model for ``llamapipe doctor -m FILE``: the file's facts, whether it fits, and how to serve it.

``look_at`` runs in the doctor's child process. It reads the file's header and vocabulary, but no weights.
``findings_of`` puts the result into words.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llamapipe as lp
from llamapipe._messages import listed, size_text
from llamapipe.cli.options import template_problem
from llamapipe.gguf.check import GgufInfo, check_gguf, tensor_bytes, type_name
from llamapipe.gguf.draft_file import DRAFT_KINDS, blocks_problem, mtp_problem, target_layers
from llamapipe.gguf.mmproj import mmproj_beside
from llamapipe.host.memory import free_memory
from llamapipe.llama.kv_memory import draft_cell_bytes, memory_sizes
from llamapipe.llama.model import packs_architecture
from llamapipe.native.load import native

_CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
_USUAL_CONTEXT, _USUAL_SLOTS, _MOST_SLOTS = 8192, 8, 64
# The share of free memory to plan with: the prefix cache takes a tenth, buffers and the program take the rest.
_SHARE = 0.8


@dataclass(frozen=True)
class Finding:
    """One line that the doctor prints. ``fix``: what to do if the finding is not ``ok`` or could be better."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


def look_at(path: Path) -> dict[str, Any]:
    """Return the facts about a file, for JSON. Raises ModelLoadError."""
    info = check_gguf(path)
    if info.is_vocab_only:
        raise lp.errors.ModelLoadError(
            f"{path} holds a vocabulary without weights; give the file of a whole model"
        )
    ffi, lib = native().ffi, native().lib
    level = lib.lp_kernels_level()
    names = {tensor.name for tensor in info.tensors}
    with lp.Model(path, vocab_only=True) as model:
        has_encoder = lib.llama_model_has_encoder(model.handle)
        has_decoder = lib.llama_model_has_decoder(model.handle)
        facts = {
            "path": str(path),
            "title": model.metadata.get("general.name", ""),
            "architecture": info.architecture,
            "n_params": sum(math.prod(tensor.dims) for tensor in info.tensors),
            "n_layer": info.n_layer,
            "n_ctx_train": info.n_ctx_train,
            "n_vocab": info.n_vocab,
            "n_parts": info.n_parts,
            "size_bytes": info.size_bytes,
            "is_served": not (has_encoder and has_decoder) and info.architecture not in DRAFT_KINDS,
            "generates": info.is_causal and not info.has_rank_head and not has_encoder,
            "is_recurrent": model.is_recurrent,
            "n_mtp_layers": (n_mtp := int(info.metadata.get(f"{info.architecture}.nextn_predict_layers", 0))),
            "mtp_bytes": _mtp_bytes(info, n_mtp),
            "mtp_problem": mtp_problem(info.metadata, names, info.n_embd, info.n_layer - n_mtp, n_mtp),
            "mtp_bytes_per_token": draft_cell_bytes(info.metadata, info.n_layer, info.n_embd),
            "drafts_for_layers": target_layers(info.metadata),
            "draft_problem": blocks_problem(info) if info.architecture == "dflash" else "",
            "weights": _weights(info),
            "kernels": None if level == ffi.NULL else ffi.string(level).decode(),
            **_template(model),
        }
        facts |= _projector(info, model)
    sizes = memory_sizes(info.metadata, info.n_layer, info.n_embd, "f16", "f16")
    # Sliding-window layers may hold fewer cells than the others, so for them this is an upper bound.
    facts["kv_bytes_per_token"] = None if sizes is None else sizes.full + sizes.window
    facts["kv_window_bytes_per_token"] = None if sizes is None else sizes.window
    facts["n_window"] = 0 if sizes is None else sizes.n_window
    facts["state_bytes"] = None if sizes is None else sizes.state
    return facts | _memory(facts)


def _mtp_bytes(info: GgufInfo, n_layers: int) -> int:
    """Return the size in bytes of the MTP layers, the last layers, which predict the token after the next."""
    first = info.n_layer - n_layers
    matches = ((re.match(r"blk\.(\d+)\.", tensor.name), tensor) for tensor in info.tensors)
    return sum(tensor_bytes(tensor) for match, tensor in matches if match and int(match[1]) >= first)


def _weights(info: GgufInfo) -> list[dict[str, Any]]:
    """Return the size and number of weight matrices by type, largest first, and whether llamapipe can pack them."""
    lib = native().lib
    names = {tensor.name for tensor in info.tensors}
    by_kind: dict[str, dict[str, Any]] = {}
    for tensor in info.tensors:
        if len(tensor.dims) < 2 or tensor.dims[1] == 1 or not tensor.name.endswith(".weight"):
            continue
        if "embd" in tensor.name and not (
            tensor.name == "token_embd.weight" and "output.weight" not in names
        ):
            continue  # rows of this matrix are looked up; a file without an output matrix also uses it as that
        name = type_name(tensor)
        ours = packs_architecture(info.architecture) and lib.lp_kernels_have(tensor.kind, *tensor.dims[:2])
        entry = by_kind.setdefault(
            f"{name} {ours}", {"type": name, "n_tensors": 0, "size_bytes": 0, "packed": bool(ours)}
        )
        entry["n_tensors"] += 1
        entry["size_bytes"] += tensor_bytes(tensor)
    return sorted(by_kind.values(), key=lambda entry: -int(entry["size_bytes"]))


def _template(model: lp.Model) -> dict[str, Any]:
    """Return whether the model can chat, and what its template supports; None if not known."""
    try:
        if (problem := template_problem(model)) is not None:
            return {"chat": False, "chat_problem": problem, "tools": None, "reasoning": None}
        form = model.chat_prompts.chat_format()
    except ImportError as error:  # the extra `chat` is not installed
        return {"chat": None, "chat_problem": str(error), "tools": None, "reasoning": None}
    return {
        "chat": True,
        "chat_problem": None,
        "tools": form.supports_tools,
        "reasoning": form.reasoning is not None,
    }


def _projector(info: GgufInfo, model: lp.Model) -> dict[str, Any]:
    """Return whether messages may contain images and audio, and the names and total size of the projector files.

    ``image_tokens``: the minimum and maximum number of tokens per image, each None without a limit; None as a whole if
    limits cannot be set.
    """
    beside = mmproj_beside(info.path, info.n_embd, lambda: model.metadata.get("general.name", ""))
    projector = beside[0] if len(beside) == 1 else None
    limits = None if projector is None else projector.image_tokens
    return {
        "images": projector is not None and projector.sees,
        "audio": projector is not None and projector.hears,
        "mmproj": [file.path.name for file in beside],
        "mmproj_bytes": sum(file.size_bytes for file in beside),
        "image_tokens": None if limits is None else [limits.least, limits.most],
    }


def _memory(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the free memory (of GPUs, else of the host) and how many slots fit next to the weights, by context."""
    gpus = [device for device in lp.devices() if device.type in ("gpu", "igpu")]
    free = sum(device.memory_free for device in gpus) if gpus else free_memory()
    slots = []
    if free is not None and (facts["kv_bytes_per_token"] or facts["state_bytes"]):
        room = free * _SHARE - facts["size_bytes"]
        contexts = {n for n in _CONTEXTS if n < facts["n_ctx_train"]} | {facts["n_ctx_train"]}
        for n_ctx in sorted(contexts):
            kv = facts["kv_bytes_per_token"] * n_ctx + facts["state_bytes"]
            slots.append({"n_ctx": n_ctx, "kv_bytes_per_slot": int(kv), "n_slots": max(int(room // kv), 0)})
    return {"memory": "gpu" if gpus else "host", "memory_free": free, "slots": slots}


def suggestion(facts: dict[str, Any], name: str) -> str | None:
    """Return a command that serves the model on this machine; None if the model does not fit or cannot be served."""
    if not facts["is_served"]:
        return None
    if not facts["generates"]:
        return f"llamapipe serve --embeddings {shlex.quote(name)}"
    command = f"llamapipe serve -m {shlex.quote(name)}"
    if not facts["slots"]:
        return command
    # Slots come before context: take the usual number of slots and the largest usual context that fits with them.
    usual = [
        entry for entry in facts["slots"] if entry["n_ctx"] <= max(_USUAL_CONTEXT, facts["slots"][0]["n_ctx"])
    ]
    for n_slots in (_USUAL_SLOTS, 4, 2, 1):
        for entry in reversed(usual):
            if entry["n_slots"] >= n_slots:
                return f"{command} -c {entry['n_ctx']} -np {n_slots}"
    return None


def findings_of(facts: dict[str, Any], name: str) -> Iterator[Finding]:
    """Yield the facts and the problems in words. ``name``: the user's name for the model."""
    size = f"{size_text(facts['size_bytes'])}{f' in {n} files' if (n := facts['n_parts']) > 1 else ''}"
    title = f"{facts['title']}: " if facts["title"] else ""
    about = f"{title}{facts['architecture']}, {_count(facts['n_params'])} parameters, {size}"
    yield Finding("model", True, about)
    yield Finding(
        "context", True, f"trained with {facts['n_ctx_train']:,} tokens; vocabulary of {facts['n_vocab']:,}"
    )
    yield _weights_finding(facts)
    if kind := DRAFT_KINDS.get(facts["architecture"]):
        reason = facts["draft_problem"]
        yield Finding(
            "use",
            not reason,
            f"{kind}: it drafts for the model that it was trained with, and cannot generate on its own",
            reason or "llamapipe serve -m MODEL --draft FILE",
        )
    elif not facts["is_served"]:
        yield Finding(
            "use",
            False,
            "an encoder-decoder model, which llamapipe does not serve: its engine computes and accepts decoders only",
            "use a decoder-only model, as nearly all chat models are; for embeddings, use an encoder-only one",
        )
    elif not facts["generates"]:
        yield Finding("use", True, "embeds or ranks texts; it does not generate any")
    else:
        yield _chat_finding(facts)
        yield _media_finding(facts)
        if n := facts["n_mtp_layers"]:
            layers = "a layer that predicts" if n == 1 else f"{n} layers that predict"
            use = "--draft mtp guesses with it" if n == 1 else "--draft mtp guesses with the first one"
            if problem := facts["mtp_problem"]:
                use = f"llamapipe cannot guess with {'it' if n == 1 else 'them'}: the file {problem}"
            size = size_text(facts["mtp_bytes"])
            cells = size_text(facts["mtp_bytes_per_token"] * 1024)
            yield Finding(
                "MTP",
                True,
                f"{layers} the token after the next, {size} and {cells} for 1024 tokens of context, loaded on demand; "
                f"{use}",
            )
    command = suggestion(facts, name)
    if facts["architecture"] in DRAFT_KINDS:
        if facts["kv_bytes_per_token"]:
            yield Finding("KV cells", True, _cells(facts))
    elif facts["generates"]:
        yield from _memory_findings(facts, command is not None)
    if command is not None:
        yield Finding("serve it with", True, command)


def _weights_finding(facts: dict[str, Any]) -> Finding:
    """Report the types of the weights and, on a CPU, the kernels that multiply them."""
    total = sum(entry["size_bytes"] for entry in facts["weights"]) or 1
    shares = [
        (f"{entry['type']} {100 * entry['size_bytes'] / total:.0f} %", entry["packed"])
        for entry in facts["weights"]
    ]
    if facts["memory"] == "gpu":
        return Finding("weights", True, ", ".join(share for share, _ in shares))
    ours, theirs = (
        ", ".join(share for share, packed in shares if packed is by_us) for by_us in (True, False)
    )
    parts = [f"{ours} with llamapipe's kernels for {facts['kernels']}"] if ours else []
    parts += [f"{theirs} with ggml's kernels"] if theirs else []
    n_slow = sum(entry["size_bytes"] for entry in facts["weights"] if not entry["packed"])
    note = ""
    if facts["kernels"] is not None and n_slow > total / 2:
        note = (
            "slow on this CPU for several requests at once: ggml's kernels unpack weights again for every few of them; "
            "Q4_K_M, Q5_K_M, Q6_K and Q8_0 files of the same model are faster"
        )
    return Finding("weights", True, "; ".join(parts) or "no matrices", note)


def _chat_finding(facts: dict[str, Any]) -> Finding:
    if facts["chat"] is None:
        return Finding("chat", True, "has a template", facts["chat_problem"])
    if not facts["chat"]:
        return Finding("chat", True, f"no: {facts['chat_problem']}; it completes texts")
    tools, reasoning = (("yes" if facts[key] else "no") for key in ("tools", "reasoning"))
    return Finding("chat", True, f"yes; tools: {tools}; reasoning: {reasoning}")


def _media_finding(facts: dict[str, Any]) -> Finding:
    files = facts["mmproj"]
    if not files:
        return Finding("images", True, "no: no projector (mmproj*.gguf) of this model is beside it")
    if len(files) > 1:
        fix = "choose one with --mmproj FILE"
        return Finding("images", True, f"no: {len(files)} projectors are beside it, {listed(files)}", fix)
    taken = " and ".join(
        what for what, takes in (("images", facts["images"]), ("sounds", facts["audio"])) if takes
    )
    detail = f"takes {taken} with {files[0]}, {size_text(facts['mmproj_bytes'])}, which the first one loads"
    if (limits := facts["image_tokens"]) is not None:
        least, most = limits
        ends = [f"at least {least}"] * (least is not None) + [f"at most {most}"] * (most is not None)
        detail += (
            f"; an image has {' and '.join(ends)} tokens" if ends else "; an image's tokens can be limited"
        )
        detail += " (--image-min-tokens, --image-max-tokens)"
    return Finding("images", True, detail)


def _memory_findings(facts: dict[str, Any], fits: bool) -> Iterator[Finding]:
    free, kv = facts["memory_free"], facts["kv_bytes_per_token"]
    where = "on GPUs" if facts["memory"] == "gpu" else "for this process"
    if kv is None:
        yield Finding(
            "KV cache", True, "the file's metadata does not give its size; `repr(engine)` and the log do"
        )
    elif kv:
        yield Finding("KV cells", True, _cells(facts))
    if facts["state_bytes"]:
        yield Finding(
            "state", True, f"{size_text(facts['state_bytes'])} for each request, whatever its length"
        )
    if facts["state_bytes"]:
        yield Finding("prefixes", True, "shared from states, which are saved where prompts diverge")
    elif facts["n_window"]:
        yield Finding(
            "prefixes", True, "shared anywhere while all cells are kept (swa_full), else from states"
        )
    if free is None:
        return
    detail = f"{size_text(free)} free {where}; weights {size_text(facts['size_bytes'])}"
    if facts["size_bytes"] > free or not fits:
        fix = "use a file of a smaller quantization, a smaller model, or a machine with more memory"
        yield Finding("memory", False, f"{detail}: too little for one request", fix)
        return
    yield Finding("memory", True, detail)
    many = [entry for entry in facts["slots"] if entry["n_slots"] > _MOST_SLOTS][-1:]
    rows = [f"over {_MOST_SLOTS} with {entry['n_ctx']:,} tokens" for entry in many]
    rows += [
        f"{entry['n_slots']} with {entry['n_ctx']:,}"
        for entry in facts["slots"]
        if entry["n_slots"] <= _MOST_SLOTS
    ]
    if rows:
        yield Finding("requests", True, f"fit at once, by context: {', '.join(rows)}")


def _cells(facts: dict[str, Any]) -> str:
    """Return, in words, the memory that a token takes, and how much of that is in sliding-window layers."""
    kv, in_windows = facts["kv_bytes_per_token"], facts["kv_window_bytes_per_token"]
    if not in_windows:
        return f"{size_text(kv)} for each token of a context (f16)"
    layers = f"in layers that see {facts['n_window']:,} tokens"
    return (
        f"at most {size_text(kv)} for each token of a context (f16), {size_text(in_windows)} of them {layers}"
    )


def _count(n: int) -> str:
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if n >= size:
            return f"{n / size:,.1f} {unit}"
    return f"{n:,}"
