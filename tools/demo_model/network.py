"""The network: llama's blocks (RMSNorm, rotary positions, grouped attention, SwiGLU), tied embeddings."""

# mypy: disallow-subclassing-any=False
# (PyTorch need not be installed to check the types of the rest.)

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; row lengths are multiples of 32, as Q8_0 requires."""

    n_vocab: int
    n_embd: int = 192
    n_layer: int = 4
    n_head: int = 3
    n_head_kv: int = 3
    n_ff: int = 512
    n_ctx: int = 1024
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def n_rot(self) -> int:
        """Size of one head."""
        return self.n_embd // self.n_head


def rotary_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 `(n_ctx, n_rot / 2)` each."""
    freq = shape.rope_base ** (-torch.arange(0, shape.n_rot, 2).float() / shape.n_rot)
    angle = torch.outer(torch.arange(shape.n_ctx).float(), freq)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates neighbouring pairs of `x` `(batch, head, pos, n_rot)`, the order that GGUF's `llama` expects."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n_kv = shape.n_head_kv * shape.n_rot
        self.attn_norm = nn.RMSNorm(shape.n_embd, shape.norm_eps)
        self.attn_q = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.attn_k = nn.Linear(shape.n_embd, n_kv, bias=False)
        self.attn_v = nn.Linear(shape.n_embd, n_kv, bias=False)
        self.attn_output = nn.Linear(shape.n_embd, shape.n_embd, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.n_embd, shape.norm_eps)
        self.ffn_gate = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_up = nn.Linear(shape.n_embd, shape.n_ff, bias=False)
        self.ffn_down = nn.Linear(shape.n_ff, shape.n_embd, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """`x` float `(batch, pos, n_embd)` -> the same shape; `mask` as in `Network.forward`, None: causal."""
        batch, n_pos, _ = x.shape
        normed = self.attn_norm(x)
        q = self.attn_q(normed).view(batch, n_pos, self.shape.n_head, self.shape.n_rot).transpose(1, 2)
        k = self.attn_k(normed).view(batch, n_pos, self.shape.n_head_kv, self.shape.n_rot).transpose(1, 2)
        v = self.attn_v(normed).view(batch, n_pos, self.shape.n_head_kv, self.shape.n_rot).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        repeat = self.shape.n_head // self.shape.n_head_kv
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.attn_output(mixed.transpose(1, 2).reshape(batch, n_pos, -1))
        normed = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(normed)) * self.ffn_up(normed))


class Network(nn.Module):
    """The whole language model; the output matrix is the embedding."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Embedding(shape.n_vocab, shape.n_embd)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layer))
        self.output_norm = nn.RMSNorm(shape.n_embd, shape.norm_eps)
        cos, sin = rotary_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                last = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.n_layer) ** 0.5 if last else 0.02)

    def forward(self, ids: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean cross entropy in nats.

        `ids` and `targets` int64 `(batch, pos)`; `mask` bool `(batch, 1, pos, pos)`, true where a position (third)
        attends to another (fourth). None: to itself and all before it.
        """
        n_pos = ids.shape[1]
        cos, sin = self.cos[:n_pos], self.sin[:n_pos]
        x = self.token_embd(ids)
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        logits = F.linear(self.output_norm(x), self.token_embd.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
