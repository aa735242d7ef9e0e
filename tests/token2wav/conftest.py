# SPDX-License-Identifier: Apache-2.0
"""A small Token2Wav with the structure of the real one: every kind of layer neighbourhood, odd sizes where allowed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vllm_omni_audio_perf.testing import upstream

EMBEDDING_DIM = 192
MEL_DIM = 80
CODEBOOK = 8193


@pytest.fixture(scope="session")
def small_config() -> Any:
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig

    return Qwen2_5OmniToken2WavConfig(
        dit_config={
            "hidden_size": 64,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "head_dim": 16,
            "emb_dim": 32,
            "look_backward_layers": [0, 3],
            "look_ahead_layers": [1, 3],
            "num_embeds": CODEBOOK,
            "enc_emb_dim": EMBEDDING_DIM,
            "enc_dim": 32,
            "enc_channels": [32, 32, 32, 32, 96],
            "enc_attention_channels": 16,
            "enc_se_channels": 16,
            "enc_res2net_scale": 2,
        },
        bigvgan_config={"upsample_initial_channel": 64},
    )


@pytest.fixture(scope="session")
def transformers_token2wav(small_config: Any) -> nn.Module:
    return upstream.build_transformers_token2wav(small_config)


@pytest.fixture(scope="session")
def vllm_omni_token2wav(small_config: Any) -> nn.Module:
    pytest.importorskip("vllm_omni")
    return upstream.build_vllm_omni_token2wav(small_config)


@pytest.fixture(params=["transformers", "vllm_omni"])
def upstream_token2wav(request: pytest.FixtureRequest) -> nn.Module:
    """Each of the two upstream Token2Wavs."""
    return request.getfixturevalue(f"{request.param}_token2wav")


@pytest.fixture(scope="session")
def voice() -> tuple[Tensor, Tensor]:
    """Speaker embedding ``[1, 192]`` and reference mel ``[1, 150, 80]``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, EMBEDDING_DIM, generator=generator), torch.randn(1, 150, MEL_DIM, generator=generator)
