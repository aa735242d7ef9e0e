# SPDX-License-Identifier: Apache-2.0
"""The code2wav stage as vLLM-Omni builds it: its own configuration and weight loader, without an engine around it."""

import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni")

OURS = "AudioPerfQwen2_5OmniForConditionalGeneration"
STOCK = "Qwen2_5OmniForConditionalGeneration"


def stage_config(model: Path, architecture: str = OURS, **settings: Any) -> Any:
    """``vllm_config`` of the code2wav stage, as the engine makes it for its process."""
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    import vllm_omni_audio_perf

    vllm_omni_audio_perf.register()
    arguments = OmniEngineArgs(
        model=str(model),
        model_stage=settings.pop("model_stage", "code2wav"),
        model_arch=architecture,
        worker_type="generation",
        hf_config_name="thinker_config",
        stage_id=2,
        enforce_eager=True,
        max_num_batched_tokens=32768,
        gpu_memory_utilization=0.1,
        **settings,
    )
    return arguments.create_engine_config()


def build(config: Any) -> Any:
    """The stage's model with its weights loaded, in the dtype context in which vLLM's loader builds it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    from vllm_omni_audio_perf.testing.upstream import initialize_single_process_group

    with set_current_vllm_config(config):
        initialize_single_process_group()
        return get_model(vllm_config=config)


def run(stage: Any, *requests: list[int], padding: int = 0, **kwargs: Any) -> list[torch.Tensor]:
    """Waveforms of one step with the given requests."""
    ids = torch.tensor([code for codes in requests for code in codes] + [0] * padding, dtype=torch.int32)
    torch.manual_seed(5)
    with torch.inference_mode():
        out = stage(ids, torch.zeros_like(ids), seq_token_counts=[len(codes) for codes in requests], **kwargs)
    return out.multimodal_outputs["model_outputs"]


def dtypes(stage: Any) -> set[torch.dtype]:
    """Dtypes of everything the Token2Wav holds, but for weights that vLLM packed away for its CPU kernels."""
    tensors = [*stage.token2wav.parameters(), *stage.token2wav.buffers()]
    return {tensor.dtype for tensor in tensors if tensor.numel()}


@pytest.fixture(scope="module")
def stage(qwen2_5_omni_checkpoint: Path) -> Any:
    return build(stage_config(qwen2_5_omni_checkpoint, dtype="bfloat16"))


@pytest.fixture
def copy_without(qwen2_5_omni_checkpoint: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of the checkpoint that lacks one file."""

    def make(name: str) -> Path:
        return shutil.copytree(
            qwen2_5_omni_checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns(name), copy_function=os.symlink
        )

    return make


def test_is_float32_in_a_bfloat16_pipeline(stage: Any) -> None:
    assert stage.vllm_config.model_config.dtype == torch.bfloat16
    assert dtypes(stage) == {torch.float32}


def test_float32_does_not_depend_on_the_checkpoints_config(qwen2_5_omni_checkpoint: Path) -> None:
    config = stage_config(qwen2_5_omni_checkpoint, dtype="bfloat16")
    token2wav = config.model_config.hf_config.token2wav_config
    for part in (token2wav, token2wav.dit_config, token2wav.bigvgan_config):
        part.dtype = None
    assert dtypes(build(config)) == {torch.float32}


def test_loads_every_weight_of_the_checkpoint(stage: Any, qwen2_5_omni_checkpoint: Path) -> None:
    from safetensors import safe_open

    loaded = dict(stage.token2wav.token2wav.state_dict())
    for index, block in enumerate(stage.token2wav.token2wav.code2wav_dit_model.transformer_blocks):
        # vLLM packs this weight away on CPU, so take it from what it does to the unit vectors.
        projection = block.attn.qkv_proj
        with torch.inference_mode():
            unit = torch.eye(projection.input_size)
            weight = (projection(unit) - projection(torch.zeros_like(unit))).T
        loaded[f"code2wav_dit_model.transformer_blocks.{index}.attn.qkv_proj.weight"] = weight
    seen = 0
    for file in qwen2_5_omni_checkpoint.glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                if not name.startswith("token2wav."):
                    continue
                seen += 1
                own = name.removeprefix("token2wav.")
                tensor = weights.get_tensor(name)
                for position, part in enumerate(("to_q", "to_k", "to_v")):
                    if f".{part}." in own:
                        fused = loaded[own.replace(part, "qkv_proj")]
                        torch.testing.assert_close(fused.chunk(3)[position], tensor, rtol=0, atol=1e-6)
                        break
                else:
                    assert torch.equal(loaded[own], tensor), name
    assert seen > 100


