# SPDX-License-Identifier: Apache-2.0
"""The code2wav stage as vLLM-Omni builds it: its own configuration and weight loader, without an engine around it."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni")

from vllm_omni_audio_perf.architectures import MIMO_AUDIO
from vllm_omni_audio_perf.graphs import CaptureBudget
from vllm_omni_audio_perf.mimo_audio.batch_decoder import BatchDecoder, graph_runner
from vllm_omni_audio_perf.mimo_audio.groups import END_OF_SPEECH_MARK, to_ids
from vllm_omni_audio_perf.mimo_audio.stage_check import checked_options, checked_stream
from vllm_omni_audio_perf.mimo_audio.streaming import StreamSettings, windows
from vllm_omni_audio_perf.scheduling.request_errors import ERROR_OUTPUT, take_error
from vllm_omni_audio_perf.scheduling.stage_settings import SCHEDULER
from vllm_omni_audio_perf.scheduling.steps import start_up_information
from vllm_omni_audio_perf.testing.graph_backends import ReexecutingBackend

GROUP_SIZE, ROWS, SAMPLES_PER_GROUP = 4, 8, 3840
CONNECTOR = {"codec_chunk_frames": 5, "codec_left_context_frames": 40, "audio_perf": {"right_context_frames": 0}}


def stage_config(model: Path, connector: dict[str, Any] | None = None, **settings: Any) -> Any:
    """``vllm_config`` of the code2wav stage, as the engine makes it for its process."""
    from vllm_omni.engine.arg_utils import OmniEngineArgs

    import vllm_omni_audio_perf

    vllm_omni_audio_perf.register()
    arguments = {
        "model_stage": "code2wav",
        "worker_type": "generation",
        "stage_id": 1,
        "enforce_eager": True,
        "trust_remote_code": True,
        "async_chunk": True,
        "max_num_batched_tokens": 8192,
        "max_model_len": 4096,
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.1,
        "dtype": "bfloat16",
        "scheduler_cls": "vllm_omni.core.sched.omni_generation_scheduler.OmniGenerationScheduler",
        "stage_connector_spec": {"name": "SharedMemoryConnector", "extra": connector or CONNECTOR},
    } | settings
    return OmniEngineArgs(model=str(model), model_arch=MIMO_AUDIO, **arguments).create_engine_config()


def build(config: Any) -> Any:
    """The stage's model, in the dtype context in which vLLM's loader builds it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    from vllm_omni_audio_perf.testing.upstream import initialize_single_process_group

    with set_current_vllm_config(config):
        initialize_single_process_group()
        return get_model(vllm_config=config)


@pytest.fixture(scope="module", autouse=True)
def tokenizer_path(mimo_audio_checkpoint: Path) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("MIMO_AUDIO_TOKENIZER_PATH", str(mimo_audio_checkpoint / "audio_tokenizer"))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def streaming_stage(mimo_audio_checkpoint: Path) -> Any:
    return build(stage_config(mimo_audio_checkpoint))


@pytest.fixture(scope="module")
def stage(mimo_audio_checkpoint: Path) -> Any:
    """One that gets all codes of a request at once."""
    return build(stage_config(mimo_audio_checkpoint, async_chunk=False))


@pytest.fixture(scope="module")
def tokenizer(stage: Any) -> Any:
    return stage.token2wav._tokenizer_service.audio_tokenizer


def random_codes(groups: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + groups)
    return torch.randint(0, 128, (ROWS, GROUP_SIZE * groups), generator=generator)


def ids_of(codes: torch.Tensor) -> list[int]:
    return to_ids(list(codes.split(GROUP_SIZE, dim=1))).tolist()


def window_meta(window: Any) -> dict[str, Any]:
    return {
        "meta": {
            "left_context_size": window.spoken,
            "right_holdback_size": 0,
            "chunk_seq": window.index,
            "stream_finished": torch.tensor(window.final),
        }
    }


def run(stage: Any, requests: list[list[int]], buffers: list[dict] | None = None, padding: int = 0) -> Any:
    ids = torch.tensor([code for codes in requests for code in codes] + [0] * padding, dtype=torch.int32)
    return stage(
        ids,
        torch.zeros_like(ids),
        seq_token_counts=[len(codes) for codes in requests],
        request_ids=[f"request-{index}" for index in range(len(requests))],
        runtime_additional_information=buffers,
    ).multimodal_outputs


def rel_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("groups", [1, 2, 7, 40])
def test_a_clip_is_the_tokenizers_decode_of_its_codes(stage: Any, tokenizer: Any, groups: int) -> None:
    codes = random_codes(groups)
    (waveform,) = run(stage, [ids_of(codes)])["model_outputs"]
    assert waveform.dtype == torch.float32
    assert waveform.shape == (groups * SAMPLES_PER_GROUP,)
    assert rel_error(waveform, tokenizer.decode(codes).reshape(-1)) <= 1e-5


