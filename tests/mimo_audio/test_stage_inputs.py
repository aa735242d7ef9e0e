# SPDX-License-Identifier: Apache-2.0
"""What the talker hands to code2wav, through upstream's own payloads and its codec between processes."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm_omni")

from vllm_omni.data_entry_keys import OmniPayloadStruct
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer
from vllm_omni.errors import OmniClientError
from vllm_omni.model_executor.stage_input_processors import mimo_audio as upstream

from vllm_omni_audio_perf.architectures import MIMO_AUDIO
from vllm_omni_audio_perf.mimo_audio.groups import SPEECH_MARK, from_ids
from vllm_omni_audio_perf.mimo_audio.stage_inputs import (
    chunk_payload,
    full_payload,
    is_to_end_empty,
    token_only_inputs,
)
from vllm_omni_audio_perf.mimo_audio.streaming import new_frames
from vllm_omni_audio_perf.scheduling.offline import EMPTY_ON_ERROR

GROUP_SIZE, ROWS, FRAMES_PER_GROUP, RIGHT_WINDOW = 4, 8, 16, 10
ENDINGS = ("with the last codes", "with an empty payload", "with zeros", "with none")


def not_ours(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("upstream's processor was asked")


ours = chunk_payload(not_ours)


def manager(ours: bool = True, **extra: Any) -> SimpleNamespace:
    """A transfer manager as the processors see it."""
    settings = extra | ({"audio_perf": {"right_context_frames": extra.pop("right", 0)}} if ours else {})
    return SimpleNamespace(connector=SimpleNamespace(config=settings), code_prompt_token_ids=defaultdict(list))


def request(**information: Any) -> SimpleNamespace:
    return SimpleNamespace(external_req_id="request", additional_information=information or None)


def step(number: int) -> dict[str, Any]:
    """The talker's output of a step: a group of codes that are all `number`."""
    return {"codes": {"audio": torch.full((1, 1, ROWS, GROUP_SIZE), number, dtype=torch.int32)}}


NO_CODES: dict[str, Any] = {"codes": {"audio": torch.empty(0)}}
TEXT_STEP = step(0)


def payloads(transfer_manager: Any, groups: int, ending: str, text_steps: bool = False) -> list[dict[str, Any]]:
    """What code2wav receives for a request of so many groups, numbered from 1."""
    steps: list[Any] = []
    for number in range(1, groups + 1):
        steps += [TEXT_STEP, step(number)] if text_steps else [step(number)]
    ends = {"with an empty payload": NO_CODES, "with zeros": TEXT_STEP, "with none": None}
    if ending in ends:
        steps.append(ends[ending])
    received = []
    for index, output in enumerate(steps):
        payload = ours(transfer_manager, output, request(), is_finished=index == len(steps) - 1)
        if payload is not None:
            assert isinstance(payload, OmniPayloadStruct)
            received.append(OmniSerializer.deserialize(OmniSerializer.serialize(payload)))
    return received


