# SPDX-License-Identifier: Apache-2.0
"""Voice and seed where requests come in: the chat server and the offline `Omni`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_audio_perf.qwen2_5_omni import client_requests
from vllm_omni_audio_perf.qwen2_5_omni.request_settings import REPORT_ERRORS, RequestError

UNKNOWN = r"There is no voice 'alloy'; this checkpoint has: Chelsie, Ethan\."


@pytest.fixture
def model(qwen2_5_omni_checkpoint: Path) -> Iterator[str]:
    """A model that this process has a stage of ours for."""
    client_requests.announce(str(qwen2_5_omni_checkpoint), None)
    yield str(qwen2_5_omni_checkpoint)
    client_requests._revisions.clear()


def preprocess(model: str, **body: Any) -> dict[str, Any]:
    """The prompt that the chat server makes of a body."""

    async def upstream(serving: Any, request: Any, messages: list[Any], *, renderer: Any = None) -> tuple[Any, list]:
        return messages, [{"prompt_token_ids": [1], "additional_information": {"speaker": ["as upstream writes it"]}}]

    serving = SimpleNamespace(model_config=SimpleNamespace(model=model))
    wrapped = client_requests.carry_client_settings(upstream)
    conversation, (prompt,) = asyncio.run(wrapped(serving, SimpleNamespace(**body), ["message"], renderer=None))
    assert conversation == ["message"]
    return prompt["additional_information"]


@pytest.mark.parametrize(
    "body",
    [
        {"voice": "ethan"},
        {"speaker": "ETHAN"},
        {"audio": {"voice": "Ethan", "format": "wav"}},
        {"audio": SimpleNamespace(voice="ethan")},
        {"voice": "Ethan", "speaker": "Chelsie", "audio": {"voice": "Chelsie"}},
    ],
)
def test_reads_the_voice_wherever_clients_put_it(model: str, body: dict[str, Any]) -> None:
    assert preprocess(model, **body)["speaker"] == ["Ethan"]


@pytest.mark.parametrize("body", [{"voice": "alloy"}, {"speaker": "alloy"}, {"audio": {"voice": "alloy"}}])
def test_an_unknown_voice_is_refused(model: str, body: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=UNKNOWN):
        preprocess(model, **body)


def test_reads_the_seed(model: str) -> None:
    assert preprocess(model, seed=7)["seed"] == [7]
    assert "seed" not in preprocess(model, seed=None)


def test_a_client_of_the_server_is_told_of_errors(model: str) -> None:
    assert preprocess(model)[REPORT_ERRORS] == [True]


def test_other_models_are_left_alone(model: str) -> None:
    assert preprocess("another", voice="alloy", seed=7) == {"speaker": ["as upstream writes it"]}


class Omni:
    """Stands for vLLM-Omni's; records what reaches it."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.seen: list[Any] = []

    @client_requests.check_prompts_first
    def generate(self, prompts: Any, sampling_params_list: Any = None) -> list[str]:
        self.seen.append(prompts)
        return ["audio"]


@pytest.mark.parametrize(
    "prompts", ["Hello", {"prompt": "Hello"}, [{"prompt": "a", "additional_information": {"speaker": ["ethan"]}}]]
)
def test_good_prompts_pass(model: str, prompts: Any) -> None:
    omni = Omni(model)
    assert omni.generate(prompts, None) == ["audio"]
    assert omni.seen == [prompts]


def test_a_bad_prompt_is_named_before_any_is_sent(model: str) -> None:
    omni = Omni(model)
    prompts = [{"prompt": "a"}, {"prompt": "b", "additional_information": {"speaker": ["alloy"]}}]
    with pytest.raises(RequestError, match=f"prompt 1: {UNKNOWN}"):
        omni.generate(prompts)
    assert not omni.seen
    assert Omni("another").generate(prompts) == ["audio"]


def test_wraps_vllm_omnis_own(model: str) -> None:
    """Where the modules are loaded; once, however often it is announced."""
    pytest.importorskip("vllm_omni")
    from vllm_omni.entrypoints.omni import Omni as UpstreamOmni
    from vllm_omni.entrypoints.openai.serving_chat import OmniOpenAIServingChat

    client_requests.announce(model, None)
    client_requests.announce(model, None)
    for method in (UpstreamOmni.generate, OmniOpenAIServingChat._preprocess_chat):
        assert method.__wrapped__.__module__.startswith("vllm_omni.")
