# SPDX-License-Identifier: Apache-2.0
"""The vocoder of the MiMo-Audio tokenizer, for padded batches: a windowed transformer and an inverse STFT."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from vllm_omni_audio_perf.mimo_audio.layers import NORMS, TransformerLayer, rotary_table, transformer_layers
from vllm_omni_audio_perf.mimo_audio.varlen import Attention as AttentionForm
from vllm_omni_audio_perf.ops import inverse_stft

MAX_MAGNITUDE = 1e2


class ISTFT(nn.Module):
    """Holds the window of the inverse STFT, under upstream's name."""

    window: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("window", torch.empty(size))

    def forward_fixed(self, spectrum: Tensor, lengths: Tensor, hop_length: int) -> Tensor:
        """Complex64 ``[batch, frames, size // 2 + 1]`` to float32 ``[batch, frames * hop_length]``."""
        window = self.window
        if window.dtype != torch.float32:  # rounded with the weights
            window = torch.hann_window(self.size, dtype=torch.float32, device=spectrum.device)
        return inverse_stft(spectrum, lengths, window=window, hop_length=hop_length)


class ISTFTHead(nn.Module):
    """Magnitudes and phases, and the signal that they are of (Vocos, arXiv:2306.00814)."""

    def __init__(self, dim: int, size: int, hop_length: int) -> None:
        super().__init__()
        self.hop_length = hop_length
        self.out = nn.Linear(dim, size + 2)
        self.istft = ISTFT(size)

    def forward_fixed(self, hidden: Tensor, lengths: Tensor) -> Tensor:
        """``[batch, frames, dim]`` to float32 ``[batch, frames * hop_length]``, zero beyond each length."""
        magnitude, phase = self.out(hidden).float().chunk(2, dim=-1)
        return self.istft.forward_fixed(
            torch.polar(magnitude.exp().clamp(max=MAX_MAGNITUDE), phase), lengths, self.hop_length
        )


class TransformerVocos(nn.Module):
    """From a coarse mel spectrogram to a waveform."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.window: tuple[int, int] = tuple(config.vocoder_attn_window_size)
        self.base = config.rope_theta
        self.head_dim = config.vocoder_dim // config.vocoder_attention_heads
        self.embeddings = nn.Linear(config.n_mels, config.vocoder_dim, bias=False)
        self.layers = transformer_layers(
            config,
            config.vocoder_num_layers,
            config.vocoder_dim,
            config.vocoder_attention_heads,
            config.vocoder_intermediate_dim,
        )
        self.layer_norm = NORMS[config.ln_type](config.vocoder_dim)
        self.head = ISTFTHead(config.vocoder_dim, config.nfft, config.hop_length)

    def forward_fixed(self, mel: Tensor, lengths: Tensor, attention: AttentionForm) -> Tensor:
        """``[batch, frames, n_mels]`` to float32 ``[batch, frames * hop_length]``, zero beyond each length."""
        hidden = self.embeddings(mel)
        frames = hidden.shape[1]
        table = rotary_table(frames, self.head_dim, base=self.base, device=hidden.device)
        attend = attention(lengths, frames, window=self.window, causal=False, dtype=hidden.dtype)
        for layer in self.layers:
            hidden = cast(TransformerLayer, layer).forward_fixed(hidden, table, attend)
        return self.head.forward_fixed(self.layer_norm(hidden), lengths)
