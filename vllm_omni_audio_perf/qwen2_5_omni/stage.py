# SPDX-License-Identifier: Apache-2.0
"""The code2wav stage of Qwen2.5-Omni as vLLM-Omni sees it.

Select it in a stage config with ``model_arch: AudioPerfQwen2_5OmniForConditionalGeneration`` on stage 2. Weights are
loaded into upstream's own modules under upstream's names; only the way from codes to waveform is ours.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm_omni.model_executor.model_loader.weight_utils import download_weights_from_hf_specific
from vllm_omni.model_executor.models.output_templates import OmniOutput
from vllm_omni.model_executor.models.qwen2_5_omni.qwen2_5_omni import (
    TALKER_CODEC_BOS_TOKEN_ID,
    TALKER_CODEC_EOS_TOKEN_ID,
    Qwen2_5OmniForConditionalGeneration,
)
from vllm_omni.model_executor.models.utils import add_prefix_to_loaded_weights

from vllm_omni_audio_perf.qwen2_5_omni.speakers import SPEAKER_FILE, Speaker, load_speakers, silent_speaker
from vllm_omni_audio_perf.qwen2_5_omni.stage_check import checked_options, is_code2wav
from vllm_omni_audio_perf.qwen2_5_omni.token2wav import Token2Wav

logger = init_logger(__name__)

DEFAULT_SPEAKER = "Chelsie"
WEIGHT_PREFIX = "token2wav"
START_UP_RUN = "audio_perf_start_up_run"


class AudioPerfQwen2_5Omni(Qwen2_5OmniForConditionalGeneration):
    """Qwen2.5-Omni whose code2wav stage is evaluated block-sparsely. Any other stage is upstream's.

    Raises:
        ValueError: at start, for a configuration that `stage_check` refuses, and for a ``spk_dict.pt`` that is
            unreadable or lacks the default voice.
        FileNotFoundError: at start, for a checkpoint without ``spk_dict.pt``.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        options = checked_options(vllm_config)
        if not is_code2wav(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        with _built_in_float32(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        token2wav = self.token2wav.token2wav
        self._token2wav = Token2Wav(
            token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model, max_mel_frames=options.max_mel_frames
        )
        # Here and not with the weights, which some loaders copy in without calling `load_weights`.
        self._speakers = self._load_speakers(torch.device(vllm_config.device_config.device))
        logger.info("code2wav stage: %s, block-sparse Token2Wav, %s", type(self).__name__, options)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights by upstream's names; on the code2wav stage those of the Token2Wav alone."""
        if not is_code2wav(self.vllm_config):
            return super().load_weights(weights)
        own = [(name, tensor) for name, tensor in weights if name.startswith(f"{WEIGHT_PREFIX}.")]
        buffers = self.token2wav.find_all_registers()
        loaded = self.token2wav.load_weights_without_buffers(self.token2wav.remove_buffers_from_weights(own, buffers))
        loaded |= self.token2wav.reload_buffers_to_model(buffers)
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
        **kwargs: object,
    ) -> Tensor | IntermediateTensors | OmniOutput:
        """On the code2wav stage: one waveform for each request of the step, in order.

        Args:
            input_ids: ``[tokens]``, the codes of all requests one after another, perhaps padded at the end.
            positions: unused on this stage.
            intermediate_tensors: unused on this stage.
            inputs_embeds: ``[tokens, hidden]``; only its length is used, and only when there are no ids.
            voice_type: name of the voice.
            seq_token_counts: codes of each request.
            kwargs: what other stages use, and ``runtime_additional_information``, which marks the start-up run.

        Returns:
            `OmniOutput` whose ``model_outputs`` are float32 CPU tensors ``[samples]`` at 24 kHz.
        """
        if not is_code2wav(self.vllm_config):
            return super().forward(
                input_ids,
                positions,
                intermediate_tensors,
                inputs_embeds,
                voice_type=voice_type,
                seq_token_counts=seq_token_counts,
                **kwargs,
            )
        if self._is_start_up_run(kwargs.get("runtime_additional_information")) or input_ids is None:
            tokens = input_ids if input_ids is not None else inputs_embeds
            assert tokens is not None
            self._token2wav.evaluate_once(tokens.shape[0], *self._speaker(voice_type))
            return _audio_output([torch.zeros(0)] * len(seq_token_counts or [1]))
        counts = seq_token_counts if seq_token_counts is not None else [input_ids.shape[0]]
        requests = input_ids[: sum(counts)].long().split(counts)
        speaker = self._speaker(voice_type)
        return _audio_output([self._token2wav.generate(_strip_boundaries(codes), *speaker) for codes in requests])

    def get_dummy_runtime_additional_information(self, num_reqs: int) -> list[dict[str, bool]]:
        """What the engine passes as ``runtime_additional_information`` in its start-up run, and only there.

        vLLM's second runner, which this pipeline does not declare, does not ask: its start-up run is a whole solve, as
        in stock.
        """
        return [{START_UP_RUN: True} for _ in range(num_reqs)]

    def _is_start_up_run(self, information: object) -> bool:
        if not isinstance(information, list):
            return False
        return any(isinstance(request, Mapping) and START_UP_RUN in request for request in information)

    def _speaker(self, name: str) -> Speaker:
        """The named voice, or the default one, with a warning, where the checkpoint does not have it."""
        speaker = self._speakers.get(name)
        if speaker is None:
            logger.warning_once("There is no voice %r (there are: %s).", name, ", ".join(self._speakers))
            speaker = self._speakers[DEFAULT_SPEAKER]
        return speaker

    def _load_speakers(self, device: torch.device) -> dict[str, Speaker]:
        dummy_weights = self.vllm_config.load_config.load_format == "dummy"
        folder = self._checkpoint_folder(download=not dummy_weights)
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

    def _checkpoint_folder(self, *, download: bool) -> Path:
        """The folder of the voices; for the name of a repository its downloaded copy, where downloading is wanted."""
        model_config, load_config = self.vllm_config.model_config, self.vllm_config.load_config
        if os.path.isdir(model_config.model) or not download:
            return Path(model_config.model)
        return Path(
            download_weights_from_hf_specific(
                model_config.model,
                load_config.download_dir,
                allow_patterns=[SPEAKER_FILE],
                revision=model_config.revision,
            )
        )


def _audio_output(waveforms: list[Tensor]) -> OmniOutput:
    return OmniOutput(text_hidden_states=None, multimodal_outputs={"model_outputs": waveforms})


def _strip_boundaries(codes: Tensor) -> Tensor:
    """Drop the talker's begin and end marks, where upstream's input processor left them."""
    if codes.numel() and codes[-1] == TALKER_CODEC_EOS_TOKEN_ID:
        codes = codes[:-1]
    if codes.numel() and codes[0] == TALKER_CODEC_BOS_TOKEN_ID:
        codes = codes[1:]
    return codes


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
