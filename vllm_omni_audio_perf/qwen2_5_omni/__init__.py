# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Omni's code2wav stage around the core in `vllm_omni_audio_perf.token2wav`.

Importing this package needs neither vLLM nor vLLM-Omni: `noise`, `codes`, `speakers` and `request_settings` work
without them. `stage`, `stage_check`, `stage_inputs`, `client_requests` and `speaker_file` are what vLLM-Omni calls.
"""
