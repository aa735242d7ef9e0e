# SPDX-License-Identifier: Apache-2.0
"""Settings of the whole test run."""

import os
from pathlib import Path

import pytest

# One thread, set before torch is imported: on a shared machine two threads that wait for each other at every small
# operation are many times slower than one, and one thread makes results repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def qwen2_5_omni_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated Qwen2.5-Omni checkpoint. Read only: tests share it."""
    from vllm_omni_audio_perf.testing.qwen2_5_omni_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "qwen2_5_omni")


@pytest.fixture(scope="session")
def mimo_audio_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated MiMo-Audio checkpoint, the tokenizer in its folder `audio_tokenizer`. Read only: tests share it."""
    from vllm_omni_audio_perf.testing.mimo_audio_checkpoint import make_checkpoint

    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "mimo_audio")
