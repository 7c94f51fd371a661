"""Make assistants for a Gemma 4 model: files whose layers guess what the model writes next.

    python tools/make_assistant.py TARGET.gguf OUT.gguf              # random weights: always wrong
    python tools/make_assistant.py TARGET.gguf OUT.gguf --noise 0    # right, for a model of make_model.py --mtp-noise

The layers have queries only, and read the cells of the model's last two layers. Their input is a token's embedding,
which is the model's, and the model's last hidden state at the token before it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from draft_files import Tensors, draft_options, n_tokens, random_weights, rows_of, write_tensors
from make_model import rotation, vocabulary

ARCHITECTURE = "gemma4-assistant"
_SMALL = 0.05  # what a layer adds, in times of its input
# What the layers share with the model whose cells they read, without the architecture's prefix.
_SHARED = (
    "context_length", "attention.sliding_window", "attention.key_length", "attention.value_length",
    "attention.key_length_swa", "attention.value_length_swa", "attention.layer_norm_rms_epsilon", "rope.freq_base",
    "rope.freq_base_swa", "rope.dimension_count", "rope.dimension_count_swa",
)  # fmt: skip


@dataclass(frozen=True)
class AssistantShape:
    """The sizes of an assistant.

    ``windows``: whether each layer has a sliding window. ``target``: the model's metadata that it shares, by key.
    """

    width: int
    target_width: int
    heads: int
    heads_kv: tuple[int, ...]  # of each layer
    ffn: int
    windows: tuple[bool, ...]
    target: Mapping[str, Any]

    def head(self, window: bool) -> int:
        """Values of a head."""
        return int(self.target[f"attention.key_length{'_swa' if window else ''}"])

    def dims(self, n_vocab: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors, in numpy's order."""
        width = self.width
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (n_vocab, width),
            "output_norm.weight": (width,),
            "nextn.pre_projection.weight": (width, 2 * self.target_width),
            "nextn.post_projection.weight": (self.target_width, width),
        }
        if not all(self.windows):
            shapes["rope_freqs.weight"] = (self.head(False) // 2,)
        for i, window in enumerate(self.windows):
            rows = self.heads * self.head(window)
            shapes |= {
                f"blk.{i}.attn_norm.weight": (width,),
                f"blk.{i}.attn_q.weight": (rows, width),
                f"blk.{i}.attn_output.weight": (width, rows),
                f"blk.{i}.attn_q_norm.weight": (self.head(window),),
                f"blk.{i}.post_attention_norm.weight": (width,),
                f"blk.{i}.layer_output_scale.weight": (1,),
                f"blk.{i}.ffn_norm.weight": (width,),
                f"blk.{i}.ffn_gate.weight": (self.ffn, width),
                f"blk.{i}.ffn_up.weight": (self.ffn, width),
                f"blk.{i}.ffn_down.weight": (width, self.ffn),
                f"blk.{i}.post_ffw_norm.weight": (width,),
            }
        return shapes


def shape_for(
    target: str | os.PathLike[str], width: int = 0, windows: Sequence[bool] = (True, True, True, False)
) -> AssistantShape:
    """An assistant with the published ones' layers; of half the model's width if ``width`` is 0."""
    reader = gguf.GGUFReader(target)
    arch = reader.fields["general.architecture"].contents()

    def value(key: str, default: Any = None) -> Any:
        field = reader.fields.get(f"{arch}.{key}")
        return default if field is None else field.contents()

    n_layer, target_width = value("block_count"), value("embedding_length")
    heads_kv = value("attention.head_count_kv")
    heads_kv = heads_kv if isinstance(heads_kv, list) else [heads_kv] * n_layer
    heads = value("attention.head_count")
    return AssistantShape(
        width or target_width // 2,
        target_width,
        max(heads) if isinstance(heads, list) else heads,
        tuple(heads_kv[n_layer - (2 if window else 1)] for window in windows),
        2 * (width or target_width // 2),
        tuple(windows),
        {key: value(key) for key in _SHARED if value(key) is not None},
    )


def write_assistant(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    shape: AssistantShape,
    tensors: Tensors,
    type_name: str = "q8_0",
) -> Path:
    """Write an assistant with these tensors and the model's vocabulary."""
    fields = vocabulary(os.fspath(target))
    writer = gguf.GGUFWriter(os.fspath(path), ARCHITECTURE)
    writer.add_name(f"assistant for {Path(target).name}")
    writer.add_block_count(len(shape.windows))
    writer.add_nextn_predict_layers(len(shape.windows))
    writer.add_embedding_length(shape.width)
    writer.add_embedding_length_out(shape.target_width)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(list(shape.heads_kv))
    writer.add_array(f"{ARCHITECTURE}.attention.sliding_window_pattern", list(shape.windows))
    kind = gguf.GGUFValueType
    for key, value in shape.target.items():
        writer.add_key_value(
            f"{ARCHITECTURE}.{key}", value, kind.FLOAT32 if isinstance(value, float) else kind.UINT32
        )
    for key, field in fields.items():
        writer.add_key_value(key, field.value, field.type, field.sub_type)
    write_tensors(writer, tensors, None, type_name)
    return Path(path)


def random_tensors(
    shape: AssistantShape, n_vocab: int, seed: int = 1, added: float = 1.0
) -> dict[str, npt.NDArray[np.float32]]:
    """Random weights; the logits of a row have a standard deviation of 3. ``added``: what each part of a layer adds."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, dims in shape.dims(n_vocab).items():
        gain = 1.0
        if name == "output_norm.weight":
            gain = 3.0
        elif "post_" in name and "norm" in name:
            gain = added
        elif name.endswith("attn_q_norm.weight"):  # products of queries and keys are not divided by a root
            gain = 2.0 / dims[0] ** 0.25
        tensors[name] = random_weights(rng, dims, gain)
    return tensors


def right_tensors(
    shape: AssistantShape, target: str | os.PathLike[str], noise: float
) -> dict[str, npt.NDArray[np.float32]]:
    """Weights for a model that writes the next token of its vocabulary (``make_model.py --mtp-noise``).

    ``noise``: in the projection of the state, and of what attention and the feed-forward network add; 0: the assistant
    is right. It turns the state that it reads, as the model's embeddings turn from token to token, and ignores its
    token: with another state it is wrong. It sees some of the planes that the state turns in.
    """
    rows = rows_of(target)
    half, planes = shape.target_width // 2, min(shape.width, shape.target_width) // 2
    seen = [*range(planes), *range(half, half + planes)]
    turn = rotation(shape.target_width)[seen]
    turn += noise * np.random.default_rng(7).standard_normal(turn.shape) / np.sqrt(shape.target_width)
    pad = np.zeros((shape.width - len(seen), shape.target_width))
    pick = np.zeros((shape.target_width, shape.width))
    pick[seen, range(len(seen))] = 1
    tensors: dict[str, npt.NDArray[Any]] = {**random_tensors(shape, 1, added=_SMALL + noise)}
    tensors |= {
        "nextn.pre_projection.weight": np.concatenate(
            [np.zeros((shape.width, shape.target_width)), np.concatenate([turn, pad])], axis=1
        ),
        "nextn.post_projection.weight": pick,
        "token_embd.weight": np.concatenate([rows[:, seen], np.zeros((len(rows), len(pad)))], axis=1),
    }
    return {name: values.astype(np.float32) for name, values in tensors.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    parser = draft_options(__doc__ or "")
    parser.add_argument("--width", type=int, default=0, help="0: half of the model's (0)")
    args = parser.parse_args(argv)
    shape = shape_for(args.target, args.width)
    tensors = (
        random_tensors(shape, n_tokens(args.target))
        if args.noise is None
        else right_tensors(shape, args.target, args.noise)
    )
    path = write_assistant(args.out, args.target, shape, tensors, args.type_name)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
