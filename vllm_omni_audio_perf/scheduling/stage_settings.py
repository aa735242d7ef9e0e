# SPDX-License-Identifier: Apache-2.0
"""What the configuration of every code2wav stage of ours has in common."""

from typing import Any

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
