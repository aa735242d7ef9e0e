# SPDX-License-Identifier: Apache-2.0
"""BigVGAN in pieces against BigVGAN whole."""

from typing import Any

import pytest
import torch
from parity import MAX_REL_ERROR, rel_error
from torch import Tensor

from vllm_omni_audio_perf.token2wav.vocoder import vocode


def random_mel(frames: int) -> Tensor:
    return torch.randn(1, 80, frames, generator=torch.Generator().manual_seed(frames))


@pytest.mark.parametrize(
    ("frames", "piece_frames"), [(60, 60), (61, 60), (100, 50), (101, 50), (119, 20), (200, 70), (90, 7)]
)
def test_pieces_equal_the_whole(frames: int, piece_frames: int, upstream_token2wav: Any) -> None:
    bigvgan, mel = upstream_token2wav.code2wav_bigvgan_model, random_mel(frames)
    with torch.inference_mode():
        whole = bigvgan(mel).reshape(-1)
        pieces = vocode(bigvgan, mel, piece_frames=piece_frames)
    assert whole.abs().max() < 1  # else clipping would hide differences
    assert pieces.shape == (240 * frames,)
    assert rel_error(pieces, whole) <= MAX_REL_ERROR
    seams = range(240 * piece_frames, 240 * frames, 240 * piece_frames)
    for seam in seams:  # where an error would be, and not lost in the whole
        part = slice(seam - 240, seam + 240)
        assert rel_error(pieces[part], whole[part]) <= MAX_REL_ERROR


def test_less_overlap_is_not_enough(transformers_token2wav: Any) -> None:
    bigvgan, mel = transformers_token2wav.code2wav_bigvgan_model, random_mel(200)
    with torch.inference_mode():
        whole = bigvgan(mel).reshape(-1)
        assert rel_error(vocode(bigvgan, mel, piece_frames=50, overlap_frames=4), whole) > MAX_REL_ERROR


def test_a_piece_is_no_longer_than_asked_for() -> None:
    seen: list[int] = []

    def vocoder(mel: Tensor) -> Tensor:
        seen.append(mel.shape[2])
        return mel[:, :1].repeat_interleave(3, dim=2).squeeze()

    mel = random_mel(95)
    out = vocode(vocoder, mel, piece_frames=30, overlap_frames=5)
    assert seen == [35, 40, 40, 10]
    assert torch.equal(out, mel[0, 0].repeat_interleave(3))
