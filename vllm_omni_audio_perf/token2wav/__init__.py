# SPDX-License-Identifier: Apache-2.0
"""Codes to waveform by a flow-matching DiT that attends block by block, and a vocoder. Needs torch alone.

The core of Qwen2.5-Omni's code2wav stage (`vllm_omni_audio_perf.qwen2_5_omni`) and of Qwen3-TTS's 25 Hz tokenizer
(`vllm_omni_audio_perf.qwen3_tts`).
"""

from vllm_omni_audio_perf.token2wav.dit import BlockDiT, cast_linear_layers
from vllm_omni_audio_perf.token2wav.sampling import Clip, Sampler, graph_blocks
from vllm_omni_audio_perf.token2wav.synthesis import Synthesizer

__all__ = ["BlockDiT", "Clip", "Sampler", "Synthesizer", "cast_linear_layers", "graph_blocks"]
