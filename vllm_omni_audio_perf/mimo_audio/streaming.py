# SPDX-License-Identifier: Apache-2.0
"""Which groups of codes are decoded together while a request still talks, and which part of that audio is new.

A stream is cut into chunks. A chunk is decoded with `left_context` groups before it, because each vocoder frame depends
on frames before it, and its last frames are spoken with the next chunk, because they depend on frames after it: the
vocoder's own right window (10 frames), or `right_context` whole groups that must be there before the chunk is decoded.

Everything here counts groups, 160 ms each, or vocoder frames, 16 a group and 240 samples each. Pure Python.
"""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from vllm_omni_audio_perf.options import SECTION, OptionError, read_section

MIN_CHUNK = 3
_CHUNK, _LEFT, _INITIAL, _RAMP = (
    "codec_chunk_frames",
    "codec_left_context_frames",
    "initial_codec_chunk_frames",
    "codec_chunk_ramp",
)
_RIGHT = "right_context_frames"


class StreamSettingsError(OptionError):
    """A setting of the connector is not allowed. The message names it, its value and what is allowed."""


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How a stream is cut, in groups. In a stage config they stand in the connector's ``extra``."""

    chunk: int = 10
    """``codec_chunk_frames``: new groups of a chunk, once the ramp is over."""

    left_context: int = 40
    """``codec_left_context_frames``: groups before a chunk that are decoded with it."""

    ramp: tuple[int, ...] = ()
    """``codec_chunk_ramp``, or ``initial_codec_chunk_frames`` for a single one: new groups of the first chunks."""

    right_context: int = 0
    """``audio_perf.right_context_frames``: groups after a chunk that it waits for; 0 to speak the frames that depend on
    them with the next chunk instead."""

    def __post_init__(self) -> None:
        _check_whole(_CHUNK, self.chunk, MIN_CHUNK)
        _check_whole(_LEFT, self.left_context, 0)
        _check_whole(f"{SECTION}.{_RIGHT}", self.right_context, 0)
        for size in self.ramp:
            _check_whole(_RAMP if len(self.ramp) > 1 else _INITIAL, size, 1)
            if size > self.chunk:
                raise StreamSettingsError(
                    f"{_RAMP if len(self.ramp) > 1 else _INITIAL} has a chunk of {size}; "
                    f"allowed: 1 to {_CHUNK}, which is {self.chunk}."
                )

    @classmethod
    def from_connector(cls, extra: object) -> Self:
        """Read the settings of a connector.

        Args:
            extra: the connector's ``extra``. Keys other than those named here belong to others.

        Raises:
            OptionError: for an unknown setting in the section ``audio_perf``, or a misspelt one.
            StreamSettingsError: for a value that is not allowed and for another misspelt setting.
        """
        values: Mapping[str, Any] = extra if isinstance(extra, Mapping) else {}
        _refuse_misspelt(values, (_CHUNK, _LEFT, _INITIAL, _RAMP))
        section = read_section(values, [_RIGHT], "the connector's extra")
        settings: dict[str, Any] = {"ramp": _ramp(values)}
        for name, key, source in (
            ("chunk", _CHUNK, values),
            ("left_context", _LEFT, values),
            ("right_context", _RIGHT, section),
        ):
            if source.get(key) is not None:
                settings[name] = source[key]
        return cls(**settings)

    def boundary_after(self, groups: int) -> int:
        """The end, in groups, of the first chunk that ends after `groups`."""
        end = 0
        for size in self.ramp:
            end += size
            if end > groups:
                return end
        return end + ((groups - end) // self.chunk + 1) * self.chunk


@dataclass(frozen=True)
class Window:
    """What is decoded at once: the groups ``[start, end)`` of a stream."""

    start: int
    end: int
    spoken: int
    """Groups at its start that belong to chunks before."""
    index: int
    """0 for the first window of a stream."""
    final: bool
    """Whether the stream ends with it."""

    @property
    def groups(self) -> int:
        return self.end - self.start


def next_window(settings: StreamSettings, *, groups: int, spoken: int, index: int, finished: bool) -> Window | None:
    """What to decode next in a stream.

    Args:
        settings: how it is cut.
        groups: of the stream so far.
        spoken: the end of the last chunk that was decoded; 0 before the first.
        index: windows before this one.
        finished: whether no group will follow.

    Returns:
        None where there is nothing to decode: not enough groups for a chunk, or, for a finished stream, none at all. A
        finished stream whose chunks are all decoded gives its last groups once more, for the frames that were kept
        back.
    """
    start = max(0, spoken - settings.left_context)
    if finished:
        return Window(start, groups, spoken - start, index, True) if groups else None
    available = groups - settings.right_context
    end = settings.boundary_after(spoken)
    if available < end:
        return None
    while (after := settings.boundary_after(end)) <= available:  # only where several groups came at once
        end = after
    return Window(start, end + settings.right_context, spoken - start, index, False)


def end_of_chunk(settings: StreamSettings, window: Window) -> int:
    """The end, in groups of the stream, of the chunk that a window decodes: `spoken` of the next one."""
    return window.end if window.final else window.end - settings.right_context


def windows(settings: StreamSettings, groups: int) -> Iterator[Window]:
    """The windows of a whole stream of `groups` groups that come one by one and end with an empty payload."""
    spoken = index = 0
    for total in range(1, groups + 1):
        window = next_window(settings, groups=total, spoken=spoken, index=index, finished=False)
        if window is not None:
            yield window
            spoken, index = end_of_chunk(settings, window), index + 1
    window = next_window(settings, groups=groups, spoken=spoken, index=index, finished=True)
    if window is not None:
        yield window


def new_frames(
    *, groups: int, spoken: int, index: int, final: bool, right_context: int, right_window: int, frames_per_group: int
) -> tuple[int, int]:
    """The vocoder frames of a decoded window that are spoken now.

    Args:
        groups: of the window.
        spoken: groups at its start that belong to chunks before.
        index: 0 for the first window of a stream.
        final: whether the stream ends with it.
        right_context: whole groups at its end that belong to the next chunk.
        right_window: frames after a frame that the vocoder's layers look at.
        frames_per_group: 16.

    Returns:
        ``(first, end)``, counted from the start of the window. Over the windows of a stream they follow one another
        without gap and without overlap.
    """
    kept_back = right_window if right_context == 0 else 0
    first = spoken * frames_per_group - (kept_back if index else 0)
    end = groups * frames_per_group
    if not final:
        end -= right_context * frames_per_group + kept_back
    first = max(0, first)
    return first, max(first, end)


def check_left_context(
    settings: StreamSettings, *, left_window: int, right_window: int, layers: int, frames_per_group: int
) -> str | None:
    """Compare the left context with what the vocoder looks at.

    Args:
        settings: of the stream.
        left_window: frames before a frame that one layer looks at; negative for no limit.
        right_window: frames after it; those are kept back and spoken out of the next chunk's left context.
        layers: of the vocoder.
        frames_per_group: 16.

    Returns:
        A warning where the context is shorter than what all layers together see, else None.

    Raises:
        StreamSettingsError: where it is shorter than what one layer sees, which makes audible seams.
    """
    needed = -(-max(left_window, right_window) // frames_per_group)
    if settings.left_context < needed:
        raise StreamSettingsError(
            f"{_LEFT} is {settings.left_context}; allowed: at least {needed}, for a vocoder layer looks at "
            f"{left_window} frames before and {right_window} after a frame, {frames_per_group} a group. Less is "
            "heard as noise and other voices at the seams."
        )
    seen = -(-left_window * layers // frames_per_group)
    if settings.left_context < seen:
        return (
            f"{_LEFT} is {settings.left_context}; the vocoder's {layers} layers together look {seen} groups back, so "
            "that chunks differ a little from one-shot decoding."
        )
    return None


def _ramp(values: Mapping[str, Any]) -> tuple[int, ...]:
    ramp = values.get(_RAMP)
    if isinstance(ramp, str):
        ramp = [int(size) if size.strip().isdigit() else size for size in ramp.split(",")]
    if ramp is not None:
        if not isinstance(ramp, Sequence) or len(ramp) < 2:
            raise StreamSettingsError(f"{_RAMP} is {ramp!r}; allowed: a list of at least two chunk sizes.")
        return tuple(ramp)
    initial = values.get(_INITIAL)
    if initial is None or initial == 0:
        return ()
    return (initial,)


def _check_whole(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise StreamSettingsError(
            f"{name} is {value!r}; allowed: a whole number of at least {least} (groups of 160 ms)."
        )


def _refuse_misspelt(values: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in values:
        if key not in known and (close := difflib.get_close_matches(str(key), known, cutoff=0.9)):
            raise StreamSettingsError(f"the connector's extra has {key!r}; did you mean {close[0]!r}?")
