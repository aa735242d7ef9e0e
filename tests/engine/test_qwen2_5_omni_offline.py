# SPDX-License-Identifier: Apache-2.0
"""The whole offline pipeline, with our code2wav stage and with the stock one."""

import re
from pathlib import Path

import numpy as np
import pytest
from engine_runs import run_example

pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

OUR_STAGE = re.compile(r"stage2.*code2wav stage: AudioPerfQwen2_5Omni\b")


def test_example_succeeds(ours) -> None:
    assert ours.returncode == 0
    assert len(ours.texts) == len(ours.waveforms) == 2
    for text in ours.texts:
        assert text.strip()
        assert text.rstrip("\n").isprintable()


def test_audio_is_24_khz_at_speech_level(ours) -> None:
    for waveform, sample_rate in ours.waveforms:
        assert sample_rate == 24_000
        rms = 20 * np.log10(np.sqrt(np.mean(waveform**2)))
        assert -40 < rms < -6
        assert np.abs(waveform).max() < 1


def test_example_ends_with_a_table(ours) -> None:
    table = ours.log[ours.log.rindex("| text") :]
    for column in ("WAV", "audio s", "thinker s", "talker s", "code2wav s", "RTF"):
        assert column in table.splitlines()[0]
    for waveform, _ in ours.waveforms:
        assert f"{len(waveform) / 24_000:.2f}" in table


def test_our_stage_serves_only_where_it_is_selected(ours, stock) -> None:
    """The plugin is registered in the stage's own process, or the stage could not have been built there."""
    assert OUR_STAGE.search(ours.log)
    assert "AudioPerf" not in stock.log


def test_stock_stage_works_with_the_rest_of_our_stage_config(stock) -> None:
    assert stock.returncode == 0
    assert len(stock.waveforms) == 2


def test_same_text_codes_and_duration_as_stock(ours, stock) -> None:
    assert ours.texts == stock.texts
    assert len(ours.codes) == 2
    assert ours.codes == stock.codes
    durations = [len(waveform) for waveform, _ in ours.waveforms]
    assert durations == [len(waveform) for waveform, _ in stock.waveforms]
    assert sorted(durations) == sorted(480 * len(codes) for codes in ours.codes)


def test_no_process_is_left(ours, stock) -> None:
    assert not ours.left_processes
    assert not stock.left_processes


@pytest.mark.slow
def test_upstreams_own_deployment_runs_on_the_cpu_platform(tmp_path: Path, qwen2_5_omni_checkpoint: Path) -> None:
    import vllm_omni

    deployment = Path(vllm_omni.__file__).parent / "deploy/qwen2_5_omni.yaml"
    run = run_example(tmp_path / "upstream", deployment.read_text(encoding="utf-8"), qwen2_5_omni_checkpoint)
    assert run.returncode == 0
    assert "AudioPerf" not in run.log
    assert [len(waveform) for waveform, _ in run.waveforms] == [480 * len(codes) for codes in run.codes]


@pytest.mark.slow
def test_a_misspelt_option_ends_the_start_with_one_clear_error(
    tmp_path: Path, shipped_stage_config: str, qwen2_5_omni_checkpoint: Path
) -> None:
    misspelt = shipped_stage_config.replace("max_mel_frames:", "max_mel_frame:")
    run = run_example(tmp_path / "misspelt", misspelt, qwen2_5_omni_checkpoint)
    assert run.returncode != 0
    assert "Unknown option audio_perf.max_mel_frame = 30000; allowed: max_mel_frames" in run.log
    assert "StageEngineCoreProc" not in run.log  # no engine was started
    assert not run.left_processes
