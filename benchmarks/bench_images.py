"""Text streams of a server while images arrive, and what a second question about an image costs.

    python benchmarks/bench_images.py FOLDER [--llama-server PATH] [--seconds 30] [--streams 4]

FOLDER gets two files in SmolVLM-256M's shape: SmolLM2-135M (`python tools/real_models.py smollm2`) with the tokens that
stand around tiles, and a projector of random weights (SigLIP base). An image becomes two pictures of 512 x 512 pixels,
which have 64 rows each.

Each server runs alone; llamapipe chooses its number of threads, which a given one would keep from making room for the
encoder. A server's text streams run for a while, then again while another client asks about one new image after
another. Printed are the 50th and 99th percentile of the gaps between the streams' events, the images a minute, and the
time to the first token of a question about a new image, of a second question about it in the same conversation, and of
another conversation with it.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import numpy as np
from local_server import SERVE, running

_TOKENS = ("<fake_token_around_image>", "<global-img>")
_WIDTH, _INNER, _LAYERS, _HEADS = 768, 3072, 12, 12
_IMAGE, _PATCH, _MERGE, _LONGEST = 512, 16, 4, 512
_N_EMBD = 576  # of the text model


def make_text(source: Path, path: Path) -> None:
    """A copy of a model whose last special tokens are those around tiles."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        value, kind = field.contents(), field.types[0]
        if field.name == "tokenizer.ggml.tokens":
            special = [i for i, text in enumerate(value) if text.startswith("<") and text.endswith(">")]
            for i, text in zip(special[-len(_TOKENS) :], _TOKENS, strict=True):
                value[i] = text
        item = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, value, kind, item)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    _write(writer)


