# SPDX-License-Identifier: Apache-2.0
"""Asks a running server with the `openai` package, prints the text of the answer and saves its sound.

python examples/online_serving/qwen2_5_omni/openai_client.py --text "What is said?" --audio-path question.wav

Of the media it sends the files themselves, as data URLs.
"""

import argparse
import base64
import io
import mimetypes
import sys
import wave
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openai

LARGEST_SEED = 2**63 - 1


def data_url(path: Path, kind: str) -> str:
    """The file itself as a URL, so that the server need not see this machine's files."""
    media_type = mimetypes.guess_type(path.name)[0] or f"{kind}/{path.suffix.removeprefix('.') or '*'}"
    return f"data:{media_type};base64,{base64.b64encode(path.read_bytes()).decode()}"


def message(args: argparse.Namespace) -> dict[str, Any]:
    """The user's message: the media, then the text."""
    media = {"audio": args.audio_path, "image": args.image_path, "video": args.video_path}
    parts: list[dict[str, Any]] = [
        {"type": f"{kind}_url", f"{kind}_url": {"url": data_url(path, kind)}}
        for kind, paths in media.items()
        for path in paths
    ]
    return {"role": "user", "content": [*parts, {"type": "text", "text": args.text}]}


def request(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """The arguments of `client.chat.completions.create`; what is not given is left to the server."""
    out: dict[str, Any] = {
        "model": model,
        "messages": [message(args)],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        "stream": args.stream,
    }
    if args.voice is not None:
        out["audio"]["voice"] = args.voice
    if args.seed is not None:
        out["seed"] = args.seed
    if args.use_audio_in_video:
        out["extra_body"] = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    return out


def read_answer(answer: Any) -> list[bytes]:
    """Print the text of a whole answer and return its sound as WAV files, one a choice."""
    sounds = []
    for choice in answer.choices:
        if choice.message.content:
            print(choice.message.content)
        if choice.message.audio:
            sounds.append(base64.b64decode(choice.message.audio.data))
    return sounds


def read_stream(chunks: Iterable[Any]) -> list[bytes]:
    """Print the text of a streamed answer as it comes and return its sound as WAV files, one a chunk.

    vLLM-Omni says in each chunk's `modality` what its `content` is; sound is base64.
    """
    sounds = []
    for chunk in chunks:
        for choice in chunk.choices:
            if not choice.delta.content:
                continue
            if getattr(chunk, "modality", "text") == "audio":
                sounds.append(base64.b64decode(choice.delta.content))
            else:
                print(choice.delta.content, end="", flush=True)
    print()
    return sounds


def save(sounds: list[bytes], path: Path) -> str:
    """Write WAV files as one, and say how long it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as out:
        for index, sound in enumerate(sounds):
            with wave.open(io.BytesIO(sound)) as part:
                if index == 0:
                    out.setparams(part.getparams())
                out.writeframes(part.readframes(part.getnframes()))
        return f"{path}: {out.getnframes() / out.getframerate():.2f} s at {out.getframerate()} Hz"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Ask a running vLLM-Omni server of Qwen2.5-Omni.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the server's API (default: %(default)s)")
    parser.add_argument("--api-key", default="none", help="where the server asks for one")
    parser.add_argument("--model", help="name of the model (default: the first that the server has)")
    parser.add_argument("--text", default="Tell me about the sea.", help="your question")
    for kind in ("audio", "image", "video"):
        parser.add_argument(
            f"--{kind}-path", type=Path, action="append", default=[], help=f"{kind} file to send along; repeatable"
        )
    parser.add_argument("--use-audio-in-video", action="store_true", help="listen to the videos, too")
    parser.add_argument("--voice", help="that answers, for example Ethan")
    parser.add_argument("--seed", type=int, help="of the answer")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    parser.add_argument(
        "--output", type=Path, default=Path("output_audio/answer.wav"), help="WAV to write (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    for kind in ("audio", "image", "video"):
        for path in getattr(args, f"{kind}_path"):
            if not path.is_file():
                parser.error(f"--{kind}-path: there is no file {path}")
    if args.use_audio_in_video and not args.video_path:
        parser.error("--use-audio-in-video needs a --video-path")
    if args.seed is not None and not 0 <= args.seed <= LARGEST_SEED:
        parser.error(f"--seed is {args.seed}; allowed: 0 to {LARGEST_SEED}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the client. Returns the exit code."""
    args = parse_args(argv)
    client = openai.OpenAI(base_url=args.url, api_key=args.api_key)
    try:
        model = args.model or client.models.list().data[0].id
        answer = client.chat.completions.create(**request(args, model))
        sounds = read_stream(answer) if args.stream else read_answer(answer)
    except openai.APIConnectionError:
        print(f"No server answers at {args.url}.", file=sys.stderr)
        return 1
    except openai.APIError as error:
        print(f"The server refused: {error}", file=sys.stderr)
        return 1
    if not sounds:
        print("The answer has no sound.", file=sys.stderr)
        return 1
    print(save(sounds, args.output))
    return 0


if __name__ == "__main__":
    sys.exit(main())