def test_reads_the_voices(stage: Any) -> None:
    assert list(stage._speakers) == ["Chelsie", "Ethan"]
    codes = list(range(30))
    (chelsie,), (ethan,) = run(stage, codes), run(stage, codes, voice_type="Ethan")
    assert not torch.equal(chelsie, ethan)
    assert torch.equal(chelsie, run(stage, codes, voice_type="Chelsie")[0])


def test_equals_the_stock_stage(stage: Any, qwen2_5_omni_checkpoint: Path) -> None:
    stock = build(stage_config(qwen2_5_omni_checkpoint, STOCK, dtype="bfloat16"))
    for count in (1, 13, 61):
        codes = list(range(100, 100 + count))
        ids = torch.tensor(codes)
        torch.manual_seed(5)
        with torch.inference_mode():
            theirs = stock(ids, torch.zeros_like(ids)).multimodal_outputs["model_outputs"]
        torch.manual_seed(5)
        torch.randn(1, 2 * count, 80)  # stock draws twice and uses the second
        ours = stage._token2wav.generate(ids, *stage._speakers["Chelsie"])
        assert ours.shape == theirs.shape == (480 * count,)
        assert (ours - theirs).norm() / theirs.norm() <= 1e-5


def test_several_requests_in_one_step_stay_apart(stage: Any) -> None:
    requests = [[1, 2, 3], [4] * 20, [], [5]]
    waveforms = run(stage, *requests, padding=7)
    assert [len(waveform) for waveform in waveforms] == [480 * len(codes) for codes in requests]


def test_strips_the_talkers_marks(stage: Any) -> None:
    assert [len(waveform) for waveform in run(stage, [8293, 1, 2, 8294], [8293, 8294])] == [960, 0]


