# SPDX-License-Identifier: Apache-2.0
"""Every stream is spoken whole, in order and once, whatever the chunks and wherever it ends."""

from itertools import pairwise

import pytest

from vllm_omni_audio_perf.mimo_audio.streaming import (
    StreamSettings,
    StreamSettingsError,
    Window,
    check_left_context,
    end_of_chunk,
    new_frames,
    next_window,
    windows,
)
from vllm_omni_audio_perf.options import OptionError

FRAMES_PER_GROUP = 16
LEFT_WINDOW, RIGHT_WINDOW = 40, 10
MAX_GROUPS = 240
RAMPS = ((), (1,), (2, 3), (3, 3, 3))


def spoken_range(settings: StreamSettings, window: Window, right_window: int = RIGHT_WINDOW) -> tuple[int, int]:
    """The vocoder frames of the stream that a window adds."""
    first, end = new_frames(
        groups=window.groups,
        spoken=window.spoken,
        index=window.index,
        final=window.final,
        right_context=settings.right_context,
        right_window=right_window,
        frames_per_group=FRAMES_PER_GROUP,
    )
    return first + window.start * FRAMES_PER_GROUP, end + window.start * FRAMES_PER_GROUP


def check_stream(settings: StreamSettings) -> None:
    """Streams of 1 to 240 groups, each ending with its last codes, and each ending with an empty payload."""
    spoken = index = end_of_speech = 0
    for groups in range(1, MAX_GROUPS + 1):
        endings = [(spoken, index, end_of_speech)]  # the end comes with the last group
        window = next_window(settings, groups=groups, spoken=spoken, index=index, finished=False)
        if window is not None:
            first, end = spoken_range(settings, window)
            assert first == end_of_speech
            assert first < end
            check_context(settings, window, first, end)
            spoken, index, end_of_speech = end_of_chunk(settings, window), index + 1, end
        endings.append((spoken, index, end_of_speech))  # the end comes afterwards
        for so_far, windows_before, first_frame in endings:
            last = next_window(settings, groups=groups, spoken=so_far, index=windows_before, finished=True)
            assert last is not None
            assert last.final
            first, end = spoken_range(settings, last)
            assert (first, end) == (first_frame, groups * FRAMES_PER_GROUP)
            assert first < end  # a last window that adds nothing would end a request without output
            check_context(settings, last, first, end)


def check_context(settings: StreamSettings, window: Window, first: int, end: int) -> None:
    kept_back = RIGHT_WINDOW if settings.right_context == 0 else 0
    context = first - window.start * FRAMES_PER_GROUP
    assert context >= settings.left_context * FRAMES_PER_GROUP - kept_back or window.start == 0
    if not window.final:
        right = (window.end * FRAMES_PER_GROUP) - end
        assert right == max(settings.right_context * FRAMES_PER_GROUP, kept_back)


@pytest.mark.parametrize("chunk", range(3, 41))
def test_no_group_is_lost_or_repeated(chunk: int) -> None:
    for left_context in range(3, 51):
        check_stream(StreamSettings(chunk=chunk, left_context=left_context))


@pytest.mark.parametrize("ramp", RAMPS)
@pytest.mark.parametrize("right_context", [0, 1, 2, 10])
def test_no_group_is_lost_with_a_ramp_and_with_right_context(ramp: tuple[int, ...], right_context: int) -> None:
    for chunk in (3, 7, 30):
        check_stream(StreamSettings(chunk=chunk, left_context=40, ramp=ramp, right_context=right_context))


def test_several_groups_at_once_lose_nothing() -> None:
    settings = StreamSettings(chunk=3, left_context=5, ramp=(1,))
    window = next_window(settings, groups=11, spoken=0, index=0, finished=False)
    assert window == Window(0, 10, 0, 0, False)


def test_windows_of_a_stream() -> None:
    settings = StreamSettings(chunk=30, left_context=40, ramp=(3, 10))
    stream = list(windows(settings, 110))
    assert [(window.start, window.end) for window in stream] == [
        (0, 3),
        (0, 13),
        (0, 43),
        (3, 73),
        (33, 103),
        (63, 110),
    ]
    assert [window.index for window in stream] == list(range(6))
    assert [window.final for window in stream] == [False] * 5 + [True]
    ranges = [spoken_range(settings, window) for window in stream]
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert (ranges[0][0], ranges[-1][1]) == (0, 110 * FRAMES_PER_GROUP)
    assert list(windows(settings, 0)) == []


