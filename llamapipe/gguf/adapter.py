"""Checks that the GGUF files of LoRAs and control vectors are valid and fit their model, before llama.cpp gets them.

llama.cpp skips norm tensors without an error, compares only two of a pair's sizes with the model's, and ends the
process if keys have the wrong type. A pair that passes the checks here can be multiplied with the model's matrix.
llama.cpp does not read control vector files: it takes an array.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from llamapipe._messages import readable
from llamapipe.errors import ModelLoadError
from llamapipe.gguf._shapes import text
from llamapipe.gguf.check import Stamp, check_tensors, naming, open_gguf, type_name
from llamapipe.gguf.reader import F32, TYPE_NAMES, U32, Array, Damage, Head, Tensor

_ALPHA: Final = "adapter.lora.alpha"
_INVOCATION: Final = "adapter.alora.invocation_tokens"
_CONVERTER: Final = "llama.cpp's convert_lora_to_gguf.py"
_HALVES: Final = (".lora_a", ".lora_b")
_TYPES: Final = ("F32", "F16", "BF16", "Q8_0")  # types that the converter writes
_PLAIN_TYPES: Final = ("F32", "F16", "BF16")
MOST_NAME: Final = 256
_EMBEDDING: Final = "token_embd.weight"
_DIRECTION: Final = re.compile(r"direction\.([1-9]\d{0,5})")
# Graphs compute with these tensors directly, so llama.cpp would silently ignore a pair for them: vectors in rows, and
# small matrices of recurrent layers and of latent attention. tests/llama/test_adapter_models.py finds such tensors.
_IGNORED: Final = re.compile(
    r"^(?!.*\.weight$)|(?:^|\.)(?:ssm_(?:conv1d|beta|[fg]_[ab]|g)|shortconv\.conv|time_mix_(?:first|lerp|decay|[wavg][12])"
    r"|attn_(?:q_[ab]|kv_a_mqa|[kv]_b|kv_b)\b|indexer|altup|per_layer_(?:model_proj|token_embd)|position_embd|token_types"
    r"|ffn_latent|nextn|rope_)"
)
_LATENT: Final = re.compile(r"output\.weight|blk\.\d+\.attn_q\.weight")
_LATENT_IN: Final = frozenset({"deepseek2", "deepseek2-ocr", "deepseek32", "glm-dsa", "mistral4", "plm"})
# Architectures whose graphs compute with most matrices directly.
_IN_PART: Final = frozenset(
    "bailingmoe3 deepseek4 dots3note glm5-next granite-switch hy_v4 kimi-k3 kimi-linear".split()
)
# In the graphs of these architectures, each row of a product with an adapter belongs to one batch entry, in batch
# order, or to one output; tests/llama/test_row_adapters.py tests each. With other architectures, adapter sets take
# turns. Adapters of recurrent and hybrid models also take turns, because their ubatches have equally long parts of
# sequences, and so do adapters of experts, because their products have only one expert's rows.
ROWS_ARE_TOKENS: Final = frozenset(
    {"llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "granite", "olmo2", "phi2", "glm4", "starcoder2",
     "mistral3", "smollm3", "internlm2", "deci", "falcon", "gemma4", "gpt-oss", "qwen2moe", "qwen3moe", "glm4moe",
     "granitemoe"}
)  # fmt: skip
# Architectures whose graphs have no place for a control vector: llama.cpp would silently ignore it.
_UNSTEERED: Final = frozenset(
    {"bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "eurobert",
     "t5encoder", "plamo2", "hy_v4", "gemma4-assistant", "eagle3", "dflash"}
)  # fmt: skip


@dataclass(frozen=True)
class AdapterInfo:
    """The facts in a checked adapter file.

    ``name``: ``general.name`` or the file's name, cut to 256 characters. ``alpha``: the file's alpha; 0 if it has
    none, and products are then not scaled by alpha. ``invocation``: the tokens that activate the adapter; empty unless
    it is an activated LoRA. ``ranks``: the smallest and the largest rank of its pairs. ``matrices``: the matrices that
    it changes, if the rows of a step can have different adapters of this kind; else empty. ``digest``: a hash of the
    whole file, 16 bytes.
    """

    path: Path
    name: str
    architecture: str
    alpha: float
    invocation: tuple[int, ...]
    ranks: tuple[int, int]
    n_pairs: int
    matrices: frozenset[str]
    size_bytes: int
    digest: bytes
    stamp: Stamp


@dataclass(frozen=True)
class ControlInfo:
    """The facts in a checked control vector, and its values.

    ``directions``: float32 (n_layer - 1, n_embd), the vectors that are added after each layer from the second onward;
    zeros for layers without a direction in the file. ``layers``: the first and the last layer with a direction.
    ``name``, ``digest``: as in ``AdapterInfo``.
    """

    path: Path
    name: str
    directions: npt.NDArray[np.float32]
    layers: tuple[int, int]
    size_bytes: int
    digest: bytes


def check_adapter(
    path: str | os.PathLike[str], architecture: str, tensors: Mapping[str, Tensor], n_vocab: int
) -> AdapterInfo:
    """Check a LoRA's file for a model with this architecture, these tensors and this vocabulary size. Any thread.

    Raises ModelLoadError if the file is missing or damaged, is not an adapter, or does not fit the model; the message
    names the problem and its place.
    """
    file = Path(path)
    if file.is_dir() and (file / "adapter_config.json").is_file():
        raise ModelLoadError(f"{file} is an adapter of PEFT; convert it with {_CONVERTER}, and give its file")
    opened = open_gguf(file, "convert_lora_to_gguf.py")
    head = opened.head
    with naming(file):
        alpha = _check_keys(head, architecture)
        invocation = _invocation(head, n_vocab)
        name = readable(text(head.entries, "general.name") or file.stem)
        check_tensors(head)
        ranks = _check_pairs(head, architecture, tensors)
        matrices = _rows_matrices(head, architecture)
    return AdapterInfo(
        path=file,
        name=name[:MOST_NAME],
        architecture=architecture,
        alpha=alpha,
        invocation=invocation,
        ranks=(min(ranks), max(ranks)),
        n_pairs=len(ranks),
        matrices=matrices,
        size_bytes=len(head.buffer),
        digest=blake2b(head.buffer, digest_size=16).digest(),
        stamp=opened.stamp,
    )


def _check_keys(head: Head, architecture: str) -> float:
    """Check the metadata and return alpha."""
    entries = head.entries
    kind = text(entries, "general.type")
    if kind != "adapter":
        what = "a model" if kind in (None, "model") else repr(kind)
        raise Damage(f"it is {what} (general.type), not an adapter; give the file that {_CONVERTER} wrote")
    own = text(entries, "general.architecture")
    if own != architecture:
        raise Damage(f"it is for models of the architecture {own!r}, and this model's is {architecture!r}")
    if architecture in _IN_PART:
        raise Damage(f"llama.cpp applies adapters of the architecture {architecture!r} only in part")
    method = text(entries, "adapter.type")
    if method != "lora":
        raise Damage(f"adapter.type is {method!r}, and only 'lora' is supported")
    alpha = entries.get(_ALPHA)
    if alpha is None:
        return 0.0
    if alpha.kind != F32 or not isinstance(alpha.value, float):
        raise Damage(f"{_ALPHA} must be f32, it is {TYPE_NAMES[alpha.kind]}")
    if not math.isfinite(alpha.value):
        raise Damage(f"{_ALPHA} is {alpha.value}; it must be finite")
    return alpha.value


def _rows_matrices(head: Head, architecture: str) -> frozenset[str]:
    """Return the matrices that the adapter changes, if our kernels compute all of its products."""
    plain = all(
        type_name(tensor) in _PLAIN_TYPES
        and len(_plain(tensor.dims)) <= 2
        and not tensor.name.startswith(_EMBEDDING)
        for tensor in head.tensors
    )
    if architecture not in ROWS_ARE_TOKENS or not plain:
        return frozenset()
    return frozenset(tensor.name[:-7] for tensor in head.tensors)


def is_activated(path: str | os.PathLike[str]) -> bool:
    """Return whether a file is an activated LoRA; False if it is missing or damaged.

    Does not need the model.
    """
    try:
        return _INVOCATION in open_gguf(Path(path), _CONVERTER).head.entries
    except ModelLoadError:
        return False


def _invocation(head: Head, n_vocab: int) -> tuple[int, ...]:
    """Return the tokens that activate the adapter; empty if it is always active."""
    entry = head.entries.get(_INVOCATION)
    if entry is None:
        return ()
    if not isinstance(entry.value, Array):
        raise Damage(f"{_INVOCATION} must be an array of u32, it is {TYPE_NAMES[entry.kind]}")
    if entry.value.kind != U32:
        raise Damage(f"{_INVOCATION} must be an array of u32, it is one of {TYPE_NAMES[entry.value.kind]}")
    tokens = tuple(entry.value.data.tolist())
    if not tokens:
        raise Damage(f"{_INVOCATION} is empty, so nothing would activate the adapter; convert it again")
    if max(tokens) >= n_vocab:
        raise Damage(
            f"{_INVOCATION} has the token {max(tokens)}, and this model's vocabulary has {n_vocab}; give the model it "
            "was made for"
        )
    return tokens


def check_control_vector(
    path: str | os.PathLike[str], architecture: str, n_layer: int, n_embd: int
) -> ControlInfo:
    """Read and check the file of a control vector for a model with these sizes. Any thread.

    Raises ModelLoadError if the file is missing or damaged, is not a control vector, or does not fit the model; the
    message names the problem and its place.
    """
    file = Path(path)
    opened = open_gguf(file, "llama.cpp's cvector-generator or repeng")
    head = opened.head
    with naming(file):
        kind = text(head.entries, "general.architecture")
        if kind != "controlvector":
            raise Damage(
                f"it is not a control vector (general.architecture is {kind!r}); give the file that llama.cpp's "
                "cvector-generator or repeng wrote"
            )
        if architecture in _UNSTEERED:
            raise Damage(
                f"llama.cpp applies no control vector to models of the architecture {architecture!r}, as this one is"
            )
        name = readable(text(head.entries, "general.name") or file.stem)
        check_tensors(head)
        directions, layers = _directions(head, n_layer, n_embd)
    return ControlInfo(
        path=file,
        name=name[:MOST_NAME],
        directions=directions,
        layers=layers,
        size_bytes=len(head.buffer),
        digest=blake2b(head.buffer, digest_size=16).digest(),
    )


def _directions(head: Head, n_layer: int, n_embd: int) -> tuple[npt.NDArray[np.float32], tuple[int, int]]:
    """Return the array of a control vector, and its first and last layer."""
    directions = np.zeros((n_layer - 1, n_embd), np.float32)
    layers = []
    for tensor in head.tensors:
        named = _DIRECTION.fullmatch(tensor.name)
        if named is None:
            raise Damage(
                f"the tensor {tensor.name!r} is not a direction: its name must be direction.LAYER, and LAYER at least 1"
            )
        layer = int(named[1])
        if layer >= n_layer:
            raise Damage(
                f"it has a direction for layer {layer}, and this model's last layer is {n_layer - 1}; give the model "
                "it was made for"
            )
        if type_name(tensor) != "F32":
            raise Damage(f"the tensor {tensor.name!r} has the type {type_name(tensor)}; it must be F32")
        if math.prod(tensor.dims) != n_embd or tensor.dims[0] != n_embd:
            raise Damage(
                f"the tensor {tensor.name!r} is {_shape(tensor.dims)}, and {n_embd} numbers fit this model; give the "
                "model it was made for"
            )
        values = np.frombuffer(head.buffer, "<f4", n_embd, head.data_start + tensor.offset)
        if not np.isfinite(values).all():
            raise Damage(f"the tensor {tensor.name!r} has numbers that are not finite")
        directions[layer - 1] = values
        layers.append(layer)
    if not layers:
        raise Damage("it has no tensors, so it would change nothing")
    return directions, (min(layers), max(layers))


def _check_pairs(head: Head, architecture: str, tensors: Mapping[str, Tensor]) -> list[int]:
    """Check each pair of tensors against the model's matrix, and return the pairs' ranks."""
    pairs: dict[str, dict[str, Tensor]] = {}
    for tensor in head.tensors:
        name, half = tensor.name[:-7], tensor.name[-7:]
        if half not in _HALVES:
            if tensor.name.endswith("_norm.weight"):
                raise Damage(
                    f"it replaces the norm {tensor.name!r}, which llama.cpp ignores: the adapter would be applied in "
                    "part; train it without norms"
                )
            raise Damage(
                f"the tensor {tensor.name!r} is not half of a pair: its name must end with .lora_a or .lora_b"
            )
        if type_name(tensor) not in _TYPES:
            raise Damage(
                f"the tensor {tensor.name!r} has the type {type_name(tensor)}; it must be {', '.join(_TYPES)}"
            )
        pairs.setdefault(name, {})[half] = tensor
    if not pairs:
        raise Damage("it has no tensors, so it would change nothing")
    ranks = []
    for name, pair in pairs.items():
        if len(pair) < 2:
            missing = next(half for half in _HALVES if half not in pair)
            raise Damage(f"{name}{missing} is missing: a pair has both halves")
        base = tensors.get(name)
        if base is None:
            raise Damage(
                f"it changes {name!r}, and this model has no such tensor; give the model it was made for"
            )
        if _IGNORED.search(name) or (architecture in _LATENT_IN and _LATENT.fullmatch(name)):
            raise Damage(
                f"it changes {name!r}, to which llama.cpp applies no adapter: it would be applied in part; train it "
                "without that"
            )
        ranks.append(_check_pair(name, base, pair[".lora_a"], pair[".lora_b"], tensors))
    return ranks


def _check_pair(name: str, base: Tensor, a: Tensor, b: Tensor, tensors: Mapping[str, Tensor]) -> int:
    """Check one pair and return its rank. In ``dims``, the number of columns comes first."""
    if len(base.dims) < 2:
        raise Damage(f"it changes {name!r}, which is a vector of this model and not a matrix")
    if type_name(base) == "NVFP4":
        raise Damage(f"it changes {name!r}, whose type is NVFP4; llama.cpp applies no adapter to that")
    n_columns, n_rows, *experts = base.dims
    if name == _EMBEDDING:
        if "output.weight" not in tensors:
            raise Damage(
                f"it changes {name!r}, which is also this model's output matrix; llama.cpp can apply an adapter only "
                "where they are two: train it without the embedding"
            )
        n_columns, n_rows = n_rows, n_columns
        rank = a.dims[0]
        wanted_a: tuple[int, ...] = (rank, n_columns)
        wanted_b: tuple[int, ...] = (rank, n_rows)
    else:
        rank = b.dims[0]
        wanted_a, wanted_b = (n_columns, rank, *experts), (rank, n_rows, *experts)
    for half, tensor, wanted in ((".lora_a", a, wanted_a), (".lora_b", b, wanted_b)):
        if _plain(tensor.dims) != _plain(wanted):
            raise Damage(
                f"{name}{half} is {_shape(tensor.dims)}, and {_shape(wanted)} fits this model's {name}, which is "
                f"{_shape(base.dims)}; give the model it was made for"
            )
    return rank


def _plain(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dimensions without trailing dimensions of size 1."""
    n = len(dims)
    while n > 2 and dims[n - 1] == 1:
        n -= 1
    return dims[:n]


def _shape(dims: tuple[int, ...]) -> str:
    return " × ".join(map(str, dims))
