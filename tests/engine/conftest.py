# SPDX-License-Identifier: Apache-2.0
"""Runs of the real engine, each started once a test run."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_runs import QUERY_TYPES, Run, run_example
from serving import CODES_A_STEP, Server

from vllm_omni_audio_perf.stage_configs_index import stage_config_path

SELECTION = "model_arch: AudioPerfQwen2_5OmniForConditionalGeneration"


@pytest.fixture(scope="session")
def shipped_stage_config() -> str:
    return stage_config_path("qwen2_5_omni").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory, shipped_stage_config: str, qwen2_5_omni_checkpoint: Path) -> Run:
    """One request of every query type with our stages: the shipped stage config, but with the noise of stock."""
    assert shipped_stage_config.count("noise: request ") == 1
    with_stage_noise = shipped_stage_config.replace("noise: request ", "noise: stage ")
    folder = tmp_path_factory.mktemp("engine") / "ours"
    return run_example(folder, with_stage_noise, qwen2_5_omni_checkpoint, "--query-type", ",".join(QUERY_TYPES))


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory, shipped_stage_config: str, qwen2_5_omni_checkpoint: Path) -> Run:
    """The same requests with the stock stages: the shipped stage config less the lines that select ours."""
    lines = shipped_stage_config.splitlines(keepends=True)
    kept = [line for line in lines if line.strip() != SELECTION]
    assert len(kept) == len(lines) - 2
    folder = tmp_path_factory.mktemp("engine") / "stock"
    return run_example(folder, "".join(kept), qwen2_5_omni_checkpoint, "--query-type", ",".join(QUERY_TYPES))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, qwen2_5_omni_checkpoint: Path) -> Iterator[Server]:
    """`vllm-omni serve` with the stage config for many requests at a time.

    Code2wav takes so few codes in a step that it gets some requests in two parts.
    """
    folder = tmp_path_factory.mktemp("server")
    config = folder / "stage_config.yaml"
    shipped = stage_config_path("qwen2_5_omni_high_throughput")
    config.write_text(
        f"base_config: {shipped}\nstages:\n  - stage_id: 2\n    max_num_batched_tokens: {CODES_A_STEP}\n",
        encoding="utf-8",
    )
    server = Server(folder, qwen2_5_omni_checkpoint, config)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        print(server.log[-30_000:])  # shown by pytest when a test fails


@pytest.fixture(scope="session")
def starting_mimo_audio_server(
    tmp_path_factory: pytest.TempPathFactory, mimo_audio_checkpoint: Path
) -> Iterator[Server]:
    """`mimo_audio_server`, not waited for: what else starts an engine does it at the same time."""
    folder = tmp_path_factory.mktemp("mimo_audio_server")
    server = Server(folder, mimo_audio_checkpoint, stage_config_path("mimo_audio_low_latency"))
    try:
        yield server
    finally:
        server.kill()
        print(server.log[-30_000:])  # shown by pytest when a test fails


@pytest.fixture(scope="session")
def mimo_audio_server(starting_mimo_audio_server: Server) -> Server:
    """`vllm-omni serve` with MiMo-Audio's shipped stage config of short chunks, four requests at a time."""
    starting_mimo_audio_server.start()
    return starting_mimo_audio_server
