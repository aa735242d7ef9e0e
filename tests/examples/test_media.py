# SPDX-License-Identifier: Apache-2.0
"""The recordings, the picture and the video that the examples send by default."""

from pathlib import Path

import pytest

MEDIA = Path(__file__).parents[2] / "examples/media"
LARGEST_TOTAL = 200_000


def test_they_are_small_and_described() -> None:
    files = [path for path in MEDIA.iterdir() if path.suffix not in (".md", ".py") and path.is_file()]
    assert len(files) == 4
    assert sum(path.stat().st_size for path in files) < LARGEST_TOTAL
    description = (MEDIA / "README.md").read_text(encoding="utf-8")
    for path in files:
        assert f"`{path.name}`" in description
    assert "CC0-1.0" in description


@pytest.mark.parametrize("name", ["sea.flac", "tide.flac"])
def test_recordings_are_mono_speech(name: str) -> None:
    soundfile = pytest.importorskip("soundfile")
    samples, rate = soundfile.read(MEDIA / name)
    assert rate == 16_000
    assert samples.ndim == 1
    assert 2 <= len(samples) / rate <= 4
    assert 0.01 < (samples**2).mean() ** 0.5 < 0.5


def test_picture() -> None:
    image = pytest.importorskip("PIL.Image").open(MEDIA / "boat.png")
    assert image.mode == "RGB"
    assert image.size == (336, 252)


def test_video_has_frames_and_sound() -> None:
    av = pytest.importorskip("av")
    with av.open(str(MEDIA / "sun.mp4")) as container:
        (video,), (audio,) = container.streams.video, container.streams.audio
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video)]
        assert len(frames) == 24
        assert audio.rate == 16_000
        assert abs(float(audio.duration * audio.time_base) - float(video.duration * video.time_base)) < 0.5
    left, right = (frame[:80].astype(int) for frame in (frames[0], frames[-1]))
    yellow = [(sky[..., 0] - sky[..., 2] > 100).nonzero()[1].mean() / sky.shape[1] for sky in (left, right)]
    assert yellow[0] < 0.2  # the sun
    assert yellow[1] > 0.8
