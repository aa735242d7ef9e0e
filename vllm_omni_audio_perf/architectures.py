# SPDX-License-Identifier: Apache-2.0
"""The names that a stage config gives in ``model_arch:`` to select a stage of ours."""

QWEN2_5_OMNI = "AudioPerfQwen2_5OmniForConditionalGeneration"
MIMO_AUDIO = "AudioPerfMiMoAudioModel"
