# SPDX-License-Identifier: Apache-2.0
"""What a stage of ours gets to know about a request beside upstream's own payload.

vLLM-Omni's orchestrator calls an input processor between two stages. Upstream's for Qwen2.5-Omni drop the voice and the
seed of the prompt; these wrap them and pass both on, if the next stage is one of ours. The rest is upstream's.
"""

from collections.abc import Callable
from typing import Any

from vllm_omni_audio_perf.architectures import QWEN2_5_OMNI
from vllm_omni_audio_perf.qwen2_5_omni.client_requests import announced_voices
from vllm_omni_audio_perf.qwen2_5_omni.request_settings import RequestError, RequestSettings
from vllm_omni_audio_perf.qwen2_5_omni.speaker_file import voice_names

Processor = Callable[..., list[Any]]


def code2wav_inputs(upstream: Processor) -> Processor:
    """Wrap ``talker2code2wav_token_only``."""

    def process(
        source_outputs: list[Any],
        prompt: Any = None,
        requires_multimodal_data: bool = False,
        *,
        target_model_config: Any = None,  # vLLM-Omni passes it to processors that have a parameter of this name
    ) -> list[Any]:
        inputs = upstream(source_outputs, prompt, requires_multimodal_data)
        return _for_our_stage(inputs, prompt, target_model_config, outputs=0)

    return process


def talker_inputs(upstream: Processor) -> Processor:
    """Wrap ``thinker2talker_token_only``.

    A thinker that answers nothing has nothing for the talker to say: no input lets vLLM-Omni end the request with empty
    audio, where upstream's talker takes the first of no ids and dies.
    """

    def process(
        source_outputs: list[Any],
        prompt: Any = None,
        requires_multimodal_data: bool = False,
        *,
        target_model_config: Any = None,
    ) -> list[Any]:
        if _is_ours(target_model_config):
            source_outputs = [output for output in source_outputs if not _is_empty_answer(output.outputs[0])]
        inputs = upstream(source_outputs, prompt, requires_multimodal_data)
        return _for_our_stage(inputs, prompt, target_model_config, outputs=1)

    return process


def _is_empty_answer(completion: Any) -> bool:
    """Whether a finished answer has no token beside an end token. One that ends with a stop string has text."""
    stops = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
    return completion.finish_reason is not None and len(completion.cumulative_token_ids) <= stops


def _is_ours(model_config: Any) -> bool:
    return getattr(model_config, "model_arch", None) == QWEN2_5_OMNI


def _for_our_stage(inputs: list[Any], prompt: Any, model_config: Any, *, outputs: int) -> list[Any]:
    """Add the settings of the request to its inputs, if the next stage is ours.

    Args:
        inputs: of the next stage.
        prompt: of the request.
        model_config: of the next stage.
        outputs: tokens for which that stage needs room beside its input.

    Raises:
        OmniClientError: for settings that are not allowed, and for an input that the stage has no room for, which
            vLLM-Omni passes on to the stage, where it would end it. Ends this request alone, with status 400.
    """
    if not _is_ours(model_config):
        return inputs
    from vllm_omni.errors import OmniClientError

    # A request has one prompt; vLLM-Omni passes it plain or as a list of one.
    prompt = prompt[0] if isinstance(prompt, list) and prompt else prompt
    voices = announced_voices(model_config.model)
    if voices is None:
        voices = voice_names(model_config.model, model_config.revision)
    try:
        settings = RequestSettings.from_prompt(prompt, voices)
    except RequestError as error:
        raise OmniClientError(str(error)) from error
    for entry in inputs:
        length, limit = len(entry["prompt_token_ids"]), model_config.max_model_len
        if length + outputs > limit:
            raise OmniClientError(
                f"The {model_config.model_stage} stage would get {length} tokens; its max_model_len of {limit} allows "
                f"{limit - outputs}."
            )
        entry["model_intermediate_buffer"] = (entry.get("model_intermediate_buffer") or {}) | settings.to_buffer()
    return inputs
