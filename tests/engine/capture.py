# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin, of the tests alone, that writes down what passes between and into the stages."""

import functools
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "AUDIO_PERF_TEST_CAPTURE"
CODES = "codes.jsonl"
STEPS = "steps.jsonl"
WINDOWS = "windows.jsonl"
SOUND = "sound"
ENTRY_POINTS = """\
[vllm.general_plugins]
audio_perf_capture = capture:install
"""


def plugin_environment(folder: Path) -> dict[str, str]:
    """The environment of an engine that is to write into `folder`, otherwise as a user's shell has it."""
    # A distribution on the path is what makes vLLM load a plugin in each process.
    plugin = folder / "plugin"
    metadata = plugin / "audio_perf_capture-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: audio-perf-capture\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    shutil.copy(__file__, plugin)
    environment = os.environ | {
        FOLDER: str(folder),
        "PYTHONPATH": str(plugin),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return environment


def read(folder: Path, name: str) -> list[Any]:
    """What was written down, in order."""
    path = folder / name
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry is not None]


def read_sound(folder: Path) -> dict[str, list[Any]]:
    """The waveforms that code2wav gave for each request, one a step, in order."""
    sound: dict[str, list[Any]] = {}
    for path in sorted((folder / SOUND).glob("*.npz")):
        with np.load(path) as step:
            for request_id in step.files:
                sound.setdefault(request_id, []).append(step[request_id])
    return sound


def install() -> None:
    """Write down what passes.

    Of Qwen2.5-Omni the codes that the talker sends, one line a request. Of MiMo-Audio what its talker sends, one line a
    payload. Of either code2wav's steps, codes of each request, and their waveforms.
    """
    from vllm_omni.model_executor.stage_input_processors import mimo_audio, qwen2_5_omni
    from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner

    import vllm_omni_audio_perf

    vllm_omni_audio_perf.register()  # first, for ours need not call what they wrap

    def codes(payload: Any, *args: Any, **kwargs: Any) -> Any:
        return payload["codes"]["audio"] if payload else []

    def counts(outputs: Any, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        waveforms = outputs.multimodal_outputs["model_outputs"]
        if "request_ids" in model_kwargs:
            folder = Path(os.environ[FOLDER]) / SOUND
            folder.mkdir(exist_ok=True)
            names = model_kwargs["request_ids"]
            sound = {name: waveform.numpy() for name, waveform in zip(names, waveforms, strict=True)}
            np.savez(folder / f"{time.monotonic_ns():020}.npz", **sound)
        return model_kwargs["seq_token_counts"]

    def window(payload: Any, *args: Any, **kwargs: Any) -> Any:
        if payload is None:
            return None
        request = kwargs["request"] if "request" in kwargs else args[2]
        name = getattr(request, "external_req_id", None) or request.req_id
        if isinstance(payload, dict):
            return {"request": name, "codes": payload["codes"]["ref"].tolist()}
        meta = payload.meta
        return {
            "request": name,
            "ids": payload.codes.audio.tolist(),
            "spoken": meta.left_context_size,
            "index": meta.chunk_seq,
            "final": bool(meta.finished),
        }

    _record(mimo_audio, "llm2code2wav_async_chunk", WINDOWS, window)
    _record(mimo_audio, "llm2code2wav_full_payload", WINDOWS, window)
    _record(qwen2_5_omni, "talker2code2wav_full_payload", CODES, codes)
    _record(GPUGenerationModelRunner, "_run_generation_model", STEPS, counts)


def _record(owner: Any, name: str, file: str, what: Any) -> None:
    """Append ``what(result, *args, **kwargs)`` of each call to a file."""
    upstream = getattr(owner, name)
    if hasattr(upstream, "__wrapped__"):
        return

    @functools.wraps(upstream)
    def recording(*args: Any, **kwargs: Any) -> Any:
        result = upstream(*args, **kwargs)
        with open(Path(os.environ[FOLDER]) / file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(what(result, *args, **kwargs)) + "\n")
        return result

    setattr(owner, name, recording)
