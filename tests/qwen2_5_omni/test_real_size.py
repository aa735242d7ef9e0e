# SPDX-License-Identifier: Apache-2.0
"""The Token2Wav at the sizes of Qwen2.5-Omni-7B, which are the defaults of transformers' configuration."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from vllm_omni_audio_perf.qwen2_5_omni import BlockSparseDiT, Token2Wav
from vllm_omni_audio_perf.testing import upstream

LAYERS = 22
TRANSFORMERS_NOISE_FRAMES = 30_000  # transformers draws noise for this length and cuts it


def rel_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def as_ours(token2wav: Any) -> Token2Wav:
    return Token2Wav(token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model)


def shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.fixture(scope="module")
def on_meta() -> nn.Module:
    """transformers' Token2Wav without memory. Its names are those of the checkpoint's files."""
    with torch.device("meta"):
        return Qwen2_5OmniToken2WavModel(Qwen2_5OmniToken2WavConfig()).eval()


def test_every_weight_of_a_checkpoint_has_its_place_in_the_stages_module(on_meta: nn.Module) -> None:
    """Name by name and shape by shape; query, key and value become one."""
    pytest.importorskip("vllm_omni")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_omni.model_executor.models.qwen2_5_omni import qwen2_5_omni_token2wav

    with set_current_vllm_config(VllmConfig()):
        upstream.initialize_single_process_group()
        with torch.device("meta"):
            served = shapes(qwen2_5_omni_token2wav.Qwen2_5OmniToken2WavModel(Qwen2_5OmniToken2WavConfig()))

    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes(on_meta).items():
        fused = re.sub(r"attn\.to_[qkv]\.", "attn.qkv_proj.", name)
        if fused != name:
            rows = expected.get(fused, (0,))[0] + shape[0]
            shape = (rows, *shape[1:])
        expected[fused] = shape
    computed = {name for name in served if name.endswith("inv_freq")}  # from the configuration, not from a file
    assert {name: shape for name, shape in served.items() if name not in computed} == expected
    assert len(expected) > 700
    assert expected["code2wav_dit_model.transformer_blocks.21.attn.qkv_proj.weight"] == (3072, 1024)


def test_ours_takes_the_real_size(on_meta: Any) -> None:
    """A whole solve without numbers: every shape fits."""
    dit = BlockSparseDiT(on_meta.code2wav_dit_model)
    assert len(dit.model.transformer_blocks) == LAYERS
    assert (dit.block_size, dit.mel_dim, dit.repeats, dit.codebook_size) == (24, 80, 2, 8194)
    with torch.device("meta"), torch.inference_mode():
        codes = torch.zeros(1, 61, dtype=torch.long)
        mel = dit.sample(torch.zeros(1, 192), torch.zeros(1, 300, 80), codes, noise=torch.zeros(1, 122, 80))
    assert mel.shape == (1, 80, 122)


@pytest.mark.slow
@pytest.mark.parametrize("codes", [13, 48])
def test_equals_vllm_omni(codes: int, voice: tuple[Tensor, Tensor]) -> None:
    pytest.importorskip("vllm_omni")
    theirs: Any = upstream.build_vllm_omni_token2wav(Qwen2_5OmniToken2WavConfig())
    assert len(theirs.code2wav_dit_model.transformer_blocks) == LAYERS
    ids = torch.randint(0, 8193, (codes,), generator=torch.Generator().manual_seed(codes))
    torch.manual_seed(3)
    with torch.inference_mode():
        expected = theirs(ids.unsqueeze(0), *voice)
    torch.manual_seed(3)
    actual = as_ours(theirs).generate(ids, *voice, noise=torch.randn(1, 2 * codes, 80))
    assert actual.shape == expected.shape == (480 * codes,)
    assert actual.abs().max() < 1
    assert rel_error(actual, expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("codes", [13, 61])
def test_equals_transformers(codes: int, voice: tuple[Tensor, Tensor]) -> None:
    """The second oracle, its rotary table replaced: whole solve and vocoder."""
    theirs: Any = upstream.build_transformers_token2wav(Qwen2_5OmniToken2WavConfig())
    ids = torch.randint(0, 8193, (codes,), generator=torch.Generator().manual_seed(codes))
    with torch.inference_mode():
        torch.manual_seed(3)
        expected_mel = theirs.code2wav_dit_model.sample(*voice, ids.unsqueeze(0))
        expected = theirs.code2wav_bigvgan_model(expected_mel)
        torch.manual_seed(3)
        noise = torch.randn(1, TRANSFORMERS_NOISE_FRAMES, 80)[:, : 2 * codes]
        ours = as_ours(theirs)
        mel = ours.dit.sample(*voice, ids.unsqueeze(0), noise=noise)
    waveform = ours.generate(ids, *voice, noise=noise)
    assert rel_error(mel, expected_mel) <= 1e-5
    assert waveform.shape == (480 * codes,)
    assert waveform.abs().max() < 1
    assert rel_error(waveform, expected.reshape(-1)) <= 1e-5
