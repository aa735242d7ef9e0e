# SPDX-License-Identifier: Apache-2.0
"""Refuses a configuration of a Qwen2.5-Omni stage of ours that cannot work, before any engine starts.

What passes gets our scheduler, and its requests are looked at from then on (`client_requests`). vLLM calls
`StageCheck` for each stage of our architecture when it puts the stage's configuration together: in the main process of
``Omni(...)`` and of ``vllm-omni serve``, and again in the process of the stage.
"""

from collections.abc import Mapping
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from vllm_omni_audio_perf import compat
from vllm_omni_audio_perf.options import SECTION, OptionError, Token2WavOptions
from vllm_omni_audio_perf.qwen2_5_omni import client_requests
from vllm_omni_audio_perf.scheduling.stage_settings import (
    CODE2WAV,
    SCHEDULER,
    refuse_several_devices,
    refuse_sleep_beside_graphs,
)

TALKER = "talker"


class StageCheck(VerifyAndUpdateConfig):
    """vLLM's hook for an architecture's configuration."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        checked_options(vllm_config)
        if is_code2wav(vllm_config):
            compat.fail_requests_one_by_one(vllm_config, SCHEDULER)
        client_requests.announce(vllm_config)


def is_code2wav(vllm_config: Any) -> bool:
    """Whether a stage's configuration is that of the code2wav stage."""
    return _stage_of(vllm_config) == CODE2WAV


def is_talker(vllm_config: Any) -> bool:
    """Whether a stage's configuration is that of the talker."""
    return _stage_of(vllm_config) == TALKER


def checked_options(vllm_config: Any) -> Token2WavOptions:
    """The options of a stage of our architecture, all of whose settings are possible.

    Raises:
        ValueError: for an option that is unknown, not allowed or on a stage other than code2wav; for a tensor or
            pipeline parallel size over 1 or sleep mode beside CUDA graphs on code2wav; for a checkpoint without a
            Token2Wav; for vLLM's second model runner.
    """
    if getattr(vllm_config.model_config, "use_v2_model_runner", False):
        raise ValueError("model_runner is 'v2', which does not tell a stage of its requests' seeds; allowed: v1.")
    options = Token2WavOptions.from_additional_config(vllm_config.additional_config)
    if not is_code2wav(vllm_config):
        if isinstance(vllm_config.additional_config, Mapping) and SECTION in vllm_config.additional_config:
            raise OptionError(
                f"additional_config.{SECTION} stands on stage {_stage_of(vllm_config)!r}; "
                f"allowed: on stage {CODE2WAV!r} only."
            )
        return options
    refuse_several_devices(vllm_config)
    refuse_sleep_beside_graphs(vllm_config, options.cuda_graphs)
    if getattr(vllm_config.model_config.hf_config, "token2wav_config", None) is None:
        raise ValueError(f"{vllm_config.model_config.model} has no token2wav_config, so it cannot produce audio.")
    return options


def _stage_of(vllm_config: Any) -> str | None:
    """Name of the stage; None where the model runs without stages, whose configuration has no such field."""
    return getattr(vllm_config.model_config, "model_stage", None)
