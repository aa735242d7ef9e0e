# SPDX-License-Identifier: Apache-2.0
"""Codes to waveforms with the decoder of Qwen3-TTS's 25 Hz tokenizer: the core in `vllm_omni_audio_perf.token2wav`.

The same function as ``Qwen3TTSTokenizerV1Decoder`` in vLLM-Omni's ``modeling_qwen3_tts_tokenizer_v1.py`` for each
sequence alone. Its DiT differs from Qwen2.5-Omni's in the rotary embedding, which turns all heads, in separate query,
key and value projections, and in the solver, which is Euler's; its vocoder in convolutions that look back further.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vllm_omni_audio_perf.token2wav import BlockDiT, Clip, Sampler, Synthesizer, cast_linear_layers
from vllm_omni_audio_perf.token2wav.noise import request_noise

VOCODER_OVERLAP_FRAMES = 48
"""Mel frames on either side of a piece of mel that the vocoder computes and cuts off again. Its convolutions are mostly
causal and dilated: a sample depends on the 48 frames before it and 10 after it; what lies further is below rounding. At
the 20 frames that Qwen2.5-Omni's takes, random weights at speech level give a relative error of 5e-4."""


class Tokenizer25HzDecoder:
    """Decodes sequences of codes of any lengths and voices together. Each gets the waveform that it gets alone.

    Where upstream is asked for one sequence at a time, this is the same function of codes, voice and noise. Elsewhere:

    - A batch of unequal lengths upstream pads without a mask, so that the last frames of a shorter sequence hear the
      padding and its voice that of its reference. Here nothing is padded.
    - Below a guidance scale of 1e-5 upstream doubles its batch, and fails after the first evaluation. Here the solve
      follows the conditional velocity alone, at half the cost.
    - ``Qwen3TTSTokenizerV1Model.decode`` cuts the waveform to ``decode_upsample_rate`` samples a code, from the
      checkpoint's configuration. Here it has all samples of its mel.

    Args:
        decoder: upstream's ``Qwen3TTSTokenizerV1Decoder``, or the ``decoder`` of its ``Qwen3TTSTokenizerV1Model``,
            float32, on any device; referenced, not copied.
        num_steps: points of the time grid; a solve evaluates the network once for each interval between them.
        guidance_scale: weight of classifier-free guidance.
        sway_coefficient: strength of sway sampling, see `vllm_omni_audio_perf.token2wav.solver.sway_time_grid`; None
            for a uniform grid.
        linear_dtype: dtype to which the linear layers of the DiT's attention and feed-forward are cast, *in place*;
            None leaves them in float32. Everything else stays float32. Another function than upstream's.
        frames_per_solve: most mel frames of several sequences that are solved together; a longer one is solved alone.
        vocoder_frames: longest mel that the vocoder takes whole; a longer one runs in pieces, which changes rounding.

    Raises:
        ValueError: for a module without upstream's parts, weights that are not float32, and settings out of range.
    """

    def __init__(
        self,
        decoder: nn.Module,
        *,
        num_steps: int = 10,
        guidance_scale: float = 0.5,
        sway_coefficient: float | None = -1.0,
        linear_dtype: torch.dtype | None = None,
        frames_per_solve: int = 16_000,
        vocoder_frames: int = 1000,
    ) -> None:
        for name, value in (("frames_per_solve", frames_per_solve), ("vocoder_frames", vocoder_frames)):
            if value < 1:
                raise ValueError(f"{name} is {value}; allowed: at least 1.")
        _check_decoder(decoder)
        dit = cast(Any, decoder).dit
        self.sampler = Sampler(
            BlockDiT(dit, rotary_heads=None, linear_dtype=linear_dtype),
            num_steps=num_steps,
            solver="euler",
            guidance_scale=guidance_scale,
            sway_coefficient=sway_coefficient,
        )
        if linear_dtype is not None:
            cast_linear_layers(dit, linear_dtype)
        self.synthesizer = Synthesizer(
            self.sampler,
            cast(Any, decoder).bigvgan,
            frames_per_solve=frames_per_solve,
            vocoder_frames=vocoder_frames,
            overlap_frames=VOCODER_OVERLAP_FRAMES,
        )
        self.codebook_size = self.synthesizer.codebook_size
        """Codes are ``0 .. codebook_size - 1``."""
        self.speaker_dim: int = dit.config.enc_emb_dim
        """Channels of a speaker embedding."""
        self.min_reference_frames = _min_reference_frames(dit.input_embed.spk_encoder)
        """Shortest reference mel that the voice encoder takes."""

    def refresh(self) -> None:
        """Forget what was computed from the weights: to be called when they have changed or moved."""
        self.sampler.refresh()

    def decode(
        self,
        codes: Sequence[Tensor],
        speakers: Sequence[Tensor],
        reference_mels: Sequence[Tensor],
        *,
        noises: Sequence[Tensor] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Synthesize sequences of codes. All are checked before any is computed.

        Without `noises` and `seeds`, seeds are drawn from torch's own random state, which ``torch.manual_seed`` sets.

        Args:
            codes: ``[codes]`` of any integer dtype each, as from upstream's ``encode``, without padding.
            speakers: ``[speaker_dim]`` float each, the speaker embeddings.
            reference_mels: ``[reference_frames, mel_dim]`` float each, log-mels of the reference voices.
            noises: ``[codes * repeats, mel_dim]`` float each, the states at time 0. Upstream's is
                ``torch.randn(1, 30000, mel_dim)[0, : codes * repeats]`` for a batch of one.
            seeds: one each, any whole number that a `torch.Generator` takes. The same seed gives the same noise on any
                device and in any batch.

        Returns:
            For each sequence ``[codes * repeats * hop]`` float32 on the CPU, in [-1, 1], at the tokenizer's output rate
            of 24 kHz, where ``hop`` is how many samples the vocoder makes of a mel frame; empty for no codes.

        Raises:
            ValueError: for lists of different lengths, tensors of another shape or dtype, a code outside the codebook,
                a reference that is too short, and both `noises` and `seeds`. The message names which and what is
                allowed.
            torch.OutOfMemoryError: if a sequence does not fit into memory even alone. This and whatever else goes wrong
                while computing carries a note that names the sequence; the other waveforms are lost.
        """
        clips = self._clips(codes, speakers, reference_mels, noises, seeds)
        waveforms: list[Tensor] = []
        for index, result in enumerate(self.synthesizer.generate(clips)):
            if isinstance(result, Exception):
                result.add_note(f"While decoding sequence {index} of {len(clips)}.")
                raise result
            waveforms.append(result)
        return waveforms

    def _clips(
        self,
        codes: Sequence[Tensor],
        speakers: Sequence[Tensor],
        reference_mels: Sequence[Tensor],
        noises: Sequence[Tensor] | None,
        seeds: Sequence[int] | None,
    ) -> list[Clip]:
        """The arguments of :meth:`decode`, checked, on the decoder's device."""
        if noises is not None and seeds is not None:
            raise ValueError("noises and seeds are both given; allowed: one of them, or neither.")
        given = {"speakers": speakers, "reference_mels": reference_mels, "noises": noises, "seeds": seeds}
        for name, values in given.items():
            if values is not None and len(values) != len(codes):
                raise ValueError(
                    f"{name} has {len(values)} entries for {len(codes)} sequences of codes; allowed: as many."
                )
        dit = self.sampler.dit
        device = dit.model.proj_out.weight.device
        for index, ids in enumerate(codes):
            self._check_codes(f"codes[{index}]", ids)
            _check_floats(f"speakers[{index}]", speakers[index], (self.speaker_dim,))
            reference = reference_mels[index]
            _check_floats(f"reference_mels[{index}]", reference, (None, dit.mel_dim))
            if reference.shape[0] < self.min_reference_frames:
                raise ValueError(
                    f"reference_mels[{index}] has {reference.shape[0]} frames; "
                    f"allowed: at least {self.min_reference_frames}."
                )
            if noises is not None:
                _check_floats(f"noises[{index}]", noises[index], (len(ids) * dit.repeats, dit.mel_dim))
        if noises is None:
            if seeds is None:
                seeds = torch.randint(2**63 - 1, (len(codes),)).tolist()
            noises = [
                request_noise(seed, len(ids) * dit.repeats, dit.mel_dim, block_size=dit.block_size)[0]
                for seed, ids in zip(seeds, codes, strict=True)
            ]
        return [
            Clip(
                ids.to(device, torch.long),
                *(tensor.to(device, torch.float32).unsqueeze(0) for tensor in (speaker, reference, noise)),
            )
            for ids, speaker, reference, noise in zip(codes, speakers, reference_mels, noises, strict=True)
        ]

    def _check_codes(self, name: str, codes: Tensor) -> None:
        if codes.ndim != 1 or codes.is_floating_point() or codes.is_complex() or codes.dtype == torch.bool:
            raise ValueError(
                f"{name} has shape {tuple(codes.shape)} and dtype {codes.dtype}; allowed: (codes,) of an integer dtype."
            )
        for position, code in enumerate(codes.tolist()):
            if not 0 <= code < self.codebook_size:
                raise ValueError(
                    f"{name} has {code} at position {position} of {len(codes)}, which is not in the codebook; "
                    f"allowed: 0 to {self.codebook_size - 1}, and no padding."
                )


def _check_decoder(decoder: nn.Module) -> None:
    for name in ("dit.proj_out", "bigvgan.conv_pre"):
        try:
            weight = cast(Tensor, decoder.get_submodule(name).weight)
        except AttributeError:
            raise ValueError(
                f"decoder is a {type(decoder).__name__} without {name}; allowed: a Qwen3TTSTokenizerV1Decoder."
            ) from None
        if weight.dtype != torch.float32:
            raise ValueError(f"decoder.{name} is {weight.dtype}; allowed: torch.float32, in which it was trained.")


def _check_floats(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuse another shape, in which None is any number, or another than a float dtype."""
    fits = tensor.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or not tensor.is_floating_point():
        words = ", ".join("frames" if size is None else str(size) for size in shape)
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; "
            f"allowed: ({words}{',' if len(shape) == 1 else ''}) of a float dtype."
        )


def _min_reference_frames(encoder: nn.Module) -> int:
    """What its convolutions need to pad by reflection: a frame more than they pad at either end."""
    reach = [
        module.dilation[0] * (module.kernel_size[0] - 1)
        for module in encoder.modules()
        if isinstance(module, nn.Conv1d)
    ]
    return (max(reach) + 1) // 2 + 1
