# SPDX-License-Identifier: Apache-2.0
"""Codes to waveform: the DiT solve followed by upstream's BigVGAN."""

import torch
from torch import Tensor, nn

from vllm_omni_audio_perf.qwen2_5_omni.dit import BlockSparseDiT


class Token2Wav:
    """Turns the codes of one request into its waveform.

    Args:
        dit: an upstream ``Qwen2_5OmniToken2WavDiTModel``; referenced, not copied.
        bigvgan: an upstream ``Qwen2_5OmniToken2WavBigVGANModel``; referenced, not copied.
        max_mel_frames: longest clip in mel frames of 10 ms; longer code sequences are cut. 0 for no cap.
    """

    def __init__(self, dit: nn.Module, bigvgan: nn.Module, *, max_mel_frames: int = 0) -> None:
        self.dit = BlockSparseDiT(dit)
        self.bigvgan = bigvgan
        self.max_mel_frames = max_mel_frames

    def kept_codes(self, codes: int) -> int:
        """How many of `codes` codes the cap on mel frames keeps: all that fit wholly, and at least one.

        The rule of ``cap_and_align_mel_length`` in vLLM-Omni's ``audio_length.py``.
        """
        if codes == 0 or self.max_mel_frames <= 0:
            return codes
        return min(codes, max(self.max_mel_frames // self.dit.repeats, 1))

    @property
    def codebook_size(self) -> int:
        """Codes are ``0 .. codebook_size - 1``."""
        return self.dit.codebook_size

    def mel_frames(self, codes: int) -> int:
        """Mel frames that `generate` makes of `codes` codes."""
        return self.kept_codes(codes) * self.dit.repeats

    @torch.inference_mode()
    def generate(self, codes: Tensor, speaker: Tensor, reference_mel: Tensor, *, noise: Tensor) -> Tensor:
        """Synthesize one clip.

        Args:
            codes: ``[codes]`` int64 on the model's device, each below `codebook_size`.
            speaker: ``[1, enc_emb_dim]`` float32, the speaker embedding.
            reference_mel: ``[1, reference_frames, mel_dim]`` float32, log-mel of the reference voice.
            noise: ``[1, mel_frames(codes), mel_dim]`` float32, from which the solve starts.

        Returns:
            ``[samples]`` float32 on the CPU, 24 kHz, in [-1, 1]; 480 samples a code. Empty for no codes.

        Raises:
            ValueError: if `noise` does not fit `codes`.
        """
        codes = codes[: self.kept_codes(codes.shape[0])]
        if codes.shape[0] == 0:
            return torch.zeros(0)
        mel = self.dit.sample(speaker, reference_mel, codes.unsqueeze(0), noise=noise)
        return self.bigvgan(mel).reshape(-1)

    @torch.inference_mode()
    def evaluate_once(self, codes: int, speaker: Tensor, reference_mel: Tensor) -> None:
        """Run one guided evaluation at the length of `codes` codes, 1/36 of a solve, for the engine's start-up run.

        It takes the memory that the solve of such a clip needs, but not that of the vocoder.
        """
        ids = torch.zeros((1, max(self.kept_codes(codes), 1)), dtype=torch.long, device=speaker.device)
        mel = torch.zeros(
            (1, ids.shape[1] * self.dit.repeats, self.dit.mel_dim), device=speaker.device, dtype=reference_mel.dtype
        )
        conditions = self.dit.conditions(speaker, reference_mel, ids, guided=True)
        self.dit.evaluate(mel, mel.new_zeros(()), conditions)
