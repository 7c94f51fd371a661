"""Projectors of random weights for tests, and text models that have the tokens that these need."""

from __future__ import annotations

import io
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from llamapipe import demo_model_path
from support.gguf_document import ARRAY, Document, Tensor
from support.gguf_models import finish

IDEFICS3_TOKENS = ("\n\n", "\n", "<fake_token_around_image>", "<global-img>")
_IMAGE, _PATCH, _WIDTH, _INNER, _N_EMBD = 64, 16, 32, 64, 192


class _Projector:
    def __init__(
        self, path: Path, kind: str, modality: str = "vision", n_embd: int = _N_EMBD, title: str = ""
    ) -> None:
        self.path = path
        self.writer = gguf.GGUFWriter(path, "clip")
        if title:
            self.writer.add_name(title)
        self._chance = np.random.default_rng(1)
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
            self.linear(f"{name}attn_qkv", 3 * _WIDTH, _WIDTH)
        for part in ("attn_out",) if is_joined else ("attn_q", "attn_k", "attn_v", "attn_out"):
            self.linear(f"{name}{part}", _WIDTH, _WIDTH, bias=key_bias or part != "attn_k")
        self.norm(f"{name}ln1")
        self.norm(f"{name}ln2")
        self.linear(f"{name}ffn_up", _INNER, _WIDTH)
        self.linear(f"{name}ffn_down", _WIDTH, _INNER)

    def linear(self, name: str, n_out: int, n_in: int, bias: bool = True) -> None:
        self.put(f"{name}.weight", n_out, n_in)
        if bias:
            self.put(f"{name}.bias", n_out)

    def put(self, name: str, *shape: int) -> None:
        n = shape[-1] if len(shape) < 4 else int(np.prod(shape[1:]))
        values = self._chance.standard_normal(shape, dtype=np.float32) * np.float32(1 / n**0.5)
        self.writer.add_tensor(name, values)

    def norm(self, name: str, n: int = _WIDTH, bias: bool = True) -> None:
        self.writer.add_tensor(f"{name}.weight", np.ones(n, np.float32))
        if bias:
            self.writer.add_tensor(f"{name}.bias", np.zeros(n, np.float32))

    def write(self) -> Path:
        finish(self.writer)
        return self.path


def gemma3_projector(path: Path, n_embd: int = _N_EMBD) -> Path:
    """Four tokens for an image of whatever size, which see each other."""
    file = _Projector(path, "gemma3", n_embd=n_embd)
    file.add("projector.scale_factor", 2)
    file.image()
    file.block()
    file.put("mm.input_projection.weight", _WIDTH, n_embd)
    file.norm("mm.soft_emb_norm", bias=False)
    return file.write()


def idefics3_projector(path: Path, title: str = "") -> Path:
    """Tiles of four tokens each, with tokens of the text model between them; as SmolVLM."""
    file = _Projector(path, "idefics3", title=title)
    file.add("projector.scale_factor", 2)
    file.add("preproc_image_size", 2 * _IMAGE)
    file.image()
    file.block()
    file.put("mm.model.fc.weight", _N_EMBD, 4 * _WIDTH)
    return file.write()


def qwen2vl_projector(path: Path) -> Path:
    """A token for each 32 × 32 pixels, at a height and a width; at least 8 of them."""
    return _qwen_projector(path, "qwen2vl_merger")


def qwen3vl_projector(path: Path) -> Path:
    """The same with rows of twice the width: the second half is added after the first layer of the text model."""
    return _qwen_projector(path, "qwen3vl_merger")


def _qwen_projector(path: Path, kind: str) -> Path:
    file = _Projector(path, kind)
    is_third = kind == "qwen3vl_merger"
    file.add("image_max_pixels", 64 * 32 * 32)
    file.image(has_places=is_third)
    file.put("v.patch_embd.weight.1", _WIDTH, 3, _PATCH, _PATCH)
    file.block(is_joined=is_third)
    if is_third:
        file.norm("v.deepstack.0.norm", 4 * _WIDTH)
        file.linear("v.deepstack.0.fc1", _INNER, 4 * _WIDTH)
        file.linear("v.deepstack.0.fc2", _N_EMBD, _INNER)
    file.linear("mm.0", _INNER, 4 * _WIDTH)
    file.linear("mm.2", _N_EMBD, _INNER)
    return file.write()


def ultravox_projector(path: Path) -> Path:
    """375 tokens for each 30 s of sound."""
    file = _Projector(path, "ultravox", "audio")
    file.add("num_mel_bins", 80)
    file.add("projector.stack_factor", 4)
    file.put("a.conv1d.1.weight", _WIDTH, 80, 3)
    file.put("a.conv1d.1.bias", _WIDTH, 1)
    file.put("a.conv1d.2.weight", _WIDTH, _WIDTH, 3)
    file.put("a.conv1d.2.bias", _WIDTH, 1)
    file.put("a.position_embd.weight", 1500, _WIDTH)
    file.norm("a.post_ln")
    file.block(key_bias=False)
    file.norm("mm.a.norm_pre", 4 * _WIDTH, bias=False)
    file.put("mm.a.mlp.1.weight", 2 * _INNER, 4 * _WIDTH)
    file.norm("mm.a.norm_mid", _INNER, bias=False)
    file.put("mm.a.mlp.2.weight", _N_EMBD, _INNER)
    return file.write()


def model_with_tile_tokens(path: Path) -> Path:
    """The bundled model with the tokens that ``idefics3`` puts around tiles, in the place of its last ones."""
    document = Document.read(demo_model_path())
    tokens = document.entry("tokenizer.ggml.tokens").value
    kinds = document.entry("tokenizer.ggml.token_type").value
    for i, text in enumerate(IDEFICS3_TOKENS, 1):
        if text.encode() not in tokens:
            tokens[-i], kinds[-i] = text.encode(), 4
    return document.write(path)


def model_with_grids(path: Path, architecture: str = "qwen2vl") -> Path:
    """The bundled model's weights as of ``qwen2vl`` or ``qwen3vl``, whose positions have a height and a width."""
    document = Document.read(demo_model_path())
    document.rename(architecture)
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
    return document.write(path)


def picture(width: int = 96, height: int = 64, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Random pixels, (height, width, 3)."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(width: int = 96, height: int = 64, seed: int = 0) -> bytes:
    """The same as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture(width, height, seed)).save(file, "PNG")
    return file.getvalue()
