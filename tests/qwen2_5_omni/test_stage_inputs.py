# SPDX-License-Identifier: Apache-2.0
"""What passes from one stage to the next: upstream's inputs, with voice and seed where the next stage is ours."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni")

from vllm_omni.engine.stage_engine_core_client import StageEngineCoreClientBase
from vllm_omni.errors import OmniClientError
from vllm_omni.model_executor.stage_input_processors import qwen2_5_omni as upstream

import vllm_omni_audio_perf
from vllm_omni_audio_perf.architectures import QWEN2_5_OMNI
from vllm_omni_audio_perf.qwen2_5_omni.request_settings import RequestSettings

STOCK = "Qwen2_5OmniForConditionalGeneration"
PROMPT = {"prompt": "Hello", "additional_information": {"speaker": ["ETHAN"], "seed": [7]}}


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    vllm_omni_audio_perf.register()
    vllm_omni_audio_perf.register()


@pytest.fixture
def call(qwen2_5_omni_checkpoint: Path) -> Callable[..., list[Any]]:
    """Call a stage's input processor as vLLM-Omni's stage client does."""

    def make(
        name: str,
        ids: list[int],
        prompt: Any = PROMPT,
        *,
        arch: str = QWEN2_5_OMNI,
        reason: str | None = "length",
        stop: str | int | None = None,
        max_model_len: int = 100,
    ) -> Any:
        completion = SimpleNamespace(cumulative_token_ids=ids, token_ids=ids, finish_reason=reason, stop_reason=stop)
        output = SimpleNamespace(request_id="r", prompt_token_ids=[1, 2, 3], outputs=[completion])
        client = SimpleNamespace(
            custom_process_input_func=getattr(upstream, name),
            requires_multimodal_data=False,
            vllm_config=SimpleNamespace(
                model_config=SimpleNamespace(
                    model_arch=arch,
                    model=str(qwen2_5_omni_checkpoint),
                    revision=None,
                    model_stage="next",
                    max_model_len=max_model_len,
                )
            ),
        )
        return StageEngineCoreClientBase._call_custom_process_input(client, [output], prompt, None)

    return make


@pytest.mark.parametrize("name", ["thinker2talker_token_only", "talker2code2wav_token_only"])
@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT]])
def test_carries_voice_and_seed_to_a_stage_of_ours(name: str, prompt: Any, call: Callable[..., list[Any]]) -> None:
    (entry,) = call(name, [5, 6], prompt)
    assert RequestSettings.from_buffer(entry["model_intermediate_buffer"]) == RequestSettings(voice="Ethan", seed=7)


@pytest.mark.parametrize("name", ["thinker2talker_token_only", "talker2code2wav_token_only"])
def test_what_a_stock_stage_gets_is_upstreams(name: str, call: Callable[..., list[Any]]) -> None:
    (entry,) = call(name, [5, 6], arch=STOCK)
    (ours,) = call(name, [5, 6])
    assert "model_intermediate_buffer" not in entry
    assert ours.pop("model_intermediate_buffer")
    assert entry == ours


def test_an_unknown_voice_is_the_clients_error(call: Callable[..., list[Any]]) -> None:
    prompt = {"prompt": "Hello", "additional_information": {"speaker": ["Nobody"]}}
    with pytest.raises(OmniClientError, match="this checkpoint has: Chelsie, Ethan") as error:
        call("talker2code2wav_token_only", [5, 6], prompt)
    assert error.value.status_code == 400


def test_a_prompt_without_settings(call: Callable[..., list[Any]]) -> None:
    (entry,) = call("talker2code2wav_token_only", [5, 6], {"prompt": "Hello"})
    assert RequestSettings.from_buffer(entry["model_intermediate_buffer"]) == RequestSettings()


@pytest.mark.parametrize(("ids", "reason"), [([9], "stop"), ([], "stop"), ([], "length")])
def test_an_empty_answer_gives_the_talker_nothing(ids: list[int], reason: str, call: Callable[..., list[Any]]) -> None:
    assert call("thinker2talker_token_only", ids, reason=reason) == []


@pytest.mark.parametrize(
    ("ids", "reason", "stop"), [([9], "length", None), ([9, 8], "stop", 8), ([], None, None), ([9], "stop", "word")]
)
def test_any_other_answer_reaches_the_talker(
    ids: list[int], reason: str | None, stop: str | int | None, call: Callable[..., list[Any]]
) -> None:
    assert len(call("thinker2talker_token_only", ids, reason=reason, stop=stop)) == 1


@pytest.mark.parametrize(
    ("name", "length", "room"),
    [("thinker2talker_token_only", 5, 6), ("talker2code2wav_token_only", 2, 2)],  # the talker needs room for a code
)
def test_an_input_that_the_next_stage_has_no_room_for(
    name: str, length: int, room: int, call: Callable[..., list[Any]]
) -> None:
    """Upstream passes it on, and the stage dies of it."""
    assert len(call(name, [5, 6], max_model_len=room)) == 1
    with pytest.raises(
        OmniClientError, match=rf"next stage would get {length} tokens; its max_model_len of {room - 1}"
    ):
        call(name, [5, 6], max_model_len=room - 1)
    assert len(call(name, [5, 6], max_model_len=room - 1, arch=STOCK)) == 1


def test_no_codes_give_no_input(call: Callable[..., list[Any]]) -> None:
    """vLLM-Omni then ends the request with empty audio."""
    assert call("talker2code2wav_token_only", [8294]) == []


def test_upstream_finds_the_wrapped_functions() -> None:
    """By the names that its pipeline has, and with the parameter that tells whose stage it is."""
    from vllm_omni.model_executor.models.qwen2_5_omni.pipeline import QWEN2_5_OMNI_PIPELINE

    for stage in QWEN2_5_OMNI_PIPELINE.stages[1:]:
        module, _, name = stage.sync_process_input_func.rpartition(".")
        assert module == upstream.__name__
        assert "target_model_config" in inspect.signature(getattr(upstream, name)).parameters
