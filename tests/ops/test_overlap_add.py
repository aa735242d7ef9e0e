# SPDX-License-Identifier: Apache-2.0
"""The inverse STFT of padded spectrograms against sums written out sample by sample."""

import pytest
import torch
from torch import Tensor

from vllm_omni_audio_perf.ops import inverse_stft, overlap_add
from vllm_omni_audio_perf.testing.capture_safety import assert_capture_safe


@pytest.mark.parametrize(("window", "hop"), [(960, 240), (8, 4), (10, 4), (6, 5), (7, 7), (3, 1)])
@pytest.mark.parametrize("frames", [1, 2, 5, 9])
def test_sums_overlapping_frames(window: int, hop: int, frames: int) -> None:
    values = torch.randn(2, frames, window, dtype=torch.float64)
    expected = torch.zeros(2, (frames - 1) * hop + window, dtype=torch.float64)
    for frame in range(frames):
        expected[:, frame * hop : frame * hop + window] += values[:, frame]
    assert torch.allclose(overlap_add(values, hop), expected, rtol=0, atol=1e-12)


def reference(spectrum: Tensor, window: Tensor, hop: int) -> Tensor:
    """One spectrogram ``[frames, bins]``: overlap-add, divided by the windows' squares, ends cut off."""
    size, frames = len(window), len(spectrum)
    signal = torch.zeros((frames - 1) * hop + size, dtype=torch.float64)
    envelope = torch.zeros_like(signal)
    for frame in range(frames):
        part = slice(frame * hop, frame * hop + size)
        signal[part] += torch.fft.irfft(spectrum[frame], size) * window
        envelope[part] += window**2
    cut = (size - hop) // 2
    return (signal / envelope)[cut : cut + frames * hop]


@pytest.mark.parametrize(("size", "hop"), [(960, 240), (480, 240), (16, 4)])
@pytest.mark.parametrize("garbage", [1e6, torch.nan])
def test_is_exact_up_to_the_last_sample(size: int, hop: int, garbage: float) -> None:
    window = torch.hann_window(size, dtype=torch.float64)
    lengths = [11, 7, 1, 0]
    spectrum = torch.randn(4, 11, size // 2 + 1, dtype=torch.complex128)
    for row, length in zip(spectrum, lengths, strict=True):
        row[length:] = garbage
    signal = inverse_stft(spectrum, torch.tensor(lengths), window=window, hop_length=hop)
    assert signal.shape == (4, 11 * hop)
    for row, length in enumerate(lengths):
        assert not signal[row, length * hop :].any()
        if length:
            expected = reference(spectrum[row, :length], window, hop)
            assert torch.allclose(signal[row, : length * hop], expected, rtol=1e-9, atol=1e-9)


def test_can_be_captured() -> None:
    def transform(spectrum: Tensor, lengths: Tensor, window: Tensor) -> Tensor:
        return inverse_stft(spectrum, lengths, window=window, hop_length=4)

    inputs = [torch.randn(2, 5, 9, dtype=torch.complex64), torch.tensor([5, 2]), torch.hann_window(16)]
    assert_capture_safe(transform, inputs)
