# SPDX-License-Identifier: Apache-2.0
"""The voices of a Qwen2.5-Omni checkpoint, as `spk_dict.pt` holds them."""

import pickle
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

SPEAKER_FILE = "spk_dict.pt"
DEFAULT_SPEAKER = "Chelsie"
"""The voice of a request that names none, as in vLLM-Omni."""


class Speaker(NamedTuple):
    """Conditioning of one voice."""

    embedding: Tensor
    """``[1, enc_emb_dim]`` float32."""

    reference_mel: Tensor
    """``[1, reference_frames, mel_dim]`` float32."""


def load_speakers(folder: Path, device: torch.device) -> dict[str, Speaker]:
    """Read every voice of a checkpoint folder onto `device`, in the order of the file.

    Args:
        folder: holds ``spk_dict.pt``: ``{name: {"cond": [1, enc_emb_dim], "ref_mel": [1, frames, mel_dim], ...}}``.
        device: where the tensors go, whatever device they were saved from.

    Raises:
        FileNotFoundError: if the file is missing.
        ValueError: if it is not such a dictionary, or holds anything but tensors and plain values: nothing in it is
            ever executed.
    """
    path = folder / SPEAKER_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: the code2wav stage of Qwen2.5-Omni needs the voices of the checkpoint "
            f"({SPEAKER_FILE} of the model repository)."
        )
    try:
        entries = torch.load(path, map_location=device, weights_only=True)
        speakers = {
            name: Speaker(
                entry["cond"].to(device=device, dtype=torch.float32),
                entry["ref_mel"].to(device=device, dtype=torch.float32),
            )
            for name, entry in entries.items()
        }
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a dictionary of voices ({type(error).__name__}: {error}).") from error
    if not speakers:
        raise ValueError(f"{path} holds no voice.")
    return speakers


def silent_speaker(embedding_dim: int, mel_dim: int, device: torch.device) -> Speaker:
    """A voice of zeros: what upstream falls back to, and what a stage with dummy weights and no folder uses."""
    return Speaker(
        torch.zeros(1, embedding_dim, device=device, dtype=torch.float32),
        torch.zeros(1, 300, mel_dim, device=device, dtype=torch.float32),
    )
