# SPDX-License-Identifier: Apache-2.0
"""CPU workers and runners for vLLM-Omni's stages: its stage logic over vLLM's CPU execution."""

import logging
from typing import Any, ClassVar

import psutil
from vllm.config import VllmConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from vllm_omni_audio_perf import compat

logger = logging.getLogger(__name__)

MAX_DEFAULT_KV_CACHE_BYTES = 4 << 30
"""Most that a stage takes for its KV cache unless it is told a size."""


class CpuARModelRunner(GPUARModelRunner, CPUModelRunner):
    """Autoregressive stages (thinker, talker)."""


class CpuGenerationModelRunner(GPUGenerationModelRunner, CPUModelRunner):
    """Generation stages (code2wav)."""


class _CpuOmniWorker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: ClassVar[type[CPUModelRunner]]

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        cache_config = vllm_config.cache_config
        if cache_config.kv_cache_memory_bytes is None:
            # The stages share one host memory. A stage config for GPUs gives each of them most of a card.
            share = int(psutil.virtual_memory().total * cache_config.gpu_memory_utilization)
            cache_config.kv_cache_memory_bytes = min(share, MAX_DEFAULT_KV_CACHE_BYTES)
            logger.info(
                "KV cache of this stage: %.1f GiB of host memory (kv_cache_memory_bytes sets another size)",
                cache_config.kv_cache_memory_bytes / (1 << 30),
            )
        super().__init__(vllm_config, *args, **kwargs)

    def init_device(self) -> None:
        compat.answer_capture_query_without_cuda()
        # vLLM's second runner has none of the omni hooks.
        self.use_v2_model_runner = False
        super().init_device()
        self.model_runner = self.model_runner_cls(self.vllm_config, self.device)

    def determine_available_memory(self) -> int:
        # The Qwen2.5-Omni talker sets its `voice_type` in the profiling forward only, and vLLM's CPU worker skips that
        # forward where the size of the KV cache is given. vLLM-Omni's own GPU worker always runs it, too.
        self.model_runner.profile_run()
        return super().determine_available_memory()


class CpuARWorker(_CpuOmniWorker):
    """Worker of an autoregressive stage."""

    model_runner_cls = CpuARModelRunner


class CpuGenerationWorker(_CpuOmniWorker):
    """Worker of a generation stage."""

    model_runner_cls = CpuGenerationModelRunner
