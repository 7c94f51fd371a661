"""Writes ``tokenizer.json`` and the two files that programs read with it, as in a model's repository on the hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from llamapipe.gguf.tokenizer_json import AddedToken, tokenizer_json


def write_tokenizer(
    source: Path,
    folder: Path,
    added: Sequence[AddedToken],
    *,
    first: int | None,
    last: int | None,
    bos: int | None,
    eos: int | None,
    ends: Sequence[int],
    n_ctx_train: int,
    chat_template: str | None,
) -> Path:
    """Writes the three files for the checked GGUF file ``source`` and returns the folder.

    ``bos``, ``eos``: the special tokens that templates refer to; ``ends``: all tokens that end generation. For
    other arguments see ``tokenizer_json``. Output is deterministic. Raises CannotExportError, OSError.
    """
    tokenizer = tokenizer_json(source, added, first, last)
    names = {token: piece for piece, token in tokenizer["model"]["vocab"].items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": first is not None,
        "add_eos_token": last is not None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": n_ctx_train,
    }
    for name, token in (("bos_token", bos), ("eos_token", eos)):
        if token is not None:
            config[name] = names[token]
    if chat_template is not None:
        config["chat_template"] = chat_template
    model = {
        "architectures": ["GGUF"],  # readers require one; no program loads weights with it
        "model_type": "gguf",
        "vocab_size": len(names),
        "max_position_embeddings": n_ctx_train,
        "bos_token_id": bos,
        "eos_token_id": list(ends) if len(ends) > 1 else eos,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (
        ("tokenizer.json", tokenizer),
        ("tokenizer_config.json", config),
        ("config.json", model),
    ):
        with NamedTemporaryFile(
            "w", encoding="utf-8", dir=folder, prefix=f".{name}.", delete=False
        ) as partial:
            try:
                json.dump(content, partial, ensure_ascii=False)
                partial.close()
                Path(partial.name).chmod(0o644)
                Path(partial.name).replace(folder / name)
            except BaseException:
                Path(partial.name).unlink()
                raise
    return folder
