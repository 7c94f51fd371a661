"""The training loop: packs documents into rows and trains with two optimizers and one decaying rate."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .lessons import document, questions, review
from .network import Network
from .tokenizer import BOS, Tokenizer

CUT_SHARE = 0.3


@dataclass(frozen=True)
class Schedule:
    """One part of the training: its length, its rate and its documents; a step is `n_tokens` tokens."""

    n_steps: int
    write: Callable[[random.Random, dict[str, dict[str, str]]], str] = document
    n_tokens: int = 4096
    n_row: int = 512  # positions of a row, until the last part
    n_row_last: int = 1024  # longer rows in the last part, to learn far positions
    last_part: float = 0.15
    n_warmup: int = 40
    rate_matrices: float = 0.02
    rate_rest: float = 0.004


SCHEDULES = [
    Schedule(n_steps=2200),
    Schedule(n_steps=600, write=review, last_part=0.0, rate_matrices=0.01, rate_rest=0.002),
    Schedule(n_steps=600, write=review, last_part=0.0, rate_matrices=0.01, rate_rest=0.002),
]


def rows(tokenizer: Tokenizer, schedule: Schedule, seed: int, n_row: int) -> Iterator[list[int]]:
    """Endless rows of `n_row + 1` ids; each is a series of documents, the last of them cut."""
    rng = random.Random(seed)
    pool = questions()
    while True:
        row: list[int] = []
        while len(row) <= n_row:
            text = schedule.write(rng, pool)
            # A prompt may end anywhere, also within a word or after a space, so some documents have such a seam.
            at = rng.randrange(len(text)) if rng.random() < CUT_SHARE else 0
            row += tokenizer.encode_cut(text, at)
        yield row[: n_row + 1]


def batches(
    tokenizer: Tokenizer, schedule: Schedule, seed: int, n_row: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless inputs and targets, int64 `(n_tokens / n_row, n_row)` each."""
    source = rows(tokenizer, schedule, seed, n_row)
    while True:
        ids = torch.tensor([next(source) for _ in range(schedule.n_tokens // n_row)])
        yield ids[:, :-1], ids[:, 1:]


def document_mask(ids: Tensor) -> Tensor:
    """Lets each position attend back to the start of its own document; bool `(batch, 1, pos, pos)`.

    Other documents in the row would be in the way of learning to repeat the names and numbers of this one.
    """
    n_pos = ids.shape[1]
    owner = (ids == BOS).cumsum(1)
    same = owner[:, None, :, None] == owner[:, None, None, :]
    return same & torch.ones(n_pos, n_pos, dtype=torch.bool).tril()


def validation_loss(network: Network, tokenizer: Tokenizer, n_row: int, n_batches: int = 8) -> float:
    """Mean loss in nats per token, on documents of a seed that the training does not use."""
    source = batches(tokenizer, SCHEDULES[0], 999_983, n_row)
    with torch.no_grad():
        pairs = [next(source) for _ in range(n_batches)]
        return float(sum(network(ids, after, document_mask(ids)).item() for ids, after in pairs) / n_batches)


def train(
    network: Network,
    tokenizer: Tokenizer,
    schedule: Schedule,
    seed: int,
    save: Callable[[], object] | None = None,
) -> None:
    """Trains in place and calls `save` from time to time."""
    matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and "embd" not in name]
    rest = [p for name, p in network.named_parameters() if p.ndim != 2 or "embd" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=schedule.rate_matrices, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=schedule.rate_rest, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base = [schedule.rate_matrices, schedule.rate_rest]
    switch = int(schedule.n_steps * (1 - schedule.last_part))
    source = batches(tokenizer, schedule, seed, schedule.n_row)
    start, recent = time.perf_counter(), 0.0
    for step in range(schedule.n_steps):
        if step == switch:
            source = batches(tokenizer, schedule, seed + 1, schedule.n_row_last)
        left = (schedule.n_steps - step) / schedule.n_steps
        factor = min((step + 1) / schedule.n_warmup, 1.0, left / 0.7)
        for optimizer, rate in zip(optimizers, base, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        ids, targets = next(source)
        # Half of the last part's rows are one long context, to learn far positions and text after an end.
        mask = document_mask(ids) if step < switch or step % 2 else None
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(ids, targets, mask)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        recent = loss.item() if step == 0 else 0.95 * recent + 0.05 * loss.item()
        if step % 25 == 0 or step == schedule.n_steps - 1:
            minutes = (time.perf_counter() - start) / 60
            if save:
                save()
            print(f"step {step} of {schedule.n_steps}, loss {recent:.4f}, {minutes:.1f} min", flush=True)
