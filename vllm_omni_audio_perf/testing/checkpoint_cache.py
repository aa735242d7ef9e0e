# SPDX-License-Identifier: Apache-2.0
"""Generated checkpoints that are made once and kept in the user's cache folder."""

import hashlib
import inspect
import os
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from tqdm import tqdm


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/vllm-omni-audio-perf``, by default under ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-omni-audio-perf"


def cached_qwen2_5_omni_checkpoint(token2wav: Literal["tiny", "real"] = "tiny") -> Path:
    """The folder of a random Qwen2.5-Omni checkpoint, made on first use with a progress bar.

    Args:
        token2wav: "tiny" or "real", see `vllm_omni_audio_perf.testing.qwen2_5_omni_checkpoint.make_checkpoint`.

    Raises:
        ValueError: for another `token2wav`.
    """
    from vllm_omni_audio_perf.testing import qwen2_5_omni_checkpoint

    return _cached(f"qwen2_5_omni-{token2wav}", qwen2_5_omni_checkpoint, token2wav=token2wav)


def cached_mimo_audio_checkpoint() -> Path:
    """The folder of a random MiMo-Audio checkpoint, made on first use with a progress bar."""
    from vllm_omni_audio_perf.testing import mimo_audio_checkpoint

    return _cached("mimo_audio", mimo_audio_checkpoint)


def _cached(name: str, generator: ModuleType, **arguments: Any) -> Path:
    """The folder in the cache that a generator module makes with these arguments."""
    from vllm_omni_audio_perf.testing import byte_tokenizer, checkpoint_writing

    # Named after its generator, so that a changed generator is not served an old checkpoint.
    sources = "".join(inspect.getsource(module) for module in (byte_tokenizer, checkpoint_writing, generator))
    path = cache_folder() / f"{name}-{hashlib.sha256(sources.encode()).hexdigest()[:8]}"
    if not path.is_dir():
        with tqdm(total=len(generator.STEPS), desc=f"Generating {path}", unit="step") as bar:

            def advance(step: str) -> None:
                bar.update(bool(bar.postfix))  # a step is done when the next one begins
                bar.set_postfix_str(step)

            generator.make_checkpoint(path, progress=advance, **arguments)
            bar.update()
    return path
