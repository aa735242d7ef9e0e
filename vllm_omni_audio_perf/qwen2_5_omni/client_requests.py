# SPDX-License-Identifier: Apache-2.0
"""Reads what clients ask for where requests come in, and refuses what is not there before a stage works on it.

Acts on engines that have a stage of ours, and on no others.
"""

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from vllm_omni_audio_perf import compat
from vllm_omni_audio_perf.architectures import QWEN2_5_OMNI
from vllm_omni_audio_perf.qwen2_5_omni.request_settings import (
    RequestError,
    RequestSettings,
    checked_seed,
    checked_voice,
)
from vllm_omni_audio_perf.qwen2_5_omni.speaker_file import voice_names
from vllm_omni_audio_perf.scheduling.offline import prompts_of, wish_empty_on_error

_voices: dict[str, tuple[str, ...]] = {}
"""For each model of which this process has a stage of ours the names of its voices, read at start and never again."""


def announce(vllm_config: Any) -> None:
    """Look at the requests for a stage of ours from now on. Called for each, before it starts."""
    model, load = vllm_config.model_config, vllm_config.load_config
    _voices[model.model] = voice_names(
        model.model, model.revision, download_dir=load.download_dir, download=load.load_format != "dummy"
    )
    compat.wrap_where_requests_come_in(generate=check_prompts_first, preprocess_chat=carry_client_settings)


def announced_voices(model: str) -> tuple[str, ...] | None:
    """Names of the voices of an announced model, by the path that vLLM has for it; None for another one."""
    return _voices.get(model)


def check_prompts_first(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``Omni.generate``: it refuses bad prompts before it sends any, and a failed one ends with empty audio.

    At the first error that reaches it, it gives up all prompts and closes itself.
    """

    @functools.wraps(generate)
    def checked(omni: Any, prompts: Any, *args: Any, **kwargs: Any) -> Any:
        voices = _voices_of(omni.engine)
        if voices is None:
            return generate(omni, prompts, *args, **kwargs)
        listed = prompts_of(prompts)
        for index, prompt in enumerate(listed):
            try:
                RequestSettings.from_prompt(prompt, voices)
            except RequestError as error:
                raise RequestError(f"prompt {index}: {error}") from None
        return generate(omni, [wish_empty_on_error(prompt) for prompt in listed], *args, **kwargs)

    return checked


def carry_client_settings(
    preprocess_chat: Callable[..., Awaitable[tuple[Any, list[Any]]]],
) -> Callable[..., Awaitable[tuple[Any, list[Any]]]]:
    """Wrap ``OmniOpenAIServingChat._preprocess_chat``: voice and seed of the body go into the prompt.

    The server answers a ``ValueError`` in here with status 400.
    """

    @functools.wraps(preprocess_chat)
    async def carrying(serving: Any, request: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        engine = getattr(serving.engine_client, "engine", None)
        voices = _voices_of(engine)
        if voices is None:
            return await preprocess_chat(serving, request, *args, **kwargs)
        _check_sampling_params(getattr(request, "sampling_params_list", None), engine)
        settings: dict[str, Any] = {}
        if (voice := checked_voice(_requested_voice(request), voices)) is not None:
            settings["speaker"] = [voice]
        if (seed := checked_seed(getattr(request, "seed", None))) is not None:
            settings["seed"] = [seed]
        conversation, prompts = await preprocess_chat(serving, request, *args, **kwargs)
        for prompt in prompts:
            prompt["additional_information"] = (prompt.get("additional_information") or {}) | settings
            RequestSettings.from_prompt(prompt, voices)  # the body may hold such information of its own
        return conversation, prompts

    return carrying


def _voices_of(engine: Any) -> tuple[str, ...] | None:
    """Names of the voices where one of the engine's stages is ours, else None."""
    for config in getattr(engine, "stage_vllm_configs", None) or []:
        model: Any = getattr(config, "model_config", None)
        if getattr(model, "model_arch", None) == QWEN2_5_OMNI:
            return _voices.get(model.model)
    return None


def _requested_voice(request: Any) -> object:
    """The voice of a chat completion's body: `voice` or `speaker` at the top, or `audio.voice`, in this order."""
    audio = getattr(request, "audio", None)
    in_audio = audio.get("voice") if isinstance(audio, Mapping) else getattr(audio, "voice", None)
    return getattr(request, "voice", None) or getattr(request, "speaker", None) or in_audio


def _check_sampling_params(sampling_params_list: Any, engine: Any) -> None:
    """Refuse sampling parameters that a later stage would die of, such as an id that its vocabulary has not.

    vLLM checks those of the first stage alone.

    Raises:
        RequestError: naming the stage and what is wrong.
    """
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError

    if not isinstance(sampling_params_list, list):
        return
    stages = list(zip(sampling_params_list, engine.stage_vllm_configs, strict=False))
    for index, (given, config) in enumerate(stages[1:], start=1):
        if not isinstance(given, Mapping):
            continue  # vLLM-Omni refuses it
        try:
            SamplingParams(**given).verify(
                config.model_config, config.speculative_config, config.structured_outputs_config, None
            )
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RequestError(f"sampling_params_list[{index}]: {error}") from error
