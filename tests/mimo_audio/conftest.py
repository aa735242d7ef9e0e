# SPDX-License-Identifier: Apache-2.0
"""Small random MiMo-Audio tokenizers of upstream's class, with the structure of the real one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

SETTINGS: dict[str, Any] = {
    "avg_pooler": 2,
    "d_model": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "nfft": 960,
    "window_size": 960,
    "hop_length": 240,
    "vocoder_dim": 48,
    "vocoder_intermediate_dim": 96,
    "vocoder_num_layers": 4,
    "vocoder_attention_heads": 3,
    "n_mels": 24,
    "num_quantizers": 5,
    "codebook_size": [64, 64, 16],
    "scale_embedding": False,
}


def build_tokenizer(**changes: Any) -> nn.Module:
    """A tokenizer in float32 whose attention is not uniform and whose norms are not the identity."""
    from vllm_omni.model_executor.models.mimo_audio.config_mimo_audio import MiMoAudioTokenizerConfig
    from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer

    settings = SETTINGS | changes
    config = MiMoAudioTokenizerConfig(**settings | {"codebook_size": list(settings["codebook_size"])})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        tokenizer = MiMoAudioTokenizer(config).float().eval()
        with torch.no_grad():
            for index, layer in enumerate(tokenizer.encoder.quantizer.vq.layers):
                layer._codebook.embed.normal_().mul_(0.8**index)
            for name, parameter in tokenizer.decoder.named_parameters():
                if "norm" in name:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                elif parameter.ndim >= 2 and "head" not in name:
                    parameter.mul_(2.5)
                elif name.endswith("bias"):
                    parameter.copy_(0.1 * torch.randn_like(parameter))
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Builds a tokenizer with changed settings, once for each change."""
    pytest.importorskip("vllm_omni")
    built: dict[str, Any] = {}

    def make(**changes: Any) -> Any:
        key = repr(sorted(changes.items()))
        if key not in built:
            built[key] = build_tokenizer(**changes)
        return built[key]

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()
