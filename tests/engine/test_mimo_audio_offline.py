# SPDX-License-Identifier: Apache-2.0
"""The offline example of MiMo-Audio with our code2wav stage, whole clips at once and several in a decode."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from capture import WINDOWS, read, read_sound
from engine_runs import ROOT, Run, run_script

from vllm_omni_audio_perf.stage_configs_index import stage_config_path

pytest.importorskip("vllm_omni")
pytestmark = pytest.mark.engine

QUERY_TYPES = ("tts_sft", "tts_sft_with_audio", "audio_trancribing_sft", "audio_understanding_sft")
SPOKEN = QUERY_TYPES[:3]
MAX_TOKENS = 40
PROMPTS = 2
SAMPLES_PER_GROUP = 3840
EXAMPLE = ROOT / "examples/offline_inference/mimo_audio/end2end.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mimo_audio_offline") / "run"


def run_example(folder: Path, model: Path, query_types: str, max_tokens: int) -> Run:
    config = stage_config_path("mimo_audio_high_throughput")
    base = f"base_config: {config.parent / 'mimo_audio.yaml'}"  # the overlay names it as beside itself
    text = config.read_text(encoding="utf-8").replace("base_config: mimo_audio.yaml", base)
    assert base in text
    command = [EXAMPLE, "--model", model, "--output-dir", folder / "out", "--num-prompts", PROMPTS]
    command += ["--max-tokens", max_tokens, "--query-type", query_types, "--stage-config"]
    return run_script(folder, command, text)


@pytest.fixture(scope="module")
def example(folder: Path, mimo_audio_checkpoint: Path, starting_mimo_audio_server: object) -> Run:
    """Two requests of each query type, all sent at once."""
    return run_example(folder, mimo_audio_checkpoint, ",".join(QUERY_TYPES), MAX_TOKENS)


@pytest.fixture(scope="module")
def tokenizer(mimo_audio_checkpoint: Path) -> Any:
    from vllm_omni.model_executor.models.mimo_audio.modeling_audio_tokenizer import MiMoAudioTokenizer

    return MiMoAudioTokenizer.from_pretrained(mimo_audio_checkpoint / "audio_tokenizer", dtype=torch.float32).eval()


def test_example_succeeds(example: Run, folder: Path) -> None:
    assert example.returncode == 0
    for query_type in QUERY_TYPES:
        texts = sorted((folder / "out" / query_type).glob("*.txt"))
        assert len(texts) == PROMPTS
        assert all(text.read_text(encoding="utf-8").strip() for text in texts)
    assert re.search(r"stage1.*code2wav stage: AudioPerfMiMoAudio, whole clips", example.log)


def test_wavs_are_24_khz_at_speech_level(example: Run, folder: Path) -> None:
    paths = sorted((folder / "out").glob("*/*.wav"))
    assert [path.parent.name for path in paths] == sorted(name for name in SPOKEN for _ in range(PROMPTS))
    for path in paths:
        waveform, sample_rate = soundfile.read(path)
        assert sample_rate == 24_000
        assert len(waveform) > 0
        assert len(waveform) % SAMPLES_PER_GROUP == 0
        assert -50 < 20 * np.log10(np.sqrt(np.mean(waveform**2))) < -6


def test_every_clip_is_the_tokenizers_decode_of_its_codes(example: Run, folder: Path, tokenizer: Any) -> None:
    """Of exactly the codes that the talker made, at 1e-5, whatever it was decoded beside."""
    codes = {entry["request"]: torch.tensor(entry["codes"]) for entry in read(folder, WINDOWS)}
    sound = {name: np.concatenate(parts) for name, parts in read_sound(folder).items()}
    spoken = {name: found for name, found in codes.items() if found.numel()}
    assert len(spoken) == len(SPOKEN) * PROMPTS
    for name, request_codes in spoken.items():
        (waveform,) = (found for request, found in sound.items() if request.startswith(name))
        expected = tokenizer.decode(request_codes).reshape(-1).numpy()
        assert waveform.shape == expected.shape
        assert np.linalg.norm(waveform - expected) <= 1e-5 * np.linalg.norm(expected)


def test_requests_share_decodes(example: Run, folder: Path) -> None:
    steps = [np.load(path).files for path in sorted((folder / "sound").glob("*.npz"))]
    if max(map(len, steps)) == 1:
        pytest.skip("no two of them met in a step this time")


def test_no_process_is_left(example: Run) -> None:
    assert not example.left_processes


@pytest.mark.slow
def test_answers_without_speech_end(tmp_path: Path, mimo_audio_checkpoint: Path) -> None:
    """Stock waits for their codes for ever. The example says that they have no sound."""
    run = run_example(tmp_path / "run", mimo_audio_checkpoint, "tts_sft", max_tokens=3)
    assert run.returncode == 1
    assert "2 answers without sound" in run.log
    assert not run.left_processes
