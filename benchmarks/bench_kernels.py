"""Compares our kernels with ggml's: single products, and whole models.

    python benchmarks/bench_kernels.py products                          # each type, by rows of activations
    python benchmarks/bench_kernels.py products --shape 4096x14336 --types Q4_K Q6_K --rows 1 8 256
    python benchmarks/bench_kernels.py model MODEL.gguf                  # decoding by callers, prompts, loading

Both sides run in turns in one process, and medians are printed. Run it alone on the machine: threads of a product wait
for each other, so other work slows both sides by much more than its share. Limits of the machine are printed first: how
fast memory is read, and, with torch installed, products of 8-bit integers by oneDNN.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import gguf
import numpy as np

import llamapipe as lp
from llamapipe.native.load import last_error, native

TYPES = "Q4_K Q5_K Q6_K Q8_0 Q5_0 Q4_0 Q4_1 Q5_1 IQ4_NL IQ4_XS MXFP4".split()
SHAPES = ("1536x8960", "8960x1536")  # columns x rows: the feed-forward layers of Qwen2.5 1.5B
SIDES: tuple[Literal["ggml", "auto"], ...] = ("ggml", "auto")
Result = dict[str, Any]


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
    products.add_argument("--types", nargs="+", default=TYPES, choices=TYPES)
    products.add_argument("--shape", nargs="+", default=SHAPES, metavar="COLUMNSxROWS")
    products.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 256])
    products.add_argument("--plot", type=Path, help="draw the figures into this SVG; needs matplotlib")
    model = what.add_parser("model")
    model.add_argument("model", help="a GGUF file")
    model.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    model.add_argument("--prompt", type=int, default=256)
    model.add_argument("--tokens", type=int, default=32, help="tokens that each caller generates")
    args = parser.parse_args(argv)
    results = measure_products(args) if args.what == "products" else measure_model(args)
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
    found: Result = {"limits": limits, "products": []}
    print("type    columns x rows    n   ggml ms   ours ms  ratio  GOP/s  GB/s")
    for name in args.types:
        for shape in args.shape:
            n_columns, n_rows = (int(n) for n in shape.split("x"))
            if not native().lib.lp_kernels_have(gguf.GGMLQuantizationType[name], n_columns, n_rows):
                print(f"{name:7} {shape:>14}: no kernel of ours")
                continue
            weights = quantized(name, n_columns, n_rows)
            for n in args.rows:
                ms = time_product(name, weights, n_columns, n_rows, n, args)
                work, n_bytes = 2e-9 * n_columns * n_rows * n, len(weights) / 1e9
                ratio = ms["ggml"] / ms["auto"]
                print(f"{name:7} {shape:>14} {n:4} {ms['ggml']:9.3f} {ms['auto']:9.3f} {ratio:6.2f} "
                      f"{work / ms['auto'] * 1e3:6.0f} {n_bytes / ms['auto'] * 1e3:5.1f}")  # fmt: skip
                found["products"].append({"type": name, "shape": shape, "n": n, "ms": ms, "ratio": ratio})
    return found


def quantized(name: str, n_columns: int, n_rows: int) -> Any:
    """Random weights in a file's form."""
    kind = gguf.GGMLQuantizationType[name]
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    ffi, lib = native().ffi, native().lib
    values = np.random.default_rng(1).normal(size=(min(n_rows, 64), n_columns)).astype(np.float32)
    part = ffi.new("char[]", len(values) * n_columns // block * n_bytes)
    lib.lp_quantize(kind, *values.shape, ffi.cast("float *", values.ctypes.data), part)
    return ffi.new(
        "char[]",
        (bytes(ffi.buffer(part)) * (n_rows // len(values) + 1))[: n_rows * n_columns // block * n_bytes],
    )


def time_product(
    name: str, weights: Any, n_columns: int, n_rows: int, n: int, args: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of a product with n rows of activations, in turns."""
    ffi, lib = native().ffi, native().lib
    x = np.random.default_rng(2).normal(size=(n, n_columns)).astype(np.float32)
    y = np.empty((n, n_rows), np.float32)
    n_times = 20 if n <= 16 else 3
    seconds = np.empty(n_times)
    forms = {"ggml": lib.LP_WEIGHTS_OF_GGML, "auto": lib.LP_WEIGHTS_PACKED}
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(args.repeats):
        for side in SIDES:
            given = {
                "type": int(gguf.GGMLQuantizationType[name]), "n_columns": n_columns, "n_rows": n_rows,
                "n_matrices": 1, "weights": weights, "form": forms[side],
                "x_stride": n_columns, "nx1": n, "nx2": 1, "x": ffi.cast("float *", x.ctypes.data),
                "n_threads": args.n_threads, "n_times": n_times, "seconds": ffi.cast("double *", seconds.ctypes.data),
            }  # fmt: skip
            if (
                lib.lp_product_compute(ffi.new("lp_product *", given), ffi.cast("float *", y.ctypes.data))
                != 0
            ):
                raise RuntimeError(last_error(native()))
            times[side].append(float(np.median(seconds[1:])) * 1e3)
    return {side: median(values) for side, values in times.items()}


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
        mine = [
            p
            for p in results["products"]
            if p["type"] == name and p["shape"] == results["products"][0]["shape"]
        ]
        n_columns, n_rows = (int(n) for n in mine[0]["shape"].split("x"))
        for side, label in zip(SIDES, ("ggml", "llamapipe"), strict=True):
            gops = [2e-6 * n_columns * n_rows * p["n"] / p["ms"][side] for p in mine]
            panel.plot([p["n"] for p in mine], gops, marker="o", label=label)
        panel.set(
            title=f"{name}, {mine[0]['shape']}", xlabel="rows of activations", xscale="log", yscale="log"
        )
    panels[0][0].set_ylabel("GOP/s")
    panels[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


# ---- whole models
def measure_model(args: argparse.Namespace) -> Result:
    """Tokens per second of both kernels."""
    found: Result = {"load_s": {}, "callers": {}, "prompt": {}}
    n_ctx = args.prompt + args.tokens + 16
    engines: dict[str, lp.Engine] = {}
    for side in SIDES:
        start = perf_counter()
        model = lp.Model(args.model, kernels=side)
        found["load_s"][side] = perf_counter() - start
        engines[side] = lp.Engine(
            model, n_ctx=n_ctx, n_seq_max=max(args.callers), prefix_cache=False, n_threads=args.n_threads
        )
    loads = ", ".join(f"{seconds:.2f} s with kernels={side!r}" for side, seconds in found["load_s"].items())
    print(f"{Path(args.model).name}: loaded in {loads}")
    print(f"{'work':>14} {'ggml':>8} {'ours':>8} {'ratio':>6}   tokens/s, median and quartiles of the ratio")
    for n in args.callers:
        found["callers"][n] = compare(
            f"{n} callers", engines, args, lambda engine, seed, n=n: decode(engine, seed, n, args.tokens)
        )
    found["prompt"] = compare(
        f"prompt of {args.prompt}", engines, args, lambda engine, seed: prefill(engine, seed, args.prompt)
    )
    for engine in engines.values():
        engine.close()
    return found


def compare(what: str, engines: dict[str, lp.Engine], args: argparse.Namespace, run: Any) -> Result:
    """Both engines in turns."""
    rates: dict[str, list[float]] = {side: [] for side in engines}
    for i in range(args.repeats):
        for side in SIDES if i % 2 else SIDES[::-1]:
            rates[side].append(run(engines[side], i))
    ratios = sorted(ours / theirs for ours, theirs in zip(rates["auto"], rates["ggml"], strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    theirs, ours = (median(rates[side]) for side in SIDES)
    print(f"{what:>14} {theirs:8.1f} {ours:8.1f} {median(ratios):6.2f}   {low:.2f} to {high:.2f}")
    return {**{side: median(values) for side, values in rates.items()}, "ratio": median(ratios)}


def decode(engine: lp.Engine, seed: int, n: int, n_tokens: int) -> float:
    """Tokens per second of n callers with short prompts."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(100, engine.model.n_vocab - 1000) for _ in range(4)] for _ in range(n)]
    params = lp.SamplingParams(max_tokens=n_tokens, temperature=0, ignore_eos=True)
    return n * n_tokens / timed(lambda: engine.generate(prompts, params))


def prefill(engine: lp.Engine, seed: int, n_tokens: int) -> float:
    """Tokens per second of one prompt."""
    draw = random.Random(seed)
    prompt = [draw.randrange(100, engine.model.n_vocab - 1000) for _ in range(n_tokens)]
    return n_tokens / timed(lambda: engine.generate(prompt, lp.SamplingParams(max_tokens=1, temperature=0)))


if __name__ == "__main__":
    sys.exit(main())
