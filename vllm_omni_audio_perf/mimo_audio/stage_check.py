# SPDX-License-Identifier: Apache-2.0
"""Refuses a configuration of a MiMo-Audio code2wav stage of ours that cannot work, before any engine starts.

vLLM calls `StageCheck` for each stage of our architecture when it puts the stage's configuration together: in the main
process of ``Omni(...)`` and of ``vllm-omni serve``, and again in the process of the stage.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from vllm_omni_audio_perf import compat
from vllm_omni_audio_perf.architectures import MIMO_AUDIO
from vllm_omni_audio_perf.mimo_audio.groups import group_width
from vllm_omni_audio_perf.mimo_audio.stage_inputs import asks_for_ours
from vllm_omni_audio_perf.mimo_audio.streaming import StreamSettings, check_left_context
from vllm_omni_audio_perf.options import MiMoAudioOptions
from vllm_omni_audio_perf.scheduling.offline import end_with_empty_audio
from vllm_omni_audio_perf.scheduling.stage_settings import (
    CODE2WAV,
    SCHEDULER,
    refuse_several_devices,
    refuse_sleep_beside_graphs,
)

logger = logging.getLogger(__name__)

TOKENIZER_PATH = "MIMO_AUDIO_TOKENIZER_PATH"

_end_with_empty_audio = end_with_empty_audio(MIMO_AUDIO)


class StageCheck(VerifyAndUpdateConfig):
    """vLLM's hook for an architecture's configuration."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        checked_options(vllm_config)
        checked_stream(vllm_config)
        compat.fail_requests_one_by_one(vllm_config, SCHEDULER)
        compat.wrap_where_requests_come_in(generate=_end_with_empty_audio)


def checked_options(vllm_config: Any) -> MiMoAudioOptions:
    """The options of a stage of our architecture, all of whose settings are possible.

    Raises:
        ValueError: for an option that is unknown or not allowed; for a stage other than code2wav; for a tensor or
            pipeline parallel size over 1; for sleep mode beside CUDA graphs; for vLLM's second model runner; for a
            tokenizer that is not there.
    """
    model_config = vllm_config.model_config
    stage = getattr(model_config, "model_stage", None)
    if stage != CODE2WAV:
        raise ValueError(f"model_arch: {MIMO_AUDIO} stands on stage {stage!r}; allowed: on stage {CODE2WAV!r} only.")
    if getattr(model_config, "use_v2_model_runner", False):
        raise ValueError("model_runner is 'v2', which does not tell a stage how far a request is; allowed: v1.")
    options = MiMoAudioOptions.from_additional_config(vllm_config.additional_config)
    refuse_several_devices(vllm_config)
    refuse_sleep_beside_graphs(vllm_config, options.cuda_graphs)
    tokenizer_config(vllm_config)
    return options


def tokenizer_config(vllm_config: Any) -> dict[str, Any]:
    """The audio tokenizer's settings, with upstream's default values, from where vLLM-Omni looks for it.

    Raises:
        ValueError: where nothing says where that is, or it is no folder with a ``config.json``; upstream's first stage
            takes no name of a repository either.
    """
    from vllm_omni.model_executor.models.mimo_audio.config_mimo_audio import MiMoAudioTokenizerConfig

    path = getattr(vllm_config.model_config, "audio_tokenizer_path", None) or os.environ.get(TOKENIZER_PATH)
    if not path:
        raise ValueError(
            f"Nothing says where the MiMo-Audio tokenizer is: set {TOKENIZER_PATH} in the environment to its folder."
        )
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{TOKENIZER_PATH} is {str(path)!r}; allowed: a folder with the tokenizer's config.json.")
    return MiMoAudioTokenizerConfig(**json.loads(file.read_text(encoding="utf-8"))).to_dict()


def connector_extra(vllm_config: Any) -> Mapping[str, Any]:
    """The ``extra`` of the connector that the stage receives through."""
    connector = getattr(vllm_config.model_config, "stage_connector_config", None)
    extra = connector.get("extra") if isinstance(connector, Mapping) else getattr(connector, "extra", None)
    return extra if isinstance(extra, Mapping) else {}


def checked_stream(vllm_config: Any) -> StreamSettings | None:
    """How the requests of the stage are cut into chunks; None where their codes come all at once.

    Raises:
        ValueError: for a setting that is not allowed, for a left context shorter than what a layer of the vocoder looks
            at, and for a stage that could not take the chunks of ``max_num_seqs`` requests in one step, which would
            lose codes.
    """
    model_config = vllm_config.model_config
    extra = connector_extra(vllm_config)
    settings = StreamSettings.from_connector(extra)
    if not getattr(model_config, "async_chunk", False):
        return None
    config = model_config.hf_config
    group_size, audio_channels = config.group_size, config.audio_channels
    tokenizer = tokenizer_config(vllm_config)
    left_window, right_window = tokenizer["vocoder_attn_window_size"]
    warning = check_left_context(
        settings,
        left_window=left_window,
        right_window=right_window,
        layers=tokenizer["vocoder_num_layers"],
        frames_per_group=group_size * tokenizer["avg_pooler"] * tokenizer["decoder_stride_size"],
    )
    if warning:
        _warn_once(warning)
    if not asks_for_ours(extra):
        _warn_once(
            "The connector has no audio_perf section: vLLM-Omni's own input processor cuts the chunks. Version 0.30.0 "
            "repeats the last one of a request that ends on its boundary."
        )
    longest = settings.left_context + settings.chunk + settings.right_context
    ids = longest * group_width(group_size, audio_channels)
    requests = vllm_config.scheduler_config.max_num_seqs
    batched = vllm_config.scheduler_config.max_num_batched_tokens
    if batched < requests * ids:
        raise ValueError(
            f"max_num_batched_tokens is {batched}; allowed: at least {requests * ids}, max_num_seqs {requests} x "
            f"{ids} ids of a chunk with its context ({longest} groups). With less, codes would be lost."
        )
    if model_config.max_model_len < ids:
        raise ValueError(
            f"max_model_len is {model_config.max_model_len}; allowed: at least {ids}, the ids of a chunk with its "
            f"context ({longest} groups)."
        )
    return settings


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
