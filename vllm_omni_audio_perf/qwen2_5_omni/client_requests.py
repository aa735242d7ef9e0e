# SPDX-License-Identifier: Apache-2.0
"""Reads voice and seed where requests come in, and refuses what is not there before any stage has worked on it.

Active in a process whose pipeline has a code2wav stage of ours (`announce`), for the models of such pipelines only.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from vllm_omni_audio_perf import compat
from vllm_omni_audio_perf.qwen2_5_omni.request_settings import (
    REPORT_ERRORS,
    RequestError,
    RequestSettings,
    checked_seed,
    checked_voice,
)
from vllm_omni_audio_perf.qwen2_5_omni.speaker_file import voice_names

_revisions: dict[str, str | None] = {}
"""Models of which this process has a code2wav stage of ours, each with its revision."""


def announce(model: str, revision: str | None) -> None:
    """Look at the requests for a model from now on."""
    _revisions[model] = revision
    compat.wrap_where_requests_come_in(generate=check_prompts_first, preprocess_chat=carry_client_settings)


def check_prompts_first(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Omni.generate`` so that it refuses bad prompts before it sends any: at an error later it closes itself."""

    @functools.wraps(generate)
    def checked(omni: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        voices = _voices(omni.model)
        if voices is not None:
            listed = prompts if isinstance(prompts, (list, tuple)) else [prompts]
            for index, prompt in enumerate(listed):
                try:
                    RequestSettings.from_prompt(prompt, voices)
                except RequestError as error:
                    raise RequestError(f"prompt {index}: {error}") from None
        return generate(omni, prompts, *args, **kwargs)

    return checked


def carry_client_settings(
    preprocess_chat: Callable[..., Awaitable[tuple[Any, list[Any]]]],
) -> Callable[..., Awaitable[tuple[Any, list[Any]]]]:
    """Wrap ``OmniOpenAIServingChat._preprocess_chat``: voice and seed of the body go into the prompt.

    The server answers a ``ValueError`` in here with status 400.
    """

    @functools.wraps(preprocess_chat)
    async def carrying(serving: Any, request: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        voices = _voices(serving.model_config.model)
        if voices is None:
            return await preprocess_chat(serving, request, *args, **kwargs)
        settings: dict[str, Any] = {REPORT_ERRORS: [True]}
        if (voice := checked_voice(_requested_voice(request), voices)) is not None:
            settings["speaker"] = [voice]
        if (seed := checked_seed(getattr(request, "seed", None))) is not None:
            settings["seed"] = [seed]
        conversation, prompts = await preprocess_chat(serving, request, *args, **kwargs)
        for prompt in prompts:
            prompt["additional_information"] = (prompt.get("additional_information") or {}) | settings
        return conversation, prompts

    return carrying


def _voices(model: str) -> tuple[str, ...] | None:
    """Names of the voices of a model that was announced, else None."""
    return voice_names(model, _revisions[model]) if model in _revisions else None


def _requested_voice(request: Any) -> object:
    """The voice of a chat completion's body: `voice` or `speaker` at the top, or `audio.voice`, in this order."""
    audio = getattr(request, "audio", None)
    in_audio = audio.get("voice") if isinstance(audio, Mapping) else getattr(audio, "voice", None)
    return getattr(request, "voice", None) or getattr(request, "speaker", None) or in_audio
