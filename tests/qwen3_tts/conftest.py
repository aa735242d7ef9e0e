# SPDX-License-Identifier: Apache-2.0
"""Small decoders of Qwen3-TTS's 25 Hz tokenizer with the structure of the real one and random weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_omni_audio_perf.testing import upstream


def build_decoder(repeats: int) -> nn.Module:
    """Upstream's decoder, float32, on the CPU, of every kind of layer neighbourhood."""
    pytest.importorskip("vllm_omni")
    from vllm_omni.model_executor.models.qwen3_tts.tokenizer_25hz import (
        configuration_qwen3_tts_tokenizer_v1 as configuration,
    )
    from vllm_omni.model_executor.models.qwen3_tts.tokenizer_25hz import modeling_qwen3_tts_tokenizer_v1 as modeling

    config = configuration.Qwen3TTSTokenizerV1DecoderConfig(
        dit_config={
            "hidden_size": 64,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "head_dim": 16,
            "emb_dim": 32,
            "look_backward_layers": [0, 3],
            "look_ahead_layers": [1, 3],
            "repeats": repeats,
            "enc_dim": 32,
            "enc_channels": [32, 32, 32, 32, 96],
            "enc_attention_channels": 16,
            "enc_se_channels": 16,
        },
        bigvgan_config={"upsample_initial_channel": 64},
    )
    model = modeling.Qwen3TTSTokenizerV1Decoder._from_config(config).eval()
    upstream.randomize(model)
    return model


@pytest.fixture(scope="session")
def theirs() -> Any:
    """Upstream's decoder with the default of 2 mel frames a code."""
    return build_decoder(repeats=2)


@pytest.fixture(scope="session")
def theirs_of_4_repeats() -> Any:
    """One with 4 mel frames a code."""
    return build_decoder(repeats=4)


@pytest.fixture(scope="session")
def voice() -> tuple[Tensor, Tensor]:
    """Speaker embedding ``[192]`` and reference mel ``[150, 80]``, as upstream's ``encode`` gives them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(192, generator=generator), torch.randn(150, 80, generator=generator)
