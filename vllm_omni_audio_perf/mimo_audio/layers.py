# SPDX-License-Identifier: Apache-2.0
"""The layers of the MiMo-Audio tokenizer's decoder, for padded batches.

The same functions as those of vLLM-Omni's ``modeling_audio_tokenizer.py``, with the names of their parameters and of
their ``forward_fixed``, but for ``[batch, length, dim]`` with lengths on the device: what stands beyond a length
changes nothing before it. Capture-safe: nothing is read back, and shapes depend on shapes alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vllm_omni_audio_perf.ops import masked_group_norm

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of query, key and value, each ``[batch, heads, length, head_dim]``."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda hidden: functional.gelu(hidden, approximate="tanh"),
    "gelu_pytorch_tanh": lambda hidden: functional.gelu(hidden, approximate="tanh"),
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
}

NORMS: dict[str, Callable[[int], nn.Module]] = {"LayerNorm": nn.LayerNorm, "RMSNorm": partial(nn.RMSNorm, eps=1e-6)}


def valid_steps(lengths: Tensor, steps: int) -> Tensor:
    """Which steps of padded sequences are valid: bool ``[batch, steps]``."""
    return torch.arange(steps, device=lengths.device) < lengths[:, None]


def rotary_table(length: int, head_dim: int, *, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding (arXiv:2104.09864), in halves: float32 ``[length, head_dim]``.

    In float32 whatever the decoder's dtype is: upstream rounds the frequencies with the weights.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), base**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply a rotary table to ``[..., length, head_dim]``."""
    cos, sin = (part.to(hidden.dtype) for part in table)
    first, second = hidden.chunk(2, dim=-1)
    return hidden * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward_fixed(self, hidden: Tensor, table: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """``[batch, length, dim]`` to the same. `attend` knows lengths and window."""
        query, key, value = (
            projection(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = attend(rotate(query, table), rotate(key, table), value)
        return self.out_proj(attended.transpose(1, 2).flatten(2))


class TransformerLayer(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(
        self, dim: int, heads: int, ffn_dim: int, *, norm: str, activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.self_attn = Attention(dim, heads)
        self.self_attn_layer_norm = NORMS[norm](dim)
        self.fc1 = nn.Linear(dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, dim)
        self.final_layer_norm = NORMS[norm](dim)
        self.activation_fn = activation

    def forward_fixed(self, hidden: Tensor, table: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """``[batch, length, dim]`` to the same. `attend` knows lengths and window."""
        hidden = hidden + self.self_attn.forward_fixed(self.self_attn_layer_norm(hidden), table, attend)
        hidden = hidden + self.fc2(self.activation_fn(self.fc1(self.final_layer_norm(hidden))))
        if hidden.dtype in (torch.float16, torch.bfloat16):
            limit = torch.finfo(hidden.dtype).max - 1000
            hidden = hidden.clamp(-limit, limit)
        return hidden


def transformer_layers(config: Any, count: int, dim: int, heads: int, ffn_dim: int) -> nn.ModuleList:
    """So many layers with the norm and the activation of a tokenizer's settings."""
    activation = ACTIVATIONS[config.activation_function]
    return nn.ModuleList(
        TransformerLayer(dim, heads, ffn_dim, norm=config.ln_type, activation=activation) for _ in range(count)
    )


class CausalConvTranspose1d(nn.Module):
    """Transposed convolution and group normalisation, of which the steps that would look ahead are cut off."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel_size, stride)
        self.norm = nn.GroupNorm(1, out_channels)

    def forward_fixed(self, hidden: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, length, in_channels]`` to ``[batch, length * stride, out_channels]``, and the new lengths."""
        kernel_size, stride = self.conv.kernel_size[0], self.conv.stride[0]
        hidden = hidden.masked_fill(~valid_steps(lengths, hidden.shape[1])[..., None], 0)
        hidden = self.conv(hidden.transpose(1, 2))
        # Upstream's statistics include the steps that are cut off afterwards.
        steps = ((lengths - 1) * stride + kernel_size).masked_fill(lengths == 0, 0)
        hidden = masked_group_norm(hidden, steps, self.norm.weight, self.norm.bias, eps=self.norm.eps)
        cut = kernel_size - stride
        return hidden[..., : hidden.shape[-1] - cut].transpose(1, 2), lengths * stride
