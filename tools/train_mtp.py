"""Give a Llama a layer that predicts the token after the next (MTP), trained on text that the model itself writes.

Needs `pip install torch==2.13.0 gguf`, and llamapipe installed or built; for the demo model a few minutes:

    python tools/train_mtp.py MODEL.gguf --out with-mtp.gguf --work folder

llama.cpp computes such layers for some architectures only. One of them, ``mimo2``, is a Llama if it has no windows and
no experts, but that it turns halves of heads instead of neighbours. So the file has the model's own weights, with the
rows of queries and keys in that order, and answers as before. The parts of the work are those of ``train_eagle3.py``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gguf
import numpy.typing as npt
import torch
from draft_files import write_tensors
from make_eagle3 import Eagle3Shape, shape_for
from make_model import vocabulary
from train_eagle3 import (
    Layer,
    Texts,
    begun,
    linear,
    prepare,
    read,
    stored_texts,
    train,
    training_options,
    write,
)

import llamapipe as lp

ARCHITECTURE = "mimo2"
_COPIED = ("context_length", "embedding_length", "feed_forward_length", "attention.layer_norm_rms_epsilon")


class Mtp(Layer):
    """The MTP layer of llama.cpp's ``mimo2``. The output matrix is the model's, and not trained."""

    def __init__(self, shape: Eagle3Shape, output: torch.Tensor) -> None:
        super().__init__(
            shape, shape.width, ("enorm", "hnorm", "attn_norm", "ffn_norm", "output_norm"), output
        )
        self.eh_proj = linear(2 * shape.width, shape.width)
        self.output.weight.requires_grad_(False)

    def read(self, embedded: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer adds to, and what attention reads."""
        x = self.eh_proj(torch.cat([self.norm(embedded, "enorm"), self.norm(state, "hnorm")], -1))
        return x, self.norm(x, "attn_norm")

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Positions as rotations of a value of the first half of a head with one of the second."""
        cos, sin = self.angles(x)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def tensors(self, n_layer: int) -> dict[str, npt.NDArray[Any]]:
        """By the names of the file."""
        weights = {
            "attn_qkv": torch.cat([self.q.weight, self.k.weight, self.v.weight]),
            "attn_output": self.o.weight,
            "ffn_gate": self.gate.weight,
            "ffn_up": self.up.weight,
            "ffn_down": self.down.weight,
            "attn_norm": self.norms["attn_norm"],
            "ffn_norm": self.norms["ffn_norm"],
            "nextn.eh_proj": self.eh_proj.weight,
            "nextn.enorm": self.norms["enorm"],
            "nextn.hnorm": self.norms["hnorm"],
            "nextn.shared_head_norm": self.norms["output_norm"],
        }
        return {
            f"blk.{n_layer}.{name}.weight": tensor.detach().float().numpy()
            for name, tensor in weights.items()
        }


def write_mtp(path: Path, target: Path, layer: Mtp, type_name: str = "q8_0") -> None:
    """Write the model with this layer."""
    reader, shape = gguf.GGUFReader(target), layer.shape
    n_layer = reader.fields["llama.block_count"].contents()
    writer = gguf.GGUFWriter(str(path), ARCHITECTURE)
    writer.add_name(f"{target.stem} with an MTP layer")
    for key in _COPIED:
        field = reader.fields[f"llama.{key}"]
        writer.add_key_value(f"{ARCHITECTURE}.{key}", field.contents(), field.types[0])
    writer.add_block_count(n_layer + 1)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_rope_freq_base(shape.freq_base)
    writer.add_uint32(f"{ARCHITECTURE}.nextn_predict_layers", 1)
    writer.add_uint32(f"{ARCHITECTURE}.expert_feed_forward_length", 0)
    # llama.cpp wants a window in some layer: the MTP layer has one of the whole context.
    writer.add_sliding_window(shape.context)
    writer.add_array(f"{ARCHITECTURE}.attention.sliding_window_pattern", [False] * n_layer + [True])
    writer.add_float32(f"{ARCHITECTURE}.rope.freq_base_swa", shape.freq_base)
    for key, value in vocabulary(str(target)).items():
        writer.add_key_value(key, value.value, value.type, value.sub_type)
    names = {tensor.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        data = tensor.data
        for name, n_heads in (("attn_q", shape.heads), ("attn_k", shape.heads_kv)):
            if tensor.name.endswith(f"{name}.weight"):  # from neighbours to halves
                data = data.reshape(n_heads, -1, 2, data.shape[-1]).swapaxes(1, 2).reshape(data.shape).copy()
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
        if tensor.name == "token_embd.weight" and "output.weight" not in names:
            writer.add_tensor("output.weight", data, raw_dtype=tensor.tensor_type)
    write_tensors(writer, layer.tensors(n_layer), None, type_name)


def main() -> None:
    """Command line."""
    parser = training_options(__doc__ or "", Path("with-mtp.gguf"), n_texts=2000, n_epochs=6)
    parser.add_argument("--plain", action="store_true", help="texts that are no chats")
    args = prepare(parser)
    shape, reader = shape_for(args.model), gguf.GGUFReader(args.model)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if reader.fields["general.architecture"].contents() != "llama" or "rope_freqs.weight" in tensors:
        parser.error(
            f"{args.model} is not a Llama whose positions all turn alike, as `{ARCHITECTURE}` has them"
        )
    if args.out.resolve() == args.model.resolve():
        parser.error("--out is the model's own file; name another one")

    def matrix(name: str) -> torch.Tensor:
        tensor = tensors[name]
        return torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())

    embeddings = matrix("token_embd.weight")
    layer = Mtp(shape, matrix("output.weight") if "output.weight" in tensors else embeddings)
    write_mtp(args.out, args.model, layer, args.type_name)  # not trained: the model's states are read with it
    began = time.monotonic()
    with lp.Model(args.out) as model:
        source = begun if args.plain else write
        texts = stored_texts(
            args.work / "texts.npz", lambda: source(model, args.texts, args.tokens, args.threads, args.seed)
        )
        parts = list(read(model, texts, (), args.threads))
    print(f"states: {time.monotonic() - began:.0f} s", flush=True)
    embedded_texts = Texts(
        [text for text, _, _ in parts],
        [n for _, n in texts],
        [states for _, states, _ in parts],
        [after for _, _, after in parts],
        embeddings,
        list(range(len(embeddings))),
    )

    def save() -> None:
        write_mtp(args.out, args.model, layer, args.type_name)

    train(layer, embedded_texts, args.guesses, args.epochs, args.minutes, args.rate, args.bf16, save)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
