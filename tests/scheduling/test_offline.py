# SPDX-License-Identifier: Apache-2.0
"""The wish of offline prompts to end with empty audio where they fail."""

from types import SimpleNamespace
from typing import Any

from vllm_omni_audio_perf.scheduling.offline import (
    EMPTY_ON_ERROR,
    end_with_empty_audio,
    wish_empty_on_error,
    wishes_empty_on_error,
)


def omni(*architectures: str) -> Any:
    configs = [SimpleNamespace(model_config=SimpleNamespace(model_arch=name)) for name in architectures]
    return SimpleNamespace(engine=SimpleNamespace(stage_vllm_configs=[*configs, None]))


def sent(engine: Any, prompts: Any) -> Any:
    generate = end_with_empty_audio("Ours")(lambda omni, prompts, *args, **kwargs: (prompts, args, kwargs))
    assert generate.__name__ == "<lambda>"
    prompts, args, kwargs = generate(engine, prompts, "params", use_tqdm=False)
    assert (args, kwargs) == (("params",), {"use_tqdm": False})
    return prompts


def test_prompts_of_an_engine_with_a_stage_of_ours_wish_it() -> None:
    prompts = sent(omni("Stock", "Ours"), ["text", {"prompt": "more", "additional_information": {"a": [1]}}])
    assert [wishes_empty_on_error(prompt["additional_information"]) for prompt in prompts] == [True, True]
    assert prompts[0]["prompt"] == "text"
    assert prompts[1]["additional_information"] == {"a": [1], EMPTY_ON_ERROR: [True]}


def test_prompts_of_other_engines_stay() -> None:
    for prompts in ("text", ["text"], {"prompt": "text"}):
        assert sent(omni("Stock"), prompts) is prompts


def test_what_is_no_prompt_stays() -> None:
    assert wish_empty_on_error(7) == 7
    assert not wishes_empty_on_error(None)
    assert not wishes_empty_on_error({})
