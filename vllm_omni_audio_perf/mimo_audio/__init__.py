# SPDX-License-Identifier: Apache-2.0
"""MiMo-Audio: from codes to waveform, chunk by chunk or all at once. Imports without vLLM and vLLM-Omni."""

from vllm_omni_audio_perf.mimo_audio.decoder import FixedShapeDecoder

__all__ = ["FixedShapeDecoder"]
