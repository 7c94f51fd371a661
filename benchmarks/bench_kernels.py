"""Compares our kernels with ggml's: single products, and whole models.

    python benchmarks/bench_kernels.py products                          # each type, by rows of activations
    python benchmarks/bench_kernels.py products --shape 4096x14336 --types Q4_K Q6_K --rows 1 8 256
    python benchmarks/bench_kernels.py products --shape 576x16 16x1536 --types F16      # a LoRA of rank 16
    python benchmarks/bench_kernels.py products --shape 2048x768 --experts 128 8        # rows choose 8 of 128 matrices
    python benchmarks/bench_kernels.py attention --rows 1 4 256          # of the shapes of some models
    python benchmarks/bench_kernels.py attention --rows 1 --cells 32000 --callers 1 4 8    # that share most cells
    python benchmarks/bench_kernels.py linear --rows 1 512               # states and convolutions of some hybrids
    python benchmarks/bench_kernels.py model MODEL.gguf                  # decoding by callers, prompts, loading
    python benchmarks/bench_kernels.py model MODEL.gguf --depth 8000 --kv-unified    # after tokens that callers share
    python benchmarks/bench_kernels.py model MODEL.gguf --batched-bench --openvino VENV/bin/python

All sides run in turns, and medians are printed. The peers are processes: `compare/peers.py` builds llama-batched-bench,
which loads the model again for each figure, and OpenVINO GenAI needs an environment with `openvino-genai`. Run it alone
on the machine: threads of a product wait for each other, so other work slows all sides by much more than its share.
Limits of the machine are printed first: how fast memory is read, and, with torch installed, products of 8-bit integers
by oneDNN. `tools/make_model.py` makes models of other shapes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Literal

import gguf
import numpy as np

import llamapipe as lp
from llamapipe.gguf.check import TYPES as GGML_TYPES
from llamapipe.native.load import last_error, native

# ggml's number of each type, the values and bytes of its blocks.
TYPES = {name: (number, *block) for number, (name, *block) in GGML_TYPES.items()}
# Types of at most 3 bits, and NVFP4; quantizing to some of them takes minutes, or a matrix of importance.
LOW_BITS = "Q3_K Q2_K IQ3_S IQ3_XXS IQ2_S IQ2_XS IQ2_XXS IQ1_M IQ1_S TQ2_0 TQ1_0 NVFP4".split()
FLOATS = ("F32", "F16", "BF16")
SHAPES = ("1536x8960", "8960x1536")  # columns x rows: the feed-forward layers of Qwen2.5 1.5B
SIDES: tuple[Literal["ggml", "auto"], ...] = ("ggml", "auto")
Result = dict[str, Any]
# Tokens per second of a number of callers, or, with None, of one prompt; also takes a seed.
Rate = Callable[[int | None, int], float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--n-threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    what = parser.add_subparsers(dest="what", required=True)
    products = what.add_parser("products")
    products.add_argument("--types", nargs="+", choices=TYPES, help="default: all that have kernels here")
    products.add_argument("--shape", nargs="+", default=SHAPES, metavar="COLUMNSxROWS")
    products.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 256])
    products.add_argument(
        "--experts",
        type=int,
        nargs=2,
        metavar=("N", "USED"),
        help="a row is multiplied with USED of N matrices",
    )
    products.add_argument("--plot", type=Path, help="draw the figures into this SVG; needs matplotlib")
    attention = what.add_parser("attention")
    attention.add_argument(
        "--heads", type=int, nargs=3, action="append", metavar=("HEADS", "KEY_HEADS", "DIMENSIONS")
    )
    attention.add_argument("--types", nargs="+", default=["F16", "Q8_0"])
    attention.add_argument("--rows", type=int, nargs="+", default=[1, 4, 256])
    attention.add_argument("--cells", type=int, default=8000)
    attention.add_argument("--layers", type=int, default=12, help="caches that are read one after another")
    attention.add_argument("--callers", type=int, nargs="+", default=[1], help="sequences of one cache each")
    attention.add_argument("--own", type=int, default=64, help="cells that callers do not share")
    attention.add_argument(
        "--processor-time", action="store_true", help="for a busy machine, with one thread"
    )
    linear = what.add_parser("linear")
    linear.add_argument("--rows", type=int, nargs="+", default=[1, 16, 512], help="tokens of each sequence")
    linear.add_argument("--seqs", type=int, default=1)
    linear.add_argument("--layers", type=int, default=12, help="states that are read one after another")
    model = what.add_parser("model")
    model.add_argument("model", help="a GGUF file")
    model.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    model.add_argument("--prompt", type=int, default=256)
    model.add_argument("--tokens", type=int, default=32, help="tokens that each caller generates")
    model.add_argument("--depth", type=int, default=0, help="tokens before, which all callers share")
    model.add_argument("--kv-unified", action="store_true", help="one range of cells for all callers")
    model.add_argument("--batched-bench", action="store_true", help="measure llama-batched-bench, too")
    model.add_argument(
        "--openvino", type=Path, metavar="PYTHON", help="and OpenVINO GenAI, of this interpreter"
    )
    args = parser.parse_args(argv)
    measures = {
        "products": measure_products,
        "attention": measure_attention,
        "linear": measure_linear,
        "model": measure_model,
    }
    results = measures[args.what](args)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if args.what == "products" and args.plot:
        plot(results, args.plot)
    return 0


# ---- single products
def measure_products(args: argparse.Namespace) -> Result:
    """A table of each type and shape."""
    limits = machine_limits(args.n_threads)
    print(", ".join(f"{name} {value:.0f}" for name, value in limits.items()))
    result: Result = {"limits": limits, "products": []}
    print("type    columns x rows    n   ggml ms   ours ms  ratio  GOP/s  GB/s")
    have = native().lib.lp_kernels_have
    for name in args.types or [name for name, (number, *_) in TYPES.items() if have(number, 1024, 1024)]:
        for shape in args.shape:
            n_columns, n_rows = (int(n) for n in shape.split("x"))
            kind = TYPES[name][0]
            if name not in FLOATS and not have(kind, n_columns, n_rows):
                print(f"{name:7} {shape:>14}: no kernel of ours")
                continue
            n_matrices, n_used = args.experts or (1, 1)
            weights = quantized(name, n_columns, n_rows * n_matrices)
            for n in args.rows:
                ids = chosen_experts(n, n_matrices, n_used)
                ms = time_product(name, weights, n_columns, n_rows, ids, n_matrices, args)
                work, n_bytes = 2e-9 * n_columns * n_rows * ids.size, len(weights) / 1e9
                n_bytes *= len(np.unique(ids)) / n_matrices
                ratio = ms["ggml"] / ms["auto"]
                print(f"{name:7} {shape:>14} {n:4} {ms['ggml']:9.3f} {ms['auto']:9.3f} {ratio:6.2f} "
                      f"{work / ms['auto'] * 1e3:6.0f} {n_bytes / ms['auto'] * 1e3:5.1f}")  # fmt: skip
                result["products"].append({"type": name, "shape": shape, "n": n, "ms": ms, "ratio": ratio})
    return result


def chosen_experts(n: int, n_matrices: int, n_used: int) -> Any:
    """Which matrices n rows choose: int32 (n, n_used), the same in each run."""
    draw = np.random.default_rng(3)
    return np.array([draw.permutation(n_matrices)[:n_used] for _ in range(n)], np.int32)


def quantized(name: str, n_columns: int, n_rows: int) -> Any:
    """Random weights in a file's form."""
    kind, block, n_bytes = TYPES[name]
    ffi, lib = native().ffi, native().lib
    if name in LOW_BITS:  # any bytes are weights, and products take as long
        return ffi.new("char[]", np.random.default_rng(1).bytes(n_rows * n_columns // block * n_bytes))
    values = np.random.default_rng(1).normal(size=(min(n_rows, 64), n_columns)).astype(np.float32)
    part = ffi.new("char[]", len(values) * n_columns // block * n_bytes)
    lib.lp_quantize(kind, *values.shape, ffi.cast("float *", values.ctypes.data), part)
    return ffi.new(
        "char[]",
        (bytes(ffi.buffer(part)) * (n_rows // len(values) + 1))[: n_rows * n_columns // block * n_bytes],
    )


def time_product(
    name: str, weights: Any, n_columns: int, n_rows: int, ids: Any, n_matrices: int, args: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of a product of rows of activations with the matrices that they choose, in turns."""
    ffi, lib = native().ffi, native().lib
    n, n_used = ids.shape
    x = np.random.default_rng(2).normal(size=(n, n_columns)).astype(np.float32)
    y = np.empty((n, n_used, n_rows), np.float32)
    n_times = 20 if n <= 16 else 3
    seconds = np.empty(n_times)
    forms = {"ggml": lib.LP_WEIGHTS_OF_GGML, "auto": lib.LP_WEIGHTS_PACKED}
    if name in FLOATS:
        forms = dict.fromkeys(SIDES, lib.LP_WEIGHTS_OF_FILES)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(args.repeats):
        for side in SIDES:
            fields = {
                "type": TYPES[name][0], "n_columns": n_columns, "n_rows": n_rows,
                "n_matrices": n_matrices, "weights": weights, "form": forms[side], "is_ours": side == "auto",
                "varies": True,  # as in engines without batch_invariant
                "x_stride": n_columns, "x": ffi.cast("float *", x.ctypes.data),
                **({"nx1": 1, "nx2": n, "n_used": n_used, "ids": ffi.cast("int32_t *", ids.ctypes.data)}
                   if n_matrices > 1 else {"nx1": n, "nx2": 1}),
                "n_threads": args.n_threads, "n_times": n_times, "seconds": ffi.cast("double *", seconds.ctypes.data),
            }  # fmt: skip
            if (
                lib.lp_product_compute(ffi.new("lp_product *", fields), ffi.cast("float *", y.ctypes.data))
                != 0
            ):
                raise RuntimeError(last_error(native()))
            times[side].append(float(np.median(seconds[1:])) * 1e3)
    return {side: median(values) for side, values in times.items()}


# ---- attention
def measure_attention(args: argparse.Namespace) -> Result:
    """A table of shapes, types, callers and rows of each. Rows are the last of the cells.

    A layer, or a caller, is a stream of one operation: several callers share cells and are not measured by layers.
    *Apart*: ours without looking for shared cells.
    """
    result: Result = {"attention": []}
    print("heads, of keys, dimensions   type    callers rows   ggml ms  apart ms   ours ms  ratio  GB/s")
    shapes = args.heads or [(14, 2, 64), (12, 2, 128), (9, 3, 64), (32, 8, 128)]
    for (heads, kv_heads, n_dims), name, n_callers, n in product(shapes, args.types, args.callers, args.rows):
        ms, n_bytes = time_attention(name, heads, kv_heads, n_dims, n, n_callers, args)
        ratio = ms["ggml"] / ms["auto"]
        print(f"{heads:5} {kv_heads:9} {n_dims:11}   {name:9} {n_callers:5} {n:4} {ms['ggml']:9.2f} {ms['apart']:9.2f} "
              f"{ms['auto']:9.2f} {ratio:6.2f} {n_bytes / ms['auto'] / 1e6:5.1f}", flush=True)  # fmt: skip
        result["attention"].append({"heads": heads, "kv_heads": kv_heads, "n_dims": n_dims, "type": name,
                                   "callers": n_callers, "n": n, "ms": ms, "ratio": ratio})  # fmt: skip
    return result


def time_attention(
    name: str, heads: int, kv_heads: int, n_dims: int, n: int, n_callers: int, args: argparse.Namespace
) -> tuple[dict[str, float], int]:
    """Milliseconds in turns, and the bytes of all keys and values."""
    ffi, lib = native().ffi, native().lib
    n_layers = n_callers if n_callers > 1 else args.layers if n <= 16 else 1  # many rows take long enough
    cells = quantized(name, kv_heads * n_dims, n_layers * args.cells)
    if n_callers > 1:
        n_all = len(cells) // n_callers
        n_shared = n_all // args.cells * (args.cells - args.own)
        for i in range(n_callers):
            ffi.memmove(cells + i * n_all, cells, n_shared)
            ffi.buffer(cells)[i * n_all + n_shared] = bytes([i])  # the first cell of its own differs
    queries = np.random.default_rng(2).normal(size=(n_layers, heads, n, n_dims)).astype(np.float32)
    masks = np.where(np.arange(args.cells) > np.arange(args.cells - n, args.cells)[:, None], -np.inf, 0)
    masks = np.ascontiguousarray(np.broadcast_to(masks, (n_layers, n, args.cells)), np.float16)
    out, seconds = np.empty_like(queries), np.empty(6)
    sides = ("ggml", "apart", "auto")
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(args.repeats):
        for side in sides:
            fields = {
                "n_streams": n_layers, "n_heads": heads, "n_kv_heads": kv_heads, "n_rows": n, "n_cells": args.cells,
                "n_dims": n_dims, "n_value_dims": n_dims, "type": TYPES[name][0],
                "queries": ffi.cast("float *", queries.ctypes.data), "keys": cells, "values": cells,
                "masks": ffi.cast("uint16_t *", masks.ctypes.data), "scale": n_dims**-0.5, "is_ours": side != "ggml",
                "n_spared": ffi.new("int64_t *") if side == "auto" and n_callers > 1 else ffi.NULL,
                "n_threads": args.n_threads, "seconds": ffi.cast("double *", seconds.ctypes.data),
            }  # fmt: skip

            def compute(n_times: int, fields: Result = fields) -> float:
                attention = ffi.new("lp_attention *", {**fields, "n_times": n_times})
                start = process_time()
                if lib.lp_attention_compute(attention, ffi.cast("float *", out.ctypes.data)):
                    raise RuntimeError(last_error(native()))
                return process_time() - start

            if args.processor_time:
                once = compute(1)  # and what is prepared
                times[side].append((compute(len(seconds)) - once) / (len(seconds) - 1) * 1e3)
            else:
                compute(len(seconds))
                times[side].append(float(np.median(seconds[1:])) * 1e3)
    return {side: median(values) for side, values in times.items()}, 2 * len(cells)


# ---- states and convolutions
# The number of `lp_linear_kind`, heads, groups, rows and columns of a state.
LINEAR = {
    "delta net, Qwen 3.5 0.8B": (0, 16, 16, 128, 128),
    "delta net, Qwen 3.5 4B": (0, 32, 16, 128, 128),
    "scan, Granite 4 h 1B": (1, 48, 1, 64, 128),
    "scan, Mamba 2 1.3B": (1, 64, 1, 64, 128),
    "wkv7, RWKV 7 0.4B": (2, 16, 16, 64, 64),
    "convolution, Qwen 3.5 0.8B": (3, 1, 1, 6144, 4),
}


def measure_linear(args: argparse.Namespace) -> Result:
    """A table of operations and tokens, gathering and copying states included; layers have their states in turns."""
    result: Result = {"linear": []}
    print("operation                     tokens   ggml ms   ours ms  ratio  GB/s of states")
    for name in LINEAR:
        for n in args.rows:
            ms, n_bytes = time_linear(name, n, args)
            ratio = ms["ggml"] / ms["auto"]
            print(f"{name:28} {n:7} {ms['ggml']:9.3f} {ms['auto']:9.3f} {ratio:6.2f} "
                  f"{n_bytes / ms['auto'] / 1e6:6.1f}", flush=True)  # fmt: skip
            result["linear"].append({"operation": name, "n": n, "seqs": args.seqs, "ms": ms, "ratio": ratio})
    return result


def time_linear(name: str, n: int, args: argparse.Namespace) -> tuple[dict[str, float], int]:
    """Milliseconds of a layer in turns, and the bytes of its states, read and written."""
    ffi, lib = native().ffi, native().lib
    kind, n_heads, n_groups, n_rows, n_columns = LINEAR[name]
    n_seqs = args.seqs * (args.layers if n <= 16 and kind < 3 else 1)
    draw = np.random.default_rng(1)
    vectors = (n_seqs * n, max(n_heads, n_groups) * max(n_rows, n_columns))
    inputs = [np.full(vectors, 0.05, np.float32) * draw.choice([-1, 1], vectors) for _ in range(6)]
    if kind < 2:
        inputs[3 if kind == 0 else 2][:] = -0.1  # gates, or A
    states = np.zeros((n_seqs, n_heads * n_rows * n_columns), np.float32)
    ids = np.arange(n_seqs, dtype=np.int32)
    out, seconds = np.empty((n_seqs * n, n_heads * n_rows), np.float32), np.empty(4)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(args.repeats):
        for side in SIDES:
            fields = {
                "kind": kind, "n_seqs": n_seqs, "n_tokens": n, "n_heads": n_heads, "n_groups": n_groups,
                "n_rows": n_rows, "n_columns": n_columns, "n_states": n_seqs, "n_kept": 1, "n_ids": n_seqs,
                "states": ffi.cast("float *", states.ctypes.data), "ids": ffi.cast("int32_t *", ids.ctypes.data),
                "inputs": [ffi.cast("float *", x.ctypes.data) for x in inputs], "is_ours": side == "auto",
                "n_threads": args.n_threads, "n_times": len(seconds),
                "seconds": ffi.cast("double *", seconds.ctypes.data),
            }  # fmt: skip
            if lib.lp_linear_compute(ffi.new("lp_linear *", fields), ffi.cast("float *", out.ctypes.data)):
                raise RuntimeError(last_error(native()))
            times[side].append(float(np.min(seconds[1:])) * 1e3 * args.seqs / n_seqs)
    return {side: median(values) for side, values in times.items()}, 2 * 4 * args.seqs * states.shape[1]


# ---- the machine
def machine_limits(n_threads: int) -> dict[str, float]:
    """What the machine could do at best."""
    parts = [np.ones(128 << 20, np.uint8) for _ in range(n_threads)]
    with ThreadPoolExecutor(n_threads) as pool:
        read = min(
            timed(lambda: list(pool.map(lambda part: np.bitwise_or.reduce(part.view(np.uint64)), parts)))
            for _ in range(5)
        )
    limits = {"memory GB/s": n_threads * (128 << 20) / read / 1e9}
    try:
        import torch
    except ImportError:
        return limits
    torch.set_num_threads(n_threads)
    a, b = (torch.ones((1536, 1536), dtype=torch.int8) for _ in range(2))
    limits["oneDNN int8 GOP/s"] = (
        2 * 1536**3 / min(timed(lambda: torch._int_mm(a, b)) for _ in range(5)) / 1e9
    )
    return limits


def timed(call: Any) -> float:
    """Seconds of a call."""
    start = perf_counter()
    call()
    return perf_counter() - start


def plot(results: Result, path: Path) -> None:
    """GOP/s by rows of activations, a panel for each type."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(product["type"] for product in results["products"]))
    figure, panels = plt.subplots(1, len(names), figsize=(3 * len(names), 3), sharey=True, squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        points = [
            p
            for p in results["products"]
            if p["type"] == name and p["shape"] == results["products"][0]["shape"]
        ]
        n_columns, n_rows = (int(n) for n in points[0]["shape"].split("x"))
        for side, label in zip(SIDES, ("ggml", "llamapipe"), strict=True):
            gops = [2e-6 * n_columns * n_rows * p["n"] / p["ms"][side] for p in points]
            panel.plot([p["n"] for p in points], gops, marker="o", label=label)
        panel.set(
            title=f"{name}, {points[0]['shape']}", xlabel="rows of activations", xscale="log", yscale="log"
        )
    panels[0][0].set_ylabel("GOP/s")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


# ---- whole models
def measure_model(args: argparse.Namespace) -> Result:
    """Tokens per second of both kernels, and of the peers."""
    result: Result = {"load_s": {}, "work": {}}
    with ExitStack() as stack:
        sides: dict[str, Rate] = {}
        for side in SIDES:
            start = perf_counter()
            model = stack.enter_context(lp.Model(args.model, kernels=side))
            result["load_s"][side] = perf_counter() - start
            sides[side] = engine_rate(stack.enter_context(new_engine(model, args)), args)
        if args.batched_bench:
            sides["batched-bench"] = batched_bench_rate(args)
        if args.openvino:
            sides["openvino"] = stack.enter_context(openvino_rate(args))
        loads = ", ".join(f"{s:.2f} s with kernels={side!r}" for side, s in result["load_s"].items())
        print(f"{Path(args.model).name}: loaded in {loads}")
        print(f"tokens/s, medians of {args.repeats}; ratio of auto to ggml: median and quartiles")
        print(f"{'work':>14}" + "".join(f" {side:>13}" for side in sides) + "   ratio", flush=True)
        for n in (*args.callers, None):
            what = f"prompt of {args.prompt}" if n is None else f"{n} callers"
            result["work"][what] = compare(what, sides, n, args.repeats)
    return result


def compare(what: str, sides: dict[str, Rate], n: int | None, repeats: int) -> Result:
    """All sides in turns."""
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for i in range(repeats):
        for side in list(sides)[:: 1 if i % 2 else -1]:
            rates[side].append(sides[side](n, i))
    ratios = sorted(ours / theirs for ours, theirs in zip(rates["auto"], rates["ggml"], strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    medians = {side: median(values) for side, values in rates.items()}
    row = "".join(f" {value:13.1f}" for value in medians.values())
    print(f"{what:>14}{row}   {median(ratios):.2f}, {low:.2f} to {high:.2f}", flush=True)
    return {**medians, "ratio": median(ratios)}


def new_engine(model: lp.Model, args: argparse.Namespace) -> lp.Engine:
    """An engine that computes every prompt, but for what callers share."""
    return lp.Engine(
        model,
        n_ctx=args.depth + args.prompt + args.tokens + 16,
        n_seq_max=max(args.callers),
        prefix_cache=args.depth > 0,
        n_threads=args.n_threads,
        tuning=lp.EngineTuning(kv_unified=args.kv_unified or None),
    )


def engine_rate(engine: lp.Engine, args: argparse.Namespace) -> Rate:
    """Decoding after the last caller's first token, or a whole prompt with one token."""

    def rate(n: int | None, seed: int) -> float:
        (shared,) = random_prompts(engine.model.n_vocab, None, args.depth, 0)
        prompts = [shared + prompt for prompt in random_prompts(engine.model.n_vocab, n, args.prompt, seed)]
        params = lp.SamplingParams(
            max_tokens=1 if n is None else args.tokens, temperature=0, ignore_eos=True, speculate="off"
        )
        start = perf_counter()
        done = engine.generate(prompts, params)
        seconds = perf_counter() - start
        if n is None:
            return float(args.prompt / seconds)
        return float(
            n * (args.tokens - 1) / (seconds - max(text.timings.first_token_s or 0 for text in done))
        )

    return rate


def random_prompts(n_vocab: int, n: int | None, n_long: int, seed: int) -> list[list[int]]:
    """Prompts of 4 tokens for n callers; None: one of n_long."""
    draw = random.Random(seed)
    n_each = n_long if n is None else 4
    return [[draw.randrange(100, n_vocab - 1000) for _ in range(n_each)] for _ in range(n or 1)]


def batched_bench_rate(args: argparse.Namespace) -> Rate:
    """llama.cpp's program."""
    sys.path.append(str(Path(__file__).parent / "compare"))
    from peers import find_peers

    program = find_peers().program("llama-batched-bench")

    def rate(n: int | None, seed: int) -> float:
        n_prompt, n_tokens = (args.prompt, 1) if n is None else (4, args.tokens)
        command = [program, "-m", args.model, "--output-format", "jsonl", "-t", args.n_threads, "-tb", args.n_threads,
                   "-npp", n_prompt, "-ntg", n_tokens, "-npl", n or 1, "-c", (n or 1) * 1024,
                   "-b", 2048, "-ub", 512]  # fmt: skip
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
        (record,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return float(record["speed_pp" if n is None else "speed_tg"])

    return rate


# What the other interpreter runs: a line of token ids and a number of tokens to generate, answered with the seconds
# until the first token and until the end.
_OPENVINO = """
import json, sys, time
import numpy as np, openvino as ov, openvino_genai as genai
pipeline = genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    ids, n_tokens = json.loads(line)
    ids = np.array(ids, np.int64)
    given = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
    start = time.perf_counter()
    out = pipeline.generate(given, max_new_tokens=n_tokens, ignore_eos=True, do_sample=False)
    seconds = time.perf_counter() - start
    assert [len(row) for row in out.tokens] == [n_tokens] * len(ids), [len(row) for row in out.tokens]
    print(json.dumps([out.perf_metrics.get_ttft().mean / 1e3, seconds]), flush=True)
"""


@contextmanager
def openvino_rate(args: argparse.Namespace) -> Iterator[Rate]:
    """OpenVINO GenAI, which reads some GGUF files; measured as our engine is."""
    command = [args.openvino, "-c", _OPENVINO, args.model, args.n_threads]
    vocabulary = len(gguf.GGUFReader(args.model).fields["tokenizer.ggml.tokens"].data)
    with subprocess.Popen(
        [*map(str, command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def rate(n: int | None, seed: int) -> float:
            assert process.stdin is not None and process.stdout is not None
            n_tokens = 1 if n is None else args.tokens
            prompts = random_prompts(vocabulary, n, args.prompt, seed)
            process.stdin.write(json.dumps([prompts, n_tokens]) + "\n")
            first_s, seconds = json.loads(process.stdout.readline())
            return float(args.prompt / seconds if n is None else n * (n_tokens - 1) / (seconds - first_s))

        while (line := process.stdout.readline()) and line != "ready\n":
            pass  # what it says while it loads
        yield rate
        process.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
