"""Perplexity, and the largest logit difference to float32, of a real model in other types of weights: ours and ggml's.

    python benchmarks/bench_types.py MODEL.gguf --types Q1_0 Q2_0 Q4_0 docs/guides/*.md
    python benchmarks/bench_types.py MODEL.gguf --types Q1_0 --matrices 'blk[.](4|12|20)[.]ffn' TEXT.md

ggml quantizes those matrices of the layers again whose rows are whole blocks; the layers' others become float32, and
what is not in a layer stays as it is. The side with float32 has the values of the quantized matrices, so the others
differ from it by the rounding of activations and the order of additions. A model that was not trained for one or two
bits only stays one if few of its matrices have them: choose those with --matrices. The text is cut into windows;
differences to ggml's have their standard error over windows.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from gguf.gguf_writer import TensorInfo

sys.path.append(str(Path(__file__).resolve().parents[1]))  # after an installed llamapipe

import llamapipe as lp
from llamapipe.gguf.check import TYPES as GGML_TYPES
from llamapipe.native.load import native

TYPES = {name: (number, *block) for number, (name, *block) in GGML_TYPES.items()}
Floats = npt.NDArray[np.float32]
SIDES: tuple[tuple[str, bool, Literal["auto", "ggml"]], ...] = (
    ("float32", True, "ggml"),
    ("ggml", False, "ggml"),
    ("ours", False, "auto"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the files, score the text, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["Q1_0", "Q2_0"])
    parser.add_argument("--matrices", default="blk[.]", metavar="REGEX", help="names of those to quantize")
    parser.add_argument("--windows", type=int, default=8, help="of the text")
    parser.add_argument("--size", type=int, default=256, help="tokens of a window")
    parser.add_argument("--n-threads", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the files that are made")
    args = parser.parse_args(argv)
    text = "\n".join(path.read_text(encoding="utf-8") for path in args.text)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.types:
            measure(name, text, args.keep or Path(folder), args)
    return 0


def measure(name: str, text: str, folder: Path, args: argparse.Namespace) -> None:
    """One type: a line of each side."""
    folder.mkdir(exist_ok=True)
    paths = {is_plain: folder / f"{name}{'-F32' if is_plain else ''}.gguf" for is_plain in (False, True)}
    n, n_all = requantize(args.model, name, args.matrices, paths)
    scores: dict[str, tuple[Floats, Floats]] = {}
    for side, is_plain, kernels in SIDES:
        start = process_time()
        with lp.Model(paths[is_plain], kernels=kernels) as model:
            tokens = model.tokenize(text)[: args.windows * args.size]
            if len(tokens) < args.windows * args.size:
                raise SystemExit(f"the text has {len(tokens)} tokens, {args.windows * args.size} are needed")
            scores[side] = evaluate(model, np.array(tokens).reshape(args.windows, -1), args.n_threads)
        print(f"{name}: {side} took {process_time() - start:.0f} s", file=sys.stderr, flush=True)
    print(f"{name}: {n} of {n_all} matrices, {args.windows} windows of {args.size} tokens")
    exact = scores["float32"]
    for side, (nll, logits) in scores.items():
        means = nll.mean(axis=1)  # of each window
        apart = means - scores["ggml"][0].mean(axis=1)
        error = apart.std(ddof=1) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
        difference = np.abs(logits - exact[1])
        print(f"  {side:8} negative log-likelihood {means.mean():.5f}, to ggml's {apart.mean():+.5f} ± {error:.5f}, "
              f"perplexity {math.exp(means.mean()):.3f}; logits of {len(logits)} tokens to float32's: "
              f"largest difference {difference.max():.4f}, mean {difference.mean():.5f}", flush=True)  # fmt: skip


def evaluate(model: lp.Model, windows: npt.NDArray[Any], n_threads: int) -> tuple[Floats, Floats]:
    """Negative log-likelihoods (windows, tokens - 1), and the logits of the first window."""
    nll, first = [], None
    n = windows.shape[1]
    batch = np.arange(n), np.zeros(n, int), np.ones(n, bool)
    with lp.Pipeline(model, n_ctx=n, n_batch=n, n_seq_max=1, n_threads=n_threads) as pipe:
        for window in windows:
            pipe.memory.clear()
            with pipe.submit(lp.DecodeBatch(window, *batch)) as output:
                logits = np.asarray(output.logits, np.float32).copy()
            first = logits if first is None else first
            top = logits.max(axis=1, keepdims=True)
            log_sum = np.log(np.exp(logits - top, dtype=np.float64).sum(axis=1)) + top[:, 0]
            nll.append(log_sum[:-1] - logits[np.arange(n - 1), window[1:]])
    assert first is not None
    return np.array(nll, np.float32), first


def requantize(source: str, name: str, pattern: str, paths: dict[bool, Path]) -> tuple[int, int]:
    """Writes a model with matrices of the type, and one with their values; the numbers of such, and of all matrices."""
    kind, block, _ = TYPES[name]
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writers = {is_plain: gguf.GGUFWriter(path, architecture) for is_plain, path in paths.items()}
    of_array = gguf.GGUFValueType.ARRAY
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == of_array else None
        for writer in writers.values():
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    n = n_all = 0
    for tensor in reader.tensors:
        shape = [int(size) for size in tensor.shape[::-1]]
        if not (tensor.name.startswith("blk.") and len(shape) == 2 and min(shape) >= 32):
            for writer in writers.values():
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        n_all += 1
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if re.search(pattern, tensor.name) and shape[-1] % block == 0:
            n += 1
            packed, values = quantized(kind, values)
            # The package does not know every type, so it is told the number.
            info = TensorInfo(shape, kind, packed.nbytes, packed)  # type: ignore[arg-type]
            writers[False].tensors[-1][tensor.name] = info
        else:
            writers[False].add_tensor(tensor.name, values)
        writers[True].add_tensor(tensor.name, values)
    for writer in writers.values():
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return n, n_all


def quantized(kind: int, values: Floats) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Rows in a type's form, by ggml, and what they are worth then."""
    ffi, lib = native().ffi, native().lib
    rows = np.ascontiguousarray(values, np.float32)
    packed = np.empty(rows.nbytes, np.uint8)
    n_bytes = lib.lp_quantize(
        kind, *rows.shape, ffi.cast("float *", rows.ctypes.data), ffi.cast("void *", packed.ctypes.data)
    )
    if n_bytes <= 0:
        raise SystemExit("ggml does not quantize to this type without a matrix of importance")
    worth = np.empty_like(rows)
    packed = packed[:n_bytes].copy()
    lib.lp_dequantize(
        kind, rows.size, ffi.cast("void *", packed.ctypes.data), ffi.cast("float *", worth.ctypes.data)
    )
    return packed, worth


if __name__ == "__main__":
    sys.exit(main())
