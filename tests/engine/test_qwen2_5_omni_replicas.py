# SPDX-License-Identifier: Apache-2.0
"""The shipped stage config with two replicas of code2wav, which get requests in turn."""

from pathlib import Path

import numpy as np
import pytest
from serving import Server

from vllm_omni_audio_perf.stage_configs_index import stage_config_path

pytest.importorskip("vllm_omni")
pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_each_replica_draws_noise_of_its_own_unless_the_client_gives_a_seed(
    tmp_path: Path, qwen2_5_omni_checkpoint: Path
) -> None:
    server = Server(tmp_path, qwen2_5_omni_checkpoint, stage_config_path("qwen2_5_omni_replicas"))
    try:
        server.start()
        unseeded = [server.chat() for _ in range(4)]
        seeded = [server.chat(seed=7) for _ in range(4)]
        log = server.log
    finally:
        server.kill()
        print(server.log[-20_000:])
    assert {answer.status for answer in unseeded + seeded} == {200}
    for replica in (0, 1):
        assert f"stage2_replica{replica}" in log
    waveforms = [answer.waveform for answer in unseeded]
    for index, waveform in enumerate(waveforms):
        assert not any(np.array_equal(waveform, other) for other in waveforms[index + 1 :])
    assert all(np.array_equal(answer.waveform, seeded[0].waveform) for answer in seeded)
