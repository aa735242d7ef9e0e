# SPDX-License-Identifier: Apache-2.0
"""Everything that reaches into vLLM, vLLM-Omni or torch beyond their registries. Nothing else in the package does.

Each function says why it is needed and for which version it was written. All of them may be called repeatedly.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

_WRAPPERS = "_audio_perf_wrappers"


def log_through_vllm(package: str) -> None:
    """Give a package's log lines vLLM's handlers and level, as vLLM-Omni 0.30.0 does with its own."""
    logging.getLogger(package).parent = logging.getLogger("vllm")


def check_configuration(architecture: str, check: str) -> None:
    """Have vLLM run a check of ours on the configuration of each stage of one of our architectures.

    vLLM 0.30.0 has the hook (``VerifyAndUpdateConfig``) but a table without a function to register in.

    Args:
        architecture: one of ours.
        check: "module:Class" of a ``VerifyAndUpdateConfig``.
    """
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.utils.import_utils import resolve_obj_by_qualname

    MODELS_CONFIG_MAP[architecture] = resolve_obj_by_qualname(check.replace(":", "."))


def wrap_qwen2_5_omni_stage_inputs(*, talker: Callable[[Any], Any], code2wav: Callable[[Any], Any]) -> None:
    """Wrap the functions that make the inputs of Qwen2.5-Omni's talker and code2wav stages.

    vLLM-Omni 0.30.0 takes them from its own frozen pipeline, which a stage config cannot change, by the names below,
    once the plugins are loaded. A pipeline of ours would do, too, but ``Omni(...)`` looks for pipelines before that.
    """
    processors = importlib.import_module("vllm_omni.model_executor.stage_input_processors.qwen2_5_omni")
    _wrap(processors, "thinker2talker_token_only", talker)
    _wrap(processors, "talker2code2wav_token_only", code2wav)


def wrap_mimo_audio_stage_inputs(
    *, chunk: Callable[[Any], Any], full: Callable[[Any], Any], token_only: Callable[[Any], Any]
) -> None:
    """Wrap the functions that hand MiMo-Audio's codes from the talker to code2wav.

    For the same reason as those of Qwen2.5-Omni (vLLM-Omni 0.30.0).
    """
    processors = importlib.import_module("vllm_omni.model_executor.stage_input_processors.mimo_audio")
    _wrap(processors, "llm2code2wav_async_chunk", chunk)
    _wrap(processors, "llm2code2wav_full_payload", full)
    _wrap(processors, "llm2code2wav_token_only", token_only)


def wrap_where_requests_come_in(
    *, generate: Callable[[Any], Any], preprocess_chat: Callable[[Any], Any] | None = None
) -> None:
    """Wrap ``Omni.generate`` and the chat server's ``_preprocess_chat``, where this process has them.

    vLLM-Omni 0.30.0 reads neither ``audio.voice`` nor, past the thinker, ``seed``, knows no list of Qwen2.5-Omni's
    voices, and has no hook for reading a request. The modules are loaded wherever they are used, because that is what
    starts the stages; other processes need not load them.
    """
    for module, owner, method, wrapper in (
        ("vllm_omni.entrypoints.omni", "Omni", "generate", generate),
        ("vllm_omni.entrypoints.openai.serving_chat", "OmniOpenAIServingChat", "_preprocess_chat", preprocess_chat),
    ):
        if module in sys.modules and wrapper is not None:
            _wrap(getattr(sys.modules[module], owner), method, wrapper)


def fail_requests_one_by_one(vllm_config: Any, scheduler: str) -> None:
    """Give a generation stage a scheduler of ours in place of vLLM-Omni's.

    vLLM-Omni 0.30.0 takes the scheduler from the frozen pipeline. One that somebody else put there is left alone.

    Args:
        vllm_config: of the stage.
        scheduler: qualified name of a subclass of ``OmniGenerationScheduler``.
    """
    upstream = "vllm_omni.core.sched.omni_generation_scheduler.OmniGenerationScheduler"
    config = vllm_config.scheduler_config
    if config.scheduler_cls == upstream:
        config.scheduler_cls = scheduler


def _wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace an attribute by what `wrapper` makes of it, once for each wrapper."""
    current = getattr(owner, name)
    wrappers = getattr(current, _WRAPPERS, ())
    if wrapper not in wrappers:
        replacement = wrapper(current)
        setattr(replacement, _WRAPPERS, (*wrappers, wrapper))
        setattr(owner, name, replacement)


def prefer_one_process_a_stage() -> None:
    """Run a stage's engine core and worker in one process, unless the user's environment says otherwise.

    Each process imports vLLM and torch again, which takes most of the start-up time and of a small model's memory. vLLM
    0.30.0 reads the variable when it puts a stage's configuration together in the main process, too early for the
    ``env:`` of a stage config.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def answer_capture_query_without_cuda() -> None:
    """Make ``torch.cuda.is_current_stream_capturing`` answer False on a machine without CUDA.

    A CUDA build of torch on a machine without a driver raises there, and stock MiMo-Audio asks on every forward
    (vLLM-Omni 0.30.0). Nothing can be capturing where there is no CUDA, so False is the true answer. Does nothing where
    CUDA is available.
    """
    import torch

    if not torch.cuda.is_available():
        torch.cuda.is_current_stream_capturing = _never_capturing


def _never_capturing() -> bool:
    return False


def end_allocation_to_pool(device: int, handle: Any) -> None:
    """Tell torch's CUDA allocator that a capture no longer allocates from a graph pool.

    torch 2.13 has no public function for a capture that failed.

    Args:
        device: index of the CUDA device.
        handle: of the pool, from ``torch.cuda.graph_pool_handle``.

    Raises:
        RuntimeError: if none does.
    """
    import torch

    torch._C._cuda_endAllocateToPool(device, handle)


def release_pool(device: int, handle: Any) -> None:
    """Give back a failed capture's share of a graph pool, for the same reason and with the same arguments."""
    import torch

    torch._C._cuda_releasePool(device, handle)
