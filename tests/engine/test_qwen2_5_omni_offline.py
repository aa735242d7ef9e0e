# SPDX-License-Identifier: Apache-2.0
"""The whole offline pipeline, with our stages and with the stock ones, for every kind of prompt."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from engine_runs import QUERY_TYPES, run_example, run_script

pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

OUR_STAGE = re.compile(r"stage2.*code2wav stage: AudioPerfQwen2_5Omni\b")


def test_example_succeeds(ours) -> None:
    assert ours.returncode == 0
    assert len(ours.texts) == len(ours.waveforms) == len(QUERY_TYPES)
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
    table = ours.log[ours.log.rindex("| WAV") :]
    for column in ("WAV", "audio s", "thinker s", "talker s", "code2wav s", "RTF", "query type"):
        assert column in table.splitlines()[0]
    for waveform, _ in ours.waveforms:
        assert f"{len(waveform) / 24_000:.2f}" in table
    for query_type in QUERY_TYPES:
        assert query_type in table


def test_our_stages_serve_only_where_they_are_selected(ours, stock) -> None:
    """The plugin is registered in the stage's own process, or the stage could not have been built there."""
    assert OUR_STAGE.search(ours.log)
    assert "AudioPerf" not in stock.log


def test_stock_stages_work_with_the_rest_of_our_stage_config(stock) -> None:
    assert stock.returncode == 0
    assert len(stock.waveforms) == len(QUERY_TYPES)


def test_same_text_codes_and_duration_as_stock(ours, stock) -> None:
    assert ours.texts == stock.texts
    assert len(ours.codes) == len(QUERY_TYPES)
    assert ours.codes == stock.codes
    durations = [len(waveform) for waveform, _ in ours.waveforms]
    assert durations == [len(waveform) for waveform, _ in stock.waveforms]
    assert sorted(durations) == sorted(480 * len(codes) for codes in ours.codes)


def test_same_sound_as_stock(ours, stock, record_property) -> None:
    """WAV files of 16 bits: a difference of one step is 3e-5."""
    for query_type, (actual, _), (expected, _) in zip(QUERY_TYPES, ours.waveforms, stock.waveforms, strict=True):
        difference = np.abs(actual - expected).max()
        correlation = np.corrcoef(actual, expected)[0, 1]
        record_property(query_type, f"max difference {difference:.1e}, correlation {correlation:.9f}")
        print(f"{query_type}: max difference {difference:.1e}, correlation {correlation:.9f}")
        assert correlation >= 0.9999
        assert difference <= 1e-4


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


@pytest.mark.slow
def test_bad_requests_of_an_offline_omni_leave_it_running(
    tmp_path: Path, shipped_stage_config: str, qwen2_5_omni_checkpoint: Path
) -> None:
    run = run_script(
        tmp_path / "failures",
        [Path(__file__).with_name("offline_failures.py"), qwen2_5_omni_checkpoint],
        shipped_stage_config,
        [tmp_path / "results.json"],
    )
    assert run.returncode == 0
    good, bad, unknown_voice, with_voice, with_seed, again = json.loads((tmp_path / "results.json").read_text())
    assert [len(waveform) > 0 for waveform in good] == [True, True]
    assert good[0] == good[1] == again[0] == again[1]
    assert bad == [[], []]
    assert "of 5 codes failed: code 8250 at position 0 of 5 is not in the codebook" in run.log
    assert unknown_voice == "prompt 1: There is no voice 'Nobody'; this checkpoint has: Chelsie, Ethan."
    for settings in (with_voice, with_seed):
        assert settings[0] == good[0]
        assert settings[1] != good[1]
    assert with_voice[1] != with_seed[1]
    assert not run.left_processes
