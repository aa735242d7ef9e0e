# SPDX-License-Identifier: Apache-2.0
"""CPU platform for vLLM-Omni: vLLM's own CPU platform plus the questions that vLLM-Omni asks of one."""

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.cpu_resource_utils import get_memory_affinity
from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum

from vllm_omni_audio_perf import compat


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """Runs vLLM-Omni's stages on the CPU workers of `vllm_omni_audio_perf.platforms.cpu_worker`."""

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        compat.prefer_one_process_a_stage()  # here, where vLLM-Omni sets up a stage: plain vLLM keeps its own way
        return "vllm_omni_audio_perf.platforms.cpu_worker.CpuARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        compat.prefer_one_process_a_stage()
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
    def set_device_control_env_var(cls, devices: str | int | None) -> None:
        """Restrict a stage to memory nodes, as far as its `devices` name some.

        A stage config written for GPUs numbers those: `devices: "1"` on a machine with one memory node means no
        restriction, where vLLM would find no memory at all.
        """
        nodes = {str(node) for node in get_memory_affinity()}
        named = [device.strip() for device in str(devices).split(",") if device.strip() in nodes]
        if named:
            super().set_device_control_env_var(",".join(named))
        else:
            cls.unset_device_control_env_var()

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
