# SPDX-License-Identifier: Apache-2.0
"""What the talker of MiMo-Audio hands to code2wav: our input processors, in place of upstream's where wanted.

A connector whose ``extra`` has a section ``audio_perf`` wants them. Chunk by chunk (``async_chunk: true``) the payload
is upstream's, with the same ids and a little more in ``meta``, so that a stock code2wav stage understands it, too. All
at once (``async_chunk: false``) the codes travel beside a prompt of a single id: their number is not bound to a model
length, and nothing is cut.

Upstream's (vLLM-Omni 0.30.0) repeat the last chunk where a request ends on a chunk's boundary, decode the zeros of text
steps as speech in chunks, cut silently at 18192 ids, and send nothing for a request without speech.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm_omni_audio_perf.architectures import MIMO_AUDIO
from vllm_omni_audio_perf.mimo_audio.groups import SPEECH_MARK, split_groups, to_ids
from vllm_omni_audio_perf.mimo_audio.streaming import StreamSettings, Window, end_of_chunk, next_window
from vllm_omni_audio_perf.options import SECTION
from vllm_omni_audio_perf.scheduling.offline import wishes_empty_on_error

_SETTINGS = "_audio_perf_stream_settings"
_PRIVATE = "kv_metadata"  # the one mapping in upstream's payload that is free for a model's own use
_EMPTY_ON_ERROR = "empty_on_error"

Processor = Callable[..., Any]


def asks_for_ours(extra: object) -> bool:
    """Whether a connector's ``extra`` asks for the processors of this module."""
    return isinstance(extra, Mapping) and SECTION in extra


def is_to_end_empty(buffer: Mapping[str, Any]) -> bool:
    """Whether a request of code2wav, by its buffer, ends with empty audio where it fails."""
    private = buffer.get(_PRIVATE)
    own = private.get(SECTION) if isinstance(private, Mapping) else None
    return isinstance(own, Mapping) and bool(own.get(_EMPTY_ON_ERROR))


def _private(empty_on_error: bool) -> dict[str, bool]:
    return {_EMPTY_ON_ERROR: empty_on_error}


class _Stream(list):
    """The groups of a request so far, each int64 ``[audio_channels, group_size]``, and how far they are decoded.

    A list, because the transfer manager keeps one for each request and drops it when the request ends or is aborted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spoken = 0
        self.windows = 0


def chunk_payload(upstream: Processor) -> Processor:
    """Wrap ``llm2code2wav_async_chunk``, which is asked after each step of the talker."""

    def process(transfer_manager: Any, multimodal_output: Any, request: Any, is_finished: bool = False) -> Any:
        extra = _connector_extra(transfer_manager)
        if not asks_for_ours(extra):
            return upstream(transfer_manager, multimodal_output, request, is_finished)
        settings = getattr(transfer_manager, _SETTINGS, None)
        if settings is None:
            settings = StreamSettings.from_connector(extra)
            setattr(transfer_manager, _SETTINGS, settings)
        stream = _stream_of(transfer_manager, request.external_req_id)
        stream.extend(split_groups(codes) if (codes := _codes_of_step(multimodal_output)) is not None else [])
        window = next_window(
            settings, groups=len(stream), spoken=stream.spoken, index=stream.windows, finished=is_finished
        )
        if window is None:
            return _last_payload() if is_finished else None
        stream.spoken, stream.windows = end_of_chunk(settings, window), stream.windows + 1
        return _window_payload(stream, window, settings, request)

    return process


def full_payload(upstream: Processor) -> Processor:
    """Wrap ``llm2code2wav_full_payload``, which is asked once, when the talker is done."""

    def process(transfer_manager: Any, pooling_output: Any, request: Any) -> Any:
        if not asks_for_ours(_connector_extra(transfer_manager)):
            return upstream(transfer_manager, pooling_output, request)
        codes = _codes_of_step(pooling_output)
        groups = split_groups(codes) if codes is not None else []
        rows = torch.cat(groups, dim=1) if groups else torch.empty(0, 0, dtype=torch.long)
        return {
            "codes": {"audio": [SPEECH_MARK], "ref": rows},
            "meta": {"finished": torch.tensor(True)},
        }

    return process


def token_only_inputs(upstream: Processor) -> Processor:
    """Wrap ``llm2code2wav_token_only``, which sizes code2wav's prompt where the codes travel all at once."""

    def process(
        source_outputs: list[Any],
        prompt: Any = None,
        requires_multimodal_data: bool = False,
        *,
        target_model_config: Any = None,  # vLLM-Omni passes it to processors that have a parameter of this name
    ) -> list[Any]:
        connector = getattr(target_model_config, "stage_connector_config", None)
        if not asks_for_ours(connector.get("extra") if isinstance(connector, Mapping) else None):
            return upstream(source_outputs, prompt, requires_multimodal_data)
        from vllm_omni.errors import OmniClientError
        from vllm_omni.inputs.data import OmniTokensPrompt

        if getattr(target_model_config, "model_arch", None) != MIMO_AUDIO:
            raise OmniClientError(
                f"The connector's {SECTION} section goes with `model_arch: {MIMO_AUDIO}` on the code2wav stage, which "
                f"has {getattr(target_model_config, 'model_arch', None)!r}: give the stage config both, or neither."
            )
        # A request has one prompt; vLLM-Omni passes it plain or as a list of one.
        prompt = prompt[0] if isinstance(prompt, list) and prompt else prompt
        information = prompt.get("additional_information") if isinstance(prompt, Mapping) else None
        private = _private(wishes_empty_on_error(information))
        return [
            OmniTokensPrompt(prompt_token_ids=[SPEECH_MARK], model_intermediate_buffer={_PRIVATE: {SECTION: private}})
            for _ in source_outputs
        ]

    return process


