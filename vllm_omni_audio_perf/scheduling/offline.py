# SPDX-License-Identifier: Apache-2.0
"""Requests of vLLM-Omni's offline ``Omni.generate``, which gives up all its prompts at the first error of one of them.

They carry a wish to end with empty audio instead; the reason then stands in the log alone.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

EMPTY_ON_ERROR = "audio_perf_empty_on_error"
"""Key of a prompt's ``additional_information``: end with empty audio, not with an error, where the request fails."""


def wish_empty_on_error(prompt: Any) -> Any:
    """The prompt with the wish to end with empty audio where it fails."""
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return prompt
    information = prompt.get("additional_information") or {}
    return {**prompt, "additional_information": {**information, EMPTY_ON_ERROR: [True]}}


def wishes_empty_on_error(additional_information: object) -> bool:
    """Whether the ``additional_information`` of a request carries that wish."""
    return isinstance(additional_information, Mapping) and bool(additional_information.get(EMPTY_ON_ERROR))


def prompts_of(prompts: Any) -> list[Any]:
    """What ``Omni.generate`` was given, as a list."""
    several = isinstance(prompts, Sequence) and not isinstance(prompts, str)
    return list(prompts) if several else [prompts]


def end_with_empty_audio(architecture: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of ``Omni.generate`` for engines that have a stage of `architecture`."""

    def wrapper(generate: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(generate)
        def wishing(omni: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
            if has_stage(omni.engine, architecture):
                prompts = [wish_empty_on_error(prompt) for prompt in prompts_of(prompts)]
            return generate(omni, prompts, *args, **kwargs)

        return wishing

    return wrapper


def has_stage(engine: Any, architecture: str) -> bool:
    """Whether an engine has a stage with that ``model_arch:``."""
    configs = getattr(engine, "stage_vllm_configs", None) or []
    return any(getattr(getattr(config, "model_config", None), "model_arch", None) == architecture for config in configs)
