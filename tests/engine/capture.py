# SPDX-License-Identifier: Apache-2.0
"""A vLLM plugin, of the tests alone, that writes down what passes between and into the stages."""

import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

FOLDER = "AUDIO_PERF_TEST_CAPTURE"
CODES = "codes.jsonl"
STEPS = "steps.jsonl"
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
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def install() -> None:
    """Write down the codes that the talker sends, one line a request, and code2wav's steps, codes of each request."""
    from vllm_omni.model_executor.stage_input_processors import qwen2_5_omni
    from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner

    def codes(payload: Any, *args: Any, **kwargs: Any) -> Any:
        return payload["codes"]["audio"] if payload else []

    def counts(outputs: Any, *args: Any, model_kwargs: dict[str, Any], **kwargs: Any) -> Any:
        return model_kwargs["seq_token_counts"]

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
