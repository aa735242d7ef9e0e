# SPDX-License-Identifier: Apache-2.0
"""Every shipped stage config, through vLLM-Omni's own loader and merged with its pipeline."""

import dataclasses
import re
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from vllm_omni.config import stage_config as upstream
from vllm_omni.engine.stage_init_utils import split_devices_for_replicas
from vllm_omni.model_executor.models.mimo_audio.pipeline import MIMO_AUDIO_PIPELINE
from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import QWEN2_5_OMNI_PIPELINE

from vllm_omni_audio_perf.architectures import MIMO_AUDIO, QWEN2_5_OMNI
from vllm_omni_audio_perf.mimo_audio.stage_inputs import asks_for_ours
from vllm_omni_audio_perf.mimo_audio.streaming import StreamSettings, check_left_context
from vllm_omni_audio_perf.options import MiMoAudioOptions, Token2WavOptions
from vllm_omni_audio_perf.stage_configs_index import list_stage_configs, stage_config_path

QWEN2_5_OMNI_CONFIGS = [name for name, _ in list_stage_configs() if name.startswith("qwen2_5_omni")]
MIMO_AUDIO_CONFIGS = [name for name, _ in list_stage_configs() if name.startswith("mimo_audio")]
MAX_MODEL_LEN = 32_768  # of Qwen2.5-Omni-7B
SECONDS_A_CODE = 0.02
FRAMES_A_CODE = 2


def merged(name: str, monkeypatch: pytest.MonkeyPatch, *, gpu: bool) -> list[Any]:
    """The stages as the engine gets them, on a GPU or on CPU."""
    deploy = upstream.load_deploy_config(stage_config_path(name))
    if gpu:
        monkeypatch.setattr(upstream, "_apply_platform_overrides", lambda deploy: deploy)
    pipeline = MIMO_AUDIO_PIPELINE if name in MIMO_AUDIO_CONFIGS else QWEN2_5_OMNI_PIPELINE
    return upstream.merge_pipeline_deploy(pipeline, deploy)


def test_every_shipped_stage_config_is_tested() -> None:
    assert [name for name, _ in list_stage_configs()] == MIMO_AUDIO_CONFIGS + QWEN2_5_OMNI_CONFIGS
    assert (len(QWEN2_5_OMNI_CONFIGS), len(MIMO_AUDIO_CONFIGS)) == (4, 3)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("name", QWEN2_5_OMNI_CONFIGS)
