# SPDX-License-Identifier: Apache-2.0
"""Lets `python -m vllm_omni_audio_perf.cli` stand in for `vllm-omni-audio-perf`."""

import sys

from vllm_omni_audio_perf.cli import main

if __name__ == "__main__":
    sys.exit(main())
