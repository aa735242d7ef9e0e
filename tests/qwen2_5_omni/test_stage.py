# SPDX-License-Identifier: Apache-2.0
"""The code2wav stage as vLLM-Omni builds it: its own configuration and weight loader, without an engine around it."""

import logging
import os
import shutil
from collections.abc import Callable
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
        model_stage="code2wav",
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


def test_start_up_run_costs_one_evaluation(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    dit = stage._token2wav.dit
    evaluate = dit.evaluate
    monkeypatch.setattr(dit, "evaluate", lambda mel, *rest: calls.append(mel.shape[1]) or evaluate(mel, *rest))
    with torch.inference_mode():
        for inputs in (
            {"input_ids": torch.zeros(64, dtype=torch.int32)},
            {"input_ids": None, "inputs_embeds": torch.zeros(64, 128)},
        ):
            out = stage(positions=torch.zeros(64), **inputs)
            assert [waveform.shape for waveform in out.multimodal_outputs["model_outputs"]] == [(0,)]
    assert calls == [128, 128]


def test_no_info_line_a_request(stage: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(stage, [1, 2, 3])
    assert not caplog.records


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


def test_an_unknown_option_is_refused_at_start(qwen2_5_omni_checkpoint: Path) -> None:
    config = stage_config(qwen2_5_omni_checkpoint, additional_config={"audio_perf": {"max_frames": 20}})
    with pytest.raises(ValueError, match=r"audio_perf\.max_frames = 20; allowed: max_mel_frames"):
        build(config)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_parallelism_is_refused_in_one_sentence(name: str) -> None:
    from vllm_omni_audio_perf.qwen2_5_omni.stage import _refuse_parallelism

    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, name: 2}
    with pytest.raises(ValueError, match=f"runs on one device: {name} is 2, allowed is 1"):
        _refuse_parallelism(SimpleNamespace(parallel_config=SimpleNamespace(**sizes)))


def test_other_stages_are_upstreams(qwen2_5_omni_checkpoint: Path) -> None:
    from vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni import Qwen2_5OmniForConditionalGeneration

    from vllm_omni_audio_perf.qwen2_5_omni.stage import AudioPerfQwen2_5Omni

    assert AudioPerfQwen2_5Omni.__mro__[1] is Qwen2_5OmniForConditionalGeneration
