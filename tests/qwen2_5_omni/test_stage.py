# SPDX-License-Identifier: Apache-2.0
"""The code2wav stage as vLLM-Omni builds it: its own configuration and weight loader, without an engine around it."""

import gc
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni")

from vllm_omni_audio_perf.qwen2_5_omni import stage as stage_module
from vllm_omni_audio_perf.qwen2_5_omni import stage_check
from vllm_omni_audio_perf.qwen2_5_omni.request_settings import RequestSettings
from vllm_omni_audio_perf.scheduling.request_errors import ERROR_OUTPUT, take_error
from vllm_omni_audio_perf.testing.graph_backends import ReexecutingBackend
from vllm_omni_audio_perf.token2wav import Clip

OURS = "AudioPerfQwen2_5OmniForConditionalGeneration"
STOCK = "Qwen2_5OmniForConditionalGeneration"
UPSTREAMS_SCHEDULER = "vllm_omni.core.sched.omni_generation_scheduler.OmniGenerationScheduler"


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


def is_same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two waveforms are the same but for the rounding of products of other sizes."""
    return actual.shape == expected.shape and bool((actual - expected).norm() <= 1e-5 * expected.norm())


def dtypes(stage: Any) -> set[torch.dtype]:
    """Dtypes of everything the Token2Wav holds, but for weights that vLLM packed away for its CPU kernels."""
    tensors = [*stage.token2wav.parameters(), *stage.token2wav.buffers()]
    return {tensor.dtype for tensor in tensors if tensor.numel()}


@pytest.fixture(scope="module")
def stage(qwen2_5_omni_checkpoint: Path) -> Any:
    return build(stage_config(qwen2_5_omni_checkpoint, dtype="bfloat16", scheduler_cls=UPSTREAMS_SCHEDULER))


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


def settings(**settings: Any) -> dict[str, Any]:
    """What the engine tells the stage about one request."""
    return {"codes": {"audio": []}, "generated_len": 0, **RequestSettings(**{"seed": 1, **settings}).to_buffer()}


def test_reads_the_voices(stage: Any) -> None:
    assert list(stage._speakers) == ["Chelsie", "Ethan"]
    codes = list(range(30))
    default, chelsie, ethan, otherwise = run(
        stage,
        *[codes] * 4,
        runtime_additional_information=[
            settings(),
            settings(voice="Chelsie"),
            settings(voice="Ethan"),
            settings(voice="eThAn"),
        ],
    )
    assert is_same(default, chelsie)
    assert is_same(ethan, otherwise)
    assert not is_same(chelsie, ethan)
    (stages_own,) = run(stage, codes, voice_type="Ethan", runtime_additional_information=[settings()])
    assert is_same(stages_own, ethan)


def test_a_request_sounds_the_same_whatever_ran_before_or_beside_it(stage: Any) -> None:
    requests = [[1, 2, 3], list(range(40)), [5]]
    information = [settings(seed=3), settings(seed=4), settings(seed=5)]
    together = run(stage, *requests, runtime_additional_information=information)
    for request, one, waveform in zip(requests, information, together, strict=True):
        run(stage, [7, 7])
        (alone,) = run(stage, request, runtime_additional_information=[one])
        assert is_same(waveform, alone)
        assert torch.equal(run(stage, request, runtime_additional_information=[one])[0], alone)


def test_the_clients_seed_stands_over_that_of_the_sampling_parameters(stage: Any) -> None:
    """The engine notes the latter as `_omni_seed`; without any, each request has noise of its own."""
    seven, of_the_parameters, both, none, again = run(
        stage,
        *[[1, 2, 3]] * 5,
        runtime_additional_information=[
            settings(seed=7),
            settings(seed=None) | {"_omni_seed": 7},
            settings(seed=7) | {"_omni_seed": 8},
            settings(seed=None) | {"_omni_seed": None},
            settings(seed=None),
        ],
    )
    assert is_same(seven, of_the_parameters)
    assert is_same(seven, both)
    assert not is_same(none, again)


def test_asks_the_engine_for_the_seed_of_the_sampling_parameters(stage: Any) -> None:
    """The runner notes it for models with a preprocessing step alone, and takes its inputs back from there."""
    from vllm_omni.worker.gpu_model_runner import OmniGPUModelRunner

    assert stage.has_preprocess
    assert 'req_infos["_omni_seed"]' in inspect.getsource(OmniGPUModelRunner._preprocess)
    ids, embeds = torch.arange(3), torch.zeros(3, 8)
    same_ids, same_embeds, update = stage.preprocess(input_ids=ids, input_embeds=embeds, request_id="r", codes={})
    assert same_ids is ids
    assert same_embeds is embeds
    assert update == {}


@pytest.fixture(scope="module")
def stage_with_stage_noise(qwen2_5_omni_checkpoint: Path) -> Any:
    options = {"audio_perf": {"noise": "stage"}}
    return build(stage_config(qwen2_5_omni_checkpoint, dtype="bfloat16", additional_config=options))


def test_stage_noise_equals_the_stock_stage(stage_with_stage_noise: Any, qwen2_5_omni_checkpoint: Path) -> None:
    stock = build(stage_config(qwen2_5_omni_checkpoint, STOCK, dtype="bfloat16"))
    for count in (1, 13, 61):
        codes = list(range(100, 100 + count))
        ids = torch.tensor(codes)
        torch.manual_seed(5)
        with torch.inference_mode():
            theirs = stock(ids, torch.zeros_like(ids)).multimodal_outputs["model_outputs"]
        (ours,) = run(stage_with_stage_noise, codes)  # seeds by itself
        assert ours.shape == theirs.shape == (480 * count,)
        assert (ours - theirs).norm() / theirs.norm() <= 1e-5


def test_options_reach_the_solve(qwen2_5_omni_checkpoint: Path) -> None:
    options = {
        "num_steps": 4,
        "solver": "midpoint",
        "dit_dtype": "bfloat16",
        "frames_per_solve": 50,
        "group_memory_mib": 3,
        "vocoder_frames": 60,
        "max_mel_frames": 70,
    }
    stage = build(stage_config(qwen2_5_omni_checkpoint, additional_config={"audio_perf": options}))
    synthesizer = stage._synthesizer
    sampler, dit = synthesizer.sampler, synthesizer.dit
    assert (sampler.num_steps, sampler.solver) == (4, "midpoint")
    assert (dit.linear_dtype, dit.group_mib) == (torch.bfloat16, 3)
    assert (synthesizer.frames_per_solve, synthesizer.vocoder_frames, synthesizer.max_mel_frames) == (50, 60, 70)
    assert [len(waveform) for waveform in run(stage, [1] * 40, [2] * 3)] == [35 * 480, 3 * 480]
    assert len(sampler.table.layers) == 6


def test_bfloat16_layers_are_loaded_and_close(stage: Any, qwen2_5_omni_checkpoint: Path) -> None:
    """In a stage that is float32 otherwise; their weights are cast when they are loaded."""
    lower = build(
        stage_config(
            qwen2_5_omni_checkpoint, dtype="bfloat16", additional_config={"audio_perf": {"dit_dtype": "bfloat16"}}
        )
    )
    assert dtypes(lower) == {torch.float32, torch.bfloat16}
    information = [settings(seed=3)]
    codes = list(range(100, 161))
    (exact,), (close,) = (run(one, codes, runtime_additional_information=information) for one in (stage, lower))
    assert 1e-5 < (close - exact).norm() / exact.norm() < 0.1


def test_graphs_are_captured_at_start_and_change_nothing(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, for which another backend stands in here."""
    codes, information = list(range(20)), [settings()]
    (eager,) = run(stage, codes, runtime_additional_information=information)
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(stage, "_device", torch.device("cuda"))
        on_a_gpu.setattr(stage_module, "CudaGraphBackend", ReexecutingBackend)
        on_a_gpu.setattr(stage_module, "free_share", lambda vllm_config, device: 2**30)
        stage._start_up(64)
        stage._start_up(64)  # not captured again
    graphs = stage._synthesizer.sampler.graphs
    try:
        assert len(graphs.captured) == graphs.statistics.captures == 21
        assert graphs.captured[0] == (25,)  # 600 mel frames
        (replayed,) = run(stage, codes, runtime_additional_information=information)
        assert is_same(replayed, eager)
        assert graphs.statistics.hits == 36
    finally:
        stage._synthesizer.sampler.refresh()


