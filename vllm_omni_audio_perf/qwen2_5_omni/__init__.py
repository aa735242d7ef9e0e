# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's Token2Wav: codes -> mel frames (DiT) -> waveform (BigVGAN).

Importing this package needs neither vLLM nor vLLM-Omni: `dit`, `solver`, `token2wav`, `noise`, `codes`, `speakers` and
`request_settings` work without them. `stage`, `stage_check`, `stage_inputs`, `client_requests` and `speaker_file` are
what vLLM-Omni calls.
"""

from vllm_omni_audio_perf.qwen2_5_omni.dit import BlockSparseDiT
from vllm_omni_audio_perf.qwen2_5_omni.token2wav import Token2Wav

__all__ = ["BlockSparseDiT", "Token2Wav"]
