# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni serve` with the shipped stage config: an answer in text and audio, and a clean end."""

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
from pathlib import Path

import pytest
import soundfile
from engine_runs import end_session, processes_of_session

from vllm_omni_audio_perf.stage_configs_index import stage_config_path

pytest.importorskip("vllm_omni")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

START_TIMEOUT_S = 600
STAGES = 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(url: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert server.poll() is None, "the server ended while starting"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(2)
    raise TimeoutError(f"no healthy server after {START_TIMEOUT_S} s")


def test_serves_text_and_audio_and_ends_on_ctrl_c(tmp_path: Path, qwen2_5_omni_checkpoint: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(Path(sys.executable).with_name("vllm-omni")),
        *("serve", str(qwen2_5_omni_checkpoint), "--omni"),
        *("--deploy-config", str(stage_config_path("qwen2_5_omni"))),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    log = tmp_path / "log.txt"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path, start_new_session=True
        )
    try:
        wait_until_healthy(url, server)
        body = {
            "model": str(qwen2_5_omni_checkpoint),
            "messages": [{"role": "user", "content": "Say something."}],
            "modalities": ["text", "audio"],
        }
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            messages = [choice["message"] for choice in json.load(response)["choices"]]
        assert len(processes_of_session(server.pid)) >= 1 + STAGES  # so that the check below sees them
        os.killpg(server.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        assert server.wait(timeout=120) == 0
        assert not processes_of_session(server.pid)
    finally:
        end_session(server.pid)
        print(log.read_text()[-20_000:])
    texts = [message["content"] for message in messages if message.get("content")]
    audios = [message["audio"]["data"] for message in messages if message.get("audio")]
    assert len(texts) == 1
    assert texts[0].isprintable()
    assert len(audios) == 1
    waveform, sample_rate = soundfile.read(io.BytesIO(base64.b64decode(audios[0])))
    assert sample_rate == 24_000
    assert len(waveform) > 0
    assert len(waveform) % 480 == 0
    assert "code2wav stage: AudioPerfQwen2_5Omni" in log.read_text()
