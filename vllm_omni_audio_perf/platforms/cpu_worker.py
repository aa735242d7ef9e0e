# SPDX-License-Identifier: Apache-2.0
"""CPU workers and runners for vLLM-Omni's stages: its stage logic over vLLM's CPU execution."""

from typing import ClassVar

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin


class CpuARModelRunner(GPUARModelRunner, CPUModelRunner):
    """Autoregressive stages (thinker, talker)."""


class CpuGenerationModelRunner(GPUGenerationModelRunner, CPUModelRunner):
    """Generation stages (code2wav)."""


class _CpuOmniWorker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: ClassVar[type[CPUModelRunner]]

    def init_device(self) -> None:
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
