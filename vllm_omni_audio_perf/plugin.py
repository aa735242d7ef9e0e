# SPDX-License-Identifier: Apache-2.0
"""Registration with vLLM and vLLM-Omni.

vLLM calls `register` (entry-point group ``vllm.general_plugins``) in every process: the main one, each stage's engine
core and each worker. It may run several times in one process.
"""

import logging

from vllm_omni_audio_perf import compat
from vllm_omni_audio_perf.architectures import MIMO_AUDIO, QWEN2_5_OMNI

logger = logging.getLogger(__name__)

_PACKAGE = "vllm_omni_audio_perf"

# (architecture for `model_arch:` in a stage config, "module:Class" of the model, "module:Class" of the check of its
# configuration). The models stay lazy until a stage asks for them.
ARCHITECTURES: tuple[tuple[str, str, str], ...] = (
    (
        QWEN2_5_OMNI,
        f"{_PACKAGE}.qwen2_5_omni.stage:AudioPerfQwen2_5Omni",
        f"{_PACKAGE}.qwen2_5_omni.stage_check:StageCheck",
    ),
    (
        MIMO_AUDIO,
        f"{_PACKAGE}.mimo_audio.stage:AudioPerfMiMoAudio",
        f"{_PACKAGE}.mimo_audio.stage_check:StageCheck",
    ),
)


def register() -> None:
    """Make every architecture of `ARCHITECTURES` known to vLLM and vLLM-Omni. Selects none of them.

    Both registries need each name: a plain vLLM ``ModelConfig`` validates the architecture first, and vLLM-Omni builds
    the stage from its own registry. The functions that make the inputs of the stages are wrapped, too; for a stage that
    is not ours, and for a connector that does not ask for ours, the result is upstream's.

    Raises:
        ImportError: if vLLM or vLLM-Omni cannot be imported.
    """
    try:
        compat.log_through_vllm(_PACKAGE)
        from vllm import ModelRegistry
        from vllm_omni.model_executor.models import OmniModelRegistry

        for architecture, model, check in ARCHITECTURES:
            for registry in (ModelRegistry, OmniModelRegistry):
                if architecture not in registry.get_supported_archs():
                    registry.register_model(architecture, model)
            compat.check_configuration(architecture, check)
        from vllm_omni_audio_perf.qwen2_5_omni import stage_inputs

        compat.wrap_qwen2_5_omni_stage_inputs(talker=stage_inputs.talker_inputs, code2wav=stage_inputs.code2wav_inputs)
        from vllm_omni_audio_perf.mimo_audio import stage_inputs as mimo_audio

        compat.wrap_mimo_audio_stage_inputs(
            chunk=mimo_audio.chunk_payload, full=mimo_audio.full_payload, token_only=mimo_audio.token_only_inputs
        )
    except Exception:
        logger.exception("vllm-omni-audio-perf could not register its architectures")
        raise
