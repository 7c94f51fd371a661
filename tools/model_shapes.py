"""The sizes of the models that people run in 2026, by architecture: metadata as llama.cpp reads it, without weights.

Open this file to see what a preset of ``make_model.py`` is, or to add one. Each has the sizes of the published model
and tiny ones of the same structure: the same kinds of layers in the same order, in a file of a few MB. Factors that
training chose (scales of residuals and logits, YaRN) are left out: random weights do not fit them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

Metadata = dict[str, Any]  # keys without the architecture's prefix
_EPS = "attention.layer_norm_rms_epsilon"


@dataclass(frozen=True)
class Architecture:
    """A model of any architecture, whose tensors llama.cpp itself names.

    ``layers``: their number. ``least_layers``: fewer have not every kind of layer. ``sizes``: metadata; names that
    begin with an underscore are for ``of_layers``, which makes the metadata that depends on the number of layers.
    ``tiny``: what ``sizes`` becomes in a small file. ``tied``: the output matrix is the embedding.
    ``scales_embedding``: the graph multiplies embeddings by the root of the width. ``biases``: matrices have biases
    where llama.cpp takes them or not. ``mtp``: layers after those that predict the token after the next (MTP).
    ``mtp_noise``: the model writes the next token of the vocabulary after each, and its MTP layer is right but for this
    noise, instead of random.
    """

    architecture: str
    layers: int
    least_layers: int
    context: int
    sizes: Metadata
    tiny: Metadata
    of_layers: Callable[[int, Metadata], Metadata] = lambda _n, _sizes: {}
    tied: bool = True
    scales_embedding: bool = False
    biases: bool = False
    mtp: int = 0
    mtp_noise: float | None = None

    def shrunk(self) -> Architecture:
        """The tiny model with the fewest layers that have every kind."""
        return replace(self, sizes=self.sizes | self.tiny, layers=self.least_layers)

    def cut(self, layers: int) -> Architecture:
        """The model with fewer layers, or more."""
        if layers < self.least_layers:
            raise ValueError(
                f"layers is {layers}, a {self.architecture} of these sizes must have at least {self.least_layers} "
                "to have every kind of layer"
            )
        return replace(self, layers=layers)

    def metadata(self) -> Metadata:
        """Values by key; arrays have a value for each layer."""
        values = {"block_count": self.layers + self.mtp, "context_length": self.context, _EPS: 1e-5}
        if self.mtp:
            values["nextn_predict_layers"] = self.mtp
        values |= self.sizes | self.of_layers(self.layers, self.sizes)
        return {key: value for key, value in values.items() if not key.startswith("_")}


def _heads(n: int, n_kv: int, size: int, **more: Any) -> Metadata:
    return {
        "attention.head_count": n,
        "attention.head_count_kv": n_kv,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        **more,
    }


def _widths(width: int, ffn: int) -> Metadata:
    return {"embedding_length": width, "feed_forward_length": ffn}


def _experts(n: int, used: int, ffn: int) -> Metadata:
    return {"expert_count": n, "expert_used_count": used, "expert_feed_forward_length": ffn}


def _mamba2(inner: int, state: int, head: int, groups: int) -> Metadata:
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": inner // head,
        "ssm.group_count": groups,
    }


def _delta_net(state: int, n_k: int, n_v: int) -> Metadata:
    """A gated delta net: heads for keys and for values, of the same size."""
    return {
        "ssm.conv_kernel": 4,
        "ssm.inner_size": state * n_v,
        "ssm.state_size": state,
        "ssm.time_step_rank": n_v,
        "ssm.group_count": n_k,
    }


def _gemma4(n: int, sizes: Metadata) -> Metadata:
    """The last 20 of 35 layers have no cells: they read those of the last layers of their kind that have."""
    n_own = max(5 * round(3 * n / 35), 5)  # whole groups of four windows and one layer that sees all
    return {
        "attention.sliding_window_pattern": [i % 5 != 4 for i in range(n)],
        "attention.shared_kv_layers": n - n_own,
        "feed_forward_length": [sizes["_ffn"] * (1 if i < n_own else 2) for i in range(n)],
    }


def _lfm2(n: int, sizes: Metadata) -> Metadata:
    attends = [i in (2, 5, 8) or (i >= 10 and i % 2 == 0) for i in range(n)]
    return {"attention.head_count_kv": [sizes["_kv"] * is_attention for is_attention in attends]}


def _granite4(n: int, sizes: Metadata) -> Metadata:
    return {"attention.head_count_kv": [sizes["_kv"] * (i % 10 == 5) for i in range(n)]}


def _nemotron_h(n: int, sizes: Metadata) -> Metadata:
    kinds = (
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"  # M: a state, *: attention, -: feed-forward
    )
    repeated = [kinds[i % len(kinds)] for i in range(n)]
    return {
        "attention.head_count_kv": [sizes["_kv"] * (kind == "*") for kind in repeated],
        "feed_forward_length": [sizes["_ffn"] * (kind == "-") for kind in repeated],
    }


def _windows_of_gemma4(n: int, size: int) -> Metadata:
    """Windows of ``n`` tokens; heads of layers with one are smaller."""
    return {
        "attention.sliding_window": n,
        "attention.key_length_swa": size,
        "attention.value_length_swa": size,
        "rope.dimension_count_swa": size,
    }


def _rwkv7(head: int, decay: int, rate: int, value: int, gate: int) -> Metadata:
    return {
        "wkv.head_size": head,
        "attention.decay_lora_rank": decay,
        "attention.iclr_lora_rank": rate,
        "attention.value_residual_mix_lora_rank": value,
        "attention.gate_lora_rank": gate,
    }


def _mla(rank: int, rotated: int, key: int, value: int, q_rank: int) -> Metadata:
    """A cell has ``rank`` values, which all heads share, and those that positions rotate."""
    return {
        "attention.key_length": rank + rotated,
        "attention.value_length": rank,
        "rope.dimension_count": rotated,
        "attention.q_lora_rank": q_rank,
        "attention.kv_lora_rank": rank,
        "attention.key_length_mla": key,
        "attention.value_length_mla": value,
    }


_TINY = _widths(128, 256)
_TINY_HEADS = _heads(4, 2, 32)
_TINY_EXPERTS = _experts(8, 2, 64)

_GEMMA3 = {"attention.sliding_window": 512, "rope.freq_base": 1e6}
_TINY_GEMMA3 = _TINY | _heads(4, 1, 32) | {"attention.sliding_window": 64}
_QWEN35 = {
    "full_attention_interval": 4,
    "rope.freq_base": 1e7,
    "rope.dimension_count": 64,
    "rope.dimension_sections": [11, 11, 10, 0],
}
_ROTATED = {"rope.dimension_count": 16, "rope.dimension_sections": [3, 3, 2, 0]}
_TINY_QWEN35 = _TINY | _TINY_HEADS | _delta_net(32, 2, 4) | _ROTATED

_TINY_MOE = _TINY_EXPERTS | {
    key: value for key, value in _TINY_QWEN35.items() if key != "feed_forward_length"
}

ARCHITECTURES = {
    # Windows: five layers of six, four of five, one of two.
    "gemma3-270m": Architecture(
        "gemma3", 18, 6, 32768,
        _widths(640, 2048) | _heads(4, 1, 256) | _GEMMA3,
        _TINY_GEMMA3,
        scales_embedding=True,
    ),
    "gemma3-1b": Architecture(
        "gemma3", 26, 6, 32768,
        _widths(1152, 6912) | _heads(4, 1, 256) | _GEMMA3,
        _TINY_GEMMA3,
        scales_embedding=True,
    ),
    "gemma4-e2b": Architecture(
        "gemma4", 35, 10, 131072,
        _heads(8, 1, 512, _ffn=6144)
        | _windows_of_gemma4(512, 256)
        | {
            "embedding_length": 1536, "embedding_length_per_layer_input": 256,
            "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0,
        },
        _heads(4, 1, 64, _ffn=256)
        | _windows_of_gemma4(64, 32)
        | {"embedding_length": 128, "embedding_length_per_layer_input": 32},
        _gemma4,
        scales_embedding=True,
    ),
    "gpt-oss-20b": Architecture(
        "gpt-oss", 24, 4, 131072,
        _widths(2880, 2880) | _heads(64, 8, 64) | _experts(32, 4, 2880)
        | {"attention.sliding_window": 128, "rope.freq_base": 150000.0},
        _TINY | _TINY_HEADS | _TINY_EXPERTS | {"attention.sliding_window": 64},
        tied=False,
        biases=True,
    ),
    # Hybrids: one layer of four attends, the others keep a state.
    "qwen3.5-0.8b": Architecture(
        "qwen35", 24, 4, 262144,
        _widths(1024, 3584) | _heads(8, 2, 256) | _delta_net(128, 16, 16) | _QWEN35,
        _TINY_QWEN35,
    ),
    "qwen3.5-4b": Architecture(
        "qwen35", 32, 4, 262144,
        _widths(2560, 9216) | _heads(16, 4, 256) | _delta_net(128, 16, 32) | _QWEN35,
        _TINY_QWEN35,
    ),
    "qwen3.6-35b-a3b": Architecture(
        "qwen35moe", 40, 4, 262144,
        _heads(16, 2, 256) | _delta_net(128, 16, 32) | _QWEN35 | _experts(256, 8, 512)
        | {"embedding_length": 2048, "expert_shared_feed_forward_length": 512},
        _TINY_MOE | {"expert_shared_feed_forward_length": 64},
        tied=False,
    ),
    "lfm2-1.2b": Architecture(
        "lfm2", 16, 6, 128000,
        _widths(2048, 8192)
        | {"attention.head_count": 32, "_kv": 8, "shortconv.l_cache": 3, "rope.freq_base": 1e6},
        _TINY | {"attention.head_count": 4, "_kv": 2},
        _lfm2,
    ),
    "granite4-h-1b": Architecture(
        "granitehybrid", 40, 6, 131072,
        _widths(1536, 4096) | _mamba2(3072, 128, 64, 1)
        | {"attention.head_count": 12, "_kv": 4, "rope.scaling.finetuned": False},
        _TINY | _mamba2(256, 32, 32, 1) | {"attention.head_count": 4, "_kv": 2},
        _granite4,
    ),
    "nemotron-h-8b": Architecture(
        "nemotron_h", 52, 9, 8192,
        _heads(32, 0, 128, _kv=8, _ffn=21504) | _mamba2(8192, 128, 64, 8)
        | {"embedding_length": 4096, "attention.layer_norm_epsilon": 1e-5},
        _heads(4, 0, 32, _kv=2, _ffn=256) | _mamba2(256, 32, 32, 2) | {"embedding_length": 128},
        _nemotron_h,
        tied=False,
    ),
    # No layer attends.
    "mamba2-1.3b": Architecture(
        "mamba2", 48, 2, 1048576,
        _widths(2048, 0) | _mamba2(4096, 128, 64, 1) | {"attention.head_count": 0},
        _widths(128, 0) | _mamba2(256, 32, 32, 1),
    ),
    "rwkv7-0.4b": Architecture(
        "rwkv7", 24, 2, 1048576,
        _widths(1024, 4096) | _rwkv7(64, 64, 64, 32, 128)
        | {"attention.head_count": 0, "attention.layer_norm_epsilon": 1e-5, "token_shift_count": 2},
        _widths(128, 512) | _rwkv7(64, 32, 32, 32, 32),
        tied=False,
    ),
    # Compressed keys and values (MLA): one vector a token and layer, for all heads.
    "glm-4.7-flash": Architecture(
        "deepseek2", 47, 3, 202752,
        _widths(2048, 10240) | _heads(20, 1, 0) | _mla(512, 64, 256, 256, 768) | _experts(64, 4, 1536)
        | {
            "leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 2,
            "expert_weights_norm": True,
        },
        _TINY | _heads(4, 1, 0) | _mla(64, 16, 48, 32, 64) | _TINY_EXPERTS,
        tied=False,
    ),
}  # fmt: skip
