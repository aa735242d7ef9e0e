# SPDX-License-Identifier: Apache-2.0
"""Codes to waveforms: solves of several clips at once, followed by the vocoder, within a memory budget."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from vllm_omni_audio_perf.token2wav.sampling import Clip, Sampler
from vllm_omni_audio_perf.token2wav.vocoder import OVERLAP_FRAMES, vocode

logger = logging.getLogger(__name__)

SMALLER = 4
"""By how much a group of blocks or a piece of mel shrinks after a failed allocation."""

MAX_SHRINKS = 3

_Result = TypeVar("_Result")


class Synthesizer:
    """Turns the codes of several requests into their waveforms.

    Args:
        sampler: solves for the mels.
        vocoder: an upstream BigVGAN: takes ``[1, mel_dim, frames]`` and returns the samples; referenced, not copied.
        frames_per_solve: most mel frames that are solved together; one clip alone may have more.
        vocoder_frames: longest mel that the vocoder takes whole; a longer one runs in pieces.
        overlap_frames: mel frames on either side of a piece that are computed and cut off again.
        max_mel_frames: longest clip in mel frames; longer code sequences are cut. 0 for no cap.
    """

    def __init__(
        self,
        sampler: Sampler,
        vocoder: nn.Module | Callable[[Tensor], Tensor],
        *,
        frames_per_solve: int = 16_000,
        vocoder_frames: int = 1000,
        overlap_frames: int = OVERLAP_FRAMES,
        max_mel_frames: int = 0,
    ) -> None:
        self.sampler = sampler
        self.dit = sampler.dit
        self.vocoder = vocoder
        self.frames_per_solve = frames_per_solve
        self.vocoder_frames = vocoder_frames
        self.overlap_frames = overlap_frames
        self.max_mel_frames = max_mel_frames

    def kept_codes(self, codes: int) -> int:
        """How many of `codes` codes the cap on mel frames keeps: all that fit wholly, and at least one.

        The rule of ``cap_and_align_mel_length`` in vLLM-Omni's ``audio_length.py``.
        """
        if codes == 0 or self.max_mel_frames <= 0:
            return codes
        return min(codes, max(self.max_mel_frames // self.dit.repeats, 1))

    @property
    def codebook_size(self) -> int:
        """Codes are ``0 .. codebook_size - 1``."""
        return self.dit.codebook_size

    def mel_frames(self, codes: int) -> int:
        """Mel frames that are made of `codes` codes."""
        return self.kept_codes(codes) * self.dit.repeats

    @torch.inference_mode()
    def generate(self, clips: Sequence[Clip]) -> list[Tensor | Exception]:
        """Synthesize several clips. Each gets the audio that it gets alone.

        Args:
            clips: their codes are cut as :meth:`kept_codes` says, their noise has :meth:`mel_frames` frames.

        Returns:
            For each clip ``[samples]`` float32 on the CPU, 24 kHz, in [-1, 1], empty for no codes; or why it failed.

        Raises:
            torch.AcceleratorError: if the device is lost.
        """
        results: list[Tensor | Exception] = [torch.zeros(0)] * len(clips)
        cut = [clip._replace(codes=clip.codes[: self.kept_codes(clip.codes.shape[0])]) for clip in clips]
        spoken = [index for index, clip in enumerate(cut) if clip.codes.shape[0]]
        for batch in plan_solves([cut[index].noise.shape[1] for index in spoken], self.frames_per_solve):
            chosen = [spoken[position] for position in batch]
            for index, mel in zip(chosen, self._solve([cut[index] for index in chosen]), strict=True):
                results[index] = mel if isinstance(mel, Exception) else self._vocode(mel)
        return results

    @torch.inference_mode()
    def warm_up(self, frames: int, speaker: Tensor, reference_mel: Tensor) -> None:
        """Evaluate the network once for a clip of so many mel frames, and run the vocoder once.

        That takes the memory that such a clip needs, and loads the kernels.
        """
        self.sampler.evaluate_once(frames, speaker, reference_mel)
        longest = min(frames, self.vocoder_frames + 2 * self.overlap_frames)
        self.vocoder(reference_mel.new_zeros(1, self.dit.mel_dim, longest))

    def _solve(self, clips: list[Clip]) -> list[Tensor | Exception]:
        """Mels of clips, solved together; where that fails, in smaller and smaller groups."""
        mels = _try_smaller(
            lambda group_mib: self.sampler.sample(clips, group_mib=group_mib),
            self.dit.group_mib,
            shrinks=MAX_SHRINKS if len(clips) == 1 else 0,
        )
        if not isinstance(mels, Exception):
            return list(mels)
        if len(clips) == 1:
            return [mels]
        logger.warning(
            "Solving %d clips of %d mel frames together failed: %s. Solving them in two halves.",
            len(clips),
            sum(clip.noise.shape[1] for clip in clips),
            str(mels),
        )
        mels.__traceback__ = None  # its frames hold the tensors of this solve
        middle = len(clips) // 2
        return self._solve(clips[:middle]) + self._solve(clips[middle:])

    def _vocode(self, mel: Tensor) -> Tensor | Exception:
        return _try_smaller(
            lambda frames: vocode(self.vocoder, mel, piece_frames=frames, overlap_frames=self.overlap_frames),
            self.vocoder_frames,
            shrinks=MAX_SHRINKS,
        )


def _try_smaller(attempt: Callable[[int], _Result], size: int, *, shrinks: int) -> _Result | Exception:
    """What an attempt returns, with a smaller size after each failed allocation; or why the last one failed.

    Raises:
        torch.AcceleratorError: if the device is lost.
    """
    for _ in range(shrinks + 1):
        try:
            return attempt(size)
        except Exception as error:
            if is_device_lost(error):
                raise
            failure = error
        if not is_out_of_memory(failure):
            break
        _free_memory(failure)
        size = max(1, size // SMALLER)
    return failure


def plan_solves(frames: Sequence[int], frames_per_solve: int) -> list[list[int]]:
    """Which clips are solved together: as many, in order, as a budget of mel frames allows, and at least one.

    Args:
        frames: of each clip.
        frames_per_solve: the budget.

    Returns:
        Positions in `frames`, each once, in order.
    """
    batches: list[list[int]] = []
    room = 0
    for index, count in enumerate(frames):
        if count > room or not batches:
            batches.append([])
            room = frames_per_solve
        batches[-1].append(index)
        room -= count
    return batches


def is_out_of_memory(failure: Exception) -> bool:
    """Whether an allocation failed: of torch's allocator, of a library or driver beside it, or on the host."""
    if isinstance(failure, (torch.OutOfMemoryError, MemoryError)):
        return True
    texts = ("allocate memory", "out of memory", "ALLOC_FAILED")
    return isinstance(failure, RuntimeError) and any(text in str(failure) for text in texts)


def is_device_lost(failure: Exception) -> bool:
    """Whether the device can compute nothing any more, for no request."""
    return isinstance(failure, torch.AcceleratorError) and not is_out_of_memory(failure)


def _free_memory(failure: Exception) -> None:
    """Let go of what a failed attempt held, which must not fail the next one."""
    failure.__traceback__ = None  # its frames hold tensors
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
