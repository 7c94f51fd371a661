"""Trains an EAGLE-3 draft for a model, on text that the model itself writes.

Needs `pip install torch==2.13.0 gguf` (the CPU build is enough), llamapipe installed or built, and for a model of 135M
weights about two hours on one core:

    python tools/train_eagle3.py MODEL.gguf --out draft.gguf --work folder

The model writes questions and answers (``write``), computes its answers again, which gives the hidden states that the
draft will read (``read``), and the draft learns from them (``train``). ``folder`` keeps what was done; a part that is
done is not repeated. Quantization, kernels and their rounding are those of the engine that will use the draft.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[0:0] = [str(Path(__file__).resolve().parent.parent)]

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from draft_files import KINDS  # noqa: E402
from make_eagle3 import Eagle3Shape, shape_for, write_eagle3  # noqa: E402

import llamapipe as lp  # noqa: E402
from llamapipe.llama.batch import DecodeBatch  # noqa: E402
from llamapipe.llama.context import Context  # noqa: E402

MARK = "the message"
N_LABELLED = 512  # most positions of a decode with logits


# ---- text and states, from the engine
Written = list[tuple[list[int], int]]  # token ids, and how many are a prompt, after which nothing is guessed


def write(model: lp.Model, n_texts: int, n_tokens: int, n_threads: int, seed: int) -> Written:
    """Chats: the model writes the user's message, too, from what its template has before one.

    Magpie's way to texts that are like the model's (arXiv:2406.08464); nothing else decides what they are about.
    """
    before, _, after = model.render_chat([{"role": "user", "content": MARK}]).partition(MARK)
    if MARK in after or not before:
        raise SystemExit("The model's chat template does not show where a user's message begins.")
    first = model.tokenize(before, add_special=True, parse_special=True)
    with lp.Engine(model, n_ctx=1024, n_seq_max=16, n_threads=n_threads) as engine:
        params = [
            lp.SamplingParams(temperature=1.0, top_p=0.95, max_tokens=96, seed=seed * n_texts + i)
            for i in range(n_texts)
        ]
        asked = engine.generate([first] * n_texts, params, progress=False)
        questions = sorted({result.text.strip() for result in asked if result.finish_reason == "stop"} - {""})
        if not questions:
            raise SystemExit("The model ends no question; its chat template may have no token after one.")
        random.Random(seed).shuffle(questions)
        prompts = [model.tokenize_chat([{"role": "user", "content": text}]) for text in questions]
        # Half of the answers are greedy: drafts are for both.
        params = [
            lp.SamplingParams(temperature=0.0 if i % 2 else 0.7, max_tokens=n_tokens, seed=i)
            for i in range(len(prompts))
        ]
        answers = engine.generate(prompts, params, progress=False)
    return [
        ([*prompt, *answer.token_ids], len(prompt)) for prompt, answer in zip(prompts, answers, strict=True)
    ]


def begun(model: lp.Model, n_texts: int, n_tokens: int, n_threads: int, seed: int) -> Written:
    """Texts that the model begins at random, and continues in two ways."""
    first = model.tokenize("", add_special=True)
    with lp.Engine(model, n_ctx=1024, n_seq_max=16, n_threads=n_threads) as engine:
        params = [
            lp.SamplingParams(max_tokens=n_tokens, temperature=1.0, seed=seed * n_texts + i)
            for i in range(n_texts)
        ]
        begins = [
            [*first, *text.token_ids[: n_tokens // 8]] for text in engine.generate([first] * n_texts, params)
        ]
        params = [
            lp.SamplingParams(max_tokens=n_tokens, temperature=0.0 if i % 2 else 0.7, seed=i)
            for i in range(n_texts)
        ]
        texts = engine.generate(begins, params)
    return [([*begin, *text.token_ids], 1) for begin, text in zip(begins, texts, strict=True)]


def stored_texts(file: Path, make: Callable[[], Written]) -> Written:
    """The texts in a file, or new ones, which it gets."""
    if not file.exists():
        new = make()
        np.savez(
            file,
            tokens=np.concatenate([text for text, _ in new]),
            ends=np.cumsum([len(text) for text, _ in new]),
            prompts=[n for _, n in new],
        )
    stored = np.load(file)
    texts = [part.tolist() for part in np.split(stored["tokens"], stored["ends"][:-1])]
    print(f"{len(texts)} texts, {len(stored['tokens'])} tokens", flush=True)
    return list(zip(texts, stored["prompts"].tolist(), strict=True))


def read(
    model: lp.Model, texts: Written, layers: tuple[int, ...], n_threads: int
) -> Iterator[tuple[list[int], np.ndarray[Any, Any], list[int]]]:
    """Of each text its tokens, the states of their positions, and the most probable token after each."""
    with Context(
        model, n_ctx=1024, n_outputs_max=N_LABELLED, n_ubatch=N_LABELLED, n_threads=n_threads
    ) as context:
        context.keep_states(1024, layers)
        for whole, _ in texts:
            text, after = whole[:1024], []
            for first in range(0, len(text), N_LABELLED):
                part = text[first : first + N_LABELLED]
                n = len(part)
                context.decode(DecodeBatch(part, range(first, first + n), [0] * n, [True] * n))
                after += [context.best(i)[0] for i in range(n)]
            yield text, context.states(0).astype(np.float16), after
            context.seq_remove(0, 0)


# ---- the draft
class Layer(torch.nn.Module):  # type: ignore[misc]
    """A layer that drafts, and several guesses in a row, as llama.cpp will make them.

    ``n_in``: the width of what attention reads. ``norms``: the names of the norms. ``output``: the output matrix.
    """

    def __init__(self, shape: Eagle3Shape, n_in: int, norms: tuple[str, ...], output: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        width, head = shape.width, shape.head
        self.q, self.k = linear(n_in, shape.heads * head), linear(n_in, shape.heads_kv * head)
        self.v, self.o = linear(n_in, shape.heads_kv * head), linear(shape.heads * head, width)
        self.gate, self.up = linear(width, shape.ffn), linear(width, shape.ffn)
        self.down = linear(shape.ffn, width)
        self.output = linear(width, len(output))
        self.output.weight.data.copy_(output)
        self.norms = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(width)) for name in norms})
        for module in (self.o, self.down):
            module.weight.data *= 0.1

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """The root-mean-square norm of this name."""
        return F.rms_norm(x, (x.shape[-1],), self.norms[name], self.shape.eps)

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Positions as rotations of neighbouring values."""
        cos, sin = self.angles(x)
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def angles(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for each position and each pair of values."""
        n, half = x.shape[-2], x.shape[-1] // 2
        speeds = self.shape.freq_base ** (-torch.arange(half) / half)
        angles = torch.arange(n)[:, None] * speeds
        return angles.cos(), angles.sin()

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """What the model's states are to the layer."""
        return states

    def read(self, embedded: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer adds to, and what attention reads."""
        raise NotImplementedError

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, n_guesses: int) -> list[torch.Tensor]:
        """Logits of each of ``n_guesses`` guesses in a row, of ``(texts, positions, tokens of the output matrix)``.

        ``embedded``: the tokens after the states. Guess ``k`` at a position reads the state that guess ``k - 1`` made
        at the one before. It attends to the keys of the model's states up to ``k`` positions before, then to its own.
        """
        shape, (n_texts, n, _) = self.shape, embedded.shape
        state, guesses = self.begin(states), []
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        places = torch.arange(n)
        for guess in range(n_guesses):
            if guess:
                state = F.pad(state, (0, 0, 1, -1))
            residual, read = self.read(embedded, state)

            def heads(x: torch.Tensor, n_heads: int) -> torch.Tensor:
                return x.view(n_texts, n, n_heads, shape.head).transpose(1, 2)

            q = self.turn(heads(self.q(read), shape.heads))
            n_same = shape.heads // shape.heads_kv
            keys.append(self.turn(heads(self.k(read), shape.heads_kv)).repeat_interleave(n_same, 1))
            values.append(heads(self.v(read), shape.heads_kv).repeat_interleave(n_same, 1))
            scores = q @ keys[0].transpose(-1, -2)
            scores = scores.masked_fill(places[None, :] > places[:, None] - guess, -torch.inf)
            # The keys that this guess and those before it made: guess j, `guess - j` positions before.
            own_k = [F.pad(keys[j], (0, 0, guess - j, j - guess)) for j in range(1, guess + 1)]
            own_v = [F.pad(values[j], (0, 0, guess - j, j - guess)) for j in range(1, guess + 1)]
            own = [(q * k).sum(-1, keepdim=True) for k in own_k]
            shares = torch.softmax(torch.cat([scores, *own], -1) / math.sqrt(shape.head), -1)
            attended = shares[..., :n] @ values[0]
            for j, value in enumerate(own_v):
                attended = attended + shares[..., n + j : n + j + 1] * value
            x = residual + self.o(attended.transpose(1, 2).reshape(n_texts, n, -1))
            normed = self.norm(x, "ffn_norm")
            state = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
            guesses.append(self.output(self.norm(state, "output_norm")))
        return guesses


def linear(n_in: int, n_out: int) -> Any:
    """A matrix."""
    return torch.nn.Linear(n_in, n_out, bias=False)


class Draft(Layer):
    """The layer of llama.cpp's ``eagle3``."""

    def __init__(self, shape: Eagle3Shape, output: torch.Tensor) -> None:
        norms = ("attn_norm", "attn_norm_2", "ffn_norm", "output_norm")
        super().__init__(shape, 2 * shape.width, norms, output)
        self.fc = linear(len(shape.layers) * shape.target_width, shape.width)

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """What the model's states are to the layer."""
        result: torch.Tensor = self.fc(states)
        return result

    def read(self, embedded: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer adds to, and what attention reads."""
        return state, torch.cat([self.norm(embedded, "attn_norm"), self.norm(state, "attn_norm_2")], -1)

    def tensors(self) -> dict[str, np.ndarray[Any, Any]]:
        """By the names of the file."""
        names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
                 "down": "ffn_down"}  # fmt: skip
        weights = {"fc.weight": self.fc.weight, "output.weight": self.output.weight}
        weights |= {f"blk.0.{theirs}.weight": getattr(self, ours).weight for ours, theirs in names.items()}
        for name, norm in self.norms.items():
            weights["output_norm.weight" if name == "output_norm" else f"blk.0.{name}.weight"] = norm
        return {name: tensor.detach().float().numpy() for name, tensor in weights.items()}


@dataclass
class Texts:
    """Batches of texts of similar length.

    ``prompts``: how many tokens of each come before the first that is guessed. ``chosen``: those that can be guessed.
    """

    tokens: list[list[int]]
    prompts: list[int]
    states: list[np.ndarray[Any, Any]]
    after: list[list[int]]
    embeddings: torch.Tensor
    chosen: list[int]

    def batches(
        self, which: list[int], n_each: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Embedded tokens, states and places of the right guesses in ``chosen`` (-100: none) for a few texts each."""
        place = torch.full((len(self.embeddings),), -100)
        place[self.chosen] = torch.arange(len(self.chosen))
        for first in range(0, len(which), n_each):
            batch = which[first : first + n_each]
            n = min(len(self.tokens[i]) for i in batch) - 1
            tokens = torch.tensor([self.tokens[i][1 : n + 1] for i in batch])
            states = torch.from_numpy(np.stack([self.states[i][:n] for i in batch])).float()
            right = place[torch.tensor([self.after[i][1 : n + 1] for i in batch])]
            firsts = torch.tensor([max(self.prompts[i] - 2, 0) for i in batch])
            yield (
                self.embeddings[tokens],
                states,
                right.masked_fill(torch.arange(n) < firsts[:, None], -100),
            )


def train(
    draft: Layer,
    texts: Texts,
    n_guesses: int,
    n_epochs: int,
    minutes: float,
    rate: float,
    is_half: bool,
    save: Callable[[], None],
) -> None:
    """Trains until all epochs or the minutes are over. Every sixteenth text tells how good it is."""
    by_length = sorted(range(len(texts.tokens)), key=lambda i: len(texts.tokens[i]))
    held_out = [i for i in by_length if i % 16 == 0]
    order = [i for i in by_length if i % 16]
    optimizer = torch.optim.AdamW(
        [p for p in draft.parameters() if p.requires_grad], lr=rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    n_each, began, rng, step = 8, time.monotonic(), random.Random(1), 0
    groups = [order[i : i + n_each] for i in range(0, len(order), n_each)]
    n_steps = n_epochs * len(groups)
    for epoch in range(n_epochs):
        rng.shuffle(groups)
        for which in groups:
            # The rate follows what is over first, the epochs or the time.
            done = min(max(step / n_steps, (time.monotonic() - began) / 60 / minutes), 1.0)
            now = rate * min(1.0, (step + 1) / 50) * max(0.5 + 0.5 * math.cos(math.pi * done), 0.02)
            for group in optimizer.param_groups:
                group["lr"] = now
            embedded, states, right = next(texts.batches(which, n_each))
            optimizer.zero_grad()
            loss = torch.zeros(())
            with torch.autocast("cpu", torch.bfloat16, enabled=is_half):
                drafted = draft(embedded, states, n_guesses)
            for k, logits in enumerate(drafted):
                # The first few positions of guesses in a row have no state.
                part = F.cross_entropy(logits[:, k:].float().flatten(0, 1), right[:, k:].flatten())
                loss = loss + 0.8**k * part
            loss.backward()
            torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 50 == 0:
                spent = (time.monotonic() - began) / 60
                print(f"step {step} of {n_steps}, loss {loss.item():.3f}, {spent:.1f} min", flush=True)
            if done >= 1.0:
                break
        right_shares = shares(draft, texts, held_out, n_guesses)
        print(f"epoch {epoch + 1}: right guesses, the first, the second…: {right_shares}", flush=True)
        save()
        if (time.monotonic() - began) / 60 > minutes:
            return


def shares(draft: Layer, texts: Texts, which: list[int], n_guesses: int) -> list[float]:
    """The share of right guesses in other texts, if those before in the row were right."""
    n_right, n_all = [0] * n_guesses, [0] * n_guesses
    for embedded, states, right in texts.batches(which, 4):
        so_far = torch.ones_like(right, dtype=torch.bool)
        with torch.no_grad():
            drafted = draft(embedded, states, n_guesses)
        for k, logits in enumerate(drafted):
            is_right = logits.argmax(-1) == right
            if k:
                so_far = F.pad(so_far, (1, -1))
            n_all[k] += int(so_far[:, k:].sum())
            so_far = so_far & is_right
            n_right[k] += int(so_far[:, k:].sum())
    return [round(n / max(m, 1), 3) for n, m in zip(n_right, n_all, strict=True)]


def training_options(about: str, out: Path, n_texts: int, n_epochs: int) -> argparse.ArgumentParser:
    """The options of all programs that train a layer, with the defaults of this one."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=out)
    parser.add_argument("--work", type=Path, required=True, help="folder for what is done so far")
    parser.add_argument(
        "--texts",
        type=int,
        default=n_texts,
        help=f"texts that the model writes ({n_texts}); of chats, the answers",
    )
    parser.add_argument("--tokens", type=int, default=220, help="most tokens of a text (220)")
    parser.add_argument("--guesses", type=int, default=2, help="guesses in a row that it learns (2)")
    parser.add_argument("--epochs", type=int, default=n_epochs)
    parser.add_argument("--minutes", type=float, default=40.0, help="most minutes of training (40)")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument(
        "--bf16", action="store_true", help="products of 16 bits, for processors that have them"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--type", dest="type_name", default="q8_0", choices=KINDS)
    return parser


def prepare(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Read the options, prepare torch and make the folder."""
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    """Command line."""
    parser = training_options(__doc__ or "", Path("draft.gguf"), n_texts=1200, n_epochs=8)
    parser.add_argument("--vocab", type=int, default=4096, help="tokens that the draft can guess (4096)")
    args = prepare(parser)
    shape = shape_for(args.model)
    texts_file, states_file, weights_file = (
        args.work / name for name in ("texts.npz", "states.npz", "draft.pt")
    )
    began = time.monotonic()

    def make() -> Written:
        with lp.Model(args.model) as model:
            return write(model, args.texts, args.tokens, args.threads, args.seed)

    texts = stored_texts(texts_file, make)
    if not states_file.exists():
        with lp.Model(args.model) as model:
            parts = list(read(model, texts, shape.layers, args.threads))
        np.savez(
            states_file,
            states=np.concatenate([states for _, states, _ in parts]),
            after=np.concatenate([np.array(after) for _, _, after in parts]),
            ends=np.cumsum([len(text) for text, _, _ in parts]),
        )
    stored = np.load(states_file)
    ends, after = stored["ends"][:-1], stored["after"]
    print(f"states: {time.monotonic() - began:.0f} s", flush=True)
    guessed = np.concatenate(
        [part[max(n - 1, 0) :] for part, (_, n) in zip(np.split(after, ends), texts, strict=True)]
    )
    counts = np.bincount(guessed)
    chosen = sorted(np.argsort(-counts, kind="stable")[: args.vocab].tolist())
    print(f"{len(chosen)} tokens are {counts[chosen].sum() / counts.sum():.4f} of the answers", flush=True)
    embedded = next(t for t in gguf.GGUFReader(args.model).tensors if t.name == "token_embd.weight")
    embeddings = torch.from_numpy(
        gguf.quants.dequantize(embedded.data, embedded.tensor_type).reshape(-1, shape.target_width).copy()
    )
    embedded_texts = Texts(
        [text[:1024] for text, _ in texts],
        [n for _, n in texts],
        np.split(stored["states"], ends),
        [part.tolist() for part in np.split(after, ends)],
        embeddings,
        chosen,
    )
    draft = Draft(shape, embeddings[chosen])
    print(f"{shape}, {sum(p.numel() for p in draft.parameters())} parameters", flush=True)
    if weights_file.exists():
        draft.load_state_dict(torch.load(weights_file))

    def save() -> None:
        torch.save(draft.state_dict(), weights_file)
        write_eagle3(args.out, args.model, shape, draft.tensors(), chosen, args.type_name)

    train(draft, embedded_texts, args.guesses, args.epochs, args.minutes, args.rate, args.bf16, save)
    print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
