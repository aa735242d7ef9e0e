# SPDX-License-Identifier: Apache-2.0
"""The CPU platform that vLLM-Omni 0.30.0 does not bring: when it is offered, and under which name.

vLLM-Omni calls `cpu_platform_plugin` (entry-point group ``vllm_omni.platform_plugins``) while it is being imported,
so nothing here may import ``vllm_omni`` at module level.
"""

import logging
from importlib.metadata import EntryPoint, entry_points

PLATFORM_PLUGINS_GROUP = "vllm_omni.platform_plugins"
CPU_PLATFORM_PLUGIN = "audio_perf_cpu"
CPU_PLATFORM_CLASS = "vllm_omni_audio_perf.platforms.cpu.CpuOmniPlatform"

logger = logging.getLogger(__name__)


def cpu_platform_plugin() -> str | None:
    """Name the CPU platform class, or decline.

    Declines unless vLLM itself runs on CPU, and where another out-of-tree omni platform claims the machine:
    vLLM-Omni refuses to start with two of them. Its built-in platforms do not count, because none of them can drive a
    vLLM that was built for CPU, and vLLM-Omni prefers an out-of-tree platform over them.

    Returns:
        The qualified class name for vLLM-Omni to instantiate, or None.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    claimant = _other_claimant()
    if claimant is not None:
        logger.info("The omni platform plugin %r claims this machine; the CPU platform steps aside.", claimant)
        return None
    return CPU_PLATFORM_CLASS


def _other_claimant() -> str | None:
    """Name another out-of-tree omni platform plugin that is allowed by ``VLLM_PLUGINS`` and wants this machine."""
    import vllm.envs as envs

    allowed = envs.VLLM_PLUGINS
    for plugin in entry_points(group=PLATFORM_PLUGINS_GROUP):
        if plugin.name != CPU_PLATFORM_PLUGIN and (allowed is None or plugin.name in allowed) and _claims(plugin):
            return plugin.name
    return None


def _claims(plugin: EntryPoint) -> bool:
    try:
        return plugin.load()() is not None
    except Exception:  # a plugin that fails to detect claims nothing: vLLM-Omni reads it that way too
        logger.debug("Omni platform plugin %s failed during detection.", plugin.name, exc_info=True)
        return False
