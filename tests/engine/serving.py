# SPDX-License-Identifier: Apache-2.0
"""Runs `vllm-omni serve` and talks to it over HTTP, as a client does."""

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from capture import plugin_environment
from engine_runs import end_session, processes_after_the_end, processes_of_session

START_TIMEOUT_S = 600
CODES_A_STEP = 200
"""What code2wav takes in one step of the tests' server; its requests have more than half of it."""


@dataclass
class Answer:
    """What a chat completion brought."""

    status: int
    text: str | None = None
    waveform: np.ndarray | None = None
    sample_rate: int | None = None
    error: str = ""


class Server:
    """A server of its own session, reachable once `start` returns."""

    def __init__(self, folder: Path, model: Path, stage_config: Path) -> None:
        self.folder, self.model = folder, str(model)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [
            str(Path(sys.executable).with_name("vllm-omni")),
            *("serve", self.model, "--omni", "--deploy-config", str(stage_config)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
        ]
        self.log_file = folder / "log.txt"
        with self.log_file.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=plugin_environment(folder) | {"MIMO_AUDIO_TOKENIZER_PATH": f"{model}/audio_tokenizer"},
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def start(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the server ended while starting"
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(2)
        raise TimeoutError(f"no healthy server after {START_TIMEOUT_S} s")

    def interrupt(self) -> int:
        """Ctrl-C as a terminal sends it, to the whole process group. Returns the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        return self.process.wait(timeout=120)

    def processes(self) -> list[str]:
        return processes_of_session(self.process.pid)

    def processes_after_the_end(self) -> list[str]:
        return processes_after_the_end(self.process.pid)

    def kill(self) -> None:
        end_session(self.process.pid)

    def request(self, text: str = "Say something.", **body: Any) -> urllib.request.Request:
        """A chat completion for text and audio, unless `body` says otherwise."""
        message = {"role": "user", "content": text}
        body = {"model": self.model, "messages": [message], "modalities": ["text", "audio"], **body}
        return urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )

    def chat(self, text: str = "Say something.", **body: Any) -> Answer:
        """Send one request and wait for its answer."""
        try:
            with urllib.request.urlopen(self.request(text, **body), timeout=300) as response:
                messages = [choice["message"] for choice in json.load(response)["choices"]]
        except urllib.error.HTTPError as error:
            return Answer(error.code, error=error.read().decode())
        answer = Answer(200)
        for message in messages:
            if message.get("content"):
                answer.text = message["content"]
            if message.get("audio"):
                wav = io.BytesIO(base64.b64decode(message["audio"]["data"]))
                answer.waveform, answer.sample_rate = soundfile.read(wav)
        return answer

    def stream(self, text: str = "Say something.", **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer, all of which ended with ``[DONE]``."""
        with urllib.request.urlopen(self.request(text, stream=True, **body), timeout=300) as response:
            lines = [line.decode().strip().removeprefix("data: ") for line in response if line.strip()]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def send_and_hang_up(self, seconds: float) -> None:
        """Send a request and close the connection after a while."""
        request = self.request()
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(request.data)}\r\n\r\n"
            )
            connection.sendall(head.encode() + request.data)
            time.sleep(seconds)


def sampling_params(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The ``sampling_params_list`` of a body: those of the shipped stage config with changes, one entry a stage."""
    defaults: list[dict[str, Any]] = [
        {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 60, "seed": 42, "repetition_penalty": 1.1},
        {
            **{"temperature": 0.9, "top_p": 0.8, "top_k": 40, "max_tokens": 60, "seed": 42},
            **{"repetition_penalty": 1.05, "stop_token_ids": [8294]},
        },
        {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": 60, "seed": 42},
    ]
    return [stage | change for stage, change in zip(defaults, changes, strict=True)]
