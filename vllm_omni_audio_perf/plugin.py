# SPDX-License-Identifier: Apache-2.0
"""Registration with vLLM and vLLM-Omni.

vLLM calls `register` (entry-point group ``vllm.general_plugins``) in every process: the main one, each stage's engine
core and each worker. It may run several times in one process.
"""

import logging

logger = logging.getLogger(__name__)

_PACKAGE = "vllm_omni_audio_perf"

# (architecture for `model_arch:` in a stage config, "module:Class"). The strings stay lazy until a stage asks for them.
ARCHITECTURES: tuple[tuple[str, str], ...] = (
    ("AudioPerfQwen2_5OmniForConditionalGeneration", f"{_PACKAGE}.qwen2_5_omni.stage:AudioPerfQwen2_5Omni"),
)


def register() -> None:
    """Make every architecture of `ARCHITECTURES` known to vLLM and vLLM-Omni. Selects none of them.

    Both registries need each name: a plain vLLM ``ModelConfig`` validates the architecture first, and vLLM-Omni builds
    the stage from its own registry.

    Raises:
        ImportError: if vLLM or vLLM-Omni cannot be imported.
    """
    _log_through_vllm()
    try:
        from vllm import ModelRegistry
        from vllm_omni.model_executor.models import OmniModelRegistry

        for registry in (ModelRegistry, OmniModelRegistry):
            registered = registry.get_supported_archs()
            for architecture, qualified_class in ARCHITECTURES:
                if architecture not in registered:
                    registry.register_model(architecture, qualified_class)
    except Exception:
        logger.exception("vllm-omni-audio-perf could not register its architectures")
        raise


def _log_through_vllm() -> None:
    """Give this package's log lines vLLM's handlers and level, as vLLM-Omni does with its own."""
    logging.getLogger(_PACKAGE).parent = logging.getLogger("vllm")
