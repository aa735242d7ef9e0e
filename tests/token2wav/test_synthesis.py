# SPDX-License-Identifier: Apache-2.0
"""Codes to waveforms, against upstream's on the same weights, noise and codes; and what happens when memory ends."""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity import CODE_COUNTS, MAX_REL_ERROR, other_voice, random_clip, random_codes, rel_error
from torch import Tensor

from vllm_omni_audio_perf.token2wav import BlockDiT, Clip, Sampler, Synthesizer
from vllm_omni_audio_perf.token2wav.synthesis import is_out_of_memory, plan_solves


def as_ours(token2wav: Any, **settings: Any) -> Synthesizer:
    sampler = Sampler(BlockDiT(token2wav.code2wav_dit_model))
    return Synthesizer(sampler, token2wav.code2wav_bigvgan_model, **settings)


def drawn(codes: int, frames: int, voice: tuple[Tensor, Tensor]) -> Clip:
    """With the noise that vLLM-Omni draws after ``torch.manual_seed(3)``."""
    torch.manual_seed(3)
    return Clip(random_codes(codes), *voice, torch.randn(1, frames, 80))


def waveforms(results: Sequence[Tensor | Exception]) -> list[Tensor]:
    for result in results:
        assert isinstance(result, Tensor), result
    return list(results)  # type: ignore[arg-type]


