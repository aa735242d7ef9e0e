# SPDX-License-Identifier: Apache-2.0
"""What the CPU platform answers to vLLM-Omni."""

import os
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from vllm_omni_audio_perf import compat

pytest.importorskip("vllm_omni")


@pytest.fixture
def platform() -> Any:
    from vllm_omni.platforms import current_omni_platform

    from vllm_omni_audio_perf.platforms.cpu import CpuOmniPlatform

    if not isinstance(current_omni_platform, CpuOmniPlatform):
        pytest.skip("vLLM does not run on CPU here")
    return current_omni_platform


def test_workers_can_be_imported(platform: Any) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.cpu_worker import CPUWorker

    for name in (platform.get_omni_ar_worker_cls(), platform.get_omni_generation_worker_cls()):
        assert issubclass(resolve_obj_by_qualname(name), CPUWorker)


def test_memory_is_the_hosts(platform: Any) -> None:
    available, total = platform.get_device_memory()
    assert 0 < available <= total
    assert 0 < platform.get_free_memory() <= total


def test_runs_on_the_cpu(platform: Any) -> None:
    assert platform.get_torch_device(1) == torch.device("cpu")
    assert platform.get_device_count() == 1
    assert not platform.supports_torch_inductor()
    assert platform.is_out_of_tree()
    assert not platform.is_cuda()
    assert platform.synchronize() is None


def test_attention_backend(platform: Any) -> None:
    assert platform.get_diffusion_attn_backend_cls(None, 64).endswith("SDPABackend")
    assert platform.get_diffusion_attn_backend_cls("torch_sdpa", 64).endswith("SDPABackend")


@pytest.mark.parametrize(
    ("devices", "nodes"), [("0", "0"), (0, "0"), ("0,1", "0"), ("1", None), ("7,8", None), (None, None)]
)
def test_devices_that_name_no_memory_node_do_not_restrict_a_stage(
    devices: str | int | None, nodes: str | None, platform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = platform.device_control_env_var
    monkeypatch.setenv(variable, "before")
    monkeypatch.setattr("vllm_omni_audio_perf.platforms.cpu.get_memory_affinity", lambda: [0])
    platform.set_device_control_env_var(devices)
    assert os.environ.get(variable) == nodes


@pytest.mark.parametrize("stage", ["ar", "generation"])
def test_one_process_a_stage_unless_the_user_says_otherwise(
    stage: str, platform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_stage = getattr(platform, f"get_omni_{stage}_worker_cls")
    variable = "VLLM_ENABLE_V1_MULTIPROCESSING"
    monkeypatch.setenv(variable, "1")
    set_up_stage()
    assert os.environ[variable] == "1"
    monkeypatch.delenv(variable)
    set_up_stage()
    assert os.environ[variable] == "0"


def test_nothing_is_capturing_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", torch.cuda.is_current_stream_capturing)
    compat.answer_capture_query_without_cuda()
    assert torch.cuda.is_current_stream_capturing() is False


@pytest.mark.parametrize(
    ("given", "fraction", "expected"), [(None, 0.9, 4 << 30), (None, 1e-6, None), (12345, 0.9, 12345)]
)
def test_a_stage_takes_no_more_than_4_gib_for_its_cache_unless_told(
    given: int | None, fraction: float, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage config for GPUs asks for most of a card, for each stage."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vllm_omni_audio_perf.platforms.cpu_worker import CpuARWorker

    monkeypatch.setattr(CPUWorker, "__init__", lambda self, config, *args, **kwargs: None)
    cache = SimpleNamespace(kv_cache_memory_bytes=given, gpu_memory_utilization=fraction)
    CpuARWorker(SimpleNamespace(cache_config=cache))
    expected = int(psutil.virtual_memory().total * fraction) if expected is None else expected
    assert cache.kv_cache_memory_bytes == expected
