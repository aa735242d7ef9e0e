# SPDX-License-Identifier: Apache-2.0
"""What the configuration of every code2wav stage of ours has in common."""

from typing import Any

import torch

SCHEDULER = "vllm_omni_audio_perf.scheduling.scheduler.AudioPerfGenerationScheduler"
CODE2WAV = "code2wav"


def refuse_several_devices(vllm_config: Any) -> None:
    """Refuse what would spread a code2wav stage over devices.

    Raises:
        ValueError: for a tensor or pipeline parallel size over 1.
    """
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(vllm_config.parallel_config, name)
        if size > 1:
            raise ValueError(
                f"The code2wav stage runs on one device: {name} is {size}, allowed is 1 "
                "(for more throughput give the stage replicas: `num_replicas`)."
            )


def refuse_sleep_beside_graphs(vllm_config: Any, cuda_graphs: bool) -> None:
    """Refuse what would take the memory away that captured graphs use.

    Raises:
        ValueError: for sleep mode beside CUDA graphs.
    """
    if cuda_graphs and getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ValueError(
            "enable_sleep_mode takes away the memory that captured CUDA graphs use; allowed: without it, or with "
            "`additional_config: {audio_perf: {cuda_graphs: false}}`."
        )


def free_share(vllm_config: Any, device: torch.device) -> int:
    """Bytes that ``gpu_memory_utilization`` leaves to this process on a CUDA device."""
    free, total = torch.cuda.mem_get_info(device)
    share = int(total * vllm_config.cache_config.gpu_memory_utilization)
    return max(0, min(free, share - torch.cuda.memory_reserved(device)))
