# SPDX-License-Identifier: Apache-2.0
"""Qwen3-TTS: the 25 Hz tokenizer's decoder, as a library. No stage of vLLM-Omni 0.30.0 decodes with it.

Imports without vLLM and vLLM-Omni, whose modules are handed in.
"""

from vllm_omni_audio_perf.qwen3_tts.tokenizer_25hz import Tokenizer25HzDecoder

__all__ = ["Tokenizer25HzDecoder"]