def test_a_first_chunk_does_not_wait_for_a_whole_one() -> None:
    settings = StreamSettings(chunk=30, ramp=(3, 30))
    assert next_window(settings, groups=2, spoken=0, index=0, finished=False) is None
    assert next_window(settings, groups=3, spoken=0, index=0, finished=False) == Window(0, 3, 0, 0, False)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, StreamSettings(chunk=10, left_context=40)),
        (None, StreamSettings()),
        ({"codec_chunk_frames": 30, "codec_left_context_frames": 45}, StreamSettings(chunk=30, left_context=45)),
        ({"codec_chunk_frames": 30, "initial_codec_chunk_frames": 2}, StreamSettings(chunk=30, ramp=(2,))),
        ({"codec_chunk_frames": 30, "initial_codec_chunk_frames": 0}, StreamSettings(chunk=30)),
        ({"codec_chunk_ramp": [3, 10], "initial_codec_chunk_frames": 2}, StreamSettings(ramp=(3, 10))),
        ({"codec_chunk_ramp": "3, 6,10"}, StreamSettings(ramp=(3, 6, 10))),
        ({"audio_perf": {"right_context_frames": 2}, "role": "sender"}, StreamSettings(right_context=2)),
        ({"audio_perf": None}, StreamSettings()),
    ],
)
def test_settings_stand_in_the_connector(extra: object, expected: StreamSettings) -> None:
    assert StreamSettings.from_connector(extra) == expected


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"codec_chunk_frames": 2}, "codec_chunk_frames is 2; allowed: a whole number of at least 3"),
        ({"codec_chunk_frames": "30"}, "codec_chunk_frames is '30'; allowed: a whole number"),
        ({"codec_chunk_frames": True}, "codec_chunk_frames is True; allowed"),
        ({"codec_left_context_frames": -1}, "codec_left_context_frames is -1; allowed: a whole number of at least 0"),
        ({"initial_codec_chunk_frames": 31, "codec_chunk_frames": 30}, "has a chunk of 31; allowed: 1 to codec_chunk"),
        ({"codec_chunk_ramp": [3]}, "codec_chunk_ramp is .* allowed: a list of at least two"),
        ({"codec_chunk_ramp": "3,x"}, "codec_chunk_ramp is 'x'; allowed"),
        ({"codec_chunk_ramp": [0, 3]}, "codec_chunk_ramp is 0; allowed: a whole number of at least 1"),
        (
            {"audio_perf": {"right_context": 1}},
            "Unknown option audio_perf.right_context = 1; allowed: right_conte",
        ),
        ({"audio_perf": 3}, "audio_perf is 3; allowed: a mapping"),
        ({"audio_perf": {"right_context_frames": 1.0}}, "audio_perf.right_context_frames is 1.0; allowed"),
        ({"audio-perf": {}}, "has a section 'audio-perf'; did you mean 'audio_perf'"),
        ({"codec_chunk_frame": 30}, "has 'codec_chunk_frame'; did you mean 'codec_chunk_frames'"),
    ],
)
def test_bad_settings_are_named(extra: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        StreamSettings.from_connector(extra)


def test_a_left_context_that_the_window_exceeds_is_refused() -> None:
    sizes = {"left_window": 40, "right_window": 10, "layers": 16, "frames_per_group": 16}
    with pytest.raises(StreamSettingsError, match="codec_left_context_frames is 2; allowed: at least 3"):
        check_left_context(StreamSettings(left_context=2), **sizes)
    warning = check_left_context(StreamSettings(left_context=39), **sizes)
    assert warning is not None
    assert "16 layers together look 40 groups back" in warning
    assert check_left_context(StreamSettings(left_context=40), **sizes) is None
    with pytest.raises(StreamSettingsError, match="at least 1"):  # or frames that were kept back would be lost
        check_left_context(StreamSettings(left_context=0), **(sizes | {"left_window": -1}))
