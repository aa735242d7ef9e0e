# SPDX-License-Identifier: Apache-2.0
"""The prompts of the query types: where the media stand in the text, and the media themselves."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

SYSTEM_PROMPT = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, "
    "capable of perceiving auditory and visual inputs, as well as generating text and speech."
)
# One for each item of `multi_modal_data`, in the same order.
AUDIO = "<|audio_bos|><|AUDIO|><|audio_eos|>"
IMAGE = "<|vision_bos|><|IMAGE|><|vision_eos|>"
VIDEO = "<|vision_bos|><|VIDEO|><|vision_eos|>"

SHIPPED_MEDIA = Path(__file__).resolve().parents[2] / "media"

Prompt = dict[str, Any]


class MediaError(Exception):
    """A file could not be read as what it should be; the message names it."""


@dataclass(frozen=True)
class Media:
    """The files of a run, by default the repository's, and how they are read."""

    audio: Path = SHIPPED_MEDIA / "sea.flac"
    second_audio: Path = SHIPPED_MEDIA / "tide.flac"
    image: Path = SHIPPED_MEDIA / "boat.png"
    video: Path = SHIPPED_MEDIA / "sun.mp4"
    num_frames: int = 16  # at most, evenly spaced
    sampling_rate: int = 16_000  # Hz


def text(media: Media, question: str | None) -> Prompt:
    """Text alone."""
    return _prompt("", question or "Explain how a text-to-speech system works. Answer in 15 words.")


def use_audio(media: Media, question: str | None) -> Prompt:
    """A recording."""
    audio = load_audio(media.audio, media.sampling_rate)
    return _prompt(AUDIO, question or "What is said in this recording?", audio=audio)


def use_image(media: Media, question: str | None) -> Prompt:
    """A picture."""
    return _prompt(IMAGE, question or "What do you see in this picture?", image=load_image(media.image))


def use_video(media: Media, question: str | None) -> Prompt:
    """The frames of a video, without its sound."""
    video = load_video(media.video, media.num_frames)
    return _prompt(VIDEO, question or "What moves in this video, and where to?", video=video)


def use_multi_audios(media: Media, question: str | None) -> Prompt:
    """Two recordings."""
    audios = [load_audio(path, media.sampling_rate) for path in (media.audio, media.second_audio)]
    return _prompt(AUDIO + AUDIO, question or "Do the two recordings say the same?", audio=audios)


def use_mixed_modalities(media: Media, question: str | None) -> Prompt:
    """A recording, a picture, and the frames of a video."""
    return _prompt(
        AUDIO + IMAGE + VIDEO,
        question or "What is said in the recording, what is in the picture, and what moves in the video?",
        audio=load_audio(media.audio, media.sampling_rate),
        image=load_image(media.image),
        video=load_video(media.video, media.num_frames),
    )


def use_audio_in_video(media: Media, question: str | None) -> Prompt:
    """A video with its sound. The processor weaves the sound into the video's place, so it has none of its own."""
    prompt = _prompt(
        VIDEO,
        question or "What happens in this video, and what does the voice in it say?",
        video=load_video(media.video, media.num_frames),
        audio=load_sound_of_video(media.video, media.sampling_rate),
    )
    return prompt | {"mm_processor_kwargs": {"use_audio_in_video": True}}


class QueryType(NamedTuple):
    """How to make a prompt, and which options name files for it."""

    make: Callable[[Media, str | None], Prompt]
    reads: frozenset[str] = frozenset()


QUERY_TYPES = {
    "text": QueryType(text),
    "use_audio": QueryType(use_audio, frozenset({"--audio-path"})),
    "use_image": QueryType(use_image, frozenset({"--image-path"})),
    "use_video": QueryType(use_video, frozenset({"--video-path"})),
    "use_multi_audios": QueryType(use_multi_audios, frozenset({"--audio-path"})),
    "use_mixed_modalities": QueryType(
        use_mixed_modalities, frozenset({"--audio-path", "--image-path", "--video-path"})
    ),
    "use_audio_in_video": QueryType(use_audio_in_video, frozenset({"--video-path"})),
}


def load_audio(path: Path, sampling_rate: int) -> Any:
    """The mono waveform (samples,), float32, and its rate."""
    from vllm.multimodal.media.audio import load_audio as load

    with _named(path, "audio"):
        return load(path, sr=sampling_rate)


def load_sound_of_video(path: Path, sampling_rate: int) -> Any:
    """The same of a video's sound track."""
    from vllm.multimodal.media.audio import load_audio_pyav

    with _named(path, "a video with sound"):
        return load_audio_pyav(str(path), sr=sampling_rate)


def load_image(path: Path) -> Any:
    """The picture, RGB."""
    from vllm.multimodal.media import ImageMediaIO

    with _named(path, "a picture"):
        return ImageMediaIO().load_file(path).media


def load_video(path: Path, num_frames: int) -> Any:
    """The frames (frames, height, width, 3), uint8, and a dict that says when they are shown."""
    from vllm.multimodal.media import ImageMediaIO, VideoMediaIO

    with _named(path, "a video"):
        return VideoMediaIO(ImageMediaIO(), num_frames=num_frames).load_file(path).media


@contextmanager
def _named(path: Path, kind: str) -> Iterator[None]:
    """Turn whatever a decoder raises into an error that names the file."""
    try:
        yield
    except Exception as error:
        raise MediaError(f"{path} cannot be read as {kind}: {error}") from error


def _prompt(places: str, question: str, **multi_modal_data: Any) -> Prompt:
    prompt: Prompt = {
        "prompt": f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
        f"<|im_start|>user\n{places}{question}<|im_end|>\n"
        "<|im_start|>assistant\n"
    }
    return prompt | {"multi_modal_data": multi_modal_data} if multi_modal_data else prompt
