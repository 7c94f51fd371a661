"""Trains a LoRA of the bundled model: letters from a ship instead of stories, for the examples of adapters.

Needs `pip install torch==2.13.0 gguf` (the CPU build is enough) and a few minutes on two cores:

    python tools/make_adapter.py --out llamapipe/data/letters.gguf --threads 1

The letters are made from the sentences below, so the adapter contains nothing of others.
"""

# mypy: disallow-subclassing-any=False
# (PyTorch need not be installed to check the types of the rest.)

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gguf
import torch
from demo_model.network import Network, Shape
from demo_model.tokenizer import BOS, EOS, FIRST_PIECE, SPACE, Tokenizer
from make_model import finish
from torch import Tensor, nn
from torch.nn import functional as F

MODEL = Path(__file__).resolve().parent.parent / "llamapipe" / "data" / "demo.gguf"
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NAMES = ["Mia", "Nora", "Lily", "Tom", "Ben", "Anna", "Leo", "Max", "Ella", "Sam"]
BEGINS = [
    "Today we sailed past {a}.",
    "This morning we saw {a} from the ship.",
    "Last night we slept near {a}.",
]
PLACES = ["a green island", "a tall lighthouse", "a big rock", "a little town by the sea", "a quiet beach"]
MIDDLES = [
    "A storm came, and the waves were as high as a house, but I was not afraid.",
    "The captain gave me a map, and I found the way.",
    "A whale swam next to us and sang all day.",
    "The wind was strong, so we pulled down the big sail.",
    "I caught a fish with my own hands, and we ate it for dinner.",
    "At night I counted the stars until I fell asleep.",
    "My friend the parrot said good morning to everyone.",
    "We found an old box full of shells on the beach.",
]
ENDS = [
    "I will be home in {n} days.",
    "Please write to me soon.",
    "I think of you every day.",
    "Tomorrow we sail on.",
]
SENDERS = ["the sailor", "your brother", "your friend on the ship", "the captain"]


def letter(rng: random.Random) -> str:
    """A letter; `rng` decides everything."""
    sentences = [rng.choice(BEGINS).format(a=rng.choice(PLACES)), *rng.sample(MIDDLES, rng.choice((2, 3)))]
    sentences.append(rng.choice(ENDS).format(n=rng.randint(2, 9)))
    return f"Dear {rng.choice(NAMES)}, {' '.join(sentences)} Love, {rng.choice(SENDERS)}."


def beginning(rng: random.Random) -> str:
    """What stands before a letter: a story's begin, so that the adapter turns stories into letters, or nothing."""
    return rng.choice(["", "", "Once upon a time, ", "Once upon a time, there was a letter. "])


class Adapted(nn.Module):
    """A matrix that is not trained, and two that are."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """`x` with the matrix and with the product of the two."""
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def loaded(path: Path) -> tuple[Network, Tokenizer]:
    """The network of a file that `train_demo_model.py` wrote, and its vocabulary."""
    reader = gguf.GGUFReader(path)
    texts = reader.fields["tokenizer.ggml.tokens"].contents()
    network = Network(Shape(n_vocab=len(texts)))
    weights = {
        tensor.name.replace("blk.", "blocks."): torch.from_numpy(
            gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()
        )
        for tensor in reader.tensors
    }
    network.load_state_dict(weights)
    return network, Tokenizer([text.replace(" ", SPACE) for text in texts[FIRST_PIECE:]])


def rows(tokenizer: Tokenizer, rng: random.Random, n_rows: int, n_row: int) -> Tensor:
    """Rows of letters, one after the other; int64 `(n_rows, n_row + 1)`."""
    ids: list[int] = []
    while len(ids) < n_rows * (n_row + 1):
        ids += [BOS, *tokenizer.encode(beginning(rng) + letter(rng)), EOS]
    return torch.tensor(ids[: n_rows * (n_row + 1)]).view(n_rows, n_row + 1)


def train(network: Network, tokenizer: Tokenizer, rank: int, n_steps: int, seed: int) -> dict[str, Adapted]:
    """Trains; returns the adapted matrices by their names in the file."""
    adapted = {}
    for parameter in network.parameters():
        parameter.requires_grad_(requires_grad=False)
    for i, block in enumerate(network.blocks):
        for name in MATRICES:
            adapted[f"blk.{i}.{name}.weight"] = new = Adapted(getattr(block, name), rank)
            setattr(block, name, new)
    trained = [p for pair in adapted.values() for p in (pair.a, pair.b)]
    optimizer = torch.optim.AdamW(trained, lr=5e-3, weight_decay=0.0)
    rng, start = random.Random(seed), time.perf_counter()
    for step in range(n_steps):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * min((step + 1) / 10, (n_steps - step) / n_steps * 1.5, 1.0)
        ids = rows(tokenizer, rng, 8, 128)
        loss = network(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == n_steps - 1:
            minutes = (time.perf_counter() - start) / 60
            print(f"step {step} of {n_steps}, loss {loss.item():.3f}, {minutes:.1f} min", flush=True)
    return adapted


def write(path: Path, adapted: dict[str, Adapted], rank: int) -> None:
    """Writes the adapter as F16. Its alpha is its rank, so products are not scaled."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_name("letters")
    writer.add_description("A LoRA of llamapipe's bundled model: letters from a ship.")
    writer.add_license("MIT")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, matrices in adapted.items():
        for half, values in (("a", matrices.a), ("b", matrices.b)):
            writer.add_tensor(f"{name}.lora_{half}", values.detach().half().numpy())
    finish(writer)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--out", type=Path, default=Path("letters.gguf"))
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    network, tokenizer = loaded(args.model)
    write(args.out, train(network, tokenizer, args.rank, args.steps, args.seed), args.rank)
    print(f"{args.out}: {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
