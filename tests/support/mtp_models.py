"""Tiny models with a layer that predicts the token after the next (MTP), whose share of right drafts is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.gguf_models import ARCHITECTURES, Architecture, make_model

_HEADS = {
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
}
_EXPERTS = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 32,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
}
_WINDOWS = {"attention.sliding_window": 64, "rope.freq_base_swa": 1e4}
_STATES = {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.group_count": 2}
_INDEXER = {
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 16,
}
_COMPRESSED = {
    "attention.head_count_kv": 1,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 16,
}

_KDA = {  # two layers with a state, one that attends, and the MTP layer
    "attention.head_count_kv": [0, 0, 1, 1],
    "ssm.conv_kernel": 4,
    "kda.head_dim": 16,
    "kda.gate_lower_bound": -5.0,
}


def _windows(n: int) -> dict[str, Any]:
    """Every other layer has a window; the MTP layers do, too."""
    return {"attention.sliding_window_pattern": [i % 2 == 0 or i >= 2 for i in range(n)]}


def _shape(architecture: str, layers: int, sizes: dict[str, Any]) -> Architecture:
    return Architecture(architecture, layers, layers, 512, _HEADS | _EXPERTS | sizes, {}, tied=False)


SHAPES = {
    "qwen35": ARCHITECTURES["qwen3.5-0.8b"].shrunk(),
    "qwen35moe": ARCHITECTURES["qwen3.6-35b-a3b"].shrunk(),
    "qwen3next": _shape("qwen3next", 4, _STATES | {"ssm.inner_size": 64, "full_attention_interval": 4}),
    "qwen4exp": _shape(
        "qwen4exp",
        4,
        _STATES
        | _INDEXER
        | {
            "ssm.inner_size": 64,
            "full_attention_interval": 4,
            "rope.dimension_sections": [3, 3, 2, 0],
            "attention.compress_ratios": [0, 0, 0, 4, 4],
            "hyper_connection.count": 2,
            "hyper_connection.low_rank": 8,
        },
    ),
    "glm4moe": _shape("glm4moe", 2, {}),
    "glm-dsa": _shape("glm-dsa", 2, _COMPRESSED | _INDEXER),
    "glm5-next": _shape(
        "glm5-next",
        3,
        _COMPRESSED
        | _INDEXER
        | _KDA
        | {
            "attention.key_length": 32,
            "rope.dimension_count": 0,
            "attention.indexer.kpool": 4,
            "hyper_connection.count": 4,
            "hyper_connection.sinkhorn_iterations": 3,
            "hyper_connection.epsilon": 1e-6,
        },
    ),
    "deepseek2": _shape("deepseek2", 2, _COMPRESSED),
    "deepseek32": _shape("deepseek32", 2, _COMPRESSED | _INDEXER),
    "nemotron_h_moe": _shape(
        "nemotron_h_moe",
        3,
        _STATES
        | {
            "ssm.inner_size": 64,
            "attention.head_count_kv": [0, 2, 0, 2],  # a state, attention, experts, and the MTP layer
            "feed_forward_length": [0, 0, 32, 32],
            "attention.layer_norm_epsilon": 1e-5,
        },
    ),
    "cohere2moe": _shape(
        "cohere2moe", 4, _WINDOWS | {"logit_scale": 1.0, "attention.layer_norm_epsilon": 1e-5}
    ),
    "bailingmoe3": _shape("bailingmoe3", 3, _COMPRESSED | _KDA),
    "hy_v3": _shape("hy_v3", 2, {}),
    "mimo2": _shape("mimo2", 2, _WINDOWS),
    "step35": _shape("step35", 2, _WINDOWS),
}
_WITH_PATTERN = ("mimo2", "step35")


def mtp_model(
    path: Path,
    noise: float | None,
    n_layers: int = 1,
    type_name: str = "f32",
    architecture: str = "qwen35",
) -> Path:
    """Writes the model. ``noise``: in its MTP layers, 0: nearly all drafts are right; None: the model is random."""
    shape = replace(SHAPES[architecture], mtp=n_layers, mtp_noise=noise)
    if architecture == "qwen35":
        shape = replace(shape, tied=noise is None)
    if architecture in _WITH_PATTERN:
        shape = replace(shape, sizes=shape.sizes | _windows(shape.layers + n_layers))
    return make_model(path, shape=shape, type_name=type_name, vocab="builtin-bpe")
