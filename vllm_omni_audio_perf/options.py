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
SOLVERS = ("rk4", "midpoint", "euler")
DIT_DTYPES = ("float32", "bfloat16")
MAX_GRAPH_MEL_FRAMES = 60_000  # more would take more graphs than a runner holds


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

    num_steps: int = 10
    """Points of the solve's time grid; it has one interval fewer. Upstream's number. Fewer are faster and another
    function."""

    solver: str = "rk4"
    """Rule of the solve: ``rk4``, upstream's, with four evaluations an interval; ``midpoint`` with two; ``euler`` with
    one."""

    dit_dtype: str = "float32"
    """Of the weights of the DiT's linear layers, to which their inputs are cast. Residual stream, norms, attention and
    solver are float32 in any case."""

    frames_per_solve: int = 16_000
    """Most mel frames of several requests that are solved together; what is over it waits for the next solve. A longer
    clip is solved alone."""

    group_memory_mib: int = 1024
    """Memory that the intermediates of an evaluation take at most, in MiB: a longer one runs in groups of blocks."""

    vocoder_frames: int = 1000
    """Longest mel, in frames, that the vocoder takes whole; a longer one runs in pieces."""

    cuda_graphs: bool = True
    """Whether evaluations are captured in CUDA graphs at start, on a GPU."""

    graph_mel_frames: int = 600
    """Most mel frames of a solve whose evaluations run from graphs. Longer ones keep a GPU busy without."""

    graph_seconds: int = 120
    """Longest time that capturing takes, in seconds; lengths that are left then are evaluated without a graph."""

    graph_memory_mib: int = 2048
    """Most memory that graphs take, in MiB, within what ``gpu_memory_utilization`` leaves to the stage."""

    def __post_init__(self) -> None:
        _check_choice(self, "noise", NOISE_SOURCES)
        _check_choice(self, "solver", SOLVERS)
        _check_choice(self, "dit_dtype", DIT_DTYPES)
        _check_choice(self, "cuda_graphs", (True, False))
        _check_whole(self, "max_mel_frames", 0)
        _check_whole(self, "num_steps", 2)
        sizes = ("frames_per_solve", "group_memory_mib", "vocoder_frames")
        for name in (*sizes, "graph_seconds", "graph_memory_mib"):
            _check_whole(self, name, 1)
        _check_whole(self, "graph_mel_frames", 1, MAX_GRAPH_MEL_FRAMES)


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
        _check_choice(self, "cuda_graphs", (True, False))
        _check_choice(self, "flash_attention", (True, False))
        _check_whole(self, "graph_seconds", 1)
        _check_whole(self, "graph_memory_mib", 1)


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


def _check_choice(options: StageOptions, name: str, allowed: tuple[str, ...] | tuple[bool, ...]) -> None:
    value = getattr(options, name)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        words = ", ".join(str(choice).lower() if isinstance(choice, bool) else choice for choice in allowed)
        raise OptionError(f"{SECTION}.{name} is {value!r}; allowed: {words}.")


def _check_whole(options: StageOptions, name: str, minimum: int, maximum: int | None = None) -> None:
    value = getattr(options, name)
    if type(value) is not int or value < minimum or (maximum is not None and value > maximum):
        most = "" if maximum is None else f" and at most {maximum}"
        raise OptionError(f"{SECTION}.{name} is {value!r}; allowed: a whole number of at least {minimum}{most}.")
