# SPDX-License-Identifier: Apache-2.0
"""Asks a running server of MiMo-Audio with the `openai` package and writes its sound to a file as it comes.

python examples/online_serving/mimo_audio/streaming_client.py --text "Tell me about the sea."

The file is a WAV from the first chunk on: a player that follows a growing file plays it while the model still talks.
"""

import argparse
import base64
import io
import mimetypes
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import openai
import soundfile


def message(args: argparse.Namespace) -> dict[str, Any]:
    """The user's message: the recording, if there is one, then the text."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": args.text}]
    if args.audio_path is not None:
        media_type = mimetypes.guess_type(args.audio_path.name)[0] or "audio/*"
        url = f"data:{media_type};base64,{base64.b64encode(args.audio_path.read_bytes()).decode()}"
        parts.insert(0, {"type": "audio_url", "audio_url": {"url": url}})
    return {"role": "user", "content": parts}


def request(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """The arguments of `client.chat.completions.create`."""
    return {
        "model": model,
        "messages": [message(args)],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        "stream": True,
    }


def write_stream(chunks: Iterable[Any], path: Path) -> int:
    """Print the text of a streamed answer and write its sound, both as they come.

    vLLM-Omni says in each chunk's `modality` what its `content` is; sound is a WAV file in base64.

    Returns:
        How many chunks of sound came.
    """
    begin, seconds, count, out = time.monotonic(), 0.0, 0, None
    try:
        for chunk in chunks:
            for choice in chunk.choices:
                if not choice.delta.content:
                    continue
                if getattr(chunk, "modality", "text") != "audio":
                    print(choice.delta.content, end="", flush=True)
                    continue
                sound, sample_rate = soundfile.read(io.BytesIO(base64.b64decode(choice.delta.content)))
                if out is None:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    out = soundfile.SoundFile(path, "w", samplerate=sample_rate, channels=1, subtype="PCM_16")
                out.write(sound)
                out.flush()
                count += 1
                seconds += len(sound) / sample_rate
                at = time.monotonic() - begin
                print(f"\n[{at:.2f} s] chunk {count}: {seconds:.2f} s of sound in {path}", file=sys.stderr)
    finally:
        print()
        if out is not None:
            out.close()
    return count


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Stream the sound of a running vLLM-Omni server of MiMo-Audio.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of the server's API (default: %(default)s)")
    parser.add_argument("--api-key", default="none", help="where the server asks for one")
    parser.add_argument("--model", help="name of the model (default: the first that the server has)")
    parser.add_argument("--text", default="Tell me about the sea.", help="what you say")
    parser.add_argument("--audio-path", "--audio_path", type=Path, help="recording to send along")
    parser.add_argument(
        "--output", type=Path, default=Path("output_audio/stream.wav"), help="WAV to write (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    if args.audio_path is not None and not args.audio_path.is_file():
        parser.error(f"--audio-path: there is no file {args.audio_path}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the client. Returns the exit code."""
    args = parse_args(argv)
    client = openai.OpenAI(base_url=args.url, api_key=args.api_key)
    try:
        model = args.model or client.models.list().data[0].id
        count = write_stream(client.chat.completions.create(**request(args, model)), args.output)
    except openai.APIConnectionError:
        print(f"No server answers at {args.url}.", file=sys.stderr)
        return 1
    except openai.APIError as error:
        print(f"The server refused: {error}", file=sys.stderr)
        return 1
    if not count:
        print("The answer has no sound.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
