# SPDX-License-Identifier: Apache-2.0
"""Runs the offline example in a process of its own and collects what it leaves behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import soundfile
from capture import CODES, plugin_environment, read

ROOT = Path(__file__).parents[2]
QUERY_TYPES = (
    "text",
    "use_audio",
    "use_image",
    "use_video",
    "use_multi_audios",
    "use_mixed_modalities",
    "use_audio_in_video",
)
EXAMPLE = ROOT / "examples/offline_inference/qwen2_5_omni/end2end.py"


@dataclass
class Run:
    """What one run of the offline example left behind."""

    returncode: int
    log: str
    texts: list[str]
    waveforms: list[tuple[np.ndarray, int]]
    codes: list[list[int]]
    left_processes: list[str]


def run_example(folder: Path, stage_config: str, model: Path, *arguments: str) -> Run:
    """Run the offline example with the text of a stage config, recording the codes."""
    output = folder / "out"
    return run_script(
        folder, [EXAMPLE, "--model", model, "--output-dir", output, *arguments, "--stage-config"], stage_config
    )


def run_script(folder: Path, command: list[object], stage_config: str, more: list[object] | None = None) -> Run:
    """Run a script in a session of its own.

    Args:
        folder: made for the run; what the script writes into ``out`` in there is read.
        command: the script and what comes before the path of the stage config.
        stage_config: its text.
        more: what comes after it.
    """
    folder.mkdir()
    config = folder / "stage_config.yaml"
    config.write_text(stage_config, encoding="utf-8")
    with (folder / "log.txt").open("w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, *map(str, [*command, config, *(more or [])])],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=plugin_environment(folder),
            cwd=folder,
            start_new_session=True,
        )
        try:
            returncode = process.wait(timeout=900)
        finally:
            left_processes = processes_after_the_end(process.pid)
            end_session(process.pid)
        log.seek(0)
        text = log.read()
    print(text[-20_000:])  # shown by pytest when a test fails
    by_request = sorted((folder / "out").glob("*.txt"))
    return Run(
        returncode=returncode,
        log=text,
        texts=[path.read_text(encoding="utf-8") for path in by_request],
        waveforms=[soundfile.read(path.with_suffix(".wav")) for path in by_request],
        codes=read(folder, CODES),
        left_processes=left_processes,
    )


def processes_of_session(session: int) -> list[str]:
    """The living processes of a session, as "pid name".

    By session because vLLM's processes rename themselves, which overwrites their environment and command line.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.name()}")
        except (psutil.Error, OSError):
            continue
    return found


def processes_after_the_end(session: int) -> list[str]:
    """What does not end within seconds of a session's first process (Python's resource tracker is the last to go)."""
    deadline = time.monotonic() + 20
    while (left := processes_of_session(session)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def end_session(session: int) -> None:
    """Kill what is left of a session, so that a failed test leaves nothing running."""
    for line in processes_of_session(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