def outputs(stage: Any, *requests: list[int], **kwargs: Any) -> dict[str, list[torch.Tensor]]:
    """All outputs of a step."""
    ids = torch.tensor([code for codes in requests for code in codes], dtype=torch.int32)
    counts = [len(codes) for codes in requests]
    with torch.inference_mode():
        return stage(ids, torch.zeros_like(ids), seq_token_counts=counts, **kwargs).multimodal_outputs


def test_several_requests_in_one_step_stay_apart(stage: Any) -> None:
    requests = [[1, 2, 3], [4] * 20, [], [5]]
    waveforms = run(stage, *requests, padding=7)
    assert [len(waveform) for waveform in waveforms] == [480 * len(codes) for codes in requests]


def test_strips_the_talkers_marks(stage: Any) -> None:
    requests = [[8293, 1, 2, 8294], [8293, 8294], [1, -1, -1], [8292]]
    assert [len(waveform) for waveform in run(stage, *requests)] == [960, 0, 480, 0]


def test_a_bad_request_fails_alone(stage: Any, log: pytest.LogCaptureFixture) -> None:
    good, bad = [1, 2, 3], [1, 8250]
    before = stage.failed_requests
    waveforms = outputs(
        stage,
        *[good, bad, good, bad],
        request_ids=["a", "b", "c", "d"],
        runtime_additional_information=[
            settings(),
            settings(),
            settings(),
            settings(empty_on_error=True),
        ],
    )
    assert [len(waveform) for waveform in waveforms["model_outputs"]] == [1440, 0, 1440, 0]
    assert is_same(waveforms["model_outputs"][0], waveforms["model_outputs"][2])
    reasons = [take_error({ERROR_OUTPUT: error}) for error in waveforms[ERROR_OUTPUT]]
    assert reasons == [None, "code 8250 at position 1 of 2 is not in the codebook; allowed: 0 to 8193.", None, None]
    assert stage.failed_requests == before + 2
    failures = [line.message for line in log.records if "failed" in line.message]
    for line, request_id in zip(failures, "bd", strict=True):
        assert f"Request {request_id} of 2 codes failed: code 8250 at position 1" in line
    assert f"so far: {before + 2}." in failures[-1]
    assert ERROR_OUTPUT not in outputs(stage, good)


