"""Projectors of random weights for tests, and text models that have the tokens that these need."""

from __future__ import annotations

import io
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from llamapipe import demo_model_path
from support.gguf_document import ARRAY, STRING, Tensor, unpack
from support.gguf_models import finish

IDEFICS3_TOKENS = ("\n\n", "\n", "<fake_token_around_image>", "<global-img>")
_IMAGE, _PATCH, _WIDTH, _INNER = 64, 16, 32, 64


class _Projector:
    def __init__(self, path: Path, kind: str, modality: str, n_embd: int, seed: int, title: str = "") -> None:
        self.path = path
        self.writer = gguf.GGUFWriter(path, "clip")
        if title:
            self.writer.add_name(title)
        self._chance = np.random.default_rng(seed)
        self._prefix = f"clip.{modality}."
        self._letter = modality[0]
        self.writer.add_string("clip.projector_type", kind)
        self.writer.add_bool(f"clip.has_{modality}_encoder", True)
        self.writer.add_bool("clip.use_gelu", True)
        self.add("embedding_length", _WIDTH)
        self.add("feed_forward_length", _INNER)
        self.add("block_count", 1)
        self.add("projection_dim", n_embd)
        self.add("attention.head_count", 2)
        self.writer.add_float32(self._prefix + "attention.layer_norm_epsilon", 1e-5)

    def add(self, name: str, value: int) -> None:
        self.writer.add_uint32(self._prefix + name, value)

    def image(self, has_places: bool = True) -> None:
        self.add("image_size", _IMAGE)
        self.add("patch_size", _PATCH)
        self.writer.add_array(self._prefix + "image_mean", [0.5, 0.5, 0.5])
        self.writer.add_array(self._prefix + "image_std", [0.5, 0.5, 0.5])
        self.put("v.patch_embd.weight", _WIDTH, 3, _PATCH, _PATCH)
        if has_places:
            self.put("v.patch_embd.bias", _WIDTH)
            self.put("v.position_embd.weight", (_IMAGE // _PATCH) ** 2, _WIDTH)
        self.norm("v.post_ln")

    def block(self, key_bias: bool = True, is_joined: bool = False) -> None:
        name = f"{self._letter}.blk.0."
        if is_joined:
            self.put(f"{name}attn_qkv.weight", 3 * _WIDTH, _WIDTH)
            self.put(f"{name}attn_qkv.bias", 3 * _WIDTH)
        for part in ("attn_out",) if is_joined else ("attn_q", "attn_k", "attn_v", "attn_out"):
            self.put(f"{name}{part}.weight", _WIDTH, _WIDTH)
            if key_bias or part != "attn_k":
                self.put(f"{name}{part}.bias", _WIDTH)
        self.norm(f"{name}ln1")
        self.norm(f"{name}ln2")
        self.put(f"{name}ffn_up.weight", _INNER, _WIDTH)
        self.put(f"{name}ffn_up.bias", _INNER)
        self.put(f"{name}ffn_down.weight", _WIDTH, _INNER)
        self.put(f"{name}ffn_down.bias", _WIDTH)

    def put(self, name: str, *shape: int, scale: float = 1.0) -> None:
        n = shape[-1] if len(shape) < 4 else int(np.prod(shape[1:]))
        values = self._chance.standard_normal(shape, dtype=np.float32) * np.float32(scale / n**0.5)
        self.writer.add_tensor(name, values)

    def norm(self, name: str, n: int = _WIDTH, bias: bool = True) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(n, np.float32))
        if bias:
            self.writer.add_tensor(f"{name}.bias", np.zeros(n, np.float32))

    def write(self) -> Path:
        finish(self.writer)
        return self.path


def gemma3_projector(path: Path, n_embd: int = 192, seed: int = 1) -> Path:
    """Four tokens for an image of whatever size, which see each other."""
    made = _Projector(path, "gemma3", "vision", n_embd, seed)
    made.add("projector.scale_factor", 2)
    made.image()
    made.block()
    made.put("mm.input_projection.weight", _WIDTH, n_embd)
    made.norm("mm.soft_emb_norm", bias=False)
    return made.write()


def idefics3_projector(path: Path, n_embd: int = 192, seed: int = 1, title: str = "") -> Path:
    """Tiles of four tokens each, with tokens of the text model between them; as SmolVLM."""
    made = _Projector(path, "idefics3", "vision", n_embd, seed, title)
    made.add("projector.scale_factor", 2)
    made.add("preproc_image_size", 2 * _IMAGE)
    made.image()
    made.block()
    made.put("mm.model.fc.weight", n_embd, 4 * _WIDTH)
    return made.write()


def qwen2vl_projector(path: Path, n_embd: int = 192, seed: int = 1) -> Path:
    """A token for each 32 × 32 pixels, at a height and a width; at least 8 of them."""
    return _qwen_projector(path, "qwen2vl_merger", n_embd, seed)


def qwen3vl_projector(path: Path, n_embd: int = 192, seed: int = 1) -> Path:
    """The same with rows of twice the width: the second half is added after the first layer of the text model."""
    return _qwen_projector(path, "qwen3vl_merger", n_embd, seed)


def _qwen_projector(path: Path, kind: str, n_embd: int, seed: int) -> Path:
    made = _Projector(path, kind, "vision", n_embd, seed)
    is_third = kind == "qwen3vl_merger"
    made.add("image_max_pixels", 64 * 32 * 32)
    made.image(has_places=is_third)
    made.put("v.patch_embd.weight.1", _WIDTH, 3, _PATCH, _PATCH)
    made.block(is_joined=is_third)
    if is_third:
        made.norm("v.deepstack.0.norm", 4 * _WIDTH)
        made.put("v.deepstack.0.fc1.weight", _INNER, 4 * _WIDTH)
        made.put("v.deepstack.0.fc1.bias", _INNER)
        made.put("v.deepstack.0.fc2.weight", n_embd, _INNER)
        made.put("v.deepstack.0.fc2.bias", n_embd)
    made.put("mm.0.weight", _INNER, 4 * _WIDTH)
    made.put("mm.0.bias", _INNER)
    made.put("mm.2.weight", n_embd, _INNER)
    made.put("mm.2.bias", n_embd)
    return made.write()


def ultravox_projector(path: Path, n_embd: int = 192, seed: int = 1) -> Path:
    """375 tokens for each 30 s of sound."""
    made = _Projector(path, "ultravox", "audio", n_embd, seed)
    made.add("num_mel_bins", 80)
    made.add("projector.stack_factor", 4)
    made.put("a.conv1d.1.weight", _WIDTH, 80, 3)
    made.put("a.conv1d.1.bias", _WIDTH, 1)
    made.put("a.conv1d.2.weight", _WIDTH, _WIDTH, 3)
    made.put("a.conv1d.2.bias", _WIDTH, 1)
    made.put("a.position_embd.weight", 1500, _WIDTH)
    made.norm("a.post_ln")
    made.block(key_bias=False)
    made.norm("mm.a.norm_pre", 4 * _WIDTH, bias=False)
    made.put("mm.a.mlp.1.weight", 2 * _INNER, 4 * _WIDTH)
    made.norm("mm.a.norm_mid", _INNER, bias=False)
    made.put("mm.a.mlp.2.weight", n_embd, _INNER)
    return made.write()


def model_with_tile_tokens(path: Path) -> Path:
    """The bundled model with the tokens that ``idefics3`` puts around tiles, in the place of its last ones."""
    document, _ = unpack(demo_model_path().read_bytes())
    tokens = document.entry("tokenizer.ggml.tokens").value
    kinds = document.entry("tokenizer.ggml.token_type").value
    for i, text in enumerate(IDEFICS3_TOKENS, 1):
        if text.encode() not in tokens:
            tokens[-i], kinds[-i] = text.encode(), 4
    path.write_bytes(document.pack())
    return path


def model_with_grids(path: Path, architecture: str = "qwen2vl") -> Path:
    """The bundled model's weights as of ``qwen2vl`` or ``qwen3vl``, whose positions have a height and a width."""
    document, _ = unpack(demo_model_path().read_bytes())
    old = document.architecture
    for entry in document.entries:
        if entry.key.startswith(f"{old}.".encode()):
            entry.key = entry.key.replace(old.encode(), architecture.encode(), 1)
    document.put("general.architecture", STRING, architecture.encode())
    n_rot = document.entry(f"{architecture}.rope.dimension_count").value
    sections = [n_rot // 8, 3 * n_rot // 16, 3 * n_rot // 16, 0]
    document.put(f"{architecture}.rope.dimension_sections", ARRAY, sections, 5)
    if architecture == "qwen3vl":
        document.put("qwen3vl.n_deepstack_layers", 4, 1)
        ones = np.ones(n_rot, np.float32).tobytes()
        for layer in range(document.entry("qwen3vl.block_count").value):
            for part in "qk":
                document.tensors.append(
                    Tensor(f"blk.{layer}.attn_{part}_norm.weight".encode(), [n_rot], 0, ones)
                )
    path.write_bytes(document.pack())
    return path


def picture(width: int = 96, height: int = 64, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Random pixels, (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(width: int = 96, height: int = 64, seed: int = 0) -> bytes:
    """The same as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture(width, height, seed)).save(file, "PNG")
    return file.getvalue()
