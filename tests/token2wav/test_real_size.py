# SPDX-License-Identifier: Apache-2.0
"""The Token2Wav at the sizes of Qwen2.5-Omni-7B, which are the defaults of transformers' configuration."""

import re
from typing import Any

import pytest
import torch
from parity import rel_error
from torch import Tensor, nn
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from vllm_omni_audio_perf.testing import upstream
from vllm_omni_audio_perf.token2wav import BlockDiT, Clip, Sampler, Synthesizer

LAYERS = 22
TRANSFORMERS_NOISE_FRAMES = 30_000  # transformers draws noise for this length and cuts it


def as_ours(token2wav: Any) -> Synthesizer:
    return Synthesizer(Sampler(BlockDiT(token2wav.code2wav_dit_model)), token2wav.code2wav_bigvgan_model)


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
    """Of another size nothing is taken for granted but what a configuration says."""
    dit = BlockDiT(on_meta.code2wav_dit_model)
    assert len(dit.layers) == LAYERS
    assert (dit.block_size, dit.mel_dim, dit.repeats, dit.codebook_size) == (24, 80, 2, 8194)
    assert dit.neighbourhoods == {(0, 0), (1, 0), (0, 1)}
    table = dit.modulation_table(torch.zeros(28, device="meta"))
    assert table.layers.shape == (28, LAYERS, 6, 1024)
    assert sum(rows.numel() for rows in table) * 4 < 16e6  # bytes


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
    (actual,) = as_ours(theirs).generate([Clip(ids, *voice, torch.randn(1, 2 * codes, 80))])
    assert isinstance(actual, Tensor)
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
        ours, clip = as_ours(theirs), Clip(ids, *voice, noise)
        (mel,) = ours.sampler.sample([clip])
    (waveform,) = ours.generate([clip])
    assert isinstance(waveform, Tensor)
    assert rel_error(mel, expected_mel) <= 1e-5
    assert waveform.shape == (480 * codes,)
    assert waveform.abs().max() < 1
    assert rel_error(waveform, expected.reshape(-1)) <= 1e-5
