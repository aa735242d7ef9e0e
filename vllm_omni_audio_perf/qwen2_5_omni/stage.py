# SPDX-License-Identifier: Apache-2.0
"""The code2wav stage of Qwen2.5-Omni as vLLM-Omni sees it.

Select it in a stage config with ``model_arch: AudioPerfQwen2_5OmniForConditionalGeneration`` on stage 2. Weights are
loaded into upstream's own modules under upstream's names; only the way from codes to waveform is ours.
"""

import os
from collections.abc import Iterable, Iterator
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

from vllm_omni_audio_perf.options import Token2WavOptions
from vllm_omni_audio_perf.qwen2_5_omni.speakers import SPEAKER_FILE, Speaker, load_speakers, silent_speaker
from vllm_omni_audio_perf.qwen2_5_omni.token2wav import Token2Wav

logger = init_logger(__name__)

CODE2WAV = "code2wav"
DEFAULT_SPEAKER = "Chelsie"
WEIGHT_PREFIX = "token2wav"


class AudioPerfQwen2_5Omni(Qwen2_5OmniForConditionalGeneration):
    """Qwen2.5-Omni whose code2wav stage is evaluated block-sparsely. Any other stage is upstream's.

    Raises:
        ValueError: at start, for an option that is not allowed, for a tensor or pipeline parallel size over 1 on the
            code2wav stage, or for a checkpoint whose ``spk_dict.pt`` is missing or unreadable.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if getattr(vllm_config.model_config, "model_stage", None) != CODE2WAV:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        options = Token2WavOptions.from_additional_config(vllm_config.additional_config)
        _refuse_parallelism(vllm_config)
        with _built_in_float32(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        token2wav = self.token2wav.token2wav
        self._token2wav = Token2Wav(
            token2wav.code2wav_dit_model, token2wav.code2wav_bigvgan_model, max_mel_frames=options.max_mel_frames
        )
        self._speakers: dict[str, Speaker] = {}
        if vllm_config.load_config.load_format == "dummy":  # then nothing calls load_weights
            self._load_speakers_if_local()
        logger.info("code2wav stage: %s, block-sparse Token2Wav, %s", type(self).__name__, options)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load upstream's weight names; on the code2wav stage also the voices, onto the device of the stage."""
        if self.model_stage != CODE2WAV:
            return super().load_weights(weights)
        own = [(name, tensor) for name, tensor in weights if name.startswith(f"{WEIGHT_PREFIX}.")]
        buffers = self.token2wav.find_all_registers()
        loaded = self.token2wav.load_weights_without_buffers(self.token2wav.remove_buffers_from_weights(own, buffers))
        loaded |= self.token2wav.reload_buffers_to_model(buffers)
        self._speakers = load_speakers(self._checkpoint_folder(), self._module_device(self.token2wav))
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
            seq_token_counts: codes of each request. Absent in the engine's start-up run, which has no request.
            kwargs: what other stages use.

        Returns:
            `OmniOutput` whose ``model_outputs`` are float32 CPU tensors ``[samples]`` at 24 kHz.
        """
        if self.model_stage != CODE2WAV:
            return super().forward(
                input_ids,
                positions,
                intermediate_tensors,
                inputs_embeds,
                voice_type=voice_type,
                seq_token_counts=seq_token_counts,
                **kwargs,
            )
        speaker = self._speaker(voice_type)
        if seq_token_counts is None or input_ids is None:
            source = input_ids if input_ids is not None else inputs_embeds
            assert source is not None
            self._token2wav.evaluate_once(source.shape[0], *speaker)
            return _audio_output([torch.zeros(0)])
        requests = input_ids[: sum(seq_token_counts)].long().split(seq_token_counts)
        return _audio_output([self._token2wav.generate(_strip_boundaries(codes), *speaker) for codes in requests])

    def _speaker(self, name: str) -> Speaker:
        """The named voice; a voice of zeros, as upstream, for a name that the checkpoint does not have."""
        if name in self._speakers:
            return self._speakers[name]
        config = self.token2wav_config.dit_config
        return silent_speaker(config.enc_emb_dim, config.mel_dim, self._module_device(self.token2wav))

    def _load_speakers_if_local(self) -> None:
        """Read the voices where the checkpoint is a folder that has them; dummy weights download nothing."""
        folder = Path(self.vllm_config.model_config.model)
        if (folder / SPEAKER_FILE).is_file():
            self._speakers = load_speakers(folder, self._module_device(self.token2wav))

    def _checkpoint_folder(self) -> Path:
        model = self.vllm_config.model_config.model
        if os.path.isdir(model):
            return Path(model)
        download_dir = self.vllm_config.load_config.download_dir
        return Path(download_weights_from_hf_specific(model, download_dir, allow_patterns=[SPEAKER_FILE]))


def _audio_output(waveforms: list[Tensor]) -> OmniOutput:
    return OmniOutput(text_hidden_states=None, multimodal_outputs={"model_outputs": waveforms})


def _strip_boundaries(codes: Tensor) -> Tensor:
    """Drop the talker's begin and end marks, where upstream's input processor left them."""
    if codes.numel() and codes[-1] == TALKER_CODEC_EOS_TOKEN_ID:
        codes = codes[:-1]
    if codes.numel() and codes[0] == TALKER_CODEC_BOS_TOKEN_ID:
        codes = codes[1:]
    return codes


def _refuse_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        size = getattr(parallel, name)
        if size > 1:
            raise ValueError(
                f"The code2wav stage runs on one device: {name} is {size}, allowed is 1 "
                "(for more throughput give the stage replicas: `num_replicas`)."
            )


@contextmanager
def _built_in_float32(vllm_config: VllmConfig) -> Iterator[None]:
    """Build the Token2Wav in float32, as it was trained, whatever dtype the pipeline and the checkpoint's config name.

    Upstream takes the dtype of the submodels' configs, which a checkpoint may leave open, and then that of the stage.
    """
    config = vllm_config.model_config.hf_config.token2wav_config
    parts = [part for part in (config, config.dit_config, config.bigvgan_config) if part is not None]
    dtypes = [part.dtype for part in parts]
    for part in parts:
        part.dtype = torch.float32
    try:
        with set_default_torch_dtype(torch.float32):
            yield
    finally:
        for part, dtype in zip(parts, dtypes, strict=True):
            part.dtype = dtype
