# SPDX-License-Identifier: Apache-2.0
"""The code2wav stage of MiMo-Audio as vLLM-Omni sees it.

Select it in a stage config with ``model_arch: AudioPerfMiMoAudioModel`` on stage 1. The audio tokenizer is loaded by
upstream's own code and keeps its weights; only the way from codes to waveform is ours.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors
from vllm_omni.model_executor.models.mimo_audio.mimo_audio import MiMoAudioForConditionalGeneration
from vllm_omni.model_executor.models.output_templates import OmniOutput

from vllm_omni_audio_perf.graphs import CaptureBudget, CudaGraphBackend, GraphRunner
from vllm_omni_audio_perf.mimo_audio.batch_decoder import BatchDecoder, graph_runner
from vllm_omni_audio_perf.mimo_audio.batching import decode_buckets
from vllm_omni_audio_perf.mimo_audio.decoder import FixedShapeDecoder
from vllm_omni_audio_perf.mimo_audio.groups import check_codes, from_ids
from vllm_omni_audio_perf.mimo_audio.stage_check import SCHEDULER, checked_options, checked_stream
from vllm_omni_audio_perf.mimo_audio.stage_inputs import is_to_end_empty
from vllm_omni_audio_perf.mimo_audio.streaming import new_frames
from vllm_omni_audio_perf.scheduling.stage_settings import free_share
from vllm_omni_audio_perf.scheduling.steps import (
    audio_output,
    buffers_of_requests,
    ids_of_requests,
    is_cut,
    is_last_part,
    is_start_up_run,
    leave_inputs,
    reason_of,
    start_up_information,
)

logger = init_logger(__name__)

GRAPHS_VARIABLE = "MIMO_AUDIO_TOKENIZER_CUDA_GRAPH"


class AudioPerfMiMoAudio(MiMoAudioForConditionalGeneration):
    """MiMo-Audio's code2wav stage: exact for every length and batch, in CUDA graphs on a GPU.

    Raises:
        ValueError: at start, for a configuration that `stage_check` refuses.
    """

    requires_request_ids = True  # asks the engine for them

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        options = checked_options(vllm_config)
        with _without_upstreams_graphs():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        tokenizer = self.token2wav._tokenizer_service.audio_tokenizer
        decoder = FixedShapeDecoder(tokenizer, flash_attention=options.flash_attention)
        # In a list, or else the tokenizer's weights would count as this model's, which a loader wants to load.
        self._decoders = [BatchDecoder(decoder)]
        self._stream = checked_stream(vllm_config)
        self._options = options
        self._is_captured = False
        self._frames_per_group = self.config.group_size * decoder.frames_per_code
        self._samples_per_frame = decoder.samples_per_code // decoder.frames_per_code
        self._right_window = max(0, decoder.vocoder_window[1])
        self.failed_requests = 0
        self._can_report_errors = vllm_config.scheduler_config.scheduler_cls == SCHEDULER
        # Only for this does the engine note how far a request is, as `_omni_num_computed_tokens`.
        self.has_preprocess = True
        self.set_custom_preprocess(leave_inputs)
        logger.info(
            "code2wav stage: %s, %s, %s, %s",
            type(self).__name__,
            "whole clips" if self._stream is None else self._stream,
            f"{decoder.dtype} on {decoder.device}",
            options,
        )

    @property
    def batch_decoder(self) -> BatchDecoder:
        """What decodes the requests of a step."""
        return self._decoders[0]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load nothing, for upstream has loaded the tokenizer by now, and capture the graphs."""
        self._capture()
        return set()

    def _capture(self) -> None:
        """Capture graphs, once, where the tokenizer is on a GPU and they are wanted."""
        decoder = self.batch_decoder.decoder
        if self._is_captured:
            return
        self._is_captured = True
        wanted = self._options.cuda_graphs and os.environ.get(GRAPHS_VARIABLE, "1") == "1"
        if not wanted or decoder.device.type != "cuda":
            logger.info("Decoding without CUDA graphs: %s.", "on the CPU" if wanted else "they are switched off")
            return
        shapes = decode_buckets(
            self._stream,
            max_requests=self.vllm_config.scheduler_config.max_num_seqs,
            group_size=self.config.group_size,
            rows=[self.config.audio_channels],
        )
        mib = min(self._options.graph_memory_mib, free_share(self.vllm_config, decoder.device) // 2**20)
        runner: GraphRunner = graph_runner(
            decoder,
            shapes,
            backend=CudaGraphBackend(),
            budget=CaptureBudget(seconds=self._options.graph_seconds, mib=mib),
        )
        runner.capture_all()
        self._decoders = [BatchDecoder(decoder, runner)]

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        seq_token_counts: list[int] | None = None,
        request_ids: list[str] | None = None,
        **kwargs: Any,
    ) -> OmniOutput:
        """One waveform for each request of the step, in order.

        Args:
            input_ids: ``[tokens]``, the ids of all requests one after another, perhaps padded at the end.
            positions: unused.
            intermediate_tensors: unused.
            inputs_embeds: unused.
            seq_token_counts: ids of each request.
            request_ids: for the log.
            kwargs: what other stages use, and ``runtime_additional_information``, one dictionary a request: which part
                of a stream its codes are, or all codes of a request that is not streamed.

        Returns:
            `OmniOutput` whose ``model_outputs`` are float32 CPU tensors ``[samples]``. A request that fails has an
            empty one, and its reason beside it if its client can be told.
        """
        information = kwargs.get("runtime_additional_information")
        if is_start_up_run(information) or input_ids is None:
            self._capture()  # unless `load_weights` has, which some loaders do not call
            rows = self.config.audio_channels
            self.batch_decoder.decode([torch.zeros(rows, self.config.group_size, dtype=torch.long)])
            return audio_output([torch.zeros(0)] * len(seq_token_counts or [1]))
        ids_of = ids_of_requests(input_ids, seq_token_counts)
        buffers = buffers_of_requests(information, len(ids_of))
        names = request_ids or [str(index) for index in range(len(ids_of))]
        windows: list[_Window] = []
        errors: list[str | None] = []
        for ids, buffer, name in zip(ids_of, buffers, names, strict=False):
            window, error = _Window(self._no_codes()), None
            try:
                window = self._window_of(ids, buffer)
            except ValueError as failure:
                error = self._note_failure(name, failure)
            windows.append(window)
            errors.append(error)
        waveforms = self._decode([window.codes for window in windows], names, errors)
        spoken = [
            waveform[window.first * self._samples_per_frame : window.end * self._samples_per_frame].contiguous()
            for waveform, window in zip(waveforms, windows, strict=True)
        ]
        told = [
            error if self._can_report_errors and not is_to_end_empty(buffer) else None
            for error, buffer in zip(errors, buffers, strict=True)
        ]
        return audio_output(spoken, told)

    def _window_of(self, ids: list[int], buffer: Mapping[str, Any]) -> "_Window":
        """What to decode for a request, and which part of it is new.

        Raises:
            CodesError: for ids that are no groups of codes and for codes that no codebook has.
        """
        group_size, rows = self.config.group_size, self.config.audio_channels
        if is_cut(ids, buffer):
            return _Window(self._no_codes())
        handed_over = _mapping(buffer, "codes")
        if isinstance(handed_over.get("ref"), Tensor):
            codes = handed_over["ref"].to("cpu", torch.long)
            codes = codes if codes.numel() else self._no_codes()
        else:
            whole = list(map(int, handed_over["audio"])) if is_last_part(buffer) and "audio" in handed_over else ids
            codes = self._no_codes() if self._is_placeholder(whole) else from_ids(torch.tensor(whole), group_size, rows)
        check_codes(codes, self.batch_decoder.decoder.codebook_sizes)
        groups = codes.shape[1] // group_size
        if self._stream is None or not groups:
            return _Window(codes, 0, groups * self._frames_per_group)
        meta = _mapping(buffer, "meta")
        ours = meta.get("chunk_seq") is not None
        first, end = new_frames(
            groups=groups,
            spoken=int(meta.get("left_context_size") or 0),
            index=int(meta["chunk_seq"]) if ours else 0,
            # Upstream's input processor keeps nothing back.
            final=bool(meta.get("stream_finished")) if ours else True,
            right_context=int(meta.get("right_holdback_size") or 0),
            right_window=self._right_window,
            frames_per_group=self._frames_per_group,
        )
        return _Window(codes, first, end)

    @staticmethod
    def _is_placeholder(ids: list[int]) -> bool:
        """Whether the ids stand for nothing, as the one does that the engine gives to a request without any."""
        return not any(ids)

    def _no_codes(self) -> Tensor:
        return torch.empty(self.config.audio_channels, 0, dtype=torch.long)

    def _decode(self, codes: list[Tensor], names: list[str], errors: list[str | None]) -> list[Tensor]:
        """Decode together; where that fails, one by one, so that only what fails alone fails."""
        try:
            return self.batch_decoder.decode(codes)
        except torch.AcceleratorError:
            raise  # the device is lost, and every request with it
        except Exception as failure:
            together = reason_of(failure)
        # Only now is what the failed decode held free.
        if self.batch_decoder.decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning("Decoding %d requests together failed: %s. Decoding them one by one.", len(codes), together)
        waveforms = []
        for index, request in enumerate(codes):
            waveform = torch.zeros(0)
            try:
                (waveform,) = self.batch_decoder.decode([request])
            except torch.AcceleratorError:
                raise
            except Exception as failure:
                errors[index] = self._note_failure(names[index], failure)
            waveforms.append(waveform)
        return waveforms

    def _note_failure(self, name: str, failure: Exception) -> str:
        self.failed_requests += 1
        reason = reason_of(failure)
        logger.error(
            "Request %s failed: %s. Others go on; failed on this stage so far: %d.",
            name,
            reason,
            self.failed_requests,
            exc_info=None if isinstance(failure, (ValueError, torch.OutOfMemoryError)) else failure,
        )
        return reason

    def get_dummy_runtime_additional_information(self, num_reqs: int) -> list[dict[str, bool]]:
        """What the engine passes as ``runtime_additional_information`` in its start-up run, and only there."""
        return start_up_information(num_reqs)


@dataclass
class _Window:
    """Codes ``[rows, codes]`` of a request to decode, and the vocoder frames of them that are new."""

    codes: Tensor
    first: int = 0
    end: int = 0


def _mapping(buffer: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = buffer.get(key)
    return value if isinstance(value, Mapping) else {}


@contextlib.contextmanager
def _without_upstreams_graphs() -> Iterator[None]:
    """Keep upstream from capturing its own graphs, which this stage never uses, when it loads the tokenizer."""
    before = os.environ.get(GRAPHS_VARIABLE)
    os.environ[GRAPHS_VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[GRAPHS_VARIABLE]
        else:
            os.environ[GRAPHS_VARIABLE] = before
