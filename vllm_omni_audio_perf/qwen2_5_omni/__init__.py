# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's Token2Wav: codes -> mel frames (DiT) -> waveform (BigVGAN).

Everything but `stage` works on torch modules alone and imports neither vLLM nor vLLM-Omni.
"""

from vllm_omni_audio_perf.qwen2_5_omni.dit import BlockSparseDiT
from vllm_omni_audio_perf.qwen2_5_omni.token2wav import Token2Wav

__all__ = ["BlockSparseDiT", "Token2Wav"]
