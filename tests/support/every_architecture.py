"""A tiny model of each architecture that the pinned llama.cpp names, made by answering what its loader misses.

A file begins as a tiny llama model under another architecture's name. The loader says which key or tensor is missing,
or which shape it expects; it is added, until the model loads or the loader asks for what cannot be guessed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gguf
import numpy as np

from llamapipe.errors import LlamapipeError
from llamapipe.llama import Model
from support.gguf_document import ARRAY, BOOL, STRING, Document, Tensor
from support.gguf_models import find_source, tiny_model

U32, F32 = 4, 6
MOST_ADDED = 600
N_LAYER, N_EMBD, N_HEAD = 2, 64, 4
# Values by the end of a key; others get 1. Such that sizes fit each other where an architecture asserts that.
INTEGERS = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "head_count": N_HEAD,
    "head_count_kv": N_HEAD, "key_length": 16, "value_length": 16, "rope.dimension_count": 16, "sliding_window": 8,
    "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 8, "ssm.group_count": 2,
    "wkv.head_size": 64, "time_mix_extra_dim": 32, "time_decay_extra_dim": 64, "rescale_every_n_layers": 0,
    "decay_lora_rank": 8, "iclr_lora_rank": 8, "value_residual_mix_lora_rank": 8, "gate_lora_rank": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "key_length_mla": 32, "value_length_mla": 16, "altup.num_inputs": 2,
    "embedding_length_per_layer_input": 16, "leading_dense_block_count": 1, "shortconv.l_cache": 3, "group_count": 4,
    "interleave_moe_layer_step": 1, "expert_shared_feed_forward_length": 32, "feed_forward_length": 128,
    "vocab_size": 0, "indexer.head_count": 4, "indexer.key_length": 16, "indexer.top_k": 4, "kda.head_dim": 16,
    "posnet.embedding_length": 64, "posnet.block_count": 6, "convnext.embedding_length": 64, "convnext.block_count": 2,
    "features_length": 64, "full_attention_interval": 2, "nextn_predict_layers": 0, "altup.active_idx": 0,
    "expert_gating_func": 1, "moe_every_n_layers": 1, "rope.scaling.original_context_length": 64,
}  # fmt: skip
FLOATS = re.compile(r"scale$|softcapping|freq_base|factor|clamp|_mult|beta|rate|threshold|alpha|eps")
EXPERTS: dict[str, object] = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
}
# What loaders ask for in words of their own, by a part of the message.
FIXES: dict[str, dict[str, object]] = {
    r"token type count|token_types": {"tokenizer.ggml.token_type_count": 2},
    r"extract_layers": {"extract_layers": [0, 1, 1]},
    r"hyper_connection.count": {"hyper_connection.count": 2},
    r"hc_mult == 4": {"hyper_connection.count": 4},
    r"rope.dimension_count_swa": {"attention.key_length_swa": 16, "attention.value_length_swa": 16},
    r"adapter token id arrays": {"adapters.count": 2},
    r"n_embd_head_qk_nope|attn_k_b.*expected +-": {
        "attention.key_length_mla_swa": 32,
        "attention.value_length_mla_swa": 16,
    },
    r"indexer_kpool": {"attention.indexer.kpool": 2, "attention.indexer.top_k": 4},
    r"n_ffn_up == n_ff": {"feed_forward_length": 1},
    r"time_mix_g1.*impossible": {"attention.gate_lora_rank": 8},
    r"target_layers": {"target_layers": [0, 1]},
    r"sqrtsoftplus": {"expert_gating_func": 4},
    r"zero experts|divided by zero|n_expert|ffn_gate_inp.*impossible shape": EXPERTS,
    r"requires MLA|n_embd_head_qk_nope": {
        "attention.key_length_mla": 32,
        "attention.value_length_mla": 16,
        "rope.dimension_count": 8,
    },
    r"posnet.n_layer": {"posnet.block_count": 2},
    r"kda_gate_lower_bound": {"kda.gate_lower_bound": -1.0},
}
_ATTENTION = re.compile(r"blk\.\d+\.attn_(q|k|v|qkv|gate)\.(weight|bias)")
_ARRAY = re.compile(r"array key not found in model: ([\w.\-]+)")
_KEY = re.compile(r"key not found in model: ([\w.\-]+)")
_TYPE = re.compile(r"key ([\w.\-]+) has wrong type \w+ but expected type (\w+)")
_LENGTH = re.compile(r"key ([\w.\-]+) has wrong array length; expected (\d+)")
_TENSOR = re.compile(r"tensor '([^']+)' not found|missing tensor '([^']+)'")
_SHAPE = re.compile(r"tensor '([^']+)' has wrong shape; expected\s+([\d, ]+), got")
_KINDS = {"u32": U32, "i32": 5, "f32": F32, "bool": BOOL, "str": STRING, "u16": 2, "u64": 10}


def architectures() -> list[str]:
    """The names in the pinned ``llama-arch.cpp``, without those that are no language model."""
    text = (find_source() / "src" / "llama-arch.cpp").read_text(encoding="utf-8")
    table = text[text.index("LLM_ARCH_NAMES = {") :]
    names = re.findall(r'\{\s*LLM_ARCH_\w+,\s*"([^"]+)"', table[: table.index("};")])
    return [name for name in names if name not in ("clip", "(unknown)")]


class Grower:
    """Grows one architecture's file at ``path``; ``step`` loads it once and adds what was missing.

    ``alike``: what the first layer misses is added to each layer, which halves the loads where layers are of one kind.
    """

    def __init__(self, path: Path, architecture: str, alike: bool = True) -> None:
        self.path, self.architecture, self.alike = path, architecture, alike
        self.document = Document.read(tiny_model(path, type_name="f32"))
        self.document.rename(architecture)
        self.document.put(f"{architecture}.attention.head_count_kv", U32, N_HEAD)
        self.document.tensors.clear()
        self.document.entry("tokenizer.ggml.tokens").value[-1] = b"<mask>"
        self._add_tensor(
            "token_embd.weight", [N_EMBD, len(self.document.entry("tokenizer.ggml.tokens").value)]
        )
        self.reason = ""

    def _add_tensor(self, name: str, dims: list[int]) -> None:
        self.document.tensors.append(Tensor(name.encode(), dims, 0))

    def step(self) -> bool:
        """Whether something was added; if not, ``reason`` is empty for a model that loads."""
        self.document.write(self.path)
        self.reason = ""
        try:
            Model(self.path).close()
        except LlamapipeError as error:
            self.reason = str(error)
            return self._add()
        return False

    def _add(self) -> bool:
        document, reason = self.document, self.reason
        if match := _ARRAY.search(reason):
            document.put(match[1], ARRAY, [1, 0], BOOL if match[1].endswith("pattern") else U32)
            return True
        if match := _KEY.search(reason):
            return self._key(document, match[1])
        if match := _TYPE.search(reason):
            kind = _KINDS.get(match[2])
            if match[2] == "arr":
                document.put(match[1], ARRAY, [0] * N_LAYER, U32)
            elif kind is not None:
                document.put(match[1], kind, {F32: 1.0, STRING: b"silu"}.get(kind, 1))
            return match[2] == "arr" or kind is not None
        if match := _LENGTH.search(reason):
            entry = document.entry(match[1])
            entry.value = [*entry.value, *[0] * int(match[2])][: int(match[2])]
            return True
        if match := _SHAPE.search(reason):
            return self._shape(match[1], [int(text) for text in match[2].split(",")])
        if match := _TENSOR.search(reason):
            return self._tensor(match[1] or match[2])
        return any(re.search(pattern, reason) and self._fix(fixes) for pattern, fixes in FIXES.items())

    def _tensor(self, name: str) -> bool:
        if any(tensor.name == name.encode() for tensor in self.document.tensors):
            return False
        match = _ATTENTION.fullmatch(name)
        rows = {"qkv": 3 * N_EMBD, "gate": N_HEAD}.get(match[1], N_EMBD) if match else 0
        for full_name in self._names(name):
            self._add_tensor(
                full_name, [1] if match is None else [N_EMBD, rows] if match[2] == "weight" else [rows]
            )
        return True

    def _names(self, name: str) -> list[str]:
        """The names of this tensor in each layer that gets it with this one."""
        if not self.alike or not name.startswith("blk.0."):
            return [name]
        return [f"blk.{i}.{name.removeprefix('blk.0.')}" for i in range(N_LAYER)]

    def _fix(self, fixes: dict[str, object]) -> bool:
        """Puts keys that the reason asks for in other words; tensors that depend on them are asked for again."""
        changed = False
        for key, value in fixes.items():
            name = key if key.startswith("tokenizer") else f"{self.architecture}.{key}"
            if self.document.has(name) and self.document.entry(name).value == value:
                continue
            changed = True
            if isinstance(value, list):
                self.document.put(name, ARRAY, value, U32)
            else:
                self.document.put(name, F32 if isinstance(value, float) else U32, value)
        if changed:
            del self.document.tensors[1:]
        return changed

    @staticmethod
    def _key(document: Document, key: str) -> bool:
        if document.has(key):
            return False
        if FLOATS.search(key.partition(".")[2]):  # without the architecture: "deepseek"
            document.put(key, F32, 1e-5 if key.endswith(("eps", "epsilon")) else 1.0)
        else:
            ends = [end for end in INTEGERS if key.endswith("." + end)]
            document.put(key, U32, INTEGERS[max(ends, key=len)] if ends else 1)
        return True

    def _shape(self, name: str, dims: list[int]) -> bool:
        while len(dims) > 1 and dims[-1] == 1:
            dims.pop()
        names = [full_name.encode() for full_name in self._names(name)]
        tensors = [tensor for tensor in self.document.tensors if tensor.name in names]
        changed = any(tensor.dims != dims for tensor in tensors)
        for tensor in tensors:
            tensor.dims = dims.copy()
        return changed


def grow(path: Path, architecture: str) -> str:
    """Make a model of this architecture at ``path``; what still keeps it from loading, or nothing."""
    for alike in (True, False):
        grower = Grower(path, architecture, alike)
        for _ in range(MOST_ADDED):
            if not grower.step():
                break
        if not grower.reason:
            break
    return grower.reason


def fill(path: Path) -> None:
    """Give a file random numbers where ``grow`` has put anything: a graph of equal ones hides what is left out."""
    rng = np.random.default_rng(1)
    for tensor in gguf.GGUFReader(str(path), "r+").tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            values = rng.standard_normal(tensor.data.shape) / np.sqrt(tensor.data.shape[-1])
            tensor.data[:] = values if tensor.data.ndim > 1 else 1 + 0.1 * values


def main() -> None:
    """Grow the architectures on standard input into a folder; a line says what became of each."""
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        name = line.strip()
        reason = grow(folder / f"{name}.gguf", name)
        sys.stdout.write(f"{reason[:300]!r}\n" if reason else "loads\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