def test_requests_of_a_step_keep_apart_and_in_order(stage: Any) -> None:
    """Of very different lengths, an empty one among them, and with ids that only pad the step."""
    codes = [random_codes(groups, seed) for seed, groups in enumerate((12, 1, 0, 30, 2, 12))]
    together = run(stage, [ids_of(request) for request in codes], padding=17)["model_outputs"]
    assert [len(waveform) for waveform in together] == [SAMPLES_PER_GROUP * groups for groups in (12, 1, 0, 30, 2, 12)]
    for request, waveform in zip(codes, together, strict=True):
        if request.numel():
            (alone,) = run(stage, [ids_of(request)])["model_outputs"]
            assert rel_error(waveform, alone) <= 5e-6


def test_codes_beside_a_prompt_of_one_id(stage: Any, tokenizer: Any) -> None:
    """As our input processor hands them over, of any length."""
    codes = [random_codes(6), random_codes(600), torch.empty(0, 0, dtype=torch.long)]
    buffers = [{"codes": {"audio": [151667], "ref": request}} for request in codes]
    first, long, empty = run(stage, [[151667]] * 3, buffers)["model_outputs"]
    assert rel_error(first, tokenizer.decode(codes[0]).reshape(-1)) <= 1e-5
    assert rel_error(long, tokenizer.decode(codes[1]).reshape(-1)) <= 1e-5
    assert empty.shape == (0,)


def test_text_is_skipped_and_the_end_of_speech_ends_it(stage: Any, tokenizer: Any) -> None:
    codes = random_codes(5)
    ids = torch.tensor(ids_of(codes)).reshape(5, GROUP_SIZE, ROWS + 1)
    ids[1, :, 0], ids[3, :, 0] = 77, END_OF_SPEECH_MARK
    (waveform,) = run(stage, [ids.reshape(-1).tolist()])["model_outputs"]
    kept = torch.cat([codes[:, :4], codes[:, 8:12]], dim=1)
    assert rel_error(waveform, tokenizer.decode(kept).reshape(-1)) <= 1e-5


@pytest.mark.parametrize("groups", [1, 4, 5, 13, 15])
def test_a_stream_is_as_long_as_the_clip(streaming_stage: Any, tokenizer: Any, groups: int) -> None:
    """And within a chunk it is the decode of the chunk with its context."""
    settings = StreamSettings(chunk=5, left_context=40)
    codes = random_codes(groups)
    spoken = []
    for window in windows(settings, groups):
        in_window = codes[:, GROUP_SIZE * window.start : GROUP_SIZE * window.end]
        (waveform,) = run(streaming_stage, [ids_of(in_window)], [window_meta(window)])["model_outputs"]
        first = 0 if window.index == 0 else window.spoken * SAMPLES_PER_GROUP - 2400
        end = window.groups * SAMPLES_PER_GROUP - (0 if window.final else 2400)
        assert rel_error(waveform, tokenizer.decode(in_window).reshape(-1)[first:end]) <= 1e-5
        spoken.append(waveform)
    assert sum(map(len, spoken)) == groups * SAMPLES_PER_GROUP


def test_upstreams_payload_is_spoken_as_upstream_speaks_it(streaming_stage: Any, tokenizer: Any) -> None:
    codes = random_codes(8)
    (waveform,) = run(streaming_stage, [ids_of(codes)], [{"meta": {"left_context_size": 3}}])["model_outputs"]
    assert rel_error(waveform, tokenizer.decode(codes).reshape(-1)[3 * SAMPLES_PER_GROUP :]) <= 1e-5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ids: ids[:-1], "215 ids are no whole number of groups; allowed: a multiple of 36"),
        (
            lambda ids: [*ids[:3], 1024, *ids[4:]],
            "code 1024 at position 0 of 24 is not in codebook 2; allowed: 0 to 127",
        ),
        (lambda ids: [*ids[:3], -5, *ids[4:]], "code -5 at position 0 of 24"),
        (lambda ids: [*ids, *ids[:5]], "221 ids are no whole number"),
    ],
)
def test_bad_codes_fail_their_request_alone(stage: Any, change: Any, reason: str) -> None:
    good = ids_of(random_codes(6))
    outputs = run(stage, [good, change(good), good])
    first, bad, last = outputs["model_outputs"]
    assert bad.shape == (0,)
    assert torch.equal(first, last)
    assert len(first) == 6 * SAMPLES_PER_GROUP
    errors = [take_error({ERROR_OUTPUT: error}) for error in outputs[ERROR_OUTPUT]]
    assert [error is None for error in errors] == [True, False, True]
    assert reason in (errors[1] or "")


