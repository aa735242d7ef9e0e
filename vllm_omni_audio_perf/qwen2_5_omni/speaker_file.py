# SPDX-License-Identifier: Apache-2.0
"""Finds the voices of a checkpoint that vLLM was given as a folder or as the name of a repository."""

import os
from pathlib import Path

import torch

from vllm_omni_audio_perf.qwen2_5_omni.speakers import DEFAULT_SPEAKER, SPEAKER_FILE, load_speakers


def checkpoint_folder(
    model: str, revision: str | None = None, *, download_dir: str | None = None, download: bool = True
) -> Path:
    """The folder of a checkpoint; for the name of a repository its downloaded copy, where downloading is wanted.

    Args:
        model: folder or name of a repository.
        revision: of the repository.
        download_dir: where downloads go; None for Hugging Face's own cache.
        download: whether to download; if not, a name is returned as a folder that does not exist.
    """
    if os.path.isdir(model) or not download:
        return Path(model)
    from vllm_omni.model_executor.model_loader.weight_utils import download_weights_from_hf_specific

    return Path(
        download_weights_from_hf_specific(model, download_dir, allow_patterns=[SPEAKER_FILE], revision=revision)
    )


def voice_names(
    model: str, revision: str | None = None, *, download_dir: str | None = None, download: bool = True
) -> tuple[str, ...]:
    """Names of a checkpoint's voices, as requests may give them; arguments as for `checkpoint_folder`.

    A checkpoint without voices (a stage with dummy weights runs all the same) has the default one.
    """
    try:
        folder = checkpoint_folder(model, revision, download_dir=download_dir, download=download)
        return tuple(load_speakers(folder, torch.device("cpu")))
    except FileNotFoundError:
        return (DEFAULT_SPEAKER,)