@pytest.mark.parametrize(
    "failure", [torch.OutOfMemoryError("out of memory"), RuntimeError("can't allocate memory"), MemoryError()]
)
def test_a_failed_allocation_fails_alone(stage: Any, failure: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = stage._synthesizer.sampler.sample

    def fails_on_two_codes(clips: Sequence[Clip], **kwargs: Any) -> list[torch.Tensor]:
        if any(len(clip.codes) == 2 for clip in clips):
            raise failure
        return sample(clips, **kwargs)

    monkeypatch.setattr(stage._synthesizer.sampler, "sample", fails_on_two_codes)
    assert [len(waveform) for waveform in run(stage, [1], [1, 2], [1, 2, 3])] == [480, 0, 1440]


def test_a_lost_device_ends_the_stage(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM-Omni answers with a new replica or an error to all, where going on would fail every request."""

    def lost(*args: Any, **kwargs: Any) -> None:
        raise torch.AcceleratorError("device-side assert", 1)

    monkeypatch.setattr(stage._synthesizer.sampler, "sample", lost)
    with pytest.raises(torch.AcceleratorError):
        run(stage, [1, 2, 3])


def test_the_requests_of_a_step_are_solved_together(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that can be: neither a bad one, nor one without codes, nor what is over the budget of a solve."""
    solved: list[list[int]] = []
    sampler = stage._synthesizer.sampler
    sample = sampler.sample

    def noting(clips: Sequence[Clip], **kwargs: Any) -> list[torch.Tensor]:
        solved.append([len(clip.codes) for clip in clips])
        return sample(clips, **kwargs)

    monkeypatch.setattr(sampler, "sample", noting)
    run(stage, [1], [1, 8250], [1, 2, 3], [], [5] * 20)
    monkeypatch.setattr(stage._synthesizer, "frames_per_solve", 8)
    run(stage, [1], [1, 2, 3], [5] * 20)
    assert solved == [[1, 3, 20], [1, 3], [20]]


def test_nothing_of_a_request_stays(stage: Any) -> None:
    """Neither of good requests nor of failed ones."""

    def live_tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    requests = [[1, 2, 3], list(range(60)), [1, 8250], []]
    run(stage, *requests)
    before = live_tensors()
    for _ in range(3):
        run(stage, *requests)
    assert live_tensors() == before


def test_an_unknown_voice_fails_its_request(stage: Any) -> None:
    """Where it was not refused before, as for a voice that only the stage lacks."""
    step = outputs(stage, [1], [2], runtime_additional_information=[settings(voice="Nobody"), settings()])
    assert [len(waveform) for waveform in step["model_outputs"]] == [0, 480]
    reason = take_error({ERROR_OUTPUT: step[ERROR_OUTPUT][0]})
    assert reason == "There is no voice 'Nobody'; this checkpoint has: Chelsie, Ethan."


def test_a_request_that_the_engine_cuts_is_solved_whole(stage: Any) -> None:
    """As it does where the requests of a step exceed `max_num_batched_tokens`; here after 5 codes and after 7 more."""
    codes = list(range(20))

    def part(computed: int) -> dict[str, Any]:
        return settings() | {"codes": {"audio": codes}, "_omni_num_computed_tokens": computed, "_omni_prompt_len": 20}

    (whole,) = run(stage, codes, runtime_additional_information=[part(0)])
    beside = [1, 2, 3]
    first, other = run(stage, codes[:5], beside, runtime_additional_information=[part(0), settings()])
    (second,) = run(stage, codes[5:12], runtime_additional_information=[part(5)])
    (last,) = run(stage, codes[12:], runtime_additional_information=[part(12)])
    assert [len(waveform) for waveform in (first, other, second)] == [0, 3 * 480, 0]
    assert is_same(last, whole)


def test_sleep_mode_goes_without_graphs(qwen2_5_omni_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stage_config(qwen2_5_omni_checkpoint)
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    with pytest.raises(ValueError, match="enable_sleep_mode takes away the memory that captured CUDA graphs use"):
        stage_check.checked_options(config)
    monkeypatch.setattr(config, "additional_config", {"audio_perf": {"cuda_graphs": False}})
    assert not stage_check.checked_options(config).cuda_graphs


def test_an_error_without_a_scheduler_that_takes_it_in_stays_in_the_log(qwen2_5_omni_checkpoint: Path) -> None:
    other = build(stage_config(qwen2_5_omni_checkpoint, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler"))
    assert list(outputs(other, [1, 8250])) == ["model_outputs"]
    assert other.failed_requests == 1


def test_the_talker_survives_an_empty_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni import Qwen2_5OmniForConditionalGeneration

    from vllm_omni_audio_perf.qwen2_5_omni.stage import AudioPerfQwen2_5Omni

    monkeypatch.setattr(
        Qwen2_5OmniForConditionalGeneration, "talker_preprocess", lambda self, *args, **info: info["ids"]["output"][0]
    )
    talker = AudioPerfQwen2_5Omni.__new__(AudioPerfQwen2_5Omni)
    torch.nn.Module.__init__(talker)
    assert talker.talker_preprocess(None, None, ids={"prompt": [1], "output": []}) == 8292
    assert talker.talker_preprocess(None, None, ids={"prompt": [1], "output": [7]}) == 7


def test_fewer_ids_than_the_requests_have_is_the_engines_fault(stage: Any) -> None:
    with pytest.raises(ValueError, match="have 3 codes, but there are 2 input ids"):
        stage(torch.tensor([1, 2]), torch.zeros(2), seq_token_counts=[1, 2])


@pytest.mark.parametrize("with_ids", [True, False])
def test_start_up_run_costs_one_evaluation(with_ids: bool, stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments that `GPUGenerationModelRunner._dummy_run` passes."""
    calls: list[int] = []
    dit = stage._synthesizer.dit
    evaluate = dit.evaluate
    monkeypatch.setattr(dit, "evaluate", lambda mel, *rest: calls.append(mel.shape[0]) or evaluate(mel, *rest))
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
    assert calls == [6]  # blocks of 24 mel frames: 128 of them


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


def test_a_long_clip_is_cut_and_said_once(qwen2_5_omni_checkpoint: Path, log: pytest.LogCaptureFixture) -> None:
    config = stage_config(qwen2_5_omni_checkpoint, additional_config={"audio_perf": {"max_mel_frames": 20}})
    stage = build(config)
    cut, short = run(stage, [1] * 30, [1] * 10, runtime_additional_information=[settings()] * 2)
    assert torch.equal(cut, short)
    assert len(cut) == 10 * 480
    run(stage, [1] * 40)
    lines = [line.message for line in log.records if "is cut" in line.message]
    assert len(lines) == 1
    assert "A clip of 30 codes is cut to the 10 that max_mel_frames: 20 allows" in lines[0]


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
        ({"additional_config": {"audio_perf": {"noise": "none"}}}, r"noise is 'none'; allowed: request, stage"),
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


def test_vllms_second_runner_is_refused(qwen2_5_omni_checkpoint: Path) -> None:
    from vllm_omni_audio_perf.qwen2_5_omni.stage_check import checked_options

    config = stage_config(qwen2_5_omni_checkpoint)
    config.model_config.use_v2_model_runner = True
    with pytest.raises(ValueError, match=r"model_runner is 'v2'.*allowed: v1"):
        checked_options(config)


def test_other_stages_are_upstreams(qwen2_5_omni_checkpoint: Path) -> None:
    from vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni import Qwen2_5OmniForConditionalGeneration

    from vllm_omni_audio_perf.qwen2_5_omni.stage import AudioPerfQwen2_5Omni

    assert AudioPerfQwen2_5Omni.__mro__[1] is Qwen2_5OmniForConditionalGeneration


def test_requests_of_the_stage_fail_one_by_one(qwen2_5_omni_checkpoint: Path) -> None:
    """The scheduler is ours, unless somebody put another one there, and only on this stage."""
    from vllm_omni_audio_perf.scheduling.scheduler import AudioPerfGenerationScheduler

    def scheduler(path: str, **settings: Any) -> Any:
        config = stage_config(qwen2_5_omni_checkpoint, scheduler_cls=path, **settings).scheduler_config
        return config.get_scheduler_cls()

    assert scheduler(UPSTREAMS_SCHEDULER) is AudioPerfGenerationScheduler
    assert scheduler(UPSTREAMS_SCHEDULER, model_stage="talker") is not AudioPerfGenerationScheduler
    assert scheduler("vllm.v1.core.sched.scheduler.Scheduler") is not AudioPerfGenerationScheduler


def test_the_talker_speaks_with_the_voice_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni import Qwen2_5OmniForConditionalGeneration

    from vllm_omni_audio_perf.qwen2_5_omni.stage import AudioPerfQwen2_5Omni

    monkeypatch.setattr(
        Qwen2_5OmniForConditionalGeneration, "talker_preprocess", lambda self, *args, **info: self.voice_type
    )
    talker = AudioPerfQwen2_5Omni.__new__(AudioPerfQwen2_5Omni)
    torch.nn.Module.__init__(talker)
    talker.voice_type = "Chelsie"
    assert talker.talker_preprocess(None, None, **settings(voice="Ethan")) == "Ethan"
    assert talker.talker_preprocess(None, None, **settings()) == "Chelsie"
    assert talker.voice_type == "Chelsie"
