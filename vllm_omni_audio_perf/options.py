# SPDX-License-Identifier: Apache-2.0
"""Every option a user can set, with its type, default and allowed values.

Options are written per stage, in the stage config's ``additional_config``::

    - stage_id: 2
      model_arch: AudioPerfQwen2_5OmniForConditionalGeneration
      additional_config:
        audio_perf:
          max_mel_frames: 6000

vLLM carries that dictionary unchanged to the stage's process as ``vllm_config.additional_config``.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

SECTION = "audio_perf"
NOISE_SOURCES = ("request", "stage")


class OptionError(ValueError):
    """An option is unknown or has a value that is not allowed. The message names both and what is allowed."""


class StageOptions:
    """The options of one stage. Subclasses are frozen dataclasses that check their values."""

    @classmethod
    def from_additional_config(cls, additional_config: object) -> Self:
        """Read the options of one stage.

        Args:
            additional_config: ``vllm_config.additional_config`` of the stage. Keys beside ``audio_perf`` belong to
                others and are left alone, unless one is evidently a misspelling of it.

        Raises:
            OptionError: for an unknown option, a value that is not allowed, or a misspelt section.
        """
        allowed = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return cls(**read_section(additional_config, allowed, "additional_config"))


@dataclass(frozen=True, kw_only=True)
class Token2WavOptions(StageOptions):
    """Options of the Qwen2.5-Omni code2wav stage."""

    max_mel_frames: int = 30_000
    """Longest clip in mel frames of 10 ms; what is longer is cut at the end. 0 for no cap. Upstream's default."""

    noise: str = "request"
    """Where the noise comes from: ``request``, from the request's seed alone; ``stage``, as vLLM-Omni 0.30.0 draws it,
    from the stage's own random state, for comparisons with it."""

    def __post_init__(self) -> None:
        if type(self.max_mel_frames) is not int or self.max_mel_frames < 0:
            raise OptionError(
                f"{SECTION}.max_mel_frames is {self.max_mel_frames!r}; allowed: a whole number of at least 0."
            )
        if self.noise not in NOISE_SOURCES:
            raise OptionError(f"{SECTION}.noise is {self.noise!r}; allowed: {', '.join(NOISE_SOURCES)}.")


@dataclass(frozen=True, kw_only=True)
class MiMoAudioOptions(StageOptions):
    """Options of the MiMo-Audio code2wav stage. How it streams stands in the connector (`mimo_audio.streaming`)."""

    cuda_graphs: bool = True
    """Whether decodes are captured in CUDA graphs at start, on a GPU. ``MIMO_AUDIO_TOKENIZER_CUDA_GRAPH=0`` in the
    environment switches them off, too."""

    graph_seconds: int = 120
    """Longest time that capturing takes, in seconds; shapes that are left then are decoded without a graph."""

    graph_memory_mib: int = 2048
    """Most memory that graphs take, in MiB, within what ``gpu_memory_utilization`` leaves to the stage."""

    flash_attention: bool = False
    """Whether decodes without a graph use flash-attn, which must be installed, on a GPU and in half precision."""

    def __post_init__(self) -> None:
        for name in ("cuda_graphs", "flash_attention"):
            if type(getattr(self, name)) is not bool:
                raise OptionError(f"{SECTION}.{name} is {getattr(self, name)!r}; allowed: true, false.")
        for name in ("graph_seconds", "graph_memory_mib"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise OptionError(f"{SECTION}.{name} is {value!r}; allowed: a whole number of at least 1.")


def read_section(config: object, allowed: list[str], where: str) -> dict[str, Any]:
    """The ``audio_perf`` dictionary in a configuration of others, all of whose keys are among `allowed`.

    Args:
        config: in which it stands, if anywhere.
        allowed: names of its options.
        where: the configuration's name, for errors.

    Raises:
        OptionError: for an unknown option, a section that is none, or a misspelt one.
    """
    if not isinstance(config, Mapping):  # vLLM also allows a hashable config object, which is not ours
        return {}
    for key in config:
        if key != SECTION and difflib.get_close_matches(str(key).lower(), [SECTION], cutoff=0.9):
            raise OptionError(f"{where} has a section {key!r}; did you mean {SECTION!r}?")
    section = config.get(SECTION)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise OptionError(f"{where}.{SECTION} is {section!r}; allowed: a mapping of options ({', '.join(allowed)}).")
    for key in section:
        if key not in allowed:
            raise OptionError(f"Unknown option {SECTION}.{key} = {section[key]!r}; allowed: {', '.join(allowed)}.")
    return dict(section)
