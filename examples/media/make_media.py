# SPDX-License-Identifier: Apache-2.0
"""Makes the media of this folder again: two spoken clips, a picture, and a video that speaks.

    python examples/media/make_media.py

Needs the speech synthesiser flite on PATH (`apt-get install flite`), and of Python packages numpy, Pillow, PyAV and
soundfile, which vLLM-Omni brings along.
"""

import argparse
import subprocess
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import soundfile
from PIL import Image, ImageDraw

FOLDER = Path(__file__).parent
FRAMES = 24
FRAMES_PER_SECOND = 8


def speak(voice: str, text: str) -> tuple[np.ndarray, int]:
    """The spoken text as int16 samples, and their rate."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        subprocess.run(["flite", "-voice", voice, "-t", text, "-o", file.name], check=True)
        return soundfile.read(file.name, dtype="int16")


def scene(width: int, height: int, progress: float) -> Image.Image:
    """A red boat on a blue sea; the sun is at the left at progress 0 and at the right at 1."""
    scale = 4  # drawn larger, then reduced: smooth edges
    image = Image.new("RGB", (width * scale, height * scale), "#9fd3f0")
    draw = ImageDraw.Draw(image)
    w, h = image.size
    sun_x, sun_y, sun_r = (0.1 + 0.8 * progress) * w, (0.3 - 0.6 * progress * (1 - progress)) * h, 0.08 * h
    draw.ellipse((sun_x - sun_r, sun_y - sun_r, sun_x + sun_r, sun_y + sun_r), fill="#ffd21f")
    draw.rectangle((0, 0.65 * h, w, h), fill="#1f5fa8")
    draw.polygon([(0.5 * w, 0.2 * h), (0.5 * w, 0.58 * h), (0.72 * w, 0.58 * h)], fill="#ffffff")
    draw.line([(0.5 * w, 0.2 * h), (0.5 * w, 0.64 * h)], fill="#4a3020", width=int(0.012 * w))
    draw.polygon(
        [(0.3 * w, 0.62 * h), (0.76 * w, 0.62 * h), (0.66 * w, 0.75 * h), (0.38 * w, 0.75 * h)], fill="#b3261e"
    )
    return image.resize((width, height), Image.Resampling.LANCZOS)


def write_video(path: Path, voice: str, text: str) -> None:
    """A video in which the sun crosses the sky while a voice says the text."""
    samples, rate = speak(voice, text)
    samples = np.pad(samples, (0, max(0, FRAMES * rate // FRAMES_PER_SECOND - len(samples))))
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        video = container.add_stream("libx264", rate=FRAMES_PER_SECOND, options={"crf": "28", "preset": "veryslow"})
        video.width, video.height, video.pix_fmt = 224, 168, "yuv420p"
        audio = container.add_stream("aac", rate=rate, layout="mono")
        audio.bit_rate = 32_000
        for index in range(FRAMES):
            picture = scene(video.width, video.height, index / (FRAMES - 1))
            container.mux(video.encode(av.VideoFrame.from_image(picture)))
        container.mux(video.encode())
        sound = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
        sound.sample_rate, sound.time_base, sound.pts = rate, Fraction(1, rate), 0
        for frame in [*av.AudioResampler(format="fltp", layout="mono", rate=rate).resample(sound), None]:
            container.mux(audio.encode(frame))


def main() -> None:
    """Write all files."""
    argparse.ArgumentParser(description="Make the media of examples/media again; needs flite.").parse_args()
    soundfile.write(FOLDER / "sea.flac", *speak("slt", "What do you hear when you stand by the sea?"))
    soundfile.write(FOLDER / "tide.flac", *speak("rms", "The tide comes in at half past seven."))
    scene(336, 252, 0.15).save(FOLDER / "boat.png", optimize=True)
    write_video(FOLDER / "sun.mp4", "slt", "Look at the sun. It moves from left to right.")


if __name__ == "__main__":
    main()