@pytest.mark.parametrize("with_ids", [True, False])
def test_start_up_run_costs_one_evaluation(with_ids: bool, stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments that `GPUGenerationModelRunner._dummy_run` passes."""
    calls: list[int] = []
    dit = stage._token2wav.dit
    evaluate = dit.evaluate
    monkeypatch.setattr(dit, "evaluate", lambda mel, *rest: calls.append(mel.shape[1]) or evaluate(mel, *rest))
    with torch.inference_mode():
        out = stage(
            input_ids=torch.zeros(64, dtype=torch.int32) if with_ids else None,
            positions=torch.zeros(64),
            intermediate_tensors=None,
            inputs_embeds=torch.zeros(64, 128),
            runtime_additional_information=stage.get_dummy_runtime_additional_information(1),
            seq_token_counts=[64],
        )
    assert [waveform.shape for waveform in out.multimodal_outputs["model_outputs"]] == [(0,)]
    assert calls == [128]


def test_information_of_a_request_is_not_taken_for_the_start_up_run(stage: Any) -> None:
    for information in ([{}], [{"codes": {"audio": [0, 0]}, "generated_len": 0}], None):
        assert [len(waveform) for waveform in run(stage, [0, 0], runtime_additional_information=information)] == [960]


def test_the_runner_offers_the_mark_that_we_wait_for() -> None:
    """The name that upstream's runner looks for on the model."""
    from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner

    from vllm_omni_audio_perf.qwen2_5_omni.stage import AudioPerfQwen2_5Omni

    assert hasattr(AudioPerfQwen2_5Omni, "get_dummy_runtime_additional_information")
    source = inspect.getsource(GPUGenerationModelRunner._dummy_run)
    assert "self.model.get_dummy_runtime_additional_information(num_reqs)" in source


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What vLLM's logger and its children print: they do not propagate to the root logger."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO):
        yield caplog
    logger.removeHandler(caplog.handler)


def test_no_info_line_a_request(stage: Any, log: pytest.LogCaptureFixture) -> None:
    logging.getLogger("vllm_omni_audio_perf").info("seen")
    run(stage, [1, 2, 3])
    assert [record.message for record in log.records] == ["seen"]


def test_a_voice_that_is_not_there_is_said(stage: Any, log: pytest.LogCaptureFixture) -> None:
    assert torch.equal(run(stage, [1, 2], voice_type="Nobody")[0], run(stage, [1, 2])[0])
    assert ["There is no voice 'Nobody' (there are: Chelsie, Ethan)." in line.message for line in log.records] == [True]


def test_dummy_weights(qwen2_5_omni_checkpoint: Path, copy_without: Callable[[str], Path]) -> None:
    """`load_format: dummy` calls no `load_weights`; the stage must run all the same, with voices or without."""
    with_voices = build(stage_config(qwen2_5_omni_checkpoint, load_format="dummy"))
    assert list(with_voices._speakers) == ["Chelsie", "Ethan"]
    without = build(stage_config(copy_without("spk_dict.pt"), load_format="dummy"))
    for stage in (with_voices, without):
        assert [len(waveform) for waveform in run(stage, [1, 2, 3])] == [3 * 480]


def test_missing_voices_are_refused_at_start(copy_without: Callable[[str], Path]) -> None:
    with pytest.raises(FileNotFoundError, match=r"spk_dict\.pt is missing"):
        build(stage_config(copy_without("spk_dict.pt")))


def test_options_reach_the_stage(qwen2_5_omni_checkpoint: Path) -> None:
    config = stage_config(qwen2_5_omni_checkpoint, additional_config={"audio_perf": {"max_mel_frames": 20}})
    assert [len(waveform) for waveform in run(build(config), [1] * 30)] == [10 * 480]


def test_a_checkpoint_without_the_default_voice_is_refused_at_start(copy_without: Callable[[str], Path]) -> None:
    folder = copy_without("spk_dict.pt")
    torch.save({"Ethan": {"cond": torch.zeros(1, 192), "ref_mel": torch.zeros(1, 150, 80)}}, folder / "spk_dict.pt")
    with pytest.raises(ValueError, match=r"no voice 'Chelsie'.*it has: Ethan"):
        build(stage_config(folder))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"additional_config": {"audio_perf": {"max_frames": 20}}},
            r"audio_perf\.max_frames = 20; allowed: max_mel_fra",
        ),
        (
            {"additional_config": {"audio_perf": {"max_mel_frames": -1}}},
            r"max_mel_frames is -1; allowed: a whole number",
        ),
        ({"additional_config": {"audio-perf": {}}}, "'audio-perf'; did you mean 'audio_perf'"),
        ({"tensor_parallel_size": 2}, "runs on one device: tensor_parallel_size is 2, allowed is 1"),
        ({"pipeline_parallel_size": 2}, "runs on one device: pipeline_parallel_size is 2, allowed is 1"),
        (
            {"model_stage": "talker", "additional_config": {"audio_perf": {"max_mel_frames": 30_000}}},
            "stands on stage 'talker'; allowed: on stage 'code2wav' only",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_before_any_engine_starts(
    settings: dict[str, Any], message: str, qwen2_5_omni_checkpoint: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        stage_config(qwen2_5_omni_checkpoint, **settings)


def test_a_checkpoint_without_token2wav_is_refused(qwen2_5_omni_checkpoint: Path) -> None:
    from vllm_omni_audio_perf.qwen2_5_omni.stage_check import checked_options

    config = stage_config(qwen2_5_omni_checkpoint)
    config.model_config.hf_config = SimpleNamespace(token2wav_config=None)
    with pytest.raises(ValueError, match="has no token2wav_config"):
        checked_options(config)


def test_other_stages_are_upstreams(qwen2_5_omni_checkpoint: Path) -> None:
    from vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni import Qwen2_5OmniForConditionalGeneration

    from vllm_omni_audio_perf.qwen2_5_omni.stage import AudioPerfQwen2_5Omni

    assert AudioPerfQwen2_5Omni.__mro__[1] is Qwen2_5OmniForConditionalGeneration