def test_a_request_that_wishes_it_ends_empty(stage: Any) -> None:
    outputs = run(stage, [[1, 2, 3]], [{"kv_metadata": {"audio_perf": {"empty_on_error": True}}}])
    assert outputs["model_outputs"][0].shape == (0,)
    assert ERROR_OUTPUT not in outputs


def test_what_fails_alone_fails_alone(stage: Any, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A decode that fails is done again one by one."""
    decode = BatchDecoder.decode

    def failing(self: Any, codes: Any) -> Any:
        if any(request.shape[1] == 12 for request in codes):
            raise torch.OutOfMemoryError("no memory for 12")
        return decode(self, codes)

    good = ids_of(random_codes(6))
    (alone,) = run(stage, [good])["model_outputs"]
    monkeypatch.setattr(BatchDecoder, "decode", failing)
    with caplog.at_level(logging.WARNING, "vllm_omni_audio_perf"):
        outputs = run(stage, [good, ids_of(random_codes(3)), good])
    assert torch.equal(outputs["model_outputs"][0], alone)
    assert torch.equal(outputs["model_outputs"][2], alone)
    assert outputs["model_outputs"][1].shape == (0,)
    assert take_error({ERROR_OUTPUT: outputs[ERROR_OUTPUT][1]}) == "OutOfMemoryError: no memory for 12"
    assert "Decoding 3 requests together failed" in caplog.text


def test_a_cut_request_is_decoded_once_and_whole(stage: Any, tokenizer: Any) -> None:
    """With upstream's input processor, where a step's requests exceed ``max_num_batched_tokens``."""
    codes = random_codes(6)
    ids = ids_of(codes)
    common = {"codes": {"audio": ids}, "_omni_prompt_len": len(ids)}
    outputs = run(stage, [ids[:108]], [common | {"_omni_num_computed_tokens": 0}])  # three whole groups
    (second,) = run(stage, [ids[108:]], [common | {"_omni_num_computed_tokens": 108}])["model_outputs"]
    assert outputs["model_outputs"][0].shape == (0,)
    assert ERROR_OUTPUT not in outputs
    assert rel_error(second, tokenizer.decode(codes).reshape(-1)) <= 1e-5


def test_the_start_up_run_is_short(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    decode = BatchDecoder.decode
    monkeypatch.setattr(BatchDecoder, "decode", lambda self, codes: decoded.append(codes) or decode(self, codes))
    (waveform,) = run(stage, [[0] * 4096], start_up_information(1))["model_outputs"]
    assert waveform.numel() == 0
    assert [request.shape for request in decoded[0]] == [(ROWS, GROUP_SIZE)]


def test_graphs_give_the_same_audio(stage: Any) -> None:
    """With a backend that runs on the CPU; requests that no bucket fits are decoded, too."""
    decoder = stage.batch_decoder.decoder
    runner = graph_runner(
        decoder,
        [(1, 8, ROWS), (1, 24, ROWS), (4, 24, ROWS)],
        backend=ReexecutingBackend(),
        budget=CaptureBudget(seconds=100, mib=1000),
    )
    runner.capture_all()
    with_graphs = BatchDecoder(decoder, runner)
    codes = [random_codes(groups, seed) for seed, groups in enumerate((1, 2, 6, 0, 5, 20, 6, 6))]
    expected = stage.batch_decoder.decode(codes)
    for _ in range(2):
        for actual, alone in zip(with_graphs.decode(codes), expected, strict=True):
            if alone.numel():
                assert rel_error(actual, alone) <= 5e-6
    assert runner.statistics.hits > 0
    assert runner.statistics.calls > runner.statistics.hits


def test_upstream_captures_no_graphs_of_its_own(mimo_audio_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable keeps the user's value around the load."""
    import os

    from vllm_omni.model_executor.models.mimo_audio import mimo_audio_code2wav

    from vllm_omni_audio_perf.mimo_audio.stage import GRAPHS_VARIABLE

    seen = []
    load = mimo_audio_code2wav.get_tokenizer_worker
    monkeypatch.setattr(
        mimo_audio_code2wav,
        "get_tokenizer_worker",
        lambda *args, **kwargs: seen.append(os.environ.get(GRAPHS_VARIABLE)) or load(*args, **kwargs),
    )
    for value in ("1", None):
        if value is None:
            monkeypatch.delenv(GRAPHS_VARIABLE, raising=False)
        else:
            monkeypatch.setenv(GRAPHS_VARIABLE, value)
        build(stage_config(mimo_audio_checkpoint))
        assert os.environ.get(GRAPHS_VARIABLE) == value
    assert seen == ["0", "0"]


def test_dummy_weights_load(mimo_audio_checkpoint: Path) -> None:
    stage = build(stage_config(mimo_audio_checkpoint, load_format="dummy", async_chunk=False))
    (waveform,) = run(stage, [ids_of(random_codes(2))])["model_outputs"]
    assert len(waveform) == 2 * SAMPLES_PER_GROUP


def test_the_tokenizers_weights_are_not_copied(stage: Any, tokenizer: Any) -> None:
    ours = dict(stage.batch_decoder.decoder.named_parameters())
    theirs = {parameter.data_ptr() for parameter in tokenizer.parameters()}
    assert ours
    assert all(parameter.data_ptr() in theirs for parameter in ours.values())


def test_gets_our_scheduler(mimo_audio_checkpoint: Path) -> None:
    assert stage_config(mimo_audio_checkpoint).scheduler_config.scheduler_cls == SCHEDULER


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"additional_config": {"audio_perf": {"cuda_graph": True}}}, "Unknown option audio_perf.cuda_graph"),
        ({"additional_config": {"audio_perf": {"graph_seconds": 0}}}, "graph_seconds is 0; allowed: a whole number"),
        ({"additional_config": {"audio_perf": {"flash_attention": "yes"}}}, "flash_attention is 'yes'; allowed: true"),
        (
            {"connector": CONNECTOR | {"codec_left_context_frames": 2}},
            "codec_left_context_frames is 2; allowed: at least 3",
        ),
        ({"connector": CONNECTOR | {"codec_chunk_frames": 1}}, "codec_chunk_frames is 1; allowed"),
        ({"max_num_seqs": 64}, "max_num_batched_tokens is 8192; allowed: at least 103680"),
        ({"max_model_len": 1000}, "max_model_len is 1000; allowed: at least 1620"),
        (
            {"model_stage": "fused_thinker_talker"},
            "stands on stage 'fused_thinker_talker'; allowed: on stage 'code2wav'",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(mimo_audio_checkpoint: Path, settings: dict, message: str) -> None:
    with pytest.raises(Exception, match=message):  # vLLM wraps it in pydantic's error
        stage_config(mimo_audio_checkpoint, **settings)


@pytest.mark.parametrize(
    ("part", "name", "value", "message"),
    [
        ("parallel_config", "tensor_parallel_size", 2, "tensor_parallel_size is 2, allowed is 1"),
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline_parallel_size is 2, allowed is 1"),
        ("model_config", "enable_sleep_mode", True, "enable_sleep_mode takes away the memory"),
        ("model_config", "use_v2_model_runner", True, "model_runner is 'v2'"),
    ],
)
def test_what_a_stage_cannot_do_is_refused(
    mimo_audio_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, part: str, name: str, value: Any, message: str
) -> None:
    config = stage_config(mimo_audio_checkpoint)
    checked_options(config)
    monkeypatch.setattr(getattr(config, part), name, value, raising=False)
    with pytest.raises(ValueError, match=message):
        checked_options(config)


def test_sleep_mode_goes_without_graphs(mimo_audio_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stage_config(mimo_audio_checkpoint, additional_config={"audio_perf": {"cuda_graphs": False}})
    monkeypatch.setattr(config.model_config, "enable_sleep_mode", True)
    assert not checked_options(config).cuda_graphs


def test_a_missing_tokenizer_is_named(mimo_audio_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = stage_config(mimo_audio_checkpoint)
    monkeypatch.setenv("MIMO_AUDIO_TOKENIZER_PATH", "nobody/nothing")
    with pytest.raises(ValueError, match="PATH is 'nobody/nothing'; allowed: a folder with the tokenizer's config"):
        checked_options(config)
    monkeypatch.delenv("MIMO_AUDIO_TOKENIZER_PATH")
    with pytest.raises(ValueError, match="set MIMO_AUDIO_TOKENIZER_PATH in the environment"):
        checked_options(config)


def test_errors_are_told_through_our_scheduler_alone(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one would pass them on to the client as an output."""
    assert ERROR_OUTPUT in run(stage, [[1, 2, 3]])
    monkeypatch.setattr(stage, "_can_report_errors", False)
    outputs = run(stage, [[1, 2, 3]])
    assert ERROR_OUTPUT not in outputs
    assert outputs["model_outputs"][0].shape == (0,)


def test_warnings_are_given_once(mimo_audio_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    from vllm_omni_audio_perf.mimo_audio import stage_check

    monkeypatch.setattr(stage_check, "_warned", set())
    with caplog.at_level(logging.WARNING, "vllm_omni_audio_perf"):
        for _ in range(2):
            stage_config(mimo_audio_checkpoint, {"codec_chunk_frames": 5, "codec_left_context_frames": 4})
    assert caplog.text.count("layers together look") == 1
    assert caplog.text.count("The connector has no audio_perf section") == 1


def test_settings_of_a_stream(mimo_audio_checkpoint: Path) -> None:
    settings = checked_stream(stage_config(mimo_audio_checkpoint))
    assert settings == StreamSettings(chunk=5, left_context=40)
    assert checked_stream(stage_config(mimo_audio_checkpoint, async_chunk=False)) is None