def make_projector(path: Path) -> None:
    """An encoder of SigLIP base's shape with random weights of 16 bits, and the projector."""
    rng = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "clip")

    def put(name: str, *shape: int) -> None:
        scale = np.float32(0.02)
        writer.add_tensor(name, (rng.standard_normal(shape, np.float32) * scale).astype(np.float16))

    def line(name: str, n: int, value: float) -> None:
        writer.add_tensor(name, np.full(n, value, np.float32))

    writer.add_string("clip.projector_type", "idefics3")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_bool("clip.use_gelu", True)
    numbers = {
        "embedding_length": _WIDTH, "feed_forward_length": _INNER, "block_count": _LAYERS, "projection_dim": _N_EMBD,
        "attention.head_count": _HEADS, "projector.scale_factor": _MERGE, "preproc_image_size": _LONGEST,
        "image_size": _IMAGE, "patch_size": _PATCH,
    }  # fmt: skip
    for key, value in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    put("v.patch_embd.weight", _WIDTH, 3, _PATCH, _PATCH)
    line("v.patch_embd.bias", _WIDTH, 0)
    writer.add_tensor(
        "v.position_embd.weight",
        rng.standard_normal(((_IMAGE // _PATCH) ** 2, _WIDTH), np.float32) * np.float32(0.02),
    )
    for name in ("v.post_ln", *(f"v.blk.{i}.ln{j}" for i in range(_LAYERS) for j in (1, 2))):
        line(f"{name}.weight", _WIDTH, 1)
        line(f"{name}.bias", _WIDTH, 0)
    for i in range(_LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            put(f"v.blk.{i}.{part}.weight", _WIDTH, _WIDTH)
            line(f"v.blk.{i}.{part}.bias", _WIDTH, 0)
        put(f"v.blk.{i}.ffn_up.weight", _INNER, _WIDTH)
        line(f"v.blk.{i}.ffn_up.bias", _INNER, 0)
        put(f"v.blk.{i}.ffn_down.weight", _WIDTH, _INNER)
        line(f"v.blk.{i}.ffn_down.bias", _WIDTH, 0)
    put("mm.model.fc.weight", _N_EMBD, _WIDTH * _MERGE * _MERGE)
    _write(writer)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def picture(seed: int) -> str:
    """A data URL of a new image."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((512, 384)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class Client:
    """One server's clients. ``gaps``: seconds between events of the text streams."""

    def __init__(self, port: int) -> None:
        self.gaps: list[float] = []
        self._port = port
        self._ended = threading.Event()

    def events(self, body: dict[str, Any]) -> Iterator[float]:
        """Asks for a stream and yields the time of each event with text."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        body = {"stream": True, "temperature": 0, "speculate": "off", **body}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {answer.read(500)!r}")
        while line := answer.readline():
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                yield perf_counter()
        connection.close()

    def first_s(self, messages: list[dict[str, Any]]) -> float:
        """Seconds to the first token of an answer of eight."""
        began = perf_counter()
        times = list(self.events({"messages": messages, "max_tokens": 8, "ignore_eos": True}))
        return times[0] - began

    def _read(self, i: int) -> None:
        while not self._ended.is_set():
            last = None
            messages = [{"role": "user", "content": f"Tell me a long story, number {i}."}]
            for now in self.events({"messages": messages, "max_tokens": 400, "ignore_eos": True}):
                if last is not None:
                    self.gaps.append(now - last)
                last = now
                if self._ended.is_set():
                    break

    @contextlib.contextmanager
    def streams(self, n: int) -> Iterator[None]:
        """Text streams, one after another in each of ``n`` threads."""
        self.gaps.clear()
        self._ended.clear()
        threads = [threading.Thread(target=self._read, args=(i,)) for i in range(n)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def percentiles_ms(self) -> tuple[float, float]:
        """Of the gaps, the 50th and 99th."""
        percentiles = np.percentile(np.array(self.gaps), [50, 99]) * 1e3
        return float(percentiles[0]), float(percentiles[1])


def question(url: str, text: str = "What is this?") -> list[dict[str, Any]]:
    """A conversation about an image."""
    image = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [{"type": "text", "text": text}, image]}]


def measure(name: str, command: list[object], seconds: float, n_streams: int) -> None:
    """Starts a server, measures and prints."""
    with running(*command) as server:
        client = Client(server.port)
        client.first_s(question(picture(0)))
        with client.streams(n_streams):
            threading.Event().wait(seconds / 2)
        quiet = client.percentiles_ms()
        n_images, began = 0, perf_counter()
        with client.streams(n_streams):
            while perf_counter() < began + seconds:
                n_images += 1
                client.first_s(question(picture(n_images)))
            took_s = perf_counter() - began
        busy = client.percentiles_ms()
        url = picture(1000)
        messages = question(url)
        first = client.first_s(messages)
        messages += [{"role": "assistant", "content": "A picture."}, {"role": "user", "content": "Of what?"}]
        second = client.first_s(messages)
        other = client.first_s(question(url, "Another conversation. Which colours does it have?"))
    print(f"{name}: gaps of {n_streams} streams in ms, 50th and 99th percentile")
    print(f"  text only   {quiet[0]:6.0f} {quiet[1]:6.0f}")
    print(f"  with images {busy[0]:6.0f} {busy[1]:6.0f}  ({busy[1] / quiet[1]:.1f} times)")
    print(f"  {n_images * 60 / took_s:.1f} images a minute; first token of a new image after {first:.2f} s,")
    print(f"  of a second question {second / first:.2f}, elsewhere {other / first:.2f} of that", flush=True)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-server", type=Path, help="the program of the pinned llama.cpp")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2, help="compute threads of llama-server")
    args = parser.parse_args()
    text, projector = args.folder / "text.gguf", args.folder / "projector.gguf"
    if not text.exists() or not projector.exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        tool = Path(__file__).resolve().parent.parent / "tools" / "real_models.py"
        listing = subprocess.run(
            [sys.executable, tool, "smollm2"], capture_output=True, text=True, check=True
        )
        make_text(Path(listing.stdout.splitlines()[-1]), text)
        make_projector(projector)
    n, model = args.streams + 1, ("-m", text, "--mmproj", projector)
    ours = [*SERVE, *model, "--n-seq-max", n, "--n-ctx", 2048]
    measure("llamapipe", ours, args.seconds, args.streams)
    if args.llama_server:
        threads = ("-t", args.threads, "-tb", args.threads)
        theirs = [args.llama_server, *model, "-np", n, "-c", 2048 * n, *threads, "--jinja"]
        measure("llama-server", theirs, args.seconds, args.streams)
    return 0


if __name__ == "__main__":
    sys.exit(main())