def spoken_frames(received: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(number of the group, frame within it) of each vocoder frame that is spoken, in order."""
    frames = []
    for payload in received:
        meta = payload["meta"]
        if not payload["codes"]["audio"].numel():
            continue
        assert meta["code_flat_numel"] == payload["codes"]["audio"].numel()
        codes = from_ids(payload["codes"]["audio"], GROUP_SIZE, ROWS)
        groups = codes[0, ::GROUP_SIZE].tolist()
        first, end = new_frames(
            groups=len(groups),
            spoken=meta["left_context_size"],
            index=meta["chunk_seq"],
            final=bool(meta["stream_finished"]),
            right_context=meta["right_holdback_size"],
            right_window=RIGHT_WINDOW,
            frames_per_group=FRAMES_PER_GROUP,
        )
        frames += [(groups[frame // FRAMES_PER_GROUP], frame % FRAMES_PER_GROUP) for frame in range(first, end)]
    return frames


def check(received: list[dict[str, Any]], groups: int) -> None:
    assert [bool(payload["meta"]["finished"]) for payload in received] == [False] * (len(received) - 1) + [True]
    expected = [(group, frame) for group in range(1, groups + 1) for frame in range(FRAMES_PER_GROUP)]
    assert spoken_frames(received) == expected


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("chunk", [3, 4, 10, 30, 40])
def test_no_group_is_lost_or_repeated(chunk: int, ending: str) -> None:
    for groups in (1, 2, chunk - 1, chunk, chunk + 1, 2 * chunk, 40 + chunk, 93, 5 * chunk):
        transfer_manager = manager(codec_chunk_frames=chunk, codec_left_context_frames=40)
        check(payloads(transfer_manager, groups, ending), groups)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("right", [0, 1, 3])
def test_ramp_right_context_and_text_steps(right: int, ending: str) -> None:
    for groups in (1, 3, 9, 21, 45, 60):
        transfer_manager = manager(codec_chunk_frames=12, codec_chunk_ramp=[1, 2, 6], right=right)
        check(payloads(transfer_manager, groups, ending, text_steps=True), groups)


def test_requests_do_not_share_groups() -> None:
    transfer_manager = manager(codec_chunk_frames=3)
    first, second = request(), request()
    second.external_req_id = "other"
    for number in (1, 2, 3):
        of_first = ours(transfer_manager, step(number), first)
        of_second = ours(transfer_manager, step(10 + number), second)
    assert from_ids(of_first.codes.audio, GROUP_SIZE, ROWS)[0, ::GROUP_SIZE].tolist() == [1, 2, 3]
    assert from_ids(of_second.codes.audio, GROUP_SIZE, ROWS)[0, ::GROUP_SIZE].tolist() == [11, 12, 13]


@pytest.mark.parametrize("output", [None, {}, NO_CODES, TEXT_STEP, {"codes": {"audio": None}}])
def test_a_request_without_speech_ends(output: Any) -> None:
    transfer_manager = manager()
    assert ours(transfer_manager, output, request()) is None
    payload = ours(transfer_manager, output, request(), is_finished=True)
    assert payload.codes.audio.numel() == 0
    assert bool(payload.meta.finished)


def test_a_stock_stage_understands_the_payloads() -> None:
    """It drops `left_context_size` groups and speaks the rest."""
    groups = 50
    received = payloads(manager(codec_chunk_frames=6, codec_left_context_frames=40), groups, "with none")
    spoken: list[int] = []
    for payload in received:
        codes = from_ids(payload["codes"]["audio"], GROUP_SIZE, ROWS)
        spoken += codes[0, ::GROUP_SIZE].tolist()[payload["meta"]["left_context_size"] :]
    assert spoken == list(range(1, groups + 1))


def test_a_connector_that_does_not_ask_gets_upstreams_payloads() -> None:
    wrapped = chunk_payload(upstream.llm2code2wav_async_chunk)
    ours_of, upstreams = manager(ours=False, codec_chunk_frames=3), manager(ours=False, codec_chunk_frames=3)
    for number in range(1, 8):
        actual = wrapped(ours_of, step(number), request(), is_finished=number == 7)
        expected = upstream.llm2code2wav_async_chunk(upstreams, step(number), request(), is_finished=number == 7)
        assert (actual is None) == (expected is None)
        if actual is not None:
            assert torch.equal(actual.codes.audio, expected.codes.audio)
            assert actual.meta.left_context_size == expected.meta.left_context_size


def test_upstreams_processor_repeats_the_end_which_is_why_ours_exists() -> None:
    transfer_manager = manager(ours=False, codec_chunk_frames=3, codec_left_context_frames=40)
    spoken: list[int] = []
    for number in range(1, 8):
        output = step(number) if number < 7 else None
        payload = upstream.llm2code2wav_async_chunk(transfer_manager, output, request(), is_finished=number == 7)
        if payload is not None:
            codes = from_ids(payload.codes.audio, GROUP_SIZE, ROWS)[0, ::GROUP_SIZE].tolist()
            spoken += codes[payload.meta.left_context_size or 0 :]
    assert spoken != [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("groups", [0, 1, 7, 505, 506, 2000])
def test_codes_all_at_once_are_never_cut(groups: int) -> None:
    steps = [step(1 + number % 127)["codes"]["audio"] for number in range(groups)]
    pooling_output = {"codes.audio": torch.cat([*steps, TEXT_STEP["codes"]["audio"]])}
    payload = full_payload(not_ours)(SimpleNamespace(_omni_connector=manager().connector), pooling_output, request())
    payload = OmniSerializer.deserialize(OmniSerializer.serialize(payload))
    codes = payload["codes"]["ref"]
    assert codes[0].tolist() if groups else codes.numel() == 0
    assert codes.numel() == groups * GROUP_SIZE * ROWS
    assert list(payload["codes"]["audio"]) == [SPEECH_MARK]
    if groups:
        assert codes[3, ::GROUP_SIZE].tolist() == [1 + number % 127 for number in range(groups)]


def test_upstreams_payload_is_cut_at_505_groups() -> None:
    pooling_output = {"codes.audio": torch.ones(506, 1, ROWS, GROUP_SIZE, dtype=torch.long)}
    payload = upstream.llm2code2wav_full_payload(None, pooling_output, request())
    assert len(payload["codes"]["audio"]) == 18192 < 506 * 36


def target(architecture: str = MIMO_AUDIO, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(model_arch=architecture, stage_connector_config={"name": "shm", "extra": extra})


def test_code2wavs_prompt_is_one_id() -> None:
    process = token_only_inputs(not_ours)
    (entry,) = process([object()], [{"prompt": ""}], target_model_config=target(audio_perf={}))
    assert entry["prompt_token_ids"] == [SPEECH_MARK]
    assert not is_to_end_empty(entry["model_intermediate_buffer"])
    prompt = {"prompt": "", "additional_information": {EMPTY_ON_ERROR: [True]}}
    (entry,) = process([object()], prompt, target_model_config=target(audio_perf={}))
    assert is_to_end_empty(entry["model_intermediate_buffer"])


def test_the_wish_for_empty_audio_travels_with_a_chunk() -> None:
    transfer_manager = manager(codec_chunk_frames=3)
    for wish in ({}, {EMPTY_ON_ERROR: [True]}):
        for number in (1, 2, 3):
            payload = ours(transfer_manager, step(number), request(**wish))
        received = OmniSerializer.deserialize(OmniSerializer.serialize(payload))
        assert is_to_end_empty(received) == bool(wish)


def test_a_stock_stage_behind_our_connector_is_refused_where_it_would_be_silent() -> None:
    with pytest.raises(OmniClientError, match=f"goes with `model_arch: {MIMO_AUDIO}` .* 'MiMoAudioModel'"):
        token_only_inputs(not_ours)([object()], target_model_config=target("MiMoAudioModel", audio_perf={}))


def test_a_connector_that_does_not_ask_gets_upstreams_prompt() -> None:
    output = SimpleNamespace(outputs=[SimpleNamespace(multimodal_output={"codes": {"audio": torch.ones(3, 1, 8, 4)}})])
    process = token_only_inputs(upstream.llm2code2wav_token_only)
    for config in (None, target(), target("MiMoAudioModel")):
        assert process([output], target_model_config=config) == upstream.llm2code2wav_token_only([output])
