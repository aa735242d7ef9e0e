# SPDX-License-Identifier: Apache-2.0
"""CPU platform for vLLM-Omni: vLLM's own CPU platform plus the questions that vLLM-Omni asks of one."""

import os

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from vllm_omni_audio_perf import compat


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """Runs vLLM-Omni's stages on the CPU workers of `vllm_omni_audio_perf.platforms.cpu_worker`."""

    _omni_enum = OmniPlatformEnum.OOT

    def __init__(self) -> None:
        super().__init__()
        # One process a stage instead of an engine core and a worker: half the start-up time and a third less memory.
        # vLLM reads it when it builds the stages' configs, too early for the `env:` of a stage config.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        compat.answer_capture_query_without_cuda()

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "vllm_omni_audio_perf.platforms.cpu_worker.CpuARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "vllm_omni_audio_perf.platforms.cpu_worker.CpuGenerationWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/deploy"

    @classmethod
    def get_diffusion_attn_backend_cls(
        cls, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = False
    ) -> str:
        if selected_backend is not None:
            cls.validate_diffusion_attn_backend(selected_backend)
            return DiffusionAttentionBackendEnum[selected_backend.upper()].get_path()
        return DiffusionAttentionBackendEnum.TORCH_SDPA.get_path()

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls) -> bool:
        return False

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        return None

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Bytes of host memory that can be taken without swapping."""
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """(available, total) bytes of host memory."""
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
