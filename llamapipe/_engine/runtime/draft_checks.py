"""Checks which models and layers can draft for a model.

Open this file when ``Engine(draft=...)`` refuses a draft, or takes one that it should not. ``gguf/draft_file.py`` reads
the metadata of the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamapipe.gguf import draft_file
from llamapipe.gguf.draft_file import ASSISTANT, assistant_problem, dflash_problem, eagle3_problem
from llamapipe.llama.model import Model
from llamapipe.native.load import native

if TYPE_CHECKING:
    from llamapipe.gguf.check import GgufInfo

# llama.cpp's rule for a draft model: the first tokens, which are often special, may differ, and the sizes a little.
_FIRST_COMPARED, _MOST_MORE = 5, 128


def mtp_problem(model: Model) -> str:
    """Return why a model cannot draft with its own MTP layers; empty if it can."""
    problem = draft_file.mtp_problem(
        model.file_metadata, model.tensors, model.n_embd, model.n_layer, model.n_mtp_layers
    )
    if not problem and not model.load_mtp:
        problem = "was loaded without its MTP layers: use lp.Model(path, load_mtp=True)"
    return f"{model.path.name} {problem}" if problem else _states_problem(model)


def _last_states_problem(model: Model) -> str:
    """Return why a model's last hidden states are not available; empty if they are."""
    problem = draft_file.last_states_problem(model.file_metadata, model.n_embd)
    return f"{model.path.name} {problem}" if problem else _states_problem(model)


def _states_problem(model: Model) -> str:
    """Return why a model's hidden states are not available; empty if they are."""
    if model.on_workers:
        return f"{model.path.name} is on RPC workers"
    module = native()
    problem = module.lib.lp_states_problem()
    return "" if problem == module.ffi.NULL else f"{module.ffi.string(problem).decode()}"


def check_draft_file(model: Model, info: GgufInfo) -> None:
    """Raise ValueError for a draft file whose metadata does not fit the model."""
    problem = ""
    if check := {"eagle3": eagle3_problem, "dflash": dflash_problem}.get(info.architecture):
        sizes = (model.architecture, model.n_layer, model.n_embd, model.n_vocab)
        problem = _states_problem(model) or check(info, *sizes)
    elif info.architecture == ASSISTANT:
        problem = _last_states_problem(model) or assistant_problem(
            info, model.file_metadata, model.n_embd, model.n_vocab
        )
    if problem:
        raise ValueError(f"draft: {info.path.name} does not draft for {model.path.name}: {problem}")


def check_assistant(model: Model, draft: Model) -> None:
    """Raise ValueError unless a Gemma 4 assistant belongs to the model and can read the model's cells."""
    from llamapipe.gguf.check import check_gguf

    check_draft_file(model, check_gguf(draft.path))
    away = {device.name for device in model.devices} - {device.name for device in draft.devices}
    if away or draft.on_workers:
        where = (
            "RPC workers" if draft.on_workers else ", ".join(sorted(device.name for device in draft.devices))
        )
        raise ValueError(
            f"draft: {draft.path.name} is on {where}, and reads cells of {model.path.name}, which is on "
            f"{', '.join(sorted(device.name for device in model.devices))}; load it there, or give its path"
        )
    if problem := _vocabulary_difference(model, draft):
        raise ValueError(
            f"draft: {draft.path.name} does not draft for {model.path.name}: their vocabularies differ ({problem})"
        )


def check_state_draft(model: Model, draft: Model) -> None:
    """Raise ValueError unless an EAGLE-3 or DFlash draft belongs to the model."""
    from llamapipe.gguf.check import check_gguf

    check_draft_file(model, check_gguf(draft.path))
    if problem := _vocabulary_difference(model, draft):
        raise ValueError(
            f"draft: {draft.path.name} does not draft for {model.path.name}: their vocabularies differ ({problem})"
        )


def check_draft(model: Model, draft: Model) -> None:
    """Raise ValueError unless ``draft`` has the model's vocabulary and cells of drafted tokens can be removed."""
    if draft.n_swa:  # each drafted token may take a cell that has left the window
        raise ValueError(
            f"draft: the model that drafts, {draft.path.name}, has a sliding window, whose cells others take, "
            "so drafted tokens cannot be removed; leave draft out"
        )
    if not draft.is_causal:
        raise ValueError(f"draft: {draft.path.name} is not causal, so it cannot generate text")
    problem = _vocabulary_difference(model, draft)
    if problem:
        raise ValueError(
            f"draft: the vocabularies of {model.path.name} and {draft.path.name} differ ({problem}); "
            "give a smaller model of the same family"
        )


def _vocabulary_difference(model: Model, draft: Model) -> str:
    vocab, draft_vocab = model.vocab, draft.vocab
    if abs(model.n_vocab - draft.n_vocab) > _MOST_MORE:
        return f"{model.n_vocab} and {draft.n_vocab} tokens"
    if (vocab.add_bos, vocab.add_eos) != (draft_vocab.add_bos, draft_vocab.add_eos):
        return "one of them adds a BOS or EOS token, the other does not"
    if (vocab.add_bos and vocab.bos != draft_vocab.bos) or (vocab.add_eos and vocab.eos != draft_vocab.eos):
        return "their BOS or EOS tokens"
    for token in range(_FIRST_COMPARED, min(model.n_vocab, draft.n_vocab)):
        if vocab.piece(token) != draft_vocab.piece(token):
            return f"token {token} is {vocab.piece(token)!r} and {draft_vocab.piece(token)!r}"
    return ""
