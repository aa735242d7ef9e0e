# SPDX-License-Identifier: Apache-2.0
"""Builds upstream's own modules outside an engine, as the reference that ours are compared with.

vLLM-Omni's Token2Wav needs a vLLM configuration and an initialised process group around it; transformers' copy needs
neither, but computes another rotary table.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BIGVGAN_GAIN = 0.75
"""Extra gain on the vocoder's weights: with it the waveform stays at speech level, where nothing clips, and differs by
tens of percent from that of another mel. Its biases are zero, which would drown the mel otherwise."""


def randomize(model: nn.Module) -> None:
    """Draw the weights of a Token2Wav so that every part of it matters and activations stay of order one.

    Args:
        model: changed in place, the same way each time. The parameters of the activations keep their initial values.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                scale = parameter[0].numel() ** -0.5
                if "bigvgan" in name:
                    scale *= BIGVGAN_GAIN
            elif name.endswith("bias"):  # vLLM's linear layers leave theirs uninitialised
                scale = 0.0 if "bigvgan" in name else 0.1
            else:
                continue
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def build_vllm_omni_token2wav(config: Any, prepare: Callable[[Any], None] | None = None) -> nn.Module:
    """vLLM-Omni's ``Qwen2_5OmniToken2WavModel`` with random weights, float32, on the CPU.

    Args:
        config: a ``Qwen2_5OmniToken2WavConfig``.
        prepare: called with the model before it gets its weights.

    Raises:
        ImportError: where vLLM-Omni is not installed.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni_token2wav import Qwen2_5OmniToken2WavModel

    with set_current_vllm_config(VllmConfig()):
        initialize_single_process_group()
        model = Qwen2_5OmniToken2WavModel(config).eval()
    if prepare is not None:
        prepare(model)
    randomize(model)
    for module in model.modules():
        quant_method = getattr(module, "quant_method", None)
        if quant_method is not None:  # what vLLM's loader does after the last weight; its CPU linear layers need it
            quant_method.process_weights_after_loading(module)
    return model


def build_transformers_token2wav(config: Any) -> nn.Module:
    """transformers' ``Qwen2_5OmniToken2WavModel`` with random weights and vLLM-Omni's rotary table.

    The table of transformers 5.14 repeats the angles half by half although its rotation pairs neighbouring channels;
    vLLM-Omni (and transformers 4.57) repeat them pair by pair.
    """
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

    model = Qwen2_5OmniToken2WavModel(config).eval()
    randomize(model)
    rotary: Any = model.code2wav_dit_model.rotary_embed

    def pairwise_table(hidden: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        positions = torch.arange(hidden.shape[1], device=rotary.inv_freq.device)
        angles = torch.outer(positions.float(), rotary.inv_freq.float())
        angles = angles.repeat_interleave(2, dim=-1).expand(hidden.shape[0], -1, -1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)

    rotary.forward = pairwise_table
    return model


def initialize_single_process_group() -> None:
    """Initialise vLLM's process groups for one process, unless they are: its layers ask them for their rank."""
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized

    if model_parallel_is_initialized():
        return
    rendezvous = Path(tempfile.mkdtemp(prefix="audio-perf-")) / "rendezvous"
    init_distributed_environment(1, 0, f"file://{rendezvous}", local_rank=0, backend="gloo")
    initialize_model_parallel()
