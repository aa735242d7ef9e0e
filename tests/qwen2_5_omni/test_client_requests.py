# SPDX-License-Identifier: Apache-2.0
"""Voice and seed where requests come in: the chat server and the offline `Omni`."""

import asyncio
import copy
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_omni_audio_perf.architectures import QWEN2_5_OMNI
from vllm_omni_audio_perf.qwen2_5_omni import client_requests
from vllm_omni_audio_perf.qwen2_5_omni.request_settings import RequestError
from vllm_omni_audio_perf.scheduling.offline import EMPTY_ON_ERROR

UNKNOWN = r"There is no voice 'alloy'; this checkpoint has: Chelsie, Ethan\."


def engine(model: str, architecture: str = QWEN2_5_OMNI) -> Any:
    """vLLM-Omni's engine with a stock thinker and a code2wav stage of some architecture."""

    def stage(model_arch: str) -> Any:
        model_config = SimpleNamespace(
            **{
                "model": model,
                "revision": None,
                "model_arch": model_arch,
                "max_logprobs": 20,
                "logits_processors": None,
                "is_diffusion": False,
            },
            get_vocab_size=lambda: 152_064,
        )
        return SimpleNamespace(
            model_config=model_config,
            load_config=SimpleNamespace(download_dir=None, load_format="auto"),
            speculative_config=None,
            structured_outputs_config=None,
        )

    return SimpleNamespace(stage_vllm_configs=[stage("stock"), stage(architecture)])


@pytest.fixture
def model(qwen2_5_omni_checkpoint: Path) -> Iterator[str]:
    """A model that this process has a stage of ours for."""
    client_requests.announce(engine(str(qwen2_5_omni_checkpoint)).stage_vllm_configs[1])
    yield str(qwen2_5_omni_checkpoint)
    client_requests._voices.clear()


def preprocess(model: str, *, architecture: str = QWEN2_5_OMNI, **body: Any) -> dict[str, Any]:
    """The information in the prompt that the chat server makes of a body."""

    async def upstream(serving: Any, request: Any, messages: list[Any], *, renderer: Any = None) -> tuple[Any, list]:
        information = {"speaker": ["chelsie"]} | getattr(request, "additional_information", {})
        return messages, [{"prompt_token_ids": [1], "additional_information": information}]

    serving = SimpleNamespace(engine_client=SimpleNamespace(engine=engine(model, architecture)))
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


@pytest.mark.parametrize("information", [{"speaker": ["Nobody"]}, {"seed": ["x"]}])
def test_information_in_the_body_itself_is_checked(model: str, information: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        preprocess(model, additional_information=information)


@pytest.mark.parametrize(
    ("talker", "message"),
    [
        ({"allowed_token_ids": [999_999_999]}, r"sampling_params_list\[1\]: allowed_token_ids"),
        ({"logit_bias": {"999999999": 1.0}}, r"sampling_params_list\[1\]: "),
        ({"temperature": -1}, r"sampling_params_list\[1\]: .*temperature"),
        ({"no_such_field": 1}, r"sampling_params_list\[1\]: .*no_such_field"),
    ],
)
def test_sampling_parameters_that_a_later_stage_would_die_of(model: str, talker: dict[str, Any], message: str) -> None:
    pytest.importorskip("vllm")
    with pytest.raises(RequestError, match=message):
        preprocess(model, sampling_params_list=[{}, talker])
    preprocess(model, sampling_params_list=[{}, {"allowed_token_ids": [8250], "seed": 3}])


def test_engines_without_a_stage_of_ours_are_left_alone(model: str) -> None:
    """Even if they serve the same model."""
    body = {"voice": "alloy", "seed": 7, "sampling_params_list": [{}, {"allowed_token_ids": [999_999_999]}]}
    assert preprocess(model, architecture="stock", **body) == {"speaker": ["chelsie"]}
    omni = Omni(model, "stock")
    assert omni.generate([BAD_PROMPT]) == ["audio"]
    assert omni.seen == [[BAD_PROMPT]]


class Omni:
    """Stands for vLLM-Omni's; records what reaches it."""

    def __init__(self, model: str, architecture: str = QWEN2_5_OMNI) -> None:
        self.engine = engine(model, architecture)
        self.seen: list[Any] = []

    @client_requests.check_prompts_first
    def generate(self, prompts: Any, sampling_params_list: Any = None) -> list[str]:
        self.seen.append(prompts)
        return ["audio"]


BAD_PROMPT = {"prompt": "b", "additional_information": {"speaker": ["alloy"]}}


@pytest.mark.parametrize(
    "prompts",
    ["a", {"prompt": "a"}, ["a"], ({"prompt": "a", "additional_information": {"speaker": ["ethan"]}},)],
)
def test_good_prompts_pass_and_end_empty_where_they_fail(model: str, prompts: Any) -> None:
    omni = Omni(model)
    given = copy.deepcopy(prompts)
    assert omni.generate(prompts, None) == ["audio"]
    assert prompts == given
    ((sent,),) = omni.seen
    assert sent["prompt"] == "a"
    assert sent["additional_information"][EMPTY_ON_ERROR] == [True]
    if isinstance(given, tuple):
        assert sent["additional_information"]["speaker"] == ["ethan"]


def test_a_bad_prompt_is_named_before_any_is_sent(model: str) -> None:
    omni = Omni(model)
    for prompts in ([{"prompt": "a"}, BAD_PROMPT], deque([{"prompt": "a"}, BAD_PROMPT]), ("a", BAD_PROMPT)):
        with pytest.raises(RequestError, match=f"prompt 1: {UNKNOWN}"):
            omni.generate(prompts)
    assert not omni.seen


def test_wraps_vllm_omnis_own(model: str) -> None:
    """Where the modules are loaded; once, however often it is announced."""
    pytest.importorskip("vllm_omni")
    from vllm_omni.entrypoints.omni import Omni as UpstreamOmni
    from vllm_omni.entrypoints.openai.serving_chat import OmniOpenAIServingChat

    for _ in range(2):
        client_requests.announce(engine(model).stage_vllm_configs[1])
    for method in (UpstreamOmni.generate, OmniOpenAIServingChat._preprocess_chat):
        assert method.__wrapped__.__module__.startswith("vllm_omni.")
        assert not hasattr(method.__wrapped__, "__wrapped__")
