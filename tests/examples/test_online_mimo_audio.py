# SPDX-License-Identifier: Apache-2.0
"""The streaming client against a server that answers chunk by chunk as vLLM-Omni 0.30.0 does, without a model."""

import base64
import io
import json
import os
import runpy
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

pytest.importorskip("openai")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/online_serving/mimo_audio"
SOUNDS = [np.full(samples, value, dtype=np.float32) for samples, value in ((5280, 0.25), (11520, -0.5), (2400, 0.125))]


def wav(sound: np.ndarray) -> str:
    file = io.BytesIO()
    soundfile.write(file, sound, 24_000, format="WAV", subtype="PCM_16")
    return base64.b64encode(file.getvalue()).decode()


class Talker:
    """A server that sends its second chunk of sound only when the test allows it."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.go_on = threading.Event()
        self.sounds = SOUNDS
        talker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.begin("application/json")
                self.wfile.write(json.dumps({"object": "list", "data": [{"id": "first"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                talker.bodies.append(body)
                self.begin("text/event-stream")
                self.event("text", "The sea ")
                for index, sound in enumerate(talker.sounds):
                    if index == 1:
                        assert talker.go_on.wait(60)
                    self.event("audio", wav(sound))
                self.event("text", "is wide.")
                self.event("audio", "")
                self.wfile.write(b"data: [DONE]\n\n")

            def begin(self, media_type: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", media_type)
                self.end_headers()

            def event(self, modality: str, content: str) -> None:
                chunk = {"id": "1", "created": 0, "model": "first", "object": "chat.completion.chunk"}
                choices = [{"index": 0, "delta": {"content": content}, "finish_reason": None}]
                event = json.dumps(chunk | {"modality": modality, "choices": choices})
                self.wfile.write(f"data: {event}\n\n".encode())
                self.wfile.flush()

            def log_message(self, *_: object) -> None:
                """Be quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def talker() -> Iterator[Talker]:
    talker = Talker()
    yield talker
    talker.go_on.set()
    talker.server.shutdown()


@pytest.fixture(scope="module")
def client() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "streaming_client.py"))


def test_the_sound_is_in_the_file_while_the_model_talks(talker: Talker, client: dict, tmp_path: Path, capsys) -> None:
    path = tmp_path / "new" / "stream.wav"
    codes = []
    thread = threading.Thread(target=lambda: codes.append(client["main"](["--url", talker.url, "--output", str(path)])))
    thread.start()
    for _ in range(600):
        if path.exists() and path.stat().st_size > 2 * len(SOUNDS[0]):
            break
        thread.join(0.05)
    sound, sample_rate = soundfile.read(path, dtype="float32")
    assert sample_rate == 24_000
    assert np.array_equal(sound, SOUNDS[0])
    talker.go_on.set()
    thread.join(60)
    assert codes == [0]
    assert np.array_equal(soundfile.read(path, dtype="float32")[0], np.concatenate(SOUNDS))
    printed = capsys.readouterr()
    assert printed.out == "The sea is wide.\n"
    assert "chunk 3: 0.80 s of sound" in printed.err


def test_a_recording_is_sent_along(talker: Talker, client: dict, tmp_path: Path) -> None:
    talker.go_on.set()
    recording = ROOT / "examples/media/sea.flac"
    arguments = ["--url", talker.url, "--output", str(tmp_path / "a.wav"), "--audio_path", str(recording)]
    assert client["main"]([*arguments, "--text", "What is said?"]) == 0
    (body,) = talker.bodies
    audio, text = body["messages"][0]["content"]
    assert base64.b64decode(audio["audio_url"]["url"].partition(",")[2]) == recording.read_bytes()
    assert text["text"] == "What is said?"
    assert body["stream"]
    assert body["modalities"] == ["text", "audio"]


def test_an_answer_without_sound_is_a_failure(talker: Talker, client: dict, tmp_path: Path, capsys) -> None:
    talker.sounds = []
    assert client["main"](["--url", talker.url, "--output", str(tmp_path / "a.wav")]) == 1
    assert "no sound" in capsys.readouterr().err
    assert not (tmp_path / "a.wav").exists()


def test_no_server(client: dict, capsys) -> None:
    assert client["main"](["--url", "http://127.0.0.1:9/v1"]) == 1
    assert "No server answers at http://127.0.0.1:9/v1" in capsys.readouterr().err


def test_a_missing_recording_is_named(client: dict, capsys) -> None:
    with pytest.raises(SystemExit):
        client["main"](["--audio-path", "nowhere.wav"])
    assert "there is no file nowhere.wav" in capsys.readouterr().err


def serve(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run serve.sh with commands that only say how they were called."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in {
        "vllm-omni": 'echo "$@"; echo "tokenizer $MIMO_AUDIO_TOKENIZER_PATH"',
        "vllm-omni-audio-perf": 'echo "/configs/$2.yaml"',
        "python": "echo /generated",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{script}\n")
        (commands / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("MIMO_AUDIO_TOKENIZER_PATH", "CONFIG")}
    path = f"{commands}:{Path(shutil.which('env') or '/usr/bin/env').parent}:/bin"
    return subprocess.run(
        [EXAMPLES / "serve.sh", *arguments],
        env=kept | {"PATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_serve_starts_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    result = serve(tmp_path, "some/model", "--port", "1", MIMO_AUDIO_TOKENIZER_PATH="/tokenizer", CONFIG="mimo_audio")
    assert result.stdout.splitlines() == [
        "serve some/model --omni --deploy-config /configs/mimo_audio.yaml --host 127.0.0.1 --port 1",
        "tokenizer /tokenizer",
    ]


def test_serve_generates_a_model(tmp_path: Path) -> None:
    result = serve(tmp_path, "--port", "1")
    assert result.stdout.splitlines() == [
        "serve /generated --omni --deploy-config /configs/mimo_audio_low_latency.yaml --host 127.0.0.1 --port 1",
        "tokenizer /generated/audio_tokenizer",
    ]
    assert "answers mean nothing" in result.stderr


def test_serve_needs_the_tokenizer_of_a_model(tmp_path: Path) -> None:
    result = serve(tmp_path, "some/model")
    assert result.returncode == 1
    assert "set MIMO_AUDIO_TOKENIZER_PATH" in result.stderr