def _connector_extra(transfer_manager: Any) -> object:
    """The ``extra`` of the connector that a transfer manager or a model runner sends through."""
    connector = getattr(transfer_manager, "connector", None) or getattr(transfer_manager, "_omni_connector", None)
    config = getattr(connector, "config", None)
    return config.get("extra", config) if isinstance(config, Mapping) else None


def _codes_of_step(output: Any) -> torch.Tensor | None:
    """The codes in what the talker gave: ``[..., audio_channels, group_size]``, or None."""
    if not isinstance(output, Mapping):
        return None
    codes = output.get("codes.audio")
    if codes is None and isinstance(output.get("codes"), Mapping):
        codes = output["codes"].get("audio")
    if codes is None:
        return None
    codes = torch.as_tensor(codes)
    return codes if codes.numel() else None


def _stream_of(transfer_manager: Any, request_id: str) -> _Stream:
    stream = transfer_manager.code_prompt_token_ids.get(request_id)
    if not isinstance(stream, _Stream):
        stream = transfer_manager.code_prompt_token_ids[request_id] = _Stream()
    return stream


def _window_payload(stream: _Stream, window: Window, settings: StreamSettings, request: Any) -> Any:
    from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct
    from vllm_omni.engine.serialization import deserialize_additional_information

    information = deserialize_additional_information(getattr(request, "additional_information", None))
    ids = to_ids(stream[window.start : window.end])
    return OmniPayloadStruct(
        codes=CodesStruct(audio=ids),
        meta=MetaStruct(
            left_context_size=window.spoken,
            right_holdback_size=settings.right_context,
            chunk_seq=window.index,
            stream_finished=torch.tensor(window.final),
            codec_chunk_frames=settings.chunk,
            codec_left_context_frames=settings.left_context,
            code_flat_numel=ids.numel(),
            finished=torch.tensor(window.final),
        ),
        kv_metadata={SECTION: _private(wishes_empty_on_error(information))},
    )


def _last_payload() -> Any:
    """Ends a request that has no speech."""
    from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct

    return OmniPayloadStruct(
        codes=CodesStruct(audio=torch.empty(0, dtype=torch.long)), meta=MetaStruct(finished=torch.tensor(True))
    )
