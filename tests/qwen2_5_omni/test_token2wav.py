# SPDX-License-Identifier: Apache-2.0
"""Our DiT and Token2Wav against upstream's, on the same weights, noise and codes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.qwen2_5_omni import BlockSparseDiT, Token2Wav
from vllm_omni_audio_perf.qwen2_5_omni import dit as dit_module

MAX_REL_ERROR = 1e-5
TRANSFORMERS_NOISE_FRAMES = 30_000  # transformers draws noise for this length and cuts it
# Codes of 2 mel frames: one, odd counts, less than a block, whole blocks of 12 codes, one code over, many blocks.
CODE_COUNTS = (1, 2, 5, 11, 12, 13, 24, 25, 37, 61, 120)


def rel_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def random_codes(count: int) -> Tensor:
    return torch.randint(0, 8193, (count,), generator=torch.Generator().manual_seed(count))


def draw(frames: int) -> Tensor:
    """The noise that upstream draws after ``torch.manual_seed(3)``."""
    torch.manual_seed(3)
    return torch.randn(1, frames, 80)


def as_ours(upstream_token2wav: Any, **settings: Any) -> Token2Wav:
    return Token2Wav(upstream_token2wav.code2wav_dit_model, upstream_token2wav.code2wav_bigvgan_model, **settings)


def error_of_one_evaluation(ours: BlockSparseDiT, upstream_dit: Any, codes: int, voice: tuple[Tensor, Tensor]) -> float:
    speaker, reference_mel = voice
    ids = random_codes(codes).unsqueeze(0)
    frames = 2 * codes
    mel = torch.randn(1, frames, 80, generator=torch.Generator().manual_seed(7))
    time = torch.tensor(0.3)
    with torch.inference_mode():
        expected = upstream_dit(
            hidden_states=mel,
            condition_vector=reference_mel,
            speaker_embedding=speaker.unsqueeze(1).repeat(1, frames, 1),
            quantized_code=ids,
            time_step=time,
        )
        actual = ours.evaluate(mel, time, ours.conditions(speaker, reference_mel, ids, guided=True))
    return rel_error(actual, expected)


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_one_evaluation_equals_upstream(codes: int, upstream_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    theirs = upstream_token2wav.code2wav_dit_model
    assert error_of_one_evaluation(BlockSparseDiT(theirs), theirs, codes, voice) <= 1e-6


@pytest.mark.parametrize("span_blocks", [1, 2, 5])
@pytest.mark.parametrize("codes", [12, 13, 37, 61, 120])
def test_any_spans_equal_upstream(
    codes: int,
    span_blocks: int,
    vllm_omni_token2wav: Any,
    voice: tuple[Tensor, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut where blocks end, whether or not the last span is whole."""
    monkeypatch.setattr(dit_module, "CPU_SPAN_BLOCKS", span_blocks)
    theirs = vllm_omni_token2wav.code2wav_dit_model
    ours = BlockSparseDiT(theirs)
    assert len(ours._spans(torch.empty(1, 2 * codes, 64))) == -(-2 * codes // (24 * span_blocks))
    assert error_of_one_evaluation(ours, theirs, codes, voice) <= 1e-6


def test_one_span_on_another_device(transformers_token2wav: Any) -> None:
    assert as_ours(transformers_token2wav).dit._spans(torch.empty(1, 5000, 64, device="meta")) == [slice(0, 5000)]


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_mel_equals_transformers(codes: int, transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    ids = random_codes(codes).unsqueeze(0)
    with torch.inference_mode():
        torch.manual_seed(3)
        expected = transformers_token2wav.code2wav_dit_model.sample(*voice, ids)
        torch.manual_seed(3)
        noise = torch.randn(1, TRANSFORMERS_NOISE_FRAMES, 80)[:, : 2 * codes]
        mel = as_ours(transformers_token2wav).dit.sample(*voice, ids, noise=noise)
    assert rel_error(mel, expected) <= MAX_REL_ERROR


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_mel_and_waveform_equal_vllm_omni(codes: int, vllm_omni_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    ids = random_codes(codes)
    ours = as_ours(vllm_omni_token2wav)
    with torch.inference_mode():
        torch.manual_seed(3)
        expected_mel = vllm_omni_token2wav.code2wav_dit_model.sample(*voice, ids.unsqueeze(0))
        expected_waveform = vllm_omni_token2wav.code2wav_bigvgan_model(expected_mel)
        torch.manual_seed(3)
        mel = ours.dit.sample(*voice, ids.unsqueeze(0), noise=torch.randn(1, 2 * codes, 80))
    waveform = ours.generate(ids, *voice, noise=draw(2 * codes))
    assert mel.shape == (1, 80, 2 * codes)
    assert rel_error(mel, expected_mel) <= MAX_REL_ERROR
    assert waveform.shape == (480 * codes,)
    assert waveform.dtype == torch.float32
    assert waveform.device.type == "cpu"
    assert waveform.abs().max() < 1  # else clipping would hide differences
    assert rel_error(waveform, expected_waveform) <= MAX_REL_ERROR


@pytest.mark.parametrize("guidance_scale", [0.0, 2.0])
@pytest.mark.parametrize("num_steps", [2, 5])
def test_solver_settings_equal_vllm_omni(
    num_steps: int, guidance_scale: float, vllm_omni_token2wav: Any, voice: tuple[Tensor, Tensor]
) -> None:
    ids = random_codes(17).unsqueeze(0)
    settings = {"num_steps": num_steps, "guidance_scale": guidance_scale}
    with torch.inference_mode():
        torch.manual_seed(3)
        expected = vllm_omni_token2wav.code2wav_dit_model.sample(*voice, ids, **settings)
        torch.manual_seed(3)
        actual = as_ours(vllm_omni_token2wav).dit.sample(*voice, ids, noise=torch.randn(1, 34, 80), **settings)
    assert rel_error(actual, expected) <= MAX_REL_ERROR


@pytest.mark.parametrize("cap", [1, 2, 3, 48, 49, 74, 75, 1000, 0])
def test_cap_on_mel_frames_equals_vllm_omni(cap: int, vllm_omni_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    """At, under and over the cap; a cap that is no multiple of a code's frames; a cap under one code."""
    ids = random_codes(37)
    torch.manual_seed(3)
    with torch.inference_mode():
        expected = vllm_omni_token2wav(ids.unsqueeze(0), *voice, max_mel_frames=cap)
    ours = as_ours(vllm_omni_token2wav, max_mel_frames=cap)
    actual = ours.generate(ids, *voice, noise=draw(ours.mel_frames(37)))
    assert actual.shape == expected.shape
    assert rel_error(actual, expected) <= MAX_REL_ERROR


@pytest.mark.parametrize("max_mel_frames", [0, 1, 2, 3, 10, 11, 30_000])
@pytest.mark.parametrize("codes", [0, 1, 2, 5, 6, 20_000])
def test_kept_codes_follow_upstreams_rule(codes: int, max_mel_frames: int, transformers_token2wav: Any) -> None:
    audio_length = pytest.importorskip("vllm_omni.model_executor.models.qwen2_5_omni.audio_length")
    expected, _ = audio_length.cap_and_align_mel_length(code_len=codes, repeats=2, max_mel_frames=max_mel_frames)
    assert as_ours(transformers_token2wav, max_mel_frames=max_mel_frames).kept_codes(codes) == expected


def test_no_codes_give_an_empty_waveform(upstream_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    none = torch.zeros(0, dtype=torch.long)
    assert as_ours(upstream_token2wav).generate(none, *voice, noise=torch.zeros(1, 0, 80)).shape == (0,)


def test_noise_of_another_length_is_refused(transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    dit = as_ours(transformers_token2wav).dit
    with pytest.raises(ValueError, match=r"\(1, 10, 80\), got \(1, 9, 80\)"):
        dit.sample(*voice, random_codes(5).unsqueeze(0), noise=torch.zeros(1, 9, 80))


def test_start_up_run_costs_one_evaluation(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = as_ours(transformers_token2wav)
    evaluated: list[torch.Size] = []
    evaluate = ours.dit.evaluate

    def counting(mel: Tensor, *args: Any) -> Tensor:
        evaluated.append(mel.shape)
        return evaluate(mel, *args)

    monkeypatch.setattr(ours.dit, "evaluate", counting)
    ours.evaluate_once(30, *voice)
    assert evaluated == [(1, 60, 80)]
    ours.generate(random_codes(5), *voice, noise=draw(10))
    assert len(evaluated) == 1 + 36


def test_weights_are_referenced_not_copied(transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    """A change of upstream's weights shows in ours."""
    mel, time = torch.zeros(1, 10, 80), torch.tensor(0.5)
    changed = copy.deepcopy(transformers_token2wav)
    dit = BlockSparseDiT(changed.code2wav_dit_model)
    with torch.inference_mode():
        conditions = dit.conditions(*voice, random_codes(5).unsqueeze(0), guided=True)
        before = dit.evaluate(mel, time, conditions)
    with torch.no_grad():
        changed.code2wav_dit_model.proj_out.bias += 1
    with torch.inference_mode():
        after = dit.evaluate(mel, time, conditions)
    torch.testing.assert_close(after, before + 1)
