"""Makes the bundled model: writes its text, learns its vocabulary, trains it and writes the GGUF file.

Needs `pip install torch==2.13.0 gguf` (the CPU build is enough) and about 40 minutes on two cores:

    python tools/train_demo_model.py --out llamapipe/data/demo.gguf
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from demo_model.export import write_gguf
from demo_model.lessons import document, plain, questions
from demo_model.network import Network, Shape
from demo_model.tokenizer import Tokenizer, learn
from demo_model.training import SCHEDULES, train, validation_loss

N_VOCAB = 2400
N_VOCABULARY_DOCUMENTS = 20_000


def vocabulary(seed: int) -> Tokenizer:
    """The tokenizer, learned from documents of this seed."""
    rng, pool = random.Random(seed), questions()
    return Tokenizer(learn((plain(document(rng, pool)) for _ in range(N_VOCABULARY_DOCUMENTS)), N_VOCAB))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("llamapipe/data/demo.gguf"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--weights", type=Path, help="keep the unquantized weights here while training")
    parser.add_argument("--resume", type=Path, help="weights kept after a part; continue with --part")
    parser.add_argument("--part", type=int, default=2, help="the part to continue with (from 1)")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = vocabulary(args.seed)
    shape = Shape(n_vocab=len(tokenizer.texts()))
    network = Network(shape)
    n_parameters = sum(p.numel() for p in network.parameters())
    print(f"{shape}, {n_parameters} parameters", flush=True)

    def save() -> None:
        if args.weights:
            torch.save(network.state_dict(), args.weights)

    start = time.perf_counter()
    schedules = list(enumerate(SCHEDULES))
    if args.resume:
        network.load_state_dict(torch.load(args.resume))
        schedules = schedules[args.part - 1 :]
    for number, schedule in schedules:
        train(network, tokenizer, schedule, 1000 * args.seed + 10 * number, save)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(args.out, network, tokenizer)
    figures = {
        "n_parameters": n_parameters,
        "n_bytes": args.out.stat().st_size,
        "n_tokens": sum(schedule.n_steps * schedule.n_tokens for _, schedule in schedules),
        "minutes": round((time.perf_counter() - start) / 60, 1),
        "validation_loss_512": round(validation_loss(network, tokenizer, 512), 4),
        "validation_loss_1024": round(validation_loss(network, tokenizer, 1024), 4),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
