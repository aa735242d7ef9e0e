# SPDX-License-Identifier: Apache-2.0
"""Runs of the real engine, each started once a test run."""

from pathlib import Path

import pytest
from engine_runs import Run, run_example

from vllm_omni_audio_perf.stage_configs_index import stage_config_path

SELECTION = "model_arch: AudioPerfQwen2_5OmniForConditionalGeneration"


@pytest.fixture(scope="session")
def shipped_stage_config() -> str:
    return stage_config_path("qwen2_5_omni").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory, shipped_stage_config: str, qwen2_5_omni_checkpoint: Path) -> Run:
    """The pipeline with our stage 2: the shipped stage config."""
    return run_example(tmp_path_factory.mktemp("engine") / "ours", shipped_stage_config, qwen2_5_omni_checkpoint)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory, shipped_stage_config: str, qwen2_5_omni_checkpoint: Path) -> Run:
    """The pipeline with the stock stage 2: the shipped stage config less the line that selects ours."""
    lines = shipped_stage_config.splitlines(keepends=True)
    kept = [line for line in lines if line.strip() != SELECTION]
    assert len(kept) == len(lines) - 1
    return run_example(tmp_path_factory.mktemp("engine") / "stock", "".join(kept), qwen2_5_omni_checkpoint)
