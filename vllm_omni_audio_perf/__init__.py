# SPDX-License-Identifier: Apache-2.0
"""Fast, exact code-to-waveform stages for vLLM-Omni, as an out-of-tree plugin.

Importing this package loads neither torch nor vLLM nor vLLM-Omni.
"""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__", "register"]

try:
    __version__ = version("vllm-omni-audio-perf")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "unknown"


def register() -> None:
    """Register the plugin's architectures with vLLM and vLLM-Omni.

    vLLM calls this in every process through the `vllm.general_plugins` entry point. Call it yourself only where
    something must be registered earlier than that. Calling it more than once is harmless.
    """
    from vllm_omni_audio_perf.plugin import register as register_architectures

    register_architectures()