@pytest.mark.parametrize("codes", CODE_COUNTS)
def test_equals_vllm_omni(codes: int, vllm_omni_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    clip = drawn(codes, 2 * codes, voice)
    torch.manual_seed(3)
    with torch.inference_mode():
        expected = vllm_omni_token2wav(clip.codes.unsqueeze(0), *voice)
    (waveform,) = waveforms(as_ours(vllm_omni_token2wav).generate([clip]))
    assert waveform.shape == (480 * codes,)
    assert waveform.dtype == torch.float32
    assert waveform.device.type == "cpu"
    assert waveform.abs().max() < 1  # else clipping would hide differences
    assert rel_error(waveform, expected) <= MAX_REL_ERROR


def test_a_waveform_shows_what_is_in_the_mel(transformers_token2wav: Any) -> None:
    """With the weights of these tests, as else errors of a mel would be lost in them."""
    bigvgan = transformers_token2wav.code2wav_bigvgan_model
    one, other = (torch.randn(1, 80, 50, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    with torch.inference_mode():
        assert rel_error(bigvgan(one), bigvgan(other)) > 0.2
        assert rel_error(bigvgan(one + 1e-3 * other), bigvgan(one)) > 1e-4


@pytest.mark.parametrize("cap", [1, 2, 3, 48, 49, 74, 75, 1000, 0])
def test_cap_on_mel_frames_equals_vllm_omni(cap: int, vllm_omni_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    """At, under and over the cap; a cap that is no multiple of a code's frames; a cap under one code."""
    ours = as_ours(vllm_omni_token2wav, max_mel_frames=cap)
    clip = drawn(37, ours.mel_frames(37), voice)
    torch.manual_seed(3)
    with torch.inference_mode():
        expected = vllm_omni_token2wav(clip.codes.unsqueeze(0), *voice, max_mel_frames=cap)
    (actual,) = waveforms(ours.generate([clip]))
    assert actual.shape == expected.shape
    assert rel_error(actual, expected) <= MAX_REL_ERROR


@pytest.mark.parametrize("max_mel_frames", [0, 1, 2, 3, 10, 11, 30_000])
@pytest.mark.parametrize("codes", [0, 1, 2, 5, 6, 20_000])
def test_kept_codes_follow_upstreams_rule(codes: int, max_mel_frames: int, transformers_token2wav: Any) -> None:
    audio_length = pytest.importorskip("vllm_omni.model_executor.models.qwen2_5_omni.audio_length")
    expected, _ = audio_length.cap_and_align_mel_length(code_len=codes, repeats=2, max_mel_frames=max_mel_frames)
    assert as_ours(transformers_token2wav, max_mel_frames=max_mel_frames).kept_codes(codes) == expected


@pytest.mark.parametrize("frames_per_solve", [1, 60, 120, 16_000])
def test_each_of_several_clips_equals_it_alone(frames_per_solve: int, transformers_token2wav: Any) -> None:
    """However many of them are solved together; one without codes among them."""
    ours = as_ours(transformers_token2wav, frames_per_solve=frames_per_solve)
    clips = [random_clip(codes, other_voice(i, 100 + i), seed=i) for i, codes in enumerate((25, 1, 0, 13, 40, 12))]
    together = waveforms(ours.generate(clips))
    assert [len(waveform) for waveform in together] == [480 * len(clip.codes) for clip in clips]
    for clip, waveform in zip(clips, together, strict=True):
        (alone,) = waveforms(ours.generate([clip]))
        if len(alone):
            assert rel_error(waveform, alone) <= MAX_REL_ERROR


def test_nothing_to_do(transformers_token2wav: Any, voice: tuple[Tensor, Tensor]) -> None:
    ours = as_ours(transformers_token2wav)
    assert ours.generate([]) == []
    (nothing,) = waveforms(ours.generate([random_clip(0, voice)]))
    assert nothing.shape == (0,)


@pytest.mark.parametrize(
    ("frames", "budget", "expected"),
    [
        ([], 10, []),
        ([4, 4, 4], 12, [[0, 1, 2]]),
        ([4, 4, 4], 11, [[0, 1], [2]]),
        ([20, 1, 1], 10, [[0], [1, 2]]),
        ([1, 20, 1], 10, [[0], [1], [2]]),
        ([6, 6, 4, 1], 10, [[0], [1, 2], [3]]),
    ],
)
def test_plan(frames: list[int], budget: int, expected: list[list[int]]) -> None:
    assert plan_solves(frames, budget) == expected


class Memory:
    """Stands in for a device: a solve of more than so many frames times MiB of groups does not fit."""

    def __init__(self, ours: Synthesizer, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
        self.solves: list[tuple[list[int], int]] = []
        self.fits = lambda frames, group_mib: True
        sample = ours.sampler.sample

        def limited(clips: Sequence[Clip], *, group_mib: int) -> list[Tensor]:
            frames = [clip.noise.shape[1] for clip in clips]
            self.solves.append((frames, group_mib))
            if not self.fits(frames, group_mib):
                raise failure
            return sample(clips, group_mib=group_mib)

        monkeypatch.setattr(ours.sampler, "sample", limited)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    torch.AcceleratorError("CUDA error: out of memory", 2),
    MemoryError(),
]


@pytest.mark.parametrize("failure", OUT_OF_MEMORY)
def test_a_failed_allocation_is_tried_again_in_smaller_groups(
    failure: Exception, transformers_token2wav: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First of clips, then of blocks; the audio is the same, and only what fits nowhere fails."""
    ours = as_ours(transformers_token2wav)
    clips = [random_clip(codes, other_voice(1, 100), seed=codes) for codes in (12, 24, 100, 13)]
    expected = waveforms(ours.generate(clips))
    memory = Memory(ours, monkeypatch, failure)
    memory.fits = lambda frames, group_mib: sum(frames) <= 60 or (len(frames) == 1 and group_mib <= 64)
    for actual, wanted in zip(waveforms(ours.generate(clips)), expected, strict=True):
        assert rel_error(actual, wanted) <= MAX_REL_ERROR
    assert memory.solves == [
        ([24, 48, 200, 26], 1024),
        ([24, 48], 1024),
        ([24], 1024),
        ([48], 1024),
        ([200, 26], 1024),
        ([200], 1024),
        ([200], 256),
        ([200], 64),
        ([26], 1024),
    ]
    memory.fits = lambda frames, group_mib: frames[0] != 200 and len(frames) == 1
    *others, last = (result for result in ours.generate(clips))
    assert others[2] is failure
    for actual, wanted in zip([*others[:2], last], [*expected[:2], expected[3]], strict=True):
        assert isinstance(actual, Tensor)
        assert rel_error(actual, wanted) <= MAX_REL_ERROR


def test_another_failure_fails_alone(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = as_ours(transformers_token2wav)
    failure = RuntimeError("odd")
    memory = Memory(ours, monkeypatch, failure)
    memory.fits = lambda frames, group_mib: 26 not in frames
    results = ours.generate([random_clip(codes, voice) for codes in (12, 13, 24)])
    assert [result if isinstance(result, Exception) else len(result) for result in results] == [
        12 * 480,
        failure,
        24 * 480,
    ]
    assert memory.solves.count(([26], 1024)) == 1  # not tried again


def test_the_vocoder_fails_alone_and_shrinks_its_pieces(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = as_ours(transformers_token2wav)
    clips = [random_clip(codes, voice) for codes in (12, 300, 13)]
    expected = waveforms(ours.generate(clips))
    vocoder, seen = ours.vocoder, []

    def limited(mel: Tensor) -> Tensor:
        seen.append(mel.shape[2])
        if mel.shape[2] == 26:
            raise RuntimeError("odd")
        if mel.shape[2] > 400:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return vocoder(mel)

    ours.vocoder = limited
    first, long, odd = ours.generate(clips)
    assert isinstance(odd, RuntimeError)
    assert isinstance(first, Tensor)
    assert torch.equal(first, expected[0])
    assert isinstance(long, Tensor)
    assert rel_error(long, expected[1]) <= MAX_REL_ERROR
    assert seen == [24, 600, 270, 290, 120, 26]


def test_a_lost_device_is_everybodys(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = as_ours(transformers_token2wav)
    memory = Memory(ours, monkeypatch, torch.AcceleratorError("device-side assert", 1))
    memory.fits = lambda frames, group_mib: False
    with pytest.raises(torch.AcceleratorError):
        ours.generate([random_clip(5, voice), random_clip(6, voice)])


def test_a_failure_holds_no_tensors(
    transformers_token2wav: Any, voice: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = as_ours(transformers_token2wav)
    memory = Memory(ours, monkeypatch, torch.OutOfMemoryError("CUDA out of memory"))
    memory.fits = lambda frames, group_mib: False

    def live() -> int:
        gc.collect()
        return sum(isinstance(thing, Tensor) for thing in gc.get_objects())

    clips = [random_clip(5, voice), random_clip(6, voice)]
    ours.generate(clips)
    before = live()
    failures = ours.generate(clips)
    assert live() == before
    assert all(isinstance(failure, torch.OutOfMemoryError) for failure in failures)


def test_what_counts_as_out_of_memory() -> None:
    assert all(map(is_out_of_memory, OUT_OF_MEMORY))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))
