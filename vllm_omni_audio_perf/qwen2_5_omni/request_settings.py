# SPDX-License-Identifier: Apache-2.0
"""What a client can ask of the voice: speaker and seed, from the prompt to the stages.

A prompt carries them in ``additional_information``: ``speaker`` (a name) and ``seed`` (a whole number), each plain or
as a list of one, which is how vLLM-Omni's server writes them. On the way to a stage of ours they become
`RequestSettings` in that request's ``model_intermediate_buffer``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from vllm_omni_audio_perf.scheduling.offline import wishes_empty_on_error

BUFFER_KEY = "audio_perf"
"""Where the settings stand in a request's ``model_intermediate_buffer``."""

MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


class RequestError(ValueError):
    """A request asks for something that is not there. The message names it and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class RequestSettings:
    """Settings of one request."""

    voice: str | None = None
    """Name of the voice as the checkpoint spells it; None for the default one."""

    seed: int | None = None
    """Seed of the noise; None for that of the stage's sampling parameters."""

    empty_on_error: bool = False
    """Whether a failed request ends with empty audio instead of an error. So do those of vLLM-Omni's offline
    ``Omni.generate``, which gives up all its prompts at the first error."""

    @classmethod
    def from_prompt(cls, prompt: object, voices: Iterable[str]) -> Self:
        """Read and check what a prompt asks for.

        Args:
            prompt: as ``Omni.generate`` takes it; what is no mapping asks for nothing.
            voices: names of the checkpoint's voices.

        Raises:
            RequestError: for an unknown voice or a seed that is no whole number of 64 bits.
        """
        information = prompt.get("additional_information") if isinstance(prompt, Mapping) else None
        if not isinstance(information, Mapping):
            return cls()
        return cls(
            voice=checked_voice(_single(information.get("speaker")), voices),
            seed=checked_seed(_single(information.get("seed"))),
            empty_on_error=wishes_empty_on_error(information),
        )

    @classmethod
    def from_buffer(cls, buffer: object) -> Self:
        """Read what `to_buffer` wrote, in the ``model_intermediate_buffer`` of a request."""
        settings = buffer.get(BUFFER_KEY) if isinstance(buffer, Mapping) else None
        return cls(**settings) if isinstance(settings, Mapping) else cls()

    def to_buffer(self) -> dict[str, dict[str, Any]]:
        """As part of a ``model_intermediate_buffer``, of plain values only."""
        return {BUFFER_KEY: {name: value for name, value in asdict(self).items() if value is not None}}


def checked_voice(name: object, voices: Iterable[str]) -> str | None:
    """The checkpoint's spelling of a voice, whatever the case; None for none.

    Raises:
        RequestError: if there is no such voice.
    """
    if name is None or (isinstance(name, str) and not name.strip()):
        return None
    voices = list(voices)
    if isinstance(name, str):
        for voice in voices:
            if voice.casefold() == name.strip().casefold():
                return voice
    raise RequestError(f"There is no voice {name!r}; this checkpoint has: {', '.join(voices)}.")


def checked_seed(seed: object) -> int | None:
    """A seed as a whole number; None for none.

    Raises:
        RequestError: if it is something else or out of range.
    """
    if seed is None:
        return None
    if type(seed) is not int or not MIN_SEED <= seed <= MAX_SEED:
        raise RequestError(f"seed is {seed!r}; allowed: a whole number from {MIN_SEED} to {MAX_SEED}.")
    return seed


def _single(value: object) -> object:
    """The element of a list of one; anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