def test_selects_our_stages_with_valid_options(name: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    thinker, talker, code2wav = merged(name, monkeypatch, gpu=gpu)
    assert thinker.yaml_engine_args["model_arch"] == QWEN2_5_OMNI_PIPELINE.model_arch
    assert talker.yaml_engine_args["model_arch"] == QWEN2_5_OMNI
    assert code2wav.yaml_engine_args["model_arch"] == QWEN2_5_OMNI
    section = code2wav.yaml_engine_args["additional_config"]["audio_perf"]
    options = Token2WavOptions.from_additional_config({"audio_perf": section})
    assert dataclasses.asdict(options) == section  # each option stands there, for people to find
    for stage in (thinker, talker):
        assert "additional_config" not in stage.yaml_engine_args
    assert talker.yaml_extras["default_sampling_params"]["repetition_penalty"] > 1  # else upstream's talker dies
    assert not any(stage.yaml_engine_args.get("async_chunk") for stage in (thinker, talker, code2wav))


@pytest.mark.parametrize("name", QWEN2_5_OMNI_CONFIGS)
def test_states_the_longest_audio(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, talker, code2wav = merged(name, monkeypatch, gpu=True)
    max_mel_frames = code2wav.yaml_engine_args["additional_config"]["audio_perf"]["max_mel_frames"]
    limits = {
        "talker": talker.yaml_extras["default_sampling_params"]["max_tokens"],
        "cap": max_mel_frames // FRAMES_A_CODE,
        "engine": min(code2wav.yaml_engine_args["max_num_batched_tokens"], MAX_MODEL_LEN),
    }
    text = re.sub(r"\n#\s*", " ", stage_config_path(name).read_text(encoding="utf-8"))
    seconds = {limit: codes * SECONDS_A_CODE for limit, codes in limits.items()}
    assert f"Longest audio: {min(seconds.values()):.2f} s" in text
    assert f"it is {seconds['cap']:.0f} s, which is max_mel_frames" in text
    assert f"allow {seconds['engine']:.0f} s" in text


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("name", QWEN2_5_OMNI_CONFIGS)
def test_devices(name: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas fit the devices named, and the shares of a card stay below all of it."""
    share: dict[str, float] = {}
    for stage in merged(name, monkeypatch, gpu=gpu):
        replicas = stage.yaml_runtime["num_replicas"]
        devices = split_devices_for_replicas(stage.yaml_runtime["devices"], replicas, 1, stage.stage_id)
        assert len(devices) == replicas
        for device in devices:
            share[device] = share.get(device, 0) + stage.yaml_engine_args["gpu_memory_utilization"]
    assert all(total < 0.96 for total in share.values()), share
    if gpu:
        assert len(share) == (1 if name.endswith("single_gpu") else 2)
    else:
        assert max(share.values()) == 0.1  # stages on devices of their own start at the same time


def test_high_throughput_is_the_same_but_for_requests_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    several, single = (merged(name, monkeypatch, gpu=True) for name in ("qwen2_5_omni_high_throughput", "qwen2_5_omni"))
    for stage, same in zip(several, single, strict=True):
        assert stage.yaml_engine_args.pop("max_num_seqs") == 8
        assert same.yaml_engine_args.pop("max_num_seqs") == 1
        assert stage.yaml_engine_args == same.yaml_engine_args
        assert stage.yaml_extras == same.yaml_extras


def test_replicas_draw_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    code2wav = merged("qwen2_5_omni_replicas", monkeypatch, gpu=True)[2]
    assert code2wav.yaml_runtime["num_replicas"] == 2
    assert code2wav.yaml_extras["default_sampling_params"]["seed"] is None
    assert merged("qwen2_5_omni", monkeypatch, gpu=True)[2].yaml_extras["default_sampling_params"]["seed"] == 42


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("name", MIMO_AUDIO_CONFIGS)
def test_mimo_audio_selects_our_stage_with_valid_options(name: str, gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    talker, code2wav = merged(name, monkeypatch, gpu=gpu)
    assert talker.yaml_engine_args["model_arch"] == MIMO_AUDIO_PIPELINE.model_arch
    assert code2wav.yaml_engine_args["model_arch"] == MIMO_AUDIO
    section = code2wav.yaml_engine_args["additional_config"]["audio_perf"]
    options = MiMoAudioOptions.from_additional_config({"audio_perf": section})
    assert dataclasses.asdict(options) == section  # each option stands there, for people to find
    assert "additional_config" not in talker.yaml_engine_args
    streamed = name != "mimo_audio_high_throughput"
    assert [bool(stage.yaml_engine_args.get("async_chunk")) for stage in (talker, code2wav)] == [streamed] * 2
    shares = [stage.yaml_engine_args["gpu_memory_utilization"] for stage in (talker, code2wav)]
    assert sum(shares) < 0.96
    if not gpu:
        assert shares == [0.1, 0.1]


@pytest.mark.parametrize("name", MIMO_AUDIO_CONFIGS)
def test_mimo_audio_is_cut_with_enough_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of a step fit into it, no layer of the vocoder sees less than it looks at, and no warning is given."""
    _, code2wav = merged(name, monkeypatch, gpu=True)
    connector = upstream.load_deploy_config(stage_config_path(name)).connectors["connector_of_shared_memory"]
    assert asks_for_ours(connector["extra"])
    settings = StreamSettings.from_connector(connector["extra"])
    assert check_left_context(settings, left_window=40, right_window=10, layers=16, frames_per_group=16) is None
    ids = (settings.left_context + settings.chunk + settings.right_context) * 36
    engine = code2wav.yaml_engine_args
    if engine.get("async_chunk"):
        assert engine["max_num_batched_tokens"] >= engine["max_num_seqs"] * ids
        assert engine["max_model_len"] >= ids
    assert settings.boundary_after(0) == 3  # the first audio does not wait for a whole chunk
    assert (settings.chunk == 3) == (name == "mimo_audio_low_latency")


@pytest.mark.parametrize("name", MIMO_AUDIO_CONFIGS)
def test_mimo_audio_states_the_longest_audio(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    talker, _ = merged(name, monkeypatch, gpu=True)
    text = re.sub(r"\n#\s*", " ", stage_config_path(name).read_text(encoding="utf-8"))
    assert f"Longest audio: {talker.yaml_engine_args['max_model_len'] * 0.16:.2f} s" in text
