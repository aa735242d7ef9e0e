# SPDX-License-Identifier: Apache-2.0
"""How MiMo-Audio's codes travel from the talker to code2wav: groups of four codes, flattened to token ids.

A group is 160 ms: `group_size` codes of each of `audio_channels` codebooks. On the wire each code has a row of
`audio_channels + 1` ids, of which the first says what the group is: speech (``<|empty|>``), or text. All ids of a
stream stand one after another. (vLLM-Omni 0.30.0, ``stage_input_processors/mimo_audio.py``.)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SPEECH_MARK = 151667
"""``<|empty|>``, the first id of each row of a group of speech."""
END_OF_SPEECH_MARK = 151671
"""``<|eostm|>``: what follows is not spoken."""


class CodesError(ValueError):
    """Codes that cannot be decoded. The message says which and what is allowed."""


def group_width(group_size: int, audio_channels: int) -> int:
    """Ids of one group."""
    return group_size * (audio_channels + 1)


def split_groups(step_codes: Tensor) -> list[Tensor]:
    """The groups of speech in what the talker gives for a step.

    The talker gives a group for each step, but one of zeros where the step made text.

    Args:
        step_codes: integers ``[..., audio_channels, group_size]``.

    Returns:
        int64 ``[audio_channels, group_size]`` each, on the CPU.

    Raises:
        CodesError: for fewer than two dimensions.
    """
    if step_codes.ndim < 2:
        raise CodesError(f"codes have the shape {tuple(step_codes.shape)}; allowed: (..., audio_channels, group_size).")
    groups = step_codes.detach().to("cpu", torch.long).reshape(-1, *step_codes.shape[-2:])
    return [group for group in groups if bool(group.any())]


def to_ids(groups: Sequence[Tensor]) -> Tensor:
    """Flatten groups of speech, each int64 ``[audio_channels, group_size]``, to ids: int64 ``[ids]``."""
    if not groups:
        return torch.empty(0, dtype=torch.long)
    codes = torch.stack(list(groups)).transpose(1, 2)  # [groups, group_size, audio_channels]
    return torch.nn.functional.pad(codes, (1, 0), value=SPEECH_MARK).reshape(-1)


def from_ids(ids: Tensor, group_size: int, audio_channels: int) -> Tensor:
    """The codes of speech among flattened ids.

    Args:
        ids: int64 ``[ids]``, on the CPU. Groups of text are skipped; the first one that begins with the mark of the end
            of speech ends it.
        group_size: codes of a group.
        audio_channels: rows of codes.

    Returns:
        int64 ``[audio_channels, codes]``.

    Raises:
        CodesError: where the ids are no whole number of groups.
    """
    width = group_width(group_size, audio_channels)
    if ids.numel() % width:
        raise CodesError(
            f"{ids.numel()} ids are no whole number of groups; allowed: a multiple of {width} "
            f"(group_size {group_size} x (audio_channels {audio_channels} + 1))."
        )
    groups = ids.reshape(-1, group_size, audio_channels + 1)
    kinds = groups[:, 0, 0]
    before_end = (kinds == END_OF_SPEECH_MARK).cumsum(0) == 0
    speech = groups[(kinds == SPEECH_MARK) & before_end, :, 1:]
    return speech.reshape(-1, audio_channels).T.contiguous()


def check_codes(codes: Tensor, codebook_sizes: Sequence[int]) -> None:
    """Refuse codes that no codebook has.

    Args:
        codes: int64 ``[rows, codes]``, on the CPU.
        codebook_sizes: of the tokenizer's codebooks, in order.

    Raises:
        CodesError: for more rows than there are codebooks, and for the first code that is out of its codebook.
    """
    if codes.shape[0] > len(codebook_sizes):
        raise CodesError(f"codes have {codes.shape[0]} rows; allowed: up to {len(codebook_sizes)} codebooks.")
    sizes = torch.tensor(codebook_sizes[: codes.shape[0]])[:, None]
    wrong = ((codes < 0) | (codes >= sizes)).nonzero()
    if len(wrong):
        row, position = wrong[0].tolist()
        raise CodesError(
            f"code {int(codes[row, position])} at position {position} of {codes.shape[1]} is not in codebook {row}; "
            f"allowed: 0 to {codebook_sizes[row] - 1}."
        )
