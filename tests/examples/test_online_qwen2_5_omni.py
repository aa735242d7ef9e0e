# SPDX-License-Identifier: Apache-2.0
"""The online examples against a server that answers as vLLM-Omni 0.30.0 does, without a model."""

import base64
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("openai")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/online_serving/qwen2_5_omni"
MEDIA = ROOT / "examples/media"
ANSWER = "The sea is wide."


def wav(frames: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(24_000)
        out.writeframes(b"\1\0" * frames)
    return file.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Answers every question with `ANSWER` and half a second of sound, and keeps the bodies."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self.answer(200, "application/json", json.dumps({"object": "list", "data": [{"id": "first"}, {"id": "other"}]}))

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        head = {"id": "1", "created": 0, "model": body["model"]}
        if body.get("audio", {}).get("voice") == "nobody":
            self.answer(400, "application/json", json.dumps({"error": {"message": "There is no voice 'nobody'"}}))
        elif body.get("stream"):
            sounds = [base64.b64encode(wav(frames)).decode() for frames in (8_000, 4_000)]
            contents = [("text", "The sea "), ("text", "is wide."), *(("audio", sound) for sound in sounds)]
            chunks = [
                head
                | {"object": "chat.completion.chunk", "modality": modality}
                | {"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": None}]}
                for modality, content in contents
            ]
            events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
            self.answer(200, "text/event-stream", events + "data: [DONE]\n\n")
        else:
            sound = {"id": "2", "data": base64.b64encode(wav(12_000)).decode(), "expires_at": 0, "transcript": ""}
            message = {"role": "assistant", "content": ANSWER, "audio": sound}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.answer(200, "application/json", json.dumps(head | {"object": "chat.completion", "choices": [choice]}))

    def answer(self, status: int, media_type: str, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Be quiet."""


@pytest.fixture
def server() -> Iterator[str]:
    """URL of a running one."""
    Handler.bodies.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/v1"
        http.shutdown()


@pytest.fixture(scope="module")
def client() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "openai_client.py"))


def frames(path: Path) -> int:
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels()) == (24_000, 1)
        return file.getnframes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--audio-path", "missing.wav"], "--audio-path: there is no file missing.wav"),
        (["--image-path", "missing.png"], "--image-path: there is no file missing.png"),
        (["--video-path", str(MEDIA)], f"--video-path: there is no file {MEDIA}"),
        (["--use-audio-in-video"], "--use-audio-in-video needs a --video-path"),
        (["--seed=-1"], "--seed is -1; allowed: 0 to 9223372036854775807"),
        (["--seed", str(2**63)], "--seed is 9223372036854775808; allowed"),
    ],
)
def test_a_mistake_is_named(
    arguments: list[str], message: str, client: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        client["parse_args"](arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_media_are_sent_as_they_are(client: dict[str, Any]) -> None:
    paths = {"audio": ["sea.flac", "tide.flac"], "image": ["boat.png"], "video": ["sun.mp4"]}
    options = [word for kind, names in paths.items() for name in names for word in (f"--{kind}-path", MEDIA / name)]
    message = client["message"](client["parse_args"](["--text", "What is it?", *map(str, options)]))
    assert message["role"] == "user"
    *media, text = message["content"]
    assert text == {"type": "text", "text": "What is it?"}
    expected = [(f"{kind}_url", name) for kind, names in paths.items() for name in names]
    for part, (kind, name) in zip(media, expected, strict=True):
        assert part["type"] == kind
        head, data = part[kind]["url"].split(";base64,")
        assert head.startswith(f"data:{kind.removesuffix('_url')}/")
        assert base64.b64decode(data) == (MEDIA / name).read_bytes()


def test_what_is_not_given_is_not_sent(client: dict[str, Any]) -> None:
    request = client["request"](client["parse_args"]([]), "m")
    assert request["modalities"] == ["text", "audio"]
    assert request["audio"] == {"format": "wav"}
    assert "seed" not in request
    assert "extra_body" not in request


def test_voice_seed_and_sound_of_videos_are_sent(client: dict[str, Any]) -> None:
    arguments = ["--voice", "Ethan", "--seed", "0", "--use-audio-in-video", "--video-path", str(MEDIA / "sun.mp4")]
    request = client["request"](client["parse_args"](arguments), "m")
    assert request["audio"] == {"format": "wav", "voice": "Ethan"}
    assert request["seed"] == 0
    assert request["extra_body"] == {"mm_processor_kwargs": {"use_audio_in_video": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_printed_and_sound_saved(
    stream: bool, server: str, client: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "answer.wav"
    arguments = ["--url", server, "--voice", "Ethan", "--seed", "7", "--output", str(output)]
    assert client["main"](arguments + ["--stream"] * stream) == 0
    assert capsys.readouterr().out.splitlines() == [ANSWER, f"{output}: 0.50 s at 24000 Hz"]
    assert frames(output) == 12_000
    (body,) = Handler.bodies
    assert body["model"] == "first"
    assert body["audio"] == {"format": "wav", "voice": "Ethan"}
    assert body["seed"] == 7
    assert body["modalities"] == ["text", "audio"]


def test_named_model(server: str, client: dict[str, Any], tmp_path: Path) -> None:
    assert client["main"](["--url", server, "--model", "other", "--output", str(tmp_path / "a.wav")]) == 0
    assert Handler.bodies[0]["model"] == "other"


def test_errors_of_the_server_are_shown(
    server: str, client: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "a.wav"
    assert client["main"](["--url", server, "--voice", "nobody", "--output", str(output)]) == 1
    assert "There is no voice 'nobody'" in capsys.readouterr().err
    assert not output.exists()


needs_curl = pytest.mark.skipif(not (shutil.which("curl") and shutil.which("python3")), reason="needs curl, python3")


def run_curl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(EXAMPLES / "curl.sh"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@needs_curl
def test_curl_prints_the_text_and_saves_the_sound(server: str, tmp_path: Path) -> None:
    output = tmp_path / "new" / "answer.wav"
    question = 'What\'s "the sea"?\n$HOME'
    done = run_curl("--url", server, "--voice", "Chelsie", "--seed", 3, "--output", output, question)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [ANSWER, f"{output}: 0.50 s at 24000 Hz"]
    assert frames(output) == 12_000
    assert Handler.bodies == [
        {
            "model": "first",
            "messages": [{"role": "user", "content": question}],
            "modalities": ["text", "audio"],
            "audio": {"voice": "Chelsie", "format": "wav"},
            "seed": 3,
        }
    ]


@needs_curl
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--voice", "nobody"], "There is no voice 'nobody'"),
        (["--seed", "soon"], "--seed is soon; it has to be a whole number"),
        (["--url"], "--url needs a value"),
        (["--loud"], "unknown option --loud"),
    ],
)
def test_curl_names_what_is_wrong(arguments: list[str], message: str, server: str, tmp_path: Path) -> None:
    output = tmp_path / "answer.wav"
    done = run_curl("--url", server, "--output", output, *arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert not output.exists()


@needs_curl
def test_curl_says_that_no_server_answers(tmp_path: Path) -> None:
    done = run_curl("--url", "http://127.0.0.1:9/v1", "--output", tmp_path / "answer.wav")
    assert done.returncode == 1
    assert "no server answers at http://127.0.0.1:9/v1" in done.stderr


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with the commands that serve.sh calls; `vllm-omni` prints its arguments, one a line."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "vllm-omni": 'printf "%s\\n" "$@"',
        "vllm-omni-audio-perf": 'echo "/configs/$2.yaml"',
        "python": "echo /cache/small",
    }
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def serve(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["/bin/sh", str(EXAMPLES / "serve.sh"), *arguments]
    return subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "model", "options"),
    [
        ([], "/cache/small", []),
        (["--port", "8091"], "/cache/small", ["--port", "8091"]),
        (["my model", "--host", "0.0.0.0"], "my model", ["--host", "0.0.0.0"]),
    ],
)
def test_serve_passes_model_and_options_on(
    arguments: list[str], model: str, options: list[str], commands: Path
) -> None:
    done = serve(f"{commands}:/usr/bin:/bin", *arguments)
    assert done.returncode == 0, done.stderr
    expected = ["serve", model, "--omni", "--deploy-config", "/configs/qwen2_5_omni.yaml", "--host", "127.0.0.1"]
    assert done.stdout.splitlines() == expected + options
    assert ("No MODEL given" in done.stderr) == (model == "/cache/small")


def test_serve_names_a_missing_command(commands: Path) -> None:
    (commands / "vllm-omni").unlink()
    done = serve(f"{commands}:/usr/bin:/bin")
    assert done.returncode == 1
    assert "there is no command vllm-omni; activate the environment" in done.stderr


def test_serve_stops_where_the_small_checkpoint_cannot_be_made(commands: Path) -> None:
    (commands / "python").write_text("#!/bin/sh\nexit 3\n")
    done = serve(f"{commands}:/usr/bin:/bin")
    assert done.returncode == 3
    assert not done.stdout


@pytest.mark.parametrize("script", ["serve.sh", "curl.sh"])
def test_scripts_explain_themselves(script: str) -> None:
    assert os.access(EXAMPLES / script, os.X_OK)
    done = subprocess.run([EXAMPLES / script, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: {script} ")


def test_client_runs_as_a_script() -> None:
    command = [sys.executable, EXAMPLES / "openai_client.py", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "--use-audio-in-video" in done.stdout
