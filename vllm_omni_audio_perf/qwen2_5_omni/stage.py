# SPDX-License-Identifier: Apache-2.0
"""The code2wav stage of Qwen2.5-Omni as vLLM-Omni sees it.

Select it in a stage config with ``model_arch: AudioPerfQwen2_5OmniForConditionalGeneration`` on stage 2. Weights are
loaded into upstream's own modules under upstream's names; only the way from codes to waveform is ours. On stage 1, the
talker, the same line makes upstream's talker speak with the voice of each request; nothing else changes there.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm_omni.model_executor.models.output_templates import OmniOutput
from vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni import Qwen2_5OmniForConditionalGeneration
from vllm_omni.model_executor.models.utils import add_prefix_to_loaded_weights

from vllm_omni_audio_perf.graphs import CaptureBudget, CudaGraphBackend
from vllm_omni_audio_perf.options import Token2WavOptions
from vllm_omni_audio_perf.qwen2_5_omni.codes import FIRST_MARK, clean_codes
from vllm_omni_audio_perf.qwen2_5_omni.request_settings import RequestSettings, checked_voice
from vllm_omni_audio_perf.qwen2_5_omni.speaker_file import checkpoint_folder
from vllm_omni_audio_perf.qwen2_5_omni.speakers import (
    DEFAULT_SPEAKER,
    SPEAKER_FILE,
    Speaker,
    load_speakers,
    silent_speaker,
)
from vllm_omni_audio_perf.qwen2_5_omni.stage_check import SCHEDULER, checked_options, is_code2wav, is_talker
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
from vllm_omni_audio_perf.token2wav import BlockDiT, Clip, Sampler, Synthesizer, cast_linear_layers, graph_blocks
from vllm_omni_audio_perf.token2wav.noise import request_noise, stage_noise

logger = init_logger(__name__)

WEIGHT_PREFIX = "token2wav"


class AudioPerfQwen2_5Omni(Qwen2_5OmniForConditionalGeneration):
    """Qwen2.5-Omni whose code2wav stage is evaluated block-sparsely and whose talker heeds the voice of each request.

    The thinker is upstream's.

    Raises:
        ValueError: at start, for a configuration that `stage_check` refuses, and for a ``spk_dict.pt`` that is
            unreadable or lacks the default voice.
        FileNotFoundError: at start, for a checkpoint without ``spk_dict.pt``.
    """

    requires_request_ids = True  # asks the engine for them

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        options = checked_options(vllm_config)
        if not is_code2wav(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        with _built_in_float32(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self._options = options
        self._synthesizer = _build_synthesizer(self.token2wav.token2wav, options)
        self._is_captured = False
        self._device = torch.device(vllm_config.device_config.device)
        # Here and not with the weights, which some loaders copy in without calling `load_weights`.
        self._speakers = self._load_speakers(self._device)
        self.failed_requests = 0
        self._has_cut = False
        self._can_report_errors = vllm_config.scheduler_config.scheduler_cls == SCHEDULER
        # Only for this does the engine note the seed of a request's sampling parameters, as `_omni_seed`.
        self.has_preprocess = True
        self.set_custom_preprocess(leave_inputs)
        logger.info("code2wav stage: %s, block-sparse Token2Wav, %s", type(self).__name__, options)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights by upstream's names; on the code2wav stage those of the Token2Wav alone."""
        if not is_code2wav(self.vllm_config):
            return super().load_weights(weights)
        own = [(name, tensor) for name, tensor in weights if name.startswith(f"{WEIGHT_PREFIX}.")]
        buffers = self.token2wav.find_all_registers()
        loaded = self.token2wav.load_weights_without_buffers(self.token2wav.remove_buffers_from_weights(own, buffers))
        loaded |= self.token2wav.reload_buffers_to_model(buffers)
        self._synthesizer.sampler.refresh()
        if self._is_captured:  # these are new weights for a running stage
            self._capture()
        return add_prefix_to_loaded_weights(loaded, WEIGHT_PREFIX)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        voice_type: str = DEFAULT_SPEAKER,
        seq_token_counts: list[int] | None = None,
        request_ids: list[str] | None = None,
        **kwargs: object,
    ) -> Tensor | IntermediateTensors | OmniOutput:
        """On the code2wav stage: one waveform for each request of the step, in order.

        Args:
            input_ids: ``[tokens]``, the codes of all requests one after another, perhaps padded at the end.
            positions: unused on this stage.
            intermediate_tensors: unused on this stage.
            inputs_embeds: ``[tokens, hidden]``; only its length is used, and only when there are no ids.
            voice_type: name of the voice of the requests that ask for none.
            seq_token_counts: codes of each request.
            request_ids: for the log.
            kwargs: what other stages use, and ``runtime_additional_information``, one dictionary a request, which
                holds its settings and marks the start-up run.

        Returns:
            `OmniOutput` whose ``model_outputs`` are float32 CPU tensors ``[samples]`` at 24 kHz. A request that fails
            has an empty one, and its reason beside it if its client can be told (`error_outputs`).
        """
        if not is_code2wav(self.vllm_config):
            if is_talker(self.vllm_config) and not _has_prompt_ids(kwargs.get("sampling_metadata")):
                # Upstream's talker corrects the prompt ids that penalties look at, and dies where nobody asked for any.
                kwargs["sampling_metadata"] = None
            return super().forward(
                input_ids, positions, intermediate_tensors, inputs_embeds, voice_type=voice_type, **kwargs
            )
        information = kwargs.get("runtime_additional_information")
        if is_start_up_run(information) or input_ids is None:
            tokens = input_ids if input_ids is not None else inputs_embeds
            assert tokens is not None
            self._start_up(tokens.shape[0])
            return audio_output([torch.zeros(0)] * len(seq_token_counts or [1]))
        ids_of = ids_of_requests(input_ids, seq_token_counts)  # the one read-back of a step, before any of its work
        buffers = buffers_of_requests(information, len(ids_of))
        settings_of = [RequestSettings()] * len(ids_of)
        results: list[Tensor | Exception] = [torch.zeros(0)] * len(ids_of)
        clips: dict[int, Clip] = {}
        for index, (ids, buffer) in enumerate(zip(ids_of, buffers, strict=True)):
            try:
                settings_of[index] = RequestSettings.from_buffer(buffer)
                clips[index] = self._clip(_codes_of_request(ids, buffer), settings_of[index], buffer, voice_type)
            except torch.AcceleratorError:
                raise  # the device is lost, and every request with it
            except Exception as failure:
                results[index] = failure
        for index, result in zip(clips, self._synthesizer.generate(list(clips.values())), strict=True):
            results[index] = result
        waveforms: list[Tensor] = []
        errors: list[str | None] = []
        for index, (result, settings) in enumerate(zip(results, settings_of, strict=True)):
            error = None
            if isinstance(result, Exception):
                self._note_failure(request_ids[index] if request_ids else str(index), len(ids_of[index]), result)
                error, result = reason_of(result), torch.zeros(0)
            waveforms.append(result)
            errors.append(error if self._can_report_errors and not settings.empty_on_error else None)
        return audio_output(waveforms, errors)

    def talker_preprocess(self, input_ids: Tensor, input_embeds: Tensor, **info_dict: object) -> tuple:
        """On the talker: upstream's, with the voice of this request in place of the stage's one."""
        voice = RequestSettings.from_buffer(info_dict).voice
        answer = info_dict.get("ids")
        if isinstance(answer, Mapping) and not answer.get("output"):
            # Upstream takes the first id of the answer, only to count it, and dies where there is none.
            info_dict["ids"] = {**answer, "output": [FIRST_MARK]}
        if voice is None:
            return super().talker_preprocess(input_ids, input_embeds, **info_dict)
        stages_own = getattr(self, "voice_type", DEFAULT_SPEAKER)
        self.voice_type = voice
        try:
            return super().talker_preprocess(input_ids, input_embeds, **info_dict)
        finally:
            self.voice_type = stages_own

    def _start_up(self, codes: int) -> None:
        """Capture graphs, once, and take the memory that a clip of so many codes needs."""
        synthesizer = self._synthesizer
        frames = max(synthesizer.mel_frames(codes), synthesizer.dit.repeats)
        synthesizer.warm_up(frames, *self._speakers[DEFAULT_SPEAKER])
        if not self._is_captured:
            self._capture()

    def _capture(self) -> None:
        """Capture graphs where the stage is on a GPU and they are wanted."""
        options, synthesizer = self._options, self._synthesizer
        if not options.cuda_graphs or self._device.type != "cuda":
            return
        self._is_captured = True
        synthesizer.sampler.capture(
            graph_blocks(options.graph_mel_frames // synthesizer.dit.block_size),
            backend=CudaGraphBackend(),
            budget=CaptureBudget(
                seconds=options.graph_seconds,
                mib=min(options.graph_memory_mib, free_share(self.vllm_config, self._device) // 2**20),
            ),
        )

    def _clip(self, ids: list[int], settings: RequestSettings, buffer: Mapping, voice_type: str) -> Clip:
        """What to solve for one request.

        Raises:
            ValueError: for ids that are in no codebook and for a voice that is not there.
        """
        synthesizer, dit = self._synthesizer, self._synthesizer.dit
        codes = clean_codes(ids, synthesizer.codebook_size)
        speaker = self._speakers[checked_voice(settings.voice or voice_type, self._speakers) or DEFAULT_SPEAKER]
        kept = synthesizer.kept_codes(len(codes))
        if kept < len(codes) and not self._has_cut:
            self._has_cut = True
            logger.warning(
                "A clip of %d codes is cut to the %d that max_mel_frames: %d allows; further ones are cut silently.",
                len(codes),
                kept,
                synthesizer.max_mel_frames,
            )
        frames = synthesizer.mel_frames(len(codes))
        if self._options.noise == "stage":
            noise = stage_noise(len(codes) * dit.repeats, frames, dit.mel_dim, device=self._device)
        else:
            seed = settings.seed if settings.seed is not None else buffer.get("_omni_seed")
            noise = request_noise(
                secrets.randbits(63) if seed is None else seed,
                frames,
                dit.mel_dim,
                block_size=dit.block_size,
                device=self._device,
            )
        return Clip(torch.tensor(codes, dtype=torch.long, device=self._device), *speaker, noise)

    def _note_failure(self, request_id: str, codes: int, failure: Exception) -> None:
        self.failed_requests += 1
        logger.error(
            "Request %s of %d codes failed: %s. Others go on; failed on this stage so far: %d.",
            request_id,
            codes,
            reason_of(failure),
            self.failed_requests,
            exc_info=None if isinstance(failure, (ValueError, torch.OutOfMemoryError)) else failure,
        )

    def get_dummy_runtime_additional_information(self, num_reqs: int) -> list[dict[str, bool]]:
        """What the engine passes as ``runtime_additional_information`` in its start-up run, and only there.

        vLLM's second runner, which this pipeline does not declare, does not ask: its start-up run is a whole solve, as
        in stock.
        """
        return start_up_information(num_reqs)

    def _load_speakers(self, device: torch.device) -> dict[str, Speaker]:
        dummy_weights = self.vllm_config.load_config.load_format == "dummy"
        model_config, load_config = self.vllm_config.model_config, self.vllm_config.load_config
        folder = checkpoint_folder(
            model_config.model,
            model_config.revision,
            download_dir=load_config.download_dir,
            download=not dummy_weights,
        )
        if dummy_weights and not (folder / SPEAKER_FILE).is_file():
            config = self.token2wav_config.dit_config
            logger.info("Dummy weights and no %s: the voice is one of zeros.", SPEAKER_FILE)
            return {DEFAULT_SPEAKER: silent_speaker(config.enc_emb_dim, config.mel_dim, device)}
        speakers = load_speakers(folder, device)
        if DEFAULT_SPEAKER not in speakers:
            raise ValueError(
                f"{folder / SPEAKER_FILE} has no voice {DEFAULT_SPEAKER!r}, the one that requests get by default; "
                f"it has: {', '.join(speakers)}."
            )
        return speakers


def _build_synthesizer(token2wav: Any, options: Token2WavOptions) -> Synthesizer:
    """The synthesizer over upstream's modules, whose weights may not be loaded yet."""
    dit, dtype = token2wav.code2wav_dit_model, None
    if options.dit_dtype != "float32":
        dtype = getattr(torch, options.dit_dtype)
        cast_linear_layers(dit, dtype)  # before the weights are loaded, which are cast then
    return Synthesizer(
        Sampler(
            BlockDiT(dit, linear_dtype=dtype, group_mib=options.group_memory_mib),
            num_steps=options.num_steps,
            solver=options.solver,
        ),
        token2wav.code2wav_bigvgan_model,
        frames_per_solve=options.frames_per_solve,
        vocoder_frames=options.vocoder_frames,
        max_mel_frames=options.max_mel_frames,
    )


def _has_prompt_ids(sampling_metadata: object) -> bool:
    return getattr(sampling_metadata, "prompt_token_ids", None) is not None


def _codes_of_request(ids: list[int], buffer: Mapping) -> list[int]:
    """The codes to solve in this step for a request of which the step has `ids`.

    A request that the engine cut in two is solved whole, from the codes in its buffer, in the step that has its last
    part, and gives no audio before.
    """
    if is_cut(ids, buffer):
        return []
    return list(map(int, buffer["codes"]["audio"])) if is_last_part(buffer) else ids


@contextmanager
def _built_in_float32(vllm_config: VllmConfig) -> Iterator[None]:
    """Build the Token2Wav in float32, as it was trained, whatever dtype the pipeline and the checkpoint's config name.

    Upstream takes the dtype of the submodels' configs, which a checkpoint may leave open, and then that of the stage.
    """
    config = vllm_config.model_config.hf_config.token2wav_config
    parts = (config, config.dit_config, config.bigvgan_config)
    dtypes = [part.dtype for part in parts]
    for part in parts:
        part.dtype = torch.float32
    try:
        with set_default_torch_dtype(torch.float32):
            yield
    finally:
        for part, dtype in zip(parts, dtypes, strict=True):
            part.dtype = dtype
